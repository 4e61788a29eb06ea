"""What would be on a disk, had the power failed at some point of a recorded run (``disk_trace.cpp`` records).

A file has what its last sync gave it, and since then all, none, a part of, or zeros for what was written. A folder has
the entries of its last sync, and since then any number of its operations, in their order; what happens to one folder or
file says nothing of another. A created file's entry is the folder's, so syncing the file alone does not keep it.
"""

from __future__ import annotations

import os
import random
import struct
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

HEADER = struct.Struct("<c3xii4xqq")  # as Header in disk_trace.cpp
SOURCE = Path(__file__).with_name("disk_trace.cpp")
Tree = dict[str, "Tree | bytes"]


def build(folder: Path) -> Path:
    """Compile the recorder."""
    library = folder / "disk_trace.so"
    compiler = os.environ.get("CXX", "g++").split()
    subprocess.run([*compiler, "-O1", "-shared", "-fPIC", "-std=c++17", "-o", library, SOURCE, "-ldl"], check=True)
    return library


@dataclass
class Operation:
    """One record; ``kind`` as in ``disk_trace.cpp``, or "n" for a note of the program's own."""

    kind: str
    path: str
    path2: str
    offset: int
    data: bytes


def note(log: str, text: str) -> None:
    """Put a note between the operations: what the program knows by now."""
    with open(log, "ab", buffering=0) as file:
        file.write(HEADER.pack(b"n", len(text), 0, 0, 0) + text.encode())


def read(log: Path) -> list[Operation]:
    """The operations of a recorded run, in order."""
    data, at, found = log.read_bytes(), 0, []
    while at < len(data):
        kind, length, length2, offset, size = HEADER.unpack_from(data, at)
        at += HEADER.size
        ends = at + length, at + length + length2, at + length + length2 + size
        path, path2 = data[at : ends[0]].decode(), data[ends[0] : ends[1]].decode()
        found.append(Operation(kind.decode(), path, path2, offset, data[ends[1] : ends[2]]))
        at = ends[2]
    return found


@dataclass
class File:
    live: bytearray = field(default_factory=bytearray)
    synced: bytes = b""
    touched: bool = False

    def write(self, offset: int, data: bytes) -> None:
        self.live.extend(bytes(max(0, offset - len(self.live))))
        self.live[offset : offset + len(data)] = data
        self.touched = True

    def variants(self) -> list[bytes]:
        """All, none, half, zeros."""
        if not self.touched:
            return [bytes(self.live)] * 4
        half = self.synced[: len(self.live)] + bytes(self.live)[len(self.synced) :]
        half = half[: len(self.synced) + max(0, len(half) - len(self.synced)) // 2]
        return [bytes(self.live), self.synced, half, self.synced + bytes(max(0, len(self.live) - len(self.synced)))]


@dataclass
class Folder:
    live: dict[str, File | Folder] = field(default_factory=dict)
    states: list[dict[str, File | Folder]] = field(default_factory=lambda: [{}])  # the first is synced

    def changed(self) -> None:
        self.states.append(dict(self.live))


class Disk:
    """The folder that was recorded, with what is synced and what is not."""

    def __init__(self, root: Path) -> None:
        self._root, self.top = str(root), Folder()

    def apply(self, operation: Operation) -> None:
        """Take one more operation."""
        parent, name = self._place(operation.path)
        if operation.kind in "cm":
            parent.live[name] = File() if operation.kind == "c" else Folder()
        elif operation.kind == "d":
            del parent.live[name]
        elif operation.kind in "rx":
            parent2, name2 = self._place(operation.path2)
            if operation.kind == "x":
                parent.live[name], parent2.live[name2] = parent2.live[name2], parent.live[name]
            else:
                parent2.live[name2] = parent.live.pop(name)
            if parent2 is not parent:
                parent2.changed()
        else:
            node = self.top if operation.path == self._root else parent.live[name]
            if isinstance(node, Folder):
                node.states = [dict(node.live)]
            elif operation.kind == "s":
                node.synced, node.touched = bytes(node.live), False
            elif operation.kind == "t":
                node.live.clear()
                node.touched = True
            else:
                node.write(operation.offset, operation.data)
            return
        parent.changed()

    def _place(self, path: str) -> tuple[Folder, str]:
        *above, name = path.removeprefix(self._root).strip("/").split("/")
        node = self.top
        for part in above:
            inner = node.live[part]
            assert isinstance(inner, Folder)
            node = inner
        return node, name

    def tree(self, of_folder: Callable[[Folder], int], of_file: Callable[[File], int]) -> Tree:
        """What is on the disk: which of a folder's states, which of a file's variants."""

        def build(folder: Folder) -> Tree:
            entries = folder.states[of_folder(folder)]
            return {
                name: build(node) if isinstance(node, Folder) else node.variants()[of_file(node)]
                for name, node in entries.items()
            }

        return build(self.top)

    def after_power_cut(self, draws: int, seed: int) -> Iterator[Tree]:
        """All kept or all lost, of folders and of files; torn files; and ``draws`` mixtures."""
        last, first = (lambda folder: -1), (lambda folder: 0)
        for folder_state in (last, first):
            for variant in range(4):
                yield self.tree(folder_state, lambda file, variant=variant: variant)
        draw = random.Random(seed)
        for _ in range(draws):
            chosen: dict[int, int] = {}

            def pick(node: File | Folder, count: int, chosen: dict[int, int] = chosen) -> int:
                return chosen.setdefault(id(node), draw.randrange(count))

            yield self.tree(lambda folder: pick(folder, len(folder.states)), lambda file: pick(file, 4))


def put(tree: Tree, folder: Path) -> None:
    """Write a tree into ``folder``."""
    folder.mkdir(exist_ok=True)
    for name, node in tree.items():
        if isinstance(node, bytes):
            (folder / name).write_bytes(node)
        else:
            put(node, folder / name)


def take(folder: Path) -> Tree:
    """The tree of ``folder``."""
    return {path.name: take(path) if path.is_dir() else path.read_bytes() for path in folder.iterdir()}
