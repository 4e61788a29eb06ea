"""load: every rank reads the chunks that overlap its own part, from a checkpoint of any grid or from a plain file.

    choose     rank 0 names the checkpoint; ranks compare their arguments, and stages say which tensors they have
    compare    what it says it holds with the model, on every rank: of another model it is one error everywhere, and
               nothing has changed
    read       straight into the parameters where they lie (``stored``), then values: optimizer, modules, generators

No rank ever holds a whole tensor that is split.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from axo.checkpoint import folder as folders
from axo.checkpoint import state
from axo.checkpoint.boxes import Parts
from axo.checkpoint.ranks import checkpoint_group, number_of, on_all_ranks, rank_in, share
from axo.checkpoint.stored import StoredFile, StoredFolder
from axo.comm.connect import Communicators
from axo.nn.placeholder import renamed
from axo.overlap.model import engines

# What reading raises of files that hold other things than a save writes; most of our own code, as it takes them apart.
_UNREADABLE = (
    ValueError, OSError, RuntimeError, LookupError, TypeError, AttributeError, ArithmeticError, MemoryError, EOFError,
)  # fmt: skip
_SHOWN = 4
_WRAPPERS = {"_orig_mod.": "torch.compile", "module.": "DistributedDataParallel"}  # what they put into names


@dataclass(frozen=True)
class Loaded:
    """What a checkpoint held beside tensors. ``path`` is the checkpoint that was read."""

    path: Path
    step: int = 0
    extra: Any = None
    grid: str | None = None


@torch.inference_mode(False)  # what it makes of an optimizer's state is to be changed
def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    strict: bool = True,
    rng: bool = True,
    verify: bool = True,
    trust: bool = False,
    comms: Communicators | None = None,
) -> Loaded:
    """Read a checkpoint into a model on any grid, or on none. Every rank calls it with the same arguments.

    Values are cast to the dtype of the parameter. Generators continue where the same rank's stopped; with more ranks
    than the checkpoint had, rank r takes those of r modulo that number.

    Args:
        path: A checkpoint, a folder of them (then the newest complete one), or a plain state_dict in a .pth or
            .safetensors file (then only the model).
        model: Parallel or plain, its parameters allocated.
        optimizer: Over the model's parameters; new or used.
        strict: Refuse tensors that only one side has.
        rng: Restore the generators and the counters of dropout.
        verify: Compare the checksums of what is read.
        trust: Whoever wrote it may run anything here: a .pth file may hold any class, and the files of a checkpoint may
            be links to elsewhere. Without it nothing that a file says is run.
        comms: What ``axo.connect`` returned; needed only for a model without parallel layers on several ranks.

    Raises:
        ValueError: Not a checkpoint, incomplete, or of another model (names which tensors and shapes), and nothing has
            changed; or damaged (names file and tensor), and the model holds what was read before. On every rank.
    """
    state.check_kinds(model, optimizer)
    comms = comms if comms is not None else state.communicators(model)
    group = checkpoint_group(comms)
    given, newest = path, None
    shapes: dict[str, tuple[int, ...]] = {}
    optimized: set[str] = set()
    with on_all_ranks(group, (ValueError, OSError), lambda error: _said(given, error)) as told:
        folders.check_local(path, f"checkpoint: {path=}: the path is empty; name a checkpoint or a folder of them")
        given = os.path.abspath(path)
        newest = str(_resolve(Path(given))) if rank_in(group) == 0 else None
        told |= {"path": given, "optimizer": state.kind_of(optimizer), "strict": strict, "rng": rng, "trust": trust}
        shapes = {name: parts.shape for name, parts in _named(*state.model_entries(model)).items()}
        optimized = set() if optimizer is None else {*itertools.chain(*state.parameter_names(model, optimizer))}
    every = share(group, (newest, shapes, optimized))
    chosen = Path(every[0][0])  # rank 0's: another rank might find a newer one
    for _, of_stage, of_optimizer in every:  # stages of a pipeline have some each
        shapes, optimized = shapes | of_stage, optimized | of_optimizer
    with on_all_ranks(group, _UNREADABLE, lambda error: _said(chosen, error)):
        source = StoredFile(chosen, trust) if chosen.is_file() else StoredFolder(chosen, verify, trust)
        weights = _weights(source, model, strict, shapes)
        moments = {} if optimizer is None else _moments(source, model, optimizer, optimized)
    for engine in engines(model):
        engine.settle()
    head, generators = source.head, f"{state.RNG}/{number_of(comms) % source.head['ranks']}"
    with on_all_ranks(group, _UNREADABLE, lambda error: _said(chosen, error)):
        source.read([*weights, *((f"{state.OPTIMIZER}/{name}", parts) for name, parts in moments.items())])
        if isinstance(source, StoredFolder):
            if optimizer is not None:
                state.set_optimizer(model, optimizer, source.value(state.OPTIMIZER), moments)
            values = [entry for entry, value in state.model_entries(model)[0].items() if not isinstance(value, Parts)]
            state.set_extra_state(model, {entry: source.value(entry) for entry in values if source.holds(entry)})
            if rng and source.holds(generators):
                state.set_rng_state(source.value(generators))
                state.set_dropout_state(model, head["dropout"])
    return Loaded(chosen, head["step"], head["extra"], head["grid"])


def _weights(
    source: StoredFile | StoredFolder, model: nn.Module, strict: bool, shapes: Mapping[str, tuple[int, ...]]
) -> list[tuple[str, Parts]]:
    """(entry of the source, part of the model to fill) for each tensor of the model that the source has.

    Args:
        shapes: Of the tensors of all stages of a pipeline.

    Raises:
        ValueError: It is of another model.
    """
    meta = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if meta:
        raise ValueError(
            f"checkpoint: {meta[0]!r} has no storage (meta device); call model.to_empty(device=...) before load"
        )
    path, names = source.path, source.names
    entries, aliases = state.model_entries(model)
    own, saved = _named(entries, aliases), {name: source.tensors[first] for name, first in names.items()}
    shapes = {**shapes} | {name: parts.shape for name, parts in own.items()}
    compare(path, "the model", {name: shape for name, (shape, _) in saved.items()}, shapes, strict)
    _check_casts(path, saved, own)
    moved = renamed(model)
    for alias, name in aliases.items():  # names of one tensor in the model, and of two in what was saved
        if {name, alias} <= source.tensors.keys() and alias not in moved:
            _check_equal(source, name, alias, own[name])
    weights: dict[str, tuple[str, Parts]] = {}
    for name in filter(names.__contains__, own):
        weights.setdefault(aliases.get(name, name), (f"{state.MODEL}/{names[name]}", own[name]))
    return list(weights.values())


def _named(entries: Mapping[str, Any], aliases: Mapping[str, str]) -> dict[str, Parts]:
    """Name -> what this rank has of each tensor of a model, under all its names."""
    tensors = state.parts(entries)
    return tensors | {alias: tensors[name] for alias, name in aliases.items()}


def _check_equal(source: StoredFile | StoredFolder, name: str, alias: str, parts: Parts) -> None:
    """Refuse to drop one of two tensors."""
    both = [Parts(torch.empty_like(parts.local, device="cpu"), parts.placement) for _ in range(2)]
    source.read([(f"{state.MODEL}/{each}", one) for each, one in zip((name, alias), both, strict=True)])
    one, other = (each.local.contiguous().reshape(-1).view(torch.uint8) for each in both)
    if not torch.equal(one, other):
        raise ValueError(
            f"checkpoint: {source.path} has other values in {name!r} than in {alias!r}, which are one tensor in the"
            " model: one of the two would be lost; load into a model that does not share it"
        )


def _moments(
    source: StoredFile | StoredFolder, model: nn.Module, optimizer: Optimizer, optimized: Collection[str]
) -> dict[str, Parts]:
    """Room for each tensor of the optimizer's state that the source has.

    Args:
        optimized: Names of the parameters of all stages' optimizers.

    Raises:
        ValueError: It has none, or of other parameters.
    """
    path = source.path
    if isinstance(source, StoredFile) or not source.holds(state.OPTIMIZER):
        what = "is a plain state_dict and holds" if isinstance(source, StoredFile) else "holds"
        raise ValueError(f"checkpoint: {path} {what} no optimizer; load without one")
    listed = {name for group in source.value(state.OPTIMIZER)["groups"] for name in group["params"]}
    compare(path, "the optimizer", dict.fromkeys(listed, ()), dict.fromkeys(optimized, ()), True)
    return state.optimizer_targets(model, optimizer, source.tensors_of(state.OPTIMIZER))


def _said(path: str | os.PathLike[str], error: Exception) -> str:
    """The message of an error of reading; of one that is no message, what kind it is."""
    if str(error).startswith("checkpoint: "):
        return str(error)
    kind = "" if isinstance(error, OSError | RuntimeError | ValueError) else f"{type(error).__name__}: "
    return f"checkpoint: {path} cannot be read: {kind}{error}"


def _resolve(path: Path) -> Path:
    if path.is_file() and (path.parent / folders.MARKER).is_file() and path.suffix not in (".pth", ".safetensors"):
        raise ValueError(f"checkpoint: {path} is a file of a checkpoint; give the folder, {path.parent}")
    return path if path.is_file() else folders.resolve(path)


def compare(
    path: Path, owner: str, saved: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]], strict: bool
) -> None:
    """Compare the tensors of a checkpoint with those of a model.

    Raises:
        ValueError: They differ; says how many and names the first few of each kind.
    """
    problems = []
    for prefix, wrapper in _WRAPPERS.items() if wanted.keys() != saved.keys() else ():
        for names, others, whose in ((wanted, saved, f"names of {owner}"), (saved, wanted, "its names")):
            if {name.replace(prefix, "") for name in names} == others.keys():
                problems.append(f"{whose} have {prefix!r} of {wrapper}; save and load the model inside it")
    if strict:
        missing = [f"{name} {_shape(wanted[name])}" for name in wanted if name not in saved]
        extra = [f"{name} {_shape(saved[name])}" for name in saved if name not in wanted]
        problems += _listed(missing, f"it lacks %d tensors of {owner}")
        problems += _listed(extra, f"it has %d that {owner} lacks")
    elif wanted and not wanted.keys() & saved.keys():
        problems.append(f"it has no tensor of {owner}")
    other = [
        f"{name} is {_shape(saved[name])} there and {_shape(shape)} here"
        for name, shape in wanted.items()
        if name in saved and saved[name] != shape
    ]
    problems += _listed(other, "%d differ in shape")
    if problems:
        raise ValueError(f"checkpoint: {path} is of another model: " + "; ".join(problems))


def _check_casts(path: Path, saved: Mapping[str, tuple[Any, torch.dtype]], wanted: Mapping[str, Parts]) -> None:
    """Refuse what would cut off fractions, imaginary parts or all but a truth value.

    Raises:
        ValueError: Names the first few.
    """
    lossy = [
        f"{name} is {saved[name][1]} there and {parts.local.dtype} here"
        for name, parts in wanted.items()
        if name in saved and not torch.can_cast(saved[name][1], parts.local.dtype)
    ]
    if lossy:
        listed = "; ".join(_listed(lossy, "values of %d tensors would be lost"))
        raise ValueError(f"checkpoint: {path}: {listed}; make the model with a dtype that holds them")


def _shape(shape: Iterable[int]) -> str:
    return f"[{', '.join(map(str, shape))}]" if shape else ""


def _listed(items: list[str], what: str) -> list[str]:
    if not items:
        return []
    more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return [what % len(items) + f" ({', '.join(item.strip() for item in items[:_SHOWN])}{more})"]
