"""Weights of a GPU's model that lie in pinned host memory: up for a gather, their gradients down.

    up      the shard goes to its place in the gathered block on a stream; the gather comes after it, what is computed
            with the block after the gather. What the computation is given meanwhile waits for neither
    down    the gradient of the shard follows its reduction over z on another stream, while backward goes on; the host
            waits once, at the end of backward, and finds ``.grad`` complete

Pinned memory of gradients is used again as soon as nobody has them any more (``zero_grad``). Nothing uses
``record_stream``: a copy stream holds what its copies read and write until they are complete.

Source: Rajbhandari et al., "ZeRO-Infinity". Not here: how weights get there (``axo.offload.parameters``), when they are
gathered and gradients reduced (``axo.overlap``).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from axo.offload.copy_stream import CopyEvent, CopyStream
from axo.offload.tier import Blocks, PinnedMemory


class Shards:
    """The ways of one model's shards between the host and a device.

    Args:
        device: Where the computation runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._up, self._down = CopyStream(device), CopyStream(device)
        self._rooms = Blocks(PinnedMemory())
        self._coming: CopyEvent | None = None

    def bring(self, room: torch.Tensor, shard: torch.Tensor) -> CopyEvent:
        """Copy a shard to ``room`` on the device, which may have another dtype."""
        if room.dtype == shard.dtype:
            return self._up.copy([(room, shard)])
        staged = torch.empty_like(shard, device=room.device)  # the device converts faster than the host
        return self._up.copy([(staged, shard), (room, staged)])

    def after_bringing(self) -> AbstractContextManager[object]:
        """What is issued in this block follows the shards that were brought, not the computation."""
        return self._up.following()

    def to_host(
        self, grad: torch.Tensor, dtype: torch.dtype, after: Callable[[], object] | None = None, held: object = None
    ) -> torch.Tensor:
        """Copy a gradient to the host, in ``dtype``; it is there after ``wait``.

        Args:
            after: Lets the current stream go on after what completes the gradient; default: it is complete.
            held: What must live until then.
        """
        room = self._rooms.allocate(grad.numel() * dtype.itemsize).view(dtype).view(grad.shape)
        pairs = [(room, grad)]
        if grad.dtype != dtype:
            cast = torch.empty_like(grad, dtype=dtype)
            pairs = [(cast, grad), (room, cast)]
        if after is not None:
            with self._down.following():
                after()
        self._coming = self._down.copy(pairs, held=held)
        return room

    def settle(self) -> None:
        """Block the host until no shard is being read: they are about to change."""
        self._up.synchronize()

    def wait(self) -> None:
        """Block the host until the gradients that were copied are there, and no shard is being read."""
        if self._coming is not None:
            self._coming.synchronize()
            self._coming = None
            self._up.synchronize()
            self._rooms.end_of_pass()
        self._down.let_go()
        self._up.let_go()
