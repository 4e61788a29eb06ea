"""axo bench products: its table of what moves, and its picture."""

import contextlib
from functools import partial

from bench.products import __main__ as products
from bench.products import algorithms


def test_the_table_has_a_row_for_every_algorithm_that_has_a_grid(capsys):
    assert products.main(["--ranks", "4,8", "--shapes", "64x64x64"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert {line[2] for line in lines} == set(algorithms)
    assert ["8", "64x64x64", "agarwal", "2x2x2x1"] in [line[:4] for line in lines]


def test_equal_curves_are_one_line_with_both_names(tmp_path, monkeypatch):
    """One of two lines on each other was not to be seen."""
    seen = []
    monkeypatch.setattr(products, "panels", partial(kept, products.panels, seen))
    products.plot(tmp_path / "picture.png", 64)
    lines = seen[0].get_lines()
    assert len({tuple(line.get_ydata()) for line in lines}) == len(lines) > 5
    assert "megatron, megatron-row" in [line.get_label() for line in lines]


@contextlib.contextmanager
def kept(panels, seen, *given, **options):
    with panels(*given, **options) as (left, right):
        seen.append(left)
        yield left, right
