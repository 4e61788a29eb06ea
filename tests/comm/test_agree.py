"""Ranks that build or feed different things get an error, all of them, where shards alone would fit each other."""

import time
import warnings

import pytest
import torch

import axo
from axo.comm import agree
from tests.launcher import rank_outcomes, run_ranks


def build_differently(what):
    comms = axo.connect("2x1x2x1")
    odd = comms.rank == 3
    build = {
        "size": lambda: axo.nn.Linear(8, 32 if odd else 16, comms=comms, name="fc"),
        "bias": lambda: axo.nn.Linear(8, 16, bias=odd, comms=comms, name="fc"),
        "side": lambda: axo.nn.Linear(16, 16, comms=comms, transposed=odd, name="fc"),
        "mean or sum": lambda: axo.nn.Linear(8, 16, comms=comms, grad_reduce="sum" if odd else "mean", name="fc"),
        "dtype": lambda: axo.nn.Linear(8, 16, comms=comms, dtype=torch.float64 if odd else None, name="fc"),
        "vocabulary": lambda: axo.nn.Embedding(64 if odd else 32, 8, comms=comms, name="fc"),
    }
    build[what]()


@pytest.mark.parametrize("what", ["size", "bias", "side", "mean or sum", "dtype", "vocabulary"])
def test_layers_that_differ_between_ranks_are_one_error_on_every_rank(what):
    for outcome in rank_outcomes(build_differently, 4, what):
        assert outcome.error == "ValueError", outcome.describe()
        assert "'fc': ranks [3] have built something else than rank 0" in outcome.message, outcome.message


def meta_models_that_differ():
    comms = axo.connect("2x1x1x1")
    with torch.device("meta"):
        layer = axo.nn.Linear(8, 16 + 2 * comms.rank, comms=comms)
    try:
        axo.init_weights(torch.nn.Sequential(layer))
    except ValueError as error:
        return str(error)
    return "no error"


def test_meta_models_that_differ_are_found_when_they_are_filled():
    assert all(
        "init_weights: ranks [1] have built something else" in text for text in run_ranks(meta_models_that_differ, 2)
    )


def feed_differently():
    comms = axo.connect("2x2x1x1")
    layer = axo.nn.Linear(8, 16, comms=comms)
    rows = 5 if comms.rank == 3 else 4
    layer(torch.ones(rows, 4))  # an all-reduce over y: ranks 1 and 3 disagree, ranks 0 and 2 do not
    comms.x.barrier()  # what they do next tells them


def test_a_mismatch_on_one_axis_reaches_the_ranks_of_the_others():
    outcomes = rank_outcomes(feed_differently, 4)
    assert [outcome.error for outcome in outcomes] == ["Aborted", "Mismatch", "Aborted", "Mismatch"], outcomes
    for outcome in outcomes:
        assert "float32[32]" in outcome.message and "float32[40]" in outcome.message, outcome.message


def come_late():
    comms = axo.connect("2x1x1x1")
    layer = axo.nn.Linear(8, 16, comms=comms)
    agree._PATIENCE = 0.1
    time.sleep(comms.rank)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        layer.state_dict()
    return [str(each.message) for each in told]


def test_a_rank_that_waits_long_says_in_which_call():
    """The others may wait for it elsewhere, until their time limit, which is 30 minutes."""
    first, _ = run_ranks(come_late, 2)
    assert first == ["axo: rank 0 waits in model.state_dict() for others; every rank must call it"]
