"""The compiled extension, loaded and checked: it serves one minor version of torch."""

from __future__ import annotations

import atexit

import torch

try:
    from axo import _C
except ImportError as error:
    raise ImportError(
        f"axo's compiled part does not load with torch {torch.__version__} ({error}); it serves the torch that it was "
        "built against: rebuild with `pip install .`, in a checkout with `make build`"
    ) from error

if _C.torch_version.split(".")[:2] != torch.__version__.split(".")[:2]:
    raise ImportError(
        f"axo was built against torch {_C.torch_version} and runs with torch {torch.__version__}; "
        "rebuild with `pip install .`, in a checkout with `make build`"
    )

# A thread that comes back from the core while the interpreter ends would take the process down.
atexit.register(_C.stop_futures)

__all__ = ["_C"]
