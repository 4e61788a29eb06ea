"""Put frozen linear layers of a parallel model into four or eight bits (``axo.quantized``)."""

from __future__ import annotations

import torch
from torch import nn

from axo.nn.embedding import Embedding
from axo.nn.linear import Linear
from axo.quantized import QuantizedWeight, largest_of_rows


def quantize(model: nn.Module, kind: str) -> None:
    """Quantize the weight of each linear layer on this rank, except one that is an embedding's too.

    An optimizer may hold the dense parameters: they are left empty.

    Args:
        model: Filled; the weights want no gradient.
        kind: As for :class:`QuantizedWeight`.

    Raises:
        ValueError: A weight is trained.
    """
    quantized: dict[torch.Tensor, QuantizedWeight] = {}  # by what they stand for: layers may share one
    tables = {id(part.weight) for part in model.modules() if isinstance(part, Embedding)}
    for layer in model.modules():
        if not isinstance(layer, Linear) or id(layer.weight) in tables:
            continue
        old = layer.weight
        if old.requires_grad:
            raise ValueError(f"{layer.label()}: a weight that is trained is not quantized; freeze it first")
        if old not in quantized:
            placement, largest = layer.placements["weight"], None
            if kind == "int8":
                largest = largest_of_rows(old)
                for axis in placement.splits[1]:
                    layer.comms.axis(axis).all_reduce(largest, "max")
            quantized[old] = QuantizedWeight(old, kind, largest)
            quantized[old].placement = placement
            old.data = old.new_empty(0)
        layer.weight = quantized[old]
