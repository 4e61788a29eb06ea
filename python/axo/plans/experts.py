"""Mixtures whose experts lie on several ranks (``axo.connect(grid, experts=e)``): which can, and what is refused.

A mixture is a module with ``experts``, an ``nn.ModuleList`` or ``nn.ModuleDict``; the layers of expert i have
one of the ranks that ``holders`` says. Or its experts are one module (``axo.plans.auto.stacked_experts``), of whose
weights each rank has its part. Not here: how each plan calls them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from axo.comm.connect import Communicators
from axo.errors import Refused
from axo.grid import Grid, Holders
from axo.plans.auto.stacked_experts import is_stack


def mixtures(model: nn.Module) -> Iterator[tuple[str, nn.Module, list[nn.Module]]]:
    """(name, mixture, its experts) of each mixture of ``model``."""
    for name, module in model.named_modules():
        experts = getattr(module, "experts", None)
        if isinstance(experts, nn.ModuleList | nn.ModuleDict):
            yield name, module, list(experts.values() if isinstance(experts, nn.ModuleDict) else experts)


def holders(model: nn.Module, comms: Communicators) -> dict[nn.Module, Holders]:
    """Where the modules of each expert lie; empty where all ranks hold all of them."""
    ranks = comms.experts.size
    return {
        part: comms.expert_holders(number * ranks // len(experts))
        for _, _, experts in (mixtures(model) if ranks > 1 else ())
        for number, expert in enumerate(experts)
        for part in expert.modules()
    }


def check(model: nn.Module, grid: Grid, ranks: int, others: dict[str, Any]) -> None:
    """Refuse to spread the experts of a model over ``ranks`` data ranks, before anything has changed.

    Args:
        model: A serial model.
        grid: The grid.
        ranks: What ``axo.connect`` was given as ``experts``.
        others: Options that are not supported beside it, by name; those that are off, or None, are fine.

    Raises:
        Refused: Says what.
    """
    owner = f"parallelize: {type(model).__name__}: experts={ranks}"
    counts = {name: len(experts) for name, _, experts in mixtures(model)}
    counts |= {name: len(next(each.parameters())) for name, each in model.named_modules() if is_stack(each)}
    if not counts:
        raise Refused(f"{owner} is of models that have experts, each a module of its own or all in one; this has none")
    for name, count in counts.items():
        if count % ranks:
            fitting = ", ".join(str(n) for n in range(1, ranks + 1) if count % n == 0)
            raise Refused(f"{owner} ranks do not divide the {count} experts of {name!r}; use one of {fitting}")
    adapters = ("litgpt.lora", "litgpt.adapter", "peft.")
    if any(kind.__module__.startswith(adapters) for part in model.modules() for kind in type(part).__mro__):
        raise Refused(f"{owner} with LoRA or adapters is not supported; leave experts= out")
    if others.get("zero") and ranks > grid.z:
        raise Refused(f"{owner}, more than z={grid.z}, with zero={others['zero']} is not supported; use zero=0")
    for name, value in others.items():
        if value and name != "zero":
            raise Refused(f"{owner} with {name}={value!r} is not supported; leave one of the two out")
