"""The kernels of the cross-entropy, in Triton's interpreter: against torch in fp64; for shards, against the chunks."""

from __future__ import annotations

import itertools
import math
import re

import pytest
import torch
import torch.nn.functional as F

import axo
from axo.nn import loss as module
from axo_kernels.device import runs_triton

pytest.importorskip("triton", reason="Triton is not installed")

# fp32: rounding of sums of up to 9,000 terms of size 1; bf16: rounding of the gradient.
LIMITS = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


class _Calls:
    """The kernels, counted."""

    def __init__(self) -> None:
        self.count, self._kernels = 0, module._kernels()

    def __getattr__(self, name: str):
        self.count += 1
        return getattr(self._kernels, name)


def _against_torch() -> None:
    assert runs_triton(torch.device("cpu"))
    calls = _Calls()
    module._kernels = lambda: calls
    comms = axo.connect("1x1x1x1")
    generator = torch.Generator().manual_seed(2)
    cases = itertools.product((1, 37, 4096, 9001), LIMITS, (0.0, 0.1), (False, True))
    for columns, dtype, smoothing, inplace in cases:
        # Cut out of more, as (B, T) and (B, T, V) without their last position are.
        target = torch.randint(columns, (2, 4), generator=generator)[:, :-1]
        target[1, 1] = -100
        logits = (4 * torch.randn(2, 4, columns, generator=generator)).to(dtype)[:, :-1]
        if dtype != torch.float16:  # far from 0, on both sides: the peak must come off first
            logits[0, 1] += 300
            logits[0, 2] -= 400
        if not smoothing and columns > 4096:  # nothing finite in the first block, and what comes is far down
            logits[1, 0] = (logits[1, 0].float() - 200).to(dtype)
            logits[1, 0, :4096] = -torch.inf
            target[1, 0] = columns - 1
        logits[1, 1, 0] = torch.inf  # of an ignored row: must not leak
        exact = logits.double().requires_grad_()
        kept = exact.masked_fill((target == -100)[..., None], 0.0)
        expected = F.cross_entropy(kept.reshape(-1, columns), target.reshape(-1), label_smoothing=smoothing)
        expected.backward()
        whole = F.pad(logits, (0, 0, 0, 1)).requires_grad_()
        given = whole * 1
        options = {"label_smoothing": smoothing, "inplace_backward": inplace}
        loss = axo.nn.cross_entropy(given[:, :-1], target, comms=comms, **options)
        before = calls.count
        loss.backward()
        assert calls.count == before + 1 and before > 0, "a kernel each"
        what = (columns, dtype, smoothing, inplace)
        assert abs(loss.item() - expected.item()) <= 2e-6 * max(1.0, expected.item()), what
        error = (whole.grad[:, :-1].double() - exact.grad).abs().max().item()
        assert error <= LIMITS[dtype] / 5, (what, error)  # a mean over five rows
        assert not whole.grad[1, 1].any()
    logits, target = torch.randn(5, 37, generator=generator), torch.randint(37, (10,), generator=generator)[::2]
    found = axo.nn.cross_entropy(logits, target, comms=comms)
    assert abs(found - F.cross_entropy(logits, target)) < 2e-6, "targets at a stride"
    wide = torch.zeros(2, 5, dtype=torch.float64, requires_grad=True)
    before = calls.count
    axo.nn.cross_entropy(wide, torch.zeros(2, dtype=torch.int64), comms=comms).backward()
    assert calls.count == before, "fp64 is not for the kernels"
    comms.close()


class _Options:
    """Of the second of three ranks; padding from column 24 on of its 30."""

    low, real, width, classes, ignore_index = 30, 24, 30, 54, -100

    def __init__(self, smoothing: float) -> None:
        self.smoothing = smoothing


