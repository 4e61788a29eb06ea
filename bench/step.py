"""How long is a training step? Axo beside plain PyTorch and its own parallel schemes, interleaved in one run.

    axo bench step --cases serial --tokens 1024 --precision 32-true          1x1x1x1 against nn.Linear
    axo bench step --cases z,x,data --ranks 2 --tokens 256 --precision bf16-mixed
    axo bench step --cases pipeline --tokens 1024 --layers 8                 stages; each row of --tokens a micro-batch
    torchrun --nproc-per-node 8 -m axo_bench.step --cases z                  on ranks that exist, such as GPUs

Cases: ``serial``; ``z`` against FSDP2, ``x`` against DTensor's column / row plan, ``data`` against DDP, ``pipeline``
against torch's own stages, all by 1F1B; each rival over Gloo (NCCL on GPUs) and over backend axo, which tells transport
and engine apart; everybody with torch's fused AdamW. A round is one step of each contestant in turn, the order turned
round each time, the slowest rank's time; figures are means of the last 8 of 10 steps, as in the AxoNN papers, over all
repeats. Columns: ms a step, how often faster than the first rival (median over rounds), tokens/s of all ranks, MFU and
HFU (of --peak-tflops, else of the rate of a large product measured here), comm: the part of the step that a rank is
blocked in communication (Axo alone knows), over: the part by which the step is longer than the same work without
communication (plain torch, the last row, whose ``faster`` is what could be won at that work), MB: peak memory of the
step, parameters and optimizer included, and the loss, which must agree.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from axo.perf.flops import narayanan

from .lib import step_models as models
from .lib.arguments import Parser
from .lib.table import Table, environment

COLUMNS = {"case": "s", "contestant": "s", "ranks": "d", "ms": ".2f", "faster": ".2f", "tokens_s": ".0f"}
COLUMNS |= {"mfu": ".3f", "hfu": ".3f", "comm": ".2f", "over": ".2f", "mb": ".0f", "loss": ".4f"}
CASES = ("serial", "z", "x", "data", "pipeline")
STEPS, COUNTED = 10, 8
LOSS_LIMIT = {"32-true": 1e-3, "bf16-mixed": 5e-2}  # relative; the same weights after the same steps


def main(arguments: list[str] | None = None) -> int:
    """Run the bench; returns 1 when losses disagree."""
    parser = Parser("axo bench step", __doc__, json=True)
    parser.add_argument("--cases", default="serial,z,x,data", help="comma-separated")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=512)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=256, help="of a rank's rows")
    parser.add_argument("--precision", default="bf16-mixed", choices=list(LOSS_LIMIT))
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--repeats", type=int, default=1, help="times 10 steps")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--peak-tflops", type=float, default=None, help="of a rank")
    parser.add_argument("--plot", type=Path, default=None, help="write a PNG here")
    options = parser.parse_args(arguments)
    unknown = set(options.cases.split(",")) - set(CASES)
    if unknown:
        parser.error(f"--cases: {', '.join(sorted(unknown))}: choose from {', '.join(CASES)}")
    if options.tokens % options.seq_len:
        parser.error(f"--tokens {options.tokens} is not a multiple of --seq-len {options.seq_len}")
    from axo.launch import Rank, launch_local

    rank = Rank.from_environment()
    fork = options.device == "cpu"
    header = {"bench": "step", **environment(torch.device(options.device)), "options": _plain(options)}
    table = Table(COLUMNS, options.json if rank is None or rank.rank == 0 else None, header)
    for case in options.cases.split(","):
        ranks = 1 if case == "serial" else options.ranks
        rows = measure(case, options) if rank else launch_local(measure, ranks, case, options, fork=fork)
        for row in rows or []:
            table.add(**row)
    if options.plot and table.rows:
        plot(table.rows, options.plot)
    return int(any(not row["right"] for row in table.rows))


def _plain(options: argparse.Namespace) -> dict[str, Any]:
    return {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}


def measure(case: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """On every rank: the rows of one case; on ranks other than 0 none."""
    import axo
    from axo.launch import set_threads

    set_threads(0, int(os.environ["LOCAL_WORLD_SIZE"]))
    ranks = int(os.environ["WORLD_SIZE"])
    sizes = models.Sizes(
        options.hidden, options.layers, options.heads, options.vocab, options.seq_len,
        options.tokens // options.seq_len, options.precision, options.recompute,
    )  # fmt: skip
    grid = axo.Grid(**({case: ranks} if case in axo.AXES else {}))
    comms = axo.connect(grid, pipeline=ranks if case == "pipeline" else 1, device=options.device)
    device = torch.device(comms.device)
    field = list(contestants(case, sizes, comms, device))
    batches = [batch(sizes, step, comms) for step in range(STEPS)]
    seconds: dict[str, list[float]] = {c.name: [] for c in field}
    blocked: dict[str, list[float]] = {c.name: [] for c in field}
    losses: dict[str, float] = {}
    for _ in range(options.repeats):
        for step in range(STEPS):
            for contestant in field[:: -1 if step % 2 else 1]:
                spent, waited, loss = timed_step(contestant, batches[step], comms)
                if step >= STEPS - COUNTED:
                    seconds[contestant.name].append(spent)
                    blocked[contestant.name].append(waited)
                losses[contestant.name] = loss
    memory = {c.name: peak_memory(c, batches[-1], device) for c in field}
    peak = (options.peak_tflops or product_rate(sizes, device)) * 1e12 * ranks
    comms.close()
    if comms.everyone.rank != 0:
        return []
    return summarize(case, field, sizes, ranks, seconds, blocked, losses, memory, peak)


def contestants(case: str, sizes: models.Sizes, comms: Any, device: torch.device) -> Any:
    """Who takes part, the first rival second; the yardstick without communication last."""
    grid = str(comms.grid)
    if case == "serial":
        yield models.axo_contestant(f"Axo {grid}", sizes, comms)
        yield models.Contestant("nn.Linear", models.serial(sizes, device), sizes)
        return
    if case == "pipeline":
        yield models.axo_stages(f"Axo {comms.stages} stages", sizes, comms)
    else:
        yield models.axo_contestant(f"Axo {grid}", sizes, comms)
    usual = "nccl" if device.type == "cuda" else "gloo"
    groups = {usual: dist.new_group(backend=usual), "axo": dist.new_group(backend="axo")}
    yield from models.rivals(case, sizes, groups, device)
    for name, overlap in switched(case, sizes):
        yield models.axo_contestant(f"Axo {grid} {name}", sizes, comms, overlap)
    if case == "x":
        yield models.axo_contestant(f"Axo {grid} q, k, v apart", sizes, comms, shares=False)
    yield models.alone(case, comms.everyone.size, sizes, device)


def switched(case: str, sizes: models.Sizes) -> list[tuple[str, Any]]:
    """Axo with what the case has to overlap switched off, and for z also without the cache of gathered weights."""
    from axo import Overlap

    if case == "pipeline":
        return []
    if case == "x":
        return [("OAR off", Overlap(all_reduce=False))]
    if case == "data":  # one bucket is full when backward ends
        whole = 4 * sizes.hidden * (2 * sizes.vocab + sizes.layers * (12 * sizes.hidden + 4) + 2)
        return [("at the end", Overlap(bucket_bytes=whole))]
    return [
        ("ORS, OAG off", Overlap(reduce_scatter=False, all_gather=False)),
        ("nothing kept", Overlap(gather_cache="none")),
        ("nothing kept, ORS, OAG off", Overlap(reduce_scatter=False, all_gather=False, gather_cache="none")),
    ]


def batch(sizes: models.Sizes, step: int, comms: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's rows; peers on x hold the same."""
    seed = step * 1000 + comms.coords.data * comms.grid.z + comms.coords.z
    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(sizes.vocab, (sizes.rows, 1), generator=generator)
    ids = (start + 3 * torch.arange(sizes.seq_len + 1)) % sizes.vocab
    return ids[:, :-1].to(comms.device), ids[:, 1:].to(comms.device)


