"""The event-driven simulator, on steps small enough to work out by hand.

Oracles: hand-made timelines; conservation (a stream's busy time is the sum of its operations); the trace format's own
rules.
"""

import json
from pathlib import Path

import pytest

from axo.grid import Grid
from axo.perf import chrome_trace as trace
from axo.perf import clock, machine, readers, simulator
from axo.perf.clock import Operation
from axo.perf.run_options import RunOptions
from axo.perf.simulator import Simulation


def play(operations: list[Operation], *, contention: float = 0.0, shared: tuple[str, ...] = ()) -> Simulation:
    spans = clock.run(operations, {axis: axis in shared for axis in ("x", "y", "z", "data")}, contention)
    return Simulation(max(span.end for span in spans), simulator._exposed(operations, spans), {}, spans)


def test_one_after_the_other() -> None:
    found = play([Operation("a", "compute", 2, ()), Operation("b", "x", 3, (0,)), Operation("c", "compute", 1, (1,))])
    assert [(s.name, s.start, s.end) for s in found.spans] == [("a", 0, 2), ("b", 2, 5), ("c", 5, 6)]
    assert found.exposed["x"] == 3 and found.seconds == 6


def test_hidden_communication_costs_nothing_but_contention() -> None:
    operations = [Operation("gather", "z", 2, ()), Operation("product", "compute", 4, ())]
    assert play(operations).seconds == 4
    slowed = play(operations, contention=0.25)  # 2 s at 3/4 of the speed, the other 2.5 s at full
    assert slowed.seconds == pytest.approx(4.5, rel=1e-12)
    assert slowed.exposed == {"x": 0, "y": 0, "z": 0, "data": 0}


def test_axes_that_leave_the_node_share_its_nics() -> None:
    operations = [Operation("x", "x", 2, ()), Operation("z", "z", 3, ()), Operation("end", "compute", 1, (0, 1))]
    apart = play(operations)
    assert apart.seconds == pytest.approx(
        6, rel=1e-12
    )  # both inside the node: they share its links: 4 s, then 1 s more
    both = play(operations, shared=("x", "z"))
    assert both.seconds == pytest.approx(6, rel=1e-12)
    one = play(operations, shared=("z",))
    assert one.seconds == pytest.approx(4, rel=1e-12)  # NICs and links apart


def test_a_stream_keeps_its_order() -> None:
    operations = [
        Operation("long", "compute", 5, ()),
        Operation("first", "z", 1, (0,)),
        Operation("second", "z", 1, ()),
        Operation("end", "compute", 1, (2,)),
    ]
    found = play(operations)
    of_z = sorted((span.start, span.name) for span in found.spans if span.stream == "z")
    assert [name for _, name in of_z] == ["first", "second"] and found.seconds == 8 and found.exposed["z"] == 2


def step(grid: str, name: str = "gpt-5b", gpus_machine: str = "frontier", **options: object) -> Simulation:
    run = RunOptions(2**20, **options)  # type: ignore[arg-type]
    return simulator.simulate(readers.read(name), Grid.parse(grid), machine.load(gpus_machine), run)


def test_streams_are_busy_for_what_they_ran_and_waits_add_up() -> None:
    run = RunOptions(2**20, overlap=frozenset())
    workload, on, grid = readers.read("gpt-5b"), machine.load("frontier"), Grid(2, 2, 4, 2)
    found = simulator.simulate(workload, grid, on, run)
    operations = simulator.operations(workload, grid, on, run)
    for stream in ("compute", "x", "y", "z", "data"):
        wanted = sum(operation.seconds for operation in operations if operation.stream == stream)
        assert found.busy[stream] == pytest.approx(wanted, rel=1e-6)  # nothing overlaps, so nothing is slowed
    assert found.seconds == pytest.approx(found.busy["compute"] + sum(found.exposed.values()), rel=1e-6)


