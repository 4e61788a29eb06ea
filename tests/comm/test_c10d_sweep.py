"""Every collective of the backend ``axo`` in every form of memory, with every way to take the result.

A case is a collective, one of 16 dtypes, where its tensors lie, how its end is seen, and an operation. Oracle: the
formula on the values that all ranks had before, which each rank makes from the seed of the case; and the bytes around
the results, which stay. `make test` draws some hundred cases, and the soak all of them.
"""

from __future__ import annotations

import itertools
import random

import pytest
import torch
import torch.distributed as dist

from tests.launcher import run_ranks

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
COMPLEX = (torch.complex64, torch.complex128)
DTYPES = (*FLOATS, *INTEGERS, torch.bool, *EIGHT_BITS, *COMPLEX)
ENDS = ("blocking", "waited", "polled", "dropped", "last", "future")
# Where tensors lie: "arena": anywhere in one tensor, results apart from each other; "place": where the core takes it as
# in place; "flat": results, and inputs, one after the other.
PLACES = ("apart", "strided", "columns", "expanded", "arena", "place", "flat", "empty", "scalar", "inference", "large")
REDUCE = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_uneven", "reduce_scatter_tensor", "coalesced")
MOVE = ("broadcast", "all_gather", "all_gather_uneven", "all_gather_into_tensor", "gather", "scatter", "all_to_all")
MOVE += ("all_to_all_single", "send_recv", *(("gather_single",) if hasattr(dist, "gather_single") else ()))
OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL")
IN_PLACE = ("broadcast", "all_reduce", "reduce", "coalesced")  # the inputs are the results
ONE_TENSOR = ("all_gather_into_tensor", "gather_single", "reduce_scatter_tensor", "all_to_all_single")


def is_defined(op, dtype):
    if dtype in FLOATS:
        return not op.startswith("B")
    if dtype in INTEGERS:
        return op != "PREMUL"
    if dtype is torch.bool:
        return op not in ("AVG", "PREMUL")
    return dtype in COMPLEX and op in ("SUM", "AVG", "PREMUL")


