"""Are the losses those of stock LitGPT? One configuration file, `litgpt pretrain` and six grids: curves in one picture.

    axo bench curves --plot docs/img/curves.png --json bench/results/curves.jsonl
    axo bench curves --steps 2000 --grids 2x1x2x1 --noise --plot docs/img/curves_long.png --json ...

Stock LitGPT and each grid are given the same file; the learning rate is constant, because LitGPT's schedule counts
micro-batches, of which a grid's data ranks have fewer each. What is drawn is what LitGPT itself logs (CSV). The check
is the largest difference of a logged loss from stock's, in fp32: 1e-4 at most. Over thousands of steps rounding grows
into more than that for stock LitGPT too: with ``--noise`` it trains a second time, with micro-batches of one row, whose
gradients are added up in another order, and a grid's means over 50 steps and its validation losses may differ from the
first run's by twice as much as the second run's do.
"""

from __future__ import annotations

import csv
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch
import yaml

from axo.grid import Grid
from axo.launch import RankFailed

from .lib.arguments import Parser
from .lib.picture import panels
from .lib.table import Table, environment

GRIDS = ("2x1x1x1", "1x2x1x1", "1x1x2x1", "1x1x1x2", "2x1x2x1", "2x2x2x1")
MODEL = {
    "name": "small-llama", "block_size": 128, "n_layer": 2, "n_embd": 64, "n_head": 8, "n_query_groups": 4,
    "vocab_size": 258, "padded_vocab_size": 264, "rotary_percentage": 1.0, "parallel_residual": False, "bias": False,
    "norm_class_name": "RMSNorm", "mlp_class_name": "LLaMAMLP", "intermediate_size": 96,
}  # fmt: skip
BATCH, LENGTH, LIMIT, WINDOW, VALIDATIONS, VALIDATED = 4, 64, 1e-4, 50, 20, 64
TEXT = 64 * 1025  # bytes: 960 samples to train on and 64 to validate, whole batches in each epoch
MOST = 2e-2  # that rounding may come to: beyond it something is wrong
STOCK, OTHER_ORDER = "litgpt", "litgpt, one row at a time"
COLUMNS = {
    "run": "s",
    "first_loss": ".4f",
    "last_loss": ".4f",
    "apart": ".1e",
    "limit": ".1e",
    "seconds": ".0f",
    "#wrong": "d",
}


def main(arguments: list[str] | None = None) -> int:
    """Run all, print a line for each, draw them. Returns the number of grids whose losses are not stock's."""
    parser = Parser("axo bench curves", __doc__, json=True)
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps")
    parser.add_argument("--grids", default=",".join(GRIDS), help="comma-separated")
    parser.add_argument("--noise", action="store_true", help="compare with stock LitGPT in another order of sums")
    parser.add_argument("--plot", type=Path, default=None, help="draw the curves here (PNG)")
    options = parser.parse_args(arguments)
    for grid in options.grids.split(","):
        Grid.parse(grid)
    header = {"bench": "curves", "steps": options.steps, "model": MODEL} | environment(torch.device("cpu"))
    table, curves, wrong, limit = Table(COLUMNS, options.json, header), {}, 0, LIMIT
    with tempfile.TemporaryDirectory() as folder:
        file = write_run(Path(folder), options.steps, options.noise)
        for run in (STOCK, *([OTHER_ORDER] if options.noise else []), *options.grids.split(",")):
            began = time.perf_counter()
            curve = curves[run] = train(run, file)
            stock, apart = curves[STOCK], distance(curve, curves[STOCK], WINDOW if options.noise else 1)
            if run == OTHER_ORDER:
                limit = min(max(LIMIT, 2 * apart), MOST)
            bad = len(curve.losses) != options.steps or len(curve.validation) != len(stock.validation)
            bad |= not apart <= limit
            wrong += bad
            figures = {"first_loss": curve.losses[0], "last_loss": curve.losses[-1], "apart": apart, "limit": limit}
            took = time.perf_counter() - began
            table.add(run=run, seconds=took, **curve._asdict(), **figures, **{"#wrong": int(bad)})
    if options.plot is not None:
        draw(curves, options.plot, limit, WINDOW if options.noise else 1)
    return wrong


class Curve(NamedTuple):
    """What a run has logged."""

    losses: list[float]
    validation: list[float]


