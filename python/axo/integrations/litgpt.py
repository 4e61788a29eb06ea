"""``axo litgpt COMMAND ...``: LitGPT's own command line, on a grid.

    litgpt     pretrain pythia-14m --data LitData ...
    axo litgpt pretrain pythia-14m --data LitData ... --grid 2x2x2x1

The arguments are litgpt's, plus ``--grid`` and ``--goldfish K,H``; nothing of litgpt is changed or copied. Each rank
runs litgpt's own function with Fabric's strategy set to AxoStrategy by LT_STRATEGY. litgpt takes every device for a
data rank; so its "devices" are the grid's data ranks (z and data), each of them Gx*Gy ranks that work as one: batch
size, token counts and the flop line then are right as they stand, and ``--devices`` is not for the user to set.

torch.compile, which ``litgpt pretrain`` always asks for, is off unless TORCHDYNAMO_DISABLE=0 is set. AXO_VOCAB_LOSS=1
swaps the loss on whole logits for the vocabulary-parallel one. ``--goldfish`` leaves one of K training tokens out of
the loss, chosen by the H before it (axo_kernels/goldfish.py); the first H targets of a row, before which there are
fewer, all count, and validation sees all tokens.

Ranks are started here, or are torchrun's. The printed loss is rank 0's own, as litgpt has it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from axo.grid import Grid
from axo.launch import Rank, launch_local, set_threads


@dataclass(frozen=True)
class Command:
    """A command of litgpt's that runs on a grid.

    Args:
        module, function: Where it is.
        trains: Whether it takes ``--devices`` and launches ranks; if not, it is written for one device.
    """

    module: str
    function: str
    trains: bool

    def load(self) -> Callable[..., Any]:
        return getattr(importlib.import_module(self.module), self.function)


# All others run on one rank, without Axo.
PARALLEL = {
    "pretrain": Command("litgpt.pretrain", "setup", True),
    "finetune_full": Command("litgpt.finetune.full", "setup", True),
    "generate": Command("litgpt.generate.base", "main", False),
}
_TRAINERS = [name for name, command in PARALLEL.items() if command.trains]


def run(arguments: list[str]) -> None:
    """Run a litgpt command with its arguments.

    Raises:
        ValueError: The grid or the batch sizes do not fit, or the command cannot run on several ranks.
        axo.launch.RankFailed: A local rank failed.
    """
    if importlib.util.find_spec("litgpt") is None:
        raise ValueError("litgpt: LitGPT is not installed; pip install 'axo[litgpt]'")
    grid_text, arguments = _take("--grid", "a grid, such as --grid 2x2x2x1", arguments)
    grid_text = grid_text or os.environ.get("AXO_GRID", "")
    grid = Grid.parse(grid_text) if grid_text else Grid()
    goldfish_text, arguments = _take("--goldfish", "K,H, such as --goldfish 2,13", arguments)
    goldfish = _goldfish(goldfish_text) if goldfish_text else None
    name = arguments[0] if arguments else "--help"
    if name not in PARALLEL:
        if grid.world_size > 1 and not name.startswith("-"):
            raise ValueError(
                f"litgpt: {name} runs on one rank only, not on grid {grid}; on a grid run {', '.join(PARALLEL)}"
            )
        if goldfish is not None:
            raise ValueError(f"litgpt: --goldfish is a loss of {', '.join(_TRAINERS)}, not of {name}; leave it out")
        _stock(arguments)
        return
    if goldfish is not None and not PARALLEL[name].trains:
        raise ValueError(f"litgpt: --goldfish is a loss of {', '.join(_TRAINERS)}, not of {name}; leave it out")
    rank = Rank.from_environment()
    if rank is not None and rank.world_size != grid.world_size:
        raise ValueError(
            f"litgpt: grid {grid} has {grid.world_size} ranks, but {rank.world_size} were started;"
            f" start {grid.world_size}, or use another grid"
        )
    # Parsed once, before there are ranks: it takes seconds, and wrong input costs one message.
    start = _parse(name, arguments[1:], grid)
    if rank is None:
        launch_local(_rank, grid.world_size, start, name, str(grid), goldfish, True)
    else:
        _rank(start, name, str(grid), goldfish, False)


def _take(option: str, wanted: str, arguments: list[str]) -> tuple[str, list[str]]:
    """The value of an option of Axo's own ("" without it), and the other arguments.

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


def _stock(arguments: list[str]) -> None:
    """litgpt's own command line in this process."""
    from litgpt.__main__ import main

    sys.argv = ["litgpt", *arguments]
    main()


