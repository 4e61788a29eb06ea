"""Every collective against an oracle: each rank makes all ranks' inputs from their seeds and reduces them serially.

Inputs of reductions are small whole numbers, so the sums, products, minima and maxima are exact in every dtype and the
comparison is equality. Rounding has a test of its own.
"""

import numpy as np
import pytest
import torch

import axo
from tests.launcher import run_ranks

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
MOVED_ONLY = [torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.complex128]
SIZES = [0, 1, 7, 1000, 50_003]  # the last crosses the borders of chunks


def inputs(world, count, dtype, seed=0, high=3):
    """The tensors of all ranks: whole numbers from 0 to high - 1."""
    tensors = []
    for rank in range(world):
        generator = torch.Generator().manual_seed(1000 * seed + rank)
        values = torch.randint(0, 2 if dtype is torch.bool else high, (count,), generator=generator)
        tensors.append(values.to(dtype))
    return tensors


def reduced(tensors, op):
    """The serial oracle, in float64 or int64."""
    dtype = tensors[0].dtype
    if dtype is torch.bool:
        stack = torch.stack(tensors)
        either, both = stack.any(0), stack.all(0)
        odd = stack.sum(0) % 2 == 1
        return {"sum": either, "max": either, "product": both, "min": both, "band": both, "bor": either, "bxor": odd}[
            op
        ]
    stack = torch.stack(tensors).to(torch.float64 if dtype.is_floating_point else torch.int64)
    if op in ("band", "bor", "bxor"):
        result = stack[0]
        for other in stack[1:]:
            result = {"band": result & other, "bor": result | other, "bxor": result ^ other}[op]
        return result.to(dtype)
    if op == "avg":
        mean = stack.sum(0) / len(tensors)
        return mean.to(dtype) if dtype.is_floating_point else mean.trunc().to(dtype)
    result = {"sum": stack.sum(0), "product": stack.prod(0), "min": stack.amin(0), "max": stack.amax(0)}[op]
    return result.to(dtype)


def same(got, expected, what):
    assert got.dtype == expected.dtype and got.shape == expected.shape, f"{what}: {got.dtype} {got.shape}"
    raw = (got.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8)) if got.numel() else (0, 0)
    assert got.numel() == 0 or torch.equal(*raw), f"{what}: {got.flatten()[:8]} is not {expected.flatten()[:8]}"


def check_reductions(dtypes, sizes):
    comm = axo.connect(f"{_world()}x1x1x1").world
    for dtype in dtypes:
        ops = ["sum", "product", "min", "max"]
        ops += ["band", "bor", "bxor"] if not dtype.is_floating_point else []
        ops += ["avg"] if dtype is not torch.bool else []
        for count in sizes:
            root, part = count % comm.size, slice(comm.rank * count, (comm.rank + 1) * count)
            every = inputs(comm.size, count, dtype, seed=count)
            longer = inputs(comm.size, count * comm.size, dtype, seed=count)
            for op in ops:
                what = f"{op} of {count} {dtype}"
                expected = reduced(every, op)
                mine = every[comm.rank].clone()
                assert comm.all_reduce(mine, op) is mine
                same(mine, expected, f"all_reduce {what}")
                out = torch.empty_like(expected)
                comm.all_reduce(every[comm.rank], op, out=out)
                same(out, expected, f"all_reduce out {what}")
                scattered = comm.reduce_scatter(longer[comm.rank], op=op)
                same(scattered, reduced([each[part] for each in longer], op), f"reduce_scatter {what}")
                result = comm.reduce(longer[comm.rank].clone(), root, op)
                if comm.rank == root:
                    same(result, reduced(longer, op), f"reduce {what}")
                else:
                    assert result is None


def check_moves(dtypes):
    comm = axo.connect(f"1x{_world()}x1x1").world
    rank, size = comm.rank, comm.size
    for dtype in dtypes:
        for count in SIZES:
            what = f"{count} {dtype}"
            every = inputs(size, count, dtype, seed=count)
            root = (count + 1) % size
            same(comm.all_gather(every[rank]), torch.cat(every), f"all_gather {what}")
            same(comm.broadcast(every[rank].clone(), root), every[root], f"broadcast {what}")
            gathered = comm.gather(every[rank], root)
            assert (gathered is None) == (rank != root)
            if rank == root:
                same(gathered, torch.cat(every), f"gather {what}")
            out = torch.empty_like(every[0])
            comm.scatter(torch.cat(every) if rank == root else None, root, out=out)
            same(out, every[rank], f"scatter {what}")
            sent = torch.cat([every[rank].roll(p) for p in range(size)])  # part p: its own, shifted by p
            received = torch.cat([every[r].roll(rank) for r in range(size)])
            same(comm.all_to_all(sent), received, f"all_to_all {what}")
            ring, left = torch.empty_like(every[0]), (rank - 1) % size
            pending = comm.send(every[rank], (rank + 1) % size, tag=5, async_op=True)
            same(comm.recv(ring, left, tag=5), every[left], f"recv {what}")
            pending.wait()
            if comm.transport != "shared-memory":
                with pytest.raises(axo.Error, match=r"ranks of one host.*name the peer"):
                    comm.recv(ring, None)
            elif rank:
                comm.send(every[rank], 0, tag=6)
            else:
                works = [comm.recv(torch.empty_like(ring), None, tag=6, async_op=True) for _ in range(size - 1)]
                results = [work.wait() for work in works]
                came = {work.source(): result for work, result in zip(works, results, strict=True)}
                for source in range(1, size):
                    same(came[source], every[source], f"recv from any {what}")
        comm.barrier()


