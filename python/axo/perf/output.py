"""Plans and simulations as tables, JSON, CSV and one self-contained HTML page.

One writer for each form. The HTML page holds its style and its plots (PNG, base64); it loads nothing from the network.
"""

from __future__ import annotations

import base64
import csv
import html
import io
import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from axo.grid import AXES
from axo.perf.command import PLACEHOLDERS, command_line, litgpt_line
from axo.perf.memory import GIB
from axo.perf.others import Alternative, others
from axo.perf.planner import INTERVAL, Candidate, GridPlan
from axo.perf.stages import Stages

if TYPE_CHECKING:
    from axo.perf.simulator import Simulation

Table = tuple[list[str], list[list[str]]]  # header and rows, as text
SHOWN = 20  # grids on the page
_NUMBER = re.compile(r"[+-]?[\d.,]+(e[+-]?\d+)?%?")


def text_columns(table: Table) -> list[bool]:
    """For each column of a table, whether it holds text, which is set to the left; numbers are set to the right."""
    header, rows = table
    return [any(row[i] and not _NUMBER.fullmatch(row[i]) for row in rows) for i in range(len(header))]


def as_csv(rows: Iterable[dict[str, Any]], columns: Sequence[str]) -> str:
    """Return records as CSV; what a record lacks is left empty."""
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def candidate_json(made: GridPlan, candidate: Candidate) -> dict[str, Any]:
    """Return one grid as plain numbers: seconds, bytes, percent."""
    found: dict[str, Any] = {
        "name": candidate.name,
        "grid": str(candidate.grid),
        "algorithm": candidate.algorithm,
        "reason": candidate.reason,
    }
    if candidate.stages is not None:
        found |= {"pipeline": candidate.stages.ranks, "schedule": candidate.stages.schedule}
        found["cuts"] = list(candidate.stages.bounds[1:-1])
    if candidate.memory is not None:
        found["memory_bytes"] = asdict(candidate.memory) | {"total": candidate.memory.total}
    if candidate.time is not None:
        time = candidate.time
        found |= {
            "step_s": time.total,
            "compute_s": time.compute,
            "contention_s": time.contention,
            "optimizer_s": time.optimizer,
            "exposed_s": dict(time.exposed),
            "communication_s": dict(time.communication),
            "hfu_percent": made.percent_of_peak(candidate),
            "mfu_percent": made.percent_of_peak(candidate, model_flops=True),
            "micro_batches": candidate.run.micro_batches,
            "cached_gathers": candidate.run.cached_gathers,
            "recompute": candidate.recompute,
            "recomputes": candidate.recomputes,
            "bubble_s": time.bubble,
            "zero": candidate.run.zero,
            "sequence_parallel": candidate.run.sequence_parallel,
            "offload": "optimizer" if candidate.run.offload else "none",
            "why": made.why(candidate),
            "tokens_per_second_per_gpu": made.tokens_a_second(candidate),
            "command": command_line(made, candidate),
            "litgpt_command": litgpt_line(made, candidate),
        }
        if made.request.tokens:
            found["days"] = made.days(candidate)
            found["gpu_hours"] = made.gpu_hours(candidate)
            found["megawatt_hours"] = made.megawatt_hours(candidate)
    return found


def plan_json(made: GridPlan, *, gpu_hour: float = 0.0) -> dict[str, Any]:
    """Return the whole plan as plain data; ``gpu_hour`` is the price of one."""
    asked = made.request
    return {
        "model": asked.workload.name,
        "parameters": asked.workload.parameters,
        "machine": asked.machine.name,
        "network_gbits": asked.machine.network,
        "interval": list(INTERVAL),
        "calibrated_on": list(asked.machine.calibrated_on),
        "gpus": asked.gpus,
        "batch_tokens": asked.batch_tokens,
        "sequence_length": asked.workload.seq_length,
        "tokens": asked.tokens,
        "watts": asked.machine.watts,
        "gpu_hour": gpu_hour,
        "hardware_flops_a_step": made.step_flops(),
        "ranked": [candidate_json(made, candidate) for candidate in made.ranked],
        "others": [
            {"kind": one.kind, "because": one.why} | candidate_json(made, one.candidate) for one in others(made)
        ],
        "left_out": [candidate_json(made, candidate) for candidate in made.left_out],
    }


