"""Run the memorization study: print the table, write JSON lines and a picture, and judge them. See README.md.

    python -m examples.memorization                               3 seeds, 3 widths, cross-entropy and Goldfish loss
    python -m examples.memorization --grid 2x1x1x1                the same on two local ranks that split every product
    torchrun --nproc-per-node 4 -m examples.memorization --grid 2x2x1x1     on ranks that exist

Runs that stand in ``--out`` already, with the same options, are not done again; so the same command goes on where it
was stopped. Ends with 1 when a target is missed, with 3 when ``--seconds`` were over first.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Any

import torch

import axo
from axo.comm.agree import ranks_that_differ
from axo.launch import Rank, RankFailed, launch_local, set_threads
from bench.lib.table import Table, environment
from examples.memorization import documents, figure, study
from examples.memorization.documents import EPOCHS
from examples.memorization.study import Settings

NAMES = [f"{epochs} ep" for epochs in EPOCHS]
COLUMNS = {"loss": "s", "width": "d", "seed": "d"} | dict.fromkeys(NAMES, ".2f")
COLUMNS |= {"tokens": ".3f", "dropped": ".4f", "cpu_s": ".1f", "wall_s": ".1f"}
PLAIN = "cross-entropy"
LEARNED = 0.50  # exact match that the bucket seen most reaches with cross-entropy, at least
NEAR = 0.02  # how far from the bucket never seen it may be with Goldfish loss; and the dropped share from 1/k, relative
UNFINISHED = 3


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.memorization", description=__doc__.splitlines()[0])
    parser.add_argument("--grid", default="1x1x1x1")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--documents", type=int, default=50, help="in each bucket")
    parser.add_argument("--widths", default="64,128,256", help="of the models; the targets are the widest one's")
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--warmup", type=int, default=10, help="steps on other text")
    parser.add_argument("--batch", type=int, default=1, help="documents a step; a multiple of the grid's z*data")
    parser.add_argument("--goldfish", default="2,13", help="K,H: leave one of K tokens out, chosen by the H before it")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/memorization"), help="memorization.jsonl and .png go here"
    )
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no run after so many")
    options = parser.parse_args(arguments)
    try:
        options.widths = sorted({int(width) for width in options.widths.split(",")})
        options.goldfish = tuple(int(part) for part in options.goldfish.split(","))
        k, h = options.goldfish
    except ValueError:
        parser.error("--widths wants whole numbers such as 128,256, and --goldfish two, such as 2,13")
    if k < 2 or h < 1 or options.seeds < 1:
        parser.error(f"--goldfish {k},{h} --seeds {options.seeds}: K is at least 2, H and the seeds at least 1")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Run the study; returns 0, 1 when a target is missed, UNFINISHED when time was over."""
    options = parse(arguments)
    grid = axo.Grid.parse(options.grid)
    if Rank.from_environment() is not None or grid.world_size == 1:
        return on_rank(options)
    return launch_local(on_rank, grid.world_size, options)


def on_rank(options: argparse.Namespace) -> int:
    """What each rank does."""
    rank = Rank.from_environment()
    set_threads(0, rank.local_world_size if rank else 1)
    comms = axo.connect(options.grid)
    started = time.perf_counter(), time.process_time()
    texts = documents.tokenize(documents.read_texts(), Settings.vocabulary)
    source = documents.library(texts, Settings.length)
    if ranks_that_differ(comms, str(source.checksum())):
        raise ValueError(
            "memorization: the ranks' Pythons hold different texts; use one version of Python on all hosts"
        )
    seconds = [time.perf_counter() - started[0], time.process_time() - started[1]]
    writes = comms.rank == 0
    path = options.out / "memorization.jsonl"
    known = _known(path) if writes else []
    table = Table(COLUMNS, path, environment(torch.device("cpu")) | {"grid": options.grid}) if writes else None
    rows = []
    finished = True
    for width in reversed(options.widths):  # the targets' first
        for seed in range(options.seeds):
            buckets = documents.draw(source, options.documents, seed)
            for goldfish in (None, options.goldfish):
                settings = Settings(
                    width, options.layers, warmup=options.warmup, batch=options.batch, goldfish=goldfish
                )
                what = _identity(settings, options, seed, source)
                row = next((row for row in known if row.get("what") == what), None)
                late = time.perf_counter() - started[0] > options.seconds
                # Rank 0 knows what is done and how late it is: 0 run it, 1 it is done, 2 time is over.
                decision = _from_rank_0(1 if row else 2 if late else 0, comms)
                if decision == 0:
                    row = _row(settings, buckets, seed, comms) | {"what": what}
                    if table:
                        table.add(**row)
                finished = finished and decision != 2
                if row:
                    rows.append(row)
    status = 0 if finished else UNFINISHED
    if table:
        table.note(
            f"text and tokens: {seconds[0]:.1f} s, {seconds[1]:.1f} CPU s; usable: {len(source.usable)} documents"
        )
        if finished:
            status = judge(rows, options, table)
            subtitle = (
                f"{options.documents} documents a bucket, the last {Settings.suffix} of {Settings.length} tokens, "
                f"{options.seeds} seeds (dots) and their mean · {options.layers} layer{'s' * (options.layers > 1)}"
            )
            figure.draw(options.out / "memorization.png", rows, subtitle=subtitle)
    status = _from_rank_0(status, comms)
    comms.close()
    return status


