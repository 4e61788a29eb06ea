"""Attention split by heads, as its table (``axo.plans.auto.families``) says.

The module runs its own forward on H/Gx of its H heads: first projections are normal, the last is transposed, and what
counts heads is divided. Ranks along x share a group of keys and values where there are fewer groups than ranks. Weights
that all heads share (norms of a head's queries and keys) have gradients summed over x. (With Tesseract, y for x.)

A form is tried out before it is used: on random weights and inputs the shares of all ranks, one after the other, must
add up to the whole. So heads that look at each other, or sizes that the table does not name, leave a module whole.

Not here: head masks, ``output_attentions`` (gives this rank's heads).
"""

from __future__ import annotations

import copy
import inspect
import itertools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from axo.comm.connect import Communicators
from axo.nn.randomness import SharedRandomness
from axo.nn.replicated import replicate
from axo.placement import check_divides
from axo.plans.auto.candidate import Decision, SplitCandidate
from axo.plans.auto.families import Heads, at, table_of
from axo.plans.auto.hugging_face import refuse_whole_heads
from axo.plans.auto.regions import graph_of, own_random
from axo.plans.heads import kv_copies
from axo.plans.replace import hooks_of

NO_TABLE = "no table of heads for"


@dataclass(frozen=True)
class Attention:
    """How one attention module is split by heads.

    Attributes:
        heads: Its table.
        layers: Path -> (kind, options of the layer): first projections are whole->split, the last split->whole.
        attributes: Path -> what its forward reads, of this rank's heads.
        norms: Children that normalise single heads, all by the same weights.
        key_heads: How many heads of keys a rank computes.
    """

    heads: Heads
    layers: dict[str, tuple[str, dict[str, Any]]]
    attributes: dict[str, int]
    norms: tuple[str, ...] = ()
    key_heads: int = 0

    def install(self, module: nn.Module, name: str, comms: Communicators, grad_reduce: str) -> None:
        """Let ``module``, whose projections are parallel now, compute with this rank's heads."""
        inner, rows = comms.arrangement.inner, comms.arrangement.rows
        ranks = comms.grid.size(inner)
        for path, value in self.attributes.items():
            _set(module, path, value)
        if self.heads.form and ranks > 1:
            NarrowInput(module, self.heads, ranks)
        elif ranks > 1:
            refuse_whole_heads(module, name, self.key_heads)
        random = SharedRandomness(comms, (inner, *rows))
        random.attach(module)  # until the last projection: what it gives is on all ranks alike
        at(module, self.heads.last).register_forward_pre_hook(lambda layer, args: random.after(layer, args, None))
        for child in self.norms:
            replicate(module.get_submodule(child), comms, grad_reduce, sum_over=(inner,))


