"""What does offload cost a step, beside the time that its bytes take to the lower tier and back?

    axo bench offload --dir /scratch --width 1024 --blocks 8 --rows 2048
    axo bench offload --device cuda
    axo bench offload --out results      a part of axo bench gpu: on a GPU, with verdicts (--walk: on the CPU)

One rank trains a stack of MLP blocks (fp32, fused AdamW), with each kind of offload in turns with none. Bytes are those
that a step moves: on a CPU rank the moments, read and written, 16 a parameter; on a GPU gradients down and parameters
up, 8 a parameter; of saved tensors twice what goes out. The bound is these bytes over the rate of plain copies to the
tier, measured here; what is added may be less, where copies hide behind computation. Columns: median milliseconds of a
step, without (plain) and with offload; what is added; the bound; and ``#wrong``: parameters that differ from the run
without offload. What memory it saves: docs/memory.md.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

import axo
from axo.offload.activations import SMALLEST
from axo.offload.tier import tier_for

from .lib import arguments
from .lib.arguments import Parser
from .lib.table import Table, environment

CASES = ("none", "optimizer", "activations", "optimizer,activations", "optimizer,parameters,activations")
COLUMNS = {"case": "s", "MiB moved": ".0f", "plain(ms)": ".1f", "step(ms)": ".1f", "added(ms)": ".1f"}
COLUMNS |= {"bound(ms)": ".1f", "#wrong": "d"}


class Run:
    """A model, its optimizer and its batches."""

    def __init__(self, case: str, folder: str | None, device: torch.device, options: argparse.Namespace) -> None:
        offload = axo.Offload.parse(case, folder)
        torch.manual_seed(0)
        width = options.width
        blocks = [
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(options.blocks)
        ]
        self.model = nn.Sequential(*blocks).to(device)
        offload.attach(self.model)
        self.optimizer = offload.adamw(self.model.parameters(), lr=1e-4)
        self.batch = torch.randn(options.rows, width, device=device)
        self.seconds: list[float] = []

    def step(self) -> None:
        _finish(self.batch.device)
        start = time.perf_counter()
        loss = self.model(self.batch).square().mean()
        loss.backward()
        self.optimizer.step()
        _finish(self.batch.device)
        self.seconds.append(time.perf_counter() - start)
        self.optimizer.zero_grad()

    def moved(self, case: str) -> int:
        """Bytes to the lower tier and back in a step."""
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        state = (16 if self.batch.device.type == "cpu" else 8) * parameters if "optimizer" in case else 0
        return state + (2 * self._saved() if "activations" in case else 0)

    def _saved(self) -> int:
        seen: dict[tuple[int, torch.Size], int] = {}
        stays = {parameter.untyped_storage().data_ptr() for parameter in self.model.parameters()}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.nbytes >= SMALLEST and tensor.untyped_storage().data_ptr() not in stays:
                seen[tensor.data_ptr(), tensor.shape] = tensor.nbytes
            return tensor

        output = self.batch
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            for block in self.model:  # its own hooks are of the whole model
                output = block(output)
        return sum(seen.values())


def main(given: list[str] | None = None) -> int:
    """Run; returns 1 when a parameter differs."""
    parser = Parser("axo bench offload", __doc__, json=True)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dir", default=None, help="folder of the lower tier of a CPU rank; default: a temporary one")
    parser.add_argument("--out", type=Path, default=None, help="write offload.jsonl with verdicts here; on the GPU")
    parser.add_argument("--walk", action="store_true", help="with --out: on the CPU, at toy sizes")
    parser.add_argument("--smoke", action="store_true", help="with --out: at toy sizes on the GPU")
    options = parser.parse_args(given)
    if options.out is not None:
        options.json, options.device = options.out / "offload.jsonl", "cpu" if options.walk else "cuda"
    if options.walk or options.smoke:
        options.width, options.blocks, options.rows, options.steps = 64, 2, 256, 1
    elif options.out is not None:
        options.width, options.rows, options.steps = 1024, 8192, 3  # some 67 million parameters
    device = arguments.device("--device", options.device)
    if options.out is not None:
        options.json.unlink(missing_ok=True)
    verdicts: dict[str, bool | str] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = None if device.type != "cpu" else options.dir or temporary
        rate = _rate(device, folder)
        table = Table(COLUMNS, options.json, {"bench": "offload", **environment(device), "copies(GB/s)": rate / 1e9})
        wrong = 0
        for case in CASES[: None if device.type == "cpu" else -1]:
            plain, run = Run("none", folder, device, options), Run(case, folder, device, options)
            for _ in range(options.steps + 1):  # in turns
                plain.step()
                run.step()
            differ = 0
            for a, b in zip(plain.model.parameters(), run.model.parameters(), strict=True):
                # The host's AdamW rounds otherwise than a GPU's, which a few steps leave small.
                same = torch.equal(a, b) if device.type == "cpu" else float((a - b).norm() / a.norm()) < 1e-4
                differ += int(not same)
            moved, wrong = run.moved(case), wrong + differ
            before, after = (statistics.median(each.seconds[1:]) * 1e3 for each in (plain, run))
            if options.out is not None and case != "none":
                cost = f"{after - before:.1f} ms added, {moved / rate * 1e3:.1f} ms bound"
                verdicts[f"offload of {case}, parameters as without"] = differ == 0
                verdicts[f"offload of {case}"] = "not measured" if options.walk else cost
            table.add(
                **{"case": case, "MiB moved": moved / 2**20, "plain(ms)": before, "step(ms)": after},
                **{"added(ms)": after - before, "bound(ms)": moved / rate * 1e3, "#wrong": differ},
            )
        table.judge(verdicts)  # at the end alone: bench.gpu takes a verdict for the end
    return int(wrong > 0)


def _rate(device: torch.device, folder: str | None) -> float:
    """Bytes a second of plain copies between this rank and its lower tier, out and back."""
    tier = tier_for(device, folder)
    there, here = tier.block(64 << 20), torch.ones(64 << 20, dtype=torch.uint8, device=device)
    best = float("inf")
    for _ in range(4):
        start = time.perf_counter()
        there.copy_(here)
        here.copy_(there)
        _finish(device)
        best = min(best, time.perf_counter() - start)
        tier.rest(there)
    return 2 * there.nbytes / best


def _finish(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()


if __name__ == "__main__":
    raise SystemExit(main())
