"""Whether a kernel that no interpreter can run is right on this device: looked at before it may be chosen.

The kernel for Hopper (gemm/hopper.py) is written in Gluon. What the other kernels prove on a CPU, it has to prove on
the GPU, in every process that is to use it: at the first use of a class of shapes its product, alone, with a bias, and
added to a master gradient, is compared with torch's, element by element, over a result full of NaN. A choice of an
earlier process is no proof, since drivers change. One that is wrong is reported, and torch's own product taken.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch

from axo_kernels.device import target_of
from axo_kernels.gemm.layout import Product, stored_shapes
from axo_kernels.gemm.matmul import vendor_matmul
from axo_kernels.gemm.tiles import Config
from axo_kernels.tune.choice import Choice
from axo_kernels.tune.error_line import in_a_line
from axo_kernels.tune.runners import Runner

# An element may be off by this share of the result's root mean square: twice the rounding of the largest elements,
# which are six times that. A step of K that is left out, or taken twice, is 1 / sqrt(steps).
_ELEMENT_LIMITS = {torch.bfloat16: 12 * 2.0**-8, torch.float16: 12 * 2.0**-11, torch.float32: 1e-3}
_ROWS = 2048  # of the result, compared at once
# Tiles of a program, of which no more ways are known: one; its ring and its buffers once more, or the other group's
# turn; and, of a group of pingpong's, a tile behind its first.
_TURNS = 3


def shape_class(choice: Choice, product: Product, units: int) -> tuple[Any, ...]:
    """What two products share that take the same way through the kernel: borders, short sums, tiles of a program.

    Args:
        units: Multiprocessors of the device: the kernel launches a program for each.
    """
    config = choice.config
    assert config is not None
    borders = (product.m % config.block_m, product.n % config.block_n, product.k % config.block_k)
    short = product.k <= config.block_k * config.stages
    tiles = math.ceil(product.m / config.block_m) * math.ceil(product.n / config.block_n)
    turns = min(_TURNS, math.ceil(tiles / units))
    return (config, product.layout, product.dtype, *(bool(rest) for rest in borders), short, turns)


class Trust:
    """What has been compared so far; ``run(choice)`` gives how a choice is run: (a, b, out=, bias=, accumulate=)."""

    def __init__(self, run: Callable[[Choice], Runner]) -> None:
        self.error: Exception | None = None  # the last that a kernel raised
        self._run = run
        self._known: dict[tuple[Any, ...], str] = {}

    def complaint(self, choice: Choice, product: Product, device: torch.device) -> str:
        """What is wrong with a choice for products of this class; "" when nothing is. Reported once, as a warning."""
        if choice.config is None or not choice.config.groups:
            return ""
        key = (*shape_class(choice, product, target_of(device).units), device)
        if key not in self._known:
            self._known[key] = complaint = self._look(choice, product, device)
            if complaint:
                warnings.warn(f"tuner: '{choice.name}' is wrong on {device} and left out: {complaint}", stacklevel=2)
        return self._known[key]

    @torch.no_grad()
    def _look(self, choice: Choice, product: Product, device: torch.device) -> str:
        generator = torch.Generator(device).manual_seed(21)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float32, device=device)

        a, b = (draw(*shape).to(product.dtype) for shape in stored_shapes(product))
        bias, master = draw(product.n).to(product.dtype), draw(product.m, product.n)
        run = self._run(choice)
        exact = vendor_matmul(a, b, product.layout, out_dtype=torch.float32)
        try:
            for name, expected, limit, extra in (
                ("the product", exact, product.dtype, {}),
                ("the product with a bias", exact + bias, product.dtype, {"bias": bias}),
                ("what is added to a master gradient", exact + master, torch.float32, {"accumulate": True}),
            ):
                out = torch.full((product.m, product.n), float("nan"), dtype=product.dtype, device=device)
                got = run(a, b, out=master.clone() if "accumulate" in extra else out, **extra)
                off = _largest_gap(got, expected)
                if not off < _ELEMENT_LIMITS[limit]:
                    where = _where(got, expected, _ELEMENT_LIMITS[limit], choice.config)
                    return f"{name} {product.name} is off by {off:.1e} of its root mean square: {where}"
        except Exception as error:
            self.error = error
            return f"{product.name}: {in_a_line(error)}"
        return ""


def _largest_gap(got: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference of an element, over the root mean square of all; NaN where one is."""
    gaps = [
        (left.float() - right).abs().amax() for left, right in zip(got.split(_ROWS), expected.split(_ROWS), strict=True)
    ]
    return float(torch.stack(gaps).amax() / expected.square().mean().sqrt())


def _where(got: torch.Tensor, expected: torch.Tensor, limit: float, config: Config | None) -> str:
    """Which elements are off: from this alone a fault has to be found, where the device is gone."""
    assert config is not None
    allowed = limit * expected.square().mean().sqrt()
    pairs = list(zip(got.split(_ROWS), expected.split(_ROWS), strict=True))
    wrong = torch.cat([~((left.float() - right).abs() < allowed) for left, right in pairs])  # NaN too
    missing = sum(int(left.isnan().sum()) for left, _ in pairs)
    rows, columns = (wrong.any(dim).nonzero().flatten() for dim in (1, 0))
    # tiles are those of the configuration in any case, also where a group has half of one
    tiles = torch.nn.functional.max_pool2d(wrong[None, None].float(), (config.block_m, config.block_n), ceil_mode=True)[
        0, 0
    ]
    off = tiles.nonzero()
    first = ", ".join(f"({row}, {column})" for row, column in off[:4].tolist())
    return (
        f"{int(wrong.sum())} of {wrong.numel()} elements ({missing} NaN), rows {int(rows[0])} to {int(rows[-1])}, "
        f"columns {int(columns[0])} to {int(columns[-1])}, {len(off)} of {tiles.numel()} tiles of {config.block_m}x"
        f"{config.block_n}: {first}{', ...' if len(off) > 4 else ''}"
    )
