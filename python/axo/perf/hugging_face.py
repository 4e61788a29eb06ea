"""A Hugging Face configuration as LitGPT's fields: transformers' own class is built on the meta device and looked at.

No field of a configuration is interpreted here but the number of blocks and of heads, and how many experts a token
goes through, which no shape shows: what a model is, its class says. A class with a part that is not known (a state
space, fused experts, latent attention) is refused by that part, as is a field that its class does not read.

Known are models of an embedding, blocks of attention and MLPs (gated or not, dense or a mixture of experts), and a
head, tied to the embedding or not.
"""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from axo.perf.workload import LATENT, Experts, Workload, from_litgpt

if TYPE_CHECKING:
    from torch import nn

_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "n_experts_per_token")
_OUT = re.compile(r"(^|\.)(o_proj|out_proj|c_proj|dense|wo)$")  # how classes call the layer behind the heads
_SIZES = re.compile(r"expert|moe|hidden|intermediate|heads|layers|head_dim|lora_rank|vocab|groups")
_COUNTED = re.compile(r"(size|heads|layers?|dim|experts|groups)$")  # of these alone, a word is no value
_MOST_LAYERS, _MOST_MODULES, _MOST = 2048, 200_000, 10**8  # modules are built one by one
_PARTS = re.compile(r"expert|moe|lora_rank")  # fields that a class which does not read them has no such part for
_OF_MLP = ("gated", "intermediate", "experts")  # what blocks of one model may differ in
_MOST_MISSED = 1e-3  # share of a model's parameters that small vectors (scales, routers' biases) may have uncounted


def read(fields: Mapping[str, Any], *, name: str = "model", seq_length: int | None = None) -> Workload:
    """Read the fields of a config.json.

    Raises:
        ValueError: transformers knows no such model, cannot build it, or it has a part that is not known.
    """
    model = build(fields, name)
    config, blocks = model.config, list(_blocks(model, name))
    shapes = [{part: what for part, what in block.items() if part not in _OF_MLP} for block in blocks]
    dense = [block for block in blocks if block["experts"] is None]
    if any(one != shapes[0] for one in shapes) or len({(one["gated"], one["intermediate"]) for one in dense}) > 1:
        raise ValueError(f"model {name!r}: its blocks differ in their attention or in the width of their MLPs")
    mlp: dict[str, Any] = dense[0] if dense else {"gated": True, "intermediate": 1}
    runs = [(len(list(same)), experts) for experts, same in itertools.groupby(block["experts"] for block in blocks)]
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    tables = (module for module in model.modules() if _kind(module) == "Embedding" and module is not table)
    what: dict[str, Any] = {
        "name": name, "n_layer": len(blocks), "n_embd": table.embedding_dim, "padded_vocab_size": table.num_embeddings,
        "block_size": getattr(config, "max_position_embeddings", None),
        "lm_head_bias": head is not None and head.bias is not None,
        "tied": head is None or head.weight is table.weight,
        "positions": next((module.num_embeddings for module in tables), 0),
        "parallel_residual": any(getattr(config, one, False) for one in ("use_parallel_residual", "parallel_attn")),
        "attention_logit_softcapping": getattr(config, "attn_logit_softcapping", None),
        "final_logit_softcapping": getattr(config, "final_logit_softcapping", None),
        "mlp_class_name": "LLaMAMLP" if mlp["gated"] else "GptNeoxMLP", "intermediate_size": mlp["intermediate"],
    }  # fmt: skip
    workload = from_litgpt(what | _mixture(runs) | shapes[0], seq_length=seq_length)
    _check_count(workload, model, name)
    return replace(workload, tables=0, longest=0)  # it turns queries and keys without tables


