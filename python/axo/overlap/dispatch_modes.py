"""Hide what communication does from dispatch modes.

Selective activation checkpointing watches every operation, keeps the results that its policy names, and gives them back
in the recomputation. What a gather copies depends on what is kept, and a collective writes into its tensor: neither
must be watched. Products are, so that a policy can save them.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode_stack


class ObservingMode(TorchDispatchMode):
    """A mode that keeps nothing and changes nothing, from which nothing is hidden."""


dispatch_modes = torch._C._len_torch_dispatch_stack  # how many there are


class hidden:
    """Run a block unseen by dispatch modes. Gives True if there are any: they may keep what they have seen."""

    __slots__ = ("_disabled",)

    def __enter__(self) -> bool:
        self._disabled: ExitStack | None = None
        if not dispatch_modes():
            return False
        modes = _get_current_dispatch_mode_stack()
        observing = [mode for mode in modes if isinstance(mode, ObservingMode)]
        if len(observing) == len(modes):
            return False
        self._disabled = ExitStack()
        self._disabled.enter_context(_disable_current_modes())
        for mode in observing:
            self._disabled.enter_context(mode)
        return True

    def __exit__(self, *error: Any) -> None:
        if self._disabled is not None:
            self._disabled.__exit__(*error)