def _against_chunks() -> None:
    """A shard's statistics and gradient, with targets elsewhere, rows of -inf and strides: those of the chunks."""
    generator = torch.Generator().manual_seed(3)
    for dtype, smoothing, block in itertools.product(LIMITS, (0.0, 0.2), (8, 16, 64)):
        module._BLOCK = block
        options = _Options(smoothing)
        logits = (5 * torch.randn(40, 7, generator=generator)).to(dtype).t()[:, :30].contiguous()
        logits = torch.cat([logits, logits], 1)[:, :30]  # a row stride of its own
        if not smoothing:
            logits[2, :20] = -torch.inf
            logits[3] = -torch.inf
        ids = torch.tensor([0, 31, 53, 30, -100, 60, 40])
        peak = torch.linspace(5, 20, 7)
        total = torch.linspace(1, 90, 7)
        scale = torch.tensor([1.0, -2.0, 0.5, 0.0, 0.0, 1.0, 3.0])
        found = {}
        for way in ("kernels", "chunks"):
            module._rows_for_kernels = _ROWS if way == "kernels" else lambda tensor: None
            own, sums = torch.full((7,), -torch.inf), torch.zeros(3 if smoothing else 2, 7)
            module._statistics(logits, ids, own, sums, options)
            grad = torch.full((7, 30), 9.0, dtype=dtype)
            module.logits_gradient(logits, grad, ids, peak, total, scale, options)
            found[way] = own, sums, grad
        for kernel, chunks in zip(found["kernels"], found["chunks"], strict=True):
            assert torch.isfinite(kernel).equal(torch.isfinite(chunks))
            torch.testing.assert_close(kernel, chunks, rtol=2e-6 if kernel.dtype == torch.float32 else 8e-3, atol=2e-6)
        assert not found["kernels"][2][:, 24:].any() and math.isinf(found["kernels"][0].min()) != bool(smoothing)


_ROWS = module._rows_for_kernels


def test_a_loss_is_torchs(interpreter):
    interpreter.run(_against_torch)


def test_a_shard_has_what_the_chunks_give(interpreter):
    interpreter.run(_against_chunks)


@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
@pytest.mark.parametrize("name", ["row_statistics", "row_gradient"])
def test_compiled_for_a_gpu(name, arch, tmp_path, monkeypatch):
    """Nothing spilled, and each access to the logits and the gradient of sixteen bytes."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from axo.nn import loss_kernels
    from axo_kernels.gemm.tiles import TARGETS
    from bench.tools.compile_matrix import _resources

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel, target = getattr(loss_kernels, name), TARGETS[arch]
    types = {"logits": "*bf16", "out": "*bf16", "ids": "*i64", "sure": "fp32", "even": "fp32"}
    types |= dict.fromkeys(("peak", "sums", "total", "scale"), "*fp32")
    constants = {"SMOOTHING": True, "BLOCK": 4096}
    signature = {each: "constexpr" if each in constants else types.get(each, "i32") for each in kernel.arg_names}
    divisible = {"logits", "out", "ids", "peak", "sums", "total", "scale", "real", "width"}
    divisible |= {"outer_stride", "row_stride", "out_outer_stride", "out_row_stride"}
    hints = {(i,): [["tt.divisibility", 16]] for i, each in enumerate(kernel.arg_names) if each in divisible}
    source = ASTSource(kernel, signature, {each: constants[each] for each in signature if each in constants}, hints)
    machine = GPUTarget("cuda" if target.nvidia else "hip", int(arch[3:]) if target.nvidia else arch, target.warp_size)
    compiled = triton.compile(source, target=machine, options={"num_warps": 8})
    registers, spilled = _resources(compiled, target)
    assert spilled == 0 < registers <= 128
    text = compiled.asm["ptx" if target.nvidia else "amdgcn"]
    wide = r"ld\.global\S*\.v4\.b32" if target.nvidia else r"(global|buffer)_load_dwordx4"
    assert len(re.findall(wide, text)) >= 4096 // (8 * 8 * target.warp_size)  # 8 warps, 8 columns a load
    if name == "row_gradient":
        stored = r"st\.global\S*\.v4\.b32" if target.nvidia else r"(global|buffer)_store_dwordx4"
        assert re.findall(stored, text) and not re.findall(r"st\.global\S*\.(b16|v2\.b16)", text)
