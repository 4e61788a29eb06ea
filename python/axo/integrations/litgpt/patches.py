"""Every name of LitGPT's commands that ``axo litgpt`` replaces: by what, and why. Nothing else of LitGPT is changed.

LitGPT's commands look these names up in their own module (``litgpt.pretrain``, ``litgpt.finetune.full``, ...), so that
is where the replacements stand for the time of one run (:func:`patched`). Each public method of :class:`LitGPTRun`
stands for LitGPT's function or class of that name; it gets the stock one first, and its docstring says why.

Some names of LitGPT's and of other packages are replaced elsewhere (:data:`ELSEWHERE`): they are needed before there is
a run, without one, or for a part of one.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import random
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning import fabric
from lightning.fabric import Fabric
from litgpt.model import LLaMAMoE
from torch import nn

from axo.errors import Error
from axo.integrations import data_ranks
from axo.integrations.fabric.figures import Figures
from axo.integrations.fabric.sharded_checkpoint import MODEL_FILE, holds_sharded, is_sharded
from axo.integrations.fabric.step_agreement import StepAgreement
from axo.integrations.litgpt import evaluating, run_folder
from axo.integrations.litgpt.conversation import Lines
from axo.integrations.litgpt.options import Options
from axo.launch import Interrupted, Rank, Termination
from axo.nn.generator import source_generator
from axo.nn.goldfish import goldfish_mask
from axo.nn.quantize import quantize
from axo.optim.muon import muon_groups
from axo.overlap.no_sync import token_weight
from axo.sharding import cut_sequence
from axo.train.config import TrainConfig
from axo.train.copies import RankCopies
from axo.train.elastic import StateCopies


class Stopped(Exception):
    """The run ended on request, and what it saved is named; or its ranks did, and it goes on on so many ``ranks``."""

    def __init__(self, words: str, ranks: int = 0) -> None:
        super().__init__(words)
        self.ranks = ranks


class _StopTraining(Exception):
    """Raised between two steps, on every rank."""


@dataclass
class LitGPTRun:
    """One run of a command, on this rank; its public methods stand for LitGPT's names.

    Args:
        module: The command's module, such as ``litgpt.pretrain``.
        options: What was asked of Axo.
        hyperparameters: LitGPT's own options, as it writes them beside a checkpoint.

    Attributes:
        agreement: What the ranks agree with before each step.
        termination: What notes SIGTERM and Ctrl-C, of a command that trains.
        strategy: The strategy of the run's Fabric, once there is one.
        quantized: What linear layers are quantized to, such as "nf4"; "": they are not.
        max_time: Seconds that training may take; None: any.
        elastic: With ``--elastic``: the run, and where copies of its state lie; ``copies``: this rank's.
        fabric, figures, loop: Once the loop has begun; ``loop`` is what its function was given.
    """

    module: ModuleType
    options: Options
    hyperparameters: str = ""
    agreement: StepAgreement = field(default_factory=StepAgreement)
    termination: Termination | None = None
    strategy: Any = None  # a LitGPTStrategy
    quantized: str = ""
    max_time: float | None = None
    elastic: tuple[TrainConfig, StateCopies] | None = None
    copies: RankCopies | None = None
    fabric: Any = None
    figures: Any = None  # a Figures
    loop: dict[str, Any] = field(default_factory=dict)
    _done: int = 0  # steps
    _first: tuple[int, float] = (sys.maxsize, 0.0)  # the step that was logged first, and when

    # --- the loop -----------------------------------------------------------------------------------------------------

    def main(self, stock: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """The strategy must know the batch sizes, to go on from other data ranks; the limit of time is all ranks'."""
        options = inspect.signature(stock).bind(*args, **options).arguments
        if "train" in options and self.module.__name__ == "litgpt.finetune.lora":  # LitGPT's other loops ignore it
            self.max_time = options["train"].max_time or None
        if "train" in options:
            options["train"] = self.strategy.train = replace(options["train"], max_time=None)
        if self.elastic is not None:
            self.elastic[1].mark("agree")
            self.copies = RankCopies(
                *self.elastic, self.strategy.comms, lambda *where: self.strategy.begin_copy(self.loop["state"], *where),
                lambda: self.termination is not None and self.termination.asked,
            )  # fmt: skip
            self.copies.complete(options["resume"] or None)
        return self.setup(stock, **options)

    def setup(self, stock: Callable[..., Any], *args: Any, quantize: str | None = None, **options: Any) -> Any:
        """Each rank quantizes its part of a layer, once it is filled; LitGPT, which is not told, on one GPU only."""
        self.quantized = (quantize or "").removeprefix("bnb.")
        return stock(*args, **options)

    def fit(self, stock: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """SIGTERM and the end of the time reach all ranks after the same step, which the loop then saves."""
        options = inspect.signature(stock).bind(*args, **options).arguments
        self.fabric = options["fabric"]
        self.figures = Figures(self.strategy.comms)
        self.loop = options
        if self.termination is not None:
            self.termination.progress = functools.partial(self._progress, options)
        if hasattr(self.module, "save_lora_checkpoint"):
            options["fabric"] = _EveryRankIsFirst(self.fabric)
        before, since = options.get("state", {}).get("iter_num", 0), time.perf_counter()
        if self.copies is not None:
            self._done = int(options["state"]["step_count"])
            self.copies.loaded(self._done)
        try:
            result = stock(**options)
            if self.copies is not None:
                self.copies.wait()
            if self.module.__name__ == "litgpt.pretrain":
                state, train = options["state"], options["train"]
                tokens = (state["iter_num"] - before) * train.micro_batch_size * state["model"].max_seq_length
                rate = tokens * self.fabric.world_size / (time.perf_counter() - since)
                self.fabric.print = functools.partial(_print_rate, self.fabric.print, rate)
            return result
        except _StopTraining:
            by = "SIGTERM"
            if self.copies is not None:
                self.copies.wait()
                if self.copies.resizes and self.termination is not None and self.termination.asked:
                    raise Interrupted(self.termination.number) from None  # this rank alone, and late
                if self.copies.resizes:
                    raise Stopped("", self.copies.next.ranks if self.copies.next is not None else 0) from None
            if self.termination is not None:
                self.termination.tell_lost()
                by = self.termination.by
        resumes = "go on with --resume auto"
        then = resumes if "state" in options else "adapters only, from which LitGPT does not resume a run"
        done, checkpoint, _ = self._progress(options)
        raise Stopped(f"stopped by {by} after step {done}; saved {checkpoint}; {then}")

    def _resizes(self) -> bool:
        """Between two batches: begin a copy, if it is time. Whether these ranks end, as the run goes on on others."""
        done = int(self.loop["state"]["step_count"])
        if self.copies is None or done == self._done:
            return False
        self._done = done
        self.copies.settle(done)
        if line := self.copies.first_step(done):
            parts = ", ".join(f"{part} {seconds:.2f} s" for part, seconds in line["seconds"].items())
            self.fabric.print(f"axo litgpt: {line['kind']} from step {line['start']}: {parts}")
        return self.copies.after(done)

    def _progress(self, options: dict[str, Any]) -> tuple[int, Path | None, int]:
        """The steps that are done, and the newest checkpoint with its step."""
        done = int(options["state"]["step_count"]) if "state" in options else self.agreement.step
        newest = run_folder.newest(options["out_dir"], "lit_model.pth*")
        return done, newest, 0 if newest is None else int(newest.parent.name.removeprefix("step-"))

    def instantiate_torch_optimizer(
        self, stock: Callable[..., Any], optimizer: Any, model_parameters: Any, **options: Any
    ) -> Any:
        """Axo's Muon is for matrices of hidden layers, and parameters alone do not say which those are."""
        path = optimizer.get("class_path") if isinstance(optimizer, dict) else optimizer
        if path == "axo.optim.Muon":
            model_parameters = muon_groups(self.strategy.module)
        return stock(optimizer, model_parameters, **options)

    def CycleIterator(self, stock: type, loader: Any) -> Any:
        """Between two steps all ranks end together; errors of the data are one message."""
        return _Batches(stock(loader), self)

    def get_dataloaders(self, stock: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Data that is not there is one message."""
        try:
            return stock(*args, **options)
        except FileNotFoundError as error:
            raise ValueError(f"data: {error}") from None

    def chunked_cross_entropy(
        self, stock: Callable[..., Any], logits: Any, targets: Any, chunk_size: int = 128, ignore_index: int = -100
    ) -> torch.Tensor:
        """Logits split over x, goldfish loss, and stages, whose schedule the loss call runs; this rank's tokens of a
        context; the mean over all data ranks' tokens where they have not as many.
        """
        asked = self.options
        masks = asked.goldfish is not None and torch.is_grad_enabled()  # litgpt validates without gradients
        if asked.goldfish is not None and masks:
            left_out = ~goldfish_mask(targets, *asked.goldfish, ignore_index=ignore_index)
            targets = targets.masked_fill(left_out, ignore_index)
        if asked.context > 1 and not targets.is_meta:
            if self.strategy.shifts_labels:  # of whole rows; the last token has none
                targets = F.pad(targets, (0, 1), value=ignore_index)
                logits = logits[:-1] if isinstance(logits, list) else logits
            targets = cut_sequence(targets, self.strategy.comms)
        own = asked.vocab_loss or asked.goldfish is not None or asked.pipeline > 1
        mean = self.strategy.cross_entropy if own else stock
        value = mean(logits, targets, chunk_size, ignore_index)
        if targets.is_meta or asked.data_ranks * asked.context == 1:
            return value
        if self.strategy.streams and asked.context == 1 and not torch.is_grad_enabled():
            return value  # a validation, in which ranks need not call this as often
        tokens = (targets != ignore_index).sum() * (not self.strategy.stands_in)
        weight = token_weight(tokens, self.strategy.comms)
        return torch.where(weight > 0, value * weight, 0.0)  # stock LitGPT's mean of no tokens is NaN in validation

    # --- what is logged -----------------------------------------------------------------------------------------------

    def RunningMean(self, stock: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """The loss that is printed and logged is that of all data ranks."""
        mean = stock(*args, **options)
        of_rank = mean.compute
        mean.compute = lambda: self.figures.mean(of_rank())
        return mean

    def validate(self, stock: Callable[..., torch.Tensor], *args: Any, **options: Any) -> torch.Tensor:
        """As RunningMean."""
        return self.figures.mean(stock(*args, **options))

    def choose_logger(self, stock: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Tokens a second, memory and communication of all ranks are logged and printed too, and the time that is left
        where LitGPT does not tell it."""
        logger = stock(*args, **options)
        log = logger.log_metrics

        def log_metrics(metrics: dict[str, Any], step: int | None = None) -> None:  # every rank calls it
            if "loss" in metrics:
                # LitGPT takes a rank's own for those of each, which rows of finetuning are not
                own = torch.tensor(int(metrics["tokens"]), device=self.fabric.device)
                metrics["total_tokens"] = int(data_ranks.reduce(own, self.strategy.comms))
                figures = self.figures.take(metrics["total_tokens"])
                left = None if "remaining_time" in metrics else self._left(metrics["step"])
                self.fabric.print(in_words(figures, left))
                metrics = metrics | figures
            log(metrics, step)

        logger.log_metrics = log_metrics
        return logger

    def _left(self, step: int) -> float:
        """Seconds that are left after a step of finetuning; infinite after the first, which tells nothing."""
        now, train = time.perf_counter(), self.loop["train"]
        first, since = self._first = min(self._first, (step, now))
        batches = train.gradient_accumulation_iters(self.loop["devices"], self.loop.get("num_nodes", 1))
        steps = (train.epochs or math.inf) * len(self.loop["train_dataloader"]) / batches
        done = step - first
        return (now - since) / done * max(0, min(steps, train.max_steps or math.inf) - step) if done else math.inf

    def num_parameters(self, stock: Any, module: nn.Module, requires_grad: bool | None = None) -> int:
        """The size of the model is printed, not that of a rank's part."""
        return count_parameters(module, requires_grad)

    def measure_flops(self, stock: Callable[..., int], model: nn.Module, *args: Any, **options: Any) -> int:
        """Rank 0 counts for all; on the meta device mixtures cannot ask who chose what."""
        flops = None
        if self.fabric.strategy.global_rank == 0:
            mixtures = [part for part in model.modules() if isinstance(part, LLaMAMoE) and part.gate.weight.is_meta]
            for part in mixtures:
                part.forward = functools.partial(_routed_evenly, part)
            flops = stock(model, *args, **options)
            for part in mixtures:
                del part.forward
        with torch.device("cpu"):  # litgpt measures within the meta device
            return self.fabric.broadcast(flops)

    def pprint(self, stock: Callable[..., None], given: dict[str, Any]) -> None:
        """What was given is printed, but for the access token."""
        stock(given | {"access_token": "(not shown)"} if given.get("access_token") else given)

    # --- what rank 0 does, or all ranks, or one alone -----------------------------------------------------------------

    def copy_config_files(self, stock: Callable[..., Any], *args: Any, **options: Any) -> None:
        """Rank 0 writes and prints; finetune_lora's loop takes every rank for it."""
        if self.strategy.is_global_zero:
            stock(*args, **options)

    save_prompt_style = prepare_results = copy_config_files

    def save_hyperparameters(self, stock: Any, function: Any, checkpoint_dir: Path, *args: Any) -> None:
        """As copy_config_files; LitGPT would parse the command line again, Axo's options too."""
        if self.strategy.is_global_zero:  # Axo's options in a comment: litgpt must still read the file
            text = run_folder.comment(self.options.by_hand) + self.hyperparameters
            (checkpoint_dir / "hyperparameters.yaml").write_text(text)

    def save_lora_checkpoint(self, stock: Any, fabric: Any, model: Any, file_path: Any) -> None:
        """Adapters are gathered tensor by tensor; rank 0 writes them."""
        from litgpt.lora import lora_filter

        fabric.print(f"Saving LoRA weights to {str(file_path)!r}")
        fabric.save(file_path, {"model": model}, filter={"model": lora_filter})

    def merge_lora(self, stock: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """A serial program with a Fabric of its own, which must not see the environment of a rank."""
        with evaluating.no_rank():
            return stock(*args, **options)

    def convert_and_evaluate(self, stock: Callable[..., Any], **options: Any) -> None:
        """The model is split that it evaluates; rank 0 alone exports it."""
        fabric = Fabric(devices=1)
        evaluating.split_models(fabric)
        options["device"] = options.get("device") or str(fabric.device)
        options["force_conversion"] = options.get("force_conversion", False) and fabric.global_rank == 0
        stock(**options)

    def generate_example(self, stock: Callable[..., Any], fabric: Any, *args: Any, **options: Any) -> Any:
        """All ranks, from one generator state, or they choose other tokens."""
        random.setstate(fabric.broadcast(random.getstate()))  # chooses the example, where litgpt was asked to
        with source_generator(fabric.strategy.comms, fabric.device, all_stages=True):
            return stock(fabric, *args, **options)

    def interact(self, stock: Callable[..., Any], *args: Any, fabric: Any, **options: Any) -> Any:
        """Rank 0 reads what is typed, and tells the others."""
        self.module.__dict__["input"] = Lines(fabric)  # before the builtin
        return stock(*args, fabric=fabric, **options)

    def LitServer(self, stock: type, api: Any, **options: Any) -> Any:
        """Rank 0 speaks HTTP, and every rank computes each answer."""
        from axo.integrations.litgpt.serving import Served  # wants LitServe

        rank = Rank.from_environment()
        assert rank is not None
        return Served(rank.rank, self.options.host, api, **options)

    # --- checkpoints that are read ------------------------------------------------------------------------------------

    def check_valid_checkpoint_dir(self, stock: Callable[..., None], checkpoint_dir: Path, **options: Any) -> None:
        """A sharded model is a folder, not a file."""
        if holds_sharded(checkpoint_dir):
            options["model_filename"] = f"{MODEL_FILE}/.metadata"
        stock(checkpoint_dir, **options)

    def load_checkpoint(
        self, stock: Callable[..., None], fabric: Any, model: Any, checkpoint_path: Path, strict: bool = True
    ) -> None:
        """Each rank reads its part of a sharded model; one without values (chat's) is split before it is filled."""
        if any(parameter.is_meta for parameter in model.parameters()):
            self.strategy.after_setup = lambda module: self.load_checkpoint(
                stock, fabric, module, checkpoint_path, strict
            )
            return
        if is_sharded(checkpoint_path):
            fabric.load_raw(checkpoint_path, model, strict=strict)
        else:
            stock(fabric, model, checkpoint_path, strict=strict)
        if self.quantized:
            if not all(part.training for part in model.modules()):  # Fabric's wrapper itself is never in evaluation
                model.requires_grad_(False)
            quantize(model, self.quantized)

    def GPT(self, stock: type, config: Any) -> nn.Module:
        """``generate_adapter`` fills its model before it is split."""
        model: Any = stock(config)
        if hasattr(self.module, "lazy_load"):

            def load(state: dict[str, Any]) -> None:
                self.strategy.after_setup = lambda module: module.load_state_dict(state)
                del model.load_state_dict

            model.load_state_dict = load
        return model


class _Batches:
    """LitGPT's endless iterator over the data, between two of whose batches all ranks of ``run`` end together.

    Attributes:
        epoch: How often the data was read whole.
    """

    def __init__(self, batches: Any, run: LitGPTRun) -> None:
        self._batches, self._run, self._since = batches, run, time.perf_counter()
        self.epoch = 0

    def __iter__(self) -> _Batches:
        return self

    def __next__(self) -> Any:
        run = self._run
        if run.agreement.stop or (run.copies is not None and run._resizes()):
            raise _StopTraining
        try:
            batch = next(self._batches)
        except (StopIteration, ValueError, Error):
            raise
        except Exception as error:
            raise ValueError(f"data: {_in_one_line(error)}") from error
        self.epoch = self._batches.epoch
        if run.strategy.stands_in and isinstance(batch, dict) and "token_counts" in batch:
            batch["token_counts"] = {name: torch.zeros_like(count) for name, count in batch["token_counts"].items()}
        if run.max_time is not None:
            over = time.perf_counter() - self._since > run.max_time
            # Clocks differ: all ranks end as soon as one's is over, or they would wait for it in the next step.
            if run.strategy.reduce_boolean_decision(over, all=False):
                run.fabric.print(f"Max time ({run.max_time / 60:.2f}m) reached")
                self.epoch = sys.maxsize  # which the loop looks at next
        return batch


def _in_one_line(error: Exception) -> str:
    """``OSError: disk on fire (in __getitem__, books.py:12)``."""
    words = str(error).strip().splitlines() or [""]
    where = f" ({error.__notes__[-1]})" if getattr(error, "__notes__", None) else ""  # the loader's
    of_worker = any("Traceback" in line for line in words)  # then torch has put the worker's traceback in
    return f"{type(error).__name__}: {words[-1] if of_worker else words[0]}{where}"


def in_words(figures: dict[str, float], left: float | None = None) -> str:
    """A line under LitGPT's own; ``left``: seconds, None or infinite: nothing is said of them."""
    words = [f"{figures['tokens_per_sec']:,.0f} tokens/s"] if "tokens_per_sec" in figures else []
    words += [f"{figures['memory_gb']:.2f} GB the largest rank", f"comm {figures['comm_share/all']:.0%}"]
    words += [] if left is None or math.isinf(left) else [f"remaining time: {timedelta(seconds=int(left))}"]
    return "  " + " | ".join(words)


def _print_rate(stock: Callable[..., None], rate: float, line: str, *more: Any, **options: Any) -> None:
    """LitGPT's last figure divides all tokens by a reading of the clock; ``rate``: tokens a second of this run."""
    stock(re.sub(r"(Tok/sec +: ).*", rf"\g<1>{rate:,.2f} tok/s", line), *more, **options)


class _EveryRankIsFirst:
    """finetune_lora lets rank 0 alone generate examples and save adapters; on a grid all ranks must take part."""

    global_rank = 0

    def __init__(self, fabric: Any) -> None:
        self._fabric = fabric

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fabric, name)


def count_parameters(module: nn.Module, requires_grad: bool | None = None) -> int:
    """As litgpt's own function: elements of the parameters, of whole ones where this rank holds a part."""
    return data_ranks.whole_numel(p for p in module.parameters() if requires_grad in (None, p.requires_grad))


def _routed_evenly(mixture: Any, x: torch.Tensor) -> torch.Tensor:
    """A mixture's pass in which its first expert gets the rows of all, which are as many, and all experts one size."""
    rows = x.reshape(-1, x.shape[-1])
    routed = mixture.gate(rows)
    chosen = routed[0] if isinstance(routed, tuple) else torch.topk(routed, mixture.config.n_expert_per_token)[0]
    each = mixture.experts[0](rows.repeat(chosen.shape[1], 1)).view(chosen.shape[1], *rows.shape)
    y = (each * chosen.t().unsqueeze(-1)).sum(0).view_as(x)
    return y + mixture.shared_experts(x) if mixture.config.n_shared_expert else y


# Names that are no command's own: the module here that replaces each, and why it is no method of LitGPTRun.
ELSEWHERE = {
    "lightning_utilities.core.imports.RequirementCache.__bool__": (
        "parsing",
        "while torchmetrics is imported, before LitGPT is: metrics that want transformers are left out, which saves a"
        " third of all imports",
    ),
    "lightning.fabric.utilities.load._lazy_load": (
        "harmless",
        "for the whole process, wherever LitGPT has imported it: a checkpoint runs no code",
    ),
    "litgpt.prompts.load_prompt_style": ("harmless", "as _lazy_load: it would import and call what a file names"),
    "litgpt.deploy.serve.SimpleLitAPI": ("serving_apis", "as _lazy_load, in the processes that LitServe starts"),
    "litgpt.deploy.serve.StreamLitAPI": ("serving_apis", "as SimpleLitAPI"),
    "litgpt.deploy.serve.OpenAISpecLitAPI": ("serving_apis", "as SimpleLitAPI; its template renders in a sandbox"),
    "lm_eval.models.huggingface.HFLM": ("evaluating", "the harness makes the model itself, which is split at once"),
}

_REPLACED = [name for name, method in vars(LitGPTRun).items() if inspect.isfunction(method) and name[0] != "_"]


class _Barrier(fabric.utilities.distributed._InfiniteBarrier):
    """Lightning's makes a group of Gloo's, which asks for the hostname's address, knows no secret, and waits for a host
    that is lost."""

    group: Any
    barrier: Any

    def __enter__(self) -> _Barrier:
        if dist.is_initialized():
            self.group = dist.new_group(timeout=timedelta(days=1000), backend="axo")
            self.barrier = functools.partial(dist.barrier, self.group)
        return self


@contextlib.contextmanager
def patched(run: LitGPTRun) -> Iterator[None]:
    """Replace the names that ``run.module`` has, and litgpt.api's where it uses that, while the body runs."""
    modules = [run.module, *([sys.modules["litgpt.api"]] if hasattr(run.module, "LLM") else [])]
    named: Any = [(module, name, getattr(module, name, None)) for name in _REPLACED for module in modules]
    of_fabric: Any = fabric.fabric
    barrier, of_fabric._InfiniteBarrier = of_fabric._InfiniteBarrier, _Barrier
    stock = [each for each in named if callable(each[-1])]  # pretrain's pprint is the module
    for module, name, function in stock:
        replacement = functools.partial(getattr(run, name), function)
        setattr(module, name, functools.update_wrapper(replacement, function, (), ()))
    try:
        yield
    finally:
        of_fabric._InfiniteBarrier = barrier
        for module, name, function in stock:
            setattr(module, name, function)
        for logger in getattr(run.fabric, "_loggers", ()):
            logger.finalize("finished")  # a forked process ends without flushing what loggers hold
            if type(logger).__name__ == "WandbLogger":  # it leaves this to the end of the process
                logger.experiment.finish()
