"""``axo dryrun``: a training step of any number of ranks on this machine, without peers and without values."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from axo.arrangement import arrangement_of
from axo.cli.output import check_file, is_stdout, say, show_table, write
from axo.cli.train import said, takes_fields
from axo.grid import Grid
from axo.perf.machine import Machine, load
from axo.perf.memory import GIB, RESERVED, SLACK
from axo.train.config import TrainConfig, overrides

if TYPE_CHECKING:
    from axo.dryrun import Record

_OF_A_STEP = (
    *("model", "model_overrides", "grid", "algorithm", "pipeline", "schedule", "cuts", "sequence_parallel", "context"),
    *("context_kind", "experts", "seq_len", "accumulate", "chunked_loss", "precision", "recompute", "recompute_keeps"),
    *("zero", "overlap", "gather_cache", "offload", "optimizer"),
)


@takes_fields(_OF_A_STEP, grid=..., model="", seq_len=2048)
def dryrun(
    call: typer.Context,
    *,
    litgpt: Annotated[
        Path | None,
        typer.Option(help="What 'litgpt pretrain --config' reads: model, length, batch and precision from there."),
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Rows of the global batch; default: one a data rank.")] = 0,
    microbatches: Annotated[int, typer.Option(help="Micro-batches that fill the stages; 0: one a stage.")] = 0,
    machine: Annotated[str, typer.Option(help="Say whether the step fits there: h100, frontier, ..., or a file.")] = "",
    ranks: Annotated[str, typer.Option(help="auto: one of each role and neighbours; all; or 0,17,300.")] = "auto",
    order: Annotated[int, typer.Option(help="Print the first N collectives of the first rank, in order.")] = 0,
    json_out: Annotated[Path | None, typer.Option("--json", help="Write JSON here; - for stdout.")] = None,
    **options: Any,
) -> None:
    """Run a training step as single ranks of a grid, without peers: memory, traffic, order, and who disagrees."""
    grid, pipeline = Grid.parse(options["grid"]), options["pipeline"]
    if order < 0:
        raise ValueError(f"order={order} is not at least 0")
    check_file(json_out)
    on = load(machine) if machine else None
    if microbatches > 1 and pipeline == 1:
        raise ValueError(f"dryrun: microbatches={microbatches} fill stages, and there is one; add --pipeline")
    if not options["model"] and litgpt is None:
        raise ValueError("dryrun: give the model by --model NAME, or by --litgpt CONFIG")
    microbatches = microbatches or pipeline
    parts = max(1, arrangement_of("dryrun", options["algorithm"]).row_parts(grid) // max(1, options["context"]))
    options |= {"grid": grid, "model_overrides": overrides(options["model_overrides"] or ())}
    if litgpt is not None:
        of_file = _of_litgpt(litgpt, options["model"], options["model_overrides"], parts)
        options |= {name: value for name, value in of_file.items() if name not in said(call, options)}
    rows = batch_size or options.pop("batch_size", parts * max(1, microbatches) * max(1, options["accumulate"]))
    config = TrainConfig(**options | {"batch_size": rows, "microbatches": microbatches})
    from axo import dryrun as dry

    dry.check(config)
    wanted = _ranks(ranks, config)
    roles = dry.representatives(config)
    wanted = list(roles) if wanted is None else wanted
    print(f"axo dryrun: runs {len(wanted)} of {config.ranks} ranks, a process each", file=sys.stderr)
    records = dry.run_all(config, wanted)
    bad = dry.compare(config, records)
    if json_out is not None:
        write(json_out, {"grid": str(grid), "records": [_plain(record) for record in records],
                         "mismatches": [str(one) for one in bad]})  # fmt: skip
    if not is_stdout(json_out):
        _print(config, records, roles, order)
        shown = ", ".join(str(record.rank) for record in records)
        if not bad:
            what = "every collective" if pipeline == 1 else "every collective and message"
            say(f"ranks {shown} of {config.ranks}: {what} that two of them share matches")
        if on is not None:
            say(_verdict(max(records, key=lambda record: record.peak.total), on))
    if bad:
        raise ValueError(f"{len(bad)} communicators do not match; the first: {bad[0]}")


def _of_litgpt(file: Path, model: str, fields: dict[str, str], parts: int) -> dict[str, Any]:
    """What a pretraining configuration of LitGPT's says of a step whose rows are cut into so many parts; its model
    where ``model`` names none. ``fields`` override the model's."""
    from axo.integrations.litgpt import parsing
    from axo.train.models import resolve

    setup = parsing.load("litgpt.pretrain", "setup")
    options = parsing.parse("pretrain", setup, ["--config", str(file)]).litgpt
    if min(options.train.global_batch_size, options.train.micro_batch_size) < 1:
        raise ValueError(f"dryrun: --litgpt {file} is no configuration of litgpt pretrain with sizes of batches")
    if options.model_config is not None and not model:
        raise ValueError(f"dryrun: --litgpt {file} has a model_config; write that into a file, and add --model FILE")
    train, model = options.train, model or options.model_name
    if train.tie_embeddings:
        raise ValueError(
            f"dryrun: --litgpt {file}: a dry run does not know tie_embeddings: true; without it both tables count"
        )
    rows = train.micro_batch_size * parts
    if train.global_batch_size % rows:
        raise ValueError(
            f"dryrun: --litgpt {file}: global_batch_size={train.global_batch_size} does not divide over"
            f" {parts} data ranks with micro_batch_size={train.micro_batch_size}"
        )
    return {
        "model": model,
        "seq_len": train.max_seq_length or resolve(model, fields).block_size,
        "batch_size": train.global_batch_size,
        "accumulate": train.global_batch_size // rows,
    } | ({"precision": options.precision} if options.precision else {})


