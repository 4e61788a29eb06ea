"""The few sizes of a LitGPT configuration that the flop formula and a log's header want. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from litgpt.config import Config


@dataclass(frozen=True)
class Shape:
    """Layers, width, vocabulary (padded) and the count of parameters."""

    layers: int
    hidden: int
    vocabulary: int
    parameters: int


def shape_of(config: Config) -> Shape:
    """Return the sizes of ``config``; parameters are counted on a model without storage."""
    import torch
    from litgpt.model import GPT

    with torch.device("meta"):
        model = GPT(config)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert config.padded_vocab_size is not None
    return Shape(config.n_layer, config.n_embd, config.padded_vocab_size, parameters)
