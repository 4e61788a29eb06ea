"""Collectives that GPUs of several hosts compose, from Python: two hosts of two ranks on the stand-in for a GPU.

Oracles: those of test_device. What the steps are, and the bytes between hosts: csrc/tests/device/test_levels.cpp.
"""

import os

import pytest
import torch
import yaml

import axo
from axo.comm.device import DeviceOptions
from tests import standin
from tests.comm.test_collectives import same
from tests.comm.test_device import connected, moves, reductions
from tests.launcher import run_ranks

EVERY = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all")


def composed(folder, check):
    """Two hosts of two ranks, as the library tells them apart; the file says from how many bytes on."""
    rank = int(os.environ["RANK"])
    os.environ |= {"LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2", "NCCL_HOSTID": f"host {rank // 2}"}
    if check is not None:
        check(folder)
        return
    gpu, comms = connected(folder)
    assert comms.x.composed == comms.world.composed == dict.fromkeys(EVERY, 8)
    source, total = torch.ones(6, device=comms.device), torch.zeros(6, device=comms.device)
    gpu.synchronize()
    with gpu.capture() as graph:
        total.copy_(source)
        comms.x.all_reduce(total, async_op=True).wait()
    for turn in range(1, 4):
        source.fill_(float(turn))
        graph.replay()
        gpu.synchronize()
        same(total.cpu(), torch.full((6,), 4.0 * turn), "a composed sum in a graph")
    graph.reset()
    assert not gpu.violations()


@pytest.mark.slow
@pytest.mark.parametrize("check", [None, reductions, moves], ids=lambda check: getattr(check, "__name__", "graphs"))
def test_composed_collectives_are_those_of_the_library(check, tmp_path):
    """Values: the same oracles as without hosts."""
    standin.build()
    (file := tmp_path / "machine.yaml").write_text(yaml.safe_dump({"composed": {"2x2": dict.fromkeys(EVERY, 8)}}))
    run_ranks(composed, 4, tmp_path, check, env={"AXO_COMPOSITION": str(file)})


def test_a_file_of_composed_collectives_that_is_none(tmp_path, monkeypatch):
    (file := tmp_path / "machine.yaml").write_text("composed: {2by2: {all_reduce: 8}}")
    for path in (file, tmp_path / "nowhere"):
        monkeypatch.setenv("AXO_COMPOSITION", str(path))
        with pytest.raises(ValueError, match=rf"AXO_COMPOSITION={path}: no file that axo profile wrote .*; give one"):
            DeviceOptions().for_core(1000, 0)
    with pytest.raises(axo.Error, match="composed: got 'barrier', expected a collective that can be composed"):
        DeviceOptions(composed=((2, 2, "barrier", 0),)).for_core(1000, 0)
