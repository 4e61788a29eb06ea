"""The JSON-lines log of a run: one header, one line a step, one summary. Each line is flushed when it is written.

header: the options, versions, grid, device, transport, sizes of model and text, and the peak that MFU divides by.
step:   step, loss, lr, grad_norm, seconds, tokens_per_s, comm_share (time blocked / time, mean over ranks, by axis and
        in all), model_flops, hardware_flops, mfu, hfu (shares of the peak of all ranks; null where it is unknown).
summary: steps, seconds, tail_loss.
Units: seconds, tokens a second, flops of the whole step on all ranks. Model flops are those of
``axo.perf.flops.narayanan`` without recomputation, hardware flops with it where the run recomputes.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from axo import files
from axo.checkpoint.folder import whole_file
from axo.perf.flops import narayanan
from axo.train import models
from axo.train.config import LOG_NAME, TrainConfig
from axo.train.loop import Step
from axo_kernels.device import cpu_model

_MOST = 1 << 30  # bytes of a log
# Dense bf16 peak in TFLOP/s by a part of the device's name; a more telling part stands before a shorter one.
_BF16_PEAKS = (
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("GH200", 989.0),
    ("H200", 989.0),
    ("H100", 989.0),
    ("A100", 312.0),
    ("L40S", 362.0),
    ("MI300X", 1307.0),
    ("MI250X", 191.5),  # one GCD, which is what a rank sees
)


class TrainLog:
    """Writes a run's log to ``config.out``; rank 0 alone holds one.

    Args:
        config: The run.
        shape: Sizes of its model.
        tokens: Tokens of its text.
        transport: What moves the bytes.
        start: The first step; above 0 the lines of the steps before it are kept, and another header follows them.
    """

    def __init__(
        self, config: TrainConfig, shape: models.ModelSize, tokens: int, transport: str, start: int = 0
    ) -> None:
        folder = Path(config.out)
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / LOG_NAME
        kept = _lines_before(self.path, start)
        if kept:  # until they are on disk once more they stay where they are
            with whole_file(self.path.resolve()) as unfinished:
                unfinished.write_text("".join(kept), encoding="utf-8")
        self._file = open(self.path, "a" if kept else "w", encoding="utf-8")
        self._ranks = config.ranks
        sizes = (config.batch_size, config.seq_len, shape.layers, shape.hidden, shape.vocabulary)
        self._model_flops = narayanan(*sizes, recompute=False)
        self._hardware_flops = narayanan(*sizes, recompute=config.recompute)
        device = device_name(config.device)
        self._peak = config.peak_tflops or peak_tflops(device, config.precision)
        self.write(
            {
                "kind": "header",
                "config": config.as_dict(),
                "model": {"parameters": shape.parameters, "layers": shape.layers, "hidden": shape.hidden},
                "tokens": tokens,
                "versions": versions(),
                "grid": str(config.grid),
                "pipeline": config.pipeline,
                "ranks": self._ranks,
                "transport": transport,
                "device": device,
                "peak_tflops_a_rank": self._peak,
                "start": start,
            }
        )

    def step(self, step: Step) -> dict[str, Any]:
        """Write one step; return the line."""
        share = {axis: seconds / step.seconds for axis, seconds in step.blocked.items()}
        peak = None if self._peak is None else self._peak * 1e12 * self._ranks * step.seconds
        line = {
            "kind": "step",
            "step": step.index,
            "loss": step.loss,
            "lr": step.lr,
            "grad_norm": step.grad_norm,
            "seconds": step.seconds,
            "tokens_per_s": step.tokens / step.seconds,
            "comm_share": share | {"all": sum(share.values())},
            "model_flops": self._model_flops,
            "hardware_flops": self._hardware_flops,
            "mfu": None if peak is None else self._model_flops / peak,
            "hfu": None if peak is None else self._hardware_flops / peak,
        }
        self.write(line)
        return line

    def write(self, line: Mapping[str, Any]) -> None:
        """Write any line."""
        try:
            if not self.path.exists():  # moved or removed, with the run's folder or alone
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file.close()
                self._file = open(self.path, "a", encoding="utf-8")
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        except OSError as error:
            error.filename = str(self.path)
            raise

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _lines_before(path: Path, start: int) -> list[str]:
    """The lines of an older log that stay when a run goes on from ``start``: headers, and the steps before."""
    if start == 0 or not path.is_file():
        return []
    kept = []
    for line in files.read_bytes(path, _MOST).decode("utf-8", "replace").splitlines(keepends=True):
        try:
            entry = files.parse_json(line)
        except ValueError:  # the run was killed while it wrote
            continue
        kind = entry.get("kind") if isinstance(entry, dict) else None
        step = entry.get("step") if kind == "step" else None
        if kind == "header" or (isinstance(step, int | float) and step < start):
            kept.append(line)
    return kept


def versions() -> dict[str, str]:
    """Versions of what a run depends on."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("axo", "litgpt", "triton", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def device_name(device: str) -> str:
    """The name of a GPU, or of this machine's processor."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    return cpu_model()


def peak_tflops(device_name: str, precision: str) -> float | None:
    """Return the dense peak of a device in TFLOP/s, None where it is not known (CPUs, other GPUs, fp32)."""
    if precision == "32-true":
        return None
    for part, peak in _BF16_PEAKS:
        if part.lower() in device_name.lower():
            return peak
    return None
