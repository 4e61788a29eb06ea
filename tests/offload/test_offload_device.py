"""Offload of a GPU to pinned host memory, on the stand-in GPU.

Its copies to and from pinned memory run in the order of their stream while the host goes on, and its freed memory is
torn up in the order of the stream that made it.

Oracle: the same model on the stand-in with nothing offloaded, and torch's AdamW on the CPU on copies of its parameters;
values are equal to the bit. What comes too early or too late shows as another value. See tests/standin.py.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import axo
from axo.comm.device import DeviceWork
from axo.offload import activations, optimizer, tier
from axo.offload.copy_stream import CopyEvent, CopyStream
from tests import gpt, standin
from tests.launcher import run_ranks
from tests.nn.support import my_rows


def pinned(*shape: int) -> torch.Tensor:
    return torch.full(shape, -1.0, pin_memory=True)


def order_of_copies(gpu: standin.Gpu) -> None:
    """A copy begins after what the compute stream held, on another stream; the host and the compute stream go on."""
    device = torch.device("standin", 0)
    out, back = CopyStream(device), CopyStream(device)
    tensor, source, host = torch.zeros(1000, device=device), torch.ones(1000, device=device), pinned(1000)
    gpu.synchronize()
    gate = gpu.hold()  # on the compute stream
    tensor.copy_(source)
    left = out.copy([(host, tensor)])
    again = pinned(1000)
    other = back.copy([(again, source)])  # this one follows the compute stream too
    assert not left.is_completed() and not other.is_completed() and host[0] == again[0] == -1.0
    gate.open()
    left.synchronize()
    assert torch.equal(host, torch.ones(1000))
    # The compute stream does not wait for a copy that is held back, until it is told to.
    with out._stream:  # type: ignore[attr-defined]
        late = gpu.hold()
    held = torch.full((1000,), 5.0, device=device)
    left = out.copy([(host, held)])
    del held
    gpu.synchronize()
    assert not left.is_completed() and host[0] == 1.0
    back_here = torch.zeros(1000, device=device)
    arrived = back.copy([(back_here, host)], left)  # after the copy out, which is late
    assert not arrived.is_completed()
    late.open()
    arrived.block()
    assert torch.equal(back_here.cpu(), torch.full((1000,), 5.0))  # nothing tore up what was on its way
    out.finish()
    back.finish()
    assert not out._in_flight and not back._in_flight


def model_of(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(3)
    blocks = [nn.Sequential(nn.Linear(32, 100), nn.GELU(), nn.Linear(100, 32), nn.LayerNorm(32)) for _ in range(3)]
    return nn.Sequential(*blocks).to(dtype)


def update(adamw: torch.optim.Optimizer, masters: list[torch.Tensor], parameters: list[Any]) -> None:
    """One step of an optimizer that updates ``masters``, copies on the CPU, or the parameters, if there are none."""
    for master, parameter in zip(masters, parameters, strict=False):
        assert parameter.grad is not None
        master.grad = parameter.grad.cpu().float()
    adamw.step()
    with torch.no_grad():
        for master, parameter in zip(masters, parameters, strict=False):
            parameter.copy_(master)


def steps(
    model: nn.Module, adamw: torch.optim.Optimizer, masters: list[torch.Tensor], count: int
) -> list[torch.Tensor]:
    """Train; ``masters`` are copies on the CPU that the optimizer updates, if it does not update the model itself."""
    parameters = list(model.parameters())
    generator = torch.Generator().manual_seed(9)
    losses = []
    for _ in range(count):
        x = torch.randn(24, 32, generator=generator).to(parameters[0].device, parameters[0].dtype)
        loss = model(x).float().square().mean()
        loss.backward()
        update(adamw, masters, parameters)
        model.zero_grad()
        losses.append(loss.detach().cpu())
    return losses


class Late:
    """Lets each copy run only when somebody waits for it, or for a collective: the latest that is allowed."""

    def __init__(self, gpu: standin.Gpu, patch: pytest.MonkeyPatch) -> None:
        held: list[tuple[CopyEvent, CopyStream, Any, tuple[Any, ...]]] = []  # in the order of issue
        copy, block, synchronize = (
            CopyStream.copy,
            CopyEvent.block,
            CopyEvent.synchronize,
        )
        wait = DeviceWork.wait
        self.copies = 0

        def late_copy(mine: CopyStream, pairs: Any, *after: Any, **options: Any) -> CopyEvent:
            if mine._stream is None:  # of a parameter that lies on the host
                return copy(mine, pairs, *after, **options)
            with mine._stream:
                gate = gpu.hold()
            done = copy(mine, pairs, *after, **options)
            held.append((done, mine, gate, after))
            self.copies += 1
            return done

        def let(done: CopyEvent) -> None:
            """Open the gates of a copy, of those before it on its stream, and of what these come after."""
            found = next((each for each in held if each[0] is done), None)
            if found is None:
                return
            upto = held.index(found) + 1
            mine = [each for each in held[:upto] if each[1] is found[1]]
            for each in mine:
                held.remove(each)
                each[2].open()
            for each in mine:
                for before in each[3]:
                    let(before)

        def let_all() -> None:
            while held:
                let(held[-1][0])

        patch.setattr(CopyStream, "copy", late_copy)
        patch.setattr(DeviceWork, "wait", lambda work: (let_all(), wait(work))[1])
        patch.setattr(CopyEvent, "block", lambda done: (let(done), block(done))[1])
        patch.setattr(CopyEvent, "synchronize", lambda done: (let(done), synchronize(done))[1])


def trained(folder: Path) -> bool:
    gpu = standin.install(folder)
    torch.set_num_threads(1)
    order_of_copies(gpu)
    optimizer.PIECE, tier.RUN, activations.SMALLEST, activations.AHEAD = 640, 50_000, 256, 8192
    settings: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
    for dtype in (torch.float32, torch.bfloat16):
        plain = model_of(dtype).to("standin")
        masters = [parameter.detach().cpu().float().requires_grad_() for parameter in plain.parameters()]
        oracle = torch.optim.AdamW(masters, fused=True, **settings)
        expected = steps(plain, oracle, masters, 4)
        for late in (False, True):
            with pytest.MonkeyPatch.context() as patch:
                seen = Late(gpu, patch) if late else None
                model = model_of(dtype).to("standin")
                offload = axo.Offload(activations="all")
                offload.attach(model)
                adamw = offload.adamw(model.parameters(), **settings)
                assert all(
                    value.is_pinned() for state in adamw.state.values() for key, value in state.items() if key != "step"
                )
                got = steps(model, adamw, [], 4)
                assert [loss.item() for loss in got] == [loss.item() for loss in expected]
                for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                    assert torch.equal(mine.cpu(), theirs.cpu())
                assert seen is None or seen.copies > 4 * 3 * 4
    with pytest.raises(ValueError, match="dir='x' is of CPU ranks; a rank on standin:0 offloads to pinned memory"):
        axo.Offload(dir="x").adamw(model.parameters())
    assert not gpu.violations()
    return True


@pytest.mark.slow
def test_copies_run_on_streams_of_their_own_neither_too_early_nor_too_late(tmp_path: Path) -> None:
    standin.build()
    run_ranks(trained, 1, tmp_path, timeout=120)


# --- parameters ---------------------------------------------------------------------------------------------------


def on_a_grid(
    comms: Any, offload: axo.Offload | None, dtype: torch.dtype, gather_cache: str, folder: Path
) -> tuple[list[float], list[torch.Tensor]]:
    """Losses of three steps of two micro-batches, the first of them in two halves, and the parameters; after two all is
    saved, changed, and loaded. Without ``offload`` the optimizer is torch's, on copies of the parameters."""
    torch.manual_seed(1000 + comms.rank)  # only rank 0's matters
    with torch.device("meta"):
        model: Any = gpt.GPT(gpt.Config(**gpt.LLAMA | {"bias": True})).to(dtype)
    axo.parallelize(model, comms, gather_cache=gather_cache)
    axo.init_weights(model, model._init_weights, offload=offload)
    parameters, settings = list(model.parameters()), {"lr": 1e-2, "weight_decay": 0.1}
    if offload is None:
        masters = [parameter.detach().cpu().float().requires_grad_() for parameter in parameters]
        adamw: torch.optim.Optimizer = torch.optim.AdamW(masters, fused=True, **settings)
    else:
        masters, adamw = [], offload.adamw(parameters, **settings)
        cut = [parameter.placement.axes >= {"z"} for parameter in parameters]
        assert [parameter.is_pinned() for parameter in parameters] == cut and True in cut and False in cut
        blocks = {each.untyped_storage().data_ptr() for each in parameters if each.is_pinned()}
        assert len(blocks) < sum(cut) / 2  # several lie in one, which torch makes of a power of two
        assert all(each.device.type == ("cpu" if own else "standin") for each, own in zip(parameters, cut, strict=True))
    losses = []
    for step in range(3):
        for half in range(2):
            ids, targets = (my_rows(comms, part) for part in gpt.batch(model.config, 2 * step + half))
            for number, rows in enumerate(torch.arange(len(ids)).chunk(1 + (half == 0))):
                logits = model(ids[rows].to(comms.device))
                loss = axo.nn.cross_entropy(logits, targets[rows].to(comms.device), comms=comms)
                if half == 0 and number == 0:
                    with axo.no_sync(model):
                        loss.backward()
                else:
                    loss.backward()
                losses.append(loss.item())
        axo.clip_grad_norm_(parameters, 0.5)
        update(adamw, masters, parameters)
        model.zero_grad()
        if offload is not None and step == 1:
            pointers = [parameter.data_ptr() for parameter in parameters]
            axo.checkpoint.save(folder, model, adamw, step=2)
            with torch.no_grad():
                for parameter in parameters:
                    parameter.fill_(7.0)
            axo.checkpoint.load(folder, model, adamw)
            assert pointers == [parameter.data_ptr() for parameter in parameters]
    return losses, [parameter.detach().cpu() for parameter in parameters]


