"""The commands `axo plan`, `axo simulate`, `axo reproduce` and `axo profile`.

`axo.cli` mounts ``app``. A user's mistake ends in one line on stderr and exit code 2; a bug keeps its traceback.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from axo.grid import Grid
from axo.perf import flops, machine, planner, readers, simulator
from axo.perf.layer_time import OVERLAPS
from axo.perf.machine import Machine
from axo.perf.memory import GIB

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Plan, simulate and check training steps.")

MOST_TOKENS = 1e18

Model = Annotated[str, typer.Option(help="gpt-5b ... gpt-640b, unet-250m ... unet-4b, a LitGPT name, or a file.")]
MachineName = Annotated[str, typer.Option("--machine", help="A known machine, or a machine file (axo profile).")]
Batch = Annotated[str, typer.Option(help="Tokens of one step, all ranks: 16.8M, 4M, 524288.")]
Seq = Annotated[int | None, typer.Option(help="Tokens of one sample; default 2048.")]
Overlap = Annotated[str, typer.Option(help="Which overlaps are on: oar,ors,oag or none.")]
Gather = Annotated[str, typer.Option(help="Gathered weights: keep, drop, or auto (keep what fits).")]
Checkpoint = Annotated[bool, typer.Option("--checkpoint/--no-checkpoint", help="Run blocks again in backward.")]
Zero = Annotated[int, typer.Option(help="ZeRO over data: 1 cuts optimizer state, 2 gradients too.")]
JsonOut = Annotated[Path | None, typer.Option("--json", help="Write JSON here; - for stdout.")]
CsvOut = Annotated[Path | None, typer.Option("--csv", help="Write CSV here; - for stdout.")]
PlotOut = Annotated[Path | None, typer.Option("--plot", help="Write the plots (PNG) into this folder.")]
HtmlOut = Annotated[Path | None, typer.Option("--html", help="Write one self-contained HTML page.")]


def _clean(command: Callable[..., None]) -> Callable[..., None]:
    """End a user's mistake (ValueError, a file that cannot be written) in one line and exit code 2."""

    @wraps(command)
    def run(*args: Any, **options: Any) -> None:
        try:
            command(*args, **options)
        except ValueError as error:
            name = command.__name__
            typer.echo(f"axo {name}: {str(error).removeprefix(f'{name}: ')}", err=True)
            raise typer.Exit(2) from None
        except OSError as error:
            if error.filename is None:
                raise
            name = command.__name__
            typer.echo(f"axo {name}: {str(error.filename)!r} cannot be used: {error.strerror}", err=True)
            raise typer.Exit(2) from None

    return run


@app.command()
@_clean
def plan(
    model: Model,
    gpus: Annotated[int, typer.Option(help="Number of GPUs (GCDs on frontier).")],
    machine_name: MachineName,
    batch_tokens: Batch = "16.8M",
    tokens: Annotated[str, typer.Option(help="Tokens of the whole training, for the days: 2T.")] = "0",
    seq: Seq = None,
    top: Annotated[int, typer.Option(help="Rows to print.")] = 10,
    overlap: Overlap = "oar,ors,oag",
    gather: Gather = "auto",
    checkpoint: Checkpoint = True,
    zero: Zero = 0,
    explain: Annotated[str | None, typer.Option(help="Show one grid in detail: 2x2x2x1.")] = None,
    json_out: JsonOut = None,
    csv_out: CsvOut = None,
    plot: PlotOut = None,
    html: HtmlOut = None,
) -> None:
    """Rank every grid of a number of GPUs by predicted step time."""
    from axo.perf import output as report

    if top < 1:
        raise ValueError(f"top={top} is not at least 1")
    if _dash(json_out) and _dash(csv_out):
        raise ValueError("--json - and --csv - both want stdout; give one of them a file")
    request = _request(model, gpus, machine_name, batch_tokens, tokens, seq, overlap, gather, checkpoint, zero)
    wanted = None if explain is None else _grid(explain, gpus)
    made = planner.plan(request)
    stdout_taken = _dash(json_out) or _dash(csv_out)
    if not stdout_taken:
        _print_plan(made, top, wanted)
    if json_out is not None:
        _write(json_out, json.dumps(report.as_json(made), indent=1))
    if csv_out is not None:
        _write(csv_out, report.as_csv(made))
    if plot is not None or html is not None:
        from axo.perf import plots

        best = made.best
        step = simulator.simulate(request.workload, best.grid, request.machine, best.run)
        drawn = plots.plan_plots(made, step)
        if plot is not None:
            _write_plots(plot, drawn, quiet=stdout_taken)
        if html is not None:
            _write(html, report.plan_page(made, step, drawn))


