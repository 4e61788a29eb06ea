"""The ``--out_dir`` of a training command: one process at a time, and one run's checkpoints.

LitGPT writes into whatever folder it is given, and ``--resume auto`` takes the newest checkpoint there. So the process
that starts the ranks (torchrun's rank 0 where it started them) holds the folder as ``axo train`` does, by the files of
``axo.checkpoint.Run``; and a run that can be resumed begins where no checkpoints lie but the one that it goes on from.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from axo.checkpoint import Run
from axo.integrations.litgpt import restarts

# What the order of the data depends on, in LitGPT's hyperparameters; and what a data module is made with that is not.
_ORDER = ("seed", "data", "train.global_batch_size", "train.max_seq_length", "tokenizer_dir")
_NO_ORDER = {"num_workers", "cache_dir", "download_dir"}


def hold(options: Any, dump: Callable[[], str], *, resumes: bool, again: bool, allow_new_data: bool) -> Run:
    """Take the folder of a run.

    Args:
        options: What litgpt's parser made of the arguments.
        dump: Gives them as LitGPT writes them beside a checkpoint.
        resumes: Whether the command can go on from a checkpoint of its own.
        again: The run is started again, and goes on from what it has saved.
        allow_new_data: It may go on with other data, another seed or another batch.

    Raises:
        ValueError: Another process holds the folder (names it); or there are checkpoints of an earlier run from which
            this one does not go on; or it would go on with another order of the data.
    """
    from litgpt.utils import init_out_dir

    folder = init_out_dir(options.out_dir)
    asked = options.get("resume", False)
    # An earlier run's checkpoints: it goes on, or is refused below; either way the folder stays that run's.
    run = Run(folder, resume=bool(asked) or again or (resumes and restarts.newest(folder) is not None))
    try:
        if resumes and not again:
            found = restarts.newest(folder)
            source = found if asked in (True, "auto") else Path(str(asked)) if asked else None
            _refuse_mixing(folder, found, source)
            if source is not None and not allow_new_data:
                _refuse_new_data(source, dump)
    except BaseException:
        run.close()
        raise
    return run


def _refuse_mixing(folder: Path, found: Path | None, source: Path | None) -> None:
    if found is not None and (source is None or found.resolve() != source.resolve()):
        raise ValueError(
            f"litgpt: {folder} holds checkpoints of an earlier run (the newest {found}), from which a later --resume"
            " auto, or a restart, would go on; add --resume auto to go on from them now, name another --out_dir, or"
            " remove them"
        )


def _refuse_new_data(source: Path, dump: Callable[[], str]) -> None:
    file = source.parent / "hyperparameters.yaml"
    if not file.is_file():  # not LitGPT's command line has saved it
        return
    try:
        then = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"litgpt: {file} cannot be read: {' '.join(str(error).split())}") from None
    before, now = (dict(_order(said)) for said in (then, yaml.safe_load(dump())))
    changed = [name for name in before | now if before.get(name) != now.get(name)]
    if changed:
        was = ", ".join(f"{name}={before.get(name)}" for name in changed)
        given = ", ".join(f"{name}={now.get(name)}" for name in changed)
        raise ValueError(
            f"litgpt: {source} was saved with {was}, now it is {given}, and the order of the data would be another: use"
            " the same, or say --allow-new-data"
        )


def _order(said: Any) -> Iterator[tuple[str, Any]]:
    """(name, value) of what the order of the data depends on; without those that are not set."""
    for name in _ORDER:
        value = said
        for part in name.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if name == "data" and isinstance(value, dict):
            yield name, value.get("class_path")
            made_with = value.get("init_args") or {}
            yield from ((f"data.{key}", _place(made_with[key])) for key in made_with if key not in _NO_ORDER)
        elif value is not None:
            yield name, _place(value)


def _place(value: Any) -> Any:
    """A file or folder by its absolute name; anything else as it is."""
    if isinstance(value, list):
        return [_place(one) for one in value]
    return os.path.abspath(value) if isinstance(value, str) and os.path.exists(value) else value
