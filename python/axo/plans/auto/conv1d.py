"""Hugging Face's ``Conv1D``, a linear layer whose weight is stored as [in, out], as a parallel layer.

transformers is not imported here: the class is known by module and name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from axo.comm.connect import Communicators
from axo.matmul import cost
from axo.matmul.product import DistributedMatmul
from axo.nn.layer import ParallelLayer, default_device
from axo.placement import Placement, check_divides
from axo.sharding import cut_features, gather_features


def is_conv1d(module: nn.Module) -> bool:
    """Whether it is transformers' Conv1D: a linear layer whose weight is stored as [in, out]."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


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
        comms: Communicators,
        transposed: bool = False,
        grad_reduce: str = "mean",
        gather_cache: str | int = "all",
        out_blocks: tuple[int, ...] | None = None,
        scatter_input: bool = False,
        gather_output: bool = False,
        like: type[nn.Module],
        name: str | None = None,
    ) -> None:
        comms.arrangement.only_axonn(f"Conv1D {name or ''!r}")
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
