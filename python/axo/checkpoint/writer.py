"""save: every rank writes its chunks into a hidden folder, and the folder gets its name when all have.

On the calling thread: wait for the save before this one, collect the entries, compare the arguments of all ranks, and
(``async_``) copy the entries to host memory. Then, on the same thread or another: DCP's plan, write and metadata over a
process group of its own, so that training may communicate meanwhile; rank 0 looks that every rank's file is there,
renames and prunes; all ranks learn how it ended. What a failed save has written is removed.
"""

from __future__ import annotations

import atexit
import io
import os
import sys
import warnings
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from axo.checkpoint import folder as folders
from axo.checkpoint import state
from axo.checkpoint.parts import Parts, SavePlanner
from axo.checkpoint.ranks import Save, checkpoint_group, number_of, on_all_ranks, pending, rank_in, share
from axo.checkpoint.storage import Writer, seal
from axo.comm.connect import Communicators
from axo.comm.extension import _C
from axo.errors import CheckpointError, Error
from axo.launch import BEFORE_A_RANK_ENDS

BEFORE_A_RANK_ENDS.append(pending.wait)


@atexit.register  # before communicators close: registered later than theirs
def _at_exit() -> None:
    try:
        pending.wait()
    except Exception as error:
        print(f"axo: {error}", file=sys.stderr)
        _C.end_with_failure()  # whatever is raised here would not change the program's exit code


def save(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    step: int = 0,
    name: str | None = None,
    extra: dict[str, Any] | None = None,
    keep: int | None = None,
    run: str | None = None,
    async_: bool = False,
    comms: Communicators | None = None,
) -> Save:
    """Write a checkpoint ``folder/step-NNNNNNNN``. Every rank calls it with the same arguments.

    Args:
        folder: A file system that all ranks see.
        model: Parallel or plain.
        optimizer: Over the model's parameters.
        step: Names the checkpoint; ``load`` gives it back. An older one of the same step and run is replaced.
        name: Names it instead, one part of a path; ``latest`` and ``keep`` then do not see it.
        extra: Plain values and tensors, the same on all ranks (data position, a scaler's or scheduler's state).
        keep: Remove the oldest of more than this many of this run, once this one is complete; None: none.
        run: Identity of the run (``axo.checkpoint.Run.id``); what other runs saved is neither replaced nor removed.
        async_: Copy to host memory, return, and write while training goes on. The next save waits for it.
        comms: What ``axo.connect`` returned; needed only for a model without parallel layers on several ranks.

    Returns:
        A handle; ``wait()`` blocks until the checkpoint is complete. Without ``async_`` it is complete already.

    Raises:
        ValueError: The arguments are wrong or differ between ranks, what has that name may not be replaced, or a
            state cannot be saved; on every rank, and nothing has been written.
        CheckpointError: Writing failed (a full disk, for example): this one, or an earlier that nobody waited for.
        axo.PeerLost, axo.Timeout: A rank has died, or does not come.
    """
    pending.wait()
    state.check_kinds(model, optimizer)
    comms = comms if comms is not None else state.communicators(model)
    group = checkpoint_group(comms)
    entries: dict[str, Any] = {}
    final, part = Path(), None
    staged = comms is not None and comms.stages > 1  # a stage may know what another does not

    def say(error: ValueError | OSError | RecursionError) -> str:
        if isinstance(error, RecursionError):
            return "checkpoint: extra holds itself, or is nested too deeply; use plain values"
        return f"checkpoint: {folder} cannot be used: {error.strerror}" if isinstance(error, OSError) else str(error)

    with on_all_ranks(group, (ValueError, OSError, RecursionError), say) as told:
        _check_arguments(folder, name, step, extra, keep, run)
        final = Path(folder).absolute() / (name or folders.name_of(step))
        folders.check_place(final, run)
        entries = _entries(model, optimizer, step, extra, comms)
        told |= {"folder": str(final.parent), "name": name, "step": step, "keep": keep, "run": run}
        told |= {"async_": async_, "optimizer": state.kind_of(optimizer)}
        if not staged:
            tensors = [(name, value.shape, value.local.dtype) for name, value in state.parts(entries).items()]
            told |= {"model": f"{len(tensors)} tensors, {state.digest(tensors)}", "extra": state.digest(extra)}
    if staged:
        _join_stages(entries, group)
    try:
        with on_all_ranks(
            group, (OSError,), lambda e: f"checkpoint: {final.parent} cannot be written to: {e.strerror}"
        ):
            part = folders.UnfinishedCheckpoint(final, run) if rank_in(group) == 0 else None
        path = Path(share(group, part and str(part.folder))[0])
        if async_:
            with on_all_ranks(group, (MemoryError, RuntimeError), _without_memory):
                _stage(entries)
    except BaseException:
        if part is not None:
            part.close()
        raise
    handle = Save(final)
    if not async_:
        write(entries, path, part, final, step, keep, group)
        return handle
    handle.begin(lambda: write(entries, path, part, final, step, keep, group))
    pending.save = handle  # not earlier: another thread's save waits for it
    if comms is not None:
        comms.before_close(pending.finish)
    return handle


def _stage(entries: dict[str, Any]) -> None:
    """Replace the entries by copies in host memory."""
    for key, value in entries.items():
        entries[key] = value.staged() if isinstance(value, Parts) else deepcopy(_without_graphs(value))


