"""Models whose sequences lie on several ranks along z: losses and gradients equal serial.

Oracles: the serial ``litgpt.GPT`` and transformers' own classes with their own attention and loss.
"""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from litgpt.config import Config
from litgpt.model import GPT

import axo
from axo.nn.layer import refuse_context
from tests.gpt import LLAMA, NEOX
from tests.launcher import run_ranks
from tests.nn.support import assert_close, assert_gradients_match, gradients_of, mean_over_data_ranks, once, seed_apart

LIMIT = 1e-5
ROWS, TOKENS = 4, 13  # no number of pieces divides them
WINDOW = {
    **LLAMA,
    "sliding_window_size": 5,
    "sliding_window_indices": [1, 0],
    "rope_indices": [0, 1],
    "rope_local_base_freq": 500,
}
CAPPED = {**WINDOW, "rope_indices": None, "attention_logit_softcapping": 5.0, "attention_scores_scalar": 11}
LATENT = {
    **LLAMA, "n_query_groups": 8, "head_size": 16, "rope_interleave": True,
    "latent_attention": {
        "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 4,
    },
}  # fmt: skip
MODELS = {"llama": LLAMA, "neox": NEOX, "window": WINDOW, "capped": CAPPED, "latent": LATENT}
HF = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "head_dim": 8,
}  # fmt: skip
FAMILIES = {
    "Llama": {},
    "Qwen2": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "Qwen3": {},
    "Gemma": {},
    "Gemma2": {"sliding_window": 5},
    "Gemma3": {"sliding_window": 5},
    "Mistral": {"sliding_window": 5},
}


def tokens_of(vocabulary):
    return torch.randint(vocabulary, (ROWS, TOKENS + 1), generator=torch.Generator().manual_seed(3))


def litgpt(cases):
    dist.init_process_group("axo")
    for grid, context, kind, name in cases:
        comms = axo.connect(grid, context=context)
        config, ids = Config(**MODELS[name]), tokens_of(100)

        def serial(config=config, ids=ids):
            torch.manual_seed(1000)
            model = GPT(config)
            loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
            return loss.detach(), gradients_of(model)

        expected, gradients = once(serial)
        seed_apart(comms)
        model = axo.parallelize(GPT(config), comms, context=kind)
        mine, targets = (axo.shard_batch(part.contiguous(), comms) for part in (ids[:, :-1], ids[:, 1:]))
        loss = axo.nn.cross_entropy(model(mine), targets, comms=comms, columns=config.padded_vocab_size)
        loss = loss * axo.token_weight(targets.numel(), comms)
        loss.backward()
        what = f"{grid} context {context} {kind} {name}"
        assert_close(torch.tensor(mean_over_data_ranks(comms, loss)), expected, LIMIT, what)
        assert_gradients_match(model, gradients, LIMIT, what)
        comms.close()


def test_litgpt_equals_serial():
    run_ranks(
        litgpt,
        8,
        [
            ("2x2x2x1", 2, "ring", "llama"),
            ("2x1x2x2", 2, "heads", "neox"),
            ("1x1x8x1", 8, "ring", "window"),
            ("1x2x4x1", 2, "gather", "capped"),
            ("2x1x4x1", 4, "gather", "latent"),
            ("1x2x4x1", 4, "ring", "latent"),
            ("2x1x2x2", 2, "heads", "latent"),
        ],
    )


def by_cache(model, ids):
    """Logits of whole sequences, four tokens first and then one by one, between two passes without the cache."""
    model.set_kv_cache(len(ids), max_seq_length=16)
    places = [torch.arange(4), *torch.arange(4, ids.shape[1])[:, None]]
    logits = [model(ids[:, place], place, input_pos_maxp1=int(place[-1]) + 1) for place in places]
    model.clear_kv_cache()
    return torch.cat(logits, 1)


@torch.no_grad()
def generating(cases):
    dist.init_process_group("axo")
    for grid, context, kind, name in cases:
        comms, config, ids = axo.connect(grid, context=context), Config(**MODELS[name]), tokens_of(100)[:2, :9]

        def serial(config=config, ids=ids):
            torch.manual_seed(1000)
            model = GPT(config)
            return model(ids), by_cache(model, ids)

        plain, cached = once(serial)
        seed_apart(comms)
        model = axo.parallelize(GPT(config), comms, context=kind, gather_logits=True)
        for _ in range(2):  # pieces and whole sequences in turn
            mine = axo.sharding.cut_sequence(ids, comms)
            assert_close(model(mine), axo.sharding.cut_sequence(plain, comms), 1e-5, f"{name}: pieces")
            # LitGPT's own cache shows soft-capped scores places that hold nothing yet.
            assert_close(by_cache(model, ids), plain if name == "capped" else cached, 1e-5, f"{name}: by the cache")
        comms.close()


