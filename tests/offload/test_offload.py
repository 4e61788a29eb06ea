"""Offload on CPU ranks: the run without it to the bit, on a part of the memory; and what goes wrong is one error.

Oracles: the same training with ``torch.optim.AdamW(fused=True)`` and nothing offloaded; AdamW on fp32 masters that are
rounded by hand; 8 bytes a parameter, and the bytes that plain hooks of autograd see saved.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from litgpt.config import Config
from litgpt.model import GPT
from torch import nn
from torch.utils.checkpoint import checkpoint

import axo
from axo.offload import activations, optimizer
from tests import gpt
from tests.launcher import rank_outcomes, run_ranks
from tests.nn.support import mean_over_data_ranks, my_rows, seed_apart

MODEL = gpt.LLAMA | {"bias": True}
SETTINGS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}


def small_pieces() -> None:
    """Let a small model's tensors be cut, and be large enough to go out."""
    optimizer.PIECE, activations.SMALLEST, activations.AHEAD = 1024, 256, 4096


def build(comms: Any, offload: axo.Offload | None, **options: Any) -> nn.Module:
    seed_apart(comms)
    return axo.parallelize(GPT(Config(**MODEL)), comms, offload=offload, **options)


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups, in another order than the model's."""
    parameters = list(model.parameters())
    return [{"params": parameters[5:], "weight_decay": 0.2}, {"params": parameters[:5]}]


