"""Guards the house: imports go down only, the core knows no Python, one subject a file, one word for one thing.

Everything is read, nothing is run, but for the last test, which resolves each public name.
"""

import ast
import functools
import inspect
import re
import subprocess
from pathlib import Path

import pytest

import axo

ROOT = Path(__file__).resolve().parents[2]
AXO = ROOT / "python" / "axo"
MOST_LINES = 600
REASON = "long because"  # in the head of a file that is longer

# Words that were replaced, and by what: none of them names a file or stands in code, comments or pages again.
REPLACED_FILES = {
    "presence": "process_alive",
    "starts": "store_namespaces",
    "supervisor": "restarts",
    "seats": "core_spread",
    "pace": "write_mode",
    "guard": "step_check",
    "as_built": "recorded_init",
    "foretold": "predicted_order",
}
REPLACED = {
    r"\bas_built\b": "recorded init",
    r"\bopaque": "compile",
    r"\bsupervisor": "restarts",
    r"\btakes? leave\b": "leaves",
    r"\bseats?\b": "core_spread",
    r"\bStagePace\b": "write_mode",
    r"\bforetold\b": "predicted order",
    r"\bpresence\b": "process_alive",
    r"\bpace\b": "write_mode",
    r"\bstarts\.(py|h|cpp)\b|\bimport starts\b": "store namespaces",
    r"\bguard\.(py|h)\b|\bimport guard\b|\bStepGuard\b": "step check",
}

# A package may import those of a lower level, and itself. What stands here is the design's order of the house.
LEVELS = [
    {"cores", "errors", "files", "lazy", "settings", "slurm"},
    {"check"},
    {"grid"},
    {"launch", "arrangement"},
    {"comm"},
    {"placement"},
    {"quantized", "sharding", "perf", "offload"},
    {"optim"},
    {"overlap"},
    {"matmul"},
    {"nn"},
    {"plans", "checkpoint"},
    {"parallelization"},
    {"pipeline", "regridding"},
    {"train"},
    {"dryrun"},
    {"integrations"},
    {"cli"},
    {"__main__"},
]
# Names of two classes, each of which is public: why both keep it. Any other name stands for one class.
SHARED_NAMES = {
    "AxoStrategy": "what Fabric and Lightning's Trainer call a strategy, each with its own base class",
    "Mismatch": "ranks that would not do the same: the error of a run, and what a dry run finds instead",
}
LEVEL = {name: number for number, names in enumerate(LEVELS) for name in names}
# The same for the folders of csrc: a file includes its own folder and those to its left; device knows no host or hosts.
CORE_FOLDERS = ["base", "memory", "progress", "host", "hosts", "device", "torch"]
# What the planner may use at module level: arithmetic. Functions that measure may import what they measure.
PURE = {
    "axo",
    "axo.arrangement",
    "axo.grid",
    "axo.errors",
    "axo.files",
    "axo.launch",
    "axo.placement",
    "axo.perf",
    "axo.matmul.activations",
    "axo.matmul.cost",
}
STANDARD = {"torch", "triton", "numpy", "axo_kernels"}


@functools.cache
def tracked():
    """Every file of the project, as git sees it: also new ones, not ignored ones."""
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, capture_output=True, text=True)
    if listing.returncode == 0:
        return [ROOT / name for name in listing.stdout.splitlines() if (ROOT / name).is_file()]
    return [path for path in ROOT.rglob("*") if path.is_file() and not {".venv", "build"} & set(path.parts)]


def sources(*suffixes):
    return [path for path in tracked() if path.suffix in suffixes]


