"""The kernels on a GPU, in one run of under eight minutes: numbers that a CPU cannot give. (``bench.gpu`` runs all.)

    axo bench kernels --out results
    python3 -m bench.kernels --out results         (from the root of the repository; torch and triton are enough)

0. Compile: what the sections below will launch, in processes beside each other, into Triton's cache.

1. Right: every kernel, layout and dtype against fp64 on sizes that are odd, small and large; every strategy against the
   serial one; 500 rounds of signalled operations back to back; graphs of them; a flag that is never set; fp8.
2. Fast: torch, CuPy's cuBLAS, Triton and the tuner's choice over square sizes and the GPT shapes of the papers; TN
   added to an fp32 gradient; fp8 beside bf16.
3. Overlap: efficiency where communication takes 0.2, 0.4 and 0.8 of the product, by launches and as replays of graphs.

Sections get shares of the time and say what they left out; the same command again measures that alone. A product or
case that raises is a verdict, and is not tried again; one after which the GPU does nothing more leaves the rest to the
next run. Nor is what a run was killed in the middle of, since it may hang; what takes far too long ends the process.
The kernel for Hopper, whose waits have no bound, is tried in processes of its own first. The last lines are the
verdicts. ``--dry`` walks through the same code on a CPU at toy sizes; its times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch

from axo_kernels import SignalTimeout
from axo_kernels import device as devices
from axo_kernels.fused.chunks import chunk_order
from axo_kernels.fused.fp8 import SCALINGS
from axo_kernels.fused.segments import SegmentedProduct
from axo_kernels.fused.strategies import FusedPlan, run_all_gather, run_reduce_scatter, start_all_reduce
from axo_kernels.gemm import tiles
from axo_kernels.gemm.layout import LAYOUTS, Product
from axo_kernels.gemm.tiles import HOPPER, TRIED, Config
from axo_kernels.tune.choice import Choice
from axo_kernels.tune.error_line import in_a_line
from axo_kernels.tune.model_shapes import layers
from axo_kernels.tune.runners import runner
from axo_kernels.tune.timing import relative_error
from axo_kernels.tune.trust import Trust

from . import gemm, overlap
from .lib import compiled, fp8
from .lib import verdicts as judge
from .lib.arguments import Parser
from .lib.attempts import bounded, case, end_with_parent, works
from .lib.launches import MEETING_CHUNKS, MEETING_SIZES, MEETINGS, TRIAL_SIZES, launches
from .lib.numerics import numerics
from .lib.simulated import SimulatedCommunicator
from .lib.table import LEFT_OUT, Table, environment, rows_to_go_on_with, trace_of
from .lib.trials import OutOfTimeError, Trial

OVERLAP_SHAPES = [(8192, 8192, 8192), (2048, 16384, 4096)]
HOPPER_SECTION = "the kernel for Hopper"
SECTION_SECONDS, CASE_SECONDS = 100.0, 60.0  # of a section, and of a product or a case, that does not hang
OVERLAP_SECONDS, FP8_SECONDS = 40.0, 15.0  # kept for them before the products begin
SMOKE_SIZES = 2  # of TRIAL_SIZES: without borders and with short sums
LATE_SECONDS = 15.0  # for what comes last
AT_FLAGS = " at flags"  # behind the name of a tile in which it hung or died there
QUIET = 75.0  # seconds after which a trial hangs that has said nothing: what it compiles takes less
FLAG_SECONDS = 5.0  # after which a kernel gives up a flag: what would wait for ever must leave the rest some time


def main(arguments: list[str] | None = None) -> int:
    """Run all sections; returns the number of failed verdicts."""
    parser = Parser("axo bench kernels", __doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/kernels"))
    parser.add_argument("--seconds", type=float, default=460.0)
    parser.add_argument("--dry", action="store_true", help="walk through on a CPU")
    parser.add_argument("--smoke", action="store_true", help="all of it at toy sizes on the GPU")
    parser.add_argument("--jobs", type=int, default=min(12, os.cpu_count() or 1), help="compiling processes")
    parser.add_argument("--compile", default="", help=argparse.SUPPRESS)  # N/M: compile the N-th of M parts, and end
    parser.add_argument("--grouped", default="", help=argparse.SUPPRESS)  # a layout: try the kernel for Hopper, and end
    parser.add_argument("--without", default="", help=argparse.SUPPRESS)  # its tiles that are not tried, by name
    parser.add_argument("--again", action="store_true", help=argparse.SUPPRESS)  # on a machine that has compiled all
    options = parser.parse_args(arguments)
    if not options.dry and not torch.cuda.is_available():
        parser.error("no GPU is visible; --dry walks through on a CPU")
    device = torch.device("cpu") if options.dry else torch.device("cuda", torch.cuda.current_device())
    if options.compile or options.grouped:
        end_with_parent()
    if options.compile:
        part, parts = (int(number) for number in options.compile.split("/"))
        compile_part(device, part, parts)
        return 0
    if options.grouped:
        try:
            sizes = TRIAL_SIZES[:SMOKE_SIZES] if options.smoke else TRIAL_SIZES
            grouped(device, _Printed(), (options.grouped,), set(options.without.split(",")), sizes)
        except Exception as error:
            print(json.dumps({"trace": trace_of(error)}), flush=True)
            raise
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    path, known = options.out / "kernels.jsonl", environment(device, "kernels")
    earlier = rows_to_go_on_with(path, known)
    ended = {row["section"] for row in earlier if "section" in row}
    started = time.perf_counter()
    torch.manual_seed(20)
    verdicts: dict[str, bool | str] = {}
    trials: dict[str, Trial] = {}
    tiles.HOPPER = left_of_hopper(earlier)  # the tuner would hang where a trial did, or a run before
    toy = options.dry or options.smoke
    products = shapes(options.dry, options.smoke)
    measured = {row["product"] for row in earlier if "tuned_ratio" in row and not row.get("unfinished")}
    waiting = any(product.name not in measured for product in products)
    if not options.dry:
        # they fill the cache as well, which is gone with the machine that a run before was on
        if tiles.HOPPER and (HOPPER_SECTION not in ended or (waiting and not options.again)):
            off = _left_out() | {row["tile"] for row in earlier if "tile" in row}
            trials = {layout: _trial(layout, off, options.smoke) for layout in LAYOUTS}
        if not (options.again or options.smoke):
            jobs = options.jobs if not compiled.brought_along() else min(2, options.jobs)  # where there is little to do
            compile_ahead(jobs, 0.25 * options.seconds)
            print(f"compiled ahead in {time.perf_counter() - started:.0f} s", flush=True)
    print(json.dumps(known))
    failed = [row for row in earlier if "failed" in row]
    checks = {row["check"]: row for row in earlier if "check" in row}.values()  # the last of each
    table = Table({"check": "s", "error": ".1e", "limit": ".1e"}, path, {"bench": "right"} | known, [*checks, *failed])
    left: list[str] = []
    sections: dict[str, Callable[[], object]] = {
        "numerics": partial(numerics, device, table, toy, (torch.bfloat16, torch.float32)),
        "strategies": partial(strategies, device, table, toy),
        "rounds": partial(rounds, device, table, toy),
        "graphs": partial(graphs, device, table, 5 if toy else 50),
        "silence": partial(silence, device, table),
        "fp8": partial(fp8.right, device, table, toy),
        HOPPER_SECTION: partial(grouped, device, table)
        if options.dry
        else partial(tried, trials, started + 0.6 * options.seconds, table, options.smoke),
    }

    def check(name: str, call: Callable[[], object]) -> None:
        if name in table.failed or (name in ended and not (trials and name == HOPPER_SECTION)):
            print(f"{name}: has ended before", flush=True)
            return
        own = None if name == HOPPER_SECTION else SECTION_SECONDS  # that one ends its processes, and not this one
        with table.under_way(name), bounded(name, own, device):
            done = section(name, call, device, table, verdicts)
        if done:
            table.note(f"{name}: ended", section=name)
        else:
            left.append(name)

    for name, call in sections.items():
        check(name, call)
    for trial in trials.values():
        trial.kill()  # where the section had no turn
    unfinished = ""
    if HOPPER_SECTION in table.failed or HOPPER_SECTION in left:  # what has not been tried to its end may hang
        unfinished = HOPPER_SECTION if HOPPER_SECTION in left else ""  # its rows are measured again, by the next run
        tiles.HOPPER = ()
    latest = {row["check"]: row for row in table.rows}.values()
    tried_whole = (
        not options.dry and HOPPER_SECTION not in left and not any(HOPPER_SECTION in what for what in table.failed)
    )
    name = "the kernel for Hopper right in every trial"
    shown = [row for row in latest if any(config.name in row["check"] for config in HOPPER)]
    verdicts[name] = all(row["error"] < row["limit"] for row in shown) if tried_whole and shown else "not measured"

    tables = [table]

    def timed(
        name: str, bench: str, columns: dict[str, str], mark: str, kept: float, call: Callable[[Table, float], int]
    ) -> list[dict[str, Any]]:
        """Time what one bench lacks in what is left but ``kept`` seconds; its rows, which have ``mark`` in them."""
        rest = options.seconds - (time.perf_counter() - started)
        mine = Table(columns, path, {"bench": bench}, [*failed, *(row for row in earlier if mark in row)])
        tables.append(mine)
        counts: list[int] = []
        timing = partial(call, mine, max(0.4 * rest, rest - kept))
        if not section(name, lambda: counts.append(timing()), device, table, verdicts):
            left.append(name)
        elif counts[0]:
            left.append(f"{counts[0]} of {name}")
        return mine.rows

    # products take all that there is, and what comes behind them has goals too
    rows = timed("gemm", "gemm", gemm.COLUMNS, "tuned_ratio", OVERLAP_SECONDS + FP8_SECONDS, lambda mine, seconds: (
        gemm.measure(products, device, mine, 7, TRIED, seconds, CASE_SECONDS, unfinished)
    ))  # fmt: skip
    verdicts |= judge.speed(rows, gpt_shapes(), devices.target_of(device).units)
    fp8_shapes = [(64, 48, 32)] if options.dry else list(fp8.SHAPES[: 1 if options.smoke else None])
    rows = timed("fp8's times", "fp8", fp8.COLUMNS, "scaling", OVERLAP_SECONDS, lambda mine, seconds: (
        fp8.measure(fp8_shapes, device, mine, 7, seconds, CASE_SECONDS)
    ))  # fmt: skip
    verdicts |= judge.fp8([] if options.dry else rows, SCALINGS)
    widths = [(32, 32, 32)] if options.dry else [(1024, 1024, 1024)] if options.smoke else OVERLAP_SHAPES
    shares, counts = [0.4] if options.smoke else [0.2, 0.4, 0.8], [2, 4] if options.dry else [4, 8]
    dtype = torch.float32 if options.dry else torch.bfloat16

    def hides(mine: Table, seconds: float) -> int:
        groups = right_at_flags(table.rows) and not any(what.endswith(AT_FLAGS) for what in table.failed)
        asked = argparse.Namespace(size=4, rounds=3 if toy else 9, seconds=seconds, groups=groups)
        return overlap.measure(widths, shares, counts, dtype, device, mine, asked, each=CASE_SECONDS)

    rows = timed("overlap", "overlap", overlap.COLUMNS, "asked_share", 0.0, hides)
    verdicts |= judge.overlap([] if options.dry else rows, overlap.OPERATIONS, OVERLAP_SHAPES)
    last = "numerics in fp16"  # as bf16's but for a type
    if options.seconds - (time.perf_counter() - started) > LATE_SECONDS:
        check(last, partial(numerics, device, table, toy, (torch.float16,)))
    else:
        left.append(last)
    latest = {row["check"]: row for row in table.rows}.values()
    wrong = left or any(what.split(": ")[0] in {*sections, last} for what in table.failed)
    verdicts["all results right"] = not wrong and all(row["error"] < row["limit"] for row in latest)
    verdicts |= {told: False for one in tables for told in one.failed.values()}
    verdicts["seconds"] = f"{time.perf_counter() - started:.0f}"
    if options.dry:
        verdicts["dry run"] = "on a CPU: times mean nothing"
    if left:
        table.note(f"left out: {', '.join(left)}; the same command goes on", **{LEFT_OUT: left})
    return table.judge(verdicts)


def section(
    name: str, call: Callable[[], object], device: torch.device, table: Table, verdicts: dict[str, bool | str]
) -> bool:
    """Run one section; returns whether it came to its end. What it raises is a verdict, and leaves the other sections
    their turn.

    One after which the device does nothing more is a failure in the table, so that it is not tried again. That its time
    was over is neither.
    """
    if not works(device):
        print(f"{name}: left out, the device has stopped working", flush=True)
        return False
    try:
        call()
    except OutOfTimeError as error:
        table.note(f"{name}: not ended: {error}")
        return False
    except Exception as error:
        if works(device):
            verdicts[told := f"{name} ended early: {in_a_line(error)}"] = False
            table.trace(told, error)
        else:
            table.fail(name, error)
        return False
    return True


def _command(*arguments: str) -> list[str]:
    """This bench, for another process."""
    return [sys.executable, "-m", __spec__.name if __spec__ else "bench.kernels", *arguments]


def _left_out() -> set[str]:
    return {config.name for config in HOPPER} - {config.name for config in tiles.HOPPER}


def _trial(layout: str, without: Iterable[str], smoke: bool = False) -> Trial:
    shorter = ["--smoke"] if smoke else []
    return Trial(_command("--grouped", layout, "--without", ",".join(without), *shorter))


def compile_ahead(jobs: int, seconds: float) -> None:
    """Fill Triton's cache with what the sections launch (lib/launches.py), from several processes; one that fails or is
    late only leaves compiling to the sections."""
    until = time.perf_counter() + seconds
    workers = [Trial(_command("--compile", f"{part}/{jobs}"), rows=False) for part in range(jobs)]
    for part, worker in enumerate(workers):
        try:
            became = worker.wait(until)
        except OutOfTimeError:
            became = f"not ready after {seconds:.0f} s"
        if became:
            print(f"compiling, part {part}: {became}", flush=True)


def compile_part(device: torch.device, part: int, parts: int) -> None:
    """Launch every ``parts``-th of what the sections launch, once, the longest compilations first."""
    every = launches(device, shapes(False), fp16=False)
    for one in sorted(every, key=lambda one: -one.weight)[part::parts]:
        try:
            one.call()
        except Exception:  # the section itself will say what is wrong, where it has its turn
            traceback.print_exc()
    torch.cuda.synchronize()


class _Printed:
    """Takes a table's rows, and prints them as JSON lines."""

    failed: ClassVar[dict[str, str]] = {}

    def add(self, **row: object) -> None:
        print(json.dumps(row), flush=True)

    def begins(self, what: str, **values: object) -> None:
        self.add(begins=what, **values)


