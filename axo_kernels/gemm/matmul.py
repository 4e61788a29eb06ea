"""Matrix product in the layouts NN, NT and TN: ``C = act(A B + bias) (* gate)``, optionally added onto C.

    NN: A[M, K] B[K, N]        NT: A[M, K] B[N, K]^T        TN: A[K, M]^T B[K, N]          (row-major names)

bf16, fp16 and fp32 with fp32 sums. On a GPU a persistent Triton kernel runs (tensor descriptors where the operands
allow it, plain pointers otherwise). CPU tensors, outside the interpreter, go to torch (a plain product in fp64 too),
and so do those of a GPU that the kernels do not serve (before sm_80). Which of several kernels, configurations or the
vendor library is fastest is the tuner's question (axo_kernels.tune), communication is axo_kernels.fused's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from axo_kernels import device as devices
from axo_kernels.gemm.layout import (
    Product,
    as_row_major,
    autocast,
    check_offsets,
    folded_rows,
    overlaps_itself,
    product_of,
    share_memory,
)
from axo_kernels.gemm.repeat import KernelLaunch, Prepared
from axo_kernels.gemm.tiles import (
    Config,
    Target,
    cut_to_fit,
    default_config,
    purpose_of,
    shrink,
    split_short,
)

ACTIVATIONS = (None, "gelu", "gelu_tanh", "silu", "silu_gate")
BACKENDS = (None, "vendor", "triton")
_INT32 = 2**31 - 1


@dataclass(frozen=True)
class Epilogue:
    """What happens to the sums of a product before they are stored; the arguments of :func:`matmul` by these names."""

    out: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    activation: str | None = None
    accumulate: bool = False
    out_dtype: torch.dtype | None = None
    gate: torch.Tensor | None = None

    def check(self, product: Product, a: torch.Tensor, b: torch.Tensor) -> None:
        """Refuse what does not fit the product of a and b, or together.

        Raises:
            ValueError: The message says what would.
        """
        out, bias, gate, activation = self.out, self.bias, self.gate, self.activation
        shape = (*(a.shape[:-2]), product.m, product.n)
        if activation not in ACTIVATIONS:
            raise ValueError(f"matmul: activation={activation!r}; use one of {', '.join(map(repr, ACTIVATIONS))}")
        if (gate is not None) != (activation == "silu_gate"):
            raise ValueError("matmul: gate and activation='silu_gate' belong together; give both or neither")
        for tensor, name in ((bias, "bias"), (gate, "gate"), (out, "out")):
            if tensor is not None and tensor.device != a.device:
                raise ValueError(f"matmul: {name} is on {tensor.device} and a is on {a.device}; move one of them")
            if tensor is not None and not tensor.is_floating_point():
                raise ValueError(f"matmul: {name} is {tensor.dtype}, which is not a floating-point type; cast it")
        if gate is not None and tuple(gate.shape) != shape:
            raise ValueError(f"matmul: gate has shape {tuple(gate.shape)}; the product has {shape}")
        if bias is not None and tuple(bias.shape) != (product.n,):
            raise ValueError(f"matmul: bias has shape {tuple(bias.shape)}; use ({product.n},), one value a column")
        if self.accumulate and out is None:
            raise ValueError("matmul: accumulate=True adds onto out; give out")
        if out is not None:
            if tuple(out.shape) != shape:
                raise ValueError(f"matmul: out has shape {tuple(out.shape)}; the product has {shape}")
            if self.out_dtype not in (None, out.dtype):
                raise ValueError(f"matmul: out is {out.dtype} and out_dtype is {self.out_dtype}; leave out_dtype away")
            if out.is_neg():
                raise ValueError("matmul: out is a view that negates (of a conjugate); write into memory of its own")
            if overlaps_itself(out):
                raise ValueError(
                    f"matmul: out of shape {shape} has strides {out.stride()}, so that elements share memory; give room"
                    " of its own to each (torch.empty)"
                )
            for tensor, name in ((a, "a"), (b, "b"), (bias, "bias"), (gate, "gate")):
                if tensor is not None and share_memory(out, tensor):
                    raise ValueError(f"matmul: out lies on {name}, which is read while out is written; give other room")
        if self.out_dtype is not None and not getattr(self.out_dtype, "is_floating_point", False):
            raise ValueError(f"matmul: out_dtype={self.out_dtype} is not a floating-point type")


def matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    layout: str = "NN",
    out: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    accumulate: bool = False,
    out_dtype: torch.dtype | None = None,
    *,
    gate: torch.Tensor | None = None,
    backend: str | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """Multiply two matrices stored as ``layout`` says.

    Args:
        a: ``[..., M, K]`` (TN: ``[..., K, M]``); any strides.
        b: ``[..., K, N]`` (NT: ``[..., N, K]``); for NN and NT two dims serve all of a's leading dims.
        layout: ``"NN"``, ``"NT"`` or ``"TN"``.
        out: ``[..., M, N]`` to write into; then no gradient is recorded.
        bias: ``[N]``, added before the activation.
        activation: ``"gelu"``, ``"gelu_tanh"``, ``"silu"``, or ``"silu_gate"`` (``silu(A B + bias) * gate``).
        accumulate: Add onto ``out`` in fp32, for example into an fp32 master gradient.
        out_dtype: dtype of the result; the operands' (or that of ``out``) by default.
        gate: ``[..., M, N]``, for ``"silu_gate"`` only.
        backend: ``"triton"``, ``"vendor"`` (torch's own), or None: Triton on a GPU, torch on a CPU.
        config: Tile configuration of the Triton kernel; None takes the default one.

    Raises:
        ValueError: Operands, layout, epilogue, configuration or sizes do not fit together; the message says what would.
    """
    plain = backend is None and out is None and bias is None and activation is None and config is None
    if plain and a.device.type == "cpu":
        if not accumulate and out_dtype is None and gate is None and not devices.interpreted():
            return _plain_vendor(a, b, layout)
    if out is None:
        a, b = autocast(a, b)
    product = product_of(a, b, layout)
    if backend not in BACKENDS:
        raise ValueError(f"matmul: backend={backend!r}; use one of {', '.join(map(repr, BACKENDS))}")
    check_config("matmul", config)
    epilogue = Epilogue(out, bias, activation, accumulate, out_dtype, gate)
    epilogue.check(product, a, b)
    triton_runs = devices.runs_triton(a.device)
    if backend == "triton" and not triton_runs:
        raise ValueError(
            f"matmul: backend='triton' cannot run on {a.device} here; use backend='vendor', or install triton for a "
            f"GPU (sm_80 or later, or AMD's), or set TRITON_INTERPRET=1 for CPU tensors"
        )
    if backend == "vendor" or not triton_runs or min(product.m, product.n, product.k, product.batch) == 0:
        return vendor_matmul(a, b, layout, out, bias, activation, accumulate, out_dtype, gate=gate)
    a, b = a.resolve_neg(), b.resolve_neg()  # a kernel reads memory, not a view that negates (x.conj().imag)
    if out is None and torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (a, b, bias, gate)):
        if activation is not None or (out_dtype or a.dtype) != a.dtype:
            raise ValueError(
                "matmul: gradients flow through the Triton kernel without activation and out_dtype only; use "
                "torch.no_grad(), backend='vendor', or apply the activation outside"
            )
        rows, lead = folded_rows(a, b, layout)
        result: torch.Tensor = _Matmul.apply(rows, b, bias, layout, config)
        return result if rows is a else result.view(*lead, product.n)
    return triton_matmul(a, b, product, epilogue, config)[0]


def check_config(owner: str, config: Any) -> None:
    """Refuse what is no configuration, or has a field that no device could take; ``owner`` begins the message.

    Raises:
        ValueError: The message says which.
    """
    if config is not None and not isinstance(config, Config):
        raise ValueError(f"{owner}: config={config!r} is no Config (axo_kernels.gemm.tiles); leave it out, or give one")
    if config is not None:
        config.check(owner)


def _plain_vendor(a: torch.Tensor, b: torch.Tensor, layout: str) -> torch.Tensor:
    """Shortest way to torch: torch's own checks, rephrased by ours only when they fail."""
    try:
        two = b.dim() == 2 and (layout != "TN" or a.dim() == 2)
        fit = two or (b.dim() > 2 and a.shape[:-2] == b.shape[:-2])  # torch would broadcast; the kernels do not
        if a.dtype is b.dtype and a.is_floating_point() and a.dim() > 1 and fit:
            if layout == "NT":
                return F.linear(a, b) if two else torch.matmul(a, b.mT)
            if layout == "NN":
                return torch.matmul(a, b)
            if layout == "TN":
                return torch.matmul(a.mT, b)
    except RuntimeError:
        product_of(a, b, layout)
        raise
    product_of(a, b, layout)
    return torch.matmul(*as_row_major(a, b, layout))


def vendor_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    layout: str = "NN",
    out: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    accumulate: bool = False,
    out_dtype: torch.dtype | None = None,
    *,
    gate: torch.Tensor | None = None,
) -> torch.Tensor:
    """Do the same with torch alone (cuBLAS, rocBLAS, oneDNN): the reference and the tuner's first candidate.

    A result wider than the operands is computed from operands widened first, except where torch has a product with a
    wider result (CUDA, two dims).
    """
    if out is not None and torch.is_grad_enabled():
        with torch.no_grad():  # else a master gradient would hold the graphs of all that was added to it
            return vendor_matmul(a, b, layout, out, bias, activation, accumulate, gate=gate)
    left, right = as_row_major(a, b, layout)
    dtype = out.dtype if out is not None else out_dtype or a.dtype
    bare = bias is None and activation is None
    # torch folds leading dims into rows there, which a result of other strides has no view for: it is copied to
    direct = out is not None and (left.dim() == 2 or right.dim() > 2 or out.is_contiguous())
    if direct and out is not None and bare and not accumulate and dtype == a.dtype:
        return torch.matmul(left, right, out=out)
    if out is not None and bias is not None and activation is None and not accumulate:
        if dtype == a.dtype == bias.dtype and left.dim() == right.dim() <= 3:
            return (torch.addmm if left.dim() == 2 else torch.baddbmm)(bias, left, right, out=out)
    if out is not None and bare and accumulate and dtype == a.dtype and left.dim() == 2:
        return out.addmm_(left, right)
    if dtype.itemsize > a.dtype.itemsize and not (a.is_cuda and left.dim() == 2):
        result = torch.matmul(left.to(dtype), right.to(dtype))
    elif dtype.itemsize > a.dtype.itemsize:
        result = torch.mm(left, right, out_dtype=dtype)
    elif bias is not None and layout == "NT" and b.dim() == 2 and bias.dtype == a.dtype:
        result, bias = F.linear(a, b, bias), None
    else:
        result = torch.matmul(left, right)
    if bias is not None:
        result = result + bias.to(result.dtype)
    if activation in ("gelu", "gelu_tanh"):
        result = F.gelu(result, approximate="tanh" if activation == "gelu_tanh" else "none")
    elif activation is not None:
        result = F.silu(result)
        result = result * gate if gate is not None else result
    if out is not None:
        return out.add_(result) if accumulate else out.copy_(result)
    return result.to(dtype)


