"""The strategies of the fused operations, without autograd (operations.py adds it).

    serial   the whole product, then the whole collective (or the other way round): the baseline
    split    the product cut into chunks; each chunk's collective runs while the next chunk is computed
    signal   one kernel over all tiles in chunk order, with a flag for each chunk between it and the communication
             stream
    push     of sums: one kernel whose tiles go to the memory of the rank that adds them (push.py)

``split`` needs nothing but a communicator that returns pending work. ``signal`` needs Triton on a GPU; on a CPU the
same order, flags and communication stream are used, with torch (or, under the interpreter, the kernel itself) computing
the segments. ``push`` needs kernels, and memory that those of all ranks reach. A strategy that cannot run is an error,
never another strategy in silence. Shapes are 2-D here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from axo_kernels import device as devices
from axo_kernels.comm.communicator import FusedCommunicator, FusedRun, Pending
from axo_kernels.fused.chunks import ChunkOrder, chunk_bounds, chunk_order
from axo_kernels.fused.push import push
from axo_kernels.fused.segments import SegmentedProduct, rows_of
from axo_kernels.gemm.layout import Product, product_of
from axo_kernels.gemm.matmul import check_config, vendor_matmul
from axo_kernels.gemm.tiles import Config

STRATEGIES = ("serial", "split", "signal", "push")

Finish = Callable[[], object]
Multiply = Callable[..., torch.Tensor]  # (a, b, out=..., bias=...)


@dataclass(frozen=True)
class FusedPlan:
    """How a fused operation runs.

    Attributes:
        strategy: One of ``STRATEGIES``.
        chunks: Pieces in which the rows travel; ignored by ``"serial"`` and ``"push"``.
        config: Tiles of ``"signal"`` and ``"push"``; None takes the default.
        multiply: How ``"serial"`` and ``"split"`` multiply (the tuner's choice); None: the vendor library.
        channels: What the collectives of ``"signal"`` are capped at, and the product leaves free; 0: as they come.
        windows: Gathers of ``"split"`` and ``"signal"`` go from window to window of the library, and take no
            multiprocessor.
    """

    strategy: str = "serial"
    chunks: int = 1
    config: Config | None = None
    multiply: Multiply | None = None
    channels: int = 0
    windows: bool = False

    def check(self, operation: str, device: torch.device, comm: FusedCommunicator) -> None:
        """Refuse an unknown strategy, and one that this device or these ranks cannot run.

        Raises:
            ValueError: The message says what would do.
        """
        if self.strategy not in STRATEGIES:
            raise ValueError(f"{operation}: strategy={self.strategy!r}; use one of {', '.join(STRATEGIES)}")
        if isinstance(self.chunks, bool) or not isinstance(self.chunks, int) or self.chunks < 1:
            raise ValueError(f"{operation}: chunks={self.chunks!r}; use a whole number of at least 1")
        check_config(operation, self.config)
        if self.strategy == "signal" and device.type != "cpu" and not devices.runs_triton(device):
            raise ValueError(
                f"{operation}: strategy='signal' needs triton and a GPU that it serves (sm_80 or later, or AMD's), "
                f"which {device} is not here; use 'split'"
            )

        if self.windows and not (self.strategy in ("split", "signal") and "gather" in operation):
            raise ValueError(f"{operation}: windows=True is for gathers of strategy='split' or 'signal'; leave it out")
        if self.strategy == "push":
            why = "is for sums" if "gather" in operation else unreachable(comm, device)
            if why:
                raise ValueError(f"{operation}: strategy='push' {why}; use 'split'")

    @property
    def of_gather(self) -> FusedPlan:
        """How the gather of a sum's backward pass runs: a push is for sums, so that it is serial there."""
        return FusedPlan() if self.strategy == "push" else self

    def engine(self, device: torch.device) -> str:
        """Who multiplies."""
        if self.strategy in ("serial", "split"):
            return "torch" if self.multiply is None else "tuned"
        if devices.interpreted() and device.type == "cpu":
            return "interpreter"
        return "triton" if device.type == "cuda" and devices.gemm_kernels() is not None else "torch"

    def begin(
        self, operation: str, a: torch.Tensor, layout: str, collective: str, rows: int, comm: FusedCommunicator
    ) -> tuple[Multiply, ChunkOrder]:
        """What each operation begins with: report what kernels left behind, check, cut ``rows``, record what runs.

        Chunk borders lie on tile borders on a GPU, whose tiles are large enough to matter.
        """
        comm.poll()
        self.check(operation, a.device, comm)
        pieces = self.chunks if self.strategy in ("split", "signal") else 1
        order = chunk_order(collective, rows, pieces, comm.rank, comm.size, 128 if a.device.type == "cuda" else 1)
        comm.ran.append(FusedRun(operation, self.strategy, self.chunks, layout, self.engine(a.device)))
        return self.multiply or partial(vendor_matmul, layout=layout), order


def unreachable(comm: FusedCommunicator, device: torch.device) -> str:
    """Why ``push`` cannot run there; "" where it can. Collective at its first call."""
    return comm.unreachable(device)


def start_all_reduce(
    a: torch.Tensor,
    b: torch.Tensor,
    comm: FusedCommunicator,
    layout: str,
    way: FusedPlan,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Finish]:
    """Begin ``sum over ranks of A B``; the result may be read after ``finish()``.

    Between the two the caller may compute something else on the compute stream. ``bias`` is added by rank 0 alone, so
    that it enters the sum once.
    """
    product = product_of(a, b, layout)
    multiply, order = way.begin("matmul_all_reduce", a, layout, "all_reduce", product.m, comm)
    bias = bias if comm.rank == 0 else None
    if way.strategy == "serial":
        out = multiply(a, b, bias=bias)
        return out, comm.all_reduce(out).wait
    out = torch.empty((product.m, product.n), dtype=a.dtype, device=a.device)
    if way.strategy == "split":
        works = []
        for segment in order.segments:
            multiply(rows_of(a, layout, segment), b, out=out[segment.written], bias=bias)
            works.append(comm.all_reduce(out[segment.written]))
        return out, partial(_wait, works)
    if way.strategy == "push":
        steps = push("matmul_all_reduce", product, a, b, out, comm, way.config, bias)
        next(steps, None)
        return out, partial(deque, steps, 0)
    comm = comm.capped(way.channels)
    workspace = comm.workspaces.get("matmul_all_reduce", order, product, a.device)
    workspace.advance()
    comm.fork(a.device)

    def communicate() -> None:
        for chunk, (start, stop) in enumerate(order.bounds):
            comm.wait_flag(workspace, chunk)
            comm.all_reduce(out[start:stop])

    SegmentedProduct(product, workspace, comm, bias, way.config).produce(a, b, out, communicate)
    return out, comm.join


def run_reduce_scatter(
    a: torch.Tensor,
    b: torch.Tensor,
    comm: FusedCommunicator,
    layout: str,
    way: FusedPlan,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return this rank's block of rows of ``sum over ranks of A B``: ``(M / size, N)``, in ``out`` (contiguous)."""
    product = product_of(a, b, layout)
    multiply, order = way.begin("matmul_reduce_scatter", a, layout, "reduce_scatter", product.m, comm)
    if out is None:
        out = torch.empty((order.rows, product.n), dtype=a.dtype, device=a.device)
    if way.strategy == "serial":
        comm.reduce_scatter(out, multiply(a, b)).wait()
        return out
    if way.strategy == "push":
        deque(push("matmul_reduce_scatter", product, a, b, out, comm, way.config), 0)
        return out
    comm = comm.capped(way.channels)
    workspace = comm.workspaces.get("matmul_reduce_scatter", order, product, a.device)
    if way.strategy == "signal":
        workspace.advance()
    packed = workspace.buffer((product.m, product.n), a.dtype, a.device)
    if way.strategy == "split" and _by_columns(product, order):
        parts, works = torch.empty_like(out), deque[tuple[torch.Tensor, torch.Tensor, Pending]]()
        for start, stop in chunk_bounds(product.n, order.chunks, 128 if a.is_cuda else 1):
            piece, part = (
                each.view(-1)[len(each) * start : len(each) * stop].view(len(each), -1) for each in (packed, parts)
            )
            multiply(a, b[start:stop] if layout == "NT" else b[:, start:stop], out=piece)
            works.append((out[:, start:stop], part, comm.reduce_scatter(part, piece)))
        for columns, part, work in works:
            work.wait()
            columns.copy_(part)
        return out

    def scatter(chunk: int) -> Pending:
        return comm.reduce_scatter(out[slice(*order.bounds[chunk])], packed[slice(*order.packed(chunk))])

    if way.strategy == "split":
        pending = []
        blocks = a.unflatten(1 if layout == "TN" else 0, (comm.size, order.rows))
        for chunk, (start, stop) in enumerate(order.bounds):
            # rows of a chunk in every rank's block: one product over a batch of blocks
            rows = blocks[:, :, start:stop].transpose(0, 1) if layout == "TN" else blocks[:, start:stop]
            into = packed[slice(*order.packed(chunk))].view(comm.size, stop - start, product.n)
            multiply(rows, b.expand(comm.size, *b.shape), out=into)
            pending.append(scatter(chunk))
        _wait(pending)
        return out
    comm.fork(a.device)

    def communicate() -> None:
        for chunk in range(order.chunks):
            comm.wait_flag(workspace, chunk)
            scatter(chunk)

    SegmentedProduct(product, workspace, comm, None, way.config).produce(a, b, packed, communicate)
    comm.join()
    return out


def _by_columns(product: Product, order: ChunkOrder) -> bool:
    """Whether a split reduce-scatter moves less memory in chunks of columns: each then reads all of A, where chunks of
    rows read all of B, and its part of the result comes in a piece of its own, which is read and written once more."""
    m, n, k = product.m, product.n, product.k
    return (order.chunks - 1) * (n - m) * k > 2 * order.rows * n


def run_all_gather(
    a: torch.Tensor,
    b: torch.Tensor,
    comm: FusedCommunicator,
    layout: str,
    gather: str,
    way: FusedPlan,
    bias: torch.Tensor | None = None,
    keep: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gather one operand's shards (rows, dim 0) and multiply; return the product and, with ``keep``, what was gathered.

    ``gather="a"``: A's rows are rows of the result (NN, NT). ``gather="b"``: B's rows are columns of the result (NT).
    What is kept is in rank order, since the backward pass sums over these rows and reads them at one stride; a chunk
    comes with its ranks side by side. So it is copied once; by ``signal`` on the communication stream.
    """
    if not gathers(gather, layout):
        raise ValueError(
            f"all_gather_matmul: gather={gather!r} with layout={layout!r}; the gathered rows must be rows or columns "
            f"of the result: use gather='a' with NN or NT, or gather='b' with NT"
        )
    shard, other = (a.contiguous(), b) if gather == "a" else (b.contiguous(), a)
    rows, depth = shard.shape
    product = product_of(a, b, layout)
    multiply, order = way.begin("all_gather_matmul", a, layout, "all_gather", rows, comm)
    if way.strategy == "serial":
        full = gathered(shard, comm)
        first, second = (full, other) if gather == "a" else (other, full)
        return multiply(first, second, bias=bias), full if keep else None
    m = comm.size * rows if gather == "a" else product.m
    n = product.n if gather == "a" else comm.size * rows
    out = torch.empty((m, n), dtype=a.dtype, device=a.device)
    product = Product(layout, m, n, product.k, a.dtype)
    if way.strategy == "split":
        return out, split_gather(shard, other, out, comm, order, gather, multiply, bias, keep, way.windows)
    comm = comm.windowed() if way.windows else comm.capped(way.channels)
    workspace = comm.workspaces.get("all_gather_matmul " + gather, order, product, a.device)
    workspace.advance()
    packed = workspace.buffer((comm.size * rows, depth), a.dtype, a.device, comm.empty)
    for rows_in_order, span, count in _by_rank(packed, order):
        rows_in_order[comm.rank].copy_(shard[span].unflatten(0, (count, -1)))
    kept = shard.new_empty((comm.size * rows, depth)) if keep and order.chunks else None
    first, second = (packed, other) if gather == "a" else (other, packed)
    comm.fork(a.device)
    try:
        for chunk in range(order.chunks):  # the producer of the flags comes first in host order
            ranks = packed[slice(*order.packed(chunk))]
            comm.all_gather(ranks, ranks.chunk(comm.size)[comm.rank])
            if kept is None or chunk + 1 < order.chunks:
                comm.write_flag(workspace, chunk)
            else:
                comm.keep(workspace, packed, kept)
        SegmentedProduct(product, workspace, comm, bias, way.config).consume(first, second, out, gather)
    except BaseException:
        comm.abandon()
        raise
    comm.join()
    return out, kept


def split_gather(
    shard: torch.Tensor,
    other: torch.Tensor,
    out: torch.Tensor,
    comm: FusedCommunicator,
    order: ChunkOrder,
    gather: str,
    multiply: Multiply,
    bias: torch.Tensor | None,
    keep: bool,
    windows: bool = False,
) -> torch.Tensor | None:
    """Multiply one's own rows into ``out`` while the first chunks travel, then each chunk as it comes.

    Half of the chunks travel at a time, so that no more than half of the operand lies here twice. Each is copied to its
    place in what is kept when it comes, while the next ones travel. ``windows``: from a window of the library to
    another, which are kept from call to call: each collective follows what has read them before.
    """
    rows, depth = shard.shape
    full = shard.new_empty((comm.size, rows, depth)) if keep else None
    sent, packed = shard, None
    if windows:
        comm = comm.windowed()
        workspace = comm.workspaces.get("windows", order, (depth, shard.dtype), shard.device)
        packed = workspace.buffer((comm.size * rows, depth), shard.dtype, shard.device, comm.empty)
        sent = workspace.buffer((rows, depth), shard.dtype, shard.device, comm.empty).copy_(shard)

    def start(chunk: int) -> tuple[torch.Tensor, Pending]:
        first, last = order.packed(chunk)
        arriving = shard.new_empty((last - first, depth)) if packed is None else packed[first:last]
        return arriving, comm.all_gather(arriving, sent[slice(*order.bounds[chunk])])

    travelling = deque(start(chunk) for chunk in range(-(-order.chunks // 2)))
    first, second = (shard, other) if gather == "a" else (other, shard)
    own = slice(comm.rank * rows, (comm.rank + 1) * rows)
    into = out[own] if gather == "a" else out[:, own]
    multiply(first, second, out=into, bias=bias if bias is None or gather == "a" else bias[own])
    for chunk, (begin, end) in enumerate(order.bounds):
        arrived, work = travelling.popleft()
        work.wait()
        following = chunk + -(-order.chunks // 2)
        if following < order.chunks:
            travelling.append(start(following))
        if full is not None and packed is None:
            full[:, begin:end] = arrived.view(comm.size, end - begin, depth)
        for ranks in (slice(0, comm.rank), slice(comm.rank + 1, comm.size)):
            if ranks.start < ranks.stop:
                _chunk_product(multiply, arrived, other, out, order, chunk, ranks, gather, bias)
    if full is not None and packed is not None:
        for rows_in_order, span, count in _by_rank(packed, order):
            full[:, span].unflatten(1, (count, -1)).copy_(rows_in_order)
    return None if full is None else full.view(-1, depth)


def _by_rank(packed: torch.Tensor, order: ChunkOrder) -> Iterator[tuple[torch.Tensor, slice, int]]:
    """Of each run of chunks what lies packed, ``[rank][chunk][rows]``, its rows of a shard, and how many chunks."""
    for span, count in order.runs:
        part = packed[order.size * span.start : order.size * span.stop]
        yield part.unflatten(0, (count, order.size, -1)).transpose(0, 1), span, count


def _chunk_product(
    multiply: Multiply,
    arrived: torch.Tensor,
    other: torch.Tensor,
    out: torch.Tensor,
    order: ChunkOrder,
    chunk: int,
    ranks: slice,
    gather: str,
    bias: torch.Tensor | None,
) -> None:
    """Multiply a chunk's rows of neighbouring ranks into their places: one product over a batch of ranks.

    arrived: ``[rank][rows of the chunk]`` of the gathered operand. A rank's part of ``out`` has ``order.rows``.
    """
    span, count = slice(*order.bounds[chunk]), ranks.stop - ranks.start
    rows = arrived.unflatten(0, (order.size, span.stop - span.start))[ranks]
    spread = other.expand(count, *other.shape)
    if gather == "a":
        multiply(rows, spread, out=out.unflatten(0, (order.size, order.rows))[ranks, span], bias=bias)
        return
    into = out.unflatten(1, (order.size, order.rows)).transpose(0, 1)[ranks, :, span]
    if bias is None:
        multiply(spread, rows, out=into)
    else:  # of each rank its own columns of the bias
        torch.baddbmm(bias.view(order.size, 1, order.rows)[ranks, :, span], spread, rows.mT, out=into)


def gathered(shard: torch.Tensor, comm: FusedCommunicator) -> torch.Tensor:
    """The rows of all ranks, in rank order."""
    full = shard.new_empty((comm.size * shard.shape[0], shard.shape[1]))
    comm.all_gather(full, shard).wait()
    return full


def gathers(gather: str, layout: str) -> bool:
    """Whether the gathered rows of that operand are rows or columns of the result."""
    return (gather, layout) in (("a", "NN"), ("a", "NT"), ("b", "NT"))


def _wait(works: list[Pending]) -> None:
    for work in works:
        work.wait()