def _ranks(text: str, config: TrainConfig) -> list[int] | None:
    """The ranks that ``text`` names; None: one of each role."""
    if text == "auto":
        return None
    if text == "all":
        return list(range(config.ranks))
    numbers = set()
    for part in text.split(","):
        if not part.strip().isdecimal() or int(part) >= config.ranks:
            raise ValueError(
                f"ranks={text!r}: {part.strip()!r} is not a rank of {config.shown}; use auto, all, or numbers from 0"
                f" to {config.ranks - 1} with commas"
            )
        numbers.add(int(part))
    return sorted(numbers)


def _place(config: TrainConfig, rank: int) -> str:
    stage, rank = divmod(rank, config.grid.world_size)
    coords = " ".join(f"{axis}{place}" for axis, place in config.grid.coords(rank)._asdict().items())
    return coords if config.pipeline == 1 else f"stage {stage}, {coords}"


def _print(config: TrainConfig, records: list[Record], roles: dict[int, int], order: int) -> None:
    gib = 2.0**30
    kinds = [kind for kind in records[0].peak.by_kind if kind != "messages" or config.pipeline > 1]
    rows = [
        [str(r.rank), _place(config, r.rank), str(roles.get(r.rank, 0)), f"{r.peak.total / gib:.2f}",
         r.peak.phase, *(f"{r.peak.by_kind[kind] / gib:.2f}" for kind in kinds)]
        for r in records
    ]  # fmt: skip
    show_table(
        f"{config.model} on {config.shown}: the fullest moment of a step, GiB of tensors",
        (["rank", "place", "ranks of its role", "peak", "when", *kinds], rows),
    )
    first = records[0]
    traffic = [
        [op, axis, str(calls), f"{size / 1e6:.3f}"] for (op, axis), (calls, size) in sorted(first.traffic().items())
    ]
    show_table(f"rank {first.rank}: what it sends in a step", (["collective", "axis", "calls", "MB put in"], traffic))
    for number, one in enumerate(first.issued[:order], 1):
        say(f"{number:6}  {one.axis:5}  {one}")


def _verdict(record: Record, machine: Machine) -> str:
    """Whether the fullest rank fits into a GPU, with what the planner adds for allocator and libraries."""
    need, has = (record.peak.total * (1 + SLACK) + RESERVED) / GIB, machine.memory_gib
    more = "" if need <= has else "; docs/memory.md lists what to switch on, the cheapest first"
    return (
        f"{machine.name}: the step {'fits' if need <= has else 'does not fit'}: rank {record.rank} needs {need:.1f} of"
        f" {has:g} GiB ({SLACK:.0%} for the allocator and {RESERVED / GIB:g} GiB for libraries included){more}"
    )


def _plain(record: Record) -> dict[str, object]:
    return {
        "rank": record.rank,
        "peak_bytes": record.peak.by_kind | {"total": record.peak.total},
        "peak_phase": record.peak.phase,
        "peaks": {phase: peak.total for phase, peak in record.peaks.items()},
        "held_bytes": record.held,
        "traffic": {f"{op} {axis}": list(counted) for (op, axis), counted in record.traffic().items()},
        "issued": [one._asdict() for one in record.issued],
        "seconds": record.seconds,
    }
