"""LitGPT's LoRA model on grids, against the serial ``litgpt.lora.GPT``: the oracle of every number here."""

import functools

import pytest
import torch
import torch.nn.functional as F
from litgpt.lora import GPT, Config, mark_only_lora_as_trainable, merge_lora_weights
from torch.utils.checkpoint import checkpoint

import axo
from axo.matmul import cost
from tests.gpt import LLAMA, NEOX, batch
from tests.launcher import run_ranks
from tests.nn.support import assert_close, assert_counted, gradients_of, my_rows, once, seed_apart, serial_seed

EVERYWHERE = dict.fromkeys(("query", "key", "value", "projection", "mlp", "head"), True)
EXPERTS = {"mlp_class_name": "LLaMAMoE", "n_expert": 4, "n_expert_per_token": 2, "moe_intermediate_size": 16}
# What is adapted differs, and the heads: groups of 2, one shared by all (several ranks hold it), one each.
CASES = {
    "default": {**LLAMA, "lora": {"query": True, "value": True}},
    "everywhere": {**LLAMA, "lora": EVERYWHERE},
    "multi-query": {**LLAMA, "n_query_groups": 1, "lora": {"key": True, "value": True}},
    "neox": {**NEOX, "lm_head_bias": True, "lora": EVERYWHERE},
    "only-mlp": {**NEOX, "lora": {"mlp": True}},
    "experts": {**LLAMA, **EXPERTS, "lora": EVERYWHERE},
    "gemma": {**LLAMA, "mlp_class_name": "GemmaMLP", "attention_logit_softcapping": 30.0, "lora": EVERYWHERE},
}


def serial_model(case, dropout=0.0):
    """The serial model with adapters that do something (B is drawn too), only these trainable."""
    fields = dict(CASES[case])
    flags = {f"lora_{name}": on for name, on in fields.pop("lora").items()}
    serial_seed()
    model = GPT(Config(**fields, **flags, lora_r=3, lora_alpha=6, lora_dropout=dropout))
    for name, parameter in model.named_parameters():
        if name.endswith("lora_B"):
            torch.nn.init.normal_(parameter, std=0.1)
    mark_only_lora_as_trainable(model)
    return model


def loss_of(model, ids, targets):
    return F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())


def oracle(case):
    """Of the serial model: logits, gradients; of other weights: the logits, and the weights with adapters merged."""
    serial = serial_model(case)
    ids, targets = batch(serial.config, 0)
    logits = serial(ids)
    F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    gradients = gradients_of(serial)
    assert len(gradients) > 1
    state = {name: value * 1.5 for name, value in serial.state_dict().items()}
    serial.load_state_dict(state)
    with torch.no_grad():
        loaded = serial(ids)
        merge_lora_weights(serial)
    return logits.detach(), gradients, state, loaded, {name: p.detach() for name, p in serial.named_parameters()}


@functools.cache
def expected_of(case):
    """What one rank has computed, once for all grids."""
    with torch.random.fork_rng(devices=[]):
        return once(functools.partial(oracle, case))


def compare(comms, cases):
    for case in cases:
        what = f"{case} at {comms.grid}"
        expected, gradients, state, loaded, merged = expected_of(case)
        model = serial_model(case)
        names = [name for name, _ in model.named_parameters()]
        seed_apart(comms)
        axo.parallelize(model, comms, gather_logits=True)
        assert list(model.state_dict()) == list(state)
        ids, targets = batch(model.config, 0)
        rows, row_targets = my_rows(comms, ids), my_rows(comms, targets)
        assert_close(model(rows), my_rows(comms, expected), 1e-5, f"{what}: logits")
        with axo.count_collectives() as counts:
            loss_of(model, rows, row_targets).backward()
        assert {name for name, p in model.named_parameters() if p.requires_grad} == gradients.keys()
        for name in names:
            mine = model.get_parameter(name)
            if name not in gradients:
                assert mine.grad is None and "lora_" not in name
                continue
            assert_close(mine.grad, axo.shard(gradients[name], mine.placement), 1e-5, f"{what}: gradient of {name}")
        assert counts["reduce_scatter", "z"].calls == 0, "a frozen weight's gradient went over z"
        reduced = sum(model.get_parameter(name).numel() for name in gradients)
        for axis in ("z", "data"):
            if comms.grid.size(axis) > 1:
                assert counts["all_reduce", axis].elements == reduced, f"{what}: {axis} carries more than adapters"
        # Whole weights are cut when loaded; a merged model gives the same logits, its weight is serial's merged one.
        model.load_state_dict(state)
        with torch.no_grad():
            assert_close(model(rows), my_rows(comms, loaded), 2e-5, f"{what}: logits after loading")
            merge_lora_weights(model)
            for name, parameter in merged.items():
                mine = model.get_parameter(name)
                assert_close(mine, axo.shard(parameter, mine.placement), 1e-6, f"{what}: merged {name}")
            assert_close(model(rows), my_rows(comms, loaded), 2e-5, f"{what}: logits of the merged model")


