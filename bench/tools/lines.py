"""How heavy is the project? Files, lines and Python statements by folder, of the working tree or of a commit.

    python -m bench.tools.lines --commit main --json

Lines are all lines of sources (.py, .pyi, .cpp, .h, .inc). Statements are those of Python's syntax tree without
docstrings: they do not change where lines are joined or comments leave. The product is csrc without its tests,
axo_kernels and python/axo; a package's parts are counted in it.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = (".py", ".pyi", ".cpp", ".h", ".inc")
PRODUCT = "product"
FOLDERS = ("csrc", "axo_kernels", "python/axo", "bench", "tests", "csrc/tests")


def statements(text: str) -> int:
    """Statements of a Python source, without docstrings and other strings that stand alone."""
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt)]
    alone = [node.value for node in nodes if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)]
    return len(nodes) - sum(isinstance(constant.value, str) for constant in alone)


def sources(commit: str = "") -> Iterator[tuple[str, str]]:
    """(path, text) of each source that git knows; ``commit`` "": as it is now, new files too.

    Raises:
        ValueError: git knows no such commit.
    """
    listing = ["ls-files", "--cached", "--others", "--exclude-standard"]
    command = ["git", "-C", str(ROOT), *(["archive", commit] if commit else listing)]
    run = subprocess.run(command, capture_output=True)
    if run.returncode:
        raise ValueError(f"lines: {run.stderr.decode().strip()}")
    if commit:
        with tarfile.open(fileobj=io.BytesIO(run.stdout)) as archive:
            for member in archive:
                content = archive.extractfile(member) if member.name.endswith(SOURCES) else None
                if content is not None:
                    yield member.name, content.read().decode()
    else:
        for name in sorted(set(run.stdout.decode().splitlines())):
            if name.endswith(SOURCES) and (ROOT / name).is_file():
                yield name, (ROOT / name).read_text()


def count(files: Iterator[tuple[str, str]]) -> dict[str, dict[str, int]]:
    """Files, lines and statements of each folder, of python/axo's packages, and of the product."""
    rows = {name: {"files": 0, "lines": 0, "statements": 0} for name in (PRODUCT, *FOLDERS)}
    for path, text in files:
        parts = path.split("/")
        folder = next((name for name in reversed(FOLDERS) if path.startswith(f"{name}/")), None)
        if folder is None:
            continue
        names = [folder, *([PRODUCT] if folder in FOLDERS[:3] else [])]
        names += ["/".join(parts[:3])] if folder == "python/axo" and len(parts) > 3 else []
        for name in names:
            row = rows.setdefault(name, {"files": 0, "lines": 0, "statements": 0})
            row["files"] += 1
            row["lines"] += text.count("\n")
            row["statements"] += statements(text) if path.endswith(".py") else 0
    packages = sorted(rows.keys() - {PRODUCT, *FOLDERS})
    at = FOLDERS.index("python/axo") + 1
    return {name: rows[name] for name in (PRODUCT, *FOLDERS[:at], *packages, *FOLDERS[at:])}


def main() -> None:
    """Print the table, or one line of JSON."""
    parser = argparse.ArgumentParser("python -m bench.tools.lines", description=__doc__.splitlines()[0])
    parser.add_argument("--commit", default="", help="count this one; default: the files as they are now")
    parser.add_argument("--json", action="store_true", help="one line of JSON in the place of the table")
    options = parser.parse_args()
    try:
        rows = count(sources(options.commit))
    except ValueError as error:
        parser.exit(2, f"{error}\n")
    if options.json:
        print(json.dumps(rows))
        return
    print(f"{'':28}{'files':>7}{'lines':>9}{'statements':>12}")
    for name, row in rows.items():
        indent = "" if name in (PRODUCT, *FOLDERS) else "  "
        print(f"{indent + name:28}{row['files']:7,}{row['lines']:9,}{row['statements'] or '-':>12}")


if __name__ == "__main__":
    main()
