"""Wrong input of ``axo litgpt`` that is found before there are ranks: one message, and nothing has begun.

What the parser itself understands, it says (``parsing``); here is what must be there, and what must fit to a grid.
"""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import os
from pathlib import Path
from typing import Any

from axo import check as check_value
from axo.arrangement import arrangement_of
from axo.checkpoint import folder as folders
from axo.comm.device_choice import check_device
from axo.grid import check_ranks
from axo.integrations.litgpt import auto_grid
from axo.integrations.litgpt.commands import PARALLEL, Command
from axo.integrations.litgpt.options import AUTO, Options, name_of
from axo.integrations.litgpt.parsing import Parsed, folder_of
from axo.launch import Rank

# What each logger writes with: one of these packages, and what to install.
_LOGGERS = {
    "tensorboard": (("tensorboard", "tensorboardX"), "tensorboardX"),
    "wandb": (("wandb",), "wandb"),
    "mlflow": (("mlflow", "mlflow_skinny"), "mlflow"),
}
_FOR_TRAINING = {"--goldfish", "--sharded", "--vocab-loss", "--max-restarts", "--allow-new-data", "--offload"}
_FOR_RESUMING = {  # why those that cannot resume do not take them
    "--max-restarts": "it cannot resume, so a run started again would begin anew",
    "--allow-new-data": "it cannot resume",
    "--sharded": "it saves adapters, which are small and always whole",
    f"--grid {AUTO}": "the planner plans steps that train all weights",
}


def check(name: str, parsed: Parsed, rank: Rank | None) -> None:
    """Refuse what cannot run, and complete what was parsed: a grid, where the planner is to choose, and devices.

    Args:
        name: The command.
        parsed: Its arguments.
        rank: Under torchrun: who this process is.

    Raises:
        ValueError: Something does not fit, or is not there; a size that an axis does not divide is an axo.Refused.
    """
    command, options = PARALLEL[name], parsed.litgpt
    _check_options(name, command, parsed.own)
    if parsed.own.grid is None:
        parsed.own = auto_grid.choose(name, options, parsed.own, rank)
    asked = parsed.own
    if options.get("quantize") is not None:
        _check_quantize(options.quantize, options.get("precision"), asked, command.quantizes)
    if rank is not None:
        check_ranks("litgpt", asked.chosen_grid, asked.pipeline, rank.world_size)
    function = command.load()
    if command.trains:
        # From a configuration file; one that a run on this grid has saved names the data ranks.
        devices = inspect.signature(function).parameters["devices"].default
        for what, usual, own in (("num_nodes", 1, 1), ("devices", devices, asked.data_ranks)):
            if options.get(what, usual) not in (usual, own):
                raise ValueError(f"litgpt: {what}: {options[what]} is what the grid says ({asked.grid}); leave it out")
        options.devices = asked.data_ranks
    used = os.environ.get("LT_ACCELERATOR", "cpu")
    if used != "auto":
        check_device(f"litgpt: LT_ACCELERATOR={used!r}", "cuda" if used == "gpu" else used)
    _check_on_one_device(options)
    _check_paths(options, asked.ranks_in_all, command.reads_sharded)
    _check_model(options, asked)
    _check_strategy(options, asked)
    if command.trains:
        _check_batch(options.train, asked)
        _check_logger(options)
        _check_optimizer(options.get("optimizer"))
        if rank is None or rank.rank == 0:  # who writes there
            above = os.environ.get("LIGHTNING_ARTIFACTS_DIR", "")  # where litgpt puts a relative one
            folders.check_writable("litgpt: --out_dir", Path(above, str(options.out_dir)))
        if options.get("model_name", "list") != "list":
            _check_pretraining_data(options.get("data"))
        _check_records(parsed.values(function).get("data"))


def _check_options(name: str, command: Command, options: Options) -> None:
    """Refuse options of Axo's that the command has no use for."""
    if not command.stages and options.pipeline > 1:
        able = ", ".join(other for other, each in PARALLEL.items() if each.stages)
        raise ValueError(f"litgpt: --pipeline is not for {name}; in stages run {able}")
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


def _check_paths(options: Any, ranks: int, reads_sharded: bool) -> None:
    """Refuse folders and files that do not exist, where litgpt would say so on every rank, or download."""
    if "checkpoint_dir" in options:
        folder = folder_of(options.checkpoint_dir)
        if not folder.is_dir() and (folder.is_absolute() or folder.parts[:1] == ("checkpoints",) or folder.exists()):
            raise ValueError(
                f"litgpt: checkpoint_dir {folder} is not a checkpoint directory; name a folder that litgpt download,"
                " convert_to_litgpt or training has written"
            )
        downloads = "access_token" in options and ranks == 1  # on several ranks each of them would
        if not folder.is_dir() and not downloads:
            raise ValueError(f"litgpt: {folder} does not exist; get it first: litgpt download {options.checkpoint_dir}")
    for name in ("tokenizer_dir", "initial_checkpoint_dir"):
        given = options.get(name)
        if given is not None and not folder_of(given).is_dir():
            raise ValueError(f"litgpt: --{name} {given} is not a folder")
    for name in ("adapter_path", "finetuned_path"):
        if name in options and not Path(str(options[name])).exists():
            raise ValueError(f"litgpt: --{name} {options[name]} does not exist")
    resume = options.get("resume")
    if isinstance(resume, str | Path) and str(resume) != "auto" and not Path(str(resume)).exists():
        raise ValueError(f"litgpt: --resume {resume} does not exist; name a lit_model.pth, or say --resume auto")
    if not reads_sharded:
        refuse_sharded(options.checkpoint_dir)


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


