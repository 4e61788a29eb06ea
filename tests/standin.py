"""A GPU for tests on machines without one: torch device "standin", with stand-ins for CUDA's runtime, driver and NCCL.

    build()                              # in the parent, once: compiles what csrc/tests/device describes
    gpu = install(folder)                # in each rank, before anything of Axo; `folder` is where ranks exchange
    torch.ones(3, device="standin")      # host memory, in the order of streams that do what they are told and no more

Collectives between the ranks' processes really move and reduce. What it proves: addresses, counts, dtypes, streams and
event edges of everything above the vendors' libraries. It is not their code, and its times mean nothing.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import subprocess
import types
from pathlib import Path
from typing import Any, ClassVar

import torch

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "csrc/tests/device"
BUILT = ROOT / "build/device-tests"
DEVICE = "standin"


@functools.cache
def build() -> None:
    """Compile the stand-ins, unless they are there."""
    command = ["make", "-s", "-j2", "-C", str(SOURCES), "torch-device", f"TORCH={Path(torch.__file__).parent}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


class Gpu:
    """What tests ask of the stand-in besides torch's own calls."""

    def __init__(self, library: Any, *kept: object) -> None:
        self._library, self._kept = library, kept
        for name in ("standin_calls", "standin_violations"):
            getattr(library, name).restype = ctypes.c_char_p
        library.standin_end_capture.restype = ctypes.c_void_p
        self._gates: list[Any] = []

    def calls(self) -> list[str]:
        """The calls of this thread to the vendors' libraries since the last time."""
        return self._library.standin_calls().decode().splitlines()

    def violations(self) -> list[str]:
        """Rules of the libraries that this process has broken."""
        return self._library.standin_violations().decode().splitlines()

    def fail(self, function: str, code: int, times: int = 1) -> None:
        """Let the next calls of ``function`` give ``code``."""
        self._library.standin_fail(function.encode(), code, times)

    def synchronize(self) -> None:
        self._library.standin_synchronize()

    def hold(self, *, pool: bool = False) -> Gate:
        """Put work on the current stream, or on the next one taken from torch's pool, until its gate is opened."""
        gate = Gate()
        self._gates.append(gate)
        hold = self._library.standin_hold_next_of_pool if pool else self._library.standin_hold
        hold(ctypes.byref(gate.word))
        return gate

    def capture(self) -> Graph:
        """Capture what the block puts on the current stream."""
        return Graph(self._library)


class Gate:
    def __init__(self) -> None:
        self.word = ctypes.c_int32(0)

    def open(self) -> None:
        self.word.value = 1


class Graph:
    """``with gpu.capture() as graph: ...``, then ``graph.replay()`` and ``reset()``: those of torch.cuda.CUDAGraph."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._graph: int | None = None

    def __enter__(self) -> Graph:
        self._stream = torch.Stream(device=torch.device(DEVICE, torch.accelerator.current_device_index()))
        self._before = torch.accelerator.current_stream()
        torch.accelerator.set_stream(self._stream)
        self._library.standin_begin_capture()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._graph = self._library.standin_end_capture()
        torch.accelerator.set_stream(self._before)
        assert kind is not None or self._graph, "a stream that joined the capture was not joined back"

    @property
    def nodes(self) -> int:
        return self._library.standin_nodes(ctypes.c_void_p(self._graph))

    def replay(self) -> None:
        self._library.standin_replay(ctypes.c_void_p(self._graph))

    def reset(self) -> None:
        if self._graph:
            self._library.standin_drop_graph(ctypes.c_void_p(self._graph))
        self._graph = None

    __del__ = reset


class _Loaded(ctypes.Structure):
    """The beginning of glibc's struct link_map, which dlopen's handles point at."""

    _fields_: ClassVar = [("address", ctypes.c_size_t), ("name", ctypes.c_char_p)]


def _hide_vendors() -> None:
    """Torch's CUDA wheels load the vendor's libraries when torch is imported: the look of Axo at what is loaded, which
    refuses a second copy, is to pass over them. They stay loaded, and torch goes on without a GPU."""
    names = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if ".so" in line}
    for name in names:
        if re.search(r"/lib(cudart|nccl|cuda)\.so", name) and BUILT not in Path(name).parents:
            handle = ctypes.CDLL(name, mode=os.RTLD_NOW | os.RTLD_NOLOAD)._handle
            ctypes.cast(handle, ctypes.POINTER(_Loaded)).contents.name = _HIDDEN


_HIDDEN = b"hidden"  # kept alive: glibc keeps its address


def install(folder: str | os.PathLike | None) -> Gpu:
    """Give this process the stand-in GPU; ranks with the same ``folder`` reach each other. None: ranks are threads."""
    if folder is not None:
        os.environ["AXO_STANDIN_PEERS"] = str(folder)
    os.environ["AXO_NCCL_LIBRARY"] = str(BUILT / "cuda/libnccl.so.2")
    _hide_vendors()
    for name in ("libcudart.so.12", "libcuda.so.1"):
        ctypes.CDLL(str(BUILT / "cuda" / name))  # Axo takes the copy that the process has loaded
    library = ctypes.CDLL(str(BUILT / "torch_device.so"))
    library.standin_install()
    torch.utils.rename_privateuse1_backend(DEVICE)
    torch._register_device_module(DEVICE, _module(library))
    # A tensor may get data of another device, as CUDA's may.
    compatible = torch.library.Library("aten", "IMPL")
    compatible.impl("_has_compatible_shallow_copy_type", lambda self, other: True, "PrivateUse1")
    return Gpu(library, compatible)


def _module(library: Any) -> types.ModuleType:
    module: Any = types.ModuleType(f"torch.{DEVICE}")
    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module.device_count = lambda: 8
    module.current_device = library.standin_current_device
    module.set_device = lambda device: library.standin_set_device(
        device if isinstance(device, int) else torch.device(device).index
    )
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = lambda seed: None  # operations draw from the CPU's generator
    module.current_stream = lambda device=None: torch.accelerator.current_stream(device)
    module.Stream = lambda device=None, priority=0: torch.Stream(device=device or DEVICE, priority=priority)
    module.Event = lambda *args, **kwargs: torch.Event(DEVICE)
    module.stream = lambda stream: stream  # a torch.Stream is a context
    module.synchronize = lambda device=None: torch.accelerator.current_stream(device).synchronize()
    module.get_rng_state = lambda device=None: torch.get_rng_state()
    module.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    return module