def _matrices(
    tensors: tuple[torch.Tensor, ...], descriptors: list[Any]
) -> tuple[tuple[bool, Any, dict[str, Any]], ...]:
    """Those of a :class:`KernelLaunch`: tensors as they are stored, with their descriptors."""
    return tuple(
        (tensor.stride(-1) != 1, type(one), {name: value for name, value in vars(one).items() if name != "base"})
        for tensor, one in zip(tensors, descriptors, strict=True)
    )


def triton_matmul(
    a: torch.Tensor, b: torch.Tensor, product: Product, epilogue: Epilogue, config: Config | None
) -> tuple[torch.Tensor, Prepared | None]:
    """Prepare and launch the Triton kernel; the arguments have been checked.

    Returns:
        The result, and what launches it again for other tensors of two dims; None: whatever they are, begin here.
    """
    out, gate = epilogue.out, epilogue.gate
    if out is None:
        shape = (*a.shape[:-2], product.m, product.n)
        out = torch.empty(shape, dtype=epilogue.out_dtype or a.dtype, device=a.device)
    if gate is not None:
        gate = gate.resolve_neg()
        gate = gate if gate.stride(-1) == 1 else gate.contiguous()
    a, _ = folded_rows(a, b, product.layout)
    written = out
    if a.dim() == 2:  # one matrix: a's leading dims, if any, have become rows
        if out.dim() > 2:
            # reshape() copies where strides do not allow a view: then the result is copied back
            written = out.reshape(-1, product.n)
        gate = gate.reshape(-1, product.n) if gate is not None else None
        product = Product(product.layout, a.shape[1 if product.layout == "TN" else 0], product.n, product.k, a.dtype)
    elif out.dim() > 3:
        written = out.flatten(0, -3)
    left, right = as_row_major(a, b, product.layout)
    for tensor, name in ((left, "a"), (right, "b"), (written, "out"), (gate, "gate")):
        if tensor is not None:
            check_offsets(tensor, name)
    prepared = _launch(left, right, written, gate, product, epilogue, config)
    if written.data_ptr() != out.data_ptr():
        out.copy_(written.view(out.shape))
    if not a.dim() == b.dim() == out.dim() == 2:
        return out, None
    turned = (product.layout == "TN", product.layout == "NT", False)  # from the stored operands to left and right
    pairs = zip(prepared.multiply.matrices, turned, strict=False)  # none, where they are plain pointers
    stored = tuple((one[0] != turn, *one[1:]) for one, turn in pairs)
    return out, replace(prepared, multiply=replace(prepared.multiply, matrices=stored))


