"""The options that ``axo litgpt`` adds to those of LitGPT's commands, taken out before litgpt reads the others."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, NoReturn

from axo.arrangement import arrangement_of
from axo.grid import Grid

AUTO = "auto"


@dataclass(frozen=True)
class Options:
    """What was asked of Axo.

    Args:
        grid: Ranks on each axis; None: the planner is to choose.
        ranks, machine: For the planner; 0, "": not given.
        sharded: Save sharded checkpoints.
        vocab_loss: Leave logits split over x in training.
        max_restarts: How often lost ranks are started again.
        goldfish: (K, H); None: no goldfish loss.
        pipeline: Stages, each of them a grid; 0: the planner is to choose.
        schedule, cuts, microbatches: Of the stages; "" and 0: not given (1f1b, even, and twice the stages).
        offload, offload_dir: What lies on the lower tier, as text; and its folder.
        algorithm: How products are distributed: "axonn", "tesseract" or "summa".
        allow_new_data: Go on from a checkpoint although data, seed or batch are others now.
        trust: A checkpoint's folder may run code.
    """

    grid: Grid | None
    ranks: int = 0
    machine: str = ""
    sharded: bool = False
    vocab_loss: bool = False
    max_restarts: int = 0
    goldfish: tuple[int, int] | None = None
    pipeline: int = 1
    schedule: str = ""
    cuts: str = ""
    microbatches: int = 0
    offload: str = "none"
    offload_dir: str = ""
    algorithm: str = "axonn"
    allow_new_data: bool = False
    trust: bool = False

    @property
    def shown(self) -> str:
        """The grid, and the stages if there are several."""
        return str(self.grid or AUTO) if self.pipeline < 2 else f"{self.grid or AUTO} in {self.pipeline} stages"

    @property
    def by_hand(self) -> str:
        """The options that ask for the same, with the grid and the stages that were chosen.

        Without ``--allow-new-data`` and ``--trust``, which are said for one start: whoever copies the rest keeps the
        checks.
        """
        words = ["--grid", str(self.grid)]
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in ("grid", "ranks", "machine", "allow_new_data", "trust") and value != field.default:
                words.append("--" + field.name.replace("_", "-"))
                if value is not True:
                    words.append(",".join(map(str, value)) if isinstance(value, tuple) else str(value))
        return shlex.join(words)

    @property
    def chosen_grid(self) -> Grid:
        """The grid, once it is known."""
        assert self.grid is not None
        return self.grid

    @property
    def ranks_in_all(self) -> int:
        """The ranks of all stages, once the grid is known."""
        return self.chosen_grid.world_size * self.pipeline

    @property
    def data_ranks(self) -> int:
        """Ranks of the grid that have samples of their own."""
        return arrangement_of("litgpt", self.algorithm).row_parts(self.chosen_grid)


def _count(option: str, text: str, least: int = 1) -> int:
    if not text.isdecimal() or int(text) < least:
        raise ValueError(f"litgpt: {option} {text} is not a whole number of at least {least}")
    return int(text)


def _goldfish(option: str, text: str) -> tuple[int, int]:
    try:
        k, h = (int(part) for part in text.split(","))
    except ValueError:
        k, h = 0, 0
    if k < 2 or h < 1:
        raise ValueError(
            f"litgpt: {option} {text}: wanted K,H with K of at least 2 (one of K tokens is left out) and H of at"
            f" least 1 (the tokens before it that decide), such as {option} 2,13"
        )
    return k, h


# Option -> (its value, what it wants, what it does); then those that are on or off.
_VALUES = {
    "--grid": (
        "XxYxZxDATA",
        "a grid, such as --grid 2x2x2x1, or --grid auto",
        "Ranks on each axis; 'auto': what the planner finds best for the model, stages too.",
    ),
    "--ranks": ("N", "a number of ranks", "With --grid auto and without torchrun: how many ranks to start."),
    "--machine": (
        "NAME|FILE",
        "a machine that axo plan knows, or a machine file",
        "With --grid auto: a machine that axo plan knows, or a file that axo profile wrote.",
    ),
    "--algorithm": (
        "NAME",
        "axonn, tesseract or summa",
        "How products are distributed: axonn, or on a grid with x = y tesseract or summa.",
    ),
    "--max-restarts": (
        "N",
        "a number of restarts, such as --max-restarts 3",
        "Start the ranks again, from the newest checkpoint, when one was lost; at most N times.",
    ),
    "--pipeline": (
        "N",
        "a number of stages, such as --pipeline 4",
        "Cut the model into N stages, each of them a grid.",
    ),
    "--schedule": (
        "NAME",
        "a schedule, such as --schedule zero-bubble",
        "Of the stages: gpipe, 1f1b (default), looped-bfs, interleaved-1f1b, zero-bubble, zbv or dualpipev.",
    ),
    "--cuts": (
        "BLOCKS",
        "even, planner, or the first blocks of later stages, such as --cuts 3,7",
        "First blocks of later stages: even (default), planner (the least flops of the busiest rank), or 3,7.",
    ),
    "--microbatches": (
        "M",
        "a number, such as --microbatches 8",
        "Parts of a micro-batch of LitGPT's that fill the stages; default: twice the stages.",
    ),
    "--offload": (
        "WHAT,...",
        "what goes there, such as --offload optimizer",
        "Onto the lower tier: optimizer, parameters, activations (or activations=BLOCKS).",
    ),
    "--offload-dir": ("DIR", "a folder on a disk", "The folder of the lower tier, for CPU ranks."),
    "--goldfish": (
        "K,H",
        "K,H, such as --goldfish 2,13",
        "Leave one of K tokens out of the training loss, chosen by the H tokens before it.",
    ),
}
_SWITCHES = {
    "--sharded": "Every rank saves its own part; 'axo consolidate' makes such a checkpoint whole.",
    "--vocab-loss": "Leave logits split over x in training: the same loss, less memory.",
    "--allow-new-data": "With --resume: go on although data, seed or batch are others now.",
    "--trust": "Let files of a checkpoint's folder run code: classes in a pickle, a prompt style, a chat template.",
}
NAMES = (*_VALUES, *_SWITCHES)
_READ: dict[str, Callable[[str, str], Any]] = {  # those whose value is no text
    "--grid": lambda _, text: None if text == AUTO else Grid.parse(text),
    "--ranks": _count,
    "--max-restarts": lambda option, text: _count(option, text, 0),
    "--pipeline": _count,
    "--microbatches": _count,
    "--goldfish": _goldfish,
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"litgpt: {message}")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        add_help=False,
        allow_abbrev=False,
        usage=argparse.SUPPRESS,
        epilog="A command of Axo's own: axo litgpt architectures [--grid ...] says which of LitGPT's configurations run"
        " on a grid.",
    )
    group = parser.add_argument_group("Options of Axo's own, for commands that run on a grid (pretrain, ...)")
    for name, (metavar, _, text) in _VALUES.items():
        group.add_argument(name, metavar=metavar, help=text, nargs="?", default="")  # None: it stands last, alone
    for name, text in _SWITCHES.items():
        group.add_argument(name, action="store_true", help=text)
    return parser


def help_text() -> str:
    """What ``--help`` says of these options."""
    return _parser().format_help()


def parse_options(arguments: list[str]) -> tuple[Options, list[str]]:
    """Axo's options, and the other arguments.

    Raises:
        ValueError: An option lacks its value, or the value is not one.
    """
    given, rest = _parser().parse_known_args(arguments)
    values: dict[str, Any] = {"grid": Grid(), "pipeline": int(given.grid != AUTO)}
    for option, (_, wanted, _) in _VALUES.items():
        name = option[2:].replace("-", "_")
        text = getattr(given, name)
        if text is None:
            raise ValueError(f"litgpt: {option} wants {wanted}")
        if text:
            values[name] = _READ[option](option, text) if option in _READ else text
    values |= {option[2:].replace("-", "_"): getattr(given, option[2:].replace("-", "_")) for option in _SWITCHES}
    options = Options(**values)
    automatic = options.grid is None
    for option, value in (("--ranks", given.ranks), ("--machine", given.machine)):
        if value and not automatic:
            raise ValueError(f"litgpt: {option} is for --grid auto; with a grid of your own leave it out")
    arrangement = arrangement_of("litgpt", options.algorithm)
    if automatic and options.algorithm != "axonn":
        raise ValueError(f"litgpt: --grid auto chooses for axonn; with --algorithm {options.algorithm} name a grid")
    for name in ("schedule", "cuts", "microbatches"):
        value = getattr(given, name)
        planned = options.pipeline == 0 and value in ("even", "planner")  # cuts of any number of stages
        if value and options.pipeline < 2 and not planned:
            raise ValueError(f"litgpt: --{name} {value} is of pipeline stages; add --pipeline N, or leave it out")
    if options.offload_dir and options.offload == "none":
        raise ValueError(
            f"litgpt: --offload-dir {options.offload_dir} without --offload; say what goes there, such as --offload"
            " optimizer"
        )
    if options.grid is not None:
        arrangement.check(options.grid)
    return options, rest
