"""The options that ``axo litgpt`` adds to LitGPT's own: fields of one dataclass, which join LitGPT's parser.

So they may stand in a ``--config`` file too. What one option's text must look like is said beside it; what several say
together, in :meth:`Options.check`. Whether a command has a use for them is the command's to say (``command``).
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable
from dataclasses import Field, dataclass, field, fields
from typing import Any

from axo.arrangement import arrangement_of
from axo.grid import Grid

AUTO, TRUST = "auto", "--trust"


def _as(metavar: str, text: str, read: Callable[[str], Any] = str) -> dict[str, Any]:
    """How an option is shown and read, as a field's metadata."""
    return {"metavar": metavar, "help": text, "read": read}


def _grid(text: str) -> Grid | str:
    return text if text == AUTO else Grid.parse(text)


def _at_least(least: int) -> Callable[[str], int]:
    def count(text: str) -> int:
        if not str(text).isdecimal() or int(text) < least:
            raise ValueError(f"{text} is not a whole number of at least {least}")
        return int(text)

    return count


def _goldfish(text: str) -> tuple[int, int]:
    try:
        k, h = (int(part) for part in text.split(","))
    except ValueError:
        k, h = 0, 0
    if k < 2 or h < 1:
        raise ValueError(
            f"{text}: wanted K,H with K of at least 2 (one of K tokens is left out) and H of at least 1 (the tokens"
            " before it that decide), such as 2,13"
        )
    return k, h


@dataclass(frozen=True)
class Options:
    """What was asked of Axo. ``grid`` is None, and ``pipeline`` 0, where the planner is to choose."""

    grid: Grid | None = field(
        default=Grid(),
        metadata=_as(
            "XxYxZxDATA", "Ranks on each axis; 'auto': the planner's choice for the model, stages too.", _grid
        ),
    )
    ranks: int = field(
        default=0, metadata=_as("N", "With --grid auto and without torchrun: how many ranks to start.", _at_least(1))
    )
    machine: str = field(
        default="",
        metadata=_as("NAME|FILE", "With --grid auto: a machine that axo plan knows, or a file that axo profile wrote."),
    )
    sharded: bool = field(
        default=False,
        metadata=_as("", "Every rank saves its own part; 'axo consolidate' makes such a checkpoint whole."),
    )
    vocab_loss: bool = field(
        default=False, metadata=_as("", "Leave logits split over x in training: the same loss, less memory.")
    )
    max_restarts: int = field(
        default=0,
        metadata=_as(
            "N", "Start the ranks again, from the newest checkpoint, when one was lost; at most N times.", _at_least(0)
        ),
    )
    goldfish: tuple[int, int] | None = field(
        default=None,
        metadata=_as(
            "K,H", "Leave one of K tokens out of the training loss, chosen by the H tokens before it.", _goldfish
        ),
    )
    pipeline: int = field(
        default=1, metadata=_as("N", "Cut the model into N stages, each of them a grid.", _at_least(1))
    )
    schedule: str = field(
        default="",
        metadata=_as(
            "NAME", "Of the stages: gpipe, 1f1b (default), looped-bfs, interleaved-1f1b, zero-bubble, zbv or dualpipev."
        ),
    )
    cuts: str = field(
        default="",
        metadata=_as(
            "BLOCKS",
            "First blocks of later stages: even (default), planner (the least flops of the busiest rank), or 3,7.",
        ),
    )
    microbatches: int = field(
        default=0,
        metadata=_as(
            "M", "Parts of a micro-batch of LitGPT's that fill the stages; default: twice the stages.", _at_least(1)
        ),
    )
    offload: str = field(
        default="none",
        metadata=_as("WHAT,...", "Onto the lower tier: optimizer, parameters, activations (or activations=BLOCKS)."),
    )
    offload_dir: str = field(default="", metadata=_as("DIR", "The folder of the lower tier, for CPU ranks."))
    algorithm: str = field(
        default="axonn",
        metadata=_as("NAME", "How products are distributed: axonn, or on a grid with x = y tesseract or summa."),
    )
    trust: bool = field(
        default=False,
        metadata=_as(
            "", "Let files of a checkpoint's folder run code: classes in a pickle, a prompt style, a chat template."
        ),
    )
    host: str = field(
        default="127.0.0.1",
        metadata=_as("ADDRESS", "Of serve: where it listens; 127.0.0.1 is this machine alone, 0.0.0.0 all networks."),
    )
    allow_new_data: bool = field(
        default=False, metadata=_as("", "With --resume: go on although data, seed or batch are others now.")
    )

    def check(self) -> None:
        """Refuse options that do not go together.

        Raises:
            ValueError: It says which to leave out, or to add.
        """
        automatic = self.grid is None
        for name in ("ranks", "machine"):
            if getattr(self, name) and not automatic:
                raise ValueError(f"litgpt: --{name} is for --grid auto; with a grid of your own leave it out")
        arrangement = arrangement_of("litgpt", self.algorithm)
        if automatic and self.algorithm != "axonn":
            raise ValueError(f"litgpt: --grid auto chooses for axonn; with --algorithm {self.algorithm} name a grid")
        for name in ("schedule", "cuts", "microbatches"):
            value = getattr(self, name)
            planned = self.pipeline == 0 and value in ("even", "planner")  # cuts of any number of stages
            if value and self.pipeline < 2 and not planned:
                raise ValueError(f"litgpt: --{name} {value} is of pipeline stages; add --pipeline N, or leave it out")
        if self.offload_dir and self.offload == "none":
            raise ValueError(
                f"litgpt: --offload-dir {self.offload_dir} without --offload; say what goes there, such as --offload"
                " optimizer"
            )
        if self.grid is not None:
            arrangement.check(self.grid)

    @property
    def given(self) -> list[str]:
        """The names of the options that differ from what stands where nothing is said, such as ``--vocab-loss``."""
        usual = Options(pipeline=0) if self.grid is None else Options()
        return [name_of(each) for each in fields(self) if getattr(self, each.name) != getattr(usual, each.name)]

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
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name not in ("grid", "ranks", "machine", "allow_new_data", "trust") and value != each.default:
                words.append(name_of(each))
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


