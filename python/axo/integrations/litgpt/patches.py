"""Every name of LitGPT's commands that ``axo litgpt`` replaces: by what, and why. Nothing else of LitGPT is changed.

LitGPT's commands look these names up in their own module (``litgpt.pretrain``, ``litgpt.finetune.full``, ...), so that
is where the replacements stand, each made from the stock one, for the time of one run (:func:`patched`). The table is
:data:`PATCHES`; the order of its entries does not matter, as none looks at another.

Some names of LitGPT's and of other packages are replaced elsewhere (:data:`ELSEWHERE`): they are needed before there is
a run, without one, or for a part of one.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import os
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from lightning.fabric import Fabric
from lightning.fabric.utilities.rank_zero import rank_zero_only
from litgpt.model import LLaMAMoE
from torch import nn

from axo.errors import Error
from axo.integrations.fabric.figures import Figures
from axo.integrations.fabric.sharded_checkpoint import MODEL_FILE, holds_sharded, is_sharded
from axo.integrations.fabric.step_agreement import StepAgreement
from axo.integrations.litgpt import run_folder
from axo.integrations.litgpt.conversation import Lines
from axo.integrations.litgpt.options import Options
from axo.integrations.litgpt.strategy import LitGPTStrategy
from axo.launch import Rank, Termination
from axo.nn.generator import source_generator
from axo.nn.goldfish import goldfish_mask
from axo.nn.quantize import quantize
from axo.overlap.no_sync import token_weight
from axo.placement import placement_of


@dataclass
class LitGPTRun:
    """One run of a training command, on this rank: what the replaced functions know of it.

    Args:
        module: The command's module, such as ``litgpt.pretrain``.
        options: What was asked of Axo.
        hyperparameters: LitGPT's own options, as it writes them beside a checkpoint.

    Attributes:
        agreement: What the ranks agree with before each step.
        termination: What notes SIGTERM and Ctrl-C, of a command that trains.
        strategy: The strategy of the run's Fabric, once there is one.
        quantized: What linear layers are quantized to, such as "nf4"; "": they are not.
        fabric, figures: Once the loop has begun.
    """

    module: ModuleType
    options: Options
    hyperparameters: str = ""
    agreement: StepAgreement = field(default_factory=StepAgreement)
    termination: Termination | None = None
    strategy: LitGPTStrategy | None = None
    quantized: str = ""
    fabric: Any = None
    figures: Figures | None = None


class Patch(NamedTuple):
    """One replaced name: ``make(run, stock)`` is what stands there instead of ``stock``."""

    make: Callable[[LitGPTRun, Any], Any]
    why: str


class Stopped(Exception):
    """The run ended on request; ``checkpoint`` is what it saved, from which it may go on or not."""

    def __init__(self, by: str, checkpoint: Path, step: int, *, resumes: bool = True) -> None:
        then = "go on with --resume auto" if resumes else "adapters only, from which LitGPT does not resume a run"
        super().__init__(f"stopped by {by} after step {step}; saved {checkpoint}; {then}")
        self.checkpoint, self.step = checkpoint, step


class _StopTraining(Exception):
    """Raised between two steps, on every rank."""


# --- the loop -----------------------------------------------------------------------------------------------------


def _main(run: LitGPTRun, stock: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(stock)
    if "train" not in signature.parameters:  # generate's
        return _unquantized(run, stock)

    @functools.wraps(stock)
    def main(*args: Any, **options: Any) -> Any:
        assert run.strategy is not None
        run.strategy.train = signature.bind(*args, **options).arguments["train"]
        return stock(*args, **options)

    return main


def _fit(run: LitGPTRun, stock: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(stock)

    def fit(*args: Any, **options: Any) -> Any:
        given = signature.bind(*args, **options).arguments
        run.fabric, train = given["fabric"], given["train"]
        run.figures = Figures(run.fabric.strategy.comms)
        if train.max_time:
            given["train"] = replace(train, max_time=_AgreedLimit(train.max_time, run.fabric.strategy))
        if run.termination is not None:
            run.termination.progress = functools.partial(_progress, run, given)
        try:
            with (
                _every_rank_is_first(run.fabric) if _saver(run) == "save_lora_checkpoint" else contextlib.nullcontext()
            ):
                return stock(**given)
        except _StopTraining:
            if run.termination is not None:
                run.termination.tell_lost()
            raise _save(run, given) from None

    return fit


# What saves adapters alone -> how the file is called.
_ADAPTER_FILES = {
    "save_lora_checkpoint": "lit_model.pth.lora",
    "save_adapter_checkpoint": "lit_model.pth.adapter",
    "save_adapter_v2_checkpoint": "lit_model.pth.adapter_v2",
}


def _saver(run: LitGPTRun) -> str | None:
    """The command's function that saves adapters alone; None: it saves whole models."""
    return next((name for name in _ADAPTER_FILES if hasattr(run.module, name)), None)


