"""The predictions of bench.roofline against sums done by hand."""

import json
from dataclasses import replace

import pytest
import torch
import triton

from axo_kernels.gemm.layout import Product
from axo_kernels.gemm.tiles import HOPPER, Config
from axo_kernels.tune import choice
from bench import gemm, roofline
from bench.lib.table import read_rows
from bench.tools.compile_matrix import cases

TILE = Config(128, 256, 64, warps=8, stages=3, descriptors=True, parts=2)


def test_one_wave_of_whole_tiles():
    """132 tiles of 128 x 256, 64 steps of K: each step 128 * 256 * 64 / 2,048 = 1,024 cycles of products, the longest;
    an epilogue of 2 * 65,536 / 128 + 600 cycles, and 1,000 until the first data."""
    found = roofline.predict(Product("NT", 12 * 128, 11 * 256, 4096, torch.bfloat16), TILE)
    assert (found.tiles, found.waves, found.bound, found.terms["products"]) == (132, 1.0, "products", 1024.0)
    assert found.terms["L2"] == (128 + 256) * 64 * 2 / 64 and found.terms["shared memory"] == (128 + 512) * 64 * 2 / 128
    assert found.share == pytest.approx(64 * 1024 / (64 * 1024 + 1024 + 600 + 1000)) and found.tail == 0
    assert found.seconds == pytest.approx((64 * 1024 + 2624) / 1.83e9)


def test_what_costs_shows():
    product = Product("NT", 12 * 128, 11 * 256, 4096, torch.bfloat16)
    plain = roofline.predict(product, TILE)
    assert roofline.predict(replace(product, k=8192), TILE).share > plain.share, "fewer epilogues a flop"
    longer = roofline.predict(replace(product, m=12 * 128 + 1), TILE)
    assert longer.waves > 1 and longer.tail > 0.4 and longer.share < 0.6, "a second wave for 11 tiles"
    two = replace(product, m=24 * 128)
    assert roofline.predict(two, HOPPER[0]).share > roofline.predict(two, TILE).share, (
        "one group stores while the other multiplies"
    )
    small = roofline.predict(product, Config(64, 64, 64, warps=4, descriptors=True))
    assert small.bound == "L2" and small.share < 0.7
    assert roofline.predict(product, TILE, roofline.Count(1000)).bound == "issue"
    few = Product("TN", 512, 512, 65536, torch.bfloat16)
    assert roofline.predict(few, replace(TILE, split_k=8)).share > 4 * roofline.predict(few, TILE).share


