"""The products of the layers go through axo_kernels: counted for a GPT, tuned at the first step, torch's own when off.

Where a choice has to differ from torch's, the tuner's clock is replaced; values are compared with serial PyTorch.
"""

import os
import time

import pytest
import torch
import torch.nn.functional as F
from litgpt.config import Config
from litgpt.model import GPT
from torch import nn

import axo
import axo.matmul.products as products_module
import axo_kernels.tune.choice as choice_module
import axo_kernels.tune.runners as runners_module
import axo_kernels.tune.tuner as tuner_module
from axo.matmul.products import products_of
from axo_kernels.gemm.tiles import HOPPER, TARGETS
from axo_kernels.tune.choice import Choice
from axo_kernels.tune.timing import Timing
from tests.gpt import LLAMA, batch
from tests.launcher import run_ranks
from tests.nn.support import assert_close, my_rows, seed_apart

LAYERS = 2 * 5 + 1  # of LLAMA: qkv, proj, fc_1, fc_2, mlp.proj in each block, and the head
# An all-reduce forward and one backward each; of fc_1 and fc_2 the gradients of their input are summed as one, apart.
FUSED = 2 * LAYERS - 2 * 2
# fp32 sums of a few hundred terms of size 1 in another order; a wrong term is of size 1e-2 at least
LIMIT = 1e-5


def second_wins(calls, device, rounds=0, warmup=0, budget=0):
    """Stands for the clock: the last candidate, which is never torch's own layout, takes half the time."""
    last = len(calls) - 1
    return [Timing(1.0 - 0.5 * (index == last), 1.0 - 0.5 * (index == last), 0.9) for index in range(len(calls))]


def rigged(mode="first-step", clock=second_wins):
    os.environ["AXO_TUNE"] = mode
    tuner_module.paired = clock
    choice_module._FLOPS_A_BYTE["cpu"] = 1e-6  # no candidate is hopeless at the sizes of a test


def gpt_step(comms):
    config = Config(**LLAMA)
    seed_apart(comms)
    model = axo.parallelize(GPT(config), comms)
    ids, _ = batch(config, 0)
    logits = model(my_rows(comms, ids))
    # the head's columns are uneven over x: every rank's part counts
    logits.float().square().mean().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return logits.detach(), gradients, products_of(comms)


def count_products(grid, mode):
    if mode == "first-step":
        rigged()
    elif mode:
        os.environ["AXO_TUNE"] = mode
    comms = axo.connect(grid)
    _, gradients, products = gpt_step(comms)
    assert all(gradient is not None for gradient in gradients.values())
    return dict(products.calls), products.mode, getattr(products.tuner, "measured", None)


ALL_THREE = {"forward": LAYERS, "grad_input": LAYERS, "grad_weight": LAYERS}


@pytest.mark.parametrize("mode", [None, "first-step", "off"])
def test_every_product_of_a_gpt_goes_through_the_kernels(mode):
    size, grid = (8, "2x2x2x1") if mode is None else (4, "2x2x1x1")
    for calls, found, measured in run_ranks(count_products, size, grid, mode):
        assert calls == ALL_THREE
        assert found == (mode or "cached")
        # qkv, proj, fc (fc_1 and fc_2 are alike), mlp.proj and the head: three products each, two with an all-reduce,
        # but one of fc
        assert measured == {None: 0, "first-step": 24, "off": None}[mode]


def test_on_one_rank_too():
    [(calls, _, _)] = run_ranks(count_products, 1, "1x1x1x1", "first-step")
    assert calls == ALL_THREE
    [(calls, _, _)] = run_ranks(count_products, 1, "1x1x1x1", None)
    assert calls == {"layer": LAYERS}, "torch's autograd runs a layer whose three products are torch's own"


def same_with_and_without(grid):
    comms = axo.connect(grid)
    logits, expected, _ = gpt_step(comms)
    rigged()
    tuned = axo.connect(grid)
    got, gradients, products = gpt_step(tuned)
    assert products.calls == ALL_THREE
    assert products.fused.calls == (FUSED if comms.grid.world_size > 1 else 0), "split/8 is the last of the fused"
    assert_close(got, logits, LIMIT, "logits")
    for name, gradient in gradients.items():
        assert_close(gradient, expected[name], LIMIT, name)
    return sorted(choice.layout for name, choice in products.tuner._choices.items() if name.startswith("matmul "))


@pytest.mark.parametrize("size, grid", [(4, "2x2x1x1"), (1, "1x1x1x1")])
def test_other_ways_of_computing_change_nothing(size, grid):
    found = run_ranks(same_with_and_without, size, grid)
    # the last mode in the order NN, NT, TN that is not the stored one: TN for NT and NN, NT for TN
    assert found == [["NT"] * 5 + ["TN"] * 10] * size


