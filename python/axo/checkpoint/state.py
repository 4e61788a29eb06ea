"""Model, optimizer and random generators as the entries of a checkpoint, and back.

Collecting touches no data: tensors are referenced, as :class:`Parts` in the serial layout. The state of an optimizer is
found parameter by parameter under the model's names, so neither the order of groups nor the grid matters. A state
tensor lies like its parameter when it has the parameter's shape; it may carry a ``placement`` of its own (state that is
sharded further); a tensor of one number is the same on all ranks.

Not here: files; state whose shape is another and whose parameter is split (Adafactor's rows and columns): refused.
"""

from __future__ import annotations

import hashlib
import itertools
import random
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from axo.checkpoint.boxes import Parts
from axo.comm.connect import Communicators
from axo.nn.dropout import Dropout
from axo.nn.placeholder import renamed
from axo.optim import checks
from axo.placement import placement_of

MODEL, OPTIMIZER, RNG, HEAD = "model", "optimizer", "rng", "axo"
FORMAT = 2
Described = Mapping[str, tuple[tuple[int, ...], torch.dtype]]  # name -> shape of the whole, and dtype
_OF_NONE = ""  # in place of a parameter: what an optimizer keeps beside
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_OF_TORCH = re.compile(r"^\[enforce fail at [^]]*\][^:]*?\. +")  # the place and the condition of a check


def check_kinds(model: Any, optimizer: Any) -> None:
    """Check that these are what ``save`` and ``load`` take.

    Raises:
        ValueError: One is not.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"checkpoint: model is a {type(model).__name__}, not an nn.Module; give the model itself")
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise ValueError(
            f"checkpoint: optimizer is a {type(optimizer).__name__}, not a torch.optim.Optimizer; give the optimizer"
            " itself, and other arguments by name (step=100)"
        )


def kind_of(optimizer: Optimizer | None) -> str | None:
    """The class of an optimizer, by name; None without one."""
    return None if optimizer is None else type(optimizer).__name__


def reason(error: BaseException) -> str:
    """Why torch could not read or write something, in a few words: its own texts run over many lines."""
    text = _OF_TORCH.sub("", _COLOUR.sub("", str(error)).strip())
    if found := re.search(r"GLOBAL (\S+)", text):
        return f"it holds a {found[1]}"
    return re.split(r"\n|(?<=\w)\. ", text)[0].rstrip(". ") or type(error).__name__


def digest(value: Any) -> str:
    """A few letters that are equal for equal plain values and tensors, on whatever rank they were made."""

    text = repr(_walk(value, _shown, lambda numbers: numbers))
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def _shown(leaf: Any) -> Any:
    if isinstance(leaf, set):
        return sorted(map(repr, leaf))  # whose order is another on each rank
    if not isinstance(leaf, torch.Tensor):
        return leaf
    plain = leaf.layout is torch.strided and not leaf.is_quantized and not leaf.is_meta
    return leaf.dtype, tuple(leaf.shape), hashlib.blake2b(bytes_of(on_host(leaf)) if plain else b"").hexdigest()


def without_numbers(value: Any) -> Any:
    """The value without its lists of numbers, which are always saved and read well."""
    return _walk(value, lambda leaf: leaf, lambda numbers: type(numbers)())


def _walk(value: Any, leaf: Callable[[Any], Any], numbers: Callable[[Any], Any]) -> Any:
    """A plain value with what stands for its leaves, and for its lists of numbers: one by one, each takes 3 us."""
    if type(value) in (list, tuple):
        if set(map(type, value)) <= {int, float, bool}:
            return numbers(value)
        return type(value)(_walk(each, leaf, numbers) for each in value)
    if isinstance(value, Mapping):  # a Counter too, whose order may be another on each rank
        return {key: _walk(value[key], leaf, numbers) for key in sorted(value, key=repr)}
    return leaf(value)


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in host memory, contiguous, its bytes the values that it shows."""
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def check_storage(name: str, tensor: torch.Tensor) -> None:
    """Check that a tensor has bytes of its own to write.

    Raises:
        ValueError: It has none, or torch keeps them in another way.
    """
    if isinstance(tensor, (nn.UninitializedParameter, nn.UninitializedBuffer)):
        what, hint = "has no shape yet", "run the model once"
    elif isinstance(tensor, DTensor):
        what, hint = "is a DTensor", "use torch.distributed.checkpoint for it, or call .full_tensor()"
    elif tensor.is_meta:
        what, hint = "has no storage (meta device)", "call model.to_empty(device=...) and fill it"
    elif tensor.layout is not torch.strided:
        what, hint = f"is {str(tensor.layout).removeprefix('torch.')}", "use .to_dense()"
    elif tensor.is_quantized:
        what, hint = f"is quantized ({tensor.dtype})", "save its .int_repr() and scale"
    else:
        return
    raise ValueError(f"checkpoint: {name!r} {what} and cannot be saved; {hint} first")


