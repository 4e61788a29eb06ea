"""Vocabulary-parallel cross-entropy against torch.nn.functional.cross_entropy."""

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import axo
from axo.nn.loss import _CHUNK_ELEMENTS
from tests.launcher import rank_outcomes, run_ranks
from tests.nn.support import assert_close

# Gradients are of size 1, losses are compared relative to their size: rounding of a few sums in each dtype. torch takes
# a bf16 log-softmax, rounded to 8 bits, and sums that; ours stays in fp32; both round gradients to bf16.
LIMITS = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 2e-2}


def compare(comms, logits, target, options, extra, what):
    columns = logits.shape[-1]
    dtype = logits.dtype
    real = extra.get("vocab_size") or columns
    serial = logits.clone().requires_grad_()
    expected = F.cross_entropy(serial[..., :real].reshape(-1, real), target.reshape(-1), **options)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (expected.double() * weights).sum().backward()

    placement = axo.Placement(logits.shape, ((), (), ("x",)), comms=comms)
    mine = axo.shard(logits, placement).requires_grad_()
    given = mine * 1  # inplace_backward must not write into a leaf
    loss = axo.nn.cross_entropy(given, target, comms=comms, columns=columns, **options, **extra)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    weights = weights if options["reduction"] != "none" else weights.view(target.shape)
    (loss.double() * weights).sum().backward()
    expected = expected if options["reduction"] != "none" else expected.view(target.shape)
    size = max(1.0, float(expected.detach().abs().max()))
    assert_close(loss, expected, LIMITS[dtype] * size, f"{what}: loss")
    assert_close(mine.grad, axo.shard(serial.grad, placement), LIMITS[dtype], f"{what}: gradient")


def compare_with_serial(grids):
    dist.init_process_group("axo")
    for grid in grids:
        comms = axo.connect(grid)
        generator = torch.Generator().manual_seed(2)
        for columns, dtype in itertools.product((40, 37, 3), LIMITS):
            logits = (4 * torch.randn(5, 6, columns, generator=generator, dtype=torch.float64)).to(dtype)
            target = torch.randint(columns, (5, 6), generator=generator)
            target[1:3, ::2] = -100
            for reduction, smoothing in itertools.product(("mean", "sum", "none"), (0.0, 0.1)):
                options = {"reduction": reduction, "label_smoothing": smoothing}
                what = f"{grid}, {columns} columns, {dtype}, {options}"
                compare(comms, logits, target, options, {}, what)
            compare(comms, logits, target, {"reduction": "mean"}, {"inplace_backward": True}, f"{what}, in place")
            padded, real = logits.clone(), columns - 2
            padded[..., real:] = 1e4  # whatever padding holds must not matter
            inside = target.clamp(max=real - 1)
            for smoothing in (0.0, 0.3):
                options = {"reduction": "sum", "label_smoothing": smoothing}
                compare(comms, padded, inside, options, {"vocab_size": real}, f"{what}, padded")
            other = torch.where(target == -100, 0, target)
            compare(comms, logits, other, {"reduction": "mean", "ignore_index": 0}, {}, f"{what}, ignore_index 0")
        comms.close()


def test_equals_torch():
    run_ranks(compare_with_serial, 4, ["4x1x1x1", "2x2x1x1", "1x1x2x2"], timeout=180)


