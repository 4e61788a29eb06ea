"""load: every rank reads the chunks that overlap its own part, from a checkpoint of any grid or from a plain file.

First the checkpoint's metadata is compared with the model on every rank, so that a checkpoint of another model is one
error everywhere and nothing has changed. Then ``storage`` reads into the parameters where they lie. No rank ever
holds a whole tensor that is split; of a plain file (.pth, .safetensors) tensors are mapped, and each rank cuts its own.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.optim import Optimizer

from axo import files
from axo.checkpoint import folder as folders
from axo.checkpoint import state
from axo.checkpoint.parts import Parts
from axo.checkpoint.ranks import agree, checkpoint_group, number_of, rank_in, share
from axo.checkpoint.storage import read_bytes, read_into, read_metadata, read_plain
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
    head: Mapping[str, Any] = field(default_factory=dict, repr=False)


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
    given, problem, found, work = "", "", None, None
    try:
        if not isinstance(path, str | os.PathLike) or not os.fspath(path):
            raise ValueError(f"checkpoint: path={path!r}: the path is empty; name a checkpoint or a folder of them")
        folders.check_local(path)
        given = os.path.abspath(path)
        found = str(_find(Path(given))) if rank_in(group) == 0 else None
    except (ValueError, OSError) as error:
        problem = _said(given or path, error)
    # Rank 0's: another rank might find a newer one.
    found = agree(
        group, problem, found, path=given, optimizer=state.kind_of(optimizer), strict=strict, rng=rng, trust=trust
    )
    others = _Elsewhere.of(model, optimizer, comms, group)
    try:
        work = _open(Path(found), model, optimizer, strict, verify, trust, others)
    except _UNREADABLE as error:
        problem = _said(found, error)
    agree(group, problem)
    assert work is not None
    loaded = Loaded(work.path)
    for engine in engines(model):
        engine.settle()
    try:
        loaded = work.read(number_of(comms), rng)
    except _UNREADABLE as error:
        problem = _said(work.path, error)
    agree(group, problem)
    return loaded


def _said(path: str | os.PathLike[str], error: Exception) -> str:
    """The message of an error of reading; of one that is no message, what kind it is."""
    if str(error).startswith("checkpoint: "):
        return str(error)
    kind = "" if isinstance(error, OSError | RuntimeError | ValueError) else f"{type(error).__name__}: "
    return f"checkpoint: {path} cannot be read: {kind}{error}"


@dataclass(frozen=True)
class _Elsewhere:
    """What the other stages of a pipeline hold: the shapes of their tensors, and the parameters of their optimizers."""

    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    optimized: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls, model: nn.Module, optimizer: Optimizer | None, comms: Communicators | None, group: dist.ProcessGroup | None
    ) -> _Elsewhere:
        """Collective where there are several stages."""
        if comms is None or comms.stages == 1:
            return cls()
        entries, aliases = state.model_entries(model)
        shapes = {name: tuple(value.size()) for name, value in state.parts(entries).items()}
        shapes |= {alias: shapes[name] for alias, name in aliases.items()}
        optimized: set[str] = set()
        if optimizer is not None:
            names = {id(parameter) for parameter in model.parameters()}
            if all(id(one) in names for each in optimizer.param_groups for one in each["params"]):  # else refused later
                optimized = {name for each in state.parameter_names(model, optimizer) for name in each}
        told = share(group, (shapes, optimized))
        joined: dict[str, tuple[int, ...]] = {}
        for theirs, _ in told:
            joined |= theirs
        return cls(joined, frozenset().union(*(theirs for _, theirs in told)))


class _File:
    """A plain state_dict, to be read into the model."""

    def __init__(self, path: Path, model: nn.Module, strict: bool, trust: bool, others: _Elsewhere) -> None:
        self.path, self.model = path, model
        self.values = read_state_dict(path, trust)
        shapes = {name: tuple(value.shape) for name, value in self.values.items() if isinstance(value, torch.Tensor)}
        wanted = {
            name: tuple(placement.global_shape if (placement := state.placement_of(value)) else value.shape)
            for name, value in model.state_dict(keep_vars=True).items()
            if isinstance(value, torch.Tensor)
        }
        compare(path, "the model", shapes, {**others.shapes, **wanted}, strict)
        dtypes = {name: value.dtype for name, value in self.values.items() if isinstance(value, torch.Tensor)}
        _check_casts(path, dtypes, model.state_dict(keep_vars=True))
        for name, alias in _shared(state.model_entries(model)[1], model, self.values.keys()):
            _check_equal(path, name, alias, self.values[name], self.values[alias])

    def read(self, rank: int, rng: bool) -> Loaded:
        own = self.model.state_dict(keep_vars=True)
        with torch.no_grad():
            for name, value in self.values.items():
                target = own.get(name)
                if isinstance(target, torch.Tensor) and isinstance(value, torch.Tensor):
                    placement = state.placement_of(target)
                    target.copy_(value if placement is None else placement.take(value))
        return Loaded(self.path)


class _Folder:
    """A checkpoint, to be read into model and optimizer."""

    def __init__(
        self,
        path: Path,
        model: nn.Module,
        optimizer: Optimizer | None,
        strict: bool,
        verify: bool,
        trust: bool,
        others: _Elsewhere,
    ) -> None:
        self.path, self.model, self.optimizer, self.verify = path, model, optimizer, verify
        self.metadata = read_metadata(path, verify, trust)
        self.head = read_head(path, self.metadata, verify)
        self.entries, aliases = state.model_entries(model)
        saved = shapes_of(self.metadata, state.MODEL)
        saved |= {alias: saved[name] for alias, name in self.head["aliases"].items() if name in saved}
        wanted = {name: tuple(value.size()) for name, value in state.parts(self.entries).items()}
        wanted |= {alias: wanted[name] for alias, name in aliases.items()}
        compare(path, "the model", saved, {**others.shapes, **wanted}, strict)
        parts = {entry: value.local for entry, value in self.entries.items() if isinstance(value, Parts)}
        entries = self.metadata.state_dict_metadata.items()
        dtypes = {key: saved.properties.dtype for key, saved in entries if isinstance(saved, TensorStorageMetadata)}
        _check_casts(path, dtypes, parts)
        for name, alias in _shared(aliases, model, shapes_of(self.metadata, state.MODEL)):
            whole: Any = self.entries[f"{state.MODEL}/{name}"]
            both = [Parts(torch.empty_like(whole.local, device="cpu"), whole.placement) for _ in range(2)]
            entries_of = (f"{state.MODEL}/{name}", f"{state.MODEL}/{alias}")
            read_into(path, self.metadata, dict(zip(entries_of, both, strict=True)), verify)
            _check_equal(path, name, alias, both[0].local, both[1].local)
        self.entries = {entry: value for entry, value in self.entries.items() if self._known(entry)}
        if optimizer is not None:
            self._add_optimizer(optimizer, others)

    def _known(self, entry: str) -> bool:
        name = entry.removeprefix(f"{state.MODEL}/")
        return entry in self.metadata.state_dict_metadata or name in self.head["aliases"]

    def _add_optimizer(self, optimizer: Optimizer, others: _Elsewhere) -> None:
        if state.OPTIMIZER not in self.metadata.state_dict_metadata:
            raise ValueError(f"checkpoint: {self.path} holds no optimizer; load without one")
        groups = read_bytes(self.path, self.metadata, state.OPTIMIZER, self.verify)["groups"]
        saved = {name for group in groups for name in group["params"]}
        wanted = others.optimized.union(*state.parameter_names(self.model, optimizer))
        compare(self.path, "the optimizer", dict.fromkeys(saved, ()), dict.fromkeys(wanted, ()), True)
        self.entries |= state.optimizer_targets(self.model, optimizer, self.metadata)

    def read(self, rank: int, rng: bool) -> Loaded:
        wanted: dict[str, Any] = {}
        for entry, value in self.entries.items():
            source = self._source(entry)
            if source in wanted:  # one tensor there, two here
                read_into(self.path, self.metadata, {source: value}, self.verify)
            wanted.setdefault(source, value)
        own = f"{state.RNG}/{rank % self.head['ranks']}"
        if rng and own in self.metadata.state_dict_metadata:
            wanted[own] = None
        read_into(self.path, self.metadata, wanted, self.verify)
        if self.optimizer is not None:
            state.set_optimizer(self.model, self.optimizer, wanted)
        state.set_extra_state(self.model, wanted)
        if wanted.get(own) is not None:
            state.set_rng_state(wanted[own])
            state.set_dropout_state(self.model, self.head["dropout"])
        return Loaded(self.path, self.head["step"], self.head["extra"], self.head["grid"], self.head)

    def _source(self, entry: str) -> str:
        """Under which name the checkpoint holds an entry: two names may have shared one tensor when it was saved."""
        if entry in self.metadata.state_dict_metadata:
            return entry
        return f"{state.MODEL}/{self.head['aliases'][entry.removeprefix(f'{state.MODEL}/')]}"


def read_head(path: Path, metadata: Metadata, verify: bool = True) -> dict[str, Any]:
    """The entry that says what the others are.

    Raises:
        ValueError: It is damaged, or of a newer format.
    """
    head: dict[str, Any] = read_bytes(path, metadata, state.HEAD, verify)
    kinds = {"format": int, "step": int, "ranks": int, "aliases": dict, "dropout": dict}
    if not isinstance(head, dict) or not all(isinstance(head.get(name), kind) for name, kind in kinds.items()):
        raise ValueError(f"checkpoint: {path} is damaged: {state.HEAD}: {files.shown(head)} is not what a save writes")
    counts = (count for counts in head["dropout"].values() for count in counts)
    if head["ranks"] < 1 or not all(count is None or type(count) is int for count in counts):
        raise ValueError(f"checkpoint: {path} is damaged: {state.HEAD}: ranks or counters of dropout cannot be")
    if head["format"] > state.FORMAT:
        raise ValueError(
            f"checkpoint: {path} was written by a newer Axo (format {head['format']}, this one reads up to"
            f" {state.FORMAT}); update Axo"
        )
    return head


def _find(path: Path) -> Path:
    if path.is_file() and (path.parent / folders.MARKER).is_file() and path.suffix not in (".pth", ".safetensors"):
        raise ValueError(f"checkpoint: {path} is a file of a checkpoint; give the folder, {path.parent}")
    return path if path.is_file() else folders.resolve(path)


def _open(
    path: Path,
    model: nn.Module,
    optimizer: Optimizer | None,
    strict: bool,
    verify: bool,
    trust: bool,
    others: _Elsewhere,
) -> _File | _Folder:
    meta = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if meta:
        raise ValueError(
            f"checkpoint: {meta[0]!r} has no storage (meta device); call model.to_empty(device=...) before load"
        )
    if not path.is_file():
        return _Folder(path, model, optimizer, strict, verify, trust, others)
    file = _File(path, model, strict, trust, others)
    if optimizer is not None:
        raise ValueError(f"checkpoint: {path} is a plain state_dict and holds no optimizer; load without one")
    return file


def shapes_of(metadata: Metadata, kind: str) -> dict[str, tuple[int, ...]]:
    """Name -> whole shape of the tensors of one kind."""
    return {
        entry.removeprefix(f"{kind}/"): tuple(saved.size)
        for entry, saved in metadata.state_dict_metadata.items()
        if entry.startswith(f"{kind}/") and isinstance(saved, TensorStorageMetadata)
    }


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


def _check_casts(path: Path, saved: Mapping[str, torch.dtype], wanted: Mapping[str, Any]) -> None:
    """Refuse what would cut off fractions, imaginary parts or all but a truth value.

    Raises:
        ValueError: Names the first few.
    """
    lossy = [
        f"{name.removeprefix(f'{state.MODEL}/')} is {saved[name]} there and {tensor.dtype} here"
        for name, tensor in wanted.items()
        if name in saved and isinstance(tensor, torch.Tensor) and not torch.can_cast(saved[name], tensor.dtype)
    ]
    if lossy:
        listed = "; ".join(_listed(lossy, "values of %d tensors would be lost"))
        raise ValueError(f"checkpoint: {path}: {listed}; make the model with a dtype that holds them")


def _shared(aliases: Mapping[str, str], model: nn.Module, saved: Collection[str]) -> list[tuple[str, str]]:
    """Pairs of names that stand for one tensor in the model and for two in what was saved."""
    moved = renamed(model)
    return [(name, alias) for alias, name in aliases.items() if {name, alias} <= set(saved) and alias not in moved]


def _check_equal(path: Path, name: str, alias: str, first: torch.Tensor, second: torch.Tensor) -> None:
    """Refuse to drop one of two tensors.

    Raises:
        ValueError: They are not the same to the bit.
    """
    one, other = (each.detach().contiguous().reshape(-1).view(torch.uint8) for each in (first, second))
    if not torch.equal(one, other):
        raise ValueError(
            f"checkpoint: {path} has other values in {name!r} than in {alias!r}, which are one tensor in the model: one"
            " of the two would be lost; load into a model that does not share it"
        )


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