_COLUMNS = (
    "rank grid algorithm x y z data step_s compute_s contention_s exposed_x_s exposed_y_s exposed_z_s exposed_data_s"
    " hfu_percent mfu_percent days gpu_hours recompute recomputes zero sequence_parallel offload micro_batches pipeline"
    " schedule cuts bubble_s cached_gathers memory_bytes command reason"
).split()


def plan_csv(made: GridPlan) -> str:
    """Return every grid as CSV, the fastest first, what is left out at the end."""
    rows = []
    for number, candidate in enumerate([*made.ranked, *made.left_out], 1):
        row = candidate_json(made, candidate)
        row["rank"] = "" if candidate.time is None else number
        row |= {axis: candidate.grid.size(axis) for axis in AXES}
        row |= {f"exposed_{axis}_s": seconds for axis, seconds in row.get("exposed_s", {}).items()}
        row["memory_bytes"] = f"{candidate.memory.total:.0f}" if candidate.memory else ""
        rows.append(row)
    return as_csv(rows, _COLUMNS)


def plan_table(made: GridPlan, top: int) -> Table:
    """Return header and rows of the best ``top`` grids, as text.

    HFU counts recomputation; kept is the share of gathered weights that stay for their second use. A step is its
    products, by axis the communication time that they do not hide, other (the optimizer, and by how much hidden
    communication slows products), and with stages what these wait for each other.
    """
    header = ["", "grid", "step s", "tokens/s a GPU", "% MFU", "% HFU", "products s", "other s"]
    header += [*(f"{axis} s" for axis in AXES), "GiB", "micro", "kept"]
    if made.request.tokens:
        header.append("days")
    if made.request.search:
        header += ["recompute", "zero"]
    offloads = any(candidate.run.offload for candidate in made.ranked[:top])
    splits = any(candidate.run.sequence_parallel for candidate in made.ranked[:top])
    header += ["offload"] * offloads + ["tokens"] * splits
    staged = made.request.pipeline != (1,)
    if staged:
        header += ["bubble s", "stages", "schedule", "blocks of stages"]
    rows = []
    for number, candidate in enumerate(made.ranked[:top], 1):
        time, held = candidate.time, candidate.memory
        assert time is not None and held is not None
        shown = [time.compute, time.contention + time.optimizer, *time.exposed.values()]
        grid = candidate.name if candidate.stages is None else str(candidate.grid)
        row = [str(number), grid, f"{time.total:.2f}", f"{made.tokens_a_second(candidate):,.0f}"]
        row += [f"{made.percent_of_peak(candidate, model_flops=mfu):.1f}" for mfu in (True, False)]
        row += [*(f"{seconds:.2f}" for seconds in shown), f"{held.total / GIB:.1f}", str(candidate.run.micro_batches)]
        row.append(f"{100 * candidate.run.cached_gathers:.0f}%")
        if made.request.tokens:
            row.append(f"{made.days(candidate):.1f}")
        if made.request.search:
            row += [candidate.recomputes, str(candidate.run.zero)]
        row += ["optimizer" if candidate.run.offload else ""] * offloads
        row += ["over x" if candidate.run.sequence_parallel else ""] * splits
        if staged:
            one = candidate.stages
            row += [f"{time.bubble:.2f}", str(one.ranks if one else 1), one.schedule if one else "", cuts_text(one)]
        rows.append(row)
    return header, rows


def others_table(found: Sequence[Alternative], best: Candidate) -> Table:
    """Return the best plan of each other kind, how far it is behind, and why."""
    rows = []
    for kind, one, why in found:
        seconds, behind = "", ""
        if one.time is not None:
            seconds, behind = f"{one.seconds:.2f}", f"{100 * (one.seconds / best.seconds - 1):+.1f}%"
        size = "" if one.memory is None else f"{one.memory.total / GIB:.1f}"
        rows.append([kind, one.name, one.way.text, str(one.run.micro_batches), seconds, behind, size, why])
    return ["instead", "grid", "how", "micro", "step s", "behind", "GiB", "why"], rows


def cuts_text(stages: Stages | None) -> str:
    """How many blocks each stage has: ``4 x 10``, ``5 x 10 + 2 x 11 + 8``."""
    if stages is None:
        return ""
    sizes = [high - low for low, high in itertools.pairwise(stages.bounds)]
    runs = [(len(list(same)), size) for size, same in itertools.groupby(sizes)]
    return " + ".join(f"{count} x {size}" if count > 1 else str(size) for count, size in runs)


