"""The Tesseract paper's tables: rows as the paper has them, one row by hand, the ratios that it draws from them."""

import pytest

from axo.perf import machine
from bench.papers import reproduce, tesseract_tables


def test_rows_and_what_the_paper_draws_from_them():
    rows = tesseract_tables.settings()
    assert len(rows) == 25 and len({(row.table, row.key) for row in rows}) == 25
    assert {row.grid.world_size for row in rows} == {1, 4, 8, 16, 32, 64}
    strong, weak = (tesseract_tables.setting(table, "t881") for table in ("strong", "weak"))
    assert (strong.forward, strong.backward) == (weak.forward, weak.backward)  # the paper's repetition
    ratios = [tesseract_tables.ratio(*rest, predicted=False) for _, *rest in tesseract_tables.COMPARED]
    assert ratios == pytest.approx([2.0702, 1.3751, 1.5293, 3.3746, 1.7144], abs=2e-4)


def test_a_sequence_by_hand():
    """[4,4,2]: x lies in a node, y crosses nodes beside three other rings, z too; 12 h^2 of weights, 12 h of rows."""
    row, on = tesseract_tables.setting("strong", "t442"), machine.load("meluxina")
    q, d, h, m = 4, 2, 3072, 12 * 512
    assert row.flops == pytest.approx(24 * 512 * (24 * h**2 + 4 * 512 * h) / 32, rel=1e-12)
    inside, between = 1e9 * on.intra_gbs[next(iter(on.intra_gbs))], 1e9 * on.inter_gbs * on.network_fraction / 4
    weights, rows = 4 * 12 * h**2 / q, 4 * m * (1 + 1 + 1 + 4) * h / (q * d)  # of q broadcasts, 4 bytes a number
    waits = 4 * q * sum(min(on.latency(row.grid, axis)) for axis in "xy")  # of 4 products
    assert row.links[0] == pytest.approx(24 / 12 * (weights / inside + rows / between + waits), rel=1e-9)
    depth = 2 * (d - 1) / d * 4 * (12 * h**2 + 9 * h * q) / q**2 / between  # with four biases, 9 h
    vectors = 2 * (q - 1) / q * 4 * 9 * h / q / inside
    vector_waits = 8 * min(on.latency(row.grid, "x")) + 16 * min(on.latency(row.grid, "z"))
    backward = 2 * (weights / inside + rows / between + waits) + depth + vectors + vector_waits
    assert row.links[1] == pytest.approx(24 / 12 * backward, rel=1e-9)
    forward, products = row.predicted[0], row.flops / tesseract_tables.rate()
    assert row.predicted[1] == pytest.approx(forward + 2 * products + tesseract_tables.slow() * row.links[1])


def test_the_fitted_rows_are_met_and_the_others_are_not_far():
    for key in tesseract_tables.CALIBRATION:
        row = tesseract_tables.setting(*key)
        assert row.predicted[0] == pytest.approx(row.forward)
    assert tesseract_tables.mean_error() < 0.34
    weak = [tesseract_tables.setting("weak", key) for key in ("t441", "t442", "t444")]
    assert {row.sequences for row in weak} == {192}
    for table in ("strong", "weak"):
        orders = [tesseract_tables.order_at_64(table, predicted=which) for which in (True, False)]
        assert orders[0] == orders[1]


def test_what_is_printed_names_its_calibration():
    strong, weak = (reproduce.tesseract_table(table) for table in ("strong", "weak"))
    assert len(strong.lines) + len(weak.lines) == 50
    assert [line.what for line in strong.lines + weak.lines if line.calibrated] == [
        "Tesseract [4,4,1] forward",
        "Tesseract [1,1,1] forward",
    ]
    assert sum(line.other for line in strong.lines) == 2
    order = "forward at 64 GPUs: Tesseract < Megatron-LM < Optimus; the paper's: Tesseract < Megatron-LM < Optimus"
    assert order in strong.note and "mean |error|" in weak.note and "5.6 TFLOP/s" in weak.note
