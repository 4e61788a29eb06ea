"""Pairs of small models: a configuration of LitGPT's list, and the Hugging Face class that has the same architecture.

The class is built from a configuration (nothing is downloaded), its weights are drawn large enough that a wrong mask,
head or rotation shows in the fifth digit, and LitGPT's own conversion functions carry them over. Those functions only
rename, cut and join, so they carry gradients over as well.
"""

from __future__ import annotations

from functools import partial

import torch
from litgpt.config import Config
from litgpt.scripts import convert_hf_checkpoint as convert

VOCABULARY = 61  # uneven over x
HEADS = {"n_embd": 64, "n_head": 4}
BLOCK = 32

# Names of LitGPT's configurations, each an architecture of its own, and what is set beside the sizes.
DENSE = {
    "pythia-160m": {},
    "stablelm-base-alpha-3b": {},
    "stablelm-3b-4e1t": {},
    "falcon-7b": {"n_query_groups": 1},
    "falcon-40b": {"n_query_groups": 2},
    "Falcon3-1B-Base": {"n_query_groups": 2, "head_size": 24},
    "open_llama_3b": {},
    "Llama-2-7b-hf": {},
    "Llama-2-70b-hf": {"n_query_groups": 2},
    "LLaMA-2-7B-32K": {},
    "Llama-3-8B": {"n_query_groups": 2},
    "Llama-3.1-8B": {"n_query_groups": 2},
    "Llama-3.2-1B": {"n_query_groups": 2},
    "CodeLlama-7b-hf": {},
    "CodeLlama-34b-hf": {"n_query_groups": 2},
    "tiny-llama-1.1b": {"n_query_groups": 1},
    "SmolLM2-135M": {"n_query_groups": 2},
    "salamandra-2b": {},
    "salamandra-7b": {"n_query_groups": 2},
    "Mistral-7B-v0.1": {"n_query_groups": 2, "sliding_window_size": 7},
    "Mistral-7B-v0.3": {"n_query_groups": 2},
    "OLMo-1B-hf": {},
    "OLMo-7B-hf": {},
    "OLMo-2-1124-7B": {"n_query_groups": 2},
    "Gemma-2b": {"n_query_groups": 1, "head_size": 24},
    "Gemma-7b": {"head_size": 24},
    "Gemma-2-2b": {"n_query_groups": 2, "head_size": 24, "sliding_window_size": 7, "sliding_window_indices": [1, 0]},
    "Gemma-3-1b-it": {"n_query_groups": 1, "head_size": 24, "sliding_window_size": 7, "sliding_window_indices": [1, 0],
                      "rope_indices": [1, 0]},
    "Gemma-3-4b-it": {"n_query_groups": 2, "head_size": 24, "sliding_window_size": 7, "sliding_window_indices": [1, 0],
                      "rope_indices": [1, 0]},
    "phi-1_5": {},
    "phi-2": {},
    "Phi-3-mini-4k-instruct": {"sliding_window_size": 7},
    "Phi-3.5-mini-instruct": {},
    "phi-4": {"n_query_groups": 2},
    "Phi-4-mini-instruct": {"n_query_groups": 2, "sliding_window_size": None, "sliding_window_indices": None},
    "Qwen2.5-0.5B": {"n_query_groups": 2},
    "Qwen2.5-7B": {"n_query_groups": 2},
    "QwQ-32B": {"n_query_groups": 2},
    "Qwen3-0.6B": {"n_query_groups": 2, "head_size": 24},
    "Qwen3-8B": {"n_query_groups": 2, "head_size": 24},
}  # fmt: skip
EXPERTS = {
    "Mixtral-8x7B-v0.1": {"n_query_groups": 2, "n_expert": 4},
    "Qwen3-30B-A3B": {"n_query_groups": 2, "head_size": 24, "n_expert": 8, "n_expert_per_token": 3,
                      "moe_intermediate_size": 40},
}  # fmt: skip
TIED = {"falcon-7b", "falcon-40b", "Llama-3.2-1B", "SmolLM2-135M", "OLMo-1B-hf", "Gemma-2b", "Gemma-7b", "Gemma-2-2b",
        "Gemma-3-1b-it", "Gemma-3-4b-it", "Phi-4-mini-instruct", "Qwen2.5-0.5B", "Qwen3-0.6B"}  # fmt: skip


