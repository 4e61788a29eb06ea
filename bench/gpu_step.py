"""A training step at GPT shapes on one GPU: Axo's layers on grid 1x1x1x1 beside torch's own, and the share of peak.

    axo bench gpu_step --out results
    python3 -m bench.gpu_step --out results           the same, from the root of a checkout
    python3 -m bench.gpu_step --out results --smoke   the same at toy sizes on the GPU
    python3 -m bench.gpu_step --out results --walk    the same code at toy sizes on the CPU; its times mean nothing

1. Layers: forward and backward of one `axo.nn.Linear` beside `torch.nn.Linear`, bf16.
2. Loss: forward and backward of `axo.nn.cross_entropy` beside torch's of the logits in fp32, and how far the gradients
   are apart. And the mask of a goldfish loss beside that of torch's operations, token by token.
3. Step: a GPT of blocks (`bench/lib/step_models.py`), bf16 autocast, fused AdamW; forward, backward and update. Both
   start from the same weights and rows; losses of the two are compared in that run. Once more with products in fp8.
   Beside each, what it allocated at the fullest moment, and what the planner says of such a step.
   Axo's step of the first as a graph, beside itself: losses after a replay.
4. At the end a profile of one step of Axo's, `step_trace.json.gz`, for chrome://tracing or Perfetto.

Contestants take turns by one clock, that of the products (``axo_kernels.tune.timing.paired``): the GPU's own, with a
head start for the host, as in a training loop, which waits for nothing. What the host takes to issue a call stands
beside it, and the longer of the two is compared.

A step is held to its own bound, in which nothing overlaps: model flops (6 a weight and token, and causal attention at
half of the square; a third more of the blocks where they are computed anew) at the rate that torch's largest product
has here, and the 28 bytes a parameter of AdamW at the rate of a copy. No step reaches it: attention, norms, the loss
and the casts of autocast are left out of it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import axo
from axo.grid import Grid
from axo.nn.goldfish import goldfish_mask, torch_mask
from axo.perf.memory import GIB, estimate
from axo.perf.run_options import RunOptions
from axo.perf.workload import gpt
from axo_kernels.tune.timing import once, paired, relative_error, sustained

from . import gemm
from .lib import verdicts as judge
from .lib.arguments import Parser
from .lib.attempts import attempt
from .lib.clock import undisturbed
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
    "of_bound": ".3f",
    "peak_gib": ".2f",
    "planned_gib": ".2f",
}
# (rows, in, out): the four products of GPT blocks at h = 4096 and 8192.
LAYERS = ((8192, 4096, 12288), (8192, 4096, 4096), (8192, 4096, 16384), (8192, 16384, 4096), (8192, 8192, 32768))
STEPS = {
    "gpt h=2048": Sizes(2048, 12, 16, 50304, 2048, 8, "bf16-mixed"),
    "gpt h=4096": Sizes(4096, 3, 32, 50304, 2048, 8, "bf16-mixed"),
    "gpt h=4096 recomputed": Sizes(4096, 3, 32, 50304, 2048, 8, "bf16-mixed", recompute=True),
}
LOGITS = (8192, 50304)  # tokens, vocabulary
TOY_LAYERS = ((64, 32, 48),)
TOKENS = (16, 4096)  # of goldfish's mask: rows, tokens
TOY_LOGITS, TOY_TOKENS = (64, 80), (2, 64)
TOY_STEPS = {
    "gpt h=32": Sizes(32, 2, 4, 64, 16, 2, "bf16-mixed"),
    "gpt h=32 recomputed": Sizes(32, 2, 4, 64, 16, 2, "bf16-mixed", True),
}
OF_BOUND, SLOWER, LOSSES_APART, FP8_APART = 0.70, 1.01, 2e-2, 0.2
PLANNED = (0.8, 1.0)  # of what the planner says a step may take: not more, and not much less
ADAMW_BYTES = 28  # a parameter: its gradient, itself and two moments in fp32 read, all but the gradient written
Ratios = dict[str, float | None]  # None: disturbed
GRADIENTS_APART = 4e-3  # both are rounded to bf16, by 2^-9 of an element at most


def step_flops(sizes: Sizes) -> float:
    """Model flops of one step: 6 a weight of a product and token, and attention's two products over half the square."""
    weights = 12 * sizes.layers * sizes.hidden**2 + sizes.vocab * sizes.hidden
    attention = (
        6 * sizes.layers * sizes.hidden * sizes.seq_len
    )  # forward 4 * h * s / 2 a token, three times that in all
    return float(sizes.tokens) * (6 * weights + attention)


def parameters(sizes: Sizes) -> int:
    """Of the whole model."""
    return 12 * sizes.layers * sizes.hidden**2 + 2 * sizes.vocab * sizes.hidden + (4 * sizes.layers + 2) * sizes.hidden


