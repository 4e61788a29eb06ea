"""What tells the architectures in LitGPT's list of configurations apart: what chooses code, without sizes."""

from typing import Any

# What chooses code: taken as it is, or only whether it is set.
_KINDS = (
    "mlp_class_name", "norm_class_name", "norm_qk_type", "gelu_approximate", "parallel_residual",
    "shared_attention_norm", "bias", "attn_bias", "lm_head_bias", "norm_1", "norm_2", "post_attention_norm",
    "post_mlp_norm", "norm_qk", "scale_embeddings", "rope_interleave", "norm_topk_prob",
)  # fmt: skip
_SET = (
    "attention_logit_softcapping", "final_logit_softcapping", "attention_scores_scalar", "sliding_window_size",
    "rope_indices", "rope_local_base_freq", "latent_attention", "n_expert_groups", "n_shared_expert",
    "first_k_dense_replace",
)  # fmt: skip


def architecture(config: Any) -> tuple[Any, ...]:
    """What tells the architectures of two configurations of LitGPT's apart."""
    heads = "one" if config.n_query_groups == 1 else "groups" if config.n_query_groups < config.n_head else "all"
    rotation = (config.rotary_percentage < 1, config.rope_condense_ratio != 1, tuple(config.rope_adjustments or ()))
    windows = len(set(config.sliding_window_indices or ()))
    own_head = config.head_size * config.n_head != config.n_embd
    kinds = tuple(getattr(config, name) for name in _KINDS)
    return (*kinds, *(bool(getattr(config, name)) for name in _SET), heads, rotation, windows, own_head)
