"""The files of LitGPT's JSON data module: that they are there, are JSON, and hold records with text.

LitGPT reads them in its ranks, and fails there with a traceback.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

_ENDINGS = (".json", ".jsonl")
_TEXTS = ("instruction", "output")


@functools.cache  # it is asked for what was read early, and for what litgpt's parser has read
def check(path: Path | None) -> None:
    """Check what ``--data.json_path`` names.

    Raises:
        ValueError: It is not there, or holds no records with an instruction and an output.
    """
    if path is None or not path.exists():
        wrong = "is missing" if path is None else f"{path} does not exist"
        raise ValueError(
            f"litgpt: --data.json_path {wrong}; name a .json or .jsonl file, or a folder with train.json and val.json"
        )
    files = [path] if not path.is_dir() else [_split(path, name) for name in ("train", "val")]
    for file in files:
        _check_records(file)


def _split(folder: Path, name: str) -> Path:
    for file in (folder / f"{name}{ending}" for ending in _ENDINGS):
        if file.is_file():
            return file
    raise ValueError(f"litgpt: --data.json_path {folder} is a folder without {name}.json; name a file, or add it")


def _check_records(file: Path) -> None:
    records = _read(file)
    what = f"litgpt: --data.json_path: {file}"
    if not isinstance(records, list) or not records:
        kind = "holds no records" if isinstance(records, list) else f"holds a {type(records).__name__}, not a list"
        raise ValueError(f'{what} {kind}; it must be a list of {{"instruction": ..., "output": ...}}')
    for number, record in enumerate(records):
        if not isinstance(record, dict):
            raise ValueError(f"{what}: record {number} is {str(record)[:40]!r}, not an instruction with its output")
        for name in _TEXTS:
            if name not in record:
                raise ValueError(f"{what}: record {number} has no {name!r}, but {', '.join(record)[:80] or 'nothing'}")
            if not isinstance(record[name], str):
                raise ValueError(f"{what}: record {number}: {name} is {str(record[name])[:40]!r}, which is no text")


def _read(file: Path) -> Any:
    if file.suffix not in _ENDINGS:
        raise ValueError(f"litgpt: --data.json_path {file} is neither a .json nor a .jsonl file")
    try:
        with open(file, encoding="utf-8") as opened:
            return json.load(opened) if file.suffix == ".json" else [json.loads(line) for line in opened]
    except (ValueError, RecursionError) as error:
        raise ValueError(f"litgpt: --data.json_path: {file} is not JSON: {error}") from None
