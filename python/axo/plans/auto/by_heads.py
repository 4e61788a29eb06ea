"""Attention of any class split by heads, where the torch.fx graph of its forward proves that no head sees another.

The module is traced with its projections as leaves, and the graph is run on shapes (batch, tokens, features), with all
heads. Projections of whole inputs are supposed to give each rank its part of the features (of each of q, k and v, where
one projection makes all). From there on every operation is either known to keep the parts apart, which dim of the
result they split, or nothing is proved:

    view, transpose, chunk, ...     the parts stay runs of whole heads; sizes in the code become shares of a rank
    softmax, norms, sums            over other dims
    matmul, einsum, SDPA            heads are a batch dim
    elementwise                     whole operands (masks, positions, slopes of heads) are cut or shared
    projections                     of features in parts: the last ones, which sum over ranks

The same must come out for other lengths, in training and in evaluation, with each optional argument absent or given.
The module then runs code written from the graph (``heads_code``): first projections normal, last ones transposed, one
all-reduce over the axis forward and one backward. What its forward reads of its attributes is as it was then.

Not here: heads that do not divide (but see ``hugging_face`` for groups of keys and values that ranks share), caches,
code that sets attributes or branches on values.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn

from axo.errors import Refused
from axo.plans.auto import heads_code
from axo.plans.auto.heads_interpreter import SAMPLES, Interpreter, NotProved, name_of
from axo.plans.auto.regions import Size, Tracer, Untouched, in_mode, own_random
from axo.plans.replace import hooks_of

MOST_LAYERS = 8  # of one attention module
_NEVER_GIVEN = ("head_mask",)  # Hugging Face passes None on; a mask of heads is refused when it comes


@dataclass
class Proof:
    """How a module is split by heads.

    Attributes:
        layers: Its projections -> ("normal" | "transposed", the blocks of a first one).
        codes: (training, which optional arguments are given) -> source of ``forward`` and its globals.
        optional: Names and defaults of the optional arguments.
    """

    layers: dict[nn.Module, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    codes: dict[tuple[bool, tuple[str, ...]], tuple[str, dict[str, Any]]] = field(default_factory=dict)
    optional: dict[str, Any] = field(default_factory=dict)

    def install(self, module: nn.Module, heads: heads_code.HeadsOf) -> None:
        """Let ``module``, whose projections are parallel now, run the code that has been proved."""
        forwards = {key: _compiled(*code) for key, code in self.codes.items()}
        optional, signature = self.optional, inspect.signature(type(module).forward)

        def forward(self: Any, *args: Any, **options: Any) -> Any:
            if args and not options and not optional:
                return forwards[self.training, ()](self, *args)
            bound = signature.bind(self, *args, **options)
            bound.apply_defaults()
            values = dict(list(bound.arguments.items())[1:])
            given = tuple(n for n, default in optional.items() if default is None and values[n] is not None)
            other = [n for n, default in optional.items() if default is not None and not _equal(values[n], default)]
            code = forwards.get((self.training, given))
            if code is None or other:
                raise Refused(
                    f"attention {heads.name!r} is split by heads for calls without {', '.join((*other, *given))}; name"
                    " its layers 'normal:whole->whole' in a plan of patterns"
                )
            return code(self, *(value for name, value in values.items() if name not in optional or name in given))

        serial = type(module)
        module.__class__ = type(serial.__name__, (serial,), {"__module__": serial.__module__, "forward": forward})
        kept: Any = module
        kept._axo_heads = heads


def _equal(value: Any, default: Any) -> bool:
    return type(value) is type(default) and bool(value == default)


def _compiled(source: str, names: dict[str, Any]) -> Callable[..., Any]:
    space = dict(names)
    exec(source, space)
    found: Callable[..., Any] = space["forward"]
    return found


def prove(module: nn.Module, sizes: dict[nn.Module, Size], axis: str, ranks: int) -> Proof | None:
    """How to split ``module`` over ``ranks`` along ``axis``; None if it has no heads.

    Args:
        sizes: The layers of the model that may be split.

    Raises:
        NotProved: It has, and cannot be split.
    """
    if any(hooks_of(child) for child in module.modules()):
        raise NotProved("hooks see its activations")
    if "forward" in module.__dict__:
        raise NotProved("it has a forward of its own")
    parameters = list(inspect.signature(module.forward).parameters.values())
    if any(p.kind not in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) for p in parameters):
        raise NotProved("its forward takes *args or **kwargs")
    proof = Proof(optional={p.name: p.default for p in parameters if p.default is not p.empty})
    maybe = [n for n, value in proof.optional.items() if value is None and n not in _NEVER_GIVEN]
    if len(maybe) > 3:
        raise NotProved(f"it has more than three optional arguments: {', '.join(maybe)}")
    some = [given for count in range(len(maybe) + 1) for given in itertools.combinations(maybe, count)]
    for training, given in itertools.product((True, False), some):
        graph = _graph_of(module, set(sizes), training, {n: v for n, v in proof.optional.items() if n not in given})
        if not _has_attention(graph):
            return None
        try:
            found = _first(graph, module, sizes, axis, ranks, training)
        except NotProved as error:
            raise NotProved(f"{error}, with {', '.join(given)} given" if given else str(error)) from None
        if proof.layers and proof.layers != found.roles():
            raise NotProved("training and evaluation, or calls with optional arguments, use its layers otherwise")
        proof.layers = found.roles()
        proof.codes[training, given] = found.code()
    return proof if any(kind == "transposed" for kind, _ in proof.layers.values()) else None


def _graph_of(module: nn.Module, leaves: set[nn.Module], training: bool, fixed: dict[str, Any]) -> fx.Graph:
    tracer = Tracer(leaves)
    tracer.proxy_buffer_attributes = True
    untouched = Untouched(module)
    try:
        with untouched, in_mode(module, training), own_random() as any_drawn:
            graph = tracer.trace(module, concrete_args=fixed or None)
            drawn = any_drawn()
    except Exception as error:  # whatever the model's own code raises when it meets a stand-in
        why = str(error).split("\n")[0][:120]
        raise NotProved(f"its forward cannot be traced ({type(error).__name__}: {why})") from None
    if drawn:
        raise NotProved("its forward draws random numbers that do not depend on its input")
    if untouched.changed:
        raise NotProved("its forward sets attributes, or makes tensors that do not depend on its input")
    names = inspect.signature(module.forward).parameters
    for node in list(graph.nodes):  # arguments that are fixed: nobody reads them but the tracer's own checks
        target = str(node.target)  # of a fixed one: its name and a number
        if node.op == "placeholder" and target not in names and target.rpartition("_")[0] in fixed:
            for user in list(node.users):
                _erase(graph, user)
            graph.erase_node(node)
    graph.eliminate_dead_code(_has_effect)
    return graph


def _has_effect(node: fx.Node) -> bool:
    name = str(getattr(node.target, "__name__", node.target))
    return node.op in ("placeholder", "output") or name == "setitem" or (name.endswith("_") and name[-2:] != "__")


def _erase(graph: fx.Graph, node: fx.Node) -> None:
    for user in list(node.users):
        _erase(graph, user)
    if node.op == "output":
        raise NotProved("an optional argument is returned")
    graph.erase_node(node)


def _has_attention(graph: fx.Graph) -> bool:
    names = {name_of(node) for node in graph.nodes}
    products = {"matmul", "bmm", "einsum", "baddbmm"}
    return "scaled_dot_product_attention" in names or bool(names & products)


def _first(
    graph: fx.Graph, module: nn.Module, sizes: dict[nn.Module, Size], axis: str, ranks: int, training: bool
) -> Interpreter:
    """The first supposition about blocks of fused projections under which the graph proves what is wanted."""
    modules = dict(module.named_modules())
    choices: dict[nn.Module, list[tuple[int, ...]]] = {}
    for node in graph.nodes:
        layer = modules.get(str(node.target)) if node.op == "call_module" else None
        if layer in sizes:
            choices[layer] = _blocks(node, sizes[layer].out)
    best = NotProved("it has no projections")
    for blocks in itertools.islice(itertools.product(*choices.values()), 64):
        suppose = dict(zip(choices, blocks, strict=True))
        try:
            first, second = (
                Interpreter(graph, module, sizes, suppose, axis, ranks, sample, training) for sample in SAMPLES
            )
            if first.code()[0] == second.code()[0] and first.roles() == second.roles():
                return first
            raise NotProved("what it does with heads depends on the shape of its input")
        except NotProved as error:
            best = max(best, error, key=lambda e: e.at)
    raise best


def _blocks(node: fx.Node, out: int) -> list[tuple[int, ...]]:
    """What a projection's features may consist of: one block, or those that a split after it names, or equal ones."""
    found: list[tuple[int, ...]] = []
    for user in node.users:
        if name_of(user) == "split" and len(user.args) > 1:
            size: Any = user.args[1]
            if isinstance(size, int) and size and out % size == 0:
                found.append((size,) * (out // size))
            elif isinstance(size, list | tuple) and all(isinstance(s, int) for s in size) and sum(size) == out:
                found.append(tuple(size))
    equal = [(out // count,) * count for count in (3, 2) if out % count == 0]
    fused = any(name_of(user) in ("split", "chunk", "getitem", "view", "reshape", "unflatten") for user in node.users)
    return list(dict.fromkeys([*found, (out,), *(equal if fused else [])]))
