"""Plans of sequences over several ranks of z. Oracle: a dry run of the same step, which is held to real ranks."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from axo import dryrun
from axo.cli import main as cli
from axo.grid import Grid
from axo.perf import command, machine, memory, output, planner, readers
from axo.perf.run_options import PRECISIONS, RunOptions
from axo.perf.workload import Workload
from axo.train import models
from axo.train.config import TrainConfig
from tests.perf.support import beside, step_calls

SIZES = {"n_layer": 2, "n_embd": 256, "n_head": 8, "padded_vocab_size": 2000, "block_size": 8192}
SIZES |= {"intermediate_size": 768, "n_query_groups": 2}
LATENT = SIZES | {
    "n_query_groups": 8, "head_size": 48, "rope_interleave": True,
    "latent_attention": {
        "q_lora_rank": 96, "kv_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32,
    },
}  # fmt: skip


def workload_of(config: TrainConfig) -> Workload:
    return readers.from_litgpt(vars(models.resolve(config.model, config.model_overrides)), seq_length=config.seq_len)


def step(grid: str, context: int, **changes: Any) -> tuple[TrainConfig, RunOptions]:
    on = Grid.parse(grid)
    config = TrainConfig(
        model="Llama-3-8B", grid=on, context=context, batch_size=on.z * on.data // context, gather_cache="none",
        chunked_loss=True, **{"seq_len": 2048, "model_overrides": SIZES, **changes},
    )  # fmt: skip
    kept = "none" if not config.recompute else "selective" if config.recompute_keeps == "products" else "full"
    run = RunOptions(
        config.batch_size * config.seq_len, recompute=kept, chunked_loss=True, context=context,
        **PRECISIONS[config.precision],  # type: ignore[arg-type]
    )  # fmt: skip
    return config, run


@pytest.mark.parametrize(
    ("grid", "context", "changes"),
    [
        ("2x1x4x1", 2, {}),
        ("1x1x4x1", 4, {"precision": "32-true", "seq_len": 1024}),
        ("1x2x4x1", 4, {"precision": "bf16-true", "recompute": True}),
        ("1x2x4x1", 4, {"precision": "bf16-true", "recompute": True, "model_overrides": SIZES | {"n_query_groups": 8}}),
        ("1x1x8x1", 8, {"recompute": True, "recompute_keeps": "products"}),
        ("2x1x4x1", 1, {"model_overrides": LATENT}),
        ("2x2x2x1", 1, {"model_overrides": LATENT, "recompute": True}),
        ("2x1x4x1", 2, {"model_overrides": LATENT}),
        ("1x2x4x1", 4, {"model_overrides": LATENT, "precision": "bf16-true", "recompute": True}),
        ("1x1x8x1", 8, {"model_overrides": LATENT, "recompute": True, "recompute_keeps": "products"}),
    ],
)
def test_messages_and_memory_are_those_of_the_step(grid: str, context: int, changes: dict[str, Any]) -> None:
    config, run = step(grid, context, **changes)
    record, workload = dryrun.run(config), workload_of(config)
    dry = {key: size for key, (_, size) in record.traffic().items()}
    more = beside(dry, step_calls(workload, config.grid, run))  # norm of gradients, mean loss, lengths of sequences
    assert all(op in ("all_reduce", "all_gather") and 0 < size <= 24 for (op, _), size in more.items()), more
    assert ("send" in {op for op, _ in dry}) == (context > 1)
    held = memory.estimate(workload, config.grid, run)
    assert max(held.moments.values()) == pytest.approx(record.peak.total, rel=0.05)


def request(**changes: Any) -> planner.Request:
    model = workload_of(step("1x1x1x1", 1)[0])
    return planner.Request(model, machine.load("h100"), 16, 4 * 2048, **{"context": 0, **changes})


def test_as_few_ranks_share_sequences_as_the_batch_needs() -> None:
    asked = request()
    assert [asked.context_of(Grid.parse(each)) for each in ("1x1x16x1", "1x1x8x2", "4x1x4x1", "1x1x6x2")] == [
        4,
        4,
        1,
        3,
    ]
    assert "z*data=8 is more than the 4" in asked.impossible(Grid.parse("2x1x1x8"))
    assert replace(asked, context=3).impossible(Grid.parse("1x1x16x1")) == "context=3 does not divide z=16"
    ranked = {str(one.grid): one for one in planner.plan(asked).ranked}
    assert ranked["1x1x16x1"].run.context == 4 and ranked["4x1x4x1"].run.context == 1
    assert "1x1x16x1" not in {str(one.grid) for one in planner.plan(request(context=1)).ranked}


def test_more_ranks_share_where_the_fewest_round_the_batch_or_hold_too_much() -> None:
    """Oracle: each number asked for by itself. Six sequences: 4 ranks a sequence make eight of them, 8 keep six."""
    asked = replace(request(), workload=readers.read("Llama-3-8B", seq_length=16384), batch_tokens=6 * 16384)
    grid = Grid.parse("1x1x16x1")
    assert asked.contexts(grid) == [4, 8, 16]
    alone = [planner.consider(replace(asked, context=one), grid) for one in asked.contexts(grid)]
    best = planner.consider(asked, grid)
    assert best.seconds == min(one.seconds for one in alone if not one.reason) < alone[0].seconds
    whole = replace(asked, gather="drop", micro_batches=1)
    less, most = sorted(planner.consider(replace(whole, context=one), grid).bytes for one in (4, 16))
    small = replace(whole, machine=replace(whole.machine, memory_gib=(less + most) / 2 / memory.GIB))
    assert planner.consider(replace(small, context=4), grid).reason
    assert not planner.consider(small, grid).reason


def test_messages_between_nodes_have_one_nic() -> None:
    """Formula: bytes over a GPU's share of a node's NICs, where the ring leaves the node."""
    on = machine.load("h100")
    model = readers.read("Llama-3-8B", seq_length=8192)
    asked = planner.Request(model, replace(on, memory_gib=1e6), 64, 4 * 8192, context=16, gather="keep")
    one, slow = (
        planner.consider(
            replace(asked, machine=replace(asked.machine, inter_gbs=on.inter_gbs * less)), Grid.parse("1x1x64x1")
        )
        for less in (1.0, 0.5)
    )
    keys = 2 * 8 * 128 * (8192 // 16) * 2  # bytes: K and V, groups, size, tokens of a rank, bf16
    least = 32 * 4 * 15 * keys / (on.inter_gbs * on.network_fraction / 8 * 1e9)  # forward, again, and twice backward
    assert one.time is not None and slow.time is not None
    assert slow.time.communication["z"] - one.time.communication["z"] > least > 0


def test_keys_that_travel_hide_behind_attention_of_long_sequences_alone() -> None:
    """Attention of a piece grows with the length's square, its messages with the length."""
    shown = {}
    for length in (2048, 524288):
        model = readers.read("Llama-3-8B", seq_length=length)
        asked = planner.Request(model, machine.load("h100"), 16, 4 * length, context=4, gather="keep")
        alone = replace(asked, machine=replace(asked.machine, memory_gib=1e6))
        best = planner.consider(alone, Grid.parse("1x1x16x1"))
        whole = planner.consider(replace(alone, context=1, batch_tokens=16 * length), Grid.parse("1x1x16x1"))
        assert best.time is not None and whole.time is not None
        shown[length] = best.time.exposed["z"] - whole.time.exposed["z"]
        assert best.time.communication["z"] > 0
    assert shown[2048] > 0 and shown[524288] < 0.01


