"""The middle of the overlap: what a layer asks for, and the engine of one model, which says when it happens.

    layer -> Exchange -> Engine: gathers, gradients -> communicators

    forward begins         hook of the root module: a pass of gathers begins
    a layer's forward      its weight gathered, and those of the next block; its output summed
    backward begins        hook on the root's output, or the first layer that leaves something: ``join_backward``
    a layer's backward     its dI summed behind its dW; its gradients sent on their way
    backward ends          callback of autograd: gradients complete, what kernels have reported raised, passes closed,
                           kept weights dropped
    backward raises        autograd drops the callback, and with it goes what was pending, with a warning

A backward is under way as long as its callback lives. autograd's graph task owns the callback, so after an exception
nothing stays armed, and the inner passes of reentrant checkpointing find the outer pass.

Before an optimizer's step the engine refuses two mistakes that torch passes over: no parameter of the model has a
gradient although the model ran forward in training; and gradients still wait for a backward outside of ``axo.no_sync``.
After a step no weight that was gathered before is used again, since a change may not show in its version
(``p.data.add_(...)``). Not here: streams of GPUs.
"""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial
from typing import Any

import torch
from torch.autograd import Variable
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from axo.comm.connect import Communicators
from axo.optim.checks import OtherParameters, stepped
from axo.optim.step_hooks import around_steps
from axo.optim.zero import Zero
from axo.overlap.autograd import LATER, NOW, graph_task, has_hooks, hows, in_backward
from axo.overlap.checks import check_same_inputs, refuse_wrapped
from axo.overlap.dispatch_modes import dispatch_modes, hidden
from axo.overlap.events import Context, TracedWork, span
from axo.overlap.gathers import BACKWARD, EVALUATION, TRAINING, Gathered, Gathers
from axo.overlap.gradients import GradientBuffer, Gradients, Slot
from axo.overlap.losses import Losses
from axo.overlap.options import Overlap
from axo.overlap.route import Copies, Reduction, Route
from axo.overlap.weight_phase import DeferredProducts, WeightPhase, WeightProduct
from axo.placement import Placement
from axo.quantized import QuantizedWeight, values
from axo.settings import is_on


class _EndOfBackward:
    """What autograd calls at the end of a backward pass, and drops when it fails."""

    __slots__ = ("__weakref__", "_called", "_engine")

    def __init__(self, engine: Engine) -> None:
        self._engine, self._called = engine, False

    def __call__(self) -> None:
        self._called = True
        self._engine.finish_backward()

    def __del__(self) -> None:
        if not self._called:
            self._engine.drop_backward()