def tried(trials: dict[str, Trial], until: float, table: Table, smoke: bool = False) -> None:
    """The rows of ``grouped``, one process a layout.

    A tile in which one hangs or dies has failed, and what is behind it is tried in another process. Where it is not
    known, the kernel has failed, and nothing else.

    Raises:
        OutOfTimeError: ``until`` has come before the end of the last one. What was found stands.
    """
    off: set[str] = set()
    try:
        for layout in trials:
            while what := _became_of(trials[layout], layout, until, table):
                became, tile, traces = what
                error = (RuntimeError if became.startswith("ended") else TimeoutError)(f"{layout} {became}{traces}")
                if tile is None:
                    raise error
                tiles.HOPPER = tuple(config for config in tiles.HOPPER if config.name != tile)
                off |= {tile, *_left_out()}
                table.fail(f"{HOPPER_SECTION}: {tile}", error, tile=tile)
                if time.perf_counter() > until:
                    raise OutOfTimeError(f"no time was left to try {layout} behind {tile}")
                trials[layout] = _trial(layout, off, smoke)
    except OutOfTimeError:
        raise
    except (TimeoutError, RuntimeError) as error:
        table.fail(HOPPER_SECTION, error)
    finally:
        for trial in trials.values():
            trial.kill()


def _became_of(trial: Trial, layout: str, until: float, table: Table) -> tuple[str, str | None, str] | None:
    """Wait for a trial's end; its rows go into the table. None: nothing is wrong. Else what became of it, the tile that
    it was in where that is known, and the tracebacks that it printed.

    Raises:
        OutOfTimeError: No time was left; it says which layout, and where it was.
    """
    late = ""
    try:
        became = trial.wait(until, QUIET)
    except OutOfTimeError as error:
        became = late = f"{layout}: {error}"
    rows, last = trial.said()
    for row in rows:
        if "check" in row:
            table.add(**row)
    within = f", in {last['begins']}" if last else ""
    if late:
        raise OutOfTimeError(late + within)
    traces = "".join(f"\n{row['trace']}" for row in rows if "trace" in row)
    return (became + within, last.get("tile"), traces) if became else None


