"""Which activations may stay split between layers: what torch.fx can prove about a model's forward.

A *region* is a set of activations of one width. Layers make them, operations that treat every feature alike (or keep
channels apart) change them, and layers take them; nothing else reads them. So each rank may hold a part of the features
only, if all layers that make them split their output, and all that take them their input, over the same axis.

Each module is traced in training and in evaluation mode, with layers as leaves. Where that fails, its children are
traced; the largest modules that can be traced count. A module cannot be traced if its control flow depends on values,
or if it does something else where an optional argument is missing. There, and where an activation reaches an operation
that is not listed here, nothing is proved and activations are whole. Tracing runs the module's Python code, with
stand-ins for tensors.
"""

from __future__ import annotations

import inspect
import operator
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import fx, nn

from axo.nn.init import tied_parameters
from axo.overlap.autograd import version_of

FEATURES, CHANNELS = "features", "channels"  # the last dim, or the third from the end

_ELEMENTWISE_MODULES = (
    *(nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.ELU, nn.CELU, nn.SELU, nn.LeakyReLU, nn.Softplus),
    *(nn.Hardswish, nn.Hardtanh, nn.Hardsigmoid, nn.Mish, nn.LogSigmoid, nn.Softsign, nn.Identity, nn.Dropout),
)
_CHANNEL_MODULES = (nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d, nn.Upsample)
_ELEMENTWISE = {
    *(operator.add, operator.sub, operator.mul, operator.truediv, operator.pow, operator.neg, operator.pos),
    *(torch.add, torch.sub, torch.mul, torch.div, torch.pow, torch.neg, torch.abs, torch.exp, torch.square, torch.sqrt),
    *(torch.relu, torch.tanh, torch.sigmoid, torch.erf, torch.clamp, torch.maximum, torch.minimum),
    *(torch.sin, torch.cos),
    *(F.relu, F.relu6, F.gelu, F.silu, F.tanh, F.sigmoid, F.elu, F.celu, F.selu, F.leaky_relu, F.softplus, F.mish),
    *(F.hardswish, F.hardtanh, F.hardsigmoid, F.logsigmoid, F.softsign),
}
_ELEMENTWISE_METHODS = {
    *("add", "sub", "mul", "div", "pow", "neg", "abs", "exp", "square", "sqrt", "relu", "tanh", "sigmoid", "erf"),
    *("clamp", "contiguous", "clone", "float"),
}
_BY_CHANNEL = {F.max_pool2d, F.avg_pool2d, F.adaptive_avg_pool2d, F.adaptive_max_pool2d, F.interpolate}


@dataclass(frozen=True)
class Size:
    """What tracing needs to know of a layer: its features in and out, and which dim holds them."""

    into: int | None
    out: int
    kind: str = FEATURES


@dataclass
class Region:
    """Activations that may stay split: the layers that make and take them, their width, what is among them."""

    makers: set[nn.Module] = field(default_factory=set)
    takers: set[nn.Module] = field(default_factory=set)
    dropouts: set[nn.Module] = field(default_factory=set)
    norms: set[nn.GroupNorm] = field(default_factory=set)
    width: int = 0


@dataclass
class Found:
    """What tracing says of a model.

    Attributes:
        regions: Activations that may stay split.
        read: The layers whose parameters other modules read themselves.
        whole: For the other layers, why their activations are whole, in words.
        one_way: The whole model could be traced, so that it calls the same layers whatever the values
            are, and drew no random numbers of its own, which may choose layers.
    """

    regions: list[Region]
    read: set[nn.Module]
    whole: dict[nn.Module, str]
    one_way: bool


def find_regions(model: nn.Module, sizes: dict[nn.Module, Size], closed: set[nn.Module]) -> Found:
    """Find the regions of ``model``.

    Args:
        model: Serial.
        sizes: The layers that may be split.
        closed: Modules that are not looked into.
    """
    shared = {module for owners in tied_parameters(model).values() for module, _ in owners}
    flow = _Flow(sizes, shared)
    with own_random() as any_drawn:
        roots = _roots(model, set(sizes), set(closed))
        drawn = any_drawn()
        for root in roots:
            for graph in root.graphs:
                flow.read(graph, root.module)
    one_way = [root.module for root in roots] == [model] and not drawn
    return Found(flow.regions(), flow.read_by_others, flow.reasons(), one_way)


