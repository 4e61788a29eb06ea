"""The one parser of a litgpt command's arguments: LitGPT's own, with Axo's options; and its errors in one line.

jsonargparse says of a wrong value everything that it tried, over many lines, or prints its usage. Here the option, its
value and what it wants are taken from that, and for a name that does not exist the nearest one is looked up.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import importlib
import inspect
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import yaml

from axo import files
from axo.integrations.litgpt import options as axo_options
from axo.integrations.litgpt.options import Options

_FOR_OTHER_METRICS = ("transformers", "matplotlib")
_WORDS = {int: "a whole number", float: "a number", bool: "true or false"}


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


def folder_of(given: Any) -> Path:
    """Where litgpt looks for a folder: at that place, or if nothing is there in ``checkpoints/``."""
    path = Path(str(given))
    below = Path("checkpoints", path)
    return below if not path.is_dir() and not path.is_absolute() and below.exists() else path


def read_yaml(file: Path) -> Any:
    """What a small YAML file of a checkpoint's folder holds; nothing in it runs code.

    Raises:
        ValueError: It is not there, or no YAML.
    """
    try:
        return files.parse_yaml(files.read_text(file))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"litgpt: {file} cannot be read: {' '.join(str(error).split())}") from None


@dataclasses.dataclass
class Parsed:
    """The arguments of a command, read.

    Attributes:
        own: Axo's options.
        litgpt: LitGPT's, as its own parser has them.
    """

    command: str
    parser: Any
    own: Options
    litgpt: Any

    def as_yaml(self) -> str:
        """LitGPT's options as it writes them beside a checkpoint."""
        return str(self.parser.dump(self.litgpt))

    def values(self, function: Callable[..., Any]) -> dict[str, Any]:
        """The arguments of ``function``, with the classes among them made.

        Raises:
            ValueError: A class refuses what it is made with.
        """
        try:
            values = self.parser.instantiate_classes(self.litgpt)
        except (OSError, TypeError, ValueError, LookupError) as error:
            raise ValueError(f"litgpt: {self.command}: {_innermost(str(error))}") from None
        parameters = inspect.signature(function).parameters
        return {key: value for key, value in values.items(branches=True) if key in parameters}


def parse(command: str, function: Callable[..., Any], arguments: list[str]) -> Parsed:
    """Read what follows the name of a command.

    Args:
        command: Its name, for messages.
        function: LitGPT's, which :func:`load` has imported.

    Raises:
        ValueError: One line: the option, what it was given, and what it wants.
    """
    from jsonargparse import capture_parser
    from litgpt.utils import CLI

    from axo.integrations.litgpt import text_data as text_data  # so that --data LocalText is found

    parser = capture_parser(lambda: CLI(function))
    parser.prog = f"axo litgpt {command}"
    parser.exit_on_error = False  # it would print its usage, forty lines
    axo_options.add_to(parser)
    words = _with_files(arguments)
    try:
        parsed = parser.parse_args(words)
    except (argparse.ArgumentError, TypeError, ValueError) as error:  # the last two: of a class that an option names
        raise ValueError(f"litgpt: {_said(command, function, parser, arguments, str(error))}") from None
    return Parsed(command, parser, axo_options.take_from(parsed), parsed)


def _with_files(arguments: list[str]) -> list[str]:
    """``--model_config FILE`` with what the file holds: jsonargparse wants the fields themselves.

    Raises:
        ValueError: It holds none, or the file of ``--config`` is not there.
    """
    replaced = list(arguments)
    for index, argument in enumerate(arguments):
        option, equals, value = argument.partition("=")
        at = index if equals else index + 1
        value = value if equals else "".join(arguments[at : at + 1])
        text = set("{:\n") & set(value)
        if option not in ("--config", "--model_config") or (option == "--model_config" and text):
            continue
        if not text and not Path(value).is_file():
            raise ValueError(f"litgpt: {option} {value} is not a file")
        try:
            content = files.parse_yaml(value if text else files.read_text(Path(value)))
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise ValueError(f"litgpt: {option} {value} is not YAML: {' '.join(str(error).split())}") from None
        if option == "--config":
            continue  # the parser reads it, now that it is known to be small
        if not isinstance(content, dict):
            raise ValueError(f"litgpt: --model_config {value} holds no fields of a model, such as n_layer: 4")
        replaced[at] = f"{option}={json.dumps(content)}" if equals else json.dumps(content)
    return replaced


