"""Kernels compiled for six GPUs without having one, and the assembly read for what must be in it."""

import itertools
import json
import random
from pathlib import Path

import pytest
import torch

from axo_kernels import adapt
from axo_kernels import device as devices
from axo_kernels.fused.strategies import FusedPlan
from axo_kernels.gemm.layout import LAYOUTS, Product
from axo_kernels.gemm.tiles import (
    PURPOSES,
    TARGETS,
    TRIED,
    Config,
    Target,
    candidates,
    cut_to_fit,
    default_config,
    estimate,
    fused_candidates,
    purpose_of,
)
from axo_kernels.tune import choice as choice_module
from axo_kernels.tune.choice import plain_choices
from axo_kernels.tune.model_shapes import MODELS, layers
from bench.tools import compile_matrix
from bench.tools.assembly import spin_loop
from bench.tools.compile_matrix import cases, compile_all

ROOT = Path(__file__).resolve().parents[3]
# what the compiler made of a case
MADE = ("registers", "shared", "occupancy", "spilled", "loop", "under_way", "tiles", "instructions")
MULTIPLY = ("matmul", "split")  # the kernels of a product that nothing is fused with


def committed():
    """The lines of the committed table by name, and the version of Triton that made it."""
    table = ROOT / "bench/results/compile_matrix_defaults.jsonl"
    summary, *lines = map(json.loads, table.read_text(encoding="utf-8").splitlines())
    return {line["name"]: line for line in lines}, summary["triton"]


def passed(matrix, workers=2):
    """The outcomes of defaults: nothing wrong, and what the committed table says, exactly, where Triton is the version
    that has made it: that makes the same code of the same sources. Another version's code has to pass the checks."""
    outcomes = list(compile_all(matrix, workers))
    assert len(outcomes) == len(matrix) > 0
    wrong = [f"{outcome.name}: {'; '.join(outcome.wrong)}" for outcome in outcomes if outcome.wrong]
    assert not wrong, "\n".join(wrong)
    lines, triton = committed()
    if compile_matrix._identity()["triton"] != triton:
        return outcomes
    for outcome in outcomes:
        found = {name: getattr(outcome, name) for name in MADE}
        assert found == {name: lines[outcome.name][name] for name in MADE}, outcome.name
    return outcomes


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_sample_of_the_matrix():
    """bf16, default configurations: every kernel once for one vendor, each form of loads of its product, both vendors'
    plain products. The others are compiled where kernels change: the committed table is of this code."""
    loads = ("tma", "ptr", "shared", "pingpong")
    matrix, taken = [], set()
    for case in cases(dtypes=["bf16"], targets=["sm_90", "gfx942"]):
        form = next((each for each in loads if f" {each} " in case.name), "") if case.kernel == "matmul" else ""
        layout = "TN" if case.kernel == "accumulate" else "NT"
        fits = case.layout in ("", layout) and (case.target == "sm_90" or case.kernel == "matmul")
        if fits and (case.target, case.kernel, form) not in taken:
            taken.add((case.target, case.kernel, form))
            matrix.append(case)
    outcomes = passed(matrix, workers=1)  # each imports torch and Triton anew
    kernels = ("accumulate", "combine", "epilogue", "wait", "signal", "keep", "flags", "goldfish", "push", "sum")
    products = {("sm_90", "matmul", form) for form in loads} | {("gfx942", "matmul", "ptr")}
    assert taken == {("sm_90", kernel, "") for kernel in kernels} | products
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


def test_the_committed_table_is_of_this_code():
    """Else: make compile-defaults ARGS="--out bench/results/compile_matrix_defaults.jsonl --table docs/compiled.md"."""
    table = ROOT / "bench/results/compile_matrix_defaults.jsonl"
    summary, *lines = map(json.loads, table.read_text(encoding="utf-8").splitlines())
    assert summary["sources"] == compile_matrix.sources()
    assert (summary["cases"], summary["wrong"]) == (len(lines), 0)
    assert [line["name"] for line in lines] == [case.name for case in cases()]
    page = compile_matrix.page(cases(), {line["name"]: line for line in lines})
    assert (ROOT / "docs/compiled.md").read_text(encoding="utf-8") == page
    known = {line["name"]: line for line in lines}
    for line in lines:  # what the page says of fp16
        twin = known[line["name"].replace(" fp16 ", " bf16 ")]
        assert [line[name] for name in ("shared", "spilled", "occupancy")] == [
            twin[name] for name in ("shared", "spilled", "occupancy")
        ]
        assert abs(line["registers"] - twin["registers"]) <= (4 if line["name"].startswith("sm_") else 24)


@pytest.mark.slow
@pytest.mark.parametrize("arch", TARGETS)
def test_what_the_tuner_may_choose_is_in_the_matrix(arch, monkeypatch):
    """Oracle: the tuner's own list for products drawn from the papers' layers and from small ones, in each layout, and
    for sizes that no descriptor describes. ``make compile-matrix`` says that it compiles all of these."""
    monkeypatch.setattr(choice_module.devices, "runs_triton", lambda device: True)
    monkeypatch.setattr(choice_module.devices, "target_of", lambda device: TARGETS[arch])
    drawn = random.Random(17)
    known = {(case.layout, case.dtype, case.config) for case in cases(True, targets=[arch]) if case.kernel in MULTIPLY}
    missing, pieces = set(), set()
    for _ in range(60):
        model, x, y = (drawn.choice(each) for each in (list(MODELS), compile_matrix.CUT, compile_matrix.CUT))
        large = drawn.choice(layers(model, (x, y, 1), rows=drawn.choice(compile_matrix.TOKENS)))
        sides = [drawn.choice(each) for each in (compile_matrix.SMALL, compile_matrix.SMALL, compile_matrix.DEPTHS)]
        for m, n, k in ((large.m, large.n, large.k), sides, (sides[0], sides[1], sides[2] + 1)):
            for dtype in ("bf16", "fp32"):
                product = Product(drawn.choice(LAYOUTS), m, n, k, compile_matrix.DTYPES[dtype])
                for choice in plain_choices(product, torch.device("cuda", 0), TRIED):
                    if choice.config is not None:
                        pieces.add(choice.config.split_k)
                        if (product.layout, dtype, choice.config) not in known:
                            missing.add((product.name, choice.config.name))
    assert not missing, sorted(missing)
    assert pieces == {1, 2, 4, 8}


