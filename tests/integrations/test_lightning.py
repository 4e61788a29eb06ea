"""AxoStrategy in Lightning Fabric, against the same program on one rank with Fabric's own strategy."""

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.integrations.support import ELASTIC, LLAMA, distance, mean, tokens
from tests.launcher import run_ranks


def train(
    strategy, steps=4, *, rows=4, lr=3e-3, save_to=None, resume_from=None, meta=True, joint=False, **fabric_options
):
    """A plain Fabric program. Returns its losses, the batches' checksums, and rank 0's whole state."""
    from litgpt.config import Config
    from litgpt.model import GPT
    from litgpt.utils import chunked_cross_entropy, reset_parameters

    fabric = L.Fabric(accelerator="cpu", strategy=strategy, **fabric_options)
    fabric.launch()
    fabric.seed_everything(7, verbose=False)
    with fabric.init_module(empty_init=meta):
        model = GPT(Config(**LLAMA))
    if meta:
        reset_parameters(model)
    if joint:
        model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1))
    else:
        model = fabric.setup(model)
        optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1))
    replicas = (getattr(fabric.strategy, "distributed_sampler_kwargs", None) or {"num_replicas": 1})["num_replicas"]
    data = DataLoader(TensorDataset(tokens(64)), batch_size=rows // replicas)
    data = fabric.setup_dataloaders(data)
    loss_of = getattr(fabric.strategy, "cross_entropy", chunked_cross_entropy)
    losses, sums = [], []
    state = {"model": model, "optimizer": optimizer, "step": 0}
    if resume_from:
        fabric.load(resume_from, state)
    for index, (batch,) in enumerate(data):
        if index < state["step"]:
            continue
        if index == steps:
            break
        loss = loss_of(model(batch[:, :-1]), batch[:, 1:])
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        sums.append(int(batch.sum()))
    state["step"] = steps
    if save_to:
        fabric.save(save_to, state)
    weights = fabric.strategy.get_module_state_dict(getattr(model, "_forward_module", model))
    return losses, sums, {name: value.clone() for name, value in weights.items()}, fabric.world_size


def train_on_grid(grid, options):
    from axo.integrations.lightning import AxoStrategy

    strategy = AxoStrategy(grid, **(options := dict(options)).pop("strategy", {}))
    return train(strategy, **options)


@pytest.mark.parametrize(
    ("grid", "options"),
    [
        ("2x1x1x1", {}),
        ("1x2x1x1", {"meta": False, "joint": True}),
        ("1x1x2x1", {}),
        ("2x1x1x2", {"strategy": {"vocab_loss": True}}),
        ("2x2x1x1", {"strategy": {"vocab_loss": True, "counts": "data"}}),
    ],
    ids=str,
)
def test_training_equals_one_rank(grid, options):
    """Oracle: the program on Fabric's single device. fp32, 4 steps: losses to 1e-5, the model to 1e-5."""
    results = run_ranks(train_on_grid, eval(grid.replace("x", "*")), grid, options, env=ELASTIC, timeout=90)
    serial_options = {key: value for key, value in options.items() if key != "strategy"}
    losses, sums, weights, _ = train("auto", devices=1, **serial_options)
    x, y, z, data = map(int, grid.split("x"))
    lines = [results[x * y * line] for line in range(z * data)]  # one rank of each data coordinate
    for rank, result in enumerate(results):
        assert result[0] == pytest.approx(lines[rank // (x * y)][0], abs=1e-6), "peers on x and y disagree"
        assert result[1] == lines[rank // (x * y)][1], "peers on x and y read different batches"
        assert result[3] == (z * data if options.get("strategy", {}).get("counts") == "data" else x * y * z * data)
    assert mean(line[0] for line in lines) == pytest.approx(losses, abs=1e-5)
    assert [sum(column) for column in zip(*(line[1] for line in lines), strict=True)] == sums
    assert distance(results[0][2], weights) < 1e-5 and losses[-1] < losses[0]
    assert all(not result[2] for result in results[1:])
