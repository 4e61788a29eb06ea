"""Put a Megatron GPTModel on Axo's grid: its parallel layers become plain ones, and a plan of four lines splits them.

Megatron's own ColumnParallelLinear and RowParallelLinear keep a weight as nn.Linear does, and return (output, bias).
``Joined`` holds the same weight in nn.Linear layers, which Axo knows, and returns (output, None). A gated fc1 is two of
them, gate and up, since each is split by itself. Megatron orders qkv by groups of heads, so its rows are split by heads
as they are; the attention modules are told how many heads are left, as Megatron tells them under its own tensor
parallelism.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import axo

PLAN = {
    "*.linear_qkv.*": "normal:whole->split",
    "*.linear_proj.*": "transposed:split->whole",
    "*.linear_fc1.*": "normal:whole->split",
    "*.linear_fc2.*": "transposed:split->whole",
}


class Joined(nn.Module):
    """The weight of one Megatron layer in ``parts`` nn.Linear layers, whose outputs are joined."""

    def __init__(self, layer: Any, parts: int = 1, weight: nn.Parameter | None = None) -> None:
        super().__init__()
        whole = layer.weight if weight is None else weight
        out, into = whole.shape
        self.parts = nn.ModuleList(nn.Linear(into, out // parts, layer.bias is not None, "meta") for _ in range(parts))
        for number, part in enumerate(self.parts):
            rows = slice(number * out // parts, (number + 1) * out // parts)
            part.weight = whole if parts == 1 else nn.Parameter(whole.detach()[rows].clone())
            if layer.bias is not None:
                part.bias = nn.Parameter(layer.bias.detach()[rows].clone())

    def forward(self, input: torch.Tensor, **options: Any) -> tuple[torch.Tensor, None]:
        if options.get("runtime_gather_output"):
            raise ValueError("Joined: runtime_gather_output is not supported; the output layer gives whole logits")
        outputs = [part(input) for part in self.parts]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1), None


def parallelize(model: Any, comms: axo.Communicators) -> nn.Module:
    """Split an unmodified GPTModel of one rank over ``comms``, in place."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.attention import Attention

    table = nn.Embedding(model.vocab_size, model.config.hidden_size, device="meta")
    table.weight = model.embedding.word_embeddings.weight
    model.embedding.word_embeddings = table
    for name, module in list(model.named_modules()):
        if isinstance(module, ColumnParallelLinear | RowParallelLinear):
            gated = model.config.gated_linear_unit and name.endswith("linear_fc1")
            tied = table.weight if module.weight is None else None
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, Joined(module, 2 if gated else 1, tied))
    if model.share_embeddings_and_output_weights:  # Megatron would hand the table's shard to the output layer
        model.shared_embedding_or_output_weight = lambda: None
    axo.parallelize(model, comms, plan=PLAN)
    for module in model.modules():
        if isinstance(module, Attention):
            for holder in (module, module.core_attention):
                holder.num_attention_heads_per_partition //= comms.grid.x
                holder.num_query_groups_per_partition //= comms.grid.x
            module.core_attention.hidden_size_per_partition //= comms.grid.x
    return model


def megatron_state(model: Any) -> dict[str, torch.Tensor]:
    """Whole tensors under Megatron's names. Every rank calls it."""
    state: dict[str, torch.Tensor] = {}
    tensors = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    for name, tensor in tensors.items():
        owner, joined, rest = name.partition(".parts.")
        known = f"{owner}.{rest.partition('.')[2]}" if joined else name
        state[known] = torch.cat([state[known], tensor]) if known in state else tensor.clone()
    if model.share_embeddings_and_output_weights:  # as Megatron does, a tied head is left out
        state.pop("output_layer.weight", None)
    return state


def loss_of(model: Any, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of this rank's rows: ids and targets (rows, tokens)."""
    tokens = ids.shape[1]
    positions = torch.arange(tokens).expand_as(ids)
    hidden = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)[None, None]  # True: not to be seen
    return F.cross_entropy(model(ids, positions, hidden).flatten(0, 1), targets.flatten())
