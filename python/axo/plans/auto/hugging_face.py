"""What plan "auto" knows of Hugging Face's classes: ``Conv1D``, and attention that works on any number of heads.

Attention of the Llama family reshapes to (batch, tokens, -1, head_dim), so it computes with as many heads as its
projections give it: q, k and v normal, o transposed, heads over x. Only its ratio of query to key-value heads changes,
and that only where neighbours share a head. GPT-2's splits one projection at ``split_size``, which becomes 1/Gx of it.

transformers is not imported here: classes are known by module and name. Not here: cross-attention, head masks,
``output_attentions`` (gives this rank's heads).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from axo.matmul import cost
from axo.matmul.product import DistributedMatmul
from axo.nn.layer import ParallelLayer, default_device
from axo.placement import Placement, check_divides
from axo.plans.heads import kv_copies
from axo.sharding import cut_features, gather_features

SEPARATE = ("llama.LlamaAttention", "mistral.MistralAttention", "qwen2.Qwen2Attention", "gemma.GemmaAttention")
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


def is_conv1d(module: nn.Module) -> bool:
    """Whether it is transformers' Conv1D: a linear layer whose weight is stored as [in, out]."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def _hf_name(module: nn.Module) -> str:
    """``llama.LlamaAttention`` for a class of transformers' models, else an empty string."""
    where = type(module).__module__.split(".")
    return f"{where[2]}.{type(module).__name__}" if where[:2] == ["transformers", "models"] and len(where) > 3 else ""


@dataclass(frozen=True)
class Attention:
    """How one attention module is split by heads.

    Attributes:
        layers: Child -> (kind, options of the layer): the first projections are whole->split, the last split->whole.
        attributes: What its forward reads and computes with this rank's heads.
    """

    layers: dict[str, tuple[str, dict[str, Any]]]
    attributes: dict[str, Any]


def attention(module: Any, name: str, ranks: int) -> Attention | str:
    """How to split ``module`` over ``ranks`` along x; a reason in words where that cannot be; "" if no attention."""
    kind = _hf_name(module)
    try:
        if kind in SEPARATE:
            return _separate(module, name, ranks)
        if kind == "gpt2.GPT2Attention" and not module.is_cross_attention:
            return _fused(module, name, ranks)
    except ValueError as error:
        return str(error)
    return ""


