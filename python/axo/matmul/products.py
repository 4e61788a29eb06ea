"""The three products of a layer on this rank, each in the way that the tuner of axo_kernels chose.

    forward      O[m, n] = I[m, k] W[n, k]^T      NT
    grad_input   I[m, k] = dO[m, n] W[n, k]       NN
    grad_weight  W[n, k] = dO[m, n]^T I[m, k]     TN

``AXO_TUNE`` of rank 0 holds for all ranks, which read it from the store that brought them together:

    off         torch's own products; axo_kernels is not asked
    cached      what `axo tune` or an earlier run has measured for these very sizes, torch's own elsewhere (the default:
                nothing is timed, nothing is communicated, and without a cache every product is torch's own)
    first-step  measure at a layer's first call, all ranks of x, y and z together

These ranks measure together at the first call for a (product, whole weight, dtype), which all of them reach at the same
moment. They time the largest share, take the largest time over the ranks, and make one choice for all. Later calls with
other numbers of rows reuse the choice. Each data replica chooses for itself, since replicas may run different numbers
of steps. The measurement issues collectives of its own.

On a grid of one rank torch's autograd runs the layer unless a product is to be computed differently. What is compiled
by torch.compile, and dtypes that axo_kernels does not take, are torch's own too.

Not here: communication of products (``axo.matmul.product``, fused ones ``axo.matmul.fused``).
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F

from axo.comm.connect import Communicators
from axo.grid import Coords
from axo.matmul.fused import FusedProducts, FusedSum, published
from axo.overlap.engine import Exchange
from axo.overlap.events import span
from axo.placement import Placement
from axo.settings import value_of
from axo_kernels.comm.communicator import FusedCommunicator
from axo_kernels.fused import fp8
from axo_kernels.gemm.layout import DTYPES, Product
from axo_kernels.tune.choice import Choice
from axo_kernels.tune.runners import Runner
from axo_kernels.tune.tuner import Tuner, runner

LAYOUT = {"forward": "NT", "grad_input": "NN", "grad_weight": "TN"}
_RECORDED_AS = {"forward": "forward", "grad_input": "dI", "grad_weight": "dW"}  # in ``axo.overlap.record``
Result = TypeVar("Result")
_MEETING_S = 300.0
# Seconds for the timed rounds of one product at a first step: a model has a dozen.
_BUDGET_S = 0.3
_MOST_SIZES = 1024
_functorch_active = torch._C._are_functorch_transforms_active


class Products:
    """What the layers of one grid share: the mode, the tuner, and a count of what ran. See :func:`products_of`.

    Attributes:
        mode: ``"off"``, ``"cached"`` or ``"first-step"``.
        calls: How often each of ``"forward"``, ``"grad_input"``, ``"grad_weight"`` ran here; ``"layer"`` counts the
            calls of a one-rank layer that torch's autograd ran whole.
        tuner: None when off.
        fused: The products that run with their all-reduce.
    """

    def __init__(self, comms: Communicators) -> None:
        self.mode, entries = _agreed(comms)
        self.calls: Counter[str] = Counter()
        self.tuner: Tuner | None = None
        if self.mode != "off":
            ranks = _ModelRanks(comms)
            together = self.mode == "first-step" and ranks.size > 1
            self.tuner = Tuner(self.mode, comm=ranks if together else None, budget=_BUDGET_S)
        deciding = self.tuner if self.tuner is not None and self.tuner.comm is not None else None
        self.fused = FusedProducts(comms, deciding, entries)
        self._sites: dict[Any, Choice] = {}

    def poll(self) -> None:
        """Raise what a kernel of a fused product has reported so far: see :meth:`FusedProducts.poll`."""
        self.fused.poll()

    def __deepcopy__(self, memo: dict[int, Any]) -> Products:
        return self  # belongs to the communicators, as a copied layer does

    def choice(self, site: Hashable, product: Product, device: torch.device) -> Choice:
        """How to compute ``product``; ``site`` is what all ranks call it by."""
        if self.tuner is None or product.dtype not in DTYPES or device.type not in ("cpu", "cuda"):
            return Choice("vendor", product.layout)
        if self.tuner.comm is None:
            return self.tuner.choose(product, device) if product.flops else Choice("vendor", product.layout)
        choice = self._sites.get(site)
        if choice is None:
            m, n, k = (int(size) for size in self.tuner.comm.maximum([product.m, product.n, product.k]))
            largest = replace(product, m=m, n=n, k=k)
            choice = self.tuner.choose(largest, device) if largest.flops else Choice("vendor", product.layout)
            self._sites[site] = choice
        return choice


def products_of(comms: Communicators) -> Products:
    """The products of a grid, made once and kept with its communicators. Every rank must ask at some time."""
    products = comms.attached.get("products")
    if not isinstance(products, Products):
        products = comms.attached["products"] = Products(comms)
    return products


class LayerProducts:
    """The products of one layer, in the record of its engine.

    Args:
        exchange: The layer's.
        placement: Where the layer's weight lies.

    Attributes:
        rows_agree: Whether ranks along z call the layer with alike numbers of rows; if not (experts), none of its
            products runs with a collective over z.
        fuses: Whether any product of this layer could run with its collective as one.
        flat: Whether inputs and outputs are multiplied as matrices, in two dims.
        row_dims: The dims of an output that a bias does not have.
    """

    flat = True
    row_dims: int | tuple[int, ...] = 0

    def __init__(self, exchange: Exchange, placement: Placement) -> None:
        self.rows_agree = True
        self._exchange = exchange
        self.products = products_of(exchange.comms)
        self._calls = self.products.calls
        self._site = (placement.global_shape, placement.splits, placement.blocks)
        self._features, self._even = _shares(exchange.comms, placement)
        self._runs: dict[Any, Runner] = {}
        self._adding: dict[Any, Runner | None] = {}
        self._whole: dict[Any, bool] = {}
        self._fp8: str | None = None
        self.fuses = self.products.fused.possible

    def use_fp8(self, scaling: str) -> None:
        """Round the operands of all three products to eight bits, as ``axo_kernels.fused.fp8`` does with ``scaling``.

        Nothing is tuned or fused then.
        """
        self._fp8, self.fuses = scaling, False
        self._runs.clear()
        self._adding.clear()

    def forward(self, rows: torch.Tensor, block: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """(m, k), (n, k), (n,) -> (m, n)."""
        run = self._runs.get(("forward", rows.shape, block.shape, rows.dtype)) or self._find("forward", rows, block)
        if self._exchange.engine.events is not None:
            return self._run("forward", run, rows, block, bias)
        self._calls["forward"] += 1
        return run(rows, block, bias)

    def grad_input(self, grad: torch.Tensor, block: torch.Tensor, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        """(m, n), (n, k) -> (m, k). ``shape`` is the input's, which a convolution cannot tell from the others."""
        run = self._runs.get(("grad_input", grad.shape, block.shape, grad.dtype))
        run = run or self._find("grad_input", grad, block)
        if self._exchange.engine.events is not None:
            return self._run("grad_input", run, grad, block)
        self._calls["grad_input"] += 1
        return run(grad, block)

    def grad_weight(self, grad: torch.Tensor, rows: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """(m, n), (m, k) -> (n, k), into ``out`` when given."""
        run = self._runs.get(("grad_weight", grad.shape, rows.shape, grad.dtype))
        run = run or self._find("grad_weight", grad, rows)
        if self._exchange.engine.events is not None:
            return self._run("grad_weight", run, grad, rows, out)
        self._calls["grad_weight"] += 1
        return run(grad, rows, out)

    def _run(self, kind: str, run: Callable[..., Result], *operands: Any) -> Result:
        """Count a product, and record it if the layer's engine has a record."""
        self._calls[kind] += 1
        events = self._exchange.engine.events
        if events is None:
            return run(*operands)
        with span(events, "compute", _RECORDED_AS[kind], "", self._exchange.name):
            return run(*operands)

    def add_grad_weight(self, grad: torch.Tensor, rows: torch.Tensor, total: torch.Tensor) -> bool:
        """(m, n), (m, k) -> added to the fp32 (n, k) ``total`` as it is computed, if a kernel was chosen that can."""
        run = self._adding_kernel(grad, rows)
        if run is None:
            return False
        self._run("grad_weight", partial(run, out=total, accumulate=True), grad, rows)
        return True

    def _adding_kernel(self, grad: torch.Tensor, rows: torch.Tensor) -> Runner | None:
        key = (grad.shape, rows.shape, grad.dtype)
        if key not in self._adding:
            _keep_short(self._adding)
            self._adding[key] = None
            if self._fp8 is None and grad.numel() * rows.numel():
                sizes = grad.shape[0], grad.shape[1], rows.shape[1]
                choice = self._choice("grad_weight", *sizes, grad.dtype, grad.device)
                if choice.config is not None and choice.config.groups:
                    self._adding[key] = runner(choice, LAYOUT["grad_weight"])
        return self._adding[key]

    def fused_forward(self, rows: torch.Tensor, block: torch.Tensor, axis: str | None) -> torch.Tensor | None:
        """(m, k), (n, k) -> the (m, n) summed over ``axis``; None where the product and its sum are to run apart."""
        choice = self._fused_choice("forward", rows, axis)
        if choice is None or axis is None:
            return None
        return self._run("forward", lambda: self.products.fused.start(choice, rows, block, axis, "NT").wait())

    def start_fused_grad_input(self, grad: torch.Tensor, block: torch.Tensor, axis: str | None) -> FusedSum | None:
        """(m, n), (n, k) -> the (m, k) on its way to the sum over ``axis``; None as above."""
        choice = self._fused_choice("grad_input", grad, axis)
        if choice is None or axis is None:
            return None
        return self._run("grad_input", self.products.fused.start, choice, grad, block, axis, "NN")

    def gathering(self, rows: torch.Tensor, in_axis: str | None) -> Choice | None:
        """How to multiply (m, k) with a weight that is gathered over z meanwhile; None: gather, then multiply."""
        if not self._even or not self.rows_agree:
            return None
        if in_axis is not None and self._fused_choice("forward", rows, in_axis) is not None:
            return None
        return self._fused_choice("gathered", rows, "z")

    def gather_forward(
        self, choice: Choice, rows: torch.Tensor, shard: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(m, k), this rank's (n/Gz, k), (n,) -> (m, n) and the whole (n, k)."""
        return self._run("forward", self.products.fused.gather, choice, rows, shard, bias, "z")

    def scattering(self, grad: torch.Tensor) -> Choice | None:
        """How to compute the gradient of the weight while it is scattered over z; None: one after the other."""
        return self._fused_choice("grad_weight", grad, "z") if self._even and self.rows_agree else None

    def scatter_grad_weight(
        self, choice: Choice, grad: torch.Tensor, rows: torch.Tensor, op: str, out: torch.Tensor
    ) -> None:
        """(m, n), (m, k) -> this rank's (n/Gz, k), reduced over z by ``op``, into ``out``."""
        self._run("grad_weight", self.products.fused.scatter, choice, grad, rows, "z", op, out)

    def _fused_choice(self, kind: str, a: torch.Tensor, axis: str | None) -> Choice | None:
        fused = self.products.fused
        if axis is None or not self.fuses or fused.on(axis).size == 1:
            return None
        if torch.compiler.is_compiling():
            return None
        if torch._C._len_torch_dispatch_stack():
            return None  # a mode, such as selective checkpointing, must see the product by itself
        (n, k), m = self._features, a.shape[0]
        sizes = {
            "forward": (m, n, k),
            "grad_input": (m, k, n),
            "gathered": (m, n // fused.on(axis).size, k),
            "grad_weight": (n, k, m),
        }[kind]
        product = Product(LAYOUT["forward" if kind == "gathered" else kind], *sizes, a.dtype)
        return fused.choice(kind, ("fused", kind, a.dtype, *self._site), axis, product, a.device)

    def alone(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The layer on a grid of one rank, differentiable: (..., k), (n, k), (n,) -> (..., n)."""
        untuned = self.products.tuner is None or torch.compiler.is_compiling() or _functorch_active()
        if untuned and self._fp8 is None:
            return F.linear(input, weight, bias)
        dtype = compute_dtype(input)
        recorded = torch.is_grad_enabled()
        key = (input.shape, weight.shape, dtype, input.device, recorded)
        plain = self._fp8 is None and self._whole.get(key)
        if plain is None:
            _keep_short(self._whole)
            plain = self._whole[key] = self._is_torchs_own(input, weight, dtype, recorded)
        if plain:
            self._calls["layer"] += 1
            return F.linear(input, weight, bias)
        rows = input.to(dtype).reshape(-1, input.shape[-1])
        output = _Alone.apply(rows, weight.to(dtype), None if bias is None else bias.to(dtype), self)
        return output.view(*input.shape[:-1], output.shape[-1])

    def _is_torchs_own(self, input: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype, recorded: bool) -> bool:
        n, k = weight.shape
        m = input.numel() // k if k else 0
        kinds = LAYOUT if recorded else ("forward",)
        return all(self._choice(kind, m, n, k, dtype, input.device).is_vendor(LAYOUT[kind]) for kind in kinds)

    def _choice(self, kind: str, m: int, n: int, k: int, dtype: torch.dtype, device: torch.device) -> Choice:
        """The choice for a product of a layer with m rows, n features out and k in."""
        sizes = {"forward": (m, n, k), "grad_input": (m, k, n), "grad_weight": (n, k, m)}[kind]
        product = Product(LAYOUT[kind], *sizes, dtype)
        return self.products.choice((kind, dtype, *self._site), product, device)

    def _find(self, kind: str, a: torch.Tensor, b: torch.Tensor) -> Runner:
        m, n = (b.shape[0], a.shape[1]) if kind == "grad_weight" else (a.shape[0], b.shape[0])
        k = b.shape[1]
        layout = LAYOUT[kind]
        choice = Choice("vendor", layout)
        if not torch.compiler.is_compiling() and self._fp8 is None:
            choice = self._choice(kind, m, n, k, a.dtype, a.device)
        packed = b.dtype == torch.uint8  # gathered over z in fp8: no operand of torch's own, even without rows
        if not packed and (not m * n * k or (self._fp8 is None and choice.is_vendor(layout))):
            run = _TORCHS_OWN[kind]
        elif self._fp8 is None:
            run = _tuned(kind, runner(choice, layout))
        else:
            run = _in_fp8(kind, self._fp8)
        _keep_short(self._runs)
        self._runs[kind, a.shape, b.shape, a.dtype] = run
        return run


def _shares(comms: Communicators, placement: Placement) -> tuple[tuple[int, int], bool]:
    """The most rows and columns that a rank's block of the weight has; whether all blocks are of one size, and cut over
    z into equal shards. The same on all ranks."""
    whole, grid = placement.without("z"), comms.grid
    first = Coords(0, 0, 0, 0) if placement.holders is None else placement.holders.first
    shapes = {whole.local_shape(grid, first._replace(x=x, y=y)) for x in range(grid.x) for y in range(grid.y)}
    rows, columns = max(shape[0] for shape in shapes), max(math.prod(shape[1:]) for shape in shapes)
    return (rows, columns), len(shapes) == 1 and rows % grid.z == 0


def _keep_short(found: dict[Any, Any]) -> None:
    """Forget what was found for sizes that may never come back, such as prompts of all lengths."""
    if len(found) >= _MOST_SIZES:
        found.clear()


def _own_grad_weight(grad: torch.Tensor, rows: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    return torch.mm(grad.t(), rows) if out is None else torch.mm(grad.t(), rows, out=out)


_TORCHS_OWN: dict[str, Runner] = {"forward": F.linear, "grad_input": torch.mm, "grad_weight": _own_grad_weight}


def _tuned(kind: str, run: Runner) -> Runner:
    """The tuner's runner with the arguments of ``kind``."""
    if kind == "forward":
        return lambda rows, block, bias: run(rows, block, bias=bias)
    if kind == "grad_weight":
        return lambda grad, rows, out: run(grad, rows, out=out)
    return run


def _in_fp8(kind: str, scaling: str) -> Runner:
    """The product of operands that are rounded to eight bits: e5m2 for the gradient that comes from behind."""

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if kind == "grad_input" and b.dtype == torch.uint8:
            return fp8.multiply_grad_packed(a, b, scaling)
        narrow, wide = fp8.formats(a.device)
        left = fp8.rounded(a, narrow if kind == "forward" else wide, scaling, 1)
        return fp8.multiply(left, fp8.rounded(b, narrow, scaling, 0), a.dtype)

    def forward(rows: torch.Tensor, block: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if block.dtype == torch.uint8:  # gathered over z in fp8
            out = fp8.multiply_packed(rows, block, scaling)
        else:
            out = product(rows, block.t())
        return out if bias is None else out.add_(bias)

    def grad_weight(grad: torch.Tensor, rows: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        if over := -len(rows) % fp8.MULTIPLE:  # the GPU sums over whole multiples; zeros change no maximum and no sum
            grad, rows = (F.pad(each, (0, 0, 0, over)) for each in (grad, rows))
        result = product(grad.t(), rows)
        return result if out is None else out.copy_(result)

    runs: dict[str, Runner] = {"forward": forward, "grad_input": product, "grad_weight": grad_weight}
    return runs[kind]


class _Alone(torch.autograd.Function):
    """A layer on one rank with products that are not torch's own; differentiable twice, by torch's own."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, products: LayerProducts
    ) -> torch.Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.products = products
        return products.forward(rows, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        wants_rows, wants_weight, wants_bias, _ = ctx.needs_input_grad
        products = ctx.products
        if torch.is_grad_enabled():  # create_graph=True
            grad_rows = grad @ weight if wants_rows else None
            grad_weight = grad.t() @ rows if wants_weight else None
        else:
            grad_rows = products.grad_input(grad, weight) if wants_rows else None
            grad_weight = products.grad_weight(grad, rows) if wants_weight else None
        return grad_rows, grad_weight, grad.sum(0) if wants_bias else None, None


class _ModelRanks(FusedCommunicator):
    """The ranks of x, y and z that share one model, for decisions only: the axes one after the other."""

    def __init__(self, comms: Communicators) -> None:
        grid, coords = comms.grid, comms.coords
        super().__init__(coords.x + grid.x * (coords.y + grid.y * coords.z), grid.x * grid.y * grid.z)
        self._lines = [comms.axis(axis) for axis in ("x", "y", "z") if grid.size(axis) > 1]
        self._device = comms.device

    def maximum(self, values: list[float]) -> list[float]:
        largest = torch.tensor(values, dtype=torch.float64, device=self._device)
        for line in self._lines:
            line.all_reduce(largest, "max")
        return largest.tolist()

    @property
    def _decisions(self) -> torch.device:
        return self._device

    def _broadcast(self, tensor: torch.Tensor) -> None:
        for line in self._lines:
            line.broadcast(tensor, 0)


def _agreed(comms: Communicators) -> tuple[str, dict[str, Any]]:
    """Rank 0's mode, and what it has on disk of fused products. The store alone is used: nobody has to come now."""
    mode = value_of("AXO_TUNE")
    if comms.grid.world_size == 1 or not dist.is_initialized():  # nobody to agree with (axo.comm.recording)
        return mode, {}
    # Of these ranks: other stages, and grids on other parts of the world, count for themselves.
    first = comms.stage * comms.grid.world_size
    mine = hash(tuple(comms.ranks[first : first + comms.grid.world_size]))  # of integers: the same on all ranks
    store = dist.PrefixStore(f"axo/tune/{mine}", dist.distributed_c10d._get_default_store())
    # How many grids have had layers in this process: equal on all ranks, since they build the same.
    key = f"grid{store.add(f'grids/{comms.rank}', 1)}"
    if comms.rank == 0:
        entries = published(Tuner(mode).cache(comms.device).all()) if mode == "cached" else {}
        store.set(key, json.dumps([mode, entries]))
    store.wait([key], timedelta(seconds=_MEETING_S))
    mode, entries = json.loads(store.get(key))
    return mode, entries


def compute_dtype(input: torch.Tensor) -> torch.dtype:
    """The dtype that a product of ``input`` computes in: autocast's where it applies, else the input's own."""
    kind = input.device.type
    if torch.is_autocast_enabled(kind) and input.is_floating_point() and input.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return input.dtype
