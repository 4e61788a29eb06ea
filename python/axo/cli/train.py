"""``axo train``: its options are the fields of ``axo.train.TrainConfig``, with their help; it prints the verdict."""

from __future__ import annotations

import dataclasses
import inspect
import math
from typing import TYPE_CHECKING, Any, get_type_hints

import typer

from axo.cli.errors import FAILED
from axo.cli.output import say
from axo.grid import check_ranks
from axo.launch import Rank
from axo.train.config import OUTPUT, RANKS, TrainConfig

if TYPE_CHECKING:
    from axo.train import Outcome

_PATHS = "More text, so that '--data A B C' is A, B and C."
_RANKS = "With --grid auto and without torchrun: how many ranks to start."
_MACHINE = "With --grid auto: a machine that axo plan knows, or a file; default: what axo profile wrote here."
_DROP = "Fail unless the last 10 losses average at least this far under ln(vocabulary)."


_OF_STAGES = ("schedule", "cuts", "microbatches")


def train(context: typer.Context, **given: Any) -> None:
    """Train a LitGPT model on a grid of ranks: new local ones, or those that torchrun started."""
    paths, expect_drop = given.pop("paths") or [], given.pop("expect_drop")
    ranks, machine = given.pop("ranks"), given.pop("machine")
    said = {name for name in ("pipeline", *_OF_STAGES) if _is_said(context, name)}
    automatic = given["grid"] == "auto"
    if automatic:
        given["grid"] = str(TrainConfig().grid)
    for name, value in (("ranks", ranks), ("machine", machine)):
        if value and not automatic:
            raise ValueError(f"{name}={value} is for --grid auto; with a grid of your own leave it out")
    if given["pipeline"] == 1 and (said & {"pipeline"} or not automatic):
        for name in _OF_STAGES:
            if name in said:
                raise ValueError(f"{name}={given[name]} is of pipeline stages; add --pipeline N, or leave it out")
    given["data"] = [*(given["data"] or []), *paths]
    for field in dataclasses.fields(TrainConfig):
        read = field.metadata["option"].read
        if read is not None:
            given[field.name] = read(given[field.name] or [] if field.name != "grid" else given[field.name])
    if expect_drop is not None and not math.isfinite(expect_drop):
        raise ValueError(f"expect-drop={expect_drop} is not a finite number of nats")
    config = TrainConfig(**given)
    rank = Rank.from_environment()
    if automatic:
        config = _planned(config, rank, ranks, machine, said)
    if rank is not None:
        check_ranks("train", config.grid, config.pipeline, rank.world_size)
    from axo.train import early, models

    # Before what takes seconds to import. Ranks of torchrun compare what each finds in its files.
    found = early.check_here(config) if rank is None else None
    if rank is not None and not models.names_file(config.model):
        early.check_sizes(config)
    from axo.integrations.litgpt.parsing import load

    outcome = load("axo.train.runner", "run")(config, found)
    if outcome is not None and not _tell(outcome, expect_drop):
        raise typer.Exit(FAILED)


def _is_said(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def _planned(config: TrainConfig, rank: Rank | None, ranks: int, machine: str, said: set[str]) -> TrainConfig:
    """``config`` with what the planner chooses; printed once."""
    from axo.train.auto import chosen

    if rank is not None and ranks not in (0, rank.world_size):
        raise ValueError(f"ranks={ranks}, but {rank.world_size} ranks were started; leave it out")
    if rank is None and ranks < 1:
        raise ValueError("grid=auto does not know how many ranks to start; add --ranks N, or use torchrun")
    config, why = chosen(config, ranks if rank is None else rank.world_size, machine, said)
    if rank is None or rank.rank == 0:
        say(why)
    return config


def _parameters() -> list[inspect.Parameter]:
    """The command's parameters: one for each field of ``TrainConfig``, and two that are the command's own."""
    found: dict[str, tuple[Any, Any]] = {
        "paths": (list[str] | None, typer.Argument(None, metavar="[PATH]...", help=_PATHS))
    }
    types = get_type_hints(TrainConfig)
    for field in dataclasses.fields(TrainConfig):
        option = field.metadata["option"]
        kind, default = types[field.name], field.default
        if option.text is not None:
            kind = option.text
            default = str(TrainConfig().grid) if kind is str else None
            kind = kind if kind is str else kind | None
        names = [f"--{option.name or field.name.replace('_', '-')}"]
        info = typer.Option(
            default, *names, metavar=option.metavar, help=option.help, rich_help_panel=option.panel, show_default=True
        )
        found[field.name] = (kind, info)
    drop = typer.Option(None, metavar="NATS", help=_DROP, rich_help_panel=OUTPUT)
    found["expect_drop"] = (float | None, drop)
    found["ranks"] = (int, typer.Option(0, metavar="N", help=_RANKS, rich_help_panel=RANKS, show_default=False))
    found["machine"] = (
        str,
        typer.Option("", metavar="NAME|FILE", help=_MACHINE, rich_help_panel=RANKS, show_default=False),
    )
    by_name = inspect.Parameter.KEYWORD_ONLY
    context = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    return [context] + [
        inspect.Parameter(name, by_name, default=info, annotation=kind) for name, (kind, info) in found.items()
    ]


train.__signature__ = inspect.Signature(_parameters())  # type: ignore[attr-defined]
train.__annotations__ = {parameter.name: parameter.annotation for parameter in _parameters()}


def with_auto(arguments: list[str]) -> list[str]:
    """Let ``--resume`` alone mean ``--resume auto``: an option with an optional value, which typer does not have."""
    found = []
    for argument, after in zip(arguments, [*arguments[1:], "-"], strict=False):
        found += [argument, "auto"] if argument == "--resume" and after.startswith("-") else [argument]
    return found


def _tell(outcome: Outcome, expect_drop: float | None) -> bool:
    """Print a run's result; return whether all that was asked of it holds. The verdict of the parity comes last."""
    seconds = f"{outcome.seconds:.0f} s" + (f", serial {outcome.serial_seconds:.0f} s" if outcome.serial else "")
    say(f"log {outcome.log} · loss curve {outcome.plot} · training {seconds}")
    if outcome.checkpoint is not None:
        say(f"checkpoint {outcome.checkpoint}")
    if outcome.stopped:
        say(f"stopped by {outcome.stopped} after {len(outcome.losses)} steps; go on with --resume auto")
        return True
    line = (
        f"loss: {outcome.losses[0]:.3f} at first, {outcome.tail_loss:.3f} over the last {len(outcome.losses[-10:])} of "
        f"{len(outcome.losses)} steps, {outcome.drop:.3f} nats under "
        f"ln({outcome.vocabulary}) = {math.log(outcome.vocabulary):.3f}"
    )
    fell = expect_drop is None or outcome.drop >= expect_drop
    if expect_drop is not None:
        line += f" (at least {expect_drop:g}): {'ok' if fell else 'FAILED'}"
    say(line)
    if outcome.parity is not None:
        say(str(outcome.parity))
    return fell and (outcome.parity is None or outcome.parity.ok)