def compare_table(plans: Sequence[tuple[str, dict[str, Any]]]) -> Table:
    """Return the best row of each plan side by side, the fewest GPU hours a token first.

    Hours, price (where ``--gpu-hour`` gave one) and energy (where the power is known) are of a billion tokens.

    Args:
        plans: (file, what ``plan_json`` gave).

    Raises:
        ValueError: A file holds no plan.
    """
    header = "file,model,machine,network,GPUs,tokens a batch,grid,step s,tokens/s,% HFU,GiB".split(",")
    header += ["GPU hours a billion tokens", "price", "MWh"]
    rows = []
    for name, made in plans:
        try:
            best = made["ranked"][0]
            rate = made["batch_tokens"] / best["step_s"]
            hours = made["gpus"] / rate * 1e9 / 3600
            row = [
                name,
                made["model"],
                made["machine"],
                f"{made['network_gbits']:g} Gb/s" if made.get("network_gbits") else "",
                str(made["gpus"]),
                f"{made['batch_tokens']:,}",
                best.get("name", best["grid"]),
            ]
            row += [f"{best['step_s']:.2f}", f"{rate:,.0f}", f"{best['hfu_percent']:.1f}"]
            row += [f"{best['memory_bytes']['total'] / GIB:.1f}", f"{hours:.1f}"]
            price, energy = hours * made.get("gpu_hour", 0.0), hours * made.get("watts", 0.0) / 1e6
            row += [f"{price:,.0f}" if price else "", f"{energy:.2f}" if energy else ""]
        except (KeyError, IndexError, TypeError, ZeroDivisionError):
            raise ValueError(f"{name} holds no plan; `axo plan ... --json FILE` writes one") from None
        rows.append((hours, row))
    return header, [row for _, row in sorted(rows, key=lambda one: one[0])]


def compared(plans: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """Say in one sentence what the dearest of plans costs against the cheapest, a token; each of them fits."""

    def hours(made: dict[str, Any]) -> float:
        return float(made["gpus"] * made["ranked"][0]["step_s"] / made["batch_tokens"])

    each = sorted(((hours(made), name, made) for name, made in plans), key=lambda one: one[0])
    (low, name, cheap), (high, other, dear) = each[0], each[-1]
    return (
        f"a token costs {high / low:.3g} times as many GPU hours in {other} ({dear['model']} on {dear['machine']}) as"
        f" in {name} ({cheap['model']} on {cheap['machine']}); both fit"
    )


def commands(made: GridPlan, top: int) -> list[str]:
    """Return the command lines of each of the best ``top`` rows, numbered as in the table."""
    lines = []
    for number, one in enumerate(made.ranked[:top], 1):
        for line in (command_line(made, one), litgpt_line(made, one)):
            lines += [f"{number}: {line}"] if line else []
    return lines


def placeholders(made: GridPlan, top: int) -> dict[str, str]:
    """What stands in the commands for what the user has, and what it is."""
    text = "\n".join(commands(made, top))
    return {word: meaning for word, meaning in PLACEHOLDERS.items() if word in text}


def tokens_text(tokens: float) -> str:
    """A count in words: ``1T``, ``1.5T``, ``300B``."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if tokens >= size:
            return f"{tokens / size:.3g}{unit}"
    return f"{tokens:g}"


def memory_table(candidate: Candidate) -> Table:
    """Return what a rank holds, by what it is for."""
    memory = candidate.memory
    if memory is None:
        return ["what", "GiB"], []
    sizes = {name: size for name, size in asdict(memory).items() if name != "accumulates"}
    sizes |= {f"when {moment}": size for moment, size in memory.moments.items()} | {
        "with waste and reserve": memory.total
    }
    return ["what", "GiB"], [[part, f"{size / GIB:.2f}"] for part, size in sizes.items()]


def traffic_table(made: GridPlan, candidate: Candidate) -> Table:
    """Return seconds by axis, shown and hidden, of one grid."""
    time = candidate.time
    if time is None:
        return ["axis", "reason"], [["", candidate.reason]]
    rows = []
    for axis in AXES:
        if candidate.grid.size(axis) > 1:
            gbs = made.request.machine.bandwidth(candidate.grid, axis) / 1e9
            where = "between nodes" if made.request.machine.crosses_nodes(candidate.grid, axis) else "inside a node"
            total = time.communication[axis]
            rows.append(
                [axis, str(candidate.grid.size(axis)), f"{gbs:.1f}", where, f"{total:.3f}", f"{time.exposed[axis]:.3f}"]
            )
    return ["axis", "ranks", "GB/s a ring", "where", "traffic s", "exposed s"], rows


def simulation_table(simulation: Simulation) -> Table:
    """Return busy and exposed seconds by stream."""
    rows = [
        [stream, f"{busy:.3f}", f"{simulation.exposed[stream]:.3f}" if stream in simulation.exposed else ""]
        for stream, busy in simulation.busy.items()
        if busy
    ]
    return ["stream", "busy s", "products wait s"], rows


# ------------------------------------------------------------------------------------------------------------- HTML

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1d2430; background: #fff; max-width: 70rem; margin: 2rem auto;
       padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
table { border-collapse: collapse; margin: .7rem 0; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .7rem; text-align: right; border-bottom: 1px solid #dde2ea; white-space: nowrap; }
th { border-bottom: 2px solid #8893a5; } td:first-child, th:first-child, td.text, th.text { text-align: left; }
td.text { white-space: normal; } img { max-width: 100%; } .wide { overflow-x: auto; } .note { color: #566173; }
"""


def page(title: str, sections: Sequence[tuple[str, Sequence[str]]]) -> str:
    """Return one HTML page: a title and sections of (heading, pieces of HTML)."""
    body = "".join(f"<h2>{html.escape(heading)}</h2>\n{''.join(pieces)}\n" for heading, pieces in sections)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{html.escape(title)}</h1>\n{body}</body>\n</html>\n"
    )


