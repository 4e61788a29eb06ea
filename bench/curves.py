"""Are the losses those of stock LitGPT? One configuration file, `litgpt pretrain` and six grids: curves in one picture.

    axo bench curves --plot docs/img/curves.png --json bench/results/curves.jsonl

Stock LitGPT and each grid are given the same file; the learning rate is constant, because LitGPT's schedule counts
micro-batches, of which a grid's data ranks have fewer each. What is drawn is what LitGPT itself logs (CSV). The check
is the largest difference of a logged loss from stock's, in fp32: 1e-4 at most.
"""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

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
BATCH, LENGTH, LIMIT = 4, 64, 1e-4
COLUMNS = {"run": "s", "first_loss": ".4f", "last_loss": ".4f", "apart": ".1e", "seconds": ".0f", "#wrong": "d"}


def main(arguments: list[str] | None = None) -> int:
    """Run all, print a line for each, draw them. Returns the number of grids whose losses are not stock's."""
    parser = Parser("axo bench curves", __doc__, json=True)
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps")
    parser.add_argument("--grids", default=",".join(GRIDS), help="comma-separated")
    parser.add_argument("--plot", type=Path, default=None, help="draw the curves here (PNG)")
    options = parser.parse_args(arguments)
    for grid in options.grids.split(","):
        Grid.parse(grid)
    header = {"bench": "curves", "steps": options.steps, "model": MODEL} | environment(torch.device("cpu"))
    table, curves, wrong = Table(COLUMNS, options.json, header), {}, 0
    with tempfile.TemporaryDirectory() as folder:
        file = write_run(Path(folder), options.steps)
        for run in ("litgpt", *options.grids.split(",")):
            began = time.perf_counter()
            curve = curves[run] = train(run, file)
            stock = curves["litgpt"]
            apart = max(abs(loss - other) for loss, other in zip(curve, stock, strict=False))
            bad = len(curve) != options.steps or not apart <= LIMIT
            wrong += bad
            figures = {"first_loss": curve[0], "last_loss": curve[-1], "apart": apart, "#wrong": int(bad)}
            table.add(run=run, seconds=time.perf_counter() - began, losses=curve, **figures)
    if options.plot is not None:
        draw(curves, options.plot)
    return wrong


def write_run(folder: Path, steps: int) -> Path:
    """Text, tokenizer and the configuration file that every run is given."""
    from axo.train.sample import write

    write(folder, size=1 << 16)
    run = {
        "model_name": "small", "model_config": MODEL, "precision": "32-true",
        "tokenizer_dir": str(folder / "tokenizer"),
        "data": {
            "class_path": "axo.integrations.litgpt.text_data.LocalText",
            "init_args": {"paths": [str(folder / "text.txt")], "cache_dir": str(folder / "cache")},
        },
        "train": {
            "global_batch_size": BATCH, "micro_batch_size": 2, "max_tokens": steps * BATCH * LENGTH,
            "max_seq_length": LENGTH, "max_norm": 1.0, "lr_warmup_steps": 0, "min_lr": 1e-3, "save_interval": None,
        },
        "eval": {"interval": 10 * steps, "max_iters": 1},
        "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 1e-3}},
        "logger_name": "csv",
    }  # fmt: skip
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(run))
    return file


def train(run: str, file: Path) -> list[float]:
    """The losses that one run has logged; ``run`` is a grid, or "litgpt"."""
    out = file.parent / run
    command = ["litgpt", "pretrain"] if run == "litgpt" else ["axo.cli", "litgpt", "pretrain", "--grid", run]
    given = ["--config", str(file), "--out_dir", str(out), *(["--devices", "1"] if run == "litgpt" else [])]
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
    return [float(row["loss"]) for row in csv.DictReader(log.open()) if row["loss"]]


def draw(curves: dict[str, list[float]], path: Path) -> None:
    """Losses over steps, and below them each grid's difference from stock."""
    with panels(path, (8, 6), 2, sharex=True, height_ratios=(2, 1)) as (above, below):
        for number, (run, curve) in enumerate(curves.items()):
            steps = range(1, len(curve) + 1)
            if run == "litgpt":
                above.plot(steps, curve, color="#c8ccd0", linewidth=13, label="litgpt pretrain, one device")
                continue
            above.plot(
                steps, curve, linewidth=max(10 - 1.7 * (number - 1), 1), label=run
            )  # narrower: none hides another
            apart = [abs(loss - other) for loss, other in zip(curve, curves["litgpt"], strict=False)]
            below.semilogy(steps, [max(value, 1e-9) for value in apart], linewidth=1, label=run)
        below.axhline(LIMIT, color="#c0392b", linewidth=1)
        below.text(1, LIMIT * 1.4, "1e-4", color="#c0392b", fontsize=8)
        below.set(ylim=(1e-9, 1e-3), ylabel="|loss - litgpt's|\n(1e-9: the same)", xlabel="optimizer step")
        above.set(ylabel="training loss", title="One configuration file: stock LitGPT and grids (fp32)")
        above.legend(fontsize=8, ncols=2)


if __name__ == "__main__":
    sys.exit(main())