def test_what_is_printed_shares_sequences_too() -> None:
    plan = planner.plan(replace(request(), workload=readers.read("Llama-3-8B", seq_length=2048), gpus=64))
    shared = next(one for one in plan.ranked if one.run.context > 1)
    line = command.command_line(plan, shared)
    assert f"--context {shared.run.context} " in line and f"--batch-size {command.batch_of(plan, shared)} " in line
    assert command.batch_of(plan, shared) == 4
    plain = replace(shared, run=shared.run._replace(recompute="none", cached_gathers=1.0))
    line = command.litgpt_line(plan, plain)
    assert f"--context {plain.run.context} " in line
    assert "--train.global_batch_size=4 --train.micro_batch_size=1 " in line


def test_what_each_exchange_sends_is_printed() -> None:
    """By hand: 32 layers; 512 tokens of a rank are 2 MiB of keys and values, and 4 MiB of queries. Ring: three times
    those forward, and twice that backward; gather: three times each; heads: three parts of four of all, twice."""
    workload = readers.read("Llama-3-8B", seq_length=2048)
    run = RunOptions(4 * 2048, recompute="none", context=4)
    best = SimpleNamespace(grid=Grid(z=16), run=run, stages=None, name="1x1x16x1")
    plan: Any = SimpleNamespace(best=best, request=SimpleNamespace(workload=workload))
    ring, gather, heads = (32 * mib / 1024 for mib in (9 * 2, 6 * 2, 2 * (4 + 2 + 4) * 3 / 4))
    assert f"{ring:.3g} GiB by ring, {gather:.3g} GiB by gather, {heads:.3g} GiB by heads;" in output.exchanges(plan)
    best.grid, best.run = Grid(z=16, x=4), run._replace(context=16)  # 8 heads of a rank for 16
    assert "heads" not in output.exchanges(plan)
    best.run = run._replace(context=1)
    assert not output.exchanges(plan)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--context -1", "context=-1 is not a count of ranks"),
        ("--context 2 --sequence-parallel", "leave context or the other out"),
        ("--context 2 --algorithm tesseract", "leave context or the other out"),
        ("--context 2 --model Gemma-2-2b", "caps the scores of attention"),
    ],
)
def test_mistakes_end_in_one_line(options: str, message: str) -> None:
    words = ["plan", "--model", "Llama-3-8B", "--gpus", "8", "--machine", "h100", *options.split()]
    done = CliRunner().invoke(cli.app, words)
    assert done.exit_code == 2 and message in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_a_grid_of_sequences_over_ranks_is_explained() -> None:
    words = "plan --model Llama-3-8B --gpus 8 --machine h100 --batch-tokens 64k --context 2 --explain 1x1x8x1"
    done = CliRunner().invoke(cli.app, words.split())
    assert done.exit_code == 0 and "traffic of 1x1x8x1" in done.output and "memory of 1x1x8x1" in done.output
