"""Is the planner right? What 8 ranks can do, timed for real over a limited link, beside what it predicts.

    axo bench plan_validation --seconds 200          again, until it says that all plans are measured

Plans are the 20 grids of axonn, those of Tesseract, those of two stages (1f1b), and some with sequence parallelism.

Four "hosts" of two CPU ranks on this machine (axo.comm.hosts.simulate); what leaves one is held to --limit bytes a
second by sleeping, so that a step is communication for the most part and other load on the machine matters little.
First what `axo profile` measures is measured on the same ranks and the same link, and kept as a machine file; nothing
is fitted to the results. Then every plan trains a small GPT (fp32, AdamW, all overlaps on) for some steps: the
slowest rank's seconds, the median of the counted steps of all passes.

Predictions: the planner's closed form, the engine's own step replayed (of Tesseract, which that does not know, the
closed form), and the closed form with one bandwidth for every axis, without placement. What is measured already stays
in --state, so a run of limited time goes on where the last one ended.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from axo.comm.connect import Communicators
from axo.dryrun import simulate as engine
from axo.grid import Grid
from axo.perf import machine, model, planner, profile, readers
from axo.perf.run_options import RunOptions
from axo.perf.stages import StageTimes, planned
from axo.perf.workload import Workload
from axo.train.data import rank_rows

from .lib.arguments import Parser, rate
from .lib.table import Table, environment
from .papers.calibrate import spearman
from .papers.equations import agnostic as one_bandwidth

RANKS, A_HOST, STAGES = 8, 2, 2
CONFIG = {
    "name": "small GPT",
    "n_layer": 2,
    "n_embd": 256,
    "n_head": 8,
    "n_query_groups": 8,
    "intermediate_size": 1024,
    "vocab_size": 512,
    "padded_vocab_size": 512,
    "block_size": 64,
    "bias": False,
    "norm_class_name": "RMSNorm",
    "mlp_class_name": "GptNeoxMLP",
    "parallel_residual": False,
}
SEQUENCES, LENGTH = 8, 32
COLUMNS = {"grid": "s", "measured_s": ".3f", "predicted_s": ".3f", "error": "+.1%"}
COLUMNS |= {"simulated_s": ".3f", "sim_error": "+.1%", "agnostic_s": ".3f", "spread": ".1%"}
SPLIT = ("8x1x1x1", "4x2x1x1", "4x1x2x1", "2x2x2x1")  # grids that are measured with sequence parallelism too
GOALS = {"spearman": 0.85, "best": 1.10, "step": 0.15}


def main(arguments: list[str] | None = None) -> int:
    """Measure what is left; once all is there, print it beside the predictions. Returns the number of goals missed."""
    from axo.launch import launch_local

    parser = Parser("axo bench plan_validation", __doc__, json=True)
    parser.add_argument("--limit", type=rate, default="8M", help="bytes a second that leave a host: 8M, 1.5G")
    parser.add_argument("--state", type=Path, default=Path("runs/plan_validation"), help="folder of what is measured")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no further grid after this time")
    parser.add_argument("--steps", type=int, default=3, help="counted steps of each grid, after two that are not")
    parser.add_argument("--passes", type=int, default=2, help="over all grids, so that a busy minute hits none twice")
    parser.add_argument("--plans", default="", help="only these, comma-separated: '2x2x2x1, 4x1x1x1 in 2 stages'")
    options = parser.parse_args(arguments)
    grids = [text.strip() for text in options.plans.split(",") if text] or every_plan()
    for plan in grids:
        Grid.parse(plan.partition(" ")[0])
    options.state.mkdir(parents=True, exist_ok=True)
    setup = {"limit": options.limit, "steps": options.steps, "config": CONFIG, "sequences": SEQUENCES, "length": LENGTH}
    state = State(options.state / "state.json", setup)
    deadline = time.time() + options.seconds
    if not state.machine.exists():
        profile.write(launch_local(measure_machine, RANKS, options.limit), state.machine)
        print(f"machine measured: {state.machine}", flush=True)
    left = state.left(grids, options.passes)
    if left and time.time() < deadline:
        launch_local(measure_grids, RANKS, left, options.steps, deadline, state, options.limit)
        state.read()
    left = state.left(grids, options.passes)
    if left:
        print(f"{len(left)} of {options.passes * len(grids)} are not measured yet; run the same command again")
        return 0
    header = environment(torch.device("cpu")) | {"bench": "plan_validation", "ranks": RANKS, "ranks_per_host": A_HOST}
    header |= {"cores": len(os.sched_getaffinity(0)), "load": round(os.getloadavg()[0], 1), "setup": setup}
    return report(grids, state, Table(COLUMNS, options.json, header | {"machine": state.machine.read_text()}))


def every_plan() -> list[str]:
    """What is measured, by name: a grid and how it is run."""
    plans = [str(grid) for grid in Grid.all(RANKS)]
    plans += [f"{grid} by tesseract" for grid in planner.tesseract_grids(RANKS)]
    plans += [f"{grid} in {STAGES} stages" for grid in Grid.all(RANKS // STAGES)]
    return plans + [f"{grid} with split tokens" for grid in SPLIT]


def micro_batches(grid: Grid) -> int:
    """Of stages: one sequence each, as the planner has it."""
    return SEQUENCES // (grid.z * grid.data)


class State:
    """What has been measured so far: seconds of each counted step, by grid; refuses another setup's."""

    def __init__(self, path: Path, setup: dict[str, Any]) -> None:
        self.path, self.setup = path, setup
        self.machine = path.with_name("machine.yaml")
        self.steps: dict[str, list[float]] = {}
        self.read()

    def read(self) -> None:
        if not self.path.exists():
            return
        found = json.loads(self.path.read_text())
        if found["setup"] != json.loads(json.dumps(self.setup)):
            raise ValueError(f"--state {self.path} holds another setup's results; give another folder")
        self.steps = found["steps"]

    def left(self, grids: list[str], passes: int) -> list[str]:
        """What is still to be measured, a pass after the other."""
        done = {grid: len(self.steps.get(grid, [])) // self.setup["steps"] for grid in grids}
        return [grid for number in range(passes) for grid in grids if done[grid] <= number]

    def add(self, grid: str, steps: list[float]) -> None:
        self.steps[grid] = self.steps.get(grid, []) + steps
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps({"setup": self.setup, "steps": self.steps}))
        new.replace(self.path)


