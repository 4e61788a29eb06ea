"""plan="litgpt": training, features and generation of litgpt's GPT against the unmodified serial model."""

import copy
import functools
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from litgpt.config import Config
from litgpt.model import GPT
from torch.utils.checkpoint import checkpoint

import axo
from tests.gpt import BATCH, LLAMA, NEOX, batch, serial_losses, train
from tests.launcher import run_ranks
from tests.nn.support import (
    assert_close,
    assert_gradients_match,
    gradients_of,
    my_rows,
    once,
    seed_apart,
    serial_seed,
)

STEPS, LONG = 5, 20
# Two fp32 runs that sum in different orders stay within 3e-5 over 20 steps; a wrong gradient is off by 1e-2 at once.
LIMIT = 1e-4


def train_on(grids, config, meta, steps):
    dist.init_process_group("axo")
    return {grid: train(axo.connect(grid), config, steps, meta=meta) for grid in grids}


def assert_losses_match(found, config, meta, steps):
    expected = serial_losses(config, steps, meta)
    assert expected[-1] < expected[0] - 0.2, "the serial run learns nothing, so it proves nothing"
    for per_grid in found:
        for grid, losses in per_grid.items():
            worst = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
            assert worst <= LIMIT, f"{grid}: losses differ by {worst:.1e}: {losses} against {expected}"


@pytest.mark.parametrize(
    "config, meta, steps",
    [pytest.param(LLAMA, False, LONG, marks=pytest.mark.soak), (NEOX, True, STEPS)],
    ids=["llama", "neox"],
)
def test_losses_equal_serial_on_16_ranks(config, meta, steps):
    found = run_ranks(train_on, 16, ["2x2x2x2"], config, meta, steps, timeout=120)
    assert_losses_match(found, config, meta, steps)


@pytest.mark.parametrize(
    "config, meta, steps",
    [({**LLAMA, "n_query_groups": 8}, True, STEPS), pytest.param(NEOX, False, LONG, marks=pytest.mark.soak)],
    ids=["llama", "neox"],
)
def test_losses_equal_serial_on_each_axis_alone(config, meta, steps):
    grids = ["8x1x1x1", "1x8x1x1", "1x1x8x1", "1x1x1x8"]
    found = run_ranks(train_on, 8, grids, config, meta, steps, timeout=240)
    assert_losses_match(found, config, meta, steps)


class Skipping:
    """Communicators whose n-th all-reduce over one axis does nothing, from step to step."""

    def __init__(self, comms, axis, call):
        self._comms, self._axis, self._call, self._calls = comms, axis, call, 0

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        value = getattr(self._comms, name)
        return _Faulty(value, self) if name == self._axis else value

    def axis(self, name):
        return getattr(self, name)


class _Faulty:
    def __init__(self, communicator, owner):
        self._communicator, self._owner = communicator, owner

    def __getattr__(self, name):
        return getattr(self._communicator, name)

    def all_reduce(self, tensor, op="sum", async_op=False):
        self._owner._calls += 1
        if self._owner._calls != self._owner._call:
            return self._communicator.all_reduce(tensor, op, async_op)
        return Done(tensor) if async_op else tensor


class Done:
    def __init__(self, tensor):
        self._tensor = tensor

    def wait(self):
        return self._tensor


def train_broken(axes):
    """Losses by the axis of the all-reduce that is left out; None: of none."""
    dist.init_process_group("axo")
    found = {None: train(axo.connect("2x2x1x2"), LLAMA, 4, meta=False)}
    for axis in axes:
        found[axis] = train(Skipping(axo.connect("2x2x1x2"), axis, 3), LLAMA, 4, meta=False)
    return found


@functools.cache
def broken_runs():
    return run_ranks(train_broken, 8, ["x", "y", "data"]), serial_losses(LLAMA, 4, False)


@pytest.mark.parametrize("axis", ["x", "y", "data"])
def test_one_all_reduce_left_out_is_seen(axis):
    found, expected = broken_runs()
    for losses in found:
        assert max(abs(a - b) for a, b in zip(losses[None], expected, strict=True)) <= LIMIT
        assert max(abs(a - b) for a, b in zip(losses[axis], expected, strict=True)) > LIMIT, "parity did not see it"


