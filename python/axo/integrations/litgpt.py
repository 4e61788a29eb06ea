"""``axo litgpt COMMAND ...``: LitGPT's own command line, on a grid.

    litgpt     pretrain pythia-14m --data LitData ...
    axo litgpt pretrain pythia-14m --data LitData ... --grid 2x2x2x1

The arguments are litgpt's, plus ``--grid``; nothing of litgpt is changed or copied. Each rank runs litgpt's own
function with Fabric's strategy set to AxoStrategy by LT_STRATEGY. litgpt takes every device for a data rank; so its
"devices" are the grid's data ranks (z and data), each of them Gx*Gy ranks that work as one: batch size, token counts
and the flop line then are right as they stand, and ``--devices`` is not for the user to set.

torch.compile, which ``litgpt pretrain`` always asks for, is off unless TORCHDYNAMO_DISABLE=0 is set. AXO_VOCAB_LOSS=1
swaps the loss on whole logits for the vocabulary-parallel one.

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


def run(arguments: list[str]) -> None:
    """Run a litgpt command with its arguments.

    Raises:
        ValueError: The grid or the batch sizes do not fit, or the command cannot run on several ranks.
        axo.launch.RankFailed: A local rank failed.
    """
    if importlib.util.find_spec("litgpt") is None:
        raise ValueError("litgpt: LitGPT is not installed; pip install 'axo[litgpt]'")
    grid_text, arguments = _take_grid(arguments)
    grid = Grid.parse(grid_text) if grid_text else Grid()
    name = arguments[0] if arguments else "--help"
    if name not in PARALLEL:
        if grid.world_size > 1 and not name.startswith("-"):
            raise ValueError(
                f"litgpt: {name} runs on one rank only, not on grid {grid}; on a grid run {', '.join(PARALLEL)}"
            )
        _stock(arguments)
        return
    rank = Rank.from_environment()
    if rank is not None and rank.world_size != grid.world_size:
        raise ValueError(
            f"litgpt: grid {grid} has {grid.world_size} ranks, but {rank.world_size} were started;"
            f" start {grid.world_size}, or use another grid"
        )
    # Parsed once, before there are ranks: it takes seconds, and wrong input costs one message.
    start = _parse(name, arguments[1:], grid)
    if rank is None:
        launch_local(_rank, grid.world_size, start, name, str(grid), True)
    else:
        _rank(start, name, str(grid), False)


def _take_grid(arguments: list[str]) -> tuple[str, list[str]]:
    grid, rest, waiting = os.environ.get("AXO_GRID", ""), [], False
    for argument in arguments:
        if waiting:
            grid, waiting = argument, False
        elif argument == "--grid":
            waiting = True
        elif argument.startswith("--grid="):
            grid = argument.removeprefix("--grid=")
        else:
            rest.append(argument)
    if waiting:
        raise ValueError("litgpt: --grid wants a grid, such as --grid 2x2x2x1")
    return grid, rest


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


def _rank(start: Callable[[], Any], name: str, grid: str, local: bool) -> None:
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
    _register(grid, strategies)
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


def _register(grid: str, made: list[Any]) -> None:
    """Let LT_STRATEGY=axo make strategies of ``grid`` that count data ranks, and note them in ``made``."""
    import torch._dynamo
    from lightning.fabric.strategies import STRATEGY_REGISTRY

    from axo.integrations.lightning import AxoStrategy

    torch._dynamo.config.disable = os.environ["TORCHDYNAMO_DISABLE"] == "1"

    def make() -> AxoStrategy:
        strategy = AxoStrategy(grid, counts="data")
        made.append(strategy)
        if strategy.vocab_loss:
            _use_loss_of(strategy)
        return strategy

    STRATEGY_REGISTRY.register("axo", make, "The grid of axo litgpt", override=True)


def _use_loss_of(strategy: Any) -> None:
    """Put the strategy's loss where litgpt's commands look theirs up."""
    import litgpt.finetune.full
    import litgpt.pretrain

    for module in (litgpt.pretrain, litgpt.finetune.full):
        module.chunked_cross_entropy = strategy.cross_entropy


@contextlib.contextmanager
def _silence() -> Any:
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        yield
