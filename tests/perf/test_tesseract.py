"""Tesseract in the planner: what it counts against what the engine issued, its time against closed forms, its grids."""

import json
import time
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

import axo
from axo.cli import main as cli
from axo.grid import Grid
from axo.matmul import cost
from axo.perf import machine, model, planner, readers
from axo.perf.layers import LinearKind
from axo.perf.run_options import OVERLAPS, RunOptions
from axo.perf.workload import Block, Workload
from tests.launcher import run_ranks
from tests.perf.test_counted import draw

GRIDS = ("2x2x2x1", "2x2x1x2")


def consider(asked, grid):
    return planner.consider(asked, grid, algorithm="tesseract")


def cases():
    plain = [case for case in draw(12) if case["config"]["n_embd"] % 2 == 0][:4]
    return [case | {"grid": GRIDS[i % 2], "sequences": 8} for i, case in enumerate(plain)]


def count(drawn):
    from litgpt import GPT, Config

    torch.distributed.init_process_group("axo")
    found = []
    for case in drawn:
        comms = axo.connect(case["grid"])
        config = Config(**{**case["config"], "vocab_size": case["config"]["padded_vocab_size"]})
        overlap = axo.Overlap(bucket_bytes=0)
        gpt = axo.parallelize(GPT(config), comms, algorithm="tesseract", overlap=overlap)
        ids = torch.randint(0, config.padded_vocab_size, (case["sequences"] // comms.data_ranks, case["seq"] + 1))
        ids = comms.y.broadcast(ids)
        with axo.count_collectives() as counts:
            logits = gpt(ids[:, :-1])
            axo.nn.cross_entropy(logits, ids[:, 1:], comms=comms, columns=config.padded_vocab_size).backward()
        found.append({key: tuple(value) for key, value in counts.items()})
        comms.close()
    return found


def test_a_step_sends_what_the_engine_issues():
    drawn = cases()
    for rank, counts in enumerate(run_ranks(count, 8, drawn, timeout=120)):
        for case, counted in zip(drawn, counts, strict=True):
            grid = Grid.parse(case["grid"])
            workload = readers.from_litgpt(case["config"], seq_length=case["seq"])
            run = RunOptions(case["sequences"] * case["seq"], itemsize=4, algorithm="tesseract")
            rows = case["sequences"] // grid.data * case["seq"]
            calls = [
                call
                for block in workload.unrolled()
                for layer in block.layers
                for call in layer.calls(grid, rows, run, coords=grid.coords(rank))
            ]
            assert {key: tuple(value) for key, value in cost.total(calls).items()} == counted, (rank, case)


def test_time_of_one_layer_by_hand():
    """Products of q blocks; broadcasts and reduces that show by the formulas of the module; the sum over depth shows
    whole, since no layer's backward comes after it."""
    m, k, n, q, d = 2**14, 4096, 8192, 4, 2
    layer = LinearKind("fc", k, n)
    workload = Workload("one", (Block((layer,)),), seq_length=m // (q * d))
    on = replace(machine.load("dgx-a100"), latency_intra_us=0, latency_inter_us=0, memory_gbs=1e9, contention=0.0)
    grid = Grid(q, q, d)
    for overlap in (frozenset(OVERLAPS), frozenset[str]()):
        run = RunOptions(m, overlap=overlap, rows=m // (q * d), algorithm="tesseract")
        found = model.predict(workload, grid, on, run)
        product = 2 * m * k * n / grid.world_size / on.gemm_flops
        assert found.compute == pytest.approx(3 * product, rel=1e-3)
        activations = 2 * m * k / (q * q * d) / on.bandwidth(grid, "y")  # of one block, in bf16
        weights = 2 * k * n / (q * q) / on.bandwidth(grid, "x")
        both, sent = activations + weights, 3 * q * (activations + weights)
        depth = 2 * (d - 1) / d * 2 * k * n / (q * q) / on.bandwidth(grid, "z")
        shown = sent
        if overlap:
            shown = both + (q - 1) * max(0.0, both - product / q)
            shown += both + (2 * q - 1) * max(0.0, both - product / q)
        assert found.exposed_total == pytest.approx(shown + depth, rel=1e-6)


def test_all_algorithms_in_one_ranking():
    """Ordered by time, each grid once an algorithm; what Tesseract cannot run has its reason; 32,768 GPUs in time."""
    asked = planner.Request(readers.read("gpt-80b"), machine.load("frontier"), 32768, 2**24)
    planner.plan(asked)
    began = time.process_time()
    made = planner.plan(replace(asked, algorithms=planner.ALGORITHMS))
    assert time.process_time() - began < 2
    alone = planner.plan(asked)
    everything = [*made.ranked, *made.left_out]
    assert [c for c in made.ranked if c.algorithm == "axonn"] == alone.ranked
    others = [c for c in everything if c.algorithm == "tesseract"]
    by_square = [candidate.grid for candidate in sorted(others, key=lambda c: str(c.grid))]
    assert by_square == sorted(planner.tesseract_grids(32768), key=str)
    assert made.ranked == sorted(made.ranked, key=lambda c: c.seconds) and all(c.grid.x == c.grid.y for c in others)
    some = next(c for c in made.ranked if c.algorithm == "tesseract")
    assert f"{some.grid} tesseract: products take" in made.why(some) and "blocks of" in made.why(some)
    for changes, why in (
        (replace(asked, zero=1), "no ZeRO"),
        (replace(asked, batch_tokens=2048 * 8), "z*data*x=16 is more"),
    ):
        left = consider(replace(changes, gpus=256), Grid(16, 16, 1))
        assert why in left.reason
    convolutions = consider(replace(asked, workload=readers.read("unet-250m")), Grid(2, 2, 1, 8192))
    assert "no convolutions" in convolutions.reason
    with pytest.raises(ValueError, match="algorithms="):
        replace(asked, algorithms=("cannon",))
    with pytest.raises(ValueError, match="6 GPUs have no grid for tesseract, which needs x = y above 1"):
        planner.plan(replace(asked, gpus=6, algorithms=("tesseract",)))


def test_experts_take_as_long_as_their_products_written_out():
    """Eight experts of a block are eight layers with a quarter of the rows each; the planner ranks their grids."""
    read, on, grid = readers.read("Mixtral-8x7B-v0.1"), machine.load("dgx-h100"), Grid(4, 4, 2, 16)
    asked = planner.Request(read, on, grid.world_size, 2**22, algorithms=("tesseract",))
    found = consider(asked, grid)
    assert not found.reason and sum(layer.experts == 8 for block in read.blocks for layer in block.layers) > 0
    each = (
        replace(block, layers=tuple(replace(one, experts=1) for one in block.layers for _ in range(one.experts)))
        for block in read.blocks
    )
    alone = model.predict(replace(read, blocks=tuple(each)), grid, on, found.run)
    for name in ("total", "compute", "exposed_total", "optimizer"):
        assert getattr(found.time, name) == pytest.approx(getattr(alone, name), rel=1e-9)


def test_memory_is_that_of_blocks_over_x_and_y():
    asked = planner.Request(readers.read("gpt-5b"), machine.load("dgx-a100"), 16, 2**18, algorithms=("tesseract",))
    flat, deep = (consider(asked, Grid(2, 2, z, 4 // z)) for z in (1, 2))
    assert flat.memory == deep.memory  # the depth holds copies, as data ranks do
    held = consider(asked, Grid(4, 4, 1)).memory
    assert held.weights == pytest.approx(flat.memory.weights / 4)
    assert isinstance(flat.time, model.StepTime)


def test_the_command_names_both():
    call = "plan --model Llama-2-7b-hf --gpus 16 --machine meluxina --batch-tokens 65536 --seq 4096 --algorithm"
    done = CliRunner().invoke(cli.app, [*call.split(), "all", "--explain", "2x2x2x2"])
    assert done.exit_code == 0 and "2x2x2x2 tesseract: products take" in done.output
    done = CliRunner().invoke(cli.app, [*call.split(), "tesseract", "--json", "-"])
    ranked = json.loads(done.output)["ranked"]
    assert {row["algorithm"] for row in ranked} == {"tesseract"}
    assert f"--grid {ranked[0]['grid']} " in ranked[0]["command"] and "--algorithm tesseract" in ranked[0]["command"]
    done = CliRunner().invoke(cli.app, [*call.split(), "cannon"])
    assert done.exit_code != 0 and "is not known" in str(done.exception) + done.output
