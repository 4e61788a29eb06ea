"""Whether an optimizer may step on parts of tensors is tried, whatever it is called.

Oracle: what each optimizer here is written to do; for those that are taken, the trainings of
``test_zero.py`` and others to the bit. The classes have the shape of published algorithms, in a few lines, under names
that say nothing.
"""

from __future__ import annotations

import copy
import random
import warnings
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import axo
from axo.grid import Coords, Grid
from axo.optim.update_trial import LIMIT, Differs, try_update
from axo.placement import Placement
from tests.launcher import run_ranks
from tests.nn.support import my_rows


class Base(torch.optim.Optimizer):
    """A closure, and a call of ``update`` for each parameter that has a gradient."""

    def __init__(self, params: Any, lr: float = 1e-2, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.begin()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * self.update(p, p.grad, self.state[p]))
        return loss

    def begin(self) -> None:
        pass

    def update(self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        return grad

    def mean_square(self, grad: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        """Adam's, without its bias: right on a part."""
        mean = state.setdefault("mean", torch.zeros_like(grad))
        return mean.mul_(0.9).add_(0.1 * grad.square())


class A(Base):
    """Prodigy: the distance d from the start, out of sums over all parameters, is the step size."""

    def begin(self) -> None:
        first, held = self.param_groups[0], [p for group in self.param_groups for p in group["params"]]
        d, rate, numerator, denominator = first.setdefault("d", 1e-6), first["lr"], first.get("sum", 0.0) * 0.97, 0.0
        for p in held:
            start = self.state[p].setdefault("start", p.clone())
            way = self.state[p].setdefault("way", torch.zeros_like(p))
            numerator += d * 1e6 * d * rate * float((p.grad * (start - p)).sum())
            denominator += float(way.mul_(0.97).add_(d * 1e6 * d * rate * p.grad).abs().sum())
        first["sum"], first["d"] = numerator, max(d, numerator / denominator)

    def update(self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        return self.param_groups[0]["d"] * grad / (self.mean_square(grad, state).sqrt() + 1e-12)


class B(Base):
    """CAME: means of rows and columns in place of the mean square."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        if p.dim() < 2:
            return grad / (self.mean_square(grad, state).sqrt() + 1e-8)
        rows, columns = grad.square().mean(1, keepdim=True), grad.square().mean(0, keepdim=True)
        return grad / (rows * columns / rows.mean() + 1e-12).sqrt()


class C(Base):
    """Adam-mini: one mean square for a tensor. Wants named parameters, as its model says."""

    def __init__(self, named: Any, lr: float, *, heads: int) -> None:
        self.heads = heads
        super().__init__([p for _, p in named], lr)

    def update(self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        state["v"] = 0.9 * state.get("v", 0.0) + 0.1 * float(grad.square().mean()) * self.heads
        return grad / (state["v"] ** 0.5 + 1e-8)


class D(Base):
    """StableAdamW: the rate is divided by the root mean square of the tensor's update, where that is above 1."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        update = grad / (self.mean_square(grad, state).sqrt() + 1e-12)
        return update / max(1.0, float(update.square().mean().sqrt()))


class E(torch.optim.Adafactor):
    """Another package's Adafactor: large matrices alone have means of rows."""

    def __init__(self, params: Any, lr: float = 1e-2, least: int = 128) -> None:
        self.least = least
        super().__init__(params, lr)

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["small"] = [p for p in group["params"] if min(p.shape) < self.least]
        return super().step(closure)


class F(Base):
    """Clips by the norm of all gradients in its step."""

    def begin(self) -> None:
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.5)


class G(Base):
    """LAMB: the rate of a tensor is its norm over that of its update."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        update = grad / (self.mean_square(grad, state).sqrt() + 1e-12)
        return update * (p.norm() / update.norm())


class ClipsBefore(torch.optim.AdamW):
    """Clips by the norm of all gradients, and then hands over: a closure, which nobody must give, would undo that."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.5)
        return super().step(closure)


class Perturbs(Base):
    """SAM: gradients where the weights would be after a step of one length. Without a closure it is SGD."""

    def step(self, closure: Any = None) -> Any:
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        length = sum(float(p.grad.square().sum()) for p in held) ** 0.5
        ways = [p.grad * (0.05 / length) for p in held]
        if closure is not None:
            [p.data.add_(way) for p, way in zip(held, ways, strict=True)]
            closure()
            [p.data.sub_(way) for p, way in zip(held, ways, strict=True)]
        return super().step()


class Asks(D):
    """Its default stands for no closure, which it wants."""

    def step(self, closure: Any = None) -> Any:
        if closure is None:
            raise RuntimeError("give a closure")
        return super().step(closure)


class Idle(G):
    """Does nothing without a closure, under another name."""

    def step(self, loss_fn: Any = None) -> Any:  # type: ignore[override]
        return None if loss_fn is None else super().step(loss_fn)


class IdleSGD(Idle):
    update = Base.update


class HandsOver(torch.optim.Optimizer):
    """SAM of another package: steps by an optimizer that it makes of a class, and wants a closure."""

    def __init__(self, params: Any, inner: Any = torch.optim.SGD, lr: float = 1e-2, rho: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "rho": rho})
        self.inner = inner(self.param_groups, lr=lr)
        self.param_groups = self.inner.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is not None
        held = [p for group in self.param_groups for p in group["params"]]
        ways = [p.grad * self.param_groups[0]["rho"] for p in held]
        [p.add_(way) for p, way in zip(held, ways, strict=True)]
        torch.enable_grad()(closure)()
        [p.sub_(way) for p, way in zip(held, ways, strict=True)]
        self.inner.step()


class Slow(torch.optim.Optimizer):
    """Lookahead, around a step that is given: slow weights, which it makes at once, come nearer in each third one."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.steps, self.defaults = inner, 0, inner.defaults
        self.param_groups, self.state = inner.param_groups, {}
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p] = {"slow": p.detach().clone()}

    def step(self, closure: Any = None) -> Any:
        loss, self.steps = self.inner.step(closure), self.steps + 1
        for p, state in self.state.items() if self.steps % 3 == 0 else ():
            p.data.copy_(state["slow"].lerp_(p.detach(), 0.5))
        return loss


class Projects(Slow):
    """Couples before the step that is given, of which alone torch's hooks know."""

    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            for p in self.state:
                p.grad -= p * (p * p.grad).sum() / p.square().sum()
        return self.inner.step(closure)


class H(Base):
    """Elementwise: Lion, with an option that is no group's, and state of construction."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, lr)
        self.beta = 0.9
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p]["moment"] = torch.zeros_like(p)

    def update(self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        return state["moment"].mul_(self.beta).add_(grad).sign()


class Noisy(Base):
    """Elementwise, with noise of its own: nothing can be compared."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        return grad + torch.randn_like(grad) + random.random()


class Elsewhere(Base):
    """Keeps its state in an attribute, made for the whole parameters."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, lr)
        self.moments = [torch.zeros_like(p) for group in self.param_groups for p in group["params"]]

    def begin(self) -> None:
        for p, moment in zip(self.param_groups[0]["params"], self.moments, strict=True):
            p.sub_(1e-2 * moment.add_(p.grad))


def parameters(*splits: tuple[tuple[str, ...], ...], grid: str = "2x2x2x1", shape: tuple[int, ...] = (300, 200)) -> Any:
    """Parameters of this rank on a grid that nobody has connected; the first is not split."""
    comms: Any = SimpleNamespace(grid=Grid.parse(grid), coords=Coords(0, 0, 0, 0))
    found = [nn.Parameter(torch.randn(40, 30))]
    for each in splits:
        placement = Placement(shape[: len(each)], each, comms=comms)
        found.append(nn.Parameter(torch.randn(placement.local_shape())))
        found[-1].placement = placement
    return found


ROWS = ((("x", "z"), ()), (("x",),))


@pytest.mark.parametrize(
    "make",
    [A, B, D, E, F, G, ClipsBefore, Perturbs, Asks, Idle, torch.optim.Adafactor, torch.optim.LBFGS],
)
def test_an_update_that_looks_further_than_an_element_is_seen(make: Any) -> None:
    assert try_update(make(parameters(*ROWS), lr=1e-2)).share > 0.01
    renamed = type("Adam", (make,), {})
    assert try_update(renamed(parameters(ROWS[0]), lr=1e-3)).share > 0.01


class Later(D):
    """Couples from a step on, or where a matrix is large."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        state["steps"] = state.get("steps", 0) + 1
        (group,) = self.param_groups
        couples = state["steps"] >= group["start"] and max(p.shape) >= group["least"]
        return super().update(p, grad, state) if couples else grad


@pytest.mark.parametrize(("start", "least"), [(20, 0), (100, 0), (0, 256), (2, 500)])
def test_what_begins_late_or_with_large_matrices_is_seen(start: int, least: int) -> None:
    mine = parameters(*ROWS, shape=(3000, 2000))
    assert try_update(Later(mine, start=start, least=least)).share > 0.01
    assert try_update(Later(mine, start=10**9, least=least)) == Differs()


def test_options_and_the_way_of_construction_are_those_of_the_optimizer() -> None:
    mini = C([(str(n), p) for n, p in enumerate(parameters(*ROWS))], 1e-2, heads=3)
    assert try_update(mini).share > 0.01
    muon = torch.optim.Muon(parameters(ROWS[0]), lr=1e-2)
    assert try_update(muon).share > 0.01
    assert try_update(E(parameters(ROWS[0]), least=1)).share > 0.01
    late = A(parameters(*ROWS), lr=1e-2)
    torch.optim.lr_scheduler.LambdaLR(late, lambda step: step / 100)
    assert late.param_groups[0]["lr"] == 0 and try_update(late).share > 0.01, "a rate that begins with 0"
    groups = [{"params": parameters(ROWS[0])}, {"params": parameters(), "lr": 1e-3}]
    assert try_update(A(groups)).share > 0.01, "what is not split is summed too"
    by_columns = parameters(((), ("y",)))
    only_rows = type(
        "OnlyRows", (Base,), {"update": lambda self, p, grad, state: grad / (grad.norm(dim=-1, keepdim=True))}
    )
    assert try_update(only_rows(by_columns)).share > 0.01
    assert try_update(only_rows(parameters((("x",), ())))).share <= LIMIT, "whole rows are on one rank"


ELEMENTWISE = [
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}), (torch.optim.AdamW, {"amsgrad": True}),
    (torch.optim.Adam, {"fused": True}), (torch.optim.Adam, {"lr": torch.tensor(0.0)}), (torch.optim.NAdam, {}),
    (torch.optim.RAdam, {}), (torch.optim.RMSprop, {"centered": True}), (torch.optim.Adagrad, {"fused": True}),
    (torch.optim.Adagrad, {}), (torch.optim.Rprop, {}), (torch.optim.ASGD, {}), (torch.optim.Adamax, {}),
    (torch.optim.Adadelta, {}), (H, {}),
]  # fmt: skip


