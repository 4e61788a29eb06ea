"""Builds `axo._C` from csrc/*/*.cpp with a C++ compiler and nothing else, and says which packages go into the wheel.

The rest of the project's description stands in pyproject.toml. What setuptools' own build_ext lacks, and is done here:
  - units compile in parallel, and only those whose source or headers changed (dependency files, as make would);
  - only the units that see torch get torch's include folders (and C++20, as its headers want): the core must compile
    without them;
  - the finished library is renamed into place, so that programs that run from an editable install never see half;
  - two builds at once wait for each other.
torch's bundled pybind11 is used, never pip's: another version has other internals, and a module built with it cannot
exchange torch's types. The torch is that of the environment that axo goes into, which pip's build isolation hides from
this program: `installed_torch` looks behind it.
"""

from __future__ import annotations

import concurrent.futures
import fcntl
import hashlib
import json
import logging
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.command.dist_info import dist_info

ROOT = Path(__file__).resolve().parent
CORE = ("base", "memory", "progress", "host", "hosts", "device", "torch")
SOURCES = sorted(path for folder in CORE for path in (ROOT / "csrc" / folder).glob("*.cpp"))
CORE_FLAGS = ["-std=c++17"]
TORCH_FLAGS = ["-std=c++20", "-DTORCH_API_INCLUDE_EXTENSION_H"]
COMMON_FLAGS = ["-O3", "-fPIC", "-fvisibility=hidden", "-pthread", "-Wall", "-Wextra", "-Wno-unused-parameter"]


def sees_torch(source: Path) -> bool:
    """Only csrc/torch may include torch's headers: the core knows no Python and no torch."""
    return source.parent.name == "torch"


@dataclass(frozen=True)
class Torch:
    """An installed torch: its version, its folder, and with which ABI of the C++ library it was compiled."""

    version: str
    folder: str
    cxx11_abi: int

    @property
    def includes(self) -> list[str]:
        return [f"{self.folder}/include", f"{self.folder}/include/torch/csrc/api/include"]


ASK = """
import json, os, sys, torch
folder, abi = os.path.realpath(torch.__path__[0]), int(torch._C._GLIBCXX_USE_CXX11_ABI)
print(json.dumps([list(sys.version_info[:2]), torch.__version__, folder, abi]))
"""


def installed_torch() -> Torch:
    """Find the torch that axo will run with.

    Raises:
        SystemExit: There is none, or its version is not supported.
    """
    for python, environment in pythons():
        try:
            answer = subprocess.run([python, "-c", ASK], capture_output=True, text=True, env=environment, timeout=120)
            python_version, version, folder, abi = json.loads(answer.stdout)
        except (OSError, ValueError, subprocess.TimeoutExpired):
            continue  # no torch there, or no Python
        if python_version == list(sys.version_info[:2]):
            return supported(Torch(version, folder, abi))
    raise SystemExit(
        f"axo is built against the torch that it will run with, and {sys.executable} has none. Install torch first, "
        f"for your accelerator as pytorch.org says, then axo:\n  pip install torch\n  pip install ."
    )


