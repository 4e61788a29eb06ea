"""LocalText: a LitGPT data module for text files of this machine, without litdata.

    axo litgpt pretrain tiny.yaml --data LocalText --data.paths '["books/", "notes.txt"]' --tokenizer_dir DIR ...

Files and folders are read as one stream of tokens; the tokenizer is litgpt's, or, without ``--tokenizer_dir``, bytes.
A sample is ``seq_len + 1`` tokens; sample w starts at token ``w * seq_len``, so that an epoch shows every target once,
in an order that depends on (seed, epoch) only: the same on any grid and without one. The last samples are for
validation. A checkpoint holds where a run stands in the data. Tokens are encoded once, into a cache.

Not here: document borders, mixing of sources, sentencepiece tokenizers (``tokenizer.model``; refused by name).
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from litgpt.data import DataModule
from torch.utils.data import DataLoader, Dataset

from axo.integrations.fabric.loader import ResumableLoader
from axo.train import data


@dataclass
class LocalText(DataModule):
    """Text files and folders of this machine."""

    paths: list[str] = field(default_factory=list)
    """Files and folders to read. Default: the sources of Python's standard library."""
    val_fraction: float = 0.05
    """The share of the samples, at the end of the text, that is kept for validation."""
    seed: int = 42
    """The seed of the order of the samples."""
    num_workers: int = 0
    """The number of workers to use for data loading."""
    cache_dir: Path | None = None
    """Where encoded tokens are kept. Default: axo/tokens in the user's cache folder."""

    tokenizer: Any = field(default=None, init=False, repr=False)
    batch_size: int = field(default=1, init=False, repr=False)
    max_seq_length: int = field(default=-1, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__init__()
        if not 0 < self.val_fraction < 1:
            raise ValueError(f"LocalText: val_fraction={self.val_fraction} is not between 0 and 1")

    def connect(self, tokenizer: Any = None, batch_size: int = 1, max_seq_length: int | None = None, **_: Any) -> None:
        if not max_seq_length or max_seq_length < 1:
            raise ValueError(f"LocalText: max_seq_length={max_seq_length} is not a length; set --train.max_seq_length")
        self.tokenizer, self.batch_size, self.max_seq_length = tokenizer, batch_size, max_seq_length

    def prepare_data(self) -> None:
        """Encode the text, if that has not been done. LitGPT lets rank 0 do this first."""
        self._corpus()

    def setup(self, stage: str = "") -> None:
        corpus = self._corpus()
        samples = max(0, (len(corpus) - 1) // self.max_seq_length)
        train = samples - max(1, int(samples * self.val_fraction))
        if train < self.batch_size:
            raise ValueError(
                f"LocalText: {samples} samples of {self.max_seq_length} tokens, {samples - train} of them for"
                f" validation, are too few for batches of {self.batch_size}; give more text or shorter samples"
            )
        self._train = Windows(corpus, self.max_seq_length, range(train), self.seed)
        self._val = Windows(corpus, self.max_seq_length, range(train, samples), None)

    def train_dataloader(self) -> DataLoader:
        return ResumableLoader(self._train, batch_size=self.batch_size, num_workers=self.num_workers, drop_last=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self._val, batch_size=self.batch_size, num_workers=self.num_workers)

    def _corpus(self) -> data.Corpus:
        files = _text_files(self.paths) if self.paths else data.default_text()
        if self.tokenizer is None:
            return data.Corpus(files)
        if self.tokenizer.backend != "huggingface":
            raise ValueError(
                f"LocalText: a {self.tokenizer.backend} tokenizer is not supported; use one with a tokenizer.json"
            )
        cache = self.cache_dir or Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "axo" / "tokens"
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "tokenizer.json")
            path.write_text(self.tokenizer.processor.to_str(), encoding="utf-8")
            return data.encode(files, path, cache)


def _text_files(paths: list[str]) -> list[Path]:
    """The files that are named, and those in the folders that hold text: no binary files, no index of litdata's chunks.

    Raises:
        ValueError: A path does not exist, or a folder holds no text.
    """
    text: list[Path] = []
    for path in paths:
        files = [file for file in data.find_files([path]) if not Path(path).is_dir() or _is_text(file)]
        if not files:
            raise ValueError(f"LocalText: the folder {path} holds no text")
        text += files
    return text


def _is_text(file: Path) -> bool:
    of_chunks = file.name == "index.json" and any(file.parent.glob("chunk-*.bin"))
    with open(file, "rb") as opened:
        return not of_chunks and b"\0" not in opened.read(8192)


class Windows(Dataset):
    """Samples of ``seq_len + 1`` tokens, int64, that overlap by one: those of ``part``, shuffled anew each epoch.

    The order is a function of (seed, epoch); there is no list of it.

    Args:
        corpus: Tokens.
        seq_len: Length of a sample, less one.
        part: Which samples of the corpus.
        seed: Chooses the order; None: as they stand.
    """

    def __init__(self, corpus: data.Corpus, seq_len: int, part: range, seed: int | None) -> None:
        self._corpus, self._seq_len, self._part, self._seed, self._epoch = corpus, seq_len, part, seed, 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._part)

    def __getitem__(self, index: int) -> torch.Tensor:
        if not 0 <= index < len(self._part):
            raise IndexError(f"LocalText: there is no sample {index}; there are {len(self._part)}")
        if self._seed is not None:
            key = ((self._seed << 32) ^ (self._epoch * 0x9E3779B97F4A7C15)) % 2**64
            index = int(data.permute(np.array([index]), len(self._part), key=key)[0])
        return torch.from_numpy(self._corpus.read(self._part[index] * self._seq_len, self._seq_len + 1))
