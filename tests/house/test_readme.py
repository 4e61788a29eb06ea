"""The README is short, its example runs as printed, its pictures are drawn; what it and the docs name exists."""

import contextlib
import importlib.util
import io
import re
from pathlib import Path

import torch
import typer

from axo.cli.main import app
from tests.launcher import run_ranks

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def run_example():
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names: dict = {}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(code, "README.md", "exec"), names)
    serial_x = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    layer, head = names["layer"], names["head"]
    hidden = torch.nn.functional.linear(serial_x, layer.full_weight(), bias_of(layer, names["axo"]))
    expected = torch.nn.functional.linear(torch.relu(hidden), head.full_weight(), bias_of(head, names["axo"]))
    # fp32 sums over 64 and 96 products, split in two
    torch.testing.assert_close(names["full"], expected, rtol=1e-5, atol=1e-5)
    return printed.getvalue()


def bias_of(layer, axo):
    return axo.unshard(layer.bias.detach(), layer.bias.placement)


def test_the_example_runs_as_printed():
    first, *others = run_ranks(run_example, 4)
    assert "torch.Size([16, 32])" in first and "all_reduce y" in first and others == [""] * 3


def test_the_readme_is_short():
    """A product page: 120 lines, 8 rows of support, 10 lines of example (imports and empty lines not counted)."""
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    lines = [line for line in code.splitlines() if line.strip() and not line.startswith("import ")]
    assert 5 <= len(lines) <= 10, lines
    (matrix,) = re.findall(r"## What it supports\n(.*?)\n## ", README, re.DOTALL)
    head, rule, *rows = [line for line in matrix.splitlines() if line.startswith("|")]
    assert head.startswith("| | CPU, one host") and rule.startswith("|---")
    assert 5 <= len(rows) <= 8, f"{len(rows)} rows"
    assert len(README.splitlines()) <= 120


def test_the_pictures_are_what_draw_draws(tmp_path):
    """Of the picture that matplotlib lays out, all texts (each bar has one): outlines differ with its version."""
    spec = importlib.util.spec_from_file_location("draw", ROOT / "docs/draw.py")
    draw = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(draw)
    draw.IMAGES, committed = tmp_path, ROOT / "docs/img"
    draw.draw_all()
    drawn = {path.name: path.read_text() for path in tmp_path.glob("*.svg")}
    assert set(drawn) == {path.name for path in committed.glob("*.svg")}
    for name, text in drawn.items():
        there = (committed / name).read_text()
        if "Matplotlib" in text:
            text, there = (re.findall(r"<!-- (.*?) -->", svg) for svg in (text, there))
            assert len(text) > 20
        assert there == text, f"docs/img/{name} is old: run python docs/draw.py"


def test_what_the_readme_names_exists():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), f"README links to {target}"
    for argument in re.findall(r"pytest ([^`]+)`", README):
        for path in argument.split():
            assert (ROOT / path).exists(), f"README names {path}"
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make ([\w-]+)|`make ([\w-]+)", README, re.MULTILINE):
        assert re.search(rf"^{target[0] or target[1]}:", makefile, re.MULTILINE), f"README names make {target}"


def test_commands_of_the_readme_and_the_docs_exist_with_their_options():
    """``axo NAME --option``: the subcommand, or the bench, has each of them."""
    commands = typer.main.get_command(app).commands
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *ROOT.glob("examples/*/README.md")]
    found = [
        (page, line)
        for page in pages
        for line in re.findall(r"(?:^|`|&& )axo ([a-z][^`\n]*)", page.read_text(), re.MULTILINE)
    ]
    assert len(found) > 30
    for page, line in found:
        line = line.split(" #")[0].split("  ")[0]
        name, *rest = line.split()
        where = f"{page.relative_to(ROOT)}: axo {line}"
        assert name in commands, where
        if name == "bench" and rest and re.fullmatch(r"[a-z_]+", rest[0]):
            scripts = [ROOT / "bench" / f"{rest[0]}.py", ROOT / "bench" / rest[0] / "__main__.py"]
            assert any(script.exists() for script in scripts), where
            known = "".join(path.read_text() for path in (*scripts, ROOT / "bench/lib/arguments.py") if path.exists())
        elif name in ("bench", "litgpt"):  # its options are LitGPT's too
            continue
        else:
            known = " ".join(
                option for parameter in commands[name].params for option in [*parameter.opts, *parameter.secondary_opts]
            )
        for option in re.findall(r"(?<=\s)--[a-z][a-z-]*", line):
            assert re.search(rf"{option}(?![a-z-])", known) or option == "--help", f"{where}: no option {option}"
