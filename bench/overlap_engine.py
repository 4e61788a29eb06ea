"""How much communication does each overlap hide in a training step? On CPU ranks over a limited link.

    axo bench overlap_engine --layers 8 --width 768 --rows 512

Each rank says that it is a host of its own (AXO_RANKS_PER_HOST=1); the link's rate (AXO_LINK_LIMIT) is set so that all
communication of a step takes ``--share`` of its products. A stack of layers runs with nothing overlapped, then with
one overlap alone, in turns:

    OAR  grid 2x1x1x1: the all-reduces of dI
    ORS  grid 1x1x2x1, weights kept: the reduce-scatters of dW
    OAG  grid 1x1x2x1, nothing kept: the gathers of forward and backward

``off`` and ``on`` are the milliseconds a step that the slowest rank waits: for OAR in backward, else for all of the
communication, since what z carries early may delay what it carries next. ``hideable`` is what of that could go: for OAR
each all-reduce of dI up to the time of its dW product, for ORS all but the last scatter of the pass, for OAG all but
the first gather of each pass. ``cut`` is (off - on) / hideable, above 1 where ranks also wait less for each other.
``step off`` and ``step on`` are whole steps. ``#wrong`` counts gradients that differ. Medians over rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from .table import Table, environment

COLUMNS = {"overlap": "s", "grid": "s", "compute": ".1f", "off": ".1f", "on": ".1f"}
COLUMNS |= {"hideable": ".1f", "cut": ".2f", "step off": ".1f", "step on": ".1f", "#wrong": "d"}
CASES = {
    "OAR": ("2x1x1x1", "all_reduce", "all_reduce"),
    "ORS": ("1x1x2x1", "reduce_scatter", "reduce_scatter"),
    "OAG": ("1x1x2x1", "all_gather", "all_gather"),
}
RANKS = 2


def main(arguments: list[str] | None = None) -> int:
    """Run the bench; returns 1 when gradients differ."""
    from axo.launch import launch_local

    parser = argparse.ArgumentParser(prog="axo bench overlap_engine", description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--rows", type=int, default=512, help="of a rank")
    parser.add_argument("--share", type=float, default=0.5, help="of communication in the time of products")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, default=None, help="append JSON lines to this file")
    options = parser.parse_args(arguments)
    os.environ["AXO_RANKS_PER_HOST"] = "1"
    plain = {name: value for name, value in vars(options).items() if name != "json"}
    table = Table(COLUMNS, options.json, {"bench": "overlap_engine", **environment(torch.device("cpu")), **plain})
    for case in options.cases.split(","):
        table.add(**launch_local(measure, RANKS, case, options))
    return int(any(row["#wrong"] for row in table.rows))


def measure(case: str, options: argparse.Namespace) -> dict[str, Any]:
    """One row, on every rank."""
    import axo

    torch.set_num_threads(1)
    grid, switch, op = CASES[case]
    axis, cache = "x" if case == "OAR" else "z", "none" if case == "OAG" else "all"
    with axo.connect(grid) as comms:  # no limit yet: what do the products take, and what leaves a rank?
        model, x = stack(comms, options, axo.Overlap(False, False, False, cache))
        step(model, x)
        with axo.count_collectives() as counts, axo.overlap.record(model) as events:
            step(model, x)
        compute = slowest(comms, sum(e.end - e.start for e in events if e.what == "compute"))
        leaves = {"all_reduce": 1, "all_gather": 1, "reduce_scatter": 0.5}  # of what two ranks put in
        sent = sum(count.bytes * leaves[name] for (name, _), count in counts.items())
    wanted = options.share * compute * (0.5 if case == "OAR" else 1)  # backward's half of the all-reduces
    rate = sent / wanted
    for _ in range(2):  # what the rate does not know of costs time too
        os.environ["AXO_LINK_LIMIT"] = f"{int(rate / 1000)}K"
        with axo.connect(grid) as comms:
            model, x = stack(comms, options, axo.Overlap(False, False, False, cache))
            times = [timed(comms, model, x, op, axis, case)[1] for _ in range(4)]
        rate *= statistics.median(times[1:]) / wanted
    os.environ["AXO_LINK_LIMIT"] = f"{int(rate / 1000)}K"
    with axo.connect(grid) as comms:
        models = {}
        for on in (False, True):
            switches = {name: on and name == switch for name in ("all_reduce", "reduce_scatter", "all_gather")}
            overlap = axo.Overlap(**switches, gather_cache=cache)
            models[on], x = stack(comms, options, overlap)
        rows: dict[bool, list[Any]] = {False: [], True: []}
        for _ in range(options.rounds + 2):
            for on, model in models.items():
                rows[on].append(timed(comms, model, x, op, axis, case))
        wrong = sum(
            not torch.allclose(a.grad, b.grad, atol=1e-6)
            for a, b in zip(models[False].parameters(), models[True].parameters(), strict=True)
        )
    off, on = ([statistics.median(column) for column in zip(*rows[which][2:], strict=True)] for which in (False, True))
    return {
        "overlap": case, "grid": grid, "compute": 1e3 * compute, "off": 1e3 * off[1], "on": 1e3 * on[1],
        "hideable": 1e3 * off[0], "cut": (off[1] - on[1]) / off[0], "step off": 1e3 * off[2],
        "step on": 1e3 * on[2], "#wrong": wrong, "limit": os.environ["AXO_LINK_LIMIT"],
    }  # fmt: skip


def stack(comms: Any, options: argparse.Namespace, overlap: Any) -> tuple[torch.nn.Module, torch.Tensor]:
    """Layers normal and transposed in turn, and this rank's input."""
    import axo

    width = options.width
    layers = [axo.nn.Linear(width, width, comms=comms, transposed=bool(i % 2)) for i in range(options.layers)]
    generator = torch.Generator().manual_seed(1)
    for layer in layers:
        torch.nn.init.normal_(layer.weight, std=width**-0.5, generator=generator)
        torch.nn.init.zeros_(layer.bias)
    model = torch.nn.Sequential(*layers)
    axo.overlap.attach(model, comms, overlap)
    x = torch.randn(options.rows, width // comms.grid.y, generator=generator, requires_grad=True)
    return model, x


def step(model: torch.nn.Module, x: torch.Tensor) -> None:
    """One forward and backward."""
    model.zero_grad()
    model(x).square().mean().backward()


def timed(comms: Any, model: torch.nn.Module, x: torch.Tensor, op: str, axis: str, case: str) -> list[float]:
    """Seconds of one step: what could be hidden of its waits for ``op``, all its waits, and the step itself."""
    import axo

    comms.world.barrier()
    with axo.overlap.record(model) as events:
        start = time.perf_counter()
        step(model, x)
        seconds = time.perf_counter() - start
    names = [(e.what, e.op, e.layer) for e in events]
    first_backward = min(n for n, name in enumerate(names) if name[:2] == ("compute", "dI"))
    waits = [(n, e) for n, e in enumerate(events) if (e.what, e.op, e.axis) == ("wait", op, axis)]
    if case == "OAR":  # the forward's all-reduces are none of them
        waits = [(n, e) for n, e in waits if n > first_backward]
    lengths = [e.end - e.start for _, e in waits]
    if case == "OAR":
        products = {e.layer: e.end - e.start for e in events if (e.what, e.op) == ("compute", "dW")}
        hideable = sum(min(length, products[e.layer]) for length, (_, e) in zip(lengths, waits, strict=True))
    elif case == "ORS":
        hideable = sum(lengths[:-1])
    else:
        forward = [length for length, (n, _) in zip(lengths, waits, strict=True) if n < first_backward]
        hideable = sum(lengths) - sum(forward[:1]) - sum(lengths[len(forward) : len(forward) + 1])
    after = first_backward if case == "OAR" else 0
    total = sum(e.end - e.start for e in events[after:] if e.what == "wait")
    return [slowest(comms, value) for value in (hideable, total, seconds)]


def slowest(comms: Any, seconds: float) -> float:
    """The largest over ranks."""
    return comms.world.all_reduce(torch.tensor([seconds], dtype=torch.float64), "max").item()


if __name__ == "__main__":
    raise SystemExit(main())
