"""Wrong input of ``axo litgpt`` that is found before there are ranks: one message, and nothing has begun.

What the parser itself understands, it says (``parsing``); here is what must be there, and what must fit to a grid.
"""

from __future__ import annotations

import copy
import gc
import importlib.util
import itertools
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from axo import check as check_value
from axo.arrangement import arrangement_of
from axo.checkpoint import folder as folders
from axo.comm.device_choice import check_device
from axo.grid import check_ranks
from axo.integrations.litgpt import auto_grid, parsing
from axo.integrations.litgpt.commands import PARALLEL, Command
from axo.integrations.litgpt.options import AUTO, Options, name_of
from axo.integrations.litgpt.parsing import Parsed, folder_of
from axo.integrations.litgpt.strategy import strategy_of
from axo.launch import Rank

# What each logger writes with: one of these packages, and what to install.
_LOGGERS = {
    "tensorboard": (("tensorboard", "tensorboardX"), "tensorboardX"),
    "wandb": (("wandb",), "wandb"),
    "mlflow": (("mlflow", "mlflow_skinny"), "mlflow"),
}
_FOR_TRAINING = {"--goldfish", "--sharded", "--vocab-loss", "--max-restarts", "--allow-new-data", "--offload"}
_OF_LITDATA = {"NoneType", "LitData", "MicroLlama", "OpenWebText", "TextFiles", "TinyLlama"}  # of LitGPT's data modules
_FOR_RESUMING = {  # why those that cannot resume do not take them
    "--max-restarts": "it cannot resume, so a run started again would begin anew",
    "--allow-new-data": "it cannot resume",
    "--sharded": "it saves adapters, which are small and always whole",
    f"--grid {AUTO}": "the planner plans steps that train all weights",
}


def read(name: str, arguments: list[str], *, asked: bool) -> Parsed | None:
    """Read a command's arguments, and refuse what cannot run. Once, before there are ranks: it takes seconds.

    What is imported meanwhile stays in use: to look through it for garbage would take a fifth of the time.

    Args:
        name: The command.
        arguments: Its arguments.
        asked: Options of Axo's are among them.

    Returns:
        None: nothing is asked of Axo, and ``--quantize`` is; on one device litgpt does that itself.

    Raises:
        ValueError: Something does not fit, or is not there; a size that an axis does not divide is an axo.Refused.
    """
    gc.disable()
    try:
        parsed = parsing.parse(name, PARALLEL[name].load(), arguments)
        if not asked and replace(parsed.own, trust=False) == Options() and parsed.litgpt.get("quantize") is not None:
            return None
        _check(name, parsed, None if parsed.own.hosts else Rank.from_environment())
    finally:
        gc.enable()
    return parsed


def _check(name: str, parsed: Parsed, rank: Rank | None) -> None:
    """Refuse what cannot run, and complete what was parsed: a grid, where the planner is to choose, and devices."""
    command = PARALLEL[name]
    _check_options(name, command, parsed.own)
    _check_prompt_style(parsed.litgpt.get("data"))
    if parsed.own.grid is None:
        parsed.own = auto_grid.choose(parsed, rank)
    asked, values = parsed.own, parsed.values
    if rank is not None:
        if asked.elastic:
            raise ValueError(f"litgpt: --elastic {asked.elastic} starts its own ranks; leave torchrun or srun out")
        check_ranks("litgpt", asked.chosen_grid, asked.pipeline, rank.world_size)
    if command.trains:
        # From a configuration file; one that a run on this grid has saved names the data ranks.
        usual = parsed.parser.get_defaults()
        for what, own in (("num_nodes", 1), ("devices", asked.data_ranks)):
            if values.get(what, own) not in (usual.get(what), own):
                raise ValueError(f"litgpt: {what}: {values[what]} is what the grid says ({asked.grid}); leave it out")
        parsed.litgpt.devices = values["devices"] = asked.data_ranks
    _check_values(values, asked, command)
    _check_paths(values, asked.ranks_in_all, command.reads_sharded)
    _check_model(parsed.model, asked)
    if command.trains:
        _check_batch(values["train"], asked)
        _check_training(values)
        if rank is None or rank.rank == 0:  # who writes there
            above = os.environ.get("LIGHTNING_ARTIFACTS_DIR", "")  # where litgpt puts a relative one
            folders.check_writable("litgpt: --out_dir", Path(above, str(values["out_dir"])))
        _check_data(values)


