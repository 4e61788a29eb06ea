"""Every architecture of LitGPT on a grid against the Hugging Face class of the same configuration.

Logits, the gradients of the loss, and greedy generation with a KV cache, at two ranks along x, y and z.
"""

import pytest
import torch
import torch.nn.functional as F
from litgpt.generate.base import generate
from litgpt.model import GPT

import axo
from tests.integrations.hugging_face import DENSE, EXPERTS, TIED, VOCABULARY, converted, small, theirs
from tests.launcher import run_ranks
from tests.nn.support import assert_close, my_rows

GRIDS = ("2x1x1x1", "1x2x1x1", "1x1x2x1")
SAMPLE = ("Gemma-2-2b", "Mixtral-8x7B-v0.1")
LIMIT = 1e-5  # absolute below 1, relative to the largest entry above it
PROMPT, LENGTH = 6, 14


def close(actual, expected, what):
    assert_close(actual, expected, LIMIT, what)


def tokens():
    return torch.randint(VOCABULARY, (4, 17), generator=torch.Generator().manual_seed(11))


def reference(name, **changes):
    """Configuration, weights as LitGPT names them, and what the Hugging Face class makes of the tokens."""
    config, tied = small(name, **{**(DENSE | EXPERTS).get(name, {}), **changes}), name in TIED
    model = theirs(config, tied)
    ids = tokens()
    logits = model(ids[:, :-1]).logits
    F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
    named = model.state_dict(keep_vars=True)
    weights = converted(config, {key: value.detach() for key, value in named.items()})
    gradients = converted(config, {key: value.grad for key, value in named.items() if value.grad is not None})
    with torch.no_grad():  # greedy, without a cache: what any cache must reproduce
        text, steps = ids[:1, :PROMPT], []
        for _ in range(LENGTH - PROMPT):
            steps.append(model(text).logits[:, -1])
            text = torch.cat([text, steps[-1].argmax(-1, keepdim=True)], 1)
    return config, tied, weights, logits.detach(), gradients, torch.stack(steps, 1), text


def compare(comms, expected):
    config, tied, weights, logits, gradients, steps, text = expected
    model = GPT(config)
    if tied:
        model.lm_head.weight = model.transformer.wte.weight
    axo.parallelize(model, comms, gather_logits=True)
    model.load_state_dict(weights)
    assert (model.lm_head.weight is model.transformer.wte.weight) is tied
    ids, what = tokens(), f"{config.name} at {comms.grid}"
    found = model(my_rows(comms, ids[:, :-1]))
    close(found, my_rows(comms, logits), f"{what}: logits")
    F.cross_entropy(found.flatten(0, 1), my_rows(comms, ids[:, 1:]).flatten()).backward()
    names = dict(model.named_parameters())
    assert names.keys() <= gradients.keys(), names.keys() - gradients.keys()
    for key, parameter in names.items():
        close(parameter.grad, axo.shard(gradients[key], parameter.placement), f"{what}: gradient of {key}")
    with torch.inference_mode():
        model.max_seq_length = LENGTH
        model.set_kv_cache(batch_size=1)
        position = torch.arange(PROMPT)
        for index in range(LENGTH - PROMPT):
            last = model(text[:, position], position)[:, -1]
            close(last, steps[:, index], f"{what}: logits of token {PROMPT + index}, with a cache")
            position = position[-1:] + 1
        model.clear_kv_cache()
        model.set_kv_cache(batch_size=1)
        assert generate(model, text[0, :PROMPT], LENGTH, temperature=0.0).tolist() == text[0].tolist(), what


def on_all_grids(names):
    grids = [axo.connect(grid) for grid in GRIDS]
    for name in names:
        expected = reference(name)
        for comms in grids:
            compare(comms, expected)


@pytest.mark.slow
def test_a_sample_of_architectures_equals_hugging_face():
    run_ranks(on_all_grids, 2, SAMPLE, timeout=120, preload=("transformers",))


@pytest.mark.soak
@pytest.mark.parametrize("name", [*DENSE, *EXPERTS])
def test_every_architecture_equals_hugging_face(name):
    run_ranks(on_all_grids, 2, [name], timeout=120, preload=("transformers",))