def timed_step(contestant: models.Contestant, rows: Any, comms: Any) -> tuple[float, float, float]:
    """Seconds of the slowest rank, its own seconds blocked, and the mean loss."""
    _synchronize(comms.device)
    comms.everyone.barrier()
    before = contestant.blocked() if contestant.blocked else 0.0
    start = time.perf_counter()
    loss = contestant.step(*rows)
    _synchronize(comms.device)
    spent = time.perf_counter() - start
    waited = contestant.blocked() - before if contestant.blocked else float("nan")
    slowest = comms.everyone.all_reduce(torch.tensor([spent], dtype=torch.float64, device=comms.device), "max")
    mean = comms.everyone.all_reduce(loss.double().reshape(1).to(comms.device), "avg")
    return float(slowest), waited, float(mean)


def _synchronize(device: Any) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def peak_memory(contestant: models.Contestant, rows: Any, device: torch.device) -> float | None:
    """Bytes: what the contestant holds between steps, and what one step adds at its highest. None where unknown."""
    held = sum(parameter.numel() * parameter.element_size() for parameter in map(_local, contestant.model.parameters()))
    held *= 3  # AdamW's two moments
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        start = torch.cuda.memory_allocated(device)
        contestant.step(*rows)
        return held + torch.cuda.max_memory_allocated(device) - start
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the highest resident size is counted from here
    except OSError:
        return None
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)  # what malloc keeps of earlier steps would count as held
    start = _status("VmRSS")
    contestant.step(*rows)
    return held + max(0, _status("VmHWM") - start)


