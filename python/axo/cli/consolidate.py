"""``axo consolidate``: a sharded checkpoint as one plain file, or a plain file as a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from axo.cli.output import say


def consolidate(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A checkpoint, a folder of them, or a plain file.")],
    out: Annotated[str, typer.Argument(metavar="OUT", help="A .pth or .safetensors file; from a file: a folder.")],
    optimizer: Annotated[bool, typer.Option("--optimizer", help="The optimizer's state_dict too (.pth).")] = False,
    trust: Annotated[bool, typer.Option("--trust", help="Let SOURCE run code: a .pth may hold any class.")] = False,
) -> None:
    """Write a sharded checkpoint as one plain state_dict, or a plain one as a checkpoint."""
    for name, path in (("SOURCE", source), ("OUT", out)):
        if not path.strip():
            raise ValueError(f"{name} is empty; name a file or a folder")
        if path == "-":
            raise ValueError(f"{name} is -, and only text goes through a pipe; name a file or a folder")
    write: Any
    if (Path(source) / "lit_model.pth").is_dir():  # a folder of axo litgpt --sharded
        from axo.integrations.fabric.sharded_checkpoint import consolidate as write
    else:
        from axo.checkpoint import consolidate as write
    say(f"wrote {write(source, out, optimizer=optimizer, trust=trust)}")