def uneven_rows():
    """Ranks of z have 5 and 4 rows, those of x prefer different candidates: one choice all the same, made once."""
    own_way = {}

    def clock(calls, device, rounds=0, warmup=0, budget=0):
        # NN is fast on rank 0 alone, TN rather fast everywhere
        mine = {"NT": 1.0, "NN": 0.1 if comms.rank == 0 else 1.5, "TN": 0.6}
        choices = [next(each for each in call.args if isinstance(each, Choice)) for call in calls]
        seconds = [mine[choice.layout] for choice in choices]
        return [Timing(each, each / seconds[0], each / seconds[0]) for each in seconds]

    rigged(clock=clock)
    comms = axo.connect("2x1x2x1")
    seed_apart(comms)
    layer = axo.nn.Linear(48, 40, comms=comms)
    for step, rows in enumerate((9, 9, 7)):  # over z: 5 and 4, then 4 and 3
        with axo.count_collectives() as counts:
            x = torch.randn(rows, 48, generator=torch.Generator().manual_seed(step))
            mine = my_rows(comms, x)
            output = layer(mine)
            expected = F.linear(mine, layer.full_weight()[comms.coords.x * 20 : comms.coords.x * 20 + 20])
            assert_close(output, expected + layer.bias, LIMIT, f"{rows} rows")
            output.sum().backward()
        # deciding takes all-reduces over z too, which the layer itself has none of (but the bias' gradient)
        own_way[step] = counts["all_reduce", "z"].calls
    products = products_of(comms)
    return own_way, products.tuner.measured, {name: choice.name for name, choice in products.tuner._choices.items()}


def test_ranks_with_unequal_shares_decide_together_and_once():
    found = run_ranks(uneven_rows, 4)
    assert all(each == found[0] for each in found)
    own_way, measured, names = found[0]
    assert own_way[0] > own_way[1] == own_way[2] == 1
    # on 2x1x2x1 the forward product gathers its weight and has no sum; the input needs no gradient
    assert measured == 3 and names == {
        "matmul NT 5x20x48 float32": "TN vendor",
        "all_gather_matmul_kept b size=2 NT 5x10x48 float32": "TN vendor",
        "matmul TN 20x48x5 float32": "TN vendor",
    }


def rank_0_decides():
    os.environ["AXO_TUNE"] = "off" if os.environ["RANK"] == "0" else "first-step"
    comms = axo.connect("2x1x1x1")
    layer = axo.nn.Linear(8, 8, comms=comms)
    layer(torch.ones(2, 8)).sum().backward()
    return products_of(comms).mode


def test_the_mode_of_rank_0_holds_for_all():
    assert run_ranks(rank_0_decides, 2) == ["off", "off"]


def fused_wins(calls, device, rounds=0, warmup=0, budget=0):
    """Stands for the clock: a fused product in four chunks wins, of plain ones torch's own."""
    choices = [next(each for each in call.args if isinstance(each, Choice)) for call in calls]
    won = [(choice.strategy, choice.chunks) == ("split", 4) for choice in choices]
    return [Timing(1.0 - 0.5 * each, 1.0 - 0.5 * each, 0.9 if each else 1.0) for each in won]


def fused_gpt(folder):
    """First plainly, then measured at the first step, then from the file that rank 0 wrote and nobody else has."""
    comms = axo.connect("2x2x1x1")
    logits, expected, plain = gpt_step(comms)
    os.environ["AXO_TUNE_CACHE"] = f"{folder}/{comms.rank}"
    found = []
    for mode in ("first-step", "cached"):
        rigged(mode, clock=fused_wins)
        tuned = axo.connect("2x2x1x1")
        got, gradients, products = gpt_step(tuned)
        assert products.calls == plain.calls == ALL_THREE
        assert_close(got, logits, LIMIT, f"{mode}: logits")
        for name, gradient in gradients.items():
            assert_close(gradient, expected[name], LIMIT, f"{mode}: {name}")
        records = {(axis, each.strategy, each.chunks) for axis in "xy" for each in products.fused.on(axis).ran}
        found.append((products.fused.calls, products.tuner.measured, records))
    assert plain.fused.calls == 0
    return found


def test_layers_run_a_fused_choice_and_all_ranks_take_it(tmp_path):
    for (first, measured, records), (later, none, kept) in run_ranks(fused_gpt, 4, str(tmp_path)):
        assert first == later == FUSED
        # 5 kinds of layers: three plain products and two fused ones each, but one of fc
        assert measured == 24 and none == 0
        assert kept == {("x", "split", 4), ("y", "split", 4)} <= records


