"""Kernels compiled for five GPUs without having one, and the assembly read for what must be in it."""

import pytest
import torch

from axo_kernels.assembly import spin_loop
from axo_kernels.compile_matrix import cases, compile_all
from axo_kernels.layout import LAYOUTS, Product
from axo_kernels.tiles import TARGETS, Config, candidates, default_config, estimate


def passed(matrix):
    outcomes = list(compile_all(matrix))
    assert len(outcomes) == len(matrix) > 0
    wrong = [f"{outcome.name}: {'; '.join(outcome.wrong)}" for outcome in outcomes if outcome.wrong]
    assert not wrong, "\n".join(wrong)
    return outcomes


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_sample_of_the_matrix():
    """bf16, default configurations: the forward layout of every kernel on every target (all of it: `.ci/run`)."""
    matrix = [
        case
        for case in cases(dtypes=["bf16"])
        if case.layout not in ("NN", "TN") or (case.layout == "TN" and case.kernel == "accumulate")
    ]
    outcomes = passed(matrix)
    assert {case.target for case in matrix} == set(TARGETS)
    assert {case.kernel for case in matrix} == {"matmul", "accumulate", "epilogue", "wait", "signal", "flags"}
    plain = [outcome for outcome in outcomes if " matmul " in outcome.name]
    assert all(outcome.spilled == 0 for outcome in plain), [(o.name, o.spilled) for o in plain if o.spilled]


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_all_default_configurations():
    matrix = cases()
    outcomes = passed(matrix)
    assert {(case.layout, case.dtype, case.target) for case in matrix if case.kernel == "matmul"} == {
        (layout, dtype, target) for layout in LAYOUTS for dtype in ("bf16", "fp16", "fp32") for target in TARGETS
    }
    print(f"{len(outcomes)} cases, {sum(outcome.seconds for outcome in outcomes):.0f} s of compilation")


def test_a_loop_is_recognised():
    loop = "$L1:\n ld.global.sys.acquire.b32 %r1, [x];\n setp.lt.s32 %p, %r1, 0;\n @%p bra $L1;\n"
    assert spin_loop(loop, r"ld\.global\.sys\.acquire")
    assert not spin_loop(loop.replace("bra $L1", "bra $L2") + "$L2:\n", r"ld\.global\.sys\.acquire")
    assert not spin_loop("ld.global.sys.acquire.b32 %r1, [x];\n" + loop.replace("acquire", "relaxed"), "acquire")


@pytest.mark.parametrize("arch", TARGETS)
def test_candidates_fit_and_are_ordered(arch):
    target = TARGETS[arch]
    for layout in LAYOUTS:
        product = Product(layout, 4096, 4096, 4096, torch.bfloat16)
        found = candidates(target, product, target.descriptors)
        assert len(found) >= 6 and len(set(found)) == len(found)
        assert all(config.fits(target, torch.bfloat16) for config in found)
        shares = [estimate(config, product, target) for config in found]
        assert shares == sorted(shares, reverse=True) and 0 < shares[-1] <= shares[0] <= 1


@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("purpose", ["plain", "wide", "fused"])
def test_defaults_satisfy_the_predicate(arch, purpose):
    target = TARGETS[arch]
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for descriptors in (True, False) if target.descriptors else (False,):
            config = default_config(target, dtype, descriptors, purpose)
            # the result is as wide as the operands, or fp32 where a kernel accumulates
            out_dtype = torch.float32 if purpose == "wide" else dtype
            assert config.fits(target, dtype, out_dtype, purpose == "wide"), config


def test_the_predicate_refuses():
    hopper = TARGETS["sm_90"]
    for config in (
        Config(96, 128, 64),  # not a power of two
        Config(8, 128, 64),  # under the matrix unit's tile
        Config(128, 256, 64, stages=6),  # shared memory
        Config(256, 256, 32, warps=4),  # registers
        Config(128, 128, 8),  # steps shorter than 32 bytes
    ):
        assert not config.fits(hopper, torch.bfloat16), config
    assert not Config(64, 64, 32, descriptors=True).fits(TARGETS["sm_80"], torch.bfloat16)
