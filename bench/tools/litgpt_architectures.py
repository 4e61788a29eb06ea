"""Which of LitGPT's configurations run on a grid, which do not, and why?

    python -m bench.tools.litgpt_architectures --grid 4x2x1x1

Each configuration of LitGPT's list is built with its real sizes, on the meta device and with few layers, and the plan
is asked what it would refuse. Nothing is trained, no rank is started: seconds, on any machine.

An architecture is what chooses code in LitGPT, sizes and names left out (:func:`architecture`); many configurations
have the same one.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import torch

from axo.grid import Grid

from ..lib.arguments import Parser

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


def features(config: Any) -> list[str]:
    """The features of a configuration that a user would ask about, in words."""
    groups = config.n_query_groups
    found = {
        "one group of keys and values (multi-query)": groups == 1,
        "groups of keys and values": 1 < groups < config.n_head,
        "parallel residual": config.parallel_residual,
        "one norm for attention and MLP": config.shared_attention_norm,
        "norms after attention and MLP": config.post_attention_norm or config.post_mlp_norm,
        "norms of each head's queries and keys": config.norm_qk and config.norm_qk_type == "default",
        "norms of all heads' queries and keys": config.norm_qk and config.norm_qk_type == "olmo2",
        "soft-capping": config.attention_logit_softcapping or config.final_logit_softcapping,
        "sliding windows": config.sliding_window_size,
        "rotary embedding of a part of the head": config.rotary_percentage < 1,
        "two rotary embeddings": config.rope_indices,
        "scaled rotary embedding": config.rope_adjustments or config.rope_condense_ratio != 1,
        "scaled token embeddings": config.scale_embeddings,
        "biases": config.bias or config.attn_bias or config.lm_head_bias,
        "mixture of experts": config.mlp_class_name == "LLaMAMoE",
        "latent attention": config.latent_attention,
    }
    kind = {"GptNeoxMLP": "plain", "LLaMAMLP": "gated (SiLU)", "GemmaMLP": "gated (GELU)"}.get(config.mlp_class_name)
    return [f"MLP {kind}"] * bool(kind) + [name for name, has in found.items() if has]


def refusal(config: Any, grid: Grid) -> str | None:
    """Why the plan would not run a model of this configuration on ``grid``; None: it would.

    Args:
        config: A ``litgpt.Config``; changed: layers that are like those before them are left out.
        grid: The grid.
    """
    from litgpt.model import GPT

    from axo.plans.litgpt.plan import check

    config.n_layer = min(config.n_layer, 1 + (config.first_k_dense_replace or 0))  # later layers are like the last
    config.block_size = min(config.block_size, 64)
    with torch.device("meta"):
        model = GPT(config)
    try:
        check(model, grid)
    except ValueError as error:
        return str(error).removeprefix("parallelize: ")
    return None


def report(grid: Grid) -> str:
    """Counts, a table by feature, and each refusal."""
    from litgpt.config import Config, configs

    refused: dict[str, str] = {}
    kinds: dict[tuple[Any, ...], bool] = {}
    having: Counter[str] = Counter()
    running: Counter[str] = Counter()
    for fields in configs:
        config = Config(**fields)
        names, kind = features(config), architecture(config)
        why = refusal(config, grid)
        if why is not None:
            refused[config.name] = why
        kinds[kind] = kinds.get(kind, False) or why is None
        having.update(names)
        running.update(names if why is None else ())
    lines = [
        f"LitGPT's list on grid {grid}: {len(configs) - len(refused)} of {len(configs)} configurations run,"
        f" {sum(kinds.values())} of {len(kinds)} architectures",
        "",
        f"{'feature':<46} configurations   run",
        *(f"{name:<46} {count:>14} {running[name]:>5}" for name, count in having.most_common()),
    ]
    if refused:
        lines += ["", "refused:", *(f"  {why}" for why in refused.values())]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Print the report."""
    parser = Parser("python -m bench.tools.litgpt_architectures", __doc__)
    parser.add_argument("--grid", type=Grid.parse, default=Grid(), help="XxYxZxDATA")
    print(report(parser.parse_args(arguments).grid))
    return 0


if __name__ == "__main__":
    sys.exit(main())
