"""The one look at tensors that lets a collective start at once: what passes, and what is left to the closer look."""

import numpy as np
import pytest
import torch

from axo.comm.extension import _C
from axo.comm.memory import DTYPES, OPS

SUM = OPS["sum"]


class Subclass(torch.Tensor):
    pass


@pytest.fixture(scope="module")
def one():
    """A communicator of one rank."""
    core = _C.create_host_communicator(None, "", 0, 1, "one", 1000)
    yield core
    core.shutdown()


def calls(core, source, out, blocking=True):
    """What each operation gives, of which ``source`` is the input: its Work, or the seconds that it took."""
    return (
        core.plain_broadcast(source, 0, blocking, -1),
        core.plain_all_gather(source, out, blocking, -1),
        core.plain_all_reduce(source, SUM, blocking, -1),
        core.plain_reduce_scatter(source, (out, SUM), blocking, -1),
        core.plain_all_to_all(source, out, blocking, -1),
    )


def taken(found):
    return tuple(each is not None for each in found)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_plain_tensor_is_its_memory(one, dtype):
    whole = torch.arange(24).to(dtype)
    reduces = _C.can_reduce(DTYPES[dtype], SUM)
    for source in (whole, whole[8:].view(4, 4), whole[:0]):
        out = torch.zeros_like(source)
        spent = calls(one, source, out)
        assert taken(spent) == (True, True, reduces, reduces, True) and all(0 <= each < 60 for each in spent if each)
        assert torch.equal(out, source)
        works = calls(one, source, out, blocking=False)
        for work in filter(None, works):
            work.wait()
        assert taken(works) == (True, True, reduces, reduces, True)


def test_parameters_are_plain(one):
    assert taken(calls(one, torch.nn.Parameter(torch.ones(3)), torch.ones(3))) == (True,) * 5


def test_a_blocking_call_in_a_group_is_looked_at_closely(one):
    _C.group_start()
    try:
        assert calls(one, torch.ones(3), torch.ones(3)) == (None,) * 5
    finally:
        _C.group_end()


@pytest.mark.parametrize(
    "array",
    [
        np.zeros(3),
        [1.0],
        None,
        "text",
        torch.zeros(4, 4).t(),
        torch.zeros(8)[::2],
        torch.zeros(3, 1).expand(3, 3),
        torch.zeros(3, dtype=torch.complex64).conj(),
        torch.zeros(3, dtype=torch.complex64).conj().imag,
        torch.zeros(3, device="meta"),
        torch.zeros(3).to_sparse(),
        torch.zeros(3, dtype=torch.uint16),
        torch._efficientzerotensor(3),
        torch.zeros(3).as_subclass(Subclass),
    ],
    ids=repr,
)
def test_whatever_else_is_looked_at_closely(one, array):
    assert calls(one, array, torch.zeros(3)) == (None,) * 5
    assert one.plain_all_gather(torch.zeros(3), array, True, -1) is None


def test_tensors_that_do_not_fit_are_looked_at_closely(one):
    memory = torch.zeros(12)
    for source, out in (
        (memory[:4], torch.zeros(5)),  # of another size
        (memory[:4], torch.zeros(4, dtype=torch.float64)),
        (memory[:4], memory[2:6]),  # overlap
    ):
        assert one.plain_all_gather(source, out, True, -1) is None
        assert one.plain_reduce_scatter(source, (out, SUM), True, -1) is None
        assert one.plain_all_to_all(source, out, True, -1) is None
    assert one.plain_all_to_all(memory, memory, True, -1) is None
    assert one.plain_all_to_all(torch.zeros(()), torch.zeros(1), True, -1) is None  # no rows
    assert one.plain_all_gather(memory, memory, True, -1) is not None  # this rank's part of it
    assert one.plain_reduce_scatter(memory, (memory, SUM), True, -1) is None
    assert one.plain_reduce_scatter(torch.zeros(()), (torch.zeros(()), SUM), True, -1) is None  # no rows
    for op in (-1, len(_C.OPS), OPS["band"]):
        assert one.plain_all_reduce(memory, op, True, -1) is None
        assert one.plain_reduce_scatter(memory, (torch.zeros(12), op), True, -1) is None


def test_a_tensor_inside_vmap_is_looked_at_closely(one):
    seen = []
    torch.vmap(lambda t: (seen.append(one.plain_broadcast(t, 0, True, -1)), t)[1])(torch.zeros(2, 3))
    assert seen == [None]


def test_written_tensors_count_as_modified(one):
    """Oracle: autograd, which refuses to read a value that has changed since."""
    weight = torch.ones(3, requires_grad=True)
    for write, wrong in (
        (_C.modified, True),
        (lambda t: one.plain_all_reduce(t, SUM, True, -1), True),
        (lambda t: one.plain_all_gather(torch.ones(3), t, True, -1), True),
        (lambda t: one.plain_all_gather(t, torch.ones(3), True, -1), False),
        (lambda t: one.plain_broadcast(t, 0, True, -1), False),  # by the root
        (lambda t: one.plain_all_to_all(torch.ones(3), t, True, -1), True),
        (lambda t: one.plain_all_to_all(t, torch.ones(3), True, -1), False),
    ):
        hidden = weight * 2
        loss = (hidden * hidden).sum()
        write(hidden)
        if wrong:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
        else:
            loss.backward()
        with torch.inference_mode():
            write(torch.ones(3))  # has no version to count
    with pytest.raises(TypeError, match="not a tensor"):
        _C.modified(np.ones(3))
