"""What the commands write: tables, JSON, pictures, the machine file of a measurement.

Oracles: the plan itself; Python's own json; the PNG signature. How the pictures look was looked at.
"""

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from axo.cli import main as cli
from axo.comm import device
from axo.grid import Grid
from axo.perf import machine, output, planner, plots, profile, readers
from axo.perf.chrome_trace import Span
from axo.perf.command import command_line, gather_cache
from axo.perf.workload import gpt
from axo.train.config import TrainConfig
from bench.papers import equations, report
from bench.papers.lines import Group, Line
from tests.launcher import run_ranks


@pytest.fixture(scope="session")
def made() -> planner.GridPlan:
    return planner.plan(planner.Request(readers.read("gpt-5b"), machine.load("frontier"), 32, 2**18, 1e12))


def test_json_adds_up(made: planner.GridPlan) -> None:
    found = json.loads(json.dumps(output.plan_json(made)))
    assert len(found["ranked"]) == len(made.ranked) and len(found["left_out"]) == len(made.left_out)
    for entry in found["ranked"]:
        parts = entry["compute_s"] + entry["contention_s"] + entry["optimizer_s"] + sum(entry["exposed_s"].values())
        assert entry["step_s"] == pytest.approx(parts)
        assert entry["mfu_percent"] < entry["hfu_percent"]
    assert found["calibrated_on"] == ["frontier 512 gpt-5b", "frontier 8192 gpt-80b"]