def check_uneven_all_to_all():
    comm = axo.connect(f"1x1x{_world()}x1").world
    rank, size = comm.rank, comm.size

    def rows(source, target):  # rows that source sends to target: some zero
        return (source * 3 + target) % 4

    sent = torch.cat([torch.full((rows(rank, p), 5), 10.0 * rank + p) for p in range(size)])
    expected = torch.cat([torch.full((rows(p, rank), 5), 10.0 * p + rank) for p in range(size)])
    counts = {
        "send_counts": [rows(rank, p) for p in range(size)],
        "recv_counts": [rows(p, rank) for p in range(size)],
    }
    same(comm.all_to_all(sent, **counts), expected, "uneven")
    out = torch.empty_like(expected)
    same(comm.all_to_all(sent, out, async_op=True, **counts).wait(), expected, "uneven into out")


def check_rounding():
    """bf16 and fp16 accumulate in fp32 in rank order and round once; fp32 adds in rank order; so the bits are known."""
    comm = axo.connect(f"1x1x1x{_world()}").world
    for dtype in FLOATS:
        every = []
        for rank in range(comm.size):
            generator = torch.Generator().manual_seed(rank)
            every.append(torch.randn(10_007, generator=generator, dtype=torch.float64).to(dtype))
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        total = torch.zeros(10_007, dtype=wide)
        for tensor in every:
            total = total + tensor.to(wide)
        for _ in range(3):
            same(comm.all_reduce(every[comm.rank].clone()), total.to(dtype), f"sum {dtype}")
        same(comm.all_reduce(every[comm.rank].clone(), "avg"), (total / comm.size).to(dtype), f"avg {dtype}")


def check_extremes():
    """Minima and maxima of numbers of both signs, infinities and NaN, which wins: torch's own, to the last bit."""
    world = _world()
    comm = axo.connect(f"{world}x1x1x1").world
    for dtype in FLOATS:
        tensors = [torch.randn(1003, generator=torch.Generator().manual_seed(rank)).to(dtype) for rank in range(world)]
        for rank, tensor in enumerate(tensors):
            tensor[rank::97] = torch.nan
            tensor[rank + 7 :: 101] = torch.inf if rank % 2 else -torch.inf
        stack = torch.stack(tensors)
        assert stack.isnan().any() and stack.isinf().any()
        for op, expected in (("min", stack.amin(0)), ("max", stack.amax(0))):
            got = comm.all_reduce(tensors[comm.rank].clone(), op)
            assert torch.equal(got.isnan(), expected.isnan()), f"{op} of {dtype}: NaN"
            same(got.nan_to_num(0), expected.nan_to_num(0), f"{op} of {dtype}")


def check_strides_and_views():
    comm = axo.connect(f"{_world()}x1x1x1").world
    rank, size = comm.rank, comm.size
    base = torch.arange(24.0).view(4, 6)
    total = sum(base + r for r in range(size))
    for view in (lambda t: t.t(), lambda t: t[:, 1:4], lambda t: t[::2], lambda t: t.view(2, 2, 6).permute(2, 0, 1)):
        whole = base + rank
        untouched = (base + rank).fill_(-1)
        view(untouched).copy_(view(whole))
        target = untouched.clone()
        result = comm.all_reduce(view(target))
        same(result.contiguous(), view(total).contiguous(), "all_reduce of a view")
        untouched_mask = torch.ones_like(whole, dtype=torch.bool)
        view(untouched_mask).fill_(False)
        assert (target[untouched_mask] == -1).all(), "all_reduce wrote beside its view"
        pending = comm.all_gather(view(whole), async_op=True)
        same(pending.wait(), torch.cat([view(base + r) for r in range(size)]), "all_gather of a view")
        out = torch.empty(2, size * 24).t()[:, 0]
        comm.all_gather(whole.t(), out, async_op=True).wait()
        same(out.contiguous(), torch.cat([(base + r).t() for r in range(size)]).flatten(), "into a view")
    expanded = comm.all_gather(torch.tensor(float(rank)).expand(3))
    same(expanded, torch.arange(size).repeat_interleave(3).float(), "all_gather of an expanded tensor")
    with pytest.raises(ValueError, match="expanded"):
        comm.all_reduce(torch.tensor(1.0).expand(3))
    z = torch.tensor([1 + 2j, 3 - 1j]) * (rank + 1)
    conjugates = torch.cat([torch.tensor([1 - 2j, 3 + 1j]) * (r + 1) for r in range(size)])
    same(comm.all_gather(z.conj()), conjugates, "all_gather of a conjugate view")
    scalar = comm.all_gather(torch.tensor(float(rank)))
    same(scalar, torch.arange(size).float(), "0-dim all_gather")