def bound(sizes: Sizes, flops: float, bandwidth: float) -> float:
    """Seconds below which a step is not, at these rates of products and of copies."""
    again = 2.0 * sizes.tokens * 12 * sizes.layers * sizes.hidden**2 if sizes.recompute else 0.0
    return (step_flops(sizes) + again) / flops + ADAMW_BYTES * parameters(sizes) / bandwidth


def rates(device: torch.device, toy: bool, table: Table) -> tuple[float, float]:
    """FLOP/s of torch's bf16 product and bytes/s (read and written) of a copy, many back to back; a note of both."""
    n, size = (256, 1 << 16) if toy else (8192, 1 << 30)
    a, b = (torch.randn(n, n, device=device).bfloat16() for _ in range(2))
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    product, copy = sustained([lambda: a @ b, lambda: target.copy_(source)], device, 3, 0.1)
    flops, bandwidth = 2.0 * n**3 / product.seconds, 2.0 * size / copy.seconds
    told = f"torch's product: {flops / 1e12:.1f} TFLOP/s; a copy: {bandwidth / 1e9:.1f} GB/s"
    table.note(told, flops=flops, bandwidth=bandwidth)
    return flops, bandwidth


def planned(sizes: Sizes) -> float:
    """GiB that the planner gives such a step of Axo's at its fullest, without its share for waste and libraries."""
    model = gpt(
        "a step", layers=sizes.layers, hidden=sizes.hidden, heads=sizes.heads, vocab=sizes.vocab,
        seq_length=sizes.seq_len, bias=False,
    )  # fmt: skip
    # what axo.overlap.attach() does where nothing is said: weights that were gathered, or cast, are kept for backward
    run = RunOptions(batch_tokens=sizes.tokens, recompute="full" if sizes.recompute else "none", cached_gathers=1.0)
    memory = estimate(model, Grid(), run)
    return max(memory.moments.values()) / GIB


def in_turns(
    case: str,
    runs: dict[str, Callable[[], Any]],
    rounds: int,
    device: torch.device,
    table: Table,
    more: Callable[[str, float], dict[str, Any]],
) -> Ratios:
    """Time contestants beside the first: their ratios to it. A row each, with ``more`` of its name and seconds."""
    measured, disturbed = undisturbed(partial(paired, list(runs.values()), device, rounds), device)
    for name, timing in zip(runs, measured, strict=True):
        times = {"ms": 1e3 * timing.seconds, "host_ms": 1e3 * timing.issued, "ratio": timing.ratio}
        table.add(case=case, contestant=name, **times, disturbed=disturbed, **more(name, timing.seconds))
    return {name: None if disturbed else timing.ratio for name, timing in zip(runs, measured, strict=True)}


def layers(
    comms: axo.Communicators, shapes: tuple[tuple[int, int, int], ...], rounds: int, table: Table
) -> list[float | None]:
    """Each layer's time over torch's, forward and both gradients; None: disturbed."""
    device, ratios = comms.device, []
    for rows, k, n in shapes:
        plain = torch.nn.Linear(k, n, False, device=device)
        mine = axo.nn.Linear(k, n, False, comms=comms)
        mine.load_serial(plain)
        x = torch.randn(rows, k, device=device, dtype=torch.bfloat16, requires_grad=True)
        flops = 6.0 * rows * k * n

        def run(layer: torch.nn.Module, x: torch.Tensor = x) -> None:
            with torch.autocast(device.type, torch.bfloat16):
                y = layer(x)
            y.backward(y.detach())

        def rate(_: str, seconds: float, flops: float = flops) -> dict[str, Any]:
            return {"tflops": 1e-12 * flops / seconds}

        runs: dict[str, Callable[[], Any]] = {"torch": partial(run, plain), "axo": partial(run, mine)}
        ratios.append(in_turns(f"Linear {rows}x{k}x{n}", runs, rounds, device, table, rate)["axo"])
    return ratios


def loss(comms: axo.Communicators, shape: tuple[int, int], rounds: int, table: Table) -> tuple[float | None, float]:
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
    runs: dict[str, Callable[[], Any]] = {name: partial(gradient, name) for name in losses}
    value = lambda name, _: {"loss": float(losses[name]().detach())}  # noqa: E731
    return in_turns(f"cross-entropy {rows}x{vocab}", runs, rounds, device, table, value)["axo"], apart


