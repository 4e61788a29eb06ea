"""What the tuner chooses between, and how a choice is kept on disk."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from axo_kernels.layout import LAYOUTS, Product, relayout
from axo_kernels.tiles import Config

STRATEGIES = ("serial", "split", "signal")


@dataclass(frozen=True)
class Choice:
    """How to compute one product, or one fused operation.

    Attributes:
        backend: ``"vendor"`` or ``"triton"``.
        layout: The layout in which it is computed; operands are laid out anew where it is not the stored one.
        config: Tile configuration, for ``"triton"``.
        strategy, chunks: Of a fused operation.
        seconds: Measured median, the largest over the ranks; 0 when nothing was measured.
        baseline: The same of torch's own (serial) way, in the same rounds.
    """

    backend: str
    layout: str
    config: Config | None = None
    strategy: str = "serial"
    chunks: int = 1
    seconds: float = 0.0
    baseline: float = 0.0

    @property
    def name(self) -> str:
        what = self.config.name if self.config else self.backend
        fused = "" if self.chunks == 1 and self.strategy == "serial" else f" {self.strategy}/{self.chunks}"
        return f"{self.layout} {what}{fused}"

    def is_vendor(self, layout: str) -> bool:
        """Whether this is torch's own way for operands stored in ``layout``, without fused communication."""
        return self.backend == "vendor" and self.layout == layout and self.strategy == "serial"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def from_json(entry: dict[str, Any]) -> Choice | None:
    """Read a choice back; None when the entry is not one (the caller treats it as a miss)."""
    try:
        config = entry["config"]
        choice = Choice(**{**entry, "config": Config(**config) if config is not None else None})
    except (TypeError, KeyError):
        return None
    numbers = (choice.seconds, choice.baseline, choice.chunks)
    if (
        choice.backend not in ("vendor", "triton")
        or choice.layout not in LAYOUTS
        or choice.strategy not in STRATEGIES
        or not all(isinstance(number, (int, float)) for number in numbers)
        or int(choice.chunks) < 1
        or (choice.config is not None and not _whole(choice.config))
    ):
        return None
    return choice


def _whole(config: Config) -> bool:
    sizes = (config.block_m, config.block_n, config.block_k, config.group_m, config.warps, config.stages, config.parts)
    return all(isinstance(size, int) and size > 0 for size in sizes) and isinstance(config.descriptors, bool)


def vendor_choices(product: Product, copy_share: float) -> list[Choice]:
    """The vendor library in all three modes, its own layout first.

    A mode is left out when laying operands out anew would alone take more than ``copy_share`` of the product's time,
    both estimated by ``bytes per flop`` of the product: ``copy_share`` is how many flops the machine does while it
    moves a byte.
    """
    found = [Choice("vendor", product.layout)]
    for layout in LAYOUTS:
        copy_a, copy_b = relayout(product.layout, layout)
        if not (copy_a or copy_b):
            continue
        moved = 2 * product.batch * product.dtype.itemsize
        moved *= copy_a * product.m * product.k + copy_b * product.k * product.n
        if moved * copy_share < 0.5 * product.flops:
            found.append(Choice("vendor", layout))
    return found
