"""Plain models: LitGPT's GPT from a configuration's name or file, with single fields overridden, built without storage.

``tiny`` is Axo's own addition: a Llama-like model (RMSNorm, SwiGLU, rotary embedding, grouped queries) over bytes,
small enough for eight ranks on a laptop. Sources: ``litgpt.config``. Nothing here knows of a grid; sizes are known
without torch.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

import yaml

from axo import files
from axo.perf.readers import litgpt_fields, litgpt_module

if TYPE_CHECKING:
    from litgpt.config import Config
    from litgpt.model import GPT

TINY = "tiny"
_TINY: dict[str, Any] = {
    "name": TINY,
    "block_size": 1024,
    "n_layer": 4,
    "n_embd": 128,
    "n_head": 8,
    "n_query_groups": 4,
    "vocab_size": 256,
    "padded_vocab_size": 256,
    "norm_class_name": "RMSNorm",
    "mlp_class_name": "LLaMAMLP",
    "intermediate_size": 384,
    "rotary_percentage": 1.0,
    "parallel_residual": False,
    "bias": False,
}


_COUNTS = (
    "block_size", "n_layer", "n_embd", "n_head", "n_query_groups", "head_size", "vocab_size", "padded_vocab_size",
    "intermediate_size", "moe_intermediate_size", "n_expert_per_token",
)  # fmt: skip
_MOST = 10**8
_CLASSES = {
    "norm_class_name": ("LayerNorm", "RMSNorm"),
    "mlp_class_name": ("GptNeoxMLP", "LLaMAMLP", "GemmaMLP", "LLaMAMoE"),
}


def resolve(model: str, overrides: Mapping[str, Any] | None = None) -> Config:
    """Return the configuration that ``model`` names, with ``overrides`` applied.

    Args:
        model: ``tiny``, a LitGPT name (``pythia-160m``, ``meta-llama/Llama-3.2-1B``) or a ``.yaml`` / ``.json`` file.
        overrides: Fields of ``litgpt.Config`` and their values; text is read as YAML (``"4"`` is 4, ``"null"`` is
        None).

    Raises:
        ValueError: The name or a field is unknown, the file is missing or malformed, or LitGPT refuses the values.
    """
    fields = dict(_from_file(Path(model)) if names_file(model) else _from_name(model))
    fields.update({key: _parse(key, value) for key, value in (overrides or {}).items()})
    fields.setdefault("name", Path(model).stem)
    _check_fields(model, fields)
    try:
        config: Config = litgpt_module("litgpt.config").Config(**fields)
    except (AssertionError, TypeError, ValueError, ZeroDivisionError) as error:
        reason = str(error) or _explain(fields)
        raise ValueError(f"model {model!r}: LitGPT refuses this configuration: {reason}") from error
    if config.rope_n_elem % 2:
        raise ValueError(
            f"model {model!r}: {config.rope_n_elem} rotary elements of a head are odd; use an even head_size"
        )
    return config


def names_file(model: str) -> bool:
    """Whether ``model`` is the name of a file."""
    return Path(model).suffix.lower() in {".yaml", ".yml", ".json"} or os.path.isfile(model)


def check_sequence(config: Config, seq_len: int) -> None:
    """Check that the model can attend to ``seq_len`` tokens.

    Raises:
        ValueError: It cannot.
    """
    if not 1 <= seq_len <= config.block_size:
        raise ValueError(
            f"model {config.name!r}: seq-len={seq_len} is not in [1, block_size={config.block_size}]; "
            f"use a shorter sequence, or --model-override block_size={seq_len}"
        )


@dataclass(frozen=True)
class ModelSize:
    """Layers, width, vocabulary (padded) and the count of parameters."""

    layers: int
    hidden: int
    vocabulary: int
    parameters: int


def build_empty(config: Config) -> GPT:
    """Return the model on the meta device: shapes, no storage."""
    import torch
    from litgpt.model import GPT

    with torch.device("meta"):
        return GPT(config)


def shape_of(config: Config) -> ModelSize:
    """Return the sizes of ``config``; parameters are counted on a model without storage."""
    parameters = sum(parameter.numel() for parameter in build_empty(config).parameters())
    assert config.padded_vocab_size is not None
    return ModelSize(config.n_layer, config.n_embd, config.padded_vocab_size, parameters)


def _from_file(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"model: the file {path} {'is no file' if path.exists() else 'does not exist'}")
    try:
        loaded = files.parse_yaml(files.read_text(path))  # YAML holds JSON
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"model: {path} is neither YAML nor JSON: {error}") from error
    if not isinstance(loaded, dict):
        raise ValueError(f"model: {path} holds no fields; write lines such as 'n_layer: 4' (see litgpt.Config)")
    return loaded


def _from_name(name: str) -> dict[str, Any]:
    if name == TINY:
        return _TINY
    fields = litgpt_fields(name)
    if fields is not None:
        return fields
    litgpt = litgpt_module("litgpt.config")
    by_lower = {known.lower(): known for known in [TINY, *litgpt.name_to_config]}
    near = difflib.get_close_matches(name.rsplit("/", 1)[-1].lower(), by_lower, n=4, cutoff=0.4)
    hint = f"; the nearest are {', '.join(by_lower[match] for match in near)}" if near else ""
    raise ValueError(f"model {name!r} is neither a LitGPT configuration nor a .yaml or .json file{hint}")


def _parse(field: str, value: Any) -> Any:
    try:
        return files.parse_yaml(value) if isinstance(value, str) else value
    except (ValueError, yaml.YAMLError) as error:
        problem = (
            str(error) if isinstance(error, ValueError) else getattr(error, "problem", None) or "it ends too early"
        )
        raise ValueError(f"model: {field}={files.shown(value)} is not YAML: {problem}") from None


def _check_fields(model: str, fields: Mapping[str, Any]) -> None:
    types = get_type_hints(litgpt_module("litgpt.config").Config)
    for key, value in fields.items():
        if key not in types:
            near = difflib.get_close_matches(key, types, n=3, cutoff=0.5)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise ValueError(f"model {model!r}: litgpt.Config has no field {key!r}{hint}")
        wrong = f"model {model!r}: {key}={value!r} is not"
        wanted = get_args(types[key]) or (types[key],)
        if value is None and type(None) in wanted:
            continue
        if int in wanted and float not in wanted and (isinstance(value, bool) or not isinstance(value, int)):
            raise ValueError(f"{wrong} a whole number")
        if float in wanted and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ValueError(f"{wrong} a number")
        if wanted == (bool,) and not isinstance(value, bool):
            raise ValueError(f"{wrong} true or false")
        if key in _COUNTS and not 1 <= value <= _MOST:
            raise ValueError(f"{wrong} a count from 1 to {_MOST}")
        if key in _CLASSES and value not in _CLASSES[key]:
            raise ValueError(f"{wrong} known; use one of {', '.join(_CLASSES[key])}")
    if not 0 <= fields.get("rotary_percentage", 0.25) <= 1:
        raise ValueError(f"model {model!r}: rotary_percentage={fields['rotary_percentage']} is not in [0, 1]")


def _explain(fields: Mapping[str, Any]) -> str:
    heads, width = fields.get("n_head", 32), fields.get("n_embd", 4096)
    groups = fields.get("n_query_groups")
    if fields.get("head_size") is None and width % heads:
        return f"n_embd={width} does not divide over n_head={heads}"
    if groups and heads % groups:
        return f"n_head={heads} does not divide over n_query_groups={groups}"
    return "its values do not fit together (see litgpt.Config)"
