"""A training step at GPT shapes on one GPU: Axo's layers on grid 1x1x1x1 beside torch's own, and the share of peak.

    axo bench gpu_step --out results
    python3 -m bench.gpu_step --out results           the same, from the root of a checkout
    python3 -m bench.gpu_step --out results --walk    the same code at toy sizes on the CPU; its times mean nothing

1. Layers: forward and backward of one `axo.nn.Linear` beside `torch.nn.Linear`, bf16.
2. Loss: forward and backward of `axo.nn.cross_entropy` beside torch's of the logits in fp32, and how far the gradients
   are apart.
3. Step: a GPT of blocks (`bench/lib/step_models.py`), bf16 autocast, fused AdamW; forward, backward and update. Both
   start from the same weights and rows; losses of the two are compared in that run.
4. At the end a profile of one step of Axo's, `step_trace.json.gz`, for chrome://tracing or Perfetto.

Contestants take turns; the time is the median of rounds, by events of the GPU's own clock, with a head start for the
host, as in a training loop, which waits for nothing. What the host takes to issue a call stands beside it. MFU counts
model flops (6 a weight and token, and causal attention at half of the square), against the advertised dense bf16 rate.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import axo
from axo_kernels.tune.timing import issue_time, once, relative_error

from . import gemm
from .lib.arguments import Parser
from .lib.attempts import attempt
from .lib.step_models import Contestant, Sizes, axo_contestant, serial
from .lib.table import Table, environment

COLUMNS = {
    "case": "s",
    "contestant": "s",
    "ms": ".3f",
    "host_ms": ".3f",
    "tflops": ".1f",
    "ratio": ".3f",
    "loss": ".4f",
}
# (rows, in, out): the four products of GPT blocks at h = 4096 and 8192.
LAYERS = ((8192, 4096, 12288), (8192, 4096, 4096), (8192, 4096, 16384), (8192, 16384, 4096), (8192, 8192, 32768))
STEPS = {
    "gpt h=2048": Sizes(2048, 12, 16, 50304, 2048, 4, "bf16-mixed"),
    "gpt h=4096": Sizes(4096, 6, 32, 50304, 2048, 4, "bf16-mixed"),
    "gpt h=4096 recomputed": Sizes(4096, 6, 32, 50304, 2048, 4, "bf16-mixed", recompute=True),
}
LOGITS = (8192, 50304)  # tokens, vocabulary
TOY_LAYERS = ((64, 32, 48),)
TOY_LOGITS = (64, 80)
TOY_STEPS = {
    "gpt h=32": Sizes(32, 2, 4, 64, 16, 2, "bf16-mixed"),
    "gpt h=32 recomputed": Sizes(32, 2, 4, 64, 16, 2, "bf16-mixed", True),
}
MFU, SLOWER, LOSSES_APART = 0.55, 1.01, 2e-2
GRADIENTS_APART = 4e-3  # both are rounded to bf16, by 2^-9 of an element at most


def step_flops(sizes: Sizes) -> float:
    """Model flops of one step: 6 a weight of a product and token, and attention's two products over half the square."""
    weights = 12 * sizes.layers * sizes.hidden**2 + sizes.vocab * sizes.hidden
    attention = (
        6 * sizes.layers * sizes.hidden * sizes.seq_len
    )  # forward 4 * h * s / 2 a token, three times that in all
    return float(sizes.tokens) * (6 * weights + attention)


