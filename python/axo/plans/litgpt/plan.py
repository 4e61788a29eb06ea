"""The plan for an unmodified ``litgpt.GPT``: which layer is normal, which transposed, and who owns which heads.

    wte              Embedding                        token ids -> residual stream (features over y, replicated over x)
    norm_1, norm_2, post_*_norm, ln_f                 over y
    attn.qkv         normal, rows [q | k | v]         each block split by heads over x
    attn.proj        transposed                       back to features over y
    mlp.fc(_1, _2)   normal;   mlp.proj transposed;   a mixture of experts: ``axo.plans.litgpt.moe``
    lm_head          normal                           logits: vocabulary over x, uneven where it does not divide

The attention module computes with n_head/Gx heads and n_query_groups/Gx groups. With fewer groups than ranks along x
it has one, which all ranks hold whose queries attend to it. It alone gets a shallow copy of the configuration:
``GPT.config`` and the blocks' stay whole. Elementwise features (gated MLPs, soft-capping of logits, scaled embeddings,
rotary variants, sliding windows) need nothing; soft-capped scores get a right mask with a KV cache
(``axo.plans.litgpt.attention``). A norm over each head's queries and keys is replicated over x, so its gradient is
summed there; OLMo 2's norm over all heads is split over x.

A head tied to the embedding stays tied: both split the vocabulary over x and the hidden size over y alike, so one shard
serves both, and its gradient is the sum of both uses.

With algorithm "tesseract" what stands over x above is over y instead, and x splits rows (``axo.arrangement``). A tied
head gathers its weight over x, as the embedding does.

With sequence parallelism the tokens of the residual stream are split over x (``axo.nn.sequence``): they are gathered
before attention, before the MLP and after ln_f. The length of a batch must divide over x: no generation token by token.

``litgpt.lora.GPT``: each layer with its adapter beside it (``axo.plans.litgpt.lora``).

Latent attention: ``axo.plans.litgpt.latent``.

Not here, refused by name: query groups that neither divide over x nor divide it, layers of bitsandbytes; sequence
parallelism with mixtures of experts, LoRA, adapters, latent attention or Tesseract.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import torch
from litgpt import adapter, adapter_v2, lora
from litgpt import model as plain
from litgpt.model import GPT, GroupedTopkRouter
from litgpt.model import RMSNorm as SerialRMSNorm
from litgpt.scripts.convert_hf_checkpoint import qkv_reassemble
from torch import nn

from axo.arrangement import AXONN, Arrangement
from axo.errors import Refused
from axo.grid import Grid
from axo.nn import Features, RMSNorm
from axo.nn.layer import ParallelLayer
from axo.nn.linear import Linear
from axo.nn.sequence import GatherTokens
from axo.nn.shared_input import share_input, share_inputs
from axo.placement import check_divides
from axo.plans.experts import holders
from axo.plans.heads import kv_copies
from axo.plans.litgpt import adapters, latent
from axo.plans.litgpt.attention import with_hidden_places
from axo.plans.litgpt.lora import AdaptedLinear
from axo.plans.litgpt.moe import replace_mixture
from axo.plans.replace import Replacer, check_exact


def _classes(*names: str) -> tuple[type, ...]:
    """LitGPT's classes of these names: the plain ones, and those that adapters and LoRA put in their place."""
    modules = (plain, lora, adapter, adapter_v2)
    return tuple(dict.fromkeys(getattr(module, name) for name in names for module in modules if hasattr(module, name)))


_ATTENTIONS = _classes("CausalSelfAttention", "MultiheadLatentAttention")
_DENSE = _classes("GptNeoxMLP", "LLaMAMLP", "GemmaMLP")
_MIXTURES = _classes("LLaMAMoE")
_ADAPTED = (lora.LoRALinear, adapter_v2.AdapterV2Linear)  # what is around a linear layer


class LitRMSNorm(RMSNorm):
    """``litgpt.model.RMSNorm`` over a split hidden dim; ``axo.init_weights`` sees litgpt's class."""

    def serial(self, device: torch.device, dtype: torch.dtype) -> nn.Module:
        with torch.device(device):
            return SerialRMSNorm(self.normalized_shape[0], eps=self.eps, add_unit_offset=self.unit_offset).to(dtype)


