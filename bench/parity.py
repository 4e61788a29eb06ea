"""Does a long parallel run lie on the serial one? The losses of both, step by step, and a picture of them.

    axo bench parity --grid 2x2x2x1 --steps 2000 --precision bf16-mixed --out runs/parity

``axo train --compare-serial`` on a small model, with checkpoints each 100 steps in ``--out``: a run that was stopped
(SIGTERM, or killed) goes on from the last one when the same command is given again. The serial run is plain LitGPT and
torch on one rank. Columns: the largest difference of a step's losses (absolute in fp32, else relative to the serial
loss) and its limit, means over the last tenth of the steps, the mean difference there, and ``#wrong``: 1 when the limit
is passed. The JSON line has both curves.
"""

from __future__ import annotations

import shutil
import statistics
from pathlib import Path

import torch

from axo.grid import Grid

from .lib.arguments import Parser
from .lib.table import Table, environment

COLUMNS = {"grid": "s", "precision": "s", "steps": "d", "difference": ".1e", "limit": ".0e"}
COLUMNS |= {"loss": ".4f", "serial": ".4f", "apart": ".1e", "#wrong": "d"}
SMALL = {"n_layer": 2, "n_embd": 64, "n_head": 4, "n_query_groups": 2, "intermediate_size": 192}


def main(arguments: list[str] | None = None) -> int:
    """Run, or go on; returns 1 when the curves part, 2 when the run was stopped before its end."""
    from axo.train import TrainConfig, run

    parser = Parser("axo bench parity", __doc__, json=True)
    parser.add_argument("--grid", default="2x2x2x1")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--precision", default="bf16-mixed", choices=["bf16-mixed", "32-true"])
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--seq-len", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--out", type=Path, default=Path("runs/parity"), help="checkpoints and the log")
    parser.add_argument("--plot", type=Path, default=None, help="write the picture here too")
    options = parser.parse_args(arguments)
    config = TrainConfig(
        model_overrides=SMALL, grid=Grid.parse(options.grid), steps=options.steps, batch_size=options.batch_size,
        seq_len=options.seq_len, lr=options.lr, min_lr=options.lr / 10, warmup=50, precision=options.precision,
        out=str(options.out), log_every=10, save_every=100, resume="auto", compare_serial=True,
    )  # fmt: skip
    outcome = run(config)
    if outcome is None:
        return 0
    if outcome.stopped:
        print(f"stopped after {len(outcome.losses)} steps; the same command goes on")
        return 2
    assert outcome.serial is not None and outcome.parity is not None
    tail = max(1, options.steps // 10)
    pairs = list(zip(outcome.losses, outcome.serial, strict=True))[-tail:]
    table = Table(COLUMNS, options.json, {"bench": "parity", **environment(torch.device("cpu")), "model": SMALL})
    table.add(
        grid=options.grid, precision=options.precision, steps=options.steps, difference=outcome.parity.difference,
        limit=outcome.parity.limit, loss=statistics.fmean(a for a, _ in pairs),
        serial=statistics.fmean(b for _, b in pairs), apart=statistics.fmean(a - b for a, b in pairs),
        **{"#wrong": int(not outcome.parity.ok)}, batch_size=options.batch_size, seq_len=options.seq_len, lr=options.lr,
        losses=[round(loss, 5) for loss in outcome.losses], serial_losses=[round(loss, 5) for loss in outcome.serial],
    )  # fmt: skip
    if options.plot is not None:
        shutil.copy(outcome.plot, options.plot)
    return int(not outcome.parity.ok)


if __name__ == "__main__":
    raise SystemExit(main())