def _mixture(runs: Sequence[tuple[int, Experts | None]]) -> dict[str, Any]:
    """Of runs of blocks with the same MLP, LitGPT's fields of a mixture, where it has such a model; else the runs."""
    experts = runs[-1][1]
    if len(runs) == 1 and experts is None:
        return {}
    if experts is None or len(runs) > 2 or (runs[:-1] and runs[0][1]) or experts.shared % experts.intermediate:
        return {"stacks": runs}
    return {
        "mlp_class_name": "LLaMAMoE", "n_expert": experts.count, "n_expert_per_token": experts.per_token,
        "moe_intermediate_size": experts.intermediate, "n_shared_expert": experts.shared // experts.intermediate,
        "first_k_dense_replace": runs[0][0] if len(runs) == 2 else 0,
    }  # fmt: skip


def build(fields: Mapping[str, Any], name: str) -> Any:
    """The model that transformers builds of these fields, on the meta device.

    Raises:
        ValueError: It cannot; says which field stands in the way.
    """
    kind = fields.get("model_type")
    if not kind:
        raise ValueError(f"model {name!r}: the configuration has no model_type, so nobody knows what it is")
    import torch

    try:
        import transformers
    except ImportError:
        raise ValueError(f"model {name!r}: a config.json is built by transformers; pip install transformers") from None
    if kind not in transformers.CONFIG_MAPPING:
        raise ValueError(
            f"model {name!r}: model_type={kind!r} is none that transformers {transformers.__version__} builds"
        )
    config_class = transformers.CONFIG_MAPPING[kind]
    _check_fields(config_class().to_dict() | dict.fromkeys(config_class.attribute_map), fields, name, kind)
    verbose = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        config = config_class.from_dict(dict(fields))
        if config.is_encoder_decoder:
            raise ValueError("is_encoder_decoder=True, and only decoders are known")
        with warnings.catch_warnings(), torch.device("meta"), _without_values():
            warnings.simplefilter("ignore")
            model = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        model.tie_weights()
    except Exception as error:  # a class may refuse its values in any way
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"model {name!r}: transformers cannot build a {kind} of these fields: {reason}") from None
    finally:
        transformers.logging.set_verbosity(verbose)
    return model


def _without_values() -> AbstractContextManager[None]:
    """Spare the first values, which thousands of layers on the meta device would compute."""
    from transformers import modeling_utils

    spare: Callable[[], AbstractContextManager[None]] = getattr(modeling_utils, "no_init_weights", nullcontext)
    return spare()


def _check_fields(known: Mapping[str, Any], fields: Mapping[str, Any], name: str, kind: str) -> None:
    """Refuse sizes that are none, that no model has, and sizes that the class would not read."""
    layers, experts = (
        max((value for field, value in fields.items() if type(value) is int and re.search(what, field)), default=1)
        for what in (r"layers?$", r"experts$")
    )
    if layers > _MOST_LAYERS or layers * experts > _MOST_MODULES:
        raise ValueError(f"model {name!r}: {layers} layers and {experts} experts are more than any model has")
    for field, value in fields.items():
        if not _SIZES.search(field) or field.startswith(("output_", "use_", "tie_")):
            continue
        default: Any = known.get(field)
        whole, sized = (type(one) is int for one in (value, default))
        if (isinstance(value, str) and _COUNTED.search(field)) or (
            sized and default > 0 and value is not None and not (whole and value > 0)
        ):
            raise ValueError(f"model {name!r}: {field}={value!r} is not a whole number of at least 1")
        if whole and value > _MOST:
            raise ValueError(f"model {name!r}: {field}={value!r} is more than any model has")
        every = field.endswith("_freq") and value == 1  # layer is like that
        if _PARTS.search(field) and field not in known and whole and value > 0 and not every:
            raise ValueError(
                f"model {name!r}: {field}={value!r} is no field of transformers' {kind}, which would build another"
                " model"
            )


def _kind(module: Any) -> str:
    """``"Linear"``, ``"Embedding"``, ``"norm"``, ``""`` for what holds no parameters, or another class's name."""
    if not any(True for _ in module.parameters(recurse=False)):
        return ""
    for base in type(module).__mro__:
        if base.__name__ in ("Linear", "Conv1D", "Embedding"):
            return "Embedding" if base.__name__ == "Embedding" else "Linear"
    return "norm" if "Norm" in type(module).__name__ else type(module).__name__