def cost_of_looking_up():
    """Processor time of a layer's product over torch's, in microseconds, where the product itself is nothing."""
    comms, found = axo.connect("1x1x1x1"), {}
    layer = axo.nn.Linear(8, 8, comms=comms)
    rows, weight, bias = torch.randn(8, 8), layer.weight.detach(), layer.bias.detach()
    products = layer.matmul.products
    pairs = {
        "forward": (lambda: products.forward(rows, weight, bias), lambda: F.linear(rows, weight, bias)),
        "grad_input": (lambda: products.grad_input(rows, weight), lambda: torch.mm(rows, weight)),
        "grad_weight": (lambda: products.grad_weight(rows, rows), lambda: torch.mm(rows.t(), rows)),
        "layer": (lambda: products.alone(rows, weight, bias), lambda: F.linear(rows, weight, bias)),
    }
    for name, calls in pairs.items():
        extra = []
        for _ in range(9):
            seconds = []
            for call in calls:
                started = time.thread_time()
                for _ in range(2000):
                    call()
                seconds.append(time.thread_time() - started)
            extra.append((seconds[0] - seconds[1]) / 2000 * 1e6)
        found[name] = round(sorted(extra)[len(extra) // 2], 2)
    return found


@pytest.mark.soak
def test_looking_up_costs_less_than_five_microseconds():
    [found] = run_ranks(cost_of_looking_up, 1)
    print(found)
    assert max(found.values()) < 5


def one_rank_alone():
    rigged()
    comms = axo.connect("1x1x1x1")
    layer = axo.nn.Linear(24, 16, comms=comms)
    serial = nn.Linear(24, 16)
    layer.load_state_dict(serial.state_dict())
    x = torch.randn(3, 5, 24)
    results = []
    for module in (layer, serial):
        for dtype in (None, torch.bfloat16):
            y = x.clone().requires_grad_()
            with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
                output = module(y)
            (first,) = torch.autograd.grad(output.float().square().sum(), y, create_graph=True)
            (second,) = torch.autograd.grad(first.square().sum(), module.weight)
            results.append((output, first, second))
    for got, expected in zip(results[:2], results[2:], strict=True):
        assert [t.dtype for t in got] == [t.dtype for t in expected]
        limit = 1e-4 if expected[0].dtype == torch.float32 else 0.02  # bf16 rounds to 3 digits
        for mine, theirs in zip(got, expected, strict=True):
            gap = (mine.double() - theirs.double()).norm() / theirs.double().norm()
            assert gap < limit, gap
    assert products_of(comms).calls["forward"] == 2
    doubles = axo.nn.Linear(4, 4, comms=comms, dtype=torch.float64)
    doubles(torch.ones(2, 4, dtype=torch.float64)).sum().backward()  # no kernel for it: torch's own
    jacobian = torch.func.jacrev(lambda v: layer(v))(x[0, 0])
    assert_close(jacobian, layer.weight, 0, "through functorch")


def test_one_rank_keeps_what_torch_can_do():
    run_ranks(one_rank_alone, 1)


def test_a_mode_that_is_none_is_refused(monkeypatch):
    monkeypatch.setenv("AXO_TUNE", "sometimes")
    with pytest.raises(ValueError, match="AXO_TUNE='sometimes' is not known; use one of off, cached, first-step"):
        axo.nn.Linear(4, 4, comms=axo.connect("1x1x1x1"))


def choose_a_kernel_that_adds(chosen):
    """Let dW be a product of the kernel for Hopper (by a stand-in), or of torch; returns what it was told of adding."""
    os.environ["AXO_TUNE"] = "off"
    added = []

    def kernel(a, b, layout, *, backend, config, out=None, bias=None, accumulate=False, **rest):
        assert (layout, backend, bool(config.groups)) == ("TN", "triton", True)
        result = a.float().mT @ b.float()
        added.append(accumulate)
        if accumulate:
            assert out.dtype == torch.float32
            return out.add_(result)
        return result.to(a.dtype) if out is None else out.copy_(result)

    runners_module.matmul, runners_module.describable = kernel, lambda *operands: True
    runners_module._key = lambda *operands: None  # no launch is prepared: there is none
    runners_module.target_of = lambda device: TARGETS["sm_90"]
    mine = Choice("triton", "TN", HOPPER[-1]) if chosen else Choice("vendor", "TN")
    products_module.LayerProducts._choice = lambda self, kind, *sizes: (
        mine if kind == "grad_weight" else Choice("vendor", products_module.LAYOUT[kind])
    )
    return added


def gradients_of_micro_batches(grid, chosen):
    """What three micro-batches under no_sync have left, and .grad after a fourth; products in bf16, weights in fp32."""
    added = choose_a_kernel_that_adds(chosen)
    comms = axo.connect(grid)
    torch.manual_seed(1)
    model = axo.parallelize(nn.Sequential(nn.Linear(24, 10)), comms, plan="auto")
    weight, seen = model[0].weight, []

    def backward():
        x, grad = (my_rows(comms, torch.randn(32, size)) for size in (24, 10))
        with torch.autocast("cpu", torch.bfloat16):
            output = model(x)
        seen.append((x, grad))
        output.backward(grad.to(output.dtype))

    with axo.no_sync(model):
        for _ in range(3):
            backward()
    (kept,) = (
        each.tensor.clone()
        for each in model[0].matmul.exchange.engine.gradients.deferred.values()
        if each.parameter is weight
    )
    backward()
    return kept, weight.grad, added, seen


@pytest.mark.parametrize("grid", ["1x1x1x2", "1x1x2x1"])
def test_a_kernel_that_adds_adds_to_what_micro_batches_have_left(grid):
    """Oracle: the same products computed, rounded and added apart, and in fp64. Apart, each product is rounded to bf16,
    half of its last bit off at most (2**-8 of itself); added by the kernel, only the first one is, and the fp32 sums of
    three times 16 exact products are off by less than 2**-18 of what is added up."""
    apart, together = (run_ranks(gradients_of_micro_batches, 2, grid, chosen) for chosen in (False, True))
    for (kept, grad, added, seen), (other, other_grad, others, _) in zip(together, apart, strict=True):
        assert added == [False, True, True, False] and others == []
        each = [dy.bfloat16().double().T @ x.bfloat16().double() for x, dy in seen]
        most = [dy.bfloat16().double().abs().T @ x.bfloat16().double().abs() for x, dy in seen]
        exact, fuzz = sum(each[:3]), 2**-18 * sum(most[:3])
        assert ((kept[:10] - exact).abs() <= 2**-8 * each[0].abs() + fuzz).all()
        assert ((other[:10] - exact).abs() <= 2**-8 * sum(one.abs() for one in each[:3]) + 2 * fuzz).all()
        assert not torch.equal(kept, other), "the kernel rounds once less"
        # what is reduced is rounded once, the mean of two ranks once more, and the sums differ by what is above
        limit = 4 * 2**-8 * (most[0].amax() + most[1].amax() + most[2].amax() + most[3].amax())
        assert grad.dtype == torch.float32 and (grad - other_grad).abs().max() <= limit


def grad_of_three_passes(hooked):
    """On a rank of a grid that cuts features alone, where autograd adds dW to .grad; then what must not be added."""
    added = choose_a_kernel_that_adds(True)
    comms = axo.connect("2x1x1x1")
    layer = axo.nn.Linear(24, 10, comms=comms)
    if hooked:
        layer.weight.register_hook(lambda grad: 2 * grad)
    torch.manual_seed(1)
    seen = [(torch.randn(32, 24), torch.randn(32, 5)) for _ in range(3)]

    def passed(x, dy):
        with torch.autocast("cpu", torch.bfloat16):
            return layer(x), dy.bfloat16()

    versions = []
    for output, dy in (passed(*each) for each in seen):
        output.backward(dy)
        versions.append(layer.weight.grad._version)
    grad, told = layer.weight.grad.clone(), list(added)
    output, dy = passed(*seen[0])
    (alone,) = torch.autograd.grad(output, layer.weight, dy)
    assert torch.equal(layer.weight.grad, grad), "autograd.grad adds to nothing"
    assert hooked or versions[0] < versions[1] < versions[2], "a change in place, which autograd may ask about"
    return grad, told, seen, alone


@pytest.mark.parametrize("hooked", [False, True])
def test_a_kernel_that_adds_adds_to_grad_itself_where_nothing_is_reduced(hooked):
    """Oracle and limits as above. A hook is to see each gradient, so there each comes by itself."""
    for grad, added, seen, alone in run_ranks(grad_of_three_passes, 2, hooked):
        assert added == ([False, False, False] if hooked else [False, True, True])
        each = [dy.bfloat16().double().T @ x.bfloat16().double() for x, dy in seen]
        most = sum(dy.bfloat16().double().abs().T @ x.bfloat16().double().abs() for x, dy in seen)
        rounded = each if hooked else each[:1]
        limit = (1 + hooked) * 2**-8 * sum(one.abs() for one in rounded) + 2**-17 * most
        assert ((grad - (1 + hooked) * sum(each)).abs() <= limit).all()
        assert ((alone - (1 + hooked) * each[0]).abs() <= (1 + hooked) * 2**-8 * each[0].abs() + 2**-17 * most).all()
