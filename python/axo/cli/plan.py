"""``axo plan``, ``axo simulate``, ``axo reproduce`` and ``axo profile``: what ``axo.perf`` computes, printed."""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from axo import files
from axo.cli.output import check_file, is_stdout, say, show_table, write
from axo.grid import Grid

if TYPE_CHECKING:
    from axo.perf import planner
    from axo.perf.output import Shown
    from axo.perf.planner import Candidate

MOST_TOKENS = 1e18
ALONE = ("axonn",)

JsonOut = Annotated[Path | None, typer.Option("--json", help="Write JSON here; - for stdout.")]
Model = Annotated[str, typer.Option(help="gpt-5b ... gpt-640b, unet-250m ... unet-4b, a LitGPT name, or a file.")]


@dataclass(frozen=True)
class Asked:
    """The options that ``axo plan`` and ``axo simulate`` share."""

    model: Model = ""
    machine: Annotated[str, typer.Option(help="A known machine, or a file; default: machine.yaml (axo profile).")] = ""
    batch_tokens: Annotated[str, typer.Option(help="Tokens of one step, all ranks: 16.8M, 4M, 524288.")] = "16.8M"
    seq: Annotated[int | None, typer.Option(help="Tokens of one sample; default 2048.")] = None
    overlap: Annotated[str, typer.Option(help="Which overlaps are on: oar,ors,oag or none.")] = "oar,ors,oag"
    gather: Annotated[str, typer.Option(help="Gathered weights: keep, drop, or auto (keep what fits).")] = "auto"
    checkpoint: Annotated[bool, typer.Option("--checkpoint/--no-checkpoint", help="Run blocks again in backward.")] = (
        True
    )
    zero: Annotated[int, typer.Option(help="ZeRO over data: 1 cuts optimizer state, 2 gradients too.")] = 0
    micro_batches: Annotated[int, typer.Option(help="Pieces of a rank's rows; 0: as few as fit.")] = 0
    network: Annotated[
        float, typer.Option(help="Gb/s of a node's NICs together, instead of the machine's: 400, 3200.")
    ] = 0.0
    recompute_keeps: Annotated[
        str, typer.Option(help="What recomputation keeps: nothing, or products (and attention).")
    ] = "nothing"
    offload: Annotated[str, typer.Option(help="In the host's memory: none, or optimizer (AdamW's state).")] = "none"
    sequence_parallel: Annotated[
        bool, typer.Option("--sequence-parallel", help="Split the residual stream's tokens over x.")
    ] = False
    optimizer: Annotated[str, typer.Option(help="adamw, or muon (axo.optim.Muon).")] = "adamw"
    chunked_loss: Annotated[
        bool | None, typer.Option(help="No logits at a time but a chunk's; default: as axo train, which has them.")
    ] = None
    pipeline: Annotated[
        str, typer.Option(help="Stages, each a grid: 1, 4; plan tries 1,2,4, or auto: every power of two that divides.")
    ] = "1"
    schedule: Annotated[str, typer.Option(help="Of stages: gpipe, 1f1b, ..., dualpipev; commas between several.")] = ""

    def request(self, gpus: int, **more: Any) -> planner.Request:
        """What is to be planned; ``more``: fields of the request."""
        from axo.perf import machine, planner, readers

        overlaps = (part.strip() for part in self.overlap.split(",") if part.strip() not in ("", "none"))
        on = machine.load(self.machine or machine.measured_here())
        on = on.with_network(self.network) if self.network else on
        workload = readers.read(self.model, seq_length=self.seq)
        if self.recompute_keeps not in ("nothing", "products"):
            raise ValueError(f"recompute-keeps={self.recompute_keeps!r} is not one of nothing, products")
        if self.offload not in ("none", "optimizer"):
            raise ValueError(f"offload={self.offload!r} is not planned; use none, or optimizer")
        recompute = "selective" if self.recompute_keeps == "products" else "full" if self.checkpoint else "none"
        if recompute == "selective" and not (self.checkpoint and workload.stacked):
            raise ValueError("plan: selective says what recomputation keeps; leave blocks checkpointed")
        schedules = tuple(part.strip() for part in self.schedule.split(",")) if self.schedule else ("1f1b",)
        could = bool(workload.trained_as) and not self.sequence_parallel and more.get("algorithms", ALONE) == ALONE
        chunked = could if self.chunked_loss is None else self.chunked_loss
        if not self.schedule and more.get("search"):
            schedules = planner.SEARCHED
        return planner.Request(
            workload, on.of_nodes(gpus) if gpus > 0 else on, gpus, tokens_of(self.batch_tokens, batch=True),
            overlap=frozenset(overlaps), gather=self.gather, zero=self.zero, micro_batches=self.micro_batches,
            recompute=recompute, offload=self.offload == "optimizer", sequence_parallel=self.sequence_parallel,
            optimizer=self.optimizer, chunked_loss=chunked,
            pipeline=_counts(self.pipeline, gpus), schedules=schedules, **more,
        )  # fmt: skip


