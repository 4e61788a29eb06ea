"""Models that torch.compile compiles again once they are parallel: Fabric does it for whoever compiled before setup."""

import copy

import pytest
import torch

from tests.integrations import support
from tests.integrations.support import ELASTIC, distance, tokens
from tests.launcher import run_ranks

LLAMA = support.LLAMA | {"n_layer": 1}  # blocks are compiled one by one
COMPILER = ("torch._dynamo.repro.after_dynamo",)


def train_twice(grid, backend):
    """Three steps eager and three compiled: losses and weights of each, graphs made, and layers found in them."""
    import lightning as L
    from litgpt.config import Config
    from litgpt.model import GPT

    from axo.integrations.fabric.strategy import AxoStrategy

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
    results = run_ranks(train_twice, x * y * z * data, grid, backend, env=ELASTIC, timeout=200, preload=COMPILER)
    for (eager, compiled), graphs, breaks in results:
        assert compiled[0] == pytest.approx(eager[0], abs=1e-5) and eager[0][0] != eager[0][2]
        assert graphs > 2 and any("axo: a parallel layer" in reason for reason in breaks), breaks
        assert not any("Unsupported" in reason and "axo" not in reason for reason in breaks), breaks
    eager, compiled = results[0][0]
    assert distance(compiled[1], eager[1]) < 1e-5


def copies(grid):
    import axo
    from axo.integrations.fabric.compile import keep_out_of_graphs

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


def evaluate(grid, backend):
    """(what was compared, largest difference from eager, graphs, breaks) of models without gradients; one has a cache,
    one is part of another module, one a copy whose weights are others."""
    from litgpt.config import Config
    from litgpt.model import GPT

    import axo
    from axo.integrations.fabric.compile import keep_out_of_graphs

    torch.set_num_threads(1)
    comms = axo.connect(grid)
    torch.manual_seed(5)
    gelu = {"norm_class_name": "LayerNorm", "mlp_class_name": "GptNeoxMLP", "parallel_residual": True, "bias": True}
    found = []

    def compare(what, model, *inputs):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        expected = model(*inputs).clone()
        compiled = torch.compile(model, backend=backend, fullgraph=True)(*inputs)
        assert compiled.dtype == expected.dtype and compiled.shape == expected.shape
        counters = torch._dynamo.utils.counters
        apart = float((compiled - expected).abs().max() / expected.abs().max())
        found.append((what, apart, counters["stats"]["unique_graphs"], list(counters["graph_break"])))
        return expected

    for fields in ({}, gelu):
        model = axo.parallelize(GPT(Config(**(LLAMA | fields))), comms, gather_logits=True)
        ids = tokens(2, length=16)
        for whole in (model, torch.nn.Sequential(model)):
            with pytest.raises(axo.Refused, match="keep_out_of_graphs"):
                torch.compile(whole, backend=backend)(ids)
        keep_out_of_graphs(model)
        with torch.no_grad():
            first = compare("logits", model, ids)
        with torch.inference_mode():
            compare("inference", torch.nn.Sequential(model), ids)
            other = copy.deepcopy(model)
            for parameter in other.parameters():
                parameter.mul_(1.5)
            assert not torch.allclose(compare("a copy", other, ids), first)
            with torch.autocast("cpu", torch.bfloat16):
                compare("autocast", model, ids)
            model.set_kv_cache(2)
            compare("cached", model, ids, torch.arange(16))
            model.clear_kv_cache()
    comms.close()
    return found


@pytest.mark.parametrize(
    ("grid", "backend"),
    [
        ("2x1x1x1", "aot_eager"),
        pytest.param("1x2x1x1", "inductor", marks=pytest.mark.soak),
        pytest.param("1x1x2x1", "inductor", marks=pytest.mark.soak),
        pytest.param("2x2x2x1", "aot_eager", marks=pytest.mark.soak),
    ],
)
def test_a_model_without_gradients_is_one_graph(grid, backend):
    """Oracle: the same model without a compiler; 1e-6 (Inductor fuses sums), and in bf16 two of its last bits."""
    x, y, z, data = map(int, grid.split("x"))
    for found in run_ranks(evaluate, x * y * z * data, grid, backend, timeout=300, preload=COMPILER):
        assert len(found) == 10
        for what, apart, graphs, breaks in found:
            assert apart <= (2**-7 if what == "autocast" else 1e-6), (what, apart)
            assert graphs == 1 and not breaks, (what, graphs, breaks)
