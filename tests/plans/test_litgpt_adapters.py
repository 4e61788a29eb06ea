"""LitGPT's adapter models on grids, against the serial ``litgpt.adapter.GPT`` and ``litgpt.adapter_v2.GPT``."""

import functools

import pytest
import torch
import torch.nn.functional as F
from litgpt import adapter, adapter_v2

import axo
from axo.matmul import cost
from tests.gpt import LLAMA, NEOX, batch
from tests.launcher import run_ranks
from tests.nn.support import assert_close, assert_counted, gradients_of, my_rows, once, seed_apart, serial_seed

EXPERTS = {"mlp_class_name": "LLaMAMoE", "n_expert": 4, "n_expert_per_token": 2, "moe_intermediate_size": 16}
# Heads: groups of two, one shared by all (several ranks hold it), one each; prompts in all blocks or the second only.
CASES = {
    "prompt": (adapter, LLAMA, 1),
    "multi-query": (adapter, {**LLAMA, "n_query_groups": 1}, 0),
    "scales": (adapter_v2, {**NEOX, "lm_head_bias": True}, 0),
    "scales-experts": (adapter_v2, {**LLAMA, **EXPERTS}, 1),
    "scales-multi-query": (adapter_v2, {**LLAMA, "n_query_groups": 1, "mlp_class_name": "GemmaMLP"}, 0),
}


def serial_model(case):
    """The serial model with adapters that do something, only these trainable."""
    module, fields, start = CASES[case]
    serial_seed()
    model = module.GPT(module.Config(**fields, adapter_start_layer=start, adapter_prompt_length=5))
    keep = module.mark_only_adapter_as_trainable if module is adapter else module.mark_only_adapter_v2_as_trainable
    for name, parameter in model.named_parameters():
        if "gating_factor" in name or "adapter_bias" in name:
            torch.nn.init.normal_(parameter, std=0.5)
        elif "adapter_scale" in name:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.2)
    keep(model)
    return model


def forget_prompt(model):
    """LitGPT keeps what the first pass made of the prompt, graph and all."""
    for block in model.transformer.h:
        if hasattr(block.attn, "gating_factor"):
            assert block.attn.adapter_kv_cache is not None
            block.attn.adapter_kv_cache = None


def oracle(case):
    """Of the serial model: its state, logits, gradients; then other weights, and their logits."""
    serial = serial_model(case)
    before = {name: value.clone() for name, value in serial.state_dict().items()}
    ids, targets = batch(serial.config, 0)
    logits = serial(ids)
    F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    gradients = gradients_of(serial)
    assert all(gradient.abs().max() > 1e-6 for gradient in gradients.values())
    forget_prompt(serial)
    state = {name: value * 1.2 for name, value in before.items()}
    serial.load_state_dict(state)
    with torch.no_grad():
        return before, logits.detach(), gradients, state, serial(ids)


@functools.cache
def expected_of(case):
    """What one rank has computed, once for all grids."""
    with torch.random.fork_rng(devices=[]):
        return once(functools.partial(oracle, case))


def compare(comms, cases, algorithm="axonn"):
    for case in cases:
        what = f"{case} at {comms.grid}, {algorithm}"
        before, expected, gradients, other, loaded = expected_of(case)
        model = serial_model(case)
        seed_apart(comms)
        axo.parallelize(model, comms, algorithm=algorithm, gather_logits=True)
        state = model.state_dict()
        assert list(state) == list(before)
        for name, value in before.items():
            assert torch.equal(state[name], value), f"{what}: {name}"
        ids, targets = batch(model.config, 0)
        assert {name for name, p in model.named_parameters() if p.requires_grad} == gradients.keys()
        for _ in range(2):  # the second pass gathers in the order of the first
            logits = model(my_rows(comms, ids))
            F.cross_entropy(logits.flatten(0, 1), my_rows(comms, targets).flatten()).backward()
            assert_close(logits, my_rows(comms, expected), 1e-5, f"{what}: logits")
            for name, theirs in gradients.items():
                mine = model.get_parameter(name)
                assert_close(mine.grad, axo.shard(theirs, mine.placement), 1e-5, f"{what}: gradient of {name}")
            forget_prompt(model)
            model.zero_grad()
        model.load_state_dict(other)
        with torch.no_grad():
            assert_close(model(my_rows(comms, ids)), my_rows(comms, loaded), 2e-5, f"{what}: after loading")


def compare_on(grids, *arguments):
    for grid in grids:
        with axo.connect(grid) as comms:
            compare(comms, *arguments)


def test_adapters_equal_serial_on_each_axis():
    """Logits and every gradient, of prompts, gates, scales, biases and norms; whole weights are cut when loaded."""
    run_ranks(compare_on, 2, ["2x1x1x1", "1x2x1x1", "1x1x2x1"], list(CASES), timeout=240)


@pytest.mark.parametrize("algorithm, first", [("axonn", "scales"), ("tesseract", "prompt")])
def test_adapters_equal_serial_on_all_axes(algorithm, first):
    run_ranks(compare_on, 8, ["2x2x2x1"], [first, "multi-query", "scales-experts"], algorithm, timeout=120)


def costs(grid):
    """A scaled layer's ``cost`` and its product's, together, are what they send; heads shared by two ranks too."""
    of_weights = (cost.SCATTER_WEIGHT_GRAD, cost.REDUCE_WEIGHT_GRAD)
    for algorithm in ("axonn", "tesseract"):
        comms, overlap = axo.connect(grid), axo.Overlap(bucket_bytes=0)
        model = axo.parallelize(serial_model("scales-multi-query"), comms, algorithm=algorithm, overlap=overlap)
        layer = model.transformer.h[0].attn.qkv
        inputs = torch.randn(12 // comms.data_ranks, 5, layer.linear.weight.shape[1], requires_grad=True)
        frozen = algorithm == "axonn"
        layer.linear.weight.requires_grad_(not frozen)
        with axo.count_collectives() as counts:
            layer(inputs).sum().backward()
        base = [call for call in layer.linear.cost(60) if not frozen or call.purpose not in of_weights]
        assert_counted(counts, [*base, *layer.cost(60)])


def test_cost_is_what_is_sent():
    run_ranks(costs, 8, "2x2x2x1")


def refusals():
    comms = axo.connect("2x1x1x1")
    with pytest.raises(ValueError) as error:
        axo.parallelize(serial_model("prompt"), comms, sequence_parallel=True)
    return str(error.value)


def test_sequence_parallelism_is_refused():
    for message in run_ranks(refusals, 2):
        assert "sequence_parallel=True with an adapter ('transformer.h.1.attn') is not supported" in message
