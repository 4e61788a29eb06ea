"""Every distributed product on its grids: equal to serial, and its cost equal to a simulator's and to what was issued.

Oracles: torch's serial product in fp64; ``tests/matmul/simulator.py``, which moves blocks by the textbook rules; and
``axo.count_collectives``.
"""

import functools
import random
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist

import axo
from axo.grid import Grid
from axo.matmul.algorithm import Shape
from bench.products import algorithms
from tests.launcher import run_ranks
from tests.matmul import simulator


def gather(whole_activations):
    return lambda a, b, g, n: simulator.gathered(a, b, g, n.x, n.y, n.z, whole_activations=whole_activations)


def one_dimension(by_rows):
    return lambda a, b, g, n: simulator.megatron(a, b, g, n.x, by_rows=by_rows)


def rings(a, b, g, n):
    return simulator.cannon(a, b, g, n.x, n.z)


def layers(a, b, g, n):
    return simulator.tesseract(a, b, g, n.x, n.z)


def square(a, b, c):
    return Grid(a, a, 1)


def deep(a, b, c):
    return Grid(a, a, b)


class Row(NamedTuple):
    """The grids of up to 16 ranks that run here, the simulator of one, and the grid that three numbers draw.

    ``padded``: shards are as long as the longest, so only sizes that divide are compared with the simulator.
    """

    grids: str
    simulator: Callable
    draw: Callable
    padded: bool = False


ALGORITHMS = {
    "megatron": Row("1x1x1 2x1x1 3x1x1 4x1x1", one_dimension(by_rows=False), lambda a, b, c: Grid(a)),
    "megatron-row": Row("2x1x1 4x1x1", one_dimension(by_rows=True), lambda a, b, c: Grid(a)),
    "cannon": Row("1x1x1 2x2x1 3x3x1 4x4x1", rings, square),
    "summa": Row("1x1x1 2x2x1 3x3x1 4x4x1", layers, square),
    "solomonik": Row("2x2x1 2x2x2 2x2x3 3x3x1", rings, deep),
    "tesseract": Row("2x2x1 2x2x2 2x2x3 2x2x4 1x1x3", layers, deep),
    "agarwal": Row("1x1x1 2x2x2", gather(whole_activations=False), lambda a, b, c: Grid(a, a, a), padded=True),
    "cosma": Row("2x1x1 1x2x2 3x1x2 2x2x1", gather(whole_activations=False), Grid, padded=True),
    "axonn": Row("2x2x1 2x1x2 2x2x2 1x3x2", gather(whole_activations=True), Grid, padded=True),
}
SHAPES = [Shape(16, 12, 20), Shape(24, 40, 8), Shape(13, 7, 11), Shape(3, 2, 5)]  # the last leaves shards empty
CASES = [(name, grid) for name, row in ALGORITHMS.items() for grid in row.grids.split()]
CASES.sort(key=lambda case: Grid.parse(case[1]).world_size)  # those of one size run one after another
BIGGEST = {"agarwal": "3x3x3", "tesseract": "4x4x1"}


def test_the_table_names_every_algorithm():
    assert set(ALGORITHMS) == set(algorithms)


def matrices(shape, dtype):
    generator = torch.Generator().manual_seed(shape.m * 10007 + shape.k * 101 + shape.n)
    return [torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for size in map(shape.of, "ABC")]


def slices_of(algorithm, comms, shape):
    layouts = {"A": algorithm.a, "B": algorithm.b, "C": algorithm.c}
    return [layout.slices(comms.grid, comms.coords, shape.of(matrix)) for matrix, layout in layouts.items()]


def run(grid, name, shapes, dtypes):
    """On every rank: parts of C, dA, dB of each case, as (slices, values), and what forward and backward issued."""
    algorithm = algorithms[name]
    found = []
    comms = axo.connect(grid)
    for shape in shapes:
        for dtype in dtypes:
            whole = matrices(shape, dtype)
            slices = slices_of(algorithm, comms, shape)
            a, b, grad = (matrix[part].clone() for matrix, part in zip(whole, slices, strict=True))
            with axo.count_collectives() as forward:
                c = algorithm.forward(comms, a, b, shape)
            with axo.count_collectives() as backward:
                grad_a, grad_b = algorithm.backward(comms, a, b, grad, shape)
            parts = [(slices[2], c), (slices[0], grad_a), (slices[1], grad_b)]
            counts = {"forward": dict(forward), "backward": dict(backward)}
            found.append((shape, dtype, parts, counts, algorithm.memory(comms.grid, shape, comms.coords)))
    comms.close()
    return found