def goldfish(comms: axo.Communicators, shape: tuple[int, int], rounds: int, table: Table) -> tuple[float | None, float]:
    """Axo's time of a mask of tokens over torch's operations', and how many tokens of the two differ."""
    tokens = torch.randint(1000, shape, generator=torch.Generator().manual_seed(1)).to(comms.device)
    masks = {"torch": partial(torch_mask, tokens, 4, 13), "axo": partial(goldfish_mask, tokens, 4, 13)}
    unlike = float((masks["torch"]() != masks["axo"]()).sum())
    case = "goldfish {}x{}".format(*shape)
    return in_turns(case, dict(masks), rounds, comms.device, table, lambda *_: {})["axo"], unlike


def as_graph(
    comms: axo.Communicators, case: str, sizes: Sizes, rounds: int, table: Table
) -> tuple[float | None, float]:
    """The time of a replay of Axo's step as a graph over the step's own, and how far losses are apart after one."""
    device, ids = comms.device, rows_of(sizes, comms.device)
    runs: dict[str, Callable[[], Any]] = {
        name: partial(axo_contestant(name, sizes, comms, capturable=True).step, ids[:, :-1], ids[:, 1:])
        for name in ("axo", "axo as a graph")
    }
    losses = {name: float(run()) for name, run in runs.items()}  # of what a first step makes, a graph holds nothing
    if device.type == "cuda":
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.stream(side):
            runs["axo as a graph"]()
        torch.cuda.synchronize(device)
        with torch.cuda.graph(graph):
            captured = runs["axo as a graph"]()
        runs["axo as a graph"] = graph.replay
        runs["axo"]()
        graph.replay()
        losses = {"axo": float(runs["axo"]()), "axo as a graph": float(captured)}
    more = lambda name, _: {"loss": losses[name]}  # noqa: E731
    ratios = in_turns(f"{case} as a graph", runs, rounds, device, table, more)
    return ratios["axo as a graph"], abs(losses["axo"] - losses["axo as a graph"])


def step(
    comms: axo.Communicators, case: str, sizes: Sizes, rounds: int, table: Table, least: float
) -> dict[str, tuple[float | None, float]]:
    """Of each contestant: its time over torch's, and how far its loss is from torch's.

    Args:
        least: Seconds of :func:`bound`.
    """
    device, ids = comms.device, rows_of(sizes, comms.device)
    makers: dict[str, Callable[[], Contestant]] = {
        "torch": lambda: Contestant("torch", serial(sizes, device), sizes),
        "axo": lambda: axo_contestant("axo", sizes, comms),
    }
    if device.type == "cpu" or torch.cuda.get_device_capability(device) >= (8, 9):
        makers["axo fp8"] = lambda: in_fp8(axo_contestant("axo fp8", sizes, comms))
    losses: dict[str, float] = {}
    peaks: dict[str, float | None] = {}
    runs: dict[str, Callable[[], Any]] = {}
    for name, make in makers.items():
        before = allocated(device)
        one = make()
        runs[name] = partial(one.step, ids[:, :-1], ids[:, 1:])
        losses[name] = float(runs[name]())
        runs[name]()  # with all moments there
        peaks[name] = (allocated(device, peak=True) - before) / 2**30 if device.type == "cuda" else None
    state = gemm.working(runs["axo"], once(runs["axo"], device), device)

    def more(name: str, seconds: float) -> dict[str, Any]:
        memory = {"peak_gib": peaks[name], "planned_gib": planned(sizes) if name == "axo" else None}
        speed = {"tflops": 1e-12 * step_flops(sizes) / seconds, "of_bound": least / seconds}
        return {"loss": losses[name], "card": state, **speed, **memory}

    ratios = in_turns(case, runs, rounds, device, table, more)
    return {name: (ratio, abs(losses[name] - losses["torch"])) for name, ratio in ratios.items()}


def in_fp8(one: Contestant) -> Contestant:
    """The same with every linear layer's products in fp8."""
    for layer in one.model.modules():
        if isinstance(layer, axo.nn.Linear):
            layer.use_fp8("row")
    return one


