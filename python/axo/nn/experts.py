"""Experts that lie on several ranks: tokens go to those that they have chosen, and what these give comes back.

With E experts over e ranks (``axo.connect(grid, experts=e)``), each of which holds E/e of them whole but for what x and
y cut; m rows of this rank, each of which goes to k experts:

    order      the m k choices by expert; how many there are of each                 E numbers, by all-to-all
    dispatch   rows[order] to the ranks of their experts                             (m k, h/Gy), by all-to-all
    experts    each of this rank's on what came for it from all e ranks, with no rows too
    combine    back to where they came from, by all-to-all, weighted and summed: (m, h/Gy)

No row is dropped: the parts that travel are as long as what was chosen. Backward sends gradients the same ways. The
gradient of an expert's weights is the sum over the tokens of all e ranks then, where that of another weight is of this
rank's alone; so that both are averaged alike, what an expert gets of gradients is 1/e of what its outputs got.

Rows travel in two halves: those of the first half of each rank's experts, then those of the second, so that an expert
is called once. While one half computes, the other is on its way; backward too. With e = 1 nothing travels. Experts
whose weights lie in one tensor (``axo.plans.auto.stacked_experts``) are multiplied together, half by half.

Not here: who chooses (a model's own router). Source: GShard (arXiv:2006.16668), without its capacities.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from axo.comm.connect import Communicators
from axo.matmul.grouped import Piece, RowTransfer
from axo.matmul.product import refuse_create_graph
from axo.matmul.products import compute_dtype
from axo.overlap.autograd import in_backward


class SpreadExperts:
    """The experts of one mixture, of which each rank holds some.

    Args:
        experts: All of them; the layers of each are placed on its holders (``axo.plans.experts.holders``). Of experts
            in one layer (with a method ``multiply``), that one as often as there are.
        comms: The communicators of the grid.
        grad_reduce: Of their layers.

    Attributes:
        order: The experts in the order in which their rows travel: the first half of each rank's, then the second.
        chosen: How many rows of this rank have gone to each expert since it was set to zero, but for passes that run
            again in backward: ``(E,)``, int64.
    """

    def __init__(self, experts: Sequence[nn.Module], comms: Communicators, grad_reduce: str) -> None:
        self.experts = list(experts)
        self.comms, self._mean = comms, grad_reduce == "mean"
        ranks, each = comms.experts.size, len(self.experts) // comms.experts.size
        self._first = each * comms.experts.rank
        self._mine = self.experts[self._first : self._first + each]
        middle = -(-each // 2) if ranks > 1 else each
        self._halves = [half for half in (range(middle), range(middle, each)) if half]
        self.order = [each * rank + number for half in self._halves for rank in range(ranks) for number in half]
        self._place = torch.tensor(self.order, device=comms.device).argsort()
        self.chosen = torch.zeros(len(self.experts), dtype=torch.int64, device=comms.device)

    def __call__(self, rows: torch.Tensor, weights: torch.Tensor, choices: torch.Tensor) -> torch.Tensor:
        """The weighted sum of what the chosen experts give of each row. Collective over the ranks of ``experts``.

        Args:
            rows: ``(m, h/Gy)``. weights: ``(m, k)``. choices: Numbers of experts, ``(m, k)``, int64.

        Returns:
            ``(m, h/Gy)``, in the dtype of ``rows``.
        """
        choices = choices.flatten()
        order = self._place[choices].argsort(stable=True)
        counts = torch.zeros_like(self.chosen).scatter_add_(0, choices, torch.ones_like(choices))
        outputs = self.outputs(rows.index_select(0, order // weights.shape[1]), counts).index_select(0, _inverse(order))
        return (weights.unsqueeze(-1) * outputs.view(*weights.shape, outputs.shape[-1])).sum(1).to(rows.dtype)

    def outputs(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """What the experts give of ``rows``, by ``order``: ``counts[i]`` rows are of expert i.

        Shapes (n, h/Gy) and (E,) -> (n, h/Gy); in the dtype of autocast.
        """
        if not in_backward():
            self.chosen += counts
        line, each, rows = self.comms.experts, len(self._mine), rows.to(compute_dtype(rows))
        going, coming = self._counts(counts, len(rows))
        stack: Any = self._mine[0] if hasattr(self._mine[0], "multiply") else None
        if line.size == 1:
            if stack is not None:
                return stack.multiply(rows, [Piece(range(each), going)])
            return torch.cat([expert(part) for expert, part in zip(self._mine, rows.split(going), strict=True)])
        factor = line.size if self._mean else 1
        there, back = list[RowTransfer](), list[RowTransfer]()
        for half in self._halves:
            sent, received = (
                [sum(of[each * rank + number] for number in half) for rank in range(line.size)]
                for of in (going, coming)
            )
            there.append(RowTransfer(line, sent, received, factor))
            back.append(RowTransfer(line, received, sent, 1 / factor))
        came = [[coming[each * rank + number] for rank in range(line.size) for number in half] for half in self._halves]
        returning, parts = list[torch.Tensor](), _Start.apply(there, rows, stack is not None)
        if stack is not None:
            pieces = map(self._piece, self._halves, came, there, back)
            returning.append(stack.multiply(*parts, list(pieces)))
        else:
            for half, one, other, part, blocks in zip(self._halves, there, back, parts, came, strict=True):
                arrived = _Finish.apply([one], 1, part)
                returning += _Start.apply([other], self._on_mine(half, arrived, blocks), False)
        absent = (p for expert in self._absent() for p in expert.parameters() if p.requires_grad)
        outputs: torch.Tensor = _Finish.apply(back, len(returning), *returning, *absent)
        return outputs

    def _counts(self, counts: torch.Tensor, rows: int) -> tuple[list[int], list[int]]:
        """How many of the ``rows`` go to each expert, and how many come from each rank for each of this rank's."""
        if self.comms.experts.size == 1:
            return counts.tolist(), []
        coming = self.comms.experts.all_to_all(counts, torch.empty_like(counts))
        both: list[list[int]] = torch.stack((counts, coming)).tolist()
        return both[0], both[1]

    def _on_mine(self, half: range, rows: torch.Tensor, blocks: list[int]) -> torch.Tensor:
        """What these of this rank's experts give of ``rows``, which lie by rank, and of one rank by expert."""
        piece = self._piece(half, blocks)
        parts = piece.by_expert(rows).split(list(piece.sizes))
        outputs = [self._mine[number](part) for number, part in zip(half, parts, strict=True)]
        return piece.as_they_came(torch.cat(outputs))

    def _piece(
        self, half: range, blocks: list[int], there: RowTransfer | None = None, back: RowTransfer | None = None
    ) -> Piece:
        """How the rows of a half lie that came: ``blocks`` of them, by rank, and of one rank by expert."""
        ranks = len(blocks) // len(half)
        numbers = torch.arange(len(half)).repeat(ranks).repeat_interleave(torch.tensor(blocks), output_size=sum(blocks))
        order = numbers.to(self.comms.device).argsort(stable=True)  # within an expert by the rank that they came from
        sizes = [sum(blocks[number :: len(half)]) for number in range(len(half))]
        return Piece(half, sizes, order, _inverse(order), there, back)

    def take_counts(self) -> list[int]:
        """What ``chosen`` holds, which is zero from then on."""
        counts: list[int] = self.chosen.tolist()
        self.chosen.zero_()
        return counts

    def _absent(self) -> list[nn.Module]:
        """The experts that other ranks hold."""
        others = self.experts[: self._first] + self.experts[self._first + len(self._mine) :]
        return [] if hasattr(self._mine[0], "multiply") else others

    def __deepcopy__(self, memo: dict[int, Any]) -> SpreadExperts:
        """That of a copied mixture: its experts are the copies."""
        new = memo[id(self)] = SpreadExperts.__new__(SpreadExperts)
        vars(new).update(vars(self))
        new.experts = [memo.get(id(expert), expert) for expert in self.experts]
        new._mine = new.experts[self._first : self._first + len(self._mine)]
        new.chosen = self.chosen.clone()
        return new


