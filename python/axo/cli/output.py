"""What the commands print and write: lines, tables, files. One way for each."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from axo.perf.output import Table


def say(line: str) -> None:
    """Print one line as it is, never wrapped."""
    print(line)


def show_table(title: str, table: Table) -> None:
    """Print a table; columns of numbers are set to the right. What is no terminal is 160 signs wide."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table as Drawing

    from axo.perf.output import text_columns

    header, rows = table
    drawn = Drawing(title=title, title_justify="left", header_style="bold")
    for name, text in zip(header, text_columns(table), strict=True):
        drawn.add_column(name, justify="left" if text else "right", overflow="fold")
    for row in rows:
        drawn.add_row(*map(escape, row))
    console = Console()
    (console if console.is_terminal else Console(width=160)).print(drawn)


def is_stdout(path: Path | None) -> bool:
    """Whether an output option says ``-``."""
    return path is not None and str(path) == "-"


def check_file(path: Path | None) -> None:
    """Check that a result can be written to ``path``: a file, stdout, or nowhere.

    Raises:
        ValueError: It is a folder, or its folder does not exist or is a file.
    """
    if path is None or is_stdout(path):
        return
    if path.parent.exists() and not path.parent.is_dir():
        raise ValueError(f"{str(path.parent)!r} is a file, not a folder; name another file")
    if not path.parent.is_dir():
        raise ValueError(f"folder {str(path.parent)!r} does not exist; make it, or name another file")
    if path.is_dir():
        raise ValueError(f"{str(path)!r} is a folder; name a file in it")


def write(path: Path, value: Any) -> None:
    """Write text, bytes, or anything else as JSON to a file, or to stdout for ``-``.

    Raises:
        ValueError: See ``check_file``.
    """
    data = value if isinstance(value, (str, bytes)) else json.dumps(value, indent=1)
    if isinstance(data, str):
        data = data if data.endswith("\n") else data + "\n"
        if is_stdout(path):
            sys.stdout.write(data)
            return
    check_file(path)
    path.write_bytes(data.encode() if isinstance(data, str) else data)
