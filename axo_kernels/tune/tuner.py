"""The tuner: measures once which way of computing a product is fastest here, and remembers it.

Candidates for a product are the vendor library in **all three modes** NN, NT and TN ("Democratizing AI", BLAS tuning:
the copy of an operand into it counts) and the Triton configurations that a cost estimate puts first; for a
fused operation, the strategies and chunk counts as well. Each candidate's result is checked before it is timed, and a
kernel that no interpreter runs once more in every process that would use it (trust.py); times
are paired medians; with a communicator the largest over the ranks decides and one choice is broadcast, since ranks with
different chunk counts would hang. torch's own way is always a candidate and wins whenever the gain is within the noise.

    AXO_TUNE=off         torch's own, always
    AXO_TUNE=cached      what has been measured before; torch's own where nothing has (the default)
    AXO_TUNE=first-step  measure at the first call of each shape, then as cached
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from axo_kernels import device as devices
from axo_kernels.comm.communicator import FusedCommunicator
from axo_kernels.gemm.layout import Product, product_of, stored_shapes
from axo_kernels.gemm.tiles import TRIED
from axo_kernels.tune.cache import Cache
from axo_kernels.tune.choice import (
    FUSED,
    Choice,
    from_json,
    fused_choices,
    fused_name,
    not_tried,
    plain_choices,
    usable,
)
from axo_kernels.tune.error_line import in_a_line
from axo_kernels.tune.runners import SHORTEST, Runner, run_alone, run_fused, runner
from axo_kernels.tune.timing import paired, relative_error
from axo_kernels.tune.trust import Trust

MODES = ("off", "cached", "first-step")
# A candidate must beat torch's own by this much: what paired medians of one machine may differ by chance.
_MARGIN = 0.03
# A candidate's result may be so far from torch's own: twice the rounding of one, since they add in different orders.
_APART_LIMITS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


class LeftOut(NamedTuple):
    """A candidate that was not timed, and why."""

    name: str  # of what was measured, as in the cache
    choice: str
    why: str


class Tuner:
    """Chooses and remembers. Not thread-safe.

    Args:
        mode: ``"off"``, ``"cached"``, ``"first-step"``; None reads ``AXO_TUNE``.
        comm: Ranks that decide together. Then all of them must ask for the same products in the same order.
        cache: Where choices are kept; None: the user's cache folder, keyed by device and versions.
        progress: Called with (done, total, name) while measuring; the name says which candidate comes next.
        configs: Triton configurations measured for each product, best guesses first.
        budget: Seconds for the timed rounds of one product.
        rounds: Of these at most so many.
    """

    def __init__(
        self,
        mode: str | None = None,
        *,
        comm: FusedCommunicator | None = None,
        cache: Cache | None = None,
        progress: Callable[[int, int, str], None] | None = None,
        configs: int = TRIED,
        budget: float = 1.0,
        rounds: int = 25,
    ) -> None:
        mode = mode or os.environ.get("AXO_TUNE") or "cached"
        if mode not in MODES:
            raise ValueError(f"AXO_TUNE={mode!r} is not a mode; use one of {', '.join(MODES)}")
        self.mode = mode
        self.comm = comm
        self.configs = configs
        self.budget = budget
        self.rounds = rounds
        self.measured = 0  # products that this tuner has timed; a warm cache leaves it at 0
        self.calls = 0  # products that went through matmul()
        self.seen: dict[str, list[tuple[Choice, float]]] = {}  # every right candidate and its time, by product
        self.left_out: list[LeftOut] = []
        self._progress = progress
        self._caches: dict[torch.device, Cache] = {}
        self._given = cache
        self._runs: dict[Any, tuple[Runner, Runner]] = {}  # without and with an epilogue
        self._choices: dict[str, Choice] = {}
        self._missing: dict[tuple[str, FusedCommunicator], dict[str, str]] = {}  # strategies, of an operation
        self._trust: dict[str, Trust] = {}  # by the layout of the operands

    def matmul(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        layout: str = "NN",
        out: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        accumulate: bool = False,
        out_dtype: torch.dtype | None = None,
        *,
        gate: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Multiply as :func:`axo_kernels.matmul` does, in the way that was chosen for these sizes."""
        self.calls += 1
        key = (layout, a.shape, b.shape, a.dtype, a.device)
        runs = self._runs.get(key)
        if runs is None:
            runs = self._runs[key] = self._runners(a, b, layout)
        if out is None and bias is None and activation is None and out_dtype is None:
            return runs[0](a, b)
        return runs[1](
            a, b, out=out, bias=bias, activation=activation, accumulate=accumulate, out_dtype=out_dtype, gate=gate
        )

    def _runners(self, a: torch.Tensor, b: torch.Tensor, layout: str) -> tuple[Runner, Runner]:
        product = product_of(a, b, layout)
        choice = Choice("vendor", layout)
        if self.mode != "off" and product.flops:
            if b.dim() == 2 and layout != "TN":  # one matrix for all leading dims: they are rows
                product = replace(product, m=product.m * product.batch, batch=1)
            choice = self.choose(product, a.device)
        run = runner(choice, layout)
        if choice.is_torchs(layout):
            return SHORTEST[layout, b.dim() == 2], run
        return run, run

    def choose(self, product: Product, device: torch.device) -> Choice:
        """Return the choice for a product; measures it only in mode ``first-step``."""
        return self._decide(
            f"matmul {product.name}",
            product,
            device,
            lambda: plain_choices(product, device, self.configs),
            lambda choice, operands: runner(choice, product.layout)(*operands),
        )

    def choose_fused(
        self,
        operation: str,
        product: Product,
        device: torch.device,
        gather: str = "b",
        *,
        on: FusedCommunicator | None = None,
    ) -> Choice:
        """Return strategy, chunk count and way of multiplying of a fused operation; the same on every rank.

        Args:
            operation: One of ``FUSED``.
            product: What this rank multiplies: with its shard for a gather.
            device: Where.
            gather: Which operand is gathered, for ``"all_gather_matmul"``.
            on: The communicator that it runs on; ``comm`` by default. ``comm`` decides: it holds ``on``'s ranks.

        Raises:
            ValueError: The tuner has no communicator, or the operation is unknown.
        """
        if operation not in FUSED:
            raise ValueError(f"tuner: operation={operation!r}; use one of {', '.join(FUSED)}")
        if self.comm is None:
            raise ValueError(f"tuner: {operation} runs on a communicator; give Tuner(comm=...)")
        ranks = on or self.comm
        if self.mode == "off" or ranks.size == 1:
            return Choice("vendor", product.layout)
        # What is no candidate, and why: the same on all ranks, also where another line of them lacks it.
        without = self._missing.get((operation, ranks))
        if without is None:
            without = not_tried(operation, ranks, device)
            if self._together([float("push" in without)])[0]:
                without.setdefault("push", "other ranks have no memory that kernels reach")
            self._missing[operation, ranks] = without
        push = "push" not in without
        name = fused_name(operation, gather, ranks, product, push)

        def candidates() -> list[Choice]:
            self.left_out += [LeftOut(name, what, why) for what, why in without.items()]
            return fused_choices(operation, product, device, gather, ranks, self.choose, without)

        return self._decide(
            name,
            product,
            device,
            candidates,
            partial(run_fused, operation, gather, ranks, product.layout),
            lambda choice: choice.strategy != "push" or push,
            ranks,
            partial(run_alone, operation, gather, ranks, product.layout),
        )

    # The decision.
    def cache(self, device: torch.device) -> Cache:
        """Where the choices for a device are kept."""
        if self._given is not None:
            return self._given
        if device not in self._caches:
            self._caches[device] = Cache(devices.device_name(device), devices.versions())
        return self._caches[device]

    def _decide(
        self,
        name: str,
        product: Product,
        device: torch.device,
        list_candidates: Callable[[], list[Choice]],
        run: Callable[[Choice, list[torch.Tensor]], torch.Tensor],
        possible: Callable[[Choice], bool] = lambda choice: True,
        on: FusedCommunicator | None = None,
        alone: Callable[[Choice, list[torch.Tensor]], object] | None = None,
    ) -> Choice:
        decided = self._choices.get(name)
        if decided is not None:
            return decided
        entry = self.cache(device).get(name)
        choice = from_json(entry) if entry is not None else None
        if choice is not None and (
            not usable(choice, product, device) or self._kernel_complaint(choice, product, device)
        ):
            choice = None
        if self.comm is not None and self.comm.size > 1:
            # One choice for all, whatever each rank has on disk.
            text = self.comm.broadcast_text(json.dumps(choice.to_json()) if choice else "")
            choice = from_json(json.loads(text)) if text else None
        if choice is not None and not possible(choice):
            choice = None
        if choice is None and self.mode == "first-step":
            with on.trial(device) if on is not None else nullcontext():
                choice = self._measure(name, product, device, list_candidates(), run, on, alone)
            if self.comm is None or self.comm.rank == 0:
                self.cache(device).put({name: choice.to_json()})
        chosen = self._choices[name] = choice or Choice("vendor", product.layout)
        return chosen

    def _kernel_complaint(self, choice: Choice, product: Product, device: torch.device) -> str:
        """What is wrong with a kernel that nothing but a GPU can run; "" for every other choice."""
        trust = self._trust.setdefault(product.layout, Trust(partial(runner, stored=product.layout)))
        return trust.complaint(choice, product, device)

    def _measure(
        self,
        name: str,
        product: Product,
        device: torch.device,
        choices: list[Choice],
        run: Callable[[Choice, list[torch.Tensor]], torch.Tensor],
        on: FusedCommunicator | None,
        alone: Callable[[Choice, list[torch.Tensor]], object] | None = None,
    ) -> Choice:
        """Check every candidate against the first (torch's own), time those that are right, return the fastest."""
        self.measured += 1
        generator = torch.Generator(device).manual_seed(20)
        operands = [
            torch.randn(shape, generator=generator, dtype=torch.float32, device=device).to(product.dtype)
            for shape in stored_shapes(product)
        ]
        with torch.no_grad():
            reference = run(choices[0], operands)
            right = [choices[0]]
            for index, choice in enumerate(choices[1:], 1):
                self._tell(index, len(choices), f"{name}: {choice.name}")
                why = self._complaint(choice, product, operands, reference, run, device, on, alone)
                if why:
                    self.left_out.append(LeftOut(name, choice.name, why))
                    if on is not None and choice.strategy == "push":
                        on.forget_room()  # in which ranks may stand apart now
                else:
                    right.append(choice)
            self._tell(len(choices), len(choices), f"{name}: times")
            calls = [partial(run, choice, operands) for choice in right]
            # Two stages: a short look leaves out what is far behind, the rest is timed in turns.
            quick = self._together([timing.judged for timing in paired(calls, device, rounds=3, warmup=1)])
            self.seen[name] = list(zip(right, quick, strict=True))
            near = [index for index, seconds in enumerate(quick) if index == 0 or seconds < 1.25 * min(quick)]
            rounds = max(5, min(self.rounds, int(self.budget / max(1e-6, sum(quick[index] for index in near)))))
            timings = paired([calls[index] for index in near], device, rounds=rounds, warmup=1)
            ratios = self._together([timing.ratio for timing in timings])
            late = self._together([timing.late_ratio for timing in timings])
            seconds = self._together([timing.judged for timing in timings])
        self._tell(len(choices), len(choices), name)
        # torch's own way stays unless the gain is larger than the margin, and there in three rounds of four
        sure = [index for index in range(len(near)) if ratios[index] <= 1 - _MARGIN and late[index] < 1]
        best = min(sure, key=lambda index: ratios[index], default=0)
        result = replace(right[near[best]], seconds=seconds[best], baseline=seconds[0])
        if self.comm is None or self.comm.size == 1:
            return result
        agreed = from_json(json.loads(self.comm.broadcast_text(json.dumps(result.to_json()))))
        assert agreed is not None
        return agreed

    def _complaint(
        self,
        choice: Choice,
        product: Product,
        operands: list[torch.Tensor],
        reference: torch.Tensor,
        run: Callable[[Choice, list[torch.Tensor]], torch.Tensor],
        device: torch.device,
        on: FusedCommunicator | None = None,
        alone: Callable[[Choice, list[torch.Tensor]], object] | None = None,
    ) -> str:
        """Run a candidate once, of a fused operation first each rank ``alone``: nobody is to wait for one that fails;
        says why it is not to be timed: it fails, or is wrong, on any rank.

        Raises:
            RuntimeError: The device has stopped working in it.
        """

        def by_itself() -> str:
            why = self._kernel_complaint(choice, product, device)
            if not why and alone is not None:
                alone(choice, operands)
            return why

        def with_others() -> str:
            error, limit = relative_error(run(choice, operands), reference), _APART_LIMITS[reference.dtype]
            if on is not None:
                on.poll()  # a kernel that gave up tells more than the numbers
            return "" if error < limit else f"off by {error:.1e}"

        for look in (by_itself, with_others):
            why = ""
            try:
                why = look()
            except Exception as error:
                why = in_a_line(error)
            if why and device.type == "cuda":
                try:
                    torch.cuda.synchronize(device)
                except Exception as error:
                    raise RuntimeError(f"the device has stopped working in '{choice.name}': {why}") from error
            if self._together([1.0 if why else 0.0])[0]:
                return why or "it failed, or was wrong, on another rank"
        return ""

    def _together(self, values: list[float]) -> list[float]:
        return values if self.comm is None else self.comm.maximum(values)

    def _tell(self, done: int, total: int, name: str) -> None:
        if self._progress is not None:
            self._progress(done, total, name)