def check_grid(parsed: Parsed, asked: Options) -> None:
    """Refuse a grid of ``asked`` on which the run cannot go on.

    Raises:
        ValueError: Model, batch or data do not fit.
    """
    asked.check()
    strategy_of(asked)
    _check_model(parsed.model, asked)
    _check_batch(parsed.values["train"], asked)
    ranks, data = parsed.own.data_ranks, type(parsed.values["data"]).__name__
    if data in _OF_LITDATA and asked.data_ranks != ranks:
        raise ValueError(f"{data} reads with litdata, which goes on with the same data ranks only: z*data={ranks}")


def _check_options(name: str, command: Command, options: Options) -> None:
    """Refuse options of Axo's that the command has no use for."""
    if not command.stages and options.pipeline > 1:
        able = ", ".join(other for other, each in PARALLEL.items() if each.stages)
        raise ValueError(f"litgpt: --pipeline is not for {name}; in stages run {able}")
    if options.elastic and name != "pretrain":
        raise ValueError(f"litgpt: --elastic is of pretrain, not of {name}; leave it out")
    if options.context > 1 and not (command.trains and command.stages):
        raise ValueError(
            f"litgpt: --context is of pretrain, finetune_full and finetune_lora: {name} reads caches, or a prompt"
            " before the tokens; leave it out"
        )
    for option in map(name_of, options.given):
        if option == "--host" and name != "serve":
            raise ValueError(f"litgpt: --host is for serve, not for {name}; leave it out")
        if option in _FOR_TRAINING and not command.trains:
            able = ", ".join(other for other, each in PARALLEL.items() if each.trains)
            raise ValueError(f"litgpt: {option} is for training ({able}), not for {name}; leave it out")
        option = f"--grid {AUTO}" if option == "--grid" and options.grid is None else option
        if option in _FOR_RESUMING and not command.resumes:
            why = _FOR_RESUMING[option]
            raise ValueError(f"litgpt: {option} is not for {name}: {why}; use finetune_full, or leave it out")


def _refuse(wrong: dict[str, bool]) -> None:
    """Refuse with the first words that are true."""
    for words in (words for words, so in wrong.items() if so):
        raise ValueError(f"litgpt: {words}")


def _check_paths(values: Mapping[str, Any], ranks: int, reads_sharded: bool) -> None:
    """Refuse folders and files that do not exist, where litgpt would say so on every rank, or download."""
    of_a_model = "name a folder that litgpt download, convert_to_litgpt or training has written"
    if "checkpoint_dir" in values:
        given = values["checkpoint_dir"]
        folder = folder_of(given)
        absent, named = not folder.is_dir(), folder.is_absolute() or folder.parts[:1] == ("checkpoints",)
        downloads = "access_token" in values and ranks == 1  # on several ranks each of them would
        _refuse(
            {
                f"checkpoint_dir {folder} is not a checkpoint directory; {of_a_model}": absent
                and (named or folder.exists()),
                f"{folder} does not exist; get it first: litgpt download {given}": absent and not downloads,
            }
        )
    for name in ("tokenizer_dir", "initial_checkpoint_dir"):
        given = values.get(name)
        _refuse({f"--{name} {given} is not a folder": given is not None and not folder_of(given).is_dir()})
    for name in values.keys() & {"adapter_path", "finetuned_path"}:
        _refuse({f"--{name} {values[name]} does not exist": not os.path.exists(values[name])})
    resume: Any = values.get("resume")
    named = isinstance(resume, str | Path) and str(resume) != "auto"
    how = "name a lit_model.pth, or say --resume auto"
    _refuse({f"--resume {resume} does not exist; {how}": named and not os.path.exists(resume)})
    if "checkpoint_dir" in values and folder.is_dir():
        lacks = f"checkpoint_dir {folder} holds no lit_model.pth; {of_a_model}"
        _refuse({lacks: not (folder / "lit_model.pth").exists()})
    if not reads_sharded:
        refuse_sharded(values["checkpoint_dir"])
    if "lora_r" in values and folder.is_dir():
        _refuse_more_than_a_model(folder)


