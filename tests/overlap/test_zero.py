"""ZeRO on the data axis: the run without it, on a part of the memory.

Oracles: the same training without ZeRO, to the bit (torch's elementwise optimizers do not care how a tensor is cut);
serial training; ``axo.matmul.cost`` for what is sent; and ``axo.unshard`` for checkpoints.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from litgpt.config import Config
from litgpt.model import GPT
from torch import nn

import axo
from axo.matmul import cost
from axo.perf import readers
from axo.perf.run_options import RunOptions
from tests import gpt
from tests.launcher import run_ranks
from tests.nn.support import mean_over_data_ranks, my_rows, seed_apart
from tests.perf.support import step_calls

# Sizes that divide over every grid here; a bias; one key-value head for both ranks of x where x is 2.
EVEN = gpt.LLAMA | {"n_layer": 1, "padded_vocab_size": 104, "n_query_groups": 1, "bias": True}
LLAMA, NEOX = gpt.LLAMA | {"n_layer": 1}, gpt.NEOX | {"n_layer": 1}


def build(comms: Any, config: dict[str, Any], zero: int, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    seed_apart(comms)
    model = axo.parallelize(GPT(Config(**config)), comms, zero=zero, **options)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def loss_of(comms: Any, model: Any, step: int) -> torch.Tensor:
    ids, targets = (my_rows(comms, part) for part in gpt.batch(model.config, step))
    return axo.nn.cross_entropy(model(ids), targets, comms=comms, columns=model.config.padded_vocab_size)


def train(comms: Any, model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, clip: float = 0) -> list[float]:
    losses = []
    for step in steps:
        loss = loss_of(comms, model, step)
        optimizer.zero_grad()
        loss.backward()
        if clip:
            axo.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(mean_over_data_ranks(comms, loss))
    return losses


def bytes_of(optimizer: torch.optim.Optimizer) -> int:
    """Of the state that is not a single number."""
    values = (value for state in optimizer.state.values() for value in state.values())
    return sum(value.nbytes for value in values if isinstance(value, torch.Tensor) and value.dim())


def equal(first: nn.Module, second: nn.Module) -> None:
    for (name, a), b in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b), f"{name} differs by {(a - b).abs().max()}"


def stages(grid: str, config: dict[str, Any], options: dict[str, Any], cls: Any, settings: dict[str, Any]) -> bool:
    comms = axo.connect(grid)
    plain, _ = build(comms, config, 0, **options)
    optimizer = cls(plain.parameters(), lr=1e-2, **settings)
    losses = train(comms, plain, optimizer, range(3))
    held = bytes_of(optimizer)
    whole = sum(parameter.nbytes for parameter in plain.parameters())
    for stage in (1, 2):
        model, _ = build(comms, config, stage, **options)
        mine = cls(model.parameters(), lr=1e-2, **settings)
        assert train(comms, model, mine, range(3)) == losses
        equal(model, plain)
        gradients = sum(parameter.grad.nbytes for parameter in model.parameters())
        if config is EVEN or comms.coords.data == 0:
            assert held <= bytes_of(mine) * comms.grid.data <= held * (1 if config is EVEN else 1.1)
            if stage == 2:
                assert whole <= gradients * comms.grid.data <= whole * (1 if config is EVEN else 1.1)
        if stage == 1:
            assert gradients == whole
    return True


CASES = [
    ("2x1x1x2", EVEN, {}, torch.optim.AdamW, {}),
    ("1x1x2x2", EVEN, {"sequence_parallel": True}, torch.optim.SGD, {"momentum": 0.9, "foreach": False}),
    ("1x1x1x3", NEOX, {}, torch.optim.Adam, {"weight_decay": 0.1}),  # nothing divides by 3
]


@pytest.mark.parametrize(("grid", "config", "options", "cls", "settings"), CASES)
def test_equals_the_run_without_on_a_part_of_the_memory(
    grid: str, config: dict[str, Any], options: dict[str, Any], cls: Any, settings: dict[str, Any]
) -> None:
    run_ranks(stages, axo.Grid.parse(grid).world_size, grid, config, options, cls, settings)


def against_serial(grid: str, expected: list[float]) -> float:
    comms = axo.connect(grid)
    found = 0.0
    for stage in (1, 2):
        losses = train(comms, *build(comms, LLAMA, stage), range(len(expected)), clip=1.0)
        found = max(found, *(abs(a - b) for a, b in zip(losses, expected, strict=True)))
    return found


def test_equals_serial_training_with_clipping() -> None:
    expected = gpt.serial_losses(LLAMA, 4, False)
    assert max(run_ranks(against_serial, 8, "2x1x2x2", expected, timeout=90)) <= 1e-5


@pytest.mark.soak
@pytest.mark.parametrize("grid", ["1x1x1x8", "2x2x1x2", "1x2x2x2", "4x1x1x2", "1x1x4x2"])
def test_equals_serial_training_on_more_grids(grid: str) -> None:
    expected = gpt.serial_losses(LLAMA, 20, False)
    worst = max(run_ranks(against_serial, 8, grid, expected, timeout=200))
    print(f"ZeRO-1 and 2 on {grid}: 20 losses within {worst:.1e} of serial")
    assert worst <= 1e-5


def gather_parameters(shapes: Iterable[Sequence[int]], grid: axo.Grid, *, bucket_bytes: int) -> list[cost.Call]:
    """Count the gathers after an optimizer step: ceil(r_i / Gdata) c_i of every parameter [r_i, c_i], in buckets.

    Args:
        shapes: This rank's part of each parameter, all fp32, in the optimizer's order, the dim that is cut first.
        bucket_bytes: Size of a bucket, all ranks' rows together; 0: each parameter by itself.
    """
    found: list[int] = []
    held = 0
    for rows, *others in shapes:
        mine = cost.chunk(rows, grid.data) * math.prod(others)
        if held and (held + mine) * grid.data * 4 > bucket_bytes:
            found.append(held)
            held = 0
        held += mine
    found.append(held)
    return cost.issued(
        [cost.Call("step", "all_gather", "data", each, 4, "gather parameters") for each in found if each], grid
    )


def scatter_gradients(calls: Iterable[cost.Call], grid: axo.Grid) -> list[cost.Call]:
    """Turn the reductions of gradients over data into those of stage 2.

    Apply it to ``in_buckets`` (tests/perf/support.py). Exact where the rows of each gradient divide over data; else
    each gradient is padded to the longest rank's rows, which is a little more.
    """
    return [
        call._replace(op="reduce_scatter", elements=cost.chunk(call.elements, grid.data) * grid.data)
        if call.purpose == cost.REDUCE_WEIGHT_GRAD and call.axis == "data"
        else call
        for call in calls
    ]


def counted(grid: str) -> bool:
    """Calls, elements and bytes of backward and step, with buckets and without."""
    comms = axo.connect(grid)
    config = {**NEOX, "name": "counted", "padded_vocab_size": 104, "vocab_size": 104}
    for limit in (0, 1 << 14, 25 << 20):
        for stage in (1, 2):
            model, optimizer = build(comms, config, stage, overlap=axo.Overlap(bucket_bytes=limit))
            with axo.count_collectives() as counts:
                loss_of(comms, model, 0).backward()
                optimizer.step()
            run = RunOptions(
                gpt.BATCH * gpt.TOKENS, itemsize=4, cached_gathers=1.0, bucket_bytes=limit, recompute="none"
            )
            workload = readers.from_litgpt(config, seq_length=gpt.TOKENS)
            calls = step_calls(workload, comms.grid, run, comms.coords)
            if stage == 2:
                calls = scatter_gradients(calls, comms.grid)
            shapes = [tuple(parameter.shape) for parameter in model.parameters()]
            gathers = gather_parameters(shapes, comms.grid, bucket_bytes=limit)
            assert counts == cost.total([*calls, *gathers]), (limit, stage)
    return True


@pytest.mark.parametrize("grid", ["1x1x2x2", "2x1x1x2"])
def test_sends_what_the_cost_says(grid: str) -> None:
    run_ranks(counted, 4, grid, timeout=90)


def pieces(comms: Any, model: Any, step: int) -> None:
    """Unequal batches: of each data rank's rows another number, in two micro-batches, the first unsynchronised."""
    place = comms.coords.z + comms.grid.z * comms.coords.data
    ids, targets = (my_rows(comms, part)[: 2 + place % 3] for part in gpt.batch(model.config, step))
    weight = axo.token_weight(targets.numel(), comms)

    def backward(part: slice) -> None:
        loss = axo.nn.cross_entropy(
            model(ids[part]), targets[part], comms=comms, columns=model.config.padded_vocab_size, reduction="sum"
        )
        (weight * loss / targets.numel()).backward()

    with axo.no_sync(model):
        backward(slice(0, 1))
    backward(slice(1, None))


