"""connect with stages, and on a part of the world: who is whose peer, meshes, messages, and what is refused."""

import os

import torch
import torch.distributed as dist

import axo
from tests.launcher import rank_outcomes, run_ranks


def everybody(comms):
    return comms.everyone.all_gather(torch.tensor([comms.rank + 100 * comms.stage])).tolist()


def grids_in_stages():
    comms = axo.connect("2x1x2x1", pipeline=2)
    number = dist.get_rank()
    assert (comms.stage, comms.rank) == (number // 4, number % 4) and comms.stages == comms.pipeline.size == 2
    assert comms.pipeline.rank == comms.stage and comms.world.size == comms.grid.world_size == 4
    mine = torch.tensor([number])
    assert comms.pipeline.all_gather(mine).tolist() == [comms.rank, comms.rank + 4]
    assert comms.world.all_gather(mine).tolist() == [comms.stage * 4 + other for other in range(4)]
    for axis in axo.AXES:
        inside = [comms.stage * 4 + other for other in comms.grid.ranks(axis, comms.rank)]
        assert comms.axis(axis).all_gather(mine).tolist() == inside
    assert everybody(comms) == [0, 1, 2, 3, 100, 101, 102, 103]

    mesh = comms.device_mesh
    assert mesh.mesh_dim_names == ("pipeline", "data", "z", "y", "x") and tuple(mesh.shape) == (2, 1, 2, 1, 2)
    assert mesh.get_local_rank("pipeline") == comms.stage and mesh["z"].get_local_rank() == comms.coords.z
    inner = comms.checkpoint_mesh
    assert inner.mesh_dim_names == ("data", "y", "x", "z")
    assert inner.mesh.flatten().tolist() == [comms.stage * 4 + other for other in (0, 2, 1, 3)]

    # What the schedules of torch.distributed.pipelining do: mixed batches, in another order on either side.
    group, other = comms.pipeline_group, comms.ranks[(number + 4) % 8]
    assert dist.get_process_group_ranks(group) == sorted((number, other))
    sent, got = torch.full((3,), float(number)), torch.empty(3)
    order = [dist.P2POp(dist.isend, sent, other, group), dist.P2POp(dist.irecv, got, other, group)]
    for work in dist.batch_isend_irecv(order if comms.stage else order[::-1]):
        work.wait()
    assert got.tolist() == [float(other)] * 3
    comms.close()


def grids_on_parts():
    dist.init_process_group("axo")
    number = dist.get_rank()
    odd, rest = dist.new_group([5, 3, 1]), dist.new_group([0, 2, 4])
    mine = odd if number % 2 else rest
    comms = axo.connect("3x1x1x1", group=mine)
    assert comms.rank == ([1, 3, 5] if number % 2 else [0, 2, 4]).index(number)
    assert comms.x.all_reduce(torch.tensor([number])).item() == (9 if number % 2 else 6)
    assert comms.device_mesh.get_local_rank("x") == comms.rank
    layer = axo.nn.Linear(6, 9, comms=comms)
    assert axo.to_dtensor(layer.weight).full_tensor().shape == (9, 6)
    if number == 1:
        return  # the other part goes on alone
    if number % 2 == 0:
        staged = axo.connect("1x1x1x1", group=rest, pipeline=3)
        assert staged.stage == comms.rank and everybody(staged) == [0, 100, 200]
        assert dist.get_process_group_ranks(staged.pipeline_group) == [0, 2, 4]


def test_stages_and_parts():
    run_ranks(grids_in_stages, 8)
    run_ranks(grids_on_parts, 6)


def wrong_stages(stages):
    axo.connect("2x1x1x1", pipeline=stages[int(os.environ["RANK"]) % 2], timeout=20)


def test_what_does_not_fit_is_one_error_on_every_rank():
    for stages, message in (
        ((3, 3), "grid 2x1x1x1 in 3 stages has 6 ranks, but 4 were started; start 6"),
        ((2, 1), "rank 0 asks for grid 2x1x1x1 in 2 stages and rank 1 for 2x1x1x1; pass one grid"),
        ((0, 0), "pipeline=0 is not a number of stages"),
    ):
        for outcome in rank_outcomes(wrong_stages, 4, stages):
            assert outcome.error == "ValueError" and message in outcome.message, outcome.describe()