@app.command()
@_clean
def simulate(
    model: Model,
    grid: Annotated[str, typer.Option(help="XxYxZxDATA, such as 2x2x128x16.")],
    machine_name: MachineName,
    batch_tokens: Batch = "16.8M",
    seq: Seq = None,
    overlap: Overlap = "oar,ors,oag",
    gather: Gather = "auto",
    checkpoint: Checkpoint = True,
    zero: Zero = 0,
    straggle: Annotated[float, typer.Option(help="Standard deviation of the ranks' speeds; 0.02: two percent.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the ranks' speeds.")] = 0,
    trace: Annotated[Path | None, typer.Option(help="Write a Chrome trace here (opens in Perfetto).")] = None,
    json_out: JsonOut = None,
    plot: PlotOut = None,
) -> None:
    """Run one training step on one grid, event by event."""
    from axo.perf import chrome_trace as chrome
    from axo.perf import output as report

    parsed = Grid.parse(grid)
    request = _request(
        model, parsed.world_size, machine_name, batch_tokens, "0", seq, overlap, gather, checkpoint, zero
    )
    candidate = planner.consider(request, parsed)
    if candidate.reason:
        raise ValueError(
            f"{request.workload.name} cannot run on grid {parsed} of {request.machine.name}: {candidate.reason};"
            f" axo plan --gpus {request.gpus} ranks the grids that can"
        )
    made = planner.Plan(request, [candidate])
    found = simulator.simulate(request.workload, parsed, request.machine, made.best.run, straggle=straggle, seed=seed)
    assert made.best.time is not None
    work = flops.step_flops(request.workload, request.batch_tokens)
    percent = 100 * work / found.seconds / (request.gpus * request.machine.peak_tflops * 1e12)
    if trace is not None:
        chrome.write(found, trace)
    if json_out is not None:
        values = {
            "grid": str(parsed),
            "seconds": found.seconds,
            "hfu_percent": percent,
            "exposed_s": found.exposed,
            "busy_s": found.busy,
            "peak_memory_bytes": found.peak_memory,
            "closed_form_s": made.best.time.total,
            "ranks": found.ranks,
        }
        _write(json_out, json.dumps(values, indent=1))
    if plot is not None:
        from axo.perf import plots

        _write_plots(plot, plots.plan_plots(made, found), quiet=_dash(json_out))
    if not _dash(json_out):
        title = f"{request.workload.name} on {parsed} ({request.gpus} GPUs of {request.machine.name})"
        _table(title, report.simulation_table(found))
        typer.echo(
            f"one step {found.seconds:.3f} s, {percent:.1f}% of peak, at most {found.peak_memory / GIB:.1f} GiB a GPU;"
            f" the closed form says {made.best.time.total:.3f} s"
        )
        if len(found.ranks) > 1:
            typer.echo(f"ranks that stood for all: {', '.join(map(str, found.ranks))}")
        if found.micro_batches < made.best.run.micro_batches:
            typer.echo(
                f"simulated {found.micro_batches} of {made.best.run.micro_batches} micro-batches; the rest repeat"
            )
        if trace is not None:
            typer.echo(f"trace: {trace} (open it in ui.perfetto.dev)")


@app.command()
@_clean
def reproduce(
    what: Annotated[str, typer.Argument(help="papers")] = "papers",
    check_fit: Annotated[
        bool, typer.Option("--fit/--no-fit", help="Fit again: leave-one-out error and every choice of rows.")
    ] = True,
    json_out: JsonOut = None,
    csv_out: CsvOut = None,
    plot: PlotOut = None,
    html: HtmlOut = None,
) -> None:
    """Print the papers' numbers beside the model's, with the error, and what it cannot predict."""
    from axo.perf import output as report
    from axo.perf import reproduce as reproduce_

    if what != "papers":
        raise ValueError(f"{what!r} is not known; use papers")
    groups = list(reproduce_.groups())
    notes = reproduce_.calibration_notes(check_fit)
    if not (_dash(json_out) or _dash(csv_out)):
        for group in groups:
            _table(group.title, report.group_table(group))
            if group.note:
                typer.echo(f"  {group.note}\n")
        for title, texts in (
            ("How it was calibrated", notes),
            ("What cannot be predicted", reproduce_.CANNOT),
            ("Where the papers contradict", reproduce_.CONTRADICTIONS),
        ):
            typer.echo(f"\n{title}")
            for text in texts:
                typer.echo(f"  - {text}")
    if json_out is not None:
        values = {
            "groups": [report.group_json(group) for group in groups],
            "calibration": list(notes),
            "cannot": list(reproduce_.CANNOT),
            "contradictions": list(reproduce_.CONTRADICTIONS),
        }
        _write(json_out, json.dumps(values, indent=1))
    if csv_out is not None:
        _write(csv_out, report.groups_csv(groups))
    if plot is not None or html is not None:
        from axo.perf import plots

        drawn = {"Weak scaling": plots.reproduction_plot(groups[0])}
        if plot is not None:
            _write_plots(plot, drawn, quiet=_dash(json_out) or _dash(csv_out))
        if html is not None:
            _write(html, report.reproduction_page(groups, notes, drawn))


