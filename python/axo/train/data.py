"""Text on disk as tokens, and the rows of a batch, which depend on (seed, step, data coordinate) only.

A corpus is the files' tokens one after another. Byte-level tokens are read straight from the files; with a
``tokenizer.json`` they are written once, next to the run or in a cache, and read from there. Nothing of the size of the
corpus is ever held in memory.

A window is ``seq_len + 1`` tokens: inputs ``[0, seq_len)``, targets shifted by one. Window w starts at token ``w *
seq_len``, so that an epoch shows every target once. Row r of step s is window ``permutation(seed, epoch)(g mod
windows)`` with ``g = s * batch_size + r`` and ``epoch = g // windows``; the permutation is a Feistel network and holds
no state. The global batch is therefore the same for every grid, and a resumed run goes on exactly where it stopped.

The rows of the global batch are split over (data, z), data outermost, as the grid's rank order has it; peers on x and y
read the same rows, and so do the ranks of a context, each of which then keeps its tokens.
Not here: document masks, mixing weights, padding.
"""

from __future__ import annotations

import bisect
import fcntl
import hashlib
import json
import os
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from axo.arrangement import AXONN, Arrangement
from axo.checkpoint.folder import kind_of, whole_file
from axo.files import open_own
from axo.grid import Coords, Grid

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BYTE_VOCABULARY = 256
_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})
_MASK64 = (1 << 64) - 1
_BLOCKS, _BLOCK_BYTES = 16, 16 << 10  # of a file, in the hash that tells texts apart
_ENCODE_BYTES = 1 << 20  # text handed to the tokenizer at once; cut at line ends


