"""Frozen weights in four bits (QLoRA, Dettmers et al., arXiv 2305.14314, section 3), or in eight.

    nf4, fp4   weight[n, k] -> codes of 4 bits, and the largest absolute value of each 64 neighbours, row after row
    int8       weight[n, k] -> codes of 8 bits, and the largest absolute value of each row (LLM.int8(), Dettmers et al.,
               arXiv 2208.07339, section 2.1, for weights only: activations stay as they are)

bitsandbytes does the arithmetic of four bits, on this rank's shard. Where a row of the shard is a multiple of 64
columns its blocks are blocks of the whole weight, and so are its values. A product makes the weight dense and drops it
again; nothing dense is kept from forward to backward. Over z each rank makes its rows dense, and these are gathered:
once for forward and once for backward, whatever the gather cache is.

Not here: double quantization of shards whose blocks are not those of the whole gives other values than one device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch.utils._pytree import tree_map_only

from axo.placement import Placement

BLOCK = 64


class QuantizedWeight(torch.Tensor):
    """A frozen parameter of the shape and dtype of the weight that it stands for; every operation sees it dense.

    Args:
        weight: The shard, (rows, columns).
        kind: "nf4" or "fp4", with "-dq" for scales that are quantized too; or "int8".
        largest: For int8, of each row of the whole weight, (rows,), fp32; None: the shard's rows are whole.
    """

    codes: torch.Tensor
    state: Any
    placement: Placement
    _is_param = True

    @staticmethod
    def __new__(cls, weight: torch.Tensor, kind: str, largest: torch.Tensor | None = None) -> Self:
        # through half precision, as Lightning's plugin does
        half = weight.detach().to(torch.half).contiguous()
        if kind == "int8":
            largest = largest_of_rows(half) if largest is None else largest
            eight = (half * (127 / largest.clamp_min(1e-30))[:, None]).round_().to(torch.int8)
            return cls._of(eight, largest, weight.dtype)
        from bitsandbytes import functional

        quantized, _, twice = kind.partition("-")
        codes, state = functional.quantize_4bit(
            half, blocksize=BLOCK, compress_statistics=bool(twice), quant_type=quantized
        )
        return cls._of(codes, state, weight.dtype)

    @classmethod
    def _of(cls, codes: torch.Tensor, state: Any, dtype: torch.dtype) -> Self:
        shape = codes.shape if codes.dtype == torch.int8 else state.shape
        new: Any = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=codes.device)
        new.codes, new.state = codes, state
        return new

    def dense(self) -> torch.Tensor:
        """The weight, (rows, columns), in memory of its own."""
        if self.codes.dtype == torch.int8:
            return (self.codes * (self.state / 127)[:, None]).to(self.dtype)
        from bitsandbytes import functional

        return functional.dequantize_4bit(self.codes, self.state).to(self.dtype)

    def data_ptr(self) -> int:
        """Where the codes lie: what is gathered from them is told apart by it."""
        return self.codes.data_ptr()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.ops.aten.detach.default:
            return cls._of(args[0].codes, args[0].state, args[0].dtype)
        args, kwargs = tree_map_only(QuantizedWeight, QuantizedWeight.dense, (args, kwargs or {}))
        return function(*args, **kwargs)


def largest_of_rows(weight: torch.Tensor) -> torch.Tensor:
    """The largest absolute value in each row of ``weight`` in half precision, fp32: (rows, columns) -> (rows,)."""
    return weight.detach().half().abs().amax(1).float()


def values(weight: torch.Tensor) -> torch.Tensor:
    """What to compute with: ``weight`` without its gradient's history, dense where it is quantized."""
    return weight.dense() if isinstance(weight, QuantizedWeight) else weight.detach()