def paragraph(text: str) -> str:
    """Return text as a paragraph."""
    return f'<p class="note">{html.escape(text)}</p>\n'


def bullets(texts: Sequence[str]) -> str:
    """Return texts as a list."""
    return "<ul>" + "".join(f"<li>{html.escape(text)}</li>" for text in texts) + "</ul>\n"


def html_table(table: Table) -> str:
    """Return a table; cells that do not look like numbers are set to the left."""
    header, rows = table
    texts = text_columns(table)

    def cells(tag: str, values: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{' class=text' if text else ''}>{html.escape(value)}</{tag}>"
            for value, text in zip(values, texts, strict=True)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>\n" for row in rows)
    return f'<div class="wide"><table>\n<tr>{cells("th", header)}</tr>\n{body}</table></div>\n'


def image(png: bytes, alt: str) -> str:
    """Return a PNG inside the page."""
    return f'<img alt="{html.escape(alt)}" src="data:image/png;base64,{base64.b64encode(png).decode()}">\n'


def plan_page(made: GridPlan, simulation: Simulation, plots: dict[str, bytes]) -> str:
    """Return the report of a plan: the ranking, the best grid in detail, one simulated step, what is left out."""
    asked, best = made.request, made.best
    title = f"{asked.workload.name} on {asked.gpus} GPUs of {asked.machine.name}"
    facts = [
        f"{asked.workload.parameters / 1e9:.1f} billion parameters, {asked.batch_tokens:,} tokens a batch in sequences"
        f" of {asked.workload.seq_length}; {made.step_flops():.3e} hardware flops a step.",
        f"Machine figures calibrated on: {', '.join(asked.machine.calibrated_on) or 'nothing; they are guesses'}.",
        made.why(best),
    ]
    step = f"One simulated step of {best.grid}: {simulation.seconds:.2f} s."
    alternatives = others(made)
    reasons = [f"{candidate.grid}: {candidate.reason}" for candidate in made.left_out[:40]]
    if len(made.left_out) > 40:
        reasons.append(f"and {len(made.left_out) - 40} more")
    sections = [
        ("What was asked", [bullets(facts)]),
        (f"The best {min(SHOWN, len(made.ranked))} of {len(made.ranked)} grids", [html_table(plan_table(made, SHOWN))]),
        *([("The best of each other choice", [html_table(others_table(alternatives, best))])] if alternatives else []),
        ("Plots", [image(png, name) for name, png in plots.items()]),
        (f"Traffic of {best.grid}", [html_table(traffic_table(made, best))]),
        (f"Memory of {best.grid}", [html_table(memory_table(best))]),
        ("Simulation", [paragraph(step), html_table(simulation_table(simulation))]),
        (f"Left out: {len(made.left_out)} grids", [bullets(reasons)]),
    ]
    return page(title, sections)
