"""The environment variables that Axo reads, in one table.

Options of a call stand in its signature; a variable is for what a launcher or an operator sets from outside.
``axo info`` shows those that are set. Not here: variables of torchrun (RANK, WORLD_SIZE, ...), of NCCL and of Triton,
which keep their own meaning.
"""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Variable:
    """One environment variable.

    Attributes:
        name: Begins with ``AXO_``.
        default: What holds when it is not set.
        meaning: What it does, and the values that it takes.
        values: Those, where they can be counted.
        secret: Whether its value is never shown.
    """

    name: str
    default: str
    meaning: str
    values: tuple[str, ...] = ()
    secret: bool = False


VARIABLES = (
    Variable(
        "AXO_TUNE",
        "cached",
        "Tuning of products: off (torch's own), cached (read choices) or first-step (measure).",
        ("off", "cached", "first-step"),
    ),
    Variable("AXO_TUNE_CACHE", "the user's cache folder", "Folder of the tuner's choices."),
    Variable("AXO_FLIGHT_DIR", "none", "Folder for a rank's last operations, written on failure and on SIGUSR1."),
    Variable("AXO_NCCL_LIBRARY", "found", "Path of the NCCL or RCCL library that the GPU transport opens."),
    Variable("AXO_SECRET", "", "The job's secret, which its ranks prove to each other.", secret=True),
    Variable("AXO_SECRET_FILE", "", "A file with it, which only its owner may read."),
    Variable("AXO_REQUIRE_SECRET", "0", "1: CPU ranks of several hosts without a secret are refused.", ("0", "1")),
    Variable("AXO_INTERFACE", "", "The network interface on which CPU ranks of several hosts connect."),
    Variable("AXO_COMPOSITION", "", "The file of axo profile that says what GPUs of several hosts compose."),
    Variable(
        "AXO_CHECK",
        "0",
        "1: the GPU transport compares operations and their order across ranks (the host always does), and a model made"
        " by axo.parallelize compares its input over x and y in every training step (else in the first).",
        ("0", "1"),
    ),
)
_BY_NAME = {variable.name: variable for variable in VARIABLES}


def value_of(name: str) -> str:
    """What the variable ``name`` says; its default where it is not set, or empty.

    Raises:
        ValueError: It is none of its values.
    """
    variable = _BY_NAME[name]
    value = os.environ.get(name) or variable.default
    if variable.values and value not in variable.values:
        raise ValueError(f"{name}={value!r} is not known; use one of {', '.join(variable.values)}, or unset it")
    return value


def is_on(name: str) -> bool:
    """Whether the variable ``name``, which is 0 or 1, says 1.

    Raises:
        ValueError: It says something else.
    """
    return value_of(name) == "1"


def check() -> None:
    """Read every variable.

    Raises:
        ValueError: One of them is none of its values.
    """
    for variable in VARIABLES:
        value_of(variable.name)


def settings() -> dict[str, str]:
    """The variables that are set, by name; of a secret one only that it is."""
    given = [variable for variable in VARIABLES if variable.name in os.environ]
    return {variable.name: "(set)" if variable.secret else os.environ[variable.name] for variable in given}
