"""Parameters and their gradients on the lower tier, for CPU ranks.

A parameter's memory becomes a part of a mapped file; what reads it (a product, a gather over z) reads the file. A
gradient moves to its place beside it as soon as it is complete, by a hook: on one rank at once, else at the end of
backward, when Axo delivers gradients. On a GPU they would have to be brought up first, which is refused.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from axo.offload.tier import PAGE, Tier


class Home:
    """Where a parameter and its gradient lie.

    Args:
        parameter: Moves in at once.
        tier: Gives the memory.

    Raises:
        OSError: The tier has no room; the parameter stays where it was.
    """

    def __init__(self, parameter: torch.Tensor, tier: Tier) -> None:
        size = -(-parameter.nbytes // PAGE) * PAGE
        block = tier.block(2 * size if parameter.requires_grad else size)
        mine = block[: parameter.nbytes].view(parameter.dtype).view(parameter.shape)
        mine.copy_(parameter.detach())
        parameter.data = mine
        tier.rest(mine)
        self.tier, self.pointer = tier, parameter.data_ptr()
        self._room = block[size:][: parameter.nbytes].view(parameter.dtype)
        if parameter.requires_grad:
            self._handle = parameter.register_post_accumulate_grad_hook(self._take)

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


def move_in(parameters: Iterable[torch.Tensor], tier: Tier) -> None:
    """Give each parameter a home on ``tier`` that has none, or has left it since (by ``model.to(dtype)``, say).

    Raises:
        OSError: The tier has no room; those before it have moved.
    """
    for parameter in parameters:
        home = getattr(parameter, "home", None)
        if isinstance(home, Home):
            if home.pointer == parameter.data_ptr():
                continue
            home.leave()
        parameter.home = Home(parameter, tier)  # type: ignore[attr-defined]