@functools.cache
def module_of(path):
    """(line, dotted name, whether at the module's level) of each import; (line, name, annotation) of what has one.

    A function's annotation is that of what it returns.
    """
    tree, found, annotated = ast.parse(path.read_text(), str(path)), [], []
    root = ROOT / "python" if AXO in path.parents else ROOT
    package = path.relative_to(root).parts[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.arg) and node.annotation is not None:
            annotated.append((node.lineno, node.arg, node.annotation))
        elif isinstance(node, ast.AnnAssign):
            name = getattr(node.target, "id", getattr(node.target, "attr", None))
            annotated.append((node.lineno, name, node.annotation))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.returns is not None:
            annotated.append((node.lineno, f"{node.name}()", node.returns))
        elif isinstance(node, ast.Import):
            found += [(node.lineno, alias.name, node in tree.body) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                name = f"{base}.{alias.name}"
                found.append((node.lineno, name if base == "axo" or file_of(name) else base, node in tree.body))
    return found, annotated


def file_of(name):
    """The file of a module of the project by its dotted name; None: it is none of them."""
    place = (ROOT / "python" if name.split(".")[0] == "axo" else ROOT).joinpath(*name.split("."))
    files = (place.with_suffix(".py"), place / "__init__.py")
    return next((file for file in files if file.is_file()), None)


def imports_of(path, module_level=False):
    """(line, dotted name) of each import; `from axo import x` counts as axo.x."""
    return [(line, name) for line, name, top in module_of(path)[0] if top or not module_level]


def top_of(path):
    return path.relative_to(AXO).with_suffix("").parts[0]


def place(path, line):
    return f"{path.relative_to(ROOT)}:{line}"


def test_imports_go_down_only():
    wrong = []
    for path in AXO.rglob("*.py"):
        here = top_of(path)
        if here == "__init__":
            continue
        assert here in LEVEL, f"{path.relative_to(ROOT)}: give the module {here!r} a level in LEVELS"
        for line, name in imports_of(path):
            parts = name.split(".")
            if parts[0] != "axo" or len(parts) == 1 or parts[1] in ("_C", here):
                continue
            target = parts[1] if parts[1] in LEVEL else axo._PUBLIC.get(parts[1], f"axo.{parts[1]}").split(".")[1]
            if here == "perf" and name in ("axo.matmul.cost", "axo.matmul.activations"):
                continue  # what an algorithm sends, multiplies and keeps is arithmetic that stands beside it
            if LEVEL.get(target, -1) >= LEVEL[here]:
                wrong.append(f"{place(path, line)} imports {name}, which is not below it")
    assert not wrong, "\n".join(wrong)


def circles(edges):
    """Sets of nodes each of which leads to all others of its set; ``edges``: node -> those that it leads to."""
    reached = {}
    for start in edges:
        reached[start], new = set(), [start]
        while new:
            more = edges[new.pop()] - reached[start]
            reached[start] |= more
            new += more
    return {
        frozenset(other for other in reached[node] if node in reached[other]) for node in edges if node in reached[node]
    }


def test_no_circle_of_imports():
    """Inside a package; imports for types alone count."""
    edges = {}
    for path in AXO.rglob("*.py"):
        files = {file_of(name) for _, name in imports_of(path)} - {None, path}
        edges[path] = {file for file in files if AXO in file.parents and top_of(file) == top_of(path)}
    assert sum(map(len, edges.values())) > 300
    assert circles({1: {2}, 2: {3}, 3: {2}, 4: {1}}) == {frozenset({2, 3})}
    wrong = [" ".join(sorted(str(path.relative_to(AXO)) for path in circle)) for circle in circles(edges)]
    assert not wrong, f"modules that import each other, for types too: {wrong}; one of them should know less"


# Habits that are being given up, in python/axo: a pattern, and how often it stands there still. No number may rise,
# and what has become less is written down.
AT_MOST = {
    r"^\s*(found|here|made|held|known) = ": 4,  # a variable's name says what it is
    r"__class__ = ": 4,  # an object keeps the class that it was made of
}


@pytest.mark.parametrize("pattern", AT_MOST)
def test_habits_that_are_given_up(pattern):
    count = sum(len(re.findall(pattern, path.read_text(), re.MULTILINE)) for path in AXO.rglob("*.py"))
    assert count <= AT_MOST[pattern], f"{count} of {pattern!r}; there were {AT_MOST[pattern]}, and none is added"
    assert count == AT_MOST[pattern], f"{count} of {pattern!r} now: write that into AT_MOST"


# What one room passes to the next, by the name of the parameter or attribute; such a thing has a class or a Protocol.
SEAMS = {"comms", "communicator", "exchange", "exchanges", "engine", "route", "placement", "placements", "gradients"}
SEAMS |= {"gathers", "pool", "bucket", "buckets", "overlap", "matmul", "products", "layer", "norm", "core", "owner"}
# Rooms whose functions say what they return, but for those that give back what somebody else's function gave.
TYPED_ROOMS = ("overlap", "matmul")
PASSED_ON = {"computed()", "whole()"}


def test_no_any_at_the_seams():
    wrong, seen = [], 0
    for path in [*AXO.rglob("*.py"), *(ROOT / "axo_kernels").rglob("*.py")]:
        typed = AXO in path.parents and top_of(path) in TYPED_ROOMS
        for line, named, annotation in module_of(path)[1]:
            returned = named is not None and named.endswith("()")
            if named is None or not (named.lstrip("_").removesuffix("()") in SEAMS or (typed and returned)):
                continue
            seen += 1
            elsewhere = returned and (named in PASSED_ON or named.startswith("__"))
            # Of what a function returns, a bare Any, or a tuple or an iterator of it; a dict of options may hold any.
            said = ast.unparse(annotation).replace("dict[str, Any]", "").replace("dict[int, Any]", "")
            said = said.replace("AbstractContextManager[Any]", "")
            if re.search(r"\bAny\b", said) and not elsewhere:
                wrong.append(f"{place(path, line)}: {named}: {ast.unparse(annotation)}")
    assert seen > 500 and not wrong, "\n".join(wrong)


def test_packages_export_and_hold_no_logic():
    for room in ("overlap", "matmul", "nn"):
        path = AXO / room / "__init__.py"
        for node in ast.parse(path.read_text()).body:
            plain = isinstance(node, ast.Import | ast.ImportFrom | ast.Assign | ast.Expr)
            for_types = isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "not TYPE_CHECKING")
            assert plain or for_types, (
                f"{place(path, node.lineno)}: an __init__ only exports; the rest goes into a module"
            )


