"""The clock of the tuner and of the benches, and the error that they print."""

import time
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from axo_kernels.tune import timing
from axo_kernels.tune.timing import head_start, paired, relative_error
from bench.lib.accuracy import sum_limit

CPU = torch.device("cpu")


def test_paired_timing_compares_round_by_round():
    delays = [0.002, 0.004]
    timings = paired([partial(time.sleep, delay) for delay in delays], CPU, rounds=4, warmup=0)
    assert timings[0].ratio == 1.0 and timings[0].seconds >= 0.002 and timings[1].seconds >= 0.004
    assert len(paired([lambda: None], CPU, rounds=50, budget=0.0)) == 1


def test_nan_is_an_error_of_infinite_size():
    error = relative_error(torch.tensor([[float("nan")]]), torch.ones(1, 1))
    assert not error < 1e30


def test_the_device_is_held_until_all_is_issued(monkeypatch):
    """A call that takes 3 ms to issue: the clock starts behind a wait of at least 6, on a device that does nothing."""
    slept: list[int] = []
    event = SimpleNamespace(record=lambda: None, synchronize=lambda: None, elapsed_time=lambda other: 1.0)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: event)
    monkeypatch.setattr(torch.cuda, "_sleep", slept.append)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    cuda = torch.device("cuda", 0)
    issued = timing.issue_time(partial(time.sleep, 0.003), cuda)
    timing.once(lambda: None, cuda, issued)
    timing.once(lambda: None, cuda)
    assert slept[0] / timing._CYCLES >= 0.006 and slept[1] / timing._CYCLES >= 1e-4
    assert head_start(10.0) < 0.1, "a call that waits for the device holds nobody for as long as it takes"


@pytest.mark.parametrize("k", [31, 97, 1003])
def test_the_limit_of_a_sum_lies_between_truncated_addition_and_a_wrong_kernel(k):
    """Products of bf16 summed in fp32, every addition cut, one by one: the worst that tensor cores may do. A kernel
    that keeps its sums in bf16, rounds operands to e4m3 or leaves out a product is far beyond the limit."""
    generator = np.random.default_rng(3)
    a, b = (
        torch.from_numpy(generator.standard_normal((128, k))).bfloat16().float().numpy().astype(np.float64)
        for _ in range(2)
    )
    products, exact = a * b, (a * b).sum(1)

    def cut(x):
        mantissa, exponent = np.frexp(x)
        return np.ldexp(np.trunc(np.ldexp(mantissa, 24)), exponent - 24)

    def error(sums):
        return np.linalg.norm(sums - exact) / np.linalg.norm(exact)

    truncated, coarse = np.zeros(128), torch.zeros(128, dtype=torch.bfloat16)
    for product in products.T:
        truncated = cut(truncated + product)
        coarse = (coarse.double() + torch.from_numpy(product)).bfloat16()
    limit = sum_limit(k, torch.bfloat16)
    assert error(truncated) < limit
    wrong = (
        coarse.double().numpy(),
        (torch.from_numpy(a).to(torch.float8_e4m3fn).double().numpy() * b).sum(1),
        products[:, 1:].sum(1),
    )
    assert all(error(sums) > 10 * limit for sums in wrong), [error(sums) / limit for sums in wrong]
