"""Random numbers that agree on ranks which compute the same, for code that draws them from torch's default generator.

Ranks that hold the same module must draw the same numbers in it, though their own seeds differ. So before its forward
the default generator gets a state that is made of (base, coordinates on the axes that split the module, number of the
call), as ``axo.nn.Dropout`` makes its own. Afterwards the old state is put back. Only in training.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from axo.comm.connect import Communicators
from axo.nn.dropout import Dropout
from axo.nn.generator import generator_access


class SharedRandomness:
    """Forward hooks, before and after a module.

    Args:
        comms: What ``axo.connect`` returned.
        split: The axes over which what the module computes is split.
    """

    def __init__(self, comms: Communicators, split: tuple[str, ...]) -> None:
        self._stream = Dropout(0.5, comms=comms, split=split)
        self._device = comms.device
        self._states: list[torch.Tensor | None] = []

    def attach(self, module: nn.Module) -> None:
        """Set the generator around every forward of ``module``."""
        module.register_forward_pre_hook(self.before)
        module.register_forward_hook(self.after, always_call=True)

    def before(self, module: nn.Module, args: Any) -> None:
        if not module.training:
            self._states.append(None)
            return
        read, write = generator_access(self._device)
        fresh = self._stream.generator(self._device)  # advances the default generator
        self._states.append(read())
        write(fresh.get_state())

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        state = self._states.pop() if self._states else None
        if state is not None:
            generator_access(self._device)[1](state)

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedRandomness:
        return self
