"""What users get wrong in ``axo bench``: exit code 2 and one line that names it, for every bench.

Oracle: the line itself, as axo/cli/errors.py promises it. Nothing is measured.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import bench
from axo.cli import main as cli
from axo.cli.bench import benchmarks
from bench.tools import bare_run

# A bench, the options that are wrong, and what the line says. Where there is no GPU, some want one before all else.
MISTAKES = {
    "collectives": ("--sizes 1Q", "size '1Q' is not a number of bytes; write 4096, 64K, 1M or 1G"),
    "context": ("--tokens 0", "--tokens, --rounds and --limit are above 0"),
    "curves": ("--grids 7", "grid '7' is not of the form XxYxZxDATA"),
    "device": ("--bogus", "unrecognized arguments: --bogus"),
    "exam": ("--bogus", "unrecognized arguments: --bogus"),
    "experts": ("--rows 3", "--rows, --rounds and --limit are above 0, and --rows a multiple of 4"),
    "gemm": ("--sizes 0", "--sizes '0' is not a whole number of at least 1"),
    "gpu": ("--seconds 1", "--seconds 1 is too short for any result; use at least 60"),
    "gpu_step": ("--rounds x", "argument --rounds: invalid int value: 'x'"),
    "kernels": ("--jobs x", "argument --jobs: invalid int value: 'x'"),
    "memory": ("--every 0", "--every 0 is not at least 1"),
    "offload": ("--device nope", "--device 'nope'"),
    "overlap": ("--shapes 4x4", "--shapes '4x4': use three sizes joined by x"),
    "pipeline": ("--ranks 1", "--ranks 1: wanted numbers of at least 2, such as 2,4"),
    "plan_validation": ("--plans 7", "grid '7' is not of the form XxYxZxDATA"),
    "products": ("--shapes 4x4", "--shapes 4x4 is not of the form MxKxN,MxKxN"),
    "recovery": ("/dev/null", "/dev/null tells of no recovery"),
    "step": ("--cases nope", "--cases: nope: choose from serial, z, x, data"),
}
OF_MPIRUN = {"mpi"}  # what mpirun starts beside bench/collectives.py: it has no options of users


def test_every_bench_has_a_mistake() -> None:
    assert set(benchmarks()) - OF_MPIRUN == set(MISTAKES)


@pytest.mark.parametrize("name", sorted(MISTAKES))
def test_a_mistake_is_one_line(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    options, words = MISTAKES[name]
    monkeypatch.setitem(sys.modules, "axo_bench", bench)  # these files, wherever Axo is installed from
    monkeypatch.setattr(sys, "argv", ["axo", "bench", name, *options.split()])
    with pytest.raises(SystemExit) as end:
        cli.main()
    said = capsys.readouterr().err
    assert end.value.code == 2, said
    assert said.startswith("axo bench") and f"error: {words}" in said and said.count("\n") == 1, said


def test_the_bare_run_wants_a_checkout(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bare_run, "ROOT", tmp_path)
    with pytest.raises(SystemExit) as end:
        bare_run.main([])
    assert end.value.code == 2 and f"{tmp_path} is not a checkout that git can read" in capfd.readouterr().err


def test_no_bench_ends_by_text_alone() -> None:
    """``raise SystemExit("text")`` has exit code 1 and no name: a mistake is a ValueError, or the parser's."""
    from tests.house.test_house import ROOT, sources

    files = [path for path in sources(".py") if path.parent in (ROOT / "bench", ROOT / "bench/lib")]
    assert len(files) > 25
    for path in files:
        for line in path.read_text().splitlines():
            assert "SystemExit" not in line or line.strip() == "raise SystemExit(main())", f"{path.name}: {line}"