def left_of_hopper(earlier: list[dict[str, Any]]) -> tuple[Config, ...]:
    """The tiles of the kernel for Hopper that a run may use which goes on: none after one hung where that is not known.

    A product is such a place, unless it was looking at one candidate when it was cut off (``Tuner``'s ``progress``).
    """
    off: set[str] = set()
    for row in earlier:
        if row.get("failed") == HOPPER_SECTION:
            return ()
        if "tile" in row:
            off.add(row["tile"])
        elif "cut_off" in row and row["failed"].split(" ")[0] in LAYOUTS:
            _, _, candidate = row["cut_off"].partition(": ")
            if candidate.split(" ")[0] not in LAYOUTS:
                return ()
            off.update(config.name for config in HOPPER if candidate.endswith(config.name))
    return tuple(config for config in HOPPER if config.name not in off)


def grouped(
    device: torch.device,
    table: Any,
    layouts: tuple[str, ...] = LAYOUTS,
    without: Iterable[str] = (),
    sizes: Iterable[tuple[int, int, int]] = TRIAL_SIZES,
) -> None:
    """The kernel for Hopper as the tuner looks at it before it may be chosen: sizes with and without borders.

    Raises:
        RuntimeError: The device has stopped working, so that what comes next would fail as well.
    """
    target = devices.target_of(device)
    for layout in layouts:
        trust = Trust(partial(runner, stored=layout))
        for m, n, k in sizes:
            product = Product(layout, m, n, k, torch.bfloat16)
            for config in HOPPER:
                if config.name in without or not config.fits(target, product.dtype):
                    continue
                name = f"{product.name} {config.name}"
                table.begins(name, tile=config.name)
                complaint = trust.complaint(Choice("triton", layout, config), product, device)
                table.add(check=f"{name}: {complaint}" if complaint else name, error=float(bool(complaint)), limit=0.5)
                if trust.error is not None:
                    print(trace_of(trust.error), file=sys.stderr, flush=True)
                    trust.error = None
                if complaint and not works(device):
                    raise RuntimeError(f"the device has stopped working in {name}: {complaint}")
        if target.hopper:
            met(device, table, layout, without)


