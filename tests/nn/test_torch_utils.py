"""torch's utilities on a parallel model. Oracle: the same call on the serial model; what cannot be right is refused."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_ as imported_early
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import axo
from tests.launcher import run_ranks
from tests.nn.support import assert_close


def models(comms, zero=0):
    torch.manual_seed(0)
    serial = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 8))
    model = axo.parallelize(copy.deepcopy(serial), comms, plan="auto", zero=zero)
    return serial, model


def backward(serial, model, comms):
    batch = torch.rand(8, 8, generator=torch.Generator().manual_seed(1))
    serial(batch).square().sum(1).mean().backward()
    model(axo.shard_batch(batch, comms)).square().sum(1).mean().backward()


def norms(grid, zero):
    comms = axo.connect(grid)
    for norm_type in (2.0, 1.0, float("inf")):
        for call in (imported_early, torch.nn.utils.clip_grad_norm_):
            serial, model = models(comms, zero)
            backward(serial, model, comms)
            expected = torch.nn.utils.get_total_norm([p.grad for p in serial.parameters()], norm_type)
            found = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()], norm_type)
            assert_close(found, expected, 1e-5, f"get_total_norm {norm_type}")
            assert_close(call(serial.parameters(), 0.1, norm_type), expected, 1e-6, "torch's own on a serial model")
            assert_close(call(model.parameters(), 0.1, norm_type), expected, 1e-5, f"clip_grad_norm_ {norm_type}")
            for parameter, oracle in zip(model.parameters(), serial.parameters(), strict=True):
                assert_close(axo.unshard_grad(parameter), oracle.grad, 1e-5, "clipped gradient")
    assert_close(
        torch.nn.utils.get_total_norm(model.parameters()),
        torch.nn.utils.get_total_norm(serial.parameters()),
        1e-4,
        "weights",
    )


@pytest.mark.parametrize(("grid", "zero"), [("2x2x1x1", 0), ("1x2x2x1", 0), ("2x1x1x2", 2)])
def test_norms_are_of_the_whole_model(grid, zero):
    run_ranks(norms, 4, grid, zero)


def others(grid):
    comms = axo.connect(grid)
    serial, model = models(comms)
    for call in (
        lambda: nn.utils.parameters_to_vector(model.parameters()),
        lambda: nn.utils.vector_to_parameters(torch.zeros(8 * 16), model.parameters()),
    ):
        with pytest.raises(ValueError, match=r"axo.unshard\(p, p.placement\)"):
            call()
    assert nn.utils.parameters_to_vector(serial.parameters()).numel() == sum(p.numel() for p in serial.parameters())
    averages = [AveragedModel(each, multi_avg_fn=get_ema_multi_avg_fn(0.5)) for each in (serial, model)]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.01) for each in (serial, model)]
    for _ in range(3):
        backward(serial, model, comms)
        for optimizer, average, each in zip(optimizers, averages, (serial, model), strict=True):
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(each)
    for oracle, parameter in zip(averages[0].module.parameters(), averages[1].module.parameters(), strict=True):
        assert_close(axo.unshard(parameter.detach(), parameter.placement), oracle, 1e-5, "moving average")
    x = torch.rand(8, 8, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = axo.shard_batch(averages[0](x), comms)
        assert_close(averages[1](axo.shard_batch(x, comms)), expected, 1e-5, "forward of the average")


def test_vectors_are_refused_and_averages_are_right():
    run_ranks(others, 4, "2x1x2x1")