SMALL = {"n_layer": 2, "block_size": 32, "vocab_size": 60, "padded_vocab_size": 61}
HEADS = {"n_embd": 48, "n_head": 4, "head_size": 12, "n_query_groups": 2, "intermediate_size": 40}
# Names of litgpt's configurations, shrunk, with what each of them adds.
FEATURES = {
    "Gemma-2-2b": {},  # soft-capping, post-norms, scaled embeddings, unit offset, sliding window
    "Gemma-3-1b-it": {"sliding_window_size": 4},  # norms of queries and keys, two rotary bases
    "Qwen3-0.6B": {},  # norms of queries and keys
    "OLMo-2-1124-7B": {},  # norms over all heads' queries and keys, post-norms without pre-norms
    "OLMo-1B-hf": {},  # norms without weights
    "phi-2": {},  # one norm shared by attention and MLP, a bias in the head
    "Qwen2.5-0.5B": {},  # a bias in qkv only
    "stablelm-base-alpha-3b": {},
    "Mistral-7B-v0.1": {"sliding_window_size": 4},
    "falcon-40b": {},
}


def serial_step(config, ids, targets):
    """Logits and gradients of the unmodified model."""
    serial_seed()
    serial = GPT(config)
    logits = serial(ids)
    F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    return logits.detach(), gradients_of(serial)


def features(grid):
    comms = axo.connect(grid)
    for name, changes in FEATURES.items():
        config = Config.from_name(name, **{**SMALL, **HEADS, **changes})
        seed_apart(comms)
        model = axo.parallelize(GPT(config), comms)
        assert model.config is config and config.n_head == 4, "the model's own configuration has changed"
        ids, targets = batch(config, 0)
        expected, gradients = once(partial(serial_step, config, ids, targets))
        logits = model(my_rows(comms, ids))
        loss = axo.nn.cross_entropy(logits, my_rows(comms, targets), comms=comms, columns=config.padded_vocab_size)
        loss.backward()
        assert_close(axo.unshard_output(model.lm_head, logits), expected, 1e-4, f"{name}: logits")  # of size 1 to 30
        assert_gradients_match(model, gradients, 1e-5, name)


def test_every_supported_feature_equals_serial():
    run_ranks(features, 8, "2x2x2x1", timeout=120)


def tiny_vocabulary(grid):
    """5 tokens over x=4 (2, 2, 1 and none), then over z: shards without rows, down to the optimizer."""
    comms = axo.connect(grid)
    config = Config(**{**LLAMA, "vocab_size": 5, "padded_vocab_size": 5})
    seed_apart(comms)
    model = axo.parallelize(GPT(config), comms)
    with torch.random.fork_rng(devices=[]):
        serial_seed()
        serial = GPT(config)
    twin = copy.deepcopy(model)
    ids, targets = batch(config, 0)
    for _ in range(2):
        F.cross_entropy(serial(ids).flatten(0, 1), targets.flatten()).backward()
        for gpt in (model, twin):
            logits = gpt(my_rows(comms, ids))
            axo.nn.cross_entropy(logits, my_rows(comms, targets), comms=comms, columns=5).backward()
            assert_gradients_match(gpt, serial, 1e-5, grid)
            axo.clip_grad_norm_(gpt.parameters(), 1.0)
            torch.optim.SGD(gpt.parameters(), lr=0.1).step()
            gpt.zero_grad()
        torch.nn.utils.clip_grad_norm_(serial.parameters(), 1.0)
        torch.optim.SGD(serial.parameters(), lr=0.1).step()
        serial.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(my_rows(comms, ids))
        loss = axo.nn.cross_entropy(logits, my_rows(comms, targets), comms=comms, columns=5, inplace_backward=True)
    loss.backward()
    assert logits.dtype == torch.bfloat16 and loss.dtype == torch.float32
    assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())


def test_tiny_vocabulary_copies_and_autocast():
    run_ranks(tiny_vocabulary, 8, "4x1x2x1")


