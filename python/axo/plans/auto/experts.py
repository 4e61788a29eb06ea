"""Mixtures of experts of transformers: ranks that hold other rows call the same experts, in the same order.

Where experts lie on several ranks (``axo.connect(grid, experts=e)``), the block's own code runs twice: once to see
which rows it gives to which expert, when experts answer with zeros; then all rows go to their experts
(``axo.nn.experts``), and the second time each expert's call gives what came back. The rows have their history from the
first run, the weights of the sum theirs from the second. What stands beside the experts (``shared...``) runs in the
second alone.

Where all ranks hold all experts:

Their blocks call, in order of number, only the experts that some row has chosen. On some ranks an expert may have no
row. If such a rank left the expert out, the others would gather its weights and reduce its gradients alone, and this
rank's next collective would meet the wrong one. So the rank calls that expert too, with no rows: before the next expert
that has rows, before a shared expert, or at the end of the block. The sum of what comes back, which is zero, is added
to the block's output, so that backward goes there as well.

A loss of balance (``output_router_logits=True``) is a product of means over the batch, so each rank gathers the logits
of all rows for it. Each rank's own rows are in it then as often as there are data ranks, over which gradients are
averaged. A mask that hides tokens is refused there.

transformers is not imported here: a block is known by its package, and by ``experts``, an ``nn.ModuleList`` or
``nn.ModuleDict`` of modules that take (rows, features). Experts that a program checkpoints one by one are called in
backward as they stand.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from axo.comm.connect import Communicators
from axo.errors import Refused
from axo.nn.experts import SpreadExperts
from axo.sharding import gather_rows


def is_mixture(module: nn.Module) -> bool:
    """Whether ``module`` is a mixture of experts of transformers whose experts are modules of their own."""
    of_transformers = type(module).__module__.startswith(("transformers.models.", "transformers_modules."))
    return of_transformers and isinstance(getattr(module, "experts", None), nn.ModuleList | nn.ModuleDict)


class SpreadBlock:
    """The forward of a block whose experts lie on several ranks.

    Args:
        block: For which :func:`is_mixture` holds, its layers parallel already.
        comms, grad_reduce: Of these layers.
    """

    def __init__(self, block: Any, comms: Communicators, grad_reduce: str) -> None:
        experts = list(block.experts.values() if isinstance(block.experts, nn.ModuleDict) else block.experts)
        block.spread_experts = self._spread = SpreadExperts(experts, comms, grad_reduce)
        self._forward = block.forward
        self._answer: Callable[[int, torch.Tensor], torch.Tensor] | None = None  # in the place of experts
        self._listens = False
        for number, expert in enumerate(experts):
            expert.forward = partial(self._call, number, expert.forward)
        for name, other in block.named_children():
            if name.startswith("shared"):
                other.forward = partial(self._call_shared, other, other.forward)
        block.forward = self._run

    def _run(self, hidden: torch.Tensor, *args: Any, **named: Any) -> Any:
        given = dict[int, torch.Tensor]()

        def listen(number: int, rows: torch.Tensor) -> torch.Tensor:
            given[number] = rows
            return torch.zeros_like(rows)

        self._listens = True
        try:
            self._run_with(listen, hidden, *args, **named)
        finally:
            self._listens = False
        none = hidden.reshape(-1, hidden.shape[-1])[:0]
        order = self._spread.order
        rows = [given.get(number, none) for number in order]
        counts = torch.tensor([len(given.get(number, none)) for number in range(len(order))], device=hidden.device)
        parts = self._spread.outputs(torch.cat(rows), counts).split([len(each) for each in rows])
        outputs = dict(zip(order, parts, strict=True))
        result = self._run_with(lambda number, rows: outputs[number], hidden, *args, **named)
        unused = parts[0].sum() * 0 if not given else 0  # so that backward comes to other ranks' rows here
        return (result[0] + unused, *result[1:]) if isinstance(result, tuple) else result + unused

    def _run_with(self, answer: Callable[[int, torch.Tensor], torch.Tensor], *args: Any, **named: Any) -> Any:
        self._answer = answer
        try:
            return self._forward(*args, **named)
        finally:
            self._answer = None

    def _call(self, number: int, forward: Any, rows: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = forward(rows) if self._answer is None else self._answer(number, rows)
        return output

    def _call_shared(self, module: nn.Module, forward: Any, hidden: torch.Tensor) -> Any:
        if not self._listens:
            return forward(hidden)
        return hidden.new_zeros(*hidden.shape[:-1], getattr(module, "out_features", hidden.shape[-1]))


class EveryExpert:
    """Hooks of one block and its experts.

    Args:
        block: For which :func:`is_mixture` holds.
        gathers: Whether a forward pass without gradients communicates too: over z.
    """

    def __init__(self, block: Any, gathers: bool) -> None:
        experts = block.experts
        self._experts = list(experts.values() if isinstance(experts, nn.ModuleDict) else experts)
        self._gathers = gathers
        self._next = len(self._experts)  # outside of the block's forward: nothing is to be called
        self._no_rows: torch.Tensor | None = None
        self._sum: torch.Tensor | None = None
        block.register_forward_pre_hook(self._begin)
        for number, expert in enumerate(self._experts):
            expert.register_forward_pre_hook(partial(self._before, number))
        for other in block.children():
            if other is not experts:
                other.register_forward_pre_hook(self._before_other)
        block.register_forward_hook(self._end)
        block.register_forward_hook(self._forget, always_call=True)  # a recomputation stops before the end

    def _begin(self, block: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if not self._gathers and not torch.is_grad_enabled():
            return
        hidden = inputs[0]
        self._no_rows = hidden.reshape(-1, hidden.shape[-1])[:0].clone()  # the block may write to its input
        self._next = 0

    def _before(self, number: int, expert: nn.Module, inputs: Any) -> None:
        if number >= self._next:
            self._call_until(number)
            self._next = number + 1

    def _before_other(self, other: nn.Module, inputs: Any) -> None:
        if self._next > 0:  # the experts' turn is over: each rank that has rows has called one
            self._call_until(len(self._experts))

    def _end(self, block: nn.Module, inputs: Any, output: Any) -> Any:
        self._call_until(len(self._experts))
        if self._sum is None:
            return output
        if isinstance(output, tuple):
            return output[0] + self._sum, *output[1:]
        return output + self._sum

    def _forget(self, block: nn.Module, inputs: Any, output: Any) -> None:
        self._next, self._no_rows, self._sum = len(self._experts), None, None

    def _call_until(self, number: int) -> None:
        for skipped in range(self._next, number):
            self._next = skipped + 1  # the expert's own hook has nothing to do then
            output = self._experts[skipped](self._no_rows).sum()
            self._sum = output if self._sum is None else self._sum + output


class WholeBalance:
    """A hook of a model's body: what it returns as ``router_logits`` is of the whole batch, on every rank."""

    def __init__(self, comms: Communicators, grad_reduce: str) -> None:
        self._comms, self._factor = comms, comms.data_ranks if grad_reduce == "mean" else 1

    def __call__(self, body: nn.Module, inputs: Any, named: dict[str, Any], output: Any) -> None:
        logits = getattr(output, "router_logits", None)
        if not isinstance(logits, tuple) or not all(isinstance(each, torch.Tensor) for each in logits):
            return
        mask = named.get("attention_mask")
        hides = torch.tensor([mask is not None and bool((mask == 0).any())], device=self._comms.device).int()
        if bool(self._comms.world.all_reduce(hides, "max").item()):
            raise Refused(
                "forward: output_router_logits=True with an attention_mask that hides tokens is not supported"
            )
        output.router_logits = tuple(map(self._gather, logits))

    def _gather(self, mine: torch.Tensor) -> torch.Tensor:
        rows = mine.reshape(-1, mine.shape[-1])
        if rows.requires_grad:
            rows.register_hook(lambda grad: grad * self._factor)
        return gather_rows(rows, self._comms)

    def __deepcopy__(self, memo: dict[int, Any]) -> WholeBalance:
        return self
