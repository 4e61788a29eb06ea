"""The short way to c10d's collectives: taken where torch would only box and unbox, and nothing that torch says is lost.

Oracle: torch's own way, in a process in which Axo is not loaded. Over Gloo, whose all_gather of what requires
a gradient ends either way, as its thread comes.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import axo.comm.extension  # noqa: F401  (opens the short way)

OPERATORS = """allreduce_ broadcast_ reduce_ _allgather_base_ _reduce_scatter_base_ alltoall_base_ send recv_
    barrier""".split()
PROGRAM = """
import sys, warnings
import torch, torch.distributed as dist
if sys.argv[1] == "axo":
    import axo.comm.extension
short = torch._C._dispatch_has_kernel_for_dispatch_key("c10d::allreduce_", "AutogradCPU")
assert short == (sys.argv[1] == "axo"), short
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())

def say(what, call, under=torch.enable_grad):
    weight = torch.ones(3, requires_grad=True)
    t = weight * 2
    with warnings.catch_warnings(record=True) as caught, under():
        warnings.simplefilter("always")
        torch.set_warn_always(True)
        try:
            out = call(t)
            (t.sum() if out is None else out.sum()).backward()
            told = weight.grad
        except RuntimeError as error:
            told = str(error).splitlines()[0]
    print(what, told, [str(each.message)[:90] for each in caught])

def scattered(t):
    out = torch.empty(3)
    dist.reduce_scatter_tensor(out, t)
    return out

def exchanged(t):
    out = torch.empty(3)
    dist.all_to_all_single(out, t)
    return out

say("all_reduce", lambda t: dist.all_reduce(t))
say("broadcast", lambda t: dist.broadcast(t, 0))
say("reduce", lambda t: dist.reduce(t, 0))
say("scattered", scattered)
say("exchanged", exchanged)
say("no_grad", lambda t: dist.all_reduce(t), torch.no_grad)
leaf = torch.ones(3, requires_grad=True)
dist.broadcast(leaf, 0)
print(leaf.is_leaf, leaf.grad_fn)
with torch.inference_mode():
    t = torch.ones(3)
    dist.all_reduce(t)
    print(t.tolist())
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
    dist.all_reduce(torch.ones(3))
print(sorted(event.key for event in profile.key_averages() if event.key.startswith("c10d::")))
"""


@pytest.mark.parametrize("key", ["AutogradCPU", "AutogradCUDA"])
def test_the_short_way_is_open(key):
    """With this torch; where a later one has kernels of its own, it takes those."""
    assert all(torch._C._dispatch_has_kernel_for_dispatch_key(f"c10d::{name}", key) for name in OPERATORS)


def test_what_requires_a_gradient_goes_as_before():
    def said(way: str) -> list[str]:
        command = [sys.executable, "-c", PROGRAM, way]
        result = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert result.returncode == 0, result.stderr
        return result.stdout.splitlines()

    torchs = said("torch")
    assert said("axo") == torchs
    assert sum("autograd kernel was not registered" in line for line in torchs) >= 2 and len(torchs) == 9
