"""The transformer that ``axo bench step`` trains, and who trains it: Axo on a grid, and torch's own schemes.

One module serves all: separate q, k and v projections (so that DTensor's column plan is exact) and no re-layout; heads
are counted from what a projection gives. Every contestant starts from the same weights and gets the same rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Sizes:
    """The model and the rows of one rank."""

    hidden: int = 512
    layers: int = 4
    heads: int = 8
    vocab: int = 512
    seq_len: int = 128
    rows: int = 8
    precision: str = "32-true"
    recompute: bool = False

    @property
    def tokens(self) -> int:
        return self.rows * self.seq_len


class Block(nn.Module):
    """x + proj(attention(norm(x))); x + down(gelu(up(norm(x)))). ``share`` of the heads and of the inner width."""

    def __init__(self, hidden: int, heads: int, share: int = 1) -> None:
        super().__init__()
        self.head_size = hidden // heads
        self.norm_1, self.norm_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.q, self.k, self.v = (nn.Linear(hidden, hidden // share, bias=False) for _ in range(3))
        self.proj = nn.Linear(hidden // share, hidden, bias=False)
        self.up = nn.Linear(hidden, 4 * hidden // share, bias=False)
        self.down = nn.Linear(4 * hidden // share, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm_1(x)
        q, k, v = (self._heads(project(y)) for project in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(*x.shape[:2], -1, self.head_size).transpose(1, 2)


class Transformer(nn.Module):
    """Token ids (rows, seq_len) -> logits."""

    def __init__(self, sizes: Sizes, share: int = 1) -> None:
        super().__init__()
        self.recompute = sizes.recompute
        self.embed = nn.Embedding(sizes.vocab, sizes.hidden)
        self.blocks = nn.ModuleList(Block(sizes.hidden, sizes.heads, share) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.hidden)
        self.head = nn.Linear(sizes.hidden, sizes.vocab // share, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(self.norm(x))


def serial(sizes: Sizes, device: torch.device, share: int = 1) -> Transformer:
    """The model with everybody's initial weights, drawn on the device: a CPU needs ten seconds for a large one's."""
    torch.manual_seed(0)
    with device:
        return Transformer(sizes, share)


class Contestant:
    """A model, its optimizer and its loss, on this rank.

    Args:
        name: Its row in the table.
        model: Ready to run.
        sizes: What it runs on.
        loss: (logits, targets) -> scalar, the mean over this rank's rows.
        blocked: Seconds spent blocked in communication so far; None: not known.
        autocast: Whether the compute dtype comes from autocast; FSDP2 has its own.
        optimized: What the optimizer works on; None: all parameters.
        capturable: Whether a graph can hold its steps.
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        sizes: Sizes,
        loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
        blocked: Callable[[], float] | None = None,
        autocast: bool = True,
        optimized: list[torch.Tensor] | None = None,
        capturable: bool = False,
    ) -> None:
        self.name, self.model, self.blocked = name, model, blocked
        self._loss = loss or (lambda logits, targets: F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()))
        kinds: dict[type, list[torch.Tensor]] = {}  # it takes no DTensors beside plain tensors in one group
        for parameter in optimized or model.parameters():
            kinds.setdefault(type(parameter), []).append(parameter)
        groups = [{"params": kind} for kind in kinds.values()]
        capturable &= torch.cuda.is_available()  # torch refuses it for a CPU's parameters
        self._optimizer = torch.optim.AdamW(groups, lr=1e-3, fused=True, capturable=capturable)
        self._autocast = autocast and sizes.precision == "bf16-mixed"

    def step(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """One optimizer step; the loss of this rank's rows."""
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=self._autocast):
            logits = self.model(ids)
        loss = self._loss(logits, targets)
        del logits  # else they are there until the end of the step
        loss.backward()
        self._optimizer.step()
        self.model.zero_grad(set_to_none=True)
        return loss.detach()