@pytest.mark.parametrize(("make", "options"), ELEMENTWISE)
def test_an_update_of_single_elements_is_taken_and_nothing_is_touched(make: Any, options: dict[str, Any]) -> None:
    mine = parameters(*ROWS)
    optimizer = make(mine, **options)
    before = copy.deepcopy((optimizer.state_dict(), [p.detach().clone() for p in mine]))
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    called = []
    hook = register_optimizer_step_post_hook(lambda *_: called.append(1))
    try:
        found = try_update(optimizer)
    finally:
        hook.remove()
    assert (found.share <= LIMIT, found.reason, called) == (True, "", [])
    after = optimizer.state_dict(), [p.detach() for p in mine]
    assert repr(before[0]) == repr(after[0]) and all(map(torch.equal, before[1], after[1]))
    assert all(p.grad is None for p in mine)
    now = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    assert torch.equal(states[0], now[0]) and states[1:] == now[1:]


@pytest.mark.parametrize(("inner", "seen"), [(torch.optim.AdamW, False), (IdleSGD, False), (G, True), (Idle, True)])
def test_an_optimizer_that_another_steps_by_is_tried_with_it(inner: Any, seen: bool) -> None:
    """And one that does nothing without a closure with one."""
    step_of_its_own = (HandsOver(parameters(*ROWS), inner),) if inner not in (Idle, IdleSGD) else ()
    for optimizer in (inner(parameters(*ROWS)), Slow(inner(parameters(*ROWS))), *step_of_its_own):
        difference = try_update(optimizer)
        assert (difference.share > LIMIT, difference.reason) == (seen, ""), type(optimizer).__name__