def distance(one: Curve, other: Curve, window: int) -> float:
    """The largest difference of a mean over ``window`` steps, or of a validation loss."""
    both = (means(curve.losses, window) + curve.validation for curve in (one, other))
    apart = [abs(a - b) for a, b in zip(*both, strict=False)]
    return max(apart) if all(map(math.isfinite, apart)) else math.inf


def means(losses: list[float], window: int) -> list[float]:
    """The mean of each window of steps."""
    return [statistics.fmean(losses[start : start + window]) for start in range(0, len(losses), window)]


def write_run(folder: Path, steps: int, validates: bool) -> Path:
    """Text, tokenizer and the configuration file that every run is given."""
    from axo.train.sample import write

    write(folder, size=TEXT)
    run = {
        "model_name": "small", "model_config": MODEL, "precision": "32-true",
        "tokenizer_dir": str(folder / "tokenizer"),
        "data": {
            "class_path": "axo.integrations.litgpt.text_data.LocalText",
            "init_args": {
                "paths": [str(folder / "text.txt")], "cache_dir": str(folder / "cache"),
                "val_fraction": (VALIDATED + 0.5) * LENGTH / TEXT,  # so many samples: whole batches on any grid
            },
        },
        "train": {
            "global_batch_size": BATCH, "micro_batch_size": 2, "max_tokens": steps * BATCH * LENGTH,
            "max_seq_length": LENGTH, "max_norm": 1.0, "lr_warmup_steps": 0, "min_lr": 1e-3, "save_interval": None,
        },
        "eval": {"interval": max(1, steps // VALIDATIONS) if validates else 10 * steps, "max_iters": VALIDATED},
        "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 1e-3}},
        "logger_name": "csv",
    }  # fmt: skip
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(run))
    return file


def train(run: str, file: Path) -> Curve:
    """What one run has logged; ``run`` is a grid, or stock LitGPT."""
    out = file.parent / run
    stock = run in (STOCK, OTHER_ORDER)
    command = ["litgpt", "pretrain"] if stock else ["axo.cli", "litgpt", "pretrain", "--grid", run]
    given = ["--config", str(file), "--out_dir", str(out), *(["--devices", "1"] if stock else [])]
    given += ["--train.micro_batch_size", "1"] if run == OTHER_ORDER else []
    done = subprocess.run(
        [sys.executable, "-m", *command, *given],
        env=os.environ | {"TORCHDYNAMO_DISABLE": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["nothing"]
        sys.stderr.write(f"{' '.join([*command, *given])} ended with {done.returncode}:\n{done.stderr[-3000:]}")
        raise RankFailed(f"{run}: {said[-1]}", rank=0, user_error=done.returncode == 2)
    (log,) = (out / "logs" / "csv").glob("*/metrics.csv")
    rows = list(csv.DictReader(log.open()))
    return Curve(*([float(row[name]) for row in rows if row.get(name)] for name in ("loss", "val_loss")))


def draw(curves: dict[str, Curve], path: Path, limit: float, window: int) -> None:
    """Losses over steps, and below them each run's difference from stock, in means over ``window`` steps."""
    stock = means(curves[STOCK].losses, window)
    steps = [(index + 1) * window for index in range(len(stock))]
    with panels(path, (8, 6), 2, sharex=True, height_ratios=(2, 1)) as (above, below):
        for number, (run, curve) in enumerate(curves.items()):
            values = means(curve.losses, window)
            if run == STOCK:
                above.plot(steps, values, color="#c8ccd0", linewidth=13, label="litgpt pretrain, one device")
                continue
            (line,) = above.plot(
                steps[: len(values)], values, linewidth=max(10 - 1.7 * (number - 1), 1), label=run
            )  # narrower: none hides another
            if window > 1:
                each = steps[-1] // len(curve.validation)
                at = [each * (index + 1) for index in range(len(curve.validation))]
                above.plot(at, curve.validation, "--", color=line.get_color(), label=f"{run}: validation")
            apart = [max(abs(loss - other), 1e-9) for loss, other in zip(values, stock, strict=False)]
            below.semilogy(steps[: len(apart)], apart, linewidth=1, label=run)
        below.axhline(limit, color="#c0392b", linewidth=1)
        below.text(1, limit * 1.4, f"{limit:.0e}", color="#c0392b", fontsize=8)
        below.set(ylim=(1e-9, 10 * limit), ylabel="|loss - litgpt's|\n(1e-9: the same)", xlabel="optimizer step")
        above.set(ylabel="training loss", title="One configuration file: stock LitGPT and grids (fp32)")
        above.legend(fontsize=8, ncols=2)


if __name__ == "__main__":
    sys.exit(main())