def shards_on_the_host(folder: Path) -> bool:
    gpu = standin.install(folder)
    torch.set_num_threads(1)
    optimizer.PIECE = 640
    comms = axo.connect("1x1x2x1", device="standin")
    for dtype, gather_cache in ((torch.float32, "none"), (torch.bfloat16, "all")):
        expected, values = on_a_grid(comms, None, dtype, gather_cache, folder)
        for late in (False, True) if dtype == torch.float32 else (True,):
            with pytest.MonkeyPatch.context() as patch:
                seen = Late(gpu, patch) if late else None
                offload = axo.Offload(parameters=True)
                saved = folder / f"checkpoint-{dtype}-{late}"
                losses, mine = on_a_grid(comms, offload, dtype, gather_cache, saved)
                assert losses == expected, (dtype, late)
                assert all(torch.equal(a, b) for a, b in zip(mine, values, strict=True)), (dtype, late)
                assert seen is None or seen.copies > 3 * 2 * 2 * 10
    layer = axo.nn.Linear(8, 6, comms=comms, device=comms.device)
    whole = layer.full_weight()
    axo.Offload(parameters=True).move_in(layer.parameters())
    assert layer.weight.is_pinned() and torch.equal(layer.full_weight().cpu(), whole.cpu())
    rows = torch.ones(2, 8, device=comms.device)
    with pytest.MonkeyPatch.context() as patch:
        Late(gpu, patch)
        out = layer(rows)  # of no attached model: it waits for its gather
        (grad,) = torch.autograd.grad(out.sum(), layer.weight)
        assert torch.equal(out.cpu(), torch.nn.functional.linear(rows.cpu(), whole.cpu(), layer.bias.detach().cpu()))
    with pytest.raises(ValueError, match="to_dtensor: the parameter lies on cpu and its grid is on standin"):
        axo.to_dtensor(layer.weight)
    offload = axo.Offload(parameters=True)
    layer.bfloat16()  # its weight leaves the pinned memory, and its optimizer takes it back
    assert not layer.weight.is_pinned()
    adamw, biases = offload.adamw([layer.weight]), offload.adamw([layer.bias])  # z cuts no bias, but a weight
    assert layer.weight.is_pinned() and all(adamw.state[layer.weight][key].is_pinned() for key in optimizer.MOMENTS)
    scaler = axo.GradScaler(init_scale=4.0, comms=comms)
    scaler.scale(layer(rows.bfloat16()).sum()).backward()
    both = torch.optim.SGD(layer.parameters())
    scaler.unscale_(both)
    assert layer.weight.grad.eq(2).all() and biases.param_groups[0]["params"] == [layer.bias]
    both = torch.optim.AdamW(layer.parameters(), fused=True)
    with pytest.raises(ValueError, match=r"a fused AdamW cannot take gradients on (cpu and standin|standin and cpu)"):
        scaler.unscale_(both)
    forgotten: Any = axo.nn.Linear(8, 6, comms=comms, device="cpu")
    with pytest.raises(ValueError, match="the tensor is on cpu; this communicator moves memory of standin"):
        forgotten(rows)
    assert grad.device.type == "cpu" and torch.equal(grad, torch.full((3, 8), 2.0))
    other: Any = axo.nn.Linear(8, 6, comms=comms, device=comms.device)
    other.weight.placement = dataclasses.replace(other.weight.placement, zero=object())
    with pytest.raises(ValueError, match="with zero on a GPU is not supported; leave zero out"):
        axo.Offload(parameters=True).move_in(other.parameters())
    with pytest.raises(ValueError, match=r"on standin:\d is of weights that the axis z cuts, and none is; use"):
        axo.Offload(parameters=True).adamw(nn.Linear(3, 3).to("standin").parameters())
    assert not gpu.violations()
    return True


@pytest.mark.slow
def test_shards_on_the_host_go_up_with_their_gather_and_gradients_come_down(tmp_path: Path) -> None:
    """Oracle: the same model with nothing offloaded, on the stand-in, and torch's AdamW on the CPU: to the bit."""
    standin.build()
    run_ranks(shards_on_the_host, 2, tmp_path, timeout=200)