def spread_experts(model: nn.Module) -> list[SpreadExperts]:
    """The mixtures of a model whose experts lie on several ranks."""
    mixtures = (getattr(module, "spread_experts", None) for module in model.modules())
    return [each for each in mixtures if isinstance(each, SpreadExperts) and each.comms.experts.size > 1]


def busiest(rows: torch.Tensor, ranks: int) -> float:
    """Rows of the rank whose experts got the most, over the mean of ranks; mean over mixtures. 1.0: even.

    Args:
        rows: For each mixture, each group of ``ranks`` data ranks, and each expert, ``(mixtures, groups, E)``.
        ranks: Over which the experts are spread.
    """
    of_ranks = rows.unflatten(2, (ranks, -1)).sum(-1).flatten(1)
    return float((of_ranks.amax(1) / of_ranks.mean(1)).mean())


def _inverse(order: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


class _Start(torch.autograd.Function):
    """Rows, as many for each transfer as it sends, are on their way: what comes of each, or of all in one tensor.

    Backward waits for their gradients.
    """

    @staticmethod
    def forward(ctx: Any, transfers: list[RowTransfer], rows: torch.Tensor, whole: bool) -> tuple[torch.Tensor, ...]:
        ctx.transfers = transfers
        parts = rows.split([sum(one.sent) for one in transfers])
        if not whole:
            return tuple(one.start(part) for one, part in zip(transfers, parts, strict=True))
        come = [sum(one.received) for one in transfers]
        out = rows.new_empty(sum(come), rows.shape[1])
        for one, part, into in zip(transfers, parts, out.split(come), strict=True):
            one.start(part, into)
        return (out,)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        refuse_create_graph("experts")
        come = [one.wait() for one in ctx.transfers]
        return None, torch.cat(come) if len(come) > 1 else come[0], None


class _Finish(torch.autograd.Function):
    """What comes by the transfers is there, one behind the other; backward sends its gradients.

    The first ``count`` parts are what it comes of, for autograd: they get stand-ins. Behind the parts stand parameters
    of which this rank has nothing. They get nothing as their gradients, which optimizers and checkpoints ask for on all
    ranks, and let backward come here on all ranks if it does on one.
    """

    @staticmethod
    def forward(ctx: Any, transfers: list[RowTransfer], count: int, *parts: torch.Tensor) -> torch.Tensor:
        ctx.transfers, ctx.absent = transfers, parts[count:]
        ctx.shapes = [part.shape for part in parts[:count]]
        come = [one.wait() for one in transfers]
        return torch.cat(come) if len(come) > 1 else come[0].view_as(come[0])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        refuse_create_graph("experts")
        parts = grad.split([sum(one.received) for one in ctx.transfers])
        for one, part in zip(ctx.transfers[::-1], parts[::-1], strict=True):
            one.start_back(part)
        stand_in = grad.new_empty(())
        return None, None, *map(stand_in.expand, ctx.shapes), *map(torch.zeros_like, ctx.absent)
