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
    known = benchmarks()
    if name in ("", "--help", "-h"):
        say("usage: axo bench NAME [ARGUMENTS]")
        say("benchmarks: " + (", ".join(known) or "none installed"))
        return
    if name not in known:
        raise ValueError(f"{name!r} is not one of {', '.join(known) or 'the installed benchmarks (none)'}")
    if "torch" not in sys.modules:
        print(f"axo bench {name}: loading torch", file=sys.stderr, flush=True)
    sys.argv = [f"axo bench {name}", *context.args]
    # By its name, not as __main__: what a bench hands to processes of its own is found under it.
    raise SystemExit(importlib.import_module(_main_of(name)).main())


def benchmarks() -> list[str]:
    """Names of the benchmarks that are installed."""
    if importlib.util.find_spec("axo_bench") is None:
        return []
    package = importlib.import_module("axo_bench")
    return sorted(module.name for module in pkgutil.iter_modules(package.__path__) if _is_script(module.name))


def _main_of(name: str) -> str:
    """The module that runs a bench: a package's is its ``__main__``."""
    spec = importlib.util.find_spec(f"axo_bench.{name}")
    return f"axo_bench.{name}" + (".__main__" if spec is not None and spec.submodule_search_locations else "")


def _is_script(name: str) -> bool:
    """Whether a module of the benches can be run; others are what they share."""
    spec = importlib.util.find_spec(f"axo_bench.{name}")
    if spec is None or spec.origin is None:
        return False
    path = Path(spec.origin)
    path = path.with_name("__main__.py") if spec.submodule_search_locations else path
    return path.exists() and "\ndef main(" in path.read_text()