def generate(grid):
    comms = axo.connect(grid)
    for fields in (LLAMA, NEOX):
        config = Config(**fields)
        seed_apart(comms)
        model = axo.parallelize(GPT(config), comms, gather_logits=True)
        with torch.random.fork_rng(devices=[]):
            serial_seed()
            serial = GPT(config)
        prompt = batch(config, 0)[0][:2, :5]
        with torch.inference_mode():
            for gpt in (model, serial):
                gpt.set_kv_cache(batch_size=2, max_seq_length=16)
            heads = model.transformer.h[0].attn.kv_cache.k.shape[1]
            assert heads == config.n_query_groups // comms.grid.x
            token, position = prompt, torch.arange(5)
            for _ in range(8):
                mine, theirs = model(token, position), serial(token, position)
                assert_close(mine, theirs, 1e-5, f"logits after {int(position[-1]) + 1} tokens")
                token, position = theirs[:, -1:].argmax(-1), position[-1:] + 1
            model.clear_kv_cache()
            whole = batch(config, 1)[0][:2]
            assert_close(model(whole), serial(whole), 1e-5, "without a cache")
    cached = GPT(config)
    cached.set_kv_cache(batch_size=2, max_seq_length=16)  # litgpt's generate does it before the strategy sees the model
    axo.parallelize(cached, comms)
    assert cached.transformer.h[0].attn.kv_cache.k.shape[1] == config.n_query_groups // comms.grid.x


def test_incremental_decoding_equals_serial():
    run_ranks(generate, 4, "2x2x1x1")


def recompute(grid):
    comms = axo.connect(grid)
    config = Config(**LLAMA)
    for cache in ("all", "none"):
        seed_apart(comms)
        recompute_with(comms, config, axo.parallelize(GPT(config), comms, gather_cache=cache), cache)


def recompute_with(comms, config, model, cache):
    ids, targets = (my_rows(comms, t) for t in batch(config, 0))
    in_blocks = 5 * config.n_layer  # qkv, proj, fc_1, fc_2, proj; beside them wte and the head
    found = {}
    for kind in ("none", "reentrant", "not reentrant"):
        model.zero_grad()
        for block in model.transformer.h:
            block.__dict__.pop("forward", None)
            if kind != "none":
                block.forward = partial(checkpoint, block.forward, use_reentrant=kind == "reentrant")
        with axo.count_collectives() as counts:
            loss = axo.nn.cross_entropy(model(ids), targets, comms=comms, columns=config.padded_vocab_size)
            loss.backward()
        found[kind] = [parameter.grad for parameter in model.parameters()]
        assert all(grad is not None for grad in found[kind])
        gathers = 2 + in_blocks if cache == "all" else 3 + 2 * in_blocks  # wte once: its backward wants no weight
        assert counts["all_gather", "z"].calls == gathers, (kind, cache)
    for kind in ("reentrant", "not reentrant"):
        assert all(torch.equal(a, b) for a, b in zip(found["none"], found[kind], strict=True)), kind


def test_activation_checkpointing_gives_the_same_bits():
    run_ranks(recompute, 8, "2x2x2x1")


def gathered_logits_and_checkpoints(grid):
    comms = axo.connect(grid)
    config = Config(**LLAMA)
    seed_apart(comms)
    model = axo.parallelize(GPT(config), comms, gather_logits=True)
    serial = GPT(config)  # another seed on every rank: rank 0's values travel by the checkpoint
    state = serial.state_dict()
    for value in state.values():
        comms.world.broadcast(value)
    for index in range(config.n_layer):  # keys of old litgpt checkpoints, with interleaved q, k and v
        weight = state.pop(f"transformer.h.{index}.attn.qkv.weight")
        groups, per_group = config.n_query_groups, config.n_head // config.n_query_groups
        q, k, v = weight.split([config.n_head * config.head_size] + [groups * config.head_size] * 2)
        q, k, v = q.chunk(groups), k.chunk(groups), v.chunk(groups)
        assert q[0].shape[0] == per_group * config.head_size
        legacy = torch.cat([part for group in zip(q, k, v, strict=True) for part in group])
        state[f"transformer.h.{index}.attn.attn.weight"] = legacy
    model.load_state_dict(state)
    assert list(model.state_dict()) == list(serial.state_dict())
    for (name, mine), theirs in zip(model.named_parameters(), serial.parameters(), strict=True):
        assert_close(mine, axo.shard(theirs.detach(), mine.placement), 0, name)
    again = {name: value.clone() for name, value in model.state_dict().items()}  # shards
    model.load_state_dict(again)
    ids, targets = batch(config, 0)
    rows, row_targets = my_rows(comms, ids), my_rows(comms, targets)
    logits = model(rows)
    assert logits.shape[-1] == config.padded_vocab_size
    F.cross_entropy(logits.flatten(0, 1), row_targets.flatten()).backward()  # litgpt's own loss, on every rank
    F.cross_entropy(serial(ids).flatten(0, 1), targets.flatten()).backward()
    assert_gradients_match(model, serial, 1e-5, "gather_logits")