def test_only_the_runtime_imports_the_extension():
    allowed = {AXO / "comm" / "extension.py"}
    mention = (path for path in sources(".py") if "_C" in path.read_text())
    users = {path for path in mention for _, name in imports_of(path) if name == "axo._C"}
    assert users <= allowed, users - allowed


def test_kernels_know_torch_and_triton_only():
    standard_library = __import__("sys").stdlib_module_names
    for path in (ROOT / "axo_kernels").rglob("*.py"):
        for line, name in imports_of(path):
            top = name.split(".")[0]
            assert not name or top in STANDARD or top in standard_library, f"{place(path, line)} imports {name}"


def test_planning_is_arithmetic():
    for path in (AXO / "perf").rglob("*.py"):
        for line, name in imports_of(path, module_level=True):
            assert name.split(".")[0] != "torch", f"{place(path, line)} imports torch"
            pure = name.split(".")[0] != "axo" or name in PURE or name.startswith("axo.perf") or name == "axo.Grid"
            assert pure, f"{place(path, line)} imports {name}"


def core_files():
    return [path for path in (ROOT / "csrc").rglob("*") if path.suffix in (".h", ".cpp", ".inc")]


def test_includes_go_down_only():
    up, seen = set(), 0
    for path in core_files():
        folder, name = path.parent.name, f"{path.parent.name}/{path.name}"
        if "tests" in path.relative_to(ROOT / "csrc").parts:
            continue
        for include in re.findall(r'^#include "(.*)"', path.read_text(), re.MULTILINE):
            target, seen = include.split("/")[0], seen + 1
            below = CORE_FOLDERS.index(target) <= CORE_FOLDERS.index(folder)
            if not below or (folder == "device" and target in ("host", "hosts")):
                up.add((name, include))
    assert seen > 200 and not up, up


