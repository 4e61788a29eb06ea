"""What lies on the lower tier: an option of ``axo.parallelize``, and the maker of the optimizer that goes with it.

What is wrong with the option is told without torch. Not here: how it gets there and back.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from axo.placement import placement_of

if TYPE_CHECKING:
    import torch
    from torch import nn

    from axo.offload.tier import Tier


@dataclass(frozen=True)
class Offload:
    """Which part of a rank's state lies on the lower tier; losses and gradients do not depend on it.

    The lower tier of a GPU is pinned memory of the host; that of a CPU rank is files in ``dir``.

    Args:
        optimizer: AdamW's moments, and the fp32 masters of parameters of another dtype; ``adamw`` makes the optimizer.
        parameters: The parameters and their gradients: with ``optimizer`` all that a CPU rank keeps. On a GPU those
            that the axis z cuts, which are gathered to be used.
        activations: Tensors that forward saves for backward: ``"none"``, ``"all"`` of the model's, or those of the
            model's first ``n`` blocks: entries of its first ``nn.ModuleList`` or ``nn.Sequential``.
        dir: A folder on a disk, for CPU ranks; nothing is left in it. Each rank may have its own.

    Raises:
        ValueError: An option is out of range.
    """

    optimizer: bool = True
    parameters: bool = False
    activations: str | int = "none"
    dir: str | os.PathLike[str] | None = None
    _tiers: dict[torch.device, Tier] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("optimizer", "parameters"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"Offload: {name}={getattr(self, name)!r} is not a switch; use True or False")
        count = isinstance(self.activations, int) and not isinstance(self.activations, bool) and self.activations >= 0
        if not count and self.activations not in ("none", "all"):
            raise ValueError(
                f"Offload: activations={self.activations!r} is not known; use 'none', 'all', or a number of blocks"
                " such as 8"
            )
        if self.dir is not None and (not isinstance(self.dir, str | os.PathLike) or not os.fspath(self.dir)):
            raise ValueError(f"Offload: dir={self.dir!r} names no folder; give one on a disk, such as '/scratch'")

    @classmethod
    def parse(cls, text: str, dir: str | os.PathLike[str] | None = None) -> Offload:
        """Read what the command line takes: ``"optimizer,activations=4"``; ``"none"`` is nothing.

        Raises:
            ValueError: It names something else.
        """
        asked = [] if text == "none" else text.split(",")
        activations: str | int = "none"
        for each in asked:
            name, equals, count = each.partition("=")
            if name == "activations":
                activations = int(count) if count.isdecimal() else count if equals else "all"
            elif each not in ("optimizer", "parameters"):
                raise ValueError(
                    f"offload={text!r}: {each!r} is not known; use none, or a list of optimizer, parameters and"
                    " activations (or activations=BLOCKS), such as optimizer,activations=4"
                )
        return cls("optimizer" in asked, "parameters" in asked, activations, dir)

    def adamw(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
    ) -> torch.optim.AdamW:
        """Make AdamW over the parameters of a model, as ``torch.optim.AdamW(..., fused=True)`` on the CPU computes it.

        Its state is where ``optimizer`` says. Call it when the parameters have their values: after
        ``axo.parallelize``, and after ``axo.init_weights`` for a model from the meta device.

        Args:
            params, lr, betas, eps, weight_decay, maximize: As of ``torch.optim.AdamW``.

        Raises:
            ValueError: A parameter is on the meta device, or the lower tier cannot be used.
            OSError: The lower tier has no room; nothing is kept of what was reserved.
        """
        import torch

        from axo.offload.optimizer import OffloadedAdamW
        from axo.offload.parameters import computed_on, home_of

        adamw = torch.optim.AdamW(params, lr, betas, eps, weight_decay, maximize=maximize, fused=not self.optimizer)
        parameters = [parameter for group in adamw.param_groups for parameter in group["params"]]
        # State is made for where a parameter is: one that leaves its GPU goes first.
        self.move_in(parameter for parameter in parameters if computed_on(parameter).type != "cpu")
        on_gpu = {str(p.device) for p in parameters if p.device.type not in ("cpu", "meta")}
        if self.parameters and on_gpu and not any(home_of(p) is not None or _on_z(p) for p in parameters):
            raise ValueError(
                f"Offload: parameters=True on {', '.join(on_gpu)} is of weights that the axis z cuts, and none is; use"
                " a grid with z of at least 2, such as 1x1x2x1, or offload the optimizer alone"
            )
        if self.optimizer:
            groups = adamw.param_groups
            adamw = OffloadedAdamW(groups, lr, betas, eps, weight_decay, maximize=maximize, tier_of=self._tier_of)
        self.move_in(parameters)
        return adamw

    def move_in(self, parameters: Iterable[torch.Tensor]) -> None:
        """Move real parameters to where ``parameters`` says; ``adamw`` and ``axo.init_weights`` call it.

        Raises:
            ValueError: ZeRO cuts their state on a GPU, or the lower tier cannot be used. OSError: It has no room.
        """
        from axo.offload.parameters import move_in

        if self.parameters:
            move_in([parameter for parameter in parameters if not parameter.is_meta], self._tier_of)

    def _tier_of(self, device: torch.device) -> Tier:
        """Where what leaves ``device`` for good lies."""
        from axo.offload.tier import Runs, tier_for

        if device not in self._tiers:
            self._tiers[device] = Runs(tier_for(device, self.dir))
        return self._tiers[device]

    def attach(self, model: nn.Module, device: torch.device | None = None) -> None:
        """Let what ``model`` saves for backward lie where ``activations`` says. ``axo.parallelize`` calls it.

        Args:
            model: Its forward passes are those of training.
            device: That it computes on; None: that of its parameters.

        Raises:
            ValueError: The model has fewer blocks than ``activations`` asks for, or the lower tier cannot be used.
        """
        if self.activations in ("none", 0):
            return
        import torch

        from axo.offload.activations import Activations, blocks_of

        roots = [model] if self.activations == "all" else blocks_of(model, int(self.activations))
        if device is None:
            device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        Activations(device, self.dir).attach(model, roots)


def _on_z(parameter: torch.Tensor) -> bool:
    """Whether the parameter's grid has an axis z that cuts weights, be it others than this."""
    placement = placement_of(parameter)
    return placement is not None and placement.comms is not None and placement.comms.grid.z > 1
