"""Experts that lie on several ranks: losses and gradients equal serial, and checkpoints load everywhere.

Oracle: the serial ``litgpt.GPT``, torch's AdamW and clipping.
"""

import copy
import os
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from litgpt.config import Config
from litgpt.model import GPT
from torch.utils.checkpoint import checkpoint

import axo
from axo.matmul import cost
from axo.matmul.grouped import RowTransfer
from axo.nn.experts import busiest, spread_experts
from axo.nn.layer import refuse_context
from tests.gpt import LLAMA, batch
from tests.launcher import run_ranks
from tests.nn.support import (
    assert_close,
    assert_counted,
    assert_gradients_match,
    gradients_of,
    mean_over_data_ranks,
    my_rows,
    once,
)
from tests.plans.test_litgpt_experts import CASES, compare, serial_model


def compare_on(cases):
    for grid, experts, case in cases:
        with axo.connect(grid, experts=experts) as comms:
            compare(comms, [case])


def test_litgpt_equals_serial_on_two_ranks():
    run_ranks(compare_on, 2, [("1x1x2x1", 2, "olmoe"), ("1x1x1x2", 2, "grouped")], timeout=240)


def test_litgpt_equals_serial():
    cases = [("1x1x4x2", 2, "olmoe"), ("2x2x2x1", 2, "grouped"), ("1x1x2x4", 4, "olmoe"), ("1x2x4x1", 4, "latent")]
    run_ranks(compare_on, 8, cases, timeout=240)


def few_tokens(cases):
    """One token a rank, five on one and none on another: most experts get none from some rank, and some from nobody."""
    for grid, experts in cases:
        with axo.connect(grid, experts=experts) as comms:
            model, serial = serial_model("olmoe"), serial_model("olmoe")
            axo.parallelize(model, comms, gather_logits=True)
            counts = [1 + 4 * (rank == 1) - (rank == 2) for rank in range(comms.data_ranks)]
            ids = [torch.arange(n).view(n, 1) * 7 + rank for rank, n in enumerate(counts)]
            serial(torch.cat(ids)).logsumexp(-1).mean().backward()
            mine = ids[comms.data_rank]
            copied = copy.deepcopy(model)
            assert spread_experts(copied)[0].experts[0] is copied.transformer.h[0].mlp.experts[0]
            assert torch.equal(copied(mine), model(mine)) and spread_experts(copied)[0].take_counts()
            for mixture in spread_experts(model):
                mixture.take_counts()
            weight = axo.token_weight(mine.numel(), comms) / 2
            with axo.no_sync(model):
                (model(mine).logsumexp(-1).mean() * weight).backward()
            (model(mine).logsumexp(-1).mean() * weight).backward()
            assert_gradients_match(model, serial, 1e-5, f"{grid} over {experts}")
            chosen = [mixture.chosen for mixture in spread_experts(model)]
            assert all(int(each.sum()) == 2 * 2 * mine.numel() for each in chosen)
            together = comms.experts.all_reduce(torch.stack(chosen))
            assert (together == 0).any(), "every expert had tokens"


def test_experts_without_tokens():
    run_ranks(few_tokens, 8, [("2x1x4x1", 4), ("1x1x2x4", 8), ("1x2x2x2", 2)], timeout=120)


