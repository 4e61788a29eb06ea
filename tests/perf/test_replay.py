"""A recorded step against the clock, on records and timelines small enough to work out by hand.

Oracles: hand-made timelines and records; the trace format's own rules. What the engine records: tests/dryrun.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from axo.grid import Grid
from axo.perf import chrome_trace as trace
from axo.perf import clock, machine, replay
from axo.perf.clock import Operation
from axo.perf.replay import ATTENTION, COLLECTIVE, MEMORY, PIECE, PRODUCT, UPDATE, WAIT, Entry


def spans_of(operations: list[Operation], *, contention: float = 0.0, shared: tuple[str, ...] = ()) -> list[tuple]:
    spans = clock.run(operations, {axis: axis in shared for axis in ("x", "y", "z", "data")}, contention)
    return [(span.name, span.start, span.end) for span in spans]


def seconds_of(operations: list[Operation], **options: object) -> float:
    return max(end for _, _, end in spans_of(operations, **options))  # type: ignore[arg-type]


def test_one_after_the_other() -> None:
    step = [Operation("a", "compute", 2, ()), Operation("b", "x", 3, (0,)), Operation("c", "compute", 1, (1,))]
    assert spans_of(step) == [("a", 0, 2), ("b", 2, 5), ("c", 5, 6)]


def test_hidden_communication_costs_nothing_but_contention() -> None:
    operations = [Operation("gather", "z", 2, ()), Operation("product", "compute", 4, ())]
    assert seconds_of(operations) == 4
    # 2 s at 3/4 of the speed, the other 2.5 s at full
    assert seconds_of(operations, contention=0.25) == pytest.approx(4.5, rel=1e-12)


def test_axes_that_leave_the_node_share_its_nics() -> None:
    operations = [Operation("x", "x", 2, ()), Operation("z", "z", 3, ()), Operation("end", "compute", 1, (0, 1))]
    # Both inside the node share its links, both outside its NICs: 4 s, then 1 s more. NICs and links are apart.
    for shared, seconds in (((), 6), (("x", "z"), 6), (("z",), 4)):
        assert seconds_of(operations, shared=shared) == pytest.approx(seconds, rel=1e-12)


def test_a_stream_keeps_its_order() -> None:
    operations = [
        Operation("long", "compute", 5, ()),
        Operation("first", "z", 1, (0,)),
        Operation("second", "z", 1, ()),
        Operation("end", "compute", 1, (2,)),
    ]
    assert spans_of(operations) == [("long", 0, 5), ("first", 5, 6), ("second", 6, 7), ("end", 7, 8)]


GRID, SECONDS = Grid(2, 1, 4, 1), (0.125, 0.5)
ON = replace(machine.load("frontier"), contention=0.0, gpus_per_node=4)  # z leaves the node, x does not
RECORD = [
    Entry(PIECE),
    Entry(COLLECTIVE, (1e6,), "ahead", "all_gather", "z", 0),
    Entry(PRODUCT, (2, 512, 256, 128), "a forward"),
    Entry(COLLECTIVE, (2e6,), "sum", "all_reduce", "x", 1),
    Entry(WAIT, number=1),
    Entry(ATTENTION, (1e12,), "attention forward"),
    Entry(WAIT, number=0),
    Entry(MEMORY, (1e8,), "memory forward"),
    Entry(PRODUCT, (1, 128, 512, 256), "a dW"),
    Entry(UPDATE),
    Entry(COLLECTIVE, (3e6,), "end", "all_gather", "z", 2),
    Entry(WAIT, number=2),
]


def test_a_record_waits_where_the_engine_did() -> None:
    """By hand: a collective follows what was computed before it; what is computed follows what was awaited."""
    _, *step = replay.operations(RECORD, GRID, ON, *SECONDS)
    names = "ahead|a forward|sum|wait|attention forward|wait|memory forward|a dW|optimizer|end|wait".split("|")
    assert [one.name for one in step] == names
    assert [one.after for one in step] == [(0,), (), (2,), (3,), (), (1,), (), (), (), (9,), (10,)]
    assert [one.stream for one in step] == ["z", "compute", "x", *["compute"] * 6, "z", "compute"]
    size, bandwidth = 3 * 1e6, ON.bandwidth(GRID, "z")
    assert step[0].seconds == pytest.approx(size / bandwidth + ON.latency(GRID, "z")[0])
    assert step[1].seconds == 2 * ON.gemm_seconds(512, 256, 128) and step[7].seconds == ON.gemm_seconds(128, 512, 256)
    assert step[4].seconds == 1e12 / ON.attention_flops and step[8].seconds == 0.5
    assert step[6].seconds == pytest.approx(0.125 - step[1].seconds - step[4].seconds - step[7].seconds), "the rest"
    _, *short = replay.operations(RECORD, GRID, ON, 1e-6, 0.5)
    assert sum(one.seconds for one in short if one.stream == "compute") == pytest.approx(0.5 + 1e-6)
    assert short[6].seconds == pytest.approx(0, abs=1e-12) and short[1].seconds < step[1].seconds


def test_a_gap_is_charged_to_what_was_awaited() -> None:
    """By hand: nothing hides the sum over x and the last gather; the first gather ends behind attention."""
    step = replay.replay(RECORD, GRID, ON, *SECONDS)
    _, ahead, product, summed, _, attention, *_, end, _ = (one.seconds for one in replay.operations(
        RECORD, GRID, ON, *SECONDS))  # fmt: skip
    assert ahead < product + summed + attention
    assert step.exposed == {"x": pytest.approx(summed), "y": 0, "z": pytest.approx(end), "data": 0}
    assert step.seconds == pytest.approx(step.busy["compute"] + sum(step.exposed.values()))
    assert step.busy == {"compute": pytest.approx(0.625), "x": pytest.approx(summed), "y": 0,
                         "z": pytest.approx(ahead + end), "data": 0}  # fmt: skip


def test_the_last_micro_batch_repeats() -> None:
    """Oracle: twelve written out, against twelve of which one was recorded."""
    twelve = replay.replay(RECORD, GRID, ON, *SECONDS, 12)
    spelled = replay.replay([*(12 * RECORD[:9]), *RECORD[9:]], GRID, ON, *SECONDS, 12)
    assert (twelve.micro_batches, spelled.micro_batches) == (1, 12) and len(twelve.spans) < len(spelled.spans)
    assert twelve.seconds == pytest.approx(spelled.seconds, rel=1e-9)
    assert twelve.busy == pytest.approx(spelled.busy, rel=1e-9)
    assert twelve.exposed == pytest.approx(spelled.exposed, rel=1e-9, abs=1e-12)


def test_trace_opens_in_perfetto(tmp_path: Path) -> None:
    """Complete events with microseconds, names for processes and threads, no overlap inside a thread."""
    step = replay.replay([*(3 * RECORD[:9]), *RECORD[9:]], GRID, ON, *SECONDS, 3)
    trace.write(tmp_path / "trace.json", step.spans, [0])
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    assert {event["ph"] for event in events} == {"X", "M"}
    assert max(e["ts"] + e["dur"] for e in complete) == pytest.approx(1e6 * step.seconds, rel=1e-6)
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {names[e["pid"], e["tid"]] for e in complete} == {"compute", "x", "z"}
    assert {e["pid"] for e in complete} == {0}
    ends: dict[tuple[int, int], float] = {}
    for event in complete:
        lane = (event["pid"], event["tid"])
        assert event["ts"] >= ends.get(lane, 0.0) - 0.01  # rounded to 0.001 us
        ends[lane] = event["ts"] + event["dur"]
