"""The papers' numbers: held-out errors, ranks and gains, and that the machine files hold what the fit gives.

Oracle: Table III of "Democratizing AI" and the ranges in its text, as copied into ``data/papers.yaml``.
"""

import math

import pytest
import torch

from axo.grid import Grid
from axo.perf import machine, planner, readers
from bench.papers import calibrate, figures, reproduce
from bench.papers import lines as lines_of
from bench.papers.calibrate import Row
from examples.unet.model import UNet


@pytest.fixture(scope="session")
def plans() -> dict[Row, planner.GridPlan]:
    return {row: planner.plan(calibrate.request(row)) for row in calibrate.rows()}


def test_eleven_rows_are_held_out_and_their_mean_error_is_small(plans: dict[Row, planner.GridPlan]) -> None:
    group = reproduce.weak_scaling(plans)
    held = lines_of.held_out(group.lines)
    assert len(group.lines) == 15 and len(held) == 11
    assert calibrate.mean_error(held) <= 0.10


def test_machine_files_hold_the_fit_to_the_four_rows_and_name_them(plans: dict[Row, planner.GridPlan]) -> None:
    """The rows that were fitted come back within 1%: the files round the fractions to three digits."""
    named = {row for name in ("frontier", "perlmutter", "alps") for row in machine.load(name).calibrated_on}
    assert named == {str(row) for row in calibrate.CALIBRATION}
    for line in reproduce.weak_scaling(plans).lines:
        if "calibrated" in line.note:
            assert line.error == pytest.approx(0, abs=0.01), line
    assert len({machine.load(name).network_fraction for name in ("frontier", "perlmutter", "alps")}) == 1


def test_frontier_is_ranked_as_measured(plans: dict[Row, planner.GridPlan]) -> None:
    frontier = [row for row in plans if row.machine == "frontier"]
    predicted = [plans[row].percent_of_peak(plans[row].best) for row in frontier]
    assert calibrate.spearman(predicted, [calibrate.rows()[row] for row in frontier]) >= 0.9


def test_gain_over_one_dimension_and_hsdp_at_80b() -> None:
    """13 to 45%, with 5 points of slack on both sides."""
    base, best = figures.without_overlap(Row("frontier", 8192, "gpt-80b"), machine.load("frontier"))
    assert 13 - 5 <= 100 * (1 - best.seconds / base.seconds) <= 45 + 5
    assert (base.grid.x, base.grid.y) == (8, 1)


def test_overlap_gain_at_80b_is_near_the_papers_two_figures(plans: dict[Row, planner.GridPlan]) -> None:
    """18.69% in one place, 22% in another; not calibrated on, so 5 points of slack."""
    line = next(line for line in figures.overlap_gains(plans).lines if line.what.startswith("all of"))
    assert 18.69 - 5 <= line.predicted <= 22 + 5


def test_grids_are_ranked_against_measured_times_not_against_the_model_itself() -> None:
    """Oracle: the seconds that bench/plan_validation measured, of all 20 grids of eight ranks."""
    seconds, *_ = reproduce.measured_steps()
    assert set(seconds) == set(Grid.all(8)) and len(seconds) == 20
    lines = {line.what: line for line in reproduce.rankings().lines}
    aware, agnostic = (lines[f"8 ranks, {name}"] for name in ("equation (10), placement-aware", "placement-agnostic"))
    assert aware.predicted > agnostic.predicted and aware.error is None
    rho = [float(line.note.split("rank correlation ")[1].split(";")[0]) for line in (aware, agnostic)]
    assert rho[0] >= 0.9 > rho[1]
    assert lines["20B on 32 A100, 2k a GPU tokens, agnostic choice"].predicted > 1.02  # the choice costs something


def test_unets_gain_over_zero_3_is_around_the_papers_five() -> None:
    """ "Up to 5 times faster" on 512 and 1,024 GPUs of both machines. Nothing is calibrated on it, so the mean of the
    four within a factor of 1.35, and none off by more than 1.75."""
    group = figures.unets()
    lines = {tuple(line.what.split()[:2]): line for line in group.lines if line.unit == "x"}
    large = {where: line.predicted for where, line in lines.items() if line.paper == "up to 5"}
    assert set(large) == {(name, count) for name in ("perlmutter", "frontier") for count in ("512", "1024")}
    assert 5 / 1.35 <= math.prod(large.values()) ** 0.25 <= 5 * 1.35
    assert all(5 / 1.75 <= gain <= 5 * 1.75 for gain in large.values())
    assert all(line.predicted > 1 for line in lines.values()) and len(lines) == 10


