"""The chunks of fused operations in their order, run by a small machine of streams and flags without a tensor."""

import random
from dataclasses import dataclass

import pytest

from axo_kernels.fused.chunks import (
    NO_FLAG,
    OPERATIONS,
    chunk_bounds,
    chunk_order,
    next_epoch,
    reached,
    tile_table,
)

SIZES = (1, 2, 3, 4)
CHUNKS = (1, 2, 4, 7)


@dataclass(frozen=True)
class Step:
    """One step of a stream: ``compute`` a segment, ``wait`` for or ``write`` a flag, or run the ``collective``."""

    kind: str
    index: int


def compute_steps(order):
    """What the compute stream does: segments by number, with the flags that its kernel waits for or writes."""
    remaining = [0] * order.chunks
    for segment in order.segments:
        if segment.flag != NO_FLAG:
            remaining[segment.flag] += 1
    for number, segment in enumerate(order.segments):
        if segment.flag != NO_FLAG and not order.signals:
            yield Step("wait", segment.flag)
        yield Step("compute", number)
        if segment.flag != NO_FLAG and order.signals:
            remaining[segment.flag] -= 1
            if not remaining[segment.flag]:
                yield Step("write", segment.flag)


def communication_steps(order):
    """What the communication stream does: the mirror image."""
    for chunk in range(order.chunks):
        if order.signals:
            yield Step("wait", chunk)
        yield Step("collective", chunk)
        if not order.signals:
            yield Step("write", chunk)


@pytest.mark.parametrize("rows", [0, 1, 7, 8, 29, 1000])
@pytest.mark.parametrize("multiple", [1, 8, 128])
def test_chunks_cover_the_rows_once(rows, multiple):
    for chunks in CHUNKS:
        if chunks > rows > 0:
            with pytest.raises(ValueError, match=f"{chunks} chunks do not fit {rows} rows; use between 1 and {rows}"):
                chunk_bounds(rows, chunks, multiple)
            continue
        bounds = chunk_bounds(rows, chunks, multiple)
        assert len(bounds) == chunks
        assert [row for start, stop in bounds for row in range(start, stop)] == list(range(rows))
        assert rows == 0 or all(stop > start for start, stop in bounds)


def test_chunk_borders_fall_on_tiles():
    assert chunk_bounds(1000, 4, 128) == ((0, 256), (256, 512), (512, 768), (768, 1000))
    assert chunk_bounds(512, 7, 128)[0] == (0, 64)  # tiles of 128 would leave chunks empty


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("chunks", CHUNKS)
def test_each_row_is_read_and_written_once(operation, size, chunks):
    rows = 12 * size if operation != "all_gather" else 12
    for rank in range(size):
        order = chunk_order(operation, rows, chunks, rank, size)
        total = 12 * size
        for side in ("source", "target"):
            seen = [getattr(segment, side) + row for segment in order.segments for row in range(segment.rows)]
            assert sorted(seen) == list(range(total)), side
        packed = [row for chunk in range(chunks) for row in range(*order.packed(chunk))]
        assert packed == list(range(total))
        for segment in order.segments:
            assert segment.flag != NO_FLAG or (operation == "all_gather" and segment.peer == rank)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_own_rows_last_where_sent_and_first_where_received(operation):
    order = chunk_order(operation, 12, 3, 1, 4)
    peers = [segment.peer for segment in order.segments]
    if operation == "reduce_scatter":
        assert peers == [2, 3, 0, 1] * 3
    elif operation == "all_gather":
        assert peers == [1, 1, 1] + [2, 3, 0] * 3


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("chunks", CHUNKS)
def test_streams_meet_in_any_interleaving(operation, size, chunks):
    """All ranks' streams, stepped in random order: nothing hangs, nothing is read too early."""
    rng = random.Random(f"{operation}{size}{chunks}")
    rows = 12 * size if operation != "all_gather" else 12
    for _ in range(10):
        orders = [chunk_order(operation, rows, chunks, rank, size) for rank in range(size)]
        streams = {}
        for rank, order in enumerate(orders):
            streams[rank, "compute"] = list(compute_steps(order))
            streams[rank, "communicate"] = list(communication_steps(order))
        flags: set[tuple[int, int]] = set()
        computed: set[tuple[int, int]] = set()
        begun = [0] * size  # collectives a rank has entered; each completes once all ranks have entered it
        entered: dict[tuple[int, str], bool] = {}
        while any(streams.values()):
            ready = []
            for key, steps in streams.items():
                if not steps:
                    continue
                rank, step = key[0], steps[0]
                if step.kind == "wait" and (rank, step.index) not in flags:
                    continue
                if step.kind == "collective" and entered.get(key) and min(begun) <= step.index:
                    continue
                ready.append(key)
            assert ready, f"deadlock with {streams}"
            key = rng.choice(ready)
            rank, step = key[0], streams[key][0]
            order = orders[rank]
            if step.kind == "write":
                flags.add((rank, step.index))
            elif step.kind == "compute":
                segment = order.segments[step.index]
                if not order.signals and segment.flag != NO_FLAG:
                    assert min(begun) > segment.flag, "computed before the chunk had arrived"
                computed.add((rank, step.index))
            elif step.kind == "collective" and not entered.get(key):
                if order.signals:
                    mine = [n for n, segment in enumerate(order.segments) if segment.flag == step.index]
                    assert all((rank, n) in computed for n in mine), "sent before it was computed"
                assert begun[rank] == step.index, "collectives in chunk order"
                begun[rank] += 1
                entered[key] = True
                continue
            entered[key] = False
            streams[key].pop(0)


def test_tiles_do_not_straddle_chunks():
    order = chunk_order("reduce_scatter", 40, 3, 0, 2)
    table = tile_table(order, block=8, across=5)
    assert table.first_tile[0] == 0 and table.total == sum(-(-s.rows // 8) for s in order.segments) * 5
    assert sum(table.tiles_of_flag) == table.total
    for index, segment in enumerate(order.segments):
        assert table.first_tile[index + 1] - table.first_tile[index] == -(-segment.rows // 8) * 5


def test_epochs_wrap_around():
    last = 2**31 - 1
    assert next_epoch(last) == -(2**31) and next_epoch(-1) == 0 and next_epoch(5) == 6
    assert reached(last, last) and reached(next_epoch(last), last) and not reached(last, next_epoch(last))
    assert not reached(4, 5) and reached(5, 5) and reached(6, 5)


def test_what_does_not_fit_says_what_would():
    with pytest.raises(ValueError, match="30 rows do not divide over 4 ranks; pad to 32"):
        chunk_order("reduce_scatter", 30, 1, 0, 4)
    with pytest.raises(ValueError, match="chunks=0; use at least 1"):
        chunk_order("all_reduce", 30, 0, 0, 4)
    with pytest.raises(ValueError, match="rank=4 is not in a communicator of size 4"):
        chunk_order("all_reduce", 30, 1, 4, 4)
    with pytest.raises(ValueError, match="use one of all_reduce, reduce_scatter, all_gather"):
        chunk_order("broadcast", 30, 1, 0, 4)