def default_text() -> list[Path]:
    """The Python standard library's ``*.py`` sources, sorted by path: real text that every machine has.

    Raises:
        ValueError: This Python came without its sources.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = _walk(root, suffix=".py", skip=_NOT_LIBRARY)
    if not files:
        raise ValueError(f"data: the standard library at {root} holds no *.py sources; name your own text with --data")
    return files


def find_files(paths: Sequence[str | os.PathLike[str]]) -> list[Path]:
    """Resolve files and folders to a list of files; a folder gives everything under it but hidden names, sorted.

    Raises:
        ValueError: A path does not exist or is no file or folder, or a folder holds no file.
    """
    files: list[Path] = []
    for path in paths:
        if not os.fspath(path).strip():
            raise ValueError("data: a path is empty; name files or folders of text")
        path = Path(path)
        inside = [path] if os.path.isfile(path) else _walk(path)
        if not inside and os.path.isdir(path):
            raise ValueError(f"data: the folder {path} holds no files")
        if not inside:
            what = "is neither a file nor a folder" if os.path.exists(path) else kind_of(path)
            raise ValueError(f"data: {path} {what}; give files or folders of text")
        files += inside
    return files


def _walk(root: Path, suffix: str = "", skip: frozenset[str] = frozenset()) -> list[Path]:
    files: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in skip and not name.startswith("."))
        files += [Path(folder, name) for name in names if name.endswith(suffix) and not name.startswith(".")]
    files = [file for file in files if file.is_file()]  # no FIFOs, no dangling links
    return sorted(files, key=lambda file: file.relative_to(root).as_posix())


def digest_of(files: Sequence[Path]) -> str:
    """A short hash of names, sizes and contents of files, in their order; of a large one's contents, of some blocks."""
    hasher = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        hasher.update(json.dumps([file.name, size]).encode())
        with open(file, "rb") as opened:
            for block in range(_BLOCKS if size > _BLOCK_BYTES else 1):  # evenly apart, the first and the last too
                opened.seek(block * max(0, size - _BLOCK_BYTES) // (_BLOCKS - 1))
                hasher.update(opened.read(_BLOCK_BYTES))
    return hasher.hexdigest()[:12]


class Corpus:
    """The tokens of files, one after another. A rank that is spawned gets their names, not what is in them.

    Args:
        files: What to read, in this order.
        dtype: Of a token in them, little-endian: a byte, or ``uint16`` or ``uint32`` where a tokenizer made them.
        vocab_size: Tokens are below this.
        digest: The hash of the text that they stand for, see :func:`digest_of`; "": of the files.

    Raises:
        ValueError: A file cannot be read.
    """

    def __init__(
        self, files: Sequence[Path], dtype: str = "uint8", vocab_size: int = BYTE_VOCABULARY, digest: str = ""
    ) -> None:
        self.vocab_size, self._files, self._dtype = vocab_size, tuple(files), np.dtype(dtype).newbyteorder("<")
        self._starts, self._stamps = [0], list[tuple[int, int]]()
        for file in self._files:
            if not os.access(file, os.R_OK):
                raise ValueError(f"data: {file} cannot be read; check its permissions")
            self._stamps.append(_stamp(file.stat()))
            self._starts.append(self._starts[-1] + self._stamps[-1][0] // self._dtype.itemsize)
        self.digest = digest or digest_of(files)

    def __len__(self) -> int:
        return self._starts[-1]

    def read(self, start: int, count: int) -> np.ndarray:
        """Return tokens ``[start, start + count)`` as int64 ``(count,)``.

        Raises:
            ValueError: A file is not what it was when the corpus was opened.
        """
        pieces, index = [b""], bisect.bisect_right(self._starts, start) - 1
        end, size = start + count, self._dtype.itemsize
        while start < end:
            stop = min(end, self._starts[index + 1])
            if stop > start:
                with open(self._files[index], "rb") as file:
                    if _stamp(os.fstat(file.fileno())) != self._stamps[index]:
                        raise ValueError(
                            f"data: {self._files[index]} was changed or replaced while the run reads it; leave it as it"
                            " was"
                        )
                    file.seek((start - self._starts[index]) * size)
                    pieces.append(file.read((stop - start) * size))
            start, index = stop, index + 1
        return np.frombuffer(b"".join(pieces), self._dtype).astype(np.int64)


def _stamp(status: os.stat_result) -> tuple[int, int]:
    return status.st_size, status.st_mtime_ns


def tokenizer_vocab_size(tokenizer: Path) -> int:
    """One more than the largest id of a ``tokenizer.json``.

    Raises:
        ValueError: The file is missing or is not a tokenizer.
    """
    return max(_load_tokenizer(tokenizer).get_vocab().values()) + 1


def encode(files: Sequence[Path], tokenizer: Path, cache: Path) -> Corpus:
    """Tokenize ``files`` into ``cache`` and open the result; once: its name hashes tokenizer, paths, sizes and times.

    Of several ranks that ask at the same time one works and the others wait for its file. Text is cut into pieces of
    about 1 MiB at line ends, so a token never spans two pieces; bytes that are not UTF-8 become U+FFFD.

    Raises:
        ValueError: The tokenizer cannot be loaded.
    """
    loaded = _load_tokenizer(tokenizer)
    vocab_size = max(loaded.get_vocab().values()) + 1
    dtype = "uint16" if vocab_size <= 1 << 16 else "uint32"
    stamps = [(str(file.resolve()), *_stamp(file.stat())) for file in files]
    key = hashlib.sha256(tokenizer.read_bytes() + json.dumps(stamps).encode()).hexdigest()[:24]
    target = cache / f"tokens-{key}.{dtype}"
    cache.mkdir(parents=True, exist_ok=True)
    with os.fdopen(open_own(cache / ".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # ends with the file, whatever happens to this process
        if not target.exists():
            _encode_into(target, files, loaded, np.dtype(dtype).newbyteorder("<"))
    return Corpus([target], dtype, vocab_size, digest_of(files))


def _encode_into(target: Path, files: Sequence[Path], tokenizer: Tokenizer, dtype: np.dtype) -> None:
    with whole_file(target) as unfinished, open(unfinished, "wb") as out:
        for file in files:
            with open(file, "rb") as text:
                while lines := text.readlines(_ENCODE_BYTES):
                    piece = b"".join(lines).decode("utf-8", "replace")
                    out.write(np.asarray(tokenizer.encode(piece, add_special_tokens=False).ids, dtype).tobytes())


def _load_tokenizer(path: Path) -> Tokenizer:
    if not path.is_file():
        what = "is not a file" if path.exists() else "does not exist"
        raise ValueError(f"tokenizer: {path} {what}; give a tokenizer.json, or leave it out for bytes")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads would not survive the fork of the ranks
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises a bare Exception
        raise ValueError(f"tokenizer: {path} is not a tokenizer.json: {error}") from None


def rank_rows(batch_size: int, grid: Grid, coords: Coords, arrangement: Arrangement = AXONN, context: int = 1) -> range:
    """The rows of the global batch that a rank reads: contiguous, data outermost, then z; equal for peers on x and y,
    and for each ``context`` neighbours along z.

    Raises:
        ValueError: ``batch_size`` does not divide over the axes that split rows.
    """
    parts = arrangement.row_parts(grid) // context
    rows, rest = divmod(batch_size, parts)
    if rest:
        near = sorted({max(1, rows) * parts, -(-batch_size // parts) * parts})
        raise ValueError(
            f"batch: batch-size={batch_size} rows do not divide over {'*'.join(reversed(arrangement.rows))}"
            f"{'/context' if context > 1 else ''}={parts} of grid {grid}; use {' or '.join(map(str, near))}"
        )
    first = arrangement.row_part(grid, coords) // context * rows
    return range(first, first + rows)


class Batches:
    """Batches of windows of a corpus. Stateless: any (step, rows) can be asked for in any order.

    Args:
        corpus: Tokens.
        seq_len: Tokens of a row.
        batch_size: Rows of the global batch.
        seed: Chooses the order of the windows.

    Raises:
        ValueError: The corpus is too short for one global batch of different windows.
    """

    def __init__(self, corpus: Corpus, *, seq_len: int, batch_size: int, seed: int) -> None:
        self._corpus, self._seq_len, self._batch_size, self._seed = corpus, seq_len, batch_size, seed
        self.vocab_size, self.tokens = corpus.vocab_size, len(corpus)
        self.text = f"{len(corpus)} tokens, {corpus.digest}"  # what a resumed run compares
        self.windows = max(0, (len(corpus) - 1) // seq_len)
        if self.windows < batch_size:
            raise ValueError(
                f"data: {len(corpus)} tokens hold {self.windows} windows of seq-len={seq_len}, fewer than "
                f"batch-size={batch_size}; give at least {batch_size * seq_len + 1} tokens, or reduce one of the two"
            )

    def windows_of(self, step: int, rows: range) -> np.ndarray:
        """Which windows these rows of the global batch of ``step`` are, int64 ``(rows,)``."""
        numbers = step * self._batch_size + np.arange(rows.start, rows.stop)
        epochs, indices = np.divmod(numbers, self.windows)
        keys = _mix(np.uint64(self._seed * 0x9E3779B97F4A7C15 & _MASK64) + epochs.astype(np.uint64))
        return permute(indices, self.windows, key=keys)

    def read(self, step: int, rows: range) -> tuple[np.ndarray, np.ndarray]:
        """Return inputs and targets, int64 ``(rows, seq_len)`` each."""
        starts = (self.windows_of(step, rows) * self._seq_len).tolist()
        tokens = np.stack([self._corpus.read(start, self._seq_len + 1) for start in starts])
        return np.ascontiguousarray(tokens[:, :-1]), np.ascontiguousarray(tokens[:, 1:])


def permute(indices: np.ndarray, size: int, *, key: np.ndarray | int) -> np.ndarray:
    """Where a permutation of ``[0, size)``, chosen by ``key``, sends each of ``indices``: int64 ``(n,)`` -> the same.

    Four Feistel rounds over the next even power of two, walked until the value falls inside (at most 4 times as large,
    so fewer than 4 walks on average).

    Args:
        indices: Below ``size``.
        size: Of the set.
        key: 64 bits, for all of them or for each, uint64 ``(n,)``.
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask, keys = (np.uint64(1) << half) - np.uint64(1), np.asarray(key, np.uint64)
    values, outside = indices.astype(np.uint64), np.ones(len(indices), dtype=bool)
    while outside.any():
        left, right = values >> half, values & mask
        for turn in range(4):
            left, right = right, left ^ (_mix(keys ^ (right << np.uint64(8)) ^ np.uint64(turn)) & mask)
        values = np.where(outside, left << half | right, values)
        outside = values >= size
    return values.astype(np.int64)


def _mix(values: np.ndarray) -> np.ndarray:
    """splitmix64's finalizer: 64 bits in, 64 well-mixed bits out; uint64, whose products wrap."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)