def compare_on(grids, *arguments):
    for grid in grids:
        with axo.connect(grid) as comms:
            compare(comms, *arguments)


def test_adapted_models_equal_serial_on_each_axis():
    """Logits, gradients, merging; and what is communicated: nothing for what is frozen."""
    run_ranks(compare_on, 2, ["2x1x1x1", "1x2x1x1", "1x1x2x1"], list(CASES), timeout=240)


def test_adapted_models_equal_serial_on_all_axes():
    run_ranks(compare_on, 8, ["2x2x2x1"], ["everywhere", "multi-query", "experts"], timeout=120)


def costs(grid):
    """An adapter's ``cost`` and its layer's, together, are what they send."""
    comms = axo.connect(grid)
    model = axo.parallelize(serial_model("multi-query"), comms, overlap=axo.Overlap(bucket_bytes=0))
    layer = model.transformer.h[0].attn.qkv
    features = layer.linear.weight.shape[1]
    inputs = torch.randn(12 // comms.grid.z, 5, features, requires_grad=True)
    with axo.count_collectives() as counts:
        layer(inputs).sum().backward()
    rows = 12 * 5
    of_weights = (cost.SCATTER_WEIGHT_GRAD, cost.REDUCE_WEIGHT_GRAD)
    base = [call for call in layer.linear.cost(rows) if call.purpose not in of_weights]  # frozen
    assert_counted(counts, [*base, *layer.cost(rows)])


def test_cost_is_what_is_sent():
    run_ranks(costs, 8, "2x2x2x1")


def dropped(grid):
    """(mid of a layer with all of its input dropped or kept) agrees where ranks hold the same activations."""
    comms = axo.connect(grid)
    seed_apart(comms)
    model = axo.parallelize(serial_model("everywhere", dropout=0.5), comms, gather_logits=True)
    ids, _ = batch(model.config, 0)
    model.train()
    first, second = model(my_rows(comms, ids)), model(my_rows(comms, ids))
    model.eval()
    return first.detach(), second.detach(), model(my_rows(comms, ids)).detach()


def test_dropout_agrees_along_x_and_y():
    """Every rank of a grid that splits no rows returns the same logits, twice different, and without noise in eval."""
    results = run_ranks(dropped, 4, "2x2x1x1")
    first, second, quiet = results[0]
    assert not torch.equal(first, second) and not torch.equal(first, quiet)
    for other in results[1:]:
        for mine, theirs in zip(results[0], other, strict=True):
            assert torch.equal(mine, theirs)


def train(grid, zero):
    """Five steps of AdamW, clipped: the losses of the rows here. With ZeRO, recomputation too."""
    comms = axo.connect(grid)
    model = axo.parallelize(serial_model("everywhere"), comms, gather_logits=True, zero=zero)
    for block in model.transformer.h if zero else ():  # blocks run again in backward
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    return steps(model, lambda tensor: my_rows(comms, tensor), axo.clip_grad_norm_)


def steps(model, cut, clip):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(5):
        ids, targets = batch(model.config, step)
        loss = loss_of(model, cut(ids), cut(targets))
        loss.backward()
        clip([p for p in model.parameters() if p.requires_grad], 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_training_equals_serial_with_zero_and_recomputation_too():
    expected = steps(serial_model("everywhere"), lambda tensor: tensor, torch.nn.utils.clip_grad_norm_)
    assert expected[-1] < expected[0] - 0.2
    for zero in (0, 2):
        per_rank = run_ranks(train, 8, "2x1x2x2", zero)
        lines = per_rank[::2]
        found = [sum(column) / len(column) for column in zip(*lines, strict=True)]
        assert found == pytest.approx(expected, abs=1e-4), f"zero={zero}"


def initialised(grid):
    """A model from the meta device gets what serial ``reset_parameters`` gives, adapters included."""
    comms = axo.connect(grid)
    seed_apart(comms)
    with torch.device("meta"):
        model, serial = (GPT(Config(**LLAMA, lora_r=2, lora_query=True, lora_mlp=True)) for _ in range(2))
    axo.parallelize(model, comms)
    axo.init_weights(model)
    serial_seed()
    serial.to_empty(device="cpu")
    serial.apply(lambda module: getattr(module, "reset_parameters", lambda: None)())
    for name, parameter in serial.named_parameters():
        mine = model.get_parameter(name)
        assert_close(mine, axo.shard(parameter.detach(), mine.placement), 0, name)
    with pytest.raises(ValueError, match="sequence_parallel=True with LoRA"):
        axo.parallelize(serial_model("default"), comms, sequence_parallel=True)
    with pytest.raises(ValueError, match="sequence_parallel=True with a mixture of experts"):
        axo.parallelize(serial_model("experts"), comms, sequence_parallel=True)


def test_first_values_equal_serial():
    run_ranks(initialised, 4, "2x1x2x1")
