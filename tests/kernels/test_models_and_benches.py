"""Shapes of the papers' models, tuning a whole model, the simulated link, and the benches at toy sizes."""

import importlib
import json
import math
from types import SimpleNamespace

import pytest
import torch

from axo_kernels import SignalTimeout, Tuner, all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter
from axo_kernels.gemm.layout import Product
from axo_kernels.tune.cache import Cache
from axo_kernels.tune.model import tune_model
from axo_kernels.tune.model_shapes import MODELS, layers
from bench import overlap
from bench.lib.simulated import SimulatedCommunicator
from bench.lib.table import Table
from tests.launcher import Command


@pytest.mark.parametrize("model", MODELS)
def test_block_has_twelve_hidden_squared_weights(model):
    """The papers' 12 h^2 weights a block, whole and cut: a grid's ranks hold Gx * Gy times less each."""
    hidden = MODELS[model][1]
    assert sum(layer.n * layer.k for layer in layers(model)) == 12 * hidden**2
    cut = layers(model, (4, 2, 2), rows=4096)
    assert sum(layer.n * layer.k for layer in cut) == 12 * hidden**2 // 8
    assert {layer.m for layer in cut} == {2048}
    flops = sum(product.flops for layer in cut for product in layer.products(torch.bfloat16).values())
    assert flops == 3 * 2 * 2048 * 12 * hidden**2 // 8
    qkv, proj = cut[0], cut[1]
    assert (qkv.n, qkv.k) == (3 * hidden // 4, hidden // 2), "normal: out over x, in over y"
    assert (proj.n, proj.k) == (hidden // 2, hidden // 4), "transposed: out over y, in over x"


def test_models_that_do_not_exist():
    with pytest.raises(ValueError, match="model 'gpt-7b' is not one of gpt-5b"):
        layers("gpt-7b")
    with pytest.raises(ValueError, match="'qkv': in_features=4096 does not divide over y=3; use a grid with y=2"):
        layers("gpt-5b", (1, 3, 1))
    with pytest.raises(ValueError, match="hidden size of 4096 shrunk by 5000 is nothing; shrink less"):
        layers("gpt-5b", shrink=5000)
    with pytest.raises(ValueError, match="2048 rows do not divide over z=3; use 2049"):
        layers("gpt-5b", (1, 1, 3))


def test_tuning_a_model_fills_the_cache(tmp_path):
    cache = Cache("a device", {}, tmp_path)
    told = []
    tuner = Tuner("first-step", cache=cache, budget=0.01, progress=lambda *progress: told.append(progress))
    cut = layers("gpt-5b", (2, 2, 1), 64, shrink=64)
    rows = list(tune_model(cut, tuner, dtype=torch.float32, device="cpu"))
    assert len(rows) == 3 * 4 and told
    assert {row.layer.split()[1] for row in rows} == {"forward", "grad_input", "grad_weight"}
    assert all(row.torch_seconds > 0 and row.chosen_seconds > 0 for row in rows)
    entries = json.loads(cache.path.read_text())["entries"]
    assert len(entries) == tuner.measured > 0
    again = Tuner("cached", cache=Cache("a device", {}, tmp_path))
    assert list(tune_model(cut, again, dtype=torch.float32, device="cpu")) == rows
    assert again.measured == 0


@pytest.mark.parametrize("strategy", ["serial", "split", "signal"])
def test_the_simulated_link_gives_what_equal_ranks_give(strategy):
    comm = SimulatedCommunicator(4, 1e12, torch.device("cpu"))
    x, w = torch.randn(16, 8), torch.randn(12, 8)
    exact = x.double() @ w.double().T
    limits = {"rtol": 0, "atol": 1e-5}  # fp32 sums of 8 products
    got = matmul_all_reduce(x, w, comm, strategy=strategy, chunks=3)
    torch.testing.assert_close(got.double(), 4 * exact, **limits)
    got = matmul_reduce_scatter(x, w, comm, strategy=strategy, chunks=3)
    torch.testing.assert_close(got.double(), 4 * exact[:4], **limits)
    got = all_gather_matmul(x, w, comm, strategy=strategy, chunks=3)
    torch.testing.assert_close(got.double(), exact.repeat(1, 4), **limits)
    assert [record.strategy for record in comm.ran] == [strategy] * 3
    assert comm.seconds(1e12) == 1.0
    ones = torch.ones(4)
    with comm.without_effects():
        comm.all_reduce(ones).wait()
    assert torch.equal(ones, torch.ones(4)), "for timing: it takes its time, and changes nothing"


def test_the_wire_is_held_by_a_clock_that_does_not_slow_down():
    """Compiled for Hopper: the clock of nanoseconds is read before the loop and in each round of it."""
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from bench.lib.wire import hold

    source = ASTSource(hold, {"nanoseconds": "i32"}, {})
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1}).asm["ptx"]
    before, _, loop = ptx.partition("Inner Loop Header")
    assert before.count("mov.u64 %rd2, %globaltimer;") == 1 and "clock64" not in ptx
    assert loop.partition("bra")[0].count("%globaltimer;") == 1, "read once a round, up to the branch back"


