"""Two unmodified ``megatron.core`` GPTModels with local specs: one like GPT-2, one like Llama."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import nn

from examples.megatron.shims import process_groups

MODELS = ("gpt2", "llama")
VOCABULARY, TOKENS, HIDDEN, HEADS, LAYERS = 128, 32, 64, 4, 2


def build(name: str) -> nn.Module:
    """Make the model ``name``. Call it inside ``on_cpu()``.

    Args:
        name: "gpt2" (learned positions, LayerNorm, GELU, biases, a tied head) or "llama" (RoPE, RMSNorm, SwiGLU, two
            groups of keys and values).
    """
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    llama: dict[str, Any] = {
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "num_query_groups": 2,
        "ffn_hidden_size": 176,
    }
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        **(llama if name == "llama" else {}),
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(normalization=config.normalization),
        vocab_size=VOCABULARY,
        max_sequence_length=TOKENS,
        position_embedding_type="rope" if name == "llama" else "learned_absolute",
        share_embeddings_and_output_weights=name == "gpt2",
        pg_collection=process_groups(),
    )
