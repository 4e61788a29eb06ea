"""Dropout whose masks agree on ranks that hold the same activations and differ on ranks that hold different ones.

The mask of the n-th call is drawn from a generator seeded by (base, coordinates on the axes that split the activation,
n). The base is drawn by rank 0 at the first call in training and broadcast once: no rank's own seed matters.

A recomputed call (activation checkpointing) must draw the mask of the call that it repeats. Checkpointing restores the
default generator before it, so each call draws a random number from that generator. Where the same number comes again,
the call repeats an earlier one, and gets that one's n. A program that resets the seed repeats masks too, as in torch;
so reset seeds on all ranks or on none.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import Any

import torch
from torch import nn

from axo.comm.connect import Communicators
from axo.grid import AXES

_REMEMBERED = 1 << 14  # calls between a forward and its recomputation: micro-batches times uses of the layer


class Dropout(nn.Module):
    """Zero elements with probability p and scale the others by 1 / (1 - p), in training.

    Args:
        p: Probability, 0 to 1.
        inplace: As in torch.
        comms: What ``axo.connect`` returned.
        split: The axes over which the activation is split; over the others it is replicated. The default is that of
            the residual stream, ``("y", "z", "data")``; between a normal and a transposed layer it is
            ``("x", "z", "data")``; Tesseract's is ``("x", "y", "z", "data")`` in both places.

    Raises:
        ValueError: p is not a probability, or an axis is not known.
    """

    def __init__(
        self,
        p: float = 0.5,
        inplace: bool = False,
        *,
        comms: Communicators,
        split: tuple[str, ...] | None = None,
    ) -> None:
        super().__init__()
        split = (comms.arrangement.stream, *comms.arrangement.rows) if split is None else split
        if not 0.0 <= p <= 1.0:
            raise ValueError(f"Dropout: p={p} is not a probability; use 0 to 1")
        for axis in split:
            if axis not in AXES:
                raise ValueError(f"Dropout: split names {axis!r}, which is not an axis; use {', '.join(AXES)}")
        self.p, self.inplace, self.comms, self.split = p, inplace, comms, tuple(split)
        self._base: int | None = None
        self._calls: OrderedDict[int, int] = OrderedDict()  # nonce -> number of the call
        self._next_call = 0

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(...) -> (...)."""
        if not self.training or self.p == 0.0:
            return input
        keep = 1.0 - self.p
        mask = torch.empty_like(input, requires_grad=False).bernoulli_(keep, generator=self.generator(input.device))
        if keep:
            mask.div_(keep)
        return input.mul_(mask) if self.inplace else input * mask

    def generator(self, device: torch.device) -> torch.Generator:
        nonce = int(torch.randint(1 << 62, (), dtype=torch.int64, device="cpu"))
        if self._base is None:
            base = torch.tensor([nonce], dtype=torch.int64, device=self.comms.device)
            self._base = int(self.comms.world.broadcast(base, root=0))
        if nonce not in self._calls:
            self._calls[nonce] = self._next_call
            self._next_call += 1
            if len(self._calls) > _REMEMBERED:
                self._calls.popitem(last=False)
        where = [getattr(self.comms.coords, axis) for axis in AXES if axis in self.split]
        key = repr((self._base, where, self._calls[nonce])).encode()
        seed = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1
        return torch.Generator(device).manual_seed(seed)

    def __deepcopy__(self, memo: dict[int, Any]) -> Dropout:
        new = Dropout(self.p, self.inplace, comms=self.comms, split=self.split)
        return new.train(self.training)

    def extra_repr(self) -> str:
        return f"p={self.p}, inplace={self.inplace}, split over {', '.join(self.split)}"
