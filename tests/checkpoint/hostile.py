"""Checkpoints as somebody would make them who means harm: what pickles call, and metadata that is not true."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from axo.checkpoint import checksum, save
from axo.checkpoint.folder import MARKER, METADATA


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, flag: Path) -> None:
        self.flag = flag

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.flag),)


def model() -> nn.Module:
    return nn.Linear(3, 5)


def write(folder: Path) -> Path:
    """A checkpoint of :func:`model` with an optimizer."""
    one = model()
    optimizer = torch.optim.Adam(one.parameters())
    one(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return save(folder, one, optimizer, step=1, extra={"position": 5}).path


def seal(path: Path) -> None:
    """Make the checksum of the metadata right again."""
    said = json.loads((path / MARKER).read_text())
    said["metadata"] = checksum.of((path / METADATA).read_bytes())
    (path / MARKER).write_text(json.dumps(said))


def rewrite(path: Path, change: Callable[[Any], Any]) -> None:
    """Let ``change`` have the metadata, and what it returns (None: the same object) be written in its place."""
    metadata = pickle.loads((path / METADATA).read_bytes())
    changed = change(metadata)
    (path / METADATA).write_bytes(pickle.dumps(metadata if changed is None else changed))
    seal(path)


def put_entry(path: Path, entry: str, value: Any) -> None:
    """Write ``value`` as a file of its own, and let the metadata say that ``entry`` lies there."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    (path / "other.distcp").write_bytes(buffer.getvalue())

    def change(metadata: Any) -> None:
        for index, info in metadata.storage_data.items():
            if index.fqn == entry:
                info.relative_path, info.offset, info.length = "other.distcp", 0, len(buffer.getvalue())
                info.checked = 0, len(buffer.getvalue()), checksum.of(buffer.getbuffer())

    rewrite(path, change)


def pth(path: Path, value: Any) -> Path:
    torch.save(value, path)
    return path


def compressed(path: Path) -> Path:
    """The file with its parts compressed: a thousandth of the bytes that it stands for."""
    unpacked = path.with_suffix(".zip")
    shutil.move(path, unpacked)
    with zipfile.ZipFile(unpacked) as source, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as target:
        for part in source.infolist():
            target.writestr(part.filename, source.read(part))
    return path
