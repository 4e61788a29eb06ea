"""How far off is the planner on machines that nobody calibrated? Published runs of others, beside what it predicts.

    axo bench exam                     error by run, the mean over the rows that were not fitted on, the null model
    axo bench exam --fit               fit the two constants again on the four named rows

The runs (``bench/papers/published_runs.yaml``, with its sources) trained with MPT's and torchtitan's FSDP, Megatron-LM
and NeMo. Each is laid out as it was published, as far as Axo has a word for it, and the planner's closed form says how
long a step takes: memory does not choose anything here. Two constants of ``axo.perf.machine`` were fitted, on
``FITTED``: the share of the GEMM rate that products reach in a step, and the intensity of attention. They are the same
for every model, run and machine. The null model knows one number: the mean share of peak (model flops) of the same
four rows.

Rows with context parallelism (CP2) are written as twice the x, and planned as two ranks of z that share sequences,
without sequence parallelism, which Axo has not beside it. Rows whose layout was not published are listed alone.
"""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml

from axo.grid import Grid
from axo.perf import machine, planner, readers
from axo.perf.machine import Machine

from .lib.arguments import Parser
from .lib.table import Table, environment

RUNS = Path(__file__).parent / "papers" / "published_runs.yaml"
# (source, model, tokens of a sequence): two rows that are products nearly alone, two that are attention for the most.
FITTED = (
    ("llm-foundry H100", "mpt-30b", 2048),
    ("llm-foundry A100", "mpt-30b", 2048),
    ("llm-foundry H100", "mpt-7b", 65536),
    ("llm-foundry A100 long", "mpt-7b", 65536),
)
GOAL, EXPLAIN = 0.15, 0.30
WHY = {  # of the rows that are off by more than EXPLAIN: what Axo's plan does otherwise than the run
    ("dgxc NeMo TP8 PP8", "nemotron-340b", 4096): (
        "16 micro-batches in 8 stages: the run cuts each rank's blocks into 12 virtual stages, Axo's interleaved"
        " schedule into 2, so the bubble is six times as long; and NeMo hides its sums over x and data, which Axo shows"
        " with sequence parallelism"
    ),
}
CONTEXT = re.compile(r"\bCP(\d+)")  # in the source of rows with context parallelism: over so many ranks
COLUMNS = {"source": "s", "model": "s", "seq": "d", "gpus": "d", "grid": "s", "published_s": ".2f"}
COLUMNS |= {"predicted_s": ".2f", "error": "+.1%", "null_error": "+.1%", "standing": "s"}


