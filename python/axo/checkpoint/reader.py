"""load: every rank reads the chunks that overlap its own part, from a checkpoint of any grid or from a plain file.

First what the checkpoint says it holds is compared with the model on every rank, so that a checkpoint of another model
is one error everywhere and nothing has changed. Then ``storage`` reads into the parameters where they lie. No rank ever
holds a whole tensor that is split; of a plain file (.pth, .safetensors) tensors are mapped, and each rank cuts its own.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.optim import Optimizer

from axo import files
from axo.checkpoint import folder as folders
from axo.checkpoint import state
from axo.checkpoint.parts import Parts
from axo.checkpoint.ranks import checkpoint_group, number_of, on_all_ranks, rank_in, share
from axo.checkpoint.storage import read_into, read_metadata, read_plain
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
    given, newest, stages = path, None, 1 if comms is None else comms.stages
    shapes: dict[str, tuple[int, ...]] = {}
    optimized: set[str] = set()
    with on_all_ranks(group, (ValueError, OSError), lambda error: _said(given, error)) as told:
        folders.check_local(path, f"checkpoint: {path=}: the path is empty; name a checkpoint or a folder of them")
        given = os.path.abspath(path)
        newest = str(_resolve(Path(given))) if rank_in(group) == 0 else None
        told |= {"path": given, "optimizer": state.kind_of(optimizer), "strict": strict, "rng": rng, "trust": trust}
        if stages > 1:
            shapes = {name: tuple(parts.size()) for name, parts in _named(*state.model_entries(model)).items()}
            if optimizer is not None:
                optimized = {name for names in state.parameter_names(model, optimizer) for name in names}
    every = share(group, (newest, shapes, optimized))
    chosen = Path(every[0][0])  # rank 0's: another rank might find a newer one
    for _, of_stage, optimized_there in every:
        shapes, optimized = shapes | of_stage, optimized | optimized_there
    with on_all_ranks(group, _UNREADABLE, lambda error: _said(chosen, error)):
        source = StoredFile(chosen, trust) if chosen.is_file() else StoredFolder(chosen, verify, trust)
        load = _Load(source, model, optimizer, strict, shapes, optimized)
    for engine in engines(model):
        engine.settle()
    with on_all_ranks(group, _UNREADABLE, lambda error: _said(chosen, error)):
        loaded = load.read(number_of(comms), rng)
    return loaded


def _named(entries: Mapping[str, Any], aliases: Mapping[str, str]) -> dict[str, Parts]:
    """Name -> what this rank has of each tensor of a model, under all its names."""
    tensors = state.parts(entries)
    return tensors | {alias: tensors[name] for alias, name in aliases.items()}


def _said(path: str | os.PathLike[str], error: Exception) -> str:
    """The message of an error of reading; of one that is no message, what kind it is."""
    if str(error).startswith("checkpoint: "):
        return str(error)
    kind = "" if isinstance(error, OSError | RuntimeError | ValueError) else f"{type(error).__name__}: "
    return f"checkpoint: {path} cannot be read: {kind}{error}"


class StoredFile:
    """A plain state_dict.

    Attributes:
        tensors: Name -> shape and dtype. aliases: Name -> the other under which the tensor is listed.
        head: What its entry ``axo`` says. has_optimizer: Whether the state of one is there.
    """

    has_optimizer = False

    def __init__(self, path: Path, trust: bool) -> None:
        self.path, self.aliases = path, dict[str, str]()
        self.head: dict[str, Any] = {"step": 0, "extra": None, "grid": None, "ranks": 1}
        values = read_state_dict(path, trust)
        self._values = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
        self.tensors = {name: (tuple(value.shape), value.dtype) for name, value in self._values.items()}

    def read(self, entries: dict[str, Any]) -> None:
        """Fill :class:`Parts`, and replace other values."""
        for entry, parts in entries.items():
            if isinstance(parts, Parts):
                parts.fill(self._values[entry.removeprefix(f"{state.MODEL}/")])

    def holds(self, entry: str) -> bool:
        return entry.removeprefix(f"{state.MODEL}/") in self._values


class StoredFolder:
    """A checkpoint; see :class:`StoredFile`."""

    def __init__(self, path: Path, verify: bool, trust: bool) -> None:
        self.path, self.verify = path, verify
        self.metadata = read_metadata(path, verify, trust)
        self.head = self._read_head()
        self.aliases: dict[str, str] = self.head["aliases"]
        self.tensors = self.tensors_of(state.MODEL)
        self.has_optimizer = self.holds(state.OPTIMIZER)

    def read(self, entries: dict[str, Any]) -> None:
        read_into(self.path, self.metadata, entries, self.verify)

    def read_value(self, entry: str) -> Any:
        """An entry that is no tensor."""
        values = {entry: None}
        self.read(values)
        return values[entry]

    def holds(self, entry: str) -> bool:
        return entry in self.metadata.state_dict_metadata

    def tensors_of(self, kind: str) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Name -> whole shape and dtype of the tensors of one kind."""
        return {
            entry.removeprefix(f"{kind}/"): (tuple(saved.size), saved.properties.dtype)
            for entry, saved in self.metadata.state_dict_metadata.items()
            if entry.startswith(f"{kind}/") and isinstance(saved, TensorStorageMetadata)
        }

    def _read_head(self) -> dict[str, Any]:
        """The entry that says what the others are, if it is one of a format that is known."""
        path, head = self.path, self.read_value(state.HEAD)
        kinds = {"format": int, "step": int, "ranks": int, "aliases": dict, "dropout": dict}
        if not isinstance(head, dict) or not all(isinstance(head.get(name), kind) for name, kind in kinds.items()):
            raise ValueError(
                f"checkpoint: {path} is damaged: {state.HEAD}: {files.shown(head)} is not what a save writes"
            )
        counts = (count for counts in head["dropout"].values() for count in counts)
        if head["ranks"] < 1 or not all(count is None or type(count) is int for count in counts):
            raise ValueError(f"checkpoint: {path} is damaged: {state.HEAD}: ranks or counters of dropout cannot be")
        if head["format"] > state.FORMAT:
            raise ValueError(
                f"checkpoint: {path} was written by a newer Axo (format {head['format']}, this one reads up to"
                f" {state.FORMAT}); update Axo"
            )
        return head


