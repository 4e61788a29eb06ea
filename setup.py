"""Builds `axo._C` from csrc/*/*.cpp with a C++ compiler and nothing else, and says which packages go into the wheel.

The rest of the project's description stands in pyproject.toml. What setuptools' own build_ext lacks, and is done here:
  - units compile in parallel, and only those whose source or headers changed (dependency files, as make would);
  - only the units that see torch get torch's include folders (and C++20, as its headers want): the core must compile
    without them;
  - the finished library is renamed into place, so that programs that run from an editable install never see half;
  - two builds at once wait for each other.
torch's bundled pybind11 is used, never pip's: another version has other internals, and a module built with it cannot
exchange torch's types.
"""

from __future__ import annotations

import concurrent.futures
import fcntl
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sysconfig
import time
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
CORE = ("base", "memory", "progress", "host", "hosts", "device", "torch")
SOURCES = sorted(path for folder in CORE for path in (ROOT / "csrc" / folder).glob("*.cpp"))
CORE_FLAGS = ["-std=c++17"]
TORCH_FLAGS = ["-std=c++20", "-DTORCH_API_INCLUDE_EXTENSION_H"]
COMMON_FLAGS = ["-O3", "-fPIC", "-fvisibility=hidden", "-pthread", "-Wall", "-Wextra", "-Wno-unused-parameter"]


def sees_torch(source: Path) -> bool:
    """Only csrc/torch may include torch's headers: the core knows no Python and no torch."""
    return source.parent.name == "torch"


class Torch:
    """Where the installed torch keeps its headers and libraries, and how it was compiled."""

    def __init__(self) -> None:
        if importlib.util.find_spec("torch") is None:
            raise SystemExit("axo builds against the torch that is installed, and torch is not installed here: "
                             "pip install torch, then pip install --no-build-isolation .")  # fmt: skip
        import torch

        folder = Path(torch.__file__).parent
        self.version = torch.__version__
        self.includes = [str(folder / "include"), str(folder / "include/torch/csrc/api/include")]
        self.library_dir = str(folder / "lib")
        self.cxx11_abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)


class BuildCore(build_ext):
    """Compile changed units in parallel, link once, rename into place."""

    def build_extension(self, ext: Extension) -> None:
        torch = Torch()
        objects_dir = ROOT / "build" / f"obj-{sysconfig.get_config_var('SOABI')}-torch{torch.version}"
        objects_dir.mkdir(parents=True, exist_ok=True)
        with open(objects_dir / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            sources = [Path(source) for source in ext.sources]
            with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
                slow_first = sorted(sources, key=lambda source: not sees_torch(source))
                objects = list(pool.map(lambda source: self._compile(source, objects_dir, torch), slow_first))
            self._link(sorted(objects), Path(self.get_ext_fullpath(ext.name)), torch)

    def _compile(self, source: Path, objects_dir: Path, torch: Torch) -> Path:
        target = objects_dir / source.parent.name / (source.stem + ".o")  # folders share names: host/core, device/core
        target.parent.mkdir(exist_ok=True)
        includes = [str(ROOT / "csrc")]
        flags = [*COMMON_FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={torch.cxx11_abi}"]
        if sees_torch(source):
            # -isystem: no warnings from headers that are not ours.
            flags += [*TORCH_FLAGS, f'-DAXO_TORCH_VERSION="{torch.version}"']
            flags += [f"-isystem{path}" for path in [*torch.includes, sysconfig.get_paths()["include"]]]
        else:
            flags += CORE_FLAGS
        command = [
            *compiler(),
            *flags,
            *(f"-I{path}" for path in includes),
            *shlex.split(os.environ.get("CXXFLAGS", "")),
        ]
        command += ["-MMD", "-MF", str(target.with_suffix(".d")), "-c", str(source), "-o", str(target)]
        if self.force or is_stale(target, command):
            target.with_suffix(".cmd").unlink(missing_ok=True)
            start = time.time()
            run(command)
            os.utime(target, (start, start))  # a header that changed while the compiler ran is newer than the object
            target.with_suffix(".cmd").write_text(shlex.join(command))
        return target

    def _link(self, objects: list[Path], target: Path, torch: Torch) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.{os.getpid()}")
        libraries = ["-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python", "-ldl", "-lrt"]
        run([*compiler(), "-shared", "-pthread", "-Wl,--exclude-libs,ALL", "-Wl,--gc-sections", *map(str, objects),
             f"-L{torch.library_dir}", *libraries, "-o", str(temporary)])  # fmt: skip
        os.replace(temporary, target)

    def copy_extensions_to_source(self) -> None:
        build_py = self.get_finalized_command("build_py")
        for ext in self.extensions:
            in_place, built = (Path(path) for path in self._get_inplace_equivalent(build_py, ext))
            temporary = in_place.with_name(f".{in_place.name}.{os.getpid()}")
            shutil.copy2(built, temporary)
            os.replace(temporary, in_place)


class BuildPackages(build_py):
    """Start from an empty folder: a module that an earlier build left there, since removed, would go into the wheel."""

    def run(self) -> None:
        if not self.editable_mode:
            for package in {name.split(".")[0] for name in self.packages}:
                shutil.rmtree(Path(self.build_lib) / package, ignore_errors=True)
        super().run()


def compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX", "g++"))


def is_stale(target: Path, command: list[str]) -> bool:
    """Whether `target` must be compiled anew: a file that it was made from is newer or gone, or the command differs."""
    record, dependencies = target.with_suffix(".cmd"), target.with_suffix(".d")
    if not (target.exists() and record.exists() and dependencies.exists()):
        return True
    if record.read_text() != shlex.join(command):
        return True
    made = target.stat().st_mtime
    paths = dependencies.read_text().split(":", 1)[1].replace("\\\n", " ").split()
    return any(not os.path.exists(path) or os.path.getmtime(path) > made for path in paths)


def run(command: list[str]) -> None:
    print(" ".join(command[:1] + command[-3:]), flush=True)
    result = subprocess.run(command, capture_output=True, text=True)
    if result.stderr:
        print(result.stderr, flush=True)
    if result.returncode:
        raise SystemExit(f"building axo._C failed; the command was\n{shlex.join(command)}")


def version() -> str:
    text = (ROOT / "python/axo/__init__.py").read_text()
    match = re.search(r'^__version__ = "(.+)"', text, re.MULTILINE)
    assert match, "python/axo/__init__.py has no __version__"
    return match.group(1)


setup(
    version=version(),
    packages=[
        *find_packages("python", include=["axo", "axo.*"]),
        *find_packages(".", include=["axo_kernels", "axo_kernels.*"]),
        "axo_bench",
    ],
    package_dir={"axo": "python/axo", "axo_kernels": "axo_kernels", "axo_bench": "bench"},
    package_data={
        "axo": ["py.typed", "*.pyi", "**/*.json", "**/*.yaml", "**/*.csv", "**/*.txt"],
        "axo_kernels": ["py.typed", "**/*.json"],
    },
    ext_modules=[Extension("axo._C", [str(path.relative_to(ROOT)) for path in SOURCES], language="c++")],
    cmdclass={"build_ext": BuildCore, "build_py": BuildPackages},
    zip_safe=False,
)
