"""Arguments of layers that mean nothing, or more than the machine holds: one line each, before any allocation."""

from __future__ import annotations

from unittest import mock

import numpy
import pytest
import torch
from torch import nn

import axo
from axo.comm.recording import recording
from axo.nn import layer

COMMS = axo.connect("1x1x1x1")


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: axo.Placement((8, "8")), ValueError, r"Placement: \(8, '8'\) is not a shape"),
        (lambda: axo.nn.Linear(8, 8, comms=None), ValueError, "Linear: comms=None is not what axo.connect returns"),
        (lambda: axo.nn.Embedding(8, 8, comms="2x1x1x1"), ValueError, "Embedding: comms='2x1x1x1' is not what"),
        (lambda: axo.nn.LayerNorm(8, comms=None), ValueError, "LayerNorm: comms=None is not what"),
        (
            lambda: axo.parallelize(nn.Linear(2, 2), None, plan="auto"),
            ValueError,
            "parallelize: comms=None is not what axo.connect returns",
        ),
        (
            lambda: axo.parallelize(COMMS, nn.Linear(2, 2)),
            ValueError,
            r"parallelize: model is a Communicators; call parallelize\(model, comms\) with a module that was made",
        ),
        (lambda: axo.parallelize(nn.Linear, COMMS), ValueError, "parallelize: model is the class Linear; call"),
        (lambda: axo.parallelize((m for m in ()), COMMS), ValueError, "parallelize: model is a generator; call"),
        (
            lambda: axo.parallelize(nn.Linear(2, 2), COMMS, ["auto"]),
            ValueError,
            r"parallelize: plan=\['auto'\] is a list; use 'auto', 'litgpt' or a dict of patterns",
        ),
        (
            lambda: axo.parallelize(nn.Linear(2, 2), COMMS, "auto", offload="all"),
            ValueError,
            r"parallelize: offload='all' is a str; use axo.Offload\(...\)",
        ),
        (
            lambda: axo.shard_input(torch.ones(2, 8), axo.nn.Linear(8, 8, comms=COMMS)),
            ValueError,
            r"shard_input: takes \(layer, tensor\), the layer one of axo.nn's; got \(Tensor, Linear\)",
        ),
        *(
            (lambda made=made: made([1.0] * 8), TypeError, "the input is a list; pass a tensor")
            for made in (
                axo.nn.Linear(8, 8, comms=COMMS),
                axo.nn.LayerNorm(8, comms=recording("1x2x1x1", 0)),
            )
        ),
        (
            lambda: axo.nn.Linear(10**6, 10**6, comms=COMMS, name="mlp.fc"),
            MemoryError,
            r"Linear 'mlp.fc': this rank's part takes 3,725.3 GiB, and cpu has [\d.,]+ GiB; use a grid with more ranks",
        ),
        (lambda: axo.nn.Embedding(10**9, 10**5, comms=COMMS), MemoryError, "Embedding: this rank's part takes 372,5"),
    ],
)
def test_what_means_nothing_or_does_not_fit(build, error, message):
    with pytest.raises(error, match=message) as caught:
        build()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        ("Linear", {"in_features": "8", "out_features": 8}, "Linear: in_features='8' is not a whole number"),
        (
            "Linear",
            {"in_features": -1, "out_features": 8},
            "Linear: in_features=-1 is not a whole number of at least 0$",
        ),
        ("Linear", {"in_features": 8, "out_features": 8.0, "name": "fc"}, "Linear 'fc': out_features=8.0 is not a"),
        ("Embedding", {"num_embeddings": 8.0, "embedding_dim": 8}, "Embedding: num_embeddings=8.0 is not a whole"),
        ("Embedding", {"num_embeddings": 8, "embedding_dim": None}, "Embedding: embedding_dim=None is not a whole"),
        (
            "Embedding",
            {"num_embeddings": 8, "embedding_dim": 8, "padding_idx": "0"},
            "Embedding: padding_idx='0' is not a whole number",
        ),
        ("LayerNorm", {"normalized_shape": "8"}, "LayerNorm: normalized_shape='8' is not a whole"),
        ("LayerNorm", {"normalized_shape": 8.0}, "LayerNorm: normalized_shape=8.0 is not a whole"),
        ("RMSNorm", {"normalized_shape": ("8",)}, r"RMSNorm: normalized_shape=\('8',\) is not a whole"),
        ("GroupNorm", {"num_groups": "2", "num_channels": 8}, "GroupNorm: num_groups='2' is not a whole"),
        (
            "GroupNorm",
            {"num_groups": 0, "num_channels": 8},
            "GroupNorm: num_groups=0 is not a whole number of at least",
        ),
        ("GroupNorm", {"num_groups": 2, "num_channels": 8.0}, "GroupNorm: num_channels=8.0 is not a whole"),
        *(
            (
                "Conv2d",
                {"in_channels": 8, "out_channels": 8, "kernel_size": 3} | {name: wrong},
                f"Conv2d: {name}={wrong!r} is not a whole".replace("(", r"\(").replace(")", r"\)"),
            )
            for name in ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups")
            for wrong in ("3", 1.5, *([] if "channels" in name or name == "groups" else [(3, None)]))
            if (name, wrong) != ("padding", "3")  # torch names its own words
        ),
        ("CrossEntropyLoss", {"ignore_index": "0"}, "CrossEntropyLoss: ignore_index='0' is not a whole"),
        ("CrossEntropyLoss", {"vocab_size": 8.0}, "CrossEntropyLoss: vocab_size=8.0 is not a whole"),
    ],
)
def test_arguments_that_are_no_whole_numbers_are_named(make, arguments, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        getattr(axo.nn, make)(**arguments, comms=COMMS)


def test_whole_numbers_of_numpy_are_taken():
    sizes = numpy.array([8, 4])
    assert axo.nn.Linear(sizes[0], sizes[1], comms=COMMS).weight.shape == (4, 8)
    assert axo.nn.Embedding(sizes[0], sizes[1], comms=COMMS).weight.shape == (8, 4)
    assert axo.nn.LayerNorm(sizes[0], comms=COMMS).weight.shape == (8,)
    for shape in (torch.Size([8]), sizes[:1], range(8, 9)):
        assert axo.nn.LayerNorm(shape, comms=COMMS).weight.shape == (8,)
    assert axo.nn.Conv2d(8, 8, numpy.array([3, 5]), comms=COMMS).weight.shape == (8, 8, 3, 5)


def test_memory_that_others_use_is_the_same_error():
    torchs = "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried to allocate 4"
    with mock.patch.object(layer.torch, "empty", side_effect=RuntimeError(torchs)):
        with pytest.raises(MemoryError, match=r"Linear: this rank's part takes 0\.0 GiB, and cpu has"):
            axo.nn.Linear(8, 8, comms=COMMS)
    with mock.patch.object(layer.torch, "empty", side_effect=RuntimeError("something else")):
        with pytest.raises(RuntimeError, match="something else"):
            axo.nn.Linear(8, 8, comms=COMMS)


def test_a_layer_on_meta_may_be_of_any_size():
    assert axo.nn.Linear(10**6, 10**6, comms=COMMS, device="meta").weight.is_meta
    with torch.device("meta"):
        assert axo.nn.Linear(10**6, 10**6, comms=COMMS).weight.is_meta


def test_a_parameter_put_in_the_place_of_another_says_where_it_lies():
    """Without a placement one rank's shard would be saved as the whole."""
    made = axo.nn.Linear(8, 4, comms=COMMS, name="fc")
    placement = made.weight.placement
    made.weight = nn.Parameter(torch.zeros(4, 8))
    assert made.weight.placement == placement and made.full_weight().shape == (4, 8)
    with pytest.raises(ValueError, match=r"Linear 'fc': weight of shape \(8, 4\) must be this rank's shard, \(4, 8\)"):
        made.weight = nn.Parameter(torch.zeros(8, 4))
