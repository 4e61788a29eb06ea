"""The Tesseract paper's tables: rows as the paper has them, one row by hand, the ratios that it draws from them."""

import pytest

from axo.perf import machine, reproduce, tesseract_tables


def test_rows_and_what_the_paper_draws_from_them():
    rows = tesseract_tables.settings()
    assert len(rows) == 25 and len({(row.table, row.key) for row in rows}) == 25
    assert {row.grid.world_size for row in rows} == {1, 4, 8, 16, 32, 64}
    strong, weak = (tesseract_tables.setting(table, "t881") for table in ("strong", "weak"))
    assert (strong.forward, strong.backward) == (weak.forward, weak.backward)  # the paper's repetition
    ratios = [tesseract_tables.ratio(*rest, predicted=False) for _, *rest in tesseract_tables.COMPARED]
    assert ratios == pytest.approx([2.0702, 1.3751, 1.5293, 3.3746, 1.7144], abs=2e-4)


def test_a_block_by_hand():
    """[4,4,2]: x lies in a node, y crosses nodes beside three other rings, z too; 12 h^2 of weights, 12 h of rows."""
    row, on = tesseract_tables.setting("strong", "t442"), machine.load("meluxina")
    q, d, h, m = 4, 2, 3072, 12 * 512
    products = m * (24 * h**2 + 4 * 512 * h) / 32 / on.gemm_flops
    inside, between = 1e9 * on.intra_gbs[next(iter(on.intra_gbs))], 1e9 * on.inter_gbs * on.network_fraction / 4
    weights, rows = 2 * 12 * h**2 / q, 2 * m * (1 + 1 + 1 + 4) * h / (q * d)  # of q broadcasts
    assert row.block[0] == pytest.approx(products + weights / inside + rows / between, rel=1e-9)
    depth = 2 * (d - 1) / d * 2 * (12 * h**2 + 9 * h * q) / q**2 / between  # with four biases, 9 h
    vectors = 2 * (q - 1) / q * 2 * 9 * h / q / inside
    backward = 2 * products + 2 * (weights / inside + rows / between) + depth + vectors
    assert row.block[1] == pytest.approx(backward, rel=0.01)  # biases travel in fp32


def test_what_is_printed_names_its_calibration():
    strong, weak = (reproduce.tesseract_table(table) for table in ("strong", "weak"))
    assert len(strong.lines) + len(weak.lines) == 50
    assert sum(line.calibrated for line in strong.lines + weak.lines) == 2
    assert sum(line.other for line in strong.lines) == 2
    order = "forward at 64 GPUs: Tesseract < Megatron-LM < Optimus; the paper's: Tesseract < Megatron-LM < Optimus"
    assert order in strong.note and "mean |error|" in weak.note