def apply(model: nn.Module, replacer: Replacer, *, gather_logits: bool = False) -> nn.Module:
    """Replace the layers of a ``litgpt.GPT`` in place.

    Args:
        model: An unmodified GPT, real or on the meta device.
        replacer: Makes the parallel layers.
        gather_logits: Let the head return whole logits on every rank instead of its part of the vocabulary.

    Raises:
        Refused: The model has a feature that the plan does not know, or a size that does not divide.
    """
    comms = replacer.comms
    inner = comms.arrangement.inner
    ranks = comms.grid.size(inner)
    check(model, comms.grid, comms.arrangement, replacer.sequence_parallel)
    gpt: Any = model
    tied = _layer(gpt.lm_head).weight is gpt.transformer.wte.weight
    replacer.embedding(gpt.transformer, "wte", "transformer.wte")
    spread = holders(model, comms)
    for parent, child, name, options in list(_linears(gpt, ranks, gather_logits)):
        if child == "lm_head" and tied:
            options["as_table"] = True
        if (module := getattr(parent, child)) in spread:
            options["holders"] = spread[module]
        _replace_linear(parent, child, name, replacer, **options)
    for parent, child, name, options in list(_norms(gpt, inner, replacer.sequence_parallel)):
        _replace_norm(parent, child, name, replacer, **options)
    for index, block in enumerate(gpt.transformer.h):
        _replace_attention(block, f"transformer.h.{index}.attn", replacer)
        if hasattr(block.mlp, "experts"):
            replace_mixture(block.mlp, f"transformer.h.{index}.mlp", replacer)
        if block.config.shared_attention_norm and block.config.parallel_residual:  # attention and MLP read one norm
            readers = [
                getattr(block.attn, "qkv", None),
                *(getattr(block.mlp, fc, None) for fc in ("fc", "fc_1", "fc_2")),
            ]
            share_input(*(layer for layer in readers if isinstance(layer, Linear)))
        if replacer.sequence_parallel:
            for part in (block.attn, block.mlp):
                part.register_forward_pre_hook(GatherTokens(comms))
        block.register_load_state_dict_pre_hook(_reassemble_legacy_qkv)
    share_inputs(model)
    if replacer.sequence_parallel:
        gpt.transformer.ln_f.register_forward_hook(GatherTokens(comms))
    if tied:
        _layer(gpt.lm_head).weight = gpt.transformer.wte.weight
    _move_buffers(gpt, comms.device)
    return model


# A layer to replace: its parent, its name there, its name in the model, and options of the parallel layer.
Place = tuple[Any, str, str, dict[str, Any]]


def _linears(gpt: Any, ranks: int, gather_logits: bool = False) -> Iterator[Place]:
    """The linear layers of a model that ``ranks`` share the heads of."""
    config = gpt.config
    sizes = tuple(n * config.head_size for n in (config.n_head, config.n_query_groups, config.n_query_groups))
    copies = kv_copies("transformer.h", "n_query_groups", config.n_query_groups, ranks)
    for index, block in enumerate(gpt.transformer.h):
        name = f"transformer.h.{index}"
        if config.latent_attention:
            for child, options in latent.LINEARS.items():
                yield block.attn, child, f"{name}.attn.{child}", dict(options)
        else:
            yield block.attn, "qkv", f"{name}.attn.qkv", {"out_blocks": sizes, "out_copies": (1, copies, copies)}
            yield block.attn, "proj", f"{name}.attn.proj", {"transposed": True}
        for path, module in block.mlp.named_modules(prefix=f"{name}.mlp"):
            if hasattr(module, "experts") and not isinstance(module.gate, GroupedTopkRouter):
                yield module, "gate", f"{path}.gate", {"whole_output": True}
            if hasattr(module, "proj"):
                for child in ("fc", "fc_1", "fc_2", "proj"):
                    if hasattr(module, child):
                        yield module, child, f"{path}.{child}", {"transposed": child == "proj"}
    yield gpt, "lm_head", "lm_head", {"uneven_out": True, "gather_output": gather_logits}


