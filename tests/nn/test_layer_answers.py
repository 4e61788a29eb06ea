"""What a layer says of itself: flops and bytes that it keeps, against torch's counter and what autograd really saves.

Layers run with values as one rank of a grid whose peers are not there (``axo.comm.recording``). The planner's layers
are held to the same figures on the shards of a whole GPT.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import axo
from axo.comm.recording import recording
from axo.grid import Grid
from axo.matmul import cost
from axo.nn.layer import ParallelLayer
from axo.nn.linear_loss import linear_cross_entropy_cost
from axo.perf import memory, readers
from axo.perf.run_options import RunOptions
from axo.perf.workload import gpt

ROWS, IN, OUT = 40, 48, 96
GRIDS = ("1x1x1x1", "2x2x2x1", "4x1x1x2", "1x4x2x1")
KINDS: dict[str, Callable[[Any], ParallelLayer]] = {
    "linear": lambda comms: axo.nn.Linear(IN, OUT, bias=False, comms=comms),
    "transposed": lambda comms: axo.nn.Linear(IN, OUT, comms=comms, transposed=True),
    "layernorm": lambda comms: axo.nn.LayerNorm(IN, comms=comms),
    "rmsnorm": lambda comms: axo.nn.RMSNorm(IN, comms=comms),
    "embedding": lambda comms: axo.nn.Embedding(OUT, IN, comms=comms),
}


def saved(rows: int, run: Callable[[], torch.Tensor]) -> int:
    """Bytes of what autograd saves of ``rows`` rows, each storage once: not weights, whose rows are others."""
    seen: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape[0] == rows:
            seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = run()
    del output
    return sum(seen.values())


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_counts_its_flops_and_what_it_keeps(kind: str, grid: str) -> None:
    comms = recording(grid)
    layer = KINDS[kind](comms)
    rows = ROWS // comms.grid.z
    if kind == "embedding":
        given = torch.zeros(rows, dtype=torch.int64)
    else:
        features = layer.in_features_whole // comms.grid.size(layer.in_axis)  # type: ignore[operator, arg-type]
        given = torch.randn(rows, features, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        layer(given)
    assert layer.flops(ROWS) == counter.get_total_flops()
    if grid != "1x1x1x1" or "norm" not in kind:  # torch's own norm keeps what it likes
        assert layer.saved_bytes(ROWS) == saved(rows, lambda: layer(given))


def test_a_layer_that_does_not_count_says_so() -> None:
    comms = recording("1x1x1x1")
    with pytest.raises(NotImplementedError, match="GroupNorm: what it keeps for backward is not counted"):
        axo.nn.GroupNorm(2, 8, comms=comms).saved_bytes(8)
    with pytest.raises(NotImplementedError, match="Conv2d: its flops"):
        axo.nn.Conv2d(4, 8, 3, comms=comms).flops(8)


@pytest.mark.parametrize("grid", ["2x2x2x1", "4x2x1x2", "1x1x4x2"])
@pytest.mark.parametrize("name", ["Llama-3-8B", "pythia-160m", "phi-2", "Qwen2.5-0.5B", "falcon-7b", "Gemma-2-2b"])
def test_the_planners_layers_say_what_the_models_layers_say(name: str, grid: str) -> None:
    """Flops of every block's products, and bytes that norms and products keep, on the shards of a parallelized GPT."""
    from litgpt import GPT, Config

    config = Config.from_name(name, n_layer=1, n_embd=256, n_head=8, head_size=32, n_query_groups=4,
                              intermediate_size=512, padded_vocab_size=1024)  # fmt: skip
    comms = recording(grid)
    with torch.device("meta"):
        model = GPT(config)
    axo.parallelize(model, comms)
    workload = readers.from_litgpt(vars(config), seq_length=64)
    run, rows, one = RunOptions(512, itemsize=2), 512, Grid.parse(grid)
    mine = rows // one.z
    products = [m for m in model.modules() if isinstance(m, axo.nn.Linear)]
    planned = [layer for block in workload.blocks for layer in block.layers if layer.kind == "linear"]
    ranks = one.x * one.y * one.z
    copied = workload.copied(one)  # keys and values that neighbours along x share are multiplied by each
    expected = sum(layer.flops(rows, 64) for layer in planned) + 2 * rows * copied
    assert sum(layer.flops(rows) for layer in products) == pytest.approx(expected / ranks)
    each = {layer.name: layer.bytes(one, mine, run).saved for layer in planned}
    for path, layer in model.named_modules():
        short = path.removeprefix("transformer.h.0.")
        if isinstance(layer, axo.nn.Linear) and each.get(short):
            assert layer.saved_bytes(rows, itemsize=2) == each[short], path
    layers = [layer for block in workload.blocks for layer in block.layers if layer.kind == "norm"]
    alone = [layer for layer in layers if layer.over == "y" and not (layer.shares_input or layer.of_product)]
    norms = {layer.name: layer.bytes(one, mine, run).saved for layer in alone}
    found = {path.rpartition(".")[2]: layer.saved_bytes(rows, itemsize=4) for path, layer in model.named_modules()
             if isinstance(layer, ParallelLayer) and "norm" in type(layer).__name__.lower()}  # fmt: skip
    assert norms and all(found[path] == size for path, size in norms.items())


@pytest.mark.parametrize("grid", GRIDS)
def test_a_loss_in_chunks_sends_what_it_counts_and_keeps_no_logits(grid: str) -> None:
    """Oracle: the count of the loss, which its own test holds to what is sent; bytes by hand. Chunks that do not divide
    round up."""
    hidden, vocabulary, rows, comms = 64, 1 << 15, 2048, recording(grid)
    head = axo.nn.Linear(hidden, vocabulary, bias=False, comms=comms)
    workload, on = gpt("tiny", layers=1, hidden=hidden, heads=4, vocab=vocabulary), comms.grid
    whole, chunked = (RunOptions(rows * on.data, rows=rows, chunked_loss=chunks) for chunks in (False, True))
    *_, linear, loss = workload.blocks[-1].layers
    found = cost.total(linear.calls(on, rows, chunked) + loss.calls(on, rows, chunked))
    wanted = cost.total(linear_cross_entropy_cost(head, rows, itemsize=2))
    assert {key: count.calls for key, count in found.items()} == {key: count.calls for key, count in wanted.items()}
    assert all(found[key].bytes == pytest.approx(count.bytes, rel=0.01) for key, count in wanted.items())
    less = memory.estimate(workload, on, whole).saved - memory.estimate(workload, on, chunked).saved
    logits = rows // on.z * (2 * vocabulary // on.x + 16)
    assert less == logits - 4 * hidden * vocabulary / (on.x * on.y), "and keeps the weight's gradient, in fp32"
