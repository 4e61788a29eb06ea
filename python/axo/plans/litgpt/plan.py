"""The plan for an unmodified ``litgpt.GPT``: which layer is normal, which transposed, and who owns which heads.

    wte              Embedding                        token ids -> residual stream (features over y, replicated over x)
    norm_1, norm_2, post_*_norm, ln_f                 over y
    attn.qkv         normal, rows [q | k | v]         each block split by heads over x
    attn.proj        transposed                       back to features over y
    mlp.fc(_1, _2)   normal;   mlp.proj transposed;   a mixture of experts: ``axo.plans.litgpt.moe``
    lm_head          normal                           logits: vocabulary over x, uneven where it does not divide

The attention module computes with n_head/Gx heads and n_query_groups/Gx groups (fewer groups than x: with one, which
the ranks whose queries attend to it all hold): it alone gets a shallow copy of the
configuration. ``GPT.config`` and the blocks' stay whole. Elementwise features (gated MLPs, soft-capping of logits,
scaled embeddings, rotary variants, sliding windows) need nothing; soft-capped scores get a right mask with a KV cache
(``axo.plans.litgpt.attention``). A norm over each head's queries and keys is replicated over
x, so its gradient is summed there; OLMo 2's norm over all heads is split over x.

A head tied to the embedding stays tied: both split the vocabulary over x and the hidden size over y alike, so one shard
serves both, and its gradient is the sum of both uses.

With sequence parallelism the tokens of the residual stream are split over x (``axo.nn.sequence``): they are gathered
before attention, before the MLP and after ln_f. The length of a batch must divide over x: no generation token by token.

``litgpt.lora.GPT``: each layer with its adapter beside it (``axo.plans.litgpt.lora``).

Not here, refused by name: query groups that neither divide over x nor divide it, latent attention, other adapters,
quantised layers; sequence parallelism with mixtures of experts or LoRA.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from axo.nn import RMSNorm
from axo.nn.sequence import GatherTokens
from axo.placement import check_divides
from axo.plans.heads import kv_copies
from axo.plans.replace import Replacer, check_exact


class LitRMSNorm(RMSNorm):
    """``litgpt.model.RMSNorm`` over a split hidden dim; ``axo.init_weights`` sees litgpt's class."""

    def serial(self, device: torch.device, dtype: torch.dtype) -> nn.Module:
        from litgpt.model import RMSNorm as Serial

        with torch.device(device):
            return Serial(self.normalized_shape[0], eps=self.eps, add_unit_offset=self.unit_offset).to(dtype)


def apply(model: nn.Module, replacer: Replacer, *, gather_logits: bool = False) -> nn.Module:
    """Replace the layers of a ``litgpt.GPT`` in place.

    Args:
        model: An unmodified GPT, real or on the meta device.
        replacer: Makes the parallel layers.
        gather_logits: Let the head return whole logits on every rank instead of its part of the vocabulary.

    Raises:
        ValueError: The model has a feature that the plan does not know, or a size that does not divide.
    """
    check(model, replacer.comms, replacer.sequence_parallel)
    gpt: Any = model
    tied = _layer(gpt.lm_head).weight is gpt.transformer.wte.weight
    replacer.embedding(gpt.transformer, "wte", "transformer.wte")
    for index, block in enumerate(gpt.transformer.h):
        _replace_block(block, f"transformer.h.{index}", replacer)
    split_tokens: dict[str, Any] = {"sum_grad_over": ("x",)} if replacer.sequence_parallel else {}
    _replace_norm(gpt.transformer, "ln_f", "transformer.ln_f", replacer, **split_tokens)
    _replace_linear(gpt, "lm_head", "lm_head", replacer, uneven_out=True, gather_output=gather_logits)
    if replacer.sequence_parallel:
        gpt.transformer.ln_f.register_forward_hook(GatherTokens(replacer.comms))
    if tied:
        _layer(gpt.lm_head).weight = gpt.transformer.wte.weight
    _move_buffers(gpt, replacer.comms.device)
    return model


