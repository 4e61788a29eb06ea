"""Parameters and their gradients on the lower tier.

On a CPU rank a parameter's memory becomes a part of a mapped file; what reads it (a product, a gather over z) reads the
file. A gradient moves to its place beside it as soon as it is complete, by a hook: on one rank at once, else at the end
of backward, when Axo delivers gradients.

On a GPU a weight that z cuts (ZeRO-3) becomes a tensor of pinned host memory. It goes to the device as a part of its
gather, and its gradient comes to the host by itself (``axo.offload.shards``). What z does not cut stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from axo.offload.tier import PAGE, Tier
from axo.placement import placement_of


class Home:
    """Where a parameter and, on a CPU rank, its gradient lie.

    Args:
        parameter: Moves in at once.
        tier: Gives the memory.
        device: Which computes with the parameter.

    Attributes:
        tier, device: Those.

    Raises:
        OSError: The tier has no room; the parameter stays where it was.
    """

    def __init__(self, parameter: torch.Tensor, tier: Tier, device: torch.device) -> None:
        size = -(-parameter.nbytes // PAGE) * PAGE
        takes_gradient = parameter.requires_grad and device.type == "cpu"
        block = tier.block(2 * size if takes_gradient else size)
        mine = block[: parameter.nbytes].view(parameter.dtype).view(parameter.shape)
        mine.copy_(parameter.detach())
        parameter.data = mine
        tier.rest(mine)
        self.tier, self.device, self._storage = tier, device, block.untyped_storage().data_ptr()
        self._room = block[size:][: parameter.nbytes].view(parameter.dtype)
        if takes_gradient:
            self._handle = parameter.register_post_accumulate_grad_hook(self._take)

    def holds(self, parameter: torch.Tensor) -> bool:
        """Whether the parameter, or what ZeRO has narrowed it to, lies here."""
        return parameter.untyped_storage().data_ptr() == self._storage

    def leave(self) -> None:
        """Take no more gradients."""
        if hasattr(self, "_handle"):
            self._handle.remove()

    def _take(self, parameter: torch.Tensor) -> None:
        grad = parameter.grad
        if grad is None or grad.is_sparse or grad.data_ptr() == self._room.data_ptr():
            return
        room = self._room[: grad.numel()].view(grad.shape)  # with ZeRO-2 a part of the parameter's
        room.copy_(grad)
        self.tier.rest(room)
        if hasattr(grad, "placement"):
            room.placement = grad.placement  # type: ignore[attr-defined]
        if room.shape == parameter.shape:
            parameter.grad = room
        else:
            grad.data = room  # torch compares shapes when a gradient is given


def home_of(parameter: torch.Tensor) -> Home | None:
    """Where a parameter lies; None: it has no home, or has left it since (by ``model.to(dtype)``, say)."""
    home = getattr(parameter, "home", None)
    return home if isinstance(home, Home) and home.holds(parameter) else None


def computed_on(parameter: torch.Tensor) -> torch.device:
    """The device that computes with a parameter: of one on the host that has a home, or has left it, the home's."""
    home = getattr(parameter, "home", None)
    return home.device if isinstance(home, Home) and parameter.device.type == "cpu" else parameter.device


def move_in(parameters: Iterable[torch.Tensor], tier_of: Callable[[torch.device], Tier]) -> None:
    """Give each parameter a home that has none: on a CPU each, on a GPU each weight that z cuts.

    Raises:
        ValueError: ZeRO cuts the state of such a weight too, or the lower tier cannot be used.
        OSError: The tier has no room; those before it have moved.
    """
    for parameter in parameters:
        device = computed_on(parameter)
        if home_of(parameter) is not None or not (device.type == "cpu" or _is_gathered(parameter)):
            continue
        left = getattr(parameter, "home", None)
        if isinstance(left, Home):
            left.leave()
        parameter.home = Home(parameter, tier_of(device), device)  # type: ignore[attr-defined]


def _is_gathered(parameter: torch.Tensor) -> bool:
    """Whether a product wants more rows of the parameter than this rank keeps."""
    placement = placement_of(parameter)
    if placement is None or placement.comms is None or type(parameter) is not nn.Parameter:
        return False
    comms = placement.comms
    if not any(axis in comms.arrangement.rows and comms.grid.size(axis) > 1 for axis in placement.splits[0]):
        return False
    if placement.zero is not None:
        raise ValueError(
            "Offload: parameters=True with zero on a GPU is not supported; leave zero out, and give z the ranks of data"
        )
    return True
