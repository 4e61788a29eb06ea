"""The loss of transformers' causal language models from what their head takes, so that logits never exist whole.

While such a model trains with ``labels``, its head passes on what it is given, the loss that the model asks for is
``axo.nn.linear_cross_entropy`` of that, and what the model returns has no ``logits`` (None). In evaluation, and without
labels, nothing is other than without.

Not here, refused: models that make something else of their logits than a soft cap (``axo.plans.context.FAMILIES`` are
those whose code was read), classes and losses of a program's own, heads that the loss cannot take
(``axo.nn.linear_loss.misfit``), and fp16, whose gradients would be taken before a scaler has scaled the loss.
"""

from __future__ import annotations

import inspect
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F

from axo.errors import Refused
from axo.matmul.products import compute_dtype
from axo.nn.linear_loss import linear_cross_entropy, misfit, without_head
from axo.plans.context import FAMILIES
from axo.plans.replace import hooks_of


def unfit(model: Any) -> str:
    """Why a model's loss cannot be taken so; empty: it can, if its head becomes parallel."""
    family, kind = getattr(getattr(model, "config", None), "model_type", ""), type(model)
    stock = kind.__module__.startswith("transformers.models.") and kind.__name__.endswith("ForCausalLM")
    if family not in FAMILIES or not stock or not hasattr(model, "lm_head"):
        families = ", ".join(FAMILIES)
        return (
            f"{kind.__name__}'s is not known to be the cross-entropy of its head, as those of transformers' own classes"
            f" of {families} for CausalLM are"
        )
    from transformers.loss.loss_utils import ForCausalLMLoss

    if model.loss_function is not ForCausalLMLoss:
        return f"{kind.__name__}'s loss_function is not transformers' ForCausalLMLoss"
    return "the head has hooks, which would see no logits" if hooks_of(model.lm_head) else ""


class HeadLoss:
    """Hooks of one model, whose layers are parallel.

    Raises:
        Refused: Its head is none whose loss can be taken so.
    """

    def __init__(self, model: Any) -> None:
        if why := misfit(model.lm_head):
            raise Refused(f"parallelize: chunked_loss=True: {why}; leave it out, and build the model again")
        self._model, self._whole, self._taken = model, model.loss_function, ExitStack()
        self._names = list(inspect.signature(model.forward).parameters)
        self._softcap: float | None = None
        self._takes = False
        model.loss_function = self._loss
        model.register_forward_pre_hook(self._begin, with_kwargs=True)
        model.register_forward_hook(self._end, always_call=True)

    def _begin(self, model: Any, args: Any, named: dict[str, Any]) -> None:
        given = dict(zip(self._names, args, strict=False)) | named
        self._takes = model.training and torch.is_grad_enabled() and given.get("labels") is not None
        if self._takes:
            if model.loss_function != self._loss:
                raise Refused(
                    "forward: loss_function was set after parallelize(..., chunked_loss=True), and there are no logits"
                    " for it; leave chunked_loss out"
                )
            self._softcap = getattr(model.config, "final_logit_softcapping", None)
            self._taken.enter_context(without_head(model))

    def _loss(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        vocab_size: int,
        num_items_in_batch: Any = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        **options: Any,
    ) -> torch.Tensor:
        """Stands for transformers' ``ForCausalLMLoss``; ``logits`` may be what the head takes, (rows, tokens, h)."""
        if not self._takes:
            options |= {"num_items_in_batch": num_items_in_batch, "ignore_index": ignore_index}
            whole: torch.Tensor = self._whole(logits, labels, vocab_size, shift_labels=shift_labels, **options)
            return whole
        if compute_dtype(logits) == torch.float16:  # of an autocast within the model's forward too
            raise Refused(
                "forward: chunked_loss=True in float16 would take gradients before a scaler has scaled the loss; use"
                " bfloat16, or leave chunked_loss out"
            )
        targets = F.pad(labels, (0, 1), value=ignore_index)[..., 1:] if shift_labels is None else shift_labels
        reduction = "mean" if num_items_in_batch is None else "sum"
        loss = linear_cross_entropy(
            logits, self._model.lm_head, targets, reduction=reduction, ignore_index=ignore_index, softcap=self._softcap
        )
        return loss if num_items_in_batch is None else loss / num_items_in_batch

    def _end(self, model: Any, args: Any, output: Any) -> Any:
        self._taken.close()
        takes, self._takes = self._takes, False
        if not takes or output is None:
            return None
        if isinstance(output, tuple):
            return (output[0], None, *output[2:])
        return type(output)(**{name: value for name, value in output.items() if name != "logits"})
