"""Types of options, as the annotations of a litgpt command say them, and what data modules take: read as source.

litgpt's own parser reads all of it again; what is told here is told in one line, before LitGPT is imported.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from types import NoneType
from typing import Any, Literal, get_args, get_type_hints

from jsonargparse import Namespace

from axo.perf.readers import litgpt_file, litgpt_module

_OWN_DATA = ("LocalText",)


def check(function: ast.FunctionDef, defaults: dict[str, Any], options: Namespace) -> None:
    """Refuse text where a number, a switch or one of several words is wanted, and data modules that do not exist.

    Args:
        function: The source of the command's function.
        defaults: Its parameters with their defaults.
        options: What was given.

    Raises:
        ValueError: It names the option, its value, and what it wants.
    """
    for name, kinds in _kinds(function, defaults):
        value = options.get(name)
        wanted = _wanted(kinds, value)
        if wanted:
            raise ValueError(f"litgpt: --{name} {value} is not {wanted}")
    if isinstance(options.get("data"), Namespace):
        _check_data(options.data.class_path)
        _check_made_with(options.data.class_path.removeprefix("litgpt.data."), options.data.init_args)


def _kinds(function: ast.FunctionDef, defaults: dict[str, Any]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Options and the types that each takes."""
    for name, default in defaults.items():
        if is_dataclass(default):
            hints = get_type_hints(type(default))
            yield from ((f"{name}.{each.name}", get_args(hints[each.name]) or (hints[each.name],))
                        for each in fields(default))  # fmt: skip
    known = {"Literal": Literal, "int": int, "float": float, "bool": bool} | vars(litgpt_module("litgpt.types"))
    for arg in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs):
        try:
            kind = eval(ast.unparse(arg.annotation), {"__builtins__": {}}, known)  # type: ignore[arg-type]
        except (NameError, AttributeError, TypeError):  # a class of LitGPT's, or text
            continue
        words = getattr(kind, "__origin__", None) is Literal
        yield arg.arg, (kind,) if words else get_args(kind) or (kind,)


def _wanted(kinds: tuple[Any, ...], value: Any) -> str:
    """What ``value`` is not, as words; "": it may be right."""
    words = [word for kind in kinds if getattr(kind, "__origin__", None) is Literal for word in get_args(kind)]
    plain = {kind for kind in kinds if isinstance(kind, type)}
    part = isinstance(value, float) and not value.is_integer() and float not in plain
    if not (isinstance(value, str) or part) or value in words or not plain <= {int, float, bool, NoneType}:
        return ""
    if isinstance(value, str):
        with contextlib.suppress(ValueError):  # litgpt's parser knows numbers that YAML does not, such as 1e3
            float(value)
            return ""
    said = {int: "a whole number", float: "a number", bool: "true or false"}
    shown = [said[kind] for kind in (int, float, bool) if kind in plain]
    shown += [f"one of {', '.join(map(str, filter(None, words)))}"] if words else []
    return " or ".join(shown)


def _check_data(name: str) -> None:
    tree = ast.parse(litgpt_file("litgpt.data.__init__").read_text(encoding="utf-8"))
    listing = next(node.value for node in tree.body if isinstance(node, ast.Assign) and node.targets[0].id == "__all__")  # type: ignore[attr-defined]
    known = [each for each in ast.literal_eval(listing) if each[0].isupper() and not each.startswith(("DataM", "SFT"))]
    known += _OWN_DATA
    if name.isidentifier() and name not in known:
        near = difflib.get_close_matches(name, known, 1)
        meant = f"did you mean {near[0]}?" if near else f"use one of {', '.join(known)}"
        raise ValueError(f"litgpt: --data {name} is no data module of LitGPT's; {meant}")


def _check_made_with(name: str, given: Namespace) -> None:
    """Refuse options that a data module of LitGPT's does not have, or lacks."""
    known = _options_of(name)
    if not known:
        return
    for option in vars(given):
        if option.split(".")[0] not in known:
            near = difflib.get_close_matches(option, known, 1)
            meant = f"did you mean {near[0]}?" if near else f"use one of {', '.join(known)}"
            raise ValueError(f"litgpt: --data.{option} is no option of {name}; {meant}")
    for option, wanted in known.items():
        if wanted and given.get(option) is None and name != "JSON":  # records.check says what to name
            raise ValueError(f"litgpt: --data.{option} is missing; {name} wants it")


def _options_of(name: str) -> dict[str, bool]:
    """The fields of a data module of LitGPT's, a dataclass, and whether each must be given. Of another class: none."""
    tree = ast.parse(litgpt_file("litgpt.data.__init__").read_text(encoding="utf-8"))
    imports = (node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module)
    module = next((node.module for node in imports for alias in node.names if alias.name == name), None)
    if module in (None, "litgpt.data.base"):
        return {}
    source = ast.parse(litgpt_file(module).read_text(encoding="utf-8")).body
    made = next(node for node in source if isinstance(node, ast.ClassDef) and node.name == name)
    known: dict[str, bool] = {}
    for base in made.bases:
        known |= _options_of(ast.unparse(base).rpartition(".")[2])
    for node in made.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            said = {each.arg: each.value for each in node.value.keywords} if isinstance(node.value, ast.Call) else {}
            if ast.unparse(said.get("init", ast.Constant(True))) == "True":
                known[node.target.id] = node.value is None
    return known
