"""Packages whose names load on first use, so that a part that needs no torch is there without it."""

from __future__ import annotations

import importlib.util
import pkgutil
import sys
from collections.abc import Callable, Mapping
from typing import Any


def names_of(package: str, modules: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The ``__getattr__`` and the ``__dir__`` of a package, which has its modules too.

    Args:
        package: Its name.
        modules: Public name -> the module that holds it.
    """

    def load(name: str) -> Any:
        if name in modules:
            value = vars(sys.modules[package])[name] = getattr(importlib.import_module(modules[name]), name)
            return value
        whole = f"{package}.{name}"
        if name.startswith("_") or importlib.util.find_spec(whole) is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return importlib.import_module(whole)

    def names() -> list[str]:
        this = vars(sys.modules[package])
        return sorted({*this, *modules, *(module.name for module in pkgutil.iter_modules(this["__path__"]))})

    return load, names
