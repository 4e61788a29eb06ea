"""A plan's step as the engine does it, against the clock.

Oracles: the closed form (which takes maxima over totals where the clock takes events), the flops of the workload, and
counts by hand. That the record is that of real ranks: tests/perf/test_order.py.
"""

import math
from dataclasses import replace

import pytest

from axo import dryrun
from axo.dryrun.simulate import simulate, training_of
from axo.grid import Grid
from axo.perf import flops, machine, model, readers
from axo.perf.layers import seen
from axo.perf.replay import ATTENTION, COLLECTIVE, PRODUCT, Entry
from axo.perf.run_options import OVERLAPS, RunOptions
from axo.perf.workload import Workload, gpt

TOKENS = 2**17
ON = machine.load("perlmutter")


def few_blocks(layers: int = 3) -> Workload:
    """As wide as 20B of the papers."""
    return gpt("wide", layers=layers, hidden=7168, heads=56, seq_length=512)


def recorded(grid: str, workload: Workload, **options: object) -> list[Entry]:
    entries, run = list[Entry](), RunOptions(TOKENS, **options)  # type: ignore[arg-type]
    dryrun.run(training_of(workload, Grid.parse(grid), run), entries=entries)
    return entries


@pytest.mark.parametrize("grid", ["1x1x64x1", "2x2x4x4", "4x1x16x1", "8x2x2x2", "1x8x8x1", "1x1x4x16"])
@pytest.mark.parametrize("overlap", [(), OVERLAPS])
def test_closed_form_and_clock_agree(grid: str, overlap: tuple[str, ...]) -> None:
    """15%: where links are shared at the borders between phases the closed form cannot see it. What goes over data it
    counts behind backward, where the engine has most of it beside."""
    workload, where = few_blocks(), Grid.parse(grid)
    run = RunOptions(TOKENS, overlap=frozenset(overlap))
    closed = model.predict(workload, where, ON, run)
    step = simulate(workload, where, ON, run)
    assert step.exposed["data"] <= closed.exposed["data"]
    without_data = step.seconds - step.exposed["data"], closed.total - closed.exposed["data"]
    assert without_data[0] == pytest.approx(without_data[1], rel=0.15), (step.exposed, closed.exposed)


@pytest.mark.parametrize("options", [{}, {"recompute": "none"}, {"recompute": "selective"}])
def test_a_record_has_the_flops_of_the_workload(options: dict[str, object]) -> None:
    """Oracle: the planner's count, of a rank's share, exactly; attention's as far as a causal kernel sees."""
    workload, grid = few_blocks(2), "2x2x2x2"
    entries = recorded(grid, workload, **options)
    multiplied = sum(2 * math.prod(one.sizes) for one in entries if one.what == PRODUCT)
    attended = sum(one.sizes[0] for one in entries if one.what == ATTENTION)
    again = options.get("recompute", "full") == "full"
    whole = flops.step_flops(workload, TOKENS, recompute=again)
    scores = (4 if again else 3) * 2 * 4 * TOKENS * seen(workload.seq_length) * workload.hidden
    assert attended == pytest.approx(scores / 8, rel=1e-9), "ranks along y have the same heads"
    assert multiplied == pytest.approx((whole - scores) / 16, rel=1e-9)


def test_gathers_a_step_with_and_without_the_cache() -> None:
    def gathers(**options: object) -> int:
        entries = recorded("1x1x8x1", few_blocks(), **options)
        return sum((one.op, one.axis) == ("all_gather", "z") for one in entries if one.what == COLLECTIVE)

    blocks, others = 4 * 3, 2  # the head, and the embedding, whose backward wants no weight
    assert gathers() == 2 * blocks + others + 1  # 2N with checkpointing
    assert gathers(cached_gathers=1.0) == blocks + others  # N


def test_micro_batches_and_the_optimizer_count_as_in_the_closed_form() -> None:
    """Bytes by hand: ZeRO gathers the updated fp32 parameters behind the optimizer's step."""
    workload, grid, on = few_blocks(2), Grid(z=2, data=4), replace(ON, contention=0.0)
    run = RunOptions(TOKENS, zero=2, micro_batches=8)
    step, closed = simulate(workload, grid, on, run), model.predict(workload, grid, on, run)
    assert step.micro_batches == 2 and step.seconds < closed.total
    # What adds to gradients writes more than the first, and repeats.
    assert step.busy["compute"] == pytest.approx(closed.compute + closed.optimizer, rel=0.01)
    (optimizer,) = (one.end for one in step.spans if one.name == "optimizer")
    behind = sum(one.end - one.start for one in step.spans if one.stream == "data" and one.start >= optimizer)
    shard = workload.parameters / 2
    assert behind == pytest.approx(3 / 4 * 4 * shard / on.bandwidth(grid, "data"), rel=0.02)


def test_names_and_order_of_one_layer_with_every_overlap() -> None:
    """OAG: the next block is gathered before this one's first product; OAR: dW runs beside dI's sum; ORS: no wait."""
    entries = recorded("2x2x4x2", few_blocks())
    number = {one.name: place for place, one in enumerate(entries) if one.name}
    block = "transformer.h.1."
    assert number["transformer.h.2.mlp.proj forward all_gather"] < number[f"{block}attn.qkv forward"]
    dI, dW = number[f"{block}mlp.fc dI"], number[f"{block}mlp.fc dW"]
    summed = number[f"{block}mlp.fc backward all_reduce"]
    assert dI < summed < dW < number[f"{block}mlp.fc backward reduce_scatter"]
    waits = [place for place, one in enumerate(entries) if (one.what, one.number) == ("wait", entries[summed].number)]
    assert min(waits) > dW


def test_what_litgpt_has_no_configuration_for_is_refused() -> None:
    with pytest.raises(ValueError, match="unet-1b is no transformer that LitGPT has a configuration for"):
        simulate(readers.read("unet-1b"), Grid(z=8), ON, RunOptions(2**17))
