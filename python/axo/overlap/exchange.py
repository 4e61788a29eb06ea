"""The communication of one parallel layer, in one place: what goes over which axis.

    gather          this rank's rows -> its block     all-gather over z      [rows/Gz, c] -> [rows, c]
    reduce          partial sums     -> sums          all-reduce over x or y, in place
    weight gradient gradient of the block -> of this rank's rows    reduce-scatter over z, then all-reduce over data
    vector gradient gradient of a tensor replicated over z          all-reduce over z, then over data

An axis of size 1 issues nothing. Rows that do not divide over z travel in a buffer padded to ``Gz * ceil(rows / Gz)``;
since bounds follow ``torch.chunk`` the padding is the tail of that buffer, and the block is a view of its head.

Rows that neighbours along x hold too (``Placement.copies``) get their gradients summed over those ranks last.

Layers call nothing else. When things are issued and awaited is the business of ``axo.overlap``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from axo.overlap import Engine, Overlap
from axo.overlap import gradients as wants
from axo.overlap.buckets import Copies, Slot, Stage
from axo.overlap.events import Pending, span
from axo.overlap.gathers import Gathered
from axo.overlap.modes import hidden
from axo.placement import Placement, chunk_size

GRAD_REDUCE = {"mean": "avg", "sum": "sum"}


class Exchange:
    """Runs the collectives of a layer on its communicators.

    Args:
        comms: The communicators of the grid.
        placement: Where the weight lies; its rows are sharded over z innermost.
        grad_reduce: ``"mean"`` averages gradients over the Gz * Gdata data ranks, ``"sum"`` adds them.
        overlap: Options of an engine of this layer's own; ``axo.overlap.attach`` gives it that of the whole model.

    Attributes:
        name: What records and messages call the layer.
        group: Layers of equal groups are gathered together.
        gathered: The weight gathered last, if somebody keeps it.
        last_asked: Weight and dtype of the last gather.
    """

    def __init__(
        self, comms: Any, placement: Placement, grad_reduce: str = "mean", overlap: Overlap | None = None
    ) -> None:
        if grad_reduce not in GRAD_REDUCE:
            raise ValueError(f"grad_reduce={grad_reduce!r} is not known; use 'mean' or 'sum'")
        self.comms = comms
        self.op = GRAD_REDUCE[grad_reduce]
        self.block_rows = placement.without("z").local_shape(comms.grid, comms.coords)[0]
        self.shard_rows = placement.local_shape(comms.grid, comms.coords)[0]
        self._copied_rows = placement.copied_rows(comms.grid, comms.coords)
        self._copied_block_rows = placement.without("z").copied_rows(comms.grid, comms.coords)
        if self._copied_block_rows:  # the same on all ranks of the outer axis, so all of them come here
            self._holders = comms.neighbours(placement.splits[0][0], max(placement.copies or (1,)))
        self.padded_rows = comms.grid.z * chunk_size(self.block_rows, comms.grid.z)
        self.weight_stages = self._stages("data")
        self.vector_stages = self._stages("z", "data")
        self.engine = Engine(comms, overlap or Overlap(bucket_bytes=0))
        self.name = ""
        self.group: Any = object()
        self.gathered: weakref.ref[Gathered] | None = None
        self.last_asked: Any = None

    def _stages(self, *axes: str) -> tuple[Stage, ...]:
        return tuple((axis, self.op) for axis in axes if self.size(axis) > 1)

    def size(self, axis: str | None) -> int:
        """Ranks along ``axis``; 1 for no axis."""
        return 1 if axis is None else self.comms.grid.size(axis)

    # --- weights --------------------------------------------------------------------------------------------------

    def forward_block(
        self,
        weight: torch.Tensor,
        dtype: torch.dtype,
        *,
        recording: bool,
        wanted: bool,
        gather: Callable[[], torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, Gathered | None]:
        """This rank's block in ``dtype``, (rows/Gz, ...) -> (rows, c), and what the node is to hold on to for backward.

        Args:
            recording: Grad mode is on around the Function.
            wanted: Its backward will want the block.
            gather: Gives the block in another way, where the layer would have to gather it now and wait.
        """
        if self.size("z") > 1:
            return self.engine.gathers.forward(self, weight, dtype, recording=recording, wanted=wanted, gather=gather)
        block = self._cast(weight, dtype)
        keeps = wanted and self.engine.overlap.gather_cache != "none"
        return block, Gathered(weight, dtype, block, None) if keeps else None

    def backward_block(self, held: Gathered | None, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The block for a product of backward; ``held`` is what ``forward_block`` gave."""
        if self.size("z") > 1:
            return self.engine.gathers.backward(self, held, weight, dtype)
        return self._cast(weight, dtype) if held is None else held.wait()

    def _cast(self, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The block in ``dtype``, where z does not cut it: in memory that is used again each step."""
        block = weight.detach().flatten(1)
        if block.dtype == dtype or torch.compiler.is_compiling():
            return block.to(dtype)
        with hidden():
            return self.engine.pool.take(tuple(block.shape), dtype, block.device).copy_(block)

    def release_block(self) -> None:
        """The product of backward is done with the block."""
        if self.size("z") > 1:
            self.engine.gathers.release(self)

    def waits_for_gather(self) -> bool:
        """Whether nothing but the layer itself would issue the gather of its weight: the engine foretells none."""
        return self.size("z") > 1 and not self.engine.gathers.looks_ahead

    def shard(self, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """This rank's rows as they travel, where shares are equal: (rows/Gz, ...) -> (rows/Gz, c), contiguous."""
        return weight.detach().flatten(1).to(dtype).contiguous()

    def start_gather(self, weight: torch.Tensor, dtype: torch.dtype, *, blocking: bool = False) -> Gathered:
        """Gather this rank's rows over z, in ``dtype``."""
        with hidden():
            shard, rows = weight.detach().flatten(1), self.padded_rows // self.size("z")
            if shard.dtype != dtype or shard.shape[0] != rows or not shard.is_contiguous():
                source = self.engine.pool.take((rows, shard.shape[1]), dtype, shard.device)
                source[: shard.shape[0]].copy_(shard)
                source[shard.shape[0] :].zero_()
                shard = source
            whole = self.engine.pool.take((self.padded_rows, shard.shape[1]), dtype, shard.device)
            block = whole[: self.block_rows]
        names = "all_gather", "z", self.name
        if blocking:
            with span(self.engine.events, "wait", *names):
                self.comms.axis("z").all_gather(shard, whole)
            return Gathered(weight, dtype, block, None)
        work = self.comms.axis("z").all_gather(shard, whole, async_op=True)
        return Gathered(weight, dtype, block, Pending(self.engine, work, block, *names))

    # --- activations ----------------------------------------------------------------------------------------------

    def reduce(self, tensor: torch.Tensor, axis: str | None, op: str = "sum") -> torch.Tensor:
        """All-reduce ``tensor`` over ``axis``, in place where it is contiguous and nobody keeps it."""
        if self.size(axis) == 1:
            return tensor
        with hidden() as watched, span(self.engine.events, "wait", "all_reduce", str(axis), self.name):
            tensor = tensor.clone() if watched else tensor.contiguous()
            return self.comms.axis(axis).all_reduce(tensor, op)

    def start_reduce(self, tensor: torch.Tensor, axis: str | None) -> Any:
        """Begin to add up partial sums over ``axis``; something with ``wait()`` that gives them."""
        if self.size(axis) == 1:
            return _Done(tensor)
        tensor = tensor.contiguous()
        if not self.engine.overlap.all_reduce:
            return _Done(self.reduce(tensor, axis))
        work = self.comms.axis(axis).all_reduce(tensor, "sum", async_op=True)
        return Pending(self.engine, work, tensor, "all_reduce", str(axis), self.name)

    # --- gradients ------------------------------------------------------------------------------------------------

    def how(self, node: Any, index: int, sum_over: tuple[str, ...] = ()) -> str:
        """What backward wants of the gradient of input ``index``: see ``axo.overlap.gradients.how``.

        What needs no communication at all is given to autograd.
        """
        found = wants.how(node, index)
        silent = not self.stages_of(sum_over) and not self._copied_block_rows
        return wants.NOW if found == wants.LATER and silent else found

    def room(self, how: str, weight: torch.Tensor, columns: int, like: torch.Tensor) -> tuple[Any, torch.Tensor]:
        """Room for the gradient of the block: what to pass to ``weight_gradient``, and the block to fill."""
        if how == wants.LATER:
            room = self.engine.gradients.room(self, weight, columns, like)
        else:
            room = like.new_empty((self.padded_rows, columns))
        buffer = room.tensor if isinstance(room, Slot) else room
        if self.padded_rows == self.block_rows:
            return room, buffer
        buffer[self.block_rows :].zero_()
        return room, buffer[: self.block_rows]

    def weight_gradient(self, how: str, weight: torch.Tensor, room: Any) -> torch.Tensor | None:
        """Reduce the gradient of the block (what ``room`` gave, or a padded buffer); None: it comes to .grad later."""
        if how == wants.LATER:
            self.engine.gradients.add_weight(self, weight, room)
            return None
        room = self.engine.gradients.cast(room)
        if self.size("z") > 1:
            room = self.comms.axis("z").reduce_scatter(room, op=self.op)
        grad = self._now(room, self.weight_stages, self.weight_copies())
        return grad[: self.shard_rows].to(weight.dtype).view(weight.shape)

    def waits_for_scatter(self, how: str, weight: torch.Tensor) -> bool:
        """Whether the layer would wait for the reduce-scatter of this gradient where it issues it."""
        if self.size("z") == 1 or self.engine.reduce_dtype is not None:  # the product reduces in its own dtype
            return False
        return how == wants.NOW or (
            not self.engine.overlap.reduce_scatter and self.engine.gradients.takes_shard_of(weight)
        )

    def shard_room(self, how: str, weight: torch.Tensor, columns: int, like: torch.Tensor) -> tuple[Any, torch.Tensor]:
        """Room for this rank's rows of a gradient that is reduced over z already: as ``room``."""
        if how == wants.LATER:
            slot = self.engine.gradients.shard_room(self, weight, columns, like)
            return slot, slot.tensor
        shard = like.new_empty((self.shard_rows, columns))
        return shard, shard

    def shard_gradient(self, how: str, weight: torch.Tensor, room: Any) -> torch.Tensor | None:
        """What ``shard_room`` gave is filled: reduce it over data; None: it comes to .grad later."""
        if how == wants.LATER:
            self.engine.gradients.add_shard(self, room)
            return None
        return self._now(room, self.weight_stages, self.weight_copies()).to(weight.dtype).view(weight.shape)

    def start_scatter(self, buffer: torch.Tensor, out: torch.Tensor) -> Pending | None:
        """Reduce-scatter the padded gradient of the block over z, into ``out``; None when that is done already."""
        if not self.engine.overlap.reduce_scatter:
            with span(self.engine.events, "wait", "reduce_scatter", "z", self.name):
                self.comms.axis("z").reduce_scatter(buffer, out, op=self.op)
            return None
        work = self.comms.axis("z").reduce_scatter(buffer, out, op=self.op, async_op=True)
        return Pending(self.engine, work, out, "reduce_scatter", "z", self.name)

    def vector_gradient(
        self, how: str, parameter: torch.Tensor, grad: torch.Tensor, sum_over: tuple[str, ...] = ()
    ) -> torch.Tensor | None:
        """Reduce the gradient of what z and data replicate; None when it comes to .grad later.

        ``sum_over`` names axes whose ranks hold partial sums, whatever ``grad_reduce`` says.
        """
        stages = self.stages_of(sum_over)
        if how == wants.LATER:
            self.engine.gradients.add_vector(self, parameter, grad, stages)
            return None
        cast = self.engine.gradients.cast(grad)
        return self._now(cast, stages, self.vector_copies()).to(parameter.dtype)

    def stages_of(self, sum_over: tuple[str, ...]) -> tuple[Stage, ...]:
        """What the gradient of a replicated parameter is reduced over."""
        return tuple((axis, "sum") for axis in sum_over if self.size(axis) > 1) + self.vector_stages

    def reduce_now(self, grad: torch.Tensor) -> torch.Tensor:
        """Reduce the gradient of what z and data replicate, in place, on the spot."""
        return self._now(self.engine.gradients.cast(grad), self.vector_stages, None).to(grad.dtype)

    def weight_copies(self) -> Copies | None:
        """The rows of this rank's weight that others hold too, and who they are."""
        return Copies(self._copied_rows, self._holders) if self._copied_rows else None

    def vector_copies(self) -> Copies | None:
        """The same of a parameter that z replicates."""
        return Copies(self._copied_block_rows, self._holders) if self._copied_block_rows else None

    def _now(self, tensor: torch.Tensor, stages: tuple[Stage, ...], copies: Copies | None) -> torch.Tensor:
        if stages:
            self.engine.gradients.data.drain()
            if self.engine.zero is not None and self.engine.zero.stage == 2:
                self.engine.arm()  # the gradient goes to autograd whole: its rows are cut out at the end
        for axis, op in stages:
            tensor = self.comms.axis(axis).all_reduce(tensor.contiguous(), op)
        if copies is not None:
            tensor = tensor.contiguous()
            for work in copies.start(tensor, 0, tensor.shape[0]):
                work.wait()
        return tensor


class _Done:
    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def wait(self) -> torch.Tensor:
        return self._tensor
