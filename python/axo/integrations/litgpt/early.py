"""What a litgpt command's arguments say, as far as it can be read without importing LitGPT; and that import.

Names and defaults stand in the signature of the command's function, which is read as source; values are YAML, as for
litgpt's own parser. Wrong input is then refused before anything is imported (``checks``), which takes seconds.

Not here: ``optimizer``, what ``data`` is made with, ``model_config``, and whatever only litgpt's parser understands. It
reads all arguments again, so what is not known here is still known before there are ranks.
"""

from __future__ import annotations

import ast
import difflib
import importlib
from collections.abc import Callable, Container, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import Namespace

from axo import files
from axo.integrations.litgpt import argument_types
from axo.integrations.litgpt.options import NAMES
from axo.perf.readers import litgpt_file, litgpt_module

_FOR_OTHER_METRICS = ("transformers", "matplotlib")
_PARSERS_OWN = {"print_config", "help", "h"}


def folder_of(given: Any) -> Path:
    """Where litgpt looks for a folder: at that place, or if nothing is there in ``checkpoints/``."""
    path = Path(str(given))
    below = Path("checkpoints", path)
    return below if not path.is_dir() and not path.is_absolute() and below.exists() else path


def load(module: str, function: str) -> Callable[..., Any]:
    """Import a command's function.

    LitGPT and Lightning take a few metrics from torchmetrics, which for others imports transformers and matplotlib, a
    third of all that is imported: here it does as where these are not installed.
    """
    from lightning_utilities.core.imports import RequirementCache

    installed = RequirementCache.__bool__

    def is_wanted(requirement: RequirementCache) -> bool:
        return not str(requirement.requirement).startswith(_FOR_OTHER_METRICS) and installed(requirement)

    RequirementCache.__bool__ = is_wanted  # type: ignore[method-assign, assignment]
    try:
        importlib.import_module("torchmetrics")
    finally:
        RequirementCache.__bool__ = installed  # type: ignore[method-assign]
    return getattr(importlib.import_module(module), function)


def read(command: str, module: str, function: str, arguments: list[str]) -> Namespace | None:
    """Read the arguments of a command.

    Args:
        command: Its name, for messages.
        module, function: Where it is.
        arguments: Those of litgpt's, after the command's name.

    Returns:
        As litgpt's parser has it: the parameters of the function, groups such as ``train`` with their fields, defaults
        filled in. None: only litgpt's parser can tell.

    Raises:
        ValueError: An option is not one of the command's or cannot have its value, or the configuration file is not
            there or no YAML.
    """
    parameters = defaults(module, function)
    options, first = Namespace(), next(iter(parameters))
    for name, default in parameters.items():
        options[name] = Namespace(**vars(default)) if is_dataclass(default) else default
    groups = {
        name: {field.name for field in fields(value)} for name, value in parameters.items() if is_dataclass(value)
    }
    may_be_none = {name for name, default in parameters.items() if default is None} - {first}
    for name, text in each_given(arguments, first):
        if name in _PARSERS_OWN or text is None:
            return None
        if name == "config":
            content = _file_of(text)
            if content is None:
                return None
            given = list(_flat(content, groups))
        else:
            value = _value(text)
            a_path = name.startswith("data.") and name.endswith("_path") and value is not None
            if a_path or (name.endswith(("_dir", "_name")) and not (value is None and text and name in may_be_none)):
                value = text
            given = [(name, value)]
        for key, value in given:
            group, _, field = key.partition(".")
            if group not in parameters or (field and field not in groups.get(group, {field})):
                raise ValueError(_unknown(command, key, parameters))
            if not field and (group in groups or (group == "model_config" and isinstance(value, str))):
                return None  # a file, or text
            if group == "data":
                _add_data(options, field, value)
                continue
            if group == "model_config" and not isinstance(options[group], Namespace):
                options[group] = Namespace()
            if group == "model_config" and not field:
                options[group] = value if value is None else Namespace(**value)
            elif not field or group in groups or group == "model_config":
                options[key] = value  # optimizer: nobody asks
    argument_types.check(_function(module, function), parameters, options)
    if options[first] is None:
        raise ValueError(
            f"litgpt: {command} wants a {first}, its first argument; axo litgpt {command} --help tells more"
        )
    train = options.get("train")
    if train and not all(isinstance(train[name], int) for name in ("global_batch_size", "micro_batch_size")):
        return None
    return options


