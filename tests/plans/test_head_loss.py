"""Hugging Face's loss without logits (``axo.parallelize(..., plan="auto", chunked_loss=True)``).

Oracle: transformers' own classes with their own loss on one device.
"""

import copy

import pytest
import torch
import torch.distributed as dist

import axo
from tests.launcher import run_ranks
from tests.nn.support import assert_close, assert_gradients_match, gradients_of, mean_over_data_ranks, once, seed_apart
from tests.nn.test_linear_loss import Largest
from tests.plans.test_context import FAMILIES, HF

ROWS, TOKENS, VOCABULARY = 4, 96, 1024
SIZES = {**HF, "vocab_size": VOCABULARY, "max_position_embeddings": 128}


def build(family, **more):
    import transformers

    suffix = "TextConfig" if family == "Gemma3" else "Config"
    config = getattr(transformers, family + suffix)(**SIZES, **FAMILIES.get(family, {}), **more)
    config._attn_implementation = "eager" if family == "Gemma2" else "sdpa"
    return getattr(transformers, f"{family}ForCausalLM")(config).train()


def batch_of():
    ids = torch.randint(VOCABULARY, (ROWS, TOKENS), generator=torch.Generator().manual_seed(3))
    return {"input_ids": ids, "labels": ids.masked_fill(torch.arange(ROWS)[:, None] * 9 > torch.arange(TOKENS), -100)}


def train(cases):
    dist.init_process_group("axo")
    for grid, context, family, more in cases:
        comms, batch, what = axo.connect(grid, context=context), batch_of(), f"{grid} context {context} {family}"

        def serial(family=family, more=more, batch=batch):
            torch.manual_seed(1000)
            model = build(family, **more)
            output = model(**batch, use_cache=False)
            output.loss.backward()
            model.eval()
            return output.loss.detach(), gradients_of(model), model(**batch, use_cache=False).logits.detach()

        expected, gradients, logits = once(serial)
        seed_apart(comms)
        model = axo.parallelize(build(family, **more), comms, plan="auto", chunked_loss=True)
        mine = axo.shard_batch(batch, comms)
        if context == 1:  # unequal counts of labels: the mean over all, as a Trainer asks for it
            counts = axo.shard_batch((batch["labels"][:, 1:] != -100).sum(1), comms).sum()
            mine["num_items_in_batch"] = counts
        with pytest.MonkeyPatch.context() as patch, Largest() as seen:
            patch.setattr("axo.nn.linear_loss.LOGITS_CHUNK", 1 << 12)
            output = model(**mine, use_cache=False)
            assert output.logits is None
            loss = output.loss * (axo.token_weight(counts, comms) if context == 1 else 1)
            loss.backward()
        rows = mine["input_ids"].numel()
        assert seen.elements < rows * VOCABULARY // comms.grid.x / 2, what  # no logits of all tokens
        assert_close(torch.tensor(mean_over_data_ranks(comms, loss)), expected, 1e-5, what)
        assert_gradients_match(model, gradients, 1e-5, what)
        if context == 1:
            model.eval()
            whole = model(**mine, use_cache=False).logits  # of evaluation, as ever
            assert_close(whole, axo.shard_batch(logits, comms), 1e-4, what)
            assert copy.deepcopy(model).train()(**mine, use_cache=False).logits is None
        comms.close()


def test_losses_and_gradients_equal_transformers_own():
    cases = [
        ("2x1x2x1", 1, "Llama", {}),
        ("2x2x1x1", 1, "Gemma2", {"tie_word_embeddings": False, "final_logit_softcapping": 5.0}),
        ("1x1x4x1", 2, "Qwen3", {}),
        ("1x2x1x2", 1, "Mistral", {}),
    ]
    run_ranks(train, 4, cases, preload=("transformers",))


def refusals():
    import transformers

    comms = axo.connect("2x1x1x1")
    model = axo.parallelize(build("Llama"), comms, plan="auto")
    assert str(axo.plan_report(model)).endswith("loss: of whole logits; chunked_loss=True makes it without")
    bert = transformers.BertForMaskedLM(transformers.BertConfig(**{**HF, "num_hidden_layers": 1}))
    with pytest.raises(axo.Refused, match="BertForMaskedLM's is not known to be the cross-entropy of its head"):
        axo.parallelize(copy.deepcopy(bert), comms, plan="auto", chunked_loss=True)
    assert "BertForMaskedLM's is not known" in str(axo.plan_report(axo.parallelize(bert, comms, plan="auto")))
    with pytest.raises(axo.Refused, match="plan 'litgpt' has no loss"):
        axo.parallelize(build("Llama"), comms, chunked_loss=True)
    model = axo.parallelize(build("Llama"), comms, plan="auto", chunked_loss=True)
    model.lm_head.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="has hooks, which would see no logits"):
        model(**batch_of())

    def own_loss(logits, labels, vocab_size, **options):
        return logits.sum()

    class OwnForCausalLM(transformers.LlamaForCausalLM):
        pass

    def refused(model, words, plan="auto", **options):
        before = [(name, type(module)) for name, module in model.named_modules()]
        with pytest.raises(axo.Refused, match=words):
            axo.parallelize(model, comms, plan=plan, chunked_loss=True, **options)
        assert before == [(name, type(module)) for name, module in model.named_modules()]

    before = build("Llama")
    before.loss_function = own_loss
    refused(before, "LlamaForCausalLM's loss_function is not transformers' ForCausalLMLoss")
    refused(OwnForCausalLM(build("Llama").config), "OwnForCausalLM's is not known to be the cross-entropy of its head")
    refused(build("Llama"), "chunked_loss=True with fp8='row' is not supported", fp8="row")
    refused(build("Llama"), "the head stays serial on every rank", plan={"lm_head": "replicate"})
    hooked = build("Llama")
    hooked.lm_head.register_forward_hook(lambda *_: None)
    refused(hooked, "the head has hooks, which would see no logits")
    serial_head = axo.parallelize(build("Llama"), comms, plan={"lm_head": "replicate"})
    assert str(axo.plan_report(serial_head)).endswith("loss: of whole logits; the head is a ReplicatedLinear")

    model = axo.parallelize(build("Llama"), comms, plan="auto", chunked_loss=True)
    with pytest.raises(axo.Refused, match="in float16 would take gradients before a scaler has scaled the loss"):
        with torch.autocast("cpu", torch.float16):
            model(**batch_of())
    model.loss_function = own_loss
    with pytest.raises(axo.Refused, match="loss_function was set after parallelize"):
        model(**batch_of())
    assert model.eval()(**batch_of()).loss.item() != 0  # it has logits there


def test_what_cannot_be_is_refused_and_reported():
    run_ranks(refusals, 2, preload=("transformers",))
