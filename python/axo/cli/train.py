"""``axo train``: its options are the fields of ``axo.train.TrainConfig``, with their help; it prints the verdict."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Container, Iterable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from axo.cli.errors import FAILED
from axo.cli.output import say
from axo.grid import Grid
from axo.launch import Rank
from axo.train.config import OUTPUT, RANKS, TrainConfig, overrides

if TYPE_CHECKING:
    from axo.train import Outcome

# What is text on the command line: its type there, and its default.
_TEXTS: dict[Any, tuple[Any, str | None]] = {
    Grid: (str, str(Grid())),
    dict[str, Any]: (list[str] | None, None),
    tuple[str, ...]: (list[str] | None, None),
}
_OF_STAGES = ("schedule", "cuts", "microbatches")


def takes_fields(wanted: Container[str] | None = None, **defaults: Any) -> Callable[[Callable], Callable]:
    """Let a command take fields of ``TrainConfig`` as options, in place of its ``**options``.

    Args:
        wanted: Their names; None: all.
        defaults: Of this command, where they differ; ``...``: it must be given.
    """

    def decorate(command: Callable) -> Callable:
        signature, types = inspect.signature(command, eval_str=True), get_type_hints(TrainConfig)
        *own, by_name = signature.parameters.values()
        options = []
        for field in dataclasses.fields(TrainConfig):
            if wanted is None or field.name in wanted:
                kind, default = _TEXTS.get(types[field.name], (types[field.name], field.default))
                shown, flag = field.metadata, f"--{field.metadata.get('name', field.name.replace('_', '-'))}"
                named = {"metavar": shown.get("metavar"), "help": shown["help"], "rich_help_panel": shown["panel"]}
                options.append(
                    by_name.replace(
                        name=field.name,
                        kind=inspect.Parameter.KEYWORD_ONLY,
                        default=defaults.get(field.name, default),
                        annotation=Annotated[kind, typer.Option(flag, **named)],
                    )
                )
        parameters = sorted([*options, *own], key=lambda each: each.kind)  # those with a place first
        command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return command

    return decorate


def said(context: typer.Context, options: Iterable[str]) -> set[str]:
    """Those of the options that the user has given."""
    sources = {name: context.get_parameter_source(name) for name in options}
    return {name for name, source in sources.items() if source is not None and source.name != "DEFAULT"}


@takes_fields()
def train(
    call: typer.Context,
    paths: Annotated[
        list[str] | None, typer.Argument(metavar="[PATH]...", help="More text, so that '--data A B C' is A, B and C.")
    ] = None,
    *,
    expect_drop: Annotated[
        float | None,
        typer.Option(
            metavar="NATS",
            help="Fail unless the last 10 losses average at least this far under ln(vocabulary).",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    ranks: Annotated[
        int, typer.Option(metavar="N", help="With --grid auto and without torchrun: how many ranks to start.",
                          rich_help_panel=RANKS, show_default=False)
    ] = 0,
    machine: Annotated[
        str, typer.Option(metavar="NAME|FILE", help="With --grid auto: a machine that axo plan knows, or a file;"
                          " default: what axo profile wrote here.", rich_help_panel=RANKS, show_default=False)
    ] = "",
    **options: Any,
) -> None:  # fmt: skip
    """Train a LitGPT model on a grid of ranks: new local ones, or those that torchrun started."""
    given, automatic = said(call, options), options["grid"] == "auto"
    for name, value in (("ranks", ranks), ("machine", machine)):
        if value and not automatic:
            raise ValueError(f"{name}={value} is for --grid auto; with a grid of your own leave it out")
    for name in _OF_STAGES:
        if name in given and options["pipeline"] == 1 and ("pipeline" in given or not automatic):
            raise ValueError(f"{name}={options[name]} is of pipeline stages; add --pipeline N, or leave it out")
    if expect_drop is not None and not math.isfinite(expect_drop):
        raise ValueError(f"expect-drop={expect_drop} is not a finite number of nats")
    options["data"] = (*(options["data"] or ()), *(paths or ()))
    options["model_overrides"] = overrides(options["model_overrides"] or ())
    options["grid"] = Grid() if automatic else Grid.parse(options["grid"])
    config, on_ranks = TrainConfig(**options), None
    rank = None if config.hosts else Rank.from_environment()
    if automatic:
        from axo.train.auto import chosen, planned

        on_ranks = partial(planned, config, machine, given)
        config, why = chosen(config, rank, ranks, machine, given)
        if rank is None or rank.rank == 0:
            say(why)
    from axo.integrations.litgpt.parsing import load

    outcome = load("axo.train.runner", "run")(config, on_ranks)
    if outcome is not None and not _tell(outcome, expect_drop):
        raise typer.Exit(FAILED)


def with_auto(arguments: list[str]) -> list[str]:
    """Let ``--resume`` alone mean ``--resume auto``: an option with an optional value, which typer does not have."""
    words = []
    for argument, after in zip(arguments, [*arguments[1:], "-"], strict=False):
        words += [argument, "auto"] if argument == "--resume" and after.startswith("-") else [argument]
    return words


def _tell(outcome: Outcome, expect_drop: float | None) -> bool:
    """Print a run's result; return whether all that was asked of it holds. The verdict of the parity comes last."""
    seconds = f"{outcome.seconds:.0f} s" + (f", serial {outcome.serial_seconds:.0f} s" if outcome.serial else "")
    say(f"log {outcome.log} · loss curve {outcome.plot} · training {seconds}")
    if outcome.checkpoint is not None:
        say(f"checkpoint {outcome.checkpoint}")
    if outcome.stopped:
        say(f"stopped by {outcome.stopped} after {len(outcome.losses)} steps; go on with --resume auto")
        return True
    fell = expect_drop is None or outcome.drop >= expect_drop
    verdict = f" (at least {expect_drop:g}): {'ok' if fell else 'FAILED'}" if expect_drop is not None else ""
    say(
        f"loss: {outcome.losses[0]:.3f} at first, {outcome.tail_loss:.3f} over the last {len(outcome.losses[-10:])} of "
        f"{len(outcome.losses)} steps, {outcome.drop:.3f} nats under "
        f"ln({outcome.vocabulary}) = {math.log(outcome.vocabulary):.3f}{verdict}"
    )
    if outcome.parity is not None:
        say(str(outcome.parity))
    return fell and (outcome.parity is None or outcome.parity.ok)
