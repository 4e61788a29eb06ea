"""Which activations may stay split between layers: what torch.fx can prove about a model's forward.

A *region* is a set of activations of one width. Layers make them, operations that treat every feature alike (or keep
channels apart) change them, and layers take them; nothing else reads them. So each rank may hold a part of the features
only, if all layers that make them split their output, and all that take them their input, over the same axis.

Each module is traced in training and in evaluation mode, with layers as leaves. Where that fails, its children are
traced; the largest modules that can be traced count. A module cannot be traced if its control flow depends on values,
or if it does something else where an optional argument is missing. There, and where an activation reaches an operation
that is not listed here, nothing is proved and activations are whole. Tracing runs the Python code of a copy, with
stand-ins for tensors.
"""

from __future__ import annotations

import copy
import inspect
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from axo.nn.init import tied_parameters
from axo.plans.auto.candidate import SplitCandidate

FEATURES, CHANNELS = "features", "channels"  # which dim of an activation is split: the last, or the third from the end

_ELEMENTWISE_MODULES = (
    *(nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.ELU, nn.CELU, nn.SELU, nn.LeakyReLU, nn.Softplus),
    *(nn.Hardswish, nn.Hardtanh, nn.Hardsigmoid, nn.Mish, nn.LogSigmoid, nn.Softsign, nn.Identity, nn.Dropout),
)
_CHANNEL_MODULES = (nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d, nn.Upsample)
# Functions of torch and operator, and methods of tensors, by name.
_ELEMENTWISE = {
    *("add", "sub", "mul", "truediv", "div", "pow", "neg", "pos", "abs", "exp", "square", "sqrt", "sin", "cos", "erf"),
    *("clamp", "maximum", "minimum", "contiguous", "clone", "float", "relu", "relu6", "gelu", "silu", "tanh"),
    *("sigmoid", "elu", "celu", "selu", "leaky_relu", "softplus", "mish", "hardswish", "hardtanh", "hardsigmoid"),
    *("logsigmoid", "log_sigmoid", "softsign"),
}


@dataclass
class Region:
    """Activations that may stay split: who makes and takes them, dropouts and group norms inside, their width."""

    makers: set[nn.Module] = field(default_factory=set)
    takers: set[nn.Module] = field(default_factory=set)
    inside: set[nn.Module] = field(default_factory=set)
    width: int = 0


@dataclass
class Traced:
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


def find_regions(model: nn.Module, layers: Iterable[SplitCandidate], closed: set[nn.Module]) -> Traced:
    """Find the regions of ``model``.

    Args:
        model: Serial.
        layers: Those that may be split.
        closed: Modules that are not looked into.
    """
    shared = {module for owners in tied_parameters(model).values() for module, _ in owners}
    flow = _Flow({layer.module: layer for layer in layers}, shared)
    with own_random() as any_drawn:
        roots = _roots(model, set(flow.layers), set(closed))
        drawn = any_drawn()
    for root, graphs in roots:
        for graph in graphs:
            flow.read(graph, root)
    return Traced(
        flow.regions(), flow.read_by_others, flow.reasons(), [root for root, _ in roots] == [model] and not drawn
    )


def _roots(module: nn.Module, layers: set[nn.Module], closed: set[nn.Module]) -> list[tuple[nn.Module, list[fx.Graph]]]:
    """The largest traceable modules within ``module`` with their graphs; those not traceable join ``closed``."""
    if module in layers or module in closed:
        return []
    below = [root for child in module.children() for root in _roots(child, layers, closed)]
    if module.__module__.startswith("torch.nn") and not isinstance(module, nn.Sequential):
        return below
    graphs = [graph for training in (True, False) if (graph := graph_of(module, layers | closed, training))]
    if len(graphs) == 2:
        return [(module, graphs)]
    closed.add(module)
    return below


class _Tracer(fx.Tracer):
    """Traces a module whose children of these names are leaves."""

    def __init__(self, leaves: set[str]) -> None:
        super().__init__()
        self.leaves = leaves

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name in self.leaves or super().is_leaf_module(m, module_qualified_name)