def _check_on_one_device(options: Any) -> None:
    """Refuse what commands that are written for one device offer beside it, or find out only when they generate."""
    if options.get("generate_strategy") is not None:
        raise ValueError("litgpt: --generate_strategy is what the grid does; leave it out")
    used = os.environ.get("LT_ACCELERATOR", "cpu")
    if options.get("accelerator", "auto") not in ("auto", used):
        raise ValueError(
            f"litgpt: --accelerator {options.accelerator} is not what the ranks use ({used}); leave it out, or set"
            f" LT_ACCELERATOR={options.accelerator}"
        )
    if "tasks" in options and options.tasks is None:
        raise ValueError("litgpt: --tasks is missing; axo litgpt evaluate without a grid lists all tasks")
    for name in ("max_new_tokens", "top_k"):
        given = options.get(name)
        if isinstance(given, int) and given < 1:
            raise ValueError(f"litgpt: --{name} {given} is not a whole number of at least 1")
    if not isinstance(options.get("batch_size", 1), int):
        raise ValueError(
            f"litgpt: --batch_size {options.batch_size} is found by running out of memory, on each rank at another"
            " size; name a number"
        )


def _check_quantize(kind: str, precision: str | None, asked: Options, able: bool) -> None:
    """Refuse quantized layers where a grid has none, or the command is not able to."""
    if kind == "bnb.int8-training":
        raise ValueError(
            f"litgpt: --quantize {kind} keeps the frozen weights in half precision and saves none of their memory, so a"
            " grid does not have it; use bnb.nf4, or leave it out"
        )
    if not able:
        raise ValueError(
            f"litgpt: this --quantize {kind} runs on one device only, without a grid; on a grid finetune_lora, generate"
            " and chat take it"
        )
    if asked.offload != "none":
        raise ValueError(f"litgpt: --quantize {kind} does not run with --offload; leave it out")
    if "mixed" in str(precision):
        raise ValueError(f"litgpt: --quantize {kind} with --precision {precision}: use 32-true, bf16-true or 16-true")
    if kind != "bnb.int8" and importlib.util.find_spec("bitsandbytes") is None:
        raise ValueError(
            f"litgpt: --quantize {kind} wants bitsandbytes, which is not installed; pip install 'axo[quantize]'"
        )


def _check_model(options: Any, asked: Options) -> None:
    """Refuse a model that the grid's axes or the stages do not divide, as the plan would do on every rank."""
    from axo.perf import cut, pipeline_schedule
    from axo.plans.litgpt import sizes

    config = auto_grid.model_fields(options)
    if asked.pipeline > 1:
        kind = pipeline_schedule.schedule_kind(asked.schedule or "1f1b")
        cuts = cut.read(asked.cuts or "even")
        if config is not None:
            cut.check(config["n_layer"], asked.pipeline * kind.stages_per_rank, cuts)
    if config is not None and asked.chosen_grid.world_size > 1:
        sizes.check_model(config, asked.chosen_grid, arrangement_of("litgpt", asked.algorithm).inner)


def _check_strategy(options: Any, asked: Options) -> None:
    """Refuse what the strategy refuses, and what it does not know of LitGPT."""
    from axo.integrations.litgpt.strategy import strategy_of

    if asked.pipeline > 1:
        if "parameters" in asked.offload.split(","):
            raise ValueError("litgpt: --offload parameters with --pipeline is not supported; leave parameters out")
        if os.environ.get("TORCHDYNAMO_DISABLE", "1") != "1" or options.get("compile"):
            raise ValueError(
                "litgpt: --pipeline runs without torch.compile; leave TORCHDYNAMO_DISABLE=0 and --compile out"
            )
    try:
        strategy_of(asked)
    except ValueError as error:
        raise ValueError(f"litgpt: {error}") from None
    if asked.offload != "none" and os.environ.get("LT_ACCELERATOR", "cpu") == "cpu" and not asked.offload_dir:
        raise ValueError("litgpt: --offload on CPU ranks wants --offload-dir DIR, a folder on a disk (not in memory)")


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


def _check_records(data: Any) -> None:
    """Refuse files of LitGPT's JSON data module that hold no records with text; its ranks would fail on them."""
    from litgpt.data import JSON

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


def _check_pretraining_data(data: Any) -> None:
    """Refuse TinyLlama's data, which pretrain reads if it is given none, where they are not."""
    given, made_with = (data, None) if data is None else (data.get("class_path"), data.get("init_args"))
    if given not in (None, "TinyLlama", "litgpt.data.TinyLlama"):
        return
    folder = str((made_with or {}).get("data_path", "data"))
    if not folder.startswith("s3://") and not Path(folder, "slimpajama", "train").is_dir():
        without = " without --data" if given is None else ""
        raise ValueError(
            f"litgpt: pretrain{without} reads TinyLlama's data, and {folder}/slimpajama/train is not a folder; to train"
            """ on text files of your own add --data LocalText --data.paths '["FILE.txt"]' --tokenizer_dir DIR"""
        )


def _check_optimizer(name: Any) -> None:
    """Refuse an optimizer that torch does not have."""
    if isinstance(name, str) and name.isidentifier() and name != "AdamW":
        import torch

        if not hasattr(torch.optim, name):
            raise ValueError(f"litgpt: --optimizer {name} is not in torch.optim; name one that is, such as AdamW")


def _check_logger(options: Any) -> None:
    """Refuse a logger whose package is not installed."""
    name = options.get("logger_name")
    packages, wanted = _LOGGERS.get(name, ((), ""))
    if packages and not any(map(importlib.util.find_spec, packages)):
        default = " (what pretrain takes if nothing is said)" if name == "tensorboard" else ""
        raise ValueError(
            f"litgpt: --logger_name {name}{default} wants a package that is not installed: pip install {wanted}, or"
            " use --logger_name csv"
        )
