"""The one look at a tensor that lets a collective start at once: what passes, and what is left to the closer look."""

import numpy as np
import pytest
import torch

from axo.comm.extension import _C
from axo.comm.memory import DTYPES


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_plain_tensor_is_its_memory(dtype):
    tensor = torch.zeros(24, dtype=dtype)
    code, item = DTYPES[dtype], dtype.itemsize
    assert _C.plain(tensor) == (tensor.data_ptr(), 24, code, 24 * item)
    assert _C.plain(tensor[8:].view(4, 4)) == (tensor.data_ptr() + 8 * item, 16, code, 16 * item)
    assert _C.plain(tensor[:0]) == (tensor[:0].data_ptr(), 0, code, 0)


def test_parameters_are_plain():
    weight = torch.nn.Parameter(torch.ones(3))
    assert _C.plain(weight) == (weight.data_ptr(), 3, DTYPES[torch.float32], 12)


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
def test_whatever_else_is_looked_at_closely(array):
    assert _C.plain(array) is None


def test_a_tensor_inside_vmap_is_looked_at_closely():
    seen = []
    torch.vmap(lambda t: (seen.append(_C.plain(t)), t)[1])(torch.zeros(2, 3))
    assert seen == [None]


def test_written_tensors_count_as_modified():
    """Oracle: autograd, which refuses to read a value that has changed since."""
    weight = torch.ones(3, requires_grad=True)
    hidden = weight * 2
    loss = (hidden * hidden).sum()
    _C.modified(hidden)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with torch.inference_mode():
        _C.modified(torch.ones(3))  # has no version to count
    with pytest.raises(TypeError, match="not a tensor"):
        _C.modified(np.ones(3))