def pythons() -> Iterator[tuple[str, dict[str, str]]]:
    """Who may see the torch of the target environment: this Python; itself without what isolation puts in its way; the
    Pythons and environments of the programs that started it (`python -m build` and uv build in one of their own)."""
    yield sys.executable, dict(os.environ)
    open_environment = {name: os.environ[name] for name in os.environ if name not in ("PYTHONPATH", "PYTHONNOUSERSITE")}
    yield sys.executable, open_environment
    parent = os.getppid()
    while parent > 1:
        process = Path("/proc", str(parent))
        try:
            program = (process / "cmdline").read_bytes().split(b"\0")[0].decode()
            variables = (process / "environ").read_bytes().split(b"\0")
            parent = int((process / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except (OSError, ValueError, IndexError):
            return
        if Path(program).name.startswith("python"):
            yield program, open_environment
        for variable in variables:
            if variable.startswith(b"VIRTUAL_ENV="):
                yield f"{variable.split(b'=', 1)[1].decode()}/bin/python", open_environment


def supported(torch: Torch) -> Torch:
    """Refuse a torch that pip would replace after the build: the extension serves one minor version."""
    wanted = re.search(r'"torch>=(\d+)\.(\d+),<(\d+)\.(\d+)"', (ROOT / "pyproject.toml").read_text())
    assert wanted, "pyproject.toml names no range of torch versions"
    low, low_minor, high, high_minor = map(int, wanted.groups())
    found = tuple(int(part) for part in torch.version.split(".")[:2])
    if not (low, low_minor) <= found < (high, high_minor):
        raise SystemExit(
            f"axo supports torch {low}.{low_minor} to {high}.{high_minor - 1}, and torch {torch.version} is installed "
            f"in {torch.folder}:\n  pip install 'torch>={low}.{low_minor},<{high}.{high_minor}'\n  pip install ."
        )
    return torch


class RefuseFirst(dist_info):
    """What installers ask for before they download what axo depends on, torch's gigabytes too: the time to refuse."""

    def run(self) -> None:
        wanted = self.distribution.python_requires
        if platform.python_version() not in wanted:  # pip itself says so, too, but after it has fetched torch
            raise SystemExit(
                f"axo needs Python {wanted}, and {sys.executable} is {platform.python_version()}: make an environment "
                "with another, such as python3.13 -m venv .venv"
            )
        installed_torch()
        check_tools()
        super().run()


def check_tools() -> None:
    """Refuse a machine without compiler or Python's headers, by the names of the packages that bring them."""
    program = compiler()[0]
    if not shutil.which(program) and "CXX" in os.environ:
        raise SystemExit(f"CXX names {program!r}, which is no program on the PATH; axo compiles its core with it")
    debian, fedora = [], []
    if not shutil.which(program):
        debian, fedora = ["g++"], ["gcc-c++"]
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        debian, fedora = [*debian, "python3-dev"], [*fedora, "python3-devel"]
    if debian:
        raise SystemExit(
            f"axo's core is compiled when it is installed, and {' and '.join(debian)} is missing:\n"
            f"  sudo apt-get install -y {' '.join(debian)}   (Debian, Ubuntu)\n"
            f"  sudo dnf install -y {' '.join(fedora)}   (Fedora, RHEL)\n"
            "Another compiler: CXX=clang++ pip install ."
        )


class BuildCore(build_ext):
    """Compile changed units in parallel, link once, rename into place."""

    def build_extension(self, ext: Extension) -> None:
        torch = installed_torch()
        check_tools()
        # Relative, as all of our own paths in the commands: objects of one checkout serve a copy of it.
        objects_dir = Path("build") / f"obj-{sysconfig.get_config_var('SOABI')}-torch{torch.version}"
        objects_dir.mkdir(parents=True, exist_ok=True)
        with open(objects_dir / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            sources = [Path(source) for source in ext.sources]
            with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
                slow_first = sorted(sources, key=lambda source: not sees_torch(source))
                objects = list(pool.map(lambda source: self._compile(source, objects_dir, torch), slow_first))
            objects.append(self._compile(sources_digest(objects_dir), objects_dir, torch))
            self._link(sorted(objects), Path(self.get_ext_fullpath(ext.name)), torch)
            link = Path("build/objects")  # the C++ tests take the core's
            link.unlink(missing_ok=True)
            link.symlink_to(objects_dir.name)

    def _compile(self, source: Path, objects_dir: Path, torch: Torch) -> Path:
        target = objects_dir / source.parent.name / (source.stem + ".o")  # folders share names: host/core, device/core
        target.parent.mkdir(exist_ok=True)
        flags = [*COMMON_FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={torch.cxx11_abi}"]
        if sees_torch(source):
            # -isystem: no warnings from headers that are not ours.
            flags += [*TORCH_FLAGS, f'-DAXO_TORCH_VERSION="{torch.version}"']
            flags += [f"-isystem{path}" for path in [*torch.includes, sysconfig.get_paths()["include"]]]
        else:
            flags += CORE_FLAGS
        command = [*compiler(), *flags, "-Icsrc", *shlex.split(os.environ.get("CXXFLAGS", ""))]
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
             f"-L{torch.folder}/lib", *libraries, "-o", str(temporary)])  # fmt: skip
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


def sources_digest(folder: Path) -> Path:
    """A source that holds the digest of all others, by which ranks see whether they run the same program."""
    digest = hashlib.sha256()
    for path in sorted(path for core in CORE for path in Path("csrc", core).glob("*.[ch]*")):
        digest.update(f"{path}\n".encode() + path.read_bytes())
    source, text = folder / "sources_digest.cpp", (
        '#include "base/identity.h"\n'
        f'const char* axo::sources_digest() {{ return "{digest.hexdigest()[:16]}"; }}\n'
    )  # fmt: skip
    if not source.exists() or source.read_text() != text:
        source.write_text(text)
    return source


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
    logging.info(" ".join(command[:1] + command[-3:]))  # not with -q
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


os.chdir(ROOT)  # sources and objects have relative names
setup(
    version=version(),
    packages=[
        *find_packages("python", include=["axo", "axo.*"]),
        *find_packages(".", include=["axo_kernels", "axo_kernels.*"]),
        "axo_bench",
        "axo_bench.lib",
        "axo_bench.papers",
        "axo_bench.products",
    ],
    package_dir={"axo": "python/axo", "axo_kernels": "axo_kernels", "axo_bench": "bench"},
    include_package_data=False,  # only what stands here: the source distribution holds bench/tools, a wheel does not
    package_data={
        "axo": ["py.typed", "*.pyi", "**/*.json", "**/*.yaml", "**/*.csv", "**/*.txt"],
        "axo_kernels": ["py.typed", "**/*.json"],
        "axo_bench": ["papers/*.yaml"],
    },
    ext_modules=[Extension("axo._C", [str(path.relative_to(ROOT)) for path in SOURCES], language="c++")],
    cmdclass={"build_ext": BuildCore, "build_py": BuildPackages, "dist_info": RefuseFirst},
    zip_safe=False,
)
