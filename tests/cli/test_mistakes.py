"""What users get wrong: one line that names it, the right exit code, no traceback, and nothing written.

Oracle: the line itself. Commands run in this process where they end before ranks exist, else in one of their own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from axo.cli import errors
from axo.cli import main as cli
from axo.errors import Timeout
from axo.launch import Rank
from tests.cli.test_cli import SMALL, endless_run, living, run_axo, text
from tests.launcher import Command

__all__ = ["text"]  # a fixture


@pytest.fixture()
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with things that are not what they are named for."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("x")
    (tmp_path / "text.txt").write_text("some words\n" * 999)
    (tmp_path / "folder").mkdir()
    (tmp_path / "with_log" / "log.jsonl").mkdir(parents=True)
    (tmp_path / "with_plot" / "loss.png").mkdir(parents=True)
    (tmp_path / "with_file").mkdir()
    (tmp_path / "with_file" / "checkpoints").touch()
    (tmp_path / "with_link").mkdir()
    (tmp_path / "with_link" / "checkpoints").symlink_to("/nowhere")
    (tmp_path / "with_fifo").mkdir()
    os.mkfifo(tmp_path / "with_fifo" / "log.jsonl")
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("/nowhere")
    (tmp_path / "list.yaml").write_text("[1, 2")
    return tmp_path


def override(field: str) -> list[str]:
    return ["--model-override", field]


def trained(arguments: list[str]) -> list[str]:
    """The command, on a text that does."""
    return ["train", *([] if "--data" in arguments else ["--data", "text.txt"]), *arguments]


MISTAKES = [
    (["--grid", "3x1x1x1"], "n_head=8 does not divide over x=3; use n_head=6 or 9, or a grid with x in {1, 2, 4, 8}"),
    (["--grid", "1x3x1x1"], "n_embd=128 does not divide over y=3"),
    (
        ["--grid", "2x2x1x1", "--algorithm", "tesseract", *override("intermediate_size=385")],
        "intermediate_size=385 does not",
    ),
    (["--grid", "1x1x1x3"], "batch-size=16 rows do not divide"),
    (["--model", "tinny"], "neither a LitGPT configuration nor"),
    (["--model", "no.yaml"], "the file no.yaml does not exist"),
    (["--data", "/no/such/text"], "data: /no/such/text does not exist"),
    (["--pipeline", "5"], "4 blocks over 5 stages"),
    (["--pipeline", "2", "--schedule", "2f2b"], "schedule='2f2b' is not known"),
    (["--lr", "-1"], "lr=-1.0 is out of range"),
    (override("norm_class_name=Foo"), "norm_class_name='Foo' is not known; use one of LayerNorm, RMSNorm"),
    (override("mlp_class_name=GPT"), "mlp_class_name='GPT' is not known; use one of GptNeoxMLP, LLaMAMLP"),
    (override("n_layer=[1"), "model: n_layer='[1' is not YAML: "),
    (override("n_layer=0"), "n_layer=0 is not a count from 1 to"),
    (override("n_layer=-1"), "n_layer=-1 is not a count from 1 to"),
    (override("n_embd=0"), "n_embd=0 is not a count from 1 to"),
    (override("n_head=0"), "n_head=0 is not a count from 1 to"),
    (override("n_embd=1000000000"), "n_embd=1000000000 is not a count from 1 to"),
    (override("n_embd=100000"), "parameters, whose weights, gradients and optimizer state take at least 1,"),
    (override("rotary_percentage=7"), "rotary_percentage=7 is not in [0, 1]"),
    (override("norm_eps=x"), "norm_eps='x' is not a number"),
    (override("bias=maybe"), "bias='maybe' is not true or false"),
    (["--microbatches", "8"], "microbatches=8 is of pipeline stages; add --pipeline N, or leave it out"),
    (["--pipeline", "1", "--grid", "auto", "--schedule", "zbv"], "schedule=zbv is of pipeline stages; add"),
    (["--ranks", "4"], "ranks=4 is for --grid auto; with a grid of your own leave it out"),
    (["--grid", "auto"], "grid=auto does not know how many ranks to start; add --ranks N, or use torchrun"),
    (["--grid", "auto", "--ranks", "2"], "there is no machine.yaml here; add --mach"),
    (["--grid", "auto", "--ranks", "2", "--precision", "32-true"], "not precision='32-true'; name a grid"),
    (["--grid", "auto", "--ranks", "2", "--offload", "activations"], "with offload=activations name a grid"),
    (["--out", ""], "out is empty; name the folder of the run"),
    (["--out", "file/x"], "out=file/x cannot be written: "),
    (["--out", "link"], "out=link is a link to /nowhere, which does not exist"),
    (["--out", "x" * 300], "cannot be written: File name too long"),
    (["--out", "with_log"], "with_log/log.jsonl is a folder, and a file of that name is to be written"),
    (["--out", "with_plot"], "with_plot/loss.png is a folder, and a file of that name is to be written"),
    (["--out", "with_fifo"], "with_fifo/log.jsonl is a FIFO, and a file of that name is to be written"),
    (["--out", "with_file", "--save-every", "9"], "with_file/checkpoints is not a folder"),
    (["--out", "with_link", "--save-every", "9"], "out=with_link/checkpoints is a link to /nowhere, which does"),
    (["--trace", "folder"], "trace=folder is a folder; name a file, such as folder/trace.json"),
    (["--trace", "fifo"], "trace=fifo is not a file"),
    (["--trace", "file/t.json"], "trace=file/t.json cannot be written: "),
    (["--trace", "x.png"], "trace=x.png ends in .png, the name of its picture; use x.json"),
    (["--lr", "inf"], "lr=inf is out of range; it must be at least 0 and finite"),
    (["--beta2", "1.0"], "beta2=1.0 is out of range; it must be in [0, 1)"),
    (["--expect-drop", "nan"], "expect-drop=nan is not a finite number of nats"),
    (["--data", ""], "data: a path is empty; name files or folders of text"),
    (["--data", "fifo"], "data: fifo is neither a file nor a folder"),
    (["--data", "/dev/null"], "data: /dev/null is neither a file nor a folder"),
    (["--data", "link"], "data: link is a link to /nowhere, which does not exist"),
    (["--data", "folder"], "data: the folder folder holds no files"),
    (["--tokenizer", "folder"], "tokenizer: folder is not a file; give a tokenizer.json"),
    (["--tokenizer", "list.yaml"], "tokenizer: list.yaml is not a tokenizer.json"),
    (["--model", "fifo"], "model 'fifo' is neither a LitGPT configuration nor a .yaml or .json file"),
    (["--model", "list.yaml"], "model: list.yaml is neither YAML nor JSON"),
    (["--resume", ""], "resume is empty; use auto, or name a checkpoint"),
    (["--resume", "auto", "--overwrite"], "overwrite starts again, and resume continues; use one of the two"),
    (["--device", "tpu"], "device='tpu' is not known; use cpu, or cuda"),
    (["--steps", "many"], "Invalid value for '--steps'"),
    (["--nope"], "No such option: --nope"),
    (["--out", "/proc/x"], "out=/proc/x cannot be written: No such file or directory in /proc"),
    (["--offload", "optimizer", "--offload-dir", "/proc/x"], "offload-dir=/proc/x cannot be written: "),
    (["--offload", "everything"], "offload='everything': 'everything' is not known; use none, or a list of"),
    (["--offload", "activations=99"], "asks for 99 blocks, and the model has 4; use activations for all"),
    (["--overlap", "everything"], "overlap everything is not known; use oar, ors, oag or none"),
    (["--gather-cache", "some"], "gather_cache='some' is not known; use 'all', 'none', a number of layers"),
    (["--data", "file"], "data: 1 tokens hold 0 windows of seq-len=128"),
    (["--resume", "nowhere"], "/nowhere does not exist; give a folder step-... that axo.checkpoint.save wrote"),
    (["--resume", "folder"], "/folder holds no checkpoint; give a folder step-... that axo.checkpoint.save wrote"),
    (["--resume", "file"], "/file is a file; give a folder step-... that axo.checkpoint.save wrote, or its parent"),
    (["--resume", "s3://bucket/run"], "s3://bucket/run is an address, not a folder; mount it, and give the folder"),
    (["--device", "cpu:0", "--grid", "1x1x2x1"], "is one device, and grid 1x1x2x1 has 2 ranks; use device='cpu'"),
]


@pytest.mark.parametrize(
    ("arguments", "message"),
    MISTAKES,
    ids=lambda value: "-".join(value)[:40] if isinstance(value, list) else "",
)
def test_train(here: Path, arguments: list[str], message: str) -> None:
    before = sorted(here.rglob("*"))
    result = CliRunner().invoke(cli.app, trained(arguments))
    assert result.exit_code == 2 and result.stderr.count("\n") == 1, result.output
    assert result.stderr.startswith("axo train: error: ") and message in result.stderr, result.stderr
    assert sorted(here.rglob("*")) == before


OTHERS = [
    ("trian", "axo: error: No such command 'trian'"),
    ("finetune_lora quick", "axo: error: finetune_lora is a command of LitGPT's; type axo litgpt finetune_lora"),
    ("--nope", "axo: error: No such option: --nope"),
    (
        "plan --model gpt-5b --gpus 8",
        "axo plan: error: no machine is named and there is no machine.yaml here; add --machine",
    ),
    ("simulate --model gpt-5b --grid 1x1x8x1 --machine alps --plot folder", "'folder' is a folder; name a file in it"),
    ("simulate --model gpt-5b --grid 1x1x8x1 --machine alps --trace folder", "'folder' is a folder; name a file"),
    ("profile --out folder", "'folder' is a folder; name a file in it"),
    ("tune --model gpt-5b --json folder", "'folder' is a folder; name a file in it"),
    ("info --flight", "axo info: error: --flight needs files"),
    ("consolidate folder -", "OUT is -, and only text goes through a pipe; name a file or a folder"),
    ("consolidate folder", "axo consolidate: error: Missing argument 'OUT'"),
    (
        "consolidate nowhere out.pth",
        "axo consolidate: error: checkpoint: nowhere does not exist; give a folder",
    ),
    ("consolidate folder out.pth", "axo consolidate: error: checkpoint: folder holds no checkpoint; give a folder"),
    ("consolidate file file/x", "axo consolidate: error: out=file/x cannot be written: "),
    ("consolidate file file", "/file is a file; give a folder"),
    ("dryrun --grid 2x2", "axo dryrun: error: grid '2x2' is not of the form XxYxZxDATA"),
    ("dryrun --grid 2x2x2x1", "axo dryrun: error: give the model by --model NAME, or by --litgpt CONFIG"),
    ("dryrun --grid 2x1x1x1 --model pythia-14m", "seq-len=2048 is not in [1, block_size=512]; use a shorter sequence"),
    ("dryrun --grid 2x1x1x1 --model pythia-14m --seq-len 64 --ranks 9", "ranks='9': '9' is not a rank of 2x1x1x1"),
    (
        "dryrun --grid 3x1x1x1 --model pythia-14m --seq-len 64",
        "intermediate_size=512 does not divide over x=3; use intermediate_size=510",
    ),
    ("profile --device tpu", "axo profile: error: device='tpu' is not known; use cpu or cuda"),
]


@pytest.mark.parametrize(("arguments", "message"), OTHERS)
def test_other_commands(here: Path, arguments: str, message: str) -> None:
    result = CliRunner().invoke(cli.app, arguments.split())
    assert result.exit_code == 2 and result.output.count("\n") == 1 and message in result.output, result.output


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("RANK", "abc", "RANK='abc' is not a whole number of at least 0; a launcher, such as torchrun, sets it"),
        ("RANK", "4", "RANK=4 is not a rank of WORLD_SIZE=1; use 0 to 0"),
        ("LOCAL_RANK", "x", "LOCAL_RANK='x' is not a whole number"),
        ("LOCAL_WORLD_SIZE", "0", "LOCAL_WORLD_SIZE=0 is no number of ranks; a launcher, such as torchrun, sets it"),
        ("WORLD_SIZE", "2", "grid 1x1x1x1 has 1 ranks, but 2 were started; start 1, or use a grid such as 2x1x1x1"),
    ],
)
def test_ranks_of_the_environment(monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str) -> None:
    for variable in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    for variable, usual in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", name: value}.items():
        monkeypatch.setenv(variable, usual)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    result = CliRunner().invoke(cli.app, ["train"])
    assert result.exit_code == 2 and result.stderr.count("\n") == 1 and message in result.stderr, result.stderr


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("AXO_CHECK", "AXO_CHECK='nowhere' is not known; use one of 0, 1, or unset it"),
        ("AXO_TUNE", "AXO_TUNE='nowhere' is not known; use one of off, cached, first-step, or unset it"),
        ("AXO_FLIGHT_DIR", "AXO_FLIGHT_DIR='nowhere' is not a folder; make it first, or unset the variable"),
    ],
)
def test_variables(here: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str) -> None:
    monkeypatch.setenv(name, "nowhere")
    result = CliRunner().invoke(cli.app, trained(["--steps", "1"]))
    assert (result.exit_code, result.stderr) == (2, f"axo train: error: {message}\n")


def test_a_rank_without_a_world_is_read_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning reads it when it is imported: "invalid literal for int() with base 10"; -1 it can read."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for value in ("abc", ""):
        monkeypatch.setenv("RANK", value)
        result = CliRunner().invoke(cli.app, ["train"])
        assert (result.exit_code, result.stderr) == (
            2,
            f"axo train: error: RANK={value!r} is not a whole number; without WORLD_SIZE, unset it\n",
        )
    monkeypatch.setenv("RANK", "-1")
    assert Rank.from_environment() is None


# --- a run's folder ----------------------------------------------------------------------------------------------


def test_a_new_run_does_not_touch_an_earlier_runs_checkpoints(text: str, tmp_path: Path) -> None:
    out, checkpoints = tmp_path / "out", tmp_path / "out" / "checkpoints"
    usual = ["train", "--data", text, "--steps", "2", "--save-every", "1", "--out", str(out), *SMALL]
    code, lines = run_axo(*usual)
    assert code == 0, lines
    before = {path: path.stat().st_mtime_ns for path in checkpoints.rglob("*")}
    code, lines = run_axo(*usual, "--seed", "9")
    assert code == 2 and len(lines) == 1, lines
    assert lines[0].startswith(
        f"axo train: error: out={out} holds checkpoints of an earlier run, the newest step-0000000"
    )
    assert "--resume" in lines[0] and "--out" in lines[0] and "--overwrite" in lines[0]
    assert {path: path.stat().st_mtime_ns for path in checkpoints.rglob("*")} == before

    other = tmp_path / "other.txt"
    other.write_text(Path(text).read_text()[:-1] + "!!\n")
    for change, what in ((["--seed", "9"], "seed=0, now it is 9"), ([str(other)], "text=")):  # one text more
        code, lines = run_axo(*usual, "--resume", "auto", "--steps", "3", *change)
        assert code == 2 and f"was saved with {what}" in lines[-1] and "or say --allow-new-data" in lines[-1], lines
    code, lines = run_axo(*usual, "--resume", "auto", "--steps", "3", "--seed", "9", "--allow-new-data")
    assert code == 0 and "3 steps" in lines[-1], lines

    code, lines = run_axo(*usual, "--overwrite")
    assert code == 0, lines
    assert sorted(path.name for path in checkpoints.glob("step-*")) == ["step-00000001", "step-00000002"]


def test_a_second_run_in_the_same_folder_is_refused_by_name(text: str, tmp_path: Path) -> None:
    first = endless_run(text, tmp_path / "out")
    try:
        code, lines = run_axo("train", "--data", text, "--steps", "2", "--out", str(tmp_path / "out"), *SMALL)
        assert code == 2 and len(lines) == 1 and "is in use by process" in lines[0], lines
    finally:
        os.killpg(first.pid, signal.SIGKILL)
        first.communicate()
    code, lines = run_axo("train", "--data", text, "--steps", "2", "--out", str(tmp_path / "out"), *SMALL)
    assert code == 0, "death has released the folder"


def test_a_trace_that_cannot_be_written_does_not_end_the_run(text: str, tmp_path: Path) -> None:
    run = ["train", "--data", text, "--steps", "3", "--out", str(tmp_path / "out"), *SMALL]
    code, lines = run_axo(*run, "--trace", "/proc/trace.json")
    assert code == 0, lines
    assert sum("the trace is not written: '/proc/trace.json' cannot be used" in line for line in lines) == 1, lines


def test_a_library_for_which_memory_has_no_room_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    error = ImportError("/x.so: failed to map segment from shared object")  # under ulimit -v
    assert errors._end(error, "axo train") == 1
    assert capfd.readouterr().err == f"axo train: error: not enough memory: {error}\n"


def test_ranks_that_do_not_meet_are_one_line(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    assert errors._end(Timeout("connect (rank 1 of 2): nobody listens"), "axo train") == 1
    assert capfd.readouterr().err == "axo train: rank 1: connect (rank 1 of 2): nobody listens\n"


# --- signals, pipes, terminals -----------------------------------------------------------------------------------


def as_nohup_does() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def without_nohup() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT], ids=lambda number: number.name)
def test_a_signal_ends_all_ranks_with_128_and_its_number(text: str, tmp_path: Path, number: signal.Signals) -> None:
    prepare = as_nohup_does if number == signal.SIGTERM else without_nohup
    process = endless_run(text, tmp_path, "--grid", "1x1x2x1", prepare=prepare)
    if number == signal.SIGTERM:  # what is ignored stays so
        os.killpg(process.pid, signal.SIGHUP)
        time.sleep(0.5)
    os.kill(process.pid, number)
    output = process.communicate()
    assert process.returncode == 128 + number, output
    assert output.strip().splitlines()[-1] == f"axo train: interrupted by {number.name}; all ranks have ended"
    assert "Traceback" not in output and living(process.pid) == []


def complain_elsewhere() -> None:
    os.dup2(os.open(os.environ["COMPLAINTS"], os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)


def test_a_closed_pipe_ends_without_a_word(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `axo train ... | head -1`: the rank that prints, and the command, end like any other Unix tool."""
    complaints = tmp_path / "complaints"
    monkeypatch.setenv("COMPLAINTS", str(complaints))
    arguments = ["train", "--data", text, "--steps", "300", "--out", str(tmp_path / "run"), *SMALL]
    command = Command("axo.cli", *arguments, prepare=complain_elsewhere)
    assert command.hang_up() and command.returncode == 128 + signal.SIGPIPE
    assert complaints.read_text() == ""

    plan = "plan --model pythia-14m --gpus 4 --machine dgx-a100 --batch-tokens 65536"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    closed = f"exec {sys.executable} -m axo.cli {plan} <&- >&-"
    ended = subprocess.run(["sh", "-c", closed], env=environment, stderr=subprocess.PIPE, check=False)
    assert (ended.returncode, ended.stderr) == (0, b""), "without standard streams"
    process = subprocess.Popen(  # of Python's own end
        [sys.executable, "-m", "axo.cli", "info"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait(60) == 128 + signal.SIGPIPE


def print_in_ascii() -> None:
    """What Python makes of PYTHONIOENCODING=ascii: what is not ASCII raises."""
    sys.stdout = open(1, "w", encoding="ascii", closefd=False)


def test_a_terminal_without_unicode_shows_other_signs(text: str, tmp_path: Path) -> None:
    arguments = ("train", "--data", text, "--steps", "2", "--out", str(tmp_path), *SMALL)
    command = Command("axo.cli", *arguments, prepare=print_in_ascii)
    shown = command.communicate()
    assert command.returncode == 0 and shown.isascii(), shown
    assert f"log {tmp_path}/log.jsonl - loss curve" in shown and "tokens/s - " in shown, shown
