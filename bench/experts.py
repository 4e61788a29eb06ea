"""A step of a mixture of experts on four CPU ranks: experts over the ranks against experts that all ranks split.

    axo bench experts --limit 50

Forward and backward of a GPT of two blocks, the same batch of --rows sequences, on four ranks that play four hosts;
what leaves one is held to --limit MB a second. In turn, each --rounds times: experts over z (1x1x4x1, ``experts=4``:
tokens travel), and by tensor parallelism (4x1x1x1: outputs are summed). Times are medians of the slowest rank; beside
them stands what the planner says that all messages take at that rate. The check is the loss of one rank.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from .lib.arguments import Parser
from .lib.clock import slowest
from .lib.table import Table, environment

COLUMNS = {"case": "s", "limit_MBs": ".0f", "seconds": ".3f", "planned_messages_s": ".3f", "error": ".1e"}
CASES = {"experts over ranks": ("1x1x4x1", 4), "tensor parallelism": ("4x1x1x1", 1)}
LENGTH = 256
SIZES: dict[str, Any] = {
    "n_layer": 2, "n_embd": 256, "n_head": 8, "n_query_groups": 8, "padded_vocab_size": 512, "block_size": LENGTH,
    "mlp_class_name": "LLaMAMoE", "n_expert": 8, "n_expert_per_token": 2, "moe_intermediate_size": 256, "bias": False,
    "norm_class_name": "RMSNorm", "parallel_residual": False, "rotary_percentage": 1.0,
}  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Print both times and which is less. Returns 1 where the planner is wrong about that."""
    from axo.launch import launch_local

    parser = Parser("axo bench experts", __doc__, json=True)
    parser.add_argument("--rows", type=int, default=8, help=f"sequences of {LENGTH} tokens, a multiple of 4 (8)")
    parser.add_argument("--limit", type=float, default=50.0, help="MB a second that leave a rank (50)")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args(arguments)
    if min(options.rows, options.rounds) < 1 or options.limit <= 0 or options.rows % 4:
        parser.error("--rows, --rounds and --limit are above 0, and --rows a multiple of 4")
    table = Table(COLUMNS, options.json, environment(torch.device("cpu")) | {"bench": "experts"})
    measured = launch_local(measure, 4, options.rows, options.limit * 1e6, options.rounds)
    planned = {case: messages(*CASES[case], options.rows, options.limit * 1e6) for case in CASES}
    for case, (seconds, error) in measured.items():
        table.add(case=case, limit_MBs=options.limit, seconds=seconds, planned_messages_s=planned[case], error=error)
    first, second = ([values[case] for case in CASES] for values in ({c: s for c, (s, _) in measured.items()}, planned))
    right = (first[0] < first[1]) == (second[0] < second[1])
    table.note(f"tensor parallelism over experts over ranks: {first[1] / first[0]:.2f}; the planner's messages:"
               f" {second[1] / second[0]:.2f}", verdict=right, gain=first[1] / first[0])  # fmt: skip
    return int(not right)


def messages(grid: str, experts: int, rows: int, rate: float) -> float:
    """What the planner says that the collectives of a step take where a rank sends ``rate`` bytes a second."""
    from axo.grid import Grid
    from axo.perf import machine, planner, readers

    model = readers.from_litgpt({"name": "mixture", **SIZES}, seq_length=LENGTH)
    one = replace(machine.load("h100"), gpus_per_node=1, inter_gbs=rate / 1e9, network_fraction=1.0, cross_gbs={})
    request = planner.Request(model, one, 4, rows * LENGTH, recompute="none", gather="keep", experts=experts)
    best = planner.consider(request, Grid.parse(grid))
    assert best.time is not None, best.reason
    return sum(best.time.communication.values())


def measure(rows: int, rate: float, rounds: int) -> dict[str, tuple[float, float]]:
    """On each rank: seconds of a step, and the relative error of its loss, of each case."""
    from litgpt.config import Config
    from litgpt.model import GPT

    import axo
    from axo.comm.hosts import simulate

    torch.set_num_threads(1)
    simulate(1, rate=rate)

    def serial() -> Any:
        torch.manual_seed(0)
        return GPT(Config(**SIZES))

    ids = torch.randint(SIZES["padded_vocab_size"], (rows, LENGTH), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = float(_loss(serial(), ids))
    every = {case: axo.connect(grid, experts=experts) for case, (grid, experts) in CASES.items()}
    models = {case: axo.parallelize(serial(), comms, gather_logits=True) for case, comms in every.items()}
    seconds: dict[str, list[float]] = {case: [] for case in CASES}
    errors = dict.fromkeys(CASES, 0.0)
    for _ in range(rounds):
        for case, comms in every.items():
            mine = axo.shard_batch(ids, comms)
            seconds[case].append(slowest(comms.world, partial(_step, models[case], mine)))
    for case, comms in every.items():
        with torch.no_grad():
            loss = _loss(models[case], axo.shard_batch(ids, comms)).reshape(1)
        mean = float(comms.data.all_reduce(comms.z.all_reduce(loss, "avg"), "avg"))
        errors[case] = abs(mean / expected - 1)
    for comms in every.values():
        comms.close()
    return {case: (statistics.median(each), errors[case]) for case, each in seconds.items()}


def _loss(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


def _step(model: Any, ids: torch.Tensor) -> None:
    model.zero_grad()
    _loss(model, ids).backward()


if __name__ == "__main__":
    raise SystemExit(main())
