"""Products in fp8 against fp64 of what was rounded, and against the exact product within the formats' precision."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from axo_kernels.fused import fp8
from axo_kernels.fused.fp8 import all_gather_matmul_fp8, matmul_fp8, multiply, rounded
from axo_kernels.gemm.layout import LAYOUTS
from bench.lib.accuracy import matmul_reference
from bench.lib.simulated import SimulatedCommunicator

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# A number is off by half of its last bit at most, 2**-4 and 2**-3 of itself, and by 0.6 of that at a guess of its mean
# square; the errors of two operands add in squares, and a sum of independent products is off as much as one is.
FORWARD = 0.6 * 2**0.5 * 2**-4
BACKWARD = 0.6 * (2**-8 + 2**-6) ** 0.5


def error(got, expected):
    return ((got.double() - expected).norm() / expected.norm()).item()


def draw(*shape, seed=0):
    """Rows of very different size."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator) * 10 ** torch.linspace(-3, 3, shape[0])[:, None]


@pytest.mark.parametrize("dtype, bits", [(E4M3, 3), (E5M2, 2)])
@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_rounding_keeps_the_bits_of_the_format(dtype, bits, scaling):
    x = draw(9, 40)
    x[3] = 0.0
    found = rounded(x, dtype, scaling)
    assert found.data.dtype == dtype and found.scale.shape == (() if scaling == "tensor" else (9, 1))
    back = found.data.float() * found.scale
    off = (back - x).abs()
    smallest = found.scale * torch.finfo(dtype).smallest_normal  # below it, steps are equal
    assert (off <= 1.001 * 2.0 ** -(bits + 1) * torch.maximum(x.abs(), smallest)).all()
    largest = x.abs().amax() if scaling == "tensor" else x.abs().amax(1, keepdim=True)
    assert torch.equal(back.abs().amax(), x.abs().amax()) and not back[3].any()
    assert torch.allclose(found.scale * torch.finfo(dtype).max, largest.where(largest > 0, torch.finfo(dtype).max))
    with pytest.raises(ValueError, match="scaling='block'; use one of tensor, row"):
        rounded(x, dtype, "block")


@pytest.mark.parametrize("scaling", ["tensor", "row"])
@pytest.mark.parametrize("m, n, k", [(0, 4, 8), (4, 0, 8), (4, 4, 0)])
def test_products_of_nothing_are_zeros(m, n, k, scaling):
    """As of a rank that has no rows."""
    a, b = torch.randn(m, k, requires_grad=True), torch.randn(n, k, requires_grad=True)
    out = matmul_fp8(a, b, "NT", scaling=scaling)
    out.sum().backward()
    for got, shape in ((out, (m, n)), (a.grad, (m, k)), (b.grad, (n, k))):
        assert torch.equal(got, torch.zeros(shape))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_products_and_gradients(layout):
    m, n, k = 48, 32, 256
    a = torch.randn(k, m) if layout == "TN" else torch.randn(m, k)
    b = torch.randn(n, k) if layout == "NT" else torch.randn(k, n)
    exact, grad = matmul_reference(a, b, layout), torch.randn(m, n)
    for scaling in ("tensor", "row"):
        x, y = a.clone().requires_grad_(), b.clone().requires_grad_()
        out = matmul_fp8(x, y, layout, scaling=scaling)
        out.backward(grad)
        assert out.dtype == a.dtype and 0.01 < error(out.detach(), exact) < FORWARD
        left, right = (t.double().requires_grad_() for t in (a, b))
        exact_left, exact_right = (left.T if layout == "TN" else left), (right.T if layout == "NT" else right)
        (exact_left @ exact_right).backward(grad.double())
        assert error(x.grad, left.grad) < BACKWARD and error(y.grad, right.grad) < BACKWARD
    assert matmul_fp8(a.bfloat16(), b.bfloat16(), layout).dtype == torch.bfloat16


def test_the_product_is_that_of_what_was_rounded():
    a, b = rounded(draw(20, 64), E4M3, "row", 1), rounded(draw(24, 64).T, E5M2, "row", 0)
    expected = (a.data.double() * a.scale) @ (b.data.double() * b.scale)
    assert error(multiply(a, b, torch.float32), expected) < 1e-6  # fp32 sums of 64 exact products


