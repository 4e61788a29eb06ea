"""Values that one rank sends another, in a format that runs nothing: whoever reads a message gets data, or an error.

    message = pack({"input_ids": ids, "names": ["a", "b"]})     # (bytes,) uint8, in host memory
    value = unpack(message)

A message is the length of its head (8 bytes, little endian), the head, and the bytes of its tensors one after another.
The head is JSON: ``{"tensors": [[dtype, shape, place, requires_grad], ...], "value": ...}``, in which what JSON does
not know is a dict of one entry, its kind and its content. A tensor that stands in a value twice is sent once.

Plain values, tensors, numpy arrays, paths, and, so that batches come as they were read, tuples, lists, dicts,
dataclasses, members of enums and exceptions of classes of a program's own. Of those the receiver takes only classes
that it has imported itself and that have no destructor, and runs no ``__init__``, ``__setitem__`` or ``__setstate__``
of theirs. An exception of another class comes as a RuntimeError with its text.

Not here: sparse and quantized tensors, views of one storage (each gets its own), objects of other classes.
"""

from __future__ import annotations

import base64
import dataclasses
import enum
import json
import math
import re
import sys
from collections import UserDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from types import MemberDescriptorType
from typing import Any

import numpy as np
import torch

from axo.errors import Error

_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class that Python code has defined
_FACTORIES = {each.__name__: each for each in (int, float, str, list, dict, set, tuple)}  # of a defaultdict
_ARRAY = re.compile(r"[<>|][biufcSUVmM]\d+(\[\w+\])?")  # dtypes without objects
_PATH = type(Path())
_DEPTH = 100  # of a value in values: a reader's stack has room for it
_MOST = 1 << 34  # bytes of a broadcast
_HINT = (
    "send tensors, arrays, texts and numbers, in lists, tuples, dicts or dataclasses of classes that a module defines"
)


def broadcast(value: Any, send: Callable[[torch.Tensor], Any], is_source: bool, device: torch.device) -> Any:
    """The source's ``value``, on every rank; the source too gets it as it arrives.

    Args:
        value: What the source sends; not looked at elsewhere.
        send: Copies a tensor from the source to the others, in place. Called by every rank, twice.
        is_source: Whether this rank is the source.
        device: Where messages travel, and where tensors that were on a device arrive.

    Raises:
        TypeError: Something in it cannot be sent; on every rank.
        axo.errors.Error: What came is no message of :func:`pack`, or has over 16 GiB.
    """
    message = pack(value) if is_source else torch.empty(0, dtype=torch.uint8)
    send(size := torch.tensor([len(message)]))
    if not 0 < size <= _MOST:
        raise Error(f"broadcast: a rank has sent {int(size)} bytes; at most {_MOST} are taken")
    message = message.to(device) if is_source else torch.empty(int(size), dtype=torch.uint8, device=device)
    send(message)
    return unpack(message, device)


def pack(value: Any) -> torch.Tensor:
    """The message of a value; where something in it cannot be sent, one that says so to whoever reads it."""
    kind = type(value).__name__
    numbered: dict[int, tuple[int, torch.Tensor]] = {}  # by id
    try:
        return _message({"value": _encode(value, numbered)}, [tensor for _, tensor in numbered.values()])
    except RecursionError:
        why = f"a {kind} that is nested too deeply cannot be sent to other ranks"
    except TypeError as error:
        why = str(error)
    except Exception as error:  # of the value's own functions; peers wait for a message
        why = f"a {kind} cannot be sent to other ranks ({type(error).__name__}: {error})"
    return _message({"error": why}, [])


def _message(head: dict[str, Any], tensors: list[torch.Tensor]) -> torch.Tensor:
    described = [
        [str(each.dtype).removeprefix("torch."), list(each.shape), _place(each), each.requires_grad] for each in tensors
    ]
    text = json.dumps(head | {"tensors": described}).encode()
    data = [_bytes(each.detach().cpu().resolve_conj().resolve_neg()) for each in tensors if not each.is_meta]
    return torch.cat([_tensor(len(text).to_bytes(8, "little") + text), *data])