def met(device: torch.device, table: Any, layout: str, without: Iterable[str]) -> None:
    """The kernel for Hopper where it meets a stream at flags, in chunks, against the serial way; and ten times without
    a wait between, which must give the same bits. What fails takes nothing from the plain product in that tile.

    Raises:
        RuntimeError: The device has stopped working.
    """
    (m, n, k), chunks, size = MEETING_SIZES, MEETING_CHUNKS, 4
    comm = SimulatedCommunicator(size, 1e10, device, timeout=FLAG_SECONDS)
    for collective in [each for each, stored in MEETINGS if stored == layout]:
        operation = {"all_gather": "all_gather_matmul"}.get(collective, f"matmul_{collective}")
        rows = n // size if collective == "all_gather" else n
        stored = ((k, m), (k, n)) if layout == "TN" else ((m, k), (rows, k))
        a, b = (torch.randn(each, device=device).to(torch.bfloat16) for each in stored)
        expected = overlap._call(operation, a, b, comm, layout, FusedPlan())()
        for config in HOPPER:
            tile = f"{config.name}{AT_FLAGS}"
            if {config.name, tile} & {*without}:
                continue
            name = f"{operation} signal/{chunks} {config.name}"
            table.begins(name, tile=tile)
            try:
                call = overlap._call(operation, a, b, comm, layout, FusedPlan("signal", chunks, config))
                got = call()
                comm.check()
                unlike = sum(not torch.equal(got, again) for again in [call() for _ in range(10)])
                comm.check()
                table.add(check=name, error=relative_error(got, expected) + unlike, limit=4e-3)
            except Exception as error:
                comm.abandon()
                table.add(check=f"{name}: {in_a_line(error)}", error=1.0, limit=0.5)
                if not works(device):
                    raise RuntimeError(f"the device has stopped working in {name}") from error