def test_a_scale_for_each_row_keeps_small_rows():
    a, b = draw(16, 64), torch.randn(32, 64)
    exact = matmul_reference(a, b, "NT")
    by_row, by_tensor = (matmul_fp8(a, b, scaling=scaling) for scaling in ("row", "tensor"))
    assert error(by_row[0], exact[0]) < 2 * FORWARD < error(by_tensor[0], exact[0])


@pytest.mark.parametrize(
    "arch, product, fnuz", [("gfx90a", False, False), ("gfx942", True, True), ("gfx950", True, False)]
)
def test_fp8_of_amd(monkeypatch, arch, product, fnuz):
    """Oracle: torch's list of devices for _scaled_mm (with ROCm 7); MI350 has the formats of everybody else."""
    monkeypatch.setattr(torch.version, "hip", "7.2")
    name = SimpleNamespace(gcnArchName=f"{arch}:sramecc+:xnack-")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: name)
    cuda = torch.device("cuda", 0)
    assert fp8.runs(cuda) == product
    assert fp8.formats(cuda) == (
        (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz) if fnuz else (torch.float8_e4m3fn, torch.float8_e5m2)
    )


def test_what_is_not_finite_shows():
    a, b = torch.randn(4, 16), torch.randn(8, 16)
    for bad in (float("inf"), float("nan")):
        a[1, 2] = bad
        out = matmul_fp8(a, b)
        assert out[1].isnan().all() and out[0].isfinite().all()
    assert torch.equal(matmul_fp8(torch.zeros(4, 16), b), torch.zeros(4, 8))
    with pytest.raises(ValueError, match="fold leading dims"):
        matmul_fp8(torch.ones(2, 3, 4), torch.ones(5, 4))


@pytest.mark.parametrize("dtype, bits", [(E4M3, 3), (E5M2, 2)])
@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_numbers_near_the_smallest_of_fp32_stay_numbers(dtype, bits, scaling):
    """Their scale, a largest magnitude over 448 or 57,344, would be 0. Oracle: the numbers themselves."""
    for largest in (1e-33, 1e-38, 1e-41, torch.finfo(torch.float32).smallest_normal, 2.0**-149):
        x = torch.tensor([[largest, 0.0], [-largest, largest / 2]])
        found = rounded(x, dtype, scaling)
        scale = found.scale.double()
        off = (found.data.double() * scale - x.double()).abs()
        smallest = scale * torch.finfo(dtype).smallest_normal  # below it, steps are equal
        assert (off <= 1.001 * 2.0 ** -(bits + 1) * torch.maximum(x.double().abs(), smallest)).all(), (largest, off)
        assert scale.min() > 1e-38


def test_one_confident_token_leaves_gradients_finite():
    """Logits 88 to 106 apart: their softmax has numbers of 1e-39 to 1e-46. Oracle: fp64."""
    for gap in range(84, 110):
        a, b = torch.eye(2, 16), torch.randn(16, 4, generator=torch.Generator().manual_seed(gap))
        for scaling in ("tensor", "row"):
            x, y = a.clone().requires_grad_(), b.clone().requires_grad_()
            logits = matmul_fp8(x, y, "NN", scaling=scaling)
            grad = torch.softmax(torch.tensor([[float(gap), 0, 0, 0]] * 2), -1)
            grad[:, 0] = 0  # the confident token's own is 1 - 1
            logits.backward(grad)
            assert x.grad.isfinite().all() and y.grad.isfinite().all(), (gap, scaling)
            expected = grad.double() @ b.double().T
            step = max(0.25 * grad.amax().double(), 2**-16 * torch.finfo(torch.float32).smallest_normal)
            assert ((x.grad - expected).abs() <= step * b.abs().sum(1)).all(), (gap, scaling)


