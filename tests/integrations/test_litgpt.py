"""``axo litgpt``: LitGPT's own pretraining on grids, against LitGPT as it is on one device."""

import os
import sys
from pathlib import Path

import pytest
import torch

from tests.integrations.support import LLAMA, distance, mean
from tests.launcher import run_ranks

TEXT = "".join(f"line {i}: {i * i} lazy dogs jump over {i} quick brown foxes\n" for i in range(300))
STEPS = 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("litgpt")
    (path / "text.txt").write_text(TEXT)
    return path


def pretrain(folder, out, options, grid=None):
    """One rank of ``litgpt pretrain`` without its command line; returns the losses and checksums that it saw."""
    import litgpt.pretrain
    from litgpt.args import EvalArgs, TrainArgs
    from litgpt.config import Config

    from axo.integrations import litgpt as integration
    from axo.integrations.text_data import LocalText

    losses, sums = [], []

    class Losses(litgpt.pretrain.RunningMean):
        def update(self, value):
            losses.append(float(value))
            super().update(value)

    class Batches(litgpt.pretrain.CycleIterator):
        def __next__(self):
            batch = super().__next__()
            sums.append(int((batch * torch.arange(1, batch.shape[1] + 1)).sum()))
            return batch

    litgpt.pretrain.RunningMean, litgpt.pretrain.CycleIterator = Losses, Batches
    litgpt.pretrain.save_hyperparameters = lambda *_: None  # reads a command line
    sys.argv = ["litgpt", "pretrain"]
    data_ranks = 1 if grid is None else int(grid.split("x")[2]) * int(grid.split("x")[3])
    steps, length, rows = options.get("steps", STEPS), 32, 8
    accumulate = options.get("accumulate", 1)

    def start():
        litgpt.pretrain.setup(
            "small",
            model_config=Config(**LLAMA),
            out_dir=Path(folder, out),
            precision=options.get("precision", "32-true"),
            resume=options.get("resume", False),
            data=LocalText(paths=[str(folder / "text.txt")]),
            train=TrainArgs(
                global_batch_size=rows,
                micro_batch_size=rows // data_ranks // accumulate,
                max_tokens=steps * rows * length,
                max_seq_length=length,
                max_norm=options.get("max_norm", 1.0),
                lr_warmup_steps=2,
                save_interval=options.get("save_interval", 1000),
                min_lr=options.get("min_lr", 4e-5),
            ),
            eval=EvalArgs(interval=1000, max_iters=2),
            optimizer={
                "class_path": "torch.optim.AdamW",
                "init_args": {"lr": 4e-4, "weight_decay": 0.1, "betas": [0.9, 0.95]},
            },
            devices=data_ranks,
            logger_name="csv",
        )

    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    torch._dynamo.config.disable = True
    if grid is None:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            del os.environ[name]
        start()
    else:
        integration._rank(start, "pretrain", grid, True)
    return losses, sums


def run(folder, out, grid=None, env=None, **options):
    """(losses, checksums) as one run: means and sums over the data ranks; and the final model."""
    ranks = 1
    if grid is not None:
        x, y, z, data = map(int, grid.split("x"))
        ranks = x * y * z * data
    environment = {"TORCHELASTIC_RUN_ID": "test"} if grid is not None else {}
    results = run_ranks(pretrain, ranks, folder, out, options, grid, env=environment | (env or {}), timeout=180)
    lines = results
    if grid is not None:
        lines = results[:: x * y]
        for rank, (losses, sums) in enumerate(results):
            assert losses == pytest.approx(lines[rank // (x * y)][0], abs=1e-6), "peers on x and y disagree"
            assert sums == lines[rank // (x * y)][1], "peers on x and y read different batches"
    losses = mean(line[0] for line in lines)
    sums = [sum(column) for column in zip(*(line[1] for line in lines), strict=True)]
    state = torch.load(folder / out / "final" / "lit_model.pth", weights_only=True)
    return losses, sums, state


@pytest.fixture(scope="module")
def serial(folder):
    return run(folder, "serial")


@pytest.mark.parametrize("grid", ["2x1x1x1", "1x2x1x1", "1x1x2x1", "2x2x1x1", "2x1x1x2", "2x2x2x1"])
def test_pretraining_equals_stock_litgpt(folder, serial, grid):
    """Oracle: ``litgpt pretrain``, one device, fp32. Losses to 1e-4, the model after 20 steps to 1e-5 (both summation
    order only), the same tokens."""
    losses, sums, state = run(folder, grid, grid)
    assert len(losses) == STEPS and serial[0][-1] < serial[0][0] - 0.3
    assert losses == pytest.approx(serial[0], abs=1e-4)
    assert sums == serial[1]
    assert distance(state["model"], serial[2]["model"]) < 1e-5