def _norms(gpt: Any, inner: str, sequence_parallel: bool) -> Iterator[Place]:
    """The norms of a model; those of the residual stream sum gradients over x where x splits its tokens."""
    stream: dict[str, Any] = {"sum_grad_over": ("x",)} if sequence_parallel else {}
    for index, block in enumerate(gpt.transformer.h):
        for child in ("norm_1", "norm_2", "post_attention_norm", "post_mlp_norm"):
            if not isinstance(getattr(block, child), nn.Identity | None):
                yield block, child, f"transformer.h.{index}.{child}", stream
        for child in ("q_a_norm", "kv_a_norm") if gpt.config.latent_attention else ():
            yield block.attn, child, f"transformer.h.{index}.attn.{child}", {"axis": None}
        spans_heads = gpt.config.norm_qk_type == "olmo2"
        over = {"axis": inner} if spans_heads else {"axis": None, "sum_grad_over": (inner,)}
        for child in ("norm_q", "norm_k"):
            if getattr(block.attn, child, None) is not None:
                yield block.attn, child, f"transformer.h.{index}.attn.{child}", over
    yield gpt.transformer, "ln_f", "transformer.ln_f", stream


def check(model: nn.Module, grid: Grid, arrangement: Arrangement = AXONN, sequence_parallel: bool = False) -> None:
    """Refuse what the plan cannot do, before anything has changed.

    Raises:
        Refused: Names the feature or the size.
    """
    if not isinstance(model, GPT):
        raise Refused(f"parallelize: plan 'litgpt' needs a litgpt.GPT, got a {type(model).__qualname__}")
    config, inner = model.config, arrangement.inner
    ranks = grid.size(inner)
    owner = f"parallelize: litgpt model {config.name or 'unnamed'!r}"
    if config.latent_attention and sequence_parallel:
        raise Refused(f"{owner}: sequence_parallel=True with latent attention is not supported; leave it out")
    adapted = [name for name, module in model.named_modules() if _is_adapted(module)]
    kind = "LoRA" if adapted and isinstance(model.get_submodule(adapted[0]), lora.LoRALinear) else "an adapter"
    head = _layer(model.lm_head)
    if head.weight is model.transformer.wte.weight and head.bias is not None:
        arrangement.only_axonn(f"{owner}: a head with a bias that is tied to the embedding")
    widths: dict[str, int] = {}
    for index, block in enumerate(model.transformer.h):
        for part, kinds in ((block.attn, _ATTENTIONS), (block.mlp, _DENSE + _MIXTURES)):
            if type(part) not in kinds:
                raise Refused(
                    f"{owner}: block {index} holds a {type(part).__module__}.{type(part).__qualname__}, which plan"
                    f" 'litgpt' does not know; it knows {', '.join(dict.fromkeys(k.__qualname__ for k in kinds))}"
                )
        mixture = type(block.mlp) in _MIXTURES
        if sequence_parallel and (mixture or adapted):
            what = f"a mixture of experts (block {index})" if mixture else f"{kind} ({adapted[0]!r})"
            raise Refused(f"{owner}: sequence_parallel=True with {what} is not supported; leave it out")
        for mlp in block.mlp.modules():
            if type(mlp) in _DENSE:
                widths["moe_intermediate_size" if mixture else "intermediate_size"] = _layer(mlp.proj).in_features
    _check_sizes(owner, config, widths, grid, inner)
    check_exact(model.transformer.wte, nn.Embedding, "transformer.wte")
    for parent, child, name, _ in _linears(model, ranks):
        module = getattr(parent, child)
        around = type(module) in (lora.LoRALinear, lora.LoRAQKVLinear, adapter_v2.AdapterV2Linear)
        check_exact(_layer(module) if around else module, nn.Linear, f"{name}.linear" if around else name)