def test_the_core_knows_no_python_and_no_torch():
    for path in core_files():
        if path.parent.name == "torch" or path.name == "torch_device.cpp":
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            foreign = re.match(r"\s*#\s*include\s*[<\"](torch|c10|ATen|pybind11|Python\.h|cuda|hip|nccl)", line)
            assert not foreign or "nccl_api" in line, f"{place(path, number)}: {line}"


def test_a_long_file_says_why():
    long = {}
    for path in sources(".py", ".cpp", ".h", ".inc", ".pyi"):
        lines = path.read_text().splitlines()
        if len(lines) > MOST_LINES and REASON not in " ".join(lines[:40]).lower():
            long[str(path.relative_to(ROOT))] = len(lines)
    assert not long, f"over {MOST_LINES} lines, without {REASON!r} in their first 40: {long}"


def test_no_replaced_word_is_left():
    here, wrong = Path(__file__).resolve(), []
    any_of_them = re.compile("|".join(REPLACED))
    for path in sources(".py", ".cpp", ".h", ".inc", ".md", ".pyi"):
        if path == here or path.name == "CHANGELOG.md":
            continue
        if path.stem in REPLACED_FILES:
            wrong.append(f"{path.relative_to(ROOT)}: a file of that subject is called {REPLACED_FILES[path.stem]}")
        text = path.read_text()
        for number, line in enumerate(text.splitlines() if any_of_them.search(text) else (), 1):
            wrong += [f"{place(path, number)}: say {new!r}" for old, new in REPLACED.items() if re.search(old, line)]
    assert not wrong, "\n".join(wrong)


# Of the process itself: no name of a package is replaced.
PROCESS_SETTINGS = {("command", "sys.argv"), ("rank", "torch._dynamo.config.disable")}