def unpack(message: torch.Tensor, device: torch.device | str = "cpu") -> Any:
    """The value of a message; tensors that were on a device come to ``device``.

    Raises:
        TypeError: It says that its sender had a value that cannot be sent.
        axo.errors.Error: It is no message of :func:`pack`, or names a class that this rank does not take.
    """
    try:
        message = message.cpu()
        start = 8 + int.from_bytes(message[:8].numpy().tobytes(), "little")
        head = json.loads(message[8:start].numpy().tobytes())
        tensors = []
        for dtype, shape, place, requires_grad in head["tensors"]:
            tensor, start = _cut(message, start, _dtype(dtype), shape, place == "meta")
            tensors.append((tensor.to(device) if place == "device" else tensor).requires_grad_(requires_grad))
        if start != len(message):
            raise ValueError(f"it has {len(message)} bytes, and {start} are described")
        if "error" not in head:
            return _decode(head["value"], dict(enumerate(tensors)))
    except Exception as error:  # of what a peer sent, which may be anything
        raise Error(f"what a rank sent is no plain value ({type(error).__name__}: {error})") from None
    raise TypeError(str(head["error"]))


def _place(tensor: torch.Tensor) -> str:
    return tensor.device.type if tensor.device.type in ("cpu", "meta") else "device"


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _cut(
    message: torch.Tensor, start: int, dtype: torch.dtype, shape: list[int], is_meta: bool
) -> tuple[torch.Tensor, int]:
    """The tensor whose bytes begin at ``start``, and where they end."""
    if is_meta:
        return torch.empty(shape, dtype=dtype, device="meta"), start
    end = start + math.prod(shape) * dtype.itemsize
    if min(shape, default=0) < 0 or end > len(message):
        raise ValueError(f"a tensor of shape {shape} does not end in it")
    return message[start:end].clone().view(dtype).view(shape), end


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"torch.{name} is no dtype")
    return dtype


# --- the head ---------------------------------------------------------------------------------------------------------


def _encode(value: Any, tensors: dict[int, tuple[int, torch.Tensor]], depth: int = 0) -> Any:
    if depth > _DEPTH:
        raise RecursionError

    def each(values: Any) -> list[Any]:
        return [_encode(one, tensors, depth + 1) for one in values]

    kind = type(value)
    if kind is np.ndarray or (isinstance(value, np.generic) and kind.__module__ == "numpy"):
        if not _ARRAY.fullmatch(value.dtype.str) or np.dtype(value.dtype.str) != value.dtype:  # another package's
            raise TypeError(f"a numpy array of {value.dtype} cannot be sent to other ranks; {_HINT}")
        scalar = isinstance(value, np.generic)
        return {"array": [value.dtype.str, list(value.shape), scalar, _encode(_tensor(value.tobytes()), tensors)]}
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return each(value)
    if kind in (torch.Tensor, torch.nn.Parameter) and value.layout == torch.strided and not value.is_quantized:
        return {"tensor": tensors.setdefault(id(value), (len(tensors), value))[0]}
    if isinstance(value, torch.Tensor):
        what = f"{kind.__name__} (layout {value.layout}, dtype {value.dtype})"
        raise TypeError(f"a tensor of class {what} cannot be sent to other ranks; {_HINT}")
    if kind in (tuple, set, frozenset, torch.Size):
        return {kind.__name__: each(value)}
    if kind is dict:
        return {"dict": [each(entry) for entry in value.items()]}
    if kind in (bytes, bytearray):
        return {kind.__name__: base64.b64encode(value).decode()}
    if kind is complex:
        return {"complex": [value.real, value.imag]}
    if kind in (torch.dtype, torch.device, _PATH):
        return {"path" if kind is _PATH else kind.__name__: str(value).removeprefix("torch.")}
    if kind.__name__ == "Encoding" and kind.__module__ == "tokenizers":
        return {"encoding": value.__getstate__().decode()}
    if isinstance(value, enum.Enum):
        if _imported(_name(kind)) is not kind or kind.__members__.get(value.name) is not value:
            raise TypeError(f"{value!r} is no member of an imported module's enum, and cannot be sent to other ranks")
        return {"enum": [_name(kind), value.name]}
    if not isinstance(value, BaseException):
        return {"object": [_name(kind), *each(_content(value))]}
    text = f"{kind.__name__}: {value}"
    try:
        return {"error": [text, _name(kind), *each(_content(value))]}
    except (TypeError, AttributeError):
        return _encode(RuntimeError(text), tensors, depth)