@app.command()
@_clean
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
    from axo.perf import profile as profiling

    size = tokens_of(message, batch=True)
    if ranks < 1:
        raise ValueError(f"ranks={ranks} is not at least 1")
    if not out.parent.is_dir():
        raise ValueError(f"folder {str(out.parent)!r} does not exist")
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device={device!r} is not known; use cpu or cuda")
    me = launch.Rank.from_environment()
    arguments = (ranks if me is None else me.world_size, model, rows, size, repeats, device)
    if me is None:
        try:
            fields = launch.launch_local(profiling.on_this_rank, ranks, *arguments, fork=device == "cpu")
        except launch.RankFailed as error:
            raise (ValueError if error.user_error else RuntimeError)(str(error)) from None
    else:
        fields = profiling.on_this_rank(*arguments)
    if me is None or me.rank == 0:
        profiling.write(fields, out)
        table = fields["intra_gbs"] | fields.get("cross_gbs", {}) if isinstance(fields["intra_gbs"], dict) else {}
        pairs = [[key, f"{gbs}"] for key, gbs in table.items()]
        _table("GB/s of simultaneous rings, (ranks inside) x (ranks of the ring)", (["hierarchy", "GB/s"], pairs))
        products = [[f"{g['m']} x {g['k']} x {g['n']}", f"{g['tflops']:.4f}"] for g in fields["gemms"]]
        _table("products, bf16, all ranks at once", (["m x k x n", "TFLOP/s a rank"], products))
        typer.echo(f"wrote {out}: axo plan --machine {out} uses it")


# ------------------------------------------------------------------------------------------------------------ helpers


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


def _request(
    model: str,
    gpus: int,
    machine_name: str,
    batch_tokens: str,
    tokens: str,
    seq: int | None,
    overlap: str,
    gather: str,
    checkpoint: bool,
    zero: int,
) -> planner.Request:
    wanted = frozenset() if overlap.strip() in ("", "none") else frozenset(part.strip() for part in overlap.split(","))
    on: Machine = machine.load(machine_name)
    workload = readers.read(model, seq_length=seq, checkpointed=checkpoint)
    if unknown := wanted - set(OVERLAPS):
        raise ValueError(f"overlap {', '.join(sorted(unknown))} is not known; use {', '.join(OVERLAPS)} or none")
    batch = tokens_of(batch_tokens, batch=True)
    return planner.Request(workload, on, gpus, batch, float(tokens_of(tokens, batch=False)), wanted, gather, zero)


def _grid(text: str, gpus: int) -> Grid:
    grid = Grid.parse(text)
    if grid.world_size != gpus:
        raise ValueError(f"grid {grid} has {grid.world_size} ranks, not {gpus}")
    return grid


def _print_plan(made: planner.Plan, top: int, explain: Grid | None) -> None:
    from axo.perf import output as report

    asked = made.request
    typer.echo(
        f"{asked.workload.name}: {asked.workload.parameters / 1e9:.1f} billion parameters;"
        f" {asked.batch_tokens:,} tokens a batch ({asked.sequences:,} sequences of {asked.workload.seq_length})"
    )
    calibrated = ", ".join(asked.machine.calibrated_on) or "nothing: its fractions are guesses (axo profile measures)"
    typer.echo(f"{asked.machine.name}: {asked.machine.description}; calibrated on {calibrated}")
    _table(
        f"{min(top, len(made.ranked))} of {len(made.ranked)} grids that fit; {len(made.left_out)} do not",
        report.plan_table(made, top),
    )
    typer.echo(made.why(made.best))
    if explain is not None:
        chosen = next(c for c in (*made.ranked, *made.left_out) if c.grid == explain)
        typer.echo("")
        typer.echo(made.why(chosen))
        if chosen.time is not None:
            _table(f"traffic of {explain}", report.traffic_table(made, chosen))
        if chosen.memory is not None:
            _table(f"memory of {explain}", report.memory_table(chosen))


def _table(title: str, table: tuple[list[str], list[list[str]]]) -> None:
    from rich.console import Console
    from rich.table import Table

    header, rows = table
    drawn = Table(title=title, title_justify="left", header_style="bold")
    for i, name in enumerate(header):
        text = any(row[i] and not _number(row[i]) for row in rows)
        drawn.add_column(name, justify="left" if text else "right", overflow="fold")
    for row in rows:
        drawn.add_row(*row)
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    console.print(drawn)


def _number(text: str) -> bool:
    return re.fullmatch(r"[+-]?[\d.]+(e[+-]?\d+)?%?", text) is not None


def _dash(path: Path | None) -> bool:
    return path is not None and str(path) == "-"


def _write(path: Path, text: str) -> None:
    if _dash(path):
        sys.stdout.write(text if text.endswith("\n") else text + "\n")
        return
    if not path.parent.is_dir():
        raise ValueError(f"folder {str(path.parent)!r} does not exist")
    path.write_text(text)


def _write_plots(folder: Path, drawn: dict[str, bytes], *, quiet: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, png in drawn.items():
        path = folder / f"{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}.png"
        path.write_bytes(png)
        if not quiet:
            typer.echo(f"wrote {path}")
