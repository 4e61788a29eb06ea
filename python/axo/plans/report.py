"""What a plan has made of each layer, and what the re-layout of activations costs.

    model = axo.parallelize(model, comms, plan="auto")
    print(axo.plan_report(model))

``bytes forward`` and ``bytes backward`` are what one rank puts into all-gathers for each row (token; pixel of a
convolution's output or input) because activations are whole outside the layer. Layers that stay split cost none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

HEADER = ("layer", "kind", "in", "out", "bytes forward", "bytes backward", "why")


@dataclass(frozen=True)
class LayerPlan:
    """One layer's line.

    Attributes:
        name: In the model.
        layer: Class of the serial layer.
        kind: "normal", "transposed" or "replicate".
        split_in, split_out: Whether activations come in and go out split over the layer's axes.
        forward_bytes, backward_bytes: Put into all-gathers by one rank for each row, at the weight's dtype.
        why: The reason in words.
    """

    name: str
    layer: str
    kind: str
    split_in: bool
    split_out: bool
    forward_bytes: int
    backward_bytes: int
    why: str


@dataclass
class PlanReport:
    """The lines of all layers of a model, in its order, and what is said of its loss; prints as a table."""

    layers: list[LayerPlan] = field(default_factory=list)
    loss: str = ""

    def __iter__(self) -> Iterator[LayerPlan]:
        return iter(self.layers)

    def __getitem__(self, name: str) -> LayerPlan:
        for layer in self.layers:
            if layer.name == name:
                return layer
        raise KeyError(f"the plan has no layer {name!r}")

    @property
    def forward_bytes(self) -> int:
        """For one row, through all layers."""
        return sum(layer.forward_bytes for layer in self.layers)

    @property
    def backward_bytes(self) -> int:
        """For one row, through all layers."""
        return sum(layer.backward_bytes for layer in self.layers)

    def __str__(self) -> str:
        rows = [HEADER]
        for line in self.layers:
            into, out = (("split" if split else "whole") for split in (line.split_in, line.split_out))
            size = (str(line.forward_bytes), str(line.backward_bytes))
            rows.append((f"{line.name} ({line.layer})", line.kind, into, out, *size, line.why))
        widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
        table = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        total = f"re-layout of a row: {self.forward_bytes} B forward, {self.backward_bytes} B backward"
        return "\n".join([*table, total, *([self.loss] if self.loss else [])])


def plan_report(model: Any) -> PlanReport:
    """The report of a model that ``axo.parallelize`` has made with plan "auto" or a dict.

    Raises:
        ValueError: It has none.
    """
    report = getattr(model, "_axo_plan_report", None)
    if report is None:
        raise ValueError(
            f"plan_report: {type(model).__qualname__} was not parallelized with plan='auto' or a dict of patterns"
        )
    return report
