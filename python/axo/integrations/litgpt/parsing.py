"""The one parser of a litgpt command's arguments: LitGPT's own, with Axo's options; and its errors in one line.

jsonargparse says of a wrong value everything that it tried, over many lines, or prints its usage. Here the option, its
value and what it wants are taken from that, and for a name that does not exist the nearest one is looked up.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import inspect
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

import yaml

from axo import files
from axo.integrations.litgpt import options as axo_options
from axo.integrations.litgpt.options import Options

if TYPE_CHECKING:
    from litgpt.config import Config

_FOR_OTHER_METRICS = ("transformers", "matplotlib")
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", **axo_options.KINDS}
_WORDS[list] = """a list, such as '["FILE"]'"""

# What was given, in jsonargparse's words.
_GIVEN = (
    r"(?:Got value|Given value|val=|Expected a dot import path string): *'?([^\n']*)"
    r"|Not of type \w+: (?:.*: ')?([^ ']*)"
)


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
        raise ValueError(f"litgpt: {file} cannot be read: {_one_line(error)}") from None


@dataclass
class Parsed:
    """The arguments of a command, read.

    Attributes:
        own: Axo's options.
        litgpt: LitGPT's, as its own parser has them.
    """

    command: str
    function: Callable[..., Any]
    parser: Any
    own: Options
    litgpt: Any

    def as_yaml(self) -> str:
        """LitGPT's options as it writes them beside a checkpoint."""
        return str(self.parser.dump(self.litgpt))

    @cached_property
    def values(self) -> dict[str, Any]:
        """The arguments of the function, with the classes among them made.

        Raises:
            ValueError: A class refuses what it is made with.
        """
        try:
            values = self.parser.instantiate_classes(self.litgpt)
        except (OSError, TypeError, ValueError, LookupError) as error:
            raise ValueError(f"litgpt: {self.command}: {_innermost(str(error))}") from None
        parameters = inspect.signature(self.function).parameters
        return {key: value for key, value in values.items(branches=True) if key in parameters}

    @cached_property
    def model(self) -> Config | None:
        """The model's configuration; None: LitGPT will list models, or the folder does not say.

        Raises:
            ValueError: LitGPT has no model of that name (it would print its list and end as if all were well), or the
                file is no configuration.
        """
        from litgpt.config import Config, name_to_config

        from axo.perf.readers import nearest

        if "checkpoint_dir" in self.litgpt:
            file = folder_of(self.litgpt.checkpoint_dir) / "model_config.yaml"
            try:
                return Config.from_file(file) if file.is_file() else None
            except (yaml.YAMLError, TypeError, AttributeError, UnicodeDecodeError) as error:  # no YAML, or no fields
                raise ValueError(f"litgpt: {file} is no configuration of a model: {_one_line(error)}") from None
        name, given = self.litgpt.model_name, self.values["model_config"]
        try:
            return None if name == "list" and given is None else given or Config.from_name(name)
        except ValueError:
            near = nearest(name, name_to_config)
            raise ValueError(
                f"litgpt: there is no model {name!r}{near}; litgpt pretrain list names all, --model_config takes one of"
                " your own"
            ) from None


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
    return Parsed(command, function, parser, axo_options.take_from(parsed), parsed)


def _with_files(arguments: list[str]) -> list[str]:
    """``--model_config FILE`` with what the file holds: jsonargparse wants the fields themselves.

    Raises:
        ValueError: It holds none, or the file of ``--config`` is not there.
    """
    words, options = list(arguments), ("--config", "--model_config")
    for at, word in enumerate(words):
        option, equals, value = word.partition("=")
        if not equals and words[at - 1] in options and at:
            option, value = words[at - 1], word
        elif option not in options or not equals:
            continue
        is_text = bool(set("{:\n") & set(value))
        if is_text and option == "--model_config":
            continue
        if not is_text and not Path(value).is_file():
            raise ValueError(f"litgpt: {option} {value} is not a file")
        try:
            content = files.parse_yaml(value if is_text else files.read_text(Path(value)))
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise ValueError(f"litgpt: {option} {value} is not YAML: {_one_line(error)}") from None
        if option == "--config":
            continue  # the parser reads it, now that it is known to be small
        if not isinstance(content, dict):
            raise ValueError(f"litgpt: --model_config {value} holds no fields of a model, such as n_layer: 4")
        words[at] = f"{option}={json.dumps(content)}" if equals else json.dumps(content)
    return words


