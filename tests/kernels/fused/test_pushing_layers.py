"""Layers whose sums are pushed, on two ranks in Triton's interpreter: what they give, in what room, and where not.

Ranks' memory is files that both map, at addresses of their own, as GPUs of one host map each other's. Oracle: the same
product of whole tensors.
"""

import os
from pathlib import Path

import torch

import axo
from axo.matmul.products import products_of

from .test_reports import on_two_ranks

IN, OUT = 24, 32


def mapped(comm, nbytes, device):
    """What torch's symmetric memory is on GPUs. Collective."""
    from axo_kernels.comm.peers import PeerMemory

    name = comm.broadcast_text(f"{os.environ['AXO_TUNE_CACHE']}/room {len(os.listdir(os.environ['AXO_TUNE_CACHE']))}")
    Path(f"{name} {comm.rank}").write_bytes(bytes(nbytes))
    comm.maximum([0.0])
    every = [
        torch.from_file(f"{name} {rank}", shared=True, size=nbytes, dtype=torch.uint8) for rank in range(comm.size)
    ]
    return PeerMemory(every[comm.rank], tuple(each.data_ptr() for each in every), every)


def keep_pushes(*products):
    """What rank 0 has on disk: a push for each of (operation, product)."""
    from axo_kernels import FusedCommunicator
    from axo_kernels import device as devices
    from axo_kernels.gemm.tiles import Config
    from axo_kernels.tune.cache import Cache
    from axo_kernels.tune.choice import Choice, fused_name

    if os.environ["RANK"] != "0":
        return
    tile = Config(16, 16, 16, group_m=2, warps=1, stages=1)
    cache = Cache(devices.device_name(torch.device("cpu")), devices.versions(), Path(os.environ["AXO_TUNE_CACHE"]))
    cache.put(
        {
            fused_name(operation, "b", FusedCommunicator(0, 2), product, push=True): Choice(
                "triton", product.layout, tile, "push"
            ).to_json()
            for operation, product in products
        }
    )


def pushing():
    from axo_kernels import FusedCommunicator
    from axo_kernels.gemm.layout import Product

    FusedCommunicator.peer_memory = mapped
    few, many = (Product("NT", rows, OUT, IN // 2, torch.float32) for rows in (8, 12))
    of_weight = [Product("TN", OUT, IN, rows, torch.float32) for rows in (12, 0)]
    keep_pushes(
        ("matmul_all_reduce", few),
        ("matmul_all_reduce", many),
        *(("matmul_reduce_scatter", one) for one in of_weight),
    )
    comms = axo.connect("1x2x1x1")
    layer = axo.nn.Linear(IN, OUT, comms=comms)
    weight = layer.full_weight()
    for rows in (8, 12, 8, 10):  # of 10 nothing is kept
        x = torch.randn(rows, IN, generator=torch.Generator().manual_seed(rows))
        mine = x[:, comms.coords.y * IN // 2 :][:, : IN // 2]
        torch.testing.assert_close(layer(mine), x @ weight.T + layer.bias, rtol=1e-5, atol=1e-5)
    fused = products_of(comms).fused
    line = fused.on("y")
    assert [each.strategy for each in line.ran] == ["push"] * 3 and len(line.rooms) == 1
    assert sorted(each.split()[-1] for each in fused.report.values()) == ["measured", "push/1", "push/1"]

    comms = axo.connect("1x1x2x1")
    layer = axo.nn.Linear(IN, OUT, bias=False, comms=comms)
    for rows in ((12, 12), (0, 12)):  # of the two ranks: what is multiplied may be empty on one
        inputs = [torch.randn(count, IN, generator=torch.Generator().manual_seed(count)) for count in rows]
        # at once: what may run behind other layers is not fused
        gradient = torch.autograd.grad(layer(inputs[comms.rank]).sum(), layer.weight)[0]
        expected = sum(torch.ones(OUT, count) @ each for count, each in zip(rows, inputs, strict=True)) / 2
        mine = expected[comms.rank * OUT // 2 :][: OUT // 2]
        torch.testing.assert_close(gradient, mine, rtol=1e-5, atol=1e-5)
    line = products_of(comms).fused.on("z", "avg")
    assert [each.strategy for each in line.ran] == ["push"] * 2
    assert line.rooms is products_of(comms).fused.on("z").rooms and len(line.rooms) == 1


def test_layers_push_what_was_measured_as_faster(interpreter, tmp_path):
    interpreter.run(on_two_ranks, pushing, str(tmp_path))


def apart():
    """Each rank a host of its own, and then memory that one of them does not get: neither hangs."""
    from axo_kernels import FusedCommunicator
    from axo_kernels.comm import communicator
    from axo_kernels.gemm.layout import Product

    def full(comm, nbytes, device):
        comm.agreed(lambda: 1 // (1 - comm.rank))

    keep_pushes(("matmul_all_reduce", Product("NT", 8, OUT, IN // 2, torch.float32)))
    told, real = [], communicator.host_number
    for host, memory in ((lambda: int(os.environ["RANK"]), mapped), (real, full)):
        communicator.host_number, FusedCommunicator.peer_memory = host, memory
        comms = axo.connect("1x2x1x1")
        layer = axo.nn.Linear(IN, OUT, comms=comms)
        layer(torch.ones(8, IN // 2))
        told += products_of(comms).fused.report.values()
    return [each.removeprefix("own way: push needs memory that kernels of all ranks reach: ") for each in told]


def test_a_line_without_such_memory_goes_its_own_way(interpreter, tmp_path):
    hosts = "they are on several hosts"
    assert interpreter.run(on_two_ranks, apart, str(tmp_path)) == [
        [hosts, "another rank has none"],
        [hosts, "integer division or modulo by zero"],
    ]


def test_what_one_axis_pushes_another_that_cannot_does_not(monkeypatch):
    """Lines of x and y of one size, with one product: only those of x reach each other's memory."""
    from axo.matmul import fused as module
    from axo_kernels import FusedCommunicator
    from axo_kernels.gemm.layout import Product
    from axo_kernels.gemm.tiles import Config
    from axo_kernels.tune.choice import Choice, fused_name

    monkeypatch.setattr(module, "usable", lambda *all: True)
    product, cpu = Product("NT", 8, 8, 8, torch.float32), torch.device("cpu")
    lines = {axis: FusedCommunicator(0, 2) for axis in "xy"}
    lines["x"]._unreachable, lines["y"]._unreachable = "", "they are apart"
    pushed = Choice("triton", "NT", Config(16, 16, 16, warps=1, stages=1), "push")
    name = fused_name("matmul_all_reduce", "b", lines["x"], product)
    for chunked in (None, Choice("vendor", "NT", strategy="split", chunks=2)):
        entries = {f"{name} push": pushed.to_json()} | ({name: chunked.to_json()} if chunked else {})
        products = module.FusedProducts(None, None, entries)
        monkeypatch.setattr(products, "on", lambda axis: lines[axis])
        for _ in range(2):
            found = [products.choice("forward", "a layer", axis, product, cpu) for axis in "xy"]
            assert found == [pushed, chunked]
        assert products.report == {name: chunked.name if chunked else "own way: push they are apart"}
