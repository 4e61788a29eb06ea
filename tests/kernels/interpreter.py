"""Runs functions in a process where Triton interprets its kernels on the CPU.

Triton reads TRITON_INTERPRET when it is imported, so kernels cannot be interpreted in pytest's own process without
taking compilation away from it. One worker process serves the whole session; it imports the test module by name.
"""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any


class Interpreter:
    """The worker, started at the first call."""

    def __init__(self) -> None:
        self._process: Any = None
        self._pipe: Any = None

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 120.0) -> Any:
        """Call a module-level function there; raise AssertionError with its traceback when it fails."""
        if self._process is None:
            self._start()
        self._pipe.send((function.__module__, function.__name__, args))
        slowness = float(os.environ.get("AXO_TEST_SLOWNESS", "1"))
        if not self._pipe.poll(timeout * slowness):
            self.close()
            raise AssertionError(
                f"{function.__name__}: not finished after {timeout * slowness:.0f} s in the interpreter"
            )
        ok, value = self._pipe.recv()
        assert ok, value
        return value

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        before = {name: os.environ.get(name) for name in _ENVIRONMENT}
        os.environ.update(_ENVIRONMENT)
        try:
            self._process = context.Process(target=_serve, args=(theirs,), daemon=False)
            self._process.start()
        finally:
            for name, value in before.items():
                os.environ.pop(name, None) if value is None else os.environ.update({name: value})
        theirs.close()

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None


def patch_once_a_launch() -> None:
    """Spare Triton's interpreter a third of its time.

    It puts its own functions into ``triton.language`` at each launch, and again whenever a kernel calls a function,
    where they stand already.
    """
    from triton import language
    from triton.runtime import interpreter

    patch, call = interpreter._patch_lang, interpreter.InterpretedFunction.__call__.__code__

    @functools.cache
    def languages(function: Callable[..., Any]) -> list[Any]:
        return [value for value in function.__globals__.values() if value is language or value is language.core]

    def in_place(module: Any) -> bool:
        return not any(map(language.core.is_builtin, (module.load, module.tensor.__add__)))

    def patch_lang(function: Callable[..., Any]) -> Any:
        nested = sys._getframe(1).f_code is call
        return None if nested and all(map(in_place, languages(function))) else patch(function)

    interpreter._patch_lang = patch_lang


_ENVIRONMENT = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}


def _serve(pipe: Any) -> None:
    import torch

    torch.set_num_threads(1)
    patch_once_a_launch()
    while True:
        try:
            module, name, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, getattr(importlib.import_module(module), name)(*args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
