"""The products of the papers' GPT models, whole or as a grid cuts them.

"Democratizing AI", table of models: layers, hidden size, heads; sequence 2,048. A block has four linear layers; ``fc``
and ``qkv`` are normal (in_features over y, out_features over x), ``proj`` and ``mlp.proj`` transposed (the other way
round); rows are split over z and data. Each layer is three products: forward NT, input gradient NN, weight gradient TN.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from axo_kernels.gemm.layout import Product

# layers, hidden size
MODELS = {
    "gpt-5b": (24, 4096),
    "gpt-10b": (32, 5120),
    "gpt-20b": (32, 7168),
    "gpt-40b": (38, 9216),
    "gpt-60b": (56, 9216),
    "gpt-80b": (42, 12288),
    "gpt-160b": (84, 12288),
    "gpt-320b": (96, 16384),
    "gpt-640b": (192, 16384),
}


@dataclass(frozen=True)
class LinearShape:
    """One linear layer as one rank sees it: ``O[m, n] = I[m, k] W[n, k]^T``."""

    name: str
    m: int
    n: int
    k: int

    def products(self, dtype: torch.dtype) -> dict[str, Product]:
        """Forward, input gradient and weight gradient."""
        return {
            "forward": Product("NT", self.m, self.n, self.k, dtype),
            "grad_input": Product("NN", self.m, self.k, self.n, dtype),
            "grad_weight": Product("TN", self.n, self.k, self.m, dtype),
        }


def layers(model: str, grid: tuple[int, int, int] = (1, 1, 1), rows: int = 2048, shrink: int = 1) -> list[LinearShape]:
    """Return the four linear layers of a block.

    Args:
        model: One of :data:`MODELS`.
        grid: Gx, Gy, Gz.
        rows: Tokens of one data-parallel group; split over z.
        shrink: Divide the hidden size (for machines without a GPU).

    Raises:
        ValueError: The model is unknown, a size does not divide over the grid, or nothing is left of it.
    """
    if model not in MODELS:
        raise ValueError(f"model {model!r} is not one of {', '.join(MODELS)}")
    hidden = MODELS[model][1] // shrink
    if hidden < 1:
        raise ValueError(f"{model}: a hidden size of {MODELS[model][1]} shrunk by {shrink} is nothing; shrink less")
    ranks = dict(zip("xyz", grid, strict=True))
    sizes = {
        "qkv": (3 * hidden, hidden, "x", "y"),
        "proj": (hidden, hidden, "y", "x"),
        "fc": (4 * hidden, hidden, "x", "y"),
        "mlp.proj": (hidden, 4 * hidden, "y", "x"),
    }
    shapes = []
    for name, (out_features, in_features, over_out, over_in) in sizes.items():
        for size, axis, what in ((out_features, over_out, "out_features"), (in_features, over_in, "in_features")):
            if size % ranks[axis]:
                raise ValueError(
                    f"{model} '{name}': {what}={size} does not divide over {axis}={ranks[axis]}; use a grid with "
                    f"{axis}={_nearest_divisor(size, ranks[axis])}"
                )
        if rows % ranks["z"]:
            raise ValueError(
                f"{model}: {rows} rows do not divide over z={ranks['z']}; use {-(-rows // ranks['z']) * ranks['z']}"
            )
        shapes.append(
            LinearShape(name, rows // ranks["z"], out_features // ranks[over_out], in_features // ranks[over_in])
        )
    return shapes


def _nearest_divisor(size: int, below: int) -> int:
    """The largest divisor of ``size`` under ``below``."""
    return next(ranks for ranks in range(min(below, size), 0, -1) if size % ranks == 0)
