"""Every architecture in LitGPT's configuration list on grids, against the serial ``litgpt.GPT``, sizes shrunk.

Flags are all kept. The classes of Hugging Face are the oracle of test_architectures, for those that have one.
"""

import copy
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from litgpt.config import Config, configs
from litgpt.model import GPT

import axo
from axo.grid import Grid
from bench.tools.litgpt_architectures import refusal, report
from tests.integrations.litgpt.architectures import architecture
from tests.launcher import run_ranks
from tests.nn.support import assert_close, assert_gradients_match, my_rows

GRIDS = ("2x1x1x1", "1x2x1x1", "1x1x2x1")


def distinct():
    """The first configuration of each architecture."""
    found = {}
    for fields in configs:
        config = Config(**fields)
        found.setdefault(architecture(config), config)
    return list(found.values())


def shrink(config):
    """The same architecture, small: two layers, 64 features, four heads."""
    small = copy.deepcopy(config)
    heads = config.n_head
    own_head = config.head_size * heads != config.n_embd
    small.n_query_groups = 1 if config.n_query_groups == 1 else 2 if config.n_query_groups < heads else 4
    small.n_layer, small.n_head, small.n_embd, small.block_size = 2, 4, 64, 32
    small.head_size = 24 if own_head else 16
    small.rope_n_elem = int(config.rotary_percentage * small.head_size)
    small.vocab_size, small.padded_vocab_size = 60, 61
    small.intermediate_size = 88
    if config.n_expert:
        small.n_expert, small.n_expert_per_token = 4, min(config.n_expert_per_token, 3)
        small.moe_intermediate_size = config.moe_intermediate_size and 40
    if config.sliding_window_size is not None:
        small.sliding_window_size = 7
    for name in ("sliding_window_indices", "rope_indices"):
        kinds = list(dict.fromkeys(getattr(config, name) or ()))
        setattr(small, name, (kinds * 2)[:2] if getattr(config, name) else None)
    if config.attention_scores_scalar:
        small.attention_scores_scalar = 20
    if "original_max_seq_len" in (config.rope_adjustments or {}):
        small.rope_adjustments = {**config.rope_adjustments, "original_max_seq_len": 16}
    assert architecture(small) == architecture(config), config.name
    return small


def build(config):
    torch.manual_seed(3)
    model = GPT(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.3)
    return model


def compare(comms, config):
    what = f"{config.name} at {comms.grid}"
    serial = build(config)
    model = axo.parallelize(build(config), comms, gather_logits=True)
    ids = torch.randint(61, (4, 17), generator=torch.Generator().manual_seed(5))
    expected = serial(ids[:, :-1])
    F.cross_entropy(expected.flatten(0, 1), ids[:, 1:].flatten()).backward()
    logits = model(my_rows(comms, ids[:, :-1]))
    F.cross_entropy(logits.flatten(0, 1), my_rows(comms, ids[:, 1:]).flatten()).backward()
    assert_close(logits, my_rows(comms, expected), 1e-5, f"{what}: logits")
    assert_gradients_match(model, serial, 1e-5, what)


def on_grids(names, every):
    """Each configuration on all grids, or on one of them in turn."""
    grids = [axo.connect(grid) for grid in GRIDS]
    chosen = [config for config in (Config(**fields) for fields in configs) if config.name in names]
    for index, config in enumerate(chosen):
        for comms in grids if every else [grids[index % 3]]:
            compare(comms, shrink(config))


def test_a_sample_of_the_architectures_runs():
    run_ranks(on_grids, 2, {config.name for config in distinct()[::5]}, False, timeout=120)


@pytest.mark.soak
@pytest.mark.parametrize("part", range(3))
def test_every_architecture_runs(part):
    """One configuration of each, on every grid; the count is printed (-s)."""
    found = distinct()
    run_ranks(on_grids, 2, {config.name for config in found[part::3]}, True, timeout=300)
    print(f"{len(found[part::3])} of {len(found)} architectures in {len(configs)} configurations of LitGPT: all run")


@pytest.mark.soak
@pytest.mark.parametrize("part", range(7))
def test_every_configuration_runs(part):
    """All configurations, on every grid."""
    run_ranks(on_grids, 2, {fields["name"] for fields in configs[part::7]}, True, timeout=400)


def test_what_runs_in_real_size_is_told():
    """The report: counts of configurations, and refusals by name."""
    everything = report(Grid.parse("1x2x4x1"))
    assert f"{len(configs)} of {len(configs)} configurations run" in everything and "refused" not in everything
    why = refusal(Config.from_name("SmolLM2-135M"), Grid.parse("2x1x1x1"))
    words = "n_head=9 does not divide over x=2; use n_head=8 or 10, or a grid with x in {1, 3}"
    assert why == f"litgpt model 'SmolLM2-135M': {words}"
    why = refusal(Config.from_name("pythia-14m"), Grid.parse("3x1x1x1"))
    assert why.endswith("a grid with x in {1, 2, 4}")  # what its four heads allow too
    latent = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
    deepseek = Config(n_layer=1, n_head=4, n_embd=32, latent_attention=latent)
    assert refusal(deepseek, Grid.parse("2x2x1x1")) is None
    assert "q_lora_rank=8 does not divide over y=3" in refusal(deepseek, Grid.parse("1x3x1x1"))


def test_architectures_are_told_apart_by_flags_not_sizes():
    one = Config.from_name("Llama-3-8B")
    assert architecture(one) == architecture(Config.from_name("Llama-3-70B"))
    for change in ({"bias": True}, {"norm_qk": True}, {"n_query_groups": 1}, {"sliding_window_size": 4}):
        assert architecture(dataclasses.replace(one, **change)) != architecture(one), change