def check(model: nn.Module, comms: Any, sequence_parallel: bool = False) -> None:
    """Refuse what the plan cannot do, before anything has changed.

    Raises:
        ValueError: Names the feature or the size.
    """
    from litgpt import lora
    from litgpt.model import GPT, CausalSelfAttention, GemmaMLP, GptNeoxMLP, LLaMAMLP, LLaMAMoE

    if not isinstance(model, GPT):
        raise ValueError(f"parallelize: plan 'litgpt' wants a litgpt.GPT, got a {type(model).__qualname__}")
    config = model.config
    owner = f"parallelize: litgpt model {config.name or 'unnamed'!r}"
    if config.latent_attention:
        raise ValueError(f"{owner}: latent_attention (DeepSeek's MLA) is not supported by plan 'litgpt'")
    attentions: tuple[type, ...] = (CausalSelfAttention, lora.CausalSelfAttention)
    dense: tuple[type, ...] = (GptNeoxMLP, LLaMAMLP, GemmaMLP, lora.GptNeoxMLP, lora.LLaMAMLP, lora.GemmaMLP)
    mixtures: tuple[type, ...] = (LLaMAMoE, lora.LLaMAMoE)
    adapted = [name for name, module in model.named_modules() if isinstance(module, lora.LoRALinear)]
    for index, block in enumerate(model.transformer.h):
        for part, kinds in ((block.attn, attentions), (block.mlp, dense + mixtures)):
            if type(part) not in kinds:
                raise ValueError(
                    f"{owner}: block {index} holds a {type(part).__module__}.{type(part).__qualname__}, which plan"
                    f" 'litgpt' does not know; it knows {', '.join(dict.fromkeys(k.__qualname__ for k in kinds))}"
                )
        name = f"transformer.h.{index}"
        _check_linear(block.attn.qkv, f"{name}.attn.qkv")
        _check_linear(block.attn.proj, f"{name}.attn.proj")
        mixture = type(block.mlp) in mixtures
        if sequence_parallel and (mixture or adapted):
            what = f"a mixture of experts (block {index})" if mixture else f"LoRA ({adapted[0]!r})"
            raise ValueError(f"{owner}: sequence_parallel=True with {what} is not supported; leave it out")
        for path, mlp in block.mlp.named_modules():
            if type(mlp) in dense:
                for child in _linears(mlp):
                    _check_linear(getattr(mlp, child), f"{name}.mlp.{path}.{child}".replace("..", "."))
                width, what = _layer(mlp.proj).in_features, "moe_intermediate_size" if mixture else "intermediate_size"
                check_divides(owner, what, width, "x", comms.grid.x)
    _check_linear(model.lm_head, "lm_head")
    check_exact(model.transformer.wte, nn.Embedding, "transformer.wte")
    check_divides(owner, "n_embd", config.n_embd, "y", comms.grid.y)
    check_divides(owner, "n_head", config.n_head, "x", comms.grid.x)
    copies = kv_copies(owner, "n_query_groups", config.n_query_groups, comms.grid.x)
    if copies > 1 and config.norm_qk and config.norm_qk_type == "olmo2":
        raise ValueError(
            f"{owner}: a norm over all heads' keys (norm_qk_type='olmo2') with n_query_groups={config.n_query_groups}"
            f" shared by x={comms.grid.x} ranks is not supported; use at most x={config.n_query_groups}"
        )


def _layer(module: Any) -> Any:
    """A linear layer itself, without the adapter that LoRA puts beside it."""
    return getattr(module, "linear", module)


def _check_linear(module: Any, name: str) -> None:
    from litgpt.lora import LoRALinear, LoRAQKVLinear

    if type(module) in (LoRALinear, LoRAQKVLinear):
        module, name = module.linear, f"{name}.linear"
    check_exact(module, nn.Linear, name)


def _linears(mlp: nn.Module) -> list[str]:
    """The names of the linear layers of a dense MLP."""
    return [child for child in ("fc", "fc_1", "fc_2", "proj") if hasattr(mlp, child)]


def _replace_linear(parent: Any, child: str, name: str, replacer: Replacer, **options: Any) -> None:
    """Replace a linear layer, and what LoRA put around it; ``options`` are keyword arguments of ``axo.nn.Linear``."""
    old = getattr(parent, child)
    if isinstance(old, nn.Linear):
        replacer.linear(parent, child, name, **options)
        return
    from axo.plans.litgpt.lora import AdaptedLinear

    gather = options.pop("gather_output", False)
    serial = old.linear
    new = AdaptedLinear(
        old,
        transposed=options.get("transposed", False),
        whole_output=options.get("whole_output", False),
        out_blocks=options.get("out_blocks"),
        out_copies=options.get("out_copies"),
        gather_output=gather,
        comms=replacer.comms,
        grad_reduce=replacer.grad_reduce,
        name=name,
    )
    replacer.put(parent, child, new)
    new.linear = serial
    replacer.linear(new, "linear", f"{name}.linear", **options)


