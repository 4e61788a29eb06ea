"""``axo litgpt finetune_full`` and ``finetune_lora`` against LitGPT as it is on one device: same samples, same values.

Stock runs draw adapters while they build the model and read samples in their loader's own order; so do runs on a grid.
"""

import json

import pytest
import torch
from litgpt.prompts import save_prompt_style

from axo.arrangement import arrangement_of
from axo.grid import Grid
from tests.integrations.support import csv_values, distance
from tests.integrations.trainer import finetune, generate, ranks_of, write_base
from tests.launcher import run_ranks

# Larger steps than usual, and no dropout (whose masks no other run can have): adapters begin at zero.
LORA = {"lora_dropout": 0.0, "lora_key": True, "lora_projection": True, "lora_mlp": True, "lora_head": True, "lr": 1e-2}


@pytest.fixture(scope="session")
def base(folder):
    write_base(folder)
    return folder


def losses_on(folder, out, grid, method, options=None, call=(finetune,)):
    """The losses of all data ranks' tokens together. ``call``: a function, its first values."""
    options = options or {}
    stages, arrangement = options.get("pipeline", 1), arrangement_of("test", options.get("algorithm", "axonn"))
    ranks, environment = ranks_of(grid, stages)
    given = (*call[1:], folder, out, grid, method, options)
    per_rank = run_ranks(call[0], ranks, *given, env=environment, timeout=180)
    parsed, lines = Grid.parse(grid), {}
    for rank, losses in enumerate(per_rank):
        first = lines.setdefault(arrangement.row_part(parsed, parsed.coords(rank % (ranks // stages))), losses)
        assert losses == pytest.approx(first, rel=1e-6), "ranks that read the same, or stages, disagree"
    return [sum(column) / len(column) for column in zip(*lines.values(), strict=True)]


@pytest.fixture(scope="session")
def stock_full(base):
    losses = run_ranks(finetune, 1, base, "stock-full")[0]
    assert len(losses) == 20 and losses[-1] < losses[0] - 0.3
    return losses


@pytest.mark.parametrize(("grid", "stages"), [("2x1x2x1", 1), pytest.param("2x1x1x1", 2, marks=pytest.mark.soak)])
def test_full_finetuning_equals_stock_litgpt(base, stock_full, grid, stages):
    """40 samples of unequal length in 20 steps: losses to 1e-4 with data ranks that have one of two each."""
    mine = losses_on(base, f"full-{stages}", grid, "full", {"pipeline": stages})
    assert mine == pytest.approx(stock_full, abs=1e-4)


@pytest.mark.parametrize(
    ("method", "grid", "asked"),
    [
        ("full", "2x1x4x1", {"context": 2, "vocab_loss": True}),
        ("lora", "1x1x4x1", {"context": 4, "context_kind": "gather", "vocab_loss": True}),
    ],
)
def test_finetuning_with_sequences_over_ranks_equals_stock_litgpt(base, request, method, grid, asked):
    """LitGPT shifts labels by slices of rows whose tokens lie on several ranks. Losses to 1e-4, validation too; the
    examples that are generated on the way, token by token."""
    stock, out = request.getfixturevalue(f"stock_{method}"), f"context-{method}"
    mine = losses_on(base, out, grid, method, (LORA if method == "lora" else {}) | asked)
    assert mine == pytest.approx(stock, abs=1e-4)
    logs = [next((base / each / "logs" / "csv").glob("*/metrics.csv")) for each in (f"stock-{method}", out)]
    validated = [csv_values(log)["val_loss"] for log in logs]
    assert validated[1] == pytest.approx(validated[0], abs=1e-4) and len(validated[0]) == 2
    examples = [(base / each / "examples.json").read_text() for each in (f"stock-{method}", out)]
    assert examples[1] == examples[0] and len(json.loads(examples[0])) == 2


@pytest.mark.soak
@pytest.mark.parametrize("method", ["full", "lora"])
def test_finetuning_a_mixture_of_experts_equals_stock_litgpt(base, method):
    """Of Mixtral's kind. Pretraining them: test_throughput.py."""
    if not (base / "experts").exists():
        write_base(base, "experts", mlp_class_name="LLaMAMoE", n_expert=4, n_expert_per_token=2)
    options = {"base": "experts", **(LORA if method == "lora" else {})}
    stock = run_ranks(finetune, 1, base, f"stock-experts-{method}", None, method, options)[0]
    assert len(stock) == 20 and stock[-1] < stock[0] - 0.3
    mine = losses_on(base, f"experts-{method}", "2x1x2x1", method, options)
    assert mine == pytest.approx(stock, abs=1e-4)


@pytest.mark.parametrize(
    ("method", "grid"), [("full", "1x1x2x1"), pytest.param("lora", "2x1x1x2", marks=pytest.mark.soak)]
)
def test_rows_that_data_ranks_do_not_divide_are_read_as_by_one_device(base, method, grid):
    """51 rows to train with and 9 to validate with, two micro-batches a step, over the end of the first epoch. Losses
    to 1e-4, those of validation too; tokens of all data ranks, and weights to 1e-6."""
    options = {"held_back": 0.15, "accumulate": 2, **(LORA if method == "lora" else {})}
    runs = [f"stock-odd-{method}", f"odd-{method}"]
    stock = run_ranks(finetune, 1, base, runs[0], None, method, options)[0]
    assert len(stock) == 40
    assert losses_on(base, runs[1], grid, method, options) == pytest.approx(stock, abs=1e-4)
    expected, mine = (csv_values(next((base / out).glob("logs/csv/*/metrics.csv"))) for out in runs)
    assert len(expected["val_loss"]) == 2 and expected["epoch"][40] == 1
    for name in ("loss", "val_loss", "total_tokens", "epoch"):
        assert mine[name] == pytest.approx(expected[name], abs=1e-4), name
    weights = [torch.load(base / out / "final" / "lit_model.pth") for out in runs]
    assert distance(*(state.get("model", state) for state in weights)) < 1e-6


@pytest.fixture(scope="session")
def stock_lora(base):
    losses = run_ranks(finetune, 1, base, "stock-lora", None, "lora", LORA)[0]
    assert len(losses) == 20 and losses[-1] < losses[0] - 0.3
    return losses


@pytest.mark.parametrize(
    ("grid", "stages"),
    [
        ("2x1x2x1", 1),
        ("1x1x1x1", 2),
        pytest.param("1x2x1x1", 1, marks=pytest.mark.soak),
        pytest.param("2x1x2x1", 2, marks=pytest.mark.soak),
    ],
)
def test_lora_finetuning_equals_stock_litgpt(base, stock_lora, grid, stages):
    """Losses to 1e-4; the saved adapters, and the model that litgpt merges them into, to 1e-5.

    Stock LitGPT generates the same tokens from both.
    """
    out = f"lora-{grid}-{stages}"
    mine = losses_on(base, out, grid, "lora", LORA | {"pipeline": stages, "vocab_loss": grid.startswith("2")})
    assert mine == pytest.approx(stock_lora, abs=1e-4)
    for name in ("lit_model.pth.lora", "lit_model.pth"):
        stock, mine = (torch.load(base / each / "final" / name) for each in ("stock-lora", out))
        stock, mine = stock.get("model", stock), mine.get("model", mine)
        assert list(mine) == list(stock) and all(mine[key].shape == stock[key].shape for key in stock)
        assert distance(mine, stock) < 1e-5, name
    made = [run_ranks(generate, 1, base / each / "final")[0] for each in ("stock-lora", out)]
    assert made[0] == made[1]


@pytest.mark.parametrize("method", ["adapter_v2", pytest.param("adapter", marks=pytest.mark.soak)])
def test_finetuning_adapters_equals_stock_litgpt(base, method):
    """Losses to 1e-4, examples generated on the way; the saved adapters to 1e-5. Prompts begin at the third block.

    What ``generate_adapter`` and ``_v2`` make with adapters that were made stronger, and ``generate_full`` without
    them: token by token.
    """
    if not (base / "deep").exists():
        write_base(base, "deep", n_layer=3)
    options = {"lr": 1e-2, "base": "deep"}
    stock = run_ranks(finetune, 1, base, f"stock-{method}", None, method, options)[0]
    assert len(stock) == 20 and len(set(stock)) > 15
    mine = losses_on(base, method, "2x1x2x1", method, options | {"vocab_loss": True})
    assert mine == pytest.approx(stock, abs=1e-4)
    saved = (
        torch.load(base / out / "final" / f"lit_model.pth.{method}")["model"] for out in (f"stock-{method}", method)
    )
    expected, mine = saved
    assert list(mine) == list(expected) and any("gating_factor" in name for name in mine)
    assert distance(mine, expected) < 1e-5
    save_prompt_style("alpaca", base / "deep")  # generate_adapter splits the answer by its words
    # What 40 steps learn need not change a greedy text: generated is with a gate or scale that is far from its start.
    strong = {
        key: value + 3.0 if key.endswith(("gating_factor", "adapter_scale")) else value
        for key, value in expected.items()
    }
    given = {"adapter_path": base / f"stock-{method}" / "strong.pth"}
    torch.save({"model": strong}, given["adapter_path"])
    plain = run_ranks(generate, 1, base / "deep")[0]
    asked = run_ranks(generate, 1, base / "deep", None, 1, 0.0, method, given)[0]
    ranks, environment = ranks_of("2x1x1x1")
    made = run_ranks(generate, ranks, base / "deep", "2x1x1x1", 1, 0.0, method, given, env=environment)
    assert made == [asked] * ranks and asked != plain
    given = {"finetuned_path": base / "deep" / "lit_model.pth"}
    made = run_ranks(generate, ranks, base / "deep", "2x1x1x1", 1, 0.0, "full", given, env=environment)
    assert made == [plain] * ranks


def finetune_with_clocks(folder, out, grid):
    """How many losses this rank saw; time passes on rank 1 only, a second each time that it looks."""
    import itertools
    import os
    from types import SimpleNamespace

    import litgpt.finetune.lora as module

    from axo.integrations.litgpt import patches

    clock = itertools.count(1, 1.0 if os.environ["RANK"] == "1" else 1e-6)
    module.time = patches.time = SimpleNamespace(perf_counter=lambda: next(clock))
    return len(finetune(folder, out, grid, "lora", {"max_time": 9.0}))


def test_a_limit_of_time_is_reached_by_all_ranks_together(base):
    """One rank's clock is ahead: the others would wait for it in the next step."""
    seen = run_ranks(finetune_with_clocks, 2, base, "limited", "2x1x1x1", env=ranks_of("2x1x1x1")[1], timeout=60)
    assert seen[0] == seen[1] and 0 < seen[0] < 9