def some_are_frozen():
    """Rank 0 trains its experts, rank 1 none, and nothing before the mixture has a gradient."""
    with axo.connect("1x1x2x1", experts=2) as comms:
        model, serial = serial_model("olmoe"), serial_model("olmoe")
        axo.parallelize(model, comms, gather_logits=True)
        for each in (model, serial):
            each.requires_grad_(False)
            experts = each.transformer.h[-1].mlp.experts
            for expert in experts[: len(experts) // 2]:
                expert.requires_grad_(True)
        ids = torch.arange(12).view(4, 3)
        serial(ids).logsumexp(-1).mean().backward()
        model(ids.chunk(2)[comms.data_rank]).logsumexp(-1).mean().backward()
        comms.world.barrier()
        gradients = {name: p.grad for name, p in serial.named_parameters() if p.grad is not None}
        assert_gradients_match(model, gradients, 1e-5, "half of the experts")


def test_experts_of_which_one_rank_trains_none():
    run_ranks(some_are_frozen, 2, timeout=60)


def test_the_busiest_rank_is_found_in_its_own_group():
    """Of each of two groups of two ranks all rows go to one: twice the mean, whichever that is."""
    rows = torch.tensor([[[8.0, 0.0], [0.0, 8.0]]])
    assert busiest(rows, 2) == 2 and busiest(torch.ones(3, 2, 4), 2) == 1


def counted(cases):
    """What a mixture sends is what its gate, its exchange and this rank's experts say; tokens come as they like."""
    for grid, experts, axis in cases:
        with axo.connect(grid, experts=experts) as comms:
            model = axo.parallelize(serial_model("olmoe"), comms, overlap=axo.Overlap(bucket_bytes=0))
            mlp = model.transformer.h[0].mlp
            generator = torch.Generator().manual_seed(comms.data_rank)
            whole = torch.randn(2, 5 + comms.data_rank, LLAMA["n_embd"], generator=generator)
            x = whole.chunk(comms.grid.y, -1)[comms.coords.y].clone().requires_grad_()
            with axo.count_collectives() as counts:
                mlp(x).sum().backward()
            rows, (spread, *_) = 2 * x.shape[0] * x.shape[1], spread_experts(model)
            chosen = comms.experts.all_reduce(spread.chosen.clone())
            mine = chosen.view(experts, -1)[comms.experts.rank].tolist()
            calls = [*mlp.gate.cost(rows // 2 * comms.grid.z), cost.Call("", "all_reduce", "y", rows // 2 * 8, 4, "")]
            calls = [call for call in calls if comms.grid.size(call.axis) > 1]
            calls += cost.experts(rows, x.shape[-1], 8, ranks=experts, axis=axis, received=sum(mine))
            for number, count in enumerate(mine):
                expert = mlp.experts[len(mine) * comms.experts.rank + number]
                for layer in (expert.fc_1, expert.fc_2, expert.proj):
                    calls += layer.cost(count * comms.grid.z // min(experts, comms.grid.z))
            assert_counted(counts, calls)


def test_bytes_equal_cost():
    cases = [("2x2x2x1", 2, "z"), ("1x1x4x2", 2, "z"), ("1x2x1x4", 4, "data"), ("1x2x2x2", 2, "z")]
    run_ranks(counted, 8, cases, timeout=120)


def losses_of(model, rows_of, loss_fn, clip, autocast, steps=20):
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for step in range(steps):
        ids, targets = map(rows_of, batch(model.config, step))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = loss_fn(model(ids), targets)
        optimizer.zero_grad()
        loss.backward()
        clip(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
    return losses


def loss_of(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def serial_losses(case, autocast):
    model = serial_model(case)
    return losses_of(model, lambda rows: rows, loss_of, torch.nn.utils.clip_grad_norm_, autocast)


def with_checkpoints(model):
    for block in model.transformer.h:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def trained(cases):
    for grid, experts, case, autocast, recompute, zero in cases:
        with axo.connect(grid, experts=experts) as comms:
            serial = partial(serial_losses, case, autocast)
            expected = once(serial)
            model = axo.parallelize(serial_model(case), comms, zero=zero, gather_logits=True)
            if recompute:
                with_checkpoints(model)
            mine = losses_of(model, partial(my_rows, comms), loss_of, axo.clip_grad_norm_, autocast)
            means = torch.tensor([mean_over_data_ranks(comms, each) for each in mine])
            # in bf16 a sum in another order may be another number, and a token go to another expert
            assert_close(means, torch.stack(expected), 2e-2 if autocast else 1e-4, f"{grid} over {experts}, {case}")


def test_twenty_losses_equal_serial():
    cases = [
        ("2x1x2x2", 2, "olmoe", False, False, 2),
        ("1x1x4x2", 8, "grouped", False, True, 0),
        ("1x2x4x1", 2, "olmoe", True, True, 0),
        ("1x1x2x4", 2, "olmoe", True, False, 1),
    ]
    run_ranks(trained, 8, cases, timeout=300)


def saved_and_loaded(folder, cases):
    """Weights and AdamW's state go from one grid to another, and back: the next steps are the serial ones."""
    for number, (before, after) in enumerate(cases):
        expected = once(partial(serial_losses, "olmoe", False))
        path = f"{folder}/{number}"
        for grid, experts, first, last in (*before, 0, 2), (*after, 2, 4):
            with axo.connect(grid, experts=experts) as comms:
                model = serial_model("olmoe")
                if first:
                    torch.nn.init.zeros_(model.lm_head.weight)
                axo.parallelize(model, comms, gather_logits=True)
                optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
                if first:
                    axo.checkpoint.load(path, model, optimizer)
                for step in range(first, last):
                    ids, targets = (my_rows(comms, part) for part in batch(model.config, step))
                    loss = loss_of(model(ids), targets)
                    optimizer.zero_grad()
                    loss.backward()
                    axo.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    mean = torch.tensor(mean_over_data_ranks(comms, loss))
                    assert_close(mean, expected[step], 1e-4, f"{grid} over {experts}: step {step}")
                if not first:
                    axo.checkpoint.save(path, model, optimizer, step=last)
                    state = model.state_dict()
                    if comms.rank == 0:
                        axo.checkpoint.consolidate(path, f"{path}.pth")
                        whole = torch.load(f"{path}.pth")
                        whole = whole.get("model", whole)
                        assert set(whole) == set(serial_model("olmoe").state_dict())
                        assert all(torch.equal(whole[name], state[name]) for name in whole)


def test_checkpoints_load_on_any_grid(tmp_path):
    cases = [
        (("1x1x4x1", 4), ("2x1x2x1", 1)),
        (("1x2x1x2", 1), ("1x1x2x2", 4)),
    ]
    run_ranks(saved_and_loaded, 4, str(tmp_path), cases, timeout=240)


def refusals():
    with pytest.raises(ValueError, match="experts=3 ranks do not divide z=2 of grid 1x1x2x1"):
        axo.connect("1x1x2x1", experts=3)
    with pytest.raises(axo.Refused, match="experts=2 with context=2 is not supported"):
        axo.connect("1x1x2x1", experts=2, context=2)
    comms = axo.connect("1x1x2x1", experts=2)
    for fields, options, error in (
        (LLAMA, {}, "is of models that have experts"),
        (CASES["mixtral"], {}, "experts=2 ranks do not divide the 5 experts of 'transformer.h.0.mlp'; use one of 1"),
        (CASES["olmoe"], {"fp8": "row"}, "with fp8='row' is not supported"),
        (CASES["olmoe"], {"offload": axo.Offload(activations="all", dir=".")}, "with offload=.* is not supported"),
    ):
        with pytest.raises(axo.Refused, match=error):
            axo.parallelize(GPT(Config(**fields)), comms, **options)
    with pytest.raises(ValueError, match="experts=2 is not supported by algorithm 'tesseract'"):
        axo.parallelize(GPT(Config(**CASES["olmoe"])), comms, algorithm="tesseract")
    model = axo.parallelize(GPT(Config(**CASES["olmoe"])), comms)
    with pytest.raises(ValueError, match="a model with experts over 2 ranks cannot move in memory"):
        axo.regrid(model, None, "2x1x1x1")
    with pytest.raises(axo.Refused, match=r"'distributed' and a matrix .* or some have none"):
        weight = model.transformer.h[0].mlp.experts[0].fc_1.weight
        weight.grad = torch.zeros_like(weight)
        axo.optim.Muon([weight], method="distributed").step()
    weight.grad = None
    with pytest.raises(axo.Refused, match=r"axo.connect\(experts=...\) is trained by a loop of your own"):
        refuse_context(model)
    with pytest.raises(ValueError, match="a weight of an expert that some ranks hold is not a DTensor"):
        axo.to_dtensor(model.transformer.h[0].mlp.experts[0].fc_1.weight)
    comms.close()
    comms = axo.connect("1x1x1x2", experts=2)
    with pytest.raises(axo.Refused, match="more than z=1, with zero=1 is not supported"):
        axo.parallelize(GPT(Config(**CASES["olmoe"])), comms, zero=1)
    comms.close()
    with pytest.raises(ValueError, match="rank 0 asks for experts=1 and rank 1 for 2"):
        axo.connect("1x1x2x1", experts=1 + int(os.environ["RANK"]))


def test_refusals():
    run_ranks(refusals, 2)


def one_half_behind_the_other():
    """Order: both halves are on their way before an expert is called, what the first gave before those of the second
    are; backward likewise. Bits: as where all rows go at once."""
    with axo.connect("1x1x2x1", experts=2) as comms:
        both, calls = [], []
        for whole in (False, True):
            model = axo.parallelize(serial_model("olmoe"), comms)
            (spread,) = spread_experts(model)[:1]
            assert [len(half) for half in spread._halves] == [2, 2]
            if whole:
                for each in spread_experts(model):
                    each._halves, each.order = [range(4)], list(range(8))
                    each._place = torch.arange(8)
            mlp = model.transformer.h[0].mlp
            x = torch.randn(1, 9, LLAMA["n_embd"], generator=torch.Generator().manual_seed(comms.rank)).requires_grad_()
            with pytest.MonkeyPatch.context() as patch:
                plain, wait = RowTransfer._start, RowTransfer.wait
                patch.setattr(
                    RowTransfer, "_start", lambda *args, plain=plain: (calls.append("start"), plain(*args))[1]
                )
                patch.setattr(RowTransfer, "wait", lambda one, wait=wait: (calls.append("wait"), wait(one))[1])
                for number, expert in enumerate(spread._mine):
                    expert.register_forward_hook(lambda *_, number=number: calls.append(number))
                    expert.register_full_backward_hook(lambda *_, number=number: calls.append(-number - 1))
                output = mlp(x)
                if not whole:
                    order = ["start", "start", "wait", 0, 1, "start", "wait", 2, 3, "start", "wait", "wait"]
                    assert calls == order, calls
                    calls.clear()
                output.square().sum().backward()
            if not whole:
                products = [call for call in calls if call != "wait"]
                assert products[:2] == ["start", "start"] and set(products[2:4]) == {-3, -4}, calls
                assert products[4] == "start" and set(products[5:7]) == {-1, -2} and products[7:] == ["start"], calls
                assert calls[2] == "wait" and "wait" in calls[calls.index("start", 2) :], calls
            both.append([output, x.grad, *gradients_of(mlp).values()])
        assert len(both[0]) > 10 and all(torch.equal(one, other) for one, other in zip(*both, strict=True))


def test_one_half_travels_behind_the_products_of_the_other():
    run_ranks(one_half_behind_the_other, 2, timeout=60)


HF = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 64,
}  # fmt: skip
FAMILIES = {
    "Mixtral": {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.5},
    "Qwen3Moe": {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "head_dim": 8},
    "Qwen2Moe": {
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40,
    },
    "Olmoe": {"num_experts": 8, "num_experts_per_tok": 2},
    "DeepseekV3": {
        "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "v_head_dim": 8,
        "qk_nope_head_dim": 8,
    },
}  # fmt: skip


def hugging_face_model(family):
    import transformers

    torch.manual_seed(1000)
    config = getattr(transformers, f"{family}Config")(**HF, **FAMILIES[family])
    model = getattr(transformers, f"{family}ForCausalLM")(config).train()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.endswith("gate.weight"):
                tensor.normal_(std=0.5)
    return model


def hugging_face_losses(family, rows_of, comms=None, steps=3, recompute=False):
    """Losses of some steps of SGD, and the gradients of the first."""
    model, losses, gradients = hugging_face_model(family), [], None
    if comms is not None:
        axo.parallelize(model, comms, plan="auto")
    if recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for step in range(steps):
        ids = rows_of(torch.randint(61, (8, 5), generator=torch.Generator().manual_seed(step)))
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        losses.append(loss.detach())
        gradients = gradients or gradients_of(model)
        if comms is not None and step == 0:
            yield model
        optimizer.step()
    yield torch.stack(losses), gradients


def hugging_face(cases):
    for grid, experts, family, recompute in cases:
        with axo.connect(grid, experts=experts) as comms:
            what = f"{grid} over {experts}: {family}"
            losses, gradients = once(lambda family=family: next(hugging_face_losses(family, lambda rows: rows)))
            run = hugging_face_losses(family, partial(my_rows, comms), comms, recompute=recompute)
            model = next(run)
            assert_gradients_match(model, gradients, 1e-5, what)
            copied, ids = copy.deepcopy(model).eval(), torch.arange(6).view(1, 6) + comms.data_rank
            assert torch.equal(copied(ids).logits, model.eval()(ids).logits)
            model.train()
            mine, _ = next(run)
            assert_close(torch.tensor([mean_over_data_ranks(comms, each) for each in mine]), losses, 1e-4, what)


def test_hugging_face_equals_its_own():
    cases = [
        ("1x1x4x2", 4, "Mixtral", False),
        ("2x1x2x2", 4, "Qwen3Moe", True),
        ("1x2x4x1", 2, "Qwen2Moe", False),
        ("1x1x2x4", 8, "Olmoe", True),
        ("1x1x8x1", 8, "DeepseekV3", False),
    ]
    run_ranks(hugging_face, 8, cases, timeout=240, preload=("transformers",))
