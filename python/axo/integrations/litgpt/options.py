"""The options that ``axo litgpt`` adds to LitGPT's own: fields of one dataclass, which join LitGPT's parser.

So they may stand in a ``--config`` file too. The help shows what stands below each field; which commands have a use
for it, ``checks`` says.
"""

from __future__ import annotations

import math
import shlex
from dataclasses import Field, dataclass, fields
from typing import Any

from jsonargparse.typing import NonNegativeInt, PositiveInt, restricted_number_type

from axo.arrangement import arrangement_of
from axo.grid import Grid
from axo.nn.context import check_kind

AUTO, TRUST = "auto", "--trust"
_ONE_RANK = Grid()
_Seconds = restricted_number_type("Seconds", float, [(">", 0), ("<", math.inf)])
# What a value of these types is, in messages.
KINDS: dict[Any, str] = {
    PositiveInt: "a whole number of at least 1",
    NonNegativeInt: "a whole number of at least 0",
    _Seconds: "a number above 0",
}
_NUMBERS: dict[str, Any] = {
    "ranks": PositiveInt,
    "max_restarts": NonNegativeInt,
    "copy_every": PositiveInt,
    "pipeline": PositiveInt,
    "context": PositiveInt,
    "microbatches": PositiveInt,
    "operation_timeout": _Seconds,
}


@dataclass(frozen=True)
class Options:
    """What was asked of Axo. ``grid`` is None, and ``pipeline`` 0, where the planner is to choose."""

    grid: Grid | None = _ONE_RANK
    """XxYxZxDATA: ranks on each axis. Or 'auto': the planner's choice for the model, stages too."""
    ranks: int = 0
    """With --grid auto and without torchrun: how many ranks to start."""
    machine: str = ""
    """With --grid auto: a machine that axo plan knows, or a file that axo profile wrote."""
    sharded: bool = False
    """Every rank saves its own part; 'axo consolidate' makes such a checkpoint whole."""
    vocab_loss: bool = False
    """The same loss in training, of logits of a few rows at a time, or at least split over x: less memory."""
    max_restarts: int = 0
    """Start the ranks again, from the newest checkpoint, when one was lost; at most so many times."""
    elastic: str = ""
    """MIN:MAX, of pretrain: go on with fewer ranks when one dies, and with as many as OUT_DIR/ranks says."""
    copy_every: int = 10
    """With --elastic: steps between copies of the state in memory; default: 10."""
    hosts: str = ""
    """With --elastic: HOST[:PORT],... of all hosts, on each of which this command is typed."""
    goldfish: tuple[int, int] | None = None
    """K,H: leave one of K tokens out of the training loss, chosen by the H tokens before it."""
    pipeline: int = 1
    """Cut the model into so many stages, each of them a grid."""
    schedule: str = ""
    """Of the stages: gpipe, 1f1b (default), looped-bfs, interleaved-1f1b, zero-bubble, zbv or dualpipev."""
    cuts: str = ""
    """First blocks of later stages: even (default), planner (the least flops of the busiest rank), or 3,7."""
    microbatches: int = 0
    """Parts of a micro-batch of LitGPT's that fill the stages; default: twice the stages."""
    offload: str = "none"
    """Onto the lower tier: a list of optimizer, parameters, activations (or activations=BLOCKS)."""
    offload_dir: str = ""
    """The folder of the lower tier, for CPU ranks."""
    context: int = 1
    """Of pretrain and finetuning: neighbours along z that hold pieces of the same sequences."""
    context_kind: str = "ring"
    """How these see each other's keys and values: ring, gather or heads."""
    algorithm: str = "axonn"
    """How products are distributed: axonn, or on a grid with x = y tesseract or summa."""
    operation_timeout: float = 1800.0
    """Seconds that the start of the ranks, and an operation between them, may take; default: 1800."""
    trust: bool = False
    """Let files of a checkpoint's folder run code: classes in a pickle, a prompt style, a chat template."""
    host: str = "127.0.0.1"
    """Of serve: where it listens; 127.0.0.1 is this machine alone, 0.0.0.0 all networks."""
    allow_new_data: bool = False
    """With --resume: go on although data, seed or batch are others now."""

    def check(self) -> None:
        """Refuse options that do not go together.

        Raises:
            ValueError: It says which to leave out, or to add.
        """
        automatic = self.grid is None
        for each in self.given:
            value = getattr(self, each.name)
            if each.name in ("ranks", "machine") and not automatic:
                raise ValueError(f"litgpt: --{each.name} is for --grid auto; with a grid of your own leave it out")
            planned = self.pipeline == 0 and value in ("even", "planner")  # cuts of any number of stages
            if each.name in ("schedule", "cuts", "microbatches") and self.pipeline < 2 and not planned:
                raise ValueError(
                    f"litgpt: {name_of(each)} {value} is of pipeline stages; add --pipeline N, or leave it out"
                )
        if self.copy_every != Options.copy_every and not self.elastic:
            raise ValueError("litgpt: --copy-every is of --elastic MIN:MAX; add that, or leave it out")
        if self.hosts and not self.elastic:
            raise ValueError("litgpt: --hosts is of --elastic MIN:MAX; add that, or leave it out")
        if self.elastic and self.max_restarts:
            raise ValueError("litgpt: --elastic goes on by itself, from memory; leave --max-restarts out")
        check_kind("litgpt", self.context_kind)
        if self.context == 1 and self.context_kind != "ring":
            raise ValueError(f"litgpt: --context-kind {self.context_kind} is of --context N; add that, or leave it out")
        if self.context > 1:
            arrangement_of("litgpt", self.algorithm).only_axonn("litgpt: --context")
        if self.context > 1 and (self.grid is None or self.grid.z % self.context or self.pipeline > 1):
            lacks = "--grid auto" if self.grid is None else f"--pipeline {self.pipeline}"
            if self.grid is not None and self.pipeline == 1:
                raise ValueError(
                    f"litgpt: --context {self.context} does not divide z={self.grid.z} of --grid {self.grid}"
                )
            raise ValueError(
                f"litgpt: --context {self.context} with {lacks} is not supported; leave one of the two out"
            )
        if self.offload_dir and self.offload == "none":
            raise ValueError(
                f"litgpt: --offload-dir {self.offload_dir} without --offload; say what goes there, such as --offload"
                " optimizer"
            )
        arrangement = arrangement_of("litgpt", self.algorithm)
        if self.grid is not None:
            arrangement.check(self.grid)
        elif self.algorithm != "axonn":
            raise ValueError(f"litgpt: --grid auto chooses for axonn; with --algorithm {self.algorithm} name a grid")

    @property
    def given(self) -> list[Field[Any]]:
        """The options that differ from what stands where nothing is said."""
        usual = Options(pipeline=0) if self.grid is None else Options()
        return [each for each in fields(self) if getattr(self, each.name) != getattr(usual, each.name)]

    @property
    def by_hand(self) -> str:
        """The options that ask for the same, with the grid and the stages that were chosen.

        Without ``--allow-new-data`` and ``--trust``, which are said for one start: whoever copies the rest keeps the
        checks.
        """
        words = ["--grid", str(self.grid)]
        for each in self.given:
            value = getattr(self, each.name)
            if each.name not in ("grid", "ranks", "machine", "allow_new_data", "trust"):
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
        return arrangement_of("litgpt", self.algorithm).row_parts(self.chosen_grid) // self.context


