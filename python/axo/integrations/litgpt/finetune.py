"""What LitGPT's finetuning commands leave to rank 0, and ranks that share a model do together, or one quite alone.

    generate_example        needs the model: all ranks, from one generator state, or they would choose other tokens
    save_lora_checkpoint    gathers the adapters, tensor by tensor; rank 0 writes them
    copy_config_files, ...  rank 0 only
    merge_lora              rank 0, as a serial program of its own

The functions are LitGPT's own; names that it looks up in its module are put in front of them, and ``finetune_lora``'s
loop is told by its Fabric that every rank is rank 0, which there decides about the first and the third of these.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
from collections.abc import Callable, Iterator
from typing import Any

from axo.nn.generator import source_generator

_FILES = ("copy_config_files", "save_hyperparameters", "save_prompt_style")
_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID", "LT_STRATEGY", "LT_ACCELERATOR")


@contextlib.contextmanager
def together(module: Any) -> Iterator[None]:
    """Put these functions in front of those of ``module``, a finetuning command; of others nothing is changed."""
    stock = {name: getattr(module, name) for name in (*_FILES, "generate_example") if hasattr(module, name)}
    if "generate_example" not in stock:
        yield
        return
    if hasattr(module, "save_lora_checkpoint"):
        stock |= {name: getattr(module, name) for name in ("save_lora_checkpoint", "merge_lora", "fit")}
    made: dict[str, Callable[..., Any]] = {name: _on_rank_0(stock[name]) for name in _FILES if name in stock}
    made["generate_example"] = _alike(stock["generate_example"])
    if "fit" in stock:
        made |= {"save_lora_checkpoint": _save_lora, "merge_lora": _alone(stock["merge_lora"])}
        made["fit"] = _all_first(stock["fit"])
    try:
        for name, function in made.items():
            setattr(module, name, function)
        yield
    finally:
        for name, function in stock.items():
            setattr(module, name, function)


def _on_rank_0(function: Callable[..., Any]) -> Callable[..., Any]:
    from lightning.fabric.utilities.rank_zero import rank_zero_only

    return rank_zero_only(function)


def _alike(generate: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(generate)
    def on_all(fabric: Any, *args: Any, **options: Any) -> Any:
        random.setstate(fabric.broadcast(random.getstate()))  # chooses the example, where litgpt was asked to
        with source_generator(fabric.strategy.comms, fabric.device):
            return generate(fabric, *args, **options)

    return on_all


def _save_lora(fabric: Any, model: Any, file_path: Any) -> None:
    from litgpt.lora import lora_filter

    fabric.print(f"Saving LoRA weights to {str(file_path)!r}")
    fabric.save(file_path, {"model": model}, filter={"model": lora_filter})


def _alone(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run without the environment of a rank: the function makes a Fabric of its own, of one device."""

    @functools.wraps(function)
    def alone(*args: Any, **options: Any) -> Any:
        kept = {name: os.environ.pop(name) for name in _RANK if name in os.environ}
        try:
            return function(*args, **options)
        finally:
            os.environ |= kept

    return alone


def _all_first(fit: Callable[..., Any]) -> Callable[..., Any]:
    # The signature is read by whoever wraps this again (long_run.Watch).
    @functools.wraps(fit)
    def fit_with_all_first(*args: Any, **options: Any) -> Any:
        fabric = args[0] if args else options["fabric"]
        own: Any = type(fabric)
        fabric.__class__ = type(own.__name__, (own,), {"global_rank": property(lambda _: 0)})
        try:
            return fit(*args, **options)
        finally:
            fabric.__class__ = own

    return fit_with_all_first
