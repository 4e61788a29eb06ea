"""AxoStrategy: a Lightning Fabric strategy that trains on a 4D grid.

    fabric = L.Fabric(strategy=AxoStrategy(grid="2x2x2x1"))
    fabric.launch()                                             # starts the ranks; joins them under torchrun, SLURM
    with fabric.init_module(empty_init=True):                   # meta device: no rank ever holds the whole model
        model = GPT(config)
    model = fabric.setup(model)                                 # axo.parallelize; shards are filled layer by layer
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters()))

What Fabric's parts become:

    sampler              replicas = Gz*Gdata, this rank's number = z + Gz*data; peers on x and y get the same batches
    backward             gradients come back averaged over the data ranks
    clip_gradients       the norm over all shards, each element once
    no_backward_sync     ``axo.no_sync``: gradients of all but the last micro-batch are added up unreduced
    save, load           plain whole tensors, as one rank would write them, optimizer state included; or, with
                         ``sharded``, a folder into which every rank writes its own chunks
    logits               whole on every rank; ``vocab_loss`` leaves them split over x in training: then the loss must be
                         ``fabric.strategy.cross_entropy``

``pipeline`` cuts a LitGPT model into stages, each of them a grid, and the loss call runs their schedule (stages.py):
there too the loss must be ``fabric.strategy.cross_entropy``. ``offload`` puts optimizer state and activations on the
lower tier (``axo.Offload``); an AdamW that Fabric sets up becomes one whose state lies there.

``fabric.world_size`` counts ranks. A trainer that takes every rank for a data rank (LitGPT) wants ``counts="data"``:
then a data rank, its Gx*Gy ranks together, is what Fabric calls a device; whatever reduces or gathers for the user
counts each data rank once, while agreements and barriers are of all ranks.

Not here: FSDP's and DDP's options, models that the plan does not know (refused by name).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl, _validate_keys_for_strict_loading
from lightning.fabric.utilities.distributed import _init_dist_connection, _sync_ddp
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.fabric.utilities.throughput import ThroughputMonitor
from lightning.fabric.utilities.types import _Stateful
from lightning_utilities.core.rank_zero import rank_zero_only as utilities_rank_zero_only
from torch import nn
from torch.optim import Optimizer

import axo
from axo.arrangement import arrangement_of
from axo.check import one_of, whole_number
from axo.comm.agree import all_call
from axo.comm.connect import Communicators
from axo.comm.rendezvous import launchers_store, store_of_this_start
from axo.errors import Refused
from axo.grid import Grid, check_ranks
from axo.integrations import data_ranks
from axo.integrations.fabric import sharded_checkpoint, whole_checkpoint
from axo.integrations.fabric.compile import keep_out_of_graphs
from axo.integrations.fabric.loader import SharedLoader, split_in_order
from axo.integrations.fabric.materialize import holds_meta, materialize
from axo.integrations.fabric.recorded_init import RecordedInit
from axo.integrations.fabric.replacements import agreeing, offloaded
from axo.integrations.fabric.stages import StagedLogits, StageRunner, stages_of
from axo.integrations.fabric.step_agreement import StepAgreement
from axo.launch import meet_in_a_file
from axo.nn.context import check_kind
from axo.nn.layer import is_parallel, refuse_context
from axo.optim.checks import check_update
from axo.pipeline import check_microbatches
from axo.plans.context import has_whole_sequences
from axo.sharding import cut_sequence

COUNTS = ("ranks", "data")
_TIMEOUT = timedelta(minutes=30)


class AxoStrategy(DDPStrategy):
    """Train on a grid of ranks.

    Args:
        grid: Ranks on each axis; of one stage, where there are several.
        plan: How ``axo.parallelize`` is to split the model.
        algorithm: How products are distributed, as for ``axo.parallelize``.
        zero: ZeRO on the data axis, as for ``axo.parallelize``: 0, 1 or 2.
        vocab_loss: Leave logits split over x while training.
        pipeline: Stages.
        schedule, microbatches: Of the stages, as for ``axo.pipeline.schedule``: micro-batches that the rows of each
            call of the model are cut into; default: twice the stages.
        cuts: Where stages begin, as for ``axo.pipeline.split``.
        context: How many neighbours along z hold pieces of the same sequences. A ``litgpt.GPT`` then takes whole rows,
            the same on these ranks, and gives the logits of this rank's tokens; ``axo.sharding.cut_sequence`` cuts the
            targets.
        context_kind: How they see each other's keys and values, as for ``axo.parallelize``.
        offload: What lies on the lower tier.
        sharded: Save sharded checkpoints (sharded_checkpoint.py), not whole ones. Both are loaded.
        counts: What ``fabric.world_size``, ``all_reduce`` and ``all_gather`` count: ``"ranks"``, or ``"data"`` ranks.
        like_one_device: Start from what one device would start from: values as the model's constructors draw them, not
            ``reset_parameters``; samples in the order of the loader's own sampler, not of a DistributedSampler, each
            once: the last batch may leave data ranks with unequal numbers (``axo.token_weight``).
        step_agreement: Has all ranks agree before each optimizer step that their losses are finite, or raises on all.
        timeout: The time limit of the rendezvous and of each operation.
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision: As in Fabric's own strategies.

    Attributes:
        comms: What ``axo.connect`` returned; None before the launch.

    Raises:
        ValueError: No grid is given, or an option is not known.
    """

    comms: Communicators

    def __init__(
        self,
        grid: Grid | str | None = None,
        *,
        plan: str = "litgpt",
        algorithm: str = "axonn",
        zero: int = 0,
        vocab_loss: bool = False,
        pipeline: int = 1,
        schedule: str = "1f1b",
        cuts: str | Sequence[int] = "even",
        microbatches: int | None = None,
        context: int = 1,
        context_kind: str = "ring",
        offload: axo.Offload | None = None,
        sharded: bool = False,
        counts: str = "ranks",
        like_one_device: bool = False,
        step_agreement: StepAgreement | None = None,
        timeout: timedelta = _TIMEOUT,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision: Any = None,
    ) -> None:
        super().__init__(accelerator, parallel_devices, cluster_environment, checkpoint_io, precision, "axo", timeout)
        one_of("AxoStrategy: counts", counts, COUNTS)
        whole_number("AxoStrategy: pipeline", pipeline, least=1)
        if grid is None:
            raise ValueError(
                "AxoStrategy: no grid; pass grid='2x2x2x1', or for strategy='axo' first call"
                " axo.integrations.lightning.register(lambda: AxoStrategy(grid='2x2x2x1'))"
            )
        self.grid = Grid.parse(grid)
        self.pipeline, self.schedule, self.cuts, self.offload = pipeline, schedule, cuts, offload
        self.microbatches = 2 * pipeline if microbatches is None else microbatches
        if pipeline > 1:
            check_microbatches(schedule, self.microbatches, pipeline)
            if zero == 2:
                raise ValueError(
                    "AxoStrategy: zero=2 with pipeline stages is not supported: gradients of a schedule's step wait for"
                    " backward whole; use zero=1"
                )
            if offload is not None and offload.parameters:
                raise ValueError(
                    "AxoStrategy: offload.parameters with pipeline stages is not supported: gradients of a schedule's"
                    " step wait for backward beside .grad, and the lower tier has one place for them; leave it out, or"
                    " train by axo train"
                )
        check_kind("AxoStrategy", context_kind)
        whole_number("AxoStrategy: context", context, least=1)
        if self.grid.z % context:
            raise ValueError(f"AxoStrategy: context={context} does not divide z={self.grid.z} of grid {self.grid}")
        if context > 1 and (pipeline > 1 or plan != "litgpt"):
            other = f"pipeline={pipeline}" if pipeline > 1 else f"plan={plan!r}, whose model knows its own batches,"
            raise Refused(f"AxoStrategy: context={context} with {other} is not supported; leave one of the two out")
        self.context, self.context_kind = context, context_kind
        self.ranks = self.grid.world_size * pipeline
        self._stages: StageRunner | None = None
        self.arrangement = arrangement_of("AxoStrategy", algorithm)
        self.arrangement.check(self.grid)
        if context > 1:
            self.arrangement.only_axonn(f"AxoStrategy: context={context}")
        self.plan, self.zero, self.vocab_loss, self.sharded = plan, zero, vocab_loss, sharded
        self.counts, self.like_one_device, self.step_agreement = counts, like_one_device, step_agreement
        self.comms = None  # type: ignore[assignment]
        self._recorded: RecordedInit | None = None
        self._columns = 0  # of whole logits
        self._backward_sync_control = _NoSync()

    def __repr__(self) -> str:  # Lightning's Trainer, which refuses strategies of Fabric, shows it
        return f"<AxoStrategy of Fabric on {self.grid}; a Trainer wants axo.integrations.trainer.AxoStrategy>"

    # --- who is here --------------------------------------------------------------------------------------------

    @DDPStrategy.num_nodes.setter  # type: ignore[attr-defined, untyped-decorator]
    def num_nodes(self, num_nodes: int) -> None:
        # Who counts data ranks cannot say on how many hosts they are: one of them may be on several.
        slurm = self.counts == "data" and SLURMEnvironment.detect()
        self._num_nodes = int(os.environ.get("SLURM_NNODES", num_nodes)) if slurm else num_nodes

    @property
    def num_processes(self) -> int:
        """Ranks on this host."""
        return self.ranks // self._num_nodes

    @property
    def row_parts(self) -> int:
        """Parts that batches are cut into: Gz * Gdata / context; with Tesseract Gx * Gz * Gdata."""
        return self.data_ranks // self.context

    @property
    def data_ranks(self) -> int:
        """Gz * Gdata; with Tesseract Gx * Gz * Gdata."""
        return self.arrangement.row_parts(self.grid)

    @property
    def world_size(self) -> int:
        return self.row_parts if self.counts == "data" else self.ranks

    @property
    def distributed_sampler_kwargs(self) -> Any:
        if self.like_one_device:
            return None  # Fabric keeps the sampler
        coords = self.grid.coords(self.global_rank % self.grid.world_size)
        return {"num_replicas": self.row_parts, "rank": self.arrangement.row_part(self.grid, coords) // self.context}

    def _set_world_ranks(self) -> None:
        """Called by Fabric once it knows devices, nodes and environment, before any process is started."""
        self._spread_devices()
        environment = self.cluster_environment
        if environment is None:
            return
        environment.set_world_size(self.ranks)
        environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
        check_ranks("AxoStrategy", self.grid, self.pipeline, environment.world_size())
        decorators: tuple[Any, ...] = (rank_zero_only, utilities_rank_zero_only)
        for decorator in decorators:
            decorator.rank = self.global_rank

    @property
    def _shown(self) -> str:
        return self.grid.in_stages(self.pipeline)

    def _spread_devices(self) -> None:
        if self.ranks % self._num_nodes:
            raise ValueError(
                f"AxoStrategy: grid {self._shown} has {self.ranks} ranks, which do not divide over"
                f" num_nodes={self._num_nodes}"
            )
        given, wanted = self.parallel_devices or [torch.device("cpu")], self.num_processes
        fitting = {1, wanted} | ({self.row_parts} if self.counts == "data" else set())
        if len(given) not in fitting:
            raise ValueError(
                f"AxoStrategy: devices={len(given)} does not fit grid {self._shown}; leave devices out (the grid says"
                f" how many ranks there are), or use devices={wanted}"
            )
        if len(given) < wanted:
            kind = given[0].type
            given = [torch.device(kind) if kind == "cpu" else torch.device(kind, index) for index in range(wanted)]
        self.parallel_devices = given

    # --- launch -------------------------------------------------------------------------------------------------

    def _configure_launcher(self) -> None:
        meet_in_a_file(self.cluster_environment, self._num_nodes)
        super()._configure_launcher()

    def _setup_distributed(self) -> None:
        if self.comms is not None:
            return
        environment = self.cluster_environment
        assert environment is not None
        # The ranks are the environment's: self.world_size may count something else.
        rank, ranks = environment.global_rank(), environment.world_size()
        limit = self._timeout
        assert limit is not None
        options: dict[str, Any] = {"timeout": limit}
        if not torch.distributed.is_initialized():
            place = rank, ranks, limit.total_seconds()
            os.environ |= {"MASTER_ADDR": environment.main_address, "MASTER_PORT": str(environment.main_port)}
            options["store"] = store_of_this_start(launchers_store(*place), *place)
        _init_dist_connection(environment, "axo", rank, ranks, **options)
        ways = {"pipeline": self.pipeline, "context": self.context}
        self.comms = axo.connect(self.grid, device=self.root_device, timeout=limit, **ways)
        self.comms.arrange(self.arrangement)
        data_ranks.sync_metrics(self.comms)
        scaler = getattr(self.precision, "scaler", None)
        if isinstance(scaler, torch.amp.GradScaler) and not isinstance(scaler, axo.GradScaler):
            self.precision.scaler = agreeing(scaler, self.comms)  # type: ignore[attr-defined]

    def teardown(self) -> None:
        if self.comms is not None:
            self.comms.close()
        super().teardown()

    # --- collectives of the user ---------------------------------------------------------------------------------

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce in place over ranks (or data ranks: see ``counts``); a given group of torch's is torch's business."""
        if not isinstance(tensor, torch.Tensor) or self.comms is None:
            return tensor
        if group not in (None, torch.distributed.group.WORLD):
            return _sync_ddp(tensor, group, reduce_op)
        op = "mean" if reduce_op is None else str(getattr(reduce_op, "name", reduce_op)).lower().replace("avg", "mean")
        if self.counts == "data":
            return tensor.copy_(data_ranks.reduce(tensor, self.comms, op))
        result = self.comms.everyone.all_reduce(tensor.reshape(-1).clone(), "sum" if op == "mean" else op)
        return tensor.copy_((result / self.ranks if op == "mean" else result).view_as(tensor))

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """``(parts, *tensor.shape)``: one part of each rank, or data rank (see ``counts``)."""
        if self.counts == "ranks" or group not in (None, torch.distributed.group.WORLD) or self.comms is None:
            return super().all_gather(tensor, group, sync_grads)
        with torch.set_grad_enabled(sync_grads and torch.is_grad_enabled()):
            return data_ranks.gather(tensor, self.comms)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Agree over all ranks, whatever ``counts`` says: peers must decide alike."""
        if self.comms is None:
            return decision
        vote = torch.tensor([int(decision)], dtype=torch.int64, device=self.comms.device)
        return bool(self.comms.everyone.all_reduce(vote, "min" if all else "max").item())

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Rank ``src``'s object, on every rank; no pickle, so not of any class (``axo.comm.values``)."""
        return obj if self.comms is None else data_ranks.broadcast(obj, self.comms, src)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if self.comms is not None:
            self.comms.everyone.barrier()

    def _check_launched(self, what: str) -> None:
        if self.comms is None:
            raise RuntimeError(f"AxoStrategy: fabric.{what}() came before fabric.launch(); launch first")

    # --- model and optimizer ------------------------------------------------------------------------------------

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager:
        """Build on the meta device with ``empty_init=True``, else with values on the CPU.

        A trainer that counts data ranks loads or resets the weights in any case, so there it is always meta.
        """
        stack = ExitStack()
        meta = bool(empty_init) or self.counts == "data" or self.like_one_device
        stack.enter_context(torch.device("meta") if meta else torch.device("cpu"))
        if self.like_one_device:
            self._recorded = stack.enter_context(RecordedInit(self.root_device))
        stack.enter_context(self.precision.module_init_context())
        return stack

    def module_to_device(self, module: nn.Module) -> None:
        if not any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
            module.to(self.root_device)

    def setup_module(self, module: nn.Module) -> nn.Module:  # type: ignore[override]
        """Split ``module`` over the grid, in place. One made of Axo's layers already is left as it is."""
        self._check_launched("setup")
        if is_parallel(module):
            refuse_context(module)
            return module
        originals = {name: part for name, part in module.named_modules() if holds_meta(part)}
        options: dict[str, Any] = {"gather_logits": not self.vocab_loss, "zero": self.zero, "offload": self.offload}
        if self.context > 1:
            options["context"] = self.context_kind
            module.register_forward_pre_hook(partial(_cut_tokens, self.comms), with_kwargs=True)
        axo.parallelize(module, self.comms, plan=self.plan, algorithm=self.arrangement.name, **options)
        if self.vocab_loss:
            head: Any = module.get_submodule("lm_head")
            self._columns = head.out_features_whole
            module.register_forward_pre_hook(partial(_gather_unless_training, head))
        if self.pipeline > 1:
            context = self._forward_context
            self._stages = StageRunner(module, self.comms, self.schedule, self.cuts, self.microbatches, context)
        if originals:
            materialize(module, originals, self.comms, self._recorded)
            self._recorded = None
        if self.offload is not None:
            self.offload.move_in(module.parameters())
        keep_out_of_graphs(module)  # Fabric compiles the parallel module again if it was compiled before
        return module

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        for optimizer in optimizers:
            if optimizer.state:
                raise ValueError("AxoStrategy: the optimizer has taken steps already; set it up before its first step")
        module = self.setup_module(module)
        parallel = dict(module.named_parameters())
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["params"] = [parallel[names[id(p)]] if id(p) in names else p for p in group["params"]]
        return module, [self.setup_optimizer(optimizer) for optimizer in optimizers], scheduler

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Refuse what would take other steps than on one device.

        Raises:
            ValueError: The optimizer looks at more than one element of a tensor at a time, and tensors are split.
        """
        check_update(optimizer, "AxoStrategy")
        if self.offload is not None and self.offload.optimizer:
            optimizer = offloaded(optimizer, self.offload)
        return super().setup_optimizer(optimizer)

    def backward(self, tensor: torch.Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        if self.step_agreement is not None:
            self.step_agreement.note(tensor)
        super().backward(tensor, module, *args, **kwargs)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        self._agree()
        return super().optimizer_step(optimizer, **kwargs)

    def _agree(self) -> None:
        if self.step_agreement is not None:
            self.step_agreement.before_step(self.comms)

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float | int,
        norm_type: float | int = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:
        self._agree()
        self.precision.unscale_gradients(optimizer)
        strict = error_if_nonfinite and self.step_agreement is None
        norm = axo.clip_grad_norm_(self.precision.main_params(optimizer), max_norm, norm_type, strict)
        if error_if_nonfinite and self.step_agreement is not None:
            self.step_agreement.check_norm(norm)
        return norm

    def cross_entropy(
        self, logits: Any, targets: torch.Tensor, chunk_size: int = 128, ignore_index: int = -100
    ) -> torch.Tensor:
        """Mean loss of ``logits`` (batch, seq, V or V/Gx), or a list of them cut along seq; as litgpt's own function.

        Whole logits take the stock path; logits split over x the vocabulary-parallel one. With pipeline stages, and
        gradients, it runs the schedule: the next call must be ``fabric.backward`` of it, or of a multiple.
        """
        first = logits[0] if isinstance(logits, list) else logits
        tokens = sum(part.shape[1] for part in (logits if isinstance(logits, list) else [logits]))
        if self.context > 1 and targets.shape[1] != tokens:
            raise ValueError(
                f"cross_entropy: targets of {targets.shape[1]} tokens for logits of this rank's {tokens}; cut them by"
                " axo.sharding.cut_sequence(targets, comms)"
            )
        if self._stages is not None and isinstance(first, StagedLogits):
            scaler = getattr(self.precision, "scaler", None)
            scale = float(scaler.get_scale()) if scaler is not None else 1.0
            summed = partial(self._summed, ignore_index=ignore_index)
            return self._stages.loss(logits, targets, summed, ignore_index, scale)
        split = self.vocab_loss and self.grid.size(self.arrangement.inner) > 1
        if not split or first.shape[-1] == self._columns:
            from litgpt.utils import chunked_cross_entropy

            return chunked_cross_entropy(logits, targets, chunk_size, ignore_index)
        parts = logits if isinstance(logits, list) else [logits]
        total = targets.new_zeros((), dtype=torch.float32)
        for part, wanted in zip(parts, targets.split([part.shape[1] for part in parts], 1), strict=True):
            total = total + self._summed(part, wanted, ignore_index)
        return total / (targets != ignore_index).sum().clamp(min=1)

    def _forward_context(self) -> AbstractContextManager[Any]:  # of a stage's micro-batch
        return self.precision.forward_context()

    def _summed(self, logits: torch.Tensor, targets: torch.Tensor, ignore_index: int) -> torch.Tensor:
        logits = self.precision.convert_output(logits)
        if not self.vocab_loss or self.grid.x == 1:
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=ignore_index, reduction="sum")
        return axo.nn.cross_entropy(
            logits, targets, ignore_index=ignore_index, reduction="sum", comms=self.comms, columns=self._columns
        )

    # --- data ---------------------------------------------------------------------------------------------------

    def process_dataloader(self, dataloader: Any) -> Any:
        self._check_launched("setup_dataloaders")
        if self.distributed_sampler_kwargs is None:
            dataloader = split_in_order(dataloader, self.comms)
        return SharedLoader(dataloader, self.comms)

    # --- checkpoints ---------------------------------------------------------------------------------------------

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Whole tensors on rank 0, nothing elsewhere. Every rank must call it."""
        all_call(self.comms, "fabric.save() or trainer.save_checkpoint()")
        keep = whole_checkpoint.keep_all if self.is_global_zero else None
        return whole_checkpoint.module_state(module, keep, stages=self._stages)

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Whole tensors on rank 0, nothing elsewhere. Every rank must call it."""
        keep = whole_checkpoint.keep_all if self.is_global_zero else None
        return whole_checkpoint.optimizer_state(optimizer, keep, stages=self._stages)

    def save_checkpoint(
        self,
        path: Any,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Write whole tensors into one file, rank 0 each as soon as all ranks have gathered it, before the next.

        So a rank holds one of them, and the parts that it is put together from. Where torch does not write the file
        (``storage_options``, an address, another ``checkpoint_io``) rank 0 first holds all of them.

        ``sharded``: every rank writes its chunks into a folder of that name; what is filtered (LoRA's) stays whole.
        """
        if self.sharded and not filter and any(isinstance(value, nn.Module) for value in state.values()):
            sharded_checkpoint.save(path, state, self.comms)
            return
        if storage_options is not None or not whole_checkpoint.is_file_of_torch(path, self.checkpoint_io):
            super().save_checkpoint(path, state, storage_options, filter)  # which gathers by the two functions above
            return
        all_call(self.comms, "fabric.save()")
        whole_checkpoint.save(path, state, filter or {}, writes=self.is_global_zero, stages=self._stages)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read what any number of ranks wrote, whole or sharded, or a run without Axo; each rank takes its parts."""
        if sharded_checkpoint.is_sharded(path):
            return sharded_checkpoint.load(path, state or {}, strict, self.comms)
        loaded = whole_checkpoint.load(path, self.checkpoint_io, weights_only)
        if not state:
            return loaded
        if isinstance(state, nn.Module | Optimizer):
            self._restore(state, loaded, strict)
            return {}
        _validate_keys_for_strict_loading(state.keys(), loaded.keys(), strict=strict)
        for name in [name for name in state if name in loaded]:
            if isinstance(state[name], _Stateful):
                self._restore(state[name], loaded.pop(name), strict)
            else:
                state[name] = loaded.pop(name)
        return loaded

    def _restore(self, target: Any, value: Any, strict: bool) -> None:
        if isinstance(target, nn.Module):
            self.load_module_state_dict(target, value, strict)
        elif isinstance(target, Optimizer):
            target.load_state_dict(whole_checkpoint.local_optimizer_state(target, value, self._stages))
        else:
            target.load_state_dict(value)


class _NoSync(_BackwardSyncControl):
    """Gradients of a backward inside stay unreduced until the next one outside."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager:
        # A schedule reduces the gradients of its step by itself.
        return axo.no_sync(module) if enabled and stages_of(module) is None else nullcontext()


def _cut_tokens(comms: Communicators, module: nn.Module, inputs: Any, named: dict[str, Any]) -> Any:
    if has_whole_sequences(inputs, named):
        return None
    return (cut_sequence(inputs[0], comms), *inputs[1:]), named


def _gather_unless_training(head: Any, model: nn.Module, inputs: Any) -> None:
    head.gather_output = not model.training  # whoever evaluates or generates wants whole logits


def register(make: Callable[[], AxoStrategy]) -> None:
    """Let ``strategy="axo"``, and LT_STRATEGY=axo, stand for what ``make`` returns."""
    STRATEGY_REGISTRY.register("axo", make, "Four-dimensional parallelism on a grid of ranks", override=True)


def _counting(init: Callable[..., None]) -> Callable[..., None]:
    def __init__(self: Any, fabric: Any, **options: Any) -> None:
        init(self, fabric, **options)
        if isinstance(fabric.strategy, AxoStrategy):
            data_ranks.count_data_ranks(self, fabric.strategy.comms)

    return __init__


ThroughputMonitor.__init__ = _counting(ThroughputMonitor.__init__)  # type: ignore[method-assign]
register(AxoStrategy)  # without a grid: its error says what to do