def run_all(cases):
    """``run`` of each (name, grid)."""
    dist.init_process_group("axo")  # one for all grids
    return [run(grid, name, SHAPES, [torch.float32, torch.bfloat16]) for name, grid in cases]


@functools.cache
def results_of(world_size):
    """{(name, grid): what ``run`` returned on each rank} of all grids with so many ranks, which start once for them."""
    cases = [case for case in CASES if Grid.parse(case[1]).world_size == world_size]
    return dict(zip(cases, zip(*run_ranks(run_all, world_size, cases), strict=True), strict=True))


def check_numbers(name, grid, results):
    """Every rank's parts against fp64; the parts must cover C, dA and dB; copies must be the same bits."""
    for case in zip(*results, strict=True):
        shape, dtype = case[0][:2]
        a, b, grad = (matrix.double() for matrix in matrices(shape, dtype))
        expected = [a @ b, grad @ b.T, a.T @ grad]
        # fp32: sums of at most 40 products; bf16: partial sums of blocks rounded to 8 bits
        limits = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 3e-2, "atol": 0.15}
        for index, reference in enumerate(expected):
            covered = torch.zeros(reference.shape, dtype=torch.bool)
            copies = {}
            for _, _, parts, *_ in case:
                (rows, columns), value = parts[index]
                assert value.dtype == dtype and value.shape == reference[rows, columns].shape, (name, grid, shape)
                torch.testing.assert_close(value.double(), reference[rows, columns], **limits)
                covered[rows, columns] = True
                first = copies.setdefault((rows.start, rows.stop, columns.start, columns.stop), value)
                assert torch.equal(first, value), f"{name} on {grid}: copies differ"
            assert covered.all(), f"{name} on {grid}: {shape}"


def issued(results, index, grid, phase):
    """{(op, axis): (calls, deliveries, elements)} over all ranks, from what each rank counted."""
    totals = {}
    for result in results:
        for (op, axis), count in result[index][3][phase].items():
            calls, elements = totals.get((op, axis), (0, 0))
            totals[op, axis] = calls + count.calls, elements + count.elements
    found = {}
    for (op, axis), (calls, elements) in totals.items():
        g = grid.size(axis)
        if op == "send":
            found[op, axis] = calls, calls, elements
        elif op != "recv":
            there = {"broadcast": g - 1, "reduce": g - 1, "all_reduce": 2 * (g - 1)}.get(op, g * (g - 1))
            # all_gather counts a shard a rank, reduce_scatter the whole, the others the block on each rank
            moved = elements * (g - 1) if op == "all_gather" else elements // g * there
            if op == "reduce_scatter":
                moved = elements // g * (g - 1)
            found[op, axis] = calls // g, calls // g * there, moved
    return found


def check_counts(name, grid, results):
    algorithm = algorithms[name]
    for index, (shape, *_) in enumerate(results[0]):
        cost = algorithm.cost(grid, shape)
        for phase in ("forward", "backward"):
            expected = {}
            for t in cost:
                if t.phase == phase:
                    old = expected.get((t.op, t.axis), (0, 0, 0))
                    expected[t.op, t.axis] = tuple(a + b for a, b in zip(old, t[3:], strict=True))
            assert issued(results, index, grid, phase) == expected, (name, grid, shape, phase)
        for rank, result in enumerate(results):
            held = sum(value.numel() for _, value in result[index][2])
            assert result[index][4] == held, (name, grid, shape, rank)


@pytest.mark.parametrize("name, grid", CASES)
def test_equal_to_serial_and_to_its_cost(name, grid):
    parsed = Grid.parse(grid)
    results = results_of(parsed.world_size)[name, grid]
    check_numbers(name, parsed, results)
    check_counts(name, parsed, results)


@pytest.mark.soak
@pytest.mark.parametrize("name", sorted(BIGGEST))
def test_larger_grids(name):
    grid = Grid.parse(BIGGEST[name])
    results = run_ranks(run, grid.world_size, BIGGEST[name], name, SHAPES, [torch.float32, torch.bfloat16])
    check_numbers(name, grid, results)
    check_counts(name, grid, results)


def by_axis(transfers):
    totals = {}
    for t in transfers:
        deliveries, elements = totals.get((t.phase, t.axis), (0, 0))
        totals[t.phase, t.axis] = deliveries + t.deliveries, elements + t.elements
    return totals