def _said(command: str, function: Callable[..., Any], parser: Any, arguments: list[str], error: str) -> str:
    """The parser's words, which may be of many lines, as one."""
    keys = re.findall(r'Parser key "([^"]+)"', error)
    unknown = re.search(r"Unrecognized arguments: --([^\s=]+)|Key '([\w.]+)' is not expected", error)
    if unknown and not keys:  # on the command line, or in a configuration file
        name = unknown[1] or unknown[2]
        return f"{command} has no option --{name}{_nearest(command, parser, name)}"
    if missing := re.search(r'Validation failed: Key "(\w+)" is required', error.splitlines()[0]):
        first = next(iter(inspect.signature(function).parameters))
        place = ", its first argument" if missing[1] == first else ""
        return f"{command} wants a {missing[1]}{place}; axo litgpt {command} --help tells more"
    if not keys:
        told = _innermost(error) if "Does not validate" in error else _one_line(error)
        told = told.replace("Problems parsing config", "--config: not YAML")
        return re.sub(r"^argument (--[\w-]+):", r"\1", told)
    if keys[0] == "model_config" and (wrong := re.search(r"Key '([\w.]+)' is not expected", error)):
        from litgpt.config import Config

        return f"--model_config has no field {wrong[1]}; {meant(wrong[1], inspect.signature(Config).parameters)}"
    if keys[0] == "data" and (told := _of_data(error, _after("--data", arguments))):
        return told
    action = next((each for each in parser._actions if each.dest == keys[0]), None)
    own = "--" + keys[0].replace("_", "-")
    option = own if own in axo_options.NAMES else "--" + ".".join(keys)
    given = re.search(_GIVEN, error)
    value = (given[1] or given[2] or "").strip() if given else _after(option, arguments)
    wanted = _wanted(getattr(action, "_typehint", None)) if len(keys) == 1 else ""
    for name in re.findall(r"Expected a <class '(\w+)'>\. Got value: .*", error)[-1:] if not wanted else ():
        wanted = {kind.__name__: words for kind, words in _WORDS.items()}.get(name, name)
    return f"{option} {value} is not {wanted}" if wanted else f"{command}: {option} {value}: {_innermost(error)}"


def _after(option: str, arguments: list[str]) -> str:
    """What follows an option on the command line."""
    words = [word for argument in arguments for word in argument.split("=", 1)]
    return words[words.index(option) + 1] if option in words[:-1] else ""


def _one_line(error: object) -> str:
    return " ".join(str(error).split())


def _innermost(error: str) -> str:
    lines = [line.strip(" -") for line in error.splitlines() if line.strip(" -")]
    tried = ("Parser key", "Subtypes", "Errors", "Given", "Expected a <", "Does not validate", "Problem with given")
    told = [line for line in lines if not line.startswith(tried)]
    return (told or lines)[-1]


def _nearest(command: str, parser: Any, name: str) -> str:
    every = [option[2:] for option in parser._option_string_actions if option.startswith("--")]
    last = name.rpartition(".")[2]
    near = difflib.get_close_matches(name, every, 1) or [other for other in every if other.rpartition(".")[2] == last]
    return f"; did you mean --{near[0]}?" if near else f"; axo litgpt {command} --help lists all"


def _of_data(error: str, typed: str) -> str:
    """What is wrong about ``--data typed`` and what its module is made with; "": something else."""
    import litgpt.data

    from axo.integrations.litgpt.text_data import LocalText

    modules: dict[str, Any] = {name: getattr(litgpt.data, name) for name in litgpt.data.__all__}
    modules = {name: kind for name, kind in modules.items() if hasattr(kind, "train_dataloader")}
    modules = {**modules, "LocalText": LocalText}
    if typed not in modules and Path(typed).exists() and not typed.endswith(("yaml", "json")):  # its first line is read
        return f"""--data {typed} is a path; to train on it type --data LocalText --data.paths '["{typed}"]'"""
    of_module = re.search(r"class_path '(?:[\w.]+\.)?(\w+)'", error)
    name = of_module[1] if of_module else ""
    if named := re.search(r"(?:Expected a dot import path string|Unexpected import path format): (\S+)", error):
        told = modules.keys() - {"DataModule"}
        return f"--data {named[1]} is no data module of LitGPT's; {meant(named[1], sorted(told))}"
    if name and (unknown := re.search(r"Key '([\w.]+)' is not expected", error)):
        options = inspect.signature(modules.get(name, modules["DataModule"])).parameters
        return f"--data.{unknown[1]} is no option of {name}; {meant(unknown[1], options)}"
    if name and (missing := re.search(r'Key "(\w+)" is required', error)):
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
