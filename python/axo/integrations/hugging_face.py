"""Hugging Face's Trainer, and accelerate's Accelerator, on a 4D grid.

    from axo.integrations.hugging_face import on_grid

    trainer = on_grid(Trainer(model=model, args=arguments, train_dataset=data), "2x1x2x1")      # any subclass too
    trainer.train()

    accelerator = on_grid(Accelerator(), "2x1x2x1")
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

torchrun starts the ranks (``torchrun --nproc-per-node 4 train.py``). The object becomes an instance of a subclass that
is made for it, in which

    batches              are of data ranks (Gz*Gdata): peers on x and y get the same, as for tensor parallelism
    models               are split by ``axo.parallelize``, optimizers made before take the new parameters
    clipping             torch's function, which sees through parallel layers
    accumulation         ``axo.no_sync``
    gather, reduce       count each data rank once
    losses that it logs  stand beside figures of all ranks (``axo.integrations.fabric.figures``), tokens per second too
                         with ``include_num_input_tokens_seen``
    save_model           writes what ``from_pretrained`` reads, by all ranks together
    checkpoints          hold a folder ``axo`` with the model and the optimizer, which any grid loads

Data is read by every rank, so peers on x and y must draw the same random numbers in it, as those of one seed do.

Not here: fp16 with loss scaling (bf16 works), DeepSpeed and FSDP plugins, optimizer states of a checkpoint that was
written without a grid.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import torch
from accelerate import Accelerator, PartialState, data_loader, scheduler
from accelerate.data_loader import DataLoaderDispatcher
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import DistributedType, operations, recursively_apply
from torch import nn

import axo
from axo.checkpoint.ranks import checkpoint_group, share
from axo.comm.agree import all_call, ranks_that_differ
from axo.comm.connect import Communicators
from axo.grid import Grid
from axo.integrations import data_ranks
from axo.integrations.fabric.figures import Figures
from axo.nn.layer import is_parallel, refuse_context

FOLDER = "axo"  # of a checkpoint
_Object = TypeVar("_Object")


def on_grid(
    owner: _Object,
    grid: Grid | str,
    *,
    plan: str | dict[str, str] = "auto",
    zero: int = 0,
    chunked_loss: bool = False,
) -> _Object:
    """Let a Trainer or an Accelerator work on a grid of ranks; return it. Every rank calls it.

    A Trainer's model is split at once, an Accelerator's in ``prepare``.

    Args:
        owner: A ``transformers.Trainer`` that has not made its optimizer, or an ``accelerate.Accelerator`` that has
            prepared nothing.
        plan, zero, chunked_loss: As for ``axo.parallelize``.

    Raises:
        axo.Refused: It has begun to work, or works in a way that a grid has no place for; a Trainer's own loss is to be
            taken of logits that ``chunked_loss`` does not make.
        ValueError: The grid does not fit the ranks that were started.
    """
    accelerator: Any = owner if isinstance(owner, Accelerator) else getattr(owner, "accelerator", None)
    if not isinstance(accelerator, Accelerator):
        raise axo.Refused(f"on_grid: wants a transformers.Trainer or an accelerate.Accelerator, got {type(owner)}")
    if accelerator.distributed_type not in (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU):
        raise axo.Refused(
            f"on_grid: {accelerator.distributed_type} distributes the model already; leave its plugin out"
        )
    if accelerator.scaler is not None:
        raise axo.Refused("on_grid: mixed_precision='fp16' scales losses; use 'bf16'")
    if accelerator._models or accelerator._optimizers or accelerator._dataloaders:
        raise axo.Refused("on_grid: something has been prepared already; call on_grid first")
    if getattr(owner, "optimizer", None) is not None:
        raise axo.Refused("on_grid: the Trainer has an optimizer, whose parameters are not split; let it make its own")
    for loss in ("label_smoother", "compute_loss_func"):
        if chunked_loss and getattr(owner, loss, None) is not None:
            raise axo.Refused(f"on_grid: chunked_loss=True with a {loss}, which takes logits; leave one of them out")
    accelerator._axo_comms = axo.connect(grid, device=accelerator.device)
    accelerator._axo_options = {"plan": plan, "zero": zero, "chunked_loss": chunked_loss}
    _count_data_ranks(accelerator._axo_comms)
    if importlib.util.find_spec("torchmetrics"):
        data_ranks.sync_metrics(accelerator._axo_comms)
    _join(accelerator, GridAccelerator)
    trainer: Any = owner
    if owner is not accelerator:
        _join(trainer, GridTrainer)
        trainer._axo_figures = Figures(accelerator._axo_comms)
        accelerator._split(trainer.model)
    return owner


def _count_data_ranks(comms: Communicators) -> None:
    """Let what accelerate gathers, reduces and hands out in this process count data ranks, each once."""

    def gather(tensor: Any) -> Any:
        def one(part: torch.Tensor) -> torch.Tensor:
            return data_ranks.gather(part.detach().reshape(part.shape or (1,)), comms).flatten(0, 1)

        return recursively_apply(one, tensor, error_on_other_type=True)

    def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
        def one(part: torch.Tensor) -> torch.Tensor:
            return data_ranks.reduce(part, comms, reduction if reduction in ("max", "mean") else "sum")

        return recursively_apply(one, tensor, error_on_other_type=True)

    def gather_object(parts: Any) -> list[Any]:
        of_ranks = share(checkpoint_group(comms), parts)
        return [each for rank in data_ranks.leaders(comms) for each in of_ranks[rank]]

    def broadcast_object_list(objects: list[Any], from_process: int = 0) -> list[Any]:
        objects[:] = data_ranks.broadcast(objects, comms, from_process)
        return objects

    state: Any = PartialState()
    if comms.grid.world_size > 1:
        data_loader.broadcast_object_list = broadcast_object_list  # by which a batch's shapes are told
        operations._gpu_gather, operations._gpu_gather_object = gather, gather_object
        inner = operations.reduce.__code__.co_freevars.index("function")
        operations.reduce.__closure__[inner].cell_contents = reduce  # programs have imported the function itself
        state.split_between_processes = partial(PartialState.split_between_processes, _DataRanks(state, comms))


def _join(owner: object, kind: type) -> None:
    own = type(owner)
    owner.__class__ = type(f"Grid{own.__name__}", (kind, own), {"__module__": own.__module__})


class GridAccelerator(Accelerator):
    """What ``on_grid`` makes of an Accelerator."""

    _axo_comms: Communicators
    _axo_options: dict[str, Any]

    @property
    def num_processes(self) -> int:
        """Data ranks."""
        return self._axo_comms.data_ranks

    @property
    def process_index(self) -> int:
        """Which data rank this is."""
        return self._axo_comms.data_rank

    @property
    def is_last_process(self) -> bool:
        """Of all ranks."""
        state: Any = self.state
        return bool(state.process_index == state.num_processes - 1)

    def _split(self, model: nn.Module) -> None:
        refuse_context(model)
        if not is_parallel(model):
            model.to(self.device)
            axo.parallelize(model, self._axo_comms, **self._axo_options)
            model.no_sync = _refuse_local_steps  # type: ignore[assignment]
            for part in model.modules():
                if hasattr(part, "num_parameters"):  # transformers'
                    part.num_parameters = partial(_num_parameters, part)  # type: ignore[assignment]

    def prepare(self, *args: Any, device_placement: Any = None) -> Any:
        """As accelerate's; models are split in place, and optimizers get their new parameters."""
        models = [each for each in args if isinstance(each, nn.Module)]
        before = {id(p): (model, name) for model in models for name, p in model.named_parameters()}
        for model in models:
            self._split(model)
        for optimizer in (each for each in args if isinstance(each, torch.optim.Optimizer)):
            if optimizer.state and any(id(p) in before for group in optimizer.param_groups for p in group["params"]):
                raise axo.Refused("prepare: the optimizer has taken steps on whole parameters; prepare it before")
            for group in optimizer.param_groups:
                group["params"] = [
                    before[id(p)][0].get_parameter(before[id(p)][1]) if id(p) in before else p for p in group["params"]
                ]
        return super().prepare(*args, device_placement=device_placement)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        self._split(model)
        return super().prepare_model(model, device_placement, evaluation_mode=True)  # no DistributedDataParallel

    def prepare_scheduler(self, scheduler: Any) -> Any:
        prepared = super().prepare_scheduler(scheduler)
        if type(prepared) is AcceleratedScheduler:
            prepared = self._schedulers[-1] = _Scheduler(prepared, _DataRanks(self.state, self._axo_comms))
        return prepared

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Gradients of backwards inside stay unreduced until the next one outside."""
        with axo.no_sync(self.unwrap_model(model)):
            yield

    def prepare_data_loader(self, data_loader: Any, *args: Any, **options: Any) -> Any:
        """As accelerate's; one that reads on rank 0 for all gives each data rank its part."""
        data_loader = data_ranks.uncut(data_loader, self._axo_comms)
        seeds = getattr(data_loader, "worker_init_fn", None)
        if isinstance(seeds, partial) and "rank" in seeds.keywords:  # the Trainer's: peers draw the same numbers
            data_loader.worker_init_fn = partial(seeds, rank=self.process_index)
        if ranks_that_differ(self._axo_comms, str(torch.get_rng_state().tolist())):  # by set_seed(device_specific=True)
            data_ranks.in_one_order(data_loader.sampler, self._axo_comms)
        prepared = super().prepare_data_loader(data_loader, *args, **options)
        if isinstance(prepared, DataLoaderDispatcher):
            prepared.state = _DataRanks(prepared.state, self._axo_comms)
        return prepared

    def wait_for_everyone(self) -> None:
        """Wait until all ranks have called it, or raise where one does something else together with all."""
        all_call(self._axo_comms, "accelerator.wait_for_everyone()")
        super().wait_for_everyone()

    def save_state(self, output_dir: Any = None, safe_serialization: bool = True, **options: Any) -> Any:
        """Write the model, the optimizer, schedulers and registered objects to ``output_dir``. Every rank calls it."""
        model, optimizer = self._one("save_state", output_dir, options)
        others = [each.state_dict() for each in (*self._schedulers, *self._custom_objects)]
        extra = {"others": others, "step": self.step}
        axo.checkpoint.save(output_dir, model, optimizer, name=FOLDER, extra=extra, comms=self._axo_comms)
        return str(output_dir)

    def load_state(self, input_dir: Any = None, load_kwargs: Any = None, **options: Any) -> None:
        """Read what ``save_state`` wrote on any grid. Every rank calls it."""
        model, optimizer = self._one("load_state", input_dir, options)
        loaded = axo.checkpoint.load(Path(input_dir) / FOLDER, model, optimizer, comms=self._axo_comms)
        extra: dict[str, Any] = loaded.extra or {}
        for each, state in zip((*self._schedulers, *self._custom_objects), extra["others"], strict=True):
            each.load_state_dict(state)
        self.step = extra["step"]

    def _one(self, what: str, folder: Any, options: Any) -> tuple[nn.Module, Any]:
        if folder is None or options or len(self._models) != 1 or len(self._optimizers) > 1:
            raise axo.Refused(f"{what}: on a grid it takes a folder, and is of one model and one optimizer at most")
        all_call(self._axo_comms, f"accelerator.{what}()")
        optimizer = self._optimizers[0].optimizer if self._optimizers else None
        return self.unwrap_model(self._models[0]), optimizer


