"""Turn what a user has into a `Workload`: a name from the papers, a LitGPT configuration, a config.json.

    read("gpt-80b")               Table II of "Democratizing AI"; read("unet-1b"): Table II of "A 4D Hybrid Algorithm"
    read("pythia-1.4b")           a LitGPT name; only the file that has its list is imported, so no torch
    read("path/config.json")      Hugging Face: what transformers' own class builds (``axo.perf.hugging_face``)
    read("path/model_config.yaml")    LitGPT's own file

Mixtures of experts count as if every expert had its even share of the rows.
"""

from __future__ import annotations

import difflib
import importlib.util
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from axo import files
from axo.perf.workload import Experts, Latent, Workload, gpt, sample_length, unet

_DATA = Path(__file__).parent / "data"
_USE = "use a model of the papers (gpt-5b, unet-1b), a LitGPT name, a config.json or a model_config.yaml"
_LATENT = ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")  # of Latent
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@lru_cache(maxsize=1)
def papers() -> dict[str, Any]:
    """Return the papers' numbers (``data/papers.yaml``)."""
    return yaml.load((_DATA / "papers.yaml").read_text(), Loader=_LOADER)


def known() -> list[str]:
    """Return the model names of the papers."""
    numbers = papers()
    return [f"gpt-{name.lower()}" for name in numbers["models"]] + [
        f"unet-{name.lower()}" for name in numbers["unet_channels_gpus"]
    ]


def read(name: str, *, seq_length: int | None = None) -> Workload:
    """Read a model by name or file.

    Args:
        name: See the module's docstring.
        seq_length: Tokens of a sample; None: 2048, or the model's longest if that is less.

    Raises:
        ValueError: Unknown name, a file or model that cannot be read, or a length that is none.
    """
    if seq_length is not None and seq_length < 1:
        raise ValueError(f"sequence length {seq_length} is not at least 1")
    path = Path(name)
    if path.suffix in (".json", ".yaml", ".yml"):
        return _from_file(path, seq_length)
    return _from_papers(name.lower(), seq_length) if name.lower() in known() else _from_litgpt_name(name, seq_length)


def _from_papers(name: str, seq_length: int | None) -> Workload:
    family, size = name.split("-")
    if family == "unet":
        if seq_length not in (None, 1024):
            raise ValueError(f"model {name!r} works on images of 32 x 32 = 1024 pixels; --seq does not apply")
        return unet(name, channels=papers()["unet_channels_gpus"][size.upper()][0])
    layers, hidden, heads = papers()["models"][size.upper()]
    return gpt(name, layers=layers, hidden=hidden, heads=heads, seq_length=seq_length or 2048)


def _from_file(path: Path, seq_length: int | None) -> Workload:
    if not path.is_file():
        raise ValueError(f"model file {str(path)!r} does not exist")
    try:
        text = files.read_text(path)
        fields = files.parse_json(text) if path.suffix == ".json" else files.parse_yaml(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"model file {path}: {' '.join(str(error).split())}") from None
    if not isinstance(fields, Mapping):
        raise ValueError(f'model file {path}: expected fields such as "hidden_size", got a {type(fields).__name__}')
    name = path.parent.name or path.stem
    try:
        if "n_embd" in fields and "padded_vocab_size" in fields:
            read = from_litgpt({"name": name, **fields}, seq_length=seq_length)
            return replace(read, trained_as=str(path), file=str(path))
        from axo.perf import hugging_face

        return replace(hugging_face.read(fields, name=files.cut(name, 200), seq_length=seq_length), file=str(path))
    except (ValueError, TypeError, ArithmeticError, LookupError, AttributeError) as error:
        raise ValueError(f"model file {path}: {error}") from None


def _from_litgpt_name(name: str, seq_length: int | None) -> Workload:
    litgpt = _litgpt_config()
    fields: dict[str, Any] = {}
    for one in litgpt.configs if litgpt is not None else ():
        theirs, org = one["hf_config"].get("name"), one["hf_config"].get("org")
        if name == one["name"] or (not fields and name in (theirs, f"{org}/{theirs}", f"{org}/{one['name']}")):
            fields = dict(one)
    if litgpt is None or not fields:
        names = [*known(), *(litgpt.name_to_config if litgpt is not None else ())]
        missing = "" if litgpt is not None else " (LitGPT is not installed: pip install 'axo[litgpt]')"
        raise ValueError(f"model {name!r} is not known{nearest(name, names)}; {_USE}{missing}")
    return replace(from_litgpt(vars(litgpt.Config(**fields)), seq_length=seq_length), trained_as=str(fields["name"]))