def test_words_do_not_make_the_table_old():
    code = 'import a\n\ndef f():\n    """Says."""\n    # why\n    return "#"  # what\n'
    same = '"""Head."""\nimport a\ndef f():\n    """Says\n    more."""\n    return "#"\n'
    assert compile_matrix._code(code) == compile_matrix._code(same) == 'import a\ndef f():\n    return "#"'


@pytest.mark.slow
@pytest.mark.parametrize(  # the first needs the most registers
    "activation", ["gelu", *(pytest.param(name, marks=pytest.mark.soak) for name in ("gelu_tanh", "silu"))]
)
def test_activations_spill_no_registers(activation, monkeypatch, tmp_path):
    """With a bias, in the tiles that a product with this activation takes by default."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    plain = compile_matrix._arguments

    def arguments(case, kernel_name):
        constants, types = plain(case, kernel_name)
        return constants | {"ACTIVATION": activation, "HAS_BIAS": True}, types

    monkeypatch.setattr(compile_matrix, "_arguments", arguments)
    for arch in ("sm_90", "gfx942"):
        target = TARGETS[arch]
        purpose = purpose_of(target, False, activation)
        config = default_config(target, torch.bfloat16, target.descriptors, purpose)
        found = compile_matrix.compile_case(compile_matrix.Case("matmul", "NT", "bf16", arch, config))
        assert not found.wrong and found.spilled == 0, (arch, config.name, found.spilled, found.wrong)


def test_a_loop_is_recognised():
    loop = "$L1:\n ld.global.sys.acquire.b32 %r1, [x];\n setp.lt.s32 %p, %r1, 0;\n @%p bra $L1;\n"
    assert spin_loop(loop, r"ld\.global\.sys\.acquire")
    assert not spin_loop(loop.replace("bra $L1", "bra $L2") + "$L2:\n", r"ld\.global\.sys\.acquire")
    assert not spin_loop("ld.global.sys.acquire.b32 %r1, [x];\n" + loop.replace("acquire", "relaxed"), "acquire")


@pytest.mark.parametrize("arch", TARGETS)
def test_candidates_fit_and_are_ordered(arch):
    target = TARGETS[arch]
    sizes = ((4096, 4096, 4096), (16, 16, 1024), (512, 512, 4096), (16, 1024, 16384))  # the last three in pieces of K
    for layout, mnk in itertools.product(LAYOUTS, sizes):
        product = Product(layout, *mnk, torch.bfloat16)
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


# Units and shared memory from the vendors' documents: RTX 3090, L4 and RTX 4090, RTX 5090, RX 7900.
OTHERS = (
    Target("sm_86", 82, 101_376),
    Target("sm_89", 128, 101_376),
    Target("sm_120", 170, 101_376),
    Target("gfx1100", 96, 65_536),
)


@pytest.mark.parametrize("target", OTHERS, ids=lambda target: target.arch)
def test_defaults_are_cut_for_devices_with_less_memory(target):
    """Without it the plain call fails there: "configuration ... does not fit sm_89"."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for out_dtype in (dtype, torch.float32):
            for descriptors in (True, False) if target.descriptors else (False,):
                for purpose in PURPOSES:
                    wide = purpose == "wide"
                    default = default_config(target, dtype, descriptors, purpose)
                    config = cut_to_fit(default, target, dtype, out_dtype, wide)
                    assert config.fits(target, dtype, out_dtype, wide), config
                    assert min(config.block_m, config.block_n) >= 64, "what was cut is stages and depth first"
        product = Product("NT", 4096, 4096, 4096, dtype)
        found = fused_candidates(target, product, target.descriptors)
        assert found and all(config.fits(target, dtype) for config in found)
    for own in TARGETS.values():  # what is compiled in the matrix stays what runs
        assert all(
            cut_to_fit(config, own, torch.bfloat16) is config
            for config in [default_config(own, torch.bfloat16, own.descriptors, purpose) for purpose in PURPOSES]
        )


@pytest.mark.parametrize("arch, served", [("sm_70", False), ("sm_75", False), ("sm_80", True), ("gfx90a", True)])
def test_a_device_that_the_kernels_do_not_serve(monkeypatch, arch, served):
    """Such a GPU gets the vendor library; who asks for a kernel is told what would work."""
    cuda, alone = torch.device("cuda", 0), adapt(None)
    monkeypatch.setattr(devices, "target_of", lambda device: Target(arch, 80, 98_304))
    monkeypatch.setattr(devices, "gemm_kernels", lambda: torch)
    monkeypatch.setattr(devices, "interpreted", lambda: False)
    assert devices.runs_triton(cuda) == served
    if served:
        FusedPlan("signal", 2).check("matmul_all_reduce", cuda, alone)
        return
    with pytest.raises(
        ValueError, match=r"signal' needs triton and a GPU that it serves \(sm_80 or later.*use 'split'"
    ):
        FusedPlan("signal", 2).check("matmul_all_reduce", cuda, alone)
    product = Product("NT", 4096, 4096, 4096, torch.float16)
    assert {each.backend for each in plain_choices(product, cuda, 8)} == {"vendor"}


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