def test_every_replaced_name_of_a_package_stands_in_the_table():
    """An assignment to an attribute of what a file imports, in the modules that LitGPT's commands run."""
    found, room = set(), AXO / "integrations" / "litgpt"
    for path in room.glob("*.py"):
        if path.stem in ("patches",):  # the table itself
            continue
        tree = ast.parse(path.read_text())
        imported = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names = [(alias.asname or alias.name).split(".")[0] for alias in node.names]
                imported |= dict(zip(names, names, strict=True))
            elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("axo"):
                imported |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        for node in ast.walk(tree):
            for target in node.targets if isinstance(node, ast.Assign) else ():
                root, _, rest = ast.unparse(target).partition(".")
                if isinstance(target, ast.Attribute) and root in imported:
                    found.add((path.stem, f"{imported[root]}.{rest}"))
    (table,) = [
        ast.literal_eval(node.value)
        for node in ast.parse((room / "patches.py").read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ELSEWHERE"
    ]
    assert found - PROCESS_SETTINGS == {(where, name) for name, (where, _) in table.items()}


def class_names(path):
    """(name, line) of each class, and of each type that a module gives a name to (``Pair = tuple[int, int]``)."""
    tree = ast.parse(path.read_text(), str(path))
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield node.name, node.lineno
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names = [target.id for target in targets if isinstance(target, ast.Name)]
        yield from ((name, node.lineno) for name in names if re.fullmatch(r"_*[A-Z]\w*[a-z]\w*", name))


def test_a_class_name_stands_for_one_class():
    defined = {}
    for path in [*AXO.rglob("*.py"), *(ROOT / "axo_kernels").rglob("*.py")]:
        for name, line in class_names(path):
            defined.setdefault(name, []).append(place(path, line))
    twice = {name: places for name, places in defined.items() if len(places) > 1}
    assert "Grid" in defined and "CoreWork" in defined
    assert set(twice) == set(SHARED_NAMES), {name: twice.get(name) for name in set(twice) ^ set(SHARED_NAMES)}


def test_a_file_opens_with_what_it_does():
    for path in sources(".py"):
        text = re.sub(r"\A(#.*\n|\s)*", "", path.read_text())
        assert not text or re.match(r'r?"""\s*\S', text), f"{path.relative_to(ROOT)} has no docstring"
    for path in sources(".cpp", ".h", ".inc"):
        # A source may leave that to the header that it opens with.
        opening = ("//", f'#include "{path.parent.name}/{path.stem}.h"', f'#include "{path.stem}.h"')
        assert path.read_text().startswith(opening), f"{path.relative_to(ROOT)} does not open with what it does"


def test_no_options_vanish_in_keyword_arguments():
    import axo.nn

    public = [getattr(axo, name) for name in axo._PUBLIC] + [getattr(axo.nn, name) for name in axo.nn.__all__]
    for item in filter(callable, public):
        if isinstance(item, type) and issubclass(item, BaseException):
            continue
        kinds = {parameter.kind for parameter in inspect.signature(item).parameters.values()}
        assert inspect.Parameter.VAR_KEYWORD not in kinds, f"{item} takes **kwargs"


def test_nothing_of_one_machine_in_the_tree():
    # Split, so that this file does not hold them.
    folders = ["ho" + "me", "ro" + "ot", "wo" + "rk", "opt/py" + "pi"]
    words = [f"/{folder}/" for folder in folders] + ["pypi" + ".org", "python" + "hosted", "py" + "env/"]
    pattern = re.compile("|".join(re.escape(word) for word in words))
    wrong = []
    for path in tracked():
        if path.suffix in (".png", ".pdf") or path.name == "LICENSE":
            continue
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if pattern.search(line):
                wrong.append(f"{place(path, number)}: {line.strip()[:100]}")
    assert not wrong, "\n".join(wrong)


def test_skips_state_their_reason():
    for path in (ROOT / "tests").rglob("*.py"):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            bare = re.search(r"@pytest\.mark\.(skip|xfail)\b(?!.*reason=)(?!if)", line)
            assert not bare, f"{place(path, number)}: {line.strip()}"


def test_a_set_up_of_a_module_can_be_repeated():
    """Work stealing gives a worker tests of a module twice, and so sets the module's fixtures up twice. What takes no
    fixture of the session, its folder above all, finds nothing of the first time."""
    wrong = []
    for path in (ROOT / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef):
                continue
            for mark in map(ast.unparse, node.decorator_list):
                taken = {argument.arg for argument in node.args.args} - {"tmp_path_factory"}
                if "fixture(" in mark and re.search(r"scope='(module|class|package)'", mark) and taken:
                    wrong.append(f"{place(path, node.lineno)}: {node.name} takes {sorted(taken)}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", sorted(axo._PUBLIC))
def test_public_names_resolve(name):
    module = ROOT / "python" / Path(*axo._PUBLIC[name].split("."))
    assert module.with_suffix(".py").exists() or module.is_dir(), f"axo.{name}: no module {axo._PUBLIC[name]}"
    hides = ROOT / "python" / "axo" / name
    assert not hides.with_suffix(".py").exists() and not hides.is_dir(), f"axo.{name}: a module of this name hides it"
    assert getattr(axo, name) is not None


def test_environment_variables_stand_in_the_table():
    from axo.settings import VARIABLES

    reads = re.compile(r"""(?:environ(?:\.get\(|\.setdefault\(|\[)|getenv\(|value_of\(|is_on\()\s*["'](AXO_\w+)""")
    read = {
        name
        for path in sources(".py", ".cpp", ".h")
        if not {"tests", "bench"} & set(path.relative_to(ROOT).parts)
        for name in reads.findall(path.read_text())
    }
    assert read and read == {variable.name for variable in VARIABLES}