def run_bench(name, *arguments, common=("--device", "cpu", "--rounds", "3")):
    command = Command(f"bench.{name}", *common, *arguments)
    printed = command.communicate()
    assert command.returncode == 0, printed
    return printed


@pytest.mark.slow
def test_gemm_bench_prints_error_beside_time(tmp_path):
    path = tmp_path / "gemm.jsonl"
    printed = run_bench("gemm", "--sizes", "64", "--models", "gpt-5b", "--shrink", "64", "--json", str(path))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert {"bench", "device", "torch", "triton", "commit", "date"} <= lines[0].keys()
    rows = [line for line in lines if "product" in line]
    assert len(rows) == 3 + 12 and all(row["right"] and row["error"] < 4e-3 for row in rows)
    assert all(math.isfinite(row["tuned_ratio"]) and row["torch_tflops"] > 0 for row in rows)
    assert "geometric mean" in printed and printed.count("bfloat16") == 15


@pytest.mark.slow
def test_overlap_bench_reports_efficiency(tmp_path):
    path = tmp_path / "overlap.jsonl"
    arguments = ["--shapes", "64x64x64", "--shares", "0.5", "--chunks", "2", "--dtype", "float32", "--json", str(path)]
    run_bench("overlap", *arguments)
    rows = [json.loads(line) for line in path.read_text().splitlines()][1:]
    assert len(rows) == 3 * 2 and all(row["right"] for row in rows)
    assert {row["strategy"] for row in rows} == {"split", "signal"}
    for row in rows:
        if row["efficiency"] is not None:
            expected = 1 - (row["fused_ms"] - row["gemm_ms"]) / (row["serial_ms"] - row["gemm_ms"])
            assert row["efficiency"] == pytest.approx(expected)


def test_a_section_that_dies_is_a_verdict():
    from bench.kernels import section
    from bench.lib.table import Table

    def dies():
        raise RuntimeError("no kernel image\nand more")

    table, device, verdicts = Table({}), torch.device("cpu"), {}
    assert not section("numerics", dies, device, table, verdicts)
    assert section("rounds", lambda: None, device, table, verdicts)
    assert not table.failed and verdicts == {"numerics ended early: RuntimeError: no kernel image ... and more": False}


def test_overlap_is_judged_by_the_fastest_strategy_and_against_serial():
    from bench.lib import verdicts

    shape = (2048, 4096, 4096)
    row = {"asked_share": 0.2, "operation": "matmul_all_reduce", "shape": "NT 2048x4096x4096 bfloat16", "chunks": 2}
    rows = [
        row
        | {"strategy": "split", "fused_ms": 1.03, "serial_ms": 1.0, "efficiency": 0.6}
        | {"graph_ms": 1.0, "graph_efficiency": 0.4},
        row
        | {"strategy": "signal", "fused_ms": 1.2, "serial_ms": 1.0, "efficiency": 0.9}
        | {"graph_ms": 0.9, "graph_efficiency": 0.7},
    ]
    found = verdicts.overlap(rows, ["matmul_all_reduce"], [shape])
    what = "matmul_all_reduce 2048x4096x4096 share 0.2, split/2"
    assert found.pop(f"{what} hides: 0.600 (goal: at least 0.5)") is True
    assert found.pop(f"{what} over serial: 1.030 (goal: at most 1.01)") is False
    graph = "matmul_all_reduce 2048x4096x4096 share 0.2, as a graph"
    assert found.pop(f"{graph}, signal/2 hides: 0.700 (goal: at least 0.5)") is True
    assert len(found) == 7 and set(found.values()) == {"not measured"}
    assert "Gluon that meets a stream, flags set, of torch (goal: at least 0.95)" in found
    mine = [rows[0] | {"strategy": "groups", "gemm_ms": 0.9, "own_ms": own} for own in (1.0, 0.9)]
    (told,) = (name for name in verdicts.overlap([*rows, *mine], [], [shape]) if name.startswith("Gluon"))
    assert told == "Gluon that meets a stream, flags set, of torch: 0.949 over 1 shapes (goal: at least 0.95)"
    bare = [one | {"graph_ms": None, "graph_efficiency": None} for one in rows]
    found = verdicts.overlap(bare, ["matmul_all_reduce"], [shape])
    assert found[f"{graph} hides (goal: at least 0.5)"] == "not measured"