def test_parameters_without_elements_say_nothing() -> None:
    assert try_update(torch.optim.AdamW([*parameters(*ROWS), nn.Parameter(torch.zeros(0, 4))])) == Differs()


def test_what_cannot_be_tried_says_why() -> None:
    assert try_update(Noisy(parameters(*ROWS))).reason == "its steps draw random numbers"
    still = type("Still", (Base,), {"update": lambda *_: 0.0})
    assert "left the small tensors as they were" in try_update(still(parameters(*ROWS))).reason
    sparse = try_update(torch.optim.SparseAdam(parameters(*ROWS)))
    assert sparse.share == 0 and "does not support dense gradients" in sparse.reason


class Scaled(Base):
    """Its step takes something, which is no closure."""

    def step(self, scale: Any = None) -> Any:
        self.scale = 1.0 if scale is None else 0.5 * scale
        return super().step()


@pytest.mark.parametrize(("make", "differs"), [(Scaled, False), (type("Norms", (Scaled, A), {}), True)])
def test_a_step_that_takes_no_closure_is_tried_without(make: Any, differs: bool) -> None:
    difference = try_update(make(parameters(*ROWS)))
    assert (difference.share > LIMIT) is differs and not difference.reason


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))


def stepped(grid: str, zero: int) -> list[str]:
    """What happens in the first step of each kind of optimizer, of which some know of the other parts."""
    comms, found = axo.connect(grid), []
    knows = type("Knows", (D,), {"takes_shards": True})
    for make in (D, Noisy, knows, H, Elsewhere, partial(torch.optim.AdamW, fused=True)):
        model = axo.parallelize(model_of(), comms, plan="auto", zero=zero)
        optimizer = make(model.parameters(), lr=1e-2)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            try:
                for _ in range(2):
                    model(torch.ones(4, 8)).sum().backward()
                    optimizer.step()
                found.append(" ".join(str(each.message) for each in told))
            except axo.Refused as error:
                found.append(str(error))
                assert not optimizer.state or make is Elsewhere
    return found