def check_in_place_parts():
    comm = axo.connect(f"{_world()}x1x1x1").world
    rank, size = comm.rank, comm.size
    whole = torch.zeros(size * 100)
    mine = whole[rank * 100 : (rank + 1) * 100].fill_(rank + 1.0)
    comm.all_gather(mine, whole)
    same(whole, torch.arange(1.0, size + 1).repeat_interleave(100), "all_gather in place")
    comm.reduce_scatter(whole, mine)
    same(mine, torch.full((100,), (rank + 1.0) * size), "reduce_scatter in place")
    with pytest.raises(ValueError, match="overlap"):
        comm.all_gather(whole[50:150] if rank == 0 else whole[:100], whole)


def check_array_kinds():
    comm = axo.connect(f"{_world()}x1x1x1").world
    array = np.full((2, 3), comm.rank + 1, dtype=np.int32)
    assert comm.all_reduce(array) is array
    assert array.tolist() == [[sum(range(1, comm.size + 1))] * 3] * 2
    gathered = comm.all_gather(np.array([comm.rank], dtype=np.float64))
    assert isinstance(gathered, np.ndarray) and gathered.tolist() == list(range(comm.size))

    class OnlyDlpack:
        def __init__(self, tensor):
            self.tensor = tensor

        def __dlpack__(self, **options):
            return self.tensor.__dlpack__(**options)

        def __dlpack_device__(self):
            return self.tensor.__dlpack_device__()

    tensor = torch.ones(4)
    comm.all_reduce(OnlyDlpack(tensor))
    same(tensor, torch.full((4,), float(comm.size)), "DLPack")
    frozen = np.ones(3)
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        comm.all_reduce(frozen)
    with pytest.raises(TypeError, match="list is not a tensor"):
        comm.all_reduce([1.0])


def check_async_and_groups():
    comms = axo.connect("2x2x1x1" if _world() == 4 else f"{_world()}x1x1x1")
    world, rank = comms.world, comms.rank
    pending = []
    for round_number in range(20):
        comm = (world, comms.x, comms.y)[round_number % 3]
        tensor = torch.full((100 * round_number + 1,), float(rank))
        expected = float(sum(comms.grid.ranks(comm.axis, rank) if comm is not world else range(world.size)))
        pending.append((comm.all_reduce(tensor, async_op=True), expected))
    for work, expected in reversed(pending):  # in another order than issued
        result = work.wait()
        assert (result == expected).all() and work.is_completed() and work.exception() is None
    a, b = torch.ones(3), torch.full((2,), float(rank))
    with axo.group():
        comms.x.all_reduce(a)
        later = world.all_gather(b.clone(), async_op=True)
        with pytest.raises(axo.Error, match="still open"):
            later.wait()
        with axo.group():
            world.broadcast(b, root=1)
    assert (a == comms.x.size).all() and (b == 1.0).all()
    assert later.wait().tolist() == [float(r) for r in range(world.size) for _ in range(2)]


def check_split():
    comm = axo.connect(f"{_world()}x1x1x1").world
    half = comm.split(comm.rank % 2, key=-comm.rank)
    members = sorted((r for r in range(comm.size) if r % 2 == comm.rank % 2), reverse=True)
    assert (half.rank, half.size) == (members.index(comm.rank), len(members))
    assert half.all_gather(torch.tensor([comm.rank])).tolist() == members
    alone = comm.split(comm.rank)
    assert alone.size == 1 and alone.all_reduce(torch.ones(1)).item() == 1
    none = comm.split(-1 if comm.rank == 0 else 0)
    assert (none is None) == (comm.rank == 0)
    half.close()
    half.close()