def test_fp8_is_judged_by_scaling():
    from bench.lib import verdicts

    rows = [{"scaling": "row", "fp8_ratio": ratio, "rounded_ratio": 0.9} for ratio in (1.2, 2.7)]
    assert verdicts.fp8(rows, ("tensor", "row")) == {
        "fp8 alone, a scale a tensor, of torch's bf16 (goal: at least 1.5)": "not measured",
        "fp8 and its rounding, a scale a tensor, of torch's bf16 (goal: at least 1)": "not measured",
        "fp8 alone, a scale a row, of torch's bf16: 1.800 over 2 shapes (goal: at least 1.5)": True,
        "fp8 and its rounding, a scale a row, of torch's bf16: 0.900 over 2 shapes (goal: at least 1)": False,
    }


def test_fp8_times_go_on_where_they_stopped(monkeypatch):
    from bench.lib import fp8
    from bench.lib.table import Table

    table, device = Table(fp8.COLUMNS), torch.device("cpu")
    shapes = [(32, 16, 64), (16, 32, 32)]
    assert fp8.measure(shapes, device, table, 3, -1.0) == 4 and not table.rows
    assert fp8.measure(shapes[:1], device, table, 3, 60.0) == 0
    assert [(row["product"], row["scaling"]) for row in table.rows] == [
        ("NT 32x16x64 bfloat16", "tensor"),
        ("NT 32x16x64 bfloat16", "row"),
    ]
    assert fp8.measure(shapes, device, table, 3, -1.0) == 2 and len(table.rows) == 2
    assert all(row["fp8_ratio"] > 0 and row["rounded_ratio"] > 0 for row in table.rows)


def test_fp8_is_checked_against_what_was_rounded(monkeypatch):
    """The check passes on the emulation, and finds a product that forgets the scales of its rows."""
    from bench.lib import fp8
    from bench.lib.table import Table

    columns, device = {"check": "s", "error": ".1e", "limit": ".1e"}, torch.device("cpu")
    right = Table(columns)
    fp8.right(device, right, dry=True)
    assert len(right.rows) == 24 and all(row["error"] < row["limit"] for row in right.rows)
    multiply, wrong = fp8.fp8.multiply, Table(columns)
    monkeypatch.setattr(fp8.fp8, "multiply", lambda a, b, dtype: multiply(a._replace(scale=a.scale.mean()), b, dtype))
    fp8.right(device, wrong, dry=True)
    assert all((row["error"] > row["limit"]) == ("a scale a row" in row["check"]) for row in wrong.rows)


def adds_by_both_rivals():
    from bench.gemm import adding_calls, adding_error

    a, b = (torch.randint(-2, 3, shape).float() for shape in ((32, 16), (32, 48)))
    calls = adding_calls(a, b, [None])
    for call in calls.values():
        first = call().clone()
        assert torch.equal(call() - first, a.T @ b)
        assert adding_error(call, a, b) == 0.0
    zeros = torch.zeros(16, 48)
    assert adding_error(lambda: zeros.add_(a.T @ b).mul_(1.25), a, b) > 0.2, "one that is wrong"
    assert adding_error(lambda: zeros.copy_(a.T @ b), a, b) > 0.01, "one that does not add"
    return len(calls)


@pytest.mark.slow
def test_tn_is_added_to_a_gradient_by_both_rivals(interpreter):
    """Oracle: a product of whole numbers, which fp32 sums hold exactly; two calls add it twice."""
    assert interpreter.run(adds_by_both_rivals) == 2


def test_speed_is_judged_by_class():
    from bench.lib import verdicts

    gpt = [Product(layout, 4096, size, 4096, torch.bfloat16) for layout in ("NN", "NT", "TN") for size in (16384, 1024)]
    square = Product("NN", 8192, 8192, 8192, torch.bfloat16)

    def row(product, triton, tuned=1.0):
        sizes = {"layout": product.layout, "m": product.m, "n": product.n, "k": product.k}
        return sizes | {
            "product": product.name, "triton_ratio": triton, "tuned_ratio": tuned, "errors": {"triton": 2e-3},
            "accumulate_ratio": 1.2 if product.layout == "TN" else None, "right": product is not square,
        }  # fmt: skip

    rows = [row(product, 0.94 if product.n == 16384 else 0.89) for product in gpt]
    found = verdicts.speed([*rows, row(square, 0.5, 0.98)], gpt, units=64)
    assert list(found.items()) == [
        ("GPT shapes measured: 6 of 6", True),
        ("Triton's relative error: 2.0e-03 over 7 shapes (goal: at most 0.004)", True),
        ("products with a wrong result, added to a gradient too: 1 over 7 shapes (goal: at most 0)", False),
        ("Triton NN, K >= 2048, >= 4 waves, of torch: 0.940 over 1 shapes (goal: at least 0.95)", False),
        ("Triton NT, K >= 2048, >= 4 waves, of torch: 0.940 over 1 shapes (goal: at least 0.95)", False),
        ("Triton TN, K >= 2048, >= 4 waves, of torch: 0.940 over 1 shapes (goal: at least 0.93)", True),
        ("Gluon on Hopper, K >= 2048, >= 4 waves, of torch (goal: at least 0.95)", "not measured"),
        ("Triton on the other GPT shapes, of torch: 0.890 over 3 shapes (goal: at least 0.88)", True),
        ("Triton at worst, of torch: 0.890 over 6 shapes (goal: at least 0.8)", True),
        ("TN added to an fp32 gradient, of torch.mm and add_: 1.200 over 2 shapes (goal: at least 1)", True),
        ("tuned at worst, of torch: 0.980 over 7 shapes (goal: at least 0.99)", False),
        ("tuned, of torch: 0.997 over 7 shapes (goal: at least 1)", False),
    ]
    found = verdicts.speed(rows[:1], gpt, units=64)
    assert found["GPT shapes measured: 1 of 6"] == "not measured"
    assert found["Triton NT, K >= 2048, >= 4 waves, of torch (goal: at least 0.95)"] == "not measured"


