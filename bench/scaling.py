"""How does a training step scale? One table over grids, with efficiency.

    axo bench scaling --grids 1x1x1x1,1x1x2x1,2x1x1x1 --tokens 256                weak: tokens of each data rank stay
    axo bench scaling --mode strong --grids 1x1x1x1,1x1x2x1,1x1x4x1 --tokens 1024  strong: tokens of all ranks stay
    torchrun --nproc-per-node 8 -m axo_bench.scaling --grids 2x2x2x1,1x1x8x1       grids of as many ranks as there are
    srun ... (one task a rank, RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set)  likewise

The first grid is the yardstick. Efficiency is (tokens/s a rank) / (tokens/s a rank of the yardstick); a rank has
``--threads`` on every grid, but over ranks that share cores efficiency cannot reach 1, so ``cores`` stands in the
header. Times as in ``axo bench step``: the slowest rank's, mean of the last 8 of 10 steps. ``comm`` is the part of the
step that a rank is blocked in communication, mean over ranks.
"""

from __future__ import annotations

import argparse
import os
import statistics
from typing import Any

import torch

from axo.grid import Grid

from .lib import step_models as models
from .lib.arguments import Parser, numbers
from .lib.table import Table, environment
from .step import COUNTED, LOSS_LIMIT, STEPS, batch, timed_step

COLUMNS = {"grid": "s", "ranks": "d", "hidden": "d", "tokens": "d", "ms": ".2f", "tokens_s": ".0f"}
COLUMNS |= {"efficiency": ".3f", "comm": ".2f", "loss": ".4f"}


def main(arguments: list[str] | None = None) -> int:
    """Run the bench."""
    parser = Parser("axo bench scaling", __doc__, json=True)
    parser.add_argument("--grids", default="1x1x1x1,2x1x1x1,1x2x1x1,1x1x2x1,1x1x1x2", help="comma-separated")
    parser.add_argument("--mode", default="weak", choices=["weak", "strong"])
    parser.add_argument("--hidden", default="256", help="sizes, comma-separated; a table row a grid and size")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=512)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=256, help="of each data rank (weak), or of all (strong)")
    parser.add_argument("--precision", default="bf16-mixed", choices=list(LOSS_LIMIT))
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of a rank, on every grid")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    from axo.launch import Rank, launch_local

    rank = Rank.from_environment()
    grids = [Grid.parse(text) for text in options.grids.split(",")]
    hidden_sizes = numbers("--hidden", options.hidden)
    for grid in grids:
        rows_of(grid, options)
        if rank is not None and grid.world_size != rank.world_size:
            parser.error(f"grid {grid} has {grid.world_size} ranks and {rank.world_size} were started; name such grids")
    cores = len(os.sched_getaffinity(0))
    header = {"bench": "scaling", "mode": options.mode, "cores": cores, **environment(torch.device(options.device))}
    header["threads"] = options.threads
    table = Table(COLUMNS, options.json if rank is None or rank.rank == 0 else None, header)
    for hidden in hidden_sizes:
        first: float | None = None
        for grid in grids:
            if rank is not None:
                row = measure(grid, hidden, options)
            else:
                fork = options.device == "cpu"
                row = launch_local(measure, grid.world_size, grid, hidden, options, fork=fork)
            if row is None:
                continue
            each = row["tokens_s"] / grid.world_size
            first = first or each
            table.add(**row, efficiency=each / first)
    return 0


def rows_of(grid: Grid, options: argparse.Namespace) -> int:
    """Rows of one data rank.

    Raises:
        ValueError: The tokens do not divide.
    """
    parts = grid.z * grid.data if options.mode == "strong" else 1
    if options.tokens % (options.seq_len * parts):
        raise ValueError(
            f"--tokens {options.tokens} is not a multiple of --seq-len {options.seq_len} times {parts} data"
            f" ranks of grid {grid}"
        )
    return options.tokens // options.seq_len // parts


def measure(grid: Grid, hidden: int, options: argparse.Namespace) -> dict[str, Any] | None:
    """On every rank: time one grid; the row on rank 0."""
    import axo

    torch.set_num_threads(options.threads)
    rows = rows_of(grid, options)
    sizes = models.Sizes(
        hidden, options.layers, options.heads, options.vocab, options.seq_len, rows, options.precision
    )  # fmt: skip
    comms = axo.connect(grid, device=options.device)
    contestant = models.axo_contestant(str(grid), sizes, comms)
    steps = [timed_step(contestant, batch(sizes, step, comms), comms) for step in range(STEPS)]
    counted = steps[-COUNTED:]
    mean = statistics.fmean(spent for spent, _, _ in counted)
    waited = torch.tensor([statistics.fmean(waited for _, waited, _ in counted)], dtype=torch.float64)
    blocked = float(comms.world.all_reduce(waited.to(comms.device), "avg"))
    comms.close()
    if comms.rank != 0:
        return None
    tokens = sizes.tokens * grid.z * grid.data
    return {
        "grid": str(grid), "ranks": grid.world_size, "hidden": hidden, "tokens": tokens, "ms": mean * 1e3,
        "tokens_s": tokens / mean, "comm": blocked / mean, "loss": steps[-1][2],
    }  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
