"""A drop-in for ``nn.Embedding``: vocabulary over x, hidden size over y, rows of the block over z.

    block  = all-gather_z(weight)                       [V/Gx/Gz, h/Gy] -> [V/Gx, h/Gy]
    output = all-reduce_x(block[id] where the id is of this rank's vocabulary, else 0)          [..., h/Gy]

Backward adds the rows of dO into the block's gradient, reduce-scatters it over z and all-reduces it over data. The
vocabulary may be uneven over x (bounds of ``torch.chunk``); the hidden size must divide over y.

With Tesseract, whose rows x splits too, the whole vocabulary is gathered over x and looked up without a sum:

    block  = all-gather_x(weight)                       [V/Gx, h/Gy] -> [V, h/Gy]

Not here: ``max_norm``, ``scale_grad_by_freq`` and ``sparse``; their meaning depends on all ranks' ids: refused.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from axo.comm.connect import Communicators, check_comms
from axo.matmul import activations, cost
from axo.matmul.product import refuse_create_graph
from axo.nn import chain
from axo.nn.layer import ParallelLayer, default_device, label_of
from axo.nn.sequence import scatter_sequence
from axo.overlap.autograd import SKIP
from axo.overlap.engine import Exchange
from axo.placement import Placement, check_divides, check_whole


class Embedding(ParallelLayer, nn.Embedding):
    """Look ids up in a table that the grid shares: (...) -> (..., embedding_dim/Gy).

    Args:
        num_embeddings: Whole vocabulary V.
        embedding_dim: Whole hidden size h.
        padding_idx: As in torch: this row starts at zero and gets no gradient.
        max_norm, norm_type, scale_grad_by_freq, sparse: As in torch; anything but the defaults is refused.
        device, dtype: As in torch; the default device is that of ``comms``.
        comms: What ``axo.connect`` returned.
        grad_reduce: ``"mean"`` averages gradients over the Gz * Gdata data ranks, ``"sum"`` adds them.
        sequence_parallel: Return this rank's part of the tokens over x, (..., s/Gx, h/Gy) (``axo.nn.sequence``).
        gather_output: Return all of embedding_dim on every rank; backward takes this rank's slice of the gradient.
        name: How error messages call the layer.

    Raises:
        ValueError: embedding_dim does not divide over y, or an option is not supported.
    """

    in_axis = None
    out_axis = "y"

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        comms: Communicators,
        grad_reduce: str = "mean",
        sequence_parallel: bool = False,
        gather_output: bool = False,
        name: str | None = None,
    ) -> None:
        check_comms(type(self).__name__, comms)
        label = label_of(self, name)
        check_whole(label, 0, {"num_embeddings": num_embeddings, "embedding_dim": embedding_dim})
        check_whole(label, None, {} if padding_idx is None else {"padding_idx": padding_idx})
        placement = Placement((num_embeddings, embedding_dim), comms.arrangement.table, comms=comms)
        self._start(comms, name, {"weight": placement})
        for option, asked in (("max_norm", max_norm), ("scale_grad_by_freq", scale_grad_by_freq), ("sparse", sparse)):
            if asked:
                raise ValueError(f"{self.label()}: {option}={asked!r} is not supported; leave it at torch's default")
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ValueError(f"{self.label()}: padding_idx={padding_idx} is not of num_embeddings={num_embeddings}")
        check_divides(self.label(), "embedding_dim", embedding_dim, "y", comms.grid.y)
        if sequence_parallel:
            comms.arrangement.only_axonn(f"{self.label()}: sequence_parallel=True")
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.out_features_whole = embedding_dim
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings  # type: ignore[assignment]
        self.max_norm, self.norm_type = None, norm_type
        self.scale_grad_by_freq = self.sparse = False
        self.exchange = Exchange(comms, placement, grad_reduce)
        self.exchanges = (self.exchange,)
        self.gather_output = gather_output
        self.scatters_tokens = sequence_parallel and comms.grid.x > 1
        shard_axis = self.exchange.shard_axis
        block = placement.without(shard_axis) if shard_axis else placement
        self.vocabulary_axis = next(iter(block.splits[0]), None)
        self.vocabulary = (block.ranges(0) or [(num_embeddings, num_embeddings)])[0]
        self._add_parameters(default_device(device, comms), dtype)
        self.reset_parameters()

    def serial(self, device: torch.device, dtype: torch.dtype) -> nn.Module:
        return nn.utils.skip_init(
            nn.Embedding, self.num_embeddings, self.embedding_dim, self.padding_idx, device=device, dtype=dtype
        )

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Look up: (...) of whole-vocabulary ids -> (..., embedding_dim/Gy).

        Raises:
            IndexError: An id is negative or not below num_embeddings (on CPU; other devices assert later).
            RuntimeError: The ids are not int64 or int32, as torch's layer wants them.
        """
        self._check_range(input)
        if self.comms.grid.world_size == 1 and self.exchange.weight_phase is None:
            return F.embedding(input, self.weight, self.padding_idx)
        sum_over = None if self.scatters_tokens else self.vocabulary_axis
        output = _Lookup.apply(input, self.weight, self, sum_over, torch.is_grad_enabled())
        if self.first_pass:
            chain.leave(output, self)
            self.first_pass, self.first_without_history = output.grad_fn is None, False
        if self.scatters_tokens:
            output = scatter_sequence(output, self.comms, owner=self.label())
        return self._gather_if_asked(output)

    def cost(self, rows: int) -> list[cost.Call]:
        """Count this layer's collectives on this rank in one step, for ``rows`` ids of one data-parallel group."""
        grid, coords, itemsize = self.comms.grid, self.comms.coords, self.weight.dtype.itemsize
        calls = cost.embedding(
            grid,
            rows,
            self.num_embeddings,
            self.embedding_dim,
            itemsize=itemsize,
            sequence_parallel=self.scatters_tokens,
            arrangement=self.comms.arrangement,
            coords=coords,
        )
        mine = cost.rows_of(self.comms.arrangement, grid, rows, coords)
        whole = mine * self.embedding_dim if self.gather_output else 0
        return self._reduced(calls) + cost.relayout(grid, 0, whole, transposed=True, itemsize=itemsize)

    def saved_bytes(self, rows: int, *, itemsize: int = 4) -> float:
        return activations.embedding(self._rows(rows))

    def _check_range(self, ids: torch.Tensor) -> None:
        if not isinstance(ids, torch.Tensor) or ids.dtype not in (torch.int64, torch.int32):
            given = ids.dtype if isinstance(ids, torch.Tensor) else type(ids).__name__
            raise RuntimeError(f"{self.label()}: ids are {given}; pass a tensor of int64 or int32, such as ids.long()")
        if ids.numel() == 0:
            return
        if ids.device.type != "cpu":
            torch._assert_async(((ids >= 0) & (ids < self.num_embeddings)).all())
            return
        low, high = (int(bound) for bound in torch.aminmax(ids))
        if low < 0 or high >= self.num_embeddings:
            bad = low if low < 0 else high
            raise IndexError(f"{self.label()}: id {bad} is out of range; num_embeddings={self.num_embeddings}")

    def extra_repr(self) -> str:
        return (
            f"{self.num_embeddings}, {self.embedding_dim}, padding_idx={self.padding_idx}, grid={self.comms.grid},"
            f" weight on this rank={tuple(self.weight.shape)}"
        )


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        ids: torch.Tensor,
        weight: torch.Tensor,
        layer: Embedding,
        sum_over: str | None,
        recording: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(ids)
        exchange, vocabulary = layer.exchange, layer.vocabulary
        ctx.weight, ctx.vocabulary, ctx.padding_idx, ctx.exchange = weight, vocabulary, layer.padding_idx, exchange
        block, _ = exchange.forward_block(weight, weight.dtype, recording=recording, wanted=False)
        if exchange.sizes[layer.vocabulary_axis] == 1:
            return F.embedding(ids, block)
        low, high = vocabulary
        if low == high:
            output = weight.new_zeros((*ids.shape, weight.shape[1]))
        else:
            elsewhere = (ids < low) | (ids >= high)
            output = F.embedding((ids - low).masked_fill_(elsewhere, 0), block)
            output.masked_fill_(elsewhere.unsqueeze(-1), 0)
        return exchange.reduce(output, sum_over)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        refuse_create_graph("Embedding")
        (ids,) = ctx.saved_tensors
        weight, exchange = ctx.weight, ctx.exchange
        how = exchange.how(ctx, 1)
        if how == SKIP:
            return None, None, None, None, None
        grad_weight = exchange.gradient(how, weight, lambda: _weight_gradient(ctx, how, ids, grad_output))
        return None, grad_weight, None, None, None


def _weight_gradient(ctx: Any, how: str, ids: torch.Tensor, grad_output: torch.Tensor) -> torch.Tensor | None:
    """The gradient of the table, on its way; None: it comes to .grad later."""
    low, high = ctx.vocabulary
    skipped = (ids < low) | (ids >= high)
    if ctx.padding_idx is not None:
        skipped |= ids == ctx.padding_idx
    rows = ctx.exchange.padded_rows
    # Row `rows` collects what is skipped; what lies before it is the padded buffer of the reduce-scatter.
    local = (ids - low).masked_fill_(skipped, rows)
    buffer = torch.ops.aten.embedding_dense_backward(grad_output, local, rows + 1, rows, False)[:rows]
    return ctx.exchange.weight_gradient(how, ctx.weight, buffer)
