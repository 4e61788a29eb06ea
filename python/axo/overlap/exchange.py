"""What a layer asks for: its weight gathered, its sums added up over an axis, its gradients reduced.

    layer -> Exchange -> Engine (gathers, gradients, pool) -> communicators

What goes over which axis is in ``axo.overlap.route``; when things are issued and awaited is the engine's business. A
layer that is in no attached model has an engine of its own, made when it first needs one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Protocol

import torch

from axo.comm.connect import Communicators
from axo.overlap import gradients as wants
from axo.overlap.buckets import Slot
from axo.overlap.dispatch_modes import dispatch_modes, hidden
from axo.overlap.engine import Engine
from axo.overlap.events import TracedWork, span
from axo.overlap.gathers import Gathered
from axo.overlap.gradients import GradientBuffer
from axo.overlap.options import Overlap
from axo.overlap.quantized import QuantizedWeight, values
from axo.overlap.route import Copies, Reduction, Route
from axo.overlap.weight_phase import WeightPhase, WeightProduct
from axo.placement import Placement


class Sum(Protocol):
    """A sum over ranks on its way."""

    def wait(self) -> torch.Tensor:
        """The sum, complete."""


class PutsOff(Protocol):
    """What runs the product of a weight's gradient when there is something to hide behind it."""

    def put_off(self, weight: torch.Tensor, product: WeightProduct) -> None: ...


