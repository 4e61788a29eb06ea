"""One launch each of torch's product, the kernel for Hopper and the plain one, for a profiler or a checker to look at.

    ncu --clock-control none --profile-from-start off --section SpeedOfLight --section WarpStateStats \\
        python3 -m bench.tools.one_product --size 8192 --layout NT
    compute-sanitizer python3 -m bench.tools.one_product --size 512 --layout TN

Everything is compiled, launched and compared once before; only the launches after that are between CUDA's
``cudaProfilerStart`` and ``cudaProfilerStop``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from axo_kernels.gemm.layout import LAYOUTS, Product, stored_shapes
from axo_kernels.gemm.matmul import vendor_matmul
from axo_kernels.gemm.tiles import HOPPER
from axo_kernels.tune.choice import Choice
from axo_kernels.tune.runners import runner
from axo_kernels.tune.timing import relative_error
from bench.gemm import PRODUCT_LIMITS
from bench.lib.arguments import Parser


def main(arguments: list[str] | None = None) -> int:
    """Launch; returns how many results are wrong."""
    parser = Parser("bench.tools.one_product", __doc__)
    parser.add_argument("--size", type=int, default=8192, help="of all three sides")
    parser.add_argument("--layout", default="NT", choices=LAYOUTS)
    parser.add_argument("--only", default="", help="torch, plain or a part of a Hopper tile's name")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("no GPU is visible")
    torch.manual_seed(1)
    n = options.size
    product = Product(options.layout, n, n, n, torch.bfloat16)
    a, b = (torch.randn(shape, device="cuda").bfloat16() for shape in stored_shapes(product))
    calls: dict[str, Callable[[], torch.Tensor]] = {"torch": lambda: vendor_matmul(a, b, product.layout)}
    for name, tile in [("plain", None), *((config.name, config) for config in HOPPER)]:
        calls[name] = partial(runner(Choice("triton", product.layout, tile), product.layout), a, b)
    calls = {name: call for name, call in calls.items() if options.only in name}
    expected, wrong = vendor_matmul(a, b, product.layout).double(), 0
    for name, call in calls.items():
        call()
        error = relative_error(call(), expected)
        wrong += not error < PRODUCT_LIMITS[product.dtype]
        print(f"{product.name} {name}: {error:.1e} from torch's", flush=True)
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    for call in calls.values():
        call()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()
    return wrong


if __name__ == "__main__":
    raise SystemExit(main())
