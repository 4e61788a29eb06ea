"""Say which linear layers take one input tensor, so that its gradient is summed over ranks once, not once a layer.

q, k and v of attention do, and the two first products of a gated MLP. Plans say it of the models they know; who writes
``axo.nn.Linear`` by hand says it with ``share_input(block.q, block.k, block.v)``. How it works is in
``axo.matmul.shared_input``.
"""

from __future__ import annotations

from collections import defaultdict

from torch import nn

from axo.matmul.product import DistributedMatmul
from axo.matmul.shared_input import SharedInput
from axo.nn.linear import Linear


def share_input(*layers: Linear) -> None:
    """Let layers that take one tensor add up their gradients of it before these are summed over ranks.

    The same holds for what is cut for them, where they take whole features. In a pass where one takes another tensor it
    sums its gradient by itself. Nothing changes where nothing is summed: on an axis of one rank, with sequence
    parallelism (once in any case), with Tesseract.

    Args:
        layers: In the order of their calls.

    Raises:
        ValueError: They take other features, or sum over other axes.
    """
    summing = [layer for layer in layers if _sums(layer)]
    for layer in summing[1:]:
        if _takes(layer) != _takes(summing[0]):
            raise ValueError(
                f"share_input: {layer.label()} takes {layer.in_features} features over {layer.in_axis}, and"
                f" {summing[0].label()} {summing[0].in_features} over {summing[0].in_axis}; name layers of one input"
            )
    if len(summing) > 1:
        shared = SharedInput(len(summing))
        for layer in summing:
            layer.shared_input, layer.sums_input_grad = shared, layer is summing[0]


def share_inputs(model: nn.Module) -> None:
    """Let linear layers of one module that take alike features share their input, wherever they are given the same."""
    for module in model.modules():
        if isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict):
            continue
        alike = defaultdict[object, list[Linear]](list)
        for child in dict.fromkeys(module.children()):
            if isinstance(child, Linear) and child.shared_input is None and _sums(child):
                alike[_takes(child)].append(child)
        for layers in alike.values():
            share_input(*layers)


def _takes(layer: Linear) -> object:
    return layer.in_features, layer.in_axis, layer.matmul.out_axis, layer.scatter_input


def _sums(layer: Linear) -> bool:
    """Whether ranks all-reduce the gradient of its input, or gather it from their cuts."""
    axes = (layer.matmul.out_axis, layer.in_axis if layer.scatter_input else None)
    several = any(axis is not None and layer.comms.grid.size(axis) > 1 for axis in axes)
    return several and type(layer.matmul) is DistributedMatmul and not layer.as_table
