"""The compiled extension, loaded and checked: it serves one minor version of torch."""

from __future__ import annotations

import atexit
import importlib.metadata

import torch


def _remedy() -> str:
    """What to do: the range of torch versions is that of the installed package."""
    try:
        wanted = [name for name in importlib.metadata.requires("axo") or () if name.startswith("torch")]
    except importlib.metadata.PackageNotFoundError:  # imported from a checkout that is not installed
        wanted = []
    supported = f"supports {wanted[0]}" if wanted else "serves the torch that it was built against"
    return f"axo {supported}: with one of those, install axo again (`pip install .`, in a checkout `make build`)"


try:
    from axo import _C
except ImportError as error:
    raise ImportError(
        f"axo's compiled part does not load with torch {torch.__version__} ({error}); {_remedy()}"
    ) from error

if _C.torch_version.split(".")[:2] != torch.__version__.split(".")[:2]:
    raise ImportError(
        f"axo was built against torch {_C.torch_version} and runs with torch {torch.__version__}; {_remedy()}"
    )

# A thread that comes back from the core while the interpreter ends would take the process down.
atexit.register(_C.stop_futures)

__all__ = ["_C"]