class Exchange(Route):
    """The collectives of one layer.

    Args:
        comms, placement, grad_reduce: As for :class:`Route`.
        overlap: Options of an engine of this layer's own; ``axo.overlap.attach`` gives it that of the whole model.
    """

    def __init__(
        self,
        comms: Communicators,
        placement: Placement,
        grad_reduce: str = "mean",
        overlap: Overlap | None = None,
    ) -> None:
        super().__init__(comms, placement, grad_reduce)
        self.overlap = overlap or Overlap(bucket_bytes=0)
        self.weight_phase: WeightPhase | None = None  # where backward passes are split in two phases

    @cached_property
    def engine(self) -> Engine:
        """The engine that runs this layer."""
        return Engine(self.comms, self.overlap)

    def join(self, engine: Engine, name: str, together: str) -> None:
        """Become part of a model: its engine runs this layer from here on."""
        self.engine, self.overlap, self.name, self.together = engine, engine.overlap, name, together

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
        if self.shards > 1:
            return self.engine.gathers.forward(self, weight, dtype, recording=recording, wanted=wanted, gather=gather)
        block = self._cast(weight, dtype)
        keeps = wanted and self.engine.overlap.gather_cache != "none" and not isinstance(weight, QuantizedWeight)
        return block, Gathered(weight, dtype, block, None) if keeps else None

    def backward_block(self, held: Gathered | None, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The block for a product of backward; ``held`` is what ``forward_block`` gave."""
        if self.shards > 1:
            return self.engine.gathers.backward(self, held, weight, dtype)
        return self._cast(weight, dtype) if held is None else held.wait()

    def _cast(self, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The block in ``dtype``, where z does not cut it: in memory that is used again each step."""
        block = values(weight)
        if block.dim() != 2:
            block = block.flatten(1)
        if block.dtype is dtype or torch.compiler.is_compiling():
            return block.to(dtype)
        with hidden():
            return self.engine.pool.allocate(tuple(block.shape), dtype, block.device).copy_(block)

    def release_block(self) -> None:
        """The product of backward is done with the block."""
        if self.shards > 1:
            self.engine.gathers.release(self)

    def waits_for_gather(self) -> bool:
        """Whether the layer would wait for the gather of its weight: the engine issues none ahead."""
        return self.shards > 1 and not self.engine.gathers.looks_ahead

    def shard(self, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """This rank's rows as they travel, where shares are equal: (rows/Gz, ...) -> (rows/Gz, c), contiguous."""
        whole = values(weight).flatten(1)
        if self.engine.shards_of(weight) is not None:
            whole = whole.to(self.comms.device, non_blocking=True)
        return whole.to(dtype).contiguous()

    # --- activations ----------------------------------------------------------------------------------------------

    def reduce(self, tensor: torch.Tensor, axis: str | None, op: str = "sum") -> torch.Tensor:
        """All-reduce ``tensor`` over ``axis``, in place where it is contiguous and nobody keeps it."""
        if axis is None or self.size(axis) == 1:
            return tensor
        if self.engine.events is None and not dispatch_modes():
            return self.comms.axis(axis).all_reduce(tensor.contiguous(), op)
        with hidden() as watched, span(self.engine.events, "wait", "all_reduce", axis, self.name):
            tensor = tensor.clone() if watched else tensor.contiguous()
            return self.comms.axis(axis).all_reduce(tensor, op)

    def start_reduce(self, tensor: torch.Tensor, axis: str | None) -> Sum:
        """Begin to add up partial sums over ``axis``; ``wait()`` gives them."""
        if axis is None or self.size(axis) == 1:
            return Completed(tensor)
        tensor = tensor.contiguous()
        if not self.engine.overlap.all_reduce:
            return Completed(self.reduce(tensor, axis))
        work = self.comms.axis(axis).all_reduce(tensor, "sum", async_op=True)
        return TracedWork(self.engine, work, tensor, "all_reduce", axis, self.name)

    # --- gradients ------------------------------------------------------------------------------------------------

    def how(self, node: torch.autograd.graph.Node, index: int, sum_over: tuple[str, ...] = ()) -> str:
        """What backward wants of the gradient of input ``index``: see ``axo.overlap.gradients.how``.

        What needs no communication at all is given to autograd.
        """
        found = wants.how(node, index)
        silent = self.silent and not self.reductions_of(sum_over)
        return wants.NOW if found == wants.LATER and silent else found

    def hows(self, node: torch.autograd.graph.Node, sum_over: tuple[str, ...] = ()) -> list[str]:
        """What backward wants of the gradients of a layer's input, weight and bias, which are the first of ``node``."""
        found = wants.hows(node, 3)
        if self.silent and not self.reductions_of(sum_over):
            found[1:] = (wants.NOW if each == wants.LATER else each for each in found[1:])
        return found

    def gradient(
        self, how: str, parameter: torch.Tensor, product: WeightProduct, behind: PutsOff | None = None
    ) -> torch.Tensor | None:
        """The gradient of ``parameter``, by ``product``; None: it comes to .grad later.

        Where the backward pass under way is the input phase of two, the product runs in the weight phase; else
        ``behind`` runs it, if there is one.
        """
        if self.weight_phase is not None and (how == wants.LATER or not self.vector_reductions):
            if self.weight_phase.take(parameter, product):
                return None
        if behind is None or (how != wants.LATER and wants.has_hooks(parameter)):  # autograd would run them with None
            return product()
        if how == wants.LATER:
            self.engine.gradients.expect(parameter)
        behind.put_off(parameter, product)
        return None

    def gradient_buffer(
        self, how: str, weight: torch.Tensor, columns: int, like: torch.Tensor
    ) -> tuple[GradientBuffer, torch.Tensor]:
        """Memory for the gradient of the block: what to pass to ``weight_gradient``, and the block to fill."""
        into: GradientBuffer = (
            like.new_empty((self.padded_rows, columns))
            if how != wants.LATER
            else self.engine.gradients.gradient_buffer(self, weight, columns, like)
        )
        buffer = into.tensor if isinstance(into, Slot) else into
        if self.padded_rows == self.block_rows:
            return into, buffer
        buffer[self.block_rows :].zero_()
        return into, buffer[: self.block_rows]

    def kept_block(self, how: str, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
        """The fp32 sum of this block's gradients that a product of ``dtype`` may be added to as it is computed.

        None where the product is to be reduced, given to autograd, or is the first of its sum.
        """
        kept = self.engine.gradients.kept_block(weight, dtype) if how == wants.LATER else None
        return None if kept is None else kept[: self.block_rows]

    def weight_gradient(self, how: str, weight: torch.Tensor, into: GradientBuffer) -> torch.Tensor | None:
        """Reduce the gradient of the block, in what ``gradient_buffer`` gave; None: it comes to .grad later."""
        if how == wants.LATER:
            self.engine.gradients.add_weight(self, weight, into)
            return None
        assert isinstance(into, torch.Tensor)
        grad = self.engine.gradients.cast(into)
        if self.shard_axis is not None and self.shards > 1:
            grad = self.comms.axis(self.shard_axis).reduce_scatter(grad, op=self.op)
        grad = self._now(grad, self.weight_reductions, self.weight_copies)
        return grad[: self.shard_rows].to(weight).view(weight.shape)

    def leaves_whole(self, how: str) -> bool:
        """Whether a gradient of the weight that autograd wants now is complete as its product gives it."""
        return how == wants.NOW and self.alone and self.engine.reduce_dtype is None

    def waits_for_scatter(self, how: str, weight: torch.Tensor) -> bool:
        """Whether the layer would wait for the reduce-scatter of this gradient where it issues it."""
        if self.shards == 1 or self.engine.reduce_dtype is not None:  # the product reduces in its own dtype
            return False
        return how == wants.NOW or (
            not self.engine.overlap.reduce_scatter and self.engine.gradients.takes_shard_of(weight)
        )

    def shard_buffer(
        self, how: str, weight: torch.Tensor, columns: int, like: torch.Tensor
    ) -> tuple[GradientBuffer, torch.Tensor]:
        """Memory for this rank's rows of a gradient that is reduced over z already: as ``gradient_buffer``."""
        if how == wants.LATER:
            slot = self.engine.gradients.shard_buffer(self, weight, columns, like)
            return slot, slot.tensor
        shard = like.new_empty((self.shard_rows, columns))
        return shard, shard

    def shard_gradient(self, weight: torch.Tensor, into: GradientBuffer) -> torch.Tensor | None:
        """What ``shard_buffer`` gave is filled: reduce it over data; None: it comes to .grad later."""
        if isinstance(into, Slot):
            self.engine.gradients.add_shard(self, into)
            return None
        return self._now(into, self.weight_reductions, self.weight_copies).to(weight).view(weight.shape)

    def vector_gradient(
        self, how: str, parameter: torch.Tensor, grad: torch.Tensor, sum_over: tuple[str, ...] = ()
    ) -> torch.Tensor | None:
        """Reduce the gradient of what z and data replicate; None when it comes to .grad later.

        ``sum_over`` names axes whose ranks hold partial sums, whatever ``grad_reduce`` says.
        """
        reductions = self.reductions_of(sum_over)
        if how == wants.LATER:
            self.engine.gradients.add_vector(self, parameter, grad, reductions)
            return None
        cast = self.engine.gradients.cast(grad)
        return self._now(cast, reductions, self.vector_copies).to(parameter.dtype)

    def reduce_now(self, grad: torch.Tensor) -> torch.Tensor:
        """Reduce the gradient of what z and data replicate, in place, on the spot."""
        return self._now(self.engine.gradients.cast(grad), self.vector_reductions, self.vector_copies).to(grad.dtype)

    def _now(self, tensor: torch.Tensor, reductions: tuple[Reduction, ...], copies: Copies | None) -> torch.Tensor:
        if reductions:
            self.engine.gradients.buckets.drain()
            if self.engine.zero is not None and self.engine.zero.stage == 2:
                self.engine.arm()  # the gradient goes to autograd whole: its rows are cut out at the end
        for axis, op in reductions:
            tensor = self.comms.axis(axis).all_reduce(tensor.contiguous(), op)
        if copies is not None:
            tensor = tensor.contiguous()
            for work in copies.start(tensor, 0, tensor.shape[0]):
                work.wait()
        return tensor


class Completed:
    """A sum, or a block, that is there already."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def wait(self) -> torch.Tensor:
        return self._tensor
