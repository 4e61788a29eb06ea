"""The clock of the tuner and of the benches, and the error that they print."""

import time
from functools import partial

import torch

from axo_kernels.tune.timing import paired, relative_error

CPU = torch.device("cpu")


def test_paired_timing_compares_round_by_round():
    delays = [0.002, 0.004]
    timings = paired([partial(time.sleep, delay) for delay in delays], CPU, rounds=4, warmup=0)
    assert timings[0].ratio == 1.0 and timings[0].seconds >= 0.002 and timings[1].seconds >= 0.004
    assert len(paired([lambda: None], CPU, rounds=50, budget=0.0)) == 1


def test_nan_is_an_error_of_infinite_size():
    error = relative_error(torch.tensor([[float("nan")]]), torch.ones(1, 1))
    assert not error < 1e30
