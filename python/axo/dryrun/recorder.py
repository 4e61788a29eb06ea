"""What a rank does in a step, in the order of its program: what it computes, its collectives, and its waits.

Products and attention have their sizes, and what else is computed the bytes that it writes, added up between two other
entries. Names are those that the engine gives (``axo.overlap.events``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._pytree import tree_leaves

from axo.comm.counting import observers
from axo.dryrun.memory import ACTIVATIONS, Following, Ledger
from axo.dryrun.shapes import Faking
from axo.overlap.events import Event, Events, TracedWork
from axo.overlap.model import engines
from axo.perf.replay import ATTENTION, COLLECTIVE, MEMORY, PIECE, PRODUCT, UPDATE, WAIT, Entry
from axo.train.loop import Trainer

_FACTORS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}  # of torch's products: where the first one stands
_UNNAMED = ("product ", "forward ", "backward ", "recompute ", "optimizer ")
_WRITE_NOTHING = ("_unsafe_view", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")


class Recorder(Events):
    """Takes down in ``entries`` what ``mode`` computes while ``ledger`` knows the phase. As a record of the engine it
    names what came last."""

    def __init__(self, ledger: Ledger, mode: Faking | Following, entries: list[Entry]) -> None:
        super().__init__()
        self._ledger, self._mode, self._entries = ledger, mode, entries
        self._products: list[int] = []  # their places among the entries
        self._places: list[int] = []  # those of collectives, by their numbers
        self._works: dict[int, tuple[object, int]] = {}  # the pending ones, so that no other has their ids

    @contextmanager
    def of(self, trainer: Trainer) -> Iterator[None]:
        """Take down what ``trainer`` does inside."""
        forward, update = trainer.model.forward, trainer.update

        def piece(*args: Any, **options: Any) -> Any:
            self._entries.append(Entry(PIECE))
            return forward(*args, **options)

        def optimizer() -> torch.Tensor:
            self._entries.append(Entry(UPDATE))
            return update()

        with ExitStack() as changes:
            for owner, name, changed in (
                (trainer.model, "forward", piece),
                (trainer, "update", optimizer),
                (self._mode, "watch", self._computed),
                (observers, "active", True),
                (observers, "issued", self._issued),
                (observers, "waited", self._waited),
                (TracedWork, "done", lambda _: False),  # for what it finds complete it would not wait
                *((engine, "events", self) for engine in engines(trainer.model)),
            ):
                changes.enter_context(mock.patch.object(owner, name, changed))
            yield

    @property
    def _phase(self) -> str:
        again = self._ledger.phase == "backward" and self._ledger.kind == ACTIVATIONS
        return "recompute" if again else self._ledger.phase

    def _computed(self, operation: Any, args: Any, result: Any) -> None:
        """An operation of torch's has given ``result``."""
        name, phase = operation.__name__.partition(".")[0], self._phase
        if phase == "optimizer" or getattr(operation, "is_view", True) or name in _WRITE_NOTHING:
            return
        if name in _FACTORS:
            a, b = args[_FACTORS[name] :][:2]
            sizes = math.prod(a.shape[:-2]), a.shape[-2], a.shape[-1], b.shape[-1]
            self._products.append(len(self._entries))
            self._entries.append(Entry(PRODUCT, sizes, f"product {phase}"))
        elif name.startswith("_scaled_dot_product"):
            backward = "backward" in name
            q, k, v = args[backward:][:3]
            attended = (k.shape[-2] + 1) / 2 if any(each is True for each in args) else k.shape[-2]  # is_causal
            flops = 2.0 * math.prod(q.shape[:-1]) * attended * (q.shape[-1] + v.shape[-1])
            self._entries.append(Entry(ATTENTION, (flops * (1 + backward),), f"attention {phase}"))
        else:
            written = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
            entry = Entry(MEMORY, (float(sum(each.numel() * each.itemsize for each in written)),), f"memory {phase}")
            if self._entries and self._entries[-1][::2] == entry[::2]:
                entry = entry._replace(sizes=(entry.sizes[0] + self._entries.pop().sizes[0],))
            self._entries.append(entry)

    def _issued(self, op: str, axis: str, tensor: torch.Tensor, start: float, work: object | None) -> None:
        number = len(self._places)
        self._places.append(len(self._entries))
        sizes, name = (tensor.numel() * tensor.itemsize,), f"{self._phase} {op}"
        self._entries.append(Entry(COLLECTIVE, sizes, name, op, axis.partition("/")[0], number))
        if work is None:
            self._entries.append(Entry(WAIT, number=number))
        else:
            self._works[id(work)] = work, number

    def _waited(self, axis: str, start: float, work: object) -> None:
        if id(work) in self._works:
            self._entries.append(Entry(WAIT, number=self._works[id(work)][1]))

    def append(self, event: Event) -> None:
        """Name the last product, or the collective that was issued or awaited last, if it has no layer yet."""
        if event.what == "compute":
            place = self._products[-1]
        elif event.what == "issue":
            place = self._places[-1]
        elif self._entries[-1].what == WAIT:
            place = self._places[self._entries[-1].number]
        else:
            return
        one, what = self._entries[place], event.op if event.op in ("dI", "dW") else self._phase
        if one.name.startswith(_UNNAMED):
            name = f"{event.layer} {what}" if one.what == PRODUCT else f"{event.layer} {one.name}"
            self._entries[place] = one._replace(name=name)