def communicators(model: nn.Module) -> Communicators | None:
    """What the model's parallel layers communicate over; None for a model without any.

    Raises:
        ValueError: They are of two grids.
    """
    placements = filter(None, map(placement_of, model.parameters()))
    comms = list({id(placement.comms): placement.comms for placement in placements if placement.comms}.values())
    if len(comms) > 1:
        raise ValueError("checkpoint: the model's layers lie on different grids; save each grid's part by itself")
    return comms[0] if comms else None


def model_entries(model: nn.Module) -> tuple[dict[str, Any], dict[str, str]]:
    """The entries of a model's ``state_dict``, and names that stand for a tensor already listed under another.

    A tensor that two stages of a pipeline hold has one entry, that of the whole model.
    """
    entries: dict[str, Any] = {}
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    in_whole = renamed(model)
    for own, value in model.state_dict(keep_vars=True).items():
        name = in_whole.get(own, own)
        if name != own:
            aliases[own] = name
        if not isinstance(value, torch.Tensor):
            entries[f"{MODEL}/{name}"] = value
        elif id(value) in first:
            aliases[name] = first[id(value)]
        else:
            first[id(value)] = name
            check_storage(name, value)
            entries[f"{MODEL}/{name}"] = Parts(value, placement_of(value))
    return entries, aliases


def parts(entries: Mapping[str, Any]) -> dict[str, Parts]:
    """Name -> what this rank has of each tensor of a model."""
    return {
        entry.removeprefix(f"{MODEL}/"): value
        for entry, value in entries.items()
        if entry.startswith(f"{MODEL}/") and isinstance(value, Parts)
    }


def set_extra_state(model: nn.Module, values: dict[str, Any]) -> None:
    """Hand what is no tensor (``get_extra_state`` of modules) back."""
    for entry, value in values.items():
        module = entry.removeprefix(f"{MODEL}/").rpartition("_extra_state")[0].rstrip(".")
        model.get_submodule(module).set_extra_state(value)


