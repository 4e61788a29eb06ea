"""axo.connect on a GPU that is not there: every call of the Communicator on device tensors, between processes.

Oracles: those of test_collectives (each rank makes all ranks' inputs and reduces them serially), and the calls that the
stand-in saw. The stand-in's own rules fail a test through ``Gpu.violations``. See tests/standin.py for what this proves.
"""

import pytest
import torch

import axo
from tests import standin
from tests.launcher import run_ranks
from tests.test_collectives import FLOATS, INTEGERS, MOVED_ONLY, inputs, reduced, same


def connected(folder, grid=None, **options):
    import os

    gpu = standin.install(folder)
    comms = axo.connect(grid or f"{os.environ['WORLD_SIZE']}x1x1x1", device="standin", **options)
    assert comms.device == torch.device("standin", int(os.environ["LOCAL_RANK"])) == comms.x.device
    assert comms.x.transport == "nccl" and torch.accelerator.current_device_index() == comms.device.index
    return gpu, comms


def reductions(folder):
    gpu, comms = connected(folder)
    comm = comms.x
    for dtype in [*FLOATS, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool]:
        for op in ("sum", "avg", "product", "min", "max"):
            if dtype is torch.bool and op == "avg":
                continue
            for count in (0, 1000) if dtype is torch.float32 else (37,):
                mine = [t.to(comms.device) for t in inputs(comm.size, count, dtype)]
                expected = reduced(inputs(comm.size, count, dtype), op)
                what = f"{op} of {count} {dtype}"
                same(comm.all_reduce(mine[comm.rank].clone(), op).cpu(), expected, f"all_reduce {what}")
                whole = torch.cat([expected] * comm.size)
                part = comm.reduce_scatter(torch.cat([mine[comm.rank]] * comm.size), op=op)
                same(part.cpu(), whole[:count], f"reduce_scatter {what}")
                at_root = comm.reduce(mine[comm.rank].clone(), 1, op)
                if comm.rank == 1:
                    same(at_root.cpu(), expected, f"reduce {what}")
    for scale in (0.5, -2.0):
        mine = torch.arange(6.0, device=comms.device) + comm.rank
        expected = scale * (comm.size * torch.arange(6.0) + sum(range(comm.size)))
        same(comm.all_reduce(mine.clone(), scale=scale).cpu(), expected, "scaled sum")
        same(comm.reduce_scatter(mine[: comm.size].clone(), scale=scale).cpu(), expected[comm.rank : comm.rank + 1], "")
    with pytest.raises(axo.Error, match="int16"):
        comm.all_reduce(torch.ones(3, dtype=torch.int16, device=comms.device))
    assert not gpu.violations()


def moves(folder):
    gpu, comms = connected(folder)
    comm, device = comms.x, comms.device
    for dtype in [*FLOATS, *INTEGERS, torch.bool, *MOVED_ONLY]:
        for rows in (0, 1, 5):
            cpu = [t.reshape(rows, 2) for t in inputs(comm.size, 2 * rows, dtype)]
            mine = cpu[comm.rank].to(device)
            what = f"{rows} rows of {dtype}"
            same(comm.all_gather(mine).cpu(), torch.cat(cpu), f"all_gather {what}")
            same(comm.broadcast(mine.clone(), 1).cpu(), cpu[1], f"broadcast {what}")
            gathered = comm.gather(mine, 0)
            if comm.rank == 0:
                same(gathered.cpu(), torch.cat(cpu), f"gather {what}")
            whole = torch.cat(cpu).to(device)
            part = comm.scatter(whole if comm.rank == 0 else None, 0, None if comm.rank == 0 else torch.empty_like(mine))
            same(part.cpu(), cpu[comm.rank], f"scatter {what}")
            blocks = torch.cat([cpu[comm.rank]] * comm.size).to(device)
            same(comm.all_to_all(blocks).cpu(), torch.cat(cpu), f"all_to_all {what}")
            if comm.rank == 0:
                comm.send(mine, 1)
            elif comm.rank == 1:
                same(comm.recv(torch.empty_like(mine), 0).cpu(), cpu[0], f"recv {what}")
    # Parts of any size, some of none.
    rows = [[(3 * a + b) % 4 for b in range(comm.size)] for a in range(comm.size)]
    sent = torch.cat([torch.full((rows[comm.rank][to], 3), 10.0 * comm.rank + to) for to in range(comm.size)])
    counts = [rows[source][comm.rank] for source in range(comm.size)]
    got = comm.all_to_all(sent.to(device), send_counts=rows[comm.rank], recv_counts=counts)
    expected = [torch.full((count, 3), 10.0 * source + comm.rank) for source, count in enumerate(counts)]
    same(got.cpu(), torch.cat(expected), "uneven all_to_all")
    comm.barrier()
    comm.barrier(async_op=True).synchronize(5.0)
    # What is not contiguous, and what is a DLPack array of another library.
    table = (torch.arange(12.0).reshape(3, 4) + comm.rank).to(device)
    comm.all_reduce(table.T)
    plain = comm.size * torch.arange(12.0).reshape(3, 4) + sum(range(comm.size))
    same(table.cpu(), plain, "a view")
    pending = table.to(device).T
    assert comm.all_reduce(pending, "max", async_op=True).wait() is pending
    same(pending.cpu(), plain.T, "a pending view")
    array = Array(torch.ones(4, device=device))
    assert comm.all_reduce(array) is array
    same(array.tensor.cpu(), torch.full((4,), float(comm.size)), "a DLPack array")
    gathered = comm.all_gather(array)
    assert isinstance(gathered, Array) and gathered.tensor.numel() == 4 * comm.size
    with pytest.raises(ValueError, match=r"on cpu; this communicator moves memory of standin:\d, use .to\('standin"):
        comm.all_reduce(torch.ones(3))
    assert not gpu.violations()


class Array:
    """As another library's array looks to Axo: DLPack, and the array API's namespace."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack__(self, **_options):
        return torch.utils.dlpack.to_dlpack(self.tensor)

    def __dlpack_device__(self):
        return 12, self.tensor.device.index  # kDLExtDev, torch's PrivateUse1

    def __array_namespace__(self):
        return Array

    @staticmethod
    def from_dlpack(tensor):
        return Array(tensor)


CHECKS = [reductions, moves]


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_on_ranks(check, tmp_path):
    standin.build()
    run_ranks(check, 3, tmp_path)