def _show(*parts: Shown) -> None:
    """Print sentences and tables (title, table); what is empty is left out."""
    for part in parts:
        if isinstance(part, tuple):
            show_table(*part)
        elif part:
            say(part)


def _give(json_out: Path | None, parts: list[Shown], values: Callable[[], Any]) -> None:
    """Print a result, unless its JSON goes to stdout, and write that where it was asked for."""
    if not is_stdout(json_out):
        _show(*parts)
    if json_out is not None:
        write(json_out, values())


def _asks(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of ``Asked`` in the place of its first argument."""
    signature, options = inspect.signature(command, eval_str=True), inspect.signature(Asked, eval_str=True).parameters

    @functools.wraps(command)
    def called(**given: Any) -> None:
        command(Asked(**{name: given.pop(name) for name in options}), **given)

    every = [*options.values(), *list(signature.parameters.values())[1:]]
    by_name = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in every]
    called.__signature__ = signature.replace(parameters=by_name)  # type: ignore[attr-defined]
    return called


@_asks
def plan(
    asked: Asked,
    gpus: Annotated[int, typer.Option(help="Number of GPUs (GCDs on frontier).")] = 0,
    tokens: Annotated[str, typer.Option(help="Tokens of the whole training, for the days: 2T.")] = "0",
    top: Annotated[int, typer.Option(help="Rows to print.")] = 10,
    precision: Annotated[str, typer.Option(help="bf16-mixed or bf16-true.")] = "bf16-mixed",
    search: Annotated[
        bool, typer.Option("--search", help="Search recomputation, ZeRO, micro-batches, sequence parallelism, offload.")
    ] = False,
    gpu_hour: Annotated[float, typer.Option(help="Price of a GPU hour, for the cost of --tokens.")] = 0.0,
    algorithm: Annotated[
        str, typer.Option(help="axonn, tesseract (where x = y), or all: both in one ranking.")
    ] = "axonn",
    context: Annotated[
        int, typer.Option(help="Neighbours along z that share sequences; 0: as few as the batch needs.")
    ] = 1,
    experts: Annotated[
        int, typer.Option(help="Neighbours along z that hold other experts each; 0: as many as are fastest.")
    ] = 1,
    explain: Annotated[str | None, typer.Option(help="Show one grid in detail: 2x2x2x1.")] = None,
    compare: Annotated[
        list[Path] | None, typer.Option(help="Compare plans that --json wrote; repeat for each file.")
    ] = None,
    json_out: JsonOut = None,
) -> None:
    """Rank every grid of a number of GPUs by predicted step time."""
    from axo.perf import output, planner

    if compare:
        if asked.model or gpus:
            raise ValueError("--compare reads plans that --json wrote, and plans nothing; leave --model and --gpus out")
        return _show(*output.compared([(str(path), _plan_file(path)) for path in compare]))
    if not asked.model or not gpus:
        raise ValueError("name what is to be planned: --model NAME --gpus N (and --machine NAME)")
    if top < 1:
        raise ValueError(f"top={top} is not at least 1")
    if not 0 <= gpu_hour < float("inf"):
        raise ValueError(f"gpu-hour={gpu_hour} is not a price of at least 0")
    if gpu_hour and tokens == "0":
        raise ValueError("gpu-hour gives the cost of a whole training; say how many --tokens that has")
    check_file(json_out)
    if algorithm != "all" and algorithm not in planner.ALGORITHMS:
        raise ValueError(f"algorithm={algorithm!r} is not known; use {', '.join(planner.ALGORITHMS)} or all")
    request = asked.request(
        gpus, tokens=float(tokens_of(tokens, batch=False)), precision=precision, search=search,
        algorithms=planner.ALGORITHMS if algorithm == "all" else (algorithm,), context=context, experts=experts,
    )  # fmt: skip
    wanted = None if explain is None else _grid(explain, gpus)
    ranking = planner.plan(request)
    chosen = None if wanted is None else _explained(ranking, wanted)
    details = _details(ranking, chosen) if chosen is not None else []
    values = functools.partial(output.plan_json, ranking, gpu_hour=gpu_hour)
    _give(json_out, [*_summary(ranking, top, gpu_hour), *details], values)


def _summary(ranking: planner.GridPlan, top: int, gpu_hour: float) -> list[Shown]:
    """What is printed of every plan."""
    from axo.perf import output, planner

    asked, on, shown = ranking.request, ranking.request.machine, ranking.ranked[:top]
    nodes, a_node = on.nodes(asked.gpus)
    described = f"{on.description}; " if on.description else ""
    network = f"--network {on.network:g} Gb/s a node; " if on.network else ""
    assumed = ", ".join(f"{name} {getattr(on, name):g}" for name in on.assumed)
    alternatives = planner.others(ranking)
    explained = [one for one in alternatives if one.candidate.time is not None and one.kind in planner.EXPLAINED]
    return [
        f"{asked.workload.name}: {output.tokens_text(asked.workload.parameters)} parameters;"
        f" {asked.batch_tokens:,} tokens a batch ({asked.sequences:,} sequences of {asked.workload.seq_length})",
        f"{on.name}: {described}{network}calibrated on"
        f" {', '.join(on.calibrated_on) or 'nothing (axo profile measures)'}",
        f"  {asked.gpus} GPUs are {nodes} nodes of {a_node}" if nodes > 1 else "",
        f"  not in its file, so assumed: {assumed}" if assumed else "",
        (
            f"{len(shown)} of {len(ranking.ranked)} grids that fit; {len(ranking.left_out)} do not",
            output.plan_table(ranking, top),
        ),
        ranking.decision(),
        _cost(ranking, gpu_hour) if asked.tokens else "",
        f"offload: {on.host_link_gbs:g} GB/s between a GPU and its host, {on.host_memory_gbs:g} GB/s of the host's"
        " memory a GPU" if any(one.run.offload for one in shown) else "",
        ranking.forced(),
        output.exchanges(ranking),
        "what runs each row:",
        *(f"  {line}" for line in output.commands(ranking, top)),
        *(f"  {word}: {meaning}" for word, meaning in output.placeholders(ranking, top).items()),
        ranking.why(ranking.best),
        *(ranking.why(one.candidate) for one in explained),
        *([("The best of each other choice", output.others_table(alternatives, ranking.best))] if alternatives else []),
    ]  # fmt: skip


def _details(ranking: planner.GridPlan, chosen: Candidate) -> list[Shown]:
    """What is printed of one grid."""
    from axo.perf import output

    parts: list[Shown] = ["\n" + ranking.why(chosen)]
    if chosen.time is not None:
        parts.append((f"traffic of {chosen.grid}", output.traffic_table(ranking, chosen)))
    if chosen.memory is not None:
        parts.append((f"memory of {chosen.grid}", output.memory_table(chosen.memory)))
    return parts


def _cost(ranking: planner.GridPlan, gpu_hour: float) -> str:
    from axo.perf.output import tokens_text
    from axo.perf.planner import INTERVAL

    asked, best, (low, high) = ranking.request, ranking.best, INTERVAL
    days, hours, energy = (count(best) for count in (ranking.days, ranking.gpu_hours, ranking.megawatt_hours))
    price = gpu_hour * hours
    text = f"{tokens_text(asked.tokens)} tokens on {best.name}: {days:.1f} days"
    text += f" ({low * days:.1f} to {high * days:.1f}), {hours:,.0f} GPU hours"
    if gpu_hour:
        text += f", ${price:,.0f} (${low * price:,.0f} to ${high * price:,.0f}) at ${gpu_hour:g} a GPU hour"
    return text + (f", {energy:,.0f} MWh at {asked.machine.watts:g} W a GPU" if energy else "")


Simulated = tuple[list["Shown"], dict[str, Any], Callable[[], bytes]]  # printed, as JSON, and what draws it


@_asks
def simulate(
    asked: Asked,
    grid: Annotated[str, typer.Option(help="XxYxZxDATA, such as 2x2x128x16.")],
    trace: Annotated[Path | None, typer.Option(help="Write a Chrome trace here (opens in Perfetto).")] = None,
    json_out: JsonOut = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the step here (PNG).")] = None,
) -> None:
    """Run one training step on one grid as the engine does it, without peers, or of its stages, against the clock."""
    from axo.perf import planner

    for path in (json_out, trace, plot):
        check_file(path)
    if not asked.model:
        raise ValueError("name what is to be simulated: --model NAME --machine NAME")
    if not asked.pipeline.isdecimal():
        raise ValueError(f"pipeline={asked.pipeline!r} is not a number of stages; use 4")
    parsed, stages = Grid.parse(grid), int(asked.pipeline)
    request = asked.request(parsed.world_size * max(1, stages))
    if stages > 1 and trace is not None:
        raise ValueError("--trace is of one grid; leave it out with --pipeline")
    candidate = planner.consider(request, parsed, stages)
    if candidate.reason:
        raise ValueError(
            f"{request.workload.name} cannot run on grid {parsed} of {request.machine.name}: {candidate.reason};"
            f" axo plan --gpus {request.gpus} ranks the grids that can"
        )
    ranking = planner.GridPlan(request, [candidate])
    parts, values, draw = _simulated_grid(ranking, trace) if candidate.stages is None else _simulated_stages(ranking)
    _give(json_out, parts, lambda: values)
    if plot is not None:
        write(plot, draw())


def _simulated_grid(ranking: planner.GridPlan, trace: Path | None) -> Simulated:
    """Run a step of the one candidate of a plan against the clock."""
    from axo.dryrun import simulate as engine
    from axo.perf import chrome_trace, output, plots

    asked, one = ranking.request, ranking.best
    assert one.memory is not None
    step = engine.simulate(asked.workload, one.grid, asked.machine, one.run)
    percent, peak = ranking.percent_of_peak(one, seconds=step.seconds), one.memory.total
    if trace is not None:
        chrome_trace.write(trace, step.spans, [0])
    values = {
        "grid": str(one.grid),
        "seconds": step.seconds,
        "hfu_percent": percent,
        "exposed_s": step.exposed,
        "busy_s": step.busy,
        "peak_memory_bytes": peak,
        "closed_form_s": one.seconds,
    }
    title = f"{asked.workload.name} on {one.grid} ({asked.gpus} GPUs of {asked.machine.name})"
    parts: list[Shown] = [
        (title, output.simulation_table(step)),
        f"one step {step.seconds:.3f} s, {percent:.1f}% of peak (HFU), at most {peak / 2**30:.1f} GiB a GPU;"
        f" the closed form says {one.seconds:.3f} s",
        f"recorded {step.micro_batches} of {one.run.micro_batches} micro-batches; the rest repeat the last"
        if step.micro_batches < one.run.micro_batches else "",
        f"trace: {trace} (open it in ui.perfetto.dev)" if trace is not None else "",
    ]  # fmt: skip
    return parts, values, lambda: plots.timeline(step.spans, title)


def _simulated_stages(ranking: planner.GridPlan) -> Simulated:
    """Run the stages of the one candidate of a plan against the clock."""
    from axo.perf import output, plots
    from axo.perf.stages import StageTimes

    asked, one, stages = ranking.request, ranking.best, ranking.best.stages
    assert stages is not None and one.memory is not None
    timing = StageTimes(asked.workload, one.grid, asked.machine, one.run)
    timeline = timing.simulate(stages)
    in_flight = timeline.held([1 / (stages.count / stages.ranks)] * stages.count)
    step, peak = one.seconds - timing.estimate(stages) + timeline.seconds, one.memory.total
    values = {
        "grid": str(one.grid),
        "pipeline": stages.ranks,
        "schedule": stages.schedule,
        "cuts": list(stages.bounds[1:-1]),
        "micro_batches": one.run.micro_batches,
        "seconds": step,
        "pipeline_s": timeline.seconds,
        "bubble": timeline.bubble,
        "busy_s": timeline.busy,
        "in_flight": in_flight,
        "peak_memory_bytes": peak,
        "closed_form_s": one.seconds,
    }
    title = f"{asked.workload.name} on {one.name}, {one.run.micro_batches} micro-batches"
    blocks = [sum(stages.bounds[stage + 1] - stages.bounds[stage] for stage in stages.of(rank))
              for rank in range(stages.ranks)]  # fmt: skip
    rows = [[str(rank), str(blocks[rank]), f"{busy:.3f}", f"{timeline.seconds - busy:.3f}", f"{in_flight[rank]:g}"]
            for rank, busy in enumerate(timeline.busy)]  # fmt: skip
    parts: list[Shown] = [
        (title, (["rank", "blocks", "busy s", "waits s", "micro-batches held"], rows)),
        f"stages of {output.cuts_text(stages)} blocks; bubble {100 * timeline.bubble:.1f}% of the pipeline's"
        f" {timeline.seconds:.3f} s; one step {step:.3f} s, at most {peak / 2**30:.1f} GiB a GPU;"
        f" the closed form says {one.seconds:.3f} s",
    ]
    return parts, values, lambda: plots.pipeline_timeline(timeline, title)


def reproduce(
    what: Annotated[str, typer.Argument(help="papers")] = "papers",
    check_fit: Annotated[bool, typer.Option("--fit/--no-fit", help="Fit the machines' fractions again.")] = True,
    json_out: JsonOut = None,
) -> None:
    """Print the papers' numbers beside the model's, with the error, and what it cannot predict."""
    from axo_bench.papers import report
    from axo_bench.papers import reproduce as papers
    from axo_bench.papers.lines import summaries

    if what != "papers":
        raise ValueError(f"{what!r} is not known; use papers")
    check_file(json_out)
    groups, notes = list(papers.groups()), papers.calibration_notes(check_fit)
    summary = summaries(groups)
    texts = {
        "How it was calibrated": notes,
        "What cannot be predicted": papers.CANNOT,
        "Where the papers contradict": papers.CONTRADICTIONS,
    }
    parts = list[Shown]()
    for group in groups:
        parts += [(group.title, report.group_table(group)), f"  {group.note}\n" if group.note else ""]
    parts += [("All rows", report.rows_table(groups)), ("All groups", report.summary_table(summary))]
    for heading, lines in texts.items():
        parts += [f"\n{heading}", *(f"  - {line}" for line in lines)]
    values = {
        "groups": [report.group_json(group) for group in groups],
        "summary": [asdict(one) for one in summary],
        "calibration": list(notes),
        "cannot": list(papers.CANNOT),
        "contradictions": list(papers.CONTRADICTIONS),
    }
    _give(json_out, parts, lambda: values)


def profile(
    ranks: Annotated[int, typer.Option(help="Local ranks; under torchrun its world counts.")] = 2,
    out: Annotated[Path, typer.Option(help="The machine file to write.")] = Path("machine.yaml"),
    model: Model = "pythia-14m",
    rows: Annotated[int, typer.Option(help="Rows of the products before z shards them.")] = 2048,
    message: Annotated[str, typer.Option(help="Bytes of the large message: 64M.")] = "64M",
    repeats: Annotated[int, typer.Option(help="Repeats of every measurement; the best counts.")] = 5,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
) -> None:
    """Measure this machine's collectives and products, and write a machine file for axo plan."""
    from axo import launch
    from axo.comm.device_choice import check_device

    size = tokens_of(message, batch=True)
    if ranks < 1:
        raise ValueError(f"ranks={ranks} is not at least 1")
    check_file(out)
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device={device!r} is not known; use cpu or cuda")
    check_device("profile", device)
    from axo.perf import profile as profiling

    me = launch.Rank.from_environment()
    arguments = (ranks if me is None else me.world_size, model, rows, size, repeats, device)
    if me is None:
        fields = launch.launch_local(profiling.on_this_rank, ranks, *arguments, fork=device == "cpu")
    else:
        fields = profiling.on_this_rank(*arguments)
    if me is not None and me.rank:
        return
    profiling.write(fields, out)
    table = fields["intra_gbs"] | fields.get("cross_gbs", {}) if isinstance(fields["intra_gbs"], dict) else {}
    pairs = [[key, f"{gbs}"] for key, gbs in table.items()]
    products = [[f"{g['m']} x {g['k']} x {g['n']}", f"{g['tflops']:.4f}"] for g in fields["gemms"]]
    _show(
        ("GB/s of simultaneous rings, (ranks inside) x (ranks of the ring)", (["hierarchy", "GB/s"], pairs)),
        ("products, bf16, all ranks at once", (["m x k x n", "TFLOP/s a rank"], products)),
        f"layer_us: {fields['profiled']['layer_us']}" if "layer_us" in fields["profiled"] else "",
        f"wrote {out}: axo plan --machine {out} uses it",
    )


def tokens_of(text: str, *, batch: bool) -> int:
    """Read a count of tokens: 524288, 4M, 16.8M, 2T.

    A batch with a suffix that lies within 5% of a power of two means that power: 16.8M is 2^24, 4M is 2^22.

    Raises:
        ValueError: Not a count.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:[eE]\d+)?)\s*([kKmMgGbBtT]?)\s*", text.replace("_", "").replace(",", ""))
    if match is None:
        raise ValueError(f"{text!r} is not a count of tokens; write 524288, 4M, 16.8M or 2T")
    value = float(match[1]) * {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12}[match[2].lower()]
    if value > MOST_TOKENS:
        raise ValueError(f"{text!r} is more tokens than there are; use at most {MOST_TOKENS:g}")
    if batch and match[2] and value >= 1:
        power = 2 ** round(math.log2(value))
        if abs(power / value - 1) <= 0.05:
            return power
    return round(value)


def _counts(text: str, gpus: int) -> tuple[int, ...]:
    """Numbers of stages: ``4``, ``1,2,4``, or auto."""
    if text == "auto":
        from axo.perf.grid_choice import stage_counts

        return stage_counts(gpus)
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 0 < int(part) <= 4096 for part in parts):
        raise ValueError(f"pipeline={text!r} is not a number of stages; use 4, or 1,2,4, or auto")
    counts = tuple(dict.fromkeys(map(int, parts)))
    if uneven := tuple(count for count in counts if gpus % count):
        raise ValueError(f"plan: pipeline={uneven} stages do not divide {gpus} GPUs")
    return counts


def _plan_file(path: Path) -> Any:
    """What ``--json`` wrote, or another JSON file.

    Raises:
        ValueError: It cannot be read.
    """
    try:
        return files.parse_json(files.read_text(path))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as a plan: {' '.join(str(error).split())[:200]}") from None


def _grid(text: str, gpus: int) -> Grid:
    grid = Grid.parse(text)
    if grid.world_size != gpus:
        raise ValueError(f"grid {grid} has {grid.world_size} ranks, not {gpus}")
    return grid


def _explained(ranking: planner.GridPlan, grid: Grid) -> Candidate:
    for candidate in (*ranking.ranked, *ranking.left_out):
        if candidate.grid == grid:
            return candidate
    raise ValueError(
        f"explain: grid {grid} is none of those that were planned; use a grid of --algorithm"
        f" {' or '.join(ranking.request.algorithms)}, and --pipeline 1 or auto"
    )