def parameter_names(model: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """The model's names of the parameters of each group.

    Raises:
        ValueError: The optimizer holds a parameter that is not the model's.
    """
    in_whole = renamed(model)
    names = {id(parameter): in_whole.get(name, name) for name, parameter in model.named_parameters()}
    for number, group in enumerate(optimizer.param_groups):
        missing = [tuple(parameter.shape) for parameter in group["params"] if id(parameter) not in names]
        if missing:
            raise ValueError(
                f"checkpoint: group {number} of {type(optimizer).__name__} holds parameters that are not the model's"
                f" (shapes {missing[:3]}); make the optimizer after axo.parallelize, from model.parameters()"
            )
    return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


def with_names(optimizer: Optimizer, names: list[list[Any]]) -> Iterator[tuple[Any, torch.Tensor]]:
    """(name, parameter) for each parameter of an optimizer, whose groups have these names."""
    for group, of_group in zip(optimizer.param_groups, names, strict=True):
        yield from zip(of_group, group["params"], strict=True)


def optimizer_entries(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The entries of an optimizer's state.

    Raises:
        ValueError: A state tensor has neither its parameter's shape nor one element, and the parameter is split; or
            state is not a parameter's.
    """
    names, kind = parameter_names(model, optimizer), type(optimizer).__name__
    entries: dict[str, Any] = {}
    values: dict[str, dict[str, Any]] = {}
    for name, parameter in with_names(optimizer, names):
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                if not isinstance(key, str) or "/" in key:
                    raise ValueError(
                        f"checkpoint: {kind} keeps a tensor of {name!r} as {key!r}; only one whose key is a string"
                        " without '/' can be saved"
                    )
                entries[f"{OPTIMIZER}/{name}/{key}"] = state_parts(optimizer, name, key, value, parameter)
            elif _is_plain(plain := _of_python(value)):
                values.setdefault(name, {})[key] = plain
            else:
                raise ValueError(
                    f"checkpoint: {kind} keeps {key!r} of {name!r} as a {type(value).__name__}, which is neither a"
                    " tensor nor a plain value"
                )
    values |= values_of_none(optimizer)
    options = [
        {key: _of_python(value) for key, value in checks.without(group).items()} | {"params": of_group}
        for group, of_group in zip(optimizer.param_groups, names, strict=True)
    ]
    entries[OPTIMIZER] = {"kind": kind, "groups": options, "values": values}
    return entries


def values_of_none(optimizer: Optimizer) -> dict[str, dict[str, Any]]:
    """What an optimizer keeps beside the state of its parameters, under a name that no parameter has.

    Raises:
        ValueError: It is no plain value; or options of a group are tensors of a rank.
    """
    kind = type(optimizer).__name__
    state: dict[Any, Any] = dict(optimizer.state)
    of_groups = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    values = {key: _of_python(value) for key, value in state.items() if id(key) not in of_groups}
    for key, value in values.items():
        if isinstance(key, torch.Tensor):
            raise ValueError(
                f"checkpoint: {kind} keeps state of a tensor of shape {tuple(key.shape)} that is in none of its groups;"
                " only that of its parameters can be saved"
            )
        if not isinstance(key, str) or not _is_plain(value):
            raise ValueError(
                f"checkpoint: {kind} keeps {key!r} of no parameter as a {type(value).__name__}; only a plain value"
                " can be saved there"
            )
    for key, value in (option for group in optimizer.param_groups for option in checks.without(group).items()):
        if key != "params" and _holds_elements(value) and checks.shards_of(optimizer):
            raise ValueError(
                f"checkpoint: {kind} keeps tensors in the option {key!r} of a group, whose parameters are split over"
                " ranks; only what is in optimizer.state, under its parameter, is saved from all ranks"
            )
    return {_OF_NONE: values} if values else {}


def state_parts(optimizer: Optimizer, name: Any, key: Any, value: torch.Tensor, parameter: torch.Tensor) -> Parts:
    """This rank's part of a tensor that an optimizer keeps of a parameter.

    Raises:
        ValueError: It has neither the parameter's shape nor one element, and the parameter is split.
    """
    own, placement, shape = placement_of(value), placement_of(parameter), tuple(value.shape)
    if own is not None or placement is None or not shape:
        return Parts(value, own)
    if shape == placement.state.local_shape():
        return Parts(value, placement.state)
    if value.shape == parameter.shape:
        return Parts(value, placement)
    if tuple(parameter.shape) == placement.global_shape:
        return Parts(value)
    raise ValueError(
        f"checkpoint: {type(optimizer).__name__} keeps {key!r} of {name!r} in shape {shape}, and the parameter has"
        f" shape {tuple(parameter.shape)} on this rank; of a split parameter only state of its shape or a single number"
        " can be saved"
    )


def optimizer_targets(model: nn.Module, optimizer: Optimizer, saved: Described) -> dict[str, Parts]:
    """PARAMETER/KEY -> room on this rank for each tensor of the optimizer's state that a checkpoint holds."""
    targets: dict[str, Parts] = {}
    parameters = dict(with_names(optimizer, parameter_names(model, optimizer)))
    for entry, (whole, dtype) in saved.items():
        name, _, key = entry.rpartition("/")
        if name not in parameters:
            continue
        parameter = parameters[name]
        own = optimizer.state.get(parameter, {}).get(key)
        placement = placement_of(own) or placement_of(parameter)
        if placement is not None:
            placement = placement.state if whole == placement.whole_shape else None
        shape = whole if placement is None else placement.local_shape()
        in_place = getattr(optimizer, "loads_in_place", False) and isinstance(own, torch.Tensor)
        if not in_place or own.shape != shape:  # in place: it lies where memory may have no room for it twice
            # Single numbers stay in host memory, where torch's optimizers keep their step.
            device = parameter.device if whole else torch.device("cpu")
            own = torch.zeros(shape, dtype=dtype, device=device)
        targets[entry] = Parts(own, placement)
    return targets


def join_optimizers(of_stages: list[dict[str, Any]]) -> dict[str, Any]:
    """The ``optimizer`` entries of the stages of a pipeline as one: groups with the same options become one group."""
    joined: dict[str, Any] = {"kind": of_stages[0]["kind"], "groups": [], "values": {}}
    for saved in of_stages:
        for name, values in saved["values"].items():
            joined["values"][name] = joined["values"].get(name, {}) | values
        for group in saved["groups"]:
            same = [one for one in joined["groups"] if one | {"params": ()} == group | {"params": ()}]
            if same:
                same[0]["params"] += [name for name in group["params"] if name not in same[0]["params"]]
            else:
                joined["groups"].append(group | {"params": list(group["params"])})
    return joined


def set_optimizer(model: nn.Module, optimizer: Optimizer, saved: dict[str, Any], tensors: Mapping[str, Parts]) -> None:
    """Give the optimizer the state that was read, and each group the options of the group that had its parameters.

    Raises:
        ValueError: A group's parameters were in several groups, or it is the state of another kind of optimizer.
    """
    values = optimizer_values(saved, {name: each.local for name, each in tensors.items()})
    group_of = {name: number for number, group in enumerate(saved["groups"]) for name in group["params"]}
    names = parameter_names(model, optimizer)
    same_groups = len(names) == len(saved["groups"]) and all(
        group_of.get(name) == number for number, of_group in enumerate(names) for name in of_group
    )
    groups = []
    for number, of_group in enumerate(names):
        sources = {group_of.get(name) for name in of_group} or ({number} if same_groups else set())
        if len(sources) > 1 or None in sources:
            raise ValueError(
                f"checkpoint: the parameters of the optimizer's group {number} were in groups"
                f" {sorted(map(str, sources))} when the checkpoint was saved; build the same groups"
            )
        own = dict(optimizer.param_groups[number])
        options = dict(saved["groups"][next(iter(sources))]) if sources else own
        lacks = [repr(option) for option in own if option not in options]
        kind = saved.get("kind", "another optimizer")
        if lacks and kind != type(optimizer).__name__:
            raise ValueError(
                f"checkpoint: the optimizer that was saved is {kind}, and this is {type(optimizer).__name__} (it lacks"
                f" {', '.join(lacks[:3])}); use the same, or load without one"
            )
        groups.append(own | options | {"params": of_group})  # the same class of another torch may have had fewer
    optimizer.load_state_dict(plain_optimizer(values, groups))


def optimizer_values(saved: dict[str, Any], tensors: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Parameter -> key -> value: plain ones are in the entry ``optimizer``, tensors in entries of their own."""
    values = {name: dict(plain) for name, plain in saved["values"].items()}
    for entry, tensor in tensors.items():  # PARAMETER/KEY
        name, _, key = entry.rpartition("/")
        values.setdefault(name, {})[key] = tensor
    return values


def plain_optimizer(values: dict[Any, dict[str, Any]], groups: list[dict[str, Any]]) -> dict[str, Any]:
    """What ``Optimizer.state_dict`` gives: parameters by number, in the order of the groups, which have their names."""
    number = itertools.count()
    numbers = {name: next(number) for group in groups for name in group["params"]}
    of_parameters = {index: values[name] for name, index in numbers.items() if values.get(name)}
    return {
        "state": of_parameters | values.get(_OF_NONE, {}),
        "param_groups": [group | {"params": [numbers[name] for name in group["params"]]} for group in groups],
    }


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def _holds_elements(value: Any) -> bool:
    """Whether a tensor of more than one element is in it."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return any(map(_holds_elements, value))
    return isinstance(value, torch.Tensor) and value.numel() > 1


def _of_python(value: Any) -> Any:
    """NumPy's numbers as Python's: a rate of ``np.linspace`` is one, and torch does not read it back."""
    if type(value) in (list, tuple):
        return type(value)(map(_of_python, value))
    return value.item() if isinstance(value, np.generic) else value


def rng_state() -> dict[str, Any]:
    """The state of this process's generators, as plain values and tensors."""
    kind, keys, position, has_gauss, gauss = np.random.get_state()  # noqa: NPY002 (the global generator)
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys, dtype=np.int64)), position, has_gauss, gauss),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """The inverse of :func:`rng_state`."""
    torch.set_rng_state(state["torch"])
    version, inner, gauss_next = state["python"]
    random.setstate((version, tuple(inner), gauss_next))
    kind, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, gauss))  # noqa: NPY002
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def dropout_state(model: nn.Module) -> dict[str, list[int | None]]:
    """Base and count of calls of each Axo dropout; the same on every rank and for every grid."""
    return {
        name: [module._base, module._next_call] for name, module in model.named_modules() if isinstance(module, Dropout)
    }


def set_dropout_state(model: nn.Module, state: dict[str, list[int | None]]) -> None:
    """The inverse of :func:`dropout_state`; a dropout that the checkpoint does not know keeps its own."""
    for name, module in model.named_modules():
        if isinstance(module, Dropout) and name in state:
            base, count = state[name]
            module._base, module._next_call = base, int(count or 0)
            module._calls.clear()
