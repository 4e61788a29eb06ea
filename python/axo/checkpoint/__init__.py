"""Checkpoints of a training run: sharded, complete or absent, and readable on any other grid.

    handle = axo.checkpoint.save("runs/a", model, optimizer, step=100, keep=3, async_=True)
    ...
    loaded = axo.checkpoint.load("runs/a", model, optimizer)    # the newest complete one; loaded.step, loaded.extra
    axo.checkpoint.consolidate("runs/a", "model.pth")           # a plain state_dict; ("model.pth", "runs/b") is back

A checkpoint is a folder ``step-00000100`` of torch.distributed.checkpoint's (DCP) format:

    model/NAME              every parameter and buffer, in its serial layout, as the chunks that ranks hold
    optimizer/NAME/KEY      optimizer state of the parameter's shape, likewise; single numbers once
    optimizer               options of each parameter group, and state that is no tensor
    rng/RANK                torch, CUDA, Python and NumPy generators of a rank
    axo                     step, grid, counters of ``axo.nn.Dropout``, names that share a tensor, the caller's extras

It is written under a hidden name and renamed when all ranks have written and synced their files, so a folder without a
leading dot is complete. Every entry has a checksum. Files: ``boxes`` (a tensor as boxes: who holds what, what goes
where), ``state`` (model, optimizer and generators to entries and back), ``folder`` (names, newest, replacing,
removing), ``run`` (whose folder it is), ``ranks`` (what ranks tell each other); a save: ``writer``, ``storage`` (the
file of a rank), ``metadata`` (what lies where); a load: ``reader``, ``stored`` (what there is, and reading it); other
formats: ``convert``, ``safetensors``, ``pretrained`` (a Hugging Face folder). Names load on first use: ``folder`` needs
no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from axo.lazy import names_of

if TYPE_CHECKING:
    from axo.checkpoint.convert import consolidate
    from axo.checkpoint.folder import latest
    from axo.checkpoint.pretrained import save_pretrained
    from axo.checkpoint.ranks import Save, share_path
    from axo.checkpoint.reader import Loaded, load
    from axo.checkpoint.run import Run
    from axo.checkpoint.writer import save
    from axo.errors import CheckpointError

__all__ = [
    "CheckpointError",
    "Loaded",
    "Run",
    "Save",
    "consolidate",
    "latest",
    "load",
    "save",
    "save_pretrained",
    "share_path",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = names_of(
        __name__,
        {
            "CheckpointError": "axo.errors",
            "Loaded": "axo.checkpoint.reader",
            "Run": "axo.checkpoint.run",
            "Save": "axo.checkpoint.ranks",
            "consolidate": "axo.checkpoint.convert",
            "latest": "axo.checkpoint.folder",
            "load": "axo.checkpoint.reader",
            "save": "axo.checkpoint.writer",
            "save_pretrained": "axo.checkpoint.pretrained",
            "share_path": "axo.checkpoint.ranks",
        },
    )
