"""Plans and dry runs of experts over several ranks. Oracle of the dry run: real ranks; of the plan: the dry run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from axo import dryrun
from axo.cli import main as cli
from axo.grid import Grid
from axo.perf import command, machine, memory, planner, readers
from axo.perf.run_options import PRECISIONS, RunOptions
from axo.perf.workload import Workload
from axo.train import models
from axo.train.config import TrainConfig
from tests.perf.support import beside, step_calls

SIZES = {"n_layer": 2, "n_embd": 256, "n_head": 8, "padded_vocab_size": 2000, "block_size": 8192, "n_expert": 8}
SIZES |= {"n_query_groups": 2, "n_expert_per_token": 2, "moe_intermediate_size": 512, "intermediate_size": 512}


def workload_of(config: TrainConfig) -> Workload:
    return readers.from_litgpt(vars(models.resolve(config.model, config.model_overrides)), seq_length=config.seq_len)


def step(grid: str, experts: int, **changes: Any) -> tuple[TrainConfig, RunOptions]:
    on = Grid.parse(grid)
    config = TrainConfig(
        model="Mixtral-8x7B-v0.1", model_overrides=SIZES, grid=on, experts=experts, batch_size=on.z * on.data,
        gather_cache="none", chunked_loss=True, **{"seq_len": 1024, **changes},
    )  # fmt: skip
    kept = "none" if not config.recompute else "selective" if config.recompute_keeps == "products" else "full"
    run = RunOptions(
        config.batch_size * config.seq_len, recompute=kept, chunked_loss=True, experts=experts,
        **PRECISIONS[config.precision],  # type: ignore[arg-type]
    )  # fmt: skip
    return config, run


CASES = [
    ("1x1x4x1", 4, {}),
    ("1x1x4x1", 1, {}),
    ("2x2x2x1", 1, {"recompute": True, "recompute_keeps": "products"}),
    ("2x2x4x1", 2, {"recompute": True}),
    ("1x1x8x2", 8, {"precision": "32-true"}),
    ("1x2x4x1", 4, {"recompute": True, "recompute_keeps": "products"}),
]


@pytest.mark.parametrize(("grid", "experts", "changes"), CASES)
def test_the_plan_counts_what_a_dry_run_sends_and_holds(grid: str, experts: int, changes: dict[str, Any]) -> None:
    config, run = step(grid, experts, **changes)
    record, workload = dryrun.run(config), workload_of(config).spread(experts)
    dry = {key: size for key, (_, size) in record.traffic().items()}
    more = beside(dry, step_calls(workload, config.grid, run))  # norm of gradients, mean loss
    assert all(op == "all_reduce" and 0 < size <= 24 for (op, _), size in more.items()), more
    held = memory.estimate(workload, config.grid, run)
    assert max(held.moments.values()) == pytest.approx(record.peak.total, rel=0.05)


def test_roles_are_shapes_among_the_holders_of_an_expert() -> None:
    """An expert's 512 columns over 5 holders are 103, but for the last 100; all others' 256 over z=20 are 13, but for
    the last 9; the first eight have a row of the router. Each is a role, whichever experts its ranks hold."""
    config, _ = step("1x1x20x1", 4)
    assert dryrun.representatives(config) == {0: 8, 1: 0, 8: 8, 16: 3, 19: 1}
    spread, _ = step("1x1x4x8", 8)
    assert dryrun.representatives(spread) == {0: 32, 1: 0, 4: 0}


def planned(**changes: Any) -> planner.Request:
    """Qwen3-30B-A3B on 256 H100."""
    model = readers.read("Qwen3-30B-A3B", seq_length=4096)
    return planner.Request(model, machine.load("h100"), 256, 4 << 20, **{"experts": 0, "chunked_loss": True, **changes})


def test_a_search_spreads_experts_where_that_is_fastest() -> None:
    """Oracle: each number asked for by itself."""
    asked, grid = planned(), Grid.parse("1x1x64x4")
    best = planner.consider(asked, grid)
    each = [planner.consider(replace(asked, experts=1 << n), grid) for n in range(7)]
    assert best.run.experts > 1 and best.seconds == min(one.seconds for one in each if not one.reason)
    assert "experts=8 does not divide z=4" in replace(asked, experts=8).impossible(Grid.parse("1x1x4x64"))
    line = command.command_line(planner.GridPlan(asked, [best]), best)
    assert f"--experts {best.run.experts} " in line


def test_rows_between_nodes_have_one_nic() -> None:
    """Formula: of 64 ranks 56 stand on other nodes; a GPU sends them their share over its share of a node's NICs."""
    asked, grid = planned(experts=64, gather="keep", recompute="none"), Grid.parse("1x1x64x4")
    on = replace(asked.machine, memory_gib=1e6)
    one, slow = (
        planner.consider(replace(asked, machine=replace(on, inter_gbs=on.inter_gbs * less)), grid)
        for less in (1.0, 0.5)
    )
    assert one.time is not None and slow.time is not None
    rows = 8 * (4 << 20) // 256  # 8 experts a token
    sent = 48 * 4 * 56 / 64 * rows * 2048 * 2  # layers; there and back, and their gradients; bf16
    least = sent / (on.inter_gbs * on.network_fraction / 8 * 1e9)
    assert slow.time.communication["z"] - one.time.communication["z"] > least > 0.1


def test_deepseek_v3_is_read_whole(tmp_path: Path) -> None:
    """As published: 671 billion parameters without what predicts further tokens."""
    import transformers

    (tmp_path / "config.json").write_text(json.dumps(transformers.DeepseekV3Config(num_hidden_layers=4).to_dict()))
    model = readers.read(str(tmp_path / "config.json"), seq_length=4096)
    of_kind = [block.repeat * sum(layer.parameters for layer in block.layers) for block in model.blocks[1:3]]
    whole = model.parameters + 57 * of_kind[1]
    assert [block.repeat for block in model.blocks] == [1, 3, 1, 1] and whole / 1e9 == pytest.approx(671.03, abs=0.01)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--experts -1", "experts=-1 is not a count of ranks"),
        ("--experts 3", "experts=3 ranks do not divide the 8 experts of Mixtral-8x7B-v0.1"),
        ("--experts 2 --context 2", "goes with axonn alone, whole sequences, and no stages"),
        ("--experts 2 --pipeline 2", "goes with axonn alone, whole sequences, and no stages"),
        ("--experts 2 --model Llama-3-8B", "do not divide the 0 experts of Llama-3-8B"),
    ],
)
def test_mistakes_end_in_one_line(options: str, message: str) -> None:
    words = ["plan", "--model", "Mixtral-8x7B-v0.1", "--gpus", "8", "--machine", "h100", *options.split()]
    done = CliRunner().invoke(cli.app, words)
    assert done.exit_code == 2 and message in done.stderr and done.stderr.count("\n") == 1, done.stderr