def _separate(module: Any, name: str, ranks: int) -> Attention:
    if any(type(getattr(module, child)) is not nn.Linear for child in _PROJECTIONS):
        raise ValueError(f"{name}: its projections are not all torch.nn.Linear")
    size = module.head_dim
    heads, groups = module.q_proj.out_features // size, module.k_proj.out_features // size
    check_divides(name, "query heads", heads, "x", ranks)
    copies = kv_copies(name, "key-value heads", groups, ranks)
    shared = {"out_blocks": (groups * size,), "out_copies": (copies,)} if copies > 1 else {}
    layers = {"q_proj": ("normal", {}), "k_proj": ("normal", shared), "v_proj": ("normal", shared)}
    mine = {"num_key_value_groups": heads // ranks // (groups * copies // ranks)}
    return Attention({**layers, "o_proj": ("transposed", {})}, mine)


def _fused(module: Any, name: str, ranks: int) -> Attention:
    if not (is_conv1d(module.c_attn) and is_conv1d(module.c_proj)):
        raise ValueError(f"{name}: its projections are not Conv1D")
    check_divides(name, "heads", module.num_heads, "x", ranks)
    layers = {"c_attn": ("normal", {"out_blocks": (module.split_size,) * 3}), "c_proj": ("transposed", {})}
    return Attention(layers, {"split_size": module.split_size // ranks, "num_heads": module.num_heads // ranks})


class Conv1D(ParallelLayer):
    """transformers' Conv1D, O = I @ weight + bias, whose weight ``[in, out]`` the grid shares.

    ``axo.nn.Linear`` with the weight stored the other way round: a rank holds ``[nx/Gin, nf/Gout/Gz]``. Arguments as
    there; sizes must divide.

    Raises:
        ValueError: A size does not divide over its axis.
    """

    weight: nn.Parameter
    bias: nn.Parameter

    def __init__(
        self,
        nf: int,
        nx: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        comms: Any,
        transposed: bool = False,
        grad_reduce: str = "mean",
        gather_cache: str | int = "all",
        out_blocks: tuple[int, ...] | None = None,
        scatter_input: bool = False,
        gather_output: bool = False,
        like: type[nn.Module],
        name: str | None = None,
    ) -> None:
        in_axis, out_axis = ("x", "y") if transposed else ("y", "x")
        weight = Placement((nx, nf), ((in_axis,), (out_axis, "z")), out_blocks, comms, block_dim=1 if out_blocks else 0)
        bias = Placement((nf,), ((out_axis,),), out_blocks, comms)
        self._start(comms, name, {"weight": weight, "bias": bias})
        check_divides(self.label(), "nx", nx, in_axis, comms.grid.size(in_axis))
        for block in out_blocks or (nf,):
            check_divides(self.label(), "nf", block, out_axis, comms.grid.size(out_axis))
        self.nf, self.nx, self.in_axis, self.out_axis, self.out_blocks = nf, nx, in_axis, out_axis, out_blocks
        self.in_features_whole, self.out_features_whole = nx, nf
        self.scatter_input, self.gather_output = scatter_input, gather_output
        self._like = like
        self.matmul = DistributedMatmul(
            comms,
            Placement((nf, nx), ((out_axis, "z"), (in_axis,)), out_blocks, comms),
            in_axis=in_axis,
            out_axis=out_axis,
            grad_reduce=grad_reduce,
            gather_cache=gather_cache,
        )
        self.exchanges = (self.matmul.exchange,)
        self._add_parameters(default_device(device, comms), dtype)

    def serial(self, device: torch.device, dtype: torch.dtype) -> nn.Module:
        with torch.device(device):
            return self._like(self.nf, self.nx).to(dtype)  # type: ignore[call-arg]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., nx/Gin) -> (..., nf/Gout).

        Raises:
            ValueError: The input's last dim is not this rank's part of nx.
        """
        if self.scatter_input and self.in_axis is not None:
            x = cut_features(x, self.comms, self.in_axis, self.nx)
        if x.shape[-1] != self.weight.shape[0]:
            raise ValueError(
                f"{self.label()}: input of shape {tuple(x.shape)} must end in {self.weight.shape[0]}, this rank's part"
                f" of nx={self.nx} over {self.in_axis}={self.matmul.exchange.size(self.in_axis)}"
            )
        output = self.matmul(x, self.weight.t(), self.bias)
        if self.gather_output and self.out_axis is not None:
            output = gather_features(output, self.comms, self.out_axis, self.nf, self.out_blocks)
        return output

    def cost(self, rows: int, *, itemsize: int = 4, input_grad: bool = True) -> list[cost.Call]:
        """Count this layer's collectives on this rank in one step; see :meth:`axo.nn.Linear.cost`."""
        grid, coords, transposed = self.comms.grid, self.comms.coords, self.in_axis == "x"
        options: dict[str, Any] = {"transposed": transposed, "itemsize": itemsize}
        gathers = self._gathers(input_grad)
        calls = cost.linear(
            grid, rows, self.nx, self.nf, **options, gathers=gathers, input_grad=input_grad, coords=coords
        )
        mine = cost.part(rows, grid.z, coords.z)
        before = mine * self.nx if self.scatter_input and input_grad else 0
        after = mine * self.nf if self.gather_output else 0
        return self._reduced(calls) + cost.relayout(grid, before, after, **options)

    def extra_repr(self) -> str:
        kind = "transposed" if self.in_axis == "x" else "normal"
        return f"nf={self.nf}, nx={self.nx}, {kind}, grid={self.comms.grid}"
