"""axo train --trace: the file shows what was issued over each axis, and awaited, beside what was computed."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from axo.grid import Grid
from axo.train import runner
from tests.launcher import run_ranks
from tests.train.test_resume import losses_of
from tests.train.test_train import small, text

__all__ = ["text"]  # a fixture


def traced(text: str, grid: Grid, path: Path, **options: Any) -> list[dict[str, Any]]:
    """The spans of the file, each with the name of its thread. Losses are those of the run that is not traced: to the
    bit until the update of the traced step, whose hooks sum a norm's gradients first, and so round them otherwise."""
    config = small(text, grid=grid, steps=5, **options)
    plain = run_ranks(losses_of, config.ranks, config)[0]
    losses = run_ranks(losses_of, config.ranks, dataclasses.replace(config, trace=str(path)))[0]
    assert losses[: runner.WARM_STEPS + 1] == plain[: runner.WARM_STEPS + 1]
    assert losses == pytest.approx(plain, rel=1e-6)
    found = json.loads(path.read_text())["traceEvents"]
    names = {(event["pid"], event["tid"]): event["args"]["name"] for event in found if event["name"] == "thread_name"}
    return [event | {"thread": names[event["pid"], event["tid"]]} for event in found if event["ph"] == "X"]


def test_a_trace_names_the_streams_by_axis(text: str, tmp_path: Path) -> None:
    """Oracle: the gathers that a step of this grid must issue."""
    path = tmp_path / "deep" / "trace.json"
    spans = traced(text, Grid(2, 1, 2, 1), path)
    assert {span["thread"].split()[0] for span in spans if span["pid"] == 3} == {"compute", "x", "z", "world"}
    assert len([span for span in spans if span["thread"] == "compute" and span["name"] == "head and loss"]) == 4
    gathers = [span for span in spans if span["pid"] == 0 and span["name"] == "all_gather"]
    assert len(gathers) == 2 + 2 * 5  # embedding and head; qkv, proj, fc_1, fc_2 and proj of two blocks
    assert all(span["thread"].split()[0] == "z" and span["dur"] >= 0 for span in gathers)
    assert all(span["args"]["bytes"] > 0 and span["args"]["layer"] for span in gathers)
    for _, thread in itertools.groupby(
        sorted(spans, key=lambda s: (s["pid"], s["tid"])), lambda s: (s["pid"], s["tid"])
    ):
        open_until: list[float] = []
        for span in sorted(thread, key=lambda span: (span["ts"], -span["dur"])):
            while open_until and open_until[-1] <= span["ts"] + 1e-2:
                open_until.pop()
            assert not open_until or span["ts"] + span["dur"] <= open_until[-1] + 1e-2, "spans of a thread nest"
            open_until.append(span["ts"] + span["dur"])
    assert path.with_suffix(".png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_trace_shows_what_hides_behind_what(text: str, tmp_path: Path) -> None:
    """On each rank: a gather before the product it hides behind, dI's wait after dW, reduce-scatters awaited last."""
    all_spans = traced(text, Grid(2, 2, 2, 1), tmp_path / "trace.json", chunked_loss=False)
    for rank in range(8):
        spans = [span for span in all_spans if span["pid"] == rank]

        def one(name: str, layer: str, spans: list[dict[str, Any]] = spans, after: float = -1.0) -> dict[str, Any]:
            found = [s for s in spans if s["name"] == name and s["args"].get("layer") == layer and s["ts"] > after]
            assert len(found) == 1, (name, layer, found)
            return found[0]

        products = sorted(
            (span for span in spans if span["name"] == f"{span['args'].get('layer')} product"), key=lambda s: s["ts"]
        )
        layers = [span["args"]["layer"] for span in products]
        assert len(layers) == 2 * 5 + 1
        for product, following in itertools.pairwise(layers):
            issued = one("all_gather", following)["ts"]
            assert issued < one(f"{product} product", product)["ts"], f"{following} is gathered behind {product}"
        backward = one(f"{layers[-1]} dI", layers[-1])["ts"]
        last = 0.0
        for layer in layers:
            grad_input, grad_weight = one(f"{layer} dI", layer), one(f"{layer} dW", layer)
            last = max(last, grad_weight["ts"] + grad_weight["dur"])
            issued = one("all_reduce", layer, after=backward)["ts"]
            assert grad_input["ts"] + grad_input["dur"] <= issued + 1e-2 < grad_weight["ts"] + 2e-2, layer
            waits = [s for s in spans if s["name"] == "wait all_reduce" and s["args"]["layer"] == layer]
            waits = [s for s in waits if s["ts"] > backward]
            assert all(wait["ts"] + 1e-2 >= grad_weight["ts"] + grad_weight["dur"] for wait in waits), layer
        scatters = [span for span in spans if span["name"] == "reduce_scatter"]
        assert len(scatters) == len(layers) + 1 and all(span["args"]["layer"] for span in scatters)
        assert sum(span["ts"] < last for span in scatters) == len(layers) - 1  # all but the embedding's and the first's
        assert all(s["ts"] + 1e-2 >= last for s in spans if s["name"] == "wait reduce_scatter")


def test_a_trace_shows_stages(text: str, tmp_path: Path) -> None:
    """Oracle: each micro-batch goes forward on a stage after the stage before, and backward after the one behind."""
    path = tmp_path / "stages.json"
    spans = traced(text, Grid(), path, pipeline=2, microbatches=2, batch_size=4)
    at = {
        (span["name"]): (span["pid"], span["ts"], span["ts"] + span["dur"]) for span in spans if "stage" in span["name"]
    }
    assert {name: pid for name, (pid, _, _) in at.items()} == {
        f"{kind}{number} stage {stage}": stage for kind in "FB" for number in range(2) for stage in range(2)
    }
    # Each rank counts from the start of its own step: stage 1's may be later by any time that fits all messages.
    least = max(at[f"F{number} stage 0"][2] - at[f"F{number} stage 1"][2] for number in range(2))
    most = min(at[f"B{number} stage 0"][1] - at[f"B{number} stage 1"][1] for number in range(2))
    assert least <= most
    (start, end) = next((s["ts"], s["ts"] + s["dur"]) for s in spans if s["name"] == "step" and s["pid"] == 1)
    assert start == 0 and all(0 <= first and last <= end for pid, first, last in at.values() if pid)
    assert path.with_suffix(".png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