def graph_of(module: nn.Module, leaves: set[nn.Module], training: bool) -> fx.Graph | None:
    """The graph of ``module`` in one mode; None where tracing it would prove nothing."""
    if module._forward_hooks or module._forward_pre_hooks or not _plain_signature(module):
        return None
    names = {name for name, part in module.named_modules(remove_duplicate=False) if part in leaves}
    try:  # a copy that has the same parameters: its code may set attributes, lists and buffers
        twin = copy.deepcopy(module, {id(parameter): parameter for parameter in module.parameters()})
        return _Tracer(names).trace(twin.train(training))
    except Exception:  # whatever the model's own code raises when it meets a stand-in
        return None


def _plain_signature(module: nn.Module) -> bool:
    """Whether forward takes nothing that may be left out: a stand-in would always take the way of what is given."""
    parameters = inspect.signature(module.forward).parameters.values()
    own = "forward" in module.__dict__
    return not own and all(p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty for p in parameters)


@contextmanager
def own_random() -> Iterator[Callable[[], bool]]:
    """What is drawn in this block leaves no trace behind it, in torch or in Python; yields what says if any was."""
    before = torch.get_rng_state(), random.getstate()
    try:
        with torch.random.fork_rng(devices=[]):
            yield lambda: not torch.equal(before[0], torch.get_rng_state()) or before[1] != random.getstate()
    finally:
        random.setstate(before[1])


class _Flow:
    """Union-find over activations. Keys: nodes, and (layer, "in" or "out"), which all calls of a layer share."""

    def __init__(self, layers: dict[nn.Module, SplitCandidate], shared: set[nn.Module]) -> None:
        self.layers = layers
        self.shared = shared  # modules whose parameters others have too
        self.parent: dict[Any, Any] = {}
        self.spoilt: dict[Any, str] = {}  # with the first reason
        self.inside: list[tuple[fx.Node, nn.Module]] = []  # dropouts and group norms
        self.kinds: dict[fx.Node, str | None] = {}
        self.order: dict[nn.Module, None] = {}
        self.read_by_others: set[nn.Module] = set()

    def find(self, key: Any) -> Any:
        while (parent := self.parent.setdefault(key, key)) != key:
            self.parent[key] = key = self.parent.setdefault(parent, parent)
        return key

    def join(self, a: Any, b: Any) -> None:
        a, b = self.find(a), self.find(b)
        self.parent[a] = b
        if a != b and a in self.spoilt:
            self.spoilt.setdefault(b, self.spoilt[a])

    def spoil(self, why: str, *keys: Any) -> None:
        for key in keys:
            self.spoilt.setdefault(self.find(key), why)

    def read(self, graph: fx.Graph, root: nn.Module) -> None:
        """Add what one graph says."""
        modules = dict(root.named_modules(remove_duplicate=False))
        for node in graph.nodes:
            module = modules.get(node.target) if node.op == "call_module" else None
            if node.op == "get_attr":
                owner = modules.get(str(node.target).rpartition(".")[0])
                if owner in self.layers:
                    self.read_by_others.add(owner)
            if module in self.layers:
                self._layer(module, node)
                continue
            kind = self._kind_after(node, module, {self.kinds.get(other) for other in node.all_input_nodes})
            self.kinds[node] = kind
            if kind is None:
                self.spoil(_what(node, module), node, *node.all_input_nodes)
                continue
            for other in node.all_input_nodes:
                self.join(node, other)
            if isinstance(module, nn.Dropout | nn.GroupNorm):
                self.inside.append((node, module))
                if isinstance(module, nn.GroupNorm):
                    self.join(node, (module, "through"))  # all its calls have one fate

    def _layer(self, layer: nn.Module, node: fx.Node) -> None:
        kind = CHANNELS if self.layers[layer].type == "conv2d" else FEATURES
        self.order[layer] = None
        self.join(node, (layer, "out"))
        self.kinds[node] = kind
        if len(node.args) != 1 or len(node.all_input_nodes) != 1 or node.kwargs:
            self.spoil("it is called with more than one tensor", node, (layer, "in"), *node.all_input_nodes)
        elif _hooked(layer):
            self.spoil("hooks look at it", node, (layer, "in"), *node.all_input_nodes)
        elif self.layers[layer].into is not None:
            (given,) = node.all_input_nodes
            self.join(given, (layer, "in"))
            if self.kinds.get(given) != kind:
                self.spoil("features and channels change places", given)

    def _kind_after(self, node: fx.Node, module: nn.Module | None, kinds: set[str | None]) -> str | None:
        """Which dim of the result holds the features, if they are still apart; None: nothing is known."""
        if len(kinds) != 1 or None in kinds:
            return None
        (kind,) = kinds
        if module is not None:
            return None if _hooked(module) else self._kind_after_module(module, kind)
        name = _name(node)
        if name in _ELEMENTWISE and _only_numbers(node):
            return kind
        return CHANNELS if kind == FEATURES and name == "unflatten" and _makes_channels(node) else None

    def _kind_after_module(self, module: nn.Module, kind: str | None) -> str | None:
        if type(module) in _ELEMENTWISE_MODULES:
            return kind
        if kind != CHANNELS:
            return None
        if type(module) is nn.GroupNorm:  # split where its groups divide over the axis (``decide``)
            return kind if "forward" not in module.__dict__ and module not in self.shared else None
        return kind if type(module) in _CHANNEL_MODULES else None

    def reasons(self) -> dict[nn.Module, str]:
        """For each layer whose activations are known to be seen whole: by what."""
        reasons = {}
        for layer in self.layers:
            sides = {side: self.spoilt.get(self.find((layer, side)), "") for side in ("in", "out")}
            told = "; ".join(f"{side}: {why}" for side, why in sides.items() if why)
            if layer not in self.order:
                told = "no module around it can be traced (control flow on values, optional arguments)"
            reasons[layer] = told or "axes would not alternate, or a width does not divide"
        return reasons

    def regions(self) -> list[Region]:
        """The regions whose sizes agree, in the order in which their layers run."""
        regions: dict[Any, Region] = {}
        for layer in self.order:
            if self.layers[layer].into is not None:
                regions.setdefault(self.find((layer, "in")), Region()).takers.add(layer)
            regions.setdefault(self.find((layer, "out")), Region()).makers.add(layer)
        for node, module in self.inside:
            if region := regions.get(self.find(node)):
                region.inside.add(module)
        return [region for key, region in regions.items() if key not in self.spoilt and self._agree(region)]

    def _agree(self, region: Region) -> bool:
        widths = {self.layers[layer].out for layer in region.makers}
        region.width = max(widths, default=0)
        return len(widths) == 1 and widths == {self.layers[layer].into for layer in region.takers}