def workload() -> Workload:
    """The model as the planner reads it."""
    return readers.from_litgpt(CONFIG, seq_length=LENGTH)


def measure_machine(limit: float) -> dict[str, Any]:
    """On every rank: what `axo profile` measures, in the dtype of the steps, with a message that the link can carry."""
    import axo
    from axo.comm.hosts import simulate

    torch.set_num_threads(1)
    simulate(A_HOST, rate=limit)
    torch.distributed.init_process_group("axo")
    rows = SEQUENCES * LENGTH
    return profile.measure(axo.connect, RANKS, workload(), rows, 1_000_000, 3, node=A_HOST, dtype="float32")


def measure_grids(grids: list[str], steps: int, deadline: float, state: State, limit: float) -> None:
    """On every rank: time grids until the deadline; rank 0 keeps what was measured."""
    import axo
    from axo.comm.hosts import simulate

    torch.set_num_threads(1)
    simulate(A_HOST, rate=limit)
    torch.distributed.init_process_group("axo")
    for plan in grids:
        grid, _, how = plan.partition(" ")
        comms = axo.connect(grid, pipeline=STAGES if "stages" in how else 1)
        late = torch.tensor([float(time.time() > deadline)])
        if comms.everyone.all_reduce(late, "max").item():
            comms.close()
            return
        seconds = time_steps(comms, steps, how)
        comms.close()
        if torch.distributed.get_rank() == 0:
            state.add(plan, seconds)
            print(f"{plan}: {', '.join(f'{one:.3f}' for one in seconds)} s", flush=True)


