"""``python -m examples.megatron``: train GPTModels of megatron-core alone and on grids of Axo, and compare."""

from __future__ import annotations

import argparse

import axo
from axo.launch import RankFailed, launch_local
from examples.megatron.model import MODELS
from examples.megatron.training import Run, train

LOSS, WEIGHT = 1e-4, 1e-5  # what may differ from Megatron alone: fp32 sums in another order


def main(arguments: list[str] | None = None) -> int:
    """Run; 0 if every target is met."""
    parser = argparse.ArgumentParser(prog="python -m examples.megatron", description=__doc__)
    parser.add_argument("--model", action="append", choices=MODELS, help="several times for several (both)")
    parser.add_argument("--grid", action="append", help="XxYxZxDATA; several times for several (2x2x1x1, 2x1x2x1)")
    parser.add_argument("--steps", type=int, default=20, help="of the optimizer (20)")
    options = parser.parse_args(arguments)
    met = True
    for name in options.model or MODELS:
        serial = launch_local(train, 1, name, "", options.steps)
        print(f"{name}: Megatron alone: loss {serial.losses[0]:.4f} -> {serial.losses[-1]:.4f}", flush=True)
        for grid in options.grid or ["2x2x1x1", "2x1x2x1"]:
            run = launch_local(train, axo.Grid.parse(grid).world_size, name, grid, options.steps)
            loss, weight = distance(serial, run)
            met &= loss <= LOSS and weight <= WEIGHT
            print(f"{name}: {grid}: losses differ by at most {loss:.1e}, weights by {weight:.1e}", flush=True)
    return 0 if met else 1


def distance(one: Run, other: Run) -> tuple[float, float]:
    """The largest difference of losses, and of weights."""
    loss = max(abs(a - b) for a, b in zip(one.losses, other.losses, strict=True))
    assert one.weights.keys() == other.weights.keys(), one.weights.keys() ^ other.weights.keys()
    return loss, max((tensor - other.weights[name]).abs().max().item() for name, tensor in one.weights.items())


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except (ValueError, RankFailed) as error:
        raise SystemExit(f"error: {error}") from None