def _decode(value: Any, tensors: dict[int, torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(each, tensors) for each in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "encoding":
        encoding = sys.modules["tokenizers"].Encoding()
        encoding.__setstate__(content.encode())
        return encoding
    if kind == "array":
        dtype, shape, scalar, data = content
        if not _ARRAY.fullmatch(dtype):
            raise TypeError(f"an array of {dtype}")
        array: Any = np.ndarray(shape, dtype, tensors[data["tensor"]].numpy())
        del tensors[data["tensor"]]  # no other array has its memory
        return array[()] if scalar else array
    if kind == "enum":
        return _imported(content[0], enum.Enum).__members__[content[1]]
    if kind == "object":
        return _instance(content[0], *_decode(content[1:], tensors))
    if kind == "error":
        try:
            return _instance(content[1], *_decode(content[2:], tensors))
        except Exception:  # a class, in it too, that only the sender has imported
            return RuntimeError(str(content[0]))
    if not isinstance(content, str if kind in _OF_TEXT else list):  # the rows of a tensor take more than its bytes
        raise TypeError(f"a {kind} of a {type(content).__name__}")
    return _KINDS[kind](_decode(content, tensors))


_KINDS: dict[str, Any] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "Size": torch.Size,
    "dict": dict,
    "bytes": base64.b64decode,
    "bytearray": lambda text: bytearray(base64.b64decode(text)),
    "complex": lambda parts: complex(*parts),
    "dtype": _dtype,
    "device": torch.device,
    "path": Path,
}
_OF_TEXT = ("bytes", "bytearray", "dtype", "device", "path")


# --- classes of a program's own ---------------------------------------------------------------------------------------


def _name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _imported(name: str, family: type = object) -> Any:
    """The class of that name, of that family."""
    module, _, path = name.partition(":")
    kind: Any = sys.modules.get(module)
    for part in path.split("."):
        kind = vars(kind).get(part) if hasattr(kind, "__dict__") else None
    if not isinstance(kind, type) or not issubclass(kind, family):
        raise TypeError(f"{name} is no class of an imported module, and cannot be sent to other ranks; {_HINT}")
    return kind


def _class(name: str) -> tuple[Any, Any]:
    """The class of that name, and its base: C's class, or ``object``, whose functions alone read and make instances."""
    kind = _imported(name)
    is_taken = issubclass(kind, (tuple, list, dict, UserDict, Exception)) or dataclasses.is_dataclass(kind)
    ends = issubclass(kind, BaseException) and not issubclass(kind, Exception)  # SystemExit, KeyboardInterrupt
    if not is_taken or ends or hasattr(kind, "__del__"):
        raise TypeError(f"a {name} cannot be sent to other ranks; {_HINT}")
    return kind, next(each for each in kind.__mro__ if not each.__flags__ & _HEAP_TYPE)


def _slots(kind: type) -> dict[str, MemberDescriptorType]:
    """The attributes of a class's instances outside of their ``__dict__``, by their names."""
    slotted = [vars(each) for each in kind.__mro__ if "__slots__" in vars(each)]
    return {k: slot for names in slotted for k, slot in names.items() if isinstance(slot, MemberDescriptorType)}


def _content(value: Any) -> tuple[list[Any], dict[str, Any]]:
    """What an instance holds as its base does, and its attributes."""
    kind, base = _class(_name(type(value)))
    if kind is not type(value):
        raise TypeError(f"{_name(type(value))} is another class by now, and cannot be sent to other ranks")
    items: list[Any] = []
    if issubclass(base, tuple | list | dict):
        items = list(base.items(value) if issubclass(base, dict) else base.__iter__(value))
    elif issubclass(base, BaseException):
        items = list(base.__reduce__(value)[1])
    attributes = {name: slot.__get__(value) for name, slot in _slots(kind).items()} | getattr(value, "__dict__", {})
    if isinstance(value, defaultdict) and value.default_factory is not None:
        if value.default_factory not in _FACTORIES.values():
            raise TypeError(f"a defaultdict of {value.default_factory} cannot be sent to other ranks; {_HINT}")
        items.insert(0, value.default_factory.__name__)
    return items, attributes


def _instance(name: str, items: list[Any], attributes: dict[str, Any]) -> Any:
    kind, base = _class(name)
    if not isinstance(items, list) or not isinstance(attributes, dict):
        raise TypeError(f"a {name} of a {type(items).__name__} and a {type(attributes).__name__}")
    if issubclass(base, tuple):
        value = base.__new__(kind, items)
    elif issubclass(base, BaseException):
        value = base.__new__(kind, *items)
        base.__init__(value, *items)
    else:
        value = base.__new__(kind)
        if issubclass(base, defaultdict) and items and isinstance(items[0], str):
            value.default_factory = _FACTORIES[items.pop(0)]
        for item in items:
            base.__setitem__(value, *item) if issubclass(base, dict) else base.append(value, item)
    for attribute, slot in _slots(kind).items():
        slot.__set__(value, attributes.pop(attribute))
    if hasattr(value, "__dict__"):
        vars(value).update(attributes)
    return value
