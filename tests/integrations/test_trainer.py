"""Lightning's Trainer with AxoStrategy, against the same program on Lightning's single device."""

import csv

import pytest
import torch

import axo
from axo.grid import AXES
from examples.trainer.lightning_trainer import BATCH, train
from tests.integrations.support import ELASTIC, csv_values, distance, tensorboard_values
from tests.launcher import run_ranks


def on_grid(cases):
    """Several Trainers one after another on the same ranks; of each the losses, the validation's, the weights."""
    return [train(grid, **options) for grid, options in cases]


def check(ranks, expected, first, what):
    losses, validation, weights = expected
    for rank in ranks:
        assert rank[0] == pytest.approx(losses[first:], abs=1e-4), what
        assert rank[1] == pytest.approx(validation, abs=1e-4), what
    assert distance(ranks[0][2], weights) < 1e-5, what


def test_training_and_resuming_equal_one_device(tmp_path):
    """Two epochs; and two starts each: between epochs, and in the midst of one from a sharded checkpoint."""
    whole = train(None, tmp_path / "serial")
    assert whole[0][-1] < whole[0][0] - 0.05
    between, midst = tmp_path / "between", tmp_path / "midst"
    cases = [
        ("2x1x2x1", {"out": tmp_path / "a"}),
        ("2x2x1x1", {"steps": 4, "out": between}),
        ("1x2x2x1", {"out": tmp_path / "c", "resume": between / "last.ckpt"}),
        ("2x1x1x2", {"steps": 2, "out": midst, "options": {"sharded": True}}),
        ("1x1x2x2", {"out": tmp_path / "d", "resume": midst / "last.ckpt", "options": {"zero": 1}}),
    ]
    ranks = run_ranks(on_grid, 4, cases, env=ELASTIC, timeout=120)
    for index, first in enumerate((0, None, 4, None, 2)):
        if first is not None:
            check([rank[index] for rank in ranks], whole, first, cases[index])
    assert (between / "last.ckpt").is_file() and (midst / "last.ckpt").is_dir()
    alone = train(None, tmp_path / "e", resume=between / "last.ckpt")
    check([alone], whole, 4, "one device goes on from a grid's checkpoint")


def accumulate(grid, options):
    return train(grid, **options)


def test_accumulation_and_precision(tmp_path):
    """Micro-batches and bf16, against one device with the same; and what a LightningModule may not own."""
    options = {"steps": 3, "accumulate_grad_batches": 2, "out": tmp_path / "a"}
    for found in run_ranks(accumulate, 2, "2x1x1x1", options, env=ELASTIC, timeout=60)[:1]:
        check([found], train(None, **options | {"out": tmp_path / "b"}), 0, "accumulation")
    options = {"steps": 3, "precision": "bf16-mixed", "out": tmp_path / "c"}
    losses = run_ranks(accumulate, 2, "1x1x2x1", options, env=ELASTIC, timeout=60)[0][0]
    assert losses == pytest.approx(train(None, **options | {"out": tmp_path / "d"})[0], rel=0.01)


FLOPS, PEAK, LENGTH = 3e9, 7e9, 16  # of a step and of a rank, both made up; tokens of a row


def log(grid, folder, more):
    """Four steps of two micro-batches, each second one logged."""
    from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

    from axo.integrations.trainer import LogFigures

    figures = LogFigures(tokens=2 * BATCH * LENGTH, flops=FLOPS, peak=PEAK)
    loggers = [CSVLogger(folder, name="csv"), TensorBoardLogger(folder, name="board")]
    options = {"accumulate_grad_batches": 2, "steps": 4, "log_every_n_steps": 2}
    return train(grid, folder, callbacks=[figures], logger=loggers, **options, **more)[0]


