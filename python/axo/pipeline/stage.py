"""One stage of a pipeline on a grid, for the schedules of ``torch.distributed.pipelining``.

    stage = axo.pipeline.Stage(module, comms, input_args=hidden, output_args=hidden)
    schedule = Schedule1F1B(stage, 8, loss_fn=loss, scale_grads=False)

What torch's own stage does otherwise, or cannot do:

    shapes       are given; nothing is run to find them out
    gradients    of the micro-batches of a step are added up on the rank and reduced once: behind the last backward
                 pass, or after it where that is split in two phases. A rank waits for that when all its stages are
                 done, so neither a message nor another stage's backward pass waits behind it
    weights      that z cuts are gathered once a step, as far as the gather cache has room
    rows         of a step that the micro-batches do not divide: the first have one more, as torch cuts them
    two phases   (zero bubble) the input phase runs the graph once and puts the products for weights off; the weight
                 phase computes these and nothing else: no collective, no recomputation, no product twice
    scale        ``.grad`` is never divided: ``scale_grads=True`` would divide what earlier steps have accumulated again

Messages travel between ranks that stand in the same place of their grids (``comms.pipeline_group``).

Not here: cutting a model (``axo.pipeline.cut``), schedules by name (``axo.pipeline.schedule``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage

from axo.comm.connect import Communicators
from axo.overlap.model import engines, exchanges
from axo.overlap.weight_phase import DeferredProducts, WeightPhase

Tensors = torch.Tensor | tuple[torch.Tensor, ...]


class Stage(PipelineStage):
    """A stage of a pipeline. Every rank of the grid makes its own.

    Args:
        submodule: What this stage computes; its layers are parallel over the stage's grid, or plain on one rank.
        comms: What ``axo.connect(grid, pipeline=...)`` returned.
        input_args, output_args: One micro-batch's inputs and outputs on this rank: tensors that have their shapes and
            dtypes, on the meta device for example. What the first stage takes in only has to have the right number.
        index: Which stage this is; default: ``comms.stage``.
        num_stages: How many there are; default: ``comms.stages``. A multiple of it: several stages on a rank.
        forward_context: Entered around each forward pass, such as ``partial(torch.autocast, "cpu", torch.bfloat16)``.

    Attributes:
        weight_phase: Where a layer of your own puts the product for its weight off (``WeightPhase.take``).
        of_rank: All stages of this rank, where a schedule has several.

    Raises:
        ValueError: ``index`` is not of ``num_stages``, or these are not a multiple of ``comms.stages``.
    """

    def __init__(
        self,
        submodule: nn.Module,
        comms: Communicators,
        input_args: Tensors,
        output_args: Tensors,
        *,
        index: int | None = None,
        num_stages: int | None = None,
        forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        index = comms.stage if index is None else index
        count = comms.stages if num_stages is None else num_stages
        if count < 1 or count % comms.stages or not 0 <= index < count:
            raise ValueError(
                f"pipeline: stage {index} of {count} on pipeline={comms.stages} does not fit; use a multiple of"
                f" {comms.stages} stages, and an index below it"
            )
        self.weight_phase = WeightPhase()
        self._work: DeferredProducts = []
        self._forward_context = forward_context
        inputs, outputs = _differentiable(input_args, index > 0), _differentiable(output_args, True)
        self.rows = inputs[0].shape[0]
        self._all_rows = all(tuple(one.shape)[:1] == (self.rows,) for one in (*inputs, *outputs))
        self._given = [(tuple(one.shape), one.dtype) for one in outputs]
        super().__init__(
            submodule,
            index,
            count,
            comms.device,
            inputs,
            outputs,
            group=comms.pipeline_group,
            dw_builder=self._take_work,
        )
        self.comms = comms
        self._engines = engines(submodule)
        self.of_rank: list[Stage] = [self]
        self._is_over = False
        self._sizes: list[int] = []

    def announce_rows(self, sizes: list[int]) -> None:
        """Say how many rows each micro-batch of a step has; nothing: as many as ``input_args``.

        Raises:
            ValueError: An input or output has another first dim than rows.
        """
        if sizes and not self._all_rows:
            raise ValueError(
                f"pipeline: micro-batches of {sizes} rows want inputs and outputs whose first dim are the {self.rows}"
                " rows; use a number of micro-batches that divides the rows"
            )
        self._sizes = sizes

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._prepare_forward_infra(*args, **kwargs)
        self._shorten(self.args_recv_info)
        return result

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._prepare_backward_infra(*args, **kwargs)
        self._shorten(self.grad_recv_info)
        return result

    def _shorten(self, received: dict[int, tuple[Any, ...]]) -> None:
        """Let each micro-batch's messages have its rows; torch makes room for those of the largest."""
        for rows, infos in zip(self._sizes, received.values(), strict=False):
            for info in infos:
                if getattr(info, "buffer", None) is not None:
                    info.buffer = info.buffer[:rows]
                elif getattr(info, "tensor_meta", None) is not None:  # from torch 2.15 on room is made by it, later
                    meta = info.tensor_meta
                    info.tensor_meta = dataclasses.replace(meta, shape=torch.Size((rows, *meta.shape[1:])))

    # torch before 2.13 compares every micro-batch with the largest; ``forward_maybe_with_nosync`` knows its rows.
    def _validate_fwd_input(self, args: Any, kwargs: Any) -> None:
        if not self._sizes:
            super()._validate_fwd_input(args, kwargs)  # type: ignore[misc]

    def _validate_fwd_outputs(self, outputs: Any) -> None:
        if not self._sizes:
            super()._validate_fwd_outputs(outputs)  # type: ignore[misc]

    def split_backward(self) -> None:
        """Let the layers put their weights' products off where a schedule has two backward phases.

        Called by the first backward pass that is split; a graph that was built before does not know of it.
        """
        for _, exchange in exchanges(self.submod):
            exchange.weight_phase = self.weight_phase

    def clear_runtime_states(self) -> None:
        """A step of a schedule begins."""
        super().clear_runtime_states()
        self.backward_state.clear()  # of a step that failed
        self.dw_runner.clear()
        self._is_over = False
        if self.has_backward:
            for engine in self._engines:
                engine.hold()

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """Run one micro-batch forward.

        Raises:
            ValueError: The output is not what ``output_args`` said, and would not fit where it is received.
        """
        with self._forward_context():
            output = self.submod(*args, **kwargs)
        if self.is_last:
            return output
        outputs = output if isinstance(output, tuple) else (output,)
        got = [(tuple(one.shape), one.dtype) for one in outputs]
        given = self._given
        if self._sizes:
            given = [((args[0].shape[0], *shape[1:]), dtype) for shape, dtype in given]
        if got != given:
            raise ValueError(
                f"pipeline: stage {self.stage_index} gives {_shown(got)} and output_args said {_shown(given)};"
                " every micro-batch must have as many rows and tokens as that, in that dtype"
            )
        whole = tuple(one.contiguous() for one in outputs)  # a message is contiguous
        return whole if isinstance(output, tuple) else whole[0]

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Run one micro-batch backward: all of it, or its input phase."""
        if not full_backward:
            self.split_backward()
            with self.weight_phase.opened() as self._work:
                super().backward_one_chunk(bwd_chunk_id, loss, False, last_backward)
            return
        if last_backward:
            for engine in self._engines:
                engine.stop_holding()
        super().backward_one_chunk(bwd_chunk_id, loss, True, last_backward)

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[tuple[torch.Tensor | None, ...], list[dict[str, Any]] | None]:
        """Run the graph of one micro-batch backward; gradients of inputs come as messages, contiguous."""
        grads, groups = super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        if self._sizes:  # else torch sends zeros of the largest micro-batch for what has no gradient
            pairs = zip(grads, bwd_kwargs["input_values"], strict=True)
            grads = tuple(torch.zeros_like(x) if grad is None and x.requires_grad else grad for grad, x in pairs)
        return tuple(None if grad is None else grad.contiguous() for grad in grads), groups

    def _take_work(self) -> Callable[[], None]:
        """What torch's stage asks for after a backward pass: the rest of it, which is what was put off."""
        work, self._work = self._work, []
        return lambda: WeightPhase.run(work)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """The step's backward passes of this stage are over: complete ``.grad``, with the rank's last stage for all.

        Raises:
            ValueError: The schedule was made with ``scale_grads=True``.
        """
        if grad_scale_factor != 1:
            raise ValueError(
                "pipeline: scale_grads=True divides .grad at the end of every step, what earlier steps have accumulated"
                " too; give the schedule scale_grads=False, and a loss that counts 1 / micro-batches"
            )
        for engine in self._engines:
            engine.start_release()
        self._is_over = True
        if all(stage._is_over for stage in self.of_rank):
            for stage in self.of_rank:
                for engine in stage._engines:
                    engine.release()

    def scale_grads(self, grad_scale_factor: int) -> None:
        """What torch's schedules that have no such end of a stage's step call in its place."""
        self.perform_reduce_grad(grad_scale_factor)


def _shown(tensors: list[tuple[tuple[int, ...], torch.dtype]]) -> str:
    return ", ".join(f"{shape} {dtype}" for shape, dtype in tensors)


def _differentiable(tensors: Tensors, wanted: bool) -> tuple[torch.Tensor, ...]:
    given = tensors if isinstance(tensors, tuple) else (tensors,)
    return tuple(
        torch.empty(one.shape, dtype=one.dtype, device="meta", requires_grad=wanted and one.is_floating_point())
        for one in given
    )