def _check_sizes(owner: str, config: Any, widths: dict[str, int], grid: Grid, inner: str) -> None:
    """Refuse sizes that an axis does not divide: it names the size, the axis, and what would work."""
    ranks, heads, groups = grid.size(inner), config.n_head, config.n_query_groups

    def fits(x: int) -> bool:
        return not any(size % x for size in (heads, *widths.values())) and not (groups % x and x % groups)

    if config.latent_attention:
        for what in ("q_lora_rank", "kv_lora_rank"):
            check_divides(owner, what, config.latent_attention[what], "y", grid.y)
    for what, size in {**widths, "n_head": heads}.items():
        check_divides(owner, what, size, inner, ranks, fits)
    check_divides(owner, "n_embd", config.n_embd, "y", grid.y)
    copies = kv_copies(owner, "n_query_groups", groups, ranks, fits, inner)
    if copies > 1 and config.norm_qk and config.norm_qk_type == "olmo2":
        raise Refused(
            f"{owner}: a norm over all heads' keys (norm_qk_type='olmo2') with n_query_groups={groups}"
            f" shared by {inner}={ranks} ranks is not supported; use at most {inner}={groups}"
        )


def _is_adapted(module: nn.Module) -> bool:
    return isinstance(module, _ADAPTED) or hasattr(module, "gating_factor")


def _layer(module: nn.Module) -> nn.Linear:
    """A linear layer itself, without the adapter around it."""
    return cast("nn.Linear", getattr(module, "linear", module))


def _replace_linear(
    parent: Any, child: str, name: str, replacer: Replacer, *, transposed: bool = False, **options: Any
) -> None:
    """Replace a linear layer, and the adapter around it; ``options`` are fields of :class:`axo.nn.Features`."""
    old = getattr(parent, child)
    if isinstance(old, nn.Linear):
        replacer.linear(parent, child, name, transposed=transposed, **options)
        return
    serial, features = old.linear, Features(**options)
    assert not features.scatter_input, f"{name}: an adapter takes its part of the features"
    kind: type[ParallelLayer] = adapters.ScaledLinear if isinstance(old, adapter_v2.AdapterV2Linear) else AdaptedLinear
    new = kind(old, replacer, name, transposed, features)
    options.pop("gather_output", None)  # the adapter comes first
    replacer.put(parent, child, new)
    new.linear = serial
    replacer.linear(new, "linear", f"{name}.linear", transposed=transposed, **options)


def _replace_attention(block: Any, name: str, replacer: Replacer) -> None:
    """Let attention compute with this rank's heads."""
    comms = replacer.comms
    inner = comms.arrangement.inner
    block.attn = adapters.with_prompt(block.attn, name, replacer)
    attn, config, parts = block.attn, block.config, comms.grid.size(inner)
    if config.attention_logit_softcapping is not None:
        attn.scaled_dot_product_attention = partial(with_hidden_places, attn.scaled_dot_product_attention)
    copies = kv_copies("transformer.h", "n_query_groups", config.n_query_groups, parts)
    attn.config = copy.copy(config)
    attn.config.n_head //= parts
    attn.config.n_query_groups //= parts // copies
    if config.latent_attention:
        latent.sum_shared_gradient(attn, comms)
        attn.scaled_dot_product_attention = partial(latent.attend, attn.scaled_dot_product_attention)
    if attn.kv_cache is not None:
        for buffer in ("k", "v"):
            groups = getattr(attn.kv_cache, buffer).chunk(parts // copies, 1)
            setattr(attn.kv_cache, buffer, groups[getattr(comms.coords, inner) // copies].clone())  # frees the others


def _replace_norm(parent: Any, child: str, name: str, replacer: Replacer, **over: Any) -> None:
    old = getattr(parent, child)
    if type(old) is not SerialRMSNorm:
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
    for kind in ("weight", "bias", "linear.weight", "linear.bias"):
        legacy = f"{prefix}attn.attn.{kind}"
        if legacy in state_dict:
            state_dict[f"{prefix}attn.qkv.{kind}"] = qkv_reassemble(state_dict.pop(legacy), block.config)


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if not buffer.is_meta and buffer.device != device:
                setattr(module, name, buffer.to(device))