BAD = {
    "gemm --sizes 64x": "--sizes '64x' is not a whole number of at least 1",
    "gemm --models gpt-7b": "model 'gpt-7b' is not one of gpt-5b",
    "gemm --models gpt-5b --grid 5x1x1": "does not divide over x=5; use a grid with x=4",
    "gemm --device tpu": "--device 'tpu': 0 GPUs are visible here; use cpu",
    "overlap --shapes 64x64": "use three sizes joined by x",
    "overlap --shapes 64x63x64": "N=63 does not divide over 4 ranks; use 64",
    "overlap --shapes 64x64x64 --chunks 17": "--chunks 17 do not fit the 16 rows of M",
    "overlap --shapes 64x64x64 --shares 0": "--shares '0': use numbers above 0",
    "overlap --shapes 64x64x64 --size 1": "--size '1' is not a whole number of at least 2",
}


@pytest.mark.parametrize("command", BAD)
def test_a_mistake_on_the_command_line_is_one_line(command, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    name, *arguments = command.split()
    with pytest.raises(SystemExit) as caught:
        importlib.import_module(f"bench.{name}").main(arguments)
    said = capsys.readouterr().err.splitlines()
    assert caught.value.code == 2 and said[-1].startswith(f"axo bench {name}: error: ") and BAD[command] in said[-1]


def test_overlap_is_timed_without_the_simulated_effects(monkeypatch):
    """They run on multiprocessors, of which a signalled product leaves few: they would count as time of the link."""
    seen, timing = set(), []
    run, paired = SimulatedCommunicator._run, overlap.paired

    def collective(comm, *given):
        seen.add((bool(timing), comm._effects))
        return run(comm, *given)

    def timed(*given):
        timing.append(True)
        found = paired(*given)
        timing.clear()
        return found

    monkeypatch.setattr(SimulatedCommunicator, "_run", collective)
    monkeypatch.setattr(overlap, "paired", timed)
    options, table = SimpleNamespace(rounds=3, seconds=60.0, size=4, groups=False), Table({})
    overlap.measure([(32, 32, 32)], [0.4], [2], torch.float32, torch.device("cpu"), table, options)
    assert not table.failed and len(table.rows) == 3 * 2 and all(row["right"] for row in table.rows)
    assert seen == {(False, True), (True, False)}


def test_overlap_says_how_far_a_case_is(capsys):
    options, table = SimpleNamespace(rounds=3, seconds=60.0, size=4, groups=False), Table({})
    overlap.measure([(32, 32, 32)], [0.4], [2], torch.float32, torch.device("cpu"), table, options)
    assert capsys.readouterr().err == "matmul_all_reduce 32x32x32 share 0.4: call 1 of 25\n"


def test_graphs_that_wait_in_vain_are_tried_once(monkeypatch):
    """Each try costs the seconds of the bound; graphs of what waits for no flag are timed, in each case."""
    tried = []

    def graphs(calls, device, rounds, comm):
        tried.append(len(calls))
        if len(calls) == 2 + 2:
            raise SignalTimeout("rank 0 waited")
        return [1.0, 2.0, 1.5][: len(calls)]

    monkeypatch.setattr(overlap, "_graphs", graphs)
    options, table = SimpleNamespace(rounds=3, seconds=60.0, size=4, groups=False), Table({})
    overlap.measure([(32, 32, 32)], [0.4, 0.8], [2], torch.float32, torch.device("cpu"), table, options)
    assert tried == [4] + [3] * 6 and len(table.rows) == 6 * 2
    for row in table.rows:
        assert row["graph_efficiency"] == (0.5 if row["strategy"] == "split" else None)