def name_of(option: Field[Any]) -> str:
    """The option of a field: ``--vocab-loss``."""
    return "--" + option.name.replace("_", "-")


NAMES = tuple(name_of(each) for each in fields(Options))


def add_to(parser: Any) -> None:
    """Add the options to a parser of jsonargparse's."""
    from docstring_parser import parse_from_object

    group = parser.add_argument_group("Options of Axo's own")
    told = {each.arg_name: each.description for each in parse_from_object(Options).params}
    for each in fields(Options):
        # A number has no default here: what it would be depends on what else is said.
        number, text = _NUMBERS.get(each.name), None if each.default is None else str(each.default)
        kind: dict[str, Any] = {"type": number} if number else {"type": str | int, "default": text}
        group.add_argument(
            name_of(each), help=told[each.name], **({"action": "store_true"} if each.default is False else kind)
        )


def take_from(parsed: Any) -> Options:
    """Take the options out of what a parser with them has read.

    Raises:
        ValueError: One of them is none, or they do not go together.
    """
    said = {each.name: parsed.pop(each.name) for each in fields(Options)}
    said = {
        name: value if name in _NUMBERS or isinstance(value, bool) else str(value)
        for name, value in said.items()
        if value is not None
    }
    if said["grid"] == AUTO:
        said |= {"grid": None, "pipeline": said.get("pipeline", 0)}
    else:
        said["grid"] = Grid.parse(said["grid"])
    if "goldfish" in said:
        said["goldfish"] = _goldfish(said["goldfish"])
    options = Options(**said)
    options.check()
    return options


def _goldfish(text: str) -> tuple[int, int]:
    k, _, h = text.partition(",")
    if not (k.isdecimal() and h.isdecimal() and int(k) >= 2 and int(h) >= 1):
        raise ValueError(
            f"litgpt: --goldfish {text}: wanted K,H with K of at least 2 (one of K tokens is left out) and H of at"
            " least 1 (the tokens before it that decide), such as 2,13"
        )
    return int(k), int(h)
