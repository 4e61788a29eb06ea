"""AxoStrategy as LitGPT's training commands need it.

LitGPT takes each device for a data rank, so the strategy counts those. And LitGPT counts a run in micro-batches of a
data rank (``iter_num``), by which it ends the run, sets the learning rate and finds its place in finetuning's data.
That number means other samples on another number of data ranks; so a checkpoint says how many samples an iteration was,
and whoever goes on counts them in iterations of its own:

    iter_num = iter_num of the checkpoint * samples an iteration then / samples an iteration now

Checkpoints of LitGPT's own say so in the ``hyperparameters.yaml`` beside them.

``vocab_loss`` goes further here, where the loop is known: in training the model gives what its head takes, and the loss
makes the logits of a few rows at a time (``axo.nn.linear_cross_entropy``). Where the head cannot (Tesseract, fp16 with
a scaler, torch.compile) logits are split over x.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning.fabric.utilities.data import has_iterable_dataset
from lightning.fabric.wrappers import _unwrap_objects
from torch import nn

from axo.checkpoint import Save
from axo.checkpoint.mirrors import Mirrors
from axo.integrations.fabric import sharded_checkpoint
from axo.integrations.fabric.loader import SharedLoader, split_in_order
from axo.integrations.fabric.strategy import AxoStrategy
from axo.integrations.litgpt.options import Options
from axo.integrations.litgpt.parsing import read_yaml
from axo.nn.linear_loss import linear_cross_entropy, misfit, without_head
from axo.offload import Offload
from axo.perf import cut
from axo.plans.context import has_whole_sequences

_SAMPLES = "samples_per_iteration"


class LitGPTStrategy(AxoStrategy):
    """A strategy that counts data ranks; arguments are those of :class:`AxoStrategy`.

    Attributes:
        train: ``litgpt.args.TrainArgs`` of the run, once they are known.
        module: The model that was split last.
        streams: Whether a loader reads a stream, of which a data rank may have more batches than another.
        stands_in: Whether the batch that was read last has no sample of its own: it belongs in no mean.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, counts="data", **options)
        self.train: Any = None
        self.module: nn.Module | None = None
        self.after_setup: Callable[[nn.Module], None] | None = None  # for the next model, once split
        self.stands_in = self.streams = False

    @property
    def shifts_labels(self) -> bool:
        """Whether LitGPT's loop does so, of rows whose tokens lie on several ranks."""
        return self.context > 1 and self.like_one_device

    def setup_module(self, module: nn.Module) -> nn.Module:  # type: ignore[override]
        module = self.module = super().setup_module(module)
        if self._stages is None and (self.vocab_loss or self.shifts_labels):
            module.forward = functools.partial(self._forward, module.forward, module)  # type: ignore[method-assign]
        if self.after_setup is not None:
            self.after_setup(module)
            self.after_setup = None
        return module

    @property
    def _chunks_loss(self) -> bool:
        """Whether the loss makes the logits."""
        can = getattr(self.precision, "scaler", None) is None and torch._dynamo.config.disable
        return self.vocab_loss and can and not misfit(getattr(self.module, "lm_head", None))

    def _forward(
        self, plain: Callable[..., Any], model: Any, *args: Any, lm_head_chunk_size: int = 0, **options: Any
    ) -> Any:
        """The model's forward pass; in a context finetuning, which shifts labels itself, gets a token more to drop."""
        if self._chunks_loss and model.training and torch.is_grad_enabled():
            with without_head(model):
                output = plain(*args, **options).as_subclass(_HeadInput)
            output = [output] if lm_head_chunk_size else output
        else:
            output = plain(*args, lm_head_chunk_size=lm_head_chunk_size, **options)
        if self.shifts_labels and not has_whole_sequences(args, options):
            more = output[-1][:, :1] if lm_head_chunk_size else None
            output = F.pad(output, (0, 0, 0, 1)) if more is None else [*output, more]
        return output

    @contextmanager
    def _forward_context(self) -> Iterator[None]:
        stages: Any = self._stages
        parts = (self.module, *stages.modules)
        with super()._forward_context(), without_head(*parts) if self._chunks_loss else nullcontext():
            yield

    def cross_entropy(
        self, logits: Any, targets: torch.Tensor, chunk_size: int = 128, ignore_index: int = -100
    ) -> torch.Tensor:
        """As in AxoStrategy; in training ``logits`` may be what the head takes."""
        rows = logits[0] if isinstance(logits, list) else logits
        if not isinstance(rows, _HeadInput):
            return super().cross_entropy(logits, targets, chunk_size, ignore_index)
        return self._summed(rows, targets, ignore_index) / (targets != ignore_index).sum().clamp(min=1)

    def _summed(self, logits: torch.Tensor, targets: torch.Tensor, ignore_index: int) -> torch.Tensor:
        if not isinstance(logits, _HeadInput) and (self._stages is None or not self._chunks_loss):
            return super()._summed(logits, targets, ignore_index)
        model: Any = self.module
        rows = self.precision.convert_input(logits.as_subclass(torch.Tensor))
        with super()._forward_context():
            return linear_cross_entropy(
                rows, model.lm_head, targets, reduction="sum", ignore_index=ignore_index,
                softcap=model.config.final_logit_softcapping,
            )  # fmt: skip

    @property
    def distributed_sampler_kwargs(self) -> Any:
        return None  # Fabric keeps the sampler: batches are those of one device

    def process_dataloader(self, dataloader: Any) -> Any:
        self._check_launched("setup_dataloaders")
        self.streams |= has_iterable_dataset(dataloader)
        return SharedLoader(
            split_in_order(dataloader, self.comms, stand_ins=True),
            self.comms,
            functools.partial(setattr, self, "stands_in"),
        )

    def save_checkpoint(self, path: Any, state: dict[str, Any], *args: Any, **options: Any) -> None:
        super().save_checkpoint(path, self._counted(state), *args, **options)

    def begin_copy(self, state: dict[str, Any], folder: Path, mirrors: Mirrors | None) -> Save:
        """Begin a copy of a run's state in ``folder`` (``sharded_checkpoint``)."""
        counted = self._counted(_unwrap_objects(state))
        return sharded_checkpoint.begin_copy(folder, counted, self.comms, int(state["step_count"]), mirrors=mirrors)

    def _counted(self, state: dict[str, Any]) -> dict[str, Any]:
        return {**state, _SAMPLES: self._samples()} if "iter_num" in state else state

    def load_checkpoint(self, path: Any, state: Any = None, *args: Any, **options: Any) -> dict[str, Any]:
        """As in AxoStrategy; counts what was trained in iterations of this run.

        Raises:
            ValueError: The checkpoint does not say how many samples an iteration was, or they are no whole number of
                iterations now.
        """
        rest = super().load_checkpoint(path, state, *args, **options)
        if isinstance(state, dict) and "iter_num" in state and self.train is not None:
            then = rest.pop(_SAMPLES, None) or _samples_of_stock(Path(path).parent)
            state["iter_num"] = self._iterations(path, state, then)
        return rest

    def _agree(self) -> None:
        super()._agree()
        if self.step_agreement is not None and self.step_agreement.stop:
            self.train.save_interval = 1  # the loop saves after this step, and before the next one it ends

    def _samples(self) -> int:
        return self.train.micro_batch_size * self.row_parts

    def _iterations(self, path: Any, state: dict[str, Any], then: int | None) -> int:
        done, each = int(state["iter_num"]), self._samples()
        if then is None:
            if done == state["step_count"] * self.train.gradient_accumulation_iters(self.row_parts):
                return done
            raise ValueError(
                f"litgpt: {path} was saved after {done} iterations and {state['step_count']} steps and does not say how"
                " many samples an iteration was; go on with the batch sizes and the number of devices of that run"
            )
        iterations, left = divmod(done * then, each)
        if left:
            raise ValueError(
                f"litgpt: {path} was saved after {done * then} samples, which are no whole number of iterations of"
                f" {each} samples (micro_batch_size={self.train.micro_batch_size} on {self.row_parts} data ranks);"
                " change --train.micro_batch_size or the grid"
            )
        return iterations