def nearest(name: str, names: Iterable[str]) -> str:
    """The middle of a sentence that refuses a model: up to four names that may have been meant; empty: none is near."""
    by_lower = {each.lower(): each for each in names}
    near = difflib.get_close_matches(name.rsplit("/", 1)[-1].lower(), by_lower, n=4, cutoff=0.4)
    return f"; the nearest are {', '.join(by_lower[match] for match in near)}" if near else ""


@lru_cache(maxsize=1)
def _litgpt_config() -> Any:
    """The module ``litgpt.config`` alone, since the rest takes many seconds to import; None: there is no LitGPT."""
    if "litgpt.config" in sys.modules:
        return sys.modules["litgpt.config"]
    package = importlib.util.find_spec("litgpt")
    if package is None or not package.submodule_search_locations:
        return None
    file = Path(package.submodule_search_locations[0], "config.py")
    spec = importlib.util.spec_from_file_location("axo_litgpt_config", file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # its dataclass looks for itself there
    spec.loader.exec_module(module)
    return module


def from_litgpt(config: Mapping[str, Any], *, seq_length: int | None = None) -> Workload:
    """Read the fields of a ``litgpt.Config``.

    Raises:
        ValueError: A field is missing.
    """
    name = str(config.get("name") or "litgpt model")
    kind = config.get("mlp_class_name", "GptNeoxMLP")
    latent = config.get("latent_attention")
    layers, stacks = _field(config, name, "n_layer"), list[tuple[int, Experts | None]]()
    if kind == "LLaMAMoE":
        width = _field(config, name, "moe_intermediate_size", "intermediate_size")
        dense = min(layers, _optional(config, name, "first_k_dense_replace"))
        experts = Experts(_field(config, name, "n_expert"), _field(config, name, "n_expert_per_token"), width,
                          width * _optional(config, name, "n_shared_expert"))  # fmt: skip
        stacks = [run for run in ((dense, None), (layers - dense, experts)) if run[0]]
    norm_qk = ("all" if config.get("norm_qk_type") == "olmo2" else "heads") if config.get("norm_qk") else ""
    pre_norms = config.get("norm_1", True) + (config.get("norm_2", True) and not config.get("shared_attention_norm"))
    heads, hidden = _field(config, name, "n_head"), _field(config, name, "n_embd")
    head_size = _optional(config, name, "head_size")
    if not head_size and hidden % heads:
        raise ValueError(f"model {name!r}: {heads} heads do not divide the width {hidden}, and there is no head_size")
    longest = config.get("block_size")
    workload = gpt(
        name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=_optional(config, name, "n_query_groups") or heads,
        head_size=head_size,
        intermediate=_optional(config, name, "intermediate_size"),
        vocab=_optional(config, name, "padded_vocab_size") or _field(config, name, "vocab_size"),
        seq_length=seq_length or sample_length(longest),
        gated=kind in ("LLaMAMLP", "GemmaMLP", "LLaMAMoE"),
        bias=bool(config.get("bias", True)),
        qkv_bias=bool(config.get("attn_bias", False) or config.get("bias", True)),
        head_bias=bool(config.get("lm_head_bias", False)),
        norm="rmsnorm" if config.get("norm_class_name") == "RMSNorm" else "layernorm",
        norms=pre_norms,
        parallel=bool(config.get("parallel_residual", True)),
        post_norms=(bool(config.get("post_attention_norm")), bool(config.get("post_mlp_norm"))),
        norm_qk=norm_qk,
        latent=Latent(*(_field(latent, name, field) for field in _LATENT)) if latent else None,
        stacks=stacks,
        caps=(bool(config.get("attention_logit_softcapping")), bool(config.get("final_logit_softcapping"))),
    )
    turned = int((head_size or hidden // heads) * config.get("rotary_percentage", 0.25))
    sines = 2 * workload.seq_length * turned * (2 if config.get("rope_indices") else 1)  # and cosines
    return replace(workload, longest=longest or 0, tables=sines)


def _field(config: Mapping[str, Any], name: str, *names: str) -> int:
    for field in names:
        value = config.get(field)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
        if value is not None:
            raise ValueError(f"model {name!r}: {field}={files.shown(value)} is not a whole number of at least 1")
    raise ValueError(f"model {name!r}: the configuration has no {' or '.join(names)}")


def _optional(config: Mapping[str, Any], name: str, field: str) -> int:
    """A count that may be missing, null or 0: 0 then."""
    return _field(config, name, field) if config.get(field) else 0
