"""What autograd wants of a layer's gradients, and how a finished one gets into ``.grad``: as it does it itself."""

from __future__ import annotations

from collections.abc import Callable

import torch

SKIP, NOW, LATER = "skip", "now", "later"
graph_task = torch._C._current_graph_task_id  # type: ignore[attr-defined]  # the backward pass of this thread, or -1


def in_backward() -> bool:
    """Whether this thread runs a backward pass of autograd."""
    return graph_task() != -1


def version_of(tensor: torch.Tensor) -> int:
    """The count of in-place changes; inference tensors have none."""
    return -1 if tensor.is_inference() else tensor._version


def hows(node: torch.autograd.graph.Node, start: int, stop: int) -> list[str]:
    """What the backward pass under way wants of the gradients of some inputs of ``node``, leaves in most cases.

    SKIP: nothing. LATER: that it is in ``.grad`` when backward returns. NOW: the gradient itself.
    """
    wants = []
    for into, _ in node.next_functions[start:stop]:  # it takes most time to ask a node for its edges
        want = NOW if into is not None and type(into).__name__ != "AccumulateGrad" else LATER
        try:
            if into is None or not torch._C._will_engine_execute_node(into):  # type: ignore[attr-defined]
                want = SKIP
        except RuntimeError:  # a leaf that autograd.grad wants
            want = NOW
        wants.append(want)
    return wants + [SKIP] * (stop - start - len(wants))  # it has edges for tensors alone


def wanted(node: torch.autograd.graph.Node, index: int) -> bool:
    """Whether the backward pass under way wants the gradient of input ``index`` of ``node`` at all.

    ``needs_input_grad`` says what any pass could want; one for the gradients of weights alone wants none of inputs.
    """
    return torch.compiler.is_compiling() or hows(node, index, index + 1) != [SKIP]


def has_hooks(parameter: torch.Tensor) -> bool:
    """Whether a gradient that comes to ``parameter`` runs hooks."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)  # type: ignore[attr-defined]


def deliver(
    parameter: torch.Tensor,
    grad: torch.Tensor,
    hooks: tuple[dict, dict],
    give: Callable[[torch.Tensor, torch.Tensor | None], None] | None = None,
) -> None:
    """Add a finished gradient to ``.grad`` as autograd does: through the hooks before it, then those after it.

    ``give`` puts it where there is no ``.grad`` yet.
    """
    before, after = hooks
    for hook in list(before.values()):
        changed = hook(grad)
        if changed is not None:
            grad = changed
    if parameter.grad is not None:
        parameter.grad.add_(grad)
    elif give is not None:
        give(parameter, grad)
    else:
        parameter.grad = grad
    for hook in list(after.values()):
        hook(parameter)
