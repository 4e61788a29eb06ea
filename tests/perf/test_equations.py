"""The papers' equations on their check values, and the flop formula against a count of the layers.

Oracles: numbers worked out by hand from equations (1)-(10) of "A 4D Hybrid Algorithm"; Narayanan et al.'s formula.
Tolerance 1e-12: the same few products and quotients in double precision, perhaps in another order.
"""

import pytest

from axo.grid import AXES, Grid
from axo.matmul import cost
from axo.perf import flops, machine, readers
from axo.perf.layers import seen
from axo.perf.machine import Machine
from axo.perf.workload import gpt
from bench.papers import equations

EXACT = 1e-12


def on(gpus_per_node: int, inter: float, intra: float) -> Machine:
    table = {(inner, size): intra for inner in (1, 2, 4, 8) for size in (2, 4, 8) if inner * size <= gpus_per_node}
    return Machine("test", gpus_per_node, 40, 312, 280, 1500, inter, table)


def test_one_layer_moves_what_the_equations_say() -> None:
    times = equations.layer_times(Grid(2, 2, 2, 1), 16, 32, 48, 1.0)
    assert times.ag_z == pytest.approx(192, rel=EXACT)
    assert times.rs_z == pytest.approx(192, rel=EXACT)
    assert times.ar_y == pytest.approx(192, rel=EXACT)
    assert times.ar_x == pytest.approx(128, rel=EXACT)
    assert times.ar_data == 0
    assert times.total == pytest.approx(704, rel=EXACT)


def test_every_term_by_hand_on_an_uneven_grid() -> None:
    """Gx, Gy, Gz, Gd = 2, 3, 4, 5; m, k, n = 60, 36, 24; a bandwidth for each axis."""
    b = {"x": 2.0, "y": 4.0, "z": 8.0, "data": 16.0}
    times = equations.layer_times(Grid(2, 3, 4, 5), 60, 36, 24, b)
    assert times.ag_z == pytest.approx(3 * (36 * 24 / 24) / 8, rel=EXACT)
    assert times.rs_z == pytest.approx(3 / 4 * (36 * 24 / 6) / 8, rel=EXACT)
    assert times.ar_y == pytest.approx(2 * 2 / 3 * (60 * 24 / 8) / 4, rel=EXACT)
    assert times.ar_x == pytest.approx(2 * 1 / 2 * (60 * 36 / 12) / 2, rel=EXACT)
    assert times.ar_data == pytest.approx(2 * 4 / 5 * (36 * 24 / 24) / 16, rel=EXACT)


def test_a_transposed_layer_swaps_sizes_and_bandwidths_of_x_and_y() -> None:
    b = {"x": 2.0, "y": 4.0, "z": 8.0, "data": 16.0}
    swapped = {**b, "x": b["y"], "y": b["x"]}
    normal = equations.layer_times(Grid(3, 2, 4, 5), 60, 36, 24, swapped)
    transposed = equations.layer_times(Grid(2, 3, 4, 5), 60, 36, 24, b, transposed=True)
    assert transposed == pytest.approx(normal, rel=EXACT)


@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter", "all_reduce"])
def test_one_rank_sends_nothing(op: str) -> None:
    assert equations.ring_seconds(op, 1, 100, 5.0) == 0


def test_ring_equations() -> None:
    assert equations.ring_seconds("all_gather", 5, 100, 4.0) == pytest.approx(100, rel=EXACT)
    assert equations.ring_seconds("reduce_scatter", 5, 100, 4.0) == pytest.approx(20, rel=EXACT)
    assert equations.ring_seconds("all_reduce", 5, 100, 4.0) == pytest.approx(40, rel=EXACT)
    with pytest.raises(ValueError, match="op='broadcast' has no ring equation"):
        equations.ring_seconds("broadcast", 5, 100, 4.0)


@pytest.mark.parametrize(
    ("grid", "expected"),
    [
        ("2x2x4x1", {"x": 200, "y": 200, "z": 6.25}),
        ("1x1x8x2", {"z": 25, "data": 6.25}),
        ("8x1x1x4", {"x": 25, "data": 6.25}),
        ("2x1x2x8", {"x": 200, "z": 200, "data": 6.25}),
    ],
)
def test_bandwidths_of_equation_10(grid: str, expected: dict[str, float]) -> None:
    found = {axis: on(4, 25, 200).bandwidth(Grid.parse(grid), axis) for axis in expected}
    assert found == pytest.approx({axis: gbs * 1e9 for axis, gbs in expected.items()}, rel=EXACT)


def test_agnostic_bandwidth_is_one_for_all_axes() -> None:
    agnostic = equations.agnostic(on(4, 25, 200))
    assert len({agnostic.bandwidth(Grid(2, 2, 4, 8), axis) for axis in AXES}) == 1


def test_measured_entries_come_before_the_nearest() -> None:
    table = {(1, 2): 80.0, (2, 2): 70.0, (1, 4): 230.0}
    found = Machine("test", 4, 40, 312, 280, 1500, 100, table)
    assert found.intra(1, 4) == 230 and found.intra(2, 2) == 70
    assert found.intra(1, 3) == 230  # nearer to 4 than to 2 by ratio
    assert found.intra(4, 1) == 70  # nothing measured with 4 inside: the slowest


