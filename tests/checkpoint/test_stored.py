"""Checkpoints that earlier versions wrote load as long as Axo says that it reads them: one of each kind, in data/.

data/grid        sharded, by 4 ranks on 2x1x2x1, with AdamW's state
data/litgpt      a run of ``axo litgpt pretrain`` on 2x1x1x1 saved twice: whole, and sharded
data/pretrained  ``axo.checkpoint.save_pretrained`` of a small GPT-2

Oracle: a formula, of which ``data/grid`` was filled; of the others, what torch, safetensors and transformers read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from litgpt.config import Config
from litgpt.model import GPT
from safetensors.torch import load_file

import axo
from axo.checkpoint import load
from axo.integrations.fabric import sharded_checkpoint
from tests.launcher import run_ranks

DATA = Path(__file__).parent / "data"
CONFIG = {
    "name": "stored", "n_layer": 1, "n_embd": 16, "n_head": 4, "n_query_groups": 2, "block_size": 16, "vocab_size": 29,
    "padded_vocab_size": 29, "norm_class_name": "RMSNorm", "mlp_class_name": "LLaMAMLP", "intermediate_size": 24,
    "rotary_percentage": 1.0, "parallel_residual": False, "bias": False,
}  # fmt: skip


def expected(number: int, shape: Any) -> torch.Tensor:
    """What parameter ``number`` was filled with; its moments are twice and four times that."""
    return (torch.arange(torch.Size(shape).numel()) % 97 + number).float().view(shape)


def load_grid(grid: str | None) -> int:
    comms = axo.connect(grid) if grid else None
    model = GPT(Config(**CONFIG))
    if comms is not None:
        axo.parallelize(model, comms)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    loaded = load(DATA / "grid", model, optimizer, comms=comms)
    assert (loaded.step, loaded.extra, loaded.grid) == (3, {"position": 5, "words": ["a", 1.5]}, "2x1x2x1")
    assert optimizer.param_groups[0]["lr"] == 1e-2
    checked = 0
    for number, parameter in enumerate(model.parameters()):
        state = optimizer.state[parameter]
        assert state["step"] == 3
        for value, factor in ((parameter, 1), (state["exp_avg"], 2), (state["exp_avg_sq"], 4)):
            where = getattr(parameter, "placement", None)
            whole = value.detach() if where is None else axo.unshard(value.detach(), where)
            assert torch.equal(whole, factor * expected(number, whole.shape))
            checked += 1
    if comms is not None:
        comms.close()
    return checked


def test_a_sharded_checkpoint_with_an_optimizer_loads_on_its_grid_and_on_others() -> None:
    assert load_grid(None) == 3 * 10
    assert run_ranks(load_grid, 4, "2x1x2x1") == [3 * 10] * 4
    assert run_ranks(load_grid, 2, "1x2x1x1") == [3 * 10] * 2


def test_a_run_folder_of_litgpts_loads_whole_and_sharded(tmp_path: Path) -> None:
    whole = torch.load(DATA / "litgpt" / "whole" / "lit_model.pth", weights_only=True)
    assert (whole["iter_num"], whole["step_count"]) == (2, 2)
    config = Config.from_checkpoint(DATA / "litgpt" / "whole")
    for source in (DATA / "litgpt" / "whole" / "lit_model.pth", DATA / "litgpt" / "sharded" / "lit_model.pth"):
        model = GPT(config)
        load(source, model)
        assert all(torch.equal(value, whole["model"][name]) for name, value in model.state_dict().items())
    sharded_checkpoint.consolidate(DATA / "litgpt" / "sharded", tmp_path / "whole", optimizer=True)
    again = torch.load(tmp_path / "whole" / "lit_model.pth", weights_only=True)
    assert again.keys() == whole.keys()
    moments = {n: values["exp_avg"] for n, values in whole["optimizer"]["state"].items()}
    assert all(torch.equal(again["optimizer"]["state"][n]["exp_avg"], moments[n]) for n in moments) and len(moments) > 5


def test_a_folder_of_hugging_faces_loads() -> None:
    import transformers

    values = load_file(DATA / "pretrained" / "model.safetensors")
    model = transformers.GPT2LMHeadModel.from_pretrained(DATA / "pretrained")
    other = transformers.GPT2LMHeadModel(model.config)
    load(DATA / "pretrained" / "model.safetensors", other, strict=False)
    for each in (model, other):
        own = each.state_dict()
        assert all(torch.equal(own[name], value) for name, value in values.items()) and len(values) == 16