class Engine(Context):
    """Runs the overlap of one model; a layer that is in no attached model has one of its own.

    Attributes:
        gathers, gradients: Its two halves.
        zero: What cuts optimizer state over data, if anything does.
        compares_inputs: Kinds of passes (TRAINING, EVALUATION) whose next one compares the model's input over x and y.
        synchronizing: False inside ``axo.no_sync``.
        holding: True from the first micro-batch of a pipeline's step until its gradients are to be reduced.
        reducing: True from then until ``release`` waits for them: what the stage sends must not come after that.
        rooted: This is the engine of a whole model.
        awaits_backward: The last forward pass in training had no backward yet.
    """

    def __init__(
        self, comms: Communicators, overlap: Overlap, zero: int = 0, reduce_dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(comms, overlap, reduce_dtype)
        self.zero = Zero(comms, zero) if zero and comms.grid.data > 1 else None
        self.gathers = Gathers(self)
        self.gradients = Gradients(self, scatters=self.zero is not None and zero == 2)
        self.compares_inputs: set[str] = set()
        self.synchronizing = True
        self.reducing = False
        self.awaits_backward = False
        self.rooted = self._hinted = False
        self._hooks: tuple[RemovableHandle, ...] = ()
        self._root: weakref.ref[torch.nn.Module] | None = None
        self._end: weakref.ref[_EndOfBackward] | None = None  # of the backward pass under way
        self._others = OtherParameters()
        self._losses: Losses | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Engine:
        stage = 0 if self.zero is None else self.zero.stage
        new = memo[id(self)] = Engine(self.comms, self.overlap, stage, self.reduce_dtype)
        new.zero = copy.deepcopy(self.zero, memo)  # what the copied placements name
        copied = memo.get(id(self._root())) if self._root is not None else None
        new._root = None if copied is None else weakref.ref(copied)  # None too where a part of the model is copied
        if self.rooted:
            new._watch_steps()
        return new

    def root_at(self, model: torch.nn.Module) -> None:
        """Let the forward passes of ``model`` begin and end passes of this engine."""
        self._root = weakref.ref(model)
        self._losses = Losses(self._root)
        self._hooks = (
            model.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            model.register_forward_hook(self._after_forward),
        )
        self._watch_steps()

    def uproot(self) -> None:
        """Let go of the model: its layers are about to get other engines."""
        for hook in self._hooks:
            hook.remove()
        self.rooted, self._root, self._losses, self._hooks = False, None, None, ()

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """The parameters of the model as they are now: those of a meta model are made anew when it is filled."""
        root = None if self._root is None else self._root()
        return iter(()) if root is None else root.parameters()

    # --- forward --------------------------------------------------------------------------------------------------

    def _before_forward(self, model: torch.nn.Module, inputs: Any, named: Any) -> None:
        refuse_wrapped(self.parameters)
        if self.zero is not None:
            self.zero.restore()
        if not in_backward():
            kind = TRAINING if torch.is_grad_enabled() else EVALUATION
            if kind in self.compares_inputs:
                if not is_on("AXO_CHECK"):
                    self.compares_inputs.discard(kind)
                check_same_inputs(self.comms, _tensors((inputs, named)))
            self.gathers.begin(kind)
            if self._losses is not None:
                self._losses.begin()

    def _after_forward(self, model: torch.nn.Module, inputs: Any, output: Any) -> None:
        if in_backward():
            return
        self.gathers.end()
        if torch.is_grad_enabled():
            if self._losses is not None:
                self._losses.end()
            self.awaits_backward = True
            for tensor in _tensors(output):
                if tensor.requires_grad:
                    tensor.register_hook(partial(self._on_output_gradient, self.gathers.forward_passes))

    # --- backward -------------------------------------------------------------------------------------------------

    def _on_output_gradient(self, forward_pass: int, grad: torch.Tensor) -> None:
        """Backward has come to an output: what nodes keep is of the last forward pass, and serves no other."""
        if forward_pass != self.gathers.forward_passes:
            self.gathers.forget_nodes()
        if self._end is None or self._end() is None:
            self._begin_backward()

    def join_backward(self) -> None:
        """Called in backward by a layer: see that its end finishes what is pending."""
        if self._end is None or self._end() is None:
            self.gathers.forget_nodes()  # no output has said which forward pass this is of
            self._begin_backward()

    def expect(self, parameter: torch.Tensor) -> None:
        """A gradient comes to ``.grad`` later: see that it does at the end of the backward pass under way, if any is.

        None is in the weight phase of a pipeline's micro-batch.
        """
        if graph_task() != -1:
            if self._end is None or self._end() is None:
                self.join_backward()
            self.gradients.expect(parameter)

    def _begin_backward(self) -> None:
        end = _EndOfBackward(self)
        self._end = weakref.ref(end)
        self.awaits_backward = False
        Variable._execution_engine.queue_callback(end)
        self.gradients.begin()
        if self.zero is not None:
            self.zero.begin_backward(self.parameters())
        if self.rooted:
            self.gathers.begin(BACKWARD)
        elif not self._hinted and self.comms.data_ranks > 1:
            self._hinted = True
            warnings.warn(
                "axo: a layer that is in no attached model hides little of its communication; call"
                " axo.overlap.attach(model, comms) once for a model made by hand",
                UserWarning,
                stacklevel=2,
            )

    def finish_backward(self) -> None:
        """Complete all gradients; nothing of this pass is left, but what a pipeline's step waits for at its end."""
        self._end = None
        self._or_drop(self.gradients.start if self.reducing else self._deliver)
        self.gathers.end()
        self._end_of_pass()

    def _deliver(self) -> None:
        gradients = self.gradients.finish()
        if self.zero is not None:
            self.zero.end_backward(self.parameters())
        self.gradients.deliver(gradients, by_rows=self.zero is not None)

    def _or_drop(self, complete: Callable[[], None]) -> None:
        """Complete gradients; if that fails, forget what the backward pass has left."""
        try:
            with torch.no_grad():
                complete()
            self.comms.poll()
        except BaseException:
            self.drop_backward(quiet=True)
            self.comms.poll()  # a kernel that has given up tells more than the transport: which chunk, of which epoch
            raise

    def _end_of_pass(self) -> None:
        if not self.defers:
            self.gathers.drop()
        if not self.reducing:
            self.pool.end_of_pass()

    def drop_backward(self, *, quiet: bool = False) -> None:
        """A backward pass has failed: forget what it left."""
        self._end = None
        self.gathers.drop()
        count = self.gradients.drop()
        if self.zero is not None:
            self.zero.end_backward(self.parameters())
        if count and not quiet:
            warnings.warn(
                f"axo: backward raised with {count} gradients under way; they are dropped, and .grad is not complete",
                RuntimeWarning,
                stacklevel=2,
            )

    # --- micro-batches --------------------------------------------------------------------------------------------

    def defer(self, *, synchronizing: bool | None = None, holding: bool | None = None) -> None:
        """Say whether gradients are reduced: outside of ``axo.no_sync``, and of a pipeline's step."""
        self.synchronizing = self.synchronizing if synchronizing is None else synchronizing
        self.holding = self.holding if holding is None else holding
        self.defers = self.holding or not self.synchronizing

    def hold(self) -> None:
        """A pipeline's step begins: keep gradients and gathered weights from one micro-batch to the next.

        What is kept of weights is gathered now, while the stage waits for its first micro-batch.
        """
        if self.holding or self.reducing:  # the last step failed
            self.gradients.deferred.clear()
            self.drop_backward(quiet=True)
        self.reducing = False
        self.defer(holding=False)
        self.gradients.begin()
        self.defer(holding=True)
        if self.zero is not None:
            self.zero.restore()
        with torch.no_grad():
            self.gathers.begin_step()

    def stop_holding(self) -> None:
        """The last backward pass of the step is next: it issues every reduction as it goes, behind its products."""
        self.defer(holding=False)
        self.reducing = True

    def start_release(self) -> None:
        """The step's backward passes are over: issue what reductions the last of them has not."""
        self.stop_holding()
        with torch.no_grad():
            self.gradients.start(of_step=True)

    def release(self) -> None:
        """What ``start_release`` has issued is to be complete: wait, and give all gradients."""
        self.reducing = False
        self._or_drop(self._deliver)
        self._end_of_pass()

    # --- steps of optimizers --------------------------------------------------------------------------------------

    def _watch_steps(self) -> None:
        self.rooted = True
        around_steps(self, before=Engine._before_step, update=Engine._before_update, after=Engine._after_step)

    def _before_step(self, optimizer: Optimizer) -> None:
        self.settle()  # some optimizers change weights before they call their closure
        if self.zero is not None:
            self.zero.restore()

    def _before_update(self, optimizer: Optimizer) -> None:
        self.settle()
        self.gradients.forget_zeroed()
        if self.gradients.deferred or self.awaits_backward:
            self._check_gradients(optimizer)
        if self.comms.data_ranks > 1:
            self._others.warn(optimizer, self.parameters())
        if self.zero is not None:
            self.zero.narrow(optimizer)

    def _check_gradients(self, optimizer: Optimizer) -> None:
        mine = {id(parameter) for parameter in self.parameters()}
        updated = [parameter for parameter in stepped(optimizer) if id(parameter) in mine]
        if any(id(parameter) in self.gradients.deferred for parameter in updated):
            raise RuntimeError(
                "step(): gradients of micro-batches inside axo.no_sync wait to be reduced; run the last backward of the"
                " step outside of it"
            )
        if updated and all(parameter.grad is None for parameter in updated):
            raise RuntimeError(
                "step() without backward: the model has run forward, and none of its parameters has a gradient; call"
                " backward on the loss first"
            )

    def _after_step(self, optimizer: Optimizer) -> None:
        if self.zero is not None:
            self.zero.finish_step(self.pool.allocate, self.overlap.bucket_bytes)
        self.gathers.outdate()


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, Mapping):
        yield from (tensor for value in output.values() for tensor in _tensors(value))
    elif isinstance(output, list | tuple):
        yield from (tensor for value in output for tensor in _tensors(value))


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
            recomputes = graph_task() != -1
            if recomputes:
                self.engine.join_backward()
            return self.engine.gathers.forward(
                self, weight, dtype, recomputes=recomputes, recording=recording, wanted=wanted, gather=gather
            )
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
        if axis is None or self.sizes[axis] == 1:
            return tensor
        engine = self.engine
        if engine.events is None and not dispatch_modes():
            return engine.communicators[axis].all_reduce(tensor.contiguous(), op)
        with hidden() as watched, span(engine.events, "wait", "all_reduce", axis, self.name):
            tensor = tensor.clone() if watched else tensor.contiguous()
            return engine.communicators[axis].all_reduce(tensor, op)

    def start_reduce(self, tensor: torch.Tensor, axis: str | None) -> TracedWork:
        """Begin to add up partial sums over ``axis``; ``wait()`` gives them."""
        work = None
        if axis is not None and self.sizes[axis] > 1:
            tensor = tensor.contiguous()
            if self.engine.overlap.all_reduce:
                work = self.engine.communicators[axis].all_reduce(tensor, "sum", async_op=True)
            else:
                tensor = self.reduce(tensor, axis)
        return TracedWork(self.engine, work, tensor, "all_reduce", axis or "", self.name)

    # --- gradients ------------------------------------------------------------------------------------------------

    def hows(self, node: torch.autograd.graph.Node, sum_over: tuple[str, ...] = ()) -> list[str]:
        """What backward wants of the gradients of a layer's input, weight and bias, which are the first of ``node``.

        SKIP, NOW or LATER: see ``axo.overlap.autograd.hows``. What needs no communication is given to autograd.
        """
        wants = hows(node, 0, 3)
        if self.silent and not (sum_over and self.reductions_of(sum_over)):
            wants[1:] = [NOW if want == LATER else want for want in wants[1:]]
        return wants

    def how(self, node: torch.autograd.graph.Node, index: int, sum_over: tuple[str, ...] = ()) -> str:
        """The same of input ``index`` alone, a parameter."""
        (want,) = hows(node, index, index + 1)
        return NOW if want == LATER and self.silent and not self.reductions_of(sum_over) else want

    def gradient(
        self, how: str, parameter: torch.Tensor, product: WeightProduct, behind: DeferredProducts | None = None
    ) -> torch.Tensor | None:
        """The gradient of ``parameter``, by ``product``; None: it comes to .grad later.

        Where the backward pass under way is the input phase of two, the product runs in the weight phase; else with
        ``behind``, if there is one.
        """
        if self.weight_phase is not None and (how == LATER or not self.vector_reductions):
            if self.weight_phase.take(parameter, product):
                return None
        if behind is None or (how != LATER and has_hooks(parameter)):  # autograd would run them with None
            return product()
        if how == LATER:
            self.engine.expect(parameter)
        behind.append((parameter, product))
        return None

    def gradient_buffer(
        self, how: str, weight: torch.Tensor, columns: int, like: torch.Tensor, *, scattered: bool = False
    ) -> tuple[GradientBuffer, torch.Tensor]:
        """Memory for the gradient of the block: what to pass to ``weight_gradient``, and the block to fill.

        ``scattered``: for this rank's rows of it, which the product itself reduces over z.
        """
        into: GradientBuffer
        if how == LATER:
            into = self.engine.gradients.buffer(self, weight, columns, like, scattered=scattered)
        else:
            into = like.new_empty((self.shard_rows if scattered else self.padded_rows, columns))
        buffer = into.tensor if isinstance(into, Slot) else into
        if scattered or self.padded_rows == self.block_rows:
            return into, buffer
        buffer[self.block_rows :].zero_()
        return into, buffer[: self.block_rows]

    def kept_block(self, how: str, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
        """The fp32 sum of this block's gradients that a product of ``dtype`` may be added to as it is computed.

        None where the product is to be reduced, given to autograd, or is the first of its sum.
        """
        kept = self.engine.gradients.kept_block(weight, dtype) if how == LATER else None
        return None if kept is None else kept[: self.block_rows]

    def weight_gradient(
        self, how: str, weight: torch.Tensor, into: GradientBuffer, *, scattered: bool = False
    ) -> torch.Tensor | None:
        """Reduce the gradient of the block, in what ``gradient_buffer`` gave; None: it comes to .grad later."""
        if how == LATER:
            self.engine.expect(weight)
            self.engine.gradients.add_weight(self, weight, into)
            return None
        assert isinstance(into, torch.Tensor)
        grad = self.engine.gradients.cast(into)
        if self.shards > 1 and not scattered:
            grad = self.engine.communicators[self.shard_axis].reduce_scatter(grad, op=self.op)
        grad = self._now(grad, self.weight_reductions, self.weight_copies)
        return grad[: self.shard_rows].to(weight).view(weight.shape)

    def leaves_whole(self) -> bool:
        """Whether a gradient of the weight that autograd wants now is complete as its product gives it."""
        return self.alone and self.engine.reduce_dtype is None

    def waits_for_scatter(self, how: str, weight: torch.Tensor) -> bool:
        """Whether the layer would wait for the reduce-scatter of this gradient where it issues it."""
        if self.shards == 1 or self.engine.reduce_dtype is not None:  # the product reduces in its own dtype
            return False
        return how == NOW or (not self.engine.overlap.reduce_scatter and self.engine.gradients.takes_shard_of(weight))

    def vector_gradient(
        self, how: str, parameter: torch.Tensor, grad: torch.Tensor, sum_over: tuple[str, ...] = ()
    ) -> torch.Tensor | None:
        """Reduce the gradient of what z and data replicate; None when it comes to .grad later.

        ``sum_over`` names axes whose ranks hold partial sums, whatever ``grad_reduce`` says.
        """
        reductions = self.reductions_of(sum_over) if sum_over else self.vector_reductions
        if how == LATER:
            self.engine.expect(parameter)
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
                self.engine.join_backward()  # the gradient goes to autograd whole: its rows are cut out at the end
        for axis, op in reductions:
            tensor = self.engine.communicators[axis].all_reduce(tensor.contiguous(), op)
        if copies is not None:
            tensor = tensor.contiguous()
            for work in copies.start(tensor, 0, tensor.shape[0]):
                work.wait()
        return tensor
