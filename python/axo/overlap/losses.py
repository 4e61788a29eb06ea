"""Refuse a loss that takes a split parameter by itself as if it were whole, where it is first used.

A parameter is a plain tensor, so ``p.norm()`` in a program's own loss is its part's, and no call says so. The graph
does: each backward pass looks at the nodes between what it begins at and the forward passes of models, of which a loss
has a few. Ways to a split parameter there:

    a mean, a norm, the largest element, a root of a sum     refused
    a sum of elements, scaled and added; all others          warned of once: gradients are right, values are the part's
    through an autograd function: axo.unshard, a collective  whoever wrote it knows

Not here: what takes no part in backward passes (axo.nn.torch_utils knows norms that are logged), losses that a compiler
has traced, and those behind the first nodes of a long graph, such as that of a model that is never called as one.
"""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction

from axo.errors import Refused
from axo.overlap.autograd import in_backward
from axo.placement import is_split, placement_of

# Functions whose value of a part is not the whole's, nor a share of it.
_OF_WHOLE = set("LinalgVectorNorm Norm ForeachNorm Sqrt Rsqrt Pow Max Min Amax Amin Var Std".split())
_PASSES = 16  # forward passes that are told apart; of older ones all nodes count as theirs
_NODES = 2000  # that are looked at: a loss has fewer
_sequence_nr = torch._C._autograd._get_sequence_nr  # the number of the next node of this thread


class Losses:
    """The forward passes of one model as the numbers of its nodes, and a look at what is outside of them.

    ``begin`` and ``end`` are called around each pass.
    """

    def __init__(self, model: weakref.ref[nn.Module]) -> None:
        self._model, self._start, self._warned = model, 0, False
        self.passes: list[range] = []
        autograd: Any = torch.autograd
        if not isinstance(autograd._engine_run_backward, _WatchedBackward):
            autograd._engine_run_backward = _WatchedBackward(autograd._engine_run_backward)
        autograd._engine_run_backward.watched.add(self)

    def begin(self) -> None:
        self._start = _sequence_nr()

    def end(self) -> None:
        self.passes.append(range(self._start, _sequence_nr()))
        if len(self.passes) > _PASSES:
            self.passes[:2] = [range(self.passes[0].start, self.passes[1].stop)]

    def check(self, uses: list[tuple[torch.Tensor, str]]) -> None:
        """Refuse, or warn of, the parameters of this model among ``uses``, by themselves or by a function.

        Raises:
            Refused: The function's value is not the whole's.
        """
        model = self._model()
        if model is None or not any(function or not self._warned for _, function in uses):
            return
        names = {id(p): name for name, p in model.named_parameters() if is_split(placement_of(p))}
        for parameter, function in uses:
            if id(parameter) not in names or (self._warned and not function):
                continue
            shape: Any = parameter.placement.global_shape  # type: ignore[attr-defined]
            what = f"{names[id(parameter)]!r}, of which this rank holds {tuple(parameter.shape)} of {shape}"
            if function:
                raise Refused(
                    f"backward: the loss takes {function} of {what}, so it would be that of a part; take it of"
                    " axo.unshard(p, p.placement), the whole tensor, or take a plain sum over elements, whose gradients"
                    " are right: instead of p.norm() ** 2 take p.square().sum()"
                )
            self._warned = True
            warnings.warn(
                f"axo: backward: the loss takes {what}: its value is the part's, and gradients are right only of a"
                " plain sum over elements; axo.unshard(p, p.placement) is the whole tensor",
                stacklevel=5,
            )


class _WatchedBackward:
    """``torch.autograd``'s way into its engine, with a look at the graph while there are models to watch."""

    def __init__(self, torchs_own: Any) -> None:
        self._torchs_own = torchs_own
        self.watched: weakref.WeakSet[Losses] = weakref.WeakSet()

    def __call__(self, outputs: Any, *args: Any, **options: Any) -> Any:
        watched = list(self.watched)
        if not watched:
            if torch.autograd._engine_run_backward is self:
                torch.autograd._engine_run_backward = self._torchs_own
        elif not in_backward():
            roots = [each.grad_fn if isinstance(each, torch.Tensor) else each.node for each in outputs]
            uses = _uses(roots, [numbers for losses in watched for numbers in losses.passes])
            for losses in watched:
                losses.check(uses)
        return self._torchs_own(outputs, *args, **options)


def _uses(roots: list[Any], passes: list[range]) -> list[tuple[torch.Tensor, str]]:
    """Split leaves under the first nodes of no pass, with the function on the way whose value would be another of the
    whole, or ""."""
    ways, uses = [(root, "", "") for root in roots], []
    seen = set(ways)
    while ways and len(seen) < _NODES:
        node, function, nearest = ways.pop()
        if hasattr(node, "variable"):
            if is_split(placement_of(node.variable)):
                uses.append((node.variable, function or ("Mean" if nearest == "Mean" else "")))
        elif node is not None and not isinstance(node, BackwardCFunction):
            number = node._sequence_nr()
            if any(number in numbers for numbers in passes):
                continue
            if not any(each.shape for each in node._input_metadata):
                name = _name(node)
                nearest = name if name in ("Sum", "Mean") else nearest  # a mean of sums is right
                function = function or (name if name in _OF_WHOLE else "")
            for into, _ in node.next_functions:
                way = (into, function, nearest)
                if way not in seen:
                    seen.add(way)
                    ways.append(way)
    return uses


def _name(node: Any) -> str:
    """What a node is the gradient of; "Sum" and "Mean" for all that are one."""
    name: str = node.name().rstrip("0123456789").removesuffix("Backward")
    reduction = getattr(node, "_saved_reduction", None)  # of torch's losses
    if reduction in (1, 2):
        return "Mean" if reduction == 1 else "Sum"
    if name in ("Dot", "Vdot") or getattr(node, "_saved_ord", None) == 1:
        return "Sum"
    return "" if name == "Mean" and _is_of_scalar(node) else name


def _is_of_scalar(node: Any) -> bool:
    """Whether its input has no dim. One element may be a part."""
    ((into, number),) = node.next_functions
    return into is not None and not into._input_metadata[number].shape
