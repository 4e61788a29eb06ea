"""Launch every kernel through Triton's real launcher, without a GPU: over a driver that computes nothing.

    python -m bench.tools.stub_driver                     every kernel, default and candidate of bench.kernels
    python -m bench.tools.stub_driver --cache DIR         and leave what was compiled for a machine with an H100

Kernels are compiled for sm_90, their binaries loaded and launched, and tensor maps encoded, by Triton's own code; the
driver (``stub_driver.cpp``, compiled here with g++) looks like one H100, holds each map and grid against the rules and
counts. Memory of the CPU stands for the device's. An error of any launch, or a refused map, ends it with 1.

The cache that ``--cache`` leaves serves where Triton is the same wheel (its key has a digest of the library) and
Python the same minor version: ``bench.gpu --compiled DIR`` copies it and gives its files their new place. Anywhere
else nothing of it is found, and kernels are compiled as without it.
"""

from __future__ import annotations

import ctypes
import importlib.util
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from bench.lib import compiled
from bench.lib.arguments import Parser

SOURCE = Path(__file__).with_suffix(".cpp")
RESERVED = 4  # multiprocessors that a fused product leaves to a simulated link (FusedCommunicator.reserved_units)


def build(folder: Path) -> ctypes.CDLL:
    """Compile the driver into a folder, and load it."""
    (package,) = importlib.util.find_spec("triton").submodule_search_locations  # type: ignore[union-attr, misc]
    headers, library = Path(package) / "backends/nvidia/include", folder / "libcuda.so.1"
    flags = ["-shared", "-fPIC", "-O1", "-Wall", f"-Wl,-soname,{library.name}", f"-I{headers}"]
    subprocess.run([os.environ.get("CXX", "g++"), *flags, "-o", str(library), str(SOURCE)], check=True)
    return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


class Stub:
    """The driver in this process, from now on; devices of the CPU pass for an H100."""

    def __init__(self, folder: Path) -> None:
        os.environ["TRITON_LIBCUDA_PATH"] = str(folder)  # before Triton looks
        self.library = build(folder)
        import triton
        from triton.backends.nvidia.driver import CudaDriver

        for name in ("stub_launches", "stub_maps"):
            getattr(self.library, name).restype = ctypes.c_longlong
        self.library.stub_complaints.restype = ctypes.c_char_p
        driver: Any = CudaDriver()
        driver.get_current_device = lambda: 0
        driver.set_current_device = lambda device: None
        driver.get_current_stream = lambda device: 0
        driver.get_device_capability = lambda device=0: (9, 0)
        triton.runtime.driver.set_active(driver)
        self._pass_for_an_h100()

    @property
    def launches(self) -> int:
        return int(self.library.stub_launches())

    @property
    def maps(self) -> int:
        return int(self.library.stub_maps())

    @property
    def complaints(self) -> list[str]:
        return bytes(self.library.stub_complaints()).decode().splitlines()

    @staticmethod
    def _pass_for_an_h100() -> None:
        """Answer for CPU tensors what an H100's would be answered, wherever the questions have been imported."""
        from axo_kernels import device as devices
        from axo_kernels.fused import segments
        from axo_kernels.gemm.tiles import TARGETS

        answers: dict[str, Callable[..., Any]] = {
            "target_of": lambda device: TARGETS["sm_90"],
            "runs_triton": lambda device: True,
            "interpreted": lambda: False,
        }
        questions = {getattr(devices, name): answer for name, answer in answers.items()}
        questions[segments.programs_left] = lambda comm, device: TARGETS["sm_90"].units - RESERVED
        for module in [module for name, module in sys.modules.items() if name.split(".")[0] in ("axo", "axo_kernels")]:
            for name, value in list(vars(module).items()):
                if callable(value) and getattr(value, "__hash__", None) and value in questions:
                    setattr(module, name, questions[value])


def every_launch() -> Iterable[Any]:
    """All launches of the benches of the kernels."""
    from bench.kernels import shapes
    from bench.lib.launches import hopper_launches, launches

    device = torch.device("cpu")
    return itertools.chain(launches(device, shapes(False)), hopper_launches(device))


def run(every: Iterable[Any], stub: Stub) -> list[str]:
    """Launch all; returns what went wrong."""
    wrong: list[str] = []
    for one in every:
        before = len(stub.complaints)
        try:
            one.call()
        except Exception as error:
            wrong.append(f"{one.name}: {type(error).__name__}: {str(error)[:300]}")
        wrong += [f"{one.name}: {text}" for text in stub.complaints[before:]]
    return wrong


def main(arguments: list[str] | None = None) -> int:
    """Launch all; returns 1 where anything went wrong."""
    parser = Parser("bench.tools.stub_driver", __doc__)
    parser.add_argument("--cache", type=Path, default=None, help="a folder that is to keep what was compiled")
    parser.add_argument("--only", default="", help="launches whose names have this in them")
    parser.add_argument("--part", default="1/1", help="N/M: every M-th of the launches, from the N-th on")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        cache = options.cache.resolve() if options.cache else folder / "cache"
        os.environ["TRITON_CACHE_DIR"] = str(cache)
        stub = Stub(folder)
        started = time.perf_counter()
        part, parts = (int(number) for number in options.part.split("/"))
        chosen = [one for one in every_launch() if options.only in one.name][part - 1 :: parts]
        wrong = run(chosen, stub)
        for line in wrong:
            print(line, flush=True)
        compiled.label(cache)
        files = [path for path in cache.rglob("*") if path.is_file()]
        print(
            f"{len(chosen)} calls, {stub.launches} launches, {stub.maps} tensor maps, {len(wrong)} wrong; "
            f"{sum(path.suffix == '.cubin' for path in files)} kernels in the cache, "
            f"{sum(path.stat().st_size for path in files) / 1e6:.1f} MB; {time.perf_counter() - started:.0f} s"
        )
        return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
