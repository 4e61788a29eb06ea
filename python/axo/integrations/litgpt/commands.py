"""The commands of LitGPT's that run on a grid, and what each can do. All others run on one rank, without Axo."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Command:
    """A command of litgpt's that runs on a grid.

    Args:
        module, function: Where it is.
        resumes: Whether it can go on from a checkpoint of its own.
        reads_sharded: Whether it can start from a sharded checkpoint.
        stages: Whether it runs in pipeline stages.
        quantizes: Whether it takes ``--quantize``.
        launches: Whether it calls Fabric's ``launch``.
        wants: A package that it wants beside LitGPT, and which extra of Axo's brings it. Without a grid such a command
            is litgpt's alone.
    """

    module: str
    function: str = "setup"
    resumes: bool = True
    reads_sharded: bool = True
    stages: bool = True
    quantizes: bool = False
    launches: bool = True
    wants: tuple[str, str] | None = None

    @property
    def trains(self) -> bool:
        """Whether it takes ``--devices`` and launches ranks; if not, it is written for one device."""
        return self.function == "setup"

    @property
    def finetunes(self) -> bool:
        """Whether it starts from what a model's constructors draw, on one device."""
        return self.module.startswith("litgpt.finetune.")

    def load(self) -> Callable[..., Any]:
        """Import its function."""
        from axo.integrations.litgpt import parsing

        return parsing.load(self.module, self.function)


_LORA = Command("litgpt.finetune.lora", resumes=False, reads_sharded=False, quantizes=True)
_ADAPTER = replace(_LORA, module="litgpt.finetune.adapter", stages=False, quantizes=False)
_ON_ONE_DEVICE = Command("litgpt.generate.full", "main", reads_sharded=False, stages=False)
_SERVE = replace(_ON_ONE_DEVICE, module="litgpt.deploy.serve", function="run_server", launches=False)
_EVALUATE = replace(_SERVE, module="litgpt.eval.evaluate", function="convert_and_evaluate")
PARALLEL = {
    "pretrain": Command("litgpt.pretrain"),
    "finetune_full": Command("litgpt.finetune.full"),
    "finetune_lora": _LORA,
    "generate": Command("litgpt.generate.base", "main", quantizes=True, launches=False),
    "generate_full": _ON_ONE_DEVICE,
    "chat": Command("litgpt.chat.base", "main", stages=False, quantizes=True, launches=False),
    "serve": replace(_SERVE, wants=("litserve", "serve")),
    "evaluate": replace(_EVALUATE, wants=("lm_eval", "evaluate")),
    "finetune_adapter": _ADAPTER,
    "generate_adapter": replace(_ON_ONE_DEVICE, module="litgpt.generate.adapter"),
    "finetune_adapter_v2": replace(_ADAPTER, module="litgpt.finetune.adapter_v2"),
    "generate_adapter_v2": replace(_ON_ONE_DEVICE, module="litgpt.generate.adapter_v2"),
    "finetune": _LORA,  # litgpt's other name for it
}
