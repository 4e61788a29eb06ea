"""Conv2d against serial nn.Conv2d in fp64: values, gradients, first values, collectives, and what it refuses."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import axo
from axo.matmul import cost
from tests.launcher import run_ranks
from tests.nn.support import assert_close, assert_gradients_match, my_rows, seed_apart, serial_seed

# fp32 against fp64, sums of at most 16 * 9 terms below 1 forward, means over rows backward: rounding stays under 1e-5.
LIMIT = 1e-5
BATCH = 8

# channels in, channels out, height, width, options
SHAPES = [
    (8, 16, 6, 6, {"kernel_size": 1}),
    (8, 16, 6, 6, {"kernel_size": 3, "padding": 1}),
    (16, 8, 7, 5, {"kernel_size": 3, "stride": 2}),
    (8, 8, 9, 6, {"kernel_size": (3, 2), "stride": (2, 1), "padding": (1, 0)}),
    (8, 8, 8, 8, {"kernel_size": 3, "dilation": 2, "padding": 2}),
    (16, 16, 5, 9, {"kernel_size": (1, 5), "dilation": (1, 2), "bias": False}),
    (8, 24, 6, 5, {"kernel_size": (4, 3), "padding": "same"}),
    (8, 8, 6, 6, {"kernel_size": 3, "padding": "valid"}),
    (8, 8, 6, 7, {"kernel_size": 3, "padding": 1, "padding_mode": "reflect"}),
    (8, 8, 6, 7, {"kernel_size": 3, "padding": (2, 1), "padding_mode": "circular", "stride": 2}),
    (8, 8, 6, 7, {"kernel_size": (3, 5), "padding": "same", "padding_mode": "replicate"}),
    (24, 8, 4, 4, {"kernel_size": 4}),
]
GRIDS = ["2x2x2x1", "4x1x1x2", "1x4x2x1", "1x1x8x1", "2x1x2x2"]


def serial_conv(*args, **options):
    with torch.random.fork_rng(devices=[]):
        serial_seed()
        return nn.Conv2d(*args, **options)


def compare_with_serial(comms, shape, transposed, **extra):
    k, n, height, width, options = shape
    what = f"{comms.grid} {'transposed' if transposed else 'normal'} {shape}"
    seed_apart(comms)
    layer = axo.nn.Conv2d(k, n, **options, comms=comms, transposed=transposed, **extra)
    serial = serial_conv(k, n, **options)
    assert_close(layer.full_weight(), serial.weight, 0, f"{what}: first values")
    serial = serial.double()
    generator = torch.Generator().manual_seed(7)
    x = torch.rand(BATCH, k, height, width, generator=generator).requires_grad_()
    wide = x.detach().double().requires_grad_()
    expected = serial(wide)
    weights = torch.rand(expected.shape, generator=generator)
    (expected * weights).flatten(1).sum(1).div(100).mean().backward()

    mine = axo.shard_input(layer, x.detach()).requires_grad_()
    with axo.count_collectives() as counts:
        output = layer(mine)
        features = output.shape[1]
        part = slice(
            features * getattr(comms.coords, layer.out_axis), features * (1 + getattr(comms.coords, layer.out_axis))
        )
        (output * my_rows(comms, weights)[:, part]).flatten(1).sum(1).div(100).mean().backward()
    assert_close(output, my_rows(comms, expected)[:, part], LIMIT, f"{what}: output")
    assert_close(axo.unshard_output(layer, output.detach()), expected, LIMIT, f"{what}: whole output")
    parts = comms.grid.z * comms.grid.data
    assert_close(mine.grad / parts, axo.shard_input(layer, wide.grad), LIMIT, f"{what}: gradient of input")
    assert_gradients_match(layer, serial, LIMIT, what)
    predicted = cost.total(layer.cost(BATCH // comms.grid.data, height, width))
    assert counts == predicted, f"{what}: {counts} is not {predicted}"


def shapes_on(grids, shapes):
    dist.init_process_group("axo")
    for grid in grids:
        comms = axo.connect(grid)
        for index, shape in enumerate(shapes):
            for transposed in (False, True):
                cache = "none" if index % 3 == 0 else "all"
                compare_with_serial(comms, shape, transposed, gather_cache=cache)
        comms.close()


def test_equals_serial():
    run_ranks(shapes_on, 8, GRIDS[:1], SHAPES[:10:2])


@pytest.mark.soak
def test_equals_serial_for_twelve_shapes_on_five_grids():
    run_ranks(shapes_on, 8, GRIDS, SHAPES, timeout=300)


def drop_in(grid):
    comms = axo.connect(grid)
    options = {"kernel_size": 3, "groups": 4, "padding": 1, "padding_mode": "circular"}
    groups_only = comms.grid.x * comms.grid.y == 1
    if groups_only:  # channels are whole: groups are exact
        for transposed in (False, True):
            compare_with_serial(comms, (8, 16, 5, 5, options), transposed)
            compare_with_serial(comms, (8, 8, 5, 5, {**options, "groups": 8}), transposed)
        return
    layer = axo.nn.Conv2d(8, 8, 3, comms=comms, scatter_input=True, gather_output=True, padding=1)
    assert isinstance(layer, nn.Conv2d) and layer.weight.shape[1] == 8 // comms.grid.y and "normal" in repr(layer)
    serial = nn.Conv2d(8, 8, 3, padding=1)
    for value in serial.state_dict().values():
        comms.world.broadcast(value)
    layer.load_state_dict(serial.state_dict())
    x = torch.rand(BATCH, 8, 5, 4, generator=torch.Generator().manual_seed(3))
    whole, mine = x.clone().requires_grad_(), my_rows(comms, x).clone().requires_grad_()
    serial(whole).square().mean().backward()
    with axo.count_collectives() as counts:
        output = layer(mine)
        output.square().mean().backward()
    assert_close(output, my_rows(comms, serial(x)), LIMIT, "whole activations")
    parts = comms.grid.z * comms.grid.data
    assert_close(mine.grad / parts, my_rows(comms, whole.grad), LIMIT, "gradient of whole activations")
    assert_gradients_match(layer, serial, LIMIT, "whole activations")
    assert counts == cost.total(layer.cost(BATCH // comms.grid.data, 5, 4)), counts
    alone = layer(mine[0])
    assert_close(alone, output[0], LIMIT, "without a batch")
    with torch.autocast("cpu", torch.bfloat16):
        output = layer(mine)
    output.float().sum().backward()
    assert output.dtype == torch.bfloat16 and layer.weight.grad.dtype == torch.float32
    layer.weight.requires_grad_(False)
    layer(mine).sum().backward()
    messages = []
    for call in (
        lambda: axo.nn.Conv2d(8, 8, 3, groups=4, comms=comms, name="features.1"),
        lambda: axo.nn.Conv2d(7, 8, 3, comms=comms, name="features.1"),
        lambda: axo.nn.Conv2d(8, 7, 3, comms=comms),
        lambda: axo.nn.Conv2d(8, 8, 3, comms=comms)(torch.zeros(1, 8, 4, 4)),
        lambda: axo.nn.Conv2d(8, 8, 3, comms=comms, padding_mode="mirror"),
        lambda: axo.nn.Conv2d(8, 8, 3, comms=comms, gather_cache="some"),
    ):
        with pytest.raises(ValueError) as error:
            call()
        messages.append(str(error.value))
    return messages


def test_groups_whole_activations_and_refusals():
    run_ranks(drop_in, 4, "1x1x2x2")
    for messages in run_ranks(drop_in, 8, "2x2x2x1"):
        for message, part in zip(
            messages,
            [
                "Conv2d 'features.1': groups=4 on x=2, y=2 is not supported",
                "Conv2d 'features.1': in_channels=7 does not divide over y=2; use in_channels=6 or 8",
                "Conv2d: out_channels=7 does not divide over x=2",
                "must be (N, 4, H, W)",
                "padding_mode",
                "gather_cache='some' is not known",
            ],
            strict=True,
        ):
            assert part in message
