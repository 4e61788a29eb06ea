"""CuPy's cuBLAS as a rival of bench.gemm, without CuPy: a stand-in that does what the arguments say.

Oracle: cuBLAS' documentation of cublasGemmEx, and the names of the arguments in CuPy's cublas.pyx, whose gemmEx sets
CuPy's current stream before the call.
"""

import ctypes
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from axo_kernels.gemm.layout import LAYOUTS, Product, stored_shapes
from axo_kernels.tune.timing import _timings
from bench import gemm
from bench.lib import verdicts
from bench.lib.accuracy import matmul_reference
from bench.lib.clock import AGREE, TRIES, undisturbed

TYPES = {2: torch.float16, 14: torch.bfloat16}  # CUDA_R_16F, CUDA_R_16BF
SIZES = (24, 40, 56)  # all differ, so that each wrong dimension shows


def in_columns(address, kind, rows, columns, leading):
    """The matrix that cuBLAS finds at an address: ``rows`` follow each other, columns are ``leading`` apart."""
    assert leading >= rows
    memory = (ctypes.c_char * (2 * leading * columns)).from_address(address)
    return torch.frombuffer(memory, dtype=TYPES[kind]).as_strided((rows, columns), (1, leading))


class Stream:
    current = None

    def __init__(self, number):
        self.number = number

    def __enter__(self):
        Stream.current = self.number

    def __exit__(self, *_):
        Stream.current = None


def stand_in(calls):
    """gemmEx as CuPy has it (cupy_backends/cuda/libs/cublas.pyx), its products in fp32."""

    def gemmEx(
        handle, transa, transb, m, n, k, alpha, A, Atype, lda, B, Btype, ldb, beta, C, Ctype, ldc, computeType, algo
    ):  # fmt: skip
        assert (handle, Stream.current, computeType, algo) == ("the handle of 0", 77, 68, -1)
        scales = [ctypes.c_float.from_address(address).value for address in (alpha, beta)]
        assert {transa, transb} <= {0, 1}
        left = in_columns(A, Atype, *((k, m) if transa else (m, k)), lda)
        right = in_columns(B, Btype, *((n, k) if transb else (k, n)), ldb)
        into = in_columns(C, Ctype, m, n, ldc)
        result = (left.T if transa else left).float() @ (right.T if transb else right).float()
        into.copy_(scales[0] * result + (scales[1] * into.float() if scales[1] else 0))
        calls.append(computeType)

    cupy = SimpleNamespace(
        cuda=SimpleNamespace(
            Device=lambda index: SimpleNamespace(cublas_handle=f"the handle of {index}"), ExternalStream=Stream
        )
    )
    return cupy, SimpleNamespace(gemmEx=gemmEx)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gemm_ex_multiplies_what_is_stored(layout, dtype, monkeypatch):
    """fp32 sums of 56 exact products, rounded once."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=77))
    product, calls = Product(layout, *SIZES, dtype), []
    a, b = (torch.randn(shape).to(dtype) for shape in stored_shapes(product))
    call = gemm.gemm_ex(*stand_in(calls), a, b, product)
    exact = matmul_reference(a, b, layout)
    for _ in range(2):  # beta is 0: nothing is left of the first result
        torch.testing.assert_close(call().double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-4)
    assert len(calls) == 2


@pytest.mark.parametrize("fault", ["", "raises", "wrong"])
def test_a_rival_that_cannot_is_left_out(fault, monkeypatch, capsys):
    """The rival's result is looked at before it is timed; what it raises costs the bench a column, no more."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=77))
    product, calls = Product("NT", *SIZES, torch.bfloat16), []
    a, b = (torch.randn(shape).bfloat16() for shape in stored_shapes(product))
    cupy, cublas = stand_in(calls)
    whole = cublas.gemmEx
    if fault == "raises":
        cublas.gemmEx = lambda *given: (_ for _ in ()).throw(TypeError("gemmEx() takes 18 arguments"))
    if fault == "wrong":
        cublas.gemmEx = lambda *given: whole(*given[:5], given[5] - 1, *given[6:])
    backends, cuda, libs = (ModuleType(name) for name in ("cupy_backends", "cupy_backends.cuda", "libs"))
    libs.cublas = cublas
    modules = {"cupy": cupy, "cupy_backends": backends, "cupy_backends.cuda": cuda, "cupy_backends.cuda.libs": libs}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    on_gpu = SimpleNamespace(is_cuda=True, device=a.device, data_ptr=a.data_ptr)
    monkeypatch.setattr(gemm, "_error", lambda result, *given: float((result.double() - exact).norm() / exact.norm()))
    exact = matmul_reference(a, b, "NT")
    call = gemm._cupy(on_gpu, b, product)
    assert (call is None) == bool(fault)
    assert capsys.readouterr().out.startswith("not measured") == bool(fault)
    assert gemm._cupy(a, b, product) is None, "on a CPU"


def test_a_row_whose_rounds_disagree_is_measured_again():
    """Times of eight rounds, made up: torch's, then a rival's, on the device and on the host."""

    def rounds(torch_ms, rival_ms):
        return _timings([[(each, 0.0) for each in torch_ms], [(each, 0.0) for each in rival_ms]])

    quiet, wandering = [10.0] * 8, [10.0, 10.2, 9.9, 10.3] * 2
    loss = rounds(wandering, [12.5] * 8)
    shared = rounds([10.0, 30.0] * 4, [10.0, 10.0, 30.0, 30.0] * 2)  # the GPU had another program's turns
    slowed = rounds([10.0, 10.0, 20.0, 20.0] * 2, [10.0, 10.0, 20.0, 20.0] * 2)  # of both at once: no ratio tells
    worse = rounds([10.0, 50.0] * 4, [9.0] * 8)
    gpu, given = torch.device("cuda"), []

    def measured(*tries, device=gpu):
        left = list(tries)
        row = undisturbed(lambda: left.pop(0), device)
        given.append(len(tries) - len(left))
        return row

    assert measured(loss, rounds(quiet, quiet)) == (loss, None), "a loss whose rounds agree stands"
    assert measured(shared, loss) == (loss, None), "and one that shows when the other program has gone"
    assert measured(slowed, rounds(quiet, quiet))[1] is None
    timings, apart = measured(worse, shared, worse, loss)
    assert timings == shared and apart == 3.0 > AGREE, "not the one that favours the rival"
    assert measured(shared, loss, device=torch.device("cpu")) == (shared, None)
    assert given == [1, 2, 2, TRIES, 1]


@pytest.mark.parametrize("worst, found", [(1.0, "not measured"), (0.9, False)])
def test_a_disturbed_row_misses_no_goal_and_reaches_none(worst, found):
    product = Product("NT", 8192, 8192, 8192, torch.bfloat16)
    row = {"product": product.name, "layout": "NT", "m": 8192, "n": 8192, "k": 8192, "errors": {}, "right": True}
    row |= {"triton_ratio": 1.0, "disturbed": None}
    rows = [row | {"tuned_ratio": worst}, row | {"tuned_ratio": 0.5, "disturbed": 1.7}]
    name = "tuned at worst, of torch: {:.3f} over 1 shapes{} (goal: at least 0.99)"
    assert verdicts.speed(rows, [product], 132)[name.format(worst, ", 1 disturbed")] == found
    assert verdicts.speed(rows[:1], [product], 132)[name.format(worst, "")] == (worst == 1.0)
