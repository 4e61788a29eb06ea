"""save: every rank writes its chunks into a hidden folder, and the folder gets its name when all have.

    save     wait for the save before this one; collect the entries; compare the arguments of all ranks; rank 0 makes
             the hidden folder; (async_) copy the entries to host memory
    write    on the same thread or another: tell what each rank holds, and plan who writes what; write a file; tell
             what lies where; rank 0 writes the metadata, looks that every file is there, renames and prunes; tell all

Both speak over a process group of their own, so that training may communicate meanwhile. What a failed save has written
is removed.
"""

from __future__ import annotations

import atexit
import io
import itertools
import os
import re
import sys
from collections.abc import Iterable
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from axo.checkpoint import folder as folders
from axo.checkpoint import metadata, state, storage
from axo.checkpoint.boxes import Box, Parts, assign
from axo.checkpoint.mirrors import Mirrors
from axo.checkpoint.ranks import Save, checkpoint_group, number_of, on_all_ranks, pending, rank_in, share
from axo.comm.connect import Communicators
from axo.comm.extension import _C
from axo.errors import CheckpointError
from axo.launch import BEFORE_A_RANK_ENDS


def _end_of_the_last() -> None:
    pending.wait()


BEFORE_A_RANK_ENDS.append(_end_of_the_last)


@atexit.register  # before communicators close: registered later than theirs
def _at_exit() -> None:
    try:
        _end_of_the_last()
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
    mirrors: Mirrors | None = None,
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
        mirrors: The folder is one in each host's memory, and each host keeps another's files, too; None: see above.

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
    group, of_first = checkpoint_group(comms), isinstance(extra, OfFirst)
    entries: dict[str, Any] = {}
    final, part, first = Path(), None, 0 if mirrors is None else mirrors.first
    staged = comms is not None and comms.stages > 1  # a stage may know what another does not

    def say(error: ValueError | OSError | RecursionError) -> str:
        if isinstance(error, RecursionError):
            return "checkpoint: extra holds itself, or is nested too deeply; use plain values"
        return f"checkpoint: {folder} cannot be used: {error.strerror}" if isinstance(error, OSError) else str(error)

    with on_all_ranks(group, (ValueError, OSError, RecursionError), say) as told:
        extra = dict(extra) if isinstance(extra, OfFirst) else extra  # a class of its own is not read back
        _check_arguments(folder, name, step, extra, keep, run)
        final = Path(folder).absolute() / (name or folders.name_of(step))
        folders.check_place(final, run)
        entries = _entries(model, optimizer, step, extra, comms)
        told |= {"folder": str(final.parent), "name": name, "step": step, "keep": keep, "run": run}
        told |= {"async_": async_, "optimizer": state.kind_of(optimizer)}
        if not staged:
            tensors = [(name, value.shape, value.local.dtype) for name, value in state.parts(entries).items()]
            told["model"] = f"{len(tensors)} tensors, {state.digest(tensors)}"
            told["extra"] = "" if of_first else state.digest(extra)
    if staged:
        _join_stages(entries, group)
    try:
        with on_all_ranks(
            group, (OSError,), lambda e: f"checkpoint: {final.parent} cannot be written to: {e.strerror}"
        ):
            if mirrors is not None and rank_in(group) == first:
                mirrors.prune(run)
            part = folders.UnfinishedCheckpoint(final, run) if rank_in(group) == first else None
        path = Path(share(group, part and str(part.folder))[first])
        if async_:
            why = "checkpoint: async_=True has no memory for a copy ({}); save without it"
            with on_all_ranks(group, (MemoryError, RuntimeError), lambda e: why.format(state.reason(e))):
                for entry, value in entries.items():  # copies in host memory
                    entries[entry] = value.staged() if isinstance(value, Parts) else deepcopy(_without_graphs(value))
    except BaseException:
        if part is not None:
            part.close()
        raise
    handle = Save(final)
    if not async_:
        write(entries, path, part, final, step, keep, group, mirrors)
        return handle
    handle.begin(lambda: write(entries, path, part, final, step, keep, group, mirrors))
    pending.save = handle  # not earlier: another thread's save waits for it
    if comms is not None:
        comms.before_close(handle.finish)
    return handle


class OfFirst(dict[str, Any]):
    """What rank 0 alone knows, and saves for all, as ``extra``."""


