"""Predicted collectives against those that the engine issued: the same model, grid and rank, exactly.

Oracle: ``axo.count_collectives`` around a forward and backward pass of a parallelized ``litgpt.GPT`` with the
vocabulary-parallel loss, on 8 CPU ranks, for models and grids drawn from one seed. Calls, elements and bytes of every
(operation, axis) must agree on every rank; an operation that only one side knows fails too.
"""

import json
import random

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import axo
from axo.grid import Grid
from axo.matmul import cost
from axo.perf import readers
from axo.perf.run_options import RunOptions
from tests.launcher import run_ranks
from tests.perf.support import step_calls

RANKS = 8


def draw(count: int, seed: int = 7) -> list[dict]:
    """Draw models, grids and ways to run them. Sizes that must divide do; vocabularies and weight rows need not."""
    rng = random.Random(seed)
    grids = [str(grid) for grid in Grid.all(RANKS)]
    rng.shuffle(grids)
    cases = []
    for i in range(count):
        heads = 8
        groups = rng.choice([8, 8, 16 // 2])
        llama = bool(i % 2)
        sequences = rng.choice([8, 16])  # rows divide over z and data, as the trainer cuts them
        cases.append(
            {
                "grid": grids[i % len(grids)],
                "config": {
                    "name": f"drawn-{i}",
                    "n_layer": rng.randint(1, 3),
                    "n_head": heads,
                    "n_query_groups": groups,
                    "n_embd": heads * rng.choice([4, 6, 8]),
                    "intermediate_size": 8 * rng.randint(3, 9),
                    "vocab_size": 0,
                    "padded_vocab_size": rng.choice([64, 75, 101]),
                    "block_size": 32,
                    "bias": not llama,
                    "parallel_residual": not llama,
                    "norm_class_name": "RMSNorm" if llama else "LayerNorm",
                    "mlp_class_name": "LLaMAMLP" if llama else "GptNeoxMLP",
                    "lm_head_bias": rng.random() < 0.5,
                },
                "sequences": sequences,
                "seq": rng.choice([3, 5, 8]),
                "checkpointed": rng.random() < 0.4,
                "keep": rng.random() < 0.5,
                "bucket": rng.choice([0, 1 << 10, 25 << 20]),
            }
        )
    return cases


def heads_of_their_own(case: dict) -> list[dict]:
    """What drawn models lack: keys and values that neighbours along x share; norms of queries and keys."""
    shared = {"n_query_groups": 2, "norm_class_name": "RMSNorm", "mlp_class_name": "LLaMAMLP", "n_embd": 64}
    changes: list[tuple[str, dict]] = [
        ("8x1x1x1", shared | {"attn_bias": True}),
        ("4x1x2x1", shared | {"norm_qk": True}),
        ("4x1x1x2", shared | {"n_query_groups": 4, "norm_qk": True, "norm_qk_type": "olmo2"}),
        ("2x2x1x2", shared | {"norm_qk": True, "norm_class_name": "LayerNorm"}),
    ]
    return [case | {"grid": grid, "config": case["config"] | changed} for grid, changed in changes]


def tokens_split(case: dict) -> list[dict]:
    """Sequence parallelism: norms of both kinds, recomputation, and a gated MLP, whose two products share tokens."""
    llama = {"norm_class_name": "RMSNorm", "mlp_class_name": "LLaMAMLP"}
    plain = case | {"seq": 8, "split": True}
    changes: list[tuple[str, bool, dict]] = [("4x2x1x1", False, {}), ("2x1x2x2", True, llama | {"norm_qk": True})]
    return [plain | {"grid": grid, "checkpointed": again, "config": case["config"] | changed}
            for grid, again, changed in changes]  # fmt: skip


def count(cases: list[dict]) -> list[dict]:
    """On every rank: run each case once and return what was counted."""
    from litgpt import GPT, Config

    torch.distributed.init_process_group("axo")
    found = []
    for case in cases:
        comms = axo.connect(case["grid"])
        torch.manual_seed(0)
        config = Config(**{**case["config"], "vocab_size": case["config"]["padded_vocab_size"]})
        cache = "all" if case["keep"] else "none"
        overlap = axo.Overlap(gather_cache=cache, bucket_bytes=case["bucket"])
        model = axo.parallelize(GPT(config), comms, overlap=overlap, sequence_parallel=case.get("split", False))
        if case["checkpointed"]:
            for block in model.transformer.h:
                again = block.forward
                block.forward = lambda *a, again=again, **k: checkpoint(again, *a, use_reentrant=False, **k)
        rows = case["sequences"] // (comms.grid.z * comms.grid.data)
        ids = torch.randint(0, config.padded_vocab_size, (rows, case["seq"] + 1))
        with axo.count_collectives() as counts:
            logits = model(ids[:, :-1])
            axo.nn.cross_entropy(logits, ids[:, 1:], comms=comms, columns=config.padded_vocab_size).backward()
        found.append({key: tuple(value) for key, value in counts.items()})
        comms.close()
    return found


def predict(case: dict, rank: int) -> dict:
    """What the planner says that this rank sends."""
    grid = Grid.parse(case["grid"])
    workload = readers.from_litgpt(case["config"], seq_length=case["seq"])
    run = RunOptions(
        case["sequences"] * case["seq"],
        itemsize=4,
        cached_gathers=1.0 if case["keep"] else 0.0,
        bucket_bytes=case["bucket"],
        recompute="full" if case["checkpointed"] else "none",
        sequence_parallel=case.get("split", False),
    )
    calls = step_calls(workload, grid, run, grid.coords(rank))
    return {key: tuple(value) for key, value in cost.total(calls).items()}


def check(cases: list[dict]) -> None:
    per_rank = run_ranks(count, RANKS, cases)
    for number, case in enumerate(cases):
        for rank in range(RANKS):
            assert per_rank[rank][number] == predict(case, rank), f"rank {rank} of {case}"
        assert per_rank[0][number], "nothing was counted"


@pytest.mark.slow
def test_predicted_collectives_are_those_that_the_engine_issues() -> None:
    cases = draw(20)
    sample = [next(c for c in cases if c["grid"] == grid) for grid in ("2x2x2x1", "1x1x4x2", "4x2x1x1", "2x1x2x2")]
    sample[0]["checkpointed"] = True
    sample += heads_of_their_own(cases[1]) + tokens_split(cases[0])
    assert {case["config"]["norm_class_name"] for case in sample} == {"LayerNorm", "RMSNorm"}
    check(sample)


@pytest.mark.soak
def test_twenty_random_models_on_every_grid_of_eight_ranks() -> None:
    cases = draw(20)
    assert len({case["grid"] for case in cases}) == 20
    check(cases + heads_of_their_own(cases[3]) + tokens_split(cases[1]))
    line = {"proof": "predicted collectives are the counted ones", "models": 20, "grids": 20, "ranks": RANKS}
    print("\n" + json.dumps(line | {"ranks_that_differ": 0}))