def time_steps(comms: Communicators, steps: int, how: str) -> list[float]:
    """Seconds of the slowest rank in each counted step."""
    from litgpt import GPT, Config

    import axo
    from axo.arrangement import arrangement_of

    name = "tesseract" if "tesseract" in how else "axonn"
    torch.manual_seed(0)
    options: dict[str, Any] = {"algorithm": name, "sequence_parallel": "tokens" in how, "overlap": axo.Overlap()}
    built = axo.parallelize(GPT(Config(**CONFIG)), comms, **options)
    modules = axo.pipeline.split(built, comms, "even") if comms.stages > 1 else []
    optimizer = torch.optim.AdamW(built.parameters(), lr=1e-3)
    rows = rank_rows(SEQUENCES, comms.grid, comms.coords, arrangement_of("bench", name))
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(512, (SEQUENCES, LENGTH + 1), generator=generator)[rows.start : rows.stop]

    def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return axo.nn.cross_entropy(logits, targets, comms=comms, columns=512)

    if modules:
        pieces = micro_batches(comms.grid)
        stages = axo.pipeline.stages(modules, comms, rows=len(rows) // pieces, tokens=LENGTH)
        schedule = axo.pipeline.schedule("1f1b", stages, microbatches=pieces, loss=loss)
    found = []
    for _ in range(2 + steps):  # the first learns the order of gathers, the second has buffers to make
        comms.everyone.barrier()
        started = time.perf_counter()
        if modules:
            schedule.step(ids[:, :-1], target=ids[:, 1:])
        else:
            loss(built(ids[:, :-1]), ids[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        spent = torch.tensor([time.perf_counter() - started], dtype=torch.float64)
        found.append(float(comms.everyone.all_reduce(spent, "max")))
    return found[2:]


def predictions(plan: str, on: machine.Machine) -> tuple[float, float, float]:
    """Seconds of a step: the closed form, the replay, the closed form without placement."""
    name, _, how = plan.partition(" ")
    work, grid, tokens = workload(), Grid.parse(name), SEQUENCES * LENGTH
    split = "tokens" in how
    run = RunOptions(tokens, itemsize=4, cached_gathers=1.0, recompute="none", sequence_parallel=split)
    if "tesseract" in how:
        run = run._replace(cached_gathers=0.0, algorithm="tesseract")
        closed, agnostic = (model.predict(work, grid, one, run).total for one in (on, one_bandwidth(on)))
        return closed, closed, agnostic
    if "stages" in how:
        run = run._replace(micro_batches=micro_batches(grid), rows=grid.z * LENGTH)
        cut = replace(planned(work, STAGES, "1f1b"), bounds=(0, 1, 2))
        closed, agnostic = (StageTimes(work, grid, one, run).predict(cut).total for one in (on, one_bandwidth(on)))
        timing = StageTimes(work, grid, on, run)
        return closed, closed - timing.estimate(cut) + timing.simulate(cut).seconds, agnostic
    closed, agnostic = (model.predict(work, grid, one, run).total for one in (on, one_bandwidth(on)))
    return closed, engine.simulate(work, grid, on, run).seconds, agnostic


def report(grids: list[str], state: State, table: Table) -> int:
    """Rows by measured time, then the verdicts."""
    on = machine.load(str(state.machine))
    measured = {grid: statistics.median(state.steps[grid]) for grid in grids}
    for grid in sorted(grids, key=lambda name: measured[name]):
        closed, simulated, agnostic = predictions(grid, on)
        seconds, all_steps = measured[grid], state.steps[grid]
        table.add(
            grid=grid, measured_s=seconds, predicted_s=closed, error=closed / seconds - 1, simulated_s=simulated,
            sim_error=simulated / seconds - 1, agnostic_s=agnostic,
            spread=(max(all_steps) - min(all_steps)) / seconds, steps=all_steps,
        )  # fmt: skip
    missed = 0
    real = [row["measured_s"] for row in table.rows]
    for name, key, judged in (
        ("planner", "predicted_s", True),
        ("replay", "simulated_s", True),
        ("without placement", "agnostic_s", False),
    ):
        said = [row[key] for row in table.rows]
        rho = spearman(said, real) if len(real) > 1 else 1.0
        chosen = min(table.rows, key=lambda row: row[key])
        loss = chosen["measured_s"] / min(real)
        errors = [abs(one / other - 1) for one, other in zip(said, real, strict=True)]
        within = sum(error <= GOALS["step"] for error in errors)
        good = rho >= GOALS["spearman"] and loss <= GOALS["best"]
        missed += judged and not good
        table.note(
            f"{name}: Spearman {rho:.3f} (goal {GOALS['spearman']}); its best grid {chosen['grid']} takes {loss:.3f} of"
            f" the best measured (goal {GOALS['best']}); step time off by {statistics.fmean(errors):.1%} on average,"
            f" {max(errors):.1%} at most, within {GOALS['step']:.0%} on {within} of {len(errors)} grids",
            verdict=good if judged else None, spearman=rho, best=loss, mean_error=statistics.fmean(errors),
            within=within,
        )  # fmt: skip
    return missed


if __name__ == "__main__":
    raise SystemExit(main())
