"""Plans and simulations as tables, sentences and JSON."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from axo.grid import AXES
from axo.matmul import cost
from axo.perf.command import PLACEHOLDERS, command_line, litgpt_line
from axo.perf.layers import AttentionKind
from axo.perf.memory import GIB, Memory
from axo.perf.planner import INTERVAL, Alternative, Candidate, GridPlan, others
from axo.perf.stages import Stages

if TYPE_CHECKING:
    from axo.perf.replay import Simulation

Table = tuple[list[str], list[list[str]]]  # header and rows, as text
Shown = str | tuple[str, Table]  # of what is printed: a sentence, or a table and its title; what is empty is left out
_NUMBER = re.compile(r"[+-]?[\d.,]+(e[+-]?\d+)?%?")


def text_columns(table: Table) -> list[bool]:
    """For each column of a table, whether it holds text, which is set to the left; numbers are set to the right."""
    header, rows = table
    return [any(row[i] and not _NUMBER.fullmatch(row[i]) for row in rows) for i in range(len(header))]


def candidate_json(plan: GridPlan, candidate: Candidate) -> dict[str, Any]:
    """Return one grid as plain numbers: seconds, bytes, percent."""
    time, run, stages, held = candidate.time, candidate.run, candidate.stages, candidate.memory
    values: dict[str, Any] = {
        "name": candidate.name,
        "grid": str(candidate.grid),
        "algorithm": run.algorithm,
        "context": run.context,
        "experts": run.experts,
        "reason": candidate.reason,
    }
    if stages is not None:
        values |= {"pipeline": stages.ranks, "schedule": stages.schedule, "cuts": list(stages.bounds[1:-1])}
    if held is not None:
        values["memory_bytes"] = held._asdict() | {"total": held.total}
    if time is None:
        return values
    values |= {
        "step_s": time.total,
        **{f"{part}_s": getattr(time, part) for part in ("compute", "contention", "optimizer", "bubble")},
        "exposed_s": dict(time.exposed),
        "communication_s": dict(time.communication),
        "hfu_percent": plan.percent_of_peak(candidate),
        "mfu_percent": plan.percent_of_peak(candidate, model_flops=True),
        **{option: getattr(run, option) for option in ("micro_batches", "cached_gathers", "zero", "sequence_parallel")},
        "recompute": run.recompute != "none",
        "recomputes": run.recompute,
        "offload": "optimizer" if run.offload else "none",
        "why": plan.why(candidate),
        "tokens_per_second_per_gpu": plan.tokens_a_second(candidate),
        "command": command_line(plan, candidate),
        "litgpt_command": litgpt_line(plan, candidate),
    }
    cost = ("days", "gpu_hours", "megawatt_hours") if plan.request.tokens else ()
    return values | {name: getattr(plan, name)(candidate) for name in cost}


def plan_json(plan: GridPlan, *, gpu_hour: float = 0.0) -> dict[str, Any]:
    """Return the whole plan as plain data; ``gpu_hour`` is the price of one."""
    asked, on = plan.request, plan.request.machine
    return {
        "model": asked.workload.name,
        "parameters": asked.workload.parameters,
        "machine": on.name,
        "network_gbits": on.network,
        "interval": list(INTERVAL),
        "calibrated_on": list(on.calibrated_on),
        "gpus": asked.gpus,
        "batch_tokens": asked.batch_tokens,
        "sequence_length": asked.workload.seq_length,
        "tokens": asked.tokens,
        "watts": on.watts,
        "optimizer": asked.optimizer,
        "chunked_loss": asked.chunked_loss,
        "context": asked.context,
        "experts": asked.experts,
        "gpu_hour": gpu_hour,
        "hardware_flops_a_step": plan.step_flops(),
        "ranked": [candidate_json(plan, candidate) for candidate in plan.ranked],
        "others": [
            {"kind": one.kind, "because": one.why} | candidate_json(plan, one.candidate) for one in others(plan)
        ],
        "left_out": [candidate_json(plan, candidate) for candidate in plan.left_out],
    }


def plan_table(plan: GridPlan, top: int) -> Table:
    """Return header and rows of the best ``top`` grids, as text.

    HFU counts recomputation; kept is the share of gathered weights that stay for their second use. A step is its
    products, by axis the communication time that they do not hide, other (the optimizer, and by how much hidden
    communication slows products), and with stages what these wait for each other.
    """
    asked, shown, rows = plan.request, plan.ranked[:top], list[dict[str, str]]()
    offloads, splits = (any(getattr(one.run, name) for one in shown) for name in ("offload", "sequence_parallel"))
    digits = ".2f" if all(one.seconds >= 0.1 for one in shown) else ".5f"
    for number, one in enumerate(shown, 1):
        time, run, stages = one.time, one.run, one.stages
        assert time is not None and one.memory is not None
        row = {
            "": str(number),
            "grid": one.name if stages is None else str(one.grid),
            **({"context": str(run.context)} if asked.context != 1 else {}),
            **({"experts": str(run.experts)} if asked.experts != 1 else {}),
            "step s": f"{time.total:{digits}}",
            "tokens/s a GPU": f"{plan.tokens_a_second(one):,.0f}",
            "% MFU": f"{plan.percent_of_peak(one, model_flops=True):.1f}",
            "% HFU": f"{plan.percent_of_peak(one):.1f}",
            "products s": f"{time.compute:{digits}}",
            "other s": f"{time.contention + time.optimizer:{digits}}",
            **{f"{axis} s": f"{time.exposed[axis]:{digits}}" for axis in AXES},
            "GiB": f"{one.memory.total / GIB:.1f}",
            "micro": str(run.micro_batches),
            "kept": f"{100 * run.cached_gathers:.0f}%",
        }
        row |= {"days": f"{plan.days(one):.1f}"} if asked.tokens else {}
        row |= {"recompute": run.recompute, "zero": str(run.zero)} if asked.search else {}
        row |= {"offload": "optimizer" * run.offload} if offloads else {}
        row |= {"tokens": "over x" * run.sequence_parallel} if splits else {}
        if asked.pipeline != (1,):
            row |= {"bubble s": f"{time.bubble:{digits}}", "stages": str(one.pipeline)}
            row |= {"schedule": stages.schedule if stages else "", "blocks of stages": cuts_text(stages)}
        rows.append(row)
    return list(rows[0]), [list(row.values()) for row in rows]


def others_table(alternatives: Sequence[Alternative], best: Candidate) -> Table:
    """Return the best plan of each other kind, how far it is behind, and why."""
    rows = []
    for kind, one, why in alternatives:
        behind = "" if one.time is None else f"{100 * (one.seconds / best.seconds - 1):+.1f}%"
        times = ["" if one.time is None else f"{one.seconds:.2f}", behind]
        size = "" if one.memory is None else f"{one.memory.total / GIB:.1f}"
        rows.append([kind, one.name, one.run.text, str(one.run.micro_batches), *times, size, why])
    return ["instead", "grid", "how", "micro", "step s", "behind", "GiB", "why"], rows


def cuts_text(stages: Stages | None) -> str:
    """How many blocks each stage has: ``4 x 10``, ``5 x 10 + 2 x 11 + 8``."""
    sizes = [] if stages is None else [high - low for low, high in itertools.pairwise(stages.bounds)]
    runs = [(len(list(same)), size) for size, same in itertools.groupby(sizes)]
    return " + ".join(f"{count} x {size}" if count > 1 else str(size) for count, size in runs)


def compared(plans: Sequence[tuple[str, dict[str, Any]]]) -> list[Shown]:
    """Return the best row of each plan side by side, the fewest GPU hours a token first, and what the dearest costs.

    Hours, price (where ``--gpu-hour`` gave one) and energy (where the power is known) are of a billion tokens.

    Args:
        plans: (file, what ``plan_json`` gave).

    Raises:
        ValueError: A file holds no plan.
    """
    rows = list[dict[str, Any]]()
    for name, plan in plans:
        try:
            best, network = plan["ranked"][0], plan.get("network_gbits")
            hours = 1e9 * plan["gpus"] * best["step_s"] / plan["batch_tokens"] / 3600
            price, energy = hours * plan.get("gpu_hour", 0.0), hours * plan.get("watts", 0.0) / 1e6
            rows.append({
                "file": name, "model": plan["model"], "machine": plan["machine"],
                "network": f"{network:g} Gb/s" if network else "",
                "GPUs": str(plan["gpus"]), "tokens a batch": f"{plan['batch_tokens']:,}",
                "grid": best.get("name", best["grid"]), "step s": f"{best['step_s']:.2f}",
                "tokens/s": f"{plan['batch_tokens'] / best['step_s']:,.0f}", "% HFU": f"{best['hfu_percent']:.1f}",
                "GiB": f"{best['memory_bytes']['total'] / GIB:.1f}", "GPU hours a billion tokens": hours,
                "price": f"{price:,.0f}" if price else "", "MWh": f"{energy:.2f}" if energy else "",
            })  # fmt: skip
        except (KeyError, IndexError, TypeError, ZeroDivisionError):
            raise ValueError(f"{name} holds no plan; `axo plan ... --json FILE` writes one") from None
    hours_of = "GPU hours a billion tokens"
    rows.sort(key=lambda row: float(row[hours_of]))
    cheap, dear = rows[0], rows[-1]
    verdict = (
        f"a token costs {dear[hours_of] / cheap[hours_of]:.3g} times as many GPU hours in {dear['file']}"
        f" ({dear['model']} on {dear['machine']}) as in {cheap['file']} ({cheap['model']} on {cheap['machine']}); both"
        " fit"
    )
    cells = [list((row | {hours_of: f"{row[hours_of]:.1f}"}).values()) for row in rows]
    return [("the best of each plan", (list(cheap), cells)), verdict if len(rows) > 1 else ""]


def commands(plan: GridPlan, top: int) -> list[str]:
    """Return the command lines of each of the best ``top`` rows, numbered as in the table; then why rows have none."""
    every = ((number, one) for number, one in enumerate(plan.ranked[:top], 1))
    lines = [(str(number), line(plan, one)) for number, one in every for line in (command_line, litgpt_line)]
    reasons: dict[str, list[str]] = {}
    for number, reason in lines:
        if reason.startswith("("):
            reasons.setdefault(reason, []).append(number)
    lines = [pair for pair in lines if pair[1] and pair[1] not in reasons]
    return [f"{rows}: {line}" for rows, line in (*lines, *((", ".join(of), why) for why, of in reasons.items()))]


def exchanges(plan: GridPlan) -> str:
    """Say what leaves a rank in a step of the best plan for attention over ranks, by each exchange; empty: nothing."""
    grid, run, ranks = plan.best.grid, plan.best.run, plan.best.run.context
    if ranks == 1 or plan.best.stages is not None:
        return ""
    leaves = {"send": 1.0, "recv": 0.0, "all_gather": ranks - 1.0, "reduce_scatter": 1 - 1 / ranks}
    sent = dict.fromkeys(cost.EXCHANGES, 0.0)
    for block in plan.request.workload.blocks:
        for layer in block.layers:
            if not isinstance(layer, AttentionKind):
                continue
            if not cost.heads_divide(*layer.local_heads(grid), ranks):
                sent.pop("heads", None)
            for kind in sent:
                for one in layer.exchange(grid, run.group_rows(grid), run, block.reruns(run), kind):
                    size = one.calls * one.elements * one.itemsize * leaves.get(one.op, 1 - 1 / ranks)
                    sent[kind] += block.repeat * run.micro_batches * size / GIB
    return (
        f"for attention a rank of {plan.best.name} sends in a step, on a ring algorithm: "
        + ", ".join(f"{size:.3g} GiB by {kind}" for kind, size in sent.items())
        + "; the plan is by ring, which goes behind attention"
    )


def placeholders(plan: GridPlan, top: int) -> dict[str, str]:
    """What stands in the commands for what the user has, and what it is."""
    text = "\n".join(commands(plan, top))
    return {word: meaning for word, meaning in PLACEHOLDERS.items() if word in text}


def tokens_text(tokens: float) -> str:
    """A count in words: ``1T``, ``1.5T``, ``300B``."""
    units = (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3))
    return next((f"{tokens / size:.3g}{unit}" for unit, size in units if tokens >= size), f"{tokens:g}")


def memory_table(held: Memory) -> Table:
    """Return what a rank holds, by what it is for."""
    sizes = {name: size for name, size in held._asdict().items() if name != "accumulates"}
    sizes |= {f"when {moment}": size for moment, size in held.moments.items()}
    sizes["with waste and reserve"] = held.total
    return ["what", "GiB"], [[part, f"{size / GIB:.2f}"] for part, size in sizes.items()]


def traffic_table(plan: GridPlan, candidate: Candidate) -> Table:
    """Return seconds by axis, shown and hidden, of one grid that fits."""
    time, grid, on, rows = candidate.time, candidate.grid, plan.request.machine, list[list[str]]()
    assert time is not None
    for axis in (axis for axis in AXES if grid.size(axis) > 1):
        where = "between nodes" if on.crosses_nodes(grid, axis) else "inside a node"
        seconds = (f"{each[axis]:.3f}" for each in (time.communication, time.exposed))
        rows.append([axis, str(grid.size(axis)), f"{on.bandwidth(grid, axis) / 1e9:.1f}", where, *seconds])
    return ["axis", "ranks", "GB/s a ring", "where", "traffic s", "exposed s"], rows


def simulation_table(simulation: Simulation) -> Table:
    """Return busy and exposed seconds by stream."""
    rows = [
        [stream, f"{busy:.3f}", f"{simulation.exposed[stream]:.3f}" if stream in simulation.exposed else ""]
        for stream, busy in simulation.busy.items()
        if busy
    ]
    return ["stream", "busy s", "products wait s"], rows
