"""What the benches of the kernels launch on a GPU, once each: compiled ahead there, and tried without one.

``bench.kernels`` deals these calls out to processes that fill Triton's cache; ``bench.tools.stub_driver`` launches all
of them through Triton's real launcher over a driver that computes nothing, and can leave the cache for a GPU machine.
So what is launched is written once. Results are nobody's business here: operands are empty.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

from axo_kernels import device as devices
from axo_kernels import matmul
from axo_kernels.comm.adapters import SoloCommunicator
from axo_kernels.fused import fp8
from axo_kernels.fused.chunks import chunk_order
from axo_kernels.fused.push import push
from axo_kernels.fused.segments import SegmentedProduct
from axo_kernels.fused.workspace import Workspace
from axo_kernels.gemm import tiles
from axo_kernels.gemm.layout import LAYOUTS, Product, as_row_major, stored_shapes
from axo_kernels.gemm.matmul import describable
from axo_kernels.gemm.tiles import HOPPER, TRIED, Config
from axo_kernels.tune.choice import Choice
from axo_kernels.tune.runners import runner

from .numerics import ROUNDING_LIMITS, numeric_cases
from .simulated import SimulatedCommunicator

# Of each class of shapes (tune/trust.py) that the products of bench.kernels have, one at least: what hangs is to hang
# in a process of its own. Then borders: with one tile a program, with short sums, with several tiles a program.
TRIAL_SIZES: tuple[tuple[int, int, int], ...] = (
    (512, 768, 1024), (128, 256, 64), (2048, 2048, 1024), (2048, 3072, 512), (4096, 4096, 4096),
    (1000, 1016, 1032), (8, 8, 8), (3000, 5000, 1032),
)  # fmt: skip
# Where that kernel meets a stream: collectives; m, n and k over four ranks, and chunks, which are whole tiles of all of
# HOPPER. bench.overlap has twice as many chunks too, for which the kernel is compiled anew.
MEETINGS = (("all_reduce", "NT"), ("all_gather", "NT"), ("reduce_scatter", "TN"))
MEETING_SIZES, MEETING_CHUNKS = (4096, 8192, 1024), 4
# Of the fused products: collective, layout, sizes, ranks, chunks (bench.kernels' sections, and bench.overlap's shapes).
FUSED = (
    *((collective, layout, (1792, 3584, 1024), 4, chunks)
      for collective, layout in (("all_reduce", "NT"), ("reduce_scatter", "TN"), ("all_gather", "NT"))
      for chunks in (1, 2, 4, 7)),
    *((collective, layout, (256, 512, 64), 2, chunks)
      for collective, layout in (("all_reduce", "NT"), ("reduce_scatter", "NT"), ("all_gather", "NT"))
      for chunks in (2, 3, 4)),
    *((collective, layout, (2048, 16384, 4096), 4, chunks)
      for collective, layout in (("all_reduce", "NT"), ("reduce_scatter", "TN"), ("all_gather", "NT"))
      for chunks in (4, 8)),
)  # fmt: skip


class Launch(NamedTuple):
    """One call, and how long its compilation takes beside others."""

    name: str
    weight: float
    call: Callable[[], object]


def launches(device: torch.device, products: Iterable[Product], fp16: bool = True) -> Iterator[Launch]:
    """All calls but those of the kernel for Hopper (:func:`hopper_launches`).

    Args:
        device: Where tensors are.
        products: Those that will be timed, whose tiles the tuner tries.
        fp16: Whether the numerics in fp16 are among them.
    """
    for dtype in ROUNDING_LIMITS:
        for case in numeric_cases(dtype, dry=False) if fp16 or dtype != torch.float16 else ():
            yield Launch(case.name, 2.0, partial(case.launch, device))
    yield from _tiles(device, products)
    for collective, layout, sizes, size, chunks in FUSED:
        name = f"{collective} {layout} {'x'.join(map(str, sizes))} in {chunks}"
        yield Launch(name, 1.5, partial(_fused, collective, layout, sizes, size, chunks, device))
    yield Launch("sums by push", 1.5, partial(_pushed, device))
    yield Launch("flags", 0.2, partial(_flags, device))
    yield Launch("a simulated link", 0.1, _hold)
    for scaling in fp8.SCALINGS:
        yield Launch(f"rounded, a scale a {scaling}", 0.5, partial(_rounded, scaling, device))


def _tiles(device: torch.device, products: Iterable[Product]) -> Iterator[Launch]:
    """The tuner's tiles of the plain language, and the default where it adds to a gradient."""
    found: dict[tuple[str, Config], Product] = {}
    for product in products:
        a, b = (torch.empty(shape, dtype=product.dtype, device="meta") for shape in stored_shapes(product))
        left, right = as_row_major(a, b, product.layout)
        described = describable(left, right, left.new_empty((product.m, product.n)), False)
        for config in tiles.tried(devices.target_of(device), product, described, TRIED):
            if not config.groups:  # tried in processes of its own
                found.setdefault((product.layout, config), Product(product.layout, 512, 512, 512, product.dtype))
    for (layout, config), product in found.items():
        yield Launch(f"{layout} {config.name}", 1.0, partial(_tile, product, config, device))
    master = Product("TN", 512, 512, 512, torch.bfloat16)
    yield Launch("TN added to a gradient", 1.0, partial(_tile, master, None, device, accumulate=True))