def axo_model(sizes: Sizes, comms: Any, overlap: Any = None) -> Transformer:
    """The serial model with Axo's layers in it, normal and transposed in turn; ``overlap``: an ``axo.Overlap``."""
    import axo

    model = serial(sizes, comms.device)

    def swap(parent: nn.Module, name: str, new: Any) -> None:
        new.load_serial(getattr(parent, name))
        setattr(parent, name, new)

    swap(model, "embed", axo.nn.Embedding(sizes.vocab, sizes.hidden, comms=comms))
    for block in model.blocks:
        for name in ("q", "k", "v", "proj", "up", "down"):
            old = getattr(block, name)
            transposed = name in ("proj", "down")
            new = axo.nn.Linear(old.in_features, old.out_features, False, comms=comms, transposed=transposed)
            swap(block, name, new)
        axo.nn.share_input(block.q, block.k, block.v)
        for name in ("norm_1", "norm_2"):
            swap(block, name, axo.nn.LayerNorm(sizes.hidden, comms=comms))
    swap(model, "norm", axo.nn.LayerNorm(sizes.hidden, comms=comms))
    swap(model, "head", axo.nn.Linear(sizes.hidden, sizes.vocab, False, comms=comms))
    axo.overlap.attach(model, comms, overlap)
    return model


def axo_contestant(name: str, sizes: Sizes, comms: Any, overlap: Any = None, capturable: bool = False) -> Contestant:
    """Axo on the grid of ``comms``; ``overlap``: an ``axo.Overlap``, default: everything on."""
    import axo

    loss_fn = axo.nn.CrossEntropyLoss(comms=comms, columns=sizes.vocab)

    def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return loss_fn(logits.flatten(0, 1), targets.flatten())

    def blocked() -> float:
        return sum(comms.blocked_seconds.values())

    return Contestant(name, axo_model(sizes, comms, overlap), sizes, loss, blocked, capturable=capturable)


def fsdp2(sizes: Sizes, group: Any, device: torch.device) -> tuple[nn.Module, bool]:
    """FSDP2, a unit a block; under bf16-mixed it gathers and reduces in bf16 as Axo does."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = serial(sizes, device)
    mesh = dist.DeviceMesh.from_group(group, device.type, mesh_dim_names=("z",))
    mixed = sizes.precision == "bf16-mixed"
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16) if mixed else MixedPrecisionPolicy()
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh, reshard_after_forward=False, mp_policy=policy)
    return model, not mixed


def ddp(sizes: Sizes, group: Any, device: torch.device) -> tuple[nn.Module, bool]:
    """DistributedDataParallel as it comes: fp32 gradients in buckets of 25 MiB."""
    return nn.parallel.DistributedDataParallel(serial(sizes, device), process_group=group), True


def dtensor(sizes: Sizes, group: Any, device: torch.device) -> tuple[nn.Module, bool]:
    """torch's column / row plan."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

    model = serial(sizes, device)
    mesh = dist.DeviceMesh.from_group(group, device.type, mesh_dim_names=("x",))
    column, row = ColwiseParallel, RowwiseParallel
    for block in model.blocks:
        plan: dict[str, ParallelStyle] = {name: column() for name in ("q", "k", "v", "up")}
        plan |= {name: row() for name in ("proj", "down")}
        parallelize_module(block, mesh, plan)
    parallelize_module(model, mesh, {"head": column(output_layouts=Replicate())})
    return model, True


RIVALS = {"z": ("FSDP2", fsdp2), "x": ("DTensor", dtensor), "data": ("DDP", ddp)}


def rival(axis: str, sizes: Sizes, transport: str, group: Any, device: torch.device) -> Contestant:
    """torch's scheme over one transport."""
    name, build = RIVALS[axis]
    model, autocast = build(sizes, group, device)
    return Contestant(f"{name} {transport}", model, sizes, autocast=autocast)


def alone(axis: str, ranks: int, sizes: Sizes, device: torch.device) -> Contestant:
    """The same work of one rank without communication, in plain torch.

    For x the model has a part of the heads and of the inner width; for z the optimizer has a part of the weights.
    """
    share = ranks if axis == "x" else 1
    model = serial(sizes, device, share)

    def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten() % logits.shape[-1])

    weights: list[torch.Tensor] = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    return Contestant("no communication", model, sizes, loss, optimized=weights[::ranks] if axis == "z" else None)