@dataclass(frozen=True)
class Run:
    """A published run, its step as the planner is asked for it, and its name."""

    row: dict[str, Any]
    model: dict[str, Any]

    @property
    def key(self) -> tuple[str, str, int]:
        return self.row["source"], self.row["model"], self.row["seq_length"]

    @property
    def context(self) -> int:
        """Ranks that share sequences."""
        named = CONTEXT.search(self.row["source"])
        return int(named[1]) if named else 1

    @property
    def grid(self) -> Grid:
        """Of one stage, as Axo lays it out."""
        grid = Grid.parse(self.row["grid"])
        return replace(grid, x=grid.x // self.context, z=grid.z * self.context)

    @property
    def standing(self) -> str:
        """``"fitted"``, ``"context parallel"``, ``"no layout"`` or ``"held out"``."""
        if "grid" not in self.row:
            return "no layout"
        if self.context > 1:
            return "context parallel"
        return "fitted" if self.key in FITTED else "held out"

    def request(self, on: Machine) -> planner.Request:
        """The step as the planner is asked for it, on a machine whose memory stands in nobody's way."""
        row = self.row
        fields = {"name": row["model"], "bias": False, "parallel_residual": False, "rotary_percentage": 1.0}
        fields |= {"block_size": row["seq_length"], "vocab_size": self.model["padded_vocab_size"]} | self.model
        workload = readers.from_litgpt(fields, seq_length=row["seq_length"])
        return planner.Request(
            workload,
            replace(on, memory_gib=1e6),
            row["gpus"],
            row["sequences"] * row["seq_length"],
            gather="drop",
            zero=row.get("zero", 0),
            precision=row.get("precision", "bf16-mixed"),
            micro_batches=row["micro_batches"],
            recompute=row["recompute"],
            sequence_parallel=row.get("sp", False) and self.context == 1,
            context=self.context,
            pipeline=(row["stages"],),
            schedules=(row.get("schedule", "1f1b"),),
        )

    def predict(self, **constants: float) -> tuple[planner.Candidate, planner.GridPlan]:
        """The planner's candidate on the published layout, and the plan that it is of."""
        on = replace(machine.load(self.row["machine"]), **constants)  # type: ignore[arg-type]
        asked = self.request(on)
        found = planner.consider(asked, self.grid, self.row["stages"])
        assert found.time is not None, f"{self.key}: {found.reason}"
        return found, planner.GridPlan(asked, [found])

    def share_of_peak(self) -> float:
        """Model flops of the published step over what the GPUs' peak allows."""
        found, made = self.predict()
        return made.percent_of_peak(found, seconds=self.row["seconds"], model_flops=True) / 100

    def error(self, **constants: float) -> float:
        """Predicted over published seconds, less 1."""
        return self.predict(**constants)[0].seconds / float(self.row["seconds"]) - 1


def runs(path: Path = RUNS) -> list[Run]:
    """The published runs of a file."""
    listed = yaml.safe_load(path.read_text(encoding="utf-8"))
    return [Run(row, listed["models"][row["model"]]) for row in listed["runs"]]


def fit(rows: Sequence[Run]) -> tuple[float, float]:
    """The two constants with the least squares of the relative errors: gemm_fraction, attention's intensity."""
    choices = itertools.product([0.01 * n for n in range(70, 101)], range(40, 81))

    def squares(pair: tuple[float, float]) -> float:
        gemm, intensity = pair
        return sum(run.error(gemm_fraction=gemm, attention_tflops=_rate(run, intensity)) ** 2 for run in rows)

    return min(choices, key=squares)


def _rate(run: Run, intensity: float) -> float:
    return intensity * machine.load(run.row["machine"]).memory_gbs / 1e3


def lines(every: Sequence[Run]) -> Iterator[dict[str, Any]]:
    """A line of the table for each run."""
    share = statistics.fmean(run.share_of_peak() for run in every if run.standing == "fitted")
    for run in every:
        row = run.row
        found: dict[str, Any] = {"source": row["source"], "model": row["model"], "seq": row["seq_length"]}
        found |= {"gpus": row["gpus"], "published_s": row["seconds"], "standing": run.standing}
        if run.standing != "no layout":
            best, made = run.predict()
            found |= {"grid": best.name, "predicted_s": best.seconds, "error": run.error()}
            found["null_error"] = made.step_flops(best, model_flops=True) / (
                row["gpus"] * made.request.machine.peak_tflops * 1e12 * share * row["seconds"]) - 1  # fmt: skip
            assert best.memory is not None
            found |= {"memory_gib": best.memory.total / 2**30, "published_gib": row.get("peak_gib")}
        yield found


def main(arguments: list[str] | None = None) -> int:
    """Print every run beside its prediction. Returns 1 where the mean error of the rows held out misses the goal."""
    parser = Parser("axo bench exam", __doc__, json=True)
    parser.add_argument("--runs", type=Path, default=RUNS, help="another list of the same form")
    parser.add_argument("--fit", action="store_true", help="fit the two constants again")
    options = parser.parse_args(arguments)
    every = runs(options.runs)
    header = environment(torch.device("cpu")) | {"bench": "exam", "fitted": [list(key) for key in FITTED]}
    table = Table(COLUMNS, options.json, header)
    for line in lines(every):
        table.add(**line)
    held = [row for row in table.rows if row["standing"] == "held out"]
    mean, null = (statistics.fmean(abs(row[name]) for row in held) for name in ("error", "null_error"))
    bias = statistics.fmean(row["error"] for row in held)
    table.note(
        f"{len(held)} rows held out: mean |error| {mean:.1%} (goal {GOAL:.0%}), mean {bias:+.1%};"
        f" the null model {null:.1%}",
        verdict=mean <= GOAL, mean_error=mean, null_error=null,
    )  # fmt: skip
    for standing in ("fitted", "context parallel"):
        apart = [abs(row["error"]) for row in table.rows if row["standing"] == standing]
        if apart:
            table.note(f"{len(apart)} rows {standing}, not in the mean: {statistics.fmean(apart):.1%}")
    for row in held:
        if abs(row["error"]) > EXPLAIN:
            why = WHY.get((row["source"], row["model"], row["seq"]), "not explained")
            table.note(f"{row['source']} {row['model']}: {row['error']:+.0%}. {why}")
    if options.fit:
        gemm, intensity = fit([run for run in every if run.standing == "fitted"])
        table.note(f"fitted again: gemm_fraction {gemm:.2f}, attention's intensity {intensity:g} flops a byte")
    return int(mean > GOAL)


if __name__ == "__main__":
    raise SystemExit(main())
