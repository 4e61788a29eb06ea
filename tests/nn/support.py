"""Shared by the tests of the layers: comparison with serial PyTorch, and counts of bytes."""

import io
import itertools
import os

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import axo
from axo.matmul import cost


def assert_counted(counts, calls):
    """Fail unless what ``axo.count_collectives`` saw is what ``cost()`` lists, call for call and byte for byte."""
    expected = cost.total(calls)
    seen = {key: (count.calls, count.bytes) for key, count in counts.items()}
    assert seen == {key: (count.calls, count.bytes) for key, count in expected.items()}


def assert_close(actual, expected, limit, what):
    """Fail with the largest difference and where it is; ``limit`` is of 1, or of the largest expected value above it.

    fp32 sums in another order differ by some units in the last place of their largest terms, whatever the processor's
    vectors: an absolute limit would be below one unit of a norm of 200.
    """
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)} is not {tuple(expected.shape)}"
    if not actual.numel():
        return
    actual, expected = actual.detach(), expected.detach()
    difference = (actual.double() - expected.double()).abs()
    worst = int(difference.nan_to_num(nan=torch.inf).argmax())
    found = float(difference.reshape(-1)[worst])
    limit = limit * max(1.0, float(expected.double().abs().nan_to_num(0, 0, 0).amax()))
    assert found <= limit, (
        f"{what}: {float(actual.reshape(-1)[worst])} is not {float(expected.reshape(-1)[worst])} at flat index {worst};"
        f" difference {found:.3e}, limit {limit:.1e}"
    )


def my_rows(comms, tensor):
    """This rank's rows of dim 0, over data and z (Tesseract's: and x), cut by torch itself."""
    for axis in ("data", "z", "x") if comms.arrangement.square else ("data", "z"):
        tensor = tensor.chunk(comms.grid.size(axis))[getattr(comms.coords, axis)]
    return tensor


def seed_apart(comms):
    """Give every rank another seed; only rank 0's, 1000, may matter."""
    torch.manual_seed(1000 + 17 * comms.rank)


def serial_seed():
    """Seed as rank 0 does in ``seed_apart``: what a serial program starts with."""
    torch.manual_seed(1000)


class Largest(TorchDispatchMode):
    """The elements of the largest tensor that an operation gives."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.elements = max(self.elements, result.numel())
        return result


_places = itertools.count()


def once(make):
    """What ``make()`` gives on rank 0: the serial oracle of all ranks, computed by one of them.

    It travels through torch's store, so that nothing of Axo's stands between an oracle and what is compared with it.
    All ranks call this equally often.
    """
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    place = f"tests/once/{next(_places)}"
    if os.environ["RANK"] == "0":
        value, file = make(), io.BytesIO()
        torch.save(value, file)
        store.set(place, file.getvalue())
        return value
    return torch.load(io.BytesIO(store.get(place)), weights_only=False)  # in C, not in Python


def gradients_of(serial):
    """Name -> gradient of each parameter that is trained; of an expert without rows it is zero."""
    named = [(name, p) for name, p in serial.named_parameters() if p.requires_grad]
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in named}


def mean_over_data_ranks(comms, value):
    """The mean of a scalar over the z and data ranks: the loss of the whole batch, where ranks hold equal rows."""
    value = value.detach().clone().reshape(1)
    comms.z.all_reduce(value, "avg")
    comms.data.all_reduce(value, "avg")
    return value.item()


def assert_gradients_match(layer, serial, limit, what):
    """Every gradient shard equals this rank's part of the serial gradient; ``serial``: a module, or its gradients."""
    gradients = serial if isinstance(serial, dict) else {name: p.grad for name, p in serial.named_parameters()}
    for name, gradient in gradients.items():
        shard = layer.get_parameter(name)
        expected = axo.shard(gradient, shard.placement)
        assert shard.grad is not None, f"{what}: {name} has no gradient"
        assert_close(shard.grad, expected, limit, f"{what}: gradient of {name}")