def scaled_mm(left, right, left_scale, right_scale, *, out_dtype, use_fast_accum):
    """Refuses what torch._scaled_mm refuses on CUDA (aten's Blas.cpp, RowwiseScaledMM.cu)."""
    assert left.is_contiguous() and right.T.is_contiguous()
    assert not (left.shape[1] % 16 or right.shape[1] % 16)
    assert E5M2 != right.dtype or E5M2 != left.dtype
    shapes = tuple(left_scale.shape), tuple(right_scale.shape)
    assert shapes in (((), ()), ((len(left), 1), (1, right.shape[1])))
    if shapes != ((), ()):
        assert out_dtype == torch.bfloat16, "row-wise scaling gives bf16 only"
        assert right.dtype == E4M3, "with a scale a row the second operand must be e4m3"
        assert left_scale.is_contiguous() and right_scale.is_contiguous()
    return (left.double() @ right.double() * left_scale * right_scale).to(out_dtype)


@pytest.mark.parametrize("scaling", ["tensor", "row"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_packed_products_keep_to_the_rules_of_the_gpus_product(dtype, scaling, monkeypatch):
    """Shards packed apart, as from two ranks. The stand-in refuses what torch._scaled_mm refuses on CUDA."""
    shards = (1e-3 * torch.stack([draw(16, 64), 7 * draw(16, 64)])).to(dtype)
    packed = torch.empty(32, 64 + fp8.SCALE_BYTES, dtype=torch.uint8)
    for shard, into in zip(shards, packed.chunk(2), strict=True):
        fp8.pack(shard, into, scaling)
    a, grad = torch.randn(24, 64).to(dtype), torch.randn(24, 32).to(dtype)

    def products():
        out, back = fp8.multiply_packed(a, packed, scaling), fp8.multiply_grad_packed(grad, packed, scaling)
        assert out.dtype == back.dtype == dtype
        return out, back

    emulated = products()
    monkeypatch.setattr(fp8, "runs", lambda device: True)
    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    for got, expected in zip(products(), emulated, strict=True):
        assert error(got, expected.double()) < 2 * torch.finfo(dtype).eps
    assert fp8.multiply_packed(a[:0], packed, scaling).shape == (0, 32)
    assert not fp8.multiply_grad_packed(grad[:, :0], packed[:0], scaling).any()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_products_and_gradients_as_the_gpu_takes_them(monkeypatch, layout, dtype, scaling):
    """Oracle: the emulation, whose roundings are the same."""
    m, n, k = 48, 32, 64
    a = draw(*((k, m) if layout == "TN" else (m, k))).to(dtype)
    b, grad = torch.randn((n, k) if layout == "NT" else (k, n)).to(dtype), torch.randn(m, n).to(dtype)

    def products():
        x, y = a.clone().requires_grad_(), b.clone().requires_grad_()
        out = matmul_fp8(x, y, layout, scaling=scaling)
        out.backward(grad)
        return out.detach(), x.grad, y.grad

    emulated = products()
    monkeypatch.setattr(fp8, "runs", lambda device: True)
    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    for got, expected in zip(products(), emulated, strict=True):
        assert got.dtype == dtype and error(got, expected.double()) < 2 * torch.finfo(dtype).eps


class Bytes(SimulatedCommunicator):
    def __init__(self, rank=0):
        super().__init__(4, 1e15, torch.device("cpu"))
        self.rank, self.moved, self.calls = rank, 0, 0

    def _all_gather(self, out, tensor):
        self.moved += tensor.nbytes
        self.calls += 1
        return super()._all_gather(out, tensor)


def test_a_gathered_weight_travels_in_fp8():
    """Four ranks that hold the same rows: half of bf16's bytes, and 16 a row; gradients as of the sum."""
    comm, rows, k = Bytes(), 8, 128
    x, w, grad = torch.randn(24, k), draw(rows, k), torch.randn(24, 4 * rows)
    a, shard = x.clone().requires_grad_(), w.clone().requires_grad_()
    out = all_gather_matmul_fp8(a, shard, comm)
    assert comm.moved == rows * (k + 16)
    whole = w.double().repeat(4, 1)
    assert error(out.detach(), x.double() @ whole.T) < FORWARD
    out.backward(grad)
    assert error(a.grad, grad.double() @ whole) < BACKWARD
    mine = grad.double()[:, :rows].T @ x.double()  # the simulation keeps the first block, of as many ranks
    assert error(shard.grad, 4 * mine) < BACKWARD


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("as_the_gpu", [False, True])
def test_a_gather_in_chunks(rank, as_the_gpu, monkeypatch):
    """Oracle: the whole gather, then the whole product, whose roundings are the same; sums of 128 terms in fp32 may be
    taken in another order. Three chunks of 16 rows, whose ranks hold the same."""
    if as_the_gpu:
        monkeypatch.setattr(fp8, "runs", lambda device: True)
        monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    rows, k = 48, 128
    x, w, grad = torch.randn(32, k), draw(rows, k), torch.randn(32, 4 * rows)
    found = []
    for strategy in ("serial", "split"):
        comm, a, shard = Bytes(rank), x.clone().requires_grad_(), w.clone().requires_grad_()
        out = all_gather_matmul_fp8(a, shard, comm, strategy=strategy, chunks=3)
        assert (comm.moved, comm.calls) == (rows * (k + 16), 3 if strategy == "split" else 1)
        assert comm.ran[-1].strategy == strategy
        out.backward(grad)
        found.append((out.detach(), a.grad, shard.grad))
    for serial, split in zip(*found, strict=True):
        assert error(split, serial.double()) < 1e-6
    with pytest.raises(ValueError, match="no kernel of ours multiplies in fp8; use 'split'"):
        all_gather_matmul_fp8(x, w, Bytes(), strategy="signal")
    comm = Bytes(rank)
    assert all_gather_matmul_fp8(x[:0], w, comm, strategy="split", chunks=3).shape == (0, 4 * rows)
    assert (comm.moved, comm.calls) == (rows * (k + 16), 3), "a rank without rows takes part, or its peers wait"


def check_kernel(dtype):
    """The bits of the kernels are those of torch's passes: strides, odd sizes, zeros, small numbers, NaN and inf; rows
    that are short and many, and several tiles and pieces of few long ones."""
    from axo_kernels.device import runs_triton
    from axo_kernels.fused import fp8 as here

    assert runs_triton(torch.device("cpu"))
    small = 1e-41 if dtype == torch.float32 else 2e-38  # the interpreter takes bf16's subnormal numbers for 0
    for rows, columns in ((1, 1), (5, 33), (70, 130), (3, 1100), (257, 17)):
        views = (draw(rows, columns), draw(columns, rows).T, draw(2 * rows, 3 * columns)[::2, ::3])
        bad_numbers = (None, 0.0, small, float("inf"), float("nan")) if rows * columns < 200 else (None, float("nan"))
        ways = list(itertools.product(views, bad_numbers, (E4M3, E5M2), ("tensor", "row"), (0, 1)))
        # The interpreter takes a second for a tensor of several tiles: those in each way, not in each pair of them.
        for view, bad, format, scaling, over in ways if rows * columns < 200 else ways[::11]:
            x = (1e-3 * view).to(dtype)
            x = x.contiguous() if view.is_contiguous() else x
            if bad is not None:
                x = x.clone(memory_format=torch.preserve_format)
                x[rows // 2] = bad
            found = rounded(x, format, scaling, over)
            here.runs_triton = lambda device: False
            expected = rounded(x, format, scaling, over)
            here.runs_triton = runs_triton
            assert found.data.shape == expected.data.shape
            assert found.data.stride(over) == 1 or found.data.shape[over] == 1
            sound = expected.scale.isfinite()
            assert torch.equal(found.scale[sound], expected.scale[sound])
            assert torch.equal(found.scale.isfinite(), sound)
            told = f"{rows}x{columns} {bad} {format} {scaling} {over}"
            a, b = found.data.float() * found.scale, expected.data.float() * expected.scale
            assert torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num()), told
            if sound.all():
                assert torch.equal(found.data.view(torch.uint8), expected.data.view(torch.uint8)), told


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_rounding_kernel_has_torchs_bits(interpreter, dtype):
    interpreter.run(check_kernel, dtype)