def right_at_flags(rows: Iterable[dict[str, Any]]) -> bool:
    """Whether what :func:`met` has found of the first tile, which is timed then, is right, and anything was."""
    name = f" {tiles.HOPPER[0].name}" if tiles.HOPPER else None
    mine = [row for row in rows if name and " signal/" in row.get("check", "") and name in row["check"]]
    return bool(mine) and all(row["error"] < row["limit"] for row in mine)


def strategies(device: torch.device, table: Any, dry: bool) -> None:
    """Split and signal against serial, all operations, chunk counts 1, 2, 4 and 7."""
    m, n, k = (56, 56, 24) if dry else (1792, 3584, 1024)
    comm = SimulatedCommunicator(4, 1e10, device, timeout=FLAG_SECONDS)
    dtype = torch.float32 if dry else torch.bfloat16
    for operation in overlap.OPERATIONS:
        layout = "TN" if operation == "matmul_reduce_scatter" else "NT"
        a = torch.randn((k, m) if layout == "TN" else (m, k), device=device).to(dtype)
        b = torch.randn((k, n) if layout == "TN" else (n, k), device=device).to(dtype)
        expected = overlap._call(operation, a, b, comm, layout, FusedPlan())()
        for strategy in ("split", "signal"):
            for chunks in (1, 2, 4, 7):
                name = f"{operation} {strategy}/{chunks}"
                call = overlap._call(operation, a, b, comm, layout, FusedPlan(strategy, chunks))
                case(
                    f"strategies: {name}",
                    partial(_strategy, name, call, strategy, expected, comm, table),
                    device,
                    table,
                )


