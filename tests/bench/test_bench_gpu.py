"""The command for a machine with a GPU, end to end on stand-ins and the CPU: ``python -m bench.gpu --walk``.

Oracles are in the scripts: sums written out, on collectives that the stand-in really reduces and moves; fp64 products.
"""

import json
import os
import subprocess

import pytest

from bench import gpu
from tests.launcher import Command, run_as_program


def fork_the_parts() -> None:
    """``prepare``: parts that take what is imported as it is run in forks. Triton's interpreter is chosen at import."""
    start = subprocess.run

    def run(command, **options):
        if command[1:2] != ["-m"] or command[2] == "bench.kernels":
            return start(command, **options)
        part = os.fork()
        if part == 0:
            run_as_program(command[2], command[3:])
        return subprocess.CompletedProcess(command, os.waitstatus_to_exitcode(os.waitpid(part, 0)[1]))

    subprocess.run = run


@pytest.mark.slow
def test_walks_through_without_a_gpu(tmp_path):
    """The same code as on a GPU, at toy sizes: every check right, every verdict a line."""
    walk = Command("bench.gpu", "--walk", "--seconds", "900", "--out", str(tmp_path), prepare=fork_the_parts)
    said = walk.communicate(timeout=900)
    assert walk.returncode == 0, said[-8000:]
    assert "0 of 4 parts failed" in said
    header, *rows = [json.loads(line) for line in (tmp_path / "device.jsonl").read_text().splitlines()]
    assert {"bench", "device", "torch", "commit", "date"} <= header.keys() and header["kind"] == "standin"
    for ranks in (1, 2, 4):
        checks = {row["check"]: row["wrong"] for row in rows if row.get("ranks") == ranks}
        assert {"all_reduce sum", "reduce_scatter max", "scatter", "scaled all_reduce"} <= checks.keys()
        assert ("uneven all_to_all" in checks) == (ranks > 1)
        assert any(name.startswith("graph of 3 communicators") for name in checks)
        assert not any(checks.values()), checks
    assert "overhead over torch's NCCL backend under 3 us a call: not measured" in said
    assert "offload of optimizer, parameters as without: True" in said
    assert "losses apart (at most 0.02)" in said and "MFU (goal: at least 0.55): not measured" in said
    assert (tmp_path / "step_trace.json.gz").stat().st_size > 1000
    assert len((tmp_path / "verdicts.txt").read_text().splitlines()) > 30
    lines = [json.loads(line) for line in (tmp_path / "kernels.jsonl").read_text().splitlines()]
    verdicts = [line["note"] for line in lines if "verdict" in line]
    assert "all results right: True" in verdicts and "tuned, of torch (goal: at least 1): not measured" in verdicts
    assert sum(verdict.endswith("not measured") for verdict in verdicts) == 1 + 9 + 3 * 3 * 2 * 2, (
        "the number of GPT shapes; error, Triton, Gluon, tuned; shares x operations x shapes, hidden and against serial"
    )
    checks = [line for line in lines if "check" in line]
    assert len(checks) == 3 * 3 * (3 * 2 + 3) + 3 * 2 * 4 + 1, (
        "dtypes x layouts x (sizes, epilogues), strategies, rounds"
    )


def test_parts_fit_into_the_time_and_a_second_run_goes_on(monkeypatch, capsys, tmp_path):
    """A part that runs past its share, and one that dies: reported, the others still run; only those two run again."""
    given = {}

    def run(command, timeout):
        name = command[2].removeprefix("bench.")
        given[name] = (command[3:], timeout)
        if name == "device":
            raise subprocess.TimeoutExpired(command, timeout)
        if name == "kernels":  # comes to its end
            line = json.dumps({"note": "as fast as it should be: False", "verdict": False})
            (tmp_path / "kernels.jsonl").write_text(line + "\n")
        return subprocess.CompletedProcess(command, 3 if name == "kernels" else -11)

    arguments = ["--out", str(tmp_path)]
    with pytest.raises(SystemExit):
        gpu.main(arguments)
    assert "no GPU is visible, so nothing is measured; --walk" in capsys.readouterr().err
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(subprocess, "run", run)
    assert gpu.main(arguments) == 4
    said = capsys.readouterr().out
    assert "device: stopped after 270 s" in said and "kernels: 3 verdicts failed" in said and "gpu_step: -11" in said
    assert list(given) == ["kernels", "device", "offload", "gpu_step"]
    kernels, seconds = given["kernels"]
    assert float(kernels[kernels.index("--seconds") + 1]) < seconds < gpu.SECONDS < 8 * 60
    assert (tmp_path / "verdicts.txt").read_text() == "kernels: as fast as it should be: False\n"
    given.clear()
    assert gpu.main(arguments) == 4 and list(given) == ["device", "offload", "gpu_step"]
    assert "kernels: has ended before" in capsys.readouterr().out
    given.clear()
    assert gpu.main([*arguments, "--fresh"]) == 4 and "kernels" in given
    with pytest.raises(SystemExit):
        gpu.main(["--seconds", "10"])
