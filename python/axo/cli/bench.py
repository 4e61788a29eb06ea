"""``axo bench``: runs a benchmark of the package ``axo_bench``, with the arguments that follow its name."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from axo.cli.output import say

CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def bench(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Which; without it, they are listed.")] = "",
) -> None:
    """Run a benchmark with the arguments that follow its name, e.g. 'axo bench collectives --help'."""
    modules = benchmarks()
    if name in ("", "--help", "-h"):
        say("usage: axo bench NAME [ARGUMENTS]")
        say("benchmarks: " + (", ".join(modules) or "none installed"))
        return
    if name not in modules:
        raise ValueError(f"{name!r} is not one of {', '.join(modules) or 'the installed benchmarks (none)'}")
    if "torch" not in sys.modules:
        print(f"axo bench {name}: loading torch", file=sys.stderr, flush=True)
    sys.argv = [f"axo bench {name}", *context.args]
    # By its name, not as __main__: what a bench hands to processes of its own is found under it.
    raise SystemExit(importlib.import_module(modules[name]).main())


def benchmarks() -> dict[str, str]:
    """The benchmarks that are installed, each with the module that runs it: a package's is its ``__main__``."""
    if importlib.util.find_spec("axo_bench") is None:
        return {}
    (folder,) = importlib.import_module("axo_bench").__path__
    modules = sorted(
        (name, f"{name}.__main__" if package else name) for _, name, package in pkgutil.iter_modules([folder])
    )
    files = {module: Path(folder, *module.split(".")).with_suffix(".py") for _, module in modules}
    return {
        name: f"axo_bench.{module}"  # those without a main are what they share
        for name, module in modules
        if files[module].exists() and "\ndef main(" in files[module].read_text()
    }
