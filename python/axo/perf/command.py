"""The command line that runs one row of a plan, so that a plan can be run again from what is printed.

A model that ``axo train`` builds (a LitGPT name or file) gives a training command, under torchrun; one that only the
planner knows (the papers' models, a config.json) the simulation of the same step.
"""

from __future__ import annotations

import shlex

from axo.perf.planner import Candidate, GridPlan
from axo.perf.workload import Workload


def command_line(made: GridPlan, candidate: Candidate) -> str:
    """Return the command of one candidate; of one that is left out an empty text."""
    if candidate.time is None:
        return ""
    asked, run, grid = made.request, candidate.run, candidate.grid
    workload = made.workload(candidate)
    if candidate.algorithm != "axonn" and not workload.trained_as:
        return ""  # axo simulate knows axonn alone
    if not workload.trained_as:
        on = asked.machine
        parts = ["axo", "simulate", "--model", workload.name, "--grid", str(grid), "--machine", on.source or on.name]
        parts += ["--network", f"{on.network:g}"] if on.network else []
        parts += ["--batch-tokens", str(asked.batch_tokens), "--seq", str(workload.seq_length)]
        parts += ["--gather", asked.gather, "--zero", str(run.zero)]
        parts += [] if workload.checkpointed else ["--no-checkpoint"]
        parts += ["--recompute-keeps", "products"] if run.selective else []
        parts += ["--offload", "optimizer"] if run.offload else []
        parts += ["--sequence-parallel"] if run.sequence_parallel else []
        parts += ["--micro-batches", str(run.micro_batches)] if run.micro_batches > 1 else []
        parts += _stages(candidate)
        return shlex.join(parts + _overlap(run.overlap))
    node = min(asked.machine.gpus_per_node, asked.gpus)
    nodes = ["--nnodes", str(asked.gpus // node)] if asked.gpus > node else []
    parts = ["torchrun", *nodes, "--nproc-per-node", str(node), "--no-python", "axo", "train"]
    parts += ["--model", workload.trained_as, "--grid", str(grid), "--device", "cuda"]
    parts += ["--batch-size", str(asked.sequences), "--seq-len", str(workload.seq_length)]
    if candidate.algorithm != "axonn":
        parts += ["--algorithm", candidate.algorithm]
    if candidate.stages is not None:
        parts += [*_stages(candidate), "--microbatches", str(run.micro_batches)]
        parts += [] if candidate.stages.even else ["--cuts", "planner"]
    elif run.micro_batches > 1:
        parts += ["--accumulate", str(run.micro_batches)]
    if workload.checkpointed:
        parts.append("--recompute")
    if run.selective:
        parts += ["--recompute-keeps", "products"]
    if run.offload:
        parts += ["--offload", "optimizer"]
    if run.sequence_parallel:
        parts.append("--sequence-parallel")
    if run.zero:
        parts += ["--zero", str(run.zero)]
    if asked.precision != "bf16-mixed":
        parts += ["--precision", asked.precision]
    parts += ["--gather-cache", gather_cache(workload, run.cached_gathers)]
    return shlex.join(parts + _overlap(run.overlap))


def _stages(candidate: Candidate) -> list[str]:
    stages = candidate.stages
    return [] if stages is None else ["--pipeline", str(stages.ranks), "--schedule", stages.schedule]


def gather_cache(workload: Workload, share: float) -> str:
    """Return the option of ``axo.Overlap`` that keeps this share of the gathered weights."""
    if share in (0.0, 1.0):
        return "all" if share else "none"
    return str(int(share * workload.linears))


def _overlap(overlap: frozenset[str]) -> list[str]:
    from axo.perf.layer_time import OVERLAPS

    if overlap == frozenset(OVERLAPS):
        return []
    return ["--overlap", ",".join(name for name in OVERLAPS if name in overlap) or "none"]
