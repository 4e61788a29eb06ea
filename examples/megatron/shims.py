"""Three shims under which megatron-core 0.16.1 runs on a CPU: it asks for a GPU in these places only.

Nothing of megatron-core is changed on disk. On a GPU none of this is wanted.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

VERSION = "0.16.1"


class Alone:
    """A process group of one rank, as far as Megatron asks it: Axo splits what Megatron believes to be whole."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def process_groups() -> Any:
    """Megatron's collection of process groups, each of one rank."""
    return SimpleNamespace(
        **dict.fromkeys(("tp", "cp", "pp", "ep", "dp", "embd", "pos_embd", "tp_cp", "dp_cp"), Alone())
    )


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Let GPTModel be made and run on the CPU inside; what was there before is there again afterwards.

    Raises:
        ValueError: megatron-core is not installed, or in another version.
    """
    if importlib.util.find_spec("megatron") is None:
        sys.path.append(str(Path(sys.prefix, "megatron")))  # a folder of its own, where make build puts it
    warnings.filterwarnings("ignore", module=r"megatron\.")  # Apex and Transformer Engine are not wanted here
    try:
        import megatron.core
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    except ImportError as error:
        raise ValueError(
            f"megatron-core cannot be imported ({error}); install it without what it asks for:"
            f" pip install --no-deps megatron-core=={VERSION}"
        ) from None
    if megatron.core.__version__ != VERSION:
        raise ValueError(f"megatron-core is {megatron.core.__version__}; this example is for {VERSION}")
    tracker: Any = CudaRNGStatesTracker
    before = torch.cuda.current_device, tracker.fork, tracker.is_initialized
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    tracker.fork = lambda self, name="": contextlib.nullcontext()
    tracker.is_initialized = lambda self: True
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()
    try:
        yield
    finally:
        torch.cuda.current_device, tracker.fork, tracker.is_initialized = before
