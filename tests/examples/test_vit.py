"""The ViT of examples/vit on grids: two epochs against the same loop without Axo; the whole study is a long proof."""

import pytest

from examples.vit import __main__ as command
from examples.vit.training import SETTINGS, Options, digits, train
from tests.launcher import run_ranks

SMALL = Options(epochs=2, width=32, depth=1)


def curve(setting, options=SMALL):
    return run_ranks(train, setting.ranks, setting, 0, options, timeout=120)


def test_curves_are_those_of_one_rank():
    images, labels = digits()
    assert images.shape == (1797, 8, 8) and labels.bincount().min() > 170
    ((expected,), *others) = map(curve, SETTINGS)
    assert expected[-1].loss < expected[0].loss - 0.5
    for setting, ranks in zip(SETTINGS[1:], others, strict=True):
        assert all(history == ranks[0] for history in ranks), "ranks disagree"
        for mine, serial in zip(ranks[0], expected, strict=True):
            # 27 AdamW steps that sum in another order; an image on the border of two digits may change sides
            assert mine.loss == pytest.approx(serial.loss, abs=1e-4), setting.name
            assert mine.test_accuracy == pytest.approx(serial.test_accuracy, abs=0.01), setting.name


@pytest.mark.soak
def test_the_study_meets_its_targets(tmp_path):
    assert command.main(["--seeds", "1", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "vit.png").stat().st_size > 10_000