def _hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _name(node: fx.Node) -> str:
    """The name of a method, or of a function of torch or operator; empty: of neither."""
    if node.op == "call_method":
        return str(node.target)
    ours = (getattr(node.target, "__module__", None) or "torch").split(".")[0] in ("torch", "_operator", "operator")
    return str(getattr(node.target, "__name__", "")) if node.op == "call_function" and ours else ""


def _what(node: fx.Node, module: nn.Module | None) -> str:
    """What sees the activation whole, in words."""
    if module is not None:
        return type(module).__name__
    if node.op == "placeholder":
        return "outside of what can be traced"
    return "returned" if node.op == "output" else str(getattr(node.target, "__name__", node.target))


def _only_numbers(node: fx.Node) -> bool:
    """Whether all arguments but activations are numbers, words or None."""
    plain = (fx.Node, int, float, bool, str, type(None))
    return all(isinstance(value, plain) for value in (*node.args, *node.kwargs.values()))


def _makes_channels(node: fx.Node) -> bool:
    """Whether features become channels of one pixel: ``unflatten(x, -1, (-1, 1, 1))``."""
    options = dict(zip(("input", "dim", "sizes"), node.args, strict=False)) | dict(node.kwargs)
    sizes: Any = options.get("sizes")
    return bool(options.get("dim") == -1 and isinstance(sizes, tuple | list) and tuple(sizes) == (-1, 1, 1))
