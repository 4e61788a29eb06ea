"""Do layers fit each other? Found out in the first pass, from what autograd has recorded; nothing afterwards.

Where Gx == Gy the output of a normal layer has the shape that another normal layer takes, but its features are split
over x and the layer takes them split over y: the result would be nonsense. So the first time that a layer's input has a
history, that history is walked back, through operations that leave features where they are (sums, products,
activations, dropout), to the layers that it comes from: these must leave features split as this layer takes them.

What reshapes, transposes or mixes features ends the walk: nothing is claimed behind it. Without gradients there is no
history, and nothing is checked.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from axo.nn.layer import ParallelLayer

_KEEPS_FEATURES = frozenset(
    f"{name}Backward{number}"
    for name in (
        *("Add", "Sub", "Mul", "Div", "Neg", "Pow", "Exp", "Sqrt", "Abs", "Clamp", "Maximum", "Minimum", "Where"),
        *("Gelu", "Relu", "LeakyRelu", "Elu", "Silu", "Mish", "Softplus", "Sigmoid", "Tanh", "LogSigmoid", "Erf"),
        *("Hardtanh", "Hardswish", "Hardsigmoid", "Threshold", "Clone", "ToCopy", "NativeDropout"),
        *("MaskedFill", "Alias"),
    )
    for number in (0, 1)
) | {"_SumOverRanksBackward"}  # of an input that several layers take


def leave(output: torch.Tensor, layer: ParallelLayer) -> None:
    """Note in the history of ``output`` that ``layer`` made it."""
    if output.grad_fn is not None:
        _notes(output.grad_fn)["axo_layer"] = layer, output.shape[layer.feature_dim]


def check(input: torch.Tensor, layer: ParallelLayer) -> bool:
    """Whether ``input`` had a history; all layers that it comes from fit ``layer``.

    Raises:
        ValueError: One does not; names both.
    """
    if input.grad_fn is None:
        return False
    for before, features in _makers(input.grad_fn):
        if features != input.shape[layer.feature_dim] or layer.comms is not before.comms:
            continue
        left, taken = _ranks_over(before, before.out_axis), _ranks_over(layer, layer.in_axis)
        if left != taken:
            raise ValueError(
                f"{_shown(layer)} takes features {_split(layer.in_axis)}, but its input comes from {_shown(before)},"
                f" which leaves them {_split(before.out_axis)}; a normal layer takes y and leaves x, a transposed one"
                " takes x and leaves y, a norm keeps its axis: let them alternate (transposed=True, axis= of a norm)"
            )
    return True


def _makers(node: torch.autograd.graph.Node) -> Iterator[tuple[ParallelLayer, int]]:
    waiting, seen = [node], {node}
    while waiting:
        node = waiting.pop()
        made = _notes(node).get("axo_layer")
        if made is not None:
            yield made
        elif node.name() in _KEEPS_FEATURES:
            for other, _ in node.next_functions:
                if other is not None and other not in seen:
                    seen.add(other)
                    waiting.append(other)


def _notes(node: torch.autograd.graph.Node) -> dict[str, tuple[ParallelLayer, int]]:
    return node.metadata  # type: ignore[return-value]  # a property, which torch declares as a method


def _ranks_over(layer: ParallelLayer, axis: str | None) -> str | None:
    return axis if axis is not None and layer.comms.grid.size(axis) > 1 else None


def _split(axis: str | None) -> str:
    return "whole" if axis is None else f"split over {axis}"


def _shown(layer: ParallelLayer) -> str:
    return f"{layer.label()} ({layer.extra_repr()})"
