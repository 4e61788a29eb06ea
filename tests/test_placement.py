"""Placement: bounds against torch.chunk, parts against slices of the whole, and what it refuses."""

import pytest
import torch

from axo.grid import Coords, Grid
from axo.placement import Placement, check_divides, chunk_bounds

GRIDS = [Grid(1, 1, 1, 1), Grid(2, 2, 2, 1), Grid(3, 2, 4, 1), Grid(1, 4, 3, 2), Grid(5, 1, 2, 1)]


@pytest.mark.parametrize("size", [0, 1, 2, 5, 7, 8, 17])
@pytest.mark.parametrize("parts", [1, 2, 3, 4, 8])
def test_bounds_are_those_of_torch_chunk(size, parts):
    pieces = [piece.tolist() for piece in torch.arange(size).chunk(parts)]
    pieces += [[]] * (parts - len(pieces))
    ours = [list(range(*chunk_bounds(size, parts, index))) for index in range(parts)]
    assert ours == [piece if size else [] for piece in pieces]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("shape", [(12, 8), (7, 6), (1, 4), (13, 1)])
def test_parts_tile_the_whole(grid, shape):
    placement = Placement(shape, (("x", "z"), ("y",)))
    full = torch.arange(shape[0] * shape[1], dtype=torch.float32).view(shape)
    rebuilt, seen = torch.full(shape, -1.0), torch.zeros(shape)
    for rank in range(grid.world_size):
        coords = grid.coords(rank)
        part = placement.take(full, grid, coords)
        assert tuple(part.shape) == placement.local_shape(grid, coords)
        placement.put(rebuilt, part, grid, coords)
        ones = torch.zeros(shape)
        placement.put(ones, torch.ones_like(part), grid, coords)
        seen += ones
    assert torch.equal(rebuilt, full)
    assert torch.equal(seen, torch.full(shape, float(grid.data)))  # every element once, and again on each data rank


def test_nested_split_equals_chunk_of_chunk():
    grid, full = Grid(2, 2, 3, 1), torch.randn(14, 6)
    placement = Placement((14, 6), (("x", "z"), ("y",)))
    for rank in range(grid.world_size):
        x, y, z, _ = coords = grid.coords(rank)
        expected = full.chunk(2, 0)[x].chunk(3, 0)[z].chunk(2, 1)[y]
        assert torch.equal(placement.take(full, grid, coords), expected)


def test_row_blocks_are_split_one_by_one():
    grid, rows = Grid(2, 1, 2, 1), (8, 4, 4)
    full = torch.arange(16 * 3).view(16, 3)
    q, k, v = full.split(rows)
    placement = Placement((16, 3), (("x", "z"), ("y",)), rows)
    for rank in range(4):
        coords = grid.coords(rank)
        held = torch.cat([block.chunk(2)[coords.x] for block in (q, k, v)]).chunk(2)[coords.z]
        assert torch.equal(placement.take(full, grid, coords), held)


def test_without_gives_the_block():
    placement = Placement((12, 8), (("x", "z"), ("y",)))
    assert placement.without("z") == Placement((12, 8), (("x",), ("y",)))
    assert placement.axes == {"x", "y", "z"} and placement.without("z").axes == {"x", "y"}
    assert placement.max_local_shape(Grid(5, 1, 2, 1)) == (2, 8)


def test_is_immutable_and_compares_by_value():
    one, other = Placement([4, 2], [["x"], []], comms=object()), Placement((4, 2), (("x",),))
    assert one == other and hash(one) == hash(other)
    with pytest.raises(AttributeError):
        one.global_shape = (1,)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (((4,), (("w",),)), "'w' is not an axis"),
        (((4, 4), (("x",), ("x",))), "axis x splits twice"),
        (((4,), (("x",), ())), "2 splits for 1 dims"),
        (((4,), (("x",),), (1, 2)), "row blocks (1, 2) do not add up"),
    ],
)
def test_refuses_contradictions(arguments, message):
    with pytest.raises(ValueError) as error:
        Placement(*arguments)
    assert message in str(error.value)


def test_refuses_a_tensor_of_another_shape_and_unknown_communicators():
    with pytest.raises(ValueError, match=r"shape \(3, 2\), its placement says \(4, 2\)"):
        Placement((4, 2)).take(torch.zeros(3, 2), Grid(), Coords(0, 0, 0, 0))
    with pytest.raises(ValueError, match="knows no communicators"):
        Placement((4, 2), (("x",),)).local_shape()


def test_message_names_what_would_work():
    with pytest.raises(ValueError) as error:
        check_divides("Linear 'mlp.fc'", "in_features", 30, "y", 4)
    assert str(error.value) == (
        "Linear 'mlp.fc': in_features=30 does not divide over y=4; use in_features=28 or 32,"
        " or a grid with y in {1, 2, 3, 5, 6}"
    )
