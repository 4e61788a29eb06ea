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

Not here: who chooses (a model's own router), overlap of the exchange with products. Source: GShard (arXiv:2006.16668),
without its capacities.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from axo.comm.communicator import Communicator
from axo.comm.connect import Communicators
from axo.matmul.product import refuse_create_graph
from axo.matmul.products import compute_dtype
from axo.overlap.autograd import in_backward


class SpreadExperts:
    """The experts of one mixture, of which each rank holds some.

    Args:
        experts: All of them; the layers of each are placed on its holders (``axo.plans.experts.holders``).
        comms: The communicators of the grid.
        grad_reduce: Of their layers.

    Attributes:
        chosen: How many rows of this rank have gone to each expert since it was set to zero, but for passes that run
            again in backward: ``(E,)``, int64.
    """

    def __init__(self, experts: Sequence[nn.Module], comms: Communicators, grad_reduce: str) -> None:
        self.experts = list(experts)
        self.comms, self._mean = comms, grad_reduce == "mean"
        each = len(self.experts) // comms.experts.size
        self._first = each * comms.experts.rank
        self._mine = self.experts[self._first : self._first + each]
        self.chosen = torch.zeros(len(self.experts), dtype=torch.int64, device=comms.device)

    def __call__(self, rows: torch.Tensor, weights: torch.Tensor, choices: torch.Tensor) -> torch.Tensor:
        """The weighted sum of what the chosen experts give of each row. Collective over the ranks of ``experts``.

        Args:
            rows: ``(m, h/Gy)``. weights: ``(m, k)``. choices: Numbers of experts, ``(m, k)``, int64.

        Returns:
            ``(m, h/Gy)``, in the dtype of ``rows``.
        """
        choices = choices.flatten()
        order = choices.argsort(stable=True)
        outputs = self.outputs(rows[order // weights.shape[1]], choices.bincount(minlength=len(self.experts)))
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        return (weights.unsqueeze(-1) * outputs[back].view(*weights.shape, outputs.shape[-1])).sum(1).to(rows.dtype)

    def outputs(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """What the experts give of ``rows``, those of the first expert first: ``counts[i]`` rows are of expert i.

        Shapes (n, h/Gy) and (E,) -> (n, h/Gy); in the dtype of autocast.
        """
        line, each = self.comms.experts, len(self._mine)
        if not in_backward():
            self.chosen += counts
        arriving = line.all_to_all(counts, torch.empty_like(counts))
        sent, received = counts.view(-1, each).sum(1).tolist(), arriving.view(-1, each).sum(1).tolist()
        factor = line.size if self._mean else 1
        rows = rows.to(compute_dtype(rows))
        absent = [p for expert in self._absent() for p in expert.parameters() if p.requires_grad]
        # The same on all ranks, whatever of the experts each holds: who has nothing to train sends gradients too.
        trains = rows.requires_grad or any(p.requires_grad for expert in self.experts for p in expert.parameters())
        rows = _Exchange.apply(rows, line, sent, received, factor, trains)
        numbers = torch.arange(each, device=rows.device).repeat(line.size).repeat_interleave(arriving)
        order = numbers.argsort(stable=True)  # by expert, and within one by the rank that it came from
        parts = rows[order].split(arriving.view(-1, each).sum(0).tolist())
        outputs = torch.cat([expert(part) for expert, part in zip(self._mine, parts, strict=True)])
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        returned: torch.Tensor = _Exchange.apply(outputs[back], line, received, sent, 1 / factor, trains, *absent)
        return returned

    def take_counts(self) -> list[int]:
        """What ``chosen`` holds, which is zero from then on."""
        counts: list[int] = self.chosen.tolist()
        self.chosen.zero_()
        return counts

    def _absent(self) -> list[nn.Module]:
        """The experts that other ranks hold."""
        return self.experts[: self._first] + self.experts[self._first + len(self._mine) :]

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
    return [mixture for mixture in mixtures if isinstance(mixture, SpreadExperts)]


def busiest(rows: torch.Tensor, ranks: int) -> float:
    """Rows of the rank whose experts got the most, over the mean of ranks; mean over mixtures. 1.0: even.

    Args:
        rows: For each mixture, each group of ``ranks`` data ranks, and each expert, ``(mixtures, groups, E)``.
        ranks: Over which the experts are spread.
    """
    of_ranks = rows.unflatten(2, (ranks, -1)).sum(-1).flatten(1)
    return float((of_ranks.amax(1) / of_ranks.mean(1)).mean())


class _Exchange(torch.autograd.Function):
    """Rows to other ranks and from them, ``sent`` and ``received`` of each; backward the other way, times ``factor``.

    ``absent``: parameters of which this rank has nothing. They get nothing as their gradients, which optimizers and
    checkpoints ask for on all ranks.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        line: Communicator,
        sent: list[int],
        received: list[int],
        factor: float,
        trains: bool,
        *absent: torch.Tensor,
    ) -> torch.Tensor:
        ctx.line, ctx.sent, ctx.received, ctx.factor = line, sent, received, factor
        ctx.trains, ctx.absent = trains, absent
        return _exchanged(rows, line, sent, received)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        refuse_create_graph("experts")
        grad_rows = None
        if ctx.trains:
            grad_rows = _exchanged(grad if ctx.factor == 1 else grad * ctx.factor, ctx.line, ctx.received, ctx.sent)
        return grad_rows, None, None, None, None, None, *map(torch.zeros_like, ctx.absent)


def _exchanged(rows: torch.Tensor, line: Communicator, sent: list[int], received: list[int]) -> torch.Tensor:
    out = rows.new_empty(sum(received), rows.shape[1])
    line.all_to_all(rows.contiguous(), out, send_counts=sent, recv_counts=received)
    return out
