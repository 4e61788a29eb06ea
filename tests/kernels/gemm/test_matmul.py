"""The matrix product: kernels in the interpreter and the torch path, both against fp64."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from axo_kernels import device as devices
from axo_kernels.gemm import matmul as products
from axo_kernels.gemm.layout import LAYOUTS
from axo_kernels.gemm.matmul import gradients, matmul
from axo_kernels.gemm.tiles import TARGETS, Config, Target
from axo_kernels.tune.choice import Choice
from axo_kernels.tune.runners import runner
from bench.lib.accuracy import matmul_reference

# Relative Frobenius error. fp32: sums of at most 128 products, each step within 2**-24 = 6e-8 of exact. fp16: the
# result is rounded once, 2**-11 = 4.9e-4 at most. bf16: Triton's interpreter cuts instead of rounding, 2**-7 at most (a
# GPU rounds, where the limit is 4e-3).
LIMITS = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
SIZES = [(1, 1, 1), (1, 37, 5), (33, 1, 64), (7, 128, 31), (33, 47, 19), (64, 80, 48), (101, 13, 97), (32, 32, 128)]
POINTERS = Config(32, 16, 16, group_m=2, warps=1, stages=1)
DESCRIPTORS = Config(32, 32, 16, group_m=2, warps=1, stages=1, descriptors=True, parts=2)


def error(result, reference):
    return ((result.double() - reference).norm() / reference.norm()).item()


def operands(layout, m, n, k, dtype, seed=0, lead=()):
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn((*lead, k, m) if layout == "TN" else (*lead, m, k), generator=generator)
    b = torch.randn((*lead, n, k) if layout == "NT" else (*lead, k, n), generator=generator)
    return a.to(dtype), b.to(dtype)


def errors_of_kernel(layout, dtype, sizes):
    """In the interpreter: {size: error} through pointers, and through descriptors where 16-byte strides allow them."""
    found = {}
    for m, n, k in sizes:
        a, b = operands(layout, m, n, k, dtype, seed=m)
        reference = matmul_reference(a, b, layout)
        out = torch.full((m, n), float("nan"), dtype=dtype)
        found["pointers", m, n, k] = error(matmul(a, b, layout, out, config=POINTERS, backend="triton"), reference)
        if m % 8 == n % 8 == k % 8 == 0:
            out.fill_(float("nan"))
            found["descriptors", m, n, k] = error(matmul(a, b, layout, out, config=DESCRIPTORS), reference)
    return found


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_kernels_against_fp64(interpreter, layout, dtype):
    found = interpreter.run(errors_of_kernel, layout, dtype, SIZES)
    assert len(found) == len(SIZES) + 2, found.keys()  # two sizes fit descriptors
    assert max(found.values()) < LIMITS[dtype], found


def check_drawn_sizes(layout, seed):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(6):
        m, n, k = (int(size) for size in torch.randint(1, 90, (3,), generator=generator))
        a, b = operands(layout, m, n, k, torch.float32, seed=m)
        got = error(matmul(a, b, layout, config=POINTERS), matmul_reference(a, b, layout))
        assert got < 1e-6, (m, n, k, got)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_kernel_at_random_sizes(interpreter, layout):
    interpreter.run(check_drawn_sizes, layout, 7)


def check_strided(layout):
    for dtype in (torch.float32, torch.float16):
        a, b = operands(layout, 34, 40, 50, dtype)
        reference = matmul_reference(a, b, layout)
        wide = torch.zeros(a.shape[0], 2 * a.shape[1], dtype=dtype)
        wide[:, ::2] = a  # no contiguous dim at all
        flipped = b.T.contiguous().T  # the other dim is contiguous
        out = torch.full((2 * 34, 60), float("nan"), dtype=dtype)
        matmul(wide[:, ::2], flipped, layout, out[::2, 5:45], config=POINTERS)
        assert error(out[::2, 5:45], reference) < LIMITS[dtype]
        assert out[1::2].isnan().all() and out[:, :5].isnan().all() and out[:, 45:].isnan().all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided_operands_and_result(interpreter, layout):
    interpreter.run(check_strided, layout)


def check_batched(layout):
    a, b = operands(layout, 18, 20, 24, torch.float32, lead=(2, 3))
    got = matmul(a, b, layout, config=POINTERS)
    assert got.shape == (2, 3, 18, 20)
    assert error(got, matmul_reference(a, b, layout)) < 1e-6
    strided = a.transpose(0, 1)
    got = matmul(strided, b.transpose(0, 1), layout, config=POINTERS)
    assert error(got, matmul_reference(a, b, layout).transpose(0, 1)) < 1e-6
    if layout != "TN":  # one weight for all leading dims
        for config in (POINTERS, DESCRIPTORS):
            got = matmul(a, b[0, 0].contiguous(), layout, config=config)
            assert error(got, matmul_reference(a, b[0, 0].expand(2, 3, -1, -1), layout)) < 1e-6


@pytest.mark.parametrize("layout", LAYOUTS)
def test_batched(interpreter, layout):
    interpreter.run(check_batched, layout)


def check_results_in_any_order():
    """Results whose leading dims are not one block, written and added to in place."""
    a, b = operands("NN", 18, 20, 24, torch.float32, lead=(2, 3))
    for second in (b, b[0, 0].contiguous()):
        reference = matmul_reference(a, second.expand(2, 3, 24, 20))
        out = torch.full((3, 2, 18, 20), 1.0).transpose(0, 1)
        matmul(a, second, out=out, config=POINTERS)
        assert error(out, reference) < 1e-6
        matmul(a, second, out=out, accumulate=True, config=POINTERS)
        assert error(out, 2 * reference) < 1e-6


def test_results_in_any_order(interpreter):
    interpreter.run(check_results_in_any_order)


def check_epilogues(layout):
    functional = torch.nn.functional
    oracles = {
        None: lambda x, gate: x,
        "gelu": lambda x, gate: functional.gelu(x),
        "gelu_tanh": lambda x, gate: functional.gelu(x, approximate="tanh"),
        "silu": lambda x, gate: functional.silu(x),
        "silu_gate": lambda x, gate: functional.silu(x) * gate,
    }
    a, b = operands(layout, 40, 48, 32, torch.float32)
    bias = torch.randn(48) * 3
    gate = torch.randn(40, 96)[:, :48]
    for config in (POINTERS, DESCRIPTORS):
        for activation, oracle in oracles.items():
            given = gate if activation == "silu_gate" else None
            expected = oracle(matmul_reference(a, b, layout) + bias.double(), gate.double())
            got = matmul(a, b, layout, bias=bias, activation=activation, gate=given, config=config)
            assert error(got, expected) < 1e-6, (config.name, activation, error(got, expected))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_epilogues(interpreter, layout):
    interpreter.run(check_epilogues, layout)


def check_gelu_far_out():
    a = torch.tensor([[-60.0], [-6.0], [6.0], [60.0]])
    for activation in ("gelu", "gelu_tanh", "silu"):
        got = matmul(a, torch.ones(1, 1), activation=activation, config=POINTERS)
        assert got.isfinite().all() and got[3] == 60.0 and abs(got[0]) < 1e-6, (activation, got)
    x = torch.linspace(-6, 6, 1001).view(-1, 1)
    expected = torch.nn.functional.gelu(x.double(), approximate="tanh")
    got = matmul(x, torch.ones(1, 1), activation="gelu_tanh", config=POINTERS)
    # each value by itself: exp's argument is at most 20, each rounding of it 6e-8
    assert ((got.double() - expected).abs() <= 5e-6 * expected.abs()).all()


def test_activations_do_not_overflow(interpreter):
    interpreter.run(check_gelu_far_out)


def check_pieces(layout):
    """K in pieces, some of them empty, with all that comes behind a sum; the same bits every time."""
    for split_k, kind, (m, n, k) in ((3, POINTERS, (33, 17, 100)), (4, DESCRIPTORS, (40, 48, 40))):
        config = replace(kind, split_k=split_k)
        a, b = operands(layout, m, n, k, torch.float32)
        bias, gate, master = torch.randn(n), torch.randn(m, n), torch.full((m, n), 2.0)
        exact = matmul_reference(a, b, layout)
        out = torch.full((m, n), float("nan"))
        assert error(matmul(a, b, layout, out, config=config), exact) < 1e-6, (config.name, m, n, k)
        assert torch.equal(out, matmul(a, b, layout, config=config))
        got = matmul(a, b, layout, bias=bias, activation="silu_gate", gate=gate, config=config)
        expected = torch.nn.functional.silu(exact + bias.double()) * gate.double()
        assert error(got, expected) < 1e-6, (config.name, m, n, k)
        assert error(matmul(a, b, layout, master, accumulate=True, config=config), exact + 2.0) < 1e-6


@pytest.mark.parametrize("layout", LAYOUTS)
def test_k_in_pieces(interpreter, layout):
    interpreter.run(check_pieces, layout)


def first_tiles(programs, xcds):
    """What first_tile gives the programs 0, 1, ... of a launch."""
    import triton
    import triton.language as tl

    from axo_kernels.gemm.kernels import first_tile

    @triton.jit
    def kernel(out, XCDS: tl.constexpr):
        tl.store(out + tl.program_id(0), first_tile(XCDS))

    out = torch.full((programs,), -1, dtype=torch.int32)
    globals()["first_tile"], globals()["tl"] = first_tile, tl  # where the interpreter looks names up
    kernel[(programs,)](out, XCDS=xcds)
    return out.tolist()


def test_neighbours_in_the_order_of_tiles_are_on_one_xcd(interpreter):
    for programs, xcds in ((304, 8), (256, 8), (228, 6), (37, 8), (5, 8), (9, 1)):
        found = interpreter.run(first_tiles, programs, xcds)
        assert sorted(found) == list(range(programs))
        for xcd in range(min(xcds, programs)):  # AMD deals programs out one by one
            mine = found[xcd::xcds]
            assert mine == list(range(mine[0], mine[0] + len(mine))), (programs, xcds, mine)
    eight = dict.fromkeys(("gfx942", "gfx950"), 8)
    assert {arch: target.xcds for arch, target in TARGETS.items()} == dict.fromkeys(TARGETS, 1) | eight
    # MI300A and its thirds, halves and parts of an MI300X, MI308X, a part of an MI355X; some units masked
    for arch, units, xcds in (
        *(("gfx942", 228, 6), ("gfx942", 76, 2), ("gfx942", 152, 4), ("gfx942", 38, 1), ("gfx942", 80, 4)),
        *(("gfx950", 128, 4), ("gfx950", 32, 1), ("gfx942", 300, 1), ("gfx942", 303, 1), ("gfx90a", 104, 1)),
    ):
        assert Target(arch, units, 65_536).xcds == xcds, (arch, units)


def check_refused():
    """What the kernel would write out of bounds, twice, or while it is read is refused, and nothing is written."""
    for lead in ((2,), (2, 3)):
        a, b = operands("NN", 40, 48, 64, torch.float32, lead=lead)
        out = torch.full((*lead, 40, 48), 7.0)
        for config in (replace(POINTERS, split_k=2), replace(DESCRIPTORS, split_k=2)):
            with pytest.raises(ValueError, match=r"cuts K in 2, of one matrix only|needs 2-D operands"):
                matmul(a, b, out=out, config=config)
        assert (out == 7).all()
        matmul(a, b[(0,) * len(lead)].contiguous(), out=out, config=replace(POINTERS, split_k=2))  # one matrix of rows
    wrong: list = [("split_k", value) for value in (1.5, 2.0, True, "2", None, 0, -1)]
    wrong += [(name, 2.5) for name in ("block_m", "group_m", "warps", "stages", "parts", "waves_per_eu", "nonkdim")]
    wrong += [("parts", 3), ("nonkdim", 5)]
    wrong += [("groups", "solo"), ("groups", None), ("groups", []), ("descriptors", 1), ("flatten", "no"), ("parts", 0)]
    a, b = operands("NN", 8, 8, 8, torch.float32)
    for name, value in wrong:
        for ready in (a, a.clone().requires_grad_()):
            with pytest.raises(ValueError, match=f"^matmul: config has {name}={re.escape(repr(value))}; use"):
                matmul(ready, b, config=replace(POINTERS, **{name: value}))
    for config in ("auto", {"block_m": 32}, Config):
        with pytest.raises(ValueError, match=r"^matmul: config=.* is no Config"):
            matmul(a, b, config=config)
    room = torch.full((20,), 7.0)
    for out in (room[:8].expand(8, 8), room[:8].unsqueeze(1).expand(8, 8), room.as_strided((8, 8), (1, 1))):
        for backend in ("triton", "vendor"):
            with pytest.raises(ValueError, match="so that elements share memory"):
                matmul(a, b, out=out, backend=backend)
    assert (room == 7).all()
    for name, out in (("a", a), ("b", b), ("a", a.T), ("b", b.view(-1)[:8].view(8, 1))):
        with pytest.raises(ValueError, match=f"out lies on {name}, which is read"):
            matmul(a, b[:, : out.shape[1]], out=out)
    wide = torch.randn(8, 16)
    expected = wide[:, :8].double() @ b.double()
    assert error(matmul(wide[:, :8], b, out=wide[:, 8:]), expected) < 1e-6  # beside each other, in one memory


def test_a_result_may_lie_beside_an_operand_and_not_across_it():
    """Windows of one tensor with gaps: exact, whatever their strides."""
    whole, array = torch.randn(16, 24), np.zeros(72, np.float32)
    b = torch.randn(8, 8)
    for a, out in (
        (whole[:8, :8], whole[:8, 4:12]),
        (whole[:8, :8], whole[:8, 7:15]),
        (whole[::2, :8], whole[4:12, 6:14]),
        (whole[:8, :8], whole.view(-1)[3:].as_strided((8, 8), (48, 3))),
        (whole.view(-1).as_strided((8, 8), (1, 24)), whole[:8, 7:15]),
        (torch.from_numpy(array[:64]).view(8, 8), torch.from_numpy(array[8:72]).view(8, 8)),  # two storages
    ):
        with pytest.raises(ValueError, match="out lies on a, which is read"):
            matmul(a, b, out=out)
    for a, out in (
        (whole[:8, :8], whole[:8, 8:16]),
        (whole[::2, :8], whole[1::2, :8]),
        (whole[:8, :16:2], whole[:8, 1:17:2]),
    ):
        expected = a.double() @ b.double()
        assert error(matmul(a, b, out=out), expected) < 1e-6


def test_tiles_that_divide_by_zero_do_not_fit():
    for change in ({"group_m": 0}, {"warps": 0}, {"block_m": 0}, {"block_m": 16.0}):
        assert not replace(POINTERS, **change).fits(TARGETS["sm_90"], torch.float32), change


def test_what_a_kernel_cannot_write_is_refused(interpreter):
    interpreter.run(check_refused)


def check_negative_views():
    """Views that negate what lies in memory: read as they are seen, and not written into."""
    whole = torch.randn(8, 8, 6, dtype=torch.complex64).conj().imag
    assert whole.is_neg()
    a, b, gate, bias = whole[..., 0], whole[..., 1], whole[..., 2], whole[0, :, 3]
    functional = torch.nn.functional
    expected = functional.silu(a.double() @ b.double() + bias.double()) * gate.double()
    for config in (POINTERS, replace(POINTERS, split_k=2)):
        assert error(matmul(a, b, bias=bias, activation="silu_gate", gate=gate, config=config), expected) < 1e-6
    with pytest.raises(ValueError, match="out is a view that negates"):
        matmul(a, b, out=gate)


def test_views_that_negate(interpreter):
    interpreter.run(check_negative_views)


class Recorder:
    """Stands for a kernel: keeps its grid and its constants."""

    def __getitem__(self, grid):
        self.grid = grid
        return self.launch

    def launch(self, *args, **options):
        self.options = options


def test_programs_are_as_many_as_fit_the_multiprocessors(monkeypatch):
    """64x64 tiles leave room for several programs a multiprocessor, 128x256 for one; few tiles get K cut."""
    kernel, combine = Recorder(), Recorder()
    monkeypatch.setattr(devices, "target_of", lambda device: TARGETS["sm_80"])
    monkeypatch.setattr(devices, "interpreted", lambda: False)
    kernels = type("Kernels", (), {"matmul_kernel": kernel, "combine_kernel": combine})
    monkeypatch.setattr(devices, "gemm_kernels", lambda: kernels)

    def launched(m, n, k, config=None):
        a, b = torch.empty(m, k, dtype=torch.bfloat16), torch.empty(k, n, dtype=torch.bfloat16)
        product = products.product_of(a, b, "NN")
        out = torch.empty(m, n, dtype=torch.bfloat16)
        products._launch(a, b, out, None, product, products.Epilogue(), config)
        return kernel.grid[0], kernel.options

    small = Config(64, 64, 32, warps=4, stages=3)
    each = small.occupancy(TARGETS["sm_80"], 2)
    assert each > 1
    grid, options = launched(4096, 4096, 512, small)
    assert grid == 108 * each == options["NUM_PROGRAMS"] and options["SPLIT_K"] == 1
    assert launched(4096, 4096, 512, Config(128, 256, 64, warps=8, stages=2))[0] == 108
    grid, options = launched(256, 256, 8192)  # 4 tiles for 108 multiprocessors
    assert options["SPLIT_K"] == 8 and grid == 32 and combine.options["PIECES"] == 8
    assert launched(256, 256, 512)[1]["SPLIT_K"] == 1, "pieces of less than eight steps cost more than they bring"
    assert launched(8192, 8192, 8192)[1]["SPLIT_K"] == 1
    odd = Config(64, 64, 32, group_m=16, warps=4, flatten=False)
    assert launched(512, 512, 512, odd)[1] | {"GROUP_M": 16, "FLATTEN": False} == kernel.options
    hinted = replace(odd, waves_per_eu=2, nonkdim=16)
    assert launched(512, 512, 512, hinted)[1].items() >= {"waves_per_eu": 2, "matrix_instr_nonkdim": 16}.items()
    monkeypatch.setattr(devices, "target_of", lambda device: Target("sm_86", 82, 101_376))
    assert launched(512, 512, 4096)[1]["SPLIT_K"] == 4, "the fp32 sums of pieces fit an RTX 3090 too"


def check_accumulate():
    """An fp32 master gradient: three micro-batches of fp16 equal their sum in fp64."""
    for config in (POINTERS, DESCRIPTORS):
        master = torch.full((40, 48), 2.0)
        expected = master.double()
        for seed in range(3):
            a, b = operands("TN", 40, 48, 32, torch.float16, seed)
            matmul(a, b, "TN", out=master, accumulate=True, config=config)
            expected += matmul_reference(a, b, "TN")
        assert error(master, expected) < 1e-6  # fp32 sums of exact products of fp16
    a, b = operands("NN", 8, 8, 8, torch.float16)
    assert matmul(a, b, out_dtype=torch.float32, config=POINTERS).dtype == torch.float32


def test_accumulates_into_fp32(interpreter):
    interpreter.run(check_accumulate)


def check_gradients(layout):
    a, b = operands(layout, 18, 20, 24, torch.float32)
    bias = torch.randn(20)
    grad = torch.randn(18, 20)
    found = []
    for config in (POINTERS, None):
        leaves = [tensor.clone().requires_grad_() for tensor in (a, b, bias)]
        if config is not None:
            out = matmul(leaves[0], leaves[1], layout, bias=leaves[2], config=config)
        else:
            left = leaves[0].T if layout == "TN" else leaves[0]
            right = leaves[1].T if layout == "NT" else leaves[1]
            out = left @ right + leaves[2]
        out.backward(grad)
        found.append([leaf.grad for leaf in leaves])
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)  # two orders of summation of at most 24 terms


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_equal_torch(interpreter, layout):
    interpreter.run(check_gradients, layout)


def check_gradients_of_batches():
    """Leading dims as rows of one weight, and as matrices of their own; what would be lost is refused."""
    for weights in ((), (2, 3)):
        x, w, bias = torch.randn(2, 3, 8, 6), torch.randn(*weights, 5, 6), torch.randn(5)
        grad, found = torch.randn(2, 3, 8, 5), []
        for run in (lambda a, b, c: matmul(a, b, "NT", bias=c, config=POINTERS), lambda a, b, c: a @ b.mT + c):
            leaves = [tensor.clone().requires_grad_() for tensor in (x, w, bias)]
            run(*leaves).backward(grad)
            found.append([leaf.grad for leaf in leaves])
        for got, expected in zip(*found, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)  # sums of at most 48 terms
    gate = torch.ones(8, 5, requires_grad=True)
    with pytest.raises(ValueError, match="without activation"):
        matmul(torch.ones(8, 6), torch.ones(6, 5), activation="silu_gate", gate=gate, config=POINTERS)


def test_gradients_of_batches(interpreter):
    interpreter.run(check_gradients_of_batches)


def test_what_is_written_into_out_records_no_gradient():
    """A master gradient that held the graphs of all micro-batches would keep their activations."""
    a, b = torch.randn(4, 3, requires_grad=True), torch.randn(4, 5)
    for more in ({"accumulate": True}, {"bias": torch.ones(5), "activation": "gelu"}, {}):
        for dtype in (torch.float32, torch.bfloat16):
            out = torch.zeros(3, 5)
            matmul(a.to(dtype), b.to(dtype), "TN", out, **more)
            assert not out.requires_grad and out.any()


def test_autocast_is_torchs():
    a, b = torch.randn(4, 8), torch.randn(8, 5)
    with torch.autocast("cpu", torch.bfloat16):
        for bias in (None, torch.ones(5)):
            got = matmul(a, b, bias=bias)
            assert got.dtype == torch.bfloat16


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_torch_path_against_fp64(layout, dtype):
    for m, n, k in SIZES:
        a, b = operands(layout, m, n, k, dtype, seed=n)
        assert error(matmul(a, b, layout), matmul_reference(a, b, layout)) < LIMITS[dtype]
    a, b = operands(layout, 12, 20, 16, dtype)
    reference = matmul_reference(a, b, layout)
    out = torch.full((12, 40), float("nan"), dtype=dtype)
    bias = torch.randn(20).to(dtype)
    assert error(matmul(a, b, layout, out[:, ::2], bias), reference + bias.double()) < LIMITS[dtype]
    master = torch.ones(12, 20)
    matmul(a, b, layout, master, accumulate=True)
    assert error(master, reference + 1) < 1e-6
    assert matmul(a, b, layout, out_dtype=torch.float32).dtype == torch.float32
    gate = torch.randn(12, 20).to(dtype)
    got = matmul(a, b, layout, activation="silu_gate", gate=gate)
    # the gate multiplies a product that was rounded to the operands' type already
    assert error(got, torch.nn.functional.silu(reference) * gate.double()) < 2 * LIMITS[dtype]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_torch_path_is_differentiable(layout):
    a, b = operands(layout, 5, 7, 3, torch.float64)
    a, b = a.requires_grad_(), b.requires_grad_()
    left = a.T if layout == "TN" else a
    right = b.T if layout == "NT" else b
    grad = torch.randn(5, 7, dtype=torch.float64)
    expected = torch.autograd.grad(left @ right, (a, b), grad)
    got = gradients(grad.float(), a.detach().float(), b.detach().float(), layout)
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs.float(), rtol=1e-5, atol=1e-5)


def test_torch_path_writes_results_of_any_strides():
    """One matrix for all of a's leading dims, and a result that is no block of rows: torch's own ``out`` refuses it."""
    a, b = torch.randn(2, 7, 12), torch.randn(12, 5)
    for out in (torch.ones(2, 5, 7).mT, torch.ones(7, 2, 5).transpose(0, 1), torch.ones(2, 14, 5)[:, ::2]):
        before = out.double().clone()
        for layout, second in (("NN", b), ("NT", b.T.contiguous())):
            for accumulate in (False, True):
                out.copy_(before)
                assert matmul(a, second, layout, out, accumulate=accumulate) is out
                assert error(out, a.double() @ b.double() + accumulate * before) < 1e-6


def test_empty_products():
    for layout in LAYOUTS:
        for m, n, k in ((0, 3, 4), (3, 0, 4), (3, 4, 0)):
            a, b = operands(layout, m, n, k, torch.float32)
            assert torch.equal(matmul(a, b, layout), torch.zeros(m, n))
            assert torch.equal(matmul(a, b, layout, bias=torch.ones(n)), torch.ones(m, n))
    for mode in LAYOUTS:  # leading dims that become rows, without a column
        assert torch.equal(
            runner(Choice("vendor", mode), "NN")(torch.ones(2, 3, 0), torch.ones(0, 4)), torch.zeros(2, 3, 4)
        )


BAD = {
    "layout='TT' is not a layout; use one of NN, NT, TN": lambda: matmul(torch.ones(2, 2), torch.ones(2, 2), "TT"),
    "a is torch.float32 and b is torch.float16; cast": lambda: matmul(torch.ones(2, 2), torch.ones(2, 2).half()),
    "torch.int32 is not supported; use torch.bfloat16": lambda: matmul(*[torch.ones(2, 2).int()] * 2),
    "has K=3 and b (4, 5) has K=4; NN needs A": lambda: matmul(torch.ones(2, 3), torch.ones(4, 5)),
    "has K=3 and b (4, 5) has K=5; NT needs A": lambda: matmul(torch.ones(2, 3), torch.ones(4, 5), "NT"),
    "leading dims (2,) of a and (3,) of b differ": lambda: matmul(torch.ones(2, 2, 2), torch.ones(3, 2, 2), "TN"),
    "b has 1; both need at least 2": lambda: matmul(torch.ones(2, 2), torch.ones(2)),
    "leading dims (1,) of a and (3,) of b differ": lambda: matmul(torch.ones(1, 2, 2), torch.ones(3, 2, 2)),
    "leading dims () of a and (3,) of b differ": lambda: matmul(torch.ones(2, 2), torch.ones(3, 2, 2)),
    "out is torch.int32, which is not": lambda: matmul(
        torch.ones(2, 2), torch.ones(2, 2), out=torch.ones(2, 2, dtype=torch.int32)
    ),
    "bias is on meta and a is on cpu; move": lambda: matmul(
        torch.ones(2, 2), torch.ones(2, 2), bias=torch.ones(2, device="meta")
    ),
    "activation='relu'; use one of": lambda: matmul(torch.ones(2, 2), torch.ones(2, 2), activation="relu"),
    "bias has shape (3,); use (2,)": lambda: matmul(torch.ones(2, 2), torch.ones(2, 2), bias=torch.ones(3)),
    "out_dtype=bf16 is not a floating-point type": lambda: matmul(torch.ones(2, 2), torch.ones(2, 2), out_dtype="bf16"),
    "adds onto out; give out": lambda: matmul(torch.ones(2, 2), torch.ones(2, 2), accumulate=True),
    "out has shape (3, 2); the product": lambda: matmul(torch.ones(2, 2), torch.ones(2, 2), out=torch.ones(3, 2)),
    "gate and activation='silu_gate' belong": lambda: matmul(
        torch.ones(2, 2), torch.ones(2, 2), activation="silu_gate"
    ),
    "cannot run on cpu here; use backend='vendor'": lambda: matmul(
        torch.ones(2, 2), torch.ones(2, 2), backend="triton"
    ),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_one_line_that_helps(message):
    with pytest.raises(ValueError) as caught:
        BAD[message]()
    assert message in str(caught.value) and "\n" not in str(caught.value)


def check_offsets_that_overflow():
    huge = torch.empty_strided((2, 4), (2**24, 1), device="meta")
    from axo_kernels.gemm.layout import check_offsets

    with pytest.raises(
        ValueError, match=r"a \(2, 4\) has strides of 16777216 \+ 1 elements; the kernels take at most 8388607 together"
    ):
        check_offsets(huge, "a")
    with pytest.raises(ValueError, match=r"strides of 5000000 \+ 5000000 elements"):  # each alone would do
        check_offsets(torch.empty_strided((256, 64), (5_000_000, 5_000_000), device="meta"), "a")
    check_offsets(torch.empty((1, 2**24), device="meta"), "a")  # a single row: its stride multiplies nothing
    check_offsets(torch.empty_strided((256, 64), (8_000_000, 1), device="meta"), "a")
    row = torch.empty((1, 2**31), device="meta")
    with pytest.raises(ValueError, match="each must be at most 2147483647; cut it"):
        matmul(row, torch.empty((2**31, 1), device="meta"), backend="vendor")
    with pytest.raises(ValueError, match=r"does not fit cpu|needs 2-D operands with 16-byte"):
        matmul(torch.ones(3, 5), torch.ones(5, 3), config=DESCRIPTORS)


def test_sizes_that_overflow(interpreter):
    interpreter.run(check_offsets_that_overflow)


def check_prepared(layout, pieces):
    """What the first launch has prepared serves other tensors of the same shapes and strides, and no others."""
    from axo_kernels.tune import runners
    from axo_kernels.tune.choice import Choice

    begun, begin = [], runners.triton_matmul
    runners.triton_matmul = lambda *given: (begun.append(given), begin(*given))[1]
    try:
        run = runners.runner(Choice("triton", layout, replace(DESCRIPTORS, split_k=pieces)), layout)

        def right(a, b, **more):
            expected = matmul_reference(a, b, layout) + (more["bias"].double() if "bias" in more else 0)
            assert error(run(a, b, **more), expected) < 1e-3  # one rounding to fp16
            return len(begun)

        pairs = [operands(layout, 40, 48, 32, torch.float16, seed) for seed in range(4)]
        out, bias = torch.empty(40, 48, dtype=torch.float16), torch.randn(48).half()
        assert [right(*pair) for pair in pairs] == [1, 1, 1, 1]
        (prepared,) = run._prepared.values()
        assert prepared.multiply.options["BLOCK_N"] == DESCRIPTORS.block_n, "the tile that was chosen, in TN too"
        assert [right(*pair, out=out) for pair in pairs] == [2, 2, 2, 2]
        assert [right(*pair, out=out, bias=bias) for pair in pairs] == [3, 3, 3, 3]
        assert right(*pairs[0], out=torch.empty(40, 64, dtype=torch.float16)[:, :48]) == 4, "strides of its own"
        a, b = operands(layout, 40, 48, 32, torch.float16)
        shifted = torch.empty(a.numel() + 1, dtype=torch.float16)[1:].view(a.shape).copy_(a)
        assert shifted.data_ptr() % 16 and right(shifted, b) == right(a.T.contiguous().T, b) - 1
        leaf = a.clone().requires_grad_()
        run(leaf, b).float().sum().backward()
        assert leaf.grad is not None and leaf.grad.abs().sum() > 0
        with pytest.raises(ValueError, match="bias has shape"):
            run(a, b, bias=bias[:40])
        # what is looked at in each call, prepared or not
        square = operands(layout, 48, 48, 48, torch.float16)
        right(*square, out=torch.empty(48, 48, dtype=torch.float16))
        with pytest.raises(ValueError, match="out lies on a"):
            run(*square, out=square[0])
        turned = torch.complex(torch.zeros(a.shape), a.float()).to(torch.complex32).conj().imag
        assert turned.is_neg()
        right(turned, b)
    finally:
        runners.triton_matmul = begin


@pytest.mark.parametrize("layout, pieces", [*((layout, 1) for layout in LAYOUTS), ("NT", 2)])
def test_a_launch_is_prepared_once(interpreter, layout, pieces):
    interpreter.run(check_prepared, layout, pieces)
