"""Sharded checkpoints of a Fabric program: every rank writes its own chunks, nothing is gathered.

    step-00001000/lit_model.pth/        where a whole checkpoint is a file, a sharded one is a folder (axo.checkpoint)
    axo consolidate out/final whole/    a folder that stock LitGPT reads, made by one process, tensor by tensor

The module and the optimizer that ``fabric.save`` is given are sharded; everything else (counters, schedulers, the
position in the data) is kept as rank 0 has it.

Not here: several modules or optimizers in one checkpoint (refused by name).
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.types import _Stateful
from torch import nn
from torch.optim import Optimizer

from axo import checkpoint
from axo.checkpoint.folder import is_checkpoint, whole_file
from axo.checkpoint.stored import read_plain
from axo.checkpoint.writer import OfFirst
from axo.comm.connect import Communicators
from axo.offload import OffloadedAdamW

MODEL_FILE = "lit_model.pth"


def is_sharded(path: Any) -> bool:
    """Whether ``path`` is a checkpoint that :func:`save` made."""
    return "://" not in str(path) and is_checkpoint(Path(path))


def save(path: Any, state: dict[str, Any], comms: Communicators) -> None:
    """Write ``state`` as the folder ``path``. Every rank must call it.

    Raises:
        ValueError: It holds several modules or optimizers, or an optimizer alone, or what cannot be read back safely.
        axo.checkpoint.CheckpointError: Writing failed; on every rank.
    """
    path = Path(path).absolute()
    _begin(path.parent, state, comms, name=path.name)


def begin_copy(folder: Path, state: dict[str, Any], comms: Communicators, step: int, **how: Any) -> checkpoint.Save:
    """Begin to write ``folder/step-NNNNNNNN``, in the place of the one before; otherwise as :func:`save`."""
    offloaded = isinstance(_one(state, Optimizer, "optimizer"), OffloadedAdamW)  # there is no room for a copy of it
    return _begin(folder, state, comms, step=step, keep=1, async_=not offloaded, **how)


def _begin(folder: Path, state: dict[str, Any], comms: Communicators, **how: Any) -> checkpoint.Save:
    module, optimizer = _one(state, nn.Module, "module"), _one(state, Optimizer, "optimizer")
    if module is None:
        raise ValueError("checkpoint: a sharded checkpoint holds a module, and this state has none; save it whole")
    others = {name: value for name, value in state.items() if not isinstance(value, nn.Module | Optimizer)}
    values = {name: value.state_dict() if isinstance(value, _Stateful) else value for name, value in others.items()}
    names = {"module": _name(state, module), "optimizer": _name(state, optimizer)}
    # Of the ranks of a data rank only one reads the data and knows where the run stands.
    extra = OfFirst(names=names, values=values) if comms.everyone.rank == 0 else OfFirst()
    return checkpoint.save(folder, module, optimizer, extra=extra, comms=comms, **how)


def load(path: Any, state: dict[str, Any] | nn.Module, strict: bool, comms: Communicators) -> dict[str, Any]:
    """Read a folder into the objects of ``state``, on any grid; return what ``state`` lacks. Every rank must call it.

    Raises:
        ValueError: It is of another model, or lacks what ``state`` wants (``strict``).
    """
    if isinstance(state, nn.Module):
        checkpoint.load(path, state, strict=strict, rng=False, comms=comms)
        return {}
    module, optimizer = _one(state, nn.Module, "module"), _one(state, Optimizer, "optimizer")
    if module is None:
        raise ValueError(f"checkpoint: {path} is sharded; load it into a module, or make it whole: axo consolidate")
    loaded = checkpoint.load(path, module, optimizer, strict=strict, rng=False, comms=comms)
    values: dict[str, Any] = dict((loaded.extra or {}).get("values", {}))
    missing = [name for name, value in state.items() if value is not module and value is not optimizer]
    missing = [name for name in missing if name not in values]
    if strict and missing:
        raise ValueError(f"checkpoint: {path} does not hold {', '.join(missing)}; load with strict=False to go without")
    for name in [name for name in state if name in values]:
        value = values.pop(name)
        if isinstance(state[name], _Stateful):
            state[name].load_state_dict(value)
        else:
            state[name] = value
    return values


def consolidate(
    source: str | os.PathLike[str], out: str | os.PathLike[str], *, optimizer: bool = False, trust: bool = False
) -> Path:
    """Make a checkpoint folder of LitGPT's (a whole ``lit_model.pth``, configuration, tokenizer) of a sharded one.

    One process calls it. Host memory holds a tensor at a time, the disk the model twice.

    Args:
        source: A folder in which ``lit_model.pth`` is a sharded checkpoint.
        out: Another folder, made if it does not exist.
        optimizer: Write what a run saves, to resume from, not the weights alone.
        trust: As in ``axo.checkpoint.load``.

    Raises:
        ValueError: The two are the same folder, or the source holds no optimizer.
    """
    source, out = Path(source), Path(out)
    if out.is_file() or out.resolve() == source.resolve():
        raise ValueError(f"consolidate: {out} is {'a file' if out.is_file() else 'the source'}; name another folder")
    out.mkdir(parents=True, exist_ok=True)
    target = out / MODEL_FILE
    checkpoint.consolidate(source / MODEL_FILE, target, optimizer=optimizer, trust=trust)
    if optimizer:
        whole = read_plain(target)
        extra = whole["extra"]
        names = extra["names"]
        run = {names["module"]: whole["model"], names["optimizer"]: whole["optimizer"]} | extra["values"]
        with whole_file(target) as unfinished:
            torch.save(run, unfinished)
    for file in source.iterdir():
        if file.is_file() and not file.name.startswith("."):
            shutil.copy(file, out)
    return out


def holds_sharded(folder: str | os.PathLike[str]) -> bool:
    """Whether ``folder`` is a checkpoint folder of LitGPT's with a sharded model in it."""
    return is_checkpoint(Path(folder) / MODEL_FILE)


def _one(state: dict[str, Any], kind: type, what: str) -> Any:
    names = [name for name, value in state.items() if isinstance(value, kind)]
    if len(names) > 1:
        raise ValueError(f"checkpoint: a sharded checkpoint holds one {what}, not {', '.join(names)}; save them whole")
    return state[names[0]] if names else None


def _name(state: dict[str, Any], value: Any) -> str:
    return next((name for name, other in state.items() if value is not None and other is value), "")
