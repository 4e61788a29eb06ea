"""Values beside plain tensors: refused where one could not be read back or would be lost, and cheap to check."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import axo
from axo.checkpoint import consolidate, load, save
from tests.checkpoint.test_checkpoint_safety import filled, names_in, tell
from tests.launcher import run_ranks


def test_what_a_run_keeps_beside_the_model_is_looked_at_without_a_call_for_each_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of a million steps has a million losses: the only ones who see each are the C of torch.save and NumPy."""
    nan, other_nan = float("nan"), -float("nan")
    extra = {
        "losses": [0.5, nan] * 500,
        "many": [2**70] * 3,
        "steps": (list(range(-500, 500)),),
        "mixed": [1, 1.0, True],
    }
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += frame.f_code.co_filename.startswith(str(Path(axo.__file__).parent)) and event == "call"

    sys.setprofile(count)
    try:
        save(tmp_path, filled(1.0), extra=extra)
    finally:
        sys.setprofile(None)
    assert 0 < calls < 900, calls
    with monkeypatch.context() as patch:
        unpickled: list[int] = []
        real = torch.load
        patch.setattr(
            torch, "load", lambda file, **more: (unpickled.append(len(file.getvalue())), real(file, **more))[1]
        )
        save(tmp_path, filled(1.0), extra=extra)
    assert unpickled and max(unpickled) < 5000
    loaded = load(tmp_path, filled(0.0)).extra
    assert repr(loaded) == repr(extra)
    digest = axo.checkpoint.state.digest
    assert digest([1.0, nan]) == digest([1.0, other_nan]) != digest([1.0, 0.0])
    assert len({digest(each) for each in ([1, 2], [1.0, 2.0], [2, 1], [True, 2], [1], [[1], 2], [1, 2, 2**70])}) == 7


class Keeps(nn.Module):
    """Keeps a value beside its tensors."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.weight, self.value = nn.Parameter(torch.ones(2)), value

    def get_extra_state(self) -> Any:
        return self.value

    def set_extra_state(self, value: Any) -> None:
        self.value = value


def test_what_could_not_be_read_back_is_not_saved(tmp_path: Path) -> None:
    """A module's own state and an optimizer's options, as what is given as extra; NumPy's numbers become Python's."""
    bad = nn.Sequential(Keeps({"path": tmp_path}))
    message = tell(lambda: save(tmp_path, bad))
    assert "'model/0._extra_state' holds what cannot be read back safely (it holds a pathlib.PosixPath)" in message
    assert "(Can't pickle local object" in tell(lambda: save(tmp_path, Keeps(lambda: 1)))
    model = filled(1.0)
    optimizer = torch.optim.Adam([{"params": model.parameters(), "where": tmp_path}])
    assert "an option of Adam holds what cannot be read back safely" in tell(lambda: save(tmp_path, model, optimizer))
    assert names_in(tmp_path) == []

    good, other = Keeps({"a": [1, 0.5]}), Keeps(None)
    rates = np.linspace(0.1, 0.2, 2)
    optimizer = torch.optim.Adam(good.parameters(), lr=rates[1], betas=(rates[0], 0.9))
    optimizer.state[good.weight] = {"step": torch.zeros(()), "seen": np.int64(3)}
    path = save(tmp_path, good, optimizer, extra={"spectrum": torch.ones(2, dtype=torch.cfloat).conj()}).path
    read = torch.optim.Adam(other.parameters())
    assert load(path, other, read).extra["spectrum"].tolist() == [1, 1] and other.value == good.value
    assert read.param_groups[0]["lr"] == rates[1] and read.param_groups[0]["betas"] == (rates[0], 0.9)
    assert read.state[other.weight]["seen"] == 3


def test_options_of_a_group_without_parameters_are_read_back(tmp_path: Path) -> None:
    """One is filled later, by add_param_group's own means, or on another stage; other groups than saved keep theirs."""
    model = filled(1.0)

    def groups(*rates: float, empty: int = 1) -> torch.optim.Optimizer:
        made = [
            {"params": [] if number == empty else model.parameters(), "lr": rate} for number, rate in enumerate(rates)
        ]
        return torch.optim.SGD(made, momentum=rates[0])

    path = save(tmp_path, model, groups(0.1, 0.2)).path
    for rates, empty, expected in (((0.5, 0.6), 1, [0.1, 0.2]), ((0.5, 0.6), 0, [0.5, 0.1])):
        read = groups(*rates, empty=empty)
        load(path, model, read)
        assert [group["lr"] for group in read.param_groups] == expected
        assert [group["momentum"] for group in read.param_groups] == [0.1 if rate < 0.5 else 0.5 for rate in expected]


def test_views_that_negate_are_read_into_as_they_are_seen(tmp_path: Path) -> None:
    values = torch.tensor([1 + 2j, 3 - 1j])
    saved, other = nn.Module(), nn.Module()
    saved.register_buffer("a", values.conj())
    saved.register_buffer("b", values.conj().imag)
    other.register_buffer("a", torch.zeros(2, dtype=torch.cfloat).conj())
    other.register_buffer("b", torch.zeros(2, dtype=torch.cfloat).conj().imag)
    assert other.a.is_conj() and other.b.is_neg()
    path = save(tmp_path / "a", saved).path
    for source in (path, consolidate(path, tmp_path / "a.pth")):
        load(source, other)
        assert other.a.tolist() == [1 - 2j, 3 + 1j] and other.b.tolist() == [-2, 1]
        other.a.zero_()
        other.b.zero_()


def share_or_not(folder: str) -> list[str]:
    comms = axo.connect("2x1x1x1")
    two = nn.Sequential(axo.nn.Linear(4, 4, bias=False, comms=comms), axo.nn.Linear(4, 4, bias=False, comms=comms))
    one = nn.Sequential(axo.nn.Linear(4, 4, bias=False, comms=comms), axo.nn.Linear(4, 4, bias=False, comms=comms))
    one[1].weight = one[0].weight
    with torch.no_grad():
        two[0].weight.fill_(float("nan"))
        two[1].weight.fill_(float("nan"))
    save(folder, two, step=1)
    load(folder, one)
    assert one[0].weight.isnan().all()
    with torch.no_grad():
        one[0].weight.fill_(5.0)
        two[0].weight.fill_(2.0)
        two[1].weight.copy_(two[0].weight)
        two[1].weight.view(-1)[-1] = 3.0 - comms.rank
    save(folder, two, step=2)
    messages = [tell(lambda: load(folder, one))]
    if comms.rank == 0:
        consolidate(folder, f"{folder}/m.pth")
    comms.world.barrier()
    messages.append(tell(lambda: load(f"{folder}/m.pth", one)))
    assert one[0].weight.eq(5.0).all()
    return messages


def test_two_tensors_are_not_read_into_one_where_one_would_be_lost(tmp_path: Path) -> None:
    for messages in run_ranks(share_or_not, 2, str(tmp_path)):
        for message in messages:
            assert "has other values in '0.weight' than in '1.weight', which are one tensor in the model" in message