def _said(command: str, function: Callable[..., Any], parser: Any, arguments: list[str], error: str) -> str:
    """The parser's words, which may be of many lines, as one."""
    if unknown := re.search(r"Unrecognized arguments: --([^\s=]+)", error):
        return f"{command} has no option --{unknown[1]}{_nearest(command, parser, unknown[1])}"
    if missing := re.search(r'Validation failed: Key "(\w+)" is required', error.splitlines()[0]):
        first = next(iter(inspect.signature(function).parameters))
        place = ", its first argument" if missing[1] == first else ""
        return f"{command} wants a {missing[1]}{place}; axo litgpt {command} --help tells more"
    keys = re.findall(r'Parser key "([^"]+)"', error)
    if not keys and (unknown := re.search(r"Key '([\w.]+)' is not expected", error)):  # of a configuration file
        return f"{command} has no option --{unknown[1]}{_nearest(command, parser, unknown[1])}"
    if not keys:
        told = _innermost(error) if "Does not validate" in error else " ".join(error.split())
        told = told.replace("Problems parsing config", "--config: not YAML")
        return re.sub(r"^argument (--[\w-]+):", r"\1", told)
    option = "--" + ".".join(keys)
    given = re.findall(r"(?:Got value|Given value|val=|Expected a dot import path string): *'?([^\n']*)", error)
    value = given[0].strip() if given else _after(option, arguments)
    if keys[0] == "data" and (told := _of_data(error)):
        return told
    action = next((each for each in parser._actions if each.dest == keys[0]), None)
    kind = getattr(action, "_typehint", None)
    if len(keys) == 1 and (wanted := _wanted(kind)):
        return f"{option} {value} is not {wanted}"
    if expected := re.findall(r"Expected a (?:<class '(\w+)'>)\. Got value: (.*)", error):
        names = {kind.__name__: words for kind, words in _WORDS.items()}
        return f"{option} {expected[-1][1]} is not {names.get(expected[-1][0], expected[-1][0])}"
    return f"{command}: {option}{f' {value}' if value else ''}: {_innermost(error)}"


def _after(option: str, arguments: list[str]) -> str:
    """What follows an option on the command line."""
    words = [word for argument in arguments for word in argument.split("=", 1)]
    return words[words.index(option) + 1] if option in words[:-1] else ""


def _innermost(error: str) -> str:
    lines = [line.strip(" -") for line in error.splitlines() if line.strip(" -")]
    tried = ("Parser key", "Subtypes", "Errors", "Given", "Expected a <", "Does not validate", "Problem with given")
    told = [line for line in lines if not line.startswith(tried)]
    return told[-1] if told else lines[-1]


def _nearest(command: str, parser: Any, name: str) -> str:
    every = [option[2:] for option in parser._option_string_actions if option.startswith("--")]
    last = name.rpartition(".")[2]
    near = difflib.get_close_matches(name, every, 1) or [other for other in every if other.rpartition(".")[2] == last]
    return f"; did you mean --{near[0]}?" if near else f"; axo litgpt {command} --help lists all"


def _of_data(error: str) -> str:
    """What is wrong about ``--data`` and what its module is made with; "": something else."""
    import litgpt.data

    from axo.integrations.litgpt.text_data import LocalText

    kinds: dict[str, Any] = {name: getattr(litgpt.data, name) for name in litgpt.data.__all__} | {
        "LocalText": LocalText
    }
    modules = {name: kind for name, kind in kinds.items() if hasattr(kind, "train_dataloader") and name != "DataModule"}
    if named := re.search(r"(?:Expected a dot import path string|Unexpected import path format): (\S+)", error):
        return f"--data {named[1]} is no data module of LitGPT's; {meant(named[1], modules)}"
    of_module = re.search(r"class_path '(?:[\w.]+\.)?(\w+)'", error)
    if of_module is None:
        return ""
    name = of_module[1]
    if unknown := re.search(r"Key '([\w.]+)' is not expected", error):
        options = inspect.signature(modules.get(name, kinds["DataModule"])).parameters
        return f"--data.{unknown[1]} is no option of {name}; {meant(unknown[1], options)}"
    if missing := re.search(r'Key "(\w+)" is required', error):
        return f"--data.{missing[1]} is missing; {name} wants it"
    return ""


def meant(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), 1)
    return f"did you mean {near[0]}?" if near else f"use one of {', '.join(known)}"


def _wanted(kind: Any) -> str:
    """What an option of this type wants, as words; "": they would say too little."""
    kinds = [kind] if get_origin(kind) is Literal or not get_args(kind) else list(get_args(kind))
    words = [str(word) for each in kinds if get_origin(each) is Literal for word in get_args(each) if word is not None]
    plain = {each for each in kinds if get_origin(each) is not Literal}
    if not plain <= {*_WORDS, NoneType} or not (words or plain - {NoneType}):
        return ""
    shown = [text for each, text in _WORDS.items() if each in plain]
    return " or ".join([*shown, *([f"one of {', '.join(words)}"] if words else [])])
