"""Plain models: LitGPT's GPT from a configuration's name or file, with single fields overridden, built without storage.

``tiny`` is Axo's own addition: a Llama-like model (RMSNorm, SwiGLU, rotary embedding, grouped queries) over bytes,
small enough for eight ranks on a laptop. Sources: ``litgpt.config``. Nothing here knows of a grid.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch
import yaml
from litgpt.config import Config, configs, name_to_config
from litgpt.model import GPT

from axo import files
from axo.perf.readers import named, nearest

TINY: dict[str, Any] = {
    "name": "tiny", "block_size": 1024, "n_layer": 4, "n_embd": 128, "n_head": 8, "n_query_groups": 4,
    "vocab_size": 256, "padded_vocab_size": 256, "norm_class_name": "RMSNorm", "mlp_class_name": "LLaMAMLP",
    "intermediate_size": 384, "rotary_percentage": 1.0, "parallel_residual": False, "bias": False,
}  # fmt: skip
_MAY_BE_0 = ("n_expert", "n_shared_expert", "n_expert_per_token", "first_k_dense_replace", "sliding_window_size")
_MOST = 10**8  # of what memory is taken for
_ANY = ("rope_base",)
_TYPES = get_type_hints(Config)


def resolve(model: str, overrides: Mapping[str, Any] | None = None) -> Config:
    """Return the configuration that ``model`` names, with ``overrides`` applied.

    Args:
        model: ``tiny``, a LitGPT name (``pythia-160m``, ``meta-llama/Llama-3.2-1B``) or a ``.yaml`` / ``.json`` file.
        overrides: Fields of ``litgpt.Config`` and their values; text is read as YAML (``"4"`` is 4, ``"null"`` is
        None).

    Raises:
        ValueError: The name or a field is unknown, the file is missing or malformed, or LitGPT refuses the values.
    """
    is_file = Path(model).suffix.lower() in {".yaml", ".yml", ".json"} or os.path.isfile(model)
    fields = {"name": Path(model).stem} | (_from_file(Path(model)) if is_file else _from_name(model))
    fields |= {key: _parse(key, value) for key, value in (overrides or {}).items()}
    for key, value in fields.items():
        _check_field(f"model {model!r}", key, value)
    try:
        config = Config(**fields)
    except (AssertionError, TypeError, ValueError, ZeroDivisionError) as error:
        reason = str(error) or _explain(fields)
        raise ValueError(f"model {model!r}: LitGPT refuses this configuration: {reason}") from error
    if config.rope_n_elem % 2:
        raise ValueError(
            f"model {model!r}: {config.rope_n_elem} rotary elements of a head are odd; use an even head_size"
        )
    return config


def build_empty(config: Config) -> GPT:
    """Return the model on the meta device: shapes, no storage."""
    with torch.device("meta"):
        return GPT(config)


def count_parameters(config: Config) -> int:
    """The parameters of a whole model."""
    return sum(parameter.numel() for parameter in build_empty(config).parameters())


def _from_file(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"model: the file {path} {'is no file' if path.exists() else 'does not exist'}")
    try:
        fields = files.parse_yaml(files.read_text(path))  # YAML holds JSON
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"model: {path} is neither YAML nor JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"model: {path} holds no fields; write lines such as 'n_layer: 4' (see litgpt.Config)")
    return fields


def _from_name(name: str) -> dict[str, Any]:
    """The fields of LitGPT's configuration of that name, LitGPT's or Hugging Face's."""
    fields = TINY if name == "tiny" else named(name, configs)
    if fields is None:
        near = nearest(name, [*name_to_config, "tiny"])
        raise ValueError(f"model {name!r} is neither a LitGPT configuration nor a .yaml or .json file{near}")
    return fields


def _parse(field: str, value: Any) -> Any:
    try:
        return files.parse_yaml(value) if isinstance(value, str) else value
    except (ValueError, yaml.YAMLError) as error:
        plain = str(error) if isinstance(error, ValueError) else getattr(error, "problem", None)
        raise ValueError(f"model: {field}={files.shown(value)} is not YAML: {plain or 'it ends too early'}") from None


def _check_field(owner: str, key: str, value: Any) -> None:
    """Check a field's value by the type that ``litgpt.Config`` gives it: LitGPT itself fails on it much later."""
    if key not in _TYPES:
        near = " or ".join(difflib.get_close_matches(key.lower(), _TYPES, n=4, cutoff=0.4))
        raise ValueError(f"{owner}: litgpt.Config has no field {key!r}" + (f"; did you mean {near}?" if near else ""))
    words = get_args(_TYPES[key]) if get_origin(_TYPES[key]) is Literal else ()
    kinds = () if words else get_args(_TYPES[key]) or (_TYPES[key],)
    whole, least = isinstance(value, int) and not isinstance(value, bool), 0 if key in _MAY_BE_0 else 1
    counts = whole and least <= value and (value <= _MOST or key in _ANY)
    if value is None and NoneType in kinds:
        return
    for applies, right, wanted in (
        (bool(words), value in words, f"known; use one of {', '.join(words)}"),
        (bool in kinds, isinstance(value, bool), "true or false"),
        (float in kinds, whole or isinstance(value, float), "a number"),
        (int in kinds, whole, "a whole number"),
        (int in kinds, counts, f"a count from {least} to {_MOST}"),
        (key == "rotary_percentage", isinstance(value, int | float) and 0 <= value <= 1, "in [0, 1]"),
    ):
        if applies and not right:
            raise ValueError(f"{owner}: {key}={value!r} is not {wanted}")


def _explain(fields: Mapping[str, Any]) -> str:
    """What LitGPT's bare assertions do not say."""
    heads, width = fields.get("n_head", Config.n_head), fields.get("n_embd", Config.n_embd)
    groups = fields.get("n_query_groups")
    if fields.get("head_size") is None and width % heads:
        return f"n_embd={width} does not divide over n_head={heads}"
    if groups and heads % groups:
        return f"n_head={heads} does not divide over n_query_groups={groups}"
    return "its values do not fit together (see litgpt.Config)"