def in_turns(
    contestants: dict[str, Callable[[], Any]], rounds: int, device: torch.device
) -> dict[str, tuple[float, float]]:
    """Median seconds of each, in turns, after two rounds that do not count, and what the host takes to issue it."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for run in contestants.values():
        run()
    issued = {name: issue_time(run, device) for name, run in contestants.items()}
    for _ in range(rounds):
        for name, run in contestants.items():
            times[name].append(once(run, device, issued[name]))
    return {name: (statistics.median(found), issued[name]) for name, found in times.items()}


def layers(
    comms: axo.Communicators, shapes: tuple[tuple[int, int, int], ...], rounds: int, table: Table
) -> list[float]:
    """Each layer's time over torch's, forward and both gradients."""
    device, ratios = comms.device, []
    for rows, k, n in shapes:
        plain = torch.nn.Linear(k, n, False, device=device)
        mine = axo.nn.Linear(k, n, False, comms=comms)
        mine.load_serial(plain)
        x = torch.randn(rows, k, device=device, dtype=torch.bfloat16, requires_grad=True)

        def run(layer: torch.nn.Module, x: torch.Tensor = x) -> None:
            with torch.autocast(device.type, torch.bfloat16):
                y = layer(x)
            y.backward(y.detach())

        found = in_turns({"torch": partial(run, plain), "axo": partial(run, mine)}, rounds, device)
        case = f"Linear {rows}x{k}x{n}"
        for name, (seconds, host) in found.items():
            times = {"ms": 1e3 * seconds, "host_ms": 1e3 * host, "ratio": seconds / found["torch"][0]}
            table.add(case=case, contestant=name, tflops=6e-12 * rows * k * n / seconds, **times)
        ratios.append(found["axo"][0] / found["torch"][0])
    return ratios


def loss(comms: axo.Communicators, shape: tuple[int, int], rounds: int, table: Table) -> tuple[float, float]:
    """Axo's time over torch's, forward and backward, and how far the gradients are apart, relative to their norm."""
    device, (rows, vocab) = comms.device, shape
    logits = torch.randn(rows, vocab, device=device).bfloat16().requires_grad_()
    target = torch.randint(vocab, (rows,), device=device)
    losses = {
        "torch": lambda: F.cross_entropy(logits.float(), target),
        "axo": lambda: axo.nn.cross_entropy(logits, target, comms=comms),
    }

    def gradient(name: str) -> torch.Tensor:
        logits.grad = None
        losses[name]().backward()
        assert logits.grad is not None
        return logits.grad

    apart = relative_error(gradient("axo"), gradient("torch").double())
    found = in_turns({name: partial(gradient, name) for name in losses}, rounds, device)
    for name, (seconds, host) in found.items():
        times = {"ms": 1e3 * seconds, "host_ms": 1e3 * host, "ratio": seconds / found["torch"][0]}
        table.add(case=f"cross-entropy {rows}x{vocab}", contestant=name, loss=float(losses[name]().detach()), **times)
    return found["axo"][0] / found["torch"][0], apart


def step(comms: axo.Communicators, case: str, sizes: Sizes, rounds: int, table: Table) -> tuple[float, float, float]:
    """Axo's time over torch's, its TFLOP/s, and how far the losses are apart."""
    device, ids = comms.device, rows_of(sizes, comms.device)
    contestants = {
        "torch": Contestant("torch", serial(sizes, device), sizes),
        "axo": axo_contestant("axo", sizes, comms),
    }
    losses = {name: float(one.step(ids[:, :-1], ids[:, 1:])) for name, one in contestants.items()}
    runs: dict[str, Callable[[], Any]] = {
        name: partial(one.step, ids[:, :-1], ids[:, 1:]) for name, one in contestants.items()
    }
    found = in_turns(runs, rounds, device)
    state = gemm.working(runs["axo"], found["axo"][0], device)
    for name, (seconds, host) in found.items():
        times = {"ms": 1e3 * seconds, "host_ms": 1e3 * host, "ratio": seconds / found["torch"][0]}
        speed = 1e-12 * step_flops(sizes) / seconds
        table.add(case=case, contestant=name, tflops=speed, loss=losses[name], card=state, **times)
    apart = abs(losses["axo"] - losses["torch"])
    return found["axo"][0] / found["torch"][0], 1e-12 * step_flops(sizes) / found["axo"][0], apart


def rows_of(sizes: Sizes, device: torch.device) -> torch.Tensor:
    """The tokens of a step, and the one behind each row."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(sizes.vocab, (sizes.rows, sizes.seq_len + 1), generator=generator).to(device)


def profile(comms: axo.Communicators, sizes: Sizes, path: Path) -> None:
    """A trace of one step of Axo's, as torch.profiler writes it."""
    ids, one = rows_of(sizes, comms.device), axo_contestant("axo", sizes, comms)
    run = partial(one.step, ids[:, :-1], ids[:, 1:])
    for _ in range(2):  # what a first step makes, and compiles, is no part of it
        run()
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as trace:
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    trace.export_chrome_trace(str(path))


