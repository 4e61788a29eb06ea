"""A tensor as the list of chunks of it that this rank holds, as DCP plans to write and to read them.

A chunk is a box of the whole tensor. A plain shard is one box; a fused weight whose row blocks are split one by one
(q, k and v) is one box for each block, so that files hold the serial layout and never a rank's own concatenation. A
part without elements has no box. Ranks that hold the same box plan it alike, and DCP lets one of them write it.
"""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from axo.placement import Placement, local_ranges
from axo.sharding import unshard


class Parts:
    """This rank's part of one tensor.

    Args:
        local: The part, or the whole tensor where nothing splits it.
        placement: How the whole lies on the grid; None: this rank holds all of it.
    """

    def __init__(self, local: torch.Tensor, placement: Placement | None = None) -> None:
        self.local = local.detach()
        self.placement = placement
        self.shape = torch.Size(local.shape if placement is None else placement.global_shape)
        self.boxes: dict[torch.Size, tuple[torch.Size, tuple[slice, ...]]] = {}  # offset -> size, where in ``local``
        ranges = (
            [[(0, n)] for n in self.shape] if placement is None else list(map(placement.ranges, range(len(self.shape))))
        )
        ranges = [of_dim or [(0, 0)] for of_dim in ranges]  # a dim of which there is nothing: one empty range
        placed = (zip(of_dim, local_ranges(of_dim), strict=True) for of_dim in ranges)
        for corner in product(*placed):
            size = torch.Size(stop - start for (start, stop), _ in corner)
            if math.prod(size) or not math.prod(self.shape):
                offset = torch.Size(start for (start, _), _ in corner)
                self.boxes[offset] = size, tuple(slice(*where) for _, where in corner)

    def size(self) -> torch.Size:
        """Shape of the whole tensor."""
        return self.shape

    def whole(self) -> torch.Tensor:
        """The whole tensor, on every rank; every rank must call it."""
        return self.local if self.placement is None else unshard(self.local, self.placement)

    @torch.no_grad()
    def fill(self, whole: torch.Tensor) -> None:
        """Copy this rank's part out of the whole tensor."""
        self.local.copy_(whole if self.placement is None else self.placement.take(whole))

    def chunk(self, offset: torch.Size | None) -> torch.Tensor:
        """The box that begins at ``offset``, as a view of the part."""
        assert offset is not None
        return self.local[self.boxes[offset][1]]

    def staged(self) -> Parts:
        """The same with a copy of the data in host memory."""
        return Parts(self.local.to("cpu", copy=True), self.placement)

    # What DCP asks of a tensor-like value.
    def __create_write_items__(self, fqn: str, value: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.local)
        return [
            WriteItem(
                index=MetadataIndex(fqn, offset),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offset, size), properties=properties, size=self.shape
                ),
            )
            for offset, (size, _) in self.boxes.items()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offset, size) for offset, (size, _) in self.boxes.items()]


class SavePlanner(DefaultSavePlanner):
    """DCP's own planner over a flat dict whose tensors are :class:`Parts`; other values are written once, as bytes."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Any:
        value = self.state_dict[index.fqn]
        return value.chunk(index.offset) if isinstance(value, Parts) else value