def _add_data(options: Namespace, field: str, value: Any) -> None:
    """What was given of ``data``, as litgpt's parser has it: a class, and what it is made with.

    Named again, a class keeps what it is made with. What is of no such form is left to that parser.
    """
    now = options.get("data")
    if field == "init_args" or not field:
        of_a_class = value if isinstance(value, dict) else {"class_path": value}
        if field:
            of_a_class = {"class_path": now.class_path if isinstance(now, Namespace) else None, "init_args": value}
        kind, made_with = of_a_class.get("class_path"), of_a_class.get("init_args") or {}
        named = isinstance(made_with, dict) and all(isinstance(key, str) for key in made_with)
        if not isinstance(kind, str) or not named or _is_file(kind):
            options["data"] = value
            return
        again = isinstance(now, Namespace) and now.class_path.rpartition(".")[2] == kind.rpartition(".")[2]
        kept = vars(now.init_args) if again else {}
        options["data"] = Namespace(class_path=kind, init_args=Namespace(**(kept | made_with)))
    elif isinstance(now, Namespace):
        now.init_args[field.removeprefix("init_args.")] = value


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except OSError:  # too long for a name: the text of a file
        return False


def _file_of(text: str) -> dict[str, Any] | None:
    """What a configuration file holds; None: ``text`` is none, but an address or the text of one."""
    file = Path(text)
    if not _is_file(text):
        if not set("{:\n") & set(text):
            raise ValueError(f"litgpt: --config {text} is not a file")
        return None
    try:
        content = files.parse_yaml(files.read_text(file))
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"litgpt: --config {text} is not YAML: {' '.join(str(error).split())}") from None
    return content if isinstance(content, dict) else None


def _value(text: str) -> Any:
    """What ``text`` means as YAML; what is none, such as a prompt with two colons, stands for itself."""
    try:
        return files.parse_yaml(text)
    except (yaml.YAMLError, ValueError):
        return text


def defaults(module: str, function: str) -> dict[str, Any]:
    """The parameters of a function in a module's source, in order, with their defaults; without one: None."""
    signature = _function(module, function).args
    args = [*signature.posonlyargs, *signature.args]
    without = len(args) - len(signature.defaults)
    values = [*[None] * without, *signature.defaults, *signature.kw_defaults]
    groups = litgpt_module("litgpt.args")
    known = {name: getattr(groups, name) for name in ("TrainArgs", "EvalArgs", "LogArgs")} | {"Path": Path, "int": int}
    return {
        arg.arg: None if value is None else eval(ast.unparse(value), {"__builtins__": {}}, known)
        for arg, value in zip([*args, *signature.kwonlyargs], values, strict=True)
    }


def _function(module: str, function: str) -> ast.FunctionDef:
    """The source of a function."""
    tree = ast.parse(litgpt_file(module).read_text(encoding="utf-8"))
    return next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function)


def check_command(name: str) -> None:
    """Refuse a command that is none of litgpt's.

    Raises:
        ValueError: It names the nearest one.
    """
    tree = ast.parse(litgpt_file("litgpt.parser_config").read_text(encoding="utf-8"))
    listing = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "parser_commands")
    known = ast.literal_eval(next(node.value for node in listing.body if isinstance(node, ast.Return) and node.value))
    if name not in known:
        near = difflib.get_close_matches(name, known, 1)
        meant = f"did you mean {near[0]}?" if near else "axo litgpt --help lists all"
        raise ValueError(f"litgpt: there is no command {name!r}; {meant}")


def each_given(arguments: list[str], first: str) -> Iterator[tuple[str, str | None]]:
    """Each argument as (name, text); every option of litgpt's has one value. None: it has none."""
    rest = iter(arguments)
    for argument in rest:
        if not argument.startswith("-"):
            yield first, argument
        elif "=" in argument:
            name, _, text = argument.lstrip("-").partition("=")
            yield name, text
        else:
            yield argument.lstrip("-"), next(rest, None)


def _flat(content: dict[str, Any], groups: Container[str]) -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if key in groups and isinstance(value, dict):
            yield from ((f"{key}.{field}", inner) for field, inner in value.items())
        else:
            yield str(key), value


def _unknown(command: str, name: str, defaults: dict[str, Any]) -> str:
    """Words that name the nearest of the command's options."""
    every = list(defaults)
    for group, default in defaults.items():
        every += [f"{group}.{field.name}" for field in fields(default)] if is_dataclass(default) else []
    every += [option.removeprefix("--") for option in NAMES]
    last = name.rpartition(".")[2]
    near = difflib.get_close_matches(name, every, 1) or [other for other in every if other.rpartition(".")[2] == last]
    meant = f"; did you mean --{near[0]}?" if near else f"; axo litgpt {command} --help lists all"
    return f"litgpt: {command} has no option --{name}{meant}"
