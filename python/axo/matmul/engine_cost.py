"""Corrects ``axo.matmul.cost`` where gradients or weights are sent in another dtype than that of the products."""

from __future__ import annotations

from collections.abc import Iterable

from axo.matmul.cost import (
    GATHER_WEIGHT,
    REDUCE_WEIGHT_GRAD,
    SCATTER_WEIGHT_GRAD,
    SUM_WEIGHT_BLOCK,
    Call,
)


def reduced_in(calls: Iterable[Call], itemsize: int) -> list[Call]:
    """Let the reductions of gradients have elements of ``itemsize`` bytes (``reduce_dtype``)."""
    gradients = (SCATTER_WEIGHT_GRAD, REDUCE_WEIGHT_GRAD, SUM_WEIGHT_BLOCK)
    return [call._replace(itemsize=itemsize) if call.purpose in gradients else call for call in calls]


def gathered_in_fp8(calls: Iterable[Call], columns: int, packed: int) -> list[Call]:
    """Let a weight of ``columns`` columns on a rank be gathered in fp8: ``packed`` bytes a row, with its scale."""
    return [
        call._replace(elements=call.elements // columns * packed, itemsize=1) if call.purpose == GATHER_WEIGHT else call
        for call in calls
    ]
