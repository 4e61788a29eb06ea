"""The small examples (nanogpt, fabric, hf, trainer, loop) on grids, each against its own run on one device."""

import json
from pathlib import Path

import pytest
import torch

from examples.fabric import train as fabric
from examples.loop import train as loop
from examples.nanogpt import train as nanogpt
from tests.integrations.support import ELASTIC, distance
from tests.launcher import run_ranks


def on_grids(cases):
    """Several programs one after another on the same ranks."""
    return [function(*args, **options) for function, args, options in cases]


def logged_in(checkpoint):
    """What Hugging Face's Trainer has logged with a loss up to a checkpoint."""
    history = json.loads((checkpoint / "trainer_state.json").read_text())["log_history"]
    return [entry for entry in history if "loss" in entry]


def same(found, expected, first=0):
    assert found[0] == pytest.approx(expected[0][first:], abs=1e-4)
    assert distance(found[-1], expected[-1]) < 1e-5


def test_nanogpt_fabric_and_a_loop_train_as_one_device(tmp_path):
    half, stop = tmp_path / "half", loop.Job(stop_at=4)
    cases = [
        (nanogpt.train, ("2x2x1x1",), {}),
        (fabric.train, ("2x1x2x1", tmp_path / "fabric"), {}),
        (loop.train, ("1x2x1x2", half, stop), {}),
        (loop.train, ("2x1x2x1", half), {"resume": True}),
    ]
    text, on_fabric, early, late = run_ranks(on_grids, 4, cases, env=ELASTIC, timeout=120)[0]
    losses, greedy, _ = nanogpt.train(None, steps=8)
    assert text[0] == pytest.approx(losses, abs=1e-4) and text[1] == greedy and losses[-1] < losses[0] - 0.1
    assert text[2].count("heads over x") == 4
    same(on_fabric, fabric.train(None, tmp_path / "serial"))
    whole = loop.train(None, tmp_path / "alone")
    same(late, whole, first=4)
    assert early[0] == pytest.approx(whole[0][:4], abs=1e-4)
    alone = loop.train(None, half, resume=True)  # a grid's last checkpoint, read without one
    assert not alone[0] and distance(alone[1], late[1]) == 0


def test_accelerate_and_hugging_faces_trainer_train_as_one_device(tmp_path):
    pytest.importorskip("accelerate")
    from examples.hf import train as hf
    from examples.trainer import hugging_face_trainer as trainer

    half, out, counted = tmp_path / "state", tmp_path / "trainer", {"include_num_input_tokens_seen": True}
    cases = [
        (hf.train, ("2x1x2x1", tmp_path / "hf"), {}),
        (hf.train, ("2x2x1x1", half), {"stop_at": 4}),
        (hf.train, ("1x1x2x2", half), {"stop_at": 4, "resume": True}),
        (trainer.train, ("2x1x2x1", out), counted | {"chunked_loss": True}),
        (trainer.train, ("1x2x1x2", tmp_path / "more"), counted | {"resume": out / "checkpoint-4"}),
        (trainer.train, ("2x1x1x2", tmp_path / "micro"), counted | {"gradient_accumulation_steps": 2, "steps": 3}),
    ]
    ranks = run_ranks(on_grids, 4, cases, timeout=200, preload=("transformers.models.llama.modeling_llama",))
    one, early, late, whole, resumed, accumulated = ranks[0]
    expected = hf.train(None, tmp_path / "serial")
    assert one[0] == pytest.approx(expected[0], abs=1e-4) and one[2] == expected[2]
    assert distance(one[1], expected[1]) < 1e-5
    assert early[0] + late[0] == pytest.approx(expected[0], abs=1e-4)
    assert distance(late[1], expected[1]) < 1e-5
    written = trainer.load(half / "pretrained").state_dict()
    assert all(torch.equal(written[name], late[1][name]) for name in written)

    serial = trainer.train(None, tmp_path / "alone", **counted)
    for found, first in ((whole, 0), (resumed, 4)):
        assert found[0][-8 + first :] == pytest.approx(serial[0][first:], abs=1.1e-4)  # four digits are logged
        assert found[1] == pytest.approx(serial[1], abs=1e-4)
        assert distance(found[2], serial[2]) < 1e-5
    written = trainer.load(out / "checkpoint-8").state_dict()
    assert all(torch.equal(written[name], whole[2][name]) for name in written)
    logged = logged_in(out / "checkpoint-8")
    assert [entry["loss"] for entry in logged] == whole[0] and len(logged) == 8
    for entry in logged:
        assert entry["memory_gb"] > 0.1 and all(0 < entry[f"comm_share/{axis}"] < 1 for axis in ("x", "z", "all"))
        assert entry["comm_share/y"] == entry["comm_share/data"] == 0
    assert ["tokens_per_sec" in entry for entry in logged] == [False] + [True] * 7
    serial = trainer.train(None, tmp_path / "alone3", **counted, gradient_accumulation_steps=2, steps=3)
    assert accumulated[0] == pytest.approx(serial[0], abs=1.1e-4) and distance(accumulated[2], serial[2]) < 1e-5
    for alone, *grids in (("alone/checkpoint-8", "trainer", "more"), ("alone3/checkpoint-3", "micro")):
        expected = [entry["num_input_tokens_seen"] for entry in logged_in(tmp_path / alone)]
        assert expected[0] > 0
        for grid in grids:  # what tokens_per_sec counts
            found = logged_in(tmp_path / grid / Path(alone).name)
            assert [entry["num_input_tokens_seen"] for entry in found] == expected, grid
    for rank in ranks[1:]:
        assert rank[3][:2] == whole[:2] and rank[0][0] == one[0]