def _without_memory(error: Exception) -> str:
    return f"checkpoint: async_=True has no memory for a copy ({state.reason(error)}); save without it"


def _without_graphs(value: Any) -> Any:
    """The value, its tensors cut off from what computed them: a loss in ``extra`` would not be copied."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor if tensor.is_leaf else tensor.detach(), value)


def _check_arguments(folder: Any, name: Any, step: Any, extra: Any, keep: Any, run: Any) -> None:
    folders.check_local(folder, f"checkpoint: folder={folder!r} names no folder; give one, such as 'runs/a'")
    folders.check_step("checkpoint", step)
    if name is not None and (
        not isinstance(name, str) or name in ("", "..") or name[0] == "." or "/" in name or not name.isprintable()
    ):
        raise ValueError(
            f"checkpoint: name={name!r} is not the name of a folder in {folder}; use one without '/', without a leading"
            " dot and without signs that cannot be printed"
        )
    if name is not None and folders.step_of(name) not in (None, step):
        raise ValueError(f"checkpoint: name={name!r} is that of another step than {step}; leave it out, or use another")
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
        raise ValueError(f"checkpoint: keep={keep!r} is out of range; keep at least 1, or None for all")
    if run is not None and (not isinstance(run, str) or not run):
        raise ValueError(f"checkpoint: run={run!r} is not an identity; use a string, or None for none")
    check_readable("extra", extra)


def check_readable(what: str, value: Any) -> None:
    """Whether ``load`` will take what is no tensor of the model."""
    buffer, value = io.BytesIO(), state.without_numbers(value)
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except OSError:  # of the system, not of what the value holds
        raise
    except Exception as error:  # pickle's own, and torch's for classes that it does not load
        raise ValueError(
            f"checkpoint: {what} holds what cannot be read back safely ({state.reason(error)}); use numbers,"
            " strings, lists, dicts and tensors, such as a state_dict"
        ) from None


def _entries(
    model: nn.Module, optimizer: Optimizer | None, step: int, extra: dict[str, Any] | None, comms: Communicators | None
) -> dict[str, Any]:
    rank = number_of(comms)
    entries, aliases = state.model_entries(model)
    if optimizer is not None:
        entries |= state.optimizer_entries(model, optimizer)
    for entry, value in entries.items():
        if not isinstance(value, Parts):
            what = f"an option of {type(optimizer).__name__}" if entry == state.OPTIMIZER else f"{entry!r}"
            check_readable(what, value)
    entries[f"{state.RNG}/{rank}"] = state.rng_state()
    grid, ranks = ("1x1x1x1", 1) if comms is None else (str(comms.grid), comms.everyone.size)
    dropout = state.dropout_state(model)
    entries[state.HEAD] = head(step, grid=grid, ranks=ranks, aliases=aliases, dropout=dropout, extra=extra)
    return entries


def _join_stages(entries: dict[str, Any], group: dist.ProcessGroup | None) -> None:
    """Make what is no tensor say the same on all stages: that of the whole model."""
    mine = entries[state.HEAD]
    told = share(group, (mine["aliases"], mine["dropout"], entries.get(state.OPTIMIZER)))
    for aliases, dropout, _ in told:
        mine["aliases"] |= aliases
        mine["dropout"] |= dropout
    if state.OPTIMIZER in entries:
        entries[state.OPTIMIZER] = state.join_optimizers([saved for _, _, saved in told if saved is not None])


def head(
    step: int,
    *,
    grid: str = "1x1x1x1",
    ranks: int = 1,
    aliases: dict[str, str] | None = None,
    dropout: dict[str, Any] | None = None,
    extra: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The entry that says what the others are."""
    return {
        "format": state.FORMAT,
        "step": step,
        "grid": grid,
        "ranks": ranks,
        "torch": str(torch.__version__),
        "aliases": aliases or {},
        "dropout": dropout or {},
        "extra": extra,
    }


def write(
    entries: dict[str, Any],
    path: Path,
    part: folders.UnfinishedCheckpoint | None,
    final: Path,
    step: int,
    keep: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write entries into ``path``, which gets the name ``final``: what of a save may run on another thread.

    Every rank of the group runs it; ``part``, which made ``path``, is rank 0's.

    Raises:
        CheckpointError: It failed; on every rank.
    """
    problem = ""
    interrupt: BaseException | None = None
    try:
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                dcp.save(
                    entries,
                    storage_writer=Writer(path),
                    planner=SavePlanner(),
                    process_group=group,
                    no_dist=group is None,
                )
            if part is not None:
                part.commit(step, seal(path))
                if keep is not None:
                    folders.prune(final, keep, part.run)
        except Error:  # a peer is lost, and could not be told of a problem
            raise
        except CheckpointException as error:  # DCP's: the same on all ranks
            rank, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
            problem = f"rank {rank}: {cause or type(cause).__name__}"
            own = error.failures.get(rank_in(group), (None, None))[0]
            interrupt = own if isinstance(own, KeyboardInterrupt) else None  # not of the writing
        except Exception as error:
            problem = f"rank {rank_in(group)}: {error}"
        problems = share(group, problem)
    finally:
        if part is not None:
            part.close()
    if interrupt is not None:
        raise interrupt
    if any(problems):
        raise CheckpointError(f"checkpoint: {final} was not written: {next(filter(None, problems))}")
