"""What the products of a model send, by the formula of "A 4D Hybrid Algorithm" (equations 4 to 8, volumes alone).

A convolution is a product with k = kernel area * channels in and one row a pixel of its output; the gradient of its
input has one row a pixel of the input. In elements that one rank puts into a step's collectives (a ring moves
(G - 1) times as much in an all-gather, (G - 1)/G in a reduce-scatter, twice that in an all-reduce):

    all-gather      z      k n / (Gx Gy Gz)      of the weight
    all-reduce      y      m n / (Gz Gx)         of the output, m its rows in one data-parallel group
    all-reduce      x      m k / (Gz Gy)         of the gradient of the input: its own channels and pixels
    reduce-scatter  z      k n / (Gx Gy)         of the gradient of the weight
    all-reduce      data   k n / (Gx Gy Gz)      of the same, this rank's shard

A transposed layer swaps x and y.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import torch
from torch import nn

import axo


@dataclass(frozen=True)
class Product:
    """One layer of the serial model, for one image.

    Attributes:
        name: Of the layer.
        rows, columns: Of its weight as a matrix: n, and k.
        into, out: Elements of input and output.
        input_grad: Whether its input wants a gradient.
        kind: "normal" or "transposed".
    """

    name: str
    rows: int
    columns: int
    into: int
    out: int
    input_grad: bool
    kind: str = "normal"


def products(model: nn.Module, images: torch.Tensor) -> list[Product]:
    """Run the serial ``model`` on two of ``images`` and note its convolutions and linear layers."""
    found: list[Product] = []

    def note(layer: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        rows, *others = layer.get_parameter("weight").shape
        into = inputs[0]
        input_grad = into.grad_fn is not None
        found.append(Product(names[layer], rows, math.prod(others), into[0].numel(), output[0].numel(), input_grad))

    names = {module: name for name, module in model.named_modules() if isinstance(module, nn.Conv2d | nn.Linear)}
    handles = [layer.register_forward_hook(note) for layer in names]
    model(images[:2], torch.zeros(2))
    for handle in handles:
        handle.remove()
    return found


def formula(layers: list[Product], grid: axo.Grid, batch: int) -> Counter[tuple[str, str]]:
    """Elements that one rank puts in, by (operation, axis); shards of a weight are padded to the largest over z.

    Args:
        layers: What ``products`` noted, with kinds.
        grid: Its x and y divide the layers' channels.
        batch: Images of all ranks together, a multiple of Gz * Gdata.
    """
    sums: Counter[tuple[str, str]] = Counter()
    images = batch // (grid.z * grid.data)
    for layer in layers:
        into, out = ("x", "y") if layer.kind == "transposed" else ("y", "x")
        shard = -(-layer.rows // grid.size(out) // grid.z) * (layer.columns // grid.size(into))
        sums["all_gather", "z"] += shard
        sums["all_reduce", into] += images * layer.out // grid.size(out)
        sums["all_reduce", out] += images * layer.into // grid.size(into) * layer.input_grad
        sums["reduce_scatter", "z"] += shard * grid.z
        sums["all_reduce", "data"] += shard
    return Counter({(op, axis): size for (op, axis), size in sums.items() if grid.size(axis) > 1})
