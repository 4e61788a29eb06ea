"""The options that ``axo litgpt`` adds to those of LitGPT's commands, taken out before litgpt reads the others."""

from __future__ import annotations

import os
from dataclasses import dataclass

from axo.grid import Grid

AUTO = "auto"
HELP = """
Options of Axo's own, for commands that run on a grid (pretrain, finetune_full, ...):
  --grid XxYxZxDATA     Ranks on each axis (or AXO_GRID); 'auto': what the planner finds best for the model.
  --ranks N             With --grid auto and without torchrun: how many ranks to start.
  --machine NAME|FILE   With --grid auto: a machine that axo plan knows, or a file that axo profile wrote.
  --sharded             Every rank saves its own part; 'axo consolidate' makes such a checkpoint whole.
  --max-restarts N      Start the ranks again, from the newest checkpoint, when one was lost; at most N times.
  --goldfish K,H        Leave one of K tokens out of the training loss, chosen by the H tokens before it.

A command of Axo's own: axo litgpt architectures [--grid ...] says which of LitGPT's configurations run on a grid.
"""


@dataclass(frozen=True)
class Options:
    """What was asked of Axo.

    Args:
        grid: Ranks on each axis; None: the planner is to choose.
        ranks, machine: For the planner; 0, "": not given.
        sharded: Save sharded checkpoints; None: not said, and AXO_SHARDED counts.
        max_restarts: How often lost ranks are started again.
        goldfish: (K, H); None: no goldfish loss.
    """

    grid: Grid | None
    ranks: int = 0
    machine: str = ""
    sharded: bool | None = None
    max_restarts: int = 0
    goldfish: tuple[int, int] | None = None


def take(arguments: list[str]) -> tuple[Options, list[str]]:
    """Axo's options, and the other arguments.

    Raises:
        ValueError: An option lacks its value, or the value is not one.
    """
    grid, arguments = _take("--grid", "a grid, such as --grid 2x2x2x1, or --grid auto", arguments)
    goldfish, arguments = _take("--goldfish", "K,H, such as --goldfish 2,13", arguments)
    ranks, arguments = _take("--ranks", "a number of ranks", arguments)
    machine, arguments = _take("--machine", "a machine that axo plan knows, or a machine file", arguments)
    restarts, arguments = _take("--max-restarts", "a number of restarts, such as --max-restarts 3", arguments)
    sharded = True if "--sharded" in arguments else None
    grid = grid or os.environ.get("AXO_GRID", "")
    automatic = grid == AUTO
    for option, value in (("--ranks", ranks), ("--machine", machine)):
        if value and not automatic:
            raise ValueError(f"litgpt: {option} is for --grid auto; with a grid of your own leave it out")
    options = Options(
        grid=None if automatic else Grid.parse(grid) if grid else Grid(),
        ranks=_count("--ranks", ranks, 1) if ranks else 0,
        machine=machine,
        sharded=sharded,
        max_restarts=_count("--max-restarts", restarts, 0) if restarts else 0,
        goldfish=_goldfish(goldfish) if goldfish else None,
    )
    return options, [argument for argument in arguments if argument != "--sharded"]


def _take(option: str, wanted: str, arguments: list[str]) -> tuple[str, list[str]]:
    """The value of an option ("" without it), and the other arguments.

    Raises:
        ValueError: The option stands last, without a value.
    """
    value, rest, waiting = "", [], False
    for argument in arguments:
        if waiting:
            value, waiting = argument, False
        elif argument == option:
            waiting = True
        elif argument.startswith(f"{option}="):
            value = argument.removeprefix(f"{option}=")
        else:
            rest.append(argument)
    if waiting:
        raise ValueError(f"litgpt: {option} wants {wanted}")
    return value, rest


def _count(option: str, text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise ValueError(f"litgpt: {option} {text} is not a whole number of at least {least}")
    return int(text)


def _goldfish(text: str) -> tuple[int, int]:
    try:
        k, h = (int(part) for part in text.split(","))
    except ValueError:
        k, h = 0, 0
    if k < 2 or h < 1:
        raise ValueError(
            f"litgpt: --goldfish {text}: wanted K,H with K of at least 2 (one of K tokens is left out) and H of at"
            " least 1 (the tokens before it that decide), such as --goldfish 2,13"
        )
    return k, h