class _HeadInput(torch.Tensor):
    """What the head takes, in the place of its logits: ``(rows, tokens, h/Gy)``."""


def strategy_of(options: Options, **more: Any) -> LitGPTStrategy:
    """The strategy that is asked for, with ``more`` arguments of it.

    Raises:
        ValueError: The strategy refuses them.
    """
    return LitGPTStrategy(
        options.grid,
        algorithm=options.algorithm,
        context=options.context,
        context_kind=options.context_kind,
        sharded=options.sharded,
        vocab_loss=options.vocab_loss,
        pipeline=options.pipeline,
        schedule=options.schedule or "1f1b",
        cuts=cut.read(options.cuts or "even"),
        microbatches=options.microbatches or None,
        offload=None if options.offload == "none" else Offload.parse(options.offload, options.offload_dir or None),
        timeout=timedelta(seconds=options.operation_timeout),
        **more,
    )


def _samples_of_stock(folder: Path) -> int | None:
    """Samples an iteration of the run that LitGPT describes in ``folder``; None: it does not say how many devices."""
    file = folder / "hyperparameters.yaml"
    if not file.is_file():
        return None
    said = read_yaml(file)
    said = said if isinstance(said, dict) else {}
    train = said.get("train")
    counts = (
        said.get("devices"),
        said.get("num_nodes", 1),
        train.get("micro_batch_size") if isinstance(train, dict) else None,
    )
    return math.prod(counts) if all(isinstance(count, int) for count in counts) else None