def test_gathered_logits_and_checkpoints():
    run_ranks(gathered_logits_and_checkpoints, 8, "2x2x2x1")


REFUSED = [
    ({"n_head": 12, "n_embd": 48, "n_query_groups": 3}, "n_query_groups=3 neither divides over x=4 nor divides it"),
    (
        {"n_query_groups": 2, "norm_qk": True, "norm_qk_type": "olmo2"},
        "a norm over all heads' keys (norm_qk_type='olmo2') with n_query_groups=2",
    ),
    ({"n_head": 6, "n_embd": 48, "n_query_groups": 6}, "n_head=6 does not divide over x=4; use n_head=4 or 8"),
    ({"n_head": 24, "n_embd": 48, "n_query_groups": 6}, "n_query_groups=6 does not divide over x=4"),
    ({"intermediate_size": 90}, "intermediate_size=90 does not divide over x=4; use intermediate_size=88 or 92"),
    ({"n_embd": 65, "head_size": 8}, "n_embd=65 does not divide over y=2"),
    (
        {"mlp_class_name": "LLaMAMoE", "n_expert": 4, "n_expert_per_token": 2, "moe_intermediate_size": 10},
        "moe_intermediate_size=10 does not divide over x=4; use moe_intermediate_size=8 or 12",
    ),
    (
        {
            "latent_attention": {
                "q_lora_rank": 8,
                "kv_lora_rank": 9,
                "qk_rope_head_dim": 4,
                "qk_nope_head_dim": 4,
                "v_head_dim": 8,
            },
            "n_query_groups": 8,
        },
        "kv_lora_rank=9 does not divide over y=2; use kv_lora_rank=8 or 10",
    ),
]


def refusals():
    comms = axo.connect("4x2x1x1")
    messages = []

    def refused(make, **options):
        with pytest.raises(ValueError) as error:
            axo.parallelize(make(), comms, **options)
        messages.append(str(error.value))

    for changes, _ in REFUSED:
        config = Config(**{**LLAMA, "name": "odd", **changes})
        refused(partial(GPT, config))

    strange = GPT(Config(**LLAMA))
    strange.transformer.h[0].attn = type("Attention", (torch.nn.Module,), {})()
    refused(lambda: strange)
    refused(lambda: torch.nn.Linear(4, 4))
    refused(lambda: axo.parallelize(GPT(Config(**LLAMA)), comms))
    refused(lambda: GPT(Config(**LLAMA)), plan="megatron")
    refused(lambda: GPT(Config(**{**LLAMA, "n_layer": 1 + comms.rank // 6})))
    with pytest.raises(ValueError) as error:
        axo.init_weights(GPT(Config(**LLAMA)))
    messages.append(str(error.value))
    return messages


def test_what_the_plan_cannot_do_is_one_error_that_names_it():
    expected = [message for _, message in REFUSED] + [
        "block 0 holds a tests.plans.test_litgpt_plan.Attention, which plan 'litgpt' does not know",
        "needs a litgpt.GPT, got a Linear",
        "'lm_head' is parallel already",
        "plan='megatron' is not known",
        "the models of ranks [6, 7] differ from rank 0's",
        "init_weights: GPT holds no parallel layer",
    ]
    for messages in run_ranks(refusals, 8):
        for message, part in zip(messages, expected, strict=True):
            assert part in message


def test_batches_cover_all_rows():
    """The data that the runs above share: every grid's rows are the same 16."""
    assert BATCH % 16 == 0 and torch.equal(batch(Config(**LLAMA), 3)[0], batch(Config(**LLAMA), 3)[0])
