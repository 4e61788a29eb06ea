"""The U-Net of examples/unet on grids: a few steps against the same loop without Axo, and what is sent.

The commands of its page, with more steps and all three axes, are typed by tests/docs (``-m soak``).
"""

import axo
from examples.unet import __main__ as command
from examples.unet.training import Options, train
from examples.unet.transfers import formula
from tests.launcher import run_ranks

SMALL = Options(command.SMALL | {"channels": 16}, steps=3, batch=8)


def run_all(grids):
    """One start of four ranks serves all grids; the serial run is rank 0's."""
    return [train(grid, SMALL) for grid in grids]


def test_steps_are_those_of_one_rank_and_products_send_what_the_formula_says():
    grids = ["2x2x1x1", "1x1x2x2", "2x1x2x1"]
    ((serial,),) = run_ranks(run_all, 1, [""], timeout=120)
    runs = run_ranks(run_all, 4, grids, timeout=240)
    assert serial.losses[-1] < serial.losses[0]
    for name, run in zip(grids, runs[0], strict=True):
        grid = axo.Grid.parse(name)
        loss, weight = command.distance(serial, run)
        assert loss < 1e-5 and weight < 1e-5, (name, loss, weight)  # three steps; the study allows 1e-4 for losses
        expected = formula(run.products, grid, SMALL.batch)
        assert len(run.products) >= 20 and len(expected) >= 2
        for (op, axis), elements in expected.items():
            vectors = run.vectors if (op, axis) == ("all_reduce", "data") else 0
            assert run.counts[op, axis] == elements + vectors, (name, op, axis)
        # Between a block's convolutions nothing is gathered: what is gathered in forward over x is attention's qkv.
        split = [layer.name for layer in run.products if layer.kind == "transposed" and "conv_2" in layer.name]
        assert len(split) == (8 if grid.x > 1 else len(split))
