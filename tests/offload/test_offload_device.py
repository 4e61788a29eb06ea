"""Offload of a GPU to pinned host memory, on the stand-in GPU.

Its copies to and from pinned memory run in the order of their stream while the host goes on, and its freed memory is
torn up in the order of the stream that made it.

Oracle: the same model on the stand-in with nothing offloaded, and torch's AdamW on the CPU on copies of its parameters;
values are equal to the bit. What comes too early or too late shows as another value. See tests/standin.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import axo
from axo.offload import activations, lane, optimizer
from tests import standin
from tests.launcher import run_ranks


def pinned(*shape: int) -> torch.Tensor:
    return torch.full(shape, -1.0, pin_memory=True)


def order_of_copies(gpu: standin.Gpu) -> None:
    """A copy begins after what the compute stream held, on another stream; the host and the compute stream go on."""
    device = torch.device("standin", 0)
    out, back = lane.Lane(device), lane.Lane(device)
    tensor, source, host = torch.zeros(1000, device=device), torch.ones(1000, device=device), pinned(1000)
    gpu.synchronize()
    gate = gpu.hold()  # on the compute stream
    tensor.copy_(source)
    left = out.copy([(host, tensor)])
    again = pinned(1000)
    other = back.copy([(again, source)])  # this lane follows the compute stream too
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
    assert not out._held and not back._held


def model_of(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(3)
    blocks = [nn.Sequential(nn.Linear(32, 100), nn.GELU(), nn.Linear(100, 32), nn.LayerNorm(32)) for _ in range(3)]
    return nn.Sequential(*blocks).to(dtype)


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
        for master, parameter in zip(masters, parameters, strict=False):
            assert parameter.grad is not None
            master.grad = parameter.grad.cpu().float()
        adamw.step()
        with torch.no_grad():
            for master, parameter in zip(masters, parameters, strict=False):
                parameter.copy_(master)
        model.zero_grad()
        losses.append(loss.detach().cpu())
    return losses


class Late:
    """Lets each copy run only when somebody waits for it: the latest that is allowed."""

    def __init__(self, gpu: standin.Gpu, patch: pytest.MonkeyPatch) -> None:
        held: list[tuple[lane.Done, lane.Lane, Any, tuple[Any, ...]]] = []  # in the order of issue
        copy, block, synchronize = lane.Lane.copy, lane.Done.block, lane.Done.synchronize
        self.copies = 0

        def late_copy(mine: lane.Lane, pairs: Any, *after: Any) -> lane.Done:
            with mine._stream:  # type: ignore[union-attr]
                gate = gpu.hold()
            done = copy(mine, pairs, *after)
            held.append((done, mine, gate, after))
            self.copies += 1
            return done

        def let(done: lane.Done) -> None:
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

        patch.setattr(lane.Lane, "copy", late_copy)
        patch.setattr(lane.Done, "block", lambda done: (let(done), block(done))[1])
        patch.setattr(lane.Done, "synchronize", lambda done: (let(done), synchronize(done))[1])


def trained(folder: Path) -> bool:
    gpu = standin.install(folder)
    torch.set_num_threads(1)
    order_of_copies(gpu)
    optimizer.PIECE, optimizer.RUN, activations.SMALLEST, activations.AHEAD = 640, 50_000, 256, 8192
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