@contextlib.contextmanager
def _every_rank_is_first(fabric: Any) -> Iterator[None]:
    """finetune_lora lets rank 0 alone generate examples and save adapters; on a grid all ranks must take part."""
    own: Any = type(fabric)
    fabric.__class__ = type(own.__name__, (own,), {"global_rank": property(lambda _: 0)})
    try:
        yield
    finally:
        fabric.__class__ = own


def _progress(run: LitGPTRun, given: dict[str, Any]) -> tuple[int, Path | None, int]:
    """The steps that are done, and the newest checkpoint with its step."""
    saver = _saver(run)
    done = run.agreement.step if saver is not None else int(given["state"]["step_count"])
    newest = run_folder.newest(given["out_dir"], "*.pth" if saver is None else _ADAPTER_FILES[saver])
    return done, newest, 0 if newest is None else int(newest.parent.name.removeprefix("step-"))


def _save(run: LitGPTRun, given: dict[str, Any]) -> Stopped:
    """Save as the loop itself does, in the folder of the step that was done last."""
    by = "SIGTERM" if run.termination is None else run.termination.by
    module, fabric, out = run.module, given["fabric"], Path(given["out_dir"])
    saver = _saver(run)
    if saver is not None:
        step = run.agreement.step
        path = out / f"step-{step:06d}" / _ADAPTER_FILES[saver]
        path.parent.mkdir(parents=True, exist_ok=True)
        getattr(module, saver)(fabric, given["model"], path)
    else:
        state: dict[str, Any] = given["state"]
        step = int(state["step_count"])
        if hasattr(module, "save_checkpoint"):  # pretrain
            path = out / f"step-{step:08d}" / "lit_model.pth"
            if not run_folder.is_saved(path):
                module.save_checkpoint(fabric, state, given["tokenizer_dir"], path)
            return Stopped(by, path, step)
        state["iter_num"] -= 1  # finetuning counts before it reads
        path = out / f"step-{step:06d}" / "lit_model.pth"
        path.parent.mkdir(parents=True, exist_ok=True)
        fabric.save(path, state)
    module.copy_config_files(given["checkpoint_dir"], path.parent)
    module.save_hyperparameters(module.setup, path.parent)
    module.save_prompt_style(given["data"].prompt_style, path.parent)
    return Stopped(by, path, step, resumes=saver is None)


class _AgreedLimit(float):
    """Seconds that a loop may take, asked on every rank with ``elapsed > limit``: reached on all as soon as on one.

    Else clocks that differ a little would let some ranks go on, and wait there for the others.
    """

    def __new__(cls, seconds: float, strategy: LitGPTStrategy) -> _AgreedLimit:
        return super().__new__(cls, seconds)

    def __init__(self, seconds: float, strategy: LitGPTStrategy) -> None:
        self._agree = strategy.reduce_boolean_decision

    def __lt__(self, elapsed: float) -> bool:  # Python asks the right side of ``>`` first, since its class is derived
        return bool(self._agree(float(self) < elapsed, all=False))