def test_every_row_ends_with_the_command_that_runs_it(made: planner.GridPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of the papers: the simulation, which the printed command gives again; one of LitGPT's: training."""
    lines = output.commands(made, 3)
    assert lines[0].startswith(f"1: axo simulate --model gpt-5b --grid {made.best.grid} --machine frontier")
    found = CliRunner().invoke(cli.app, [*lines[0].split()[2:], "--json", "-"])
    assert found.exit_code == 0, found.output
    assert json.loads(found.output)["closed_form_s"] == made.best.seconds
    slower = planner.plan(replace(made.request, machine=made.request.machine.with_network(200)))
    assert "--machine frontier --network 200 " in output.commands(slower, 1)[0]
    assert slower.request.machine.inter_gbs == 25
    workload = readers.read("pythia-14m", seq_length=128)
    asked = planner.Request(workload, machine.load("rtx-4090"), 8, 16 * 128, search=True)
    searched = planner.plan(asked)
    configs: list[TrainConfig] = []
    monkeypatch.setattr("axo.train.runner.launch_local", lambda _, ranks, config, *args, **more: configs.append(config))
    monkeypatch.setattr("axo.train.check.check_machine", lambda config, model: None)
    monkeypatch.setattr("axo.train.check.check_device", lambda what, device: (device, None))  # as if it were here
    for one in searched.ranked[:6]:
        words = command_line(searched, one).split()
        assert words[:5] == ["torchrun", "--nnodes", "2", "--nproc-per-node", "4"]
        words = words[words.index("axo") + 1 :]
        words[words.index("DATA")] = __file__
        found = CliRunner().invoke(cli.app, words)
        assert found.exit_code == 0, found.output
        config = configs.pop()
        assert (config.model, config.grid, config.batch_size, config.seq_len) == ("pythia-14m", one.grid, 16, 128)
        assert (config.recompute, config.zero) == (one.run.recompute != "none", one.run.zero)
        assert config.accumulate == one.run.micro_batches
        assert config.gather_cache == gather_cache(workload, one.run.cached_gathers) and config.offload == "none"
    words = command_line(searched, replace(one, run=one.run._replace(offload=True))).split()
    words = [word.replace("DATA", __file__) for word in words[words.index("axo") + 1 :]]
    assert CliRunner().invoke(cli.app, words).exit_code == 0 and configs.pop().offload == "optimizer"


@pytest.mark.parametrize(("length", "unit"), [(0.25, "ms"), (4.0, "s")])
def test_a_step_has_a_legend_and_a_fitting_unit(length: float, unit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The picture's own texts; each colour is named once."""
    monkeypatch.setattr(plots, "png", lambda figure: figure)
    names = ("mlp forward", "mlp dI", "mlp dW", "mlp dW")
    spans = [Span("compute", name, length * i, length * (i + 1)) for i, name in enumerate(names)]
    figure: Any = plots.timeline(spans)
    (legend,), (axes,) = figure.legends, figure.axes
    assert [text.get_text() for text in legend.get_texts()] == ["forward", "dI: gradients of inputs", "dW: of weights"]
    assert axes.get_xlabel() == unit and axes.get_xlim()[1] == 4 * length * (1e3 if unit == "ms" else 1)


def test_a_range_has_no_error() -> None:
    _, rows = report.group_table(Group("g", [Line("a", "13 to 45", 20.0, "%"), Line("b", 10, 11.0, "%")]))
    assert [row[4] for row in rows] == ["", "+10.0%"]


def test_plans_are_compared_side_by_side(made: planner.GridPlan, tmp_path: Path) -> None:
    slower = replace(made, ranked=made.ranked[::-1])
    for name, plan in (("a.json", slower), ("b.json", made)):
        (tmp_path / name).write_text(json.dumps(output.plan_json(plan, gpu_hour=2.5) | {"watts": 500.0}))
    (_, (header, rows)), verdict = output.compared(
        [(n, json.loads((tmp_path / n).read_text())) for n in ("a.json", "b.json")]
    )  # type: ignore[misc]
    assert "times as many GPU hours in a.json" in verdict
    assert [row[0] for row in rows] == ["b.json", "a.json"] and len(rows[0]) == len(header)
    hours = 32 / (2**18 / made.best.seconds) * 1e9 / 3600
    assert float(rows[0][-3]) == pytest.approx(hours, abs=0.06)
    assert rows[0][-2:] == [f"{2.5 * hours:,.0f}", f"{hours * 500 / 1e6:.2f}"]
    for text in ("{}", "[]"):
        (tmp_path / "c.json").write_text(text)
        found = CliRunner().invoke(cli.app, ["plan", "--compare", str(tmp_path / "c.json")])
        assert found.exit_code == 2 and "holds no plan; `axo plan ... --json FILE` writes one" in found.stderr


def test_a_reproduction_has_one_table_of_rows() -> None:
    groups = [
        Group(
            "first",
            [Line("a", 2.0, 3.0, "s"), Line("b", "13 to 45", 20.0, "%"), Line("c", 4.0, 4.0, "s", "calibrated")],
        ),
        Group("second", [Line("d", "a plot", 1.0, "x")]),
    ]
    header, rows = report.rows_table(groups)
    assert len(header) == len(rows[0]) and [row[0] for row in rows] == ["first"] * 3 + ["second"]
    assert [row[-1] for row in rows] == ["held out", "no error", "calibrated", "no error"] and rows[0][5] == "+50.0%"


def test_commands_write_what_they_say(tmp_path: Path) -> None:
    call = "plan --model gpt-5b --gpus 32 --machine frontier --batch-tokens 256k --tokens 1T --explain 2x2x4x2"
    done = CliRunner().invoke(cli.app, call.split())
    assert done.exit_code == 0, done.output
    assert "calibrated on frontier 512 gpt-5b" in done.output and "traffic of 2x2x4x2" in done.output
    done = CliRunner().invoke(cli.app, f"{call} --json -".split())
    assert json.loads(done.output)["ranked"][0]["days"] > 0
    call = f"simulate --model pythia-14m --grid 2x2x4x2 --machine frontier --batch-tokens 64k --trace {tmp_path}/t.json"
    done = CliRunner().invoke(cli.app, f"{call} --plot {tmp_path}/step.png".split())
    assert done.exit_code == 0, done.output
    assert "one step" in done.output and (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]


@pytest.mark.parametrize("more", [[], ["--recompute-keeps", "products"], ["--no-checkpoint"]])
def test_a_simulated_step_has_the_flops_of_the_planned_one(more: list[str]) -> None:
    asked = ["--model", "pythia-14m", "--machine", "frontier", "--batch-tokens", "64k", "--json", "-", *more]
    found = []
    for call in (["simulate", "--grid", "1x1x32x1"], ["plan", "--gpus", "32"]):
        done = CliRunner().invoke(cli.app, [*call, *asked])
        assert done.exit_code == 0, done.output
        found.append(json.loads(done.stdout))
    simulated, planned = found
    (row,) = (row for row in planned["ranked"] if row["grid"] == simulated["grid"])
    flops = simulated["hfu_percent"] * simulated["seconds"], row["hfu_percent"] * row["step_s"]
    assert flops[0] == pytest.approx(flops[1], rel=1e-12)  # rounding of a product and a quotient


def test_a_grid_that_is_left_out_is_explained_by_its_reason_alone() -> None:
    call = "plan --model gpt-5b --gpus 64 --machine alps --top 1 --explain 64x1x1x1"
    done = CliRunner().invoke(cli.app, call.split())
    assert done.exit_code == 0 and "64x1x1x1 is left out: x=64 does not divide heads=" in done.output
    assert "traffic of" not in done.output and "memory of" not in done.output


def test_the_columns_of_a_row_add_up_to_its_step(made: planner.GridPlan) -> None:
    header, rows = output.plan_table(made, 5)
    first, last = header.index("products s"), header.index("GiB")
    for row in rows:
        assert sum(map(float, row[first:last])) == pytest.approx(float(row[2]), abs=0.005 * (last - first + 1))


def test_hierarchies_are_all_that_fit() -> None:
    assert list(profile.hierarchies(8)) == [(1, 2), (1, 4), (1, 8), (2, 2), (2, 4), (4, 2)]
    assert list(profile.hierarchies(1)) == []
    assert set(machine.load("frontier").intra_gbs) == set(profile.hierarchies(8))


def test_a_collective_is_composed_from_where_that_is_faster(tmp_path: Path, monkeypatch: Any) -> None:
    """Down to the size below which it is not; of a machine whose times are known."""
    from axo.comm.device import DeviceOptions

    # Bytes of the whole message above which the composed one takes half the time; the rest: as long as the library's.
    faster = {"all_reduce": 5000, "all_gather": 0, "broadcast": 1 << 30}
    closed = list[Grid]()

    class World:
        def __init__(self, composed: Any) -> None:
            self.composed = {collective for *_, collective, _ in composed}

        def __getattr__(self, name: str) -> Any:
            whole = 4 * 4 if name == "all_gather" else 4  # bytes of an element on all ranks that have a part
            return lambda t: 0.5 if name in self.composed and t.numel() * whole > faster.get(name, 1 << 30) else 1.0

    def connect(grid: Grid, *, device_options: DeviceOptions) -> Any:
        world = World(device_options.composed)
        return SimpleNamespace(world=world, device="cpu", close=lambda: closed.append(grid))

    monkeypatch.setattr(profile, "_timed", lambda comms, repeats, run: [run(), 2.0])
    table = profile._composed(connect, 4, 2, 1 << 16, 3)
    assert table == {"2x2": {"all_reduce": 1 << 14, "all_gather": 16}} and len(closed) == 2
    (file := tmp_path / "machine.yaml").write_text(yaml.safe_dump({"composed": table}))
    assert device._composed(str(file)) == ((2, 2, "all_gather", 16), (2, 2, "all_reduce", 1 << 14))


def on_hosts(ranks: int) -> dict:
    """The same over two hosts of two ranks, with a link of 20 MB/s; LitGPT is not installed."""
    import torch

    import axo

    torch.distributed.init_process_group("axo")
    workload = gpt("tiny", layers=1, hidden=32, heads=4, vocab=64)
    if os.environ["RANK"] in "23":  # the second host: what one host lacks is measured on none
        profile.find_spec = lambda name: None  # type: ignore[assignment, misc]
    return profile.measure(axo.connect, ranks, workload, 64, 400_000, 2, node=2, dtype="float32")


@pytest.mark.slow
def test_rings_across_hosts_are_measured_at_the_rate_of_the_link(tmp_path: Path) -> None:
    """A rank's ring beside another's has half of the link. The link sleeps, so figures hold on a busy machine: never
    above the rate, and well above half of it unless the machine stands still."""
    first, *others = run_ranks(on_hosts, 4, 4, hosts={"ranks_per_host": 2, "rate": 20e6})
    assert all(other == first for other in others)
    assert set(first["intra_gbs"]) == {"1x2"} and set(first["cross_gbs"]) == {"1x4", "2x2"}
    assert first["gpus_per_node"] == 2 and first["inter_gbs"] == 2 * first["cross_gbs"]["2x2"]
    assert 0.3 * 0.02 < first["inter_gbs"] < 1.1 * 0.02
    assert first["layer_us"] == 0 and first["profiled"]["layer_us"].startswith("not measured: LitGPT is not installed")
    path = tmp_path / "hosts.yaml"
    profile.write(first, path)
    found = machine.load(str(path))
    assert found.bandwidth(Grid(x=2, y=2), "y") == 1e9 * first["cross_gbs"]["2x2"]
    assert found.bandwidth(Grid(x=2, y=4), "y") == 1e9 * found.inter_gbs / 2, "equation (10) where nothing is measured"
    assert not equations.agnostic(found).cross_gbs
    with pytest.raises(ValueError, match="3 ranks are not a whole number of hosts of 2"):
        profile.measure(None, 3, gpt("tiny", layers=1, hidden=32, heads=4), 64, 4096, 2, node=2)  # type: ignore


def on_ranks(ranks: int) -> dict:
    """Measure a small model on CPU ranks; also that each hierarchy's ring is the one that was asked for."""
    import torch

    import axo

    torch.distributed.init_process_group("axo")
    workload, before = gpt("tiny", layers=1, hidden=32, heads=4, vocab=64), torch.get_rng_state()
    found = profile.measure(axo.connect, ranks, workload, 64, 4096, 2)
    assert torch.equal(torch.get_rng_state(), before)
    return found


@pytest.mark.slow
def test_a_measured_machine_file_can_be_planned_on(tmp_path: Path) -> None:
    """Figures are of a busy machine and mean nothing; that they are complete, equal on all ranks and readable does."""
    first, *others = run_ranks(on_ranks, 4, 4)
    assert all(other == first for other in others)
    assert set(first["intra_gbs"]) == {"1x2", "1x4", "2x2"} and first["latency_intra_us"] > 0
    assert first["layer_us"] > 10 and "layer_us" not in first["profiled"]  # Python alone takes more
    path = tmp_path / "mine.yaml"
    profile.write(first, path)
    found = machine.load(str(path))
    assert found.gpus_per_node == 4 and len(found.gemms) == len(first["gemms"]) > 5
    request = planner.Request(gpt("tiny", layers=1, hidden=32, heads=4, vocab=64, seq_length=16), found, 4, 256)
    assert planner.plan(request).best.time is not None