@pytest.mark.parametrize("grid", ["1x1x2x1", pytest.param("2x1x2x1", marks=pytest.mark.soak)])
def test_figures_of_all_ranks_reach_the_loggers(tmp_path, grid):
    """Oracle of the losses: one device. What depends on time is compared with another number of the same moment.

    The module logs a loss itself, that of the last micro-batch, so this one's mean over a step tells them apart.
    """
    ranks = axo.Grid.parse(grid).world_size
    run_ranks(log, ranks, grid, tmp_path, {}, env=ELASTIC, timeout=60)
    micro = train(None, tmp_path / "alone", accumulate_grad_batches=2, steps=4)[0]
    (file,) = tmp_path.glob("csv/*/metrics.csv")
    logged = csv_values(file)
    shares = [f"comm_share/{axis}" for axis in AXES]
    for found in (logged, tensorboard_values(tmp_path / "board")):
        for name in ("loss", "tokens_per_sec", "mfu", "memory_gb", "comm_share/all", *shares):
            assert list(found[name]) == [1, 3], name
            assert [*found[name].values()] == pytest.approx([*logged[name].values()], rel=1e-5), name
    for step in (1, 3):
        now = {name: values[step] for name, values in logged.items() if step in values}
        assert now["loss"] == pytest.approx((micro[2 * step] + micro[2 * step + 1]) / 2, abs=1e-4)
        assert now["tokens_per_sec"] > 0 and 0.01 < now["memory_gb"] < 100
        steps_per_sec = now["tokens_per_sec"] / (2 * BATCH * LENGTH)
        assert now["mfu"] == pytest.approx(steps_per_sec * FLOPS / (PEAK * ranks), rel=1e-5)
        for axis, share in zip(AXES, shares, strict=True):
            assert (0 < now[share] < 1) == (getattr(axo.Grid.parse(grid), axis) > 1), share
        assert now["comm_share/all"] == pytest.approx(sum(now[share] for share in shares), rel=1e-5)


def log_uneven(folder):
    """The losses logged of a constant one, in two epochs of five batches with two to a step; the rows before them are
    of a fit that ends in the midst of a step, with another constant."""
    import lightning.pytorch as pl
    from lightning.pytorch.loggers import CSVLogger

    from axo.integrations.trainer import AxoStrategy, LogFigures

    class Constant(pl.LightningModule):
        def __init__(self, loss, last):
            super().__init__()
            self.layer = torch.nn.Sequential(torch.nn.Linear(1, 1))
            self.loss, self.last = loss, last

        def training_step(self, batch, index):
            return 0 * self.layer(batch).sum() + self.loss

        def on_train_batch_start(self, batch, index):
            return -1 if index == self.last else None

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    figures, logger = LogFigures(), CSVLogger(folder, name="csv")
    for loss, last, epochs in ((8.0, 3, 1), (1.0, -1, 2)):
        trainer = pl.Trainer(
            strategy=AxoStrategy("1x1x1x1"), accelerator="cpu", accumulate_grad_batches=2, callbacks=[figures],
            max_epochs=epochs, logger=logger, log_every_n_steps=1, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(Constant(loss, last), torch.utils.data.DataLoader(torch.ones(5, 1)))


def test_a_step_of_fewer_micro_batches_and_one_cut_off_log_the_mean_loss(tmp_path):
    """Oracle: the loss is constant. The first fit ends after three micro-batches, the first of its second step."""
    run_ranks(log_uneven, 1, tmp_path, env=ELASTIC, timeout=60)
    (file,) = tmp_path.glob("csv/*/metrics.csv")
    with file.open() as opened:
        losses = [float(row["loss"]) for row in csv.DictReader(opened) if row["loss"]]
    assert losses == [8.0] + [1.0] * 6


def test_what_a_trainer_cannot_take_says_what_to_do(tmp_path):
    import lightning.pytorch as pl

    from axo.integrations.trainer import LogFigures, _children

    with pytest.raises(ValueError, match=r"a Trainer wants axo\.integrations\.trainer\.AxoStrategy"):
        pl.Trainer(strategy=axo.AxoStrategy("1x1x1x1"))

    with pytest.raises(axo.Refused, match=r"LogFigures: wants Trainer\(strategy=AxoStrategy\(...\)\), got Single"):
        train(None, tmp_path, callbacks=[LogFigures()])

    owner = torch.nn.Module()
    owner.a, owner.b = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    owner.empty = torch.nn.ReLU()
    assert list(_children(owner)) == ["a", "b"]
    owner.b.weight = owner.a.weight
    with pytest.raises(axo.Refused, match="'b' and 'a' of Module share a parameter"):
        _children(owner)
    owner.scale = torch.nn.Parameter(torch.ones(1))
    with pytest.raises(axo.Refused, match="itself owns the parameters scale"):
        _children(owner)