def test_unets_are_the_examples_convolutions() -> None:
    """Oracle: the modules of ``examples/unet``, whose defaults are the paper's smallest size."""
    from torch import nn

    with torch.device("meta"):
        model = UNet()
    wide = [m for m in model.modules() if isinstance(m, nn.Conv2d) and m.kernel_size == (3, 3)]
    wide = [m for m in wide if 3 not in (m.in_channels, m.out_channels)]  # images in and out
    found = [layer for block in readers.read("unet-250m").blocks for layer in block.layers]
    assert sorted((9 * m.in_channels, m.out_channels) for m in wide) == sorted(
        (layer.in_features, layer.out_features) for layer in found
    )
    whole = sum(p.numel() for p in model.parameters())
    assert whole == pytest.approx(196e6, rel=0.01) and readers.read("unet-250m").parameters > 0.75 * whole


def test_figures_of_overlap_and_frameworks(plans: dict[Row, planner.GridPlan]) -> None:
    """Each overlap gains or costs nothing; bars are whole steps; what the text gives stands there as it gives it."""
    steps, large = figures.overlap_steps(), figures.overlap_gains(plans)
    for group in (steps, large):
        ends = (": computation", ": communication that shows")
        parts = [line.predicted for line in group.lines if line.what.endswith(ends)]
        whole = [products + shown for products, shown in zip(parts[::2], parts[1::2], strict=True)]
        assert whole == sorted(whole, reverse=True)
        gains = [line.predicted for line in group.lines if line.what.endswith("gain")]
        kept = math.prod(1 - gain / 100 for gain in gains[:-1])
        assert 1 - gains[-1] / 100 == pytest.approx(kept) == pytest.approx(whole[-1] / whole[0])
    assert [line.paper for line in steps.lines][:5] == [5, 8, 19, 9, 34]
    assert whole[-1] == pytest.approx(plans[Row("frontier", 8192, "gpt-80b")].best.seconds)
    grids = {line.what: line for line in figures.grid_and_overlap(plans).lines}
    assert grids["frontier 8192 gpt-80b: gain of overlap"].paper == "18.69 to 22"
    assert sum(line.paper == "13 to 45" for line in grids.values()) == 5


def test_spearman_by_hand() -> None:
    assert calibrate.spearman([1, 2, 3], [10, 20, 30]) == 1
    assert calibrate.spearman([1, 2, 3], [3, 2, 1]) == -1
    assert calibrate.spearman([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx(0.8)
    assert calibrate.spearman([1, 1, 2], [1, 1, 2]) == 1
    with pytest.raises(ValueError, match="3 and 2 values"):
        calibrate.spearman([1, 2, 3], [1, 2])


def test_every_weak_scaling_row_is_in_the_papers_data() -> None:
    weak = readers.papers()["democratizing_weak"]
    assert {name: len(table) for name, table in weak.items()} == {"perlmutter": 4, "frontier": 7, "alps": 4}


@pytest.mark.soak
def test_machine_files_hold_what_a_fit_gives() -> None:
    """Two rows of frontier do not tell its two fractions apart: any network from 0.85 to 0.95 meets both."""
    for name, (gemm, network) in calibrate.fit().items():
        assert machine.load(name).gemm_fraction == pytest.approx(gemm, abs=0.011), name
        assert 0.85 < network < 0.99


@pytest.mark.soak
def test_every_group_is_printed_with_numbers() -> None:
    groups = list(reproduce.groups())
    assert len(groups) == 17 and all(group.lines for group in groups)
    closing = lines_of.summaries(groups)
    assert sum(one.rows for one in closing) == sum(len(group.lines) for group in groups)
    assert closing[0].held_out == 11 and closing[0].mean is not None and closing[0].mean <= 0.10
    assert any(isinstance(line.paper, str) and line.error is None for group in groups for line in group.lines)
    assert len(reproduce.CANNOT) > 5 and len(reproduce.CONTRADICTIONS) > 5