def _without_graphs(value: Any) -> Any:
    """The value, its tensors cut off from what computed them: a loss in ``extra`` would not be copied."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor if tensor.is_leaf else tensor.detach(), value)


def _check_arguments(folder: Any, name: Any, step: Any, extra: Any, keep: Any, run: Any) -> None:
    folders.check_local(folder, f"checkpoint: folder={folder!r} names no folder; give one, such as 'runs/a'")
    folders.check_step("checkpoint", step)
    if name is not None:
        if not isinstance(name, str) or not re.fullmatch(r"[^./][^/]*", name) or not name.isprintable():
            raise ValueError(
                f"checkpoint: name={name!r} is not the name of a folder in {folder}; use one without '/', without a"
                " leading dot and without signs that cannot be printed"
            )
        if folders.step_of(name) not in (None, step):
            raise ValueError(
                f"checkpoint: name={name!r} is that of another step than {step}; leave it out, or use another"
            )
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
        raise ValueError(f"checkpoint: keep={keep!r} is out of range; keep at least 1, or None for all")
    if run is not None and (not isinstance(run, str) or not run):
        raise ValueError(f"checkpoint: run={run!r} is not an identity; use a string, or None for none")
    _check_readable("extra", extra)


def _check_readable(what: str, value: Any) -> None:
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
            _check_readable(what, value)
    entries[f"{state.RNG}/{rank}"] = state.rng_state()
    where = {} if comms is None else {"grid": str(comms.grid), "ranks": comms.everyone.size}
    entries[state.HEAD] = head(step, aliases=aliases, dropout=state.dropout_state(model), extra=extra, **where)
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


def head(step: int, **fields: Any) -> dict[str, Any]:
    """The entry that says what the others are."""
    alone = {"grid": "1x1x1x1", "ranks": 1, "aliases": {}, "dropout": {}, "extra": None}
    return {"format": state.FORMAT, "step": step, "torch": str(torch.__version__)} | alone | fields


def write(
    entries: dict[str, Any],
    path: Path,
    part: folders.UnfinishedCheckpoint | None,
    final: Path,
    step: int,
    keep: int | None = None,
    group: dist.ProcessGroup | None = None,
    mirrors: Mirrors | None = None,
) -> None:
    """Write entries into ``path``, which gets the name ``final``: what of a save may run on another thread.

    Every rank of the group runs it; ``part``, which made ``path``, is rank 0's, with mirrors that of each host's first.

    Raises:
        CheckpointError: It failed; on every rank.
    """
    rank, problem, interrupt, written = rank_in(group), "", None, []
    file = f"__{rank}_0.distcp"
    holds: dict[tuple[str, Box | None], int] = {}  # bytes
    for name, value in entries.items():
        tensor = isinstance(value, Parts)
        holds |= {(name, box): value.view(box).nbytes for box in value.boxes} if tensor else {(name, None): 0}
    try:
        writers = assign(share(group, holds))
        own = [key for key, writer in writers.items() if writer == rank]
        try:
            values = (entries[name] if box is None else entries[name].view(Box(*box)) for name, box in own)
            for (name, box), extent in zip(own, storage.write(path / file, values), strict=True):
                whole = None if box is None else (str(entries[name].local.dtype), entries[name].shape)
                written.append((name, box, whole, extent))
        except BaseException as error:
            problem = f"rank {rank}: {str(error) or type(error).__name__}"
            interrupt = None if isinstance(error, Exception) else error
        told = share(group, (problem, written))
        problems = [problem for problem, _ in told]
        if mirrors is not None and not any(problems):
            problems = mirrors.exchange(path, file)
        if part is not None and not any(problems):
            try:
                part.commit(step, metadata.write(path, _contents(itertools.chain(*(written for _, written in told)))))
                if keep is not None and mirrors is None:
                    folders.prune(final, keep, part.run)
            except BaseException as error:  # the others wait to hear of it
                problem = f"rank {rank}: {str(error) or type(error).__name__}"
                interrupt = None if isinstance(error, Exception) else error
        problems += share(group, problem)
    finally:
        if part is not None:
            part.close()
    if interrupt is not None:
        raise interrupt
    if any(problems):
        raise CheckpointError(f"checkpoint: {final} was not written: {next(filter(None, problems))}")
    if mirrors is not None:
        mirrors.confirm(final)


def _contents(written: Iterable[Any]) -> metadata.Contents:
    contents: metadata.Contents = {}
    for name, box, whole, extent in written:
        if whole is None:
            contents[name] = metadata.Extent(*extent)
            continue
        dtype = getattr(torch, whole[0].removeprefix("torch."))
        tensor = contents.setdefault(name, metadata.StoredTensor(dtype, whole[1], {}))
        assert isinstance(tensor, metadata.StoredTensor)
        tensor.chunks[Box(*box)] = metadata.Extent(*extent)
    return contents
