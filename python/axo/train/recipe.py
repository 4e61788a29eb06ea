"""The recipe that a parallel run and its serial oracle have in common: learning rate, optimizer, precision.

    lr(s) = lr (s + 1) / warmup                                                      s < warmup
    lr(s) = min + (lr - min) (1 + cos(pi (s - warmup) / (steps - warmup))) / 2       after

Plain torch: nothing here knows of ranks. Source: the usual recipe (GPT-3, LitGPT).
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from axo.nn.goldfish import goldfish_targets
from axo.offload.options import Offload
from axo.optim.muon import Muon, muon_groups
from axo.train.config import TrainConfig

_PRODUCTS = ("aten.mm.default", "aten.addmm.default", "aten.bmm.default", "aten.baddbmm.default")


def learning_rate(step: int, config: TrainConfig) -> float:
    """Return the learning rate of ``step`` (counted from 0)."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    progress = (step - config.warmup) / max(1, config.steps - config.warmup)
    return config.last_lr + (config.lr - config.last_lr) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def set_learning_rate(optimizer: torch.optim.Optimizer, step: int, config: TrainConfig) -> float:
    """Give every group the rate of ``step``; return it."""
    lr = learning_rate(step, config)
    for group in optimizer.param_groups:
        group["lr"] = lr
    return lr


def build_optimizer(
    model: torch.nn.Module, config: TrainConfig, offload: Offload | None = None
) -> torch.optim.Optimizer:
    """Build AdamW, its state where ``offload`` says; or Muon, its updates as large as AdamW's, since they share a rate.

    Weights (two dims and more) decay, biases and norms do not.
    """
    betas = (config.beta1, config.beta2)
    if config.optimizer == "muon":
        hidden_and_others = muon_groups(model, adamw={"betas": betas})
        return Muon(hidden_and_others, config.lr, config.weight_decay, adjust_lr_fn="match_rms_adamw")
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    adamw = offload.adamw if offload and (offload.optimizer or offload.parameters) else torch.optim.AdamW
    return adamw([group for group in groups if group["params"]], lr=config.lr, betas=betas)


def autocast(config: TrainConfig) -> AbstractContextManager[Any]:
    """The context of a forward pass: bf16 (fp16) products over fp32 weights in ``bf16-mixed`` (``16-mixed``)."""
    dtype = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(config.precision)
    return nullcontext() if dtype is None else torch.autocast(config.device.split(":")[0], dtype=dtype)


def wanted_targets(inputs: torch.Tensor, targets: torch.Tensor, config: TrainConfig) -> torch.Tensor:
    """The targets (rows, seq_len) that the loss is taken over; those that goldfish loss leaves out become -100."""
    return goldfish_targets(inputs, targets, config.goldfish_k, config.goldfish_h) if config.goldfish_k else targets


def finish_model(model: torch.nn.Module, config: TrainConfig) -> None:
    """Apply the options that change a built GPT: bf16 weights, and recomputation of each block in backward.

    Recomputation that keeps products is torch's selective activation checkpointing: the results of products and of
    attention stay in memory, and what lies between them (norms, activations, rotations) is computed again.
    """
    if config.precision == "bf16-true":
        model.to(torch.bfloat16)
    if config.recompute:
        selective = partial(create_selective_checkpoint_contexts, _policy)
        contexts = noop_context_fn if config.recompute_keeps == "nothing" else selective
        for block in model.get_submodule("transformer.h").children():
            if next(block.parameters(), None) is not None:  # else another stage has it
                block.forward = partial(  # type: ignore[method-assign]
                    checkpoint, block.forward, use_reentrant=False, context_fn=contexts
                )


def _policy(ctx: Any, operation: Any, *args: Any, **options: Any) -> CheckpointPolicy:
    name = str(operation)
    kept = name in _PRODUCTS or name.startswith("aten._scaled_dot_product_")
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