def train(comms: Any, model: Any, adamw: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        ids, targets = (my_rows(comms, part) for part in gpt.batch(model.config, step))
        loss = axo.nn.cross_entropy(model(ids), targets, comms=comms, columns=model.config.padded_vocab_size)
        adamw.zero_grad()
        loss.backward()
        axo.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
        losses.append(mean_over_data_ranks(comms, loss))
    return losses


def state_of(model: nn.Module, adamw: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Parameters and moments, whole, gathered by ``axo.unshard``: another way than the checkpoint's."""
    found = {}
    for name, parameter in model.named_parameters():
        where: Any = parameter.placement  # type: ignore[attr-defined]
        found[name] = axo.unshard(parameter.detach(), where)
        for key, value in adamw.state[parameter].items():
            found[f"{name} {key}"] = axo.unshard(value, where.state) if value.dim() else value.clone()
    return found


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    different = [name for name in a if not torch.equal(a[name], b[name])]
    assert not different, different


def compared(grid: str, folder: str, options: dict[str, Any], recompute: bool) -> bool:
    small_pieces()
    comms = axo.connect(grid)
    found = []
    for what in (None, "all", 1):
        offload = None if what is None else axo.Offload(parameters=what == 1, activations=what, dir=folder)
        model: Any = build(comms, offload, **options)
        if recompute:
            for block in model.transformer.h:
                block.forward = partial_checkpoint(block.forward)
        if offload is None:
            adamw: torch.optim.AdamW = torch.optim.AdamW(groups(model), fused=True, **SETTINGS)
        else:
            adamw = offload.adamw(groups(model), **SETTINGS)
        found.append((train(comms, model, adamw, range(3)), state_of(model, adamw)))
    for losses, state in found[1:]:
        assert losses == found[0][0]
        equal(state, found[0][1])
    assert not os.listdir(folder)
    return True


def partial_checkpoint(forward: Any) -> Any:
    return lambda *args: checkpoint(forward, *args, use_reentrant=False)


@pytest.mark.parametrize(
    ("grid", "options", "recompute"),
    [("1x1x1x1", {}, False), ("2x1x2x1", {}, True), ("1x1x1x2", {"zero": 2, "grad_reduce": "sum"}, False)],
)
def test_equals_the_run_without_to_the_bit(tmp_path: Path, grid: str, options: dict, recompute: bool) -> None:
    run_ranks(compared, axo.Grid.parse(grid).world_size, grid, str(tmp_path), options, recompute)


# --- checkpoints -------------------------------------------------------------------------------------------------


def saved_on(grid: str, files: str, folder: str) -> tuple[dict[str, torch.Tensor], list[float]]:
    comms = axo.connect(grid)
    offload = axo.Offload(activations="all", dir=files)
    model = build(comms, offload)
    adamw = offload.adamw(groups(model), **SETTINGS)
    train(comms, model, adamw, range(2))
    axo.checkpoint.save(folder, model, adamw, step=2)
    state = state_of(model, adamw)
    return state, train(comms, model, adamw, range(2, 4))


def loaded_on(grid: str, files: str, folder: str, plain: bool) -> tuple[dict[str, torch.Tensor], list[float]]:
    comms = axo.connect(grid)
    offload = axo.Offload(optimizer=not plain, dir=files)
    model = build(comms, offload)
    adamw = offload.adamw(groups(model), lr=1.0)
    places = [value.data_ptr() for state in adamw.state.values() for value in state.values()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    if not plain:
        train(comms, model, adamw, range(1))  # what is loaded replaces what was there
    axo.checkpoint.load(folder, model, adamw)
    if not plain:
        assert places == [value.data_ptr() for state in adamw.state.values() for value in state.values()]
    state = state_of(model, adamw)
    return state, train(comms, model, adamw, range(2, 4))


@pytest.mark.parametrize(("grid", "plain"), [("1x1x1x2", False), ("1x2x1x1", True)])
def test_a_checkpoint_loads_on_another_grid_and_into_plain_adamw(tmp_path: Path, grid: str, plain: bool) -> None:
    (tmp_path / "files").mkdir()
    files, folder = str(tmp_path / "files"), str(tmp_path / "checkpoints")
    state, losses = run_ranks(saved_on, 2, "1x1x2x1", files, folder)[0]
    again, more = run_ranks(loaded_on, 2, grid, files, folder, plain)[0]
    equal(again, state)
    assert more == pytest.approx(losses, abs=1e-5)


def test_masters_of_bf16_parameters(tmp_path: Path) -> None:
    """Oracle: torch's AdamW on fp32 copies, rounded by hand after each step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 700), nn.GELU(), nn.Linear(700, 3)).bfloat16()
    masters = [parameter.detach().float().requires_grad_() for parameter in model.parameters()]
    plain = torch.optim.AdamW(masters, fused=True, **SETTINGS)
    adamw = axo.Offload(dir=tmp_path).adamw(model.parameters(), **SETTINGS)

    def steps(count: int) -> None:
        for _ in range(count):
            model(torch.randn(8, 96).bfloat16()).float().square().sum().backward()
            for parameter, master in zip(model.parameters(), masters, strict=True):
                assert parameter.grad is not None
                master.grad, parameter.grad = parameter.grad.float(), parameter.grad.t().contiguous().t()
            adamw.step()
            plain.step()
            adamw.zero_grad()
            check()

    def check() -> None:
        for parameter, master in zip(model.parameters(), masters, strict=True):
            assert torch.equal(adamw.state[parameter]["master"], master)
            assert torch.equal(parameter, master.bfloat16())

    steps(3)
    # Somebody sets one element: its master follows, and the others keep what they have below a bf16's last bit.
    with torch.no_grad():
        model[0].weight[5, 7] = 3.0
        masters[0][5, 7] = 3.0
    steps(1)
    saved = adamw.state_dict()
    for state in saved["state"].values():
        assert state["master"].dtype == state["exp_avg"].dtype == torch.float32
    other = axo.Offload(dir=tmp_path).adamw(model.parameters(), lr=1.0)
    other.load_state_dict(saved)
    adamw = other
    steps(2)
    # A state without masters, such as plain AdamW's: they are the parameters'.
    for state in saved["state"].values():
        del state["master"]
    other = axo.Offload(dir=tmp_path).adamw(model.parameters(), lr=1.0)
    other.load_state_dict(saved)
    plain.load_state_dict(saved)
    plain.param_groups[0]["fused"] = True
    with torch.no_grad():
        for parameter, master in zip(model.parameters(), masters, strict=True):
            master.copy_(parameter)
    adamw = other
    steps(1)


# --- memory ------------------------------------------------------------------------------------------------------


def anonymous() -> int:
    """Bytes of memory that no file backs."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024


def wide() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in range(6)]
    return nn.Sequential(*blocks)


def held(folder: str, what: str) -> list[int]:
    """Anonymous bytes at the end of forward and after a step, parameters, and bytes that forward saves."""
    assert ctypes.CDLL(None).mallopt(-3, 1 << 16) == 1  # M_MMAP_THRESHOLD: what is freed goes back at once
    before = anonymous()
    model, x = wide(), torch.randn(512, 512)
    offload = axo.Offload(what == "optimizer", what == "parameters", "all" if what == "all" else "none", folder)
    offload.attach(model)
    adamw = offload.adamw(model.parameters())
    seen: dict[tuple[int, torch.Size], int] = {}
    for _ in range(2):  # the second has the optimizer's state, and buffers that are used again
        loss = model(x).square().mean()
        forward = anonymous() - before
        loss.backward()
        adamw.step()
        step = anonymous() - before
        adamw.zero_grad()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own and tensor is not x:
            seen[tensor.data_ptr(), tensor.shape] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = model(x)
    return [forward, step, parameters, sum(seen.values())]


def test_memory_goes_down_by_what_lies_on_the_lower_tier(tmp_path: Path) -> None:
    cases = ("none", "optimizer", "parameters", "all")
    none, state, weights, saved = (run_ranks(held, 1, str(tmp_path), what)[0] for what in cases)
    parameters, activations = none[2:]
    assert none[1] - state[1] == pytest.approx(8 * parameters, rel=0.1)  # AdamW's two moments, fp32
    assert none[1] - weights[1] == pytest.approx(8 * parameters, rel=0.1)  # weights and gradients
    assert none[0] - saved[0] == pytest.approx(activations, rel=0.1)


def mapped_files(folder: Path) -> int:
    return sum(str(folder) in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_many_tensors_lie_in_few_mapped_files(tmp_path: Path) -> None:
    """The kernel lets a process map 65,530 files: with one a tensor, 20,000 bf16 parameters with AdamW's state fail."""
    parameters = [nn.Parameter(torch.ones(33, dtype=torch.bfloat16)) for _ in range(1000)]
    adamw = axo.Offload(parameters=True, dir=tmp_path).adamw(parameters)
    assert 0 < mapped_files(tmp_path) < 100
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    adamw.step()
    moments = torch.cat([adamw.state[parameter]["exp_avg"] for parameter in parameters])
    assert moments.eq(moments[0]).all() and moments[0] > 0  # each has memory of its own


# --- what goes wrong ---------------------------------------------------------------------------------------------


def limited(folder: str) -> bool:
    """A limit on the size of a file is an error of the same place as a full disk."""
    small_pieces()
    model = wide()
    before = [parameter.clone() for parameter in model.parameters()]
    offload = axo.Offload(activations="all", dir=folder)
    offload.attach(model)
    x = torch.randn(64, 512)
    model(x).sum().backward()
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(OSError, match=r"no room for \d+\.\d MiB more .*limit of a file's size") as caught:
            offload.adamw(model.parameters())
        assert caught.value.filename == folder
        with pytest.raises(OSError, match="no room"):  # in the middle of a forward pass
            model(torch.randn(512, 512))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert not os.listdir(folder)
    # Nothing is left of it: not the hooks of the pass that failed, nor its state.
    model.zero_grad()
    model(x).sum().backward()
    got = [parameter.grad for parameter in model.parameters()]
    plain = wide()
    plain(x).sum().backward()
    assert all(torch.equal(a, b.grad) for a, b in zip(got, plain.parameters(), strict=True))
    offload.adamw(model.parameters()).step()
    return True


def test_a_full_disk_is_one_error_and_leaves_nothing(tmp_path: Path) -> None:
    run_ranks(limited, 1, str(tmp_path))


def test_bad_input_is_refused(tmp_path: Path) -> None:
    for options, message in (
        ({"optimizer": 1}, "optimizer=1 is not a switch"),
        ({"parameters": None}, "parameters=None is not a switch"),
        ({"activations": "some"}, "activations='some' is not known; use 'none', 'all', or a number of blocks"),
        ({"activations": -1}, "activations=-1 is not known"),
        ({"activations": True}, "activations=True is not known"),
        ({"dir": ""}, "dir='' names no folder"),
    ):
        with pytest.raises(ValueError, match=message):
            axo.Offload(**options)  # type: ignore[arg-type]
    for text, message in (("optimiser", "'optimiser' is not known; use none"), ("activations=few", "'few' is not kno")):
        with pytest.raises(ValueError, match=message):
            axo.Offload.parse(text)
    parsed = axo.Offload.parse("activations=3,optimizer,parameters", "/x")
    assert parsed == axo.Offload(True, True, 3, "/x") and axo.Offload.parse("none") == axo.Offload(optimizer=False)

    layer = nn.Linear(3, 3)
    with pytest.raises(ValueError, match=r"name a folder on a disk: axo.Offload\(dir=...\)"):
        axo.Offload().adamw(layer.parameters())
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"dir='.*file' cannot be used: File exists; give a folder on a disk"):
        axo.Offload(dir=tmp_path / "file").adamw(layer.parameters())
    good = axo.Offload(dir=tmp_path)
    with pytest.raises(ValueError, match="meta device; fill the model first"):
        good.adamw(nn.Linear(3, 3, device="meta").parameters())
    with pytest.raises(ValueError, match="Linear has no "):
        axo.Offload(activations=2, dir=tmp_path).attach(layer)
    with pytest.raises(ValueError, match="activations=3, and 'Sequential' has 1 blocks; use up to 1"):
        axo.Offload(activations=3, dir=tmp_path).attach(nn.Sequential(layer))
    adamw = good.adamw(layer.parameters())
    other = torch.optim.AdamW(nn.Linear(3, 3).parameters(), amsgrad=True)
    other.param_groups[0]["params"][0].grad = torch.ones(3, 3)
    other.step()
    with pytest.raises(ValueError, match="'max_exp_avg_sq', which AdamW without amsgrad has not"):
        adamw.load_state_dict(other.state_dict())
    wrong = torch.optim.AdamW(nn.Linear(4, 3).parameters())
    F.linear(torch.ones(1, 4), wrong.param_groups[0]["params"][0]).sum().backward()
    wrong.step()
    with pytest.raises(ValueError, match=r"'exp_avg' to load has shape \(3, 4\), and \(3, 3\) is wanted"):
        adamw.load_state_dict(wrong.state_dict())


def refused_on_ranks(folder: str) -> None:
    comms = axo.connect("2x1x1x1")
    build(comms, axo.Offload(activations=5, dir=folder))


def test_more_blocks_than_the_model_has_is_one_error_on_every_rank(tmp_path: Path) -> None:
    for outcome in rank_outcomes(refused_on_ranks, 2, str(tmp_path)):
        assert outcome.error == "ValueError" and "has 2 blocks; use up to 2, or 'all'" in outcome.message


# --- more than there is memory for -------------------------------------------------------------------------------

LIMIT, WIDTH, DEPTH = 384 << 20, 2048, 24


def large(folder: str, what: bool, group: Path | None) -> list[float]:
    """Train a model whose state is four times ``LIMIT``, in a control group with as much memory."""
    # What this process shares with the one that it was forked from counts as soon as it is written to: the collector
    # of garbage would write to all of Python's objects.
    gc.disable()
    assert ctypes.CDLL(None).mallopt(-3, 1 << 16) == 1  # M_MMAP_THRESHOLD: what is freed goes back at once
    if group is not None:
        (group / "cgroup.procs").write_text(str(os.getpid()))
    comms = axo.connect("1x1x1x1")
    with torch.device("meta"):
        model: nn.Module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))
    assert 16 * DEPTH * WIDTH**2 >= 4 * LIMIT
    offload = axo.Offload(what, what, "none", folder)
    axo.parallelize(model, comms, plan="auto", offload=offload)
    axo.init_weights(model, offload=offload)
    adamw = offload.adamw(model.parameters(), lr=1e-4)
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(0))
    losses = []
    for _ in range(3):
        loss = (model(x) - x).square().mean()
        loss.backward()
        adamw.step()
        adamw.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.soak
@pytest.mark.skipif(not os.access("/sys/fs/cgroup/memory", os.W_OK), reason="no control group can be made here")
def test_a_model_of_four_times_the_memory_trains(tmp_path: Path) -> None:
    """Oracle: the same run without a limit and without offload. With the limit alone the kernel ends the rank."""
    expected = run_ranks(large, 1, str(tmp_path), False, None)[0]
    group = Path("/sys/fs/cgroup/memory") / f"axo-test-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(LIMIT))
        (lost,) = rank_outcomes(large, 1, str(tmp_path), False, group)
        assert lost.signal == "SIGKILL", lost
        losses = run_ranks(large, 1, str(tmp_path), True, group, timeout=150)[0]
    finally:
        group.rmdir()
    assert losses == expected and losses[-1] < losses[0]
    print(f"state of {16 * DEPTH * WIDTH**2 >> 20} MiB in {LIMIT >> 20} MiB of memory: losses {losses}")
