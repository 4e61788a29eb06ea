"""What attention that has been split by heads calls: the code that ``by_heads`` writes is made of these functions.

Numbers in that code are those of the serial module (all heads, all features); tensors between its first and its last
projections hold this rank's part of one dim. A dim is counted from the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from axo.comm.connect import Communicators
from axo.errors import Refused
from axo.nn.randomness import SharedRandomness
from axo.plans.gradient import sum_gradient
from axo.sharding import cut_features


class HeadsOf:
    """What the code of one module knows of its grid: ``axis`` splits its heads.

    Attributes:
        ranks: Along the axis.
    """

    def __init__(self, name: str, comms: Communicators, axis: str, rows: tuple[str, ...]) -> None:
        self.name, self.comms, self.axis, self.ranks = name, comms, axis, comms.grid.size(axis)
        self._random = SharedRandomness(comms, (axis, *rows))

    @contextmanager
    def random(self) -> Iterator[None]:
        """Draw from a stream of this rank's heads, not from that which all ranks along the axis share."""
        drawing = nn.Module()  # in training
        self._random.before(drawing, None)
        try:
            yield
        finally:
            self._random.after(drawing, None, None)

    def __deepcopy__(self, memo: Any) -> HeadsOf:
        return self


def _shared(heads: HeadsOf, tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.requires_grad or heads.ranks == 1:
        return tensor
    return sum_gradient(tensor, heads.comms.axis(heads.axis), f"attention {heads.name!r}")


def check_input(heads: HeadsOf, tensor: torch.Tensor) -> torch.Tensor:
    """Refuse an input of another rank than what was proved is about.

    Raises:
        axo.Refused: It is not (batch, tokens, features).
    """
    if tensor.dim() != 3:
        raise Refused(
            f"attention {heads.name!r} is split by heads for inputs of (batch, tokens, features) and got"
            f" {tuple(tensor.shape)}; name its layers 'normal:whole->whole' in a plan of patterns"
        )
    return tensor


def fit_heads(heads: HeadsOf, tensor: Any, dim: int, size: int, rank: int) -> Any:
    """A whole tensor that meets split ones, whose ``dim`` is of ``size`` in all: this rank's part, or all of it.

    Raises:
        axo.Refused: Its shape does not fit.
    """
    if not isinstance(tensor, torch.Tensor):
        return tensor
    if tensor.dim() > rank or (tensor.dim() >= -dim and tensor.shape[dim] not in (1, size)):
        raise Refused(
            f"attention {heads.name!r} is split by heads, and a tensor of shape {tuple(tensor.shape)} meets them; dim"
            f" {dim} must be 1 or {size}, of at most {rank} dims"
        )
    if tensor.dim() >= -dim and tensor.shape[dim] == size > 1:
        return cut_features(tensor, heads.comms, heads.axis, size, dim=dim)
    return _shared(heads, tensor)


def norm(heads: HeadsOf, module: nn.Module, tensor: torch.Tensor) -> torch.Tensor:
    """A norm of each head by itself: its weights are those of all heads."""
    own = {name: _shared(heads, parameter) for name, parameter in module.named_parameters()}
    return functional_call(module, own, (tensor,))


def shape_of(heads: HeadsOf, tensor: torch.Tensor, dim: int, wanted: int | None = None) -> Any:
    """The shape that the serial module has here, or one number of it."""
    shape = list(tensor.shape)
    shape[dim] *= heads.ranks
    return torch.Size(shape) if wanted is None else shape[wanted]


def view(heads: HeadsOf, tensor: torch.Tensor, index: int, *shape: Any) -> torch.Tensor:
    """``tensor.reshape(shape)``, where the number at ``index`` is shared."""
    return tensor.reshape(_shared_sizes(heads, index, shape))


def expand(heads: HeadsOf, tensor: torch.Tensor, index: int, *shape: Any) -> torch.Tensor:
    """``tensor.expand(shape)``, where the number at ``index`` is shared."""
    return tensor.expand(_shared_sizes(heads, index, shape))


def _shared_sizes(heads: HeadsOf, index: int, shape: Sequence[Any]) -> list[int]:
    sizes = list(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else list(shape)
    if sizes[index] != -1:
        sizes[index] //= heads.ranks
    return sizes


def drop_in(heads: HeadsOf, module: nn.Module, tensor: torch.Tensor) -> torch.Tensor:
    """``module``, a dropout, of this rank's heads."""
    with heads.random():
        dropped: torch.Tensor = module(tensor)
    return dropped


def dropout(heads: HeadsOf, *args: Any, **options: Any) -> torch.Tensor:
    """torch's, of this rank's heads."""
    with heads.random():
        return F.dropout(*args, **options)


def attention(heads: HeadsOf, *args: Any, **options: Any) -> torch.Tensor:
    """torch's, with dropout, of this rank's heads."""
    with heads.random():
        return F.scaled_dot_product_attention(*args, **options)