def main(arguments: list[str] | None = None) -> int:
    """Run everything; returns the number of failed verdicts."""
    parser = Parser("axo bench gpu_step", __doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/gpu_step"))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--walk", action="store_true", help="toy sizes on the CPU; times mean nothing")
    options = parser.parse_args(arguments)
    if not options.walk and not torch.cuda.is_available():
        parser.error("no GPU is visible; --walk runs the same code at toy sizes on the CPU")
    options.out.mkdir(parents=True, exist_ok=True)
    comms = axo.connect("1x1x1x1", device="cpu" if options.walk else "cuda")
    header = environment(comms.device) | {"bench": "gpu_step"} | ({"kind": "walk"} if options.walk else {})
    path = options.out / "gpu_step.jsonl"
    path.unlink(missing_ok=True)
    table = Table(COLUMNS, path, header, earlier=())  # nothing earlier; but what is under way stands in the file
    ratios: list[float] = []
    of_loss: list[tuple[float, float]] = []
    found: dict[str, tuple[float, float, float]] = {}

    def measure_layers() -> None:
        ratios.extend(layers(comms, TOY_LAYERS if options.walk else LAYERS, options.rounds, table))

    def measure_loss() -> None:
        of_loss.append(loss(comms, TOY_LOGITS if options.walk else LOGITS, options.rounds, table))

    def measure_step(case: str, sizes: Sizes) -> None:
        found[case] = step(comms, case, sizes, options.rounds, table)

    works = attempt("layers", measure_layers, comms.device, table)
    cases = TOY_STEPS if options.walk else STEPS
    calls: dict[str, Callable[[], None]] = {"loss": measure_loss}
    calls |= {case: partial(measure_step, case, sizes) for case, sizes in cases.items()}
    # last, since a profiler may fail where nothing else does
    trace = options.out / "step_trace.json.gz"
    calls["a profile"] = partial(profile, comms, next(iter(cases.values())), trace)
    for what, call in calls.items():
        works = works and attempt(what, call, comms.device, table)
        gc.collect()  # a cycle of frames keeps torch's first optimizer, and the memory that the next model needs
        if works and comms.device.type == "cuda":
            torch.cuda.empty_cache()
    rate = gemm.peak_of(comms.device)
    peak = rate / 1e12 if rate else None
    verdicts: dict[str, bool | str] = dict.fromkeys(table.failed.values(), False)
    name = f"Axo's layers over torch's at worst (goal: at most {SLOWER:g})"
    verdicts[name if options.walk or not ratios else f"{name}: {max(ratios):.3f}"] = (
        "not measured" if options.walk or not ratios else max(ratios) <= SLOWER
    )
    for ratio, apart in of_loss:
        name = f"cross-entropy, gradients apart (at most {GRADIENTS_APART:g}): {apart:.1e}"
        verdicts[name] = apart <= GRADIENTS_APART
        name = "cross-entropy over torch's (goal: at most 1)"
        verdicts[name if options.walk else f"{name}: {ratio:.3f}"] = "not measured" if options.walk else ratio <= 1
    for case, (ratio, speed, apart) in found.items():
        verdicts[f"{case}, losses apart (at most {LOSSES_APART:g}): {apart:.1e}"] = apart <= LOSSES_APART
        name = f"{case}, Axo's step over torch's (goal: at most {SLOWER:g})"
        verdicts[name if options.walk else f"{name}: {ratio:.3f}"] = "not measured" if options.walk else ratio <= SLOWER
        clock = next((row["card"].get("sm_mhz") for row in table.rows if row["case"] == case and "card" in row), None)
        verdicts |= mfu(case, speed, ratio, peak, (STEPS | TOY_STEPS)[case].recompute, clock)
    return table.judge(verdicts)


def mfu(
    case: str, speed: float, ratio: float, peak: float | None, recomputed: bool, clock: float | None
) -> dict[str, bool | str]:
    """Model flops against the peak, Axo's and torch's, as a verdict.

    Where activations are computed anew the device does a third more than the model flops of the blocks, which count for
    nothing: no goal is asked of that.

    Args:
        speed: TFLOP/s of Axo's.
        ratio: Axo's time over torch's.
        peak: TFLOP/s of the device; None: unknown.
        clock: Of the multiprocessors in the step, MHz; None: unknown. The peak is one at the clock of the documents.
    """
    name = f"{case}, MFU ({'no goal: recomputed' if recomputed else f'goal: at least {MFU:g}'})"
    if peak is None:
        return {name: "not measured"}
    shares = f"{speed / peak:.3f}, torch's {ratio * speed / peak:.3f}{f', at {clock:.0f} MHz' if clock else ''}"
    return {name: shares} if recomputed else {f"{name}: {shares}": speed >= MFU * peak}


if __name__ == "__main__":
    raise SystemExit(main())
