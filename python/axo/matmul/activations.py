"""What a layer multiplies on a rank and what autograd keeps of it for backward: flops and bytes, beside ``cost`` calls.

The layers of ``axo.nn`` (``flops()``, ``saved_bytes()``) and the planner ask these functions, so a figure stands once.
Rows and features are those of one rank. Weights are not activations, and are not counted. A pass counts forward flops;
backward takes twice as many, for the gradients of the input and of the weight.
"""

from __future__ import annotations

STATISTIC = 4  # bytes of a mean, a deviation, a maximum or a sum: fp32
LOGITS_CHUNK = 1 << 23  # elements of the logits that ``axo.nn.linear_cross_entropy`` makes at a time: 16 MiB in bf16


def linear_flops(rows: float, in_features: int, out_features: int) -> float:
    """Flops of ``(rows, in) @ (in, out)``, 2 a multiply-add."""
    return 2.0 * rows * in_features * out_features


def linear(rows: float, in_features: int, itemsize: int) -> float:
    """Bytes of a linear layer's input in the dtype that it multiplies in."""
    return float(itemsize * rows * in_features)


def norm(rows: float, features: int, itemsize: int, *, centered: bool, shares_input: bool = False) -> float:
    """Bytes of a norm's input and of its deviation a row; ``centered``: of its mean too (LayerNorm).

    ``shares_input``: another layer keeps the input.
    """
    return STATISTIC * rows * (2 if centered else 1) + (0 if shares_input else itemsize * rows * features)


def embedding(rows: float) -> float:
    """Bytes of ids, int64."""
    return 8.0 * rows


def cross_entropy(rows: float, columns: int, itemsize: int, *, capped: bool = False) -> float:
    """Bytes of the logits (before they are ``capped`` too), of ids, and of a maximum and a sum a row."""
    return rows * (itemsize * (1 + capped) * columns + 8 + 2 * STATISTIC)
