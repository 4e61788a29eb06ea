"""The values that building a model on one device would have given it, for a model that was built on the meta device.

    with recording as record: model = GPT(config)      parameters on the meta device; what would fill them is noted
    axo.parallelize(model, ...)
    materialize(model, originals, comms, record)       each is filled as it would have been, cut, and dropped

While the constructors run, whatever fills a parameter (``uniform_``, ``zero_``, ...) fills a scratch tensor of the same
size instead, so that the random numbers are drawn as they would be; the generator's state before it is kept. Later the
same call is made again from that state (rank 0's) on room for the whole parameter. So a rank holds one whole parameter
at a time, and a program whose serial form builds its model on a device (``litgpt finetune_lora`` on one) starts from
the same adapters.

Not here: values that do not come from an in-place function of the whole parameter; ``reset_parameters`` gives those.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from axo.comm.connect import Communicators
from axo.nn.generator import generator_access


class _Fill(NamedTuple):
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    state: torch.Tensor  # of the generator before it


class RecordedInit(TorchDispatchMode):
    """Notes what fills meta parameters while it is active, and draws the numbers that would fill them.

    Args:
        device: Where the serial program would have built the model.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._fills: dict[int, list[_Fill]] = {}
        self._parameters: list[nn.Parameter] = []  # kept alive: another would get a dropped one's id

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        target = args[0] if args else None
        if isinstance(target, nn.Parameter) and target.is_meta and func._schema.is_mutable:
            state = generator_access(self._device)[0]()
            fill = _Fill(func, args[1:], dict(kwargs or {}), state)
            func(torch.empty(target.shape, dtype=target.dtype, device=self._device), *fill.arguments, **fill.options)
            if id(target) not in self._fills:
                self._parameters.append(target)
            self._fills.setdefault(id(target), []).append(fill)
            return target
        return func(*args, **(kwargs or {}))

    def knows(self, module: nn.Module) -> bool:
        """Whether every parameter of ``module`` itself was filled while this was active."""
        own = list(module.parameters(recurse=False))
        return bool(own) and all(id(parameter) in self._fills for parameter in own)

    def fill(self, module: nn.Module, device: torch.device, comms: Communicators) -> None:
        """Give a module that :meth:`knows` its parameters' values, whole, on ``device``. Every rank must call it."""
        fills = {name: self._fills[id(parameter)] for name, parameter in module.named_parameters(recurse=False)}
        module.to_empty(device=device, recurse=False)
        read, write = generator_access(self._device)
        before = read()
        for name, steps in fills.items():
            parameter = getattr(module, name)
            for step in steps:
                state = step.state.to(comms.device, copy=True)
                if comms.everyone.size > 1:
                    comms.everyone.broadcast(state, root=0)
                write(state.cpu())
                step.function(parameter.detach(), *step.arguments, **step.options)
        write(before)