def _launch(
    left: torch.Tensor,
    right: torch.Tensor,
    out: torch.Tensor,
    gate: torch.Tensor | None,
    product: Product,
    epilogue: Epilogue,
    config: Config | None,
) -> Prepared:
    """Launch the kernel for ``left[..., M, K] @ right[..., K, N]`` into ``out``; chooses the path and the grid."""
    target = devices.target_of(left.device)
    kernels = devices.gemm_kernels()
    assert kernels is not None
    bias, activation, accumulate = epilogue.bias, epilogue.activation, epilogue.accumulate
    wide = accumulate or gate is not None
    descriptors = describable(left, right, out, accumulate)
    if config is None:
        described = uses_descriptors(target, left, descriptors)
        config = shrink(default_config(target, left.dtype, described, purpose_of(target, wide, activation)), product)
        config = split_short(cut_to_fit(config, target, left.dtype, out.dtype, wide), product, target)
        config = cut_to_fit(config, target, left.dtype, out.dtype, wide)  # the fp32 sums of pieces take more room
    if config.descriptors and not descriptors:
        raise ValueError(
            f"matmul {product.name}: configuration '{config.name}' needs 2-D operands with 16-byte bases and strides; "
            f"use one without descriptors"
        )
    if not config.fits(target, left.dtype, out.dtype, wide):
        needed = config.shared_bytes(left.dtype.itemsize, target, out.dtype.itemsize, wide)
        raise ValueError(
            f"matmul {product.name}: configuration '{config.name}' does not fit {target.arch} ({needed} of "
            f"{target.shared_bytes} bytes of shared memory); use a smaller tile or fewer stages, or backend='vendor'"
        )
    if config.split_k > 1 and product.batch > 1:
        raise ValueError(
            f"matmul {product.name}: configuration '{config.name}' cuts K in {config.split_k}, of one matrix only; use"
            " one with split_k=1"
        )
    tiles_m = math.ceil(product.m / config.block_m)
    tiles = tiles_m * math.ceil(product.n / config.block_n) * product.batch * config.split_k
    if tiles > _INT32:
        raise ValueError(f"matmul {product.name}: {tiles} tiles exceed {_INT32}; cut the product")
    if config.groups:
        if activation is not None:
            raise ValueError(
                f"matmul {product.name}: configuration '{config.name}' has no activation; apply it outside"
            )
        return launch_grouped(left, right, out, bias, product, config, accumulate)
    slots = target.units * config.occupancy(target, left.dtype.itemsize, out.dtype.itemsize, wide, activation or "")
    programs = min(tiles, slots)
    behind = {"HAS_BIAS": bias is not None, "ACTIVATION": activation or "", "ACCUMULATE": accumulate}
    bias = out if bias is None else bias.resolve_neg().contiguous()
    final, pieces, combine = out, config.split_k, None
    if pieces > 1:  # fp32 sums of each piece, with whole tiles of rows: what is behind the sum comes with the last step
        final, rows = _matrix(out), tiles_m * config.block_m
        out = torch.empty((pieces * rows, product.n), dtype=torch.float32, device="meta")  # made at each launch
        tiles = tiles_m * math.ceil(product.n / 128) * math.ceil(config.block_m / 32)
        sizes = (product.m, product.n, rows * product.n, *final.stride(), (final if gate is None else gate).stride(-2))
        last = {"PIECES": pieces, "BLOCK_M": 32, "BLOCK_N": 128, "num_warps": 4} | behind
        combine = KernelLaunch(kernels.combine_kernel, tiles, (), sizes, last)
        behind = {"HAS_BIAS": False, "ACTIVATION": "", "ACCUMULATE": False}
    options = {
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "GROUP_M": config.group_m,
        # the step of the loop over tiles; not `programs`, since each value of it is compiled
        "NUM_PROGRAMS": slots, "SPLIT_K": pieces, "XCDS": target.xcds,
        "PRECISION": precision(left), "INTERPRETED": devices.interpreted(), "FLATTEN": config.flatten,
        "num_warps": config.warps, "num_stages": config.stages,
    } | behind | hints(config)  # fmt: skip
    if config.descriptors:
        from triton.tools.tensor_descriptor import TensorDescriptor

        left, right, out = _matrix(left), _matrix(right), _matrix(out)
        result = TensorDescriptor.from_tensor(out, [config.block_m, config.block_n // config.parts])
        numbers = (product.m, product.n, product.k, 0 if gate is None else gate.stride(-2))
        options |= {"A_TRANSPOSED": left.stride(-1) != 1, "B_TRANSPOSED": right.stride(-1) != 1, "PARTS": config.parts}
        matrices = _matrices((left, right, out), [*operand_descriptors(left, right, config), result])
        multiply = KernelLaunch(kernels.matmul_descriptor_kernel, programs, matrices, numbers, options)
        prepared = Prepared(multiply, True, combine, tuple(out.shape))
        prepared(left, right, final, bias, gate)
        return prepared
    shape, left, right, out = tuple(out.shape), _batched(left), _batched(right), _batched(out)
    read = out if gate is None else _batched(gate)
    sizes_and_strides = (
        product.batch, product.m, product.n, product.k, *left.stride(), right.stride(0) if right.shape[0] > 1 else 0,
        *right.stride()[1:], *out.stride(), *read.stride()[:2], rows * product.n if pieces > 1 else 0,
    )  # fmt: skip
    options["EVEN_K"] = product.k % config.block_k == 0
    prepared = Prepared(
        KernelLaunch(kernels.matmul_kernel, programs, (), sizes_and_strides, options), True, combine, shape
    )
    prepared(left, right, final, bias, gate)
    return prepared


def hints(config: Config) -> dict[str, int]:
    """Options that AMD's compiler alone knows, where the configuration has them."""
    named = {"waves_per_eu": config.waves_per_eu, "matrix_instr_nonkdim": config.nonkdim}
    return {name: value for name, value in named.items() if value}


def launch_grouped(
    left: torch.Tensor,
    right: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    product: Product,
    config: Config,
    accumulate: bool,
    **meeting: Any,
) -> Prepared:
    """Launch the kernel for Hopper (hopper.py); ``meeting``: where it meets a stream, its arguments for that, with how
    many programs it has."""
    from axo_kernels.gemm import hopper

    left, right, out = _matrix(left), _matrix(right), _matrix(out)
    rows = config.block_m if config.groups == "pingpong" else config.block_m // 2
    units = devices.target_of(left.device).units
    tiles = meeting.get("tiles", math.ceil(product.m / config.block_m) * math.ceil(product.n / config.block_n))
    a_transposed, b_transposed = left.stride(-1) != 1, right.stride(-1) != 1
    described = [
        hopper.descriptor(left.mT if a_transposed else left, hopper.block(rows, config.block_k, a_transposed)),
        hopper.descriptor(
            right.mT if b_transposed else right, hopper.block(config.block_k, config.block_n, b_transposed)
        ),
        hopper.descriptor(out, [rows, config.block_n // config.parts]),
    ]
    options = {
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "NUM_PROGRAMS": units,
        "STAGES": config.stages, "PINGPONG": config.groups == "pingpong", "PARTS": config.parts,
        "A_TRANSPOSED": a_transposed, "B_TRANSPOSED": b_transposed, "HAS_BIAS": bias is not None,
        "ACCUMULATE": accumulate, "num_warps": config.warps, "maxnreg": hopper.REGISTERS,
    } | meeting  # fmt: skip
    numbers, programs = (product.m, product.n, product.k, config.group_m), min(tiles, options["NUM_PROGRAMS"])
    matrices = _matrices((left, right, out), described)
    prepared = Prepared(KernelLaunch(hopper.hopper_matmul_kernel, programs, matrices, numbers, options), gated=False)
    prepared(left, right, out, None if bias is None else bias.resolve_neg().contiguous())
    return prepared


def operand_descriptors(left: torch.Tensor, right: torch.Tensor, config: Config) -> list[Any]:
    """Host descriptors of two matrices as they are stored, with the blocks that a kernel loads."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    descriptors = []
    for matrix, block in ((left, [config.block_m, config.block_k]), (right, [config.block_k, config.block_n])):
        if matrix.stride(-1) != 1:
            matrix, block = matrix.mT, block[::-1]
        descriptors.append(TensorDescriptor.from_tensor(matrix, block))
    return descriptors


def _batched(tensor: torch.Tensor) -> torch.Tensor:
    """Exactly three dims."""
    return tensor.unsqueeze(0) if tensor.dim() == 2 else tensor.flatten(0, -3) if tensor.dim() > 3 else tensor


def _matrix(tensor: torch.Tensor) -> torch.Tensor:
    """Exactly two dims; leading ones are of size 1 here."""
    return tensor if tensor.dim() == 2 else tensor.view(tensor.shape[-2], tensor.shape[-1])


def precision(tensor: torch.Tensor) -> str:
    """How fp32 operands are multiplied: in full, unless the user has allowed TF32 for cuBLAS too."""
    if tensor.dtype == torch.float32 and tensor.is_cuda and torch.version.hip is None:
        # not allow_tf32, which raises where the user has chosen by this newer name
        return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"
    return "ieee"


def uses_descriptors(target: Target, operand: torch.Tensor, describable: bool) -> bool:
    """Say whether the default is to use descriptors: fp32 without TF32 spills registers that way (seen compiled)."""
    exact = operand.dtype == torch.float32 and precision(operand) == "ieee"
    return describable and target.descriptors and not exact


def describable(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, accumulate: bool) -> bool:
    """Say whether tensor descriptors can describe the operands: one matrix each, 16-byte bases and strides."""
    if accumulate and out.dtype != torch.float32:
        return False
    return out.stride(-1) == 1 and all(_describable(tensor) for tensor in (left, right, out))


def _describable(tensor: torch.Tensor) -> bool:
    if tensor.shape[:-2].numel() != 1 or tensor.data_ptr() % 16:
        return False
    inner, outer = sorted(tensor.stride()[-2:])
    return (
        inner == 1 and outer * tensor.itemsize % 16 == 0 and outer >= tensor.shape[-1 if tensor.stride(-1) == 1 else -2]
    )


class _Matmul(torch.autograd.Function):
    """Gradients of the plain product, each again in one of the three layouts."""

    @staticmethod
    def forward(ctx, a, b, bias, layout, config):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(a, b)
        ctx.layout, ctx.bias_dtype = layout, None if bias is None else bias.dtype
        return matmul(a, b, layout, bias=bias, config=config)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        a, b = ctx.saved_tensors
        grad_a, grad_b = gradients(grad, a, b, ctx.layout, ctx.needs_input_grad[0], ctx.needs_input_grad[1])
        over = tuple(range(grad.dim() - 1))
        grad_bias = grad.sum(over, dtype=torch.float32).to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        return grad_a, grad_b, grad_bias, None, None


def gradients(
    grad: torch.Tensor, a: torch.Tensor, b: torch.Tensor, layout: str, for_a: bool = True, for_b: bool = True
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of both stored operands; see :data:`BACKWARD` for the layouts."""
    first, second = BACKWARD[layout]
    operands = {"a": a, "b": b, "grad": grad}
    grad_a = matmul(operands[first[0]], operands[first[1]], first[2]) if for_a else None
    grad_b = matmul(operands[second[0]], operands[second[1]], second[2]) if for_b else None
    return grad_a, grad_b


# layout -> (left, right, layout) of the gradient of a, and of b; with NT: dI = dO @ W (NN), dW = dO^T @ I (TN)
BACKWARD = {
    "NT": (("grad", "b", "NN"), ("grad", "a", "TN")),
    "NN": (("grad", "b", "NT"), ("a", "grad", "TN")),
    "TN": (("b", "grad", "NT"), ("a", "grad", "NN")),
}
