"""What Fabric programs ask of AxoStrategy beside training: SLURM, accumulation, clipping, models made empty."""

import os

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.integrations.support import ELASTIC, LLAMA, distance, tokens
from tests.launcher import run_ranks


def slurm(grid):
    """As srun starts it: Fabric's view of the ranks, and a sum over them."""
    import lightning as L
    from lightning.fabric.plugins.environments import SLURMEnvironment

    from axo.integrations.fabric.strategy import AxoStrategy

    rank, world = os.environ.pop("RANK"), os.environ.pop("WORLD_SIZE")
    os.environ |= {"SLURM_NTASKS": world, "SLURM_NTASKS_PER_NODE": world, "SLURM_NNODES": "1", "SLURM_NODEID": "0"}
    os.environ |= {"SLURM_PROCID": rank, "SLURM_LOCALID": os.environ.pop("LOCAL_RANK"), "SLURM_JOB_NAME": "training"}
    fabric = L.Fabric(accelerator="cpu", strategy=AxoStrategy(grid))
    fabric.launch()
    assert isinstance(fabric.strategy.cluster_environment, SLURMEnvironment)
    return fabric.global_rank, fabric.world_size, fabric.all_reduce(torch.tensor(1.0), reduce_op="sum").item()


def test_ranks_of_slurm():
    assert run_ranks(slurm, 4, "2x1x2x1") == [(rank, 4, 4.0) for rank in range(4)]


def step_twice(grid, clip, accumulate):
    """Two steps on 8 rows, in ``accumulate`` micro-batches; the whole weights, and the collectives left out."""
    import lightning as L
    from litgpt.config import Config
    from litgpt.model import GPT

    import axo
    from axo.integrations.fabric.strategy import AxoStrategy

    fabric = L.Fabric(accelerator="cpu", **({"strategy": AxoStrategy(grid)} if grid else {"devices": 1}))
    fabric.launch()
    torch.manual_seed(5)
    model = fabric.setup(GPT(Config(**LLAMA)))
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.5))
    sampler = getattr(fabric.strategy, "distributed_sampler_kwargs", None) or {"num_replicas": 1, "rank": 0}
    counts = []
    for index in range(2):
        rows = tokens(8, seed=index).chunk(accumulate * sampler["num_replicas"])[
            sampler["rank"] :: sampler["num_replicas"]
        ]
        for number, batch in enumerate(rows):
            waits = number + 1 < accumulate
            with axo.count_collectives() as counted, fabric.no_backward_sync(model, enabled=waits):
                logits = model(batch[:, :-1])
                fabric.backward(
                    torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()) / accumulate
                )
            counts.append((waits, counted["reduce_scatter", "z"].calls))
        fabric.clip_gradients(model, optimizer, **clip)
        optimizer.step()
        optimizer.zero_grad()
    return fabric.strategy.get_module_state_dict(getattr(model, "_forward_module", model)), counts


@pytest.mark.parametrize(
    "clip", [{"clip_val": 1e-3}, {"max_norm": 0.1}, {"max_norm": 0.1, "norm_type": "inf"}], ids=str
)
def test_accumulation_and_clipping_equal_one_rank(clip):
    """By value and by norm. Oracle: one device, the same rows at once; 1e-5. Only the last micro-batch reduces."""
    serial, _ = step_twice(None, clip, 1)
    for weights, counts in run_ranks(step_twice, 4, "2x1x2x1", clip, 2, env=ELASTIC)[:1]:
        assert distance(weights, serial) < 1e-5
        assert all((number == 0) == waits for waits, number in counts), counts


class Live(TorchDispatchMode):
    """Counts the bytes of all tensors that are alive in host memory; ``peak`` is the most there were at once."""

    def __init__(self):
        super().__init__()
        self.storages, self.peak = {}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                self.storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.storages = {key: held for key, held in self.storages.items() if not held[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.storages.values()))
        return result


def peak_of_an_empty_model(grid, config):
    """Bytes: the most that were alive at once, this rank's shards, the largest layer, the whole model."""
    import lightning as L
    from litgpt.config import Config
    from litgpt.model import GPT

    from axo.integrations.fabric.strategy import AxoStrategy

    fabric = L.Fabric(accelerator="cpu", strategy=AxoStrategy(grid))
    fabric.launch()
    with Live() as live:
        with fabric.init_module(empty_init=True):
            model = GPT(Config(**config))
        sizes = [parameter.numel() * 4 for parameter in model.parameters()]
        model = fabric.setup(model)
    assert not any(parameter.is_meta for parameter in model.parameters())
    return live.peak, sum(p.numel() * 4 for p in model.parameters()), max(sizes), sum(sizes)


def test_no_rank_holds_a_whole_model_that_is_made_empty():
    """Measured: never more than a rank's shards and three times the largest layer, of a model four times as large."""
    config = LLAMA | {
        "n_embd": 256,
        "intermediate_size": 704,
        "n_layer": 16,
        "vocab_size": 250,
        "padded_vocab_size": 256,
    }
    for peak, shards, largest, whole in run_ranks(peak_of_an_empty_model, 4, "2x2x1x1", config, env=ELASTIC):
        assert shards < 0.26 * whole and largest < 0.03 * whole
        assert shards < peak < shards + 3 * largest < 0.35 * whole, (peak, shards, largest, whole)
