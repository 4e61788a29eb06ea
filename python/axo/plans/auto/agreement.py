"""What ranks with other rows must have alike, in models whose way depends on values: the layers that ran, the buffers.

A model that calls a layer for some rows only (``if rows.numel() == 0: continue`` in a mixture of experts) would call
one expert here and another one there. Both issue the same collectives, so weights and gradients of the two would be
mixed, and nothing else would show it. So before each optimizer step the ranks compare which parameters have gradients;
before the first one also the values of buffers, which a module may have computed from its own rows alone. On GPUs,
where to compare would wait for the device, layers too are compared before the first step only, or with ``AXO_CHECK=1``.

Not here: models that tracing follows as a whole (``regions``), which have one way; passes without a step; gradients
that ``zero_grad(set_to_none=False)`` has left at zero.
"""

from __future__ import annotations

import hashlib
import warnings

import torch
from torch import nn
from torch.optim import Optimizer

from axo.comm.agree import ranks_that_differ
from axo.comm.connect import Communicators
from axo.comm.counting import observers as counting
from axo.nn.layer import ParallelLayer
from axo.optim.step_hooks import around_steps
from axo.settings import is_on


class AgreementCheck:
    """Compares, before each step on parameters of a model, what its ranks must have alike.

    Args:
        comms: The ranks.
        layers: Which parameters have gradients, too.
    """

    def __init__(self, comms: Communicators, *, layers: bool) -> None:
        self._comms, self._layers = comms, layers
        self._first = True

    def watch(self, model: nn.Module) -> None:
        around_steps(model, update=self._compare)

    def _compare(self, model: nn.Module, optimizer: Optimizer) -> None:
        layers = self._layers and (self._first or self._comms.device.type == "cpu" or is_on("AXO_CHECK"))
        if not (layers or self._first):
            return
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        stepped = [p for group in optimizer.param_groups for p in group["params"] if id(p) in names]
        if not stepped:
            return
        with counting.paused():
            if layers:
                self._compare_layers([names[id(p)] for p in stepped if p.grad is not None])
            if self._first:
                self._first = False
                self._compare_buffers(model)

    def _compare_layers(self, used: list[str]) -> None:
        if differ := ranks_that_differ(self._comms, " ".join(used)):
            raise RuntimeError(
                f"step(): ranks {differ} have gradients of other parameters than rank 0 (here: {_some(used)}), so one"
                " layer's weights and gradients were mixed with another's; ranks that hold other rows must call the"
                " same layers in the same order: call a layer that no row has chosen too, with no rows"
            )

    def _compare_buffers(self, model: nn.Module) -> None:
        digests = {
            f"{name}.{key}".lstrip("."): _digest(value)
            for name, module in model.named_modules()
            if not isinstance(module, ParallelLayer)
            for key, value in module.named_buffers(recurse=False)
            if key not in module._non_persistent_buffers_set and value.layout == torch.strided
        }
        if ranks_that_differ(self._comms, repr(digests)):  # each of these is asked on all ranks or on none
            if ranks_that_differ(self._comms, " ".join(digests)):
                differ = [f"their names (here: {_some(list(digests)) or 'none'})"]
            else:
                differ = [name for name, each in digests.items() if ranks_that_differ(self._comms, each)]
            if self._comms.everyone.rank:
                return  # all ranks would say the same
            warnings.warn(
                f"axo: buffers differ between ranks: {_some(differ)}; they are computed from each rank's own rows, so"
                " ranks train different models, and a checkpoint holds rank 0's. Reduce them in the module, over"
                f" comms.data and comms.z (sum, divided by comms.data_ranks={self._comms.data_ranks})",
                stacklevel=2,
            )


def _digest(value: torch.Tensor) -> str:
    flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(flat.numpy().data, digest_size=8).hexdigest()


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
