"""Distributed matrix products: the algorithms, their communication, and what they cost.

``axo.matmul.algorithms`` has them by name. It loads on first use, and what it loads is arithmetic until a product runs,
so that planning needs no torch.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "Shape":
        from axo.matmul.algorithm import Shape

        return Shape
    if name == "algorithms":
        from axo.matmul.registry import algorithms

        return algorithms
    raise AttributeError(f"module 'axo.matmul' has no attribute {name!r}")
