"""The predictions of bench.roofline against sums done by hand."""

from dataclasses import replace

import pytest
import torch

from axo_kernels.gemm.layout import Product
from axo_kernels.gemm.tiles import HOPPER, Config
from bench import roofline

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
    assert roofline.predict(product, TILE, instructions=1000).bound == "issue"
    few = Product("TN", 512, 512, 65536, torch.bfloat16)
    assert roofline.predict(few, replace(TILE, split_k=8)).share > 4 * roofline.predict(few, TILE).share


def test_the_command_prints_each_default(capsys):
    assert roofline.main(["--grid", "4x2x1", "--rows", "2048"]) == 0
    told = capsys.readouterr().out
    assert told.count("% of the peak predicted") == 1 + len(HOPPER) and "NT 2048x" in told
