"""The chunks of a fused operation: which rows make one, which part of the product is computed when, which flag stands
for it. Pure Python: no tensor, no kernel, no device.

Three operations, with ``size`` ranks and C chunks over the rows that travel:

    all_reduce      out[M, N] = sum over ranks            chunk c: rows of out, in place, contiguous
    reduce_scatter  out[M/size, N], rank g keeps block g  chunk c: rows c of *every* block, packed [chunk][rank][rows]
    all_gather      operand[size * R, K] from shards      chunk c: rows c of *every* shard, packed [chunk][rank][rows]

A :class:`Segment` is a run of rows that lie together both where they are read and where they are written; the product
is computed segment by segment, in this order, so a tile never straddles a chunk. An all-reduce or a
reduce-scatter of chunk c may start when all its segments are computed (the product *signals*); a segment of an
all-gather may be computed when its chunk has arrived (the product *waits*). Within a chunk the next rank's rows come
first and one's own last where rows are sent, one's own first where rows are received.

Collectives are issued in chunk order on every rank, so the order is the same everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather")
NO_FLAG = -1
_WRAP = 1 << 32


@dataclass(frozen=True)
class Segment:
    """Rows that one stretch of tiles covers.

    Attributes:
        source: First row in the operand that is read.
        target: First row (or column, where a weight is gathered) in the result that is written.
        rows: How many.
        flag: The chunk whose flag belongs to them; NO_FLAG where nothing has to be waited for.
        peer: The rank whose rows these are; one's own for an all-reduce.
    """

    source: int
    target: int
    rows: int
    flag: int
    peer: int

    @property
    def read(self) -> slice:
        """The rows that are read."""
        return slice(self.source, self.source + self.rows)

    @property
    def written(self) -> slice:
        """The rows (or columns) that are written."""
        return slice(self.target, self.target + self.rows)


@dataclass(frozen=True)
class ChunkOrder:
    """What one rank computes and sends, in order.

    Attributes:
        operation: One of OPERATIONS.
        rank, size: Of the communicator.
        bounds: Rows ``[start, stop)`` of each chunk, inside the result, the block or the shard.
        segments: In the order in which they are computed.
    """

    operation: str
    rank: int
    size: int
    bounds: tuple[tuple[int, int], ...]
    segments: tuple[Segment, ...]

    def __hash__(self) -> int:
        """Without the segments, which follow from the rest: each fused operation looks up by its order."""
        return hash((self.operation, self.rank, self.size, self.bounds))

    @property
    def chunks(self) -> int:
        return len(self.bounds)

    @property
    def rows(self) -> int:
        """Rows of the result, the block or the shard."""
        return self.bounds[-1][1] if self.bounds else 0

    @property
    def signals(self) -> bool:
        """Whether the product sets flags (True) or waits for them (False)."""
        return self.operation != "all_gather"

    @property
    def runs(self) -> list[tuple[slice, int]]:
        """Neighbouring chunks of equally many rows: their rows together, and how many chunks they are."""
        runs: list[tuple[slice, int]] = []
        for start, stop in self.bounds:
            last, count = runs[-1] if runs else (slice(0, 0), 0)
            if count and (last.stop - last.start) == count * (stop - start):
                runs[-1] = slice(last.start, stop), count + 1
            else:
                runs.append((slice(start, stop), 1))
        return runs

    def packed(self, chunk: int) -> tuple[int, int]:
        """Rows ``[start, stop)`` of a chunk in the packed workspace (of the result itself for an all-reduce)."""
        start, stop = self.bounds[chunk]
        parts = 1 if self.operation == "all_reduce" else self.size
        return start * parts, stop * parts


@lru_cache(maxsize=1024)
def push_order(rows: int, rank: int, size: int) -> ChunkOrder:
    """What one rank computes where each tile goes to its owner at once: rows ``[g * block, (g + 1) * block)`` are rank
    g's, which may have fewer, or none. A segment for each owner, whose number is its flag, written from row 0 of the
    room that this rank has there; one's own last."""
    block = -(-rows // size)
    bounds = tuple((min(rows, owner * block), min(rows, (owner + 1) * block)) for owner in range(size))
    segments = [
        Segment(bounds[owner][0], 0, bounds[owner][1] - bounds[owner][0], owner, owner)
        for owner in _others_first(rank, size)
        if bounds[owner][0] < rows
    ]
    return ChunkOrder("push", rank, size, bounds, tuple(segments))


def chunk_bounds(rows: int, chunks: int, multiple: int = 1) -> tuple[tuple[int, int], ...]:
    """Cut rows into chunks of nearly equal size, borders on multiples of ``multiple`` where that leaves none empty.

    Raises:
        ValueError: There are fewer rows than chunks.
    """
    if chunks < 1:
        raise ValueError(f"fused product: chunks={chunks}; use at least 1")
    if rows and chunks > rows:
        raise ValueError(f"fused product: {chunks} chunks do not fit {rows} rows; use between 1 and {rows}")
    while multiple > 1 and -(-rows // multiple) < chunks:
        multiple //= 2
    units = -(-rows // multiple)
    borders = [min(rows, units * index // chunks * multiple) for index in range(chunks)] + [rows]
    return tuple((borders[index], borders[index + 1]) for index in range(chunks))


@lru_cache(maxsize=1024)
def chunk_order(operation: str, rows: int, chunks: int, rank: int, size: int, multiple: int = 1) -> ChunkOrder:
    """Return what one rank does, in which order.

    Args:
        operation: ``"all_reduce"``, ``"reduce_scatter"`` or ``"all_gather"``.
        rows: Rows of the whole product (all_reduce, reduce_scatter), or of one rank's shard (all_gather).
        chunks: Pieces in which they travel.
        rank, size: Of the communicator.
        multiple: Rows of a tile; chunk borders fall on its multiples where possible.

    Raises:
        ValueError: The rows do not divide over the ranks, or there are more chunks than rows.
    """
    if operation not in OPERATIONS:
        raise ValueError(f"fused product: operation={operation!r}; use one of {', '.join(OPERATIONS)}")
    if not 0 <= rank < size:
        raise ValueError(f"fused product: rank={rank} is not in a communicator of size {size}")
    if operation == "all_reduce":
        bounds = chunk_bounds(rows, chunks, multiple)
        segments = [Segment(start, start, stop - start, index, rank) for index, (start, stop) in enumerate(bounds)]
        return ChunkOrder(operation, rank, size, bounds, tuple(segments))
    if operation == "reduce_scatter":
        if rows % size:
            raise ValueError(
                f"matmul_reduce_scatter: {rows} rows do not divide over {size} ranks; pad to {-(-rows // size) * size}"
            )
        block = rows // size
        bounds = chunk_bounds(block, chunks, multiple)
        segments = [
            Segment(peer * block + start, size * start + peer * (stop - start), stop - start, index, peer)
            for index, (start, stop) in enumerate(bounds)
            for peer in _others_first(rank, size)
        ]
        return ChunkOrder(operation, rank, size, bounds, tuple(segments))
    bounds = chunk_bounds(rows, chunks, multiple)
    received = [
        Segment(size * start + peer * (stop - start), peer * rows + start, stop - start, index, peer)
        for index, (start, stop) in enumerate(bounds)
        for peer in _others_first(rank, size)[:-1]
    ]
    own = [
        Segment(size * start + rank * (stop - start), rank * rows + start, stop - start, NO_FLAG, rank)
        for start, stop in bounds
    ]
    return ChunkOrder(operation, rank, size, bounds, tuple(own + received))


def _others_first(rank: int, size: int) -> list[int]:
    return [(rank + 1 + step) % size for step in range(size)]


@dataclass(frozen=True)
class TileTable:
    """An order of segments in tiles, as the kernel reads it.

    Attributes:
        first_tile: Number of the first tile of each segment, and the total at the end.
        tiles_of_flag: How many tiles must be finished before a flag may be set.
    """

    first_tile: tuple[int, ...]
    tiles_of_flag: tuple[int, ...]

    @property
    def total(self) -> int:
        return self.first_tile[-1]


@lru_cache(maxsize=1024)
def tile_table(order: ChunkOrder, block: int, across: int) -> TileTable:
    """Count tiles: ``block`` rows a tile along the segments, ``across`` tiles in the other direction."""
    first, counts = [0], [0] * order.chunks
    for segment in order.segments:
        tiles = -(-segment.rows // block) * across
        first.append(first[-1] + tiles)
        if segment.flag != NO_FLAG:
            counts[segment.flag] += tiles
    return TileTable(tuple(first), tuple(counts))


def reached(flag: int, epoch: int) -> bool:
    """Say whether a flag has reached an epoch: 32-bit, cyclic, ``int32(flag - epoch) >= 0``."""
    return (flag - epoch) % _WRAP < _WRAP // 2


def next_epoch(epoch: int) -> int:
    """Advance a 32-bit epoch; after 2**31 - 1 comes -2**31."""
    return wrapped(epoch + 1)


def wrapped(epoch: int) -> int:
    """An epoch in 32 bits."""
    return (epoch + _WRAP // 2) % _WRAP - _WRAP // 2
