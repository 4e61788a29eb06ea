"""What belongs to the update of parameters: ZeRO's cut, clipping, the scaler, and checks of optimizers.

    muon           Muon whose matrices lie on the grid
    newton_schulz  its products: of a whole matrix, and of one that stays on the grid
    zero           optimizer state and gradients cut over the data axis
    clip           the norm of all gradients over all ranks
    scaler         torch's GradScaler, whose overflow flag is that of any rank
    checks         optimizers, and states of them, that cannot be right on shards
    update_trial   whether an optimizer updates a part of a tensor as it would in the whole
    step_hooks     what runs around each step of every optimizer

Not here: how gradients get to ``.grad`` (``axo.overlap``). Names load on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from axo.lazy import names_of

if TYPE_CHECKING:
    from axo.optim.muon import Muon, muon_groups

__all__ = ["Muon", "muon_groups"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = names_of(__name__, dict.fromkeys(__all__, "axo.optim.muon"))