@dataclass
class Splitter:
    """Says how attention modules of one model are split.

    Args:
        ranks: Along the axis that splits heads.
        linear: The linear layers of the model that may be split.
    """

    ranks: int
    linear: dict[nn.Module, SplitCandidate]
    _tried: dict[str, str] = field(default_factory=dict)  # a form with its sizes -> why its shares do not add up

    def split(self, module: nn.Module, name: str) -> Attention | None:
        """How ``module``, called ``name``, is split; None: no table has it.

        Raises:
            ValueError: A table has it and it cannot be split, in words.
        """
        heads = table_of(module, name)
        if heads is None:
            return None
        attention = self._shares(module, name, heads)
        if heads.form:
            numbers = {key: value for key, value in vars(module).items() if isinstance(value, int | float)}
            kind = f"{type(module)} {module} {numbers}"
            if kind not in self._tried:
                self._tried[kind] = why_not(module, attention, self.ranks)
            if self._tried[kind]:
                raise ValueError(f"{name}: {self._tried[kind]}")
        return attention

    def _shares(self, module: nn.Module, name: str, heads: Heads) -> Attention:
        last, *first = (at(module, path) for path in (heads.last, *heads.first))
        if any(layer not in self.linear for layer in (last, *first)):
            raise ValueError(f"{name}: its projections are not all torch.nn.Linear or Conv1D that can be split")
        width = self.linear[last].into or 0
        head_size = getattr(module, "head_dim", None) or getattr(module, "head_size", None) or 1
        count = at(module, heads.counts[0]) if heads.counts else width // head_size
        if not isinstance(count, int) or count < 1 or width % count:
            raise ValueError(f"{name}: {count} heads do not share the {width} features that {heads.last} takes")
        check_divides(name, "query heads", count, "x", self.ranks)
        size, groups, layers = width // count, count, dict[str, tuple[str, dict[str, Any]]]()
        for path, layer in zip(heads.first, first, strict=True):
            out, options = self.linear[layer].out, {}
            if out % size or (len(first) == 1 and out % count):
                raise ValueError(f"{name}: {path} gives {out} features, which are no heads of {size}")
            if heads.blocks > 1:
                options = {"out_blocks": (out // heads.blocks,) * heads.blocks}
            elif out < width:
                groups = out // size
                copies = kv_copies(name, "key-value heads", groups, self.ranks)
                options = {"out_blocks": (out,), "out_copies": (copies,)} if copies > 1 else {}
            layers[path] = ("normal", options)
        layers[heads.last] = ("transposed", {})
        key_heads = max(groups // self.ranks, 1)
        attributes = {path: at(module, path) // self.ranks for path in heads.counts}
        if hasattr(module, "num_key_value_groups"):
            attributes["num_key_value_groups"] = count // self.ranks // key_heads
        norms = tuple(
            child
            for child, part in module.named_children()
            if "norm" in child and {p.numel() for p in part.parameters()} == {size}
        )
        _check_parameters(module, name, (*layers, *norms, *heads.after))
        return Attention(heads, layers, attributes, norms, key_heads)


def split_attention(
    model: nn.Module, candidates: list[SplitCandidate], axis: str, ranks: int
) -> tuple[dict[nn.Module, Attention], dict[nn.Module, str]]:
    """Decide the projections of attention that ``ranks`` along ``axis`` share, as tables say.

    Returns:
        The modules that are split; and for the layers of other attention, why it is whole.
    """
    linear = {c.module: c for c in candidates if c.type in ("linear", "conv1d") and c.decision is None}
    splitter = Splitter(ranks, linear)
    attentions, whole, done = dict[nn.Module, Attention](), dict[nn.Module, str](), set[nn.Module]()
    for name, module in model.named_modules():
        own = [part for part in module.modules() if part in linear]
        if module in done or len(own) < 2:
            continue
        try:
            attention = splitter.split(module, name)
        except ValueError as error:
            whole |= dict.fromkeys(own, str(error))
            done |= set(module.modules())
            continue
        called = f"{type(module).__name__} {name.rpartition('.')[2]}".lower()
        if attention is None:
            if "attention" in called or "attn" in called:
                why = f"{name}: {NO_TABLE} {type(module).__name__}; one would save what these layers gather"
                whole |= dict.fromkeys(own, why)
            continue
        done |= set(module.modules())
        layers = [(linear[at(module, path)], *way) for path, way in attention.layers.items()]
        if any(not _may_be_split(layer, kind) for layer, kind, _ in layers):
            continue  # easy mode: the user says otherwise, or looks at whole activations
        attentions[module] = attention
        for layer, kind, options in layers:
            layer.decision = Decision(kind, kind != "normal", kind == "normal", f"heads over {axis}", options)
    return attentions, whole


def _may_be_split(layer: SplitCandidate, kind: str) -> bool:
    asked = layer.override
    return not hooks_of(layer.module) and (asked is None or (asked.kind == kind and asked.split_in is None))


def _check_parameters(module: nn.Module, name: str, known: tuple[str, ...]) -> None:
    """Refuse parameters that no table names: each rank would have the gradient of its heads."""
    for path, _ in module.named_parameters():
        if not any(path.startswith(f"{part}.") for part in known):
            raise ValueError(f"{name}: no table says how heads share its parameter {path}")


class NarrowInput:
    """Hooks by which a forward that reads sizes off its input sees that of a module of this rank's heads alone.

    It gets a part of the features, of which it may use the shape; its first projections get all of them.
    """

    def __init__(self, module: nn.Module, heads: Heads, ranks: int) -> None:
        self._ranks = ranks
        self._whole: torch.Tensor | None = None
        module.register_forward_pre_hook(self._narrow, with_kwargs=True)
        for path in heads.first:
            at(module, path).register_forward_pre_hook(self._widen)
        module.register_forward_hook(self._forget, always_call=True)

    def _narrow(self, module: nn.Module, args: Any, named: dict[str, Any]) -> Any:
        whole: torch.Tensor = [*args, *named.values()][0]
        self._whole = whole
        return (whole[..., : whole.shape[-1] // self._ranks],), {}

    def _widen(self, layer: nn.Module, args: Any) -> Any:
        return self._whole

    def _forget(self, *_: Any) -> None:
        self._whole = None


def why_not(module: nn.Module, attention: Attention, ranks: int) -> str:
    """Why the shares of ``ranks`` are not the whole of ``module``, in words; empty: they are."""
    if len(inspect.signature(module.forward).parameters) != 1:
        return "its forward takes more than one tensor"
    if any(hooks_of(part) for part in module.modules()):
        return "hooks see its activations"
    if any(graph_of(module, set(module.children()), training) is None for training in (False, True)):
        return "its forward cannot be traced (control flow on values)"
    try:
        with own_random(), torch.no_grad():
            return _trial(module, attention, ranks)
    except Exception as error:  # whatever the module's own code raises
        return f"its forward cannot run on some of its heads: {type(error).__name__}: {error}"[:200]


def _trial(module: nn.Module, attention: Attention, ranks: int) -> str:
    torch.default_generator.manual_seed(0)  # all ranks come to the same result
    weights = {id(p): nn.Parameter(torch.randn(p.shape).double() / p.shape[-1] ** 0.5) for p in module.parameters()}
    whole, *shares = (copy.deepcopy(module, dict(weights)).to("cpu", torch.double) for _ in range(1 + ranks))
    for rank, share in enumerate(shares):
        _cut(share, attention, rank, ranks)
    for training, scale in itertools.product((False, True), (1, 30)):
        x = scale * torch.randn(2, 7, at(module, attention.heads.first[0]).in_features, dtype=torch.double)
        before, expected = torch.get_rng_state(), whole.train(training)(x)
        if training and not torch.equal(before, torch.get_rng_state()):
            continue  # each head draws its own
        if not torch.allclose(sum(share.train(training)(x) for share in shares), expected, 1e-5, 1e-5):
            return "the shares of its heads do not add up to the whole"
    return ""


def _cut(share: nn.Module, attention: Attention, rank: int, ranks: int) -> None:
    """Leave a rank's heads of a whole module; the bias of the last projection is added by the first rank."""
    heads = attention.heads
    for path in heads.first:
        layer = at(share, path)
        for name, whole in list(layer.named_parameters()):
            rows = whole.unflatten(0, (heads.blocks, -1)).chunk(ranks, 1)[rank].flatten(0, 1)
            setattr(layer, name, nn.Parameter(rows))
    layer = at(share, heads.last)
    layer.weight = nn.Parameter(layer.weight.chunk(ranks, 1)[rank])
    if layer.bias is not None and rank:
        layer.bias = None
    for path, value in attention.attributes.items():
        _set(share, path, value)
    NarrowInput(share, heads, ranks)


def _set(module: nn.Module, path: str, value: int) -> None:
    parent, _, name = path.rpartition(".")
    setattr(module.get_submodule(parent), name, value)
