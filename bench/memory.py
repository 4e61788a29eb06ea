"""Is the planner's memory right? Twelve models on six grids in three precisions, with and without recomputation.

Those with x above 1 a second time with sequence parallelism.

    axo bench memory --seconds 300 --json bench/results/memory.jsonl     again, until it says that all is measured

A step of ``axo train`` runs on tensors with values, as the first of eight ranks whose peers are not there, and every
storage is followed from its first tensor to its end (``axo.dryrun.measure``; ``tests/dryrun`` holds it to real ranks).
Measured are the bytes that are kept for backward when that begins, the weights, the moments, the gradients and what
they wait in, gathered weights, and all together at the fullest moment. Beside them stands what ``axo plan`` counts
(without the allocator's share and the reserve), and for every --dry-th case what ``axo dryrun`` says.

Over the cases go, in turn: gathered weights kept, ZeRO-2, ZeRO-1 with two micro-batches. A line of the file is a case;
what stands there is not measured again.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import signal
import statistics
import time
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch

from axo import dryrun
from axo.grid import Grid
from axo.perf import memory, readers
from axo.perf.layers import LinearKind
from axo.perf.run_options import PRECISIONS, RunOptions
from axo.perf.workload import Workload
from axo.train import models
from axo.train.config import TrainConfig

from .lib.arguments import Parser
from .lib.table import environment, read_rows

SEQUENCES, LENGTH = 16, 128
_SIZES = {"n_layer": 2, "n_embd": 256, "n_head": 8, "padded_vocab_size": 2000, "block_size": LENGTH}
_GATED, _PLAIN = {"intermediate_size": 768}, {"intermediate_size": 1024}
MODELS: dict[str, dict[str, Any]] = {  # families of LitGPT, small
    "Llama-3-8B": {"n_query_groups": 2} | _GATED,
    "Llama-2-7b-hf": {"n_query_groups": 8} | _GATED,
    "Mistral-7B-v0.1": {"n_query_groups": 4} | _GATED,  # a window of attention
    "pythia-160m": _PLAIN,  # branches in parallel, biases
    "phi-2": _PLAIN,  # branches in parallel that share a norm, a bias of the head
    "falcon-7b": {"n_query_groups": 1} | _PLAIN,
    "Gemma-2b": {"n_query_groups": 1, "head_size": 48} | _GATED,  # a tied head
    "Gemma-2-2b": {"n_query_groups": 4, "head_size": 48} | _GATED,  # norms behind the branches, capped scores
    "Gemma-3-1b-it": {"n_query_groups": 1, "head_size": 48} | _GATED,
    "Qwen2.5-0.5B": {"n_query_groups": 2} | _GATED,  # biases of queries, keys and values
    "Qwen3-0.6B": {"n_query_groups": 4, "head_size": 48} | _GATED,  # norms of queries and keys
    "OLMo-2-1124-7B": {"n_query_groups": 8} | _GATED,  # the same over all heads, no norms before the branches
}
GRIDS = ("2x2x2x1", "1x1x8x1", "8x1x1x1", "1x2x2x2", "1x1x4x2", "4x1x1x2")
RECOMPUTED = ("none", "selective", "full")
WAYS = (("all", 0, 1), ("none", 0, 1), ("none", 2, 1), ("all", 1, 2))  # gathered weights kept, ZeRO, micro-batches
GOAL = 0.05
JUDGED = ("saved", "weights", "optimizer", "gradients", "gathered", "peak")


class Case(NamedTuple):
    """One step."""

    model: str
    grid: str
    precision: str
    recomputed: str
    way: tuple[str, int, int]
    split: bool = False  # tokens over x: sequence parallelism
    chunks: bool = False  # a loss without logits

    def config(self) -> TrainConfig:
        """The step as ``axo train`` takes it."""
        cache, zero, accumulate = self.way
        return TrainConfig(
            model=self.model, model_overrides=_SIZES | MODELS[self.model], grid=Grid.parse(self.grid),
            batch_size=SEQUENCES, seq_len=LENGTH, precision=self.precision, recompute=self.recomputed != "none",
            recompute_keeps="products" if self.recomputed == "selective" else "nothing",
            gather_cache=cache, zero=zero, accumulate=accumulate, sequence_parallel=self.split,
            chunked_loss=self.chunks,
        )  # fmt: skip


def cases() -> list[Case]:
    """All of them; each group (a model, a grid, ...) has every way in it."""
    each = product(MODELS, GRIDS, PRECISIONS, RECOMPUTED)
    whole = [Case(*one, WAYS[(number + number // 9 + number // 54) % 4]) for number, one in enumerate(each)]
    return whole + [one._replace(split=True) for one in whole if Grid.parse(one.grid).x > 1]


def estimate(case: Case) -> tuple[Workload, RunOptions, memory.Memory]:
    """What the planner knows of the step, and what it counts."""
    config = case.config()
    fields = vars(models.resolve(config.model, config.model_overrides))
    workload = readers.from_litgpt(fields, seq_length=LENGTH)
    sizes: dict[str, Any] = {**PRECISIONS[case.precision]}
    run = RunOptions(
        SEQUENCES * LENGTH,
        cached_gathers=float(config.gather_cache == "all"),
        micro_batches=config.accumulate,
        zero=config.zero,
        recompute=case.recomputed,
        sequence_parallel=case.split,
        chunked_loss=config.chunks_loss,
        **sizes,
    )
    return workload, run, memory.estimate(workload, config.grid, run)


def planned(case: Case) -> dict[str, float]:
    """Bytes by kind as the planner counts them."""
    (workload, run, held), config = estimate(case), case.config()
    read = held.gathered
    if run.cached_gathers:  # the head's too, or a block's that is cast again when it runs again
        linear = [[layer for layer in block.layers if isinstance(layer, LinearKind)] for block in workload.blocks]
        again = linear[1] if config.recompute and config.grid.z == 1 else []
        each = (sum(layer.weight_read(config.grid, run) for layer in layers) for layers in (linear[-1], again))
        read += max(each)
    return {
        "saved": held.saved, "weights": held.weights, "optimizer": held.optimizer, "gradients": held.gradients,
        "gathered": read, "peak": max(held.moments.values()),
    }  # fmt: skip


def of(record: dryrun.Record) -> dict[str, float]:
    """The same as they were measured."""
    ends = record.peaks["optimizer"].by_kind
    return {
        "saved": record.saved, "weights": record.held["weights"], "optimizer": record.held["optimizer"],
        "gradients": ends["gradients"], "gathered": record.most["gathered weights"],
        "peak": record.peak.total,
    }  # fmt: skip


def measure(case: Case, dry: bool) -> dict[str, Any]:
    """One line of the results."""
    config = case.config()
    found = dryrun.measure(config)
    line: dict[str, Any] = {"case": list(case), "measured": of(found), "kinds": found.peak.by_kind, "most": found.most}
    if dry:
        line["dry_run"] = of(dryrun.run(config))
    return line


def main(arguments: list[str] | None = None) -> int:
    """Measure what is left, then print the errors by group. Returns the number of cases whose peak misses the goal."""
    parser = Parser("axo bench memory", __doc__)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no further case after this time")
    parser.add_argument("--dry", type=int, default=6, help="run every N-th case without values too; 0: none")
    parser.add_argument("--every", type=int, default=1, help="only every N-th case")
    parser.add_argument("--json", type=Path, default=Path("runs/memory.jsonl"), help="JSON lines, a case each")
    options = parser.parse_args(arguments)
    if options.every < 1:
        parser.error(f"--every {options.every} is not at least 1")
    wanted = cases()[:: options.every]
    lines = read(options.json)
    done = set(map(case_of, lines))
    left = [(number, case) for number, case in enumerate(wanted) if case not in done]
    deadline = time.time() + options.seconds
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # what is imported needs no more looking through
    atexit.register(gc.unfreeze)  # else Triton's modules report all of theirs as leaked when the program ends
    options.json.parent.mkdir(parents=True, exist_ok=True)
    # Ctrl-C is for this process, which waits for the cases under way: a worker that it interrupts may never end.
    cores = len(os.sched_getaffinity(0))
    pool = ProcessPoolExecutor(cores, None, signal.signal, (signal.SIGINT, signal.SIG_IGN))
    with options.json.open("a") as file, pool:
        if not lines:
            file.write(json.dumps(environment(torch.device("cpu")) | {"bench": "memory"}) + "\n")
        told = time.time()
        while left and time.time() < deadline:
            before = len(wanted) - len(left)
            now, left = left[: 2 * cores], left[2 * cores :]
            dry = [options.dry > 0 and number % options.dry == 0 for number, _ in now]
            for number, line in enumerate(pool.map(measure, [case for _, case in now], dry), before + 1):
                file.write(json.dumps(line) + "\n")
                file.flush()
                lines.append(line)
                if number == len(wanted) or time.time() > told + 5:
                    told = time.time()
                    print(f"{number} of {len(wanted)} cases are measured", flush=True)
    if left:
        print(f"{len(left)} of {len(wanted)} cases are not measured yet; run the same command again")
    return report(lines)


def case_of(line: dict[str, Any]) -> Case:
    """The case of a line."""
    model, grid, precision, recomputed, way, *split = line["case"]  # lines of before sequence parallelism have no last
    return Case(model, grid, precision, recomputed, tuple(way), *split)


def read(path: Path) -> list[dict[str, Any]]:
    """The cases that were measured."""
    return [line for line in read_rows(path) if "case" in line]


def report(lines: list[dict[str, Any]]) -> int:
    """Print the worst and the mean error of each kind and group."""
    errors: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    worst: list[tuple[float, str, float]] = []
    dry = [0.0]
    for line in lines:
        case = case_of(line)
        expected = planned(case)
        for kind in JUDGED:
            real = line["measured"][kind]
            if real < 1 or (kind == "gathered" and case.way[0] != "all"):  # else the moment decides which are there
                continue
            error = expected[kind] / real - 1
            for group in ("all", *map(str, case[:5]), "tokens over x" if case.split else "tokens whole"):
                errors[group][kind].append(error)
            if kind == "peak":
                worst.append((abs(error), " ".join(map(str, case)), error))
        if "dry_run" in line:
            dry += [abs(line["dry_run"][kind] / max(1, line["measured"][kind]) - 1) for kind in ("saved", "peak")]
    print(f"{'worst error (mean)':24}" + "".join(f"{kind:>18}" for kind in JUDGED) + "   peaks within 5%")
    for group, kinds in errors.items():
        cells = []
        for kind in JUDGED:
            found = kinds[kind] or [0.0]
            cells.append(f"{max(found, key=abs):+8.1%} ({statistics.fmean(map(abs, found)):.1%})")
        within = sum(abs(error) <= GOAL for error in kinds["peak"])
        print(f"{group:24}" + "".join(f"{cell:>18}" for cell in cells) + f"   {within} of {len(kinds['peak'])}")
    missed = [one for one in worst if one[0] > GOAL]
    for _, what, error in sorted(missed, reverse=True)[:12]:
        print(f"  {error:+.1%}  {what}")
    print(f"the dry run against what was measured, {len(dry) // 2} cases: at most {max(dry):.2%}")
    return len(missed)


if __name__ == "__main__":
    raise SystemExit(main())