def _strategy(
    name: str,
    call: Callable[[], torch.Tensor],
    strategy: str,
    expected: torch.Tensor,
    comm: SimulatedCommunicator,
    table: Any,
) -> None:
    got = call()
    comm.check()  # here, since what waits in vain is to be named
    assert comm.ran[-1].strategy == strategy
    table.add(check=name, error=relative_error(got, expected), limit=4e-3)


def rounds(device: torch.device, table: Any, dry: bool, often: int = 500) -> None:
    """Signalled operations back to back without a synchronize between; whole numbers, so equality is exact."""
    comm = SimulatedCommunicator(2, 1e11, device, timeout=FLAG_SECONDS)
    generator = torch.Generator(device).manual_seed(3)
    wrong = torch.zeros((), device=device)
    dtype, count = (torch.float32, 10) if dry else (torch.bfloat16, often)
    m, n, k = (16, 32, 16) if dry else (256, 512, 64)
    for number in range(count):
        x = torch.randint(-2, 3, (m, k), generator=generator, device=device).to(dtype)
        w = torch.randint(-2, 3, (n, k), generator=generator, device=device).to(dtype)
        out, _full = run_all_gather(x, w, comm, "NT", "b", FusedPlan("signal", 3), keep=False)
        expected = (x.float() @ w.float().T).to(dtype)
        wrong += (out != expected.repeat(1, 2)).any()
        wrong += (run_reduce_scatter(w, x, comm, "NT", FusedPlan("signal", 4)) != 2 * expected.T[: n // 2]).any()
        total, finish = start_all_reduce(x, w, comm, "NT", FusedPlan("signal", 2))
        finish()
        wrong += (total != 2 * expected).any()
        if number == 0:
            comm.check()  # before hundreds more have been put behind what waits
    comm.check()
    table.add(check=f"{3 * count} signalled operations back to back", error=float(wrong), limit=0.5)


def graphs(device: torch.device, table: Any, often: int = 50) -> None:
    """A captured graph of split, and of signalled, operations, replayed: whole numbers, so equality is exact."""
    if device.type != "cuda":
        return
    comm = SimulatedCommunicator(2, 1e11, device, timeout=FLAG_SECONDS)
    generator = torch.Generator(device).manual_seed(5)

    def draw(rows: int) -> torch.Tensor:
        return torch.randint(-2, 3, (rows, 64), generator=generator, device=device).to(torch.bfloat16)

    for strategy in ("split", "signal"):
        case(f"graphs: {strategy}", partial(_graph, strategy, comm, draw, table, often), device, table)


def _graph(
    strategy: str, comm: SimulatedCommunicator, draw: Callable[[int], torch.Tensor], table: Any, often: int
) -> None:
    way, x, w = FusedPlan(strategy, 2), draw(256), draw(512)
    wrong = torch.zeros((), device=x.device)

    def operations() -> list[torch.Tensor]:
        gathered = run_all_gather(x, w, comm, "NT", "b", way, keep=False)[0]
        scattered = run_reduce_scatter(w, x, comm, "NT", way)
        total, finish = start_all_reduce(x, w, comm, "NT", way)
        finish()
        return [gathered, scattered, total]

    operations()  # makes flags and buffers, and compiles
    comm.check()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = operations()
    graph.replay()
    comm.check()  # before many more have been put behind what waits
    for _ in range(often):
        x.copy_(draw(256))
        graph.replay()
        exact = (x.float() @ w.float().T).to(x.dtype)
        for got, expected in zip(results, (exact.repeat(1, 2), 2 * exact.T[:256], 2 * exact), strict=True):
            wrong += (got != expected).any()
    comm.check()
    table.add(check=f"{often} replays of a graph of {strategy} operations", error=float(wrong), limit=0.5)


def silence(device: torch.device, table: Table) -> None:
    """A flag that nobody sets is reported within the bound, and the rows that needed it are NaN."""
    if not devices.runs_triton(device):
        return
    comm = SimulatedCommunicator(2, 1e11, device, timeout=0.2)
    order = chunk_order("all_gather", 256, 2, 0, 2, 128)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    product = Product("NT", 128, 512, 64, dtype)
    workspace = comm.workspaces.get("silence", order, product, device)
    workspace.advance()
    workspace.write_on_host(0)
    x, w = (torch.ones((rows, 64), device=device, dtype=dtype) for rows in (128, 512))
    out = torch.zeros((128, 512), device=device, dtype=dtype)
    SegmentedProduct(product, workspace, comm).launch(x, w, out, along_n=True)
    try:
        comm.check()
        told = False
    except SignalTimeout as error:
        told = "chunk 1" in str(error) and "epoch 1" in str(error)
    poisoned = bool(out[:, 384:].isnan().all()) and bool(out[:, :384].isfinite().all())
    table.add(check="a flag that is never set", error=0.0 if told and poisoned else 1.0, limit=0.5)


def gpt_shapes() -> list[Product]:
    """Layers of two of the papers' models, whole, and two of the largest as one real grid cuts them."""
    cut = layers("gpt-320b", (4, 2, 1), 2048)[:2]
    whole = [layer for model in ("gpt-20b", "gpt-80b") for layer in layers(model, (1, 1, 1), 4096)]
    return [product for layer in [*whole, *cut] for product in layer.products(torch.bfloat16).values()]


def shapes(dry: bool, smoke: bool = False) -> list[Product]:
    """What says most first, since time may end: square sizes that are known of every library, then the GPT shapes of
    the verdict, all kinds of one hidden size and then the next.
    """
    if dry:
        return [Product(layout, 64, 48, 32, torch.float32) for layout in LAYOUTS]
    if smoke:
        return [Product(layout, 1024, 1024, 1024, torch.bfloat16) for layout in LAYOUTS]
    squares = [Product(layout, n, n, n, torch.bfloat16) for n in (8192, 4096) for layout in LAYOUTS]
    return list(dict.fromkeys([*squares, *gpt_shapes()]))


if __name__ == "__main__":
    raise SystemExit(main())