@pytest.mark.parametrize(("grid", "zero"), [("2x1x1x1", 0), ("1x1x2x1", 0), ("1x1x1x2", 2), ("1x1x1x2", 0)])
def test_a_first_step_refuses_warns_or_takes(grid: str, zero: int) -> None:
    split = grid != "1x1x1x2" or zero > 0
    for stable, noisy, knows, lion, elsewhere, adamw in run_ranks(stepped, 2, grid, zero):
        assert ("step(): D does not update element by element (on a half of a small" in stable) == split
        assert (noisy.count("could not be tried on a part") == 1) == split
        assert ("Elsewhere does not update" in elsewhere) == bool(zero), "state of whole tensors, out of reach"
        assert (knows, lion, adamw) == ("", "", "")
        assert not split or "takes_shards = True" in stable


class Hands(torch.optim.Optimizer):
    """Hands steps on, and has no groups."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base = base

    def step(self, closure: Any = None) -> Any:
        return self.base.step(closure)


def step_by_wrappers(grid: str) -> list[str]:
    """What is said of wrappers that torch's ``__init__`` has not made, around AdamW."""
    comms, said = axo.connect(grid), []
    for wrapper in (Projects, Slow, Hands):
        model = axo.parallelize(model_of(), comms, plan="auto")
        model(my_rows(comms, torch.arange(32.0).view(4, 8) / 32)).square().sum().backward()
        said.append("")
        try:
            wrapper(torch.optim.AdamW(model.parameters())).step()
        except axo.Refused as error:
            said[-1] = str(error)
    return said


@pytest.mark.parametrize("grid", ["2x1x1x1", "1x1x2x1"])
def test_a_wrapper_around_an_optimizer_is_tried_too(grid: str) -> None:
    for projects, slow, hands in run_ranks(step_by_wrappers, 2, grid):
        assert "step(): Projects does not update element by element" in projects and slow == hands == ""


def trained(make: Any, zero: int, folder: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Parameters after three steps, and after a fourth on what a checkpoint has given back."""
    comms, found = axo.connect("1x1x1x2"), []
    model = axo.parallelize(model_of(), comms, plan="auto", zero=zero)
    optimizer = make(model.parameters(), lr=1e-1)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(my_rows(comms, torch.arange(32.0).view(4, 8) / 32)).square().sum().backward()
        optimizer.step()
        found.append([p.detach().clone() for p in model.parameters()])

    for _ in range(3):
        step(model, optimizer)
    axo.checkpoint.save(folder, model, optimizer)
    again = axo.parallelize(model_of(), comms, plan="auto", zero=zero)
    other = make(again.parameters(), lr=1e-1)
    axo.checkpoint.load(folder, again, other)
    step(again, other)
    for name, p in model.named_parameters():
        shapes = {tuple(value.shape) for value in optimizer.state[p].values() if value.dim()}
        assert shapes == {tuple(p.placement.state.local_shape())}, name  # type: ignore[attr-defined]
    return found[2], found[3]


@pytest.mark.parametrize("make", [torch.optim.Adagrad, partial(torch.optim.Adagrad, fused=True), H])
def test_state_of_construction_is_cut_to_rows(tmp_path: Any, make: Any) -> None:
    """Oracle: the run without ZeRO, to the bit; the same after a checkpoint that was saved in between."""
    plain, *others = (run_ranks(trained, 2, make, zero, str(tmp_path / str(zero)))[0] for zero in (0, 1, 2))
    for other in others:
        assert all(map(torch.equal, plain[0], other[0])) and all(map(torch.equal, plain[1], other[1]))
