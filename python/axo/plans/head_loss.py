"""The loss of transformers' causal language models from what their head takes, so that logits never exist whole.

While such a model trains with ``labels``, its head passes on what it is given, the loss that the model asks for is
``axo.nn.linear_cross_entropy`` of that, and what the model returns has no ``logits`` (None). In evaluation, and without
labels, nothing is other than without.

Not here, refused: models that make something else of their logits than a soft cap (``axo.plans.context.FAMILIES`` are
those whose code was read), and heads that the loss cannot take (``axo.nn.linear_loss.misfit``).
"""

from __future__ import annotations

import inspect
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from axo.errors import Refused
from axo.nn.linear_loss import linear_cross_entropy, misfit, without_head
from axo.plans.context import FAMILIES


def unfit(model: nn.Module) -> str:
    """Why a model's loss cannot be taken so; empty: it can, if its head can."""
    family, kind = getattr(getattr(model, "config", None), "model_type", ""), type(model).__name__
    if family in FAMILIES and kind.endswith("ForCausalLM") and hasattr(model, "lm_head"):
        return ""
    return (
        f"{kind}'s is not known to be the cross-entropy of its head, as those of {', '.join(FAMILIES)} for CausalLM are"
    )


class HeadLoss:
    """Hooks of one model, whose layers are parallel.

    Raises:
        Refused: Its head is none whose loss can be taken so.
    """

    def __init__(self, model: Any) -> None:
        if why := misfit(model.lm_head):
            raise Refused(f"parallelize: chunked_loss=True: {why}; leave it out")
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
        targets = F.pad(labels, (0, 1), value=ignore_index)[..., 1:] if shift_labels is None else shift_labels
        reduction = "mean" if num_items_in_batch is None else "sum"
        loss = linear_cross_entropy(
            logits, self._model.lm_head, targets, reduction=reduction, ignore_index=ignore_index, softcap=self._softcap
        )
        return loss if num_items_in_batch is None else loss / num_items_in_batch

    def _end(self, model: Any, args: Any, output: Any) -> Any:
        self._taken.close()
        if not self._takes or output is None:
            return None
        self._takes = False
        if isinstance(output, tuple):
            return (output[0], None, *output[2:])
        return type(output)(**{name: value for name, value in output.items() if name != "logits"})
