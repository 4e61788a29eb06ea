"""Tune all products of a model at once; what ``axo tune`` runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from axo_kernels.tune.model_shapes import LinearShape
from axo_kernels.tune.tuner import Tuner


@dataclass(frozen=True)
class Row:
    """One product: what torch does by default, and what was chosen."""

    layer: str
    product: str
    torch_seconds: float
    chosen: str
    chosen_seconds: float

    @property
    def gain(self) -> float:
        """How many times faster than torch's own way."""
        return self.torch_seconds / self.chosen_seconds if self.chosen_seconds else 1.0


def tune_model(
    layers: list[LinearShape], tuner: Tuner, *, dtype: torch.dtype, device: str | torch.device
) -> Iterator[Row]:
    """Measure each product of a model's layers once and write the tuner's cache; yields one row a product.

    Args:
        layers: Those of one block, as one rank sees them (``model_shapes.layers``).
        tuner: In mode ``first-step``, or ``cached`` to read what was measured.
        dtype, device: Of the operands.
    """
    place = torch.device(device)
    for layer in layers:
        for what, product in layer.products(dtype).items():
            choice = tuner.choose(product, place)
            yield Row(f"{layer.name} {what}", product.name, choice.baseline, choice.name, choice.seconds)