@dataclass
class _Root:
    module: nn.Module
    graphs: list[fx.Graph]


def _roots(module: nn.Module, layers: set[nn.Module], closed: set[nn.Module]) -> list[_Root]:
    """The largest traceable modules within ``module``; those that are not traceable join ``closed``."""
    if module in layers or module in closed:
        return []
    below = [root for child in module.children() for root in _roots(child, layers, closed)]
    if module.__module__.startswith("torch.nn") and not isinstance(module, nn.Sequential):
        return below
    found: list[fx.Graph] = []
    for training in (True, False):
        if (graph := _graph_of(module, layers | closed, training)) is None:
            break
        found.append(graph)
    else:
        return [_Root(module, found)]
    closed.add(module)
    return below


class Tracer(fx.Tracer):
    """Traces a module with ``leaves`` as they are."""

    def __init__(self, leaves: set[nn.Module]) -> None:
        super().__init__()
        self.leaves = leaves

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return m in self.leaves or super().is_leaf_module(m, module_qualified_name)


@contextmanager
def in_mode(module: nn.Module, training: bool) -> Iterator[None]:
    """Put ``module`` into training or evaluation mode in this block; each child is as before behind it."""
    modes = {child: child.training for child in module.modules()}
    module.train(training)
    try:
        yield
    finally:
        for child, mode in modes.items():
            child.training = mode


@contextmanager
def own_random() -> Iterator[Callable[[], bool]]:
    """What is drawn in this block leaves no trace behind it, in torch or in Python; yields what says if any was."""
    before = torch.get_rng_state(), random.getstate()
    try:
        with torch.random.fork_rng(devices=[]):
            yield lambda: not torch.equal(before[0], torch.get_rng_state()) or before[1] != random.getstate()
    finally:
        random.setstate(before[1])