@pytest.mark.parametrize("name", ["gpt-5b", "gpt-80b", "gpt-640b"])
def test_counted_flops_are_narayanans(name: str) -> None:
    layers, hidden, _ = readers.papers()["models"][name.split("-")[1].upper()]
    workload = readers.read(name)
    for recompute in (True, False):
        counted = flops.step_flops(workload, 8192 * 2048, recompute=recompute, full_attention=True)
        formula = flops.narayanan(8192, 2048, layers, hidden, 50304, recompute=recompute)
        assert counted == pytest.approx(formula, rel=EXACT)


def test_attention_is_counted_as_the_mask_leaves_it() -> None:
    """Token t of s attends to t + 1 tokens: s (s + 1) / 2 pairs, 4 h flops each."""
    workload = readers.read("Llama-3-8B", seq_length=131072)
    causal, full = (flops.step_flops(workload, 131072, full_attention=whole) for whole in (False, True))
    assert full - causal == pytest.approx(3 * 32 * 4 * 4096 * (131072**2 - 131072 * 131073 / 2), rel=EXACT)
    assert seen(1) == 1 and seen(4) == (1 + 2 + 3 + 4) / 4
    grid, on = Grid(), machine.load("dgx-h100")
    attention = next(layer for block in workload.blocks for layer in block.layers if layer.kind == "attention")
    seconds, _, _ = attention.seconds(grid, 131072, on, seen(131072))
    assert seconds == pytest.approx(4 * 4096 * 131072 * 131073 / 2 / on.attention_flops, rel=EXACT)


def test_80b_takes_the_papers_25_days() -> None:
    """571.4 PF/s and 2T tokens: the paper's 25.5 days, to its last digit."""
    seconds = flops.narayanan(8192, 2048, 42, 12288, 50304) / 571.4e15 * 2e12 / 2**24
    assert round(seconds / 86400, 1) == 25.5


def test_cost_is_algorithm_1() -> None:
    """m, k, n = 16, 32, 48 on 2x2x2x2 with a bias, by hand."""
    counts = cost.total(cost.linear(Grid(2, 2, 2, 2), 16, 32, 48, itemsize=2))
    assert counts == {
        ("all_gather", "z"): (1, 32 * 48 // 8, 2 * 192),
        ("all_reduce", "y"): (1, 16 * 48 // 4, 2 * 192),
        ("all_reduce", "x"): (1, 16 * 32 // 4, 2 * 128),
        ("reduce_scatter", "z"): (1, 32 * 48 // 4, 2 * 384),
        ("all_reduce", "data"): (2, 192 + 24, 2 * 192 + 4 * 24),
        ("all_reduce", "z"): (1, 24, 4 * 24),
    }


def test_cost_and_equations_agree_where_sizes_divide() -> None:
    """Seconds from cost() through the ring equations are equations (4)-(8), for every grid of 16 ranks."""
    for grid in Grid.all(16):
        for transposed in (False, True):
            calls = cost.linear(grid, 64, 32, 48, False, transposed=transposed, itemsize=1)
            found = sum(equations.ring_seconds(c.op, grid.size(c.axis), c.elements, 1.0) for c in calls)
            assert found == pytest.approx(
                equations.layer_times(grid, 64, 32, 48, 1.0, transposed=transposed).total, rel=EXACT
            )


@pytest.mark.parametrize(
    ("recompute", "gathers", "phases"),
    [
        (False, 1, ["forward"]),
        (False, 2, ["forward", "backward"]),
        (True, 1, ["forward"]),
        (True, 2, ["forward", "recompute"]),
    ],
)
def test_gathers_a_step(recompute: bool, gathers: int, phases: list[str]) -> None:
    calls = cost.linear(Grid(1, 1, 4, 1), 16, 32, 48, recompute=recompute, gathers=gathers)
    assert [call.phase for call in calls if call.op == "all_gather"] == phases


def test_only_z_is_zero_3_and_only_x_is_megatron() -> None:
    z = cost.total(cost.linear(Grid(z=4), 16, 32, 48, False, gathers=2))
    assert {key: count.calls for key, count in z.items()} == {("all_gather", "z"): 2, ("reduce_scatter", "z"): 1}
    pair = cost.linear(Grid(x=4), 16, 32, 48, False) + cost.linear(Grid(x=4), 16, 48, 32, False, transposed=True)
    assert {key: count.calls for key, count in cost.total(pair).items()} == {("all_reduce", "x"): 2}
    assert cost.linear(Grid(), 16, 32, 48) == []


def test_uneven_shards_are_those_of_torch_chunk() -> None:
    assert [cost.part(10, 4, i) for i in range(4)] == [3, 3, 3, 1]
    assert [cost.part(5, 4, i) for i in range(4)] == [2, 2, 1, 0]


def test_parameters_of_the_papers_models() -> None:
    """12 l h^2 weights of the blocks and two tables of V h; the rest (biases, norms) is under 0.1%."""
    workload = gpt("test", layers=24, hidden=4096, heads=32)
    weights = 12 * 24 * 4096**2 + 2 * 50304 * 4096
    assert weights < workload.parameters < 1.001 * weights