def _sizes(linear: Any) -> tuple[int, int]:
    """(in, out) of a linear layer; of GPT-2's ``Conv1D`` the weight lies the other way."""
    rows, columns = linear.weight.shape
    return (rows, columns) if type(linear).__name__ == "Conv1D" else (columns, rows)


def _blocks(model: Any, name: str) -> Iterator[dict[str, Any]]:
    from torch import nn

    config = model.config
    count, hidden = config.num_hidden_layers, model.get_input_embeddings().embedding_dim
    every = next((m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == count), None)
    if every is None:
        raise ValueError(
            f"model {name!r}: model_type={config.model_type!r} builds a {type(model).__name__} without a list of"
            f" num_hidden_layers={count} blocks"
        )
    for index, block in enumerate(every):
        yield _block(block, hidden, config, f"model {name!r}: block {index}, a {type(block).__name__},")


def _block(block: nn.Module, hidden: int, config: Any, owner: str) -> dict[str, Any]:
    """What a block is, by its modules: fields of ``litgpt.Config``, and what its MLP is."""
    from torch import nn

    parts = {child: module for child, module in block.named_children() if any(True for _ in module.parameters())}
    attentions = [child for child, module in parts.items() if re.search("Attention|Attn", type(module).__name__)]
    norms = [child for child, module in parts.items() if _kind(module) == "norm"]
    others = [child for child in parts if child not in attentions and child not in norms]
    loose = all(_kind(parts[child]) == "Linear" for child in others)  # OPT's MLP is two layers of the block's own
    if len(attentions) != 1 or not others or not (loose or len(others) == 1):
        strange = ", ".join(f"{child} ({type(parts[child]).__name__})" for child in others)
        raise ValueError(
            f"{owner} of model_type={config.model_type!r} is not one attention and an MLP: it has {strange or norms}"
        )
    linears, widths = _leaves(parts[attentions[0]], owner)
    out = next((linear for path, linear in linears.items() if _OUT.search(path)), list(linears.values())[-1])
    queries = [linear for linear in linears.values() if linear is not out]
    heads = config.num_attention_heads
    latent = _latent({path: _sizes(linear) for path, linear in linears.items()}, heads)
    if latent is not None:
        queries, widths = [], []
    head_size, rest = divmod(_sizes(out)[0], heads)
    qkv = sum(_sizes(linear)[1] for linear in queries)
    kv_heads, odd = divmod(qkv // max(1, head_size) - heads, 2)
    plain = all(_sizes(linear)[0] == hidden for linear in queries)
    if latent is None and (rest or odd or kv_heads < 1 or not plain or qkv != (heads + 2 * kv_heads) * head_size):
        raise ValueError(
            f"{owner} has an attention whose layers are not queries, keys and values of {heads} heads and an output;"
            " gated attention, and a latent one of keys alone, are not modelled"
        )
    mlp = nn.ModuleDict({child: parts[child] for child in others}) if loose else parts[others[0]]
    gated, intermediate, experts, bias = _mlp(mlp, hidden, config, owner)
    post = [child.startswith("post_") for child in norms]
    both = len(norms) == 4 or not any("input" in child or "1" in child or "pre" in child for child in norms)
    behind = both and sum(post) == 2
    vectors = len(list(parts[norms[0]].parameters())) if norms else 1
    count = len(norms) - 2 * behind
    return {
        "n_head": heads, "n_query_groups": heads if latent else kv_heads, "head_size": head_size,
        "norm_qk": bool(widths), "norm_qk_type": "default" if widths[:1] in ([], [head_size]) else "olmo2",
        "latent_attention": latent, "bias": bias, "qkv_bias": any(linear.bias is not None for linear in queries),
        "norm_1": count > 0, "norm_2": count > 0, "shared_attention_norm": count == 1,
        "post_attention_norm": behind, "post_mlp_norm": behind,
        "norm_class_name": "LayerNorm" if vectors == 2 else "RMSNorm",
        "gated": gated, "intermediate": intermediate, "experts": experts,
    }  # fmt: skip


def _latent(sizes: Mapping[str, tuple[int, int]], heads: int) -> dict[str, int] | None:
    """DeepSeek's attention, by the sizes (in, out) of its layers; None: another."""
    if not {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"} <= set(sizes):
        return None
    keys, values = sizes["kv_b_proj"][0], sizes["o_proj"][0] // heads
    rotary, plain = sizes["kv_a_proj_with_mqa"][1] - keys, sizes["kv_b_proj"][1] // heads - values
    return dict(zip(LATENT, (sizes["q_a_proj"][1], keys, rotary, plain, values), strict=True))


def _leaves(module: Any, owner: str, experts: int = 0) -> tuple[dict[str, Any], list[int]]:
    """The linear layers under ``module`` by name, and the widths of its norms; small vectors are left out.

    ``experts``: so many, whose weights lie in one tensor, and a router's of as many rows, are no layers.
    """
    linears, widths = dict[str, Any](), list[int]()
    for path, leaf in module.named_modules():
        kind = _kind(leaf)
        if kind == "Linear":
            linears[path] = leaf
        elif kind == "norm":
            widths.append(leaf.weight.numel())
        elif kind and any(
            parameter.squeeze().dim() > 1 and not (experts and parameter.shape[0] == experts)
            for parameter in leaf.parameters(recurse=False)
        ):
            raise ValueError(f"{owner} holds {path or 'itself'} ({kind}), which the planner does not know")
    return linears, widths


def _mlp(module: Any, hidden: int, config: Any, owner: str) -> tuple[bool, int, Experts | None, bool]:
    """(gated, width, experts, bias) of an MLP or of a mixture of them."""
    from torch import nn

    lists = [child for child in module.modules() if isinstance(child, nn.ModuleList) and len(child) > 1]
    stacked = [weight for weight in module.parameters() if weight.dim() == 3]
    if not lists and not stacked:
        linears = list(_leaves(module, owner)[0].values())
        down = next((linear for linear in linears if _sizes(linear)[0] != hidden), linears[-1])
        width, out = _sizes(down)
        into = sum(_sizes(linear)[1] for linear in linears if linear is not down)
        if out != hidden or into not in (width, 2 * width):
            raise ValueError(f"{owner} has an MLP ({type(module).__name__}) that is not two or three layers")
        return into == 2 * width, width, None, getattr(down, "bias", None) is not None
    per_token = next((getattr(config, field) for field in _PER_TOKEN if getattr(config, field, None)), 0)
    if not per_token:
        raise ValueError(f"{owner} is a mixture of experts, and no field says how many a token goes through")
    count = len(lists[0]) if lists else stacked[0].shape[0]
    if lists:
        each = {_mlp(one, hidden, config, owner) for one in lists[0]}
        gated, width, _, bias = next(iter(each))
    else:  # their weights lie in one tensor, those into the MLP's width and those out of it
        each = {(True, sum(weight.numel() for weight in stacked) // (3 * hidden * count), None, False)}
        gated, width, _, bias = next(iter(each))
    if len(lists) > 1 or len(each) > 1 or not gated:
        raise ValueError(f"{owner} has experts that differ, or that are not gated; they are not modelled")
    routed = set(lists[0].modules()) if lists else set()
    _leaves(module, owner, count)
    beside = [leaf for leaf in module.modules() if _kind(leaf) == "Linear" and leaf not in routed]
    shared = [linear for linear in beside if _sizes(linear)[1] not in (1, count)]  # others choose experts
    return True, width, Experts(count, per_token, width, _sizes(shared[-1])[0] if shared else 0), bias


def _check_count(workload: Workload, model: Any, name: str) -> None:
    """The account is right if it has as many parameters as the model."""
    stored = sum(parameter.numel() for parameter in model.parameters())
    if abs(workload.parameters - stored) > _MOST_MISSED * stored:
        raise ValueError(
            f"model {name!r}: model_type={model.config.model_type!r} builds a {type(model).__name__} of"
            f" {stored / 1e9:.3f} billion parameters, of which {workload.parameters / 1e9:.3f} are understood"
        )