def check_autograd_sees_the_write():
    comm = axo.connect(f"{_world()}x1x1x1").world
    x = torch.ones(3, requires_grad=True)
    y = x.exp()  # backward reads y
    comm.all_reduce(y.detach())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    with torch.inference_mode():
        assert comm.all_reduce(torch.ones(2))[0] == comm.size


def check_shared_buffers():
    comm = axo.connect(f"{_world()}x1x1x1").world
    for count in (0, 3, 70_000):
        shared = axo.empty_shared((count, 2), dtype=torch.float32)
        shared.fill_(comm.rank + 1.0)
        comm.all_reduce(shared[1:])
        expected = torch.full((count, 2), float(sum(range(1, comm.size + 1))))
        expected[:1] = comm.rank + 1.0
        same(shared, expected, "all_reduce in shared memory")
        gathered = comm.all_gather(shared, axo.empty_shared((comm.size * count, 2)))
        expected = expected.repeat(comm.size, 1)
        for rank in range(comm.size):
            expected[rank * count : rank * count + 1] = rank + 1.0
        same(gathered, expected, "all_gather in shared memory")


def _world():
    import os

    return int(os.environ["WORLD_SIZE"])


def test_reductions_of_every_dtype():
    run_ranks(check_reductions, 3, [*FLOATS, *INTEGERS, torch.bool], [0, 1, 7, 1000])


@pytest.mark.parametrize("world", [2, 8])
def test_reductions(world):
    run_ranks(check_reductions, world, [torch.float32, torch.bfloat16, torch.int32, torch.bool], SIZES)


def test_moves_of_every_dtype():
    run_ranks(check_moves, 3, [*FLOATS, *INTEGERS, torch.bool, *MOVED_ONLY])


@pytest.mark.parametrize("world", [2, 8])
def test_moves(world):
    run_ranks(check_moves, world, [torch.float32, torch.bool, torch.complex128])


CHECKS = [check_uneven_all_to_all, check_rounding, check_extremes, check_strides_and_views, check_in_place_parts]
CHECKS += [check_array_kinds, check_async_and_groups, check_split, check_autograd_sees_the_write, check_shared_buffers]


def check_all():
    for check in CHECKS:
        check()


@pytest.mark.parametrize("world", [2, 4])
def test_on_ranks(world):
    run_ranks(check_all, world)


def test_one_rank_needs_nobody():
    comms = axo.connect("1x1x1x1")
    tensor = torch.arange(6.0).view(3, 2)
    for comm in (comms.x, comms.y, comms.z, comms.data, comms.world):
        assert comm.all_reduce(tensor) is tensor and comm.transport == "none"
        same(comm.all_gather(tensor), tensor, "all_gather")
        same(comm.reduce_scatter(tensor, op="avg"), tensor, "reduce_scatter")
        same(comm.gather(tensor), tensor, "gather")
        same(comm.scatter(tensor), tensor, "scatter")
        same(comm.all_to_all(tensor), tensor, "all_to_all")
        same(comm.reduce(tensor), tensor, "reduce")
        assert comm.broadcast(tensor, async_op=True).wait() is tensor
        comm.barrier()
        assert comm.split(0).size == 1 and comm.split(-1) is None
    with axo.count_collectives() as counts:
        comms.x.all_reduce(tensor)
    assert counts == {}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: c.all_reduce(torch.ones(2), "mean"), "op='mean' is not an operation; use one of sum, avg"),
        (lambda c: c.all_reduce(torch.ones(2), "band"), "op='band' is not defined on torch.float32"),
        (lambda c: c.all_reduce(torch.ones(2, dtype=torch.complex64)), "not defined on torch.complex64"),
        (lambda c: c.all_reduce(torch.ones(2), out=torch.ones(3)), "out has 3 elements, expected 2"),
        (lambda c: c.all_reduce(torch.ones(2), out=torch.ones(2).double()), "out has dtype torch.float64, the input"),
        (lambda c: c.broadcast(torch.ones(2), root=1), "root=1 is not a rank"),
        (lambda c: c.all_to_all(torch.ones(2), send_counts=[3]), r"send_counts=\[3\] does not cut 2 rows"),
        (lambda c: c.all_reduce(torch.ones(2, device="meta")), "the tensor is on meta"),
        (lambda c: c.all_reduce(torch.ones(2).to_sparse()), "layout torch.sparse_coo"),
        (lambda c: c.send(torch.ones(2), peer=0), "peer=0 is this rank itself"),
        (lambda c: c.scatter(None), "the root must pass a tensor"),
    ],
)
def test_wrong_arguments_say_what_would_be_right(call, message):
    with pytest.raises(ValueError, match=message):
        call(axo.connect("1x1x1x1").x)
