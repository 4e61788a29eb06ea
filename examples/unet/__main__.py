"""``python -m examples.unet``: train a U-Net on one rank and on grids, compare, count what is sent."""

from __future__ import annotations

import argparse

import axo
from axo.launch import RankFailed, launch_local
from examples.unet.training import Options, Run, train
from examples.unet.transfers import formula

SMALL: dict[str, object] = {
    "images": 1,
    "size": 8,
    "channels": 32,
    "multiples": (1, 2),
    "blocks": 1,
    "attention": (4,),
    "heads": 2,
    "groups": 8,
}
LOSS, WEIGHT = 1e-4, 1e-5  # what may differ from one rank: fp32 sums in another order


def main(arguments: list[str] | None = None) -> int:
    """Run; 0 if every target is met."""
    parser = argparse.ArgumentParser(prog="python -m examples.unet", description=__doc__)
    parser.add_argument("--grid", action="append", help="XxYxZxDATA; several times for several (2x2x1x1, 1x1x2x2)")
    parser.add_argument("--steps", type=int, default=40, help="of the optimizer (40)")
    options = parser.parse_args(arguments)
    made = Options(SMALL, steps=options.steps)
    serial = launch_local(train, 1, "", made)
    print(f"one rank, without Axo: loss {serial.losses[0]:.4f} -> {serial.losses[-1]:.4f}")
    met = serial.losses[-1] < serial.losses[0]
    for name in options.grid or ["2x2x1x1", "1x1x2x2"]:
        grid = axo.Grid.parse(name)
        run = launch_local(train, grid.world_size, name, made)
        loss, weight = distance(serial, run)
        print(f"\n{name}: losses differ by at most {loss:.1e}, weights by {weight:.1e}")
        met &= loss <= LOSS and weight <= WEIGHT
        met &= show(run, grid, made.batch)
    return 0 if met else 1


def distance(one: Run, other: Run) -> tuple[float, float]:
    """The largest difference of losses, and of weights."""
    loss = max(abs(a - b) for a, b in zip(one.losses, other.losses, strict=True))
    assert one.weights.keys() == other.weights.keys()
    return loss, max((tensor - other.weights[name]).abs().max().item() for name, tensor in one.weights.items())


def show(run: Run, grid: axo.Grid, batch: int) -> bool:
    """Print what a rank puts into the collectives of a step, beside the formula; whether products send what it says."""
    expected = formula(run.products, grid, batch)
    print(f"{'elements of rank 0 in a step':32} {'formula':>10} {'counted':>10}")
    met = True
    for op, axis in sorted(expected.keys() | run.counts.keys() - {("broadcast", "world")}):
        counted = run.counts.get((op, axis), 0)
        note = ""
        if op == "all_reduce" and axis in ("z", "data"):  # biases and norm weights travel on these too
            counted, note = counted - run.vectors, f"+ {run.vectors:,} of biases and norms"
        elif (op, axis) not in expected:
            note = "activations that are whole between layers"
        else:
            met &= counted == expected[op, axis]
        print(f"{op + ' ' + axis:32} {expected[op, axis]:10,} {counted:10,}  {note}")
    return met


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except (ValueError, RankFailed) as error:
        raise SystemExit(f"error: {error}") from None
