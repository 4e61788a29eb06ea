"""docs/gpu.md: what was measured on a GPU, when, on which card and by which command, from the results of ``bench.gpu``.

A row for each subject of ``_SUBJECTS``, bad ones too; what no line of the results tells is "not measured".
"""

from __future__ import annotations

import re
from pathlib import Path

from .table import read_rows

_HEAD = """# Measured on a GPU

For readers who ask what has run on a real GPU: every figure, good or bad, as `axo bench gpu --page docs/gpu.md` has
written it from the results of the parts below. Stand-ins never fill a row here. What was found there, what was mended,
which rows something else disturbed, and what was measured besides: [the first GPU](notes/first_gpu.md). *Hides*: 1 is
all of the communication; below 0 is slower than the product, then the communication; above 1 the product in pieces is
faster than in one.

"""
# Subject, part of bench.gpu, and what its verdicts begin with.
_SUBJECTS = (
    ("Kernels against fp64, strategies, graphs, flags", "kernels", r"all results right"),
    ("The kernel for Hopper in its trials", "kernels", r"the kernel for Hopper right"),
    ("Products: Triton beside torch's cuBLAS", "kernels", r"Triton (NN|NT|TN|on|at)"),
    ("Products: Gluon on Hopper", "kernels", r"Gluon on"),
    ("Products: Gluon that meets a stream", "kernels", r"Gluon that"),
    ("Products: what the tuner chose", "kernels", r"tuned"),
    ("dW added to an fp32 gradient", "kernels", r"TN added"),
    ("fp8 beside bf16", "kernels", r"fp8"),
    ("Communication hidden behind a product", "kernels", r"\w+_\w+ .*(hides|over serial)"),
    ("Collectives and graphs of 1, 2 and 4 ranks", "device", r"collectives|wrong results"),
    ("Flags, push, training, an abort, a death, at two ranks", "device", r"two ranks:"),
    ("Host time of a collective over torch's NCCL backend", "device", r"overhead"),
    ("Offload", "offload", r"offload"),
    ("Layers and loss beside torch's", "gpu_step", r"Axo's layers|cross-entropy"),
    ("A training step beside torch's", "gpu_step", r".*(step of axo|losses of axo)"),
    ("Goldfish's mask", "gpu_step", r"goldfish"),
    ("A training step as a graph", "gpu_step", r".* as a graph"),
    ("A training step and its own bound", "gpu_step", r".*bound over"),
    ("Memory of a step and the planner's", "gpu_step", r".*memory of Axo"),
)


def page(out: Path | None) -> str:
    """The page for a folder of results; None: for none at all."""
    rows, where, words = {}, [], {True: "yes", False: "no"}
    for part in dict.fromkeys(part for _, part, _ in _SUBJECTS):
        lines = read_rows(out / f"{part}.jsonl") if out else []
        if lines and lines[0].get("kind") == "cuda":
            rows[part] = lines
            head = lines[0]
            versions = [f"{name} {head[name]}" for name in ("torch", "triton", "cuda", "nccl") if head.get(name)]
            told = [head["device"], head["date"], *versions, f"commit {head['commit']}"]
            where.append(f"- `bench.{part}`: {', '.join(told)}")
    text = _HEAD + ("\n".join(where) + "\n\n" if where else "Nothing yet.\n\n")
    text += "| subject | goal and figure | reached |\n|---|---|---|\n"
    for subject, part, begins in _SUBJECTS:
        told = [row for row in rows.get(part, []) if "verdict" in row and re.match(begins, row["note"])]
        for row in told:
            name = row["note"].rsplit(": ", 1)[0].replace("|", "\\|")
            text += f"| {subject} | {name} | {words.get(row['verdict'], row['verdict'])} |\n"
        text += "" if told else f"| {subject} | | not measured |\n"
    for part, lines in rows.items():  # what failed otherwise
        known = [begins for _, of, begins in _SUBJECTS if of == part]
        for row in lines:
            if row.get("verdict") is False and not any(re.match(begins, row["note"]) for begins in known):
                text += f"| `bench.{part}` | {row['note'].rsplit(': ', 1)[0]} | no |\n"
    return text