def accumulation(grid: str) -> bool:
    comms = axo.connect(grid)
    models = []
    for stage in (0, 1, 2):
        model, optimizer = build(comms, LLAMA, stage)
        for step in range(2):
            for micro in range(2):  # plain accumulation around it: gradients add up
                pieces(comms, model, 2 * step + micro)
            axo.clip_grad_norm_(model.parameters(), 1e9)
            optimizer.step()
            optimizer.zero_grad(set_to_none=step == 0)
        models.append(model)
    equal(models[1], models[0])
    equal(models[2], models[0])
    return True


def test_accumulation_without_synchronisation_and_unequal_batches() -> None:
    run_ranks(accumulation, 4, "1x1x2x2")


def moments(comms: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Parameters and Adam's state, whole, gathered by another way than the checkpoint's."""
    found = {}
    for name, parameter in model.named_parameters():
        where: Any = parameter.placement  # type: ignore[attr-defined]
        found[name] = axo.unshard(parameter.detach(), where)
        for key, value in optimizer.state[parameter].items():
            found[f"{name} {key}"] = axo.unshard(value, where.state) if value.dim() else value.clone()
    return found


def save_on(grid: str, stage: int, folder: str) -> tuple[dict[str, torch.Tensor], list[float]]:
    comms = axo.connect(grid)
    model, optimizer = build(comms, EVEN, stage)
    train(comms, model, optimizer, range(2))
    axo.checkpoint.save(folder, model, optimizer, step=2)
    state = moments(comms, model, optimizer)
    return (state if comms.rank == 0 else {}), train(comms, model, optimizer, range(2, 4))


def load_on(grid: str, stage: int, folder: str) -> tuple[dict[str, torch.Tensor], list[float]]:
    comms = axo.connect(grid)
    model, optimizer = build(comms, EVEN, stage)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    axo.checkpoint.load(folder, model, optimizer)
    state = moments(comms, model, optimizer)
    return (state if comms.rank == 0 else {}), train(comms, model, optimizer, range(2, 4))


WAYS = [("1x1x2x2", 2, "2x1x1x1", 0), ("1x2x1x1", 0, "1x1x1x4", 1), ("2x1x1x2", 1, "1x1x1x2", 2)]


@pytest.mark.parametrize(("first", "stage", "then", "other"), WAYS)
def test_checkpoints_load_with_and_without_on_any_grid(
    tmp_path: Any, first: str, stage: int, then: str, other: int
) -> None:
    state, losses = run_ranks(save_on, axo.Grid.parse(first).world_size, first, stage, str(tmp_path))[0]
    loaded, after = run_ranks(load_on, axo.Grid.parse(then).world_size, then, other, str(tmp_path))[0]
    assert loaded.keys() == state.keys()
    assert not [name for name in state if not torch.equal(state[name], loaded[name])]
    assert after == pytest.approx(losses, abs=1e-5)
    whole = axo.checkpoint.consolidate(tmp_path, tmp_path / "all.pth", optimizer=True)
    plain = torch.optim.AdamW(GPT(Config(**EVEN)).parameters())
    plain.load_state_dict(torch.load(whole, weights_only=True)["optimizer"])


class Mixed(nn.Module):
    """A convolution, a linear layer, and modules that every rank keeps whole."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.gate = nn.PReLU(8)
        self.head = nn.Linear(8 * 16, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.gate(self.norm(self.conv(x))).flatten(1))


def replicated(grid: str) -> bool:
    comms = axo.connect(grid)
    x = torch.randn(8, 3, 4, 4, generator=torch.Generator().manual_seed(5))
    models = []
    for stage in (0, 1, 2):
        seed_apart(comms)
        model = axo.parallelize(Mixed(), comms, plan="auto", zero=stage)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(4):
            loss = model(my_rows(comms, x)).square().mean() + 1e-2 * model.head.weight.square().sum()
            loss.backward()
            axo.clip_grad_norm_(model.parameters(), 1e9)
            if step % 2:  # autograd's own whole gradients, added up over two backward passes
                optimizer.step()
                optimizer.zero_grad()
        models.append(model)
    equal(models[1], models[0])
    equal(models[2], models[0])
    return True


def test_replicated_parameters_and_gradients_of_autograd() -> None:
    run_ranks(replicated, 4, "2x1x1x2")


def gpt2(grid: str) -> bool:
    import transformers

    comms = axo.connect(grid)
    config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=64, n_positions=16)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    ids = torch.randint(64, (8, 12), generator=torch.Generator().manual_seed(1))
    models = []
    for stage in (0, 1, 2):
        seed_apart(comms)
        model = axo.parallelize(transformers.GPT2LMHeadModel(config), comms, plan="auto", zero=stage)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(3):
            optimizer.zero_grad()
            model(my_rows(comms, ids), labels=my_rows(comms, ids)).loss.backward()
            optimizer.step()
        models.append(model)
    equal(models[1], models[0])
    equal(models[2], models[0])
    return True


