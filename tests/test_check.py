"""axo.check: what is right comes back, what is wrong is named with what would be right."""

import numpy
import pytest

from axo import check


@pytest.mark.parametrize(
    ("value", "least", "most", "said"),
    [
        (True, None, None, "n=True is not a whole number"),
        (2.0, None, None, "n=2.0 is not a whole number"),
        ("2", 0, None, "n='2' is not a whole number of at least 0"),
        (0, 1, None, "n=0 is not a whole number of at least 1"),
        (9, None, 8, "n=9 is not a whole number of at most 8"),
        (9, 1, 8, "n=9 is not a whole number from 1 to 8"),
    ],
)
def test_whole_numbers(value, least, most, said):
    with pytest.raises(ValueError) as refusal:
        check.whole_number("n", value, least=least, most=most)
    assert str(refusal.value) == said


def test_numpy_counts_as_a_whole_number():
    count = check.whole_number("n", numpy.int32(8), least=1, most=8)
    assert count == 8 and type(count) is int


@pytest.mark.parametrize("value", [True, "1", None, float("nan"), float("inf"), 0, -1.5])
def test_numbers_above_zero(value):
    with pytest.raises(ValueError, match=r"^clip=.* is not a number above 0$"):
        check.number("clip", value, above=0)
    assert check.number("clip", 1) == 1.0


def test_one_of():
    assert check.one_of("loss", "mse", ("mse", "ce")) == "mse"
    with pytest.raises(ValueError, match=r"^loss='MES' is not known; did you mean 'mse'\?$"):
        check.one_of("loss", "MES", ("mse", "ce"))
    with pytest.raises(ValueError, match=r"^loss=7 is not known; use one of 'mse', 'ce'$"):
        check.one_of("loss", 7, ("mse", "ce"))
