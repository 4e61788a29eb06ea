"""Which layer is normal, which transposed, which stays whole; and where activations stay split between them. Pure.

Each region (``axo.plans.auto.regions``) gets an axis, x or y, over which its features are split; a layer between two
regions needs two different ones, which makes it normal (in over y, out over x) or transposed. Axes are given along
chains of layers, x first. Activations of a region stay whole in three cases: the region is in an odd cycle (as a
residual sum around one layer makes), its width does not divide, or the other side of a layer has no axis. A layer whose
own sizes do not divide either way stays serial. With Tesseract features lie over y in all regions, and every layer is
normal.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from axo.arrangement import AXONN, Arrangement
from axo.grid import Grid
from axo.plans.auto.candidate import Decision, SplitCandidate
from axo.plans.auto.regions import Region


def decide(
    candidates: list[SplitCandidate], regions: Iterable[Region], grid: Grid, arrangement: Arrangement = AXONN
) -> dict[nn.Module, str]:
    """Decide every candidate; for each dropout and group norm that stays split, the axis of its features."""
    axes = _Axes(candidates, grid, arrangement)
    beside: dict[nn.Module, list[Region]] = {candidate.module: [] for candidate in candidates}
    free = [region for region in regions if not axes.spoken_for(region)]
    for region in free:
        for layer in axes.layers(region):
            beside[layer].append(region)
    inside: dict[nn.Module, str] = {}
    next_ones, seen = free[::-1], set[int]()  # the last comes first
    next_ones.sort(key=axes.is_bound)
    while next_ones:  # along chains, from regions whose axis is said
        region = next_ones.pop()
        if id(region) in seen:
            continue
        seen.add(id(region))
        if axis := axes.give(region):
            inside |= dict.fromkeys(region.inside, axis)
            next_ones += [other for layer in axes.layers(region) for other in beside[layer]]
    for candidate in candidates:
        candidate.decision = axes.decision(candidate)
    return inside


class _Axes:
    """The axes of the regions that have one so far, by layer."""

    def __init__(self, candidates: list[SplitCandidate], grid: Grid, arrangement: Arrangement) -> None:
        self.by_module = {candidate.module: candidate for candidate in candidates}
        self.position = {module: number for number, module in enumerate(self.by_module)}
        self.grid, self.arrangement = grid, arrangement
        self.into: dict[nn.Module, str] = {}
        self.out: dict[nn.Module, str] = {}

    def spoken_for(self, region: Region) -> bool:
        """Whether the user has said what a layer of the region takes or gives, or that it stays serial."""
        asked = [(self.by_module[layer].override, "split_in") for layer in region.takers]
        asked += [(self.by_module[layer].override, "split_out") for layer in region.makers]
        return any(o and (o.kind == "replicate" or getattr(o, side) is not None) for o, side in asked)

    def is_bound(self, region: Region) -> bool:
        """Whether the user, or an embedding, says its axis."""
        beside = [self.by_module[layer] for layer in region.makers | region.takers]
        return any(layer.override or layer.type == "embedding" for layer in beside)

    def layers(self, region: Region) -> list[nn.Module]:
        """The layers beside a region, in the model's order: ranks decide alike."""
        return sorted(region.makers | region.takers, key=self.position.__getitem__)

    def give(self, region: Region) -> str | None:
        """Give a region an axis, if it can have one."""
        axis = next(iter(self._possible(region)), None)
        if axis is not None:
            self.into |= dict.fromkeys(region.takers, axis)
            self.out |= dict.fromkeys(region.makers, axis)
        return axis

    def _possible(self, region: Region) -> list[str]:
        axes = dict.fromkeys((self.arrangement.inner, self.arrangement.stream))
        return [axis for axis in axes if self._divides(region, axis) and self._suits(region, axis)]

    def _divides(self, region: Region, axis: str) -> bool:
        ranks = self.grid.size(axis)
        groups = (module.num_groups for module in region.inside if isinstance(module, nn.GroupNorm))
        return not any(size % ranks for size in (region.width, *groups))

    def _suits(self, region: Region, axis: str) -> bool:
        return all(
            self._kinds(
                self.by_module[layer],
                axis if layer in region.takers else self.into.get(layer),
                axis if layer in region.makers else self.out.get(layer),
            )
            for layer in region.takers | region.makers
        )

    def _kinds(self, candidate: SplitCandidate, into: str | None, out: str | None) -> list[str]:
        """The kinds of a layer that takes and gives features over these axes (None: whole)."""
        kinds = ["normal"] if candidate.type == "embedding" else ["normal", "transposed"]
        if override := candidate.override:
            kinds = [override.kind]
        possible = []
        for kind in kinds:
            in_axis, out_axis = candidate.axes(kind, self.arrangement)
            if into in (None, in_axis) and out in (None, out_axis) and (override or self._fits(candidate, kind, out)):
                possible.append(kind)
        return possible

    def _fits(self, candidate: SplitCandidate, kind: str, out: str | None) -> bool:
        """Whether the layer's features divide over the axes that split them."""
        in_ranks, out_ranks = map(self.grid.size, candidate.axes(kind, self.arrangement))
        uneven = candidate.type == "linear" and out is None  # what is gathered need not divide
        return not (candidate.into or 0) % in_ranks and (uneven or not candidate.out % out_ranks)

    def decision(self, candidate: SplitCandidate) -> Decision:
        into, out = self.into.get(candidate.module), self.out.get(candidate.module)
        override = candidate.override
        if override is not None:
            why = f"plan {override.pattern!r}"
            if override.kind == "replicate":
                return Decision("replicate", why=why)
            split_in = into is not None if override.split_in is None else override.split_in
            split_out = out is not None if override.split_out is None else override.split_out
            return Decision(override.kind, split_in, split_out, why)
        if kinds := self._kinds(candidate, into, out):
            why = "proved by tracing" if into or out else ""
            return Decision(kinds[0], into is not None, out is not None, why)
        sizes = f"{candidate.into} -> {candidate.out}" if candidate.into else f"{candidate.out}"
        return Decision("replicate", why=f"features {sizes} do not divide over x={self.grid.x} and y={self.grid.y}")
