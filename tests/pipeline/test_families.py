"""Cutting: which blocks go where, and Hugging Face's models in stages against the serial ones."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from litgpt.config import Config
from litgpt.model import GPT

import axo
from axo.nn.placeholder import Placeholder, renamed
from axo.perf.cut import bounds_of, planned
from axo.perf.pipeline_schedule import stages_of
from axo.pipeline.cut import part_of, workload_of
from axo.pipeline.families import _Rows
from tests.gpt import LLAMA
from tests.launcher import run_ranks

ROWS, TOKENS = 8, 8


def test_bounds_and_places():
    assert bounds_of(10, 4, "even") == [0, 2, 5, 8, 10]
    assert bounds_of(10, 3, [3, 7]) == [0, 3, 7, 10]
    for model in (small("llama"), small("gpt2")):
        assert planned(workload_of(model), 2, 2, "loop")[1:-1] == [2]
    assert [stages_of(rank, 6, 2, "loop") for rank in (0, 1)] == [[0, 2, 4], [1, 3, 5]]
    assert [stages_of(rank, 6, 3, "v") for rank in (0, 1, 2)] == [[0, 5], [1, 4], [2, 3]]


def test_tokens_beyond_the_table_are_refused():
    table = torch.arange(8.0)[:, None]
    assert _Rows(table, 2)[:4].equal(table)
    with pytest.raises(ValueError, match="rows of 10 tokens are longer than max_seq_length=8"):
        _Rows(table, 2)[:5]


def what_each_holds():
    comms = axo.connect("1x1x1x1", pipeline=2)
    model = GPT(Config(**{**LLAMA, "n_layer": 5}))
    whole = set(model.state_dict())
    axo.parallelize(model, comms)
    (module,) = axo.pipeline.split(model, comms, cuts=[2])
    assert module is model and (part_of(model).index, part_of(model).stages) == (comms.stage, 2)
    for name, each in model.named_modules():
        if isinstance(each, Placeholder):
            assert all(parameter.is_meta for parameter in each.stands_for.parameters()), f"{name} is still held"
    block = sum(parameter.numel() for parameter in GPT(Config(**LLAMA)).transformer.h[0].parameters())
    vocabulary = 2 * block // LLAMA["n_embd"] // 2 * 2
    heavy = {**LLAMA, "n_layer": 6, "vocab_size": vocabulary, "padded_vocab_size": vocabulary}
    with torch.device("meta"):
        planned = GPT(Config(**heavy))
    axo.parallelize(planned, comms)
    axo.pipeline.split(planned, comms, cuts="planner")
    blocks = {name.split(".")[2] for name in planned.state_dict() if ".h." in name}
    return whole, set(model.state_dict()), blocks


def test_a_stage_holds_its_own_tensors_under_their_names():
    (whole, first, light), (_, last, heavy) = run_ranks(what_each_holds, 2)
    assert first | last == whole and not first & last
    assert {name.split(".")[2] for name in first if ".h." in name} == {"0", "1"}
    assert "lm_head.weight" in last and "transformer.wte.weight" in first
    assert (light, heavy) == (set("0123"), set("45")), "the head does as much as two blocks"


def small(kind):
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
        ViTConfig,
        ViTForImageClassification,
    )

    if kind == "vit":  # 4 patches and a token of the class
        sizes = {"num_hidden_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}
        return ViTForImageClassification(ViTConfig(**sizes, image_size=8, patch_size=4, num_labels=10))
    if kind == "gpt2":
        sizes = {"n_layer": 4, "n_embd": 32, "n_head": 4, "vocab_size": 61, "n_positions": 16}
        return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))
    sizes = {"num_hidden_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=48, vocab_size=61, max_position_embeddings=16))


def in_stages(cases):
    """Two steps, accumulated; one rank of each stage keeps its outputs, and so the nodes behind them."""
    dist.init_process_group("axo")
    for kind, grid, name in cases:
        comms = axo.connect(grid, pipeline=2)
        torch.manual_seed(7)
        serial = small(kind)
        model = copy.deepcopy(serial)
        ids, targets = (torch.randint(61, (ROWS, TOKENS)) for _ in range(2))
        if kind == "vit":
            ids, targets = torch.randn(ROWS, 3, 8, 8), torch.randint(10, (ROWS,))
        loss_of = lambda logits, wanted: F.cross_entropy(logits.flatten(0, -2), wanted.flatten())  # noqa: E731
        loss_of(serial(ids).logits, targets).backward()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="parallelize:")
            axo.parallelize(model, comms, plan="auto")
        modules = axo.pipeline.split(model, comms, **axo.pipeline.layout(name))
        stages = axo.pipeline.stages(modules, comms, rows=2 // comms.grid.z, tokens=5 if kind == "vit" else TOKENS)
        schedule = axo.pipeline.schedule(name, stages, microbatches=4, loss=loss_of)
        mine = slice(comms.coords.z * ROWS // comms.grid.z, (comms.coords.z + 1) * ROWS // comms.grid.z)
        kept = []
        for module in modules if comms.rank == 0 else ():
            module.register_forward_hook(lambda module, given, output, kept=kept: kept.append(output))
        for _ in range(2):
            schedule.step(ids[mine], target=targets[mine])
        in_whole = renamed(model)
        for own, parameter in model.named_parameters():
            expected = 2 * serial.get_parameter(in_whole.get(own, own)).grad
            # Of attention's key bias the gradient is what rounding leaves: it counts beside that of queries.
            like = serial.get_parameter(
                in_whole.get(own, own).replace("key.bias", "query.bias").replace("k_proj.bias", "q_proj.bias")
            ).grad
            worst = (axo.unshard_grad(parameter) - expected).abs().max().item() / like.abs().max().item()
            assert worst <= 1e-5, f"{kind} by {name} on {grid}: {own} is off by {worst:.1e}"


@pytest.mark.parametrize(
    "cases",
    [
        [("llama", "2x1x1x1", "1f1b"), ("gpt2", "1x1x2x1", "zero-bubble"), ("vit", "2x1x1x1", "interleaved-1f1b")],
        pytest.param(
            [(kind, grid, name) for kind in ("llama", "gpt2", "vit") for grid in ("1x2x1x1", "1x1x2x1") for name in
             ("gpipe", "zbv", "interleaved-1f1b")],
            marks=pytest.mark.soak,
        ),
    ],
    ids=["some", "all"],
)  # fmt: skip
def test_hugging_face(cases):
    run_ranks(in_stages, 4, cases, timeout=120, preload=("transformers",))
