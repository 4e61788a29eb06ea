"""What users write in modules of their own: plan "auto" gives the serial result, or says what it cannot do.

Oracle: the module itself before ``parallelize``, all rows on one rank.
"""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import axo
from tests.launcher import run_ranks
from tests.nn.support import assert_close, serial_seed


class InPlace(nn.Module):
    """Operations in place on what layers return, whole and split."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        h = self.a(x)
        h += x
        h = self.b(h.relu_())
        h *= 2
        return self.c(h)


class Convolutions(nn.Module):
    """As in torchvision: ReLU in place, and a view that wants contiguous memory."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(inplace=True), nn.MaxPool2d(1))
        self.side, self.norm = nn.Conv2d(4, 8, 3), nn.GroupNorm(2, 8)
        self.head = nn.Sequential(nn.Linear(8 * 4 * 4, 12), nn.ReLU(inplace=True), nn.Linear(12, 4))

    def forward(self, x):
        h = self.norm(self.side(x)).add_(self.stem(x))
        h = torch.cat([h[:, :4], self.side(x).view(x.shape[0], 8, -1).view(h.shape)[:, 4:]], 1)
        return self.head(h.view(x.shape[0], -1))


class Aliases(nn.Module):
    """One layer under two names, used by the second."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({"up": nn.Linear(8, 16), "down": nn.Linear(16, 8)})
        self.up = self.layers["up"]

    def forward(self, x):
        return self.layers["down"](self.up(x))


class Hooked(nn.Module):
    """A hook that changes what a layer returns, and one that is removed later."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.a.register_forward_hook(lambda module, args, output: output.cumsum(-1))
        self.b.register_forward_pre_hook(lambda module, args: (args[0].flip(-1),))
        self.b.register_full_backward_hook(lambda module, grads, _: (grads[0].cumsum(-1),))

    def forward(self, x):
        return self.b(self.a(x))


class ReadsWeights(nn.Module):
    """A head that is tied by hand."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return F.linear(self.b(self.a(x)), self.a.weight)


class OldWeightNorm(nn.Module):
    def __init__(self):
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.a = nn.utils.weight_norm(nn.Linear(8, 8))
        self.b = nn.Linear(8, 8)

    def forward(self, x):
        return self.b(self.a(x))


MODULES = (InPlace, Convolutions, Aliases, Hooked, ReadsWeights, OldWeightNorm)


def compare(grid):
    comms = axo.connect(grid)
    warnings.simplefilter("ignore")
    rows, row = comms.grid.z * comms.grid.data, comms.coords.z + comms.grid.z * comms.coords.data
    for make in MODULES:
        serial_seed()
        serial = make()
        serial_seed()
        model = axo.parallelize(make(), comms, plan="auto")
        x = torch.randn(8, 4, 6, 6) if make is Convolutions else torch.randn(8, 8)
        for step in range(2):
            expected, given = serial(x), model(x.chunk(rows)[row])
            assert_close(given, expected.chunk(rows)[row], 1e-5, f"{make.__name__} {step}")
            expected.square().sum(1).mean().backward()
            given.square().sum(1).mean().backward()
            theirs = dict(serial.named_parameters(remove_duplicate=False))
            for name, parameter in model.named_parameters(remove_duplicate=False):
                grad, scale = axo.shard(theirs[name].grad, parameter.placement), theirs[name].grad.abs().max().item()
                assert_close(parameter.grad, grad, 1e-5 * max(1, scale), f"{make.__name__} {name} {step}")
            for module in (serial, model):
                torch.optim.SGD(module.parameters(), lr=0.01).step()
                module.zero_grad()
    shown = {line.name: line.why for line in axo.plan_report(axo.parallelize(ReadsWeights(), comms, plan="auto"))}
    assert "reads its weight itself" in shown["a"] and shown["b"].startswith("whole"), shown

    hooked = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    seen = []
    handle = hooked[0].register_forward_hook(lambda module, args, output: seen.append(output.shape))
    hooked = axo.parallelize(hooked, comms, plan="auto")
    hooked(torch.randn(2, 8))
    handle.remove()
    hooked(torch.randn(2, 8))
    assert seen == [(2, 8)], seen
    hooked = nn.Sequential(nn.Linear(8, 8))
    hooked[0].weight.register_hook(lambda grad: grad)
    with pytest.raises(ValueError, match=r"Linear '0': its weight has gradient hooks.*after parallelize"):
        axo.parallelize(hooked, comms, plan="auto")


@pytest.mark.parametrize("grid", ["2x2x1x1", "2x1x1x2"])
def test_modules_of_users_train_as_before(grid):
    run_ranks(compare, 4, grid)