class Untouched:
    """Puts attributes, lists and buffers of ``module`` and its children back behind this block: tracing runs its code.

    ``changed`` says then whether there was anything to put back.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module, self.changed = module, False

    def __enter__(self) -> Self:
        modules = list(self._module.modules())
        self._attributes = [(module.__dict__, dict(module.__dict__)) for module in modules]
        self._tables = [(module._buffers, dict(module._buffers)) for module in modules]
        lists = (value for _, kept in self._attributes for value in kept.values() if isinstance(value, list))
        self._lists = [(value, list(value)) for value in lists]
        self._buffers = [(buffer, version_of(buffer), buffer.clone()) for buffer in self._module.buffers()]
        return self

    def __exit__(self, *error: object) -> None:
        for table, kept in (*self._attributes, *self._tables):
            if table.keys() != kept.keys() or any(table[key] is not value for key, value in kept.items()):
                self.changed = True
                table.clear()
                table.update(kept)
        for value, elements in self._lists:
            if len(value) != len(elements):
                self.changed, value[:] = True, elements
        for buffer, version, before in self._buffers:
            if version_of(buffer) != version:
                self.changed = True
                buffer.copy_(before)


def _graph_of(module: nn.Module, leaves: set[nn.Module], training: bool) -> fx.Graph | None:
    """The graph of ``module`` in one mode; None where tracing it would prove nothing."""
    hooks = module._forward_hooks or module._forward_pre_hooks
    if hooks or "forward" in module.__dict__ or not _plain_signature(module):
        return None
    try:
        with Untouched(module), in_mode(module, training):
            return Tracer(leaves).trace(module)
    except Exception:  # whatever the model's own code raises when it meets a stand-in
        return None


def _plain_signature(module: nn.Module) -> bool:
    """Whether forward takes nothing that may be left out: a stand-in would always take the way of what is given."""
    parameters = list(inspect.signature(module.forward).parameters.values())
    return all(p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty for p in parameters)


class _Flow:
    """Union-find over activations. Keys: (graph, node), and (layer, "in" or "out"), shared by all calls of a layer."""

    def __init__(self, sizes: dict[nn.Module, Size], shared: set[nn.Module]) -> None:
        self.sizes = sizes
        self.shared = shared  # modules whose parameters others have too
        self.parent: dict[Any, Any] = {}
        self.spoilt: dict[Any, str] = {}  # with the first reason
        self.dropouts: list[tuple[Any, nn.Module]] = []
        self.norms: list[tuple[Any, nn.GroupNorm]] = []
        self.kinds: dict[Any, str | None] = {}
        self.order: list[nn.Module] = []
        self.read_by_others: set[nn.Module] = set()

    def find(self, key: Any) -> Any:
        self.parent.setdefault(key, key)
        while self.parent[key] != key:
            self.parent[key] = self.parent[self.parent[key]]
            key = self.parent[key]
        return key

    def join(self, a: Any, b: Any) -> None:
        a, b = self.find(a), self.find(b)
        if a == b:
            return
        self.parent[a] = b
        if a in self.spoilt:
            self.spoilt.setdefault(b, self.spoilt[a])

    def spoil(self, why: str, *keys: Any) -> None:
        for key in keys:
            self.spoilt.setdefault(self.find(key), why)

    def read(self, graph: fx.Graph, root: nn.Module) -> None:
        """Add what one graph says."""
        modules = dict(root.named_modules())
        for node in graph.nodes:
            key, inputs = (id(graph), node), [(id(graph), other) for other in node.all_input_nodes]
            module = modules.get(node.target) if node.op == "call_module" else None
            if node.op == "get_attr":
                owner = modules.get(str(node.target).rpartition(".")[0])
                if owner in self.sizes:
                    self.read_by_others.add(owner)
            if module in self.sizes:
                self._layer(module, node, key, inputs)
                continue
            kind = self._kind_after(node, module, [self.kinds.get(other) for other in inputs])
            self.kinds[key] = kind
            if kind is None:
                self.spoil(_what(node, module), key, *inputs)
                continue
            for other in inputs:
                self.join(key, other)
            if isinstance(module, nn.Dropout):
                self.dropouts.append((key, module))
            if isinstance(module, nn.GroupNorm):
                self.join(key, (module, "through"))  # all its calls have one fate
                self.norms.append((key, module))

    def _layer(self, layer: nn.Module, node: fx.Node, key: Any, inputs: list[Any]) -> None:
        size = self.sizes[layer]
        self.order.append(layer)
        self.join(key, (layer, "out"))
        self.kinds[key] = size.kind
        plain = len(node.args) == 1 and len(inputs) == 1 and not node.kwargs
        if layer._forward_hooks or layer._forward_pre_hooks or not plain:
            why = "it is called with more than one tensor" if not plain else "hooks look at it"
            self.spoil(why, key, (layer, "in"), *inputs)
        elif size.into is not None:
            self.join(inputs[0], (layer, "in"))
            if self.kinds.get(inputs[0]) != size.kind:
                self.spoil("features and channels change places", inputs[0])

    def _kind_after(self, node: fx.Node, module: nn.Module | None, kinds: list[str | None]) -> str | None:
        """Which dim of the result holds the features, if they are still apart; None: nothing is known."""
        if not kinds or None in kinds or len(set(kinds)) > 1:
            return None
        kind = kinds[0]
        if node.op == "call_module":
            if module is None or module._forward_hooks or module._forward_pre_hooks:
                return None
            if type(module) in _ELEMENTWISE_MODULES:
                return kind
            if kind == CHANNELS and isinstance(module, nn.Flatten):
                return FEATURES if (module.start_dim, module.end_dim) == (1, -1) else None
            if type(module) is nn.GroupNorm:  # split where its groups divide over the axis (``decide``)
                plain = "forward" not in module.__dict__ and module not in self.shared
                return kind if kind == CHANNELS and plain else None
            return kind if kind == CHANNELS and type(module) in _CHANNEL_MODULES else None
        if node.op == "call_function":
            known: Callable[..., Any] | str = node.target
            elementwise, by_channel, name = known in _ELEMENTWISE, known in _BY_CHANNEL, getattr(known, "__name__", "")
        elif node.op == "call_method":
            elementwise, by_channel, name = node.target in _ELEMENTWISE_METHODS, False, str(node.target)
        else:
            return None
        if elementwise and _only_numbers(node):
            return kind
        if kind != CHANNELS:
            return CHANNELS if name == "unflatten" and _makes_channels(node) else None
        if by_channel:
            return kind
        return FEATURES if _flattens(node, name) else None

    def reasons(self) -> dict[nn.Module, str]:
        """For each layer whose activations are known to be seen whole: by what."""
        found = {}
        for layer in self.sizes:
            sides = {side: self.spoilt.get(self.find((layer, side)), "") for side in ("in", "out")}
            told = [f"{side}: {why}" for side, why in sides.items() if why]
            if layer not in self.order:
                told = ["no module around it can be traced (control flow on values, optional arguments)"]
            found[layer] = "; ".join(told) or "axes would not alternate, or a width does not divide"
        return found

    def regions(self) -> list[Region]:
        """The regions whose sizes agree, in the order in which their layers run."""
        found: dict[Any, Region] = {}
        for layer in dict.fromkeys(self.order):
            for side in ("in", "out"):
                if self.sizes[layer].into is None and side == "in":
                    continue
                region = found.setdefault(self.find((layer, side)), Region())
                (region.takers if side == "in" else region.makers).add(layer)
        for key, dropout in self.dropouts:
            home = self.find(key)
            if home in found:
                found[home].dropouts.add(dropout)
        for key, norm in self.norms:
            home = self.find(key)
            if home in found:
                found[home].norms.add(norm)
        return [region for key, region in found.items() if key not in self.spoilt and self._agree(region)]

    def _agree(self, region: Region) -> bool:
        widths = {self.sizes[layer].out for layer in region.makers}
        kinds = {self.sizes[layer].kind for layer in region.makers}
        if len(widths) != 1 or not region.takers:
            return False
        (region.width,) = widths
        kind = CHANNELS if CHANNELS in kinds else FEATURES  # both: features that became channels, one for one
        for layer in region.takers:
            size = self.sizes[layer]
            flattened = kind == CHANNELS and size.kind == FEATURES  # channel by channel: parts stay parts
            if (size.into or 0) % region.width or (size.into != region.width and not flattened):
                return False
        return True


def _what(node: fx.Node, module: nn.Module | None) -> str:
    """What sees the activation whole, in words."""
    if node.op == "placeholder":
        return "outside of what can be traced"
    if node.op == "output":
        return "returned"
    if module is not None:
        return type(module).__name__
    return str(getattr(node.target, "__name__", node.target))


def _only_numbers(node: fx.Node) -> bool:
    """Whether all arguments but activations are numbers, words or None."""
    plain = (fx.Node, int, float, bool, str, type(None))
    return all(isinstance(value, plain) for value in (*node.args, *node.kwargs.values()))


def _makes_channels(node: fx.Node) -> bool:
    """Whether features become channels of one pixel: ``unflatten(x, -1, (-1, 1, 1))``."""
    options = dict(zip(("input", "dim", "sizes"), node.args, strict=False)) | dict(node.kwargs)
    sizes: Any = options.get("sizes")
    return bool(options.get("dim") == -1 and isinstance(sizes, tuple | list) and tuple(sizes) == (-1, 1, 1))


def _flattens(node: fx.Node, name: str) -> bool:
    """Whether channels become features: ``flatten(x, 1)``, or the mean over height and width."""
    options = dict(zip(("input", "start_dim", "end_dim"), node.args, strict=False)) | dict(node.kwargs)
    if name == "flatten":
        return bool(options.get("start_dim") == 1 and options.get("end_dim", -1) == -1)
    if name == "mean":
        dims = options.get("start_dim", options.get("dim"))
        pixels = isinstance(dims, tuple | list) and sorted(dims) in ([2, 3], [-2, -1])
        return bool(pixels and len(node.args) <= 2 and not options.get("keepdim"))
    return False
