"""AxoStrategy: a Lightning Fabric strategy that trains on a 4D grid.

    fabric = L.Fabric(strategy=AxoStrategy(grid="2x2x2x1"))     # or strategy="axo" with AXO_GRID=2x2x2x1
    fabric.launch()                                             # starts the ranks; joins them under torchrun, SLURM
    with fabric.init_module(empty_init=True):                   # meta device: no rank ever holds the whole model
        model = GPT(config)
    model = fabric.setup(model)                                 # axo.parallelize; shards are filled layer by layer
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters()))

What Fabric's parts become:

    sampler              replicas = Gz*Gdata, this rank's number = z + Gz*data; peers on x and y get the same batches
    backward             gradients come back averaged over the data ranks
    clip_gradients       the norm over all shards, each element once
    save, load           plain whole tensors, as one rank would write them, optimizer state included; or, with
                         ``sharded`` (AXO_SHARDED=1), a folder into which every rank writes its own chunks
    logits               whole on every rank; ``vocab_loss`` (AXO_VOCAB_LOSS=1) leaves them split over x in training:
                         then the loss must be ``fabric.strategy.cross_entropy``

``fabric.world_size`` counts ranks. A trainer that takes every rank for a data rank (LitGPT) wants ``counts="data"``:
then a data rank, its Gx*Gy ranks together, is what Fabric calls a device. Environment: AXO_GRID, AXO_VOCAB_LOSS,
AXO_SHARDED.

``fabric.no_backward_sync`` is ``axo.no_sync``: gradients of all but the last micro-batch are added up unreduced.

Not here: FSDP's and DDP's options, models that the plan does not know (refused by name).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from datetime import timedelta
from typing import Any

import torch
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.strategies.strategy import _BackwardSyncControl, _validate_keys_for_strict_loading
from lightning.fabric.utilities.types import _Stateful
from torch import nn
from torch.optim import Optimizer

import axo
from axo.grid import Grid
from axo.integrations.fabric import sharded_checkpoint as sharded
from axo.integrations.fabric import whole_checkpoint as checkpoint
from axo.integrations.fabric.compile import keep_out_of_graphs
from axo.integrations.fabric.loader import SharedLoader, split_in_order
from axo.integrations.fabric.materialize import is_parallel, materialize
from axo.integrations.fabric.ranks import GridRanks
from axo.integrations.fabric.recorded_init import AsBuilt
from axo.integrations.fabric.step_agreement import Guard
from axo.overlap.zero import NOT_ELEMENTWISE

_TIMEOUT = timedelta(minutes=30)


class AxoStrategy(GridRanks):
    """Train on a grid of ranks.

    Args:
        grid: Ranks on each axis; None: the environment's AXO_GRID.
        plan: How ``axo.parallelize`` is to split the model.
        zero: ZeRO on the data axis, as for ``axo.parallelize``: 0, 1 or 2.
        vocab_loss: Leave logits split over x while training; None: whether AXO_VOCAB_LOSS is 1.
        sharded: Save sharded checkpoints (sharded.py), not whole ones; None: whether AXO_SHARDED is 1. Both are loaded.
        counts: What ``fabric.world_size``, ``all_reduce`` and ``all_gather`` count: ``"ranks"``, or ``"data"`` ranks.
        like_one_device: Start from what one device would start from: values as the model's constructors draw them, not
            ``reset_parameters``; samples in the order of the loader's own sampler, not of a DistributedSampler.
        guard: Has all ranks agree before each optimizer step that their losses are finite, or raises on all of them.
        timeout: Of the rendezvous and of each operation.
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision: As in Fabric's own strategies.

    Raises:
        ValueError: No grid is given, an option is not known, or a variable of the environment is neither 0 nor 1.
    """

    def __init__(
        self,
        grid: Grid | str | None = None,
        *,
        plan: str = "litgpt",
        zero: int = 0,
        vocab_loss: bool | None = None,
        sharded: bool | None = None,
        counts: str = "ranks",
        like_one_device: bool = False,
        guard: Guard | None = None,
        timeout: timedelta = _TIMEOUT,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision: Any = None,
    ) -> None:
        super().__init__(
            grid, counts, timeout, accelerator, parallel_devices, cluster_environment, checkpoint_io, precision
        )
        self.plan, self.zero = plan, zero
        self.vocab_loss, self.sharded = vocab_loss, sharded
        if vocab_loss is None:
            self.vocab_loss = _switch("AXO_VOCAB_LOSS", os.environ.get("AXO_VOCAB_LOSS"))
        if sharded is None:
            self.sharded = _switch("AXO_SHARDED", os.environ.get("AXO_SHARDED"))
        self.guard, self.like_one_device = guard, like_one_device
        self._as_built: AsBuilt | None = None
        self._columns = 0  # of whole logits
        self._backward_sync_control = _NoSync()

    # --- model and optimizer ------------------------------------------------------------------------------------

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager:
        """Build on the meta device with ``empty_init=True``, else with values on the CPU.

        A trainer that counts data ranks loads or resets the weights in any case, so there it is always meta.
        """
        stack = ExitStack()
        meta = bool(empty_init) or self.counts == "data" or self.like_one_device
        stack.enter_context(torch.device("meta") if meta else torch.device("cpu"))
        if self.like_one_device:
            self._as_built = stack.enter_context(AsBuilt(self.root_device))
        stack.enter_context(self.precision.module_init_context())
        return stack

    def module_to_device(self, module: nn.Module) -> None:
        if not any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
            module.to(self.root_device)

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Split ``module`` over the grid, in place. One made of Axo's layers already is left as it is."""
        self._check_launched("setup")
        if is_parallel(module):
            return module
        originals = {name: part for name, part in module.named_modules() if _holds_meta(part)}
        axo.parallelize(module, self.comms, plan=self.plan, gather_logits=not self.vocab_loss, zero=self.zero)
        if originals:
            materialize(module, originals, self.comms, self._as_built)
            self._as_built = None
        if self.vocab_loss:
            head: Any = module.get_submodule("lm_head")
            self._columns = head.out_features
            head.register_forward_pre_hook(_gather_unless_training)  # whoever evaluates or generates wants whole logits
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
        kinds = {kind.__name__ for kind in type(optimizer).__mro__}
        if kinds & NOT_ELEMENTWISE and self.grid.x * self.grid.y * self.grid.z > 1:
            raise ValueError(
                f"AxoStrategy: {type(optimizer).__name__} looks at whole tensors, and grid {self.grid} splits them;"
                " use an optimizer that treats each element by itself (AdamW, SGD, ...), or a grid with data ranks only"
            )
        return super().setup_optimizer(optimizer)

    def backward(self, tensor: torch.Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        if self.guard is not None:
            self.guard.note(tensor)
        super().backward(tensor, module, *args, **kwargs)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        self._agree()
        return super().optimizer_step(optimizer, **kwargs)

    def _agree(self) -> None:
        if self.guard is not None:
            self.guard.before_step(self.comms)

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
        strict = error_if_nonfinite and self.guard is None
        norm = axo.clip_grad_norm_(self.precision.main_params(optimizer), max_norm, norm_type, strict)
        if error_if_nonfinite and self.guard is not None:
            self.guard.check_norm(norm)
        return norm

    def cross_entropy(
        self, logits: Any, targets: torch.Tensor, chunk_size: int = 128, ignore_index: int = -100
    ) -> torch.Tensor:
        """Mean loss of ``logits`` (batch, seq, V or V/Gx), or a list of them cut along seq; as litgpt's own function.

        Whole logits take the stock path; logits split over x the vocabulary-parallel one.
        """
        whole = logits[0].shape[-1] if isinstance(logits, list) else logits.shape[-1]
        if not self.vocab_loss or self.grid.x == 1 or whole == self._columns:
            from litgpt.utils import chunked_cross_entropy

            return chunked_cross_entropy(logits, targets, chunk_size, ignore_index)
        parts = logits if isinstance(logits, list) else [logits]
        total = targets.new_zeros((), dtype=torch.float32)
        for part, wanted in zip(parts, targets.split([part.shape[1] for part in parts], 1), strict=True):
            total = total + axo.nn.cross_entropy(
                part, wanted, ignore_index=ignore_index, reduction="sum", comms=self.comms, columns=self._columns
            )
        return total / (targets != ignore_index).sum().clamp(min=1)

    # --- data ---------------------------------------------------------------------------------------------------

    @property
    def distributed_sampler_kwargs(self) -> Any:
        return None if self.like_one_device else super().distributed_sampler_kwargs  # None: Fabric keeps the sampler

    def process_dataloader(self, dataloader: Any) -> Any:
        self._check_launched("setup_dataloaders")
        if self.like_one_device:
            dataloader = split_in_order(dataloader, self.comms)
        return SharedLoader(dataloader, self.comms)

    # --- checkpoints ---------------------------------------------------------------------------------------------

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Whole tensors on rank 0, nothing elsewhere. Every rank must call it."""
        return checkpoint.module_state(module, checkpoint.keep_all if self.is_global_zero else None)

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Whole tensors on rank 0, nothing elsewhere. Every rank must call it."""
        return checkpoint.optimizer_state(optimizer, checkpoint.keep_all if self.is_global_zero else None)

    def save_checkpoint(
        self,
        path: Any,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Write whole tensors into one file. Rank 0 writes; no rank holds more than one of them at a time.

        ``sharded``: every rank writes its chunks into a folder of that name; what is filtered (LoRA's) stays whole.
        """
        if self.sharded and not filter and any(isinstance(value, nn.Module) for value in state.values()):
            sharded.save(path, state, self.comms)
            return
        checkpoint.save(path, state, self.checkpoint_io, storage_options, filter or {}, writes=self.is_global_zero)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read what any number of ranks wrote, whole or sharded, or a run without Axo; each rank takes its parts."""
        if sharded.is_sharded(path):
            return sharded.load(path, state or {}, strict, self.comms)
        loaded = checkpoint.load(path, self.checkpoint_io, weights_only)
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
            target.load_state_dict(checkpoint.local_optimizer_state(target, value))
        else:
            target.load_state_dict(value)


class _NoSync(_BackwardSyncControl):
    """Gradients of a backward inside stay unreduced until the next one outside."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager:
        return axo.no_sync(module) if enabled else nullcontext()


def _switch(name: str, value: str | None) -> bool:
    if value not in (None, "", "0", "1"):
        raise ValueError(f"AxoStrategy: {name}={value} is neither 0 nor 1")
    return value == "1"


def _holds_meta(module: nn.Module) -> bool:
    own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    return any(tensor.is_meta for tensor in own)


def _gather_unless_training(head: Any, inputs: Any) -> None:
    head.gather_output = not head.training


def register() -> None:
    """Make ``strategy="axo"`` known to Fabric (importing this module does it)."""
    STRATEGY_REGISTRY.register("axo", AxoStrategy, "Four-dimensional parallelism; the grid is AXO_GRID", override=True)


register()