def name_of(option: Field[Any]) -> str:
    """The option of a field: ``--vocab-loss``."""
    return "--" + option.name.replace("_", "-")


NAMES = tuple(name_of(each) for each in fields(Options))


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add the options to a parser."""
    group = parser.add_argument_group("Options of Axo's own")
    for each in fields(Options):
        text = each.metadata["help"]
        if each.default is False:
            group.add_argument(name_of(each), action="store_true", help=text)
        else:
            metavar = each.metadata["metavar"]
            default = None if each.name == "pipeline" else each.default  # left out, it depends on the grid
            group.add_argument(name_of(each), type=_Reader(each), default=default, metavar=metavar, help=text)


@dataclass(frozen=True)
class _Reader:
    """Reads an option's text for a parser, whose help shows this object as the option's type."""

    option: Field[Any]

    def __call__(self, value: Any) -> Any:
        if not isinstance(value, str | int | float) or value == self.option.default:  # read before
            return value
        try:
            return self.option.metadata["read"](str(value))
        except ValueError as error:  # argparse shows the words of this one
            raise argparse.ArgumentTypeError(str(error)) from None

    def __repr__(self) -> str:
        return str(self.option.metadata["metavar"])


def take_from(parsed: Any) -> Options:
    """Take the options out of what a parser with them has read.

    Raises:
        ValueError: They do not go together.
    """
    values: dict[str, Any] = {}
    for each in fields(Options):
        value = parsed.pop(each.name)
        values[each.name] = each.default if value is None else value
        if each.name == "pipeline" and value is None and values["grid"] == AUTO:
            values["pipeline"] = 0
    options = Options(**{**values, "grid": None if values["grid"] == AUTO else values["grid"]})
    options.check()
    return options