class _Load:
    """What is to be read into model and optimizer.

    Args:
        source: What it is read from.
        model, optimizer, strict: As of :func:`load`.
        shapes: Of the tensors of all stages of a pipeline.
        optimized: Names of the parameters of all stages' optimizers.

    Raises:
        ValueError: It is of others.
    """

    def __init__(
        self,
        source: StoredFile | StoredFolder,
        model: nn.Module,
        optimizer: Optimizer | None,
        strict: bool,
        shapes: Mapping[str, tuple[int, ...]],
        optimized: Collection[str],
    ) -> None:
        meta = [name for name, parameter in model.named_parameters() if parameter.is_meta]
        if meta:
            raise ValueError(
                f"checkpoint: {meta[0]!r} has no storage (meta device); call model.to_empty(device=...) before load"
            )
        self.source, self.model, self.optimizer, path = source, model, optimizer, source.path
        if optimizer is not None and not source.has_optimizer:
            what = "holds" if isinstance(source, StoredFolder) else "is a plain state_dict and holds"
            raise ValueError(f"checkpoint: {path} {what} no optimizer; load without one")
        self.entries, aliases = state.model_entries(model)
        wanted = _named(self.entries, aliases)
        of_file = source.tensors
        saved = of_file | {alias: of_file[name] for alias, name in source.aliases.items() if name in of_file}
        shapes = {**shapes} | {name: tuple(parts.size()) for name, parts in wanted.items()}
        compare(path, "the model", {name: shape for name, (shape, _) in saved.items()}, shapes, strict)
        _check_casts(path, saved, wanted)
        moved = renamed(model)
        for alias, name in aliases.items():  # names of one tensor in the model, and of two in what was saved
            if {name, alias} <= of_file.keys() and alias not in moved:
                self._check_equal(name, alias, wanted[name])
        self._aliases = aliases
        self.entries = {entry: value for entry, value in self.entries.items() if self._origin(entry) is not None}
        if optimizer is not None:
            assert isinstance(source, StoredFolder)
            groups = source.read_value(state.OPTIMIZER)["groups"]
            listed = {name for group in groups for name in group["params"]}
            own = {*optimized}.union(*state.parameter_names(model, optimizer))
            compare(path, "the optimizer", dict.fromkeys(listed, ()), dict.fromkeys(own, ()), True)
            self.entries |= state.optimizer_targets(model, optimizer, source.metadata)

    def _origin(self, entry: str) -> str | None:
        """The entry of the checkpoint that is read for one of the model: two names may share a tensor."""
        name = entry.removeprefix(f"{state.MODEL}/")
        names = [name, *(alias for alias, first in self._aliases.items() if first == name)]
        names += [self.source.aliases[each] for each in names if each in self.source.aliases]
        entries = [entry, *(f"{state.MODEL}/{each}" for each in names[1:])]
        return next((each for each in entries if self.source.holds(each)), None)

    def _check_equal(self, name: str, alias: str, parts: Parts) -> None:
        """Refuse to drop one of two tensors."""
        both = [Parts(torch.empty_like(parts.local, device="cpu"), parts.placement) for _ in range(2)]
        self.source.read({f"{state.MODEL}/{each}": one for each, one in zip((name, alias), both, strict=True)})
        one, other = (each.local.contiguous().reshape(-1).view(torch.uint8) for each in both)
        if not torch.equal(one, other):
            raise ValueError(
                f"checkpoint: {self.source.path} has other values in {name!r} than in {alias!r}, which are one tensor"
                " in the model: one of the two would be lost; load into a model that does not share it"
            )

    def read(self, rank: int, rng: bool) -> Loaded:
        """Fill the model, the optimizer and the generators."""
        source, head = self.source, self.source.head
        wanted: dict[str, Any] = {}
        for entry, value in self.entries.items():
            origin = self._origin(entry)
            assert origin is not None
            if origin in wanted:  # one tensor there, two here
                source.read({origin: value})
            wanted.setdefault(origin, value)
        generators = f"{state.RNG}/{rank % head['ranks']}"
        if rng and source.holds(generators):
            wanted[generators] = None
        source.read(wanted)
        if self.optimizer is not None:
            state.set_optimizer(self.model, self.optimizer, wanted)
        state.set_extra_state(self.model, wanted)
        if wanted.get(generators) is not None:
            state.set_rng_state(wanted[generators])
            state.set_dropout_state(self.model, head["dropout"])
        return Loaded(source.path, head["step"], head["extra"], head["grid"])


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


def read_state_dict(path: Path, trust: bool = False) -> dict[str, Any]:
    """A plain state_dict, its tensors mapped from the file where the format allows it.

    Raises:
        ValueError: The file is no state_dict.
    """
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        try:
            return dict(load_file(path))
        except Exception as error:  # safetensors' own class, which says nothing of the file
            raise ValueError(f"checkpoint: {path} cannot be read as a state_dict ({state.reason(error)})") from None
    values = read_plain(path, weights_only=not trust)
    for key in ("model", "state_dict"):  # what litgpt and consolidate(optimizer=True), and what Lightning write
        if isinstance(values, Mapping) and isinstance(values.get(key), Mapping):
            values = values[key]
    if not isinstance(values, Mapping) or not any(isinstance(value, torch.Tensor) for value in values.values()):
        raise ValueError(f"checkpoint: {path} holds no state_dict (name -> tensor)")
    return dict(values)
