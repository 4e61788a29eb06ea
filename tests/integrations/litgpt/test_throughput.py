"""What ``axo litgpt`` prints and logs of its speed: flops, tokens and samples, once each; mixtures of experts."""

import contextlib
import csv
import io
import math
import re
from types import SimpleNamespace

import pytest
import torch
from litgpt.args import TrainArgs
from litgpt.config import Config
from litgpt.model import GPT
from litgpt.utils import chunked_cross_entropy
from torch.nn.attention import SDPBackend, sdpa_kernel

from axo.grid import Grid
from axo.integrations.litgpt import patches
from axo.integrations.litgpt.options import Options
from axo.integrations.litgpt.patches import LitGPTRun, patched
from tests.integrations.support import LLAMA, distance
from tests.integrations.trainer import STEPS, pretrain, ranks_of, run
from tests.launcher import run_ranks

ROWS, LENGTH = 8, 32  # of a whole batch in trainer.pretrain
PEAK = 1e12
EXPERTS = {"mlp_class_name": "LLaMAMoE", "n_expert": 4, "n_expert_per_token": 2, "moe_intermediate_size": 48}
GROUPED = EXPERTS | {
    "n_shared_expert": 1, "n_expert_groups": 2, "n_topk_groups": 1, "n_topk_scores_per_group": 2,
    "first_k_dense_replace": 1,
}  # fmt: skip


def flops_by_hand():
    """Three products with each weight, six with each head's (T, T) scores, 2 flops an element.

    T is the block size, whatever the samples' length: that is how LitGPT counts.
    """
    length = LLAMA["block_size"]
    with torch.device("meta"):
        model = GPT(Config(**LLAMA))
    weights = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and "wte" not in name)
    scores = model.config.n_layer * model.config.n_head * length**2 * model.config.head_size
    return ROWS * (6 * weights * length + 12 * scores)


def speak(folder, out, grid):
    """On one rank: how often flops were counted, and the number that was printed, magnified (a tiny model has 0.00
    TFLOPs), for a peak of 1e12."""
    import lightning.fabric.utilities.throughput as throughput
    import litgpt.pretrain

    stock, counted = litgpt.pretrain.measure_flops, []
    litgpt.pretrain.measure_flops = lambda *args: counted.append(stock(*args)) or counted[0] * 10**8
    throughput.get_available_flops = lambda *_: PEAK
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        pretrain(folder, out, {"flops": True}, grid)
    shown = re.findall(r"^  (?:([\d,]+) tokens/s \| )?([\d.]+) GB the largest rank", printed.getvalue(), re.MULTILINE)
    speed = re.findall(r"(?:Training Time|Tok/sec) +: ([\d.,]+)", printed.getvalue())
    return len(counted), re.findall(r"Measured TFLOPs: ([\d.]+)", printed.getvalue()), shown, speed


@pytest.mark.parametrize("grid", [None, "1x2x1x2", pytest.param("2x2x2x1", marks=pytest.mark.soak)], ids=str)
def test_speed_is_counted_once(folder, grid):
    """Oracle: flops by hand, and, with the same numbers, stock LitGPT (grid None). What depends on time is compared
    with another number of the same moment: all of them then differ by a known factor."""
    ranks, environment = ranks_of(grid)
    out = f"speed-{grid}"
    said = run_ranks(speak, ranks, folder, out, grid, env=environment, timeout=180)
    assert [times for times, *_ in said] == [1, *[0] * (ranks - 1)]
    printed, shown, speed = said[0][1:]
    flops = flops_by_hand() * 10**8
    assert [float(number) for number in printed] == [pytest.approx(flops / 1e12, abs=0.005)]
    _, _, z, data = map(int, (grid or "1x1x1x1").split("x"))
    files = list((folder / out / "logs" / "csv").glob("*/metrics.csv"))
    rows = [row for file in files for row in csv.DictReader(file.open()) if row["loss"]]
    assert len(rows) == STEPS
    if grid is not None:
        seconds, rate = (float(number.replace(",", "")) for number in speed)  # LitGPT saves in that time, too
        assert STEPS * ROWS * LENGTH / seconds < 1.01 * rate < 100 * STEPS * ROWS * LENGTH / seconds
        # Under each of LitGPT's lines, on rank 0.
        assert [gb for _, gb in shown] == [f"{float(row['memory_gb']):.2f}" for row in rows] and not said[1][2]
        assert [rate for rate, _ in shown[1:]] == [f"{float(row['tokens_per_sec']):,.0f}" for row in rows[1:]]
    for step, row in enumerate(rows, 1):
        assert float(row["total_tokens"]) == step * ROWS * LENGTH
        assert float(row["samples"]) * z * data == step * ROWS
        assert float(row["lengths"]) * z * data == step * ROWS * LENGTH
    last = {name: float(value) for name, value in rows[-1].items() if value}
    everybody = "" if z * data > 1 else "device/"
    samples = last[f"{everybody}samples_per_sec"]
    assert last[f"{everybody}items_per_sec"] == pytest.approx(samples * LENGTH)
    assert last[f"{everybody}flops_per_sec"] == pytest.approx(samples / ROWS * flops)
    assert last["device/samples_per_sec"] * z * data == pytest.approx(samples)
    assert last["device/mfu"] * PEAK * ranks == pytest.approx(samples / ROWS * flops)


