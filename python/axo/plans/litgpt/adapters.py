"""LitGPT's adapters on a grid: a prompt that attention looks at too (LLaMA-Adapter), and v2's scales and biases.

    v1   O = attention(q, k, v) + gate[heads] * attention(q, k', v'),    k', v' out of qkv(prompt[length, h])
         the prompt's features are over y, as all that qkv takes; the gate is split by heads over x
    v2   O[m, n] = scale[n] * (I @ W^T + b + bias[n])                     scale and bias lie as the features of O do

z and data replicate them all, for they are small: their gradients are reduced over both. With algorithm "tesseract"
heads and the features of every O are over y, and x replicates them as z does (``axo.arrangement``).

LitGPT 0.5.13 has two habits that a model on a grid shares, so that its results are LitGPT's. It takes k' and v' from
the rows of qkv as if these came group by group, where they are [q | k | v]: a head's k' may be another head's query.
So the few rows of the prompt are gathered over x before they are cut. And it keeps k' and v' of the first forward pass,
with or without gradients, until somebody sets ``adapter_kv_cache`` to None.

Not here: sequence parallelism (refused).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from litgpt.adapter_v2 import AdapterV2Linear
from litgpt.model import CausalSelfAttention as PlainAttention
from torch import nn

from axo.matmul import cost
from axo.nn import Features
from axo.nn.layer import ParallelLayer
from axo.nn.linear_loss import Beside
from axo.nn.replicated import reduce_gradient
from axo.overlap.engine import Exchange
from axo.placement import Placement, chunk_bounds
from axo.plans.gradient import sum_gradient
from axo.plans.replace import Replacer
from axo.sharding import gather_features


def own_gradients(layer: ParallelLayer, itemsize: int) -> list[cost.Call]:
    """The reductions of the gradients of a layer's own small parameters: over rows, and over who holds a copy."""
    calls: list[cost.Call] = []
    arrangement = layer.comms.arrangement
    for name, exchange in zip(layer.placements, layer.exchanges, strict=True):
        parameter: Any = getattr(layer, name)
        if parameter.requires_grad:
            calls += cost.replicated_grad(parameter.numel(), itemsize, arrangement)
            row, copies = math.prod(parameter.shape[1:]), exchange.vector_copies
            calls += [
                cost.Call(cost.BACKWARD, "all_reduce", arrangement.inner, (b - a) * row, itemsize,
                          cost.REDUCE_WEIGHT_GRAD)
                for a, b in (copies.rows if copies else ())
            ]  # fmt: skip
    return calls


class _OwnParameters(ParallelLayer):
    """A module that computes with small parameters of its own; a hook on each reduces its gradient."""

    def _exchange(self, replacer: Replacer) -> None:
        self.exchanges = tuple(
            Exchange(replacer.comms, placement, replacer.grad_reduce) for placement in self.placements.values()
        )

    def _tag(self) -> None:
        for (name, placement), exchange in zip(self.placements.items(), self.exchanges, strict=True):
            parameter: Any = getattr(self, name)
            if getattr(parameter, "placement", None) is not placement:
                reduce_gradient(parameter, exchange)
        super()._tag()

    def cost(self, rows: int, *, itemsize: int = 4) -> list[cost.Call]:
        """Count the reductions of this module's own gradients on this rank in one step, whatever ``rows``."""
        return cost.issued(self._reduced(own_gradients(self, itemsize)), self.comms.grid)


class Prompt(_OwnParameters):
    """The prompt of an attention: an ``nn.Embedding`` of which only the weight is used, its features over y.

    Args:
        old: The serial embedding.
        replacer: Whose grid it is for.
        name: Its name in the model.
    """

    def __init__(self, old: nn.Embedding, replacer: Replacer, name: str) -> None:
        shape = (old.num_embeddings, old.embedding_dim)
        self._start(replacer.comms, name, {"weight": Placement(shape, ((), ("y",)), comms=replacer.comms)})
        self._exchange(replacer)
        self._add_parameters("meta", old.weight.dtype)

    def serial(self, device: torch.device, dtype: torch.dtype) -> nn.Module:
        length, features = self.placements["weight"].global_shape
        return nn.Embedding(length, features, device=device, dtype=dtype)


