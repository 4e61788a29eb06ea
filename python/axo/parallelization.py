"""Turn a serial model into a parallel one, in place, by a plan that says which layer stands where.

Plans: ``"litgpt"`` (``axo.plans.litgpt.plan``); ``"auto"`` for any module, and a dict of patterns over it
(``axo.plans.auto.plan``). All ranks call it with the same model; that is checked first, by one small collective, so
that a difference is an error on every rank and not a hang.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from axo.arrangement import arrangement_of
from axo.comm.agree import ranks_that_differ
from axo.comm.connect import Communicators, check_comms
from axo.errors import Refused
from axo.nn.init import init_weights
from axo.nn.layer import ParallelLayer
from axo.nn.linear import Linear
from axo.nn.linear_loss import misfit
from axo.nn.shard_reads import watch_first_passes
from axo.offload import Offload
from axo.optim.checks import watch_replaced
from axo.optim.zero import STAGES
from axo.overlap import Overlap, attach
from axo.overlap.gradients import REDUCE_DTYPES
from axo.overlap.route import GRAD_REDUCE
from axo.plans import context as plan_context
from axo.plans import experts as plan_experts
from axo.plans import head_loss, methods
from axo.plans.replace import Replacer
from axo.plans.serial import Serial
from axo_kernels.fused.fp8 import SCALINGS

__all__ = ["init_weights", "parallelize"]

PLANS = ("litgpt", "auto")


@torch.inference_mode(False)  # parameters are to be trained
def parallelize(
    model: nn.Module,
    comms: Communicators,
    plan: str | dict[str, str] = "litgpt",
    *,
    algorithm: str = "axonn",
    grad_reduce: str = "mean",
    overlap: Overlap | None = None,
    gather_cache: str | int | None = None,
    gather_logits: bool = False,
    sequence_parallel: bool = False,
    zero: int = 0,
    reduce_dtype: torch.dtype | None = None,
    offload: Offload | None = None,
    fp8: str | None = None,
    context: str | None = None,
    chunked_loss: bool = False,
) -> nn.Module:
    """Replace the layers of ``model`` by parallel ones and return it. All ranks call it, before they make optimizers.

    A model on the meta device stays there: fill it with ``axo.init_weights`` or ``load_state_dict``, and no rank ever
    holds more than one whole layer. A real model gives up rank 0's values tensor by tensor, and the whole are freed.

    Args:
        model: A serial model that the plan knows.
        comms: What ``axo.connect`` returned.
        plan: ``"litgpt"`` for an unmodified ``litgpt.GPT``; ``"auto"`` for any module, Hugging Face's too; a dict of
            patterns, such as ``{"*.q_proj": "normal", "lm_head": "replicate"}``, for "auto" with wishes.
        algorithm: How products are distributed: ``"axonn"`` on any grid; ``"tesseract"`` where x = y (z is its depth);
            ``"summa"``, Tesseract with z = 1. With these two x splits the rows of a batch too (``axo.shard_batch``,
            ``comms.data_ranks``), and features lie over y everywhere. One algorithm for all layers of ``comms``.
        grad_reduce: ``"mean"`` averages gradients over the data ranks (Gz * Gdata; Tesseract's: Gx * Gz * Gdata),
            ``"sum"`` adds them.
        overlap: What hides behind what, and what is kept; default: everything on (see :class:`axo.Overlap`).
        gather_cache: Short for ``overlap=axo.Overlap(gather_cache=...)``.
        gather_logits: Of plan "litgpt" ("auto" returns whole outputs).
            Return whole logits on every rank; else the vocabulary stays split over x (Tesseract's: y), for
            ``axo.nn.CrossEntropyLoss``. All ranks along that axis must then compute the same loss from them.
        sequence_parallel: Of plan "litgpt".
            Split the tokens of the residual stream over x: norms keep 1/Gx of their activations, for the
            same bytes. Sequence lengths must divide over x. Each rank still takes and returns whole sequences.
        zero: 1 cuts the optimizer's state over the data axis, 2 the gradients too: each data rank updates its rows,
            which are then gathered. Give the model's parameters to any torch optimizer that updates element by
            element. With 2, ``.grad`` holds this rank's rows; clip by ``axo.clip_grad_norm_``.
        reduce_dtype: Reduce gradients over z and data in ``torch.float32`` or ``torch.bfloat16``; None: in the dtype
            that they are computed in (bf16 for weights under bf16 autocast). ``.grad`` has the parameter's in any case.
        offload: What lies on the lower tier; default: nothing (see :class:`axo.Offload`).
        fp8: Multiply in eight bits in every ``axo.nn.Linear``, the head too: e4m3, gradients from behind e5m2.
            ``"row"`` has a scale for each row of an operand, ``"tensor"`` one for all of it on this rank. Weights are
            rounded before they are gathered over z, and travel, and are kept for backward, in e4m3 with 16 bytes more
            a row; each rank's rows have scales of their own. All else travels as without. Emulated where the device
            has no such products. Sizes on a rank must be multiples of 16.
        context: How ranks that share sequences (``axo.connect(context=...)``) attend to each other's tokens: ``"ring"``
            (the default there) passes keys and values on behind the attention of those at hand; ``"gather"`` gathers
            them; ``"heads"`` exchanges tokens for heads. Each rank then takes and returns its tokens
            (``axo.shard_batch``).
        chunked_loss: Of plan "auto", for transformers' causal language models: where they train with ``labels`` the
            loss is made in chunks of rows (``axo.nn.linear_cross_entropy``), and what they return has no logits.

    Raises:
        ValueError: An option is not known, the grid does not fit the algorithm, the ranks' models differ, or the plan
            cannot do something; names which.
    """
    _check_kinds(model, comms, plan=plan, overlap=overlap, offload=offload)
    arrangement = arrangement_of("parallelize", algorithm)
    for option, value, known in (
        ("plan", plan if isinstance(plan, str) else "auto", PLANS),
        ("grad_reduce", grad_reduce, tuple(GRAD_REDUCE)),
        ("zero", zero, STAGES),
        ("reduce_dtype", reduce_dtype, REDUCE_DTYPES),
        ("fp8", fp8, (None, *SCALINGS)),
    ):
        if value not in known or isinstance(value, bool):  # True would count as 1
            raise ValueError(f"parallelize: {option}={value!r} is not known; use one of {known}")
    if gather_cache is not None:
        if overlap is not None:
            raise ValueError(
                "parallelize: overlap= and gather_cache= say the same thing; use Overlap(gather_cache=...)"
            )
        overlap = Overlap(gather_cache=gather_cache)
    for name, module in model.named_modules():
        if isinstance(module, ParallelLayer):
            raise ValueError(f"parallelize: {name!r} is parallel already; call parallelize once, on a serial model")
    layers = getattr(getattr(model, "config", None), "n_layer", 1)
    if isinstance(layers, int) and layers < 1:
        raise ValueError(f"parallelize: n_layer={layers} is a model without blocks; use at least 1")
    if sequence_parallel:
        arrangement.only_axonn("parallelize: sequence_parallel=True")
    if fp8:
        arrangement.only_axonn(f"parallelize: fp8={fp8!r}")
    if context is not None and comms.context.size == 1:
        raise ValueError(
            f"parallelize: context={context!r} is of ranks that share sequences: use axo.connect(grid, context=2)"
        )
    context = context or "ring"
    if comms.context.size > 1:
        plan_context.check(model, context, comms.context.size, comms.grid.x)
        if sequence_parallel:
            raise Refused("parallelize: sequence_parallel=True in a context is not supported; leave it out")
    if chunked_loss and (why := "plan 'litgpt' has no loss" if plan == "litgpt" else head_loss.unfit(model)):
        raise Refused(f"parallelize: chunked_loss=True: {why}; call axo.nn.linear_cross_entropy in a loop of your own")
    if chunked_loss:
        arrangement.only_axonn("parallelize: chunked_loss=True")
        if fp8:
            raise Refused(f"parallelize: chunked_loss=True with fp8={fp8!r} is not supported; leave one of them out")
    comms.arrange(arrangement)
    if comms.experts.size > 1:
        others: dict[str, Any] = {"zero": zero, "sequence_parallel": sequence_parallel, "fp8": fp8}
        if offload is not None and (offload.optimizer or offload.parameters or offload.activations != "none"):
            others["offload"] = offload
        plan_experts.check(model, comms.grid, comms.experts.size, others)
    check_same_model(model, comms)
    serial = Serial(
        model,
        {
            "plan": plan,
            "algorithm": algorithm,
            "grad_reduce": grad_reduce,
            "overlap": overlap,
            "gather_logits": gather_logits,
            "sequence_parallel": sequence_parallel,
            "zero": zero,
            "reduce_dtype": reduce_dtype,
            "offload": offload,
            "fp8": fp8,
            "chunked_loss": chunked_loss,
        },
    )
    watch_made_before = watch_replaced(model)
    replacer = Replacer(comms, grad_reduce=grad_reduce, sequence_parallel=sequence_parallel)
    if plan == "litgpt":
        if not _is_litgpt(model):
            raise ValueError(
                f"parallelize: plan 'litgpt' needs a litgpt.GPT, got a {type(model).__qualname__}; use plan=\"auto\""
                " for any other module"
            )
        from axo.plans.litgpt import plan as litgpt

        model = litgpt.apply(model, replacer, gather_logits=gather_logits)
    else:
        if sequence_parallel:
            raise ValueError("parallelize: sequence_parallel=True is of plan 'litgpt'; plan 'auto' has no such option")
        from axo.plans.auto import plan as auto

        model = auto.apply(model, replacer, {} if isinstance(plan, str) else plan, chunked_loss=chunked_loss)
    if comms.context.size > 1:
        plan_context.install(model, comms, context, grad_reduce)
    if fp8 is not None:
        for module in model.modules():
            if isinstance(module, Linear):
                module.use_fp8(fp8)
    if chunked_loss:
        head_loss.HeadLoss(model)
    elif plan != "litgpt" and hasattr(type(model), "loss_function"):
        could = head_loss.unfit(model) or misfit(model.lm_head) or "chunked_loss=True makes it without"
        model._axo_plan_report.loss = f"loss: of whole logits; {could}"  # type: ignore[union-attr]
    attach(model, comms, overlap, zero=zero, reduce_dtype=reduce_dtype, same_inputs=True)
    watch_first_passes(model, comms)
    methods.install(model, comms)
    if offload is not None:
        offload.attach(model, comms.device)
    watch_made_before()
    serial.buffers = {name: buffer.shape for name, buffer in model.named_buffers()}
    kept: Any = model
    kept._axo_serial = serial
    return model


def _check_kinds(model: object, comms: object, **options: object) -> None:
    """Refuse arguments that are of another kind, or in another order.

    Raises:
        ValueError: One is; says what was expected.
    """
    if not isinstance(model, nn.Module):
        what = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise ValueError(f"parallelize: model is {what}; call parallelize(model, comms) with a module that was made")
    check_comms("parallelize", comms)
    kinds: dict[str, tuple[Any, str]] = {
        "plan": (str | Mapping, "'auto', 'litgpt' or a dict of patterns"),
        "overlap": (Overlap | None, "axo.Overlap(...)"),
        "offload": (Offload | None, "axo.Offload(...)"),
    }
    for name, value in options.items():
        kind, wanted = kinds[name]
        if not isinstance(value, kind):
            raise ValueError(f"parallelize: {name}={value!r} is a {type(value).__name__}; use {wanted}")


def _is_litgpt(model: nn.Module) -> bool:
    """Whether it is a ``litgpt.GPT``, or one of LoRA's or adapters'; by name, as importing it takes seconds."""
    return any(kind.__name__ == "GPT" and kind.__module__ == "litgpt.model" for kind in type(model).__mro__)


def check_same_model(model: nn.Module, comms: Communicators) -> None:
    """Compare names, shapes, dtypes and configuration of the model with the other ranks'.

    Raises:
        Refused: A parameter is sparse, or has no shape yet.
        ValueError: They differ; on every rank.
    """
    for name, p in model.named_parameters():
        if nn.parameter.is_lazy(p):
            raise Refused(f"parallelize: {name!r} has no shape yet; call the model once before, as lazy layers want it")
        if p.layout is not torch.strided:
            raise Refused(f"parallelize: {name!r} is {p.layout}; keep it dense")
    lines = [f"{name} {tuple(p.shape)} {p.dtype} {p.is_meta} {p.requires_grad}" for name, p in model.named_parameters()]
    text = "\n".join([type(model).__qualname__, repr(getattr(model, "config", None)), *lines])
    differ = ranks_that_differ(comms, text)
    if differ:
        raise ValueError(
            f"parallelize: the models of ranks {differ} differ from rank 0's in configuration, shapes, dtypes, frozen"
            " parameters or meta device; build the same model on every rank"
        )
