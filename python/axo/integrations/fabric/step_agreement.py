"""What all ranks agree on before each optimizer step: that losses are finite, and whether they have been asked to end.

A rank notes its own losses and signals; two flags go through one all-reduce over all ranks, so that every rank stops
at the same step. It comes before the step: weights and checkpoints never see a loss that is not finite.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from axo.comm.connect import Communicators


class StepAgreement:
    """The agreement of one training run.

    Args:
        asked: Whether this rank has been asked to end (:class:`axo.launch.Termination`).

    Attributes:
        stop: All ranks have agreed to end after this step.
        step: Optimizer steps of this process.
    """

    def __init__(self, asked: Callable[[], bool] = lambda: False) -> None:
        self._asked = asked
        self._bad: torch.Tensor | None = None
        self.stop = False
        self.step = 0

    def note(self, loss: torch.Tensor) -> None:
        """Look at a loss (any shape) without waiting for it."""
        bad = ~torch.isfinite(loss.detach()).all()
        self._bad = bad if self._bad is None else self._bad | bad

    def before_step(self, comms: Communicators) -> None:
        """Agree, once for the losses since the last step. Every rank must call it.

        Raises:
            FloatingPointError: A loss since the last step is not finite; the same on every rank.
        """
        if self._bad is None:  # clipping, which comes before the step, has asked already
            return
        flags = torch.zeros(2, dtype=torch.int64, device=comms.device)
        everyone = comms.everyone
        flags[0] = self._bad * (everyone.size - everyone.rank)  # the largest is that of the lowest rank
        flags[1] = int(self._asked())
        self._bad = None
        self.step += 1
        bad, asked = everyone.all_reduce(flags, "max").tolist()
        if bad:
            where = everyone.size - bad
            coords = comms.grid.coords(where % comms.grid.world_size)
            self._raise("the loss", f", first on rank {where} (z={coords.z}, data={coords.data})")
        self.stop = bool(asked)

    def check_norm(self, norm: torch.Tensor) -> None:
        """Look at the norm of all gradients, the same on every rank: a finite loss can have gradients that are not.

        Raises:
            FloatingPointError: It is not finite.
        """
        if not torch.isfinite(norm):
            self._raise("the norm of the gradients", "")

    def _raise(self, what: str, where: str) -> None:
        raise FloatingPointError(
            f"{what} is not finite (NaN or infinite) at step {self.step} of this start{where}; all ranks"
            " stopped before it changed a weight. Use a lower learning rate, or look at that batch; the last checkpoint"
            " is sound"
        )