def _refuse_more_than_a_model(folder: Path) -> None:
    """Refuse what LitGPT would merge LoRA's adapters into, after the training, and cannot."""
    try:
        content = torch.load(folder / "lit_model.pth", mmap=True, weights_only=True, map_location="cpu")
    except Exception:  # no checkpoint of torch: whoever reads the weights says so
        return
    if isinstance(content, dict) and "model" in content:
        raise ValueError(
            f"litgpt: {folder} holds a checkpoint of a training; take the model out of it, which is what adapters are"
            f" merged into: axo litgpt convert_pretrained_checkpoint {folder} {folder}-model"
        )


def refuse_sharded(given: Any) -> None:
    """Refuse a folder whose ``lit_model.pth`` is a sharded checkpoint, which the command cannot read.

    Raises:
        ValueError: It is.
    """
    folder = folder_of(given)
    if folders.is_checkpoint(folder / "lit_model.pth"):
        raise ValueError(
            f"litgpt: {folder} holds a sharded checkpoint; make it whole: axo consolidate {folder} {folder}-whole"
        )


def _check_values(values: Mapping[str, Any], asked: Options, command: Command) -> None:
    """Refuse what commands that are written for one device offer beside a grid, or find out only when they run."""
    used, accelerator = os.environ.get("LT_ACCELERATOR", "cpu"), values.get("accelerator", "auto")
    if used != "auto":
        check_device(f"litgpt: LT_ACCELERATOR={used!r}", "cuda" if used == "gpu" else used)
    batch, precision, kind = values.get("batch_size", 1), str(values.get("precision")), values.get("quantize")
    compiles = os.environ.get("TORCHDYNAMO_DISABLE", "1") != "1" or bool(values.get("compile"))
    quantizes, staged, memory = kind is not None, asked.pipeline > 1, asked.offload != "none"
    counts = {name: values.get(name) for name in ("max_new_tokens", "top_k")}
    _refuse(
        {
            f"--quantize {kind} keeps the frozen weights in half precision and saves none of their memory, so a grid"
            " does not have it; use bnb.nf4, or leave it out": kind == "bnb.int8-training",
            f"this --quantize {kind} runs on one device only, without a grid; on a grid finetune_lora, generate and"
            " chat take it": quantizes and not command.quantizes,
            f"--quantize {kind} does not run with --offload; leave it out": quantizes and memory,
            f"--quantize {kind} with --precision {precision}: use 32-true, bf16-true or 16-true": quantizes
            and "mixed" in precision,
            f"--quantize {kind} wants bitsandbytes, which is not installed; pip install 'axo[quantize]'": kind
            not in (None, "bnb.int8")
            and importlib.util.find_spec("bitsandbytes") is None,
            "--generate_strategy is what the grid does; leave it out": values.get("generate_strategy") is not None,
            f"--accelerator {accelerator} is not what the ranks use ({used}); leave it out, or set"
            f" LT_ACCELERATOR={accelerator}": accelerator not in ("auto", used),
            "--tasks is missing; axo litgpt evaluate without a grid lists all tasks": values.get("tasks", "") is None,
            f"--batch_size {batch} is found by running out of memory, on each rank at another size; name a"
            " number": not isinstance(batch, int),
            "--offload parameters with --pipeline is not supported; leave parameters out": staged
            and "parameters" in asked.offload.split(","),
            "--pipeline runs without torch.compile; leave TORCHDYNAMO_DISABLE=0 and --compile out": staged and compiles,
        }
        | {
            f"--{name} {count} is not a whole number of at least 1": count is not None and count < 1
            for name, count in counts.items()
        }
    )
    try:
        strategy_of(asked)
    except ValueError as error:
        raise ValueError(f"litgpt: {error}") from None
    where = "wants --offload-dir DIR, a folder on a disk (not in memory)"
    _refuse({f"--offload on CPU ranks {where}": memory and used == "cpu" and not asked.offload_dir})


