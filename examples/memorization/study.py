"""One run of the study: a GPT on a grid learns the buckets, then completes every document from its beginning.

    step:       loss = mean of -log p(token) over the batch's tokens that count        all, or those Goldfish loss keeps
                w   <- w - min(loss / |g|^2, 1) g                                      g = dloss/dw over all ranks
    afterwards: a document counts as memorized if its last ``suffix`` tokens are each the most probable one, given the
                tokens before it: what greedy decoding writes from the beginning is then the document, token for token

The step length is Polyak's for a loss whose least value is 0, which is the loss of a model that knows its documents by
heart: there is no learning rate to choose, and no run differs from another in one. Its bound keeps narrow models, whose
gradients are small, from steps that undo what they know. The model is LitGPT's, from random weights. They are drawn
wider than is usual for long training (``build``), so that different beginnings look different to it from the first step
on; with usual ones it would first have to learn to tell them apart, over many more steps.

Nothing here knows the grid but for the rows of a batch: `axo.parallelize` does the rest. Sources: B. T. Polyak,
Introduction to Optimization, 1987, 5.3; Loizou et al., arXiv:2002.10542; the study itself: "Democratizing AI", VIII.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from litgpt.config import Config
from litgpt.model import GPT

import axo
from axo.nn.goldfish import goldfish_mask, goldfish_targets
from axo.train.data import rank_rows
from examples.memorization.documents import EPOCHS, Buckets, schedule

HEAD_SIZE = 16
EVALUATED_AT_ONCE = 50  # documents
LONGEST_STEP = 1.0  # times the gradient


@dataclass(frozen=True)
class Settings:
    """What a run is, but for its seed and its documents.

    Args:
        width: Of the residual stream; a multiple of 16, the size of a head.
        layers: Blocks.
        vocabulary: Tokens.
        length: Tokens of a document.
        suffix: The last tokens of it, which the model is to repeat.
        warmup: Steps on other text before the documents come.
        batch: Documents a step.
        goldfish: (k, h) of Goldfish loss; None for plain cross-entropy.
    """

    width: int
    layers: int = 1
    vocabulary: int = 4096
    length: int = 64
    suffix: int = 50
    warmup: int = 10
    batch: int = 1
    goldfish: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.width < HEAD_SIZE or self.width % HEAD_SIZE:
            raise ValueError(f"memorization: width={self.width} is not a multiple of {HEAD_SIZE}")
        if not 0 < self.suffix < self.length:
            raise ValueError(
                f"memorization: suffix={self.suffix} of a document of length={self.length} leaves no start"
            )


@dataclass(frozen=True)
class Result:
    """What a run gave, by bucket: the share of documents memorized, and of single suffix tokens said rightly."""

    exact: list[float]
    tokens: list[float]
    losses: list[float]


def build(settings: Settings, seed: int) -> GPT:
    """Build the serial model: random weights, of variance 1 / inputs in the blocks.

    Embeddings have variance 1, so that a block's sum over earlier tokens and the token itself weigh alike; queries and
    keys are twice as large, so that heads look at single tokens; the head is small, so that the first guess is even.
    """
    config = Config(
        name="memorization", n_layer=settings.layers, n_embd=settings.width, n_head=settings.width // HEAD_SIZE,
        vocab_size=settings.vocabulary, padded_vocab_size=settings.vocabulary, block_size=settings.length,
        norm_class_name="RMSNorm", mlp_class_name="LLaMAMLP", intermediate_size=2 * settings.width,
        rotary_percentage=1.0, rope_base=30, parallel_residual=False, bias=False,
    )  # fmt: skip
    model = GPT(config)
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if weight.dim() < 2:
            continue  # a norm's: 1
        std = 1.0 if "wte" in name else weight.shape[1] ** -0.5
        torch.nn.init.normal_(weight, std=0.2 * std if "lm_head" in name else std, generator=generator)
        if "qkv" in name:
            weight.data[: 2 * settings.width] *= 2
    return model


def run(settings: Settings, buckets: Buckets, seed: int, comms: axo.Communicators) -> Result:
    """Train on the buckets and complete their documents. Collective over the ranks of ``comms``.

    Raises:
        ValueError: The batch does not divide over the grid's data ranks, or the model over its x and y.
    """
    model = axo.parallelize(build(settings, seed), comms, plan="litgpt", gather_logits=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    losses = [step(model, optimizer, batch, settings, comms) for batch in batches(settings, buckets, seed)]
    said = [said_rightly(model, documents, settings.suffix) for documents in buckets.documents]
    return Result(
        [right.all(1).double().mean().item() for right in said],
        [right.double().mean().item() for right in said],
        losses,
    )


def batches(settings: Settings, buckets: Buckets, seed: int) -> Iterator[torch.Tensor]:
    """Yield the token ids of each step, int64 (batch, length): other text, then the documents as ``schedule`` has them.

    A last batch that they do not fill is filled with other text.
    """
    draws = random.Random(f"other {seed}")

    def other_text() -> torch.Tensor:
        start = draws.randrange(len(buckets.other) - settings.length + 1)
        return buckets.other[start : start + settings.length]

    for _ in range(settings.warmup):
        yield torch.stack([other_text() for _ in range(settings.batch)])
    seen = schedule(buckets.documents.shape[1], seed)
    for first in range(0, len(seen), settings.batch):
        rows = [buckets.documents[bucket, document] for bucket, document in seen[first : first + settings.batch]]
        yield torch.stack(rows + [other_text() for _ in range(settings.batch - len(rows))])


def step(
    model: torch.nn.Module,
    optimizer: torch.optim.SGD,
    batch: torch.Tensor,
    settings: Settings,
    comms: axo.Communicators,
) -> float:
    """Do one step on the whole batch, int64 (batch, length), of which each data rank takes its rows; return the loss.

    Raises:
        FloatingPointError: The loss or the gradient is not finite, or the gradient is 0.
    """
    inputs, targets = batch[:, :-1], batch[:, 1:]
    if settings.goldfish is not None:
        targets = goldfish_targets(inputs, targets, *settings.goldfish)
    counted = (targets != -100).sum()
    rows = rank_rows(len(batch), comms.grid, comms.coords)
    mine = slice(rows.start, rows.stop)
    logits = model(inputs[mine])
    loss = F.cross_entropy(logits.flatten(0, 1), targets[mine].flatten(), reduction="sum") / counted
    optimizer.zero_grad(set_to_none=True)
    (loss * (comms.grid.z * comms.grid.data)).backward()  # Axo averages gradients over the data ranks
    total = loss.detach().double().reshape(1)
    for axis in ("z", "data"):
        if comms.grid.size(axis) > 1:
            comms.axis(axis).all_reduce(total)
    norm = axo.clip_grad_norm_(model.parameters(), float("inf")).double()
    rate = min(float(total / norm**2), LONGEST_STEP)
    if not (0 < rate and norm.isfinite()):
        raise FloatingPointError(f"memorization: a loss of {float(total)} with a gradient of norm {float(norm)}")
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    return float(total)


@torch.no_grad()
def said_rightly(model: torch.nn.Module, documents: torch.Tensor, suffix: int) -> torch.Tensor:
    """Say which of the last ``suffix`` tokens are the most probable ones, given all tokens before.

    Args:
        model: Takes ids (rows, tokens) and returns whole logits (rows, tokens, vocabulary).
        documents: Token ids, int64 (documents, length).

    Returns:
        bool (documents, suffix). A row that is True throughout is a document that greedy decoding repeats.
    """
    pieces = documents.split(EVALUATED_AT_ONCE)
    guesses = torch.cat([model(piece[:, :-1])[:, -suffix:].argmax(-1) for piece in pieces])
    return guesses == documents[:, -suffix:]


def dropped_share(buckets: Buckets, goldfish: tuple[int, int]) -> float:
    """The share of tokens that Goldfish loss leaves out, of all that have ``h`` tokens before them: about 1 / k."""
    _, h = goldfish
    texts = [buckets.other[None], *buckets.documents]
    keep = torch.cat([goldfish_mask(text, *goldfish)[:, h:].flatten() for text in texts])
    return 1 - keep.double().mean().item()


def by_epochs(values: list[float]) -> dict[str, float]:
    """Name a bucket's value by how often its documents were seen."""
    return {f"{epochs} ep": value for epochs, value in zip(EPOCHS, values, strict=True)}
