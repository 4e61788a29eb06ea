"""The command ``axo``: what it prints, how it fails, and that it leaves no rank behind.

Most tests run the command's ``main`` inside a process forked from the zygote, which saves the imports; it starts its
ranks itself, as it does for people. Oracles: the serial run, exact lines, exit codes, the process table.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from axo.cli import bench, info
from axo.cli import main as cli
from axo.perf.flops import narayanan
from tests.launcher import Command, Outcome, fork_the_ranks_of_torchrun, rank_outcomes
from tests.train.test_train import NEOX, TEXT

SMALL = [
    *("--model-override", "n_layer=2", "--model-override", "n_embd=64", "--model-override", "intermediate_size=128"),
    *("--batch-size", "8", "--seq-len", "32", "--warmup", "2", "--lr", "2e-3", "--precision", "32-true"),
]


@pytest.fixture()
def text(tmp_path: Path) -> str:
    (tmp_path / "text.txt").write_text(TEXT)
    return str(tmp_path / "text.txt")


def call_main(*arguments: str) -> int:
    """Run the command as if it were started from a shell."""
    for name in list(os.environ):
        if name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE") or name.startswith(
            ("MASTER_", "TORCHELASTIC")
        ):
            del os.environ[name]
    sys.argv = ["axo", *arguments]
    try:
        cli.main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def run_axo(*arguments: str, main: Any = call_main) -> tuple[int, list[str]]:
    """Exit code and the lines that the command and its ranks printed."""
    outcome: Outcome = rank_outcomes(main, 1, *arguments, timeout=120)[0]
    assert outcome.ok, f"{outcome.describe()}\n{outcome.traceback}\n{outcome.output}"
    return outcome.value, outcome.output.strip().splitlines()


# --- training ----------------------------------------------------------------------------------------------------


def test_train_compares_with_serial_and_leaves_log_and_plot(text: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    code, lines = run_axo(
        "train", "--grid", "2x1x2x1", "--data", text, "--steps", "4", "--out", str(out), "--compare-serial",
        "--expect-drop", "-9", *SMALL,
    )  # fmt: skip
    assert code == 0, "\n".join(lines)
    verdict = r"parity: max \|loss - serial\| = \d\.\de-\d\d over 4 steps \(limit 1e-4\): ok"
    assert re.fullmatch(verdict, lines[-1]), lines
    assert re.search(r"nats under ln\(256\) = 5\.545 \(at least -9\): ok$", lines[-2])
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    header, *steps, summary = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert header["tokens"] == len(TEXT.encode()) and header["transport"] == "shared-memory"
    assert header["grid"] == "2x1x2x1" and header["ranks"] == 4 and header["versions"]["torch"] == torch.__version__
    assert [step["step"] for step in steps] == [0, 1, 2, 3] and summary["steps"] == 4
    for step in steps:
        assert 4 < step["loss"] < 7 and step["grad_norm"] > 0 and step["tokens_per_s"] == 256 / step["seconds"]
        assert 0.05 < step["memory_gb"] < 50  # a process that has imported torch
        assert set(step["comm_share"]) == {"x", "y", "z", "data", "world", "all"}
        assert step["comm_share"]["y"] == step["comm_share"]["data"] == 0  # axes of size 1 say nothing
        assert step["comm_share"]["x"] > 0 and step["comm_share"]["z"] > 0 and step["comm_share"]["all"] > 0
        assert step["mfu"] is None and step["hardware_flops"] == step["model_flops"] == narayanan(
            8, 32, 2, 64, 256, recompute=False
        )
    assert steps[1]["lr"] == 2e-3


def main_with_a_broken_all_reduce(*arguments: str) -> int:
    """One all-reduce over y, the tenth of each rank, hands back this rank's own numbers instead of the sum."""
    from axo.comm.communicator import Communicator

    honest = Communicator.all_reduce
    calls = {"y": 0}

    def all_reduce(self: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if self.axis == "y":
            calls["y"] += 1
            if calls["y"] == 10:
                mine = tensor.clone()
                result = honest(self, tensor, *args, **kwargs)
                if hasattr(result, "wait"):
                    result.wait()
                tensor.copy_(mine)
                if (out := kwargs.get("out")) is not None:
                    out.copy_(mine)
                return result
        return honest(self, tensor, *args, **kwargs)

    Communicator.all_reduce = all_reduce  # type: ignore[method-assign]
    return call_main(*arguments)


def test_one_broken_all_reduce_fails_the_parity(text: str, tmp_path: Path) -> None:
    arguments = (
        "train", "--grid", "1x2x1x1", "--data", text, "--steps", "3", "--out", str(tmp_path), "--compare-serial", *SMALL
    )  # fmt: skip
    code, lines = run_axo(*arguments, main=main_with_a_broken_all_reduce)
    assert code == 1
    verdict = re.fullmatch(r"parity: max \|loss - serial\| = (\S+) over 3 steps \(limit 1e-4\): FAILED", lines[-1])
    assert verdict and float(verdict[1]) > 1e-4, lines
    code, lines = run_axo(*arguments)  # the same command, nothing broken
    assert code == 0 and lines[-1].endswith("ok"), lines


def test_bf16_states_its_own_limit(text: str, tmp_path: Path) -> None:
    (tmp_path / "neox.json").write_text(json.dumps(NEOX))
    code, lines = run_axo(
        "train", "--model", str(tmp_path / "neox.json"), "--grid", "2x1x1x1", "--steps", "3", "--batch-size", "8",
        "--seq-len", "32", "--compare-serial", "--out", str(tmp_path / "run"), "--peak-tflops", "2",
        "--recompute", "--data", text, text,
    )  # fmt: skip
    pattern = r"parity \(bf16-mixed, relative\): max \|loss - serial\| / serial = \S+ over 3 steps \(limit 1e-2\): ok"
    assert code == 0 and re.fullmatch(pattern, lines[-1]), lines
    step = json.loads((tmp_path / "run" / "log.jsonl").read_text().splitlines()[1])
    assert step["hardware_flops"] == narayanan(8, 32, 2, 64, 256, recompute=True) > step["model_flops"]
    assert step["mfu"] == pytest.approx(step["model_flops"] / step["seconds"] / 4e12)  # two ranks of 2 TFLOP/s


def test_a_loss_that_does_not_fall_enough_fails(text: str, tmp_path: Path) -> None:
    code, lines = run_axo(
        "train", "--data", text, "--steps", "2", "--out", str(tmp_path), "--expect-drop", "3", *SMALL
    )  # fmt: skip
    assert code == 1 and lines[-1].endswith("(at least 3): FAILED"), lines


# --- wrong input and failures ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--grid", "2x2"],
            "grid '2x2' is not of the form XxYxZxDATA; write four sizes such as 2x2x2x1, or the first three",
        ),
        (["--data", "/nowhere/text"], "data: /nowhere/text does not exist; give files or folders of text"),
        (["--model-override", "n_layer"], "--model-override 'n_layer' is not of the form FIELD=VALUE"),
        (["--grid", "1x1x3x1"], "batch: batch-size=16 rows do not divide over z*data=3 of grid 1x1x3x1; use 15 or 18"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_wrong_input_is_one_line_and_starts_no_rank(arguments: list[str], message: str) -> None:
    code, lines = run_axo("train", *arguments)
    assert code == 2 and lines == [f"axo train: error: {message}"]


def test_what_the_plan_refuses_is_said_once(text: str, tmp_path: Path) -> None:
    code, lines = run_axo(
        "train", "--grid", "6x1x1x1", "--data", text, "--out", str(tmp_path), "--model-override", "n_head=12",
        "--model-override", "n_embd=192", "--model-override", "n_query_groups=4",
    )  # fmt: skip
    errors = [line for line in lines if "error" in line.lower()]
    assert code == 2 and len(errors) == 1 and "Traceback" not in "\n".join(lines), lines
    assert "n_query_groups" in errors[0] and "x=6" in errors[0], errors


def main_that_kills_rank_1_in_a_step(*arguments: str) -> int:
    from axo.train import loop

    honest = loop.Trainer.step

    def step(self: Any, index: int) -> Any:
        if index == 1 and self.comms.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return honest(self, index)

    loop.Trainer.step = step  # type: ignore[method-assign]
    return call_main(*arguments)


def main_that_kills_rank_1_at_its_start(*arguments: str) -> int:
    from axo.train import runner

    honest = runner.set_threads

    def set_threads(*args: Any, **kwargs: Any) -> None:
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        honest(*args, **kwargs)

    runner.set_threads = set_threads
    return call_main(*arguments)


@pytest.mark.parametrize("main", [main_that_kills_rank_1_in_a_step, main_that_kills_rank_1_at_its_start])
def test_a_killed_rank_is_one_message(text: str, tmp_path: Path, main: Any) -> None:
    code, lines = run_axo("train", "--grid", "1x1x4x1", "--data", text, "--out", str(tmp_path), *SMALL, main=main)
    assert code == 1 and "Traceback" not in "\n".join(lines)
    assert lines[-1] == "axo train: error: rank 1 was killed by SIGKILL; is there enough memory?", lines


def main_that_raises_on_rank_2(*arguments: str) -> int:
    from axo.train import loop

    honest = loop.Trainer.step

    def step(self: Any, index: int) -> Any:
        if index == 1 and self.comms.rank == 2:
            raise KeyError("lost")
        return honest(self, index)

    loop.Trainer.step = step  # type: ignore[method-assign]
    return call_main(*arguments)


def test_an_unexpected_error_shows_one_traceback_of_the_rank_that_caused_it(text: str, tmp_path: Path) -> None:
    code, lines = run_axo(
        "train", "--grid", "1x1x4x1", "--data", text, "--out", str(tmp_path), *SMALL, main=main_that_raises_on_rank_2
    )  # fmt: skip
    assert code == 1 and sum(line.startswith("Traceback") for line in lines) == 1, lines
    assert lines[-1] == "axo train: error: rank 2: KeyError: 'lost'"


# --- real processes ----------------------------------------------------------------------------------------------

TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "axo.cli")