def test_weights_stored_the_other_way_round() -> None:
    pytest.importorskip("transformers")
    run_ranks(gpt2, 4, "2x1x1x2", timeout=120)


def corners(grid: str) -> bool:
    comms = axo.connect(grid)
    with torch.device("meta"):
        empty = GPT(Config(**LLAMA))
    seed_apart(comms)
    model = axo.parallelize(empty, comms, zero=2)
    axo.init_weights(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    twin = copy.deepcopy(model)  # a copy cuts for itself
    other = torch.optim.SGD(twin.parameters(), lr=1e-2, momentum=0.9)
    train(comms, model, optimizer, range(2))

    def closure(step: int) -> torch.Tensor:
        other.zero_grad()
        loss = loss_of(comms, twin, step)
        loss.backward()
        return loss

    for step in range(2):
        assert other.step(partial(closure, step)) > 0
    equal(model, twin)
    assert bytes_of(optimizer) == bytes_of(other) < sum(p.nbytes for p in model.parameters())

    hooked = []
    head = model.lm_head.weight
    handle = head.register_post_accumulate_grad_hook(lambda p: hooked.append(p.grad.shape))
    loss_of(comms, model, 2).backward()
    handle.remove()
    assert hooked == [head.grad.shape] and head.grad.shape[0] == -(-head.shape[0] // 2) - (
        head.shape[0] % 2 and comms.coords.data
    )
    kept = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    (gradient,) = torch.autograd.grad(loss_of(comms, model, 2), [head])
    assert gradient.shape == head.shape, "autograd.grad gives what was asked for"
    with pytest.raises(ZeroDivisionError), pytest.warns(RuntimeWarning, match="gradients under way"):
        model.transformer.wte.register_forward_hook(lambda *a: a[-1].register_hook(lambda grad: 1 // 0) and None)
        loss_of(comms, model, 3).backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, kept[name]), f"{name}: a failed backward leaves what was there"
    return True


def test_closures_copies_meta_models_and_failures() -> None:
    run_ranks(corners, 2, "1x1x1x2")


def refused(grid: str) -> list[str]:
    comms = axo.connect(grid)
    found = []
    for zero in (3, True):
        with pytest.raises(ValueError, match="zero=") as error:
            build(comms, LLAMA, zero)
        found.append(str(error.value))
    model, _ = build(comms, LLAMA, 1)
    loss_of(comms, model, 0).backward()
    for optimizer in (torch.optim.Adafactor(model.parameters()), torch.optim.LBFGS(model.parameters())):
        with pytest.raises(ValueError, match="does not update element by element") as error:
            optimizer.step(lambda: 0.0)
        found.append(str(error.value))

    adam = torch.optim.AdamW(model.parameters())
    adam.step()
    adam.zero_grad()
    early = loss_of(comms, model, 0)
    with pytest.raises(RuntimeError, match=r"step\(\) without backward"):
        adam.step()
    loss_of(comms, model, 1).backward()
    adam.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation between forward and backward"):
        early.backward()
    with pytest.raises(RuntimeError, match="second time"):
        late = loss_of(comms, model, 1)
        late.backward()
        late.backward()

    class Broken(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            raise ArithmeticError

    shapes = [parameter.shape for parameter in model.parameters()]
    with pytest.raises(ArithmeticError):
        Broken(model.parameters(), lr=1.0).step()
    loss_of(comms, model, 1).backward()
    assert [parameter.shape for parameter in model.parameters()] == shapes
    return found


def test_bad_input_is_refused_by_name() -> None:
    messages = run_ranks(refused, 2, "1x1x1x2")
    assert messages[0] == messages[1]
    for zero, message in zip((3, True), messages[0], strict=False):  # before a layer is replaced
        assert f"parallelize: zero={zero} is not known; use one of (0, 1, 2)" in message
