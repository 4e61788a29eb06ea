"""What the command lines of benches share: the parser, numbers, shapes, rates, the device; a mistake is one line."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import NoReturn

import torch


class Parser(argparse.ArgumentParser):
    """The parser of a bench: a mistake is one line, as for every command, not the usage of all options.

    Args:
        prog: What is typed.
        doc: Of the module; its first line says what the bench does.
        json: Whether its rows can be appended to a file.
    """

    def __init__(self, prog: str, doc: str, *, json: bool = False) -> None:
        super().__init__(prog=prog, description=doc.splitlines()[0])
        if json:
            self.add_argument("--json", type=Path, default=None, help="append JSON lines to this file")

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}; see {self.prog} --help\n")


def numbers(option: str, text: str, least: int = 1) -> list[int]:
    """Read whole numbers, comma-separated.

    Raises:
        ValueError: One is not a whole number of at least ``least``.
    """
    return [_number(option, part, least) for part in text.split(",") if part]


def shapes(option: str, text: str) -> list[tuple[int, int, int]]:
    """Read shapes MxNxK, comma-separated.

    Raises:
        ValueError: One is not three sizes joined by x.
    """
    read = []
    for shape in text.split(","):
        sizes = [_number(option, part, 1) for part in shape.split("x")]
        if len(sizes) != 3:
            raise ValueError(f"{option} {shape!r}: use three sizes joined by x, for example 4096x4096x4096")
        read.append((sizes[0], sizes[1], sizes[2]))
    return read


def shares(option: str, text: str) -> list[float]:
    """Read shares above 0, comma-separated.

    Raises:
        ValueError: One is none.
    """
    try:
        read = [float(part) for part in text.split(",")]
    except ValueError:
        read = [0.0]
    if not all(0 < share < float("inf") for share in read):
        raise ValueError(f"{option} {text!r}: use numbers above 0, such as 0.2,0.4,0.8")
    return read


def rate(text: str) -> float:
    """Bytes a second: 200M, 1.5G (K, M, G: powers of 1000). For argparse."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?)", text)
    value = float(match[1]) * 1000.0 ** " KMG".find(match[2] or " ") if match else 0.0
    if not 1 <= value <= 1e15:
        raise argparse.ArgumentTypeError(f"{text!r} is no rate; use bytes a second, such as 200M or 1.5G")
    return value


def device(option: str, name: str) -> torch.device:
    """Find the device that was asked for, a GPU with its index.

    Raises:
        ValueError: It is not here.
    """
    if name == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    try:
        place = torch.device(name)
    except RuntimeError:
        place = torch.device("meta")
    if place.type != "cuda" or (place.index or 0) >= count:
        raise ValueError(f"{option} {name!r}: {count} GPUs are visible here; use cpu{', or cuda' if count else ''}")
    return place if place.index is not None else torch.device("cuda", torch.cuda.current_device())


def _number(option: str, text: str, least: int) -> int:
    if not (text.isascii() and text.isdigit() and int(text) >= least):
        raise ValueError(f"{option} {text!r} is not a whole number of at least {least}")
    return int(text)