def test_the_command_prints_each_default(capsys):
    assert roofline.main(["--grid", "4x2x1", "--rows", "2048"]) == 0
    told = capsys.readouterr().out
    assert told.count("% of the peak predicted") == 2 * (1 + len(HOPPER) // 2) + 2 and "NT 2048x" in told


def test_kernels_that_add_wait_or_signal():
    """Oracle: sums by hand. Adding moves four times 4 bytes an element through shared memory, after a wait for memory;
    a signalled product has 8 multiprocessors fewer, and at each tile the wait that the plain one has once."""
    product = Product("TN", 12 * 128, 11 * 256, 4096, torch.bfloat16)
    added = roofline.predict(product, TILE, kernel="accumulate")
    cycles = 64 * 1024 + 4 * 4 * 128 * 256 / 128 + 600 + 1000
    assert added.share == pytest.approx(64 * 1024 / (cycles + 1000))
    signalled = roofline.predict(replace(product, m=31 * 128, n=8 * 256), TILE, kernel="signal")
    assert (signalled.tiles, signalled.waves) == (248, 2.0)
    per_tile = 64 * 1024 + 1024 + 600 + 1000
    assert signalled.share == pytest.approx(248 / 132 * 64 * 1024 / (2 * per_tile + 1000))
    short = roofline.predict(replace(product, k=64), TILE, kernel="accumulate")
    assert short.seconds == pytest.approx(8 * product.m * product.n / 3.35e12), (
        "the gradient's bytes, whatever overlaps"
    )
    wide = roofline.predict(product, TILE, roofline.Count(0, 2000))
    assert wide.share == pytest.approx(64 * 1024 / (64 * 1024 + 4000 + 600 + 1000)), "8 warps on 4 schedulers"


SASS = """
.L_x_1:
        /*0010*/                   MOV R1, R2 ;
        /*0020*/               @P0 BRA `(.L_x_2) ;
        /*0030*/                   MOV R1, R2 ;
        /*0040*/                   MOV R1, R2 ;
.L_x_2:
        /*0050*/                   HGMMA.64x256x16.F32.BF16 R24, gdesc[UR8], R24 ;
        /*0060*/                   HGMMA.64x256x16.F32.BF16 R24, gdesc[UR8], R24, gsb0 ;
        /*0070*/              @!P1 BRA `(.L_x_9) ;
        /*0080*/               @P2 BRA `(.L_x_3) ;
        /*0090*/                   UTMASTG.2D [UR36], [UR6] ;
.L_x_3:
        /*00a0*/                   MOV R1, R2 ;
        /*00b0*/               @P0 BRA `(.L_x_1) ;
"""


def test_the_shortest_way_through_a_loop_is_a_step():
    assert roofline.shortest_step(SASS) == roofline.Count(8, 3)
    assert roofline.shortest_step("no loop") == roofline.Count(0, 0)


@pytest.mark.slow
def test_the_committed_counts_are_those_of_today(monkeypatch, tmp_path):
    """One of the four kernels, compiled again: exactly by the Triton that has counted; by another, nearly."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    known = roofline.known_counts()
    (found,) = roofline.counted(1).items()
    kernel, count = found
    summary = json.loads(roofline.COMPILED.read_text().splitlines()[0])
    near = 0.0 if triton.__version__ == summary["triton"] else 0.05
    assert count.step > 0 and count.step == pytest.approx(known[kernel].step, rel=near)
    assert count.tile == pytest.approx(known[kernel].tile, rel=near)


def test_the_committed_predictions_are_those_of_today():
    rows = [row for row in read_rows(roofline.COUNTED) if "share_pct" in row]
    assert all(row["issue_cycles"] > 0 for row in rows)
    of_models = list(roofline.products("1x1x1", 4096)) + list(roofline.products("4x2x1", 2048))
    known = roofline.known_counts()
    expected = [
        (product.name, kernel, config.name, round(100 * roofline.predicted(product, kernel, config, known).share, 3))
        for product in of_models
        for kernel, config in roofline.ways(product)
    ]
    assert [(row["product"], row["kernel"], row["config"], row["share_pct"]) for row in rows] == expected, (
        "write bench/results/roofline.jsonl anew, as docs/roofline.md says"
    )


def test_what_is_left_out_is_what_these_layers_do_not_take():
    """Of Hopper's defaults in bf16 the compile matrix has these kernels; the head of bench.roofline names the rest.
    Descriptors describe every product of the six models, whole and as a grid cuts them."""
    compiled = {case.kernel for case in cases(dtypes=("bf16",), targets=("sm_90",))}
    of_models = [*roofline.products("1x1x1", 4096), *roofline.products("4x2x1", 2048)]
    assert all(choice._described(product) for product in of_models)
    predicted = {kernel for product in of_models for kernel, _ in roofline.ways(product)}
    left_out = compiled - predicted - {"split"}
    assert left_out == {"epilogue", "combine", "flags", "goldfish"}
    assert all(word in roofline.__doc__ for word in (*left_out, "pointers", "TF32"))


def test_a_measurement_stands_beside_its_prediction(monkeypatch):
    product, gpu = Product("NT", 4096, 12288, 4096, torch.bfloat16), torch.device("cuda")
    monkeypatch.setattr(gemm, "_name", lambda _: "NVIDIA H100 80GB HBM3")
    rows = [row for row in read_rows(roofline.COUNTED) if row.get("product") == product.name]
    best = max(row["share_pct"] for row in rows if row["kernel"] == "matmul")
    assert gemm._predicted(product, gpu) == pytest.approx(best, abs=1e-3)
    assert gemm._predicted(replace(product, dtype=torch.float32), gpu) is None
    assert gemm._predicted(product, torch.device("cpu")) is None
    for other in ("NVIDIA A100", "NVIDIA H100 PCIe", "NVIDIA H100 NVL"):
        monkeypatch.setattr(gemm, "_name", lambda _, other=other: other)
        assert gemm._predicted(product, gpu) is None, other
