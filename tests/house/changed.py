"""The test files that are nearest to what has changed, by imports: what ``make check`` runs beside its quick tests.

    python -m tests.house.changed [--base COMMIT] [--all]

Changed is what differs from ``--base``, and what git does not know yet. A test is as near to a file as there are
imports from one to the other, at any level of a module, for types too; ``"axo.cli"`` as a string counts, since tests
start programs and packages load modules by such names. Of each changed file the NEAREST tests are printed, those of its
own name first. Nothing is printed, and the quick tests are what runs, where these were more than MOST (unless
``--all``): then it is ``make test`` that answers.
"""

import argparse
import collections
import re
import subprocess
import sys

import axo
from tests.house.test_house import ROOT, file_of, imports_of, sources

NEAREST, MOST = 3, 10


def git(*words):
    """The lines that git prints; None: it failed."""
    run = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)
    return run.stdout.splitlines() if run.returncode == 0 else None


def default_base():
    """Where this branch left main; on main itself the commit before."""
    head = git("rev-parse", "HEAD")
    for main in ("main", "origin/main"):
        base = git("merge-base", main, "HEAD")
        if base and base != head:
            return base[0]
    return "HEAD~1"


def changed_files(base):
    """Python files that are no longer as they were at ``base``; None: git does not know that."""
    lists = git("diff", "--name-only", base), git("ls-files", "--others", "--exclude-standard")
    if None in lists:
        return None
    return sorted({ROOT / name for names in lists for name in names if name.endswith(".py")})


def imported(path):
    """The project's files that a file imports or names."""
    names = {name for _, name in imports_of(path)}
    mentioned, files = set(re.findall(r"""["']((?:axo|bench|tests)\.[\w.]+)["']""", path.read_text())), set()
    for name in names | {text for text in mentioned if file_of(text)}:
        if name.startswith("axo.") and file_of(name) is None:  # a public name, such as axo.Linear
            name = axo._PUBLIC.get(name.split(".")[1], name)
        file = file_of(name)
        files.add(file)
        if file is not None and file.name == "__init__.py" and name in mentioned:
            files.add(file_of(f"{name}.__main__"))
    return files - {None, path}


def distances(file, importers):
    """Each file that reaches ``file``, and over how many imports."""
    steps, new = {file: 0}, collections.deque([file])
    while new:
        nearer = new.popleft()
        for other in importers[nearer]:
            if other not in steps:
                steps[other] = steps[nearer] + 1
                new.append(other)
    return steps


def nearest(files):
    """The tests of changed files."""
    importers = collections.defaultdict(set)
    for path in sources(".py"):
        for target in imported(path):
            importers[target].add(path)
    chosen = set()
    for file in files:
        tests = [(steps, file.stem not in test.stem, test) for test, steps in distances(file, importers).items()]
        tests = sorted(entry for entry in tests if entry[2].name.startswith("test_") and entry[2].exists())
        chosen |= {test for _, _, test in tests[: 1 if tests and tests[0][0] == 0 else NEAREST]}
    return sorted(chosen)


def main():
    """Print them, one a line."""
    parser = argparse.ArgumentParser("python -m tests.house.changed", description=__doc__.splitlines()[0])
    parser.add_argument("--base", default="", help="a commit; default: where this branch left main, or HEAD~1 on main")
    parser.add_argument("--all", action="store_true", help=f"also where they are more than {MOST}")
    options = parser.parse_args()
    base = options.base or default_base()
    files = changed_files(base)
    if files is None:
        print(f"changed: git knows no commit {base}; the quick tests alone", file=sys.stderr)
        return
    tests = nearest(files)
    if len(tests) > MOST and not options.all:
        print(f"changed: {len(tests)} test files are near to what changed; the quick tests alone", file=sys.stderr)
        return
    for test in tests:
        print(test.relative_to(ROOT))


if __name__ == "__main__":
    main()