def start_afresh(*launcher: str, cwd: Path | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *launcher],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        cwd=cwd,
    )


def endless_run(text: str, out: Path, *options: str, prepare: Callable[[], None] | None = None) -> Command:
    """``axo train`` in its second step or later, of 100,000."""
    arguments = ["train", "--data", text, "--steps", "100000", "--out", str(out), *options, *SMALL]
    command = Command("axo.cli", *arguments, prepare=prepare)
    log, deadline = out / "log.jsonl", time.monotonic() + 250
    while not (log.exists() and log.read_text().count("\n") > 2):
        assert command.poll() is None and time.monotonic() < deadline, command.communicate(timeout=5)
        time.sleep(0.05)
    return command


def living(session: int) -> list[int]:
    """Processes of a session, zombies left out."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            if int(fields[3]) == session and fields[0] != "Z":
                found.append(int(entry.name))
    return found


def test_ctrl_c_ends_all_ranks(text: str, tmp_path: Path) -> None:
    process = endless_run(text, tmp_path, "--grid", "1x1x2x1")
    assert len(living(process.pid)) >= 3
    os.killpg(process.pid, signal.SIGINT)  # what a terminal does
    output = process.communicate()
    assert process.returncode == 130, output
    assert output.strip().splitlines()[-1] == "axo train: interrupted; all ranks have ended"
    assert "Traceback" not in output and "shutting down" not in output and living(process.pid) == []
    for line in (tmp_path / "log.jsonl").read_text().splitlines():
        json.loads(line)


def test_under_torchrun_the_given_ranks_are_used(text: str, tmp_path: Path) -> None:
    out = str(tmp_path / "run")
    arguments = ("train", "--data", text, "--steps", "3", "--compare-serial", "--out", out, *SMALL)
    good = Command(*TORCHRUN, *arguments, "--grid", "1x1x2x1", prepare=fork_the_ranks_of_torchrun)
    output = good.communicate()
    assert good.returncode == 0, output
    parities = [line for line in output.splitlines() if line.startswith("parity")]
    assert len(parities) == 1 and parities[0].endswith("over 3 steps (limit 1e-4): ok"), output


def test_a_grid_that_does_not_match_torchrun_is_one_error(text: str, tmp_path: Path) -> None:
    arguments = ("train", "--data", text, "--grid", "2x2x1x1", "--out", str(tmp_path), *SMALL)
    bad = Command(*TORCHRUN, *arguments, prepare=fork_the_ranks_of_torchrun)
    output = bad.communicate()
    message = "grid 2x2x1x1 has 4 ranks, but 2 were started; start 4, or use a grid such as 2x1x1x1"
    assert bad.returncode != 0 and output.count(message) == 1, output
    assert "axo.train" not in output, output  # no traceback of ours


# --- the other commands ------------------------------------------------------------------------------------------


def test_help_is_quick_and_needs_no_torch() -> None:
    """Oracle: the modules that are loaded when the command line has been read."""
    code = (
        "import sys; sys.argv = ['axo', '--help']; from axo.cli import main as cli\n"
        "try: cli.main()\nexcept SystemExit: pass\n"
        "print('heavy:', sorted({'torch', 'litgpt', 'matplotlib', 'numpy'} & set(sys.modules)))"
    )
    process = start_afresh("-c", code)
    output = process.communicate(timeout=60)[0]
    assert output.strip().endswith("heavy: []"), output
    assert all(name in output for name in ("train", "info", "bench"))


def test_a_current_folder_that_is_gone_is_told(tmp_path: Path) -> None:
    """MKL ended the process: "Cannot load libtorch_cpu.so"."""
    code = (
        "import os, sys; os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone'); sys.argv = ['axo', 'train']\n"
        "from axo.cli import main as cli; cli.main()"
    )
    process = start_afresh("-c", code, cwd=tmp_path)
    output = process.communicate(timeout=60)[0]
    assert output == "axo train: error: the current folder has been removed; change into one that exists\n"
    assert process.returncode == 2


def test_info_checks_every_axis() -> None:
    code, lines = run_axo("info", "--grid", "1x2x2x1")
    assert code == 0, lines
    assert f"torch        {version('torch')}: ok" in lines
    assert "grid         1x2x2x1: 4 ranks over shared-memory" in lines
    assert "axis z       2 ranks, stride 2, all_reduce ok" in lines
    assert "axis data    1 rank, stride 4, all_reduce ok" in lines
    asked = ("torch", "triton", "nccl", "rccl", "compiler", "gpus", "files", "memory")
    verdicts = [line for line in lines if line.split()[0] in asked]
    assert len(verdicts) == 7 and all(re.search(": |not ", line) for line in verdicts), lines


def test_info_says_what_a_machine_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(info, "version", lambda name: version(f"no-{name}"))
    facts = info.facts()
    assert facts["triton"] == "not installed; GPUs need it" and "'.[litgpt]'" in facts["litgpt"]
    assert info._compiler().startswith("no g++") and "sudo apt-get install g++" in info._compiler()
    monkeypatch.setattr(info.resource, "getrlimit", lambda _: (256, 256))
    assert info._files() == "only 256 may be open; many ranks want more: ulimit -n 4096"


def complete(words: str) -> int:
    """What the shell asks once ``axo --install-completion`` has been typed."""
    asked = {"_AXO_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    os.environ.update(asked)
    return call_main()


def test_the_shell_completes_commands_and_options() -> None:
    for words, expected in (("axo tr", "train"), ("axo train --compare", "--compare-serial")):
        code, lines = run_axo(words, main=complete)
        assert code == 0 and expected in lines, lines


def test_bench_lists_and_refuses(tmp_path: Path) -> None:
    assert list(bench.benchmarks()) == sorted(bench.benchmarks())
    code, lines = run_axo("bench")
    assert code == 0 and lines[0] == "usage: axo bench NAME [ARGUMENTS]"
    code, lines = run_axo("bench", "nothing-like-it")
    assert code == 2 and lines[0].startswith("axo bench: error: 'nothing-like-it' is not one of")


def test_a_bench_hands_work_to_processes(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    code, lines = run_axo("bench", "memory", "--seconds", "1", "--json", str(out))
    assert code == 0 and len(out.read_text().splitlines()) > 1, lines


def test_tune_prints_a_table_and_writes_the_cache(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    small = ["tune", "--model", "gpt-5b", "--grid", "2x2x2x1", "--shrink", "64", "--rows", "128", "--dtype", "float32"]
    code, lines = run_axo(str(tmp_path), *small, "--json", str(out), main=call_in)
    assert code == 0 and "torch ms" in lines[2], lines
    assert sum("forward" in line or "grad_" in line for line in lines) == 12
    written = json.loads(out.read_text())
    assert len(written["products"]) == 12 and written["grid"] == "2x2x2x1"
    assert f"{written['measured']} products measured" in lines[-2] and str(tmp_path) in lines[-2]
    assert Path(written["cache"]).parent == tmp_path and json.loads(Path(written["cache"]).read_text())["entries"]
    code, lines = run_axo(str(tmp_path), *small, main=call_in)
    assert code == 0 and lines[-1].startswith("0 products measured"), lines


def call_in(cache: str, *arguments: str) -> int:
    """Ranks are forked from the zygote, whose environment is older than the test."""
    os.environ["AXO_TUNE_CACHE"] = cache
    torch.set_num_threads(1)
    return call_main(*arguments)


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["--model", "gpt-7b"], "model 'gpt-7b' is not one of gpt-5b"),
        (["--model", "gpt-5b", "--grid", "3x1x1x1"], "in_features=4096 does not divide over x=3"),
        (["--model", "gpt-5b", "--grid", "2x2"], "grid"),
        (["--model", "gpt-5b", "--device", "cuda"], "0 GPUs are visible; use --device cpu"),
        (["--model", "gpt-5b", "--device", "abacus"], "use cpu, cuda or cuda:N"),
        (["--model", "gpt-5b", "--dtype", "int8"], "dtype 'int8' is not one of bfloat16, float16, float32"),
        (["--model", "gpt-640b", "--rows", "100000000"], "GB are free on cpu; use a larger --grid"),
        (["--model", "gpt-5b", "--rows", "0"], "--rows 0 is not at least 1"),
        (["--model", "gpt-5b", "--json", "no/such/folder/x"], "folder 'no/such/folder' does not exist"),
    ],
)
def test_tune_refuses_in_one_line(arguments: list[str], complaint: str) -> None:
    result = CliRunner().invoke(cli.app, ["tune", *arguments])
    assert result.exit_code == 2 and result.output.count("\n") == 1, result.output
    assert result.output.startswith("axo tune: error: ") and complaint in result.output
