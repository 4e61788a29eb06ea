"""Hide what communication does from dispatch modes.

Selective activation checkpointing watches every operation, keeps the results that its policy names, and gives them back
in the recomputation. What a gather copies depends on what is kept, and a collective writes into its tensor: neither
must be watched. Products are, so that a policy can save them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes


class hidden:
    """Run a block unseen by dispatch modes. Gives True if there are any: they may keep what they have seen."""

    __slots__ = ("_disabled",)

    def __enter__(self) -> bool:
        self._disabled = _disable_current_modes() if torch._C._len_torch_dispatch_stack() else None
        if self._disabled is None:
            return False
        self._disabled.__enter__()
        return True

    def __exit__(self, *error: Any) -> None:
        if self._disabled is not None:
            self._disabled.__exit__(*error)