def test_whole_sequences_go_through_the_cache():
    """Oracle: the serial model's own cache; a window's holds no more than the window."""
    cases = [("1x1x4x1", 4, "ring", "window"), ("2x1x2x1", 2, "heads", "llama"), ("1x2x2x1", 2, "ring", "latent")]
    run_ranks(generating, 4, [*cases, ("1x1x4x1", 2, "gather", "capped")])


def packed_positions():
    """Rows of documents of 1, 7, ... tokens that cross pieces."""
    lengths = ([1, 7, 5], [13], [6, 1, 1, 5], [2, 11])
    return torch.stack([torch.cat([torch.arange(length) for length in row]) for row in lengths])


def hugging_face(cases):
    import transformers

    dist.init_process_group("axo")
    for grid, context, kind, family, packed in cases:
        comms = axo.connect(grid, context=context)
        suffix = "TextConfig" if family == "Gemma3" else "Config"
        config = getattr(transformers, family + suffix)(**HF, **FAMILIES[family])
        config._attn_implementation = "eager" if family == "Gemma2" else "sdpa"
        batch = {"input_ids": tokens_of(61)[:, :-1].contiguous()}
        batch["labels"] = batch["input_ids"].masked_fill(torch.arange(ROWS)[:, None] * 4 > torch.arange(TOKENS), -100)
        if packed:
            batch["position_ids"] = packed_positions()

        def serial(config=config, batch=batch, family=family):
            torch.manual_seed(1000)
            model = getattr(transformers, f"{family}ForCausalLM")(config).train()
            options = dict(batch)
            if "position_ids" in batch:
                documents = (batch["position_ids"] == 0).cumsum(1)
                seen = (documents[:, :, None] == documents[:, None]) & torch.ones(TOKENS, TOKENS).bool().tril()
                options["attention_mask"] = torch.zeros(ROWS, 1, TOKENS, TOKENS).masked_fill(~seen[:, None], -1e30)
            loss = model(**options, use_cache=False).loss
            loss.backward()
            return loss.detach(), gradients_of(model)

        expected, gradients = once(serial)
        seed_apart(comms)
        model = getattr(transformers, f"{family}ForCausalLM")(copy.deepcopy(config)).train()
        axo.parallelize(model, comms, plan="auto", context=kind)
        by_work = batch["position_ids"] if packed == "by work" else None
        loss = model(**axo.shard_batch(batch, comms, positions=by_work)).loss
        loss.backward()
        what = f"{grid} context {context} {kind} {family} {packed}"
        assert_close(torch.tensor(mean_over_data_ranks(comms, loss)), expected, LIMIT, what)
        assert_gradients_match(model, gradients, LIMIT, what)
        comms.close()


def test_hugging_face_equals_its_own():
    cases = [
        ("2x2x2x1", 2, "ring", "Llama", False),
        ("1x1x4x2", 4, "ring", "Llama", True),
        ("2x1x4x1", 2, "heads", "Qwen2", False),
        ("1x1x8x1", 4, "gather", "Qwen3", True),
        ("1x1x4x2", 2, "ring", "Qwen3", "by work"),
        ("1x2x2x2", 2, "heads", "Gemma", True),
        ("2x1x4x1", 4, "gather", "Gemma2", False),
        ("1x1x8x1", 8, "ring", "Gemma3", False),
        ("2x1x2x2", 2, "ring", "Mistral", False),
    ]
    run_ranks(hugging_face, 8, cases, preload=("transformers",))


def packed_training(grid=None, context=1):
    """Losses of 20 AdamW steps on documents of other tokens each, cut by work; without a grid: transformers' own."""
    import transformers

    config = transformers.Qwen3Config(**HF)
    torch.manual_seed(1000)
    model, comms = transformers.Qwen3ForCausalLM(config).train(), None
    place = packed_positions()
    if grid is not None:
        comms = axo.connect(grid, context=context)
        axo.parallelize(model, comms, plan="auto", context="ring")
    else:
        documents = (place == 0).cumsum(1)
        seen = (documents[:, :, None] == documents[:, None]) & torch.ones(TOKENS, TOKENS).bool().tril()
        mask = torch.zeros(ROWS, 1, TOKENS, TOKENS).masked_fill(~seen[:, None], -1e30)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for step in range(20):
        ids = (torch.arange(TOKENS) * 3 + torch.arange(ROWS)[:, None] + step) % 61
        batch = {"input_ids": ids, "labels": ids, "position_ids": place}
        if comms is None:
            loss = model(**batch, attention_mask=mask, use_cache=False).loss
        else:
            loss = model(**axo.shard_batch(batch, comms, positions=place)).loss
        loss.backward()
        losses.append(loss.item() if comms is None else mean_over_data_ranks(comms, loss))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_twenty_steps_of_packed_documents_equal_transformers():
    expected = run_ranks(packed_training, 1, preload=("transformers",))[0]
    for losses in run_ranks(packed_training, 8, "2x1x2x2", 2, preload=("transformers",)):
        assert losses == pytest.approx(expected, abs=1e-4)
    assert expected[-1] < expected[0] - 1


