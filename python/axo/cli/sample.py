"""``axo sample``: a text, a tokenizer and questions with answers, for a first run without a network."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from axo.cli.output import say


def sample(folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where; made if it is not there.")]) -> None:
    """Write a text, a byte-level tokenizer and questions with answers to try training with; nothing is downloaded."""
    from axo.train.sample import write

    out = write(folder)
    say(f"wrote {out / 'text.txt'}, {out / 'tokenizer'}, {out / 'model.yaml'} and {out / 'instructions.json'}")