class _DataRanks:
    """accelerate's state of a process, in which data ranks are the processes."""

    def __init__(self, state: Any, comms: Communicators) -> None:
        self._state, self.num_processes, self.process_index = state, comms.data_ranks, comms.data_rank

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)


def _refuse_local_steps() -> None:
    raise axo.Refused(
        "model.no_sync() (accelerate's LocalSGD): ranks hold parts of one model, so none takes steps by itself;"
        " accelerator.accumulate(model), or axo.no_sync(model), adds gradients up"
    )


def _num_parameters(model: nn.Module, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
    """As transformers' own, of the whole model."""
    tables = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
    counted = (p for p in model.parameters() if not (exclude_embeddings and id(p) in tables))
    return data_ranks.whole_numel(p for p in counted if p.requires_grad or not only_trainable)


class _Scheduler(AcceleratedScheduler):
    """Steps once for each data rank, as accelerate's does for each process; ``state`` says how many there are."""

    def __init__(self, stock: AcceleratedScheduler, state: _DataRanks) -> None:
        super().__init__(stock.scheduler, stock.optimizers, stock.step_with_optimizer, stock.split_batches)
        self._state = state

    def step(self, *args: Any, **kwargs: Any) -> None:
        with mock.patch.object(scheduler, "AcceleratorState", lambda: self._state):
            super().step(*args, **kwargs)


class GridTrainer:
    """What ``on_grid`` mixes into a Trainer's class."""

    accelerator: GridAccelerator
    args: Any
    model: Any
    optimizer: Any
    lr_scheduler: Any
    state: Any
    _axo_figures: Figures

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As the Trainer's; every rank calls it."""
        if "loss" in logs:
            tokens = self.state.num_input_tokens_seen if self.args.include_num_input_tokens_seen else None
            logs = logs | self._axo_figures.take(tokens)
        trainer: Any = super()
        trainer.log(logs, start_time)

    def floating_point_ops(self, inputs: Any) -> float:
        """This rank's share: the Trainer adds up all ranks'."""
        trainer: Any = super()
        return float(trainer.floating_point_ops(inputs)) / self.get_tp_size()

    def get_tp_size(self) -> int:
        """Ranks that work on the same batch."""
        return self.accelerator._axo_comms.grid.x * self.accelerator._axo_comms.grid.y

    # transformers 5 divides by that what it has gathered, or what it takes for a number of ranks: here both count each
    # data rank once.

    def compute_loss(self, *args: Any, **options: Any) -> Any:
        """As the Trainer's."""
        trainer: Any = super()
        with mock.patch.object(self, "get_tp_size", lambda: 1):
            return trainer.compute_loss(*args, **options)

    def _get_num_items_in_batch(self, *args: Any, **options: Any) -> Any:
        trainer: Any = super()
        with mock.patch.object(self, "get_tp_size", lambda: 1):
            return trainer._get_num_items_in_batch(*args, **options)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write what ``from_pretrained`` reads. Every rank calls it."""
        trainer: Any = super()
        folder = output_dir or self.args.output_dir
        state = self.model.state_dict()  # whole tensors; a collective
        if self.args.should_save:
            trainer._save(folder, state_dict=state)
        elif getattr(
            self.model, "_hf_peft_config_loaded", False
        ):  # PEFT asks modules for what it saves; by add_adapter
            self.model.get_adapter_state_dict(state_dict=state)
        elif hasattr(self.model, "peft_config"):
            self.model.save_pretrained(folder, state_dict=state, is_main_process=False)
        self.accelerator.wait_for_everyone()
        if self.args.push_to_hub and not _internal_call:
            trainer.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        extra = {"scheduler": self.lr_scheduler.state_dict()}
        axo.checkpoint.save(
            output_dir, self.model, optimizer, name=FOLDER, extra=extra, comms=self.accelerator._axo_comms
        )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        path = Path(checkpoint) / FOLDER
        if not path.is_dir() and (Path(checkpoint) / "optimizer.pt").exists():
            raise axo.Refused(
                f"{checkpoint} holds the optimizer of a run without a grid; load its weights by from_pretrained and"
                " start anew, or go on without a grid"
            )
        if path.is_dir():
            optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
            loaded = axo.checkpoint.load(
                os.fspath(path), self.model, optimizer, rng=False, comms=self.accelerator._axo_comms
            )
            self.lr_scheduler.load_state_dict((loaded.extra or {})["scheduler"])
