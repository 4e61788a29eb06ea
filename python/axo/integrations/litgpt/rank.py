"""What each rank of ``axo litgpt`` runs: LitGPT's own function, with Fabric's strategy set to Axo's."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from axo.integrations.fabric.step_agreement import StepAgreement
from axo.integrations.fabric.strategy import register
from axo.integrations.litgpt import harmless, run_folder
from axo.integrations.litgpt.commands import PARALLEL
from axo.integrations.litgpt.options import Options
from axo.integrations.litgpt.parsing import Parsed
from axo.integrations.litgpt.patches import LitGPTRun, Stopped, patched
from axo.integrations.litgpt.strategy import strategy_of
from axo.launch import Rank, Termination, set_threads
from axo.train.config import TrainConfig
from axo.train.elastic import StateCopies


def start(parsed: Parsed, again: bool, copy: str | None = None) -> None:
    """Call LitGPT's function with what was parsed, from its newest checkpoint where a run goes on by itself.

    ``copy``: from this one in memory.
    """
    options = dict(parsed.values)
    wanted, initial = options.get("resume"), options.get("initial_checkpoint_dir")
    by_itself = wanted in (True, "auto")
    if copy is not None:
        options |= {"resume": Path(copy), "initial_checkpoint_dir": None}
    elif "resume" in options and (again or (by_itself and initial is None)):  # LitGPT refuses both
        # LitGPT would take other runs' below the folder too.
        newest = run_folder.newest(options["out_dir"])
        if newest is not None and initial is not None:
            options["initial_checkpoint_dir"] = None
        options["resume"] = newest or (wanted if not by_itself else False)
    PARALLEL[parsed.command].load()(**options)  # which may be replaced


def run(
    name: str, options: Options, begin: Callable[[bool], Any], hyperparameters: str, local: bool, restart: int,
    elastic: tuple[TrainConfig, StateCopies] | None = None,
) -> int:  # fmt: skip
    """Run a command on this rank. Returns how many ranks it goes on with, as rank 0 was told; 0: it has ended.

    Args:
        name, options: The command, and what was asked of Axo.
        begin: Calls LitGPT's function; true: it goes on from its newest checkpoint.
        hyperparameters: LitGPT's options, as it writes them.
        local: The ranks were started here, so they share this program's output.
        restart: How often the ranks were started before.
        elastic: The run, and where its ranks leave copies of their state; None: they do not.

    Raises:
        ValueError: LitGPT ended with an exit code.
    """
    rank = Rank.from_environment()
    assert rank is not None
    set_threads(0, rank.local_world_size)
    torch.set_float32_matmul_precision("high")  # as litgpt's main does
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    os.environ.setdefault("LT_ACCELERATOR", "cpu")  # what axo.connect has a transport for
    os.environ["LT_STRATEGY"] = "axo"
    torch._dynamo.config.disable = os.environ["TORCHDYNAMO_DISABLE"] == "1"
    command = PARALLEL[name]
    this = LitGPTRun(importlib.import_module(command.module), options, hyperparameters)
    if not options.trust:
        protect()

    def make() -> Any:
        agreement = this.agreement if command.trains else None
        this.strategy = strategy_of(options, step_agreement=agreement, like_one_device=command.finetunes)
        return this.strategy

    register(make)
    with contextlib.ExitStack() as stack:
        # All ranks print the same, so only rank 0 does; errors come as exceptions. (torchrun keeps the streams apart.)
        if local and rank.rank:
            stack.enter_context(_silence())
        if rank.rank:
            for logger in ("lightning", "lightning.fabric", "lightning.pytorch"):  # each rank would say what it starts
                logging.getLogger(logger).setLevel(logging.WARNING)
        else:
            parts, count = options.data_ranks, options.ranks_in_all
            reads = f"which read each batch in {parts} parts" if parts > 1 else "which read the same batch"
            grid = options.chosen_grid.in_stages(options.pipeline)
            print(f"axo litgpt: grid {grid}: " + (f"{count} ranks, {reads}" if count > 1 else "1 rank"))
        stack.enter_context(patched(this))
        if command.trains:
            termination = stack.enter_context(Termination())
            this.agreement, this.termination = StepAgreement(lambda: termination.asked), termination
            this.elastic = elastic
        elif not command.launches:
            os.environ["LT_CLI_USED"] = "1"  # Fabric joins the ranks when it is made, since nobody calls launch()
        ranks = 0
        try:
            begin(restart > 0)
        except Stopped as stopped:
            ranks = stopped.ranks
            if rank.rank == 0 and str(stopped):
                print(f"axo litgpt: {stopped}", flush=True)
        except SystemExit as stop:
            if stop.code:
                raise ValueError(f"litgpt: {name} ended with exit code {stop.code}; its message is above") from None
    if this.strategy is not None and this.strategy.comms is not None:
        this.strategy.comms.close()
    return ranks


def protect() -> None:
    """Let nothing in a checkpoint's folder run code, in this process and in those that LitServe starts."""
    harmless.protect()
    if "litgpt.deploy.serve" in sys.modules:
        from axo.integrations.litgpt import serving_apis  # wants LitServe

        serving_apis.replace()


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        yield
