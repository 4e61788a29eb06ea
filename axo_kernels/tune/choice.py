"""What the tuner chooses between, and how a choice is kept on disk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, get_type_hints

import torch

from axo_kernels import device as devices
from axo_kernels.comm.communicator import FusedCommunicator
from axo_kernels.fused.strategies import STRATEGIES, unreachable
from axo_kernels.gemm.layout import LAYOUTS, Product, as_row_major, relayout, stored_shapes
from axo_kernels.gemm.matmul import describable
from axo_kernels.gemm.tiles import Config, fused_candidates, tried

# "behind_dw" is dI's: what has not travelled by the end of the product does so behind the product dW. "kept": what was
# gathered is wanted in rank order too, for the backward pass. "fp8": axo_kernels.fused.fp8, which keeps it as well.
FUSED = (
    "all_gather_matmul",
    "all_gather_matmul_kept",
    "all_gather_matmul_fp8",
    "matmul_all_reduce",
    "matmul_all_reduce_behind_dw",
    "matmul_reduce_scatter",
)
# Flops that the machine does while it moves one byte: below its own value a copy is hopeless.
_FLOPS_A_BYTE = {"cuda": 100.0, "cpu": 4.0}
# Tiles tried for a signalling product, each with every chunk count.
_FUSED_TILES = 3
# Which size of the product counts the gathered operand's rows.
_ROWS = {"a": "m", "b": "n"}


@dataclass(frozen=True)
class Choice:
    """How to compute one product, or one fused operation.

    Attributes:
        backend: ``"vendor"`` or ``"triton"``.
        layout: The layout in which it is computed; operands are copied where it is not the stored one.
        config: Tile configuration, for ``"triton"``.
        strategy, chunks, channels, windows: Of a fused operation (``axo_kernels.fused.strategies.FusedPlan``).
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
    channels: int = 0
    windows: bool = False

    @property
    def name(self) -> str:
        what = self.config.name if self.config else self.backend
        fused = "" if self.chunks == 1 and self.strategy == "serial" else f" {self.strategy}/{self.chunks}"
        fused += f" on {self.channels} channels" if self.channels else " in windows" if self.windows else ""
        return f"{self.layout} {what}{fused}"

    def is_torchs(self, layout: str) -> bool:
        """Whether the product is torch's own for operands stored in ``layout``."""
        return self.backend == "vendor" and self.layout == layout

    def is_vendor(self, layout: str) -> bool:
        """The same, and without fused communication."""
        return self.is_torchs(layout) and self.strategy == "serial"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def from_json(entry: dict[str, Any]) -> Choice | None:
    """Read a choice back; None when the entry is not one (the caller treats it as a miss)."""
    try:
        config = entry["config"]
        choice = Choice(**{**entry, "config": Config(**config) if config is not None else None})
        if choice.config is not None:
            choice.config.check("tuner")
    except (TypeError, KeyError, ValueError):
        return None
    if (
        choice.backend not in ("vendor", "triton")
        or choice.layout not in LAYOUTS
        or choice.strategy not in STRATEGIES
        or not (_typed(choice) and choice.chunks)
        or (choice.backend == "vendor" and choice.config is not None)
        or (choice.strategy in ("signal", "push") and choice.config is None)
    ):
        return None
    return choice


def _typed(one: Choice) -> bool:
    """Whether each plain field is of its kind, and no number is negative."""
    for name, kind in get_type_hints(type(one)).items():
        value = getattr(one, name)
        if kind in (int, float) and (isinstance(value, bool) or not isinstance(value, (int, kind)) or value < 0):
            return False
        if kind is bool and not isinstance(value, bool):
            return False
    return True


def usable(choice: Choice, product: Product, device: torch.device) -> bool:
    """Say whether a choice read from disk can run here at all; one that cannot is a miss."""
    if choice.backend == "triton" and not devices.runs_triton(device):
        return False
    return choice.config is None or choice.config.fits(devices.target_of(device), product.dtype)


def vendor_choices(product: Product, copy_share: float) -> list[Choice]:
    """The vendor library in all three modes, its own layout first.

    A mode is left out when copying operands into it would alone take more than ``copy_share`` of the product's time,
    both estimated by ``bytes per flop`` of the product: ``copy_share`` is how many flops the machine does while it
    moves a byte.
    """
    choices = [Choice("vendor", product.layout)]
    for layout in LAYOUTS:
        copy_a, copy_b = relayout(product.layout, layout)
        if not (copy_a or copy_b):
            continue
        moved = 2 * product.batch * product.dtype.itemsize
        moved *= copy_a * product.m * product.k + copy_b * product.k * product.n
        if moved * copy_share < 0.5 * product.flops:
            choices.append(Choice("vendor", layout))
    return choices


