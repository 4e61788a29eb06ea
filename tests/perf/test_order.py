"""When a step without peers issues each collective and waits for it, against when eight ranks do.

Oracle: eight CPU ranks run the second step of a parallelized ``litgpt.GPT`` (Llama-like, no biases), when the engine
knows the order. A point in time is the number of products that this rank had begun before: 3 means between its third
and its fourth. So for each collective there are two numbers, where it was issued and where something waited for it.
Each of OAR, ORS, OAG and the buckets is then broken in the engine: a wait where none is due, or a bucket for each
gradient; the comparison must see it.

Left out on both sides: gradients of replicated vectors (norm weights) over z, which go with the end of the step. The
bytes of what goes over data are compared with ``support.in_buckets`` too.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import axo
from axo import dryrun
from axo.comm.counting import observers as watch
from axo.dryrun.simulate import training_of
from axo.grid import Grid
from axo.overlap.engine import Exchange
from axo.overlap.events import TracedWork
from axo.overlap.gathers import Gathers
from axo.overlap.gradients import Buckets, Gradients
from axo.perf import readers
from axo.perf.replay import COLLECTIVE, PIECE, PRODUCT, UPDATE, WAIT, Entry
from axo.perf.run_options import RunOptions
from tests.launcher import run_ranks
from tests.perf.support import step_calls

RANKS, SEQUENCES, LENGTH = 8, 8, 4
CONFIG = {
    "name": "order",
    "n_layer": 2,
    "n_head": 4,
    "n_query_groups": 4,
    "n_embd": 32,
    "intermediate_size": 48,
    "padded_vocab_size": 64,
    "block_size": 16,
    "bias": False,
    "norm_class_name": "RMSNorm",
    "mlp_class_name": "LLaMAMLP",
}


class Case(NamedTuple):
    grid: str
    checkpointed: bool
    keep: bool  # gathered weights
    overlap: str
    broken: str = ""


CASES = [
    Case("2x2x2x1", False, True, "oar"),
    Case("2x2x2x1", True, True, "oar"),
    Case("1x2x4x1", False, False, "oar"),
    Case("4x1x2x1", True, True, ""),
    Case("2x1x1x4", False, True, "oar"),
    Case("2x1x2x2", False, True, "oar ors oag"),
    Case("2x2x2x1", False, False, "oar ors oag"),
    Case("1x2x4x1", True, False, "oar ors oag"),
    Case("2x1x4x1", False, True, "ors oag"),
]
BROKEN = [
    Case("2x2x2x1", False, True, "oar ors oag", "oar"),
    Case("2x2x2x1", False, True, "oar ors oag", "ors"),
    Case("2x2x2x1", False, True, "oar ors oag", "oag"),
    Case("2x2x2x1", False, True, "oar ors oag", "gather waits"),
    Case("2x1x2x2", False, True, "oar ors oag", "buckets"),
]


class Seen(NamedTuple):
    """One collective: products begun before it was issued, and before something waited for it."""

    op: str
    axis: str
    issued: int
    awaited: int


@contextmanager
def broken(what: str) -> Iterator[None]:
    """Break one overlap in the engine, as a mistake would."""

    def waits_at_once(plain: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*args: Any, **options: Any) -> Any:
            pending = plain(*args, **options)
            if pending is not None:
                pending.wait()
            return pending

        return changed

    def all_ahead_at_once(plain: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*args: Any) -> Any:
            issued = plain(*args)
            for gathered in issued.values():
                gathered.wait()
            return issued

        return changed

    def a_bucket_each(plain: Callable[..., Any]) -> Callable[..., Any]:
        def changed(self: Buckets, bucket: Any) -> None:
            plain(self, bucket)
            if bucket.kind in self._open:
                self._close(bucket.kind)

        return changed

    places: dict[str, tuple[type, str, Callable[..., Any]]] = {
        "oar": (Exchange, "start_reduce", waits_at_once),
        "ors": (Gradients, "_start_scatter", waits_at_once),
        "oag": (Gathers, "_look_ahead", lambda plain: lambda self, kind, route: None),
        "gather waits": (Gathers, "_issue", all_ahead_at_once),
        "buckets": (Buckets, "ready", a_bucket_each),
    }
    if not what:
        yield
        return
    owner, name, change = places[what]
    plain = getattr(owner, name)
    setattr(owner, name, change(plain))
    try:
        yield
    finally:
        setattr(owner, name, plain)


def record(cases: list[Case]) -> list[tuple[list[Seen], list[int]]]:
    """On every rank: the collectives of a step, and the bytes of those over data."""
    from litgpt import GPT, Config

    torch.distributed.init_process_group("axo")
    TracedWork.done = lambda self: False  # type: ignore[method-assign]  # whether it finds one complete is chance
    found = []
    for case in cases:
        comms = axo.connect(case.grid)
        switches = (name in case.overlap for name in ("oar", "ors", "oag"))
        options = axo.Overlap(*switches, "all" if case.keep else "none")
        model = axo.parallelize(GPT(Config(**CONFIG)), comms, overlap=options)
        if case.checkpointed:
            for block in model.transformer.h:
                again = block.forward
                block.forward = lambda *a, again=again, **k: checkpoint(again, *a, use_reentrant=False, **k)
        ids = torch.zeros(SEQUENCES // (comms.grid.z * comms.grid.data), LENGTH + 1, dtype=torch.long)
        with broken(case.broken):
            for _ in range(2):
                model.zero_grad()
                watch.open()
                with axo.overlap.record(model) as events:
                    logits = model(ids[:, :-1])
                    axo.nn.cross_entropy(logits, ids[:, 1:], comms=comms).backward()
                issued, waits = watch.close()
        products = sorted(event.start for event in events if event.what == "compute")

        def before(when: float, products: list[float] = products) -> int:
            return sum(start < when for start in products)

        awaited: dict[int, float] = {}
        for wait in waits:
            awaited.setdefault(id(wait.work), wait.start)
        axes = [axis for axis in ("x", "y", "z", "data") if comms.grid.size(axis) > 1]
        seen = [
            Seen(one.op, one.axis, before(one.start), before(awaited.get(id(one.work), one.start)))
            for one in issued
            if one.axis in axes and (one.op, one.axis) != ("all_reduce", "z")
        ]
        found.append((seen, [one.bytes for one in issued if one.axis == "data"]))
        comms.close()
    return found


def run_of(case: Case) -> RunOptions:
    return RunOptions(
        SEQUENCES * LENGTH,
        itemsize=4,
        stream=4,
        overlap=frozenset(case.overlap.split()),
        cached_gathers=1.0 if case.keep else 0.0,
        recompute="full" if case.checkpointed else "none",
    )


def recorded(case: Case) -> list[Seen]:
    """The same from the step of a rank without peers."""
    workload = readers.from_litgpt(CONFIG, seq_length=LENGTH)
    entries = list[Entry]()
    dryrun.run(training_of(workload, Grid.parse(case.grid), run_of(case)), entries=entries)
    places = [number for number, one in enumerate(entries) if one.what in (PIECE, UPDATE)]
    products, issued, awaited = 0, dict[int, tuple[Entry, int]](), dict[int, int]()
    for one in entries[slice(*places)]:
        products += one.what == PRODUCT
        if one.what == COLLECTIVE and (one.op, one.axis) != ("all_reduce", "z"):
            issued[one.number] = one, products
        elif one.what == WAIT:
            awaited.setdefault(one.number, products)
    return [Seen(one.op, one.axis, begun, awaited[number]) for number, (one, begun) in issued.items()]


def buckets(case: Case) -> list[int]:
    """Bytes of each bucket that goes over data, in no order."""
    workload = readers.from_litgpt(CONFIG, seq_length=LENGTH)
    calls = step_calls(workload, Grid.parse(case.grid), run_of(case))
    return sorted(call.bytes for call in calls if call.axis == "data")


@pytest.mark.slow
def test_points_of_issue_and_wait_without_peers_are_those_that_eight_ranks_record() -> None:
    per_rank = run_ranks(record, RANKS, CASES + BROKEN)
    for number, case in enumerate(CASES):
        expected = recorded(case)
        assert len(expected) > 12
        for rank in range(RANKS):
            seen, over_data = per_rank[rank][number]
            assert seen == expected, f"rank {rank} of {case}"
            assert sorted(over_data) == buckets(case), f"rank {rank} of {case}"
    for number, case in enumerate(BROKEN, len(CASES)):
        seen, over_data = per_rank[0][number]
        caught = seen != recorded(case) or sorted(over_data) != buckets(case)
        assert caught, f"{case.broken} is broken, and the comparison does not see it"
