"""Mixtures of experts and latent attention of LitGPT on grids, against the serial model.

Hugging Face's: test_architectures.
"""

import functools

import pytest
import torch
import torch.nn.functional as F
from litgpt.config import Config
from litgpt.model import GPT

import axo
from axo.matmul import cost
from tests.gpt import LLAMA, batch
from tests.launcher import run_ranks
from tests.nn.support import (
    assert_close,
    assert_counted,
    assert_gradients_match,
    gradients_of,
    my_rows,
    once,
    seed_apart,
    serial_seed,
)

FIELDS = {**LLAMA, "mlp_class_name": "LLaMAMoE", "n_expert_per_token": 2}
CASES = {
    "mixtral": {**FIELDS, "n_expert": 5, "moe_intermediate_size": 24},
    "olmoe": {**FIELDS, "n_expert": 8, "moe_intermediate_size": 20, "norm_qk": True, "norm_qk_type": "olmo2"},
    # DeepSeek's: the first block dense, a shared expert, groups of experts, scaled
    "grouped": {**FIELDS, "n_expert": 8, "n_expert_groups": 4, "n_topk_groups": 2, "n_topk_scores_per_group": 2,
                "moe_intermediate_size": 16, "n_shared_expert": 2, "first_k_dense_replace": 1, "norm_topk_prob": True,
                "routed_scaling_factor": 2.5},
}  # fmt: skip
LATENT = {"q_lora_rank": 12, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 8}
CASES["latent"] = {**CASES["grouped"], "n_query_groups": FIELDS["n_head"], "latent_attention": LATENT}


def serial_model(case):
    """Drawn as litgpt draws it before training, larger: a gate that has a mind of its own."""
    serial_seed()
    model = GPT(Config(**CASES[case]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "gate" in name:
                parameter.normal_(std=0.3)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.1)
    return model


PROMPT = 6  # tokens that come at once, before those that come one by one


def oracle(case):
    """Of the serial model: logits, gradients; of other weights: the logits, those of latent attention by its cache."""
    serial = serial_model(case)
    ids, targets = batch(serial.config, 0)
    logits = serial(ids)
    F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    gradients = gradients_of(serial)
    assert gradients["transformer.h.1.mlp.gate.weight"].abs().max() > 1e-4
    state = {name: value + 0.01 for name, value in serial.state_dict().items()}
    serial.load_state_dict(state)
    with torch.no_grad():
        loaded = serial(ids)
        if case == "latent":
            serial.set_kv_cache(batch_size=len(ids), max_seq_length=ids.shape[1])
        cached = [serial(ids[:, place], place) for place in places(ids)] if case == "latent" else []
    return logits.detach(), gradients, state, loaded, cached


def places(ids):
    return [torch.arange(PROMPT), *torch.arange(PROMPT, ids.shape[1])[:, None]]


@functools.cache
def expected_of(case):
    """What one rank has computed, once for all grids."""
    with torch.random.fork_rng(devices=[]):
        return once(functools.partial(oracle, case))


def compare(comms, cases, algorithm="axonn"):
    for case in cases:
        what = f"{case} at {comms.grid}, {algorithm}"
        expected, gradients, state, loaded, cached = expected_of(case)
        model = serial_model(case)
        seed_apart(comms)
        axo.parallelize(model, comms, algorithm=algorithm, gather_logits=True)
        assert list(model.state_dict()) == list(state)
        ids, targets = batch(model.config, 0)
        rows = my_rows(comms, ids)
        for _ in range(2):  # the second pass gathers in the order of the first
            logits = model(rows)
            F.cross_entropy(logits.flatten(0, 1), my_rows(comms, targets).flatten()).backward()
            assert_close(logits, my_rows(comms, expected), 1e-5, f"{what}: logits")
            assert_gradients_match(model, gradients, 1e-5, what)
            model.zero_grad()
        model.load_state_dict(state)
        with torch.no_grad():
            assert_close(model(rows), my_rows(comms, loaded), 1e-5, f"{what}: after loading")
            if case == "latent":  # each rank has a cache of its heads
                model.set_kv_cache(batch_size=len(rows), max_seq_length=ids.shape[1])
                ranks = comms.grid.size(comms.arrangement.inner)
                assert model.transformer.h[0].attn.kv_cache.k.shape[1] == LLAMA["n_head"] // ranks
            for place, theirs in zip(places(ids) if cached else (), cached, strict=True):
                mine = model(rows[:, place], place)
                assert_close(mine, my_rows(comms, theirs), 1e-5, f"{what}: token {place[-1]}")


def compare_on(grids, *arguments):
    for grid in grids:
        with axo.connect(grid) as comms:
            compare(comms, *arguments)


def test_experts_equal_serial_on_each_axis():
    run_ranks(compare_on, 2, ["2x1x1x1", "1x2x1x1", "1x1x2x1"], list(CASES), timeout=240)


@pytest.mark.parametrize("algorithm", ["axonn", "tesseract"])
def test_experts_equal_serial_on_all_axes(algorithm):
    run_ranks(compare_on, 8, ["2x2x2x1"], list(CASES), algorithm, timeout=120)


def alone(grid, algorithm):
    """One row a rank: most experts get no token, on other ranks others; what the gate sends is what it says."""
    comms = axo.connect(grid)
    serial, model = serial_model("mixtral"), serial_model("mixtral")
    overlap = axo.Overlap(bucket_bytes=0)
    axo.parallelize(model, comms, algorithm=algorithm, gather_logits=True, overlap=overlap)
    ids = torch.arange(comms.data_ranks).view(-1, 1) * 7
    serial(ids).logsumexp(-1).mean().backward()
    model(my_rows(comms, ids)).logsumexp(-1).mean().backward()
    assert_gradients_match(model, serial, 1e-5, "one token a rank")
    gate = model.transformer.h[0].mlp.gate
    rows = torch.randn(6, gate.weight.shape[1], requires_grad=True)
    with axo.count_collectives() as counts:
        gate(rows).sum().backward()
    on_y = cost.Call(cost.BACKWARD, "all_reduce", "y", 6 * gate.out_features, 4, "")  # of SumGradient
    assert_counted(counts, [*gate.cost(6 * comms.data_ranks // comms.grid.data), on_y])


@pytest.mark.parametrize("grid, algorithm", [("1x2x2x2", "axonn"), ("2x2x2x1", "tesseract")])
def test_experts_without_tokens_and_the_cost_of_a_gate(grid, algorithm):
    run_ranks(alone, 8, grid, algorithm)


def tuned(grid):
    """Products chosen at the first step, overlaps off: ranks along z have other numbers of rows for an expert, or 0."""
    comms = axo.connect(grid)
    off = axo.Overlap(all_reduce=False, reduce_scatter=False, all_gather=False)
    serial, model = serial_model("mixtral"), serial_model("mixtral")
    axo.parallelize(model, comms, gather_logits=True, overlap=off)
    for rows in (1, 3):
        ids = torch.arange(rows * comms.grid.z).view(-1, 1) * 7 % 101
        serial.zero_grad(), model.zero_grad()
        serial(ids).logsumexp(-1).mean().backward()
        model(my_rows(comms, ids)).logsumexp(-1).mean().backward()
        assert_gradients_match(model, serial, 1e-5, f"{rows} tokens a rank")


@pytest.mark.soak
def test_experts_with_tuned_products():
    run_ranks(tuned, 4, "1x2x2x1", env={"AXO_TUNE": "first-step"}, timeout=120)
