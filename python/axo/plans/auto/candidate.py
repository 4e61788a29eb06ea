"""The layers of a model that may be split, and what becomes of each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from axo.arrangement import AXONN, Arrangement
from axo.grid import Grid
from axo.nn.init import tied_parameters
from axo.plans.auto.conv1d import is_conv1d
from axo.plans.auto.patterns import Override


@dataclass
class Decision:
    """What becomes of a layer; ``options`` are further arguments of its parallel class."""

    kind: str
    split_in: bool = False
    split_out: bool = False
    why: str = ""
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(eq=False)
class SplitCandidate:
    """A layer that may be split.

    Attributes:
        name, module: In the serial model.
        type: "linear", "conv1d", "conv2d" or "embedding".
        into, out: Features; ``into`` None: an embedding.
        override: What the user asks for it.
        decision: What becomes of it; None: nothing is decided yet.
    """

    name: str
    module: Any
    type: str
    into: int | None
    out: int
    override: Override | None = None
    decision: Decision | None = None

    def axes(self, kind: str, arrangement: Arrangement = AXONN) -> tuple[str, str]:
        """The axes that split what comes in and what goes out."""
        # An embedding has its vocabulary over x and its features over the stream's axis.
        return arrangement.features(self.type == "embedding" or kind == "transposed")

    def keep(self, why: str) -> None:
        """Leave it serial."""
        self.decision = Decision("replicate", why=why)

    @property
    def decided(self) -> Decision:
        assert self.decision is not None, f"{self.name}: nothing is decided"
        return self.decision


def find_candidates(model: nn.Module, grid: Grid, arrangement: Arrangement) -> list[SplitCandidate]:
    """The layers of ``model``; those that must stay serial are decided."""
    candidates, readers = list[SplitCandidate](), dict[str, str]()
    for name, module in model.named_modules():
        candidate = _candidate(name, module)
        if candidate is not None:
            inside = next((kind for prefix, kind in readers.items() if name.startswith(prefix)), None)
            if why := _why_serial(candidate, inside, grid, arrangement):
                candidate.keep(why)
            candidates.append(candidate)
        elif type(module).__module__.startswith("torch.nn.") and any(module.children()):
            if not isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict):
                readers[f"{name}."] = type(module).__name__
    for group in tied(model, candidates):
        biased = any(c is not None and c.type == "linear" and c.module.bias is not None for c in group)
        if not is_table_with_heads(group) or (arrangement.square and biased):  # a bias does not lie as a table
            for owner in filter(None, group):
                owner.keep("shares its weight")
    return candidates


def _candidate(name: str, module: Any) -> SplitCandidate | None:
    if type(module) is nn.Linear:
        return SplitCandidate(name, module, "linear", module.in_features, module.out_features)
    if type(module) is nn.Conv2d:
        return SplitCandidate(name, module, "conv2d", module.in_channels, module.out_channels)
    if type(module) is nn.Embedding:
        return SplitCandidate(name, module, "embedding", None, module.embedding_dim)
    return SplitCandidate(name, module, "conv1d", module.nx, module.nf) if is_conv1d(module) else None


def _why_serial(candidate: SplitCandidate, inside: str | None, grid: Grid, arrangement: Arrangement) -> str:
    module, own = candidate.module, set(candidate.module._parameters)
    if not "weight" in own <= {"weight", "bias"} or module._buffers or "forward" in module.__dict__:
        return "it has parameters, buffers or a forward of its own (weight_norm, pruning, ...)"
    if not module.weight.is_floating_point():
        return f"its weight is {module.weight.dtype}"
    if inside:
        return f"inside a torch.nn.{inside}, which reads its layers' weights itself"
    if candidate.type == "conv2d" and module.groups > 1 and grid.x * grid.y > 1:
        return f"groups={module.groups}: a group's channels must meet on one rank"
    if candidate.type in ("conv1d", "conv2d") and arrangement.square:
        return f"algorithm {arrangement.name!r} has no {candidate.type}"
    if candidate.type == "embedding" and (module.max_norm or module.sparse or module.scale_grad_by_freq):
        return "max_norm, sparse or scale_grad_by_freq"
    return ""


def tied(model: nn.Module, candidates: list[SplitCandidate]) -> list[list[SplitCandidate | None]]:
    """The owners of each weight that several modules share and a layer among them; None stands for any other module."""
    by_module = {c.module: c for c in candidates}
    groups = ([by_module.get(module) for module, _ in owners] for owners in tied_parameters(model).values())
    return [group for group in groups if any(group)]


def is_table_with_heads(group: list[SplitCandidate | None]) -> bool:
    """Whether it is an embedding, and linear layers beside it."""
    types = sorted(c.type if c is not None else "other" for c in group)
    return types == ["embedding"] + ["linear"] * (len(types) - 1)
