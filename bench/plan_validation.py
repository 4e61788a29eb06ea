"""Is the planner right? All 20 grids of 8 ranks, timed for real over a limited link, beside what it predicts.

    axo bench plan_validation --seconds 200          again, until it says that all grids are measured

Four "hosts" of two CPU ranks on this machine (axo.comm.hosts.simulate); what leaves one is held to --limit bytes a
second by sleeping, so that a step is communication for the most part and other load on the machine matters little.
First what `axo profile` measures is measured on the same ranks and the same link, and kept as a machine file; nothing
is fitted to the 20 results. Then every grid trains a small GPT (fp32, AdamW, all overlaps on) for some steps: the
slowest rank's seconds, the median of the counted steps of all passes.

Predictions: the planner's closed form, the simulator, and the closed form with one bandwidth for every axis, without
placement. What is measured already stays in --state, so a run of limited time goes on where the last one ended.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from axo.grid import Grid
from axo.perf import machine, model, profile, readers, simulator
from axo.perf.calibrate import spearman
from axo.perf.layer_time import Run
from axo.perf.workload import Workload

from .lib.arguments import Parser
from .lib.link import rate
from .lib.table import Table, environment

RANKS, A_HOST = 8, 2
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
GOALS = {"spearman": 0.8, "best": 1.10, "step": 0.15}


def main(arguments: list[str] | None = None) -> int:
    """Measure what is left; once all is there, print it beside the predictions. Returns the number of goals missed."""
    from axo.launch import launch_local

    parser = Parser(prog="axo bench plan_validation", description=__doc__.splitlines()[0])
    parser.add_argument("--limit", type=rate, default="8M", help="bytes a second that leave a host: 8M, 1.5G")
    parser.add_argument("--state", type=Path, default=Path("runs/plan_validation"), help="folder of what is measured")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no further grid after this time")
    parser.add_argument("--steps", type=int, default=3, help="counted steps of each grid, after two that are not")
    parser.add_argument("--passes", type=int, default=2, help="over all grids, so that a busy minute hits none twice")
    parser.add_argument("--grids", default="", help="only these, comma-separated; all by default")
    parser.add_argument("--json", type=Path, default=None, help="append JSON lines here when all is measured")
    options = parser.parse_args(arguments)
    options.state.mkdir(parents=True, exist_ok=True)
    setup = {"limit": options.limit, "steps": options.steps, "config": CONFIG, "sequences": SEQUENCES, "length": LENGTH}
    state = State(options.state / "state.json", setup)
    grids = [text for text in options.grids.split(",") if text] or [str(grid) for grid in Grid.all(RANKS)]
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
            raise SystemExit(f"plan_validation: {self.path} holds another setup's results; give another --state")
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
    return readers.from_litgpt(CONFIG, seq_length=LENGTH).with_checkpointing(False)


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
    for grid in grids:
        comms = axo.connect(grid)
        late = torch.tensor([float(time.time() > deadline)])
        if comms.world.all_reduce(late, "max").item():
            comms.close()
            return
        seconds = time_steps(comms, steps)
        comms.close()
        if comms.rank == 0:
            state.add(grid, seconds)
            print(f"{grid}: {', '.join(f'{one:.3f}' for one in seconds)} s", flush=True)


def time_steps(comms: Any, steps: int) -> list[float]:
    """Seconds of the slowest rank in each counted step."""
    from litgpt import GPT, Config

    import axo

    torch.manual_seed(0)
    built = axo.parallelize(GPT(Config(**CONFIG)), comms, overlap=axo.Overlap())
    optimizer = torch.optim.AdamW(built.parameters(), lr=1e-3)
    rows = SEQUENCES // (comms.grid.z * comms.grid.data)
    first = (comms.coords.data * comms.grid.z + comms.coords.z) * rows
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(512, (SEQUENCES, LENGTH + 1), generator=generator)[first : first + rows]
    found = []
    for _ in range(2 + steps):  # the first learns the order of gathers, the second has buffers to make
        comms.world.barrier()
        started = time.perf_counter()
        logits = built(ids[:, :-1])
        axo.nn.cross_entropy(logits, ids[:, 1:], comms=comms, columns=512).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        spent = torch.tensor([time.perf_counter() - started], dtype=torch.float64)
        found.append(float(comms.world.all_reduce(spent, "max")))
    return found[2:]


def predictions(grid: Grid, on: machine.Machine) -> tuple[float, float, float]:
    """Seconds of a step: the closed form, the simulator, the closed form without placement."""
    work, run = workload(), Run(SEQUENCES * LENGTH, itemsize=4, cached_gathers=1.0)
    closed, agnostic = (model.predict(work, grid, one, run).total for one in (on, on.agnostic()))
    return closed, simulator.simulate(work, grid, on, run).seconds, agnostic


def report(grids: list[str], state: State, table: Table) -> int:
    """Rows by measured time, then the verdicts."""
    on = machine.load(str(state.machine))
    measured = {grid: statistics.median(state.steps[grid]) for grid in grids}
    for grid in sorted(grids, key=lambda name: measured[name]):
        closed, simulated, agnostic = predictions(Grid.parse(grid), on)
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
        ("simulator", "simulated_s", True),
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
