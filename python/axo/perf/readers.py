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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from axo import files
from axo.perf.workload import Workload, gpt, unet
from axo.perf.workload import from_litgpt as from_litgpt

_DATA = Path(__file__).parent / "data"
_USE = "use a model of the papers (gpt-5b, unet-1b), a LitGPT name, a config.json or a model_config.yaml"
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
    fields = named(name, litgpt.configs) if litgpt is not None else None
    if litgpt is None or fields is None:
        names = [*known(), *(litgpt.name_to_config if litgpt is not None else ())]
        missing = "" if litgpt is not None else " (LitGPT is not installed: pip install 'axo[litgpt]')"
        raise ValueError(f"model {name!r} is not known{nearest(name, names)}; {_USE}{missing}")
    return replace(from_litgpt(vars(litgpt.Config(**fields)), seq_length=seq_length), trained_as=str(fields["name"]))


def named(name: str, configs: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """That of LitGPT's ``configs`` which LitGPT calls so, else the first that Hugging Face does; None: none is."""
    theirs = [(one, one["hf_config"].get("name"), one["hf_config"].get("org")) for one in configs]
    called = [one for one in configs if one["name"] == name]
    called += [one for one, hf, org in theirs if name in (hf, f"{org}/{hf}", f"{org}/{one['name']}")]
    return called[0] if called else None


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
