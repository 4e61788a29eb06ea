"""The command lines that run one row of a plan, so that what is printed can be typed.

A model that ``axo train`` builds (a LitGPT name or file) gives a training command, under torchrun on as many nodes as
it takes, and one of ``axo litgpt pretrain`` where that can run the row; one that only the planner knows (the papers'
GPTs, a config.json) the simulation of the same step, of the same file. ``DATA``, ``TOKENIZER`` and ``HEAD_NODE``
stand for what the user has: text, the folder of a tokenizer, and the name of the first node.

A batch that does not divide over the ranks of z and data is rounded up, as its step was predicted.
"""

from __future__ import annotations

import math
import shlex

from axo.perf.planner import Candidate, GridPlan
from axo.perf.run_options import OVERLAPS, RunOptions
from axo.perf.workload import Workload

DEFAULT_STEPS = 200  # of axo train, where the plan does not know how many tokens
PORT = 29500
PLACEHOLDERS = {
    "DATA": "your text, files or folders",
    "TOKENIZER": "the folder of the model's tokenizer",
    "HEAD_NODE": "the name of the first node; type the same line on every node",
}
Words = dict[str, object]  # options of a command: its value, True for a flag; what is empty, 0 or None is left out


def _typed(options: Words) -> list[str]:
    words = ([name] if value is True else [name, str(value)] for name, value in options.items() if value)
    return [word for pair in words for word in pair]


def batch_of(plan: GridPlan, candidate: Candidate) -> int:
    """Sequences of the batch whose step was predicted: those asked for, rounded up where ranks do not divide them."""
    run, grid = candidate.run, candidate.grid
    if candidate.stages is not None or not run.rows:
        return plan.request.sequences
    return run.rows // plan.request.workload.seq_length * run.held_as(grid).data * run.micro_batches


def steps_of(plan: GridPlan) -> int:
    """Steps of the whole training; ``DEFAULT_STEPS`` where its tokens were not asked."""
    asked = plan.request
    return math.ceil(asked.tokens / asked.batch_tokens) if asked.tokens else DEFAULT_STEPS


def torchrun(plan: GridPlan) -> list[str]:
    """The words that start a rank on every GPU."""
    nodes, a_node = plan.request.machine.nodes(plan.request.gpus)
    several: Words = {"--rdzv-backend": "c10d", "--rdzv-endpoint": f"HEAD_NODE:{PORT}"} if nodes > 1 else {}
    counts: Words = {"--nnodes": nodes if nodes > 1 else 0, "--nproc-per-node": a_node}
    return ["torchrun", *_typed(counts | several), "--no-python", "axo"]


def command_line(plan: GridPlan, candidate: Candidate) -> str:
    """Return the command of one candidate; of one that is left out, or that nothing else runs, an empty text."""
    asked, run, model, stages = plan.request, candidate.run, plan.request.workload, candidate.stages
    alone = candidate.algorithm == "axonn" and model.in_litgpt and not model.trained_as
    if candidate.time is None or not (model.trained_as or alone) or (alone and max(run.context, run.experts) > 1):
        return ""
    overlap = ",".join(name for name in OVERLAPS if name in run.overlap) or "none"
    pieces = run.micro_batches if stages is None and run.micro_batches > 1 else 0
    options: Words = {"--overlap": overlap if len(run.overlap) < len(OVERLAPS) else ""}
    if alone:
        on = asked.machine
        options = {
            "--model": model.file or model.name, "--grid": candidate.grid, "--machine": on.source or on.name,
            "--network": f"{on.network:g}" if on.network else "", "--batch-tokens": asked.batch_tokens,
            "--seq": model.seq_length, "--gather": asked.gather, "--zero": str(run.zero),
            "--no-checkpoint": run.recompute == "none", **_saves_memory(run), "--chunked-loss": run.chunked_loss,
            "--micro-batches": run.micro_batches if run.micro_batches > 1 else 0, **_stages(candidate), **options,
        }  # fmt: skip
        return shlex.join(["axo", "simulate", *_typed(options)])
    options = {
        "--model": model.trained_as, "--model-override": f"block_size={model.seq_length}" if _longer(model) else "",
        "--grid": candidate.grid, "--device": "cuda", "--data": "DATA", "--steps": steps_of(plan),
        "--batch-size": batch_of(plan, candidate), "--seq-len": model.seq_length, **_parallel(candidate),
        "--accumulate": pieces, "--recompute": run.recompute != "none", **_saves_memory(run), "--zero": run.zero,
        "--no-chunked-loss": candidate.algorithm == "axonn" and not (run.chunked_loss or run.sequence_parallel),
        **_context(run),
        "--precision": asked.precision if asked.precision != "bf16-mixed" else "",
        "--gather-cache": gather_cache(model, run.cached_gathers), **options,
    }  # fmt: skip
    return shlex.join([*torchrun(plan), "train", *_typed(options)])


