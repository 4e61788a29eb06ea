"""Triton's cache, filled on one machine (``bench.tools.stub_driver --cache``) and used on another.

What is looked up there is named by digests of the kernels' sources, of Triton's library and of the options, so what
does not fit is never found, and kernels are compiled as without it. Triton writes where each file lies into the file
that lists a kernel's: those lines are given the new place.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from importlib import metadata
from pathlib import Path

LABEL = "filled_by.json"  # beside the entries: which Triton and Python they are for


def versions() -> dict[str, str]:
    """What must be the same on both machines; launchers are compiled for one Python."""
    return {"triton": metadata.version("triton"), "python": sys.implementation.cache_tag}


def label(cache: Path) -> None:
    """Write down which versions have filled a cache, and leave out what no launch reads: nine bytes of ten."""
    for path in cache.rglob("*"):
        if path.is_file() and path.suffix not in (".json", ".cubin", ".so"):
            path.unlink()
    (cache / LABEL).write_text(json.dumps(versions()), encoding="utf-8")


def bring(source: Path, cache: Path) -> str:
    """Copy a cache to where this machine's Triton, and that of every process started from here, is to look.

    Returns:
        What has become of it, in a line.
    """
    try:
        filled_by = json.loads((source / LABEL).read_text(encoding="utf-8"))
        if filled_by != versions():
            return f"compiled for {filled_by}, here is {versions()}: kernels are compiled here"
        shutil.copytree(source, cache, dirs_exist_ok=True)
        kernels = 0
        for listing in cache.rglob("__grp__*.json"):
            files = json.loads(listing.read_text(encoding="utf-8"))["child_paths"]
            moved = {name: str(listing.parent / Path(path).name) for name, path in files.items()}
            listing.write_text(json.dumps({"child_paths": moved}), encoding="utf-8")
            kernels += 1
    except (OSError, ValueError, KeyError, metadata.PackageNotFoundError) as error:
        return f"nothing compiled was brought along ({type(error).__name__}: {error}): kernels are compiled here"
    os.environ["TRITON_CACHE_DIR"] = str(cache)
    return f"{kernels} kernels were compiled elsewhere, for {filled_by}"


def brought_along() -> bool:
    """Whether Triton's cache of this process is one that :func:`bring` has copied."""
    return (Path(os.environ.get("TRITON_CACHE_DIR", "")) / LABEL).is_file()