def plain_choices(product: Product, device: torch.device, configs: int) -> list[Choice]:
    """Candidates for a product: the vendor library's modes, and the Triton configurations of :func:`tried`."""
    choices = vendor_choices(product, _FLOPS_A_BYTE["cuda" if device.type == "cuda" else "cpu"])
    if device.type == "cuda" and devices.runs_triton(device):
        tiles = tried(devices.target_of(device), product, _described(product), configs)
        choices += [Choice("triton", product.layout, config) for config in tiles]
    return choices


def fused_choices(
    operation: str,
    product: Product,
    device: torch.device,
    gather: str,
    on: FusedCommunicator,
    choose: Callable[[Product, torch.device], Choice],
    missing: dict[str, str],
) -> list[Choice]:
    """Candidates for a fused operation: torch's own, then the collective; what ``choose`` gives for the plain product,
    serial and in chunks, of a gather also in windows; with a few tiles ``signal``, with the collectives at every one of
    the communicator's ``caps`` or in windows, and ``push`` of a sum; but for what is ``missing`` (:func:`not_tried`).

    Chunks of at least 128 rows on a GPU, 8 on a CPU (where ``signal`` is emulated: left out, as on a GPU that has no
    more multiprocessors than it leaves to the communication, which ``push`` can do without). In fp8 torch's product is
    all there is: serial and in chunks, of whose rows torch._scaled_mm wants multiples of 16.
    """
    size, caps, held, reserved = on.size, on.caps, on.held_units, on.reserved_units
    whole = product
    if operation.startswith("all_gather"):
        rows = getattr(product, _ROWS[gather])
        whole = replace(product, **{_ROWS[gather]: size * rows})
    else:
        rows = product.m // (size if operation == "matmul_reduce_scatter" else 1)
    counts = [chunks for chunks in (2, 4, 8) if chunks <= rows // (128 if device.type == "cuda" else 8)]
    if operation == "all_gather_matmul_fp8":
        eight = Choice("vendor", product.layout)
        return [eight, *(replace(eight, strategy="split", chunks=chunks) for chunks in counts if rows % 16 == 0)]
    plain = replace(choose(whole, device), seconds=0.0, baseline=0.0)
    choices = [Choice("vendor", product.layout)]
    if plain != choices[0]:
        choices.append(plain)
    if plain.layout != product.layout:  # would copy the whole operand for each chunk
        plain = choices[0]
    split = [replace(plain, strategy="split", chunks=chunks) for chunks in counts]
    choices += split
    if "windows" not in missing:
        choices += [replace(choice, windows=True) for choice in split]
    if device.type == "cuda" and devices.runs_triton(device):
        target = devices.target_of(device)
        fit = [cap for cap in caps or (0,) if target.units > (cap + held if cap else reserved)]
        configs = fused_candidates(target, whole, _described(whole))
        for config in [*configs[:_FUSED_TILES], *(each for each in configs[_FUSED_TILES:] if each.groups)]:
            signal = Choice("triton", product.layout, config, "signal")
            if "push" not in missing and not config.groups:
                choices.append(replace(signal, strategy="push"))
            choices += [replace(signal, chunks=chunks, channels=cap) for chunks in counts for cap in fit]
            if fit and "windows" not in missing:
                choices += [replace(signal, chunks=chunks, windows=True) for chunks in counts]
    return choices


def not_tried(operation: str, on: FusedCommunicator, device: torch.device) -> dict[str, str]:
    """Which of ``"windows"`` (of gathers) and ``"push"`` (of sums) are no candidates here, and why. Collective at its
    first call."""
    gathers = operation.startswith("all_gather")
    windows = on.without_windows if gathers else "is for gathers"
    push = "is for sums" if gathers else unreachable(on, device)
    return {name: why for name, why in (("windows", windows), ("push", push)) if why}


def fused_name(operation: str, gather: str, on: FusedCommunicator, product: Product, push: bool = False) -> str:
    """What a fused operation is called in the cache; one that was chosen among the communicator's caps, where it has
    windows, or beside a ``push``, is no choice without them."""
    gathers = operation.startswith("all_gather")
    name = f"{operation} {gather if gathers else ''} size={on.size} {product.name}"
    name += f" caps={','.join(map(str, on.caps))}" if on.caps else ""
    name += " windows" if gathers and not on.without_windows else ""
    return f"{name} push" if push else name


def _described(product: Product) -> bool:
    """Whether contiguous operands of these sizes could go through tensor descriptors."""
    a, b = (torch.empty(shape, dtype=product.dtype, device="meta") for shape in stored_shapes(product))
    left, right = as_row_major(a, b, product.layout)
    return product.batch == 1 and describable(left, right, left.new_empty((product.m, product.n)), False)
