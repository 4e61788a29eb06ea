"""A kernel whose wait for a flag has given up: who used the layer is told, with rank, chunk and epoch.

The kernels run in Triton's interpreter, on two ranks forked from its process. What the tuner would have kept stands on
rank 0's disk, so that the weight is gathered by `signal`. On a GPU a kernel gives up behind the host's back: there
`late` stands for it, which lets a real kernel wait in vain for what nobody will set.
"""

import multiprocessing
import os
import re
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import axo
from axo.matmul.products import products_of

ROWS, IN, OUT = 8, 24, 32


def _rank(function, rank, folder, pipe):
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", AXO_TUNE="cached", AXO_TUNE_CACHE=folder)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    try:
        pipe.send((True, function()))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    os._exit(0)  # a rank may be inside a collective that the other never enters


def on_two_ranks(function, folder):
    """Call a function on both; their results."""
    context, pipes = multiprocessing.get_context("fork"), []
    for rank in range(2):
        mine, theirs = context.Pipe()
        context.Process(target=_rank, args=(function, rank, folder, theirs), daemon=True).start()
        pipes.append(mine)
    found = [pipe.recv() for pipe in pipes]
    assert all(ok for ok, _ in found), "\n".join(value for ok, value in found if not ok)
    return [value for _, value in found]


def signalled_layer(timeout):
    """A layer by hand on two ranks of z."""
    from axo_kernels import FusedCommunicator
    from axo_kernels import device as devices
    from axo_kernels.gemm.layout import Product
    from axo_kernels.gemm.tiles import Config
    from axo_kernels.tune.cache import Cache
    from axo_kernels.tune.choice import Choice, fused_name

    product = Product("NT", ROWS, OUT // 2, IN, torch.float32)
    name = fused_name("all_gather_matmul_kept", "b", FusedCommunicator(0, 2), product)
    if os.environ["RANK"] == "0":
        tile = Config(16, 16, 16, group_m=2, warps=1, stages=1)
        kept = Choice("triton", "NT", tile, "signal", 2)
        cache = Cache(devices.device_name(torch.device("cpu")), devices.versions(), Path(os.environ["AXO_TUNE_CACHE"]))
        cache.put({name: kept.to_json()})
    comms = axo.connect("1x1x2x1", timeout=timeout)
    layer = axo.nn.Linear(IN, OUT, comms=comms)
    x = torch.ones(ROWS, IN, requires_grad=True)
    step(layer, x)
    record = products_of(comms).fused.on("z").ran[-1]
    assert (record.strategy, record.chunks, record.engine) == ("signal", 2, "interpreter")
    report = products_of(comms).fused.report
    assert report.pop(name).endswith(" signal/2") and set(report.values()) <= {"own way: not measured"}
    return comms, layer, x


def step(layer, x):
    layer(x).square().sum().backward()


def silent_peer():
    """Rank 1 never comes to the second product; rank 0's is told by the layer itself."""
    from axo_kernels import SignalTimeout

    comms, layer, x = signalled_layer(2.0)
    store = dist.distributed_c10d._get_default_store()
    if comms.rank == 1:
        store.wait(["told"])
        return None
    with pytest.raises(SignalTimeout) as caught:
        layer(x)
    store.set("told", "1")
    return str(caught.value)


@pytest.mark.soak
def test_a_layer_reports_a_silent_peer(interpreter, tmp_path):
    message, _ = interpreter.run(on_two_ranks, silent_peer, str(tmp_path))
    assert re.fullmatch(  # neither chunk has come; the last program that gave up has written which it was waiting for
        r"all_gather_matmul b: rank 0 of 2 waited 2 s for chunk [01] \(rows of rank 1\) of epoch 2; "
        r"its flag stands at 1: a peer has not signalled",
        message,
    ), message


def late(comms):
    """What a kernel on a GPU does after the host has gone on: wait for the next epoch of chunk 1, and give up."""
    from axo_kernels.fused.kernels import wait_flag_kernel

    [workspace] = products_of(comms).fused.on("z").workspaces.all()
    epoch = workspace.epoch
    wait_flag_kernel[(1,)](workspace.flags[1:], epoch.word, epoch.counted + 1, workspace.status, 3, 1)
    return rf"rank {comms.rank} of 2 waited 60 s for chunk 1 \(rows of rank {1 - comms.rank}\) of epoch "


def reported_late():
    from axo_kernels import SignalTimeout

    comms, layer, x = signalled_layer(60.0)
    output = layer(x)
    message = late(comms)
    with pytest.raises(SignalTimeout, match=message + "3; its flag stands at 2"):
        output.square().sum().backward()
    step(layer, x)  # told once, and nothing is left of that pass
    message = late(comms)
    with pytest.raises(SignalTimeout, match=message + "4"), torch.no_grad():
        layer(x)
    message = late(comms)
    with pytest.raises(SignalTimeout, match=message + "4"):
        comms.poll()
    comms.poll()
    layer.zero_grad()
    step(layer, x)
    expected = torch.nn.functional.linear(x.detach(), layer.full_weight(), layer.bias)
    gradient = (2 * expected.T @ x.detach())[16 * comms.rank :][:16]
    torch.testing.assert_close(layer.weight.grad, gradient, rtol=1e-5, atol=1e-5)  # fp32 sums of 32 terms


def test_what_a_kernel_reports_later_ends_the_backward_pass_or_the_next_product(interpreter, tmp_path):
    interpreter.run(on_two_ranks, reported_late, str(tmp_path))
