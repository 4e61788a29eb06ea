"""Quantized layers, with sixteen bits in place of bitsandbytes' four: what is kept, shared and refused."""

from types import SimpleNamespace

import pytest
import torch

import axo
import axo.nn.quantize
from axo.quantized import QuantizedWeight
from tests.launcher import run_ranks


class Halved(QuantizedWeight):
    @staticmethod
    def __new__(cls, weight, kind, largest=None):
        return cls._of(weight.detach().half(), SimpleNamespace(shape=weight.shape), weight.dtype)

    def dense(self):
        return self.codes.to(self.dtype)


def layers_of(comms, frozen=True):
    axo.nn.quantize.QuantizedWeight, QuantizedWeight.dense = Halved, Halved.dense
    made = torch.nn.ModuleList(axo.nn.Linear(24, 40, comms=comms) for _ in range(2))
    return made.requires_grad_(not frozen)


def kept(grid):
    """Whether a recorded forward keeps the weight dense, and its gathers; product and gradient are torch's."""
    layer = layers_of(axo.connect(grid))[0]
    reference = torch.nn.Linear(24, 40).requires_grad_(False)
    reference.load_state_dict({"weight": layer.full_weight().half().float(), "bias": layer.bias})
    axo.nn.quantize.quantize(layer, "nf4")
    sizes, x = [], torch.randn(3, 24, requires_grad=True)

    def pack(tensor):
        if not isinstance(tensor, QuantizedWeight):
            sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), axo.count_collectives() as counts:
        output = layer(x)
        mine = torch.autograd.grad(output.square().sum(), x)[0]
    torch.testing.assert_close(output, reference(x))
    torch.testing.assert_close(mine, torch.autograd.grad(reference(x).square().sum(), x)[0])
    return 24 * 40 in sizes, counts["all_gather", "z"].calls


def test_nothing_dense_is_kept_for_backward():
    """On one rank; and over z, where the rows are gathered again (dense weights are gathered once)."""
    assert run_ranks(kept, 1, "1x1x1x1") == [(False, 0)]
    assert run_ranks(kept, 2, "1x1x2x1") == [(False, 2)] * 2


def shared(grid):
    layers = layers_of(axo.connect(grid))
    layers[1].weight = layers[0].weight
    before = layers[0].weight.half().float()
    axo.nn.quantize.quantize(layers, "nf4")
    return layers[0].weight is layers[1].weight and torch.equal(layers[1].weight.dense(), before)


def test_layers_that_share_a_weight_share_the_quantized_one():
    assert run_ranks(shared, 1, "1x1x1x1") == [True]


def trained(grid):
    layers = layers_of(axo.connect(grid), frozen=False)
    for training in (True, False):
        with pytest.raises(ValueError, match="a weight that is trained is not quantized; freeze it first"):
            axo.nn.quantize.quantize(layers.train(training), "nf4")
    return True


def test_a_trained_weight_is_refused_in_evaluation_too():
    assert run_ranks(trained, 1, "1x1x1x1") == [True]
