"""``python -m examples.million``: three steps of a tiny model on sequences of 131,072 or 1,048,576 tokens, 8 CPU ranks.

The ranks hold pieces of one sequence (``--context 8``), blocks run again in backward, what is kept between them lies in
files, and the logits never exist whole. A dry run says first what a rank will hold; then the step runs, and the memory
that each process has for itself is read ten times a second. Not here: a model worth having.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from dataclasses import replace
from pathlib import Path

import axo
from axo import dryrun
from axo.launch import RankFailed
from axo.train import TrainConfig, run
from examples.million.memory import Memory, draw, return_freed_memory

RANKS = 8
MIB = 2.0**20


def config(tokens: int, window: int, out: Path) -> TrainConfig:
    """The run: one sequence a step; ``window``: tokens that a query sees, 0: all before it."""
    model: dict[str, object] = {
        "n_layer": 2, "n_embd": 32, "n_head": 2, "n_query_groups": 1, "intermediate_size": 256,
        "rotary_percentage": 0.25, "block_size": tokens,
    }  # fmt: skip
    if window:
        model |= {"sliding_window_size": window, "sliding_window_indices": [1, 1]}
    return TrainConfig(
        model_overrides=model, grid=axo.Grid(z=RANKS), context=RANKS, seq_len=tokens, batch_size=1, steps=3, warmup=0,
        precision="32-true", recompute=True, offload="activations", timeout=7200, out=str(out),
    )  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Run; 0 if the fullest rank held what the dry run had said, within 5%."""
    parser = argparse.ArgumentParser(prog="python -m examples.million", description=__doc__)
    parser.add_argument("--tokens", type=int, default=1 << 17, help="of the sequence (131072)")
    parser.add_argument("--window", type=int, default=0, help="tokens that a token sees; 0: all before it")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/million"), help="folder of the run, its files too")
    options = parser.parse_args(arguments)
    case = replace(config(options.tokens, options.window, options.out), steps=options.steps)
    records = dryrun.run_all(case, [0, RANKS - 1], processes=2)  # in processes of their own: ranks are forked from this
    record = max(records, key=lambda each: each.peak.total)
    predicted = record.peak.total / MIB
    print(f"{options.tokens:,} tokens on {RANKS} ranks: a dry run of {record.seconds:.0f} s says that a rank's tensors"
          f" take {predicted:.1f} MiB when they take most ({record.peak.phase})")  # fmt: skip
    return_freed_memory()
    memory = Memory()
    ended = threading.Event()
    watcher = threading.Thread(target=memory.watch, args=(ended,))
    watcher.start()
    start = time.monotonic()
    try:
        outcome = run(case)
    finally:
        ended.set()
        watcher.join()
    assert outcome is not None
    held = memory.most / MIB
    print(f"{case.steps} steps in {time.monotonic() - start:.0f} s, losses {outcome.losses}")
    off = held / predicted - 1
    print(f"the fullest rank held {held:.1f} MiB more than before its model was made: {off:+.1%}")
    picture = draw(options.out / "memory.png", memory, predicted, f"{options.tokens:,} tokens, {RANKS} ranks")
    row = {"tokens": options.tokens, "window": options.window, "losses": outcome.losses, "predicted_MiB": predicted,
           "held_MiB": held, "seconds": outcome.seconds}  # fmt: skip
    (options.out / "million.json").write_text(json.dumps(row) + "\n")
    print(f"picture: {picture}")
    return 0 if abs(off) <= 0.05 else 1


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except (ValueError, RankFailed) as error:
        raise SystemExit(f"million: {error}") from None
