"""Which of LitGPT's configurations run on a grid, which do not, and why?

    python -m bench.tools.litgpt_architectures --grid 4x2x1x1

Each configuration of LitGPT's list is built with its real sizes, on the meta device and with few layers, and the plan
is asked what it would refuse. Nothing is trained, no rank is started: seconds, on any machine.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from axo.grid import Grid

from ..lib.arguments import Parser


def refusal(config: Any, grid: Grid) -> str | None:
    """Why the plan would not run a model of this configuration on ``grid``; None: it would.

    Args:
        config: A ``litgpt.Config``; changed: layers that are like those before them are left out.
        grid: The grid.
    """
    from litgpt.model import GPT

    from axo.plans.litgpt.plan import check

    config.n_layer = min(config.n_layer, 1 + (config.first_k_dense_replace or 0))  # later layers are like the last
    config.block_size = min(config.block_size, 64)
    with torch.device("meta"):
        model = GPT(config)
    try:
        check(model, grid)
    except ValueError as error:
        return str(error).removeprefix("parallelize: ")
    return None


def report(grid: Grid) -> str:
    """How many run, and each refusal."""
    from litgpt.config import Config, configs

    reasons = [why for fields in configs if (why := refusal(Config(**fields), grid)) is not None]
    ran = len(configs) - len(reasons)
    head = f"LitGPT's list on grid {grid}: {ran} of {len(configs)} configurations run"
    return "\n".join([head, *(["", "refused:"] if reasons else []), *(f"  {why}" for why in reasons)])


def main(arguments: list[str] | None = None) -> int:
    """Print the report."""
    parser = Parser("python -m bench.tools.litgpt_architectures", __doc__)
    parser.add_argument("--grid", type=Grid.parse, default=Grid(), help="XxYxZxDATA")
    print(report(parser.parse_args(arguments).grid))
    return 0


if __name__ == "__main__":
    sys.exit(main())