def litgpt_line(plan: GridPlan, candidate: Candidate) -> str:
    """Return the command that runs the row by ``axo litgpt pretrain``, or why there is none, in brackets."""
    model, run, grid = plan.request.workload, candidate.run, candidate.grid
    if candidate.time is None or not model.trained_as:
        return ""
    lacks = {
        "recomputation (--no-checkpoint plans without)": run.recompute != "none",
        f"ZeRO-{run.zero}": run.zero,
        "sequence parallelism": run.sequence_parallel,
        "groups of Muon": run.optimizer == "muon",
        "experts over ranks": run.experts > 1,
        "context in stages": run.context > 1 and candidate.stages is not None,
        "dropped weights": grid.z > 1 and run.cached_gathers < 1,
        "a length beyond the model's": _longer(model),
        "overlaps that are off": len(run.overlap) < len(OVERLAPS),
    }
    if any(lacks.values()):
        return f"(no axo litgpt command: it has no {', '.join(what for what, lacking in lacks.items() if lacking)})"
    batch, held = batch_of(plan, candidate), run.held_as(grid)
    pieces = 1 if candidate.stages is not None else run.micro_batches
    options: Words = {
        "--model_config": model.file, "--grid": grid, **_parallel(candidate), **_saves_memory(run), **_context(run),
        "--vocab-loss": True, "--precision": plan.request.precision, "--data": "LocalText",
        "--data.paths": '["DATA"]', "--tokenizer_dir": "TOKENIZER",
    }  # fmt: skip
    train = {"global_batch_size": batch, "micro_batch_size": batch * run.context // (held.z * held.data) // pieces,
             "max_seq_length": model.seq_length, "max_tokens": steps_of(plan) * batch * model.seq_length}  # fmt: skip
    start = [*torchrun(plan), "litgpt", "pretrain", model.name if model.file else model.trained_as]
    words = [*start, *_typed(options), *(f"--train.{name}={value}" for name, value in train.items())]
    return f"LT_ACCELERATOR=cuda {shlex.join(words)}"  # LitGPT has no option for it, and Axo's default is the CPU


def _longer(model: Workload) -> bool:
    """Whether its sequences are longer than those that it was made for."""
    return 0 < model.longest < model.seq_length


def _saves_memory(run: RunOptions) -> Words:
    """As all commands call it."""
    return {
        "--recompute-keeps": "products" if run.selective else "",
        "--offload": "optimizer" if run.offload else "",
        "--optimizer": run.optimizer if run.optimizer != "adamw" else "",
        "--sequence-parallel": run.sequence_parallel,
    }


def _context(run: RunOptions) -> Words:
    shared = {"--context": run.context, "--experts": run.experts}
    return {option: ranks for option, ranks in shared.items() if ranks > 1}


def _parallel(candidate: Candidate) -> Words:
    """The algorithm and the stages, as the training commands call them."""
    words: Words = {"--algorithm": candidate.algorithm if candidate.algorithm != "axonn" else ""}
    if candidate.stages is not None:
        words |= _stages(candidate) | {"--microbatches": candidate.run.micro_batches}
        words["--cuts"] = "" if candidate.stages.even else "planner"
    return words


def _stages(candidate: Candidate) -> Words:
    stages = candidate.stages
    return {} if stages is None else {"--pipeline": stages.ranks, "--schedule": stages.schedule}


def gather_cache(workload: Workload, share: float) -> str:
    """Return the option of ``axo.Overlap`` that keeps this share of the gathered weights."""
    if share in (0.0, 1.0):
        return "all" if share else "none"
    return str(int(share * workload.linears))
