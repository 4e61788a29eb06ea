"""Hugging Face's ``Conv1D``, a linear layer whose weight is stored as [in, out], as a parallel layer.

transformers is not imported here: the class is known by module and name.
"""

from __future__ import annotations

import torch
from torch import nn

from axo.comm.connect import Communicators
from axo.nn import Features, Linear
from axo.placement import Placement


def is_conv1d(module: nn.Module) -> bool:
    """Whether it is transformers' Conv1D: a linear layer whose weight is stored as [in, out]."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


class Conv1D(Linear):
    """transformers' Conv1D, O = I @ weight + bias: ``axo.nn.Linear`` with the weight stored the other way round.

    A rank holds ``[nx/Gin, nf/Gout/Gz]``.

    Args:
        like: The serial layer, of which only the class and the sizes are used.
        comms, transposed, grad_reduce, features, name: As for ``axo.nn.Linear``.

    Raises:
        ValueError: A size does not divide over its axis.
    """

    def __init__(
        self,
        like: nn.Module,
        *,
        comms: Communicators,
        transposed: bool,
        grad_reduce: str,
        features: Features,
        name: str,
    ) -> None:
        comms.arrangement.only_axonn(f"Conv1D {name!r}")
        weight = like.get_parameter("weight")
        nx, nf = weight.shape
        super().__init__(
            nx,
            nf,
            device="meta",
            dtype=weight.dtype,
            comms=comms,
            transposed=transposed,
            grad_reduce=grad_reduce,
            features=features,
            name=name,
        )
        self.nf, self.nx, self._like = nf, nx, type(like)

    @staticmethod
    def _stored(matrix: Placement) -> Placement:
        block_dim = 1 if matrix.blocks else 0
        return Placement(matrix.global_shape[::-1], matrix.splits[::-1], matrix.blocks, matrix.comms, None, block_dim)

    def _matrix(self) -> torch.Tensor:
        return self.weight.t()

    def serial(self, device: torch.device, dtype: torch.dtype) -> nn.Module:
        with torch.device(device):
            return self._like(self.nf, self.nx).to(dtype)