def allocated(device: torch.device, peak: bool = False) -> int:
    """Bytes that tensors have now, or had at the most since this was asked for last."""
    if device.type != "cuda":
        return 0
    gc.collect()
    torch.cuda.synchronize(device)
    most = int(torch.cuda.max_memory_allocated(device))
    torch.cuda.reset_peak_memory_stats(device)
    return most if peak else int(torch.cuda.memory_allocated(device))


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
    parser.add_argument("--smoke", action="store_true", help="toy sizes on the GPU")
    options = parser.parse_args(arguments)
    if not options.walk and not torch.cuda.is_available():
        parser.error("no GPU is visible; --walk runs the same code at toy sizes on the CPU")
    options.out.mkdir(parents=True, exist_ok=True)
    comms = axo.connect("1x1x1x1", device="cpu" if options.walk else "cuda")
    header = environment(comms.device) | {"bench": "gpu_step"} | ({"kind": "walk"} if options.walk else {})
    path = options.out / "gpu_step.jsonl"
    path.unlink(missing_ok=True)
    table = Table(COLUMNS, path, header, earlier=())  # nothing earlier; but what is under way stands in the file
    toy = options.walk or options.smoke
    cases, results = TOY_STEPS if toy else STEPS, dict[str, Any]()

    def measure_step(case: str) -> dict[str, tuple[float | None, float]]:
        least = bound(cases[case], *results.get("rates", (1.0, 1.0)))
        return step(comms, case, cases[case], options.rounds, table, least)

    def measure(what: str, call: Callable[[], Any]) -> None:
        results[what] = call()

    calls: dict[str, Callable[[], Any]] = {
        "layers": partial(layers, comms, TOY_LAYERS if toy else LAYERS, options.rounds, table),
        "rates": partial(rates, comms.device, toy, table),
        "loss": partial(loss, comms, TOY_LOGITS if toy else LOGITS, options.rounds, table),
        "goldfish": partial(goldfish, comms, TOY_TOKENS if toy else TOKENS, options.rounds, table),
        **{case: partial(measure_step, case) for case in cases},
        "a graph": partial(as_graph, comms, *next(iter(cases.items())), options.rounds, table),
        # last, since a profiler may fail where nothing else does
        "a profile": partial(profile, comms, next(iter(cases.values())), options.out / "step_trace.json.gz"),
    }
    works = True
    for what, call in calls.items():
        works = works and attempt(what, partial(measure, what, call), comms.device, table)
        gc.collect()  # a cycle of frames keeps torch's first optimizer, and the memory that the next model needs
        if works and comms.device.type == "cuda":
            torch.cuda.empty_cache()
    verdicts: judge.Verdicts = dict.fromkeys(table.failed.values(), False)
    quiet = [ratio for ratio in results.get("layers", ()) if ratio is not None]
    worst, off = None if toy else max(quiet, default=None), len(results.get("layers", ())) - len(quiet)
    verdicts |= judge.line("Axo's layers over torch's at worst", worst, SLOWER, at_most=True, disturbed=off)
    if "loss" in results:
        ratio, apart = results["loss"]
        verdicts |= judge.line("cross-entropy, gradients apart", apart, GRADIENTS_APART, at_most=True, form=".1e")
        verdicts |= judge.line("cross-entropy over torch's", None if toy else ratio, 1.0, at_most=True)
    if "goldfish" in results:
        ratio, unlike = results["goldfish"]
        verdicts |= judge.line("goldfish mask, tokens unlike torch's", unlike, 0, at_most=True, form="g")
        verdicts |= judge.line("goldfish mask over torch's operations", None if toy else ratio, 1.0, at_most=True)
    ratio, apart = results.get("a graph", (None, None))
    case = next(iter(cases))
    verdicts |= judge.line(f"{case} as a graph, losses apart", apart, LOSSES_APART, at_most=True, form=".1e")
    verdicts |= judge.line(f"{case} as a graph over the step itself", None if toy else ratio, SLOWER, at_most=True)
    for case in (case for case in cases if case in results):
        for contestant, (ratio, apart) in results[case].items():
            if contestant == "torch":
                continue
            limit, goal = (FP8_APART, 1.0) if contestant.endswith("fp8") else (LOSSES_APART, SLOWER)
            verdicts |= judge.line(f"{case}, losses of {contestant} apart", apart, limit, at_most=True, form=".1e")
            name = f"{case}, the step of {contestant} over torch's"
            verdicts |= judge.line(name, None if toy else ratio, goal, at_most=True)
        verdicts |= judged(case, [] if toy else [row for row in table.rows if row["case"] == case])
    return table.judge(verdicts)


def judged(case: str, rows: list[dict[str, Any]]) -> judge.Verdicts:
    """Whether Axo's step is near its own bound, and takes the memory that the planner says."""
    mine = {row["contestant"]: row for row in rows}
    one, rival = mine.get("axo", {}), mine.get("torch", {})
    beside = f", torch's {rival['of_bound']:.3f}" if rival else ""
    if clock := one.get("card", {}).get("sm_mhz"):
        beside += f", at {clock:.0f} MHz"
    verdicts = judge.line(f"{case}, the bound over Axo's step", one.get("of_bound"), OF_BOUND, beside=beside)
    memory = f"{case}, memory of Axo's step over the planner's (goal: {PLANNED[0]:g} to {PLANNED[1]:g})"
    if one.get("peak_gib") is None:
        return verdicts | {memory: "not measured"}
    told = f"{memory}: {one['peak_gib']:.2f} of {one['planned_gib']:.2f} GiB"
    return verdicts | {told: PLANNED[0] <= one["peak_gib"] / one["planned_gib"] <= PLANNED[1]}


if __name__ == "__main__":
    raise SystemExit(main())
