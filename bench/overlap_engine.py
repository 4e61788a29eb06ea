"""How much communication does each overlap hide in a training step? On CPU ranks over a limited link.

    axo bench overlap_engine --cases OAR --width 3072 --rows 256
    axo bench overlap_engine --cases ORS,OAG --width 768 --rows 2048

Each rank plays a host of its own (axo.comm.hosts.simulate); the rate of the link is set so that all
communication of a step takes ``--share`` of its products. A stack of layers runs with nothing overlapped (off), with
one overlap alone (on), and as plain torch products of the same sizes without communication (alone), in turns:

    OAR  grid 2x1x1x1: the all-reduces of dI
    ORS  grid 1x1x2x1, weights kept: the reduce-scatters of dW
    OAG  grid 1x1x2x1, nothing kept: the gathers of forward and backward

All times are milliseconds of a step of the slowest rank, medians over rounds:

    comm        what all collectives of the step take, each as the last rank to come to it sees it
    exposed     off - alone
    left        on - alone
    hideable    of the collectives of the kind, each what it takes, but no more than the products it may hide behind: of
                the layer's dW for OAR, of the products until the next gather for OAG (but for the first of a pass), of
                the products until the end of backward for ORS, the link carrying one scatter after the other
    cut         (exposed - left) / hideable

``#wrong`` counts gradients that differ. The cores that compute also copy what the link carries, which no overlap hides:
sizes with few bytes a product show the engine, others the copies.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any, NamedTuple

import torch

from .lib.arguments import Parser
from .lib.table import Table, environment

COLUMNS = {"overlap": "s", "grid": "s", "compute": ".1f", "comm": ".1f", "alone": ".1f", "off": ".1f", "on": ".1f"}
COLUMNS |= {"exposed": ".1f", "left": ".1f", "hideable": ".1f", "cut": ".2f", "#wrong": "d"}
CASES = {
    "OAR": ("2x1x1x1", "all_reduce"),
    "ORS": ("1x1x2x1", "reduce_scatter"),
    "OAG": ("1x1x2x1", "all_gather"),
}
SWITCHES = ("all_reduce", "reduce_scatter", "all_gather")
RANKS = 2


def main(arguments: list[str] | None = None) -> int:
    """Run the bench; returns 1 when gradients differ."""
    from axo.launch import launch_local

    parser = Parser("axo bench overlap_engine", __doc__, json=True)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=1024, help="of a rank")
    parser.add_argument("--share", type=float, default=0.5, help="of communication in the time of products")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args(arguments)
    unknown = set(options.cases.split(",")) - set(CASES)
    if unknown:
        parser.error(f"--cases: {', '.join(sorted(unknown))}: choose from {', '.join(CASES)}")
    plain = {name: value for name, value in vars(options).items() if name != "json"}
    table = Table(COLUMNS, options.json, {"bench": "overlap_engine", **environment(torch.device("cpu")), **plain})
    for case in options.cases.split(","):
        table.add(**launch_local(measure, RANKS, case, options))
    return int(any(row["#wrong"] for row in table.rows))


def measure(case: str, options: argparse.Namespace) -> dict[str, Any]:
    """One row, on every rank."""
    import axo
    from axo.comm.hosts import simulate

    torch.set_num_threads(1)
    simulate(1)
    grid, switch = CASES[case]
    cache = "none" if case == "OAG" else "all"
    off = axo.Overlap(False, False, False, cache)
    on = axo.Overlap(**{name: name == switch for name in SWITCHES}, gather_cache=cache)
    with axo.connect(grid) as comms:  # no limit yet: what do the products take, and what leaves a rank?
        model, x = stack(comms, options, off)
        with axo.count_collectives() as counts:
            step(model, x)
        compute = statistics.median(_sum(record(comms, model, x), "compute") for _ in range(3))
        leaves = {"all_reduce": 1, "all_gather": 1, "reduce_scatter": 0.5}  # of what two ranks put in
        sent = sum(count.bytes * leaves[name] for (name, _), count in counts.items())
    wanted = options.share * compute
    rate = sent / wanted
    for _ in range(2):  # what the rate does not know of costs time too
        simulate(1, rate=rate)
        with axo.connect(grid) as comms:
            model, x = stack(comms, options, off)
            rate *= statistics.median([_sum(record(comms, model, x), "wait") for _ in range(4)][1:]) / wanted
    simulate(1, rate=rate)
    with axo.connect(grid) as comms:
        models = {name: stack(comms, options, overlap) for name, overlap in (("off", off), ("on", on))}
        models["alone"] = plain(comms, options)
        seconds: dict[str, list[float]] = {name: [] for name in models}
        records = []
        for number in range(options.rounds + 2):
            for name, (model, x) in models.items():
                spent = timed(comms, model, x)
                if number >= 2:
                    seconds[name].append(spent)
            records.append(record(comms, *models["off"]))
        pairs = zip(models["off"][0].parameters(), models["on"][0].parameters(), strict=True)
        grads = [(a.grad, b.grad) for a, b in pairs]
        wrong = sum(a is None or b is None or not torch.allclose(a, b, atol=1e-6) for a, b in grads)
    typical = [
        parts[0]._replace(seconds=statistics.median(part.seconds for part in parts))
        for parts in zip(*records[2:], strict=True)
    ]
    times = {name: 1e3 * statistics.median(values) for name, values in seconds.items()}
    could = 1e3 * hideable(case, typical, options.layers)
    return {
        "overlap": case, "grid": grid, "compute": 1e3 * _sum(typical, "compute"), "comm": 1e3 * _sum(typical, "wait"),
        "alone": times["alone"], "off": times["off"], "on": times["on"], "exposed": times["off"] - times["alone"],
        "left": times["on"] - times["alone"], "hideable": could, "cut": (times["off"] - times["on"]) / could,
        "#wrong": wrong, "limit": rate,
        "all_ms": {name: [round(1e3 * value, 2) for value in values] for name, values in seconds.items()},
    }  # fmt: skip


class Part(NamedTuple):
    """A product or a collective of a step without overlap, in order: seconds that it takes."""

    what: str
    op: str
    layer: str
    seconds: float


def record(comms: Any, model: torch.nn.Module, x: torch.Tensor) -> list[Part]:
    """The parts of one step: a product's time is the mean over ranks, a collective's that of the last rank to come.

    The biases' all-reduce, which always waits for the end, is left out.
    """
    import axo

    comms.world.barrier()
    with axo.overlap.record(model) as events:
        step(model, x)
    issued = {event[1:4] for event in events if event.what == "issue"}
    events = [event for event in events if event[1:4] not in issued]
    lengths = torch.tensor([event.end - event.start for event in events], dtype=torch.float64)
    shortest = comms.world.all_reduce(lengths.clone(), "min").tolist()
    mean = comms.world.all_reduce(lengths, "avg").tolist()
    return [
        Part(event.what, event.op, event.layer, mean[n] if event.what == "compute" else shortest[n])
        for n, event in enumerate(events)
    ]


def _sum(parts: list[Part], what: str) -> float:
    return sum(part.seconds for part in parts if part.what == what)


def hideable(case: str, parts: list[Part], layers: int) -> float:
    """Seconds of communication that the overlap could hide at best; see the module."""
    backward = min(n for n, part in enumerate(parts) if part.op == "dI")
    hidden = 0.0
    if case == "OAR":
        behind = {part.layer: part.seconds for part in parts if part.op == "dW"}
        return sum(min(p.seconds, behind[p.layer]) for p in parts[backward:] if p[:2] == ("wait", "all_reduce"))
    if case == "ORS":
        now = link = 0.0
        for part in parts[backward:]:
            now += part.seconds if part.what == "compute" else 0
            if part[:2] == ("wait", "reduce_scatter"):
                link = max(link, now) + part.seconds
                hidden += part.seconds
        return hidden - max(0.0, link - now)
    products, gathers = 0.0, 0
    for part in parts:
        if part.what == "compute":
            products += part.seconds
        elif part.op == "all_gather":
            hidden += min(part.seconds, products) if gathers % layers else 0
            products, gathers = 0.0, gathers + 1
    return hidden


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


def plain(comms: Any, options: argparse.Namespace) -> tuple[torch.nn.Module, torch.Tensor]:
    """The products of ``stack`` on this rank, in plain torch, without communication."""
    half = options.width // comms.grid.x
    sizes = [(options.width, half) if i % 2 == 0 else (half, options.width) for i in range(options.layers)]
    model = torch.nn.Sequential(*(torch.nn.Linear(*size) for size in sizes))
    return model, torch.randn(options.rows, options.width, requires_grad=True)


def timed(comms: Any, model: torch.nn.Module, x: torch.Tensor) -> float:
    """Seconds of one step of the slowest rank."""
    comms.world.barrier()
    start = time.perf_counter()
    step(model, x)
    return slowest(comms, time.perf_counter() - start)


def slowest(comms: Any, seconds: float) -> float:
    """The largest over ranks."""
    return comms.world.all_reduce(torch.tensor([seconds], dtype=torch.float64), "max").item()


if __name__ == "__main__":
    raise SystemExit(main())
