"""Layers in a chain: features must be split as the next layer takes them, also where shapes do not tell (Gx == Gy).

Oracle: the error names both layers, on every rank; a chain that fits equals serial PyTorch (``test_linear``) and is
looked at in its first pass only.
"""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import axo
from axo.nn import chain
from tests.launcher import run_ranks


class Mlp(nn.Module):
    def __init__(self, comms, transposed):
        super().__init__()
        self.up = axo.nn.Linear(8, 16, comms=comms)
        self.gate = axo.nn.Linear(8, 16, comms=comms)
        self.norm = axo.nn.LayerNorm(16, comms=comms, axis="x")
        self.down = axo.nn.Linear(16, 8, comms=comms, transposed=transposed)

    def forward(self, x):
        return x + self.down(F.dropout(F.silu(self.gate(x)), 0.1) * self.norm(F.gelu(self.up(x))))


def wrong_chains(grid):
    comms = axo.connect(grid)
    x = torch.rand(4, 8 // comms.grid.y)
    model = Mlp(comms, transposed=False)
    axo.overlap.attach(model, comms)
    with pytest.raises(ValueError) as error:
        model(x)
    for word in ("Linear 'down'", "split over y", "its input comes from", "split over x"):
        assert word in str(error.value)
    pairs = {
        "two normal": (axo.nn.Linear(8, 8, comms=comms, name="a"), axo.nn.Linear(8, 8, comms=comms, name="b")),
        "two transposed": [axo.nn.Linear(8, 8, comms=comms, transposed=True, name=name) for name in "ab"],
        "norm over y": (axo.nn.Linear(8, 8, comms=comms, name="a"), axo.nn.LayerNorm(8, comms=comms, name="b")),
        "rms norm": (axo.nn.Linear(8, 8, comms=comms, name="a"), axo.nn.RMSNorm(8, comms=comms, name="b")),
    }
    for what, (first, second) in pairs.items():
        with pytest.raises(ValueError, match=r"'b' .*comes from .*'a'"):
            second(F.relu(first(x)) + 1)
            pytest.fail(what)
    convolutions = [axo.nn.Conv2d(8, 8, 1, comms=comms, name=name) for name in "ab"]
    with pytest.raises(ValueError, match=r"Conv2d 'b' .*comes from Conv2d 'a'"):
        convolutions[1](convolutions[0](torch.rand(2, 8 // comms.grid.y, 3, 3)).relu())
    table = axo.nn.Embedding(16, 8, comms=comms, name="wte")
    with pytest.raises(ValueError, match=r"Linear 'b' .*comes from Embedding 'wte'"):
        axo.nn.Linear(8, 8, comms=comms, transposed=True, name="b")(table(torch.arange(4)))


def right_chains(grid):
    comms = axo.connect(grid)
    model = Mlp(comms, transposed=True)
    axo.overlap.attach(model, comms)
    x = torch.rand(4, 8 // comms.grid.y, requires_grad=True)
    with torch.no_grad():
        model(x)  # has no history
    layers = (model.norm, model.down)
    assert all(layer.first_pass for layer in layers)
    model(x).sum().backward()
    assert not any(layer.first_pass for layer in layers)
    with (
        mock.patch.object(axo.nn.layer.ParallelLayer, "_first_pass", side_effect=AssertionError),
        mock.patch.object(chain, "leave", side_effect=AssertionError),
        mock.patch.object(chain, "check", side_effect=AssertionError),
    ):
        model.up.first_pass = model.gate.first_pass = False  # their input has no history, so they ask once a pass
        model(x).sum().backward()


ROWS = torch.tensor([2, 0])

# What leaves features where they are, or moves them together with their dim: (batch, tokens, features) to the same
KEPT = {
    "view": lambda h: h.view(-1, h.shape[-1]),
    "reshape": lambda h: h.transpose(0, 1).reshape(-1, h.shape[-1]),
    "flatten": lambda h: h.flatten(0, 1),
    "unflatten": lambda h: h.unflatten(1, (2, 2)),
    "transpose": lambda h: h.transpose(0, 1),
    "transpose and back": lambda h: h.transpose(1, 2).relu().mT,
    "permute": lambda h: h.permute(2, 0, 1).permute(1, 2, 0),
    "T": lambda h: h[0].T.relu().t(),
    "slice": lambda h: h[:, 1:3],
    "select": lambda h: h[0],
    "last token": lambda h: h[:, -1],
    "narrow": lambda h: h.narrow(1, 0, 2),
    "unsqueeze": lambda h: h.unsqueeze(0),
    "squeeze": lambda h: h.unsqueeze(1).squeeze(1),
    "expand": lambda h: h[:1].expand(3, *h.shape[1:]),
    "repeat": lambda h: h.repeat(2, 1, 1),
    "repeat_interleave": lambda h: h.repeat_interleave(2, 0),
    "cat": lambda h: torch.cat([h.relu(), h], 1),
    "cat with another": lambda h: torch.cat([torch.zeros_like(h), h]),
    "stack": lambda h: torch.stack([h, h], 1),
    "split": lambda h: h.split(2, 1)[1],
    "split with sizes": lambda h: h.split([1, 3], 1)[1],
    "unbind": lambda h: h.unbind(1)[2],
    "index": lambda h: h[:, ROWS],
    "index of a mask": lambda h: h[torch.ones(h.shape[:-1], dtype=torch.bool)],
    "index_select": lambda h: h.index_select(1, ROWS),
    "flip": lambda h: h.flip(1),
    "roll": lambda h: h.roll(1, 1),
    "softmax": lambda h: h.softmax(1),
    "sum": lambda h: h.sum(1),
    "sum over two": lambda h: h.sum((0, -2), keepdim=True),
    "mean": lambda h: h.mean(1),
    "amax": lambda h: h.amax(0),
    "max": lambda h: h.max(1).values,
    "layer_norm over rows": lambda h: F.layer_norm(h.mT, h.shape[1:2]).mT,
    "pad rows": lambda h: F.pad(h, (0, 0, 1, 0)),
    "pool rows": lambda h: F.max_pool1d(h.mT, 2).mT,
    "dropout": lambda h: F.dropout(h, 0.5),
    "cast": lambda h: h.double().float(),
    "clone": lambda h: h.mT.contiguous().mT.clone(),
    "several": lambda h: (h.permute(1, 0, 2)[1:].reshape(-1, h.shape[-1]).softmax(0) * 2).unsqueeze(0).mean(1),
}
# The same for images: (N, channels, H, W)
KEPT_CHANNELS = {
    "max_pool2d": lambda h: F.max_pool2d(h, 2),
    "avg_pool2d": lambda h: F.avg_pool2d(h, 2),
    "adaptive_avg_pool2d": lambda h: F.adaptive_avg_pool2d(h, 2),
    "interpolate": lambda h: F.interpolate(h, scale_factor=2),
    "bilinear": lambda h: F.interpolate(h, scale_factor=2, mode="bilinear"),
    "pad": lambda h: F.pad(h, (1, 1, 1, 1)),
    "batch_norm": lambda h: F.batch_norm(h, None, None, training=True),
    "dropout2d": lambda h: F.dropout2d(h, 0.5),
    "flip": lambda h: h.flip(-1),
}
# From channels to the last dim
TO_FEATURES = {
    "flatten": lambda h: F.adaptive_avg_pool2d(h, 1).flatten(1),
    "mean": lambda h: h.mean((2, 3)),
    "permute": lambda h: h.permute(0, 2, 3, 1),
    "tokens": lambda h: h.flatten(2).transpose(1, 2),
}


def through_operations(grid):
    comms = axo.connect(grid)
    linears = [axo.nn.Linear(8, 8, comms=comms, name=name) for name in "ab"]
    right = axo.nn.Linear(8, 8, comms=comms, transposed=True, name="c")
    convolutions = [axo.nn.Conv2d(8, 8, 1, comms=comms, name=name) for name in "ab"]
    right_convolution = axo.nn.Conv2d(8, 8, 1, comms=comms, transposed=True, name="c")
    rows, images = torch.rand(2, 4, 8 // comms.grid.y), torch.rand(2, 8 // comms.grid.y, 4, 4)
    for forms, (first, second), fits, x in (
        (KEPT, linears, right, rows),
        (KEPT_CHANNELS, convolutions, right_convolution, images),
        (TO_FEATURES, (convolutions[0], linears[1]), right, images),
    ):
        for what, form in forms.items():
            for layer in (first, second, fits):
                layer.first_pass = True
            with pytest.raises(ValueError, match=r"'b' .*comes from .*'a'"):
                second(form(first(x)))
                pytest.fail(what)
            fits(form(first(x)))
            assert not fits.first_pass, what


def unknown(grid):
    """What ends the walk: nothing is claimed behind it."""
    comms = axo.connect(grid)
    one, two = (lambda: axo.nn.Linear(8, 8, comms=comms)), axo.nn.Linear(8, 8, comms=comms)
    x = torch.rand(4, 4, 8 // comms.grid.y)  # the local sizes are 4, 4, 4: nothing but the history tells them apart
    for form in (
        lambda h: h.flip(-1),
        lambda h: h.roll(1),
        lambda h: h.transpose(1, 2),
        lambda h: h.transpose(0, 2),
        lambda h: h.permute(2, 0, 1),
        lambda h: torch.cat([h[..., :2], h[..., 2:]], -1),
        lambda h: torch.cat([h, h], -1)[..., 2:6],
        lambda h: h.softmax(-1),
        lambda h: h.cumsum(-1),
        lambda h: h[..., torch.arange(4)],
        lambda h: h[:, torch.arange(4), torch.arange(4)],
        lambda h: h.unbind(-1)[0],
        lambda h: torch.stack([h[..., 0], h[..., 1], h[..., 2], h[..., 3]], -1),
        lambda h: h.view(4, 4, 2, 2).transpose(2, 3).reshape(4, 4, 4),
        lambda h: h.sum(-1),
        lambda h: h.mean(-1),
        lambda h: h.mean(-1, keepdim=True).expand(4, 4, 4),
        lambda h: h.sum().expand(4, 4),
        lambda h: h @ torch.rand(4, 4),
        lambda h: F.layer_norm(h, (4,)),
        lambda h: F.scaled_dot_product_attention(h, h, h),
        lambda h: F.pad(h, (1, -1)),
    ):
        first = one()
        two.first_pass = True
        two(form(first(x)))
        assert not two.first_pass, "the walk has not begun"
    # a head of a rank's own is whole there: its features are split only over heads
    norm = axo.nn.RMSNorm(4, comms=comms, axis=None)
    for there, back in (
        (lambda h: h.view(4, 4, 1, 4).transpose(1, 2), lambda h: h.transpose(1, 2).reshape(4, 4, 4)),
        (lambda h: h.unsqueeze(1), lambda h: h.squeeze(1)),
        (lambda h: h[..., :4], lambda h: h.view(-1, 4)),
        (lambda h: h.split(4, -1)[0], lambda h: torch.cat([h], -1)),
    ):
        norm.first_pass = True
        axo.nn.Linear(8, 8, comms=comms, transposed=True)(back(norm(there(one()(x)))))


def without_gradients(grid):
    comms = axo.connect(grid)
    x = torch.rand(4, 8 // comms.grid.y)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            a, b = (axo.nn.Linear(8, 8, comms=comms, name=name) for name in "ab")
            with pytest.raises(ValueError, match=r"Linear 'b' .*comes from Linear 'a'"):
                nn.Sequential(a, b)(x)
            table, c = axo.nn.Embedding(16, 8, comms=comms, name="wte"), axo.nn.Linear(8, 8, comms=comms, name="c")
            assert c(table(torch.arange(4))).shape == x.shape
            right = nn.Sequential(axo.nn.Linear(8, 8, comms=comms), axo.nn.Linear(8, 8, comms=comms, transposed=True))
            right(x)
            with mock.patch.object(chain, "_outputs", None):  # nobody looks a second time
                kept = right(x)
            assert not vars(kept), "a note that would be pickled"
            # another value in the same tensor is not what the layer made; what lies between hides it
            first, second = (axo.nn.Linear(8, 8, comms=comms) for _ in range(2))
            second(first(x).copy_(x))
            axo.nn.Linear(8, 8, comms=comms)(axo.nn.Linear(8, 8, comms=comms)(x) + 1)
    # a frozen layer before a trained one
    frozen, trained = (axo.nn.Linear(8, 8, comms=comms, name=name) for name in ("frozen", "trained"))
    with pytest.raises(ValueError, match=r"Linear 'trained' .*comes from Linear 'frozen'"):
        trained(frozen.requires_grad_(False)(x))


def test_operations_that_keep_features_hide_nothing():
    run_ranks(through_operations, 4, "2x2x1x1")


def test_nothing_is_claimed_behind_what_is_not_known():
    run_ranks(unknown, 4, "2x2x1x1")


def test_without_gradients_direct_successors_are_compared():
    run_ranks(without_gradients, 4, "2x2x1x1")


def test_wrong_chains_are_refused():
    run_ranks(wrong_chains, 4, "2x2x1x1")


def test_right_chains_run():
    run_ranks(right_chains, 4, "2x2x1x1")