def _check_model(config: Any, asked: Options) -> None:
    """Refuse a model that the grid's axes or the stages do not divide, as the plan would do on every rank."""
    from litgpt.model import GPT

    from axo.perf import cut, pipeline_schedule
    from axo.plans import context
    from axo.plans.litgpt import plan

    kind, cuts = pipeline_schedule.schedule_kind(asked.schedule or "1f1b"), cut.read(asked.cuts or "even")
    if config is not None and asked.pipeline > 1:
        cut.check(config.n_layer, asked.pipeline * kind.stages_per_rank, cuts)
    if config is not None and asked.chosen_grid.world_size > 1:
        short = copy.copy(config)  # with one block of each kind
        short.n_layer = min(config.n_layer, 1 + (config.first_k_dense_replace or 0))
        with torch.device("meta"):
            plan.check(GPT(short), asked.chosen_grid, arrangement_of("litgpt", asked.algorithm))
            if asked.context > 1:
                context.check(GPT(short), asked.context_kind, asked.context, asked.chosen_grid.x)


def _check_batch(train: Any, asked: Options) -> None:
    """Refuse batch sizes that do not divide over the data ranks, or fill no stages."""
    for name in ("global_batch_size", "micro_batch_size"):
        check_value.whole_number(f"litgpt: --train.{name}", getattr(train, name), least=1)
    rows, ranks = arrangement_of("litgpt", asked.algorithm).rows, asked.data_ranks
    at_once = train.micro_batch_size * ranks
    if train.global_batch_size % at_once:
        raise ValueError(
            f"litgpt: --train.global_batch_size={train.global_batch_size} does not divide over"
            f" micro_batch_size={train.micro_batch_size} on {'*'.join(reversed(rows))}={ranks} data ranks"
            f" of grid {asked.grid}; use a multiple of {at_once}"
        )
    if train.micro_batch_size < asked.pipeline:
        raise ValueError(
            f"litgpt: --train.micro_batch_size={train.micro_batch_size} are fewer rows than the {asked.pipeline}"
            " stages; a micro-batch of LitGPT's is what goes through the stages at once: use all rows of a data rank,"
            " global_batch_size / (z*data)"
        )


def _check_training(values: Mapping[str, Any]) -> None:
    """Refuse a logger whose package is not installed, and an optimizer that torch does not have."""
    logger, optimizer = values.get("logger_name"), values.get("optimizer")
    packages, wanted = _LOGGERS.get(str(logger), ((), ""))
    default = " (what pretrain takes if nothing is said)" if logger == "tensorboard" else ""
    named = isinstance(optimizer, str) and optimizer.isidentifier()
    _refuse(
        {
            f"--logger_name {logger}{default} wants a package that is not installed: pip install {wanted}, or use"
            " --logger_name csv": bool(packages) and not any(map(importlib.util.find_spec, packages)),
            f"--optimizer {optimizer} is not in torch.optim; name one that is, such as AdamW": named
            and not hasattr(torch.optim, str(optimizer)),
        }
    )


def _check_prompt_style(data: Any) -> None:
    """Refuse the name of a prompt style that LitGPT does not have: its own error is the name alone."""
    from litgpt.prompts import prompt_styles

    style = None if data is None else (data.get("init_args") or {}).get("prompt_style")
    if isinstance(style, str):
        check_value.one_of("litgpt: --data.prompt_style", style, prompt_styles)


def _check_data(values: Mapping[str, Any]) -> None:
    """Refuse data that are not there, or files without records with text, on which all ranks would fail."""
    from litgpt.data import JSON, TinyLlama

    data, pretrains = values.get("data"), values.get("model_name", "list") != "list"
    if pretrains and isinstance(data, TinyLlama | None):  # what pretrain reads if it is given none
        folder = str((data or TinyLlama()).data_path)
        if not folder.startswith("s3://") and not Path(folder, "slimpajama", "train").is_dir():
            without = " without --data" if data is None else ""
            raise ValueError(
                f"litgpt: pretrain{without} reads TinyLlama's data, and {folder}/slimpajama/train is not a folder; to"
                " train on text files of your own add --data LocalText --data.paths '[\"FILE.txt\"]' --tokenizer_dir"
                " DIR"
            )
    if not isinstance(data, JSON):
        return
    what = f"litgpt: --data.json_path {data.json_path}"
    try:
        records = list(itertools.chain(*data.get_splits()))
    except (TypeError, LookupError):
        raise ValueError(f"{what} holds no list of records") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{what}: {' '.join(str(error).split())}") from None
    for record in records:
        texts = [record.get(name) for name in ("instruction", "output")] if isinstance(record, dict) else [None]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(f'{what}: {str(record)[:80]!r} is no record such as {{"instruction": ..., "output": ...}}')
    if not records:
        raise ValueError(f"{what} holds no records")