def test_finetuning_says_what_is_left(monkeypatch):
    """Two epochs of ten batches, two a step: ten steps, of three seconds each by the test's clock, or at most four."""
    now = iter(range(100, 200, 3))
    monkeypatch.setattr(patches.time, "perf_counter", lambda: next(now))
    for most, left in ((None, [24, 21]), (4, [6, 3])):
        train = TrainArgs(epochs=2, max_steps=most, global_batch_size=4, micro_batch_size=2)
        run = LitGPTRun(patches, Options(grid=Grid()))
        run.loop = {"train": train, "devices": 1, "train_dataloader": range(10)}
        assert [run._left(step) for step in (1, 2, 3)] == [math.inf, *left]
    figures = {"tokens_per_sec": 1234.5, "memory_gb": 0.5, "comm_share/all": 0.25}
    assert patches.in_words(figures, 61.5) == (
        "  1,234 tokens/s | 0.50 GB the largest rank | comm 25% | remaining time: 0:01:01"
    )


@pytest.mark.parametrize("fields", [{}, EXPERTS, GROUPED], ids=["dense", "experts", "grouped"])
def test_flops_of_experts_are_those_of_a_real_pass(fields):
    """Oracle: the same count of a pass that routes tokens, on the CPU, with attention as plain products."""
    import litgpt.pretrain as module

    stock = module.measure_flops

    def count(device, measure):
        with torch.device(device):
            model = GPT(Config(**(LLAMA | fields)))
            ids = torch.randint(0, 1, (3, 20))
        with sdpa_kernel(SDPBackend.MATH):
            return measure(model, lambda: model(ids), lambda logits: chunked_cross_entropy(logits, ids, chunk_size=0))

    run = LitGPTRun(module, Options(grid=Grid()))
    run.fabric = SimpleNamespace(strategy=SimpleNamespace(global_rank=0), broadcast=lambda flops: flops)
    with patched(run):
        assert count("meta", module.measure_flops) == count("cpu", stock)
    assert module.measure_flops is stock


@pytest.mark.parametrize(
    "grid",
    [
        "2x1x2x1",
        pytest.param("1x2x1x2", marks=pytest.mark.soak),
        pytest.param("2x2x1x1", marks=pytest.mark.soak),
    ],
)
def test_pretraining_a_mixture_of_experts_equals_serial_litgpt(folder, grid):
    """Oracle: ``litgpt.pretrain`` on one device, without its count of flops, at which it stops. fp32, losses to 1e-4,
    the model after 10 steps to 1e-5."""
    stock = run(folder, f"stock-experts-{grid}", None, config=EXPERTS)
    losses, sums, state = run(folder, f"experts-{grid}", grid, config=EXPERTS, flops=True)
    assert len(losses) == STEPS and stock[0][-1] < stock[0][0] - 0.1
    assert losses == pytest.approx(stock[0], abs=1e-4) and sums == stock[1]
    assert distance(state["model"], stock[2]["model"]) < 1e-5