def test_gathers_a_step_with_and_without_the_cache() -> None:
    workload, on, grid = readers.read("gpt-5b"), machine.load("frontier"), Grid(1, 1, 32, 1)

    def gathers(**options: object) -> int:
        operations = simulator.operations(workload, grid, on, RunOptions(2**20, **options))  # type: ignore[arg-type]
        return sum(operation.name.endswith("gather") for operation in operations)

    blocks, others = 4 * 24, 2  # the head, and the embedding, whose backward wants no weight
    assert gathers() == 2 * blocks + others + 1  # 2N with checkpointing
    assert gathers(cached_gathers=1.0) == blocks + others  # N
    assert gathers(cached_gathers=0.5) == pytest.approx(1.5 * blocks + others, abs=4)  # 2N - K


def test_order_of_one_layer_with_every_overlap() -> None:
    """OAG: the next block is gathered before this one's first product; OAR: dW runs beside dI's sum; ORS: no wait."""
    workload, on = readers.read("gpt-5b"), machine.load("frontier")
    operations = simulator.operations(workload, Grid(2, 2, 4, 2), on, RunOptions(2**20))
    number = {operation.name: i for i, operation in enumerate(operations)}
    gather, product = operations[number["2.mlp.proj forward gather"]], number["1.attn.qkv forward"]
    assert set(gather.after) == set(operations[product].after) - {number["1.attn.qkv forward gather"]}
    weight, reduced = number["1.mlp.fc dW"], number["1.mlp.fc dI all-reduce"]
    assert operations[weight].after == operations[reduced].after == (number["1.mlp.fc dI"],)
    scatter = number["1.mlp.fc dW reduce-scatter"]
    waits = [o.name for o in operations if scatter in o.after and o.stream == "compute"]
    assert waits == []


def test_switched_off_everything_waits_where_it_is_issued() -> None:
    workload, on = readers.read("gpt-5b"), machine.load("frontier")
    operations = simulator.operations(workload, Grid(2, 2, 4, 2), on, RunOptions(2**20, overlap=frozenset()))
    number = {operation.name: i for i, operation in enumerate(operations)}
    assert operations[number["1.mlp.fc dW"]].after == (number["1.mlp.fc dI all-reduce"],)
    scatter = number["1.mlp.fc dW reduce-scatter"]
    assert any(scatter in o.after for o in operations if o.stream != "data")


def test_many_micro_batches_repeat() -> None:
    """Twelve, written out by hand from the operations, against twelve of which eight are simulated; no axis shares."""
    workload, on, grid = readers.read("gpt-5b"), machine.load("frontier"), Grid(1, 1, 16, 1)
    run = RunOptions(12 * 2**16, micro_batches=12)
    found = simulator.simulate(workload, grid, on, run)
    spans = clock.run(simulator.operations(workload, grid, on, run), None, on.contention)
    assert (found.micro_batches, max(span.end for span in spans)) == (8, pytest.approx(found.seconds, rel=1e-3))
    for stream in ("compute", "z"):
        busy = sum(span.end - span.start for span in spans if span.stream == stream)
        assert found.busy[stream] == pytest.approx(busy, rel=1e-3)


def test_320b_on_32768_gpus_is_soon_done() -> None:
    import time

    started = time.process_time()
    found = step("16x1x32x64", "gpt-320b")
    assert time.process_time() - started < 10
    assert len(found.spans) > 5000


def test_trace_opens_in_perfetto(tmp_path: Path) -> None:
    """Complete events with microseconds, names for processes and threads, no overlap inside a thread."""
    found = simulator.simulate(readers.read("gpt-5b"), Grid(2, 1, 8, 1), machine.load("frontier"), RunOptions(2**18))
    trace.write(tmp_path / "trace.json", found.spans, [0])
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    assert {event["ph"] for event in events} == {"X", "M"}
    assert max(e["ts"] + e["dur"] for e in complete) == pytest.approx(1e6 * found.seconds, rel=1e-6)
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {names[e["pid"], e["tid"]] for e in complete} == {"compute", "x", "z"}
    assert {e["pid"] for e in complete} == {0}
    ends: dict[tuple[int, int], float] = {}
    for event in complete:
        lane = (event["pid"], event["tid"])
        assert event["ts"] >= ends.get(lane, 0.0) - 0.01  # rounded to 0.001 us
        ends[lane] = event["ts"] + event["dur"]
