"""The command lines that run one row of a plan, so that what is printed can be typed.

A model that ``axo train`` builds (a LitGPT name or file) gives a training command, under torchrun on as many nodes as
it takes, and one of ``axo litgpt pretrain`` where that can run the row; one that only the planner knows (the papers'
models, a config.json) the simulation of the same step, of the same file. ``DATA``, ``TOKENIZER`` and ``HEAD_NODE``
stand for what the user has: text, the folder of a tokenizer, and the name of the first node.

A batch that does not divide over the ranks of z and data is rounded up, as its step was predicted.
"""

from __future__ import annotations

import math
import shlex

from axo.perf.layer_time import OVERLAPS, RunOptions
from axo.perf.planner import Candidate, GridPlan
from axo.perf.workload import Workload

DEFAULT_STEPS = 200  # of axo train, where the plan does not know how many tokens
PORT = 29500
PLACEHOLDERS = {
    "DATA": "your text, files or folders",
    "TOKENIZER": "the folder of the model's tokenizer",
    "HEAD_NODE": "the name of the first node; type the same line on every node",
}


def batch_of(made: GridPlan, candidate: Candidate) -> int:
    """Sequences of the batch whose step was predicted: those asked for, rounded up where ranks do not divide them."""
    run, grid = candidate.run, candidate.grid
    if candidate.stages is not None or not run.rows:
        return made.request.sequences
    return run.rows // made.request.workload.seq_length * run.held_as(grid).data * run.micro_batches


def steps_of(made: GridPlan) -> int:
    """Steps of the whole training; ``DEFAULT_STEPS`` where its tokens were not asked."""
    asked = made.request
    return math.ceil(asked.tokens / asked.batch_tokens) if asked.tokens else DEFAULT_STEPS


def torchrun(made: GridPlan) -> list[str]:
    """The words that start a rank on every GPU."""
    nodes, a_node = made.request.machine.nodes(made.request.gpus)
    several = ["--nnodes", str(nodes)] if nodes > 1 else []
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"HEAD_NODE:{PORT}"] if nodes > 1 else []
    return ["torchrun", *several, "--nproc-per-node", str(a_node), *meeting, "--no-python", "axo"]


def command_line(made: GridPlan, candidate: Candidate) -> str:
    """Return the command of one candidate; of one that is left out, or that only the planner knows, an empty text."""
    if candidate.time is None:
        return ""
    asked, run, grid = made.request, candidate.run, candidate.grid
    workload = made.workload(candidate)
    if not workload.trained_as:
        return "" if candidate.algorithm != "axonn" else _simulate(made, candidate)
    parts = [*torchrun(made), "train", "--model", workload.trained_as]
    if 0 < workload.longest < workload.seq_length:
        parts += ["--model-override", f"block_size={workload.seq_length}"]
    parts += ["--grid", str(grid), "--device", "cuda", "--data", "DATA", "--steps", str(steps_of(made))]
    parts += ["--batch-size", str(batch_of(made, candidate)), "--seq-len", str(workload.seq_length)]
    parts += _parallel(candidate)
    if candidate.stages is None and run.micro_batches > 1:
        parts += ["--accumulate", str(run.micro_batches)]
    parts += ["--recompute"] * workload.checkpointed + _memory(run)
    parts += ["--zero", str(run.zero)] if run.zero else []
    parts += ["--precision", asked.precision] if asked.precision != "bf16-mixed" else []
    parts += ["--gather-cache", gather_cache(workload, run.cached_gathers)]
    return shlex.join(parts + _overlap(run.overlap))


def litgpt_line(made: GridPlan, candidate: Candidate) -> str:
    """Return the command that runs the row by ``axo litgpt pretrain``, or why there is none, in brackets."""
    workload, run, grid = made.workload(candidate), candidate.run, candidate.grid
    if candidate.time is None or not workload.trained_as:
        return ""
    lacks = [
        *(["recomputation"] if workload.checkpointed else []),
        *([f"ZeRO-{run.zero}"] if run.zero else []),
        *(["sequence parallelism"] if run.sequence_parallel else []),
        *(["dropped weights"] if grid.z > 1 and run.cached_gathers < 1 else []),
        *(["a length beyond the model's"] if 0 < workload.longest < workload.seq_length else []),
        *(["overlaps that are off"] if _overlap(run.overlap) else []),
    ]
    if lacks:
        return f"(no axo litgpt command: it has no {', '.join(lacks)})"
    batch, parts = batch_of(made, candidate), ["--grid", str(grid)]
    pieces = 1 if candidate.stages is not None else run.micro_batches
    parts += _parallel(candidate) + _memory(run)
    groups = run.held_as(grid).z * run.held_as(grid).data
    model = ["--model_config", workload.file] if workload.file else []
    train = {"global_batch_size": batch, "micro_batch_size": batch // groups // pieces,
             "max_seq_length": workload.seq_length,
             "max_tokens": steps_of(made) * batch * workload.seq_length}  # fmt: skip
    words = [*torchrun(made), "litgpt", "pretrain", workload.name if model else workload.trained_as, *model, *parts]
    words += ["--vocab-loss", "--precision", made.request.precision, "--data", "LocalText", "--data.paths", '["DATA"]']
    words += ["--tokenizer_dir", "TOKENIZER", *(f"--train.{name}={value}" for name, value in train.items())]
    return shlex.join(words)


def _simulate(made: GridPlan, candidate: Candidate) -> str:
    asked, run, on = made.request, candidate.run, made.request.machine
    workload = made.workload(candidate)
    parts = ["axo", "simulate", "--model", workload.file or workload.name, "--grid", str(candidate.grid)]
    parts += ["--machine", on.source or on.name]
    parts += ["--network", f"{on.network:g}"] if on.network else []
    parts += ["--batch-tokens", str(asked.batch_tokens), "--seq", str(workload.seq_length)]
    parts += ["--gather", asked.gather, "--zero", str(run.zero)]
    parts += [] if workload.checkpointed else ["--no-checkpoint"]
    parts += _memory(run)
    parts += ["--micro-batches", str(run.micro_batches)] if run.micro_batches > 1 else []
    return shlex.join(parts + _stages(candidate) + _overlap(run.overlap))


def _memory(run: RunOptions) -> list[str]:
    """What saves memory, as all commands call it."""
    parts = ["--recompute-keeps", "products"] if run.selective else []
    parts += ["--offload", "optimizer"] if run.offload else []
    return parts + ["--sequence-parallel"] * run.sequence_parallel


def _parallel(candidate: Candidate) -> list[str]:
    """The algorithm and the stages, as the training commands call them."""
    parts = ["--algorithm", candidate.algorithm] if candidate.algorithm != "axonn" else []
    if candidate.stages is not None:
        parts += [*_stages(candidate), "--microbatches", str(candidate.run.micro_batches)]
        parts += [] if candidate.stages.even else ["--cuts", "planner"]
    return parts


def _stages(candidate: Candidate) -> list[str]:
    stages = candidate.stages
    return [] if stages is None else ["--pipeline", str(stages.ranks), "--schedule", stages.schedule]


def gather_cache(workload: Workload, share: float) -> str:
    """Return the option of ``axo.Overlap`` that keeps this share of the gathered weights."""
    if share in (0.0, 1.0):
        return "all" if share else "none"
    return str(int(share * workload.linears))


def _overlap(overlap: frozenset[str]) -> list[str]:
    if overlap == frozenset(OVERLAPS):
        return []
    return ["--overlap", ",".join(name for name in OVERLAPS if name in overlap) or "none"]
