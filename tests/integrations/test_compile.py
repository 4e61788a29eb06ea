"""Models that torch.compile compiles again once they are parallel: Fabric does it for whoever compiled before setup."""

import copy

import pytest
import torch

from tests.integrations.support import ELASTIC, LLAMA, distance, tokens
from tests.launcher import run_ranks


def train_twice(grid, backend):
    """Three steps eager and three compiled: losses and weights of each, graphs made, and layers found in them."""
    import lightning as L
    from litgpt.config import Config
    from litgpt.model import GPT

    from axo.integrations.lightning import AxoStrategy

    fabric = L.Fabric(accelerator="cpu", strategy=AxoStrategy(grid))
    fabric.launch()
    results = []
    counters = torch._dynamo.utils.counters
    for compiled in (False, True):
        torch.manual_seed(5)
        model = GPT(Config(**LLAMA))
        model = fabric.setup(torch.compile(model, backend=backend) if compiled else model)
        assert isinstance(model._forward_module, torch._dynamo.OptimizedModule) is compiled
        optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=3e-3))
        losses = []
        sampler = fabric.strategy.distributed_sampler_kwargs
        for step in range(3):
            batch = tokens(4, seed=step).chunk(sampler["num_replicas"])[sampler["rank"]]
            loss = torch.nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        results.append((losses, fabric.strategy.get_module_state_dict(model.module)))
    return results, counters["stats"]["unique_graphs"], list(counters["graph_break"])


@pytest.mark.parametrize(
    ("grid", "backend"),
    [
        ("2x1x1x1", "eager"),
        ("1x1x2x1", "aot_eager"),
        pytest.param("2x1x1x1", "inductor", marks=pytest.mark.soak),
        pytest.param("1x1x2x1", "inductor", marks=pytest.mark.soak),
        pytest.param("2x2x1x2", "aot_eager", marks=pytest.mark.soak),
    ],
)
def test_a_compiled_run_equals_an_eager_one(grid, backend):
    """Oracle: the same steps without a compiler, 1e-5. Graphs are made, and none holds a parallel layer."""
    x, y, z, data = map(int, grid.split("x"))
    results = run_ranks(train_twice, x * y * z * data, grid, backend, env=ELASTIC, timeout=200)
    for (eager, compiled), graphs, breaks in results:
        assert compiled[0] == pytest.approx(eager[0], abs=1e-5) and eager[0][0] != eager[0][2]
        assert graphs > 2 and any("axo: a parallel layer" in reason for reason in breaks), breaks
        assert not any("Unsupported" in reason and "axo" not in reason for reason in breaks), breaks
    eager, compiled = results[0][0]
    assert distance(compiled[1], eager[1]) < 1e-5


def copies(grid):
    import axo
    from axo.integrations.opaque import keep_out_of_graphs

    comms = axo.connect(grid)
    layer = axo.nn.Linear(8, 6, comms=comms)
    keep_out_of_graphs(layer)
    keep_out_of_graphs(layer)
    other = copy.deepcopy(layer)
    with torch.no_grad():
        other.weight.zero_()
        other.bias.fill_(2.0)
    inputs = torch.randn(3, 8 // comms.grid.y)
    return (
        type(layer).__name__,
        isinstance(layer, axo.nn.Linear),
        other(inputs).unique().tolist(),
        layer(inputs).std() > 0,
    )


def test_a_copy_of_a_layer_is_a_layer_of_its_own():
    assert all(found == ("Linear", True, [2.0], True) for found in run_ranks(copies, 2, "2x1x1x1"))
