"""Which layer is normal, which transposed, which stays whole; and where activations stay split between them. Pure.

Each region (``axo.plans.auto.regions``) gets an axis, x or y, over which its features are split; a layer between two
regions needs two different ones, which makes it normal (in over y, out over x) or transposed. Axes are given along
chains of layers, x first. Activations of a region stay whole in three cases: the region is in an odd cycle (as a
residual sum around one layer makes), its width does not divide, or the other side of a layer has no axis. A layer whose
own sizes do not divide either way stays serial. With Tesseract features lie over y in all regions, and every layer is
normal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from axo.arrangement import AXONN, Arrangement
from axo.grid import Grid
from axo.plans.auto.patterns import Wish
from axo.plans.auto.regions import Region


@dataclass(frozen=True)
class SplitCandidate:
    """A layer that may be split.

    Attributes:
        name, module: In the serial model.
        type: "linear", "conv1d", "conv2d" or "embedding".
        into, out: Features; ``into`` None: an embedding.
        uneven_out: ``out`` need not divide, as long as it is gathered.
    """

    name: str
    module: nn.Module
    type: str
    into: int | None
    out: int
    uneven_out: bool = False


@dataclass
class Decision:
    """What becomes of a layer; ``options`` are further arguments of its parallel class."""

    kind: str
    split_in: bool = False
    split_out: bool = False
    why: str = ""
    options: dict[str, Any] = field(default_factory=dict)

    def axes(self, arrangement: Arrangement = AXONN) -> tuple[str, str]:
        """The axes that split what comes in and what goes out."""
        return arrangement.features(self.kind == "transposed")


def decide(
    candidates: list[SplitCandidate],
    regions: Iterable[Region],
    wishes: dict[str, Wish],
    grid: Grid,
    arrangement: Arrangement = AXONN,
) -> tuple[dict[str, Decision], dict[nn.Module, str]]:
    """Choose for every candidate.

    Returns:
        Name -> choice; and for each dropout and group norm in a region that stays split, the axis that splits its
        features.
    """
    by_module = {candidate.module: candidate for candidate in candidates}
    live = [region for region in regions if not _spoken_for(region, by_module, wishes)]
    while True:
        axes, dead = _axes(live, by_module, wishes, arrangement)
        dead = dead or [region for region, axis in axes if not _divides(region, grid.size(axis))]
        into = {layer: axis for region, axis in axes for layer in region.takers}
        out = {layer: axis for region, axis in axes for layer in region.makers}
        choices = {}
        if not dead:
            for candidate in candidates:
                choice = _choose(
                    candidate, into.get(candidate.module), out.get(candidate.module), wishes, grid, arrangement
                )
                if choice is None:  # split on one side, and the whole other side does not divide
                    dead = [r for r in live if candidate.module in r.takers or candidate.module in r.makers]
                    break
                choices[candidate.name] = choice
        if not dead:
            inside = {module: axis for region, axis in axes for module in (*region.dropouts, *region.norms)}
            return choices, inside
        live = [region for region in live if all(region is not other for other in dead)]


def _divides(region: Region, ranks: int) -> bool:
    return not region.width % ranks and not any(norm.num_groups % ranks for norm in region.norms)


def _spoken_for(region: Region, by_module: dict[nn.Module, SplitCandidate], wishes: dict[str, Wish]) -> bool:
    """Whether the user has said what a layer of the region takes or gives, or that it stays serial."""
    for layers, side in ((region.takers, "split_in"), (region.makers, "split_out")):
        for layer in layers:
            wish = wishes.get(by_module[layer].name)
            if wish is not None and (wish.kind == "replicate" or getattr(wish, side) is not None):
                return True
    return False


def _axes(
    live: list[Region], by_module: dict[nn.Module, SplitCandidate], wishes: dict[str, Wish], arrangement: Arrangement
) -> tuple[list[tuple[Region, str]], list[Region]]:
    """An axis for each region, so that no layer has the same on both sides; else a region that cannot have one."""
    stream, inner = arrangement.stream, arrangement.inner
    if stream == inner:
        return [(region, stream) for region in live], []
    other = {stream: inner, inner: stream}
    forced: dict[int, str] = {}
    for index, region in enumerate(live):
        for layers, transposed, normal in ((region.takers, inner, stream), (region.makers, stream, inner)):
            for layer in layers:
                candidate = by_module[layer]
                wish = wishes.get(candidate.name)
                if candidate.type == "embedding":
                    axis = stream
                elif wish is None:
                    continue
                else:
                    axis = transposed if wish.kind == "transposed" else normal
                if forced.setdefault(index, axis) != axis:
                    return [], [region]
    chosen: dict[int, str] = {}
    for start in sorted(range(len(live)), key=lambda index: index not in forced):
        if start in chosen:
            continue
        queue = [(start, forced.get(start, inner))]
        while queue:
            index, axis = queue.pop()
            if chosen.setdefault(index, axis) != axis or forced.get(index, axis) != axis:
                return [], [live[index]]
            for index_of, region in enumerate(live):
                meets = live[index].makers & region.takers or live[index].takers & region.makers
                if meets and index_of == index:
                    return [], [region]
                if meets and chosen.get(index_of) != other[axis]:
                    queue.append((index_of, other[axis]))
    return [(region, chosen[index]) for index, region in enumerate(live)], []


def _choose(
    candidate: SplitCandidate,
    into: str | None,
    out: str | None,
    wishes: dict[str, Wish],
    grid: Grid,
    arrangement: Arrangement,
) -> Decision | None:
    """The choice for one layer whose regions are split over ``into`` and ``out`` (None: whole)."""
    wish = wishes.get(candidate.name)
    if wish is not None and wish.kind == "replicate":
        return Decision("replicate", why=f"plan {wish.pattern!r}")
    if wish is not None:
        split_in = into is not None if wish.split_in is None else wish.split_in
        split_out = out is not None if wish.split_out is None else wish.split_out
        return Decision(wish.kind, split_in, split_out, f"plan {wish.pattern!r}")
    split = into is not None or out is not None
    if candidate.type == "embedding":
        kinds = ["normal"]  # vocabulary over x, features over y
    elif split:
        stays = into in (None, arrangement.stream) and out in (None, arrangement.inner)
        kinds = ["normal" if stays else "transposed"]
    else:
        kinds = ["normal", "transposed"]
    for kind in kinds:
        choice = Decision(kind, into is not None, out is not None, "proved by tracing" if split else "")
        if fits(candidate, choice, grid, arrangement):
            return choice
    if split:
        return None
    sizes = f"{candidate.into} -> {candidate.out}" if candidate.into else f"{candidate.out}"
    return Decision("replicate", why=f"features {sizes} do not divide over x={grid.x} and y={grid.y}")


def fits(candidate: SplitCandidate, choice: Decision, grid: Grid, arrangement: Arrangement = AXONN) -> bool:
    """Whether the layer's features divide over the axes that split them."""
    in_axis, out_axis = choice.axes(arrangement)
    if candidate.type == "embedding":
        return candidate.out % grid.y == 0
    divides: Callable[[int | None, str], bool] = lambda size, axis: not (size or 0) % grid.size(axis)  # noqa: E731
    uneven = candidate.uneven_out and not choice.split_out
    return divides(candidate.into, in_axis) and (uneven or divides(candidate.out, out_axis))