def _batches(run: LitGPTRun, stock: Any) -> type:
    class GuardedBatches(stock):  # type: ignore[misc]
        def __next__(self) -> Any:
            if run.agreement.stop:
                raise _StopTraining
            try:
                return super().__next__()
            except (StopIteration, ValueError, Error):
                raise
            except Exception as error:
                raise ValueError(f"data: {_in_one_line(error)}") from error

    return GuardedBatches


def _get_dataloaders(run: LitGPTRun, stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def get(*args: Any, **options: Any) -> Any:
        try:
            return stock(*args, **options)
        except FileNotFoundError as error:
            raise ValueError(f"data: {error}") from None

    return get


def _in_one_line(error: Exception) -> str:
    """``OSError: disk on fire (in __getitem__, books.py:12)``."""
    words = str(error).strip().splitlines() or [""]
    where = f" ({error.__notes__[-1]})" if getattr(error, "__notes__", None) else ""  # the loader's
    of_worker = any("Traceback" in line for line in words)  # then torch has put the worker's traceback in
    return f"{type(error).__name__}: {words[-1] if of_worker else words[0]}{where}"


def _loss(run: LitGPTRun, stock: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    goldfish = run.options.goldfish
    own = run.options.vocab_loss or goldfish is not None or run.options.pipeline > 1
    finetunes = run.module.__name__.startswith("litgpt.finetune.")  # answers are of unequal length

    def loss(logits: Any, targets: torch.Tensor, chunk_size: int = 128, ignore_index: int = -100) -> torch.Tensor:
        masks = False
        if goldfish is not None and torch.is_grad_enabled():  # litgpt validates without gradients
            masks = True
            targets = targets.masked_fill(~goldfish_mask(targets, *goldfish, ignore_index=ignore_index), ignore_index)
        assert run.strategy is not None
        mean = run.strategy.cross_entropy if own else stock
        value = mean(logits, targets, chunk_size, ignore_index)
        if run.options.data_ranks == 1 or targets.is_meta or not (masks or finetunes):
            return value
        weight = token_weight((targets != ignore_index).sum(), run.strategy.comms)
        return torch.where(weight > 0, value * weight, 0.0)  # stock LitGPT's mean of no tokens is NaN in validation

    return loss if own or finetunes else stock


# --- what is logged ---------------------------------------------------------------------------------------------


def _running_mean(run: LitGPTRun, stock: Any) -> type:
    class RunningMean(stock):  # type: ignore[misc]
        def compute(self) -> torch.Tensor:
            assert run.figures is not None
            return run.figures.mean(super().compute())

    return RunningMean


def _validate(run: LitGPTRun, stock: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def validate(*args: Any, **options: Any) -> torch.Tensor:
        assert run.figures is not None
        return run.figures.mean(stock(*args, **options))

    return validate


def count_parameters(module: nn.Module, requires_grad: bool | None = None) -> int:
    """As litgpt's own function: elements of the parameters, of whole ones where this rank holds a part."""
    total = 0
    for parameter in module.parameters():
        if requires_grad in (None, parameter.requires_grad):
            placement = placement_of(parameter)
            if placement is not None:
                total += math.prod(placement.global_shape)
            else:
                total += math.prod(getattr(parameter, "quant_state", parameter).shape)
    return total


def _choose_logger(run: LitGPTRun, stock: Callable[..., Any]) -> Callable[..., Any]:
    def choose(*args: Any, **options: Any) -> Any:
        logger = stock(*args, **options)
        log = logger.log_metrics

        def log_metrics(metrics: dict[str, Any], step: int | None = None) -> None:  # every rank calls it
            if "loss" in metrics:
                assert run.figures is not None
                tokens = metrics.get("total_tokens")  # an int, or finetuning's tensor
                metrics = metrics | run.figures.take(None if tokens is None else int(tokens))
            log(metrics, step)

        logger.log_metrics = log_metrics
        return logger

    return choose


def _measure(run: LitGPTRun, stock: Callable[..., int]) -> Callable[..., int]:
    def measure(model: nn.Module, *args: Any, **options: Any) -> int:
        flops = None
        if run.fabric.strategy.global_rank == 0:
            with _routed_evenly(model):
                flops = stock(model, *args, **options)
        with torch.device("cpu"):  # litgpt measures within the meta device
            return run.fabric.broadcast(flops)

    return measure


class _Even(LLaMAMoE):
    """A mixture whose first expert is given the rows of all: each token goes to as many experts, all of one size."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        routed = self.gate(rows)
        chosen = routed[0] if isinstance(routed, tuple) else torch.topk(routed, self.config.n_expert_per_token)[0]
        each = self.experts[0](rows.repeat(chosen.shape[1], 1)).view(chosen.shape[1], *rows.shape)
        y = (each * chosen.t().unsqueeze(-1)).sum(0).view_as(x)
        return y + self.shared_experts(x) if self.config.n_shared_expert else y


@contextlib.contextmanager
def _routed_evenly(model: nn.Module) -> Iterator[None]:
    on_meta = all(parameter.is_meta for parameter in model.parameters())
    mixtures = [part for part in model.modules() if on_meta and type(part) is LLaMAMoE]
    for part in mixtures:
        part.__class__ = _Even
    try:
        yield
    finally:
        for part in mixtures:
            part.__class__ = LLaMAMoE


# --- what rank 0 does, or all ranks, or one alone -------------------------------------------------------------------


def _save_hyperparameters(run: LitGPTRun, stock: Callable[..., Any]) -> Callable[..., Any]:
    def save(function: Any, checkpoint_dir: Path, *args: Any) -> None:
        # Axo's options in a comment: litgpt must still read the file
        text = run_folder.comment(run.options.by_hand) + run.hyperparameters
        (checkpoint_dir / "hyperparameters.yaml").write_text(text)

    return rank_zero_only(save)


def _check_checkpoint_dir(run: LitGPTRun, stock: Callable[..., Any]) -> Callable[..., Any]:
    def check(checkpoint_dir: Path, *args: Any, **options: Any) -> None:
        if holds_sharded(checkpoint_dir):
            options["model_filename"] = f"{MODEL_FILE}/.metadata"
        stock(checkpoint_dir, *args, **options)

    return check


def _load_checkpoint(run: LitGPTRun, stock: Callable[..., Any]) -> Callable[..., Any]:
    def load(fabric: Any, model: Any, checkpoint_path: Path, strict: bool = True) -> None:
        if any(parameter.is_meta for parameter in model.parameters()):  # chat's, which is split afterwards
            assert run.strategy is not None
            run.strategy.after_setup = lambda module: load(fabric, module, checkpoint_path, strict)
        elif is_sharded(checkpoint_path):
            fabric.load_raw(checkpoint_path, model, strict=strict)
        else:
            stock(fabric, model, checkpoint_path, strict=strict)
        if run.quantized and not any(parameter.is_meta for parameter in model.parameters()):
            if not all(part.training for part in model.modules()):  # Fabric's wrapper itself is never in evaluation
                model.requires_grad_(False)
            quantize(model, run.quantized)

    return load


def _unquantized(run: LitGPTRun, stock: Callable[..., Any]) -> Callable[..., Any]:
    """No layer is of bitsandbytes' classes, so LitGPT is not told."""
    if "quantize" not in inspect.signature(stock).parameters:
        return stock

    @functools.wraps(stock)
    def call(*args: Any, quantize: str | None = None, **options: Any) -> Any:
        run.quantized = (quantize or "").removeprefix("bnb.")
        return stock(*args, **options)

    return call


def _gpt(run: LitGPTRun, stock: Any) -> Any:
    """A model that ``generate_adapter`` loads before Fabric splits it: its parameters have no values to load into."""
    if not hasattr(run.module, "generate") or not hasattr(run.module, "lazy_load"):
        return stock

    def make(config: Any) -> nn.Module:
        model = stock(config)

        def load(state: dict[str, Any]) -> None:
            assert run.strategy is not None
            run.strategy.after_setup = lambda module: module.load_state_dict(state)
            del model.load_state_dict

        model.load_state_dict = load
        return model

    return make


def _on_rank_0(run: LitGPTRun, stock: Callable[..., Any]) -> Callable[..., Any]:
    return rank_zero_only(stock)


def _generate_example(run: LitGPTRun, stock: Callable[..., Any]) -> Callable[..., Any]:
    def generate(fabric: Any, *args: Any, **options: Any) -> Any:
        random.setstate(fabric.broadcast(random.getstate()))  # chooses the example, where litgpt was asked to
        with source_generator(fabric.strategy.comms, fabric.device, all_stages=True):
            return stock(fabric, *args, **options)

    return generate


def _save_lora(run: LitGPTRun, stock: Callable[..., Any]) -> Callable[..., Any]:
    from litgpt.lora import lora_filter

    def save(fabric: Any, model: Any, file_path: Any) -> None:
        fabric.print(f"Saving LoRA weights to {str(file_path)!r}")
        fabric.save(file_path, {"model": model}, filter={"model": lora_filter})

    return save


_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID", "LT_STRATEGY", "LT_ACCELERATOR")


def _alone(run: LitGPTRun, stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def alone(*args: Any, **options: Any) -> Any:
        kept = {name: os.environ.pop(name) for name in _RANK if name in os.environ}
        try:
            return stock(*args, **options)
        finally:
            os.environ |= kept

    return alone


def _lit_server(run: LitGPTRun, stock: Any) -> Callable[..., Any]:
    def make(api: Any, **options: Any) -> Any:
        from axo.integrations.litgpt.serving import Served  # wants LitServe

        rank = Rank.from_environment()
        assert rank is not None
        return Served(rank.rank, run.options.host, api, **options)

    return make


def _print_given(run: LitGPTRun, stock: Any) -> Any:
    if inspect.ismodule(stock):  # pretrain's
        return stock

    @functools.wraps(stock)
    def print_given(given: dict[str, Any]) -> None:
        stock(given | {"access_token": "(not shown)"} if given.get("access_token") else given)

    return print_given


def _evaluate(run: LitGPTRun, stock: Callable[..., Any]) -> Callable[..., Any]:
    def evaluate(**options: Any) -> None:
        from axo.integrations.litgpt.evaluating import on_grid  # wants lm_eval

        fabric = Fabric(devices=1)
        with on_grid(fabric, functools.partial(_alone, run)):
            options["device"] = options.get("device") or str(fabric.device)
            options["force_conversion"] = options.get("force_conversion", False) and fabric.global_rank == 0
            stock(**options)

    return evaluate


def _interact(run: LitGPTRun, stock: Callable[..., Any]) -> Callable[..., Any]:
    def interact(*args: Any, fabric: Any, **options: Any) -> Any:
        run.module.__dict__["input"] = Lines(fabric)  # before the builtin
        try:
            return stock(*args, fabric=fabric, **options)
        finally:
            del run.module.__dict__["input"]

    return interact


PATCHES = {
    "main": Patch(_main, "the strategy must know the batch sizes, to go on from other data ranks; as setup"),
    "fit": Patch(_fit, "SIGTERM and the end of max_time reach all ranks after the same step, and SIGTERM saves"),
    "CycleIterator": Patch(_batches, "between two steps all ranks end together; errors of the data are one message"),
    "get_dataloaders": Patch(_get_dataloaders, "data that is not there is one message"),
    "chunked_cross_entropy": Patch(
        _loss,
        "logits split over x, goldfish loss, and stages, whose schedule the loss call runs; the mean over all data"
        " ranks' tokens where they have not as many",
    ),
    "RunningMean": Patch(_running_mean, "the loss that is printed and logged is that of all data ranks"),
    "validate": Patch(_validate, "as RunningMean"),
    "choose_logger": Patch(_choose_logger, "tokens a second, memory and communication of all ranks are logged too"),
    "num_parameters": Patch(lambda *_: count_parameters, "the size of the model is printed, not that of a rank's part"),
    "measure_flops": Patch(_measure, "rank 0 counts for all; on the meta device mixtures cannot ask who chose what"),
    "generate_example": Patch(_generate_example, "all ranks, from one generator state, or they choose other tokens"),
    "interact": Patch(_interact, "rank 0 reads what is typed, and tells the others"),
    "save_lora_checkpoint": Patch(_save_lora, "adapters are gathered tensor by tensor; rank 0 writes them"),
    "LitServer": Patch(_lit_server, "rank 0 speaks HTTP, and every rank computes each answer"),
    "pprint": Patch(_print_given, "what was given is printed, but for the access token"),
    "convert_and_evaluate": Patch(_evaluate, "the model is split that it evaluates; rank 0 alone exports it"),
    "prepare_results": Patch(_on_rank_0, "prints and writes"),
    "merge_lora": Patch(
        _alone, "a serial program with a Fabric of its own, which must not see the environment of a rank"
    ),
    "copy_config_files": Patch(_on_rank_0, "finetune_lora's loop takes every rank for rank 0"),
    "save_hyperparameters": Patch(
        _save_hyperparameters, "as copy_config_files; LitGPT would parse the command line again, Axo's options too"
    ),
    "save_prompt_style": Patch(_on_rank_0, "as copy_config_files"),
    "setup": Patch(_unquantized, "each rank quantizes its part of a layer, once it is filled; LitGPT on one GPU only"),
    "GPT": Patch(_gpt, "generate_adapter fills its model before it is split"),
    "check_valid_checkpoint_dir": Patch(_check_checkpoint_dir, "a sharded model is a folder, not a file"),
    "load_checkpoint": Patch(
        _load_checkpoint,
        "each rank reads its part of a sharded model; a model without values is split before it is filled",
    ),
}


# Names that are no command's own: the module here that replaces each, and why it is no row of PATCHES.
ELSEWHERE = {
    "lightning_utilities.core.imports.RequirementCache.__bool__": (
        "parsing",
        "while torchmetrics is imported, before LitGPT is: metrics that want transformers are left out, which saves a"
        " third of all imports",
    ),
    "docstring_parser.parse_from_object": (
        "parsing",
        "for the whole process, before there are ranks: the sources of classes are read once, not for each parser",
    ),
    "lightning.fabric.utilities.load._lazy_load": (
        "harmless",
        "for the whole process, wherever LitGPT has imported it: a checkpoint runs no code",
    ),
    "litgpt.prompts.load_prompt_style": ("harmless", "as _lazy_load: it would import and call what a file names"),
    "litgpt.deploy.serve.SimpleLitAPI": (
        "serving_apis",
        "as _lazy_load, in the processes that LitServe starts",
    ),
    "litgpt.deploy.serve.StreamLitAPI": (
        "serving_apis",
        "as _lazy_load, in the processes that LitServe starts",
    ),
    "litgpt.deploy.serve.OpenAISpecLitAPI": (
        "serving_apis",
        "as _lazy_load, in the processes that LitServe starts; and its chat template is rendered in a sandbox",
    ),
    "lm_eval.models.huggingface.HFLM": (
        "evaluating",
        "while LitGPT's evaluate runs: the harness makes the model itself, and it is split as soon as it is made",
    ),
}


@contextlib.contextmanager
def patched(run: LitGPTRun) -> Iterator[None]:
    """Replace the names that ``run.module`` has, and litgpt.api's where it uses that, while the body runs."""
    modules = [run.module, *([sys.modules["litgpt.api"]] if hasattr(run.module, "LLM") else [])]
    stock = [(module, name, getattr(module, name)) for name in PATCHES for module in modules if hasattr(module, name)]
    for module, name, function in stock:
        setattr(module, name, PATCHES[name].make(run, function))
    try:
        yield
    finally:
        for module, name, function in stock:
            setattr(module, name, function)
        for logger in getattr(run.fabric, "_loggers", ()):
            logger.finalize("finished")  # a forked process ends without flushing what loggers hold
            if type(logger).__name__ == "WandbLogger":  # it leaves this to the end of the process
                logger.experiment.finish()