def _tile(product: Product, config: Config | None, device: torch.device, accumulate: bool = False) -> None:
    a, b = _operands(product, device)
    out = torch.empty((product.m, product.n), dtype=torch.float32, device=device) if accumulate else None
    matmul(a, b, product.layout, out=out, accumulate=accumulate, backend="triton", config=config)


def hopper_launches(
    device: torch.device, layouts: Iterable[str] = LAYOUTS, sizes: Iterable[tuple[int, int, int]] = TRIAL_SIZES
) -> Iterator[Launch]:
    """The kernel for Hopper as :class:`axo_kernels.tune.trust.Trust` looks at it, and where it meets a stream."""
    for (collective, layout), chunks in itertools.product(MEETINGS, (MEETING_CHUNKS, 2 * MEETING_CHUNKS)):
        for config in HOPPER if layout in layouts else ():
            name = f"{collective} {layout} {config.name} in {chunks}"
            yield Launch(name, 1.5, partial(_fused, collective, layout, MEETING_SIZES, 4, chunks, device, config))
    for layout in layouts:
        for m, n, k in sizes:
            product = Product(layout, m, n, k, torch.bfloat16)
            for config in HOPPER:
                for what in ("", "bias", "accumulate"):
                    name = f"{product.name} {config.name} {what}".strip()
                    yield Launch(name, 1.5, partial(_grouped, product, config, what, device))


def _grouped(product: Product, config: Config, what: str, device: torch.device) -> None:
    a, b = _operands(product, device)
    run = runner(Choice("triton", product.layout, config), product.layout)
    dtype = torch.float32 if what == "accumulate" else product.dtype
    out = torch.empty((product.m, product.n), dtype=dtype, device=device)
    more: dict[str, Any] = {"accumulate": True} if what == "accumulate" else {}
    if what == "bias":
        more["bias"] = torch.empty(product.n, dtype=product.dtype, device=device)
    run(a, b, out=out, **more)


def _operands(product: Product, device: torch.device) -> list[torch.Tensor]:
    return [torch.empty(shape, dtype=product.dtype, device=device) for shape in stored_shapes(product)]


def _fused(
    collective: str,
    layout: str,
    sizes: tuple[int, int, int],
    size: int,
    chunks: int,
    device: torch.device,
    config: Config | None = None,
) -> None:
    m, n, k = sizes
    comm = SimulatedCommunicator(size, 1e12, device)
    order = chunk_order(collective, n // size if collective == "all_gather" else m, chunks, 0, size, 128)
    product = Product(layout, m, n, k, torch.bfloat16)
    workspace = Workspace("a launch", order, device)
    workspace.flags.fill_(1)
    a, b = _operands(product, device)
    out = torch.empty((m, n), dtype=product.dtype, device=device)
    product_in_segments = SegmentedProduct(product, workspace, comm, config=config)
    product_in_segments.launch(a, b, out, along_n=collective == "all_gather")


def _pushed(device: torch.device) -> None:
    product = Product("NT", 512, 512, 512, torch.bfloat16)
    a, b = _operands(product, device)
    for operation in ("matmul_all_reduce", "matmul_reduce_scatter"):
        deque(push(operation, product, a, b, torch.empty_like(a), SoloCommunicator(timeout=1.0)), 0)


def _flags(device: torch.device) -> None:
    kernels = devices.signal_kernels()
    assert kernels is not None
    words = torch.zeros(128, dtype=torch.int32, device=device)
    for dtype in (torch.bfloat16, torch.float32):
        rows = torch.zeros(64, dtype=dtype, device=device)
        kernels.keep_rows_kernel[(1, 1)](
            rows, rows, words, words[100:], words, 0, 64, SEGMENTS=16, BLOCK=2048, num_warps=4
        )
    kernels.write_flag_kernel[(1,)](words[4:], words, 0, num_warps=1)
    kernels.wait_flag_kernel[(1,)](words[4:], words, 0, words[1:], 10, 0, num_warps=1)
    kernels.wait_flag_kernel[(1,)](words[5:], words, 0, words[1:], 10, 1, num_warps=1)
    kernels.write_flag_kernel[(1,)](words[5:], words, 0, num_warps=1)


def _hold() -> None:
    from .wire import hold

    hold[(1,)](1000, num_warps=1)


def _rounded(scaling: str, device: torch.device) -> None:
    narrow, wide = fp8.formats(device)
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.zeros(512, 512, dtype=dtype, device=device)
        for into in (narrow, wide):
            for over in (1, 0):
                fp8.rounded(x, into, scaling, over)
                fp8.rounded(x.T, into, scaling, over)
