"""Files in the format of safetensors, written tensor by tensor.

8 bytes of the header's length, then JSON of dtype, shape and byte range of each tensor, then the data. The header is
known in advance, so no more than one tensor is held at a time.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from axo.checkpoint.folder import whole_file
from axo.checkpoint.state import Described

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


def write(out: Path, described: Described, tensors: Iterable[torch.Tensor], extra: dict[str, str]) -> None:
    """Write ``out``, which gets its name when it is complete and on disk.

    Args:
        out: The file.
        described: Name -> shape and dtype.
        tensors: The tensors, in the same order.
        extra: Words to keep beside them.

    Raises:
        ValueError: A dtype has no name in the format.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **extra}}
    end = 0
    for name, (shape, dtype) in described.items():
        check_dtype(name, dtype)
        start, end = end, end + bytes_of(shape, dtype)
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with whole_file(out) as unfinished, open(unfinished, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors:
            if tensor.numel():
                file.write(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)


def bytes_of(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes of a tensor."""
    return math.prod(shape) * dtype.itemsize


def check_dtype(name: str, dtype: torch.dtype) -> None:
    """Refuse a dtype that the format does not know.

    Raises:
        ValueError: It does not.
    """
    if dtype not in _NAMES:
        raise ValueError(f"safetensors: {name} is {dtype}, which the format does not know; save a .pth file")