class _Gate(nn.Module):
    """What an attention is to those who fill its gate."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.gating_factor = nn.Parameter(torch.empty(1, 1, heads, 1))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.gating_factor)


class _Prompted(_OwnParameters):
    """Mixed into ``litgpt.adapter.CausalSelfAttention``: this rank's heads look at the prompt."""

    heads: tuple[int, int]  # of all heads, whole: how many there are of queries, and of keys and values

    def serial(self, device: torch.device, dtype: torch.dtype) -> nn.Module:
        with torch.device(device):
            return _Gate(self.heads[0]).to(dtype)

    def scaled_dot_product_attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        attention: Any = self
        if attention.adapter_kv_cache is None:
            attention.adapter_kv_cache = self._keys_and_values()
        keys, values = attention.adapter_kv_cache
        everything = torch.ones(q.size(2), keys.size(2), dtype=torch.bool, device=q.device)
        of_prompt = PlainAttention.scaled_dot_product_attention(attention, q, keys, values, everything)
        of_tokens = PlainAttention.scaled_dot_product_attention(attention, q, k, v, mask)
        return of_tokens + attention.gating_factor * of_prompt

    def _keys_and_values(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What this rank's heads see of the prompt, (1, heads, length, head size) each; one head where all share it."""
        attention: Any = self
        heads, groups = self.heads
        inner = self.comms.arrangement.inner
        layer = getattr(attention.qkv, "linear", attention.qkv)
        rows = attention.qkv(attention.adapter_wte.weight.unsqueeze(0))
        rows = gather_features(rows, self.comms, inner, layer.out_features, layer.out_blocks, layer.out_copies)
        # Each rank's heads use rows of all ranks.
        rows = sum_gradient(rows, self.comms.axis(inner), "an adapter's prompt")
        each = heads // groups
        rows = rows.view(1, -1, groups, each + 2, attention.config.head_size).permute(0, 2, 3, 1, 4)
        prompt = rows[:, :, each], rows[:, :, each + 1]
        if groups == 1:
            return prompt
        first, last = chunk_bounds(heads, self.comms.grid.size(inner), getattr(self.comms.coords, inner))
        keys, values = (part.repeat_interleave(each, dim=1)[:, first:last] for part in prompt)
        return keys, values


def with_prompt(old: Any, name: str, replacer: Replacer) -> Any:
    """An attention like ``old``, whose linear layers are parallel already, with its prompt and gate split too.

    A new module: the serial one stays as it is, for those who fill parameters as it would.
    """
    if not hasattr(old, "gating_factor"):
        return old
    new: Any = object.__new__(type(f"Prompted{type(old).__name__}", (_Prompted, type(old)), {}))
    new.__dict__ = {key: value.copy() if isinstance(value, dict) else value for key, value in old.__dict__.items()}
    new.comms, new.name, new.heads = replacer.comms, name, (old.config.n_head, old.config.n_query_groups)
    splits = ((), (), (replacer.comms.arrangement.inner,))
    gate = Placement(tuple(old.gating_factor.shape), splits, comms=replacer.comms)
    new.placements = {"gating_factor": gate}
    new._exchange(replacer)
    part = replacer.part(old.gating_factor, gate)
    new.gating_factor = nn.Parameter(part, old.gating_factor.requires_grad)
    new._tag()
    prompt = Prompt(old.adapter_wte, replacer, f"{name}.adapter_wte")
    replacer.put(new, "adapter_wte", prompt)
    return new


class AroundLinear(ParallelLayer):
    """What LitGPT puts around a linear layer, with small parameters of its own.

    (..., in_features/Gin) -> (..., out_features/Gout), all out_features with ``gather_output``.

    Args:
        old: The serial layer. Whoever makes this gives it a parallel ``linear``.
        replacer: Whose grid it is for.
        name: Its name in the model.
        transposed, features: As for :class:`axo.nn.Linear`.
    """

    def __init__(self, old: Any, replacer: Replacer, name: str, transposed: bool, features: Features) -> None:
        self._start(replacer.comms, name, {})
        self.in_axis, inner = replacer.comms.arrangement.features(transposed)
        self.out_axis = None if features.whole_output else inner
        self.in_features_whole, self.out_features_whole = old.linear.in_features, old.linear.out_features
        self.out_blocks, self.out_copies = features.out_blocks, features.out_copies
        self.gather_output = features.gather_output
        self.placements = self._place(old)
        self.exchanges = tuple(Exchange(self.comms, each, replacer.grad_reduce) for each in self.placements.values())
        if self.placements:
            self._add_parameters("meta", next(getattr(old, each).dtype for each in self.placements))

    def _place(self, old: Any) -> dict[str, Placement]:
        """The placements of the own parameters, which lie as the features of the layer do."""
        raise NotImplementedError

    def beside(self, rows: torch.Tensor) -> Beside:
        """What it adds to the rows ``(rows, in_features/Gin)`` of a head, for a loss that makes their logits."""
        raise NotImplementedError

    @property
    def _out_axes(self) -> tuple[str, ...]:
        return (self.out_axis,) if self.out_axis else ()

    def _fill(self, whole: Any, device: torch.device, dtype: torch.dtype) -> nn.Module:
        """Give ``whole``, a serial layer on the meta device, its own parameters alone: ``linear`` is filled itself."""
        whole.linear = nn.Identity()
        for name, placement in self.placements.items():
            setattr(whole, name, nn.Parameter(torch.empty(placement.global_shape, device=device, dtype=dtype)))
        serial: nn.Module = whole
        return serial


class ScaledLinear(AroundLinear, _OwnParameters, AdapterV2Linear):
    """``litgpt.adapter_v2.AdapterV2Linear`` around an :class:`axo.nn.Linear`."""

    adapter_bias: nn.Parameter
    adapter_scale: nn.Parameter

    def _place(self, old: Any) -> dict[str, Placement]:
        out = (old.linear.out_features,)
        placement = Placement(out, (self._out_axes,), self.out_blocks, self.comms, self.out_copies)
        return {"adapter_bias": placement, "adapter_scale": placement}

    def serial(self, device: torch.device, dtype: torch.dtype) -> nn.Module:
        with torch.device("meta"):
            return self._fill(AdapterV2Linear(1, 1), device, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._gather_if_asked(AdapterV2Linear.forward(self, x))

    def beside(self, rows: torch.Tensor) -> Beside:
        return Beside(shift=self.adapter_bias, scale=self.adapter_scale)
