"""The engine of one model: it issues what can run ahead and waits for what must be there.

    forward begins         hook of the root module: a pass of gathers begins
    backward begins        hook on the root's output (or the first layer that has something to keep): ``arm``
    backward ends          callback of autograd: gradients complete, what kernels have reported raised, passes closed,
                           kept weights dropped
    backward raises        autograd drops the callback, and with it goes what was pending, with a warning

A backward is under way as long as its callback lives. autograd's graph task owns the callback, so after an exception
nothing stays armed, and the inner passes of reentrant checkpointing find the outer pass. Not here: streams of GPUs.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from axo.comm.connect import Communicators
from axo.offload.parameters import home_of
from axo.offload.shards import Shards
from axo.overlap.buckets import Buckets
from axo.overlap.events import Events
from axo.overlap.gathers import BACKWARD, EVALUATION, TRAINING, Gathers, in_backward, owner
from axo.overlap.gradients import Gradients
from axo.overlap.options import Overlap, cache_limits, idle_limit
from axo.overlap.pool import Pool
from axo.overlap.step_check import check_same_inputs, refuse_wrapped
from axo.overlap.zero import Zero
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


class Engine:
    """Runs the overlap of one model; a layer that is in no attached model has one of its own.

    Attributes:
        overlap: The options.
        reduce_dtype: In which gradients are reduced; None: as they come.
        gathers, gradients: Its two halves.
        pool: Buffers.
        zero: What cuts optimizer state over data, if anything does.
        events: The record under way, if any.
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
        self.comms, self.overlap, self.reduce_dtype = comms, overlap, reduce_dtype
        self.zero = Zero(self, zero) if zero and comms.grid.data > 1 else None
        self.pool = Pool(idle_limit(overlap.idle_bytes))
        self.gathers = Gathers(self, *cache_limits(overlap.gather_cache))
        scatter = self.zero is not None and zero == 2
        self.gradients = Gradients(self, Buckets(self, overlap.bucket_bytes, scatter=scatter))
        self.events: Events | None = None
        self.compares_inputs: set[str] = set()
        self.synchronizing = True
        self.holding = self.reducing = False
        self.awaits_backward = False
        self.rooted = self._hinted = False
        self._hooks: tuple[RemovableHandle, ...] = ()
        self._root: weakref.ref[torch.nn.Module] | None = None
        self._end: weakref.ref[_EndOfBackward] | None = None
        self._shards: Shards | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Engine:
        stage = 0 if self.zero is None else self.zero.stage
        new = memo[id(self)] = Engine(self.comms, self.overlap, stage, self.reduce_dtype)
        new.rooted = self.rooted
        copied = memo.get(id(self._root())) if self._root is not None else None
        new._root = None if copied is None else weakref.ref(copied)  # None too where a part of the model is copied
        return new

    def root_at(self, model: torch.nn.Module) -> None:
        """Let the forward passes of ``model`` begin and end passes of this engine."""
        self.rooted, self._root = True, weakref.ref(model)
        self._hooks = (
            model.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            model.register_forward_hook(self._after_forward),
        )

    def uproot(self) -> None:
        """Let go of the model: its layers are about to get other engines."""
        for hook in self._hooks:
            hook.remove()
        self.rooted, self._root, self._hooks = False, None, ()

    def shards_of(self, weight: torch.Tensor) -> Shards | None:
        """The ways between host and device of a weight that was offloaded to the host; None: it was not."""
        if weight.device.type == self.comms.device.type or home_of(owner(weight)) is None:
            return None
        if self._shards is None:
            self._shards = Shards(self.comms.device)
        return self._shards

    def settle(self) -> None:
        """The weights are about to change: let no copy of one be under way."""
        if self._shards is not None:
            self._shards.settle()

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """The parameters of the model as they are now: those of a meta model are made anew when it is filled."""
        root = None if self._root is None else self._root()
        return iter(()) if root is None else root.parameters()

    def _before_forward(self, model: torch.nn.Module, inputs: Any, named: Any) -> None:
        refuse_wrapped(self)
        if self.zero is not None:
            self.zero.restore()
        if not in_backward():
            kind = TRAINING if torch.is_grad_enabled() else EVALUATION
            if kind in self.compares_inputs:
                if not is_on("AXO_CHECK"):
                    self.compares_inputs.discard(kind)
                check_same_inputs(self.comms, _tensors((inputs, named)))
            self.gathers.begin(kind)

    def _after_forward(self, model: torch.nn.Module, inputs: Any, output: Any) -> None:
        if in_backward():
            return
        self.gathers.end()
        if torch.is_grad_enabled():
            self.awaits_backward = True
            for tensor in _tensors(output):
                if tensor.requires_grad:
                    tensor.register_hook(partial(self._on_output_gradient, self.gathers.forward_passes))

    def _on_output_gradient(self, forward_pass: int, grad: torch.Tensor) -> None:
        self.arm(forward_pass)

    def arm(self, forward_pass: int | None = None) -> None:
        """Called in backward: see that its end finishes what is pending.

        Args:
            forward_pass: The number of the forward pass whose output's gradient has come; None: it is not known.
                What nodes keep for backward is of the last forward pass. Backward of another pass, or of an unknown
                one, may not use it.
        """
        armed = self._end is not None and self._end() is not None
        if forward_pass != self.gathers.forward_passes and not (armed and forward_pass is None):
            self.gathers.forget_nodes()
        if armed:
            return
        end = _EndOfBackward(self)
        self._end = weakref.ref(end)
        self.awaits_backward = False
        Variable._execution_engine.queue_callback(end)
        self.gradients.begin()
        if self.zero is not None:
            self.zero.begin_backward()
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
        self._or_drop(self.gradients.start if self.reducing else self.gradients.finish)
        self.gathers.end()
        self._end_of_pass()

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

    @property
    def defers(self) -> bool:
        """Whether gradients stay on this rank, unreduced, and gathered weights are kept for the next micro-batch."""
        return self.holding or not self.synchronizing

    def hold(self) -> None:
        """A pipeline's step begins: keep gradients and gathered weights from one micro-batch to the next.

        What is kept of weights is gathered now, while the stage waits for its first micro-batch.
        """
        if self.holding or self.reducing:  # the last step failed
            self.gradients.deferred.clear()
            self.drop_backward(quiet=True)
        self.holding = self.reducing = False
        self.gradients.begin()
        self.holding = True
        if self.zero is not None:
            self.zero.restore()
        with torch.no_grad():
            self.gathers.begin_step()

    def stop_holding(self) -> None:
        """The last backward pass of the step is next: it issues every reduction as it goes, behind its products."""
        self.holding, self.reducing = False, True

    def start_release(self) -> None:
        """The step's backward passes are over: issue what reductions the last of them has not."""
        self.stop_holding()
        with torch.no_grad():
            self.gradients.start_held()

    def release(self) -> None:
        """What ``start_release`` has issued is to be complete: wait, and give all gradients."""
        self.reducing = False
        self._or_drop(self.gradients.finish)
        self._end_of_pass()

    def drop_backward(self, *, quiet: bool = False) -> None:
        """A backward pass has failed: forget what it left."""
        self._end = None
        self.gathers.drop()
        count = self.gradients.drop()
        if self.zero is not None:
            self.zero.end_backward()
        if count and not quiet:
            warnings.warn(
                f"axo: backward raised with {count} gradients under way; they are dropped, and .grad is not complete",
                RuntimeWarning,
                stacklevel=2,
            )


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, Mapping):
        yield from (tensor for value in output.values() for tensor in _tensors(value))
    elif isinstance(output, list | tuple):
        yield from (tensor for value in output for tensor in _tensors(value))