def _replace_mlp(mlp: Any, name: str, replacer: Replacer) -> None:
    for child in _linears(mlp):
        _replace_linear(mlp, child, f"{name}.{child}", replacer, transposed=child == "proj")


def _replace_block(block: Any, name: str, replacer: Replacer) -> None:
    attn, mlp, config = block.attn, block.mlp, block.config
    split_tokens: dict[str, Any] = {}
    if replacer.sequence_parallel:
        split_tokens = {"sum_grad_over": ("x",)}
        for part in (attn, mlp):
            part.register_forward_pre_hook(GatherTokens(replacer.comms))
    for norm in ("norm_1", "norm_2", "post_attention_norm", "post_mlp_norm"):
        if not isinstance(getattr(block, norm), nn.Identity | None):
            _replace_norm(block, norm, f"{name}.{norm}", replacer, **split_tokens)
    sizes = tuple(n * config.head_size for n in (config.n_head, config.n_query_groups, config.n_query_groups))
    parts = replacer.comms.grid.x
    copies = kv_copies(name, "n_query_groups", config.n_query_groups, parts)
    _replace_linear(attn, "qkv", f"{name}.attn.qkv", replacer, out_blocks=sizes, out_copies=(1, copies, copies))
    _replace_linear(attn, "proj", f"{name}.attn.proj", replacer, transposed=True)
    for norm in ("norm_q", "norm_k"):
        if getattr(attn, norm) is not None:
            spans_heads = config.norm_qk_type == "olmo2"
            over = {"axis": "x"} if spans_heads else {"axis": None, "sum_grad_over": ("x",)}
            _replace_norm(attn, norm, f"{name}.attn.{norm}", replacer, **over)
    if hasattr(mlp, "experts"):
        from axo.plans.litgpt.moe import replace_moe

        replace_moe(mlp, f"{name}.mlp", replacer, _replace_linear, _replace_mlp)
    else:
        _replace_mlp(mlp, f"{name}.mlp", replacer)
    if config.attention_logit_softcapping is not None:
        from axo.plans.litgpt.attention import softcapped

        attn.__class__ = softcapped(type(attn))
    attn.config = copy.copy(config)
    attn.config.n_head //= parts
    attn.config.n_query_groups //= parts // copies
    if attn.kv_cache is not None:
        for buffer in ("k", "v"):
            groups = getattr(attn.kv_cache, buffer).chunk(parts // copies, 1)
            setattr(attn.kv_cache, buffer, groups[replacer.comms.coords.x // copies].contiguous())
    block.register_load_state_dict_pre_hook(_reassemble_legacy_qkv)


def _replace_norm(parent: Any, child: str, name: str, replacer: Replacer, **over: Any) -> None:
    from litgpt.model import RMSNorm as Serial

    old = getattr(parent, child)
    if type(old) is not Serial:
        replacer.layer_norm(parent, child, name, **over)
        return
    new = LitRMSNorm(
        old.weight.shape[0],
        old.eps,
        True,
        "meta",
        old.weight.dtype,
        comms=replacer.comms,
        grad_reduce=replacer.grad_reduce,
        add_unit_offset=old.add_unit_offset,
        name=name,
        **over,
    )
    replacer.put(parent, child, new)


def _reassemble_legacy_qkv(block: Any, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Translate ``attn.attn.*`` of old checkpoints with the whole configuration; litgpt would use attention's own."""
    from litgpt.scripts.convert_hf_checkpoint import qkv_reassemble

    for kind in ("weight", "bias", "linear.weight", "linear.bias"):
        legacy = f"{prefix}attn.attn.{kind}"
        if legacy in state_dict:
            state_dict[f"{prefix}attn.qkv.{kind}"] = qkv_reassemble(state_dict.pop(legacy), block.config)


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if not buffer.is_meta and buffer.device != device:
                setattr(module, name, buffer.to(device))