def _local(parameter: Any) -> torch.Tensor:
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def product_rate(sizes: models.Sizes, device: torch.device) -> float:
    """TFLOP/s of one rank in a 1024-cubed product of the compute dtype, all ranks at once."""
    dtype = torch.bfloat16 if sizes.precision == "bf16-mixed" else torch.float32
    a = torch.randn(1024, 1024, device=device).to(dtype)
    times = []
    for _ in range(8):
        _synchronize(device)
        start = time.perf_counter()
        a @ a
        _synchronize(device)
        times.append(time.perf_counter() - start)
    return 2 * 1024**3 / min(times) / 1e12


def summarize(
    case: str,
    field: list[models.Contestant],
    sizes: models.Sizes,
    ranks: int,
    seconds: dict[str, list[float]],
    blocked: dict[str, list[float]],
    losses: dict[str, float],
    memory: dict[str, float | None],
    peak: float,
) -> list[dict[str, Any]]:
    """One row a contestant. ``faster`` is the median over steps of the first rival's time over this one's."""
    groups = ranks if case in ("z", "data") else 1
    tokens = sizes.tokens * groups
    shape = (sizes.rows * groups, sizes.seq_len, sizes.layers, sizes.hidden, sizes.vocab)
    flops = {"mfu": narayanan(*shape, recompute=False), "hfu": narayanan(*shape, recompute=sizes.recompute)}
    first, yardstick = field[1].name, field[-1].name
    rows = []
    for contestant in field:
        name = contestant.name
        mean = statistics.fmean(seconds[name])
        paired = [a / b for a, b in zip(seconds[first], seconds[name], strict=True)]
        extra = 1 - statistics.fmean(seconds[yardstick]) / mean if case != "serial" else None
        apart = abs(losses[name] - losses[first]) / losses[first]
        rows.append(
            {
                "case": case,
                "contestant": name,
                "ranks": ranks,
                "ms": mean * 1e3,
                "faster": statistics.median(paired),
                "tokens_s": tokens / mean,
                "mfu": flops["mfu"] / mean / peak,
                "hfu": flops["hfu"] / mean / peak,
                "comm": statistics.fmean(blocked[name]) / mean if contestant.blocked else None,
                "over": extra,
                "mb": None if (used := memory[name]) is None else used / 1e6,
                "loss": losses[name],
                "right": name == "no communication" or apart <= LOSS_LIMIT[sizes.precision],
                "all_ms": [round(1e3 * value, 3) for value in seconds[name]],
            }
        )
    return rows


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """A bar a contestant, grouped by case."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 0.35 * len(rows) + 1.2), layout="constrained")
    labels = [f"{row['case']}: {row['contestant']}" for row in rows]
    colours = ["tab:blue" if row["contestant"].startswith("Axo") else "tab:grey" for row in rows]
    axes.barh(labels, [row["ms"] for row in rows], color=colours)
    for index, row in enumerate(rows):
        axes.text(row["ms"], index, f" {row['ms']:.1f}", va="center", fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("ms a step (mean of the last 8 of 10)")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


if __name__ == "__main__":
    raise SystemExit(main())