def _from_rank_0(value: int, comms: axo.Communicators) -> int:
    tensor = torch.tensor([value])
    if comms.grid.world_size > 1:
        comms.world.broadcast(tensor, src=0)
    return int(tensor)


def _row(settings: Settings, buckets: documents.Buckets, seed: int, comms: axo.Communicators) -> dict[str, Any]:
    """Do one run; return its line. Times are this rank's, CPU seconds of all its threads."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = study.run(settings, buckets, seed, comms)
    goldfish = settings.goldfish
    return {
        "loss": f"Goldfish k={goldfish[0]} h={goldfish[1]}" if goldfish else PLAIN,
        "width": settings.width,
        "seed": seed,
        **study.by_epochs(result.exact),
        "tokens": result.tokens[-1],
        "dropped": study.dropped_share(buckets, goldfish) if goldfish else None,
        "cpu_s": time.process_time() - cpu,
        "wall_s": time.perf_counter() - wall,
        "tokens by bucket": study.by_epochs(result.tokens),
    }


def judge(rows: list[dict[str, Any]], options: argparse.Namespace, table: Table) -> int:
    """Print the means over seeds and what became of the targets; return 1 when one is missed."""
    for loss in dict.fromkeys(row["loss"] for row in rows):
        for width in options.widths:
            runs = [row for row in rows if row["loss"] == loss and row["width"] == width]
            means = {name: mean(row[name] for row in runs) for name in NAMES}
            shares = ", ".join(f"{name} {100 * share:.1f}%" for name, share in means.items())
            table.note(f"{loss}, width {width}, exact match, mean of {len(runs)} seeds: {shares}", means=means)
    widest = [row for row in rows if row["width"] == max(options.widths)]
    plain = [row for row in widest if row["loss"] == PLAIN]
    goldfish = [row for row in widest if row["loss"] != PLAIN]
    k = options.goldfish[0]
    never, most = NAMES[0], NAMES[-1]
    targets = {
        f"cross-entropy, {most}: at least {LEARNED:.0%} in each seed": all(row[most] >= LEARNED for row in plain),
        f"Goldfish, {most}: within {100 * NEAR:.0f} points of {never} in each seed": all(
            abs(row[most] - row[never]) <= NEAR + 1e-12 for row in goldfish
        ),
        f"Goldfish leaves 1/{k} of the tokens out, within {NEAR:.0%}, in each seed": all(
            abs(row["dropped"] * k - 1) <= NEAR for row in goldfish
        ),
    }
    for target, met in targets.items():
        table.note(f"{'met   ' if met else 'MISSED'}  {target}", met=met)
    table.note(
        f"all runs: {sum(row['cpu_s'] for row in rows):.0f} CPU s, {sum(row['wall_s'] for row in rows):.0f} s",
        threads=torch.get_num_threads(),
    )
    return 0 if all(targets.values()) else 1


def _identity(settings: Settings, options: argparse.Namespace, seed: int, source: documents.Library) -> dict[str, Any]:
    """What a run depends on, as JSON gives it back."""
    what = asdict(settings) | {"documents": options.documents, "seed": seed, "text": source.checksum()}
    return json.loads(json.dumps(what | {"grid": options.grid}))


def _known(path: Path) -> list[dict[str, Any]]:
    """The runs that an earlier command left; a line that was cut off in the middle is none."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except (ValueError, RankFailed) as error:
        raise SystemExit(f"error: {error}") from None