def edges(grid):
    comms = axo.connect(grid)
    local = 8 // comms.grid.x
    loss = axo.nn.CrossEntropyLoss(comms=comms)
    logits = torch.randn(3, local, requires_grad=True)
    ignored = torch.full((3,), -100)
    assert loss(logits, ignored).isnan()  # as torch: a mean over nothing
    total = axo.nn.CrossEntropyLoss(comms=comms, reduction="sum")(logits, ignored)
    total.backward()
    assert total == 0 and torch.equal(logits.grad, torch.zeros(3, local))
    assert loss(torch.zeros(0, local), torch.zeros(0, dtype=torch.long)).isnan()
    flat = axo.nn.cross_entropy(torch.zeros(local), torch.tensor(3), comms=comms)  # one row, no leading dim
    assert_close(flat, torch.tensor(8.0).log(), 1e-6, "uniform logits")
    huge = torch.full((2, local), 3e38)  # exp would overflow without the maximum taken off
    assert_close(loss(huge, torch.tensor([0, 7])), torch.tensor(8.0).log(), 1e-6, "huge logits")
    masked = torch.full((1, local), -torch.inf)
    if comms.coords.x == 0:
        masked[0, 0] = 2.0  # all of the other ranks' columns are -inf
    assert loss(masked, torch.tensor([0])) == 0
    with axo.count_collectives() as counts:
        loss(logits, torch.tensor([0, 3, 7])).backward()
    assert set(counts) <= {("all_reduce", "x")} and counts.total().elements <= 3 * 3 + 3
    first = torch.zeros(2, local, requires_grad=True)
    twice = axo.nn.cross_entropy(first * 1, torch.tensor([0, 1]), comms=comms, inplace_backward=True)
    twice.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="only one backward"):
        twice.backward()
    with pytest.raises(ValueError, match="elements share memory; leave it out"):
        axo.nn.cross_entropy(first[:1].expand(2, local), torch.tensor([0, 1]), comms=comms, inplace_backward=True)
    for target in (8, -1):
        with pytest.raises(IndexError, match=f"target {target} is out of range; the vocabulary has 8 entries"):
            loss(torch.zeros(1, local), torch.tensor([target]))
    for dtype in (torch.float32, torch.bool, torch.uint8):
        with pytest.raises(RuntimeError, match=r"the targets are torch\..*; pass ids of int64 or int32"):
            loss(torch.zeros(1, local), torch.zeros(1, dtype=dtype))
    for given, name in ((([0.0] * 8, torch.tensor([0])), "input"), ((logits, [0, 3, 7]), "target")):
        with pytest.raises(TypeError, match=f"cross_entropy: {name} is a list; pass a tensor"):
            loss(*given)
    for options, message in (
        ({"reduction": "max"}, "reduction='max' is not known"),
        ({"label_smoothing": 2.0}, "label_smoothing=2.0 is not between 0 and 1"),
        ({"weight": torch.ones(8)}, "class weights are not supported"),
    ):
        with pytest.raises(ValueError, match=message):
            axo.nn.CrossEntropyLoss(**options, comms=comms)
    with pytest.raises(ValueError, match=r"targets of shape \(2,\) do not fit logits of shape"):
        loss(torch.zeros(3, local), torch.zeros(2, dtype=torch.long))


@pytest.mark.parametrize("grid", ["4x1x1x1", "1x1x4x1"])
def test_edges(grid):
    run_ranks(edges, 4, grid)


def uneven_without_columns(columns):
    comms = axo.connect("4x1x1x1")
    width = 3 if comms.rank < 3 else 1
    axo.nn.cross_entropy(torch.zeros(2, width), torch.zeros(2, dtype=torch.long), comms=comms, columns=columns)


@pytest.mark.parametrize("columns", [None, 12])
def test_columns_that_do_not_fit_are_an_error_on_every_rank(columns):
    for outcome in rank_outcomes(uneven_without_columns, 4, columns):
        assert outcome.error == "ValueError" and "pass columns=" in outcome.message, outcome.describe()


class LargestAllocation(TorchDispatchMode):
    """Bytes of the largest tensor that any operation returned and that is not a view of its inputs."""

    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        known = {storage.data_ptr() for storage in storages((args, kwargs))}
        new = [storage.nbytes() for storage in storages(result) if storage.data_ptr() not in known]
        self.largest = max([self.largest, *new])
        return result


def storages(tree):
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if torch.is_tensor(leaf)]


def allocations(grid):
    comms = axo.connect(grid)
    rows, columns = 1024, 4096
    local = columns // comms.grid.x
    target = torch.randint(columns, (rows,))
    sizes = {}
    for inplace in (False, True):
        logits = torch.randn(rows, local, requires_grad=True)
        given = logits * 1
        loss = axo.nn.CrossEntropyLoss(comms=comms, inplace_backward=inplace)
        with LargestAllocation() as forward:
            value = loss(given, target)
        with LargestAllocation() as backward:
            (grad,) = torch.autograd.grad(value, given)
        assert grad.shape == given.shape
        sizes[inplace] = (forward.largest, backward.largest)
    with LargestAllocation() as torch_own:
        F.cross_entropy(torch.randn(rows, local), target % local)
    return sizes, torch_own.largest, 4 * rows * local


@pytest.mark.parametrize("grid", ["1x1x1x2", "2x1x1x1"])
def test_allocates_nothing_of_the_size_of_the_logits(grid):
    for sizes, torch_own, logits in run_ranks(allocations, 2, grid):
        assert torch_own >= logits, "the measure does not see what torch's own loss allocates"
        chunk = 4 * _CHUNK_ELEMENTS
        assert chunk < logits
        assert sizes[False] == (pytest.approx(chunk, rel=0.01), logits)  # backward: the gradient itself
        assert max(sizes[True]) <= 1.01 * chunk
