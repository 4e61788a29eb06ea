"""Do layers fit each other? Found out in the first pass, from what autograd has recorded; nothing afterwards.

Where Gx == Gy the output of a normal layer has the shape that another normal layer takes, but its features are split
over x and the layer takes them split over y: the result would be nonsense. So the first time that a layer's input has a
history, that history is walked back to the layers that it comes from: these must leave features split as this layer
takes them. Each operation on the way says which dim of its input the feature dim of its output is (sums, products,
activations, casts; views, transposes, slices, joins and reductions along other dims).

What mixes, cuts or joins features, or is not known here, ends the walk: nothing is claimed behind it. Nor is it where
dims have moved and one of the two layers has whole features: these may be those of a head, and heads are split.

Without gradients there is no history: a layer's first such input is compared if it is the very tensor that another
layer returned in its first such call. What lies between two layers hides them.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from axo.comm.connect import Communicators


class Splitting(Protocol):
    """A layer that takes features split over one axis, and leaves them split over one (None: whole)."""

    @property
    def comms(self) -> Communicators: ...
    @property
    def in_axis(self) -> str | None: ...
    @property
    def out_axis(self) -> str | None: ...
    @property
    def feature_dim(self) -> int: ...
    @property
    def first_without_history(self) -> bool: ...
    def label(self) -> str: ...
    def extra_repr(self) -> str: ...


Sizes = Sequence[int]
_outputs = WeakTensorKeyDictionary()  # without a history -> (mark, layer); an attribute would be pickled with it
_MARKED = 64  # elements


def leave(output: torch.Tensor, layer: Splitting) -> None:
    """Note, in the history of ``output`` or beside it, that ``layer`` made it."""
    if output.grad_fn is not None:
        _notes(output.grad_fn)["axo_layer"] = layer, output.dim() + layer.feature_dim
    elif layer.first_without_history:
        _outputs[output] = _mark(output), weakref.ref(layer)


def check(input: torch.Tensor, layer: Splitting) -> bool:
    """Whether ``input`` had a history; all layers that it comes from fit ``layer``.

    Raises:
        ValueError: One does not; names both.
    """
    dim = input.dim() + layer.feature_dim
    if input.grad_fn is None:
        if layer.first_without_history:
            mark, made = _outputs.get(input, (None, _no_layer))
            before = made()
            same = mark is not None and mark == _mark(input)
            if before is not None and same and dim == input.dim() + before.feature_dim:
                _check_pair(before, layer, moved=False)
        return False
    for before, moved in _makers(input, dim):
        _check_pair(before, layer, moved)
    return True


def _check_pair(before: Splitting, layer: Splitting, moved: bool) -> None:
    left, taken = _ranks_over(before, before.out_axis), _ranks_over(layer, layer.in_axis)
    if left == taken or layer.comms is not before.comms or (moved and None in (left, taken)):
        return
    raise ValueError(
        f"{_shown(layer)} takes features {_split(layer.in_axis)}, but its input comes from {_shown(before)},"
        f" which leaves them {_split(before.out_axis)}; a normal layer takes y and leaves x, a transposed one"
        " takes x and leaves y, a norm keeps its axis: let them alternate (transposed=True, axis= of a norm)"
    )


def _makers(input: torch.Tensor, dim: int) -> Iterator[tuple[Splitting, bool]]:
    """The layers that features in ``dim`` of ``input`` come from, and whether dims moved on the way."""
    assert input.grad_fn is not None
    waiting: list[tuple[Any, int, int, bool]] = [(input.grad_fn, input.output_nr, dim, False)]
    seen = set(waiting)
    while waiting:
        node, number, dim, moved = waiting.pop()
        layer, left = _notes(node).get("axo_layer", (None, 0))
        if layer is not None and left == dim:
            yield layer, moved
        rule = None if layer is not None else _rule(node.name())
        if rule is None:
            continue
        after = tuple(node._input_metadata[number].shape)
        for source, output in node.next_functions:
            if source is None:
                continue
            before = tuple(source._input_metadata[output].shape)
            source_dim = rule(node, dim, before, after)
            if source_dim is not None and 0 <= source_dim < len(before) and before[source_dim] == after[dim]:
                state = source, output, source_dim, moved or rule is not _aligned
                if state not in seen:
                    seen.add(state)
                    waiting.append(state)


# Which dim of an operation's input (of shape ``before``) is ``dim`` of its output (``after``)? None: not known.


def _aligned(node: Any, dim: int, before: Sizes, after: Sizes) -> int | None:
    return dim + len(before) - len(after)  # as broadcasting aligns them


def _in_place(node: Any, dim: int, before: Sizes, after: Sizes) -> int | None:
    return dim if len(before) == len(after) else None


def _regrouped(node: Any, dim: int, before: Sizes, after: Sizes) -> int | None:
    """The dim of the same size with as many rows before it, if other dims were merged or cut."""
    rows, size = math.prod(after[:dim]), after[dim]
    if not rows or size < 2:
        return None
    return next((at for at, each in enumerate(before) if each == size and math.prod(before[:at]) == rows), None)


def _along_others(node: Any, dim: int, before: Sizes, after: Sizes) -> int | None:
    dims = _dims(node, len(after))
    return dim if dims and dim not in dims and len(before) == len(after) else None


def _without(node: Any, dim: int, before: Sizes, after: Sizes) -> int | None:
    gone = sorted(_dims(node, len(before)))
    if len(before) == len(after):  # keepdim
        return dim if dim not in gone else None
    if len(before) != len(after) + len(gone):
        return None
    for each in gone:
        dim += each <= dim
    return dim


def _stacked(node: Any, dim: int, before: Sizes, after: Sizes) -> int | None:
    (added,) = _dims(node, len(after))
    return None if dim == added else dim - (dim > added)


def _transposed(node: Any, dim: int, before: Sizes, after: Sizes) -> int | None:
    first, second = (_signed(each) % len(after) for each in (node._saved_dim0, node._saved_dim1))
    return {first: second, second: first}.get(dim, dim)


def _turned(node: Any, dim: int, before: Sizes, after: Sizes) -> int | None:
    return len(after) - 1 - dim


def _permuted(node: Any, dim: int, before: Sizes, after: Sizes) -> int | None:
    return _dims(node, len(after))[dim]


def _indexed(node: Any, dim: int, before: Sizes, after: Sizes) -> int | None:
    """A last dim without an index stays the last."""
    try:
        indices = node._saved_indices
    except RuntimeError:  # a backward pass has freed them
        return None
    taken = 0
    for index in indices:
        mask = index is not None and index.dtype in (torch.bool, torch.uint8)
        taken += index.dim() if mask else 1
    return len(before) - 1 if dim == len(after) - 1 and taken < len(before) else None


def _of_pixels(node: Any, dim: int, before: Sizes, after: Sizes) -> int | None:
    return dim if dim < len(after) - 2 and len(before) == len(after) else None


def _padded(node: Any, dim: int, before: Sizes, after: Sizes) -> int | None:
    first = 2 * (len(after) - 1 - dim)  # pairs, the last dim's first
    return dim if not any(node._saved_pad[first : first + 2]) else None


def _normed(node: Any, dim: int, before: Sizes, after: Sizes) -> int | None:
    return dim if dim < len(after) - len(node._saved_normalized_shape) and len(before) == len(after) else None


_RULES: dict[Callable[[Any, int, Sizes, Sizes], int | None], str] = {
    _aligned: "Add Sub Mul Div Neg Pow Exp Log Log1P Sqrt Rsqrt Reciprocal Abs Sin Cos Clamp Maximum Minimum Where Lerp"
    " Addcmul Addcdiv Gelu Relu LeakyRelu Elu Celu Silu Mish Softplus Sigmoid Tanh LogSigmoid Erf Hardtanh Hardswish"
    " Hardsigmoid Threshold PreluKernel RreluWithNoise Clone ToCopy NativeDropout MaskedFill Expand Repeat",
    _in_place: "Alias NativeBatchNorm NativeGroupNorm",
    _regrouped: "View UnsafeView ReshapeAlias Unsqueeze Squeeze",
    _along_others: "Softmax LogSoftmax Slice Split SplitWithSizes Cat Flip Roll IndexSelect Cumsum Glu",
    _without: "Select Unbind Sum Mean Max Min Amax Amin Var Std Prod Logsumexp LinalgVectorNorm",
    _stacked: "Stack",
    _transposed: "Transpose",
    _turned: "T",
    _permuted: "Permute",
    _indexed: "Index",
    _of_pixels: "MaxPool2DWithIndices AvgPool2D AdaptiveAvgPool2D UpsampleNearest2D UpsampleBilinear2D ReflectionPad2D",
    _padded: "ConstantPadNd",
    _normed: "NativeLayerNorm",
}
_RULE = {name: rule for rule, names in _RULES.items() for name in names.split()}


def _rule(name: str) -> Callable[[Any, int, Sizes, Sizes], int | None] | None:
    if name == "_SumOverRanksBackward":  # of an input that several layers take
        return _aligned
    operation, _, number = name.rpartition("Backward")
    return _RULE.get(operation) if number.isdigit() else None


def _dims(node: Any, rank: int) -> list[int]:
    """What the operation says of its dims; nothing where it works on all elements at once."""
    named = getattr(node, "_saved_dim", getattr(node, "_saved_dims", None))
    named = () if named is None else named if isinstance(named, tuple) else (named,)
    return [_signed(each) % rank for each in named]


def _signed(dim: int) -> int:
    return dim - 2**64 if dim >= 2**63 else dim  # torch shows negative dims as unsigned


def _no_layer() -> None:
    return None


def _mark(tensor: torch.Tensor) -> object:
    """What differs once somebody has written to the tensor; None: nothing tells."""
    if not tensor.is_inference():
        return tensor._version
    return None if tensor.is_nested or tensor.is_meta else tensor.reshape(-1)[:_MARKED].tolist()


def _notes(node: torch.autograd.graph.Node) -> dict[str, tuple[Splitting, int]]:
    return node.metadata  # type: ignore[return-value]  # a property, which torch declares as a method


def _ranks_over(layer: Splitting, axis: str | None) -> str | None:
    return axis if axis is not None and layer.comms.grid.size(axis) > 1 else None


def _split(axis: str | None) -> str:
    return "whole" if axis is None else f"split over {axis}"


def _shown(layer: Splitting) -> str:
    return f"{layer.label()} ({layer.extra_repr()})"
