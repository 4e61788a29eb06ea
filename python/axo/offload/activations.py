"""Tensors that forward saves for backward, on the lower tier in between.

    forward    a saved tensor goes out on a stream of its own; what it was computed in is free for the next layer
    backward   tensors are wanted in the reverse of the order in which they were saved: before one is used, those that
               were saved before it are on their way back, up to AHEAD bytes

Tensors that several nodes save go out once. What is small, lies in a parameter's memory or overlaps itself stays where
it is. Values come back bit for bit, with the strides that they had. On a CPU rank nothing comes back: backward reads
the mapped file. With activation checkpointing it is the blocks' inputs that go out.

Hangs on ``torch.autograd.graph.saved_tensors_hooks``. Source: Rajbhandari et al., "ZeRO-Infinity".
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from axo.offload.copy_stream import CopyEvent, CopyStream
from axo.offload.tier import Blocks, Tier, tier_for

SMALLEST = 64 << 10  # bytes; what is smaller stays
AHEAD = 64 << 20
_in_backward: Any = torch._C._current_graph_task_id  # type: ignore[attr-defined]
_hooks_of_others: Any = torch._C._autograd._top_saved_tensors_default_hooks


def blocks_of(model: nn.Module, count: int) -> list[nn.Module]:
    """The first ``count`` blocks of a model: entries of its first ``nn.ModuleList`` or ``nn.Sequential``.

    Raises:
        ValueError: It has fewer.
    """
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential) or len(module) == 0:
            continue
        if count > len(module):
            raise ValueError(
                f"Offload: activations={count}, and {name or type(model).__name__!r} has {len(module)} blocks; use up"
                f" to {len(module)}, or 'all'"
            )
        return list(module)[:count]
    raise ValueError(
        f"Offload: activations={count}, and {type(model).__qualname__} has no nn.ModuleList or nn.Sequential whose"
        " entries are its blocks; use 'all'"
    )


class _Saved:
    """A tensor that is out.

    Attributes:
        number: Its place in the order of its pass.
        memory: On the lower tier, with the tensor's shape and strides.
        left: The end of its way out.
        here: The tensor, back or on its way.
        arrived: The end of its way back.
    """

    __slots__ = ("__weakref__", "arrived", "here", "left", "memory", "number")

    def __init__(self, number: int, memory: torch.Tensor, left: CopyEvent) -> None:
        self.number, self.memory, self.left = number, memory, left
        self.here: torch.Tensor | None = None
        self.arrived: CopyEvent | None = None


class Activations:
    """Takes what a model saves for backward out and brings it back.

    Args:
        device: Where the computation runs.
        folder: Where the lower tier lies, for CPU ranks.

    Raises:
        ValueError: The lower tier cannot be used.
    """

    def __init__(self, device: torch.device, folder: str | os.PathLike[str] | None) -> None:
        self._device, self._folder = device, folder
        self._tier: Tier = tier_for(device, folder)
        self._blocks = Blocks(self._tier)
        self._leaving, self._coming = CopyStream(device), CopyStream(device)
        self._order: list[weakref.ref[_Saved]] = []
        self._out: dict[Any, tuple[StorageWeakRef, weakref.ref[_Saved]]] = {}
        self._stays: set[int] = set()  # memory of parameters
        self._open: list[saved_tensors_hooks | None] = []
        self._model: weakref.ref[nn.Module] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Activations:
        new = memo[id(self)] = Activations(self._device, self._folder)
        copied = memo.get(id(self._model())) if self._model is not None else None
        new._model = None if copied is None else weakref.ref(copied)
        return new

    def attach(self, model: nn.Module, roots: Iterable[nn.Module]) -> None:
        """Take out what forward saves inside ``roots``, modules of ``model``."""
        self._model = weakref.ref(model)
        for root in roots:
            root.register_forward_pre_hook(self._before, prepend=True)
            root.register_forward_hook(self._after, always_call=True)

    # --- the passes -----------------------------------------------------------------------------------------------

    def _before(self, module: nn.Module, inputs: Any) -> None:
        # Inside of others' hooks, such as those of activation checkpointing, tensors are theirs.
        free = not any(self._open) and _hooks_of_others(True) is None
        if not torch.is_grad_enabled() or not free or _in_backward() != -1:
            self._open.append(None)
            return
        model = None if self._model is None else self._model()
        parameters = (module if model is None else model).parameters()
        self._stays = {parameter.untyped_storage()._cdata for parameter in parameters}
        self._forget_dead()
        hooks = saved_tensors_hooks(self._pack, self._unpack)
        hooks.__enter__()
        self._open.append(hooks)

    def _after(self, module: nn.Module, inputs: Any, output: Any) -> None:
        hooks = self._open.pop() if self._open else None
        if hooks is not None:
            hooks.__exit__()

    def _forget_dead(self) -> None:
        alive = [saved for each in self._order if (saved := each()) is not None]
        for number, saved in enumerate(alive):
            saved.number = number
        self._order = [weakref.ref(saved) for saved in alive]
        self._out = {key: each for key, each in self._out.items() if each[1]() is not None}
        if not alive:
            self._blocks.end_of_pass()

    # --- out ------------------------------------------------------------------------------------------------------

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | _Saved:
        if not self._goes_out(tensor):
            return tensor
        storage = StorageWeakRef(tensor.untyped_storage())
        key = storage.cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version
        before = self._out.get(key)
        if before is not None and not before[0].expired() and (saved := before[1]()) is not None:
            return saved
        saved = self._send(tensor.detach())
        self._order.append(weakref.ref(saved))
        self._out[key] = storage, weakref.ref(saved)
        return saved

    def _goes_out(self, tensor: torch.Tensor) -> bool:
        plain = type(tensor) in (torch.Tensor, nn.Parameter) or isinstance(tensor, FakeTensor)
        if not plain or tensor.layout is not torch.strided:
            return False
        if tensor.nbytes < SMALLEST or tensor.is_meta or tensor.is_conj() or tensor.is_neg():
            return False
        if tensor.device != self._device or tensor.untyped_storage()._cdata in self._stays:
            return False
        return torch._debug_has_internal_overlap(tensor) != 1  # 1: several elements share memory

    def _send(self, tensor: torch.Tensor) -> _Saved:
        strides = torch.empty_like(tensor, device="meta").stride()  # the tensor's, without what lies between
        memory = self._blocks.allocate(tensor.nbytes).view(tensor.dtype).as_strided(tensor.shape, strides)
        left = self._leaving.copy([(memory, tensor)])
        self._tier.rest(memory)
        return _Saved(len(self._order), memory, left)

    # --- back -----------------------------------------------------------------------------------------------------

    def _unpack(self, packed: torch.Tensor | _Saved) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        self._leaving.let_go()
        self._bring(packed)
        budget, number = AHEAD, packed.number
        while budget > 0 and number > 0:
            number -= 1
            before = self._order[number]() if number < len(self._order) else None
            if before is not None:
                self._bring(before)
                budget -= before.memory.nbytes
        assert packed.here is not None and packed.arrived is not None
        packed.arrived.block()
        return packed.here

    def _bring(self, saved: _Saved) -> None:
        if saved.here is not None:
            return
        if self._device.type == "cpu":
            self._tier.soon(saved.memory)
            saved.here, saved.arrived = saved.memory, saved.left
            return
        saved.here = torch.empty_strided(
            saved.memory.shape, saved.memory.stride(), dtype=saved.memory.dtype, device=self._device
        )
        saved.arrived = self._coming.copy([(saved.here, saved.memory)], saved.left)
