"""The graph of attention, run on shapes: which dim of each tensor the ranks share, and code that computes with a share.

A projection of a whole tensor gives each rank its part of every block of features. Each operation on such parts is
either known to keep them apart, and then where they are in its result, or it raises :class:`NotProved` (see
``by_heads``). The new graph has the same operations, with sizes and whole operands made to fit (``heads_code``).

Long because each operation is a method of one run, a few lines each, and they share its state.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from axo.plans.auto import heads_code
from axo.plans.auto.regions import Size

SAMPLES = ((5, 7, 11), (13, 17, 19))  # batch, tokens, tokens of another input: prime, so that dims cannot be confused
_UNKNOWN: Any = object()  # a value that tracing says nothing of


@dataclass(frozen=True)
class Split:
    """A dim of which each rank holds its part of each block.

    Attributes:
        dim: Counted from the front.
        blocks: Sizes that add up to the dim's.
    """

    dim: int
    blocks: tuple[int, ...]


class NotProved(Exception):
    """Why a module cannot be split by heads.

    Attributes:
        at: How many operations had been proved before.
    """

    at = 0


_SHAPE_KEEPING = {"softmax", "log_softmax", "normalize", "cumsum"}  # over a dim that is not split
_REDUCTIONS = {"sum", "mean", "amax", "amin"}
_ELEMENTWISE = {
    *("add", "sub", "mul", "truediv", "div", "pow", "neg", "pos", "abs", "exp", "square", "sqrt", "rsqrt", "relu"),
    *("tanh", "sigmoid", "erf", "gelu", "silu", "clamp", "maximum", "minimum", "sin", "cos", "masked_fill", "where"),
    *("contiguous", "clone", "detach", "float", "to", "type_as", "type", "half", "bfloat16", "relu6", "elu"),
    "softplus",
    *("lt", "le", "gt", "ge", "eq", "ne", "logical_not", "logical_and", "logical_or", "invert"),
}
_RANDOM = {"dropout", "scaled_dot_product_attention"}
_OTHERS = {
    *("view", "reshape", "flatten", "transpose", "swapaxes", "permute", "unsqueeze", "squeeze", "expand", "size"),
    *("chunk", "split", "unbind", "getitem", "matmul", "bmm", "einsum", "cat", "stack", "repeat_interleave", "getattr"),
    "dim",
}
_FUNCTIONS: dict[Any, str] = {
    getattr(holder, name): name
    for holder in (operator, torch, F)
    for name in (*_ELEMENTWISE, *_RANDOM, *_SHAPE_KEEPING, *_REDUCTIONS, *_OTHERS)
    if hasattr(holder, name)
} | {getattr: "getattr", operator.truediv: "truediv"}
_NORMS = (nn.LayerNorm, nn.RMSNorm)
_ELEMENTWISE_MODULES = (nn.Dropout, nn.Identity, nn.GELU, nn.SiLU, nn.ReLU, nn.Sigmoid, nn.Tanh)


def name_of(node: fx.Node) -> str:
    """The name of a function or method that is known, else an empty one."""
    if node.op == "call_method":
        return str(node.target)
    return _FUNCTIONS.get(node.target, "") if node.op == "call_function" else ""


class Interpreter:
    """One run of a torch.fx graph on one shape, which writes the new graph as it goes.

    Raises:
        NotProved: An operation is not known to keep heads apart.
    """

    def __init__(
        self,
        graph: fx.Graph,
        module: nn.Module,
        sizes: dict[nn.Module, Size],
        blocks: dict[nn.Module, tuple[int, ...]],
        axis: str,
        ranks: int,
        sample: tuple[int, int, int],
        training: bool,
    ) -> None:
        self.training = training
        self.module, self.sizes, self.blocks, self.axis, self.ranks = module, sizes, blocks, axis, ranks
        self.modules = dict(module.named_modules())
        self.kinds: dict[nn.Module, str] = {}
        self.values: dict[fx.Node, Any] = {}
        self.splits: dict[int, Split] = {}  # by id of a value; values are kept
        self.new, self.copies = fx.Graph(), {}  # type: ignore[var-annotated]
        self.apart = False  # whether heads have become a dim of their own
        with FakeTensorMode(allow_non_fake_inputs=True) as self.mode, torch.no_grad():
            inputs = self._inputs(graph, sample)
            self.heads: fx.Node | None = None
            for node in graph.nodes:
                if node.op != "placeholder" and self.heads is None:
                    self.heads = self.new.get_attr("_axo_heads")
                    for placeholder in inputs:
                        self.copies[placeholder] = self._call(heads_code.check_input, self.copies[placeholder])
                try:
                    self._node(node, inputs)
                except NotProved as error:
                    error.at = len(self.values)
                    raise
        if not self.apart:
            raise NotProved("no view makes heads of its features")

    def roles(self) -> dict[nn.Module, tuple[str, tuple[int, ...]]]:
        return {
            layer: (kind, self.blocks[layer] if kind == "normal" else (self.sizes[layer].out,))
            for layer, kind in self.kinds.items()
        }

    def code(self) -> tuple[str, dict[str, Any]]:
        written = self.new.python_code("self")
        return written.src, dict(written.globals)

    # --- the run ------------------------------------------------------------------------------------------------

    def _inputs(self, graph: fx.Graph, sample: tuple[int, int, int]) -> dict[fx.Node, torch.Tensor]:
        """Shapes for the inputs that projections take; the first one's other users see it too."""
        batch, tokens, others = sample
        found: dict[fx.Node, torch.Tensor] = {}
        first: int | None = None
        for node in graph.nodes:
            layer = self.modules.get(str(node.target)) if node.op == "call_module" else None
            if layer in self.sizes:
                into = self.sizes[layer].into
                first = first or into
                taken = node.args[0] if node.args else None
                if isinstance(taken, fx.Node) and taken.op == "placeholder" and taken not in found and into:
                    found[taken] = torch.empty(batch, others if found else tokens, into)
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        if not found and placeholders and first:
            found[placeholders[0]] = torch.empty(batch, tokens, first)
        return found

    def _node(self, node: fx.Node, inputs: dict[fx.Node, torch.Tensor]) -> None:
        if node.op == "placeholder":
            self.copies[node] = self.new.node_copy(node)
            self.values[node] = inputs.get(node, _UNKNOWN)
            return
        if node.op == "output":
            if self._parts(node):
                raise NotProved("heads are returned in parts")
            self.new.node_copy(node, self._copy_of)
            return
        parts = self._parts(node)
        layer = self.modules.get(str(node.target)) if node.op == "call_module" else None
        if layer in self.sizes:
            self._layer(layer, node, parts)
        elif not parts:
            self._kept(node, self._whole(node), None)
        else:
            self._split(node, layer, parts)

    def _parts(self, node: fx.Node) -> list[Any]:
        """The split tensors that a node takes."""
        taken: list[Any] = []
        fx.map_arg((node.args, node.kwargs), lambda n: taken.append(self.values[n]))
        return [value for value in _flat(taken) if id(value) in self.splits]

    def _value(self, argument: Any) -> Any:
        return fx.map_arg(argument, lambda n: self.values[n])

    def _copy_of(self, node: fx.Node) -> fx.Node:
        return self.copies[node]

    def _copied(self, argument: Any) -> Any:
        return fx.map_arg(argument, self._copy_of)

    def _call(self, function: Callable[..., Any], *args: Any, **options: Any) -> fx.Node:
        return self.new.call_function(function, (self.heads, *args), options)

    def _whole(self, node: fx.Node) -> Any:
        if node.op == "get_attr":
            value = operator.attrgetter(str(node.target))(self.module)
            return self.mode.from_tensor(value.detach()) if isinstance(value, torch.Tensor) else value
        args, options = self._value((node.args, node.kwargs))
        if any(value is _UNKNOWN for value in _flat([args, list(options.values())])):
            return _UNKNOWN
        try:
            if node.op == "call_module":
                return self.modules[str(node.target)](*args, **options)
            if node.op == "call_method":
                return getattr(args[0], str(node.target))(*args[1:], **options)
            return node.target(*args, **options)  # type: ignore[operator]
        except Exception:
            return _UNKNOWN

    def _layer(self, layer: nn.Module, node: fx.Node, parts: list[Any]) -> None:
        size = self.sizes[layer]
        if size.into is None or len(node.args) != 1 or node.kwargs:
            raise NotProved(f"{node.target} is not a projection of one tensor")
        taken = self._value(node.args[0])
        kind = "transposed" if parts else "normal"
        if self.kinds.setdefault(layer, kind) != kind:
            raise NotProved(f"{node.target} takes whole features and parts of them")
        if parts:
            split = self.splits[id(taken)]
            if split.dim != taken.dim() - 1 or split.blocks != (size.into,):
                raise NotProved(f"heads are not the features that {node.target} takes")
        if taken is _UNKNOWN:
            raise NotProved(f"the shape of what {node.target} takes is not known")
        self.copies[node] = self.new.node_copy(node, self._copy_of)
        result = torch.empty(*taken.shape[:-1], size.out)
        self.values[node] = result
        if not parts:
            if any(block % self.ranks for block in self.blocks[layer]):
                raise NotProved(f"features of {node.target} do not divide over {self.axis}={self.ranks}")
            self.splits[id(result)] = Split(result.dim() - 1, self.blocks[layer])

    # --- operations on split tensors -----------------------------------------------------------------------------

    def _split(self, node: fx.Node, module: nn.Module | None, parts: list[Any]) -> None:
        name = name_of(node)
        if module is not None:
            self._module(node, module)
        elif name in _ELEMENTWISE:
            self._elementwise(node, parts)
        elif hasattr(self, f"_op_{name}"):
            getattr(self, f"_op_{name}")(node)
        elif name in _SHAPE_KEEPING | _REDUCTIONS:
            self._over_a_dim(node, name)
        else:
            raise NotProved(f"{name or getattr(node.target, '__name__', node.target)} sees all heads")

    def _done(self, node: fx.Node, copy: fx.Node, result: Any, split: Split | None) -> None:
        self.copies[node], self.values[node] = copy, result
        if split is None:
            return
        for value in _flat([result]):
            if isinstance(value, torch.Tensor):
                self._mark(value, split)

    def _kept(self, node: fx.Node, result: Any, split: Split | None) -> None:
        """The operation stays as it is."""
        self._done(node, self.new.node_copy(node, self._copy_of), result, split)

    def _mark(self, value: torch.Tensor, split: Split) -> None:
        if sum(split.blocks) != value.shape[split.dim]:
            raise NotProved("parts of heads lose their order")
        if split.dim != value.dim() - 1:
            self.apart = True
        self.splits[id(value)] = split

    def _run(self, node: fx.Node) -> Any:
        result = self._whole(node)
        if result is _UNKNOWN:
            raise NotProved(f"{name_of(node)}: its shape is not known")
        taken = [value for value in _flat([self._value(list(node.args))]) if isinstance(value, torch.Tensor)]
        if isinstance(result, torch.Tensor) and any(result is value for value in taken):
            result = torch.empty_like(result)  # a value of its own: marks are by identity
        return result

    def _tensor(self, node: fx.Node) -> tuple[torch.Tensor, Split]:
        """The split tensor that an operation is about, its first argument."""
        (tensor,) = self._all_split(name_of(node), [self._value(node.args[0])])
        return tensor, self.splits[id(tensor)]

    def _same(self, parts: Iterable[torch.Tensor]) -> tuple[int, tuple[int, ...]]:
        """The dim, from the end, and the blocks that all have."""
        found = {(self.splits[id(part)].dim - part.dim(), self.splits[id(part)].blocks) for part in parts}
        if len(found) != 1:
            raise NotProved("tensors meet that split heads otherwise")
        return found.pop()

    def _all_split(self, what: str, tensors: Any) -> Any:
        if any(id(tensor) not in self.splits for tensor in tensors):
            raise NotProved(f"{what} of whole tensors with parts of heads")
        return tensors

    def _met(self, argument: Any, dim: int, blocks: tuple[int, ...], rank: int) -> Any:
        """A copy of an argument, its whole tensors made to fit those that are split."""
        if not isinstance(argument, fx.Node):
            return argument
        value = self.values[argument]
        copy = self._copy_of(argument)
        if id(value) in self.splits or not (value is _UNKNOWN or isinstance(value, torch.Tensor)):
            return copy
        if value is not _UNKNOWN and value.dim() > rank:
            raise NotProved("a whole tensor of more dims meets parts of heads")
        cut = value is _UNKNOWN or (value.dim() >= -dim and value.shape[dim] != 1)
        if cut and len(blocks) != 1:
            raise NotProved("a whole tensor meets q, k and v in one")
        return self._call(heads_code.fit_heads, copy, dim, sum(blocks) if cut else 1, rank)

    def _elementwise(self, node: fx.Node, parts: list[Any]) -> None:
        dim, blocks = self._same(parts)
        first = max(parts, key=lambda part: part.dim())
        result = self._whole(node)
        if result is _UNKNOWN:
            result = torch.empty_like(first)
        elif result.dim() != first.dim():
            raise NotProved("a whole tensor of more dims meets parts of heads")
        else:
            result = torch.empty_like(result)
        args = tuple(self._met(argument, dim, blocks, result.dim()) for argument in node.args)
        options = {key: self._met(argument, dim, blocks, result.dim()) for key, argument in node.kwargs.items()}
        self._done(
            node, self.new.create_node(node.op, node.target, args, options), result, Split(result.dim() + dim, blocks)
        )

    def _module(self, node: fx.Node, module: nn.Module) -> None:
        tensor, split = self._tensor(node)
        copied = self._copied(node.args[0])
        if len(node.args) != 1 or node.kwargs:
            raise NotProved(f"{type(module).__name__} takes more than one tensor")
        over_another = type(module) is nn.Softmax and self._dim(module.dim, tensor) != split.dim
        if type(module) is nn.Dropout and self.training and module.p:
            call = self._call(heads_code.drop_in, self.new.get_attr(str(node.target)), copied)
        elif type(module) in _ELEMENTWISE_MODULES or over_another:
            call = self.new.call_module(str(node.target), (copied,))
        elif isinstance(module, _NORMS) and split.dim < tensor.dim() - len(module.normalized_shape):
            call = self._call(heads_code.norm, self.new.get_attr(str(node.target)), copied)
        else:
            raise NotProved(f"{type(module).__name__} sees all heads")
        self._done(node, call, torch.empty_like(tensor), split)

    def _op_getattr(self, node: fx.Node) -> None:
        tensor, split = self._tensor(node)
        what = str(node.args[1])
        if what == "shape":
            call = self._call(heads_code.shape_of, self._copied(node.args[0]), split.dim)
            self._done(node, call, tensor.shape, None)
        elif what in ("dtype", "device", "ndim"):
            self._kept(node, getattr(tensor, what), None)
        elif what in ("mT", "mH") or (what == "T" and tensor.dim() == 2):
            self._swap(node, tensor.dim() - 2, tensor.dim() - 1)
        else:
            raise NotProved(f"{what} of heads is not known")

    def _op_size(self, node: fx.Node) -> None:
        _, split = self._tensor(node)
        wanted = self._argument(node, 1, "dim", None)
        call = self._call(heads_code.shape_of, self._copied(node.args[0]), split.dim, self._copied(wanted))
        self._done(node, call, self._whole(node), None)

    def _op_dim(self, node: fx.Node) -> None:
        self._kept(node, self._whole(node), None)

    def _over_a_dim(self, node: fx.Node, name: str) -> None:
        tensor, split = self._tensor(node)
        default = -1 if name == "softmax" and node.target is not F.softmax else None
        dims = self._value(self._argument(node, 2 if name == "normalize" else 1, "dim", default))
        if name == "normalize" and dims is None:
            dims = 1
        if dims is None or any(value is _UNKNOWN for value in _flat([dims])):
            raise NotProved(f"{name} sees all heads")
        chosen = {self._dim(dim, tensor) for dim in _flat([dims])}
        if split.dim in chosen:
            raise NotProved(f"{name} sees all heads")
        result = self._run(node)
        lost = 0 if result.dim() == tensor.dim() else sum(dim < split.dim for dim in chosen)
        self._kept(node, result, Split(split.dim - lost, split.blocks))

    # shapes

    def _op_view(self, node: fx.Node) -> None:
        tensor, split = self._tensor(node)
        if not node.args[1:] or node.kwargs:
            raise NotProved("a view to a dtype, or by keywords")
        result = self._run(node)
        made = self._viewed(tensor, split, result)
        call = self._call(heads_code.view, self._copied(node.args[0]), made.dim, *self._copied(tuple(node.args[1:])))
        self._done(node, call, result, made)

    _op_reshape = _op_view

    def _op_flatten(self, node: fx.Node) -> None:
        tensor, split = self._tensor(node)
        result = self._run(node)
        self._kept(node, result, self._viewed(tensor, split, result))

    def _viewed(self, tensor: torch.Tensor, split: Split, result: torch.Tensor) -> Split:
        """Where the split dim goes in a view: the parts must be runs of an outer dim again."""
        size = sum(split.blocks)
        outer = tensor.shape[: split.dim].numel()
        if len(split.blocks) == 1:
            blocks, before = 1, outer
        elif len(set(split.blocks)) == 1:
            blocks, before = len(split.blocks), outer * len(split.blocks)
        else:
            raise NotProved("a view of blocks that are not of one size")
        seen = 1
        for dim, length in enumerate(result.shape):
            if seen == before and length > 1:  # the dim begins where a block does: the blocks are dims of their own
                return self._of_heads(dim, length, 1)
            if seen == outer and blocks > 1 and length == size:
                return Split(dim, split.blocks)
            if seen < before < seen * length and before % seen == 0 and length % (before // seen) == 0:
                return self._of_heads(dim, length // (before // seen), before // seen)
            seen *= length
        raise NotProved(f"a view of shape {tuple(tensor.shape)} to {tuple(result.shape)} mixes heads")

    def _of_heads(self, dim: int, heads: int, blocks: int) -> Split:
        if heads % self.ranks:
            raise NotProved(f"{heads} heads do not divide over {self.axis}={self.ranks}")
        return Split(dim, (heads,) * blocks)

    def _op_expand(self, node: fx.Node) -> None:
        tensor, split = self._tensor(node)
        result = self._run(node)
        dim = split.dim + result.dim() - tensor.dim()
        if result.shape[dim] != tensor.shape[split.dim]:
            raise NotProved("expand repeats the dim of heads")
        call = self._call(heads_code.expand, self._copied(node.args[0]), dim, *self._copied(tuple(node.args[1:])))
        self._done(node, call, torch.empty(result.shape), Split(dim, split.blocks))

    def _op_transpose(self, node: fx.Node) -> None:
        a, b = (self._value(self._argument(node, index, f"dim{index - 1}", None)) for index in (1, 2))
        tensor, _ = self._tensor(node)
        self._swap(node, self._dim(a, tensor), self._dim(b, tensor))

    _op_swapaxes = _op_transpose

    def _swap(self, node: fx.Node, a: int, b: int) -> None:
        _, split = self._tensor(node)
        dim = {a: b, b: a}.get(split.dim, split.dim)
        self._kept(node, self._run(node), Split(dim, split.blocks))

    def _op_permute(self, node: fx.Node) -> None:
        tensor, split = self._tensor(node)
        order = [self._dim(dim, tensor) for dim in _flat([self._value(list(node.args[1:]))])]
        if len(order) != tensor.dim():
            raise NotProved("permute by keywords")
        dim = order.index(split.dim)
        self._kept(node, self._run(node), Split(dim, split.blocks))

    def _op_unsqueeze(self, node: fx.Node) -> None:
        _, split = self._tensor(node)
        result = self._run(node)
        at = self._value(self._argument(node, 1, "dim", None))
        at = at + result.dim() if at < 0 else at
        dim = split.dim + (at <= split.dim)
        self._kept(node, result, Split(dim, split.blocks))

    def _op_squeeze(self, node: fx.Node) -> None:
        tensor, split = self._tensor(node)
        at = self._value(self._argument(node, 1, "dim", None))
        if not isinstance(at, int) or self._dim(at, tensor) == split.dim:
            raise NotProved("squeeze may drop the dim of heads")
        result = self._run(node)
        lost = tensor.dim() - result.dim() if self._dim(at, tensor) < split.dim else 0
        self._kept(node, result, Split(split.dim - lost, split.blocks))

    def _op_repeat_interleave(self, node: fx.Node) -> None:
        tensor, split = self._tensor(node)
        times = self._value(self._argument(node, 1, "repeats", None))
        at = self._value(self._argument(node, 2, "dim", None))
        if not isinstance(times, int) or not isinstance(at, int):
            raise NotProved("repeat_interleave by a tensor, or without a dim")
        grown = tuple(block * times for block in split.blocks) if self._dim(at, tensor) == split.dim else split.blocks
        self._kept(node, self._run(node), Split(split.dim, grown))

    def _op_chunk(self, node: fx.Node) -> None:
        tensor, split = self._tensor(node)
        at = self._dim(self._value(self._argument(node, 2, "dim", 0)), tensor)
        pieces = self._run(node)
        if at != split.dim:
            self._kept(node, pieces, split)
            return
        taken = self._pieces(split, [piece.shape[at] for piece in pieces])
        mine = [sum(blocks) // self.ranks for blocks in taken]
        self.copies[node] = self.new.call_method("split", (self._copied(node.args[0]), mine, at))
        self.values[node] = pieces
        for piece, blocks in zip(pieces, taken, strict=True):
            self._mark(piece, Split(at, blocks))

    _op_split = _op_chunk

    def _pieces(self, split: Split, sizes: list[int]) -> list[tuple[int, ...]]:
        """The blocks of each piece of a split dim."""
        rest, found = list(split.blocks), []
        for size in sizes:
            taken: list[int] = []
            while rest and sum(taken) < size:
                taken.append(rest.pop(0))
            if sum(taken) != size:
                raise NotProved("a slice of features cuts through heads")
            found.append(tuple(taken))
        return found

    def _op_unbind(self, node: fx.Node) -> None:
        tensor, split = self._tensor(node)
        at = self._dim(self._value(self._argument(node, 1, "dim", 0)), tensor)
        if at == split.dim:
            raise NotProved("unbind takes heads apart")
        made = Split(split.dim - (at < split.dim), split.blocks)
        self._kept(node, self._run(node), made)

    def _op_getitem(self, node: fx.Node) -> None:
        tensor = self._value(node.args[0])
        if not isinstance(tensor, torch.Tensor):  # of a tuple: its element has its mark already
            self._kept(node, self._whole(node), None)
            return
        tensor, split = self._tensor(node)
        index = self._value(node.args[1])
        items = list(index) if isinstance(index, tuple) else [index]
        if any(not (item is None or item is Ellipsis or isinstance(item, int | slice)) for item in items):
            raise NotProved("heads are picked by a tensor")
        real = sum(isinstance(item, int | slice) for item in items)
        if Ellipsis in items:
            where = items.index(Ellipsis)
            items[where : where + 1] = [slice(None)] * (tensor.dim() - real)
        items += [slice(None)] * (tensor.dim() - sum(item is not None for item in items))
        dim, made, blocks, mine = 0, 0, split.blocks, None
        for item in items:
            if item is None:
                made += 1
                continue
            if dim == split.dim:
                if isinstance(item, int):
                    raise NotProved("one head is picked")
                if item != slice(None):
                    blocks, mine = self._sliced(split, item)
                break
            dim, made = dim + 1, made + (not isinstance(item, int))
        result = self._run(node)
        if mine is None:
            copy = self.new.node_copy(node, self._copy_of)
        elif len(items) == tensor.dim() and all(i == slice(None) for at, i in enumerate(items) if at != split.dim):
            copy = self.new.call_method("narrow", (self._copied(node.args[0]), split.dim, *mine))
        else:
            raise NotProved("features and other dims are sliced at once")
        self._done(node, copy, result, Split(made, blocks))

    def _sliced(self, split: Split, item: slice) -> tuple[tuple[int, ...], tuple[int, int]]:
        start, stop, step = item.indices(sum(split.blocks))
        if step != 1 or stop <= start:
            raise NotProved("a slice of features cuts through heads")
        _, blocks = self._pieces(split, [start, stop - start]) if start else (None, self._pieces(split, [stop])[0])
        return blocks, (start // self.ranks, (stop - start) // self.ranks)

    def _op_cat(self, node: fx.Node) -> None:
        tensors = self._all_split("cat", self._value(node.args[0]))
        dim, blocks = self._same(tensors)
        at = self._dim(self._value(self._argument(node, 1, "dim", 0)), tensors[0])
        result = self._run(node)
        if at - tensors[0].dim() == dim:
            raise NotProved("cat along the dim of heads")
        self._kept(node, result, Split(result.dim() + dim, blocks))

    def _op_stack(self, node: fx.Node) -> None:
        tensors = self._all_split("stack", self._value(node.args[0]))
        dim, blocks = self._same(tensors)
        result = self._run(node)
        at = self._value(self._argument(node, 1, "dim", 0))
        at = at + result.dim() if at < 0 else at
        old = tensors[0].dim() + dim
        self._kept(node, result, Split(old + (at <= old), blocks))

    # products

    def _op_matmul(self, node: fx.Node) -> None:
        if len(node.args) != 2 or node.kwargs:
            raise NotProved("matmul by keywords")
        dim, blocks = self._same(self._parts(node))
        if dim > -3:
            raise NotProved("a product sums over heads")
        result = self._run(node)
        args = tuple(self._met(argument, dim, blocks, result.dim()) for argument in node.args)
        self._done(node, self.new.create_node(node.op, node.target, args), result, Split(result.dim() + dim, blocks))

    _op_bmm = _op_matmul

    def _op_einsum(self, node: fx.Node) -> None:
        equation = str(node.args[0]).replace(" ", "")
        tensors = self._value(list(node.args[1:]))
        left, arrow, right = equation.partition("->")
        terms = left.split(",")
        if not arrow or "." in equation or len(terms) != len(tensors) or any(id(t) not in self.splits for t in tensors):
            raise NotProved("einsum with an ellipsis, or of whole tensors with parts of heads")
        letters = {term[self.splits[id(t)].dim] for term, t in zip(terms, tensors, strict=True)}
        blocks = {self.splits[id(t)].blocks for t in tensors}
        if len(letters) != 1 or len(blocks) != 1 or not letters <= set(right):
            raise NotProved("einsum sums over heads")
        made = Split(right.index(letters.pop()), blocks.pop())
        self._kept(node, self._run(node), made)

    def _op_scaled_dot_product_attention(self, node: fx.Node) -> None:
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale")
        given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
        tensors = [given.pop(name, None) for name in names[:3]]
        query, key, value = self._all_split("attention", self._value(tensors))
        dims = {self.splits[id(tensor)].dim - tensor.dim() for tensor in (query, key, value)}
        counts = {len(self.splits[id(tensor)].blocks) for tensor in (query, key, value)}
        if len(dims) != 1 or len(counts) != 1 or max(dims) > -3:
            raise NotProved("attention whose heads are not a batch dim")
        dim, blocks = dims.pop(), self.splits[id(query)].blocks
        mask = given.pop("attn_mask", None)
        options = {"attn_mask": self._met(mask, dim, blocks, query.dim())} | self._copied(given)
        if isinstance(mask, fx.Node) and self.values[mask] is _UNKNOWN:
            result = torch.empty(*query.shape[:-1], value.shape[-1])
        else:
            result = self._run(node)
        if given.get("dropout_p"):
            copy = self._call(heads_code.attention, *self._copied(tensors), **options)
        else:
            copy = self.new.call_function(F.scaled_dot_product_attention, tuple(self._copied(tensors)), options)
        self._done(node, copy, result, Split(result.dim() + dim, blocks))

    def _op_dropout(self, node: fx.Node) -> None:
        tensor, split = self._tensor(node)
        args, options = self._copied(tuple(node.args)), self._copied(dict(node.kwargs))
        active = self._argument(node, 2, "training", True)
        copy = (
            self._call(heads_code.dropout, *args, **options)
            if active
            else self.new.call_function(F.dropout, args, options)
        )
        self._done(node, copy, torch.empty_like(tensor), split)

    # arguments

    def _argument(self, node: fx.Node, index: int, name: str, default: Any) -> Any:
        return node.args[index] if len(node.args) > index else node.kwargs.get(name, default)

    @staticmethod
    def _dim(dim: Any, tensor: torch.Tensor) -> int:
        if not isinstance(dim, int):
            raise NotProved("a dim that is not a number")
        return dim + tensor.dim() if dim < 0 else dim


def _flat(values: Any) -> list[Any]:
    """The leaves of lists, tuples and dicts."""
    if isinstance(values, list | tuple) and not isinstance(values, torch.Size):
        return [leaf for value in values for leaf in _flat(value)]
    if isinstance(values, dict):
        return [leaf for value in values.values() for leaf in _flat(value)]
    return [values]
