"""The order of a simulated step against the order in which the engine issues its collectives.

Oracle: a record of every all_gather, reduce_scatter and all_reduce that 8 CPU ranks issue in a forward and backward of
a parallelized ``litgpt.GPT`` (Llama-like, no biases), in the second step, when the engine knows the order. Left out on
both sides: gradients of replicated vectors (norm weights) and the data axis, which both reduce at the end of the step.
"""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import axo
from axo.grid import Grid
from axo.perf import machine, readers, schedule
from axo.perf.layer_time import Run
from tests.launcher import run_ranks

RANKS, SEQUENCES, LENGTH = 8, 8, 4
CONFIG = {
    "name": "order",
    "n_layer": 2,
    "n_head": 4,
    "n_query_groups": 4,
    "n_embd": 32,
    "intermediate_size": 48,
    "padded_vocab_size": 64,
    "block_size": 16,
    "bias": False,
    "norm_class_name": "RMSNorm",
    "mlp_class_name": "LLaMAMLP",
}
CASES = [  # grid, checkpointed, gathered weights kept, overlap
    ("2x2x2x1", False, True, "oar"),
    ("2x2x2x1", True, True, "oar"),
    ("1x2x4x1", False, False, "oar"),
    ("4x1x2x1", True, True, ""),
    ("2x1x1x4", False, True, "oar"),
    ("2x2x2x1", False, False, "oar ors oag"),
    ("1x2x4x1", True, False, "oar ors oag"),
    ("2x1x4x1", False, True, "ors oag"),
]


def record(cases: list) -> list:
    """On every rank: the (operation, axis) of each collective, in the order in which it was issued."""
    from litgpt import GPT, Config

    torch.distributed.init_process_group("axo")
    issued: list[tuple[str, str]] = []
    for op in ("all_reduce", "all_gather", "reduce_scatter"):
        plain = getattr(axo.Communicator, op)

        def recorded(self, *args, which=op, plain=plain, **options):
            issued.append((which, self.axis))
            return plain(self, *args, **options)

        setattr(axo.Communicator, op, recorded)
    found = []
    for grid, checkpointed, keep, overlap in cases:
        comms = axo.connect(grid)
        switches = (name in overlap for name in ("oar", "ors", "oag"))
        options = axo.Overlap(*switches, "all" if keep else "none")
        model = axo.parallelize(GPT(Config(**CONFIG)), comms, overlap=options)
        if checkpointed:
            for block in model.transformer.h:
                again = block.forward
                block.forward = lambda *a, again=again, **k: checkpoint(again, *a, use_reentrant=False, **k)
        ids = torch.zeros(SEQUENCES // (comms.grid.z * comms.grid.data), LENGTH + 1, dtype=torch.long)
        for _ in range(2):
            issued.clear()
            logits = model(ids[:, :-1])
            axo.nn.cross_entropy(logits, ids[:, 1:], comms=comms).backward()
        axes = [axis for axis in ("x", "y", "z") if comms.grid.size(axis) > 1]
        found.append([(op, axis) for op, axis in issued if axis in axes and (op, axis) != ("all_reduce", "z")])
        comms.close()
    return found


def simulated(grid: str, checkpointed: bool, keep: bool, overlap: str) -> list[tuple[str, str]]:
    """The same from the planner's schedule."""
    workload = readers.from_litgpt(CONFIG, seq_length=LENGTH).with_checkpointing(checkpointed)
    share = 1.0 if keep else 0.0
    run = Run(SEQUENCES * LENGTH, itemsize=4, overlap=frozenset(overlap.split()), cached_gathers=share)
    found = []
    for operation in schedule.build(workload, Grid.parse(grid), machine.load("perlmutter"), run).operations:
        layer = operation.name.split()[0].split(".", 1)[-1]
        vector_grad = operation.name.endswith("reduce-scatter") and ("norm" in layer or layer == "ln_f")
        if operation.stream in ("x", "y", "z") and not vector_grad:
            what = operation.name.split()[-1]
            op = {"gather": "all_gather", "reduce-scatter": "reduce_scatter"}.get(what, "all_reduce")
            found += [(op, operation.stream)] * (2 if layer == "loss" else 1)  # a maximum, then the sums
    return found


@pytest.mark.slow
def test_simulated_order_is_the_order_that_eight_ranks_record() -> None:
    per_rank = run_ranks(record, RANKS, CASES)
    for number, case in enumerate(CASES):
        expected = simulated(*case)
        assert len(expected) > 20 or case[0] == "2x1x1x4"
        for rank in range(RANKS):
            assert per_rank[rank][number] == expected, f"rank {rank} of {case}"
