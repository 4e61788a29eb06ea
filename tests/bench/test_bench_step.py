"""axo bench step: its contestants train the same model, and its rows say what was measured."""

from __future__ import annotations

import argparse
import multiprocessing
import platform
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from axo.launch import RankFailed
from bench import gpu_step, step
from bench.lib import step_models
from bench.lib.emulation import emulated
from bench.lib.table import Table, read_rows
from tests.launcher import run_ranks
from tests.test_launch import put_aside_by_malloc

OPTIONS: dict[str, Any] = {
    "hidden": 32, "layers": 1, "heads": 4, "vocab": 64, "seq_len": 16, "tokens": 32, "precision": "32-true",
    "recompute": False, "repeats": 1, "device": "cpu", "peak_tflops": 0.1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("case", "ranks"),
    [
        ("z", 2),
        *(pytest.param(*case, marks=pytest.mark.soak) for case in (("serial", 1), ("x", 2), ("data", 2))),
    ],
)
def test_contestants_agree_on_the_loss(case: str, ranks: int) -> None:
    """Oracle: torch's own schemes, which start from the same weights: the loss after ten AdamW steps, to 1e-3."""
    rows = run_ranks(step.measure, ranks, case, argparse.Namespace(**OPTIONS))[0]
    assert all(row["right"] for row in rows), rows
    names = [row["contestant"] for row in rows]
    assert names[0].startswith("Axo ") and len(set(names)) == len(names)
    if case != "serial":
        rival = step_models.RIVALS[case][0]
        assert {f"{rival} gloo", f"{rival} axo"} <= set(names) and names[-1] == "no communication"
    for row in rows:
        assert len(row["all_ms"]) == 8 and row["mfu"] == row["hfu"] > 0
        assert row["tokens_s"] == pytest.approx(32 * (ranks if case in ("z", "data") else 1) / row["ms"] * 1e3)


def test_contestants_in_processes_of_their_own_agree_too(capsys: pytest.CaptureFixture[str]) -> None:
    rows = step.measure_apart("z", argparse.Namespace(**OPTIONS, ranks=2), Table({}))
    assert capsys.readouterr().err.startswith("z: starting contestant 1, ranks: 2\n"), "before anything takes time"
    assert len(rows) == 7 and all(row["right"] and len(row["all_ms"]) == 8 for row in rows), rows
    assert [row["comm"] is not None for row in rows] == [row["contestant"].startswith("Axo ") for row in rows]


