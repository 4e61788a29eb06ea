"""The documents of the study: real text that every machine has, in buckets that are seen 0, 1, 4 and 6 times.

The text is the docstrings of Python's standard library and the language reference behind ``help()``, cut into byte-pair
tokens learned from it. A document is the first ``length`` tokens of one of these texts, and none of its runs of
``UNIQUE_RUN`` tokens occurs in any other text: what a model can say of it, it has learned from it. What remains is the
other text, for warming up; it holds no token of a document.

Source: "Democratizing AI: Open-source Scalable LLM Training on GPU-based Supercomputers", VIII, the memorization study
(there: English Wikipedia, 200 documents a bucket).
"""

from __future__ import annotations

import ast
import random
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from axo.train.data import default_text

EPOCHS = (0, 1, 4, 6)  # how often the documents of each bucket are seen
UNIQUE_RUN = 8


def read_texts() -> list[str]:
    """The docstrings of the standard library, sorted by file and place, then the topics of the language reference.

    Raises:
        ValueError: This Python came without its sources.
    """
    from pydoc_data.topics import topics

    texts = []
    for file in default_text():
        try:
            tree = ast.parse(file.read_bytes())
        except (SyntaxError, ValueError):
            continue  # a file that is data for some tool, not source of this version
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                texts.append(ast.get_docstring(node) or "")
    texts += [topics[name] for name in sorted(topics)]
    return [text for text in texts if text]


def tokenize(texts: list[str], vocabulary: int) -> list[list[int]]:
    """Learn ``vocabulary`` byte-pair tokens from the texts and return each text's ids, all below ``vocabulary``."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, show_progress=False, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    return [encoding.ids for encoding in tokenizer.encode_batch(texts)]


@dataclass(frozen=True)
class Library:
    """Tokenized texts, and which of them can be documents.

    Args:
        texts: Ids of each text.
        length: Tokens of a document.
        usable: Indices of the texts that are long enough and whose first ``length`` tokens are like no other text's.
    """

    texts: list[list[int]]
    length: int
    usable: list[int]

    def checksum(self) -> int:
        """Equal where texts and tokens are."""
        return zlib.crc32(repr((self.length, self.usable, self.texts)).encode())


def library(texts: list[list[int]], length: int) -> Library:
    """Find the texts that can be documents of ``length`` tokens."""
    holders = Counter(run for text in texts for run in set(_runs(text)))
    usable = [
        index
        for index, text in enumerate(texts)
        if len(text) >= length and all(holders[run] == 1 for run in _runs(text[:length]))
    ]
    return Library(texts, length, usable)


def _runs(text: list[int]) -> Iterator[tuple[int, ...]]:
    return (tuple(text[start : start + UNIQUE_RUN]) for start in range(len(text) - UNIQUE_RUN + 1))


@dataclass(frozen=True)
class Buckets:
    """Documents ``(bucket, document, length)``, bucket b to be seen EPOCHS[b] times, and the other text ``(tokens,)``;
    int64."""

    documents: torch.Tensor
    other: torch.Tensor


def draw(source: Library, documents: int, seed: int) -> Buckets:
    """Put ``documents`` random documents into each bucket; the buckets are disjoint.

    Raises:
        ValueError: There are not enough.
    """
    wanted = documents * len(EPOCHS)
    if not 0 < wanted <= len(source.usable):
        raise ValueError(
            f"memorization: documents={documents} in {len(EPOCHS)} buckets are {wanted}, and there are "
            f"{len(source.usable)} documents of {source.length} tokens; use 1 to {len(source.usable) // len(EPOCHS)}"
        )
    chosen = random.Random(f"documents {seed}").sample(source.usable, wanted)
    heads = torch.tensor([source.texts[index][: source.length] for index in chosen])
    taken = set(chosen)
    other = [token for index, text in enumerate(source.texts) if index not in taken for token in text]
    return Buckets(heads.view(len(EPOCHS), documents, source.length), torch.tensor(other))


def schedule(documents: int, seed: int) -> list[tuple[int, int]]:
    """The order in which documents are seen, as (bucket, document).

    A document that is seen e times is seen once in each e-th part of the run, at a random place there: its epochs are
    spread over the whole run, and mixed with all others'.
    """
    draws = random.Random(f"order {seed}")
    times = [
        ((epoch + draws.random()) / epochs, bucket, document)
        for bucket, epochs in enumerate(EPOCHS)
        for document in range(documents)
        for epoch in range(epochs)
    ]
    return [(bucket, document) for _, bucket, document in sorted(times)]
