"""AxoStrategy for Lightning's Trainer, made of the parts of Fabric's.

    from axo.integrations.trainer import AxoStrategy
    trainer = lightning.pytorch.Trainer(strategy=AxoStrategy("2x2x1x1"), accelerator="cpu", gradient_clip_val=1.0)
    trainer.fit(module, loader)                # starts the ranks; joins them under torchrun, SLURM

A LightningModule is not split itself, its children are, each by ``axo.parallelize``: ``training_step`` calls them
(``self.model(x)``) and stays as it is. ``configure_optimizers`` runs afterwards and sees this rank's shards.

What the Trainer's parts become:

    sampler              as many replicas as data ranks (Gz*Gdata); peers on x and y get the same batches, read once
    clipping             torch's function, which sees through parallel layers: the norm of the whole model
    accumulation         ``axo.no_sync``: gradients of all but the last micro-batch are added up unreduced
    self.log(sync_dist)  each data rank counts once
    checkpoints          one file of whole tensors, as one device writes it, which any grid and no grid reads; with
                         ``sharded`` a folder into which every rank writes its chunks

    trainer.logger       with ``callbacks=[LogFigures(...)]`` also the global mean loss, memory, the share of
                         communication over each axis, and where it is told what a step is tokens per second and MFU

``pytorch_lightning`` is another package with classes of its own: import the Trainer from ``lightning.pytorch``.

Not here: parameters that the LightningModule itself owns (refused), several optimizers in a sharded checkpoint.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from operator import attrgetter
from typing import Any

import torch
from lightning.fabric.utilities.data import has_iterable_dataset
from lightning.fabric.utilities.seed import reset_seed
from lightning.fabric.utilities.throughput import get_available_flops
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.callbacks.throughput_monitor import ThroughputMonitor, _plugin_to_compute_dtype
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSamplerWrapper, _IndexBatchSamplerWrapper
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.grads import grad_norm
from lightning.pytorch.utilities.model_summary import model_summary
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import BatchSampler

import axo
from axo.comm.connect import Communicators
from axo.grid import Grid
from axo.integrations import data_ranks
from axo.integrations.fabric import sharded_checkpoint, whole_checkpoint
from axo.integrations.fabric.figures import Figures
from axo.integrations.fabric.loader import EachOnce, SharedLoader, with_batches
from axo.integrations.fabric.strategy import AxoStrategy as FabricStrategy
from axo.integrations.fabric.strategy import count_data_ranks
from axo.launch import meet_in_a_file
from axo.optim.clip import total_norm

_POSITION = "axo_data"  # where the run stands in its data; under Lightning's own key a run without Axo would refuse it


class AxoStrategy(ParallelStrategy):
    """Train on a grid of ranks.

    Args:
        grid: Ranks on each axis.
        plan, zero, sharded, timeout: As for Fabric's strategy (:class:`axo.AxoStrategy`); ``plan`` is for the children.
        like_one_device: Keep the order of the loader's own sampler, which the data ranks share out, so that all of them
            together read what one device with a batch as large would; else Lightning's DistributedSampler orders them.
            An ``IterableDataset`` has no sampler: each data rank reads all of it, unless it cuts itself.
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin: As in Lightning's own.

    Raises:
        ValueError: An option is not known.
    """

    strategy_name = "axo"

    def __init__(
        self,
        grid: Grid | str,
        *,
        plan: str = "auto",
        zero: int = 0,
        sharded: bool = False,
        like_one_device: bool = False,
        timeout: timedelta = timedelta(minutes=30),
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
    ) -> None:
        # Ranks, communicators and splitting are Fabric's strategy's. It counts data ranks in what it reduces.
        self._fabric = FabricStrategy(grid, plan=plan, zero=zero, sharded=sharded, counts="data", timeout=timeout)
        super().__init__(accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin)
        self.grid, self.sharded, self.like_one_device = self._fabric.grid, sharded, like_one_device
        self._stage: RunningStage | None = None

    # --- who is here --------------------------------------------------------------------------------------------

    @property
    def comms(self) -> Communicators:
        """What ``axo.connect`` returned; None before the launch."""
        return self._fabric.comms

    root_device: Any = property(attrgetter("_fabric.root_device"))
    num_processes: Any = property(attrgetter("_fabric.num_processes"), doc="Ranks on this host.")
    distributed_sampler_kwargs: Any = property(attrgetter("_fabric.distributed_sampler_kwargs"))

    @property
    def num_nodes(self) -> int:
        return self._fabric.num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._fabric.num_nodes = num_nodes

    @property
    def is_distributed(self) -> bool:
        """Whether the Trainer is to reduce what is logged, and to replace samplers."""
        return True

    def set_world_ranks(self) -> None:
        """Called by the Trainer once it knows devices, nodes and environment, before any process is started."""
        self._fabric.accelerator, self._fabric.cluster_environment = self.accelerator, self.cluster_environment  # type: ignore[assignment]
        self._fabric.parallel_devices = self.parallel_devices
        self._fabric._set_world_ranks()
        self.parallel_devices = self._fabric.parallel_devices

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        meet_in_a_file(self.cluster_environment, self.num_nodes)
        self._launcher = _SubprocessScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    def setup_environment(self) -> None:
        reset_seed()
        self._fabric.precision = self.precision_plugin  # type: ignore[assignment]  # its loss scaler is made to agree
        self._fabric.setup_environment()

    # --- collectives of the user ---------------------------------------------------------------------------------

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Over data ranks, each of which counts once; a given group of torch's is torch's business."""
        if not isinstance(tensor, torch.Tensor):
            return tensor
        if (
            str(getattr(reduce_op, "name", reduce_op)).lower() in ("none", "mean", "avg")
            and not tensor.is_floating_point()
        ):
            tensor = tensor.to(torch.get_default_dtype())  # Lightning weighs by numbers of rows, whose mean is none
        return self._fabric.all_reduce(tensor.clone(), group, reduce_op)

    all_gather: Any = property(attrgetter("_fabric.all_gather"), doc="One part of each data rank.")
    reduce_boolean_decision: Any = property(attrgetter("_fabric.reduce_boolean_decision"))
    barrier: Any = property(attrgetter("_fabric.barrier"))
    broadcast: Any = property(attrgetter("_fabric.broadcast"))

    # --- model and optimizer ------------------------------------------------------------------------------------

    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    def _setup_model(self, model: nn.Module) -> nn.Module:
        """Split the children of ``model`` in place.

        Raises:
            axo.Refused: A parameter belongs to none of them, or to two.
        """
        children = _children(model)
        alike = {_shapes(each) for each in (model, *children.values())}
        for child in children.values():
            self._fabric.setup_module(child)
        # Averages of weights are copies that callbacks made before.
        trainer: Any = getattr(self.lightning_module, "_trainer", None)
        attributes = [each for callback in trainer.callbacks for each in vars(callback).values()] if trainer else []
        for module in (part for each in attributes if isinstance(each, nn.Module) for part in each.modules()):
            if _shapes(module) in alike:
                for copy in _children(module).values() if isinstance(module, type(model)) else (module,):
                    self._fabric.setup_module(copy)
        return model

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            self._fabric.setup_optimizer(optimizer)

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        assert self.lightning_module is not None
        with ExitStack() as stack:
            for child in _children(self.lightning_module).values():
                stack.enter_context(axo.no_sync(child))
            yield

    # --- data ---------------------------------------------------------------------------------------------------

    def process_dataloader(self, dataloader: Any) -> Any:
        if not isinstance(dataloader, torch.utils.data.DataLoader):
            raise axo.Refused(
                f"AxoStrategy: a {type(dataloader).__name__} as data; peers on x and y must get the same batches, which"
                " Axo sees to for a torch.utils.data.DataLoader"
            )
        return _Loader(self._cut(dataloader), self.comms)

    def _cut(self, loader: Any) -> Any:
        """Each sample once where the order is that of one device, and in prediction, as in Lightning."""
        batches, comms = loader.batch_sampler, self.comms
        predicts = isinstance(batches, _IndexBatchSamplerWrapper)
        own: Any = batches.sampler if predicts else loader.sampler
        if predicts and type(own) is UnrepeatedDistributedSamplerWrapper:
            own = own.dataset._sampler  # type: ignore[attr-defined]
        elif not self.like_one_device or batches is None or has_iterable_dataset(loader):
            return loader
        if not predicts and type(batches) is not BatchSampler:
            raise axo.Refused(
                f"AxoStrategy: like_one_device=True with a batch sampler of its own, {type(batches).__name__}, whose"
                " batches are of one device; leave like_one_device out, or give batch_size and sampler"
            )
        cut: Any = EachOnce(own, batches.batch_size, batches.drop_last, comms)
        last = cut.sizes()[-1] if len(cut) else 0
        if self._stage == RunningStage.TRAINING and last % comms.data_ranks:
            raise axo.Refused(
                f"AxoStrategy: like_one_device=True, and the last batch of an epoch has {last} samples, which"
                f" {comms.data_ranks} data ranks cannot share evenly: their mean would not be that of one device; use"
                " drop_last=True, or leave like_one_device out"
            )
        return with_batches(loader, _IndexBatchSamplerWrapper(cut) if predicts else cut)

    # --- checkpoints ---------------------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Whole tensors on rank 0, nothing elsewhere. Every rank must call it."""
        assert self.lightning_module is not None
        return {} if self.sharded else self._fabric.get_module_state_dict(self.lightning_module)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Whole tensors on rank 0, nothing elsewhere. Every rank must call it."""
        optimizer = getattr(optimizer, "_optimizer", optimizer)
        return {} if self.sharded else self._fabric.get_optimizer_state(optimizer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        checkpoint = dict(checkpoint)
        position = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {}).pop("combined_loader", None)
        if position is not None:
            checkpoint[_POSITION] = position
        if not self.sharded:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        plain = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
        sharded_checkpoint.save(filepath, plain | self._sharded_parts(), self.comms)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read what any number of ranks wrote, whole or sharded, or a run without Axo; each rank takes its parts."""
        if sharded_checkpoint.is_sharded(checkpoint_path):
            loaded = sharded_checkpoint.load(checkpoint_path, self._sharded_parts(), True, self.comms)
            loaded |= {"state_dict": None, "optimizer_states": [None] * len(self.optimizers)}
        else:
            loaded = super().load_checkpoint(checkpoint_path, weights_only)
        if _POSITION in loaded:
            loaded["loops"]["fit_loop"]["state_dict"]["combined_loader"] = loaded.pop(_POSITION)
        return loaded

    def _sharded_parts(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        if len(self.optimizers) > 1:
            raise axo.Refused("AxoStrategy: sharded=True saves one optimizer; leave it out to save several, whole")
        parts: dict[str, Any] = {"axo_module": self.lightning_module}
        return parts | ({"axo_optimizer": self.optimizers[0]} if self.optimizers else {})

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if checkpoint["state_dict"] is not None:  # a sharded one has been loaded already
            super().load_model_state_dict(checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, whole in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            if whole is not None:
                optimizer.load_state_dict(whole_checkpoint.local_optimizer_state(optimizer, whole))

    def setup(self, trainer: Any) -> None:
        if self.like_one_device:
            trainer._accelerator_connector.use_distributed_sampler = False
        prepare = trainer._data_connector._prepare_dataloader

        def prepare_and_note(dataloader: Any, shuffle: bool, mode: Any) -> Any:
            self._stage = mode  # of the loader that process_dataloader gets next
            return prepare(dataloader, shuffle, mode)

        if self._stage is None:
            trainer._data_connector._prepare_dataloader = prepare_and_note
        self._stage = trainer.state.stage
        for monitor in (each for each in trainer.callbacks if isinstance(each, ThroughputMonitor)):
            for throughput in monitor._throughputs.values():
                throughput.available_flops = monitor.available_flops
                count_data_ranks(throughput, self.comms)
        super().setup(trainer)


class LogFigures(Callback):
    """Log figures of all ranks (``axo.integrations.fabric.figures``) to the Trainer's loggers, whenever it logs.

    ``loss`` is what a step has optimized, the mean over its micro-batches and over the data ranks; it stands in the
    place of a ``loss`` that the LightningModule logs itself.

    Args:
        tokens: Of one optimizer step, of all data ranks together; None: no ``tokens_per_sec``.
        flops: Of one optimizer step of the whole model, of all data ranks together; None: no ``mfu``.
        peak: Flops per second of one rank's device; None: what Lightning knows of a GPU and the precision.
    """

    def __init__(self, *, tokens: int | None = None, flops: float | None = None, peak: float | None = None) -> None:
        self._tokens, self._flops, self._peak = tokens, flops, peak
        self._losses: list[torch.Tensor] = []  # of the step under way, as far as it has come

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        strategy = trainer.strategy
        if not isinstance(strategy, AxoStrategy):
            raise axo.Refused(f"LogFigures: wants Trainer(strategy=AxoStrategy(...)), got {type(strategy).__name__}")
        peak = self._peak
        if peak is None and self._flops is not None:
            peak = get_available_flops(strategy.root_device, _plugin_to_compute_dtype(trainer.precision_plugin))
        self._figures = Figures(strategy.comms, peak=peak)
        self._losses = []  # a fit may have ended in the midst of a step
        self._take(trainer)  # rates are counted from here

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, torch.Tensor):  # divided, in an epoch's last step too, which may have fewer micro-batches
            self._losses.append(loss.detach() * trainer.accumulate_grad_batches)
        if trainer.fit_loop._should_accumulate():
            return
        if trainer._logger_connector.should_update_logs:
            mean = {"loss": self._figures.mean(torch.stack(self._losses).mean())} if self._losses else {}
            pl_module.log_dict(mean | self._take(trainer))
        self._losses = []

    def _take(self, trainer: Any) -> dict[str, float]:
        steps = trainer.global_step
        tokens = None if self._tokens is None else self._tokens * steps
        return self._figures.take(tokens, flops=None if self._flops is None else self._flops * steps)


class _Loader(SharedLoader):
    """A shared loader whose state, taken when an epoch has ended, begins the next one, as the Trainer does."""

    def __iter__(self) -> Iterator[Any]:
        # Whoever does not read goes through the indices all the same: Lightning shows them to writers of predictions.
        batches = getattr(self._loader, "batch_sampler", None)
        indices = iter(batches if isinstance(batches, _IndexBatchSamplerWrapper) and not self._reads else ())
        for batch in super().__iter__():
            next(indices, None)
            yield batch

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        own = self._own
        if own is not None and own._given and own._given == len(self):
            return {"epoch": state["epoch"] + 1, "samples": 0}
        return state


def _shapes(module: nn.Module) -> tuple[Any, ...]:
    return type(module), *((name, parameter.shape) for name, parameter in module.named_parameters())


def whole_grad_norm(module: nn.Module, norm_type: float | int | str, group_separator: str = "/") -> dict[str, Any]:
    """What Lightning's ``grad_norm`` gives on one device. Every rank must call it."""
    norm_type = float(norm_type)
    if norm_type <= 0:
        raise ValueError(f"`norm_type` must be a positive number or 'inf' (infinity norm). Got {norm_type}")
    norms = {
        f"grad_{norm_type}_norm{group_separator}{name}": total_norm([(p, p.grad)], norm_type, False, "grad_norm")
        for name, p in module.named_parameters()
        if p.grad is not None
    }
    return norms | (
        {f"grad_{norm_type}_norm_total": torch.stack(list(norms.values())).norm(norm_type)} if norms else {}
    )


def _grad_norm(module: Any, norm_type: Any, group_separator: Any = "/") -> Any:
    from axo.integrations.trainer import whole_grad_norm

    return whole_grad_norm(module, norm_type, group_separator)


def _see_whole_parameters() -> None:
    """Let Lightning's counters count whole parameters, of which a rank holds parts."""
    summary = model_summary.ModelSummary

    def trainable(self: Any) -> int:
        return data_ranks.whole_numel(p for p in self._model.parameters() if p.requires_grad)

    layers = property(lambda self: data_ranks.whole_numel(self._module.parameters()))
    model_summary.LayerSummary.num_parameters = layers  # type: ignore[assignment]
    summary.total_parameters = property(lambda self: data_ranks.whole_numel(self._model.parameters()))  # type: ignore[assignment]
    summary.trainable_parameters = property(trainable)  # type: ignore[assignment]
    grad_norm.__code__ = _grad_norm.__code__  # programs have imported the function itself


_see_whole_parameters()


def _children(module: nn.Module) -> dict[str, nn.Module]:
    """The children that hold parameters.

    Raises:
        axo.Refused: A parameter belongs to none of them, or to two.
    """
    own = [name for name, _ in module.named_parameters(recurse=False)]
    if own:
        raise axo.Refused(
            f"AxoStrategy: {type(module).__name__} itself owns the parameters {', '.join(own)}; put them into a child"
            " module that training_step calls"
        )
    children = {name: child for name, child in module.named_children() if any(True for _ in child.parameters())}
    owners: dict[int, str] = {}
    for name, child in children.items():
        for parameter in child.parameters():
            if owners.setdefault(id(parameter), name) != name:
                raise axo.Refused(
                    f"AxoStrategy: {name!r} and {owners[id(parameter)]!r} of {type(module).__name__} share a parameter,"
                    " and each child is split by itself; put both into one child module"
                )
    return children