def test_a_contestant_that_fails_is_named(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def fails(comms: Any) -> Any:
        raise ValueError("no such rival")

    players = [*step.contestants("z", step.sizes_of(argparse.Namespace(**OPTIONS)))[:1], step.Entry(fails)]
    monkeypatch.setattr(step, "contestants", lambda case, sizes: players)
    before = set(multiprocessing.active_children())  # Triton's interpreter, of other tests
    with pytest.raises(RankFailed, match="the ranks of contestant 1 of case z ended; their error stands above"):
        step.measure_apart("z", argparse.Namespace(**OPTIONS, ranks=2))
    assert "no such rival" in capfd.readouterr().err
    assert set(multiprocessing.active_children()) <= before


def test_emulated_products_are_told_beside_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    flags, cpu = "flags: avx2 fma", torch.device("cpu")
    monkeypatch.setattr(Path, "read_text", lambda path: flags)
    message = "this processor has no bf16 products: they are emulated, many times slower; try --dtype float32"
    assert emulated(torch.bfloat16, cpu, "--dtype float32") == message
    assert emulated(torch.float32, cpu, "") == emulated(torch.bfloat16, torch.device("cuda"), "") == ""
    flags += " avx512_bf16"
    assert emulated(torch.bfloat16, cpu, "") == "" != emulated(torch.float16, cpu, "")


class Counting:
    """A contestant whose turns take 1, 2, 3 ... seconds, until Ctrl-C comes in turn ``last``."""

    def __init__(self, name: str, last: int = 10) -> None:
        self.name, self._last = name, last

    def turn(self, step: int) -> tuple[float, float, float]:
        if step == self._last:
            raise KeyboardInterrupt
        return step + 1.0, 0.5, 10.0 - step


def test_turns_are_counted_and_how_far_it_is_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """The last eight of ten steps, with the loss of the last."""
    options, names = argparse.Namespace(**OPTIONS, ranks=2), ("Axo", "FSDP2", "no communication")
    table = Table({})
    rows = step.compete("z", options, [Counting(name) for name in names], table)  # type: ignore[misc]
    assert [row["contestant"] for row in rows] == list(names)
    assert all(row["all_ms"] == [1e3 * n for n in range(3, 11)] and row["loss"] == 1.0 for row in rows), rows
    assert capsys.readouterr().err == "z: step 1 of 10: Axo, 1000 ms; rows in 0 s\n"


@pytest.mark.parametrize(("last", "counted"), [(2, 0), (5, 3)])
def test_ctrl_c_leaves_the_rows_of_the_rounds_so_far(last: int, counted: int, tmp_path: Path) -> None:
    """Whole rounds alone, so that losses are of the same step."""
    options, table = argparse.Namespace(**OPTIONS, ranks=2), Table({}, tmp_path / "rows.jsonl")
    players = [Counting("Axo"), Counting("FSDP2", last), Counting("no communication")]
    with pytest.raises(KeyboardInterrupt):
        step.compete("z", options, players, table)  # type: ignore[arg-type]
    lines = read_rows(tmp_path / "rows.jsonl")[1:]
    assert [row["all_ms"] for row in lines[:-1]] == (3 * bool(counted)) * [[3e3, 4e3, 5e3]]
    assert [line["note"] for line in lines[-1:]] == ["z: stopped: 3 of 8 steps are in its rows"] * bool(counted)


def blocks_put_aside(index: int) -> tuple[str, int]:
    """By malloc of a rank of that contestant, and its name."""
    here, there = multiprocessing.Pipe()
    here.send(None)  # nothing is asked
    step.play("data", argparse.Namespace(**OPTIONS), index, there)
    return here.recv() if here.poll() else "", put_aside_by_malloc()


def test_rivals_have_not_the_settings_of_malloc_that_axo_has() -> None:
    """Oracle: malloc puts small blocks aside unless told otherwise."""
    (name, none), (rival, some) = (run_ranks(blocks_put_aside, 2, index)[0] for index in (0, 2))
    assert (name, rival) == ("Axo 1x1x1x2", "DDP axo") and none == 0 < some


@pytest.mark.soak
def test_recomputation_counts_as_hardware_flops_only() -> None:
    rows = run_ranks(step.measure, 1, "serial", argparse.Namespace(**OPTIONS | {"recompute": True}))[0]
    assert all(row["right"] and row["hfu"] > 1.2 * row["mfu"] for row in rows)


def test_ratios_are_of_steps_side_by_side() -> None:
    """By hand: one slow round, of all, moves neither ratio; ``longer`` is over the step without communication."""
    sizes = step.sizes_of(argparse.Namespace(**OPTIONS))
    seconds = {"Axo": [1.1, 1.1, 5.5], "FSDP2": [1.32, 1.32, 6.6], "no communication": [1.0, 1.0, 5.0]}
    names = list(seconds)
    blocked, losses = {name: [float("nan")] for name in names}, dict.fromkeys(names, 1.0)
    rows = step.summarize("z", sizes, 2, seconds, blocked, losses, 1e12)
    assert [round(row["faster"], 3) for row in rows] == [1.2, 1.0, 1.32]
    assert [round(row["longer"], 3) for row in rows] == [0.1, 0.32, 0.0]


def test_a_step_is_held_to_its_own_bound_and_to_the_planner():
    """Oracle: arithmetic. 990 TFLOP/s and 3.3e12 bytes/s bound the h=2048 step by flops / rate + 28 P / rate."""
    sizes = gpu_step.STEPS["gpt h=2048"]
    weights = 12 * 12 * 2048**2 + 2 * 50304 * 2048 + (4 * 12 + 2) * 2048
    whole = step_models.serial(sizes, torch.device("meta"))
    assert gpu_step.parameters(sizes) == weights == sum(parameter.numel() for parameter in whole.parameters())
    seconds = gpu_step.step_flops(sizes) / 990e12 + 28 * weights / 3.3e12
    assert gpu_step.bound(sizes, 990e12, 3.3e12) == pytest.approx(seconds)
    again = gpu_step.bound(replace(sizes, recompute=True), 990e12, 3.3e12) - seconds
    assert again == pytest.approx(2 * sizes.tokens * 12 * 12 * 2048**2 / 990e12)
    assert gpu_step.planned(sizes) > gpu_step.planned(replace(sizes, recompute=True)) > 16 * weights / 2**30
    card = {"sm_mhz": 1755}
    rows = [
        {"contestant": "torch", "of_bound": 0.71, "card": card},
        {"contestant": "axo", "of_bound": 0.69, "card": card, "peak_gib": 11.9, "planned_gib": 12.4},
    ]
    assert gpu_step.judged("gpt", rows) == {
        "gpt, the bound over Axo's step: 0.690, torch's 0.710, at 1755 MHz (goal: at least 0.7)": False,
        "gpt, memory of Axo's step over the planner's (goal: 0.8 to 1): 11.90 of 12.40 GiB": True,
    }
    assert set(gpu_step.judged("gpt", []).values()) == {"not measured"}
