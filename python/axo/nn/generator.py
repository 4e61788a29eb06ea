"""The default generator while first values are drawn: rank 0's, on every rank.

A rank that enters with rank 0's state (all called ``torch.manual_seed`` with one seed) leaves with rank 0's new state,
as the serial program would. A rank that enters with another state (a seed of its own) gets that state back. So ranks
that drew the same numbers before also do so afterwards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from axo.comm.connect import Communicators


@contextlib.contextmanager
def source_generator(comms: Communicators, device: torch.device, *, all_stages: bool = False) -> Iterator[None]:
    """Run the body under the state of rank 0's default generator for ``device``. Every rank must enter it.

    Rank 0 of the grid, which is one stage's; with ``all_stages`` that of the first stage, and every stage enters it.
    """
    source = comms.everyone if all_stages else comms.world
    if source.size == 1:
        yield
        return
    read, write = generator_access(device)
    before = read()
    carried = before.to(comms.device, copy=True)
    source.broadcast(carried, root=0)
    state = carried.cpu()
    write(state)
    try:
        yield
    finally:
        if not torch.equal(before, state):
            write(before)


def generator_access(device: torch.device) -> tuple[Callable[[], torch.Tensor], Callable[[torch.Tensor], None]]:
    """What reads and what writes the state of the default generator for ``device``."""
    if device.type in ("cpu", "meta"):
        return torch.get_rng_state, torch.set_rng_state
    module = getattr(torch, device.type)
    return lambda: module.get_rng_state(device), lambda state: module.set_rng_state(state, device)