def draw(rng, name):
    """A random grid for the algorithm and a shape; its parts divide where shards would be padded."""
    row = ALGORITHMS[name]
    grid = row.draw(rng.randint(1, 5), rng.randint(1, 5), rng.randint(1, 4))
    even = grid.x * grid.y * grid.z if row.padded else 1
    return grid, Shape(*(even * rng.randint(1, 9) for _ in range(3)))


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_cost_is_what_the_simulator_counts(name):
    """200 random draws over the algorithms, uneven blocks included where nothing is padded."""
    rng = random.Random(name)
    for _ in range(25):
        grid, shape = draw(rng, name)
        a, b, grad = (np.asarray(matrix) for matrix in matrices(shape, torch.float64))
        c, grad_a, grad_b, counted = ALGORITHMS[name].simulator(a, b, grad, grid)
        for got, want in zip((c, grad_a, grad_b), (a @ b, grad @ b.T, a.T @ grad), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-10)
        assert by_axis(algorithms[name].cost(grid, shape)) == counted, (name, grid, shape)


N = 64  # a multiple of every number of blocks below, so that volumes are whole


@pytest.mark.parametrize(
    "name, grid, calls, deliveries, volume",
    [
        ("cannon", "8x8x1", 1008, 1008, 15.75),
        ("solomonik", "4x4x4", None, 240, 15.0),
        ("tesseract", "4x4x4", 128, 384, 15.0),
        ("summa", "8x8x1", 128, 896, 14.0),
    ],
)
def test_sixty_four_ranks_forward(name, grid, calls, deliveries, volume):
    """The published counts, alike for all: deliveries of blocks and volume in n^2, formula and simulator."""
    grid, shape = Grid.parse(grid), Shape(N, N, N)
    forward = [t for t in algorithms[name].cost(grid, shape) if t.phase == "forward"]
    assert sum(t.deliveries for t in forward) == deliveries
    assert sum(t.elements for t in forward) / N**2 == volume
    if calls is not None:
        assert sum(t.calls for t in forward) == calls
    if name == "solomonik":
        parts = {op: sum(t.deliveries for t in forward if t.op == op) for op in ("broadcast", "send", "reduce")}
        assert parts == {"broadcast": 96, "send": 96, "reduce": 48}
    zeros = [np.zeros(shape.of(matrix)) for matrix in "ABC"]
    counted = ALGORITHMS[name].simulator(*zeros, grid)[3]
    assert sum(n for (phase, _), (n, _) in counted.items() if phase == "forward") == deliveries
    assert sum(n for (phase, _), (_, n) in counted.items() if phase == "forward") == volume * N**2


def test_tesseract_beats_summa_where_the_closed_form_says():
    """At p = 64 Tesseract [4,4,4] moves 3 m k + 12 k n and SUMMA [8,8] 7 (m k + k n): less when 4 m k > 5 k n."""
    tesseract, summa = algorithms["tesseract"], algorithms["summa"]

    def volume(algorithm, grid, shape):
        return sum(t.elements for t in algorithm.cost(Grid.parse(grid), shape) if t.phase == "forward")

    for m in range(8, 200, 8):
        shape = Shape(m, 64, 96)
        wins = volume(tesseract, "4x4x4", shape) < volume(summa, "8x8x1", shape)
        assert wins == (4 * shape.m * shape.k > 5 * shape.k * shape.n), shape


def without_depth_sum(grid, shape):
    """dB of Tesseract on this rank when the sum over depth is left out."""
    from axo.matmul.summa import Summa

    comms, algorithm = axo.connect(grid), algorithms["tesseract"]
    whole = matrices(shape, torch.float32)
    slices = slices_of(algorithm, comms, shape)
    a, b, grad = (matrix[part].clone() for matrix, part in zip(whole, slices, strict=True))
    return Summa.backward(algorithm, comms, a, b, grad, shape)[1], whole, slices[1]


def test_without_the_sum_over_depth_the_gradient_is_wrong():
    for grad_b, (a, _, grad), part in run_ranks(without_depth_sum, 8, "2x2x2x1", Shape(16, 12, 20)):
        assert not torch.allclose(grad_b, (a.T @ grad)[part], rtol=1e-2, atol=1e-2)


REFUSED = {
    "cannon": "2x2x2",
    "summa": "2x1x1",
    "tesseract": "2x3x1",
    "solomonik": "2x1x2",
    "agarwal": "2x2x1",
    "megatron": "2x2x1",
}


@pytest.mark.parametrize("name, grid", REFUSED.items())
def test_a_grid_that_does_not_fit_is_refused(name, grid):
    with pytest.raises(ValueError, match=rf"algorithm '{name}' cannot use grid .* it needs .*x"):
        algorithms[name].check(Grid.parse(grid))