def _parse(name: str, arguments: list[str], grid: Grid) -> Callable[[], Any]:
    """Read a command's arguments with litgpt's own parser, which ends the process with its message if they are wrong.

    Raises:
        ValueError: An argument is the grid's business, or the global batch does not divide over the data ranks.
    """
    from jsonargparse import capture_parser
    from litgpt.utils import CLI

    from axo.integrations import text_data  # noqa: F401  so that --data LocalText is found

    for option in ("--devices", "--num_nodes"):
        if any(argument.split("=")[0] == option for argument in arguments):
            raise ValueError(f"litgpt: {option} is what the grid says ({grid}); leave it out")
    if PARALLEL[name].trains:
        arguments = [*arguments, "--devices", str(grid.z * grid.data)]
    sys.argv = ["litgpt", name, *arguments]  # litgpt reads it again when it saves its hyperparameters
    function = PARALLEL[name].load()
    parser = capture_parser(lambda: CLI(function))
    parser.prog = f"axo litgpt {name}"
    options = parser.parse_args(arguments)
    if "train" in options:
        _check_batch(options.train, grid)

    def start() -> None:
        values = parser.instantiate_classes(options)
        function(**{key: value for key, value in values.items(branches=True) if key in _parameters(function)})

    return start


def _parameters(function: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(function).parameters)


def _check_batch(train: Any, grid: Grid) -> None:
    at_once = train.micro_batch_size * grid.z * grid.data
    if train.global_batch_size % at_once:
        raise ValueError(
            f"litgpt: --train.global_batch_size={train.global_batch_size} does not divide over"
            f" micro_batch_size={train.micro_batch_size} on z*data={grid.z * grid.data} data ranks of grid {grid};"
            f" use a multiple of {at_once}"
        )


def _rank(start: Callable[[], Any], name: str, grid: str, goldfish: tuple[int, int] | None, local: bool) -> None:
    """What each rank runs."""
    import torch

    rank = Rank.from_environment()
    assert rank is not None
    set_threads(0, rank.local_world_size)
    torch.set_float32_matmul_precision("high")  # as litgpt's main does
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    os.environ.setdefault("LT_ACCELERATOR", "cpu")  # what axo.connect has a transport for
    os.environ["LT_STRATEGY"] = "axo"
    if not PARALLEL[name].trains:
        os.environ["LT_CLI_USED"] = "1"  # Fabric joins the ranks when it is made, since nobody calls launch()
    strategies: list[Any] = []
    _register(grid, goldfish, strategies)
    # Ranks print alike; what goes wrong on any of them comes as an exception. (torchrun keeps the streams apart.)
    quiet: Any = _silence() if local and rank.rank else contextlib.nullcontext()
    try:
        with quiet:
            start()
    except SystemExit as stop:
        if stop.code:
            raise ValueError(f"litgpt: {name} ended with exit code {stop.code}; its message is above") from None
    for strategy in strategies:
        if strategy.comms is not None:
            strategy.comms.close()


def _register(grid: str, goldfish: tuple[int, int] | None, made: list[Any]) -> None:
    """Let LT_STRATEGY=axo make strategies of ``grid`` that count data ranks, and note them in ``made``."""
    import torch._dynamo
    from lightning.fabric.strategies import STRATEGY_REGISTRY

    from axo.integrations.lightning import AxoStrategy

    torch._dynamo.config.disable = os.environ["TORCHDYNAMO_DISABLE"] == "1"

    def make() -> AxoStrategy:
        strategy = AxoStrategy(grid, counts="data")
        made.append(strategy)
        if strategy.vocab_loss or goldfish is not None:
            _use_loss_of(strategy, goldfish)
        return strategy

    STRATEGY_REGISTRY.register("axo", make, "The grid of axo litgpt", override=True)


def _use_loss_of(strategy: Any, goldfish: tuple[int, int] | None) -> None:
    """Put the strategy's loss where litgpt's commands look theirs up."""
    import litgpt.finetune.full
    import litgpt.pretrain
    import torch

    from axo_kernels import goldfish_mask

    def loss(logits: Any, targets: torch.Tensor, chunk_size: int = 128, ignore_index: int = -100) -> torch.Tensor:
        if goldfish is not None and torch.is_grad_enabled():  # litgpt validates without gradients
            targets = targets.masked_fill(~goldfish_mask(targets, *goldfish, ignore_index=ignore_index), ignore_index)
        return strategy.cross_entropy(logits, targets, chunk_size, ignore_index)

    for module in (litgpt.pretrain, litgpt.finetune.full):
        module.chunked_cross_entropy = loss


@contextlib.contextmanager
def _silence() -> Any:
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        yield