def small(name, **changes):
    """The configuration of that name, its sizes shrunk and its architecture kept."""
    sizes = {**HEADS, "n_layer": 2, "block_size": BLOCK, "padded_vocab_size": VOCABULARY, "intermediate_size": 88}
    config = Config.from_name(name, **{**sizes, "n_query_groups": None, "head_size": None, **changes})
    if config.rope_adjustments and "original_max_seq_len" in config.rope_adjustments:
        config.rope_adjustments = {**config.rope_adjustments, "original_max_seq_len": BLOCK // 2}
    if config.attention_scores_scalar:
        config.attention_scores_scalar = 20
    return config


def theirs(config, tied):
    """The Hugging Face model of the same architecture, weights drawn."""
    import transformers as hf

    common = {
        "vocab_size": config.padded_vocab_size,
        "hidden_size": config.n_embd,
        "num_hidden_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.block_size,
        "tie_word_embeddings": tied,
        "attn_implementation": "eager",
        "pad_token_id": None,
    }
    grouped = {**common, "num_key_value_heads": config.n_query_groups, "rope_theta": config.rope_base}
    rms = {**grouped, "rms_norm_eps": config.norm_eps}
    with_head = {**rms, "head_dim": config.head_size}
    windows = ["sliding_attention" if local else "full_attention" for local in config.sliding_window_indices or ()]
    name = config.name
    if name.startswith(("pythia", "stablelm-base")):
        made = hf.GPTNeoXConfig(
            **common, rotary_pct=config.rotary_percentage, layer_norm_eps=config.norm_eps,
            use_parallel_residual=config.parallel_residual, hidden_act="gelu", rotary_emb_base=config.rope_base,
        )  # fmt: skip
        model = hf.GPTNeoXForCausalLM(made)
    elif name.startswith("stablelm"):
        made = hf.StableLmConfig(
            **grouped, layer_norm_eps=config.norm_eps, partial_rotary_factor=config.rotary_percentage
        )
        model = hf.StableLmForCausalLM(made)
    elif name.startswith("falcon"):
        common.pop("intermediate_size")
        made = hf.FalconConfig(
            **common, num_kv_heads=config.n_query_groups, multi_query=config.n_query_groups == 1, bias=False,
            new_decoder_architecture="7b" not in name, parallel_attn=True, ffn_hidden_size=config.intermediate_size,
            layer_norm_epsilon=config.norm_eps,
        )  # fmt: skip
        model = hf.FalconForCausalLM(made)
    elif name.startswith("OLMo-2"):
        model = hf.Olmo2ForCausalLM(hf.Olmo2Config(**rms))
    elif name.startswith("OLMo"):
        model = hf.OlmoForCausalLM(hf.OlmoConfig(**grouped))
    elif name.startswith("Gemma-3"):
        scaling = {"rope_type": "linear", **config.rope_adjustments} if config.rope_adjustments else None
        made = hf.Gemma3TextConfig(
            **with_head, query_pre_attn_scalar=config.attention_scores_scalar, layer_types=windows,
            sliding_window=config.sliding_window_size, rope_local_base_freq=config.rope_local_base_freq,
            rope_scaling=scaling,
        )  # fmt: skip
        model = hf.Gemma3ForCausalLM(made)
    elif name.startswith("Gemma-2-"):
        made = hf.Gemma2Config(
            **with_head, query_pre_attn_scalar=config.attention_scores_scalar, layer_types=windows,
            sliding_window=config.sliding_window_size, attn_logit_softcapping=config.attention_logit_softcapping,
            final_logit_softcapping=config.final_logit_softcapping,
        )  # fmt: skip
        model = hf.Gemma2ForCausalLM(made)
    elif name.startswith("Gemma"):
        model = hf.GemmaForCausalLM(hf.GemmaConfig(**with_head))
    elif name.startswith("phi-") and name != "phi-4":
        made = hf.PhiConfig(
            **grouped, layer_norm_eps=config.norm_eps, partial_rotary_factor=config.rotary_percentage,
            hidden_act="gelu_new" if config.gelu_approximate == "tanh" else "gelu",
        )  # fmt: skip
        model = hf.PhiForCausalLM(made)
    elif name.lower().startswith("phi-"):
        made = hf.Phi3Config(
            **rms, partial_rotary_factor=config.rotary_percentage, sliding_window=config.sliding_window_size,
            original_max_position_embeddings=config.block_size,
        )  # fmt: skip
        model = hf.Phi3ForCausalLM(made)
    elif name.startswith(("Qwen2", "QwQ")):
        model = hf.Qwen2ForCausalLM(hf.Qwen2Config(**rms))
    elif name.startswith("Qwen3-30B"):
        made = hf.Qwen3MoeConfig(
            **with_head, num_experts=config.n_expert, num_experts_per_tok=config.n_expert_per_token,
            moe_intermediate_size=config.moe_intermediate_size, norm_topk_prob=True,
        )  # fmt: skip
        model = hf.Qwen3MoeForCausalLM(made)
    elif name.startswith("Mixtral"):
        made = hf.MixtralConfig(**rms, num_local_experts=config.n_expert, num_experts_per_tok=config.n_expert_per_token)
        model = hf.MixtralForCausalLM(made)
    elif name.startswith("Qwen3"):
        model = hf.Qwen3ForCausalLM(hf.Qwen3Config(**with_head))
    elif name.startswith("Mistral"):
        model = hf.MistralForCausalLM(hf.MistralConfig(**with_head, sliding_window=config.sliding_window_size))
    else:
        model = hf.LlamaForCausalLM(hf.LlamaConfig(**with_head, rope_scaling=_llama_scaling(config)))
    return draw(model.eval(), offset="Gemma" in name)


def _llama_scaling(config):
    if config.rope_adjustments:
        rest = dict(config.rope_adjustments)
        return {"rope_type": "llama3", "original_max_position_embeddings": rest.pop("original_max_seq_len"), **rest}
    return (
        {"rope_type": "linear", "factor": float(config.rope_condense_ratio)} if config.rope_condense_ratio > 1 else None
    )


@torch.no_grad()
def draw(model, offset):
    """Fill every parameter: matrices that keep the size of what they multiply, norms around what leaves it as it is."""
    generator = torch.Generator().manual_seed(7)
    for name, parameter in model.named_parameters():
        parameter.normal_(generator=generator)
        if parameter.dim() > 1:
            parameter *= parameter.shape[-1] ** -0.5
        else:
            parameter *= 0.2
            if name.endswith("weight") and not offset:
                parameter += 1
    return model


def converted(config, tensors):
    """What LitGPT's conversion makes of a Hugging Face model's tensors: weights, or their gradients."""
    name, found = config.name.lower(), {}
    if "falcon" in name and "falcon3" not in name:
        copy = partial(convert.copy_weights_falcon, config)
    elif name.startswith("gemma-2-"):
        copy = partial(convert.copy_weights_gemma_2, {})
    elif name.startswith("gemma-3"):
        copy = partial(convert.copy_weights_gemma_3, {}, config=config)
    elif name.startswith("phi"):
        copy = partial(convert.copy_weights_phi, config, {})
    elif name.startswith(("qwen2.5", "qwq")):
        copy = partial(convert.copy_weights_qwen_2_5, config, {})
    elif name.startswith("olmo-2-"):
        copy = partial(convert.copy_weights_olmo2, config, {})
    elif name.startswith("qwen3"):
        copy = partial(convert.copy_weights_qwen_3, config, {})
    elif config.mlp_class_name == "GptNeoxMLP":
        copy = partial(convert.copy_weights_gpt_neox, config)
    else:
        copy = partial(convert.copy_weights_hf_llama, config, {})
    copy(found, tensors)
    return found