def mistakes():
    import transformers

    comms = axo.connect("1x1x2x1", context=2)
    for name, kind, error in (
        ("capped", "ring", "context='ring' cannot have soft-capped scores"),
        ("llama", "star", "context='star' is not known"),
    ):
        with pytest.raises(ValueError, match=error):
            axo.parallelize(GPT(Config(**MODELS[name])), comms, context=kind)
    with pytest.raises(axo.Refused, match="sequence_parallel=True in a context"):
        axo.parallelize(GPT(Config(**LLAMA)), comms, sequence_parallel=True)
    with pytest.raises(axo.Refused, match="a rank's 3 heads"):
        axo.parallelize(GPT(Config(**{**NEOX, "n_embd": 48, "n_head": 3})), comms, context="heads")
    with pytest.raises(axo.Refused, match="context=2 is not known of this model"):
        axo.parallelize(torch.nn.Sequential(torch.nn.Linear(4, 4)), comms, plan="auto")
    bloom = transformers.BloomConfig(vocab_size=61, hidden_size=32, n_layer=1, n_head=4)  # whose code adds ALiBi itself
    with pytest.raises(axo.Refused, match=r"in a model of your own call axo\.nn\.attention, which takes"):
        axo.parallelize(transformers.BloomForCausalLM(bloom), comms, plan="auto")
    with pytest.raises(axo.Refused, match="in a context is not supported; use 0"):
        config = transformers.LlamaConfig(**HF, attention_dropout=0.1)
        axo.parallelize(transformers.LlamaForCausalLM(config), comms, plan="auto")
    for kind, options, error in (
        ("SequenceClassification", {}, "other heads look at all tokens"),
        (
            "CausalLM",
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            "rotations that depend on a sequence's",
        ),
    ):
        config = transformers.LlamaConfig(**HF, **options)
        with pytest.raises(axo.Refused, match=error):
            axo.parallelize(getattr(transformers, f"LlamaFor{kind}")(config), comms, plan="auto")
    with pytest.raises(axo.Refused, match="a GPT takes no context_cut: it knows no packed documents"):
        axo.parallelize(GPT(Config(**LLAMA)), comms)(torch.zeros(2, 4, dtype=torch.int64), context_cut=[])
    model = axo.parallelize(GPT(Config(**LLAMA)), comms)
    ids = torch.zeros(2, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match="sequences of 40 tokens are longer than max_seq_length=32"):
        model(torch.zeros(2, 20, dtype=torch.int64))
    with pytest.raises(ValueError, match="a model with sequences over 2 ranks cannot move in memory"):
        axo.regrid(model, None, "2x1x1x1")
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**HF))
    axo.parallelize(model, comms, plan="auto")
    mask = torch.ones(2, 4, dtype=torch.int64)
    model(ids, mask)
    if comms.rank == 1:  # only this one's tokens hold padding
        mask[0, 0] = 0
    with pytest.raises(axo.Refused, match="an attention_mask that hides tokens"):
        model(ids, mask)
    with pytest.raises(axo.Refused, match="an attention_mask that hides tokens"):  # or any other than a mask of tokens
        model(ids, torch.ones(2, 1, 8, 8, dtype=torch.bool))
    with pytest.raises(axo.Refused, match="cu_seq_lens_q is not supported"):
        model(ids, cu_seq_lens_q=torch.tensor([0, 8]))
    with pytest.raises(axo.Refused, match="logits_to_keep is not supported"):
        model(ids, logits_to_keep=1)
    place = torch.cat([torch.arange(size) for size in (17, 3, 1, 11)])[None]
    whole = {"input_ids": torch.zeros(1, 32, dtype=torch.int64), "position_ids": place}
    batch = axo.shard_batch(whole, comms, positions=place)
    model(**batch)
    del batch["context_cut"]
    with pytest.raises(ValueError, match=r"in row 0 position \d+ comes behind \d+; .* the model the whole dict"):
        model(**batch)
    with pytest.raises(axo.Refused, match=r"a model in a context .* by a loop of your own"):
        refuse_context(model)
    with pytest.raises(axo.Refused, match="unshard_output: in a context rows are tokens too"):
        axo.unshard_output(model.lm_head, torch.zeros(2, 4, 8))
    comms.close()
    with pytest.raises(ValueError, match="context='ring' is of ranks that share sequences"):
        axo.parallelize(GPT(Config(**LLAMA)), axo.connect("2x1x1x1"), context="ring")


def test_mistakes():
    run_ranks(mistakes, 2, preload=("transformers",))
