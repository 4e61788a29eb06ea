"""axo bench products: its table, and the arithmetic of what it predicts and of what was hidden, by hand."""

import pytest

from axo.grid import Grid
from axo.matmul.algorithm import Shape
from bench.products import __main__ as products
from bench.products import algorithms
from bench.products import times as product_times
from bench.products.times import Case


def test_the_table_has_a_row_for_every_algorithm_that_has_a_grid(capsys):
    assert products.main(["--ranks", "4,8", "--shapes", "64x64x64"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert {line[2] for line in lines} == set(algorithms)
    assert ["8", "64x64x64", "agarwal", "2x2x2x1"] in [line[:4] for line in lines]


@pytest.mark.parametrize(
    "name, grid, sent, calls",
    [
        ("summa", "2x2x1", 6 * 4 * 4, 12),  # a block along each axis, in each of the three rounds of both passes
        ("cannon", "2x2x1", 10 * 4 * 4, None),  # skew and shift of A and B twice, of both sums once and home
        ("solomonik", "1x1x2", 8 * 8 * 8, 8),  # layer 0 sends A and B, then dC too; layer 1 its sums of C, dA and dB
        ("axonn", "2x1x1", 8 * 8, 1),  # half of a sum of dA, there and back
    ],
)
def test_what_the_busiest_rank_sends(name, grid, sent, calls):
    found = product_times.busiest(algorithms[name], Grid.parse(grid), Shape(8, 8, 8))
    assert found[0] == sent
    assert calls is None or found[1] == calls


def test_weights_are_found_and_hidden_is_a_share_of_the_steps_that_can_hide():
    cases = [Case(name, "2x2x1x1", Shape(size, size, size)) for name in ("summa", "cannon") for size in (64, 128, 256)]
    true = product_times.Model(1.5, 0.5, 20.0, 1e7)
    found = product_times.calibrated(cases, [true.milliseconds(case) for case in cases], 1e7)
    assert found == pytest.approx(true)
    seen = {"communication": 40.0, "products": 20.0, "overlapped": 52.0}
    assert product_times.hidden(cases[0], seen) == pytest.approx(8 / (20 / 2))
    assert product_times.hidden(Case("megatron", "4x1x1x1", Shape(64, 64, 64)), seen) is None
