"""The ``--out_dir`` of a training command: one process at a time, and one run's checkpoints.

LitGPT writes into whatever folder it is given, and ``--resume auto`` takes the newest checkpoint there. So the process
that starts the ranks (torchrun's rank 0 where it started them) holds the folder as ``axo train`` does, by the files of
``axo.checkpoint.Run``; and a run that can be resumed begins where no checkpoints lie but those that it goes on from.

A run may go back to an earlier checkpoint of its folder. The later ones stay, named in ``axo-run.json`` with the time
of their writing, and are not taken as the newest until they are written again.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from axo import files
from axo.checkpoint import Run
from axo.checkpoint.folder import whole_file
from axo.checkpoint.run import IDENTITY
from axo.integrations.litgpt.parsing import read_yaml

# What the order of the data depends on, in LitGPT's hyperparameters; and what a data module is made with that is not.
_ORDER = ("seed", "data", "train.global_batch_size", "train.max_seq_length", "tokenizer_dir")
_NO_ORDER = {"num_workers", "cache_dir", "download_dir"}
_IN = "# in "  # before the working directory, as JSON
_LEFT = "left behind"  # in axo-run.json: names of checkpoints' folders, and when they were written


def hold(
    values: Mapping[str, Any], dump: Callable[[], str], *, resumes: bool, again: bool, allow_new_data: bool
) -> Run:
    """Take the folder of a run.

    Args:
        values: The arguments of litgpt's function.
        dump: Gives them as LitGPT writes them beside a checkpoint.
        resumes: Whether the command can go on from a checkpoint of its own.
        again: The run is started again, and goes on from what it has saved.
        allow_new_data: It may go on with other data, another seed or another batch.

    Raises:
        ValueError: Another process holds the folder (names it); or there are checkpoints of an earlier run from which
            this one does not go on; or it would go on with another order of the data.
    """
    folder = out_folder(values["out_dir"])
    asked = values.get("resume", False)
    # An earlier run's checkpoints: it goes on, or is refused below; either way the folder stays that run's.
    run = Run(folder, resume=bool(asked) or again or (resumes and bool(_steps(folder))))
    try:
        if resumes and not again:
            source = newest(folder) if asked in (True, "auto") else Path(str(asked)) if asked else None
            if asked is True and source is None:
                raise ValueError(f"litgpt: --resume true, and {folder} has no step-* checkpoint; use --resume auto")
            later = _later(folder, source)
            if source is not None and not allow_new_data:
                _refuse_new_data(source, dump)
            if source is not None:
                _leave_behind(run, folder, source, later)
    except BaseException:
        run.close()
        raise
    return run


def newest(out_dir: Any, files: str = "*.pth") -> Path | None:
    """The checkpoint from which a run goes on by itself; or the newest of other ``files``, which hold adapters."""
    return next((path for _, path in reversed(_steps(out_folder(out_dir), files)) if is_saved(path)), None)


def is_saved(path: Path) -> bool:
    """Whether a checkpoint of a step is there, and not left behind."""
    return path.exists() and _left(path.parent.parent).get(path.parent.name) != path.stat().st_mtime_ns


def out_folder(out_dir: Any) -> Path:
    """Where LitGPT puts a run of that ``out_dir``."""
    from litgpt.utils import init_out_dir

    return init_out_dir(out_dir)


def _steps(folder: Path, files: str = "*.pth") -> list[tuple[int, Path]]:
    """The checkpoints of a run, by their steps; those of runs in folders below are not its own."""
    named = ((re.fullmatch(r"step-(\d+)", path.parent.name), path) for path in folder.glob(f"step-*/{files}"))
    return sorted((int(number[1]), path) for number, path in named if number)


def _left(folder: Path) -> dict[str, int]:
    try:
        said = files.parse_json(files.read_text(folder / IDENTITY))
    except (OSError, ValueError):
        return {}
    left = said.get(_LEFT) if isinstance(said, dict) else None
    return left if isinstance(left, dict) else {}


def _later(folder: Path, source: Path | None) -> dict[str, int]:
    """Checkpoints of steps after ``source``, and when they were written.

    Raises:
        ValueError: There are checkpoints, and it is none of them.
    """
    steps = _steps(folder)
    own = [step for step, path in steps if source is not None and path.resolve() == source.resolve()]
    if steps and not own:
        last = newest(folder)
        raise ValueError(
            f"litgpt: {folder} holds checkpoints of an earlier run (the newest {last or steps[-1][1]}), from which a"
            f" later --resume auto, or a restart, would go on; add --resume {'auto' if last else steps[-1][1]} to go"
            " on from them now, name another --out_dir, or remove them"
        )
    return {path.parent.name: path.stat().st_mtime_ns for step, path in steps if step > own[0]}


def _leave_behind(run: Run, folder: Path, source: Path, later: dict[str, int]) -> None:
    before = _left(folder)
    left = {name: written for name, written in (before | later).items() if name != source.resolve().parent.name}
    if left == before:
        return
    with whole_file(folder / IDENTITY) as unfinished:
        unfinished.write_text(json.dumps({"run": run.id, _LEFT: left}) + "\n", encoding="utf-8")
    new = [name for name in later if before.get(name) != later[name]]
    if new:
        print(
            f"axo litgpt: going back to {source}; {', '.join(new)} in {folder} will be replaced when these steps come"
            " again, and until then --resume auto passes over them",
            flush=True,
        )


def _refuse_new_data(source: Path, dump: Callable[[], str]) -> None:
    file = source.parent / "hyperparameters.yaml"
    if not file.is_file():  # not LitGPT's command line has saved it
        return
    then = read_yaml(file)
    old, new, folder = dict(_order(then)), dict(_order(yaml.safe_load(dump()))), _folder_in(files.read_text(file))
    before = {name: _place(value, folder) for name, value in old.items()}
    now = {name: _place(value, os.getcwd()) for name, value in new.items()}
    # A relative name whose place is gone is taken for the same: the project may have moved.
    gone = {name for name in old if old[name] == before[name] == new.get(name)}
    changed = [name for name in before | now if before.get(name) != now.get(name) and name not in gone]
    if changed:
        was = ", ".join(f"{name}={before.get(name)}" for name in changed)
        given = ", ".join(f"{name}={now.get(name)}" for name in changed)
        raise ValueError(
            f"litgpt: {source} was saved with {was}, now it is {given}, and the order of the data would be another: use"
            " the same, or say --allow-new-data"
        )


def comment(by_hand: str) -> str:
    """What stands above LitGPT's hyperparameters: the options of Axo's own, and the working directory."""
    return f"# axo litgpt {by_hand}\n{_IN}{json.dumps(os.getcwd())}\n"


def _folder_in(hyperparameters: str) -> str:
    """The working directory that ``comment`` has written; this process's own where it has not."""
    for line in hyperparameters.splitlines()[:2]:
        if line.startswith(_IN):
            with contextlib.suppress(ValueError):  # a line of somebody else's
                return str(files.parse_json(line.removeprefix(_IN)))
    return os.getcwd()


def _order(said: Any) -> Iterator[tuple[str, Any]]:
    """(name, value) of what the order of the data depends on; without those that are not set."""
    for name in _ORDER:
        value = said
        for part in name.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if name == "data" and isinstance(value, dict):
            yield name, value.get("class_path")
            made_with = value.get("init_args")
            items = made_with.items() if isinstance(made_with, dict) else ()
            yield from ((f"data.{key}", each) for key, each in items if key not in _NO_ORDER)
        elif value is not None:
            yield name, value


def _place(value: Any, folder: str) -> Any:
    """A file or folder, named in ``folder``, by its absolute name; anything else as it is."""
    if isinstance(value, list):
        return [_place(one, folder) for one in value]
    if not isinstance(value, str) or not os.path.exists(os.path.join(folder, value)):
        return value
    return os.path.normpath(os.path.join(folder, value))
