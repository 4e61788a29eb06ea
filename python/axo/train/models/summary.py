"""LitGPT's GPT without storage, and the few sizes that the flop formula and a log's header want."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from litgpt.config import Config
from litgpt.model import GPT


@dataclass(frozen=True)
class Shape:
    """Layers, width, vocabulary (padded) and the count of parameters."""

    layers: int
    hidden: int
    vocabulary: int
    parameters: int


def build_empty(config: Config) -> GPT:
    """Return the model on the meta device: shapes, no storage."""
    with torch.device("meta"):
        return GPT(config)


def shape_of(config: Config) -> Shape:
    """Return the sizes of ``config``; parameters are counted on a model without storage."""
    parameters = sum(parameter.numel() for parameter in build_empty(config).parameters())
    assert config.padded_vocab_size is not None
    return Shape(config.n_layer, config.n_embd, config.padded_vocab_size, parameters)