def reduced(op, parts):
    """``op`` over the ranks' tensors, in a wide dtype, rounded once."""
    dtype = parts[0].dtype
    if dtype is torch.bool:
        whole = torch.stack(parts)
        if op == "BXOR":
            return whole.sum(0) % 2 == 1
        return whole.any(0) if op in ("SUM", "MAX", "BOR") else whole.all(0)
    wide = {torch.bfloat16: torch.float32, torch.float16: torch.float32}.get(dtype, dtype)
    wide = torch.int64 if dtype in INTEGERS else wide
    result, *others = (part.to(wide) for part in parts)
    for other in others:
        if op in ("SUM", "AVG", "PREMUL"):
            result = result + other
        elif op == "PRODUCT":
            result = result * other
        elif op in ("MIN", "MAX"):
            result = (torch.minimum if op == "MIN" else torch.maximum)(result, other)
        else:
            result = {"BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor}[op](result, other)
    if op == "AVG" and dtype in COMPLEX:
        return torch.view_as_complex(torch.view_as_real(result) / len(parts))
    if op == "AVG":
        result = result // len(parts) if dtype in INTEGERS else result / len(parts)
    return (result * 0.5 if op == "PREMUL" else result).to(dtype)  # of small whole numbers: exact


def values(generator, count, dtype):
    """Small whole numbers; for booleans any bytes."""
    if dtype is torch.bool:
        return torch.tensor([0, 1, 2, 16, 255], dtype=torch.uint8)[
            torch.randint(5, (count,), generator=generator)
        ].view(torch.bool)
    whole = torch.randint(4, (2 * count,), generator=generator).float()
    return torch.complex(*whole.chunk(2)).to(dtype) if dtype in COMPLEX and count else whole[:count].to(dtype)


def sizes_of(name, world, rank, n):
    """Elements of each input and of each result on ``rank``. Root: rank 1."""
    uneven, here = [n + r for r in range(world)], rank == 1
    return {
        "broadcast": ([n], [n]),
        "all_reduce": ([n], [n]),
        "reduce": ([n], [n]),
        "coalesced": ([n, n + 1], [n, n + 1]),
        "reduce_scatter": ([n] * world, [n]),
        "reduce_scatter_uneven": (uneven, [uneven[rank]]),
        "reduce_scatter_tensor": ([n * world], [n]),
        "all_gather": ([n], [n] * world),
        "all_gather_uneven": ([uneven[rank]], uneven),
        "all_gather_into_tensor": ([n], [n * world]),
        "gather": ([n], [n] * world if here else []),
        "gather_single": ([n], [n * world] if here else []),
        "scatter": ([n] * world if here else [], [n]),
        "all_to_all": ([n + (rank + r) % 3 for r in range(world)], [n + (rank + r) % 3 for r in range(world)]),
        "all_to_all_single": ([n * world], [n * world]),
        "send_recv": ([n], [n]),
    }[name]


def results_of(name, op, inputs, rank):
    """What the results on ``rank`` must hold; ``inputs[r]`` are the tensors that rank r put in. None: as before."""
    world = len(inputs)
    firsts = [each[0] if each else None for each in inputs]
    if name == "broadcast":
        return [firsts[1]]
    if name == "send_recv":
        return [firsts[(rank - 1) % world]]
    if name in ("all_reduce", "coalesced"):
        return [reduced(op, list(parts)) for parts in zip(*inputs, strict=True)]
    if name == "reduce":
        return [reduced(op, firsts)] if rank == 1 else [firsts[rank]]
    if name in ("reduce_scatter", "reduce_scatter_uneven"):
        return [reduced(op, [each[rank] for each in inputs])]
    if name == "reduce_scatter_tensor":
        return [reduced(op, [whole.chunk(world)[rank] if whole.numel() else whole for whole in firsts])]
    if name in ("all_gather", "all_gather_uneven") or (name == "gather" and rank == 1):
        return firsts
    if name == "all_gather_into_tensor" or (name == "gather_single" and rank == 1):
        return [torch.cat(firsts)]
    if name in ("gather", "gather_single"):
        return []
    if name == "scatter":
        return [inputs[1][rank]]
    if name == "all_to_all":
        return [each[rank] for each in inputs]
    n = firsts[0].numel() // world
    return [torch.cat([whole[rank * n : rank * n + n] for whole in firsts])]


def lay_out(place, name, sizes, dtype, rank, world, draw):
    """Tensors for the inputs and the results, and all memory that they lie in."""
    ins, outs = sizes
    if name in IN_PLACE:
        ins = []
    if name == "send_recv" and place in ("arena", "place"):
        place = "apart"  # two operations, of which neither may write what the other reads
    if place == "place" and ins and outs:
        larger, smaller = (outs, ins) if sum(outs) > sum(ins) else (ins, outs)
        arena = torch.zeros(sum(larger) + 3, dtype=dtype)
        big = list(arena[1 : 1 + sum(larger)].split(larger))
        start = 1 + (sum(larger[:rank]) if len(larger) > 1 else rank * smaller[0])
        if len(smaller) > 1 or name == "all_to_all_single":
            start = 1
        small = list(arena[start : start + sum(smaller)].split(smaller))
        return (small, big, [arena]) if larger is outs else (big, small, [arena])
    if place == "flat":
        one, other = (torch.zeros(sum(each), dtype=dtype) for each in (ins, outs))
        return list(one.split(ins)), list(other.split(outs)), [one, other]
    if place == "arena":
        room = sum(outs) + max([0, *ins])
        arena, start, results = torch.zeros(room + 2, dtype=dtype), draw.randrange(3), []
        for size in outs:
            results.append(arena[start : start + size])
            start += size
        starts = [draw.randrange(room + 3 - size) for size in ins]
        return [arena[s : s + size] for s, size in zip(starts, ins, strict=True)], results, [arena]
    memory, lists = [], []
    for counts in (ins, outs):
        tensors = []
        for size in counts:
            if place == "strided":
                memory.append(torch.zeros(2 * size + 1, dtype=dtype))
                tensors.append(memory[-1][1::2])
            elif place == "columns":
                memory.append(torch.zeros(size, 3, dtype=dtype))
                tensors.append(memory[-1][:, 1:2])
            elif place == "expanded" and counts is ins:
                memory.append(torch.zeros(1, dtype=dtype))
                tensors.append(memory[-1].expand(size))
            elif place == "scalar" and size == 1 and name not in ONE_TENSOR:
                memory.append(torch.zeros((), dtype=dtype))
                tensors.append(memory[-1])
            else:
                memory.append(torch.zeros(size, dtype=dtype))
                tensors.append(memory[-1])
        lists.append(tensors)
    return lists[0], lists[1], memory


def call(name, op, ins, outs, rank, world, async_op):
    first, result = ins[0] if ins else None, outs[0] if outs else None
    reduce_op = dist._make_nccl_premul_sum(0.5) if op == "PREMUL" else getattr(dist.ReduceOp, op)
    options = {"async_op": async_op}
    if name == "broadcast":
        return dist.broadcast(result, 1, **options)
    if name == "all_reduce":
        return dist.all_reduce(result, reduce_op, **options)
    if name == "coalesced":
        return dist.all_reduce_coalesced(outs, reduce_op, **options)
    if name == "reduce":
        return dist.reduce(result, 1, reduce_op, **options)
    if name in ("reduce_scatter", "reduce_scatter_uneven"):
        return dist.reduce_scatter(result, ins, reduce_op, **options)
    if name == "reduce_scatter_tensor":
        return dist.reduce_scatter_tensor(result, first, reduce_op, **options)
    if name in ("all_gather", "all_gather_uneven"):
        return dist.all_gather(outs, first, **options)
    if name == "all_gather_into_tensor":
        return dist.all_gather_into_tensor(result, first, **options)
    if name == "gather":
        return dist.gather(first, outs if rank == 1 else None, 1, **options)
    if name == "gather_single":
        return dist.gather_single(first, result, 1, **options)
    if name == "scatter":
        return dist.scatter(result, ins if rank == 1 else None, 1, **options)
    if name == "all_to_all":
        return dist.all_to_all(outs, ins, **options)
    if name == "all_to_all_single":
        return dist.all_to_all_single(result, first, **options)
    sent = dist.isend(first, (rank + 1) % world)  # around the ring
    received = dist.irecv(result, (rank - 1) % world)
    sent.wait()
    if async_op:
        return received
    return received.wait()


def see_the_end(work, end):
    """``work``: the only reference, in a list."""
    if end == "waited":
        work[0].wait()
    elif end == "polled":
        is_completed = getattr(work[0], "is_completed", None) or work[0].done
        while not is_completed():
            pass
    elif end == "future":
        getattr(work[0], "get_future", lambda: work[0])().wait()
    elif end == "dropped":
        work.clear()
        dist.barrier()
    elif end == "last":  # the earlier handle lives, and only the later one is waited for
        dist.all_reduce(torch.ones(1), async_op=True).wait()


def bits(tensor):
    return tensor.contiguous().view(torch.uint8) if tensor.dtype in EIGHT_BITS else tensor.contiguous()


def one_case(case, seed, rank, world):
    name, dtype, place, end, op = case
    n = {"empty": 0, "scalar": 1, "large": 300_000, "columns": 6}.get(place, 7)
    inputs, generator = [], torch.Generator().manual_seed(seed)
    for r in range(world):
        sizes = sizes_of(name, world, r, n)
        with torch.inference_mode(place == "inference"):
            ins, outs, memory = lay_out(place, name, sizes, dtype, r, world, random.Random(seed + r))
            for each in memory:
                each.copy_(values(generator, each.numel(), dtype).view(each.shape))
            read = outs if name in IN_PLACE else ins
            inputs.append([t.flatten().clone() for t in read])
            if r == rank:
                mine = ins, outs, memory
    ins, outs, memory = mine
    if name in REDUCE and not is_defined(op, dtype):
        with pytest.raises((ValueError, RuntimeError, TypeError)):
            call(name, op, ins, outs, rank, world, True)
        return
    if name == "send_recv" and end in ("dropped", "last"):
        end = "waited"  # collectives are not ordered after messages
    with torch.inference_mode(place == "inference"):
        around = [blanked(each.clone(), outs, each) for each in memory]
        work = [call(name, op, ins, outs, rank, world, end != "blocking")]
    if end != "blocking":
        see_the_end(work, end)
    results = results_of(name, op, inputs, rank)
    assert len(results) == len(outs)
    for got, right in zip(outs, results, strict=True):
        if dtype is torch.bool:  # any byte but 0 is true
            got, right = (each.contiguous().view(torch.uint8) != 0 for each in (got, right))
        assert torch.equal(bits(got.flatten()), bits(right.flatten())), (got, right)
    with torch.inference_mode(place == "inference"):
        for each, before in zip(memory, around, strict=True):
            assert torch.equal(bits(blanked(each, outs, each)), bits(before)), "written outside of the results"


def blanked(memory, outs, original):
    """``memory`` with zeros where the results lie in ``original``."""
    for out in outs:
        if out.untyped_storage().data_ptr() == original.untyped_storage().data_ptr():
            memory.as_strided(out.shape, out.stride(), out.storage_offset()).zero_()
    return memory


def cases():
    for name, dtype, place, end in itertools.product(REDUCE + MOVE, DTYPES, PLACES, ENDS):
        if place == "large" and dtype not in (torch.float32, torch.bool):
            continue
        for op in OPS if name in REDUCE else ("SUM",):
            yield name, dtype, place, end, op


def sweep(seed, count, part, parts):
    dist.init_process_group("axo")
    rank, world = dist.get_rank(), dist.get_world_size()
    drawn = list(cases())
    if count:
        drawn = random.Random(seed).sample(drawn, count)
    for number, case in enumerate(drawn[part::parts]):
        try:
            one_case(case, seed + number, rank, world)
        except BaseException as error:
            raise AssertionError(f"case {case}, seed {seed + number}: {error}") from error
    dist.barrier()
    return len(drawn[part::parts])


@pytest.mark.parametrize("world", [2, 3])
def test_a_sample(world):
    assert set(run_ranks(sweep, world, world, 500, 0, 1, timeout=120)) == {500}


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("world", "part"), [(world, part) for world in (2, 3) for part in range(4)])
def test_all(world, part):
    assert min(run_ranks(sweep, world, 17, 0, part, 4, timeout=3000)) > 10_000
