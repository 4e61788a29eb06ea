"""The table printer of the benches: aligned columns as rows arrive, JSON lines beside them.

The first JSON line says where the numbers come from: device, versions, commit, a digest of the sources, date.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

import axo
import axo_kernels
from axo_kernels.tune.error_line import in_a_line

_KEPT = {"section", "failed"}  # notes that a run goes on with
_MARKS = {"bench", "begun", "begins", "over"}  # lines that are no rows
_QUIET = 5.0  # seconds, at least, between two words on how far a bench is
_TRACE = 6000  # characters of a traceback that are kept: its end, where the error is
LEFT_OUT = "left_out"  # of a note: what was not measured, so that the same command has something to go on with
# What the parts of bench.gpu run, below the root of the repository (axo stands where it is imported from): what is
# mended elsewhere leaves their results standing.
_LIB = Path("bench/lib")
RUN_BY: dict[str, tuple[Path, ...]] = {
    "kernels": (Path("axo_kernels"), _LIB, *(Path(f"bench/{name}.py") for name in ("kernels", "gemm", "overlap"))),
    "device": (Path("axo"), Path("axo_kernels"), _LIB, Path("bench/device.py")),
    "offload": (Path("axo"), Path("axo_kernels"), _LIB, Path("bench/offload.py")),
    "gpu_step": (Path("axo"), Path("axo_kernels"), _LIB, Path("bench/gpu_step.py"), Path("bench/gemm.py")),
}


def environment(device: torch.device, part: str = "") -> dict[str, Any]:
    """Describe the machine, the versions, the commit and what is run, which need not be the commit's.

    Args:
        device: Where it runs.
        part: Of bench.gpu, whose sources alone count; "": all that there are.
    """
    try:
        import triton

        triton_version = triton.__version__
    except ModuleNotFoundError:
        triton_version = "none"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    folder = Path(__file__).resolve().parent
    command = ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"]
    try:
        commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    except OSError:
        commit = "unknown"
    return {
        "device": name,
        "kind": device.type,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton_version,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        **_libraries(device),
        "commit": commit,
        "sources": sources(_run_by(part)),
        "date": time.strftime("%Y-%m-%d"),
    }


def _libraries(device: torch.device) -> dict[str, str]:
    """The vendor's libraries that a GPU's numbers are compared with, by version."""
    if device.type != "cuda" or torch.version.hip:
        return {}
    libraries = {"nccl": "none", "cublas": "unknown"}
    with contextlib.suppress(Exception):
        libraries["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    with contextlib.suppress(Exception):
        library = ctypes.CDLL(f"libcublasLt.so.{str(torch.version.cuda).split('.')[0]}")
        library.cublasLtGetVersion.restype = ctypes.c_size_t
        libraries["cublas"] = str(library.cublasLtGetVersion())
    return libraries


def _run_by(part: str) -> list[Path]:
    """Where the files of a part of bench.gpu are here."""
    packages = {"axo": Path(axo.__file__).parent, "axo_kernels": Path(axo_kernels.__file__).parent}
    packages["bench"] = Path(__file__).resolve().parent.parent
    named = RUN_BY.get(part, [Path(name) for name in packages])
    return [packages[path.parts[0]].joinpath(*path.parts[1:]) for path in named]


def sources(roots: Iterable[Path]) -> str:
    """A digest of these files, and of the Python files and extensions below these folders."""
    digest = hashlib.sha256()
    for root in roots:
        files = [root] if root.is_file() else (path for path in root.rglob("*") if path.suffix in (".py", ".so"))
        for path in sorted(files):
            digest.update(f"{path.relative_to(root.parent)}\0{path.stat().st_size}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two descriptions that begin with :func:`environment` allow numbers beside each other.

    The commit does not count: another one may have mended what is not run, which the digest of the sources tells.
    """
    return all(one.get(key) == value for key, value in other.items() if key not in ("date", "threads", "commit"))


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The JSON lines of a file, none where there is no file; a last line that a killed run has torn is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return rows


