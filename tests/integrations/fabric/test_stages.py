"""AxoStrategy with pipeline stages and with offload, against the same program on Fabric's single device."""

import lightning as L
import pytest
import torch

import axo
from axo.errors import Refused
from tests.integrations.fabric.test_strategy import train
from tests.integrations.support import ELASTIC, LLAMA, distance, mean, tokens
from tests.launcher import run_ranks

FOUR = {"layers": 4, "rows": 8, "parts": 2}


def trained(runs):
    """The outcomes of several programs on this rank, one after the other."""
    from axo.integrations.fabric.strategy import AxoStrategy

    return [train(AxoStrategy(**strategy), **options) for strategy, options in runs]


def tensors(state):
    moments = {
        f"{index}/{name}": value
        for index, values in state["optimizer"]["state"].items()
        for name, value in values.items()
    }
    return {**state["model"], **moments}


def test_stages_train_as_one_device_and_load_what_other_stages_saved(tmp_path):
    """Two steps of two accumulated batches in four stages; two more in two stages of 2x1x1x1 and on stock Fabric's one
    device: losses to 1e-5, the model to 1e-5. These and a grid without stages first save what they have loaded, the
    optimizer's state too: to the bit."""
    losses, sums, weights, _ = train("auto", devices=1, **FOUR)
    half = tmp_path / "half.ckpt"
    again = {name: tmp_path / f"{name}.ckpt" for name in ("two stages", "no stages", "stock")}
    four = {"grid": "1x1x1x1", "pipeline": 4, "schedule": "1f1b", "microbatches": 4}
    # Four rows in three micro-batches.
    two = {"grid": "2x1x1x1", "pipeline": 2, "schedule": "zbv", "microbatches": 3, "vocab_loss": True}
    runs = [
        (four, FOUR | {"steps": 2, "save_to": half}),
        (two, FOUR | {"steps": 2, "resume_from": half, "save_to": again["two stages"]}),
        ({"grid": "1x2x2x1"}, FOUR | {"steps": 2, "resume_from": half, "save_to": again["no stages"]}),
        (two, FOUR | {"resume_from": half}),
    ]
    every = run_ranks(trained, 4, runs, env=ELASTIC, timeout=120)
    for first, *_, then in every:
        assert first[0] + then[0] == pytest.approx(losses, abs=1e-5) and first[1] + then[1] == sums
        assert first[3] == 4
    assert distance(every[0][-1][2], weights) < 1e-5 and losses[-1] < losses[0]
    train("auto", devices=1, **FOUR, steps=2, resume_from=half, save_to=again["stock"])
    saved = torch.load(half, weights_only=True)
    assert saved["optimizer"]["param_groups"][0]["params"] == list(range(len(dict(saved["model"]))))
    assert list(saved["model"]) == list(weights)
    saved = tensors(saved)
    for where, path in again.items():
        loaded = tensors(torch.load(path, weights_only=True))
        assert saved.keys() == loaded.keys(), where
        assert all(torch.equal(saved[name], loaded[name]) for name in saved), where
    alone = train("auto", devices=1, **FOUR, resume_from=half)
    assert alone[0] == pytest.approx(losses[2:], abs=1e-5) and distance(alone[2], weights) < 1e-5


def test_precision_and_offload_in_stages(tmp_path):
    """fp16 with a scaled loss, to 1%; and optimizer and activations on the lower tier: the run without, to 1e-6
    (its AdamW is not the fused one)."""
    losses = train("auto", devices=1, **FOUR)[0]
    two = {"grid": "1x1x2x1", "pipeline": 2, "schedule": "interleaved-1f1b", "microbatches": 2}
    offload = two | {"offload": axo.Offload(optimizer=True, activations="all", dir=tmp_path)}
    runs = [(two, FOUR | {"precision": "16-mixed"}), (two, FOUR), (offload, FOUR)]
    every = run_ranks(trained, 4, runs, env=ELASTIC, timeout=120)
    lines = every[0], every[1]  # z = 0 and z = 1
    assert mean(line[0][0] for line in lines) == pytest.approx(losses, rel=0.01)
    assert mean(line[1][0] for line in lines) == pytest.approx(losses, abs=1e-5)
    for _, plain, offloaded in every:
        assert offloaded[0] == pytest.approx(plain[0], rel=1e-6)
    assert distance(every[0][2][2], every[0][1][2]) < 1e-6


def misused():
    from litgpt.config import Config
    from litgpt.model import GPT

    from axo.integrations.fabric.strategy import AxoStrategy

    fabric = L.Fabric(accelerator="cpu", strategy=AxoStrategy("1x1x1x1", pipeline=2, cuts=[3]))
    fabric.launch()
    with fabric.init_module(empty_init=True):
        short, model = (GPT(Config(**{**LLAMA, "n_layer": layers})) for layers in (1, 4))
    with pytest.raises(ValueError, match=r"plan 'litgpt' needs a litgpt\.GPT, got a Sequential"):
        fabric.setup(torch.nn.Sequential(torch.nn.Linear(4, 4)))
    with pytest.raises(ValueError, match="1 blocks over 2 stages leave a stage without layers"):
        fabric.setup(short)
    model = fabric.setup(model)
    assert len(list(model.transformer.h)) == (1 if fabric.strategy.comms.stage else 3)  # blocks of this stage
    ids, loss_of = tokens(4), fabric.strategy.cross_entropy
    given, wanted = ids[:, :-1], ids[:, 1:]
    with pytest.raises(Refused, match="softmax wants logits, and in training with pipeline stages they never leave"):
        model(given).softmax(-1)
    with pytest.raises(ValueError, match="takes what the last call of the model returned, once, and from its first"):
        loss_of(model(given)[:, 1:], wanted[:, 1:])
    with pytest.raises(ValueError, match=r"targets have shape \(2, 32\), and the logits are of 4 rows of 32 tokens"):
        loss_of(model(given), wanted[:2])
    before = {name: value.clone() for name, value in model.named_parameters()}
    logits = model(given)
    loss_of(logits, wanted)  # thrown away
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(before[name], value) for name, value in model.named_parameters())
    with pytest.raises(ValueError, match="takes what the last call of the model returned, once"):
        loss_of(logits, wanted)


def test_misuse_is_one_error_on_every_rank():
    run_ranks(misused, 2, env=ELASTIC)
    from axo.integrations.fabric.strategy import AxoStrategy

    with pytest.raises(ValueError, match="microbatches=1 are fewer than the 2 stages"):
        AxoStrategy("1x1x1x1", pipeline=2, microbatches=1)
    with pytest.raises(ValueError, match="the lower tier has one place for them"):
        AxoStrategy("1x1x1x1", pipeline=2, offload=axo.Offload(parameters=True))