def rows_to_go_on_with(path: Path, known: dict[str, Any]) -> list[dict[str, Any]]:
    """What a run that left something out has measured; the file keeps that alone, and its first line.

    A run that left out nothing, and one of another device, versions or sources, is begun anew: the file goes. What a
    run was in the middle of when it was killed has failed (:meth:`Table.under_way`).

    Args:
        path: JSON lines.
        known: :func:`environment` of this run.
    """
    lines = read_rows(path)
    ended = any("verdict" in line for line in lines) and not any(line.get(LEFT_OUT) for line in lines)
    if ended or not lines or not same(lines[0], known):
        path.unlink(missing_ok=True)
        return []
    kept = [line for line in lines if not line.keys() & _MARKS and ("note" not in line or line.keys() & _KEPT)]
    for what, within in list(under_way(lines).items())[-1:]:  # it may have hung: a second run must not hang there too
        told = f"{what}: not tried again, since the run before was stopped, or died, in the middle of it"
        kept.append({"note": told + (f", at {within}" if within else ""), "failed": what, "cut_off": within})
    swap = path.with_suffix(".swap")
    swap.write_text("".join(f"{json.dumps(line)}\n" for line in [lines[0], *kept]), encoding="utf-8")
    swap.replace(path)
    return kept


def under_way(lines: Iterable[dict[str, Any]]) -> dict[str, str]:
    """What began in these lines and was not over (:meth:`Table.under_way`), and the last that it named of itself.

    The last of them is inside of the others: a case of a section.
    """
    found: dict[str, str] = {}
    for line in lines:
        if "begun" in line:
            found[line["begun"]] = ""
        elif "begins" in line and found:
            found[next(reversed(found))] = line["begins"]
        elif "over" in line:
            found.pop(line["over"], None)
    return found


def trace_of(error: Exception) -> str:
    """The end of an error's traceback."""
    return "".join(traceback.format_exception(error))[-_TRACE:]


class Table:
    """Prints one row at a time and remembers all.

    Args:
        columns: Name to format, for example ``{"shape": "s", "ms": ".3f"}``.
        path: JSON lines are written here as well; None: nowhere.
        header: Goes into the first JSON line.
        earlier: Rows that stand in the file already (:func:`rows_to_go_on_with`); of them also what has failed. None:
            no run goes on with this one.
    """

    def __init__(
        self,
        columns: dict[str, str],
        path: Path | None = None,
        header: dict[str, Any] | None = None,
        earlier: Iterable[dict[str, Any]] | None = None,
    ) -> None:
        self.columns = columns
        self._goes_on = earlier is not None
        earlier = list(earlier or ())
        self.rows = [row for row in earlier if "failed" not in row]
        self.failed: dict[str, str] = {row["failed"]: row["note"] for row in earlier if "failed" in row}
        self._file = None
        self._told = -_QUIET  # the first word at once
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8")
            self._write(header or {})
        self._widths = {name: max(len(name), 34 if form == "s" else 9) for name, form in columns.items()}
        print("  ".join(name.ljust(width) for name, width in self._widths.items()), flush=True)

    def add(self, **row: Any) -> None:
        """Print a row; values that are None print as ``-``."""
        self.rows.append(row)
        cells = []
        for name, form in self.columns.items():
            value = row.get(name)
            text = "-" if value is None else format(value, form) if form != "s" else str(value)
            cells.append(text.ljust(self._widths[name]))
        print("  ".join(cells), flush=True)
        self._write(row)

    def progress(self, text: str) -> None:
        """Say on stderr how far a bench is, once in some seconds; it is no row, and no JSON line."""
        if time.monotonic() - self._told >= _QUIET:
            self._told = time.monotonic()
            print(text, file=sys.stderr, flush=True)

    def note(self, text: str, **values: Any) -> None:
        """Print a line below the table; it becomes a JSON line too."""
        print(text, flush=True)
        self._write({"note": text} | values)

    @contextlib.contextmanager
    def under_way(self, what: str) -> Iterator[None]:
        """Mark in the file where something begins and is over, however that ends: what a kill cuts off has no end."""
        if not self._goes_on:
            yield
            return
        self._write({"begun": what})
        try:
            yield
        finally:
            self._write({"over": what})

    def begins(self, what: str, **values: Any) -> None:
        """Name, in the file, what is done next of what is under way: after a kill it is all that tells."""
        if self._goes_on:
            self._write({"begins": what} | values)

    def fail(self, what: str, error: Exception, **values: Any) -> None:
        """Note what could not be measured, and why; it is not tried again by a run that goes on."""
        self.failed[what] = told = f"{what}: {in_a_line(error)}"
        self.trace(told, error, failed=what, **values)

    def trace(self, text: str, error: Exception, **values: Any) -> None:
        """Note an error with its traceback: the machine that it came from may be gone when it is read."""
        print(trace_of(error), flush=True)
        self.note(text, **values, trace=trace_of(error))

    def judge(self, verdicts: dict[str, bool | str]) -> int:
        """Print a line for each verdict; return how many goals are missed."""
        for name, verdict in verdicts.items():
            self.note(f"{name}: {verdict}", verdict=verdict)
        return sum(verdict is False for verdict in verdicts.values())

    def _write(self, row: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()
