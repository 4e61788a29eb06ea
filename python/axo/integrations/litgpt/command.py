"""``axo litgpt COMMAND ...``: LitGPT's own command line, on a grid.

    litgpt     pretrain pythia-14m --data LitData ...
    axo litgpt pretrain pythia-14m --data LitData ... --grid 2x2x2x1

The arguments are litgpt's, plus Axo's own (``options``). Each rank runs litgpt's own function with Fabric's strategy
set to AxoStrategy by LT_STRATEGY; the names that are replaced meanwhile stand in one table (``patches``). litgpt takes
every device for a data rank; so its "devices" are the grid's data ranks (z and data), each of them Gx*Gy ranks that
work as one: batch size, token counts and the flop line then are right as they stand, and ``--devices`` is not for the
user to set. torch.compile, which ``litgpt pretrain`` always asks for, is off unless TORCHDYNAMO_DISABLE=0 is set.

Ranks are started here, or are torchrun's. Losses that are printed and logged are means over the data ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import gc
import importlib.util
import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from axo.grid import Grid
from axo.integrations.litgpt import conversation, restarts
from axo.integrations.litgpt.options import AUTO, Options, help_text, parse_options
from axo.launch import Rank, Termination, set_threads


@dataclass(frozen=True)
class Command:
    """A command of litgpt's that runs on a grid.

    Args:
        module, function: Where it is.
        trains: Whether it takes ``--devices`` and launches ranks; if not, it is written for one device.
        finetunes: Whether it starts from what a model's constructors draw, on one device.
        resumes: Whether it can go on from a checkpoint of its own.
        reads_sharded: Whether it can start from a sharded checkpoint.
        stages: Whether it runs in pipeline stages.
        quantizes: Whether it takes ``--quantize``.
        launches: Whether it calls Fabric's ``launch``, as those that train do.
        wants: A package that it wants beside LitGPT, and which extra of Axo's brings it. Without a grid such a command
            is litgpt's alone.
    """

    module: str
    function: str
    trains: bool
    finetunes: bool = False
    resumes: bool = True
    reads_sharded: bool = True
    stages: bool = True
    quantizes: bool = False
    launches: bool = False
    wants: tuple[str, str] | None = None

    def load(self) -> Callable[..., Any]:
        from axo.integrations.litgpt import early

        return early.load(self.module, self.function)


_ON_ONE_DEVICE = Command("", "main", False, reads_sharded=False, stages=False)
# Commands that are not in this table run on one rank, without Axo.
PARALLEL = {
    "pretrain": Command("litgpt.pretrain", "setup", True),
    "finetune_full": Command("litgpt.finetune.full", "setup", True, finetunes=True),
    "finetune_lora": Command(
        "litgpt.finetune.lora", "setup", True, finetunes=True, resumes=False, reads_sharded=False, quantizes=True
    ),
    "generate": Command("litgpt.generate.base", "main", False, quantizes=True),
    "generate_full": dataclasses.replace(_ON_ONE_DEVICE, module="litgpt.generate.full", launches=True),
    "chat": Command("litgpt.chat.base", "main", False, stages=False, quantizes=True),
    "serve": dataclasses.replace(
        _ON_ONE_DEVICE, module="litgpt.deploy.serve", function="run_server", wants=("litserve", "serve")
    ),
    "evaluate": dataclasses.replace(
        _ON_ONE_DEVICE, module="litgpt.eval.evaluate", function="convert_and_evaluate", wants=("lm_eval", "evaluate")
    ),
}
for _kind in ("adapter", "adapter_v2"):
    _module = f"litgpt.finetune.{_kind}"
    PARALLEL[f"finetune_{_kind}"] = dataclasses.replace(
        PARALLEL["finetune_lora"], module=_module, stages=False, quantizes=False
    )
    _module = f"litgpt.generate.{_kind}"
    PARALLEL[f"generate_{_kind}"] = dataclasses.replace(_ON_ONE_DEVICE, module=_module, launches=True)
PARALLEL["finetune"] = PARALLEL["finetune_lora"]  # litgpt's other name for it
_HELP = {"-h", "--help"}
# Imported once, before local ranks are forked, instead of by each of them.
_USED_BY_RANKS = (
    "axo.checkpoint.reader",
    "axo.checkpoint.writer",
    "axo.integrations.fabric.strategy",
    "axo.integrations.litgpt.patches",
    "axo.integrations.litgpt.strategy",
    "axo.parallelize",
    "axo.plans.litgpt.plan",
)
_TRAINERS = [name for name, command in PARALLEL.items() if command.trains]


def run(arguments: list[str]) -> None:
    """Run a litgpt command with its arguments.

    Raises:
        ValueError: The grid or the batch sizes do not fit, or the command cannot run on several ranks.
        axo.launch.RankFailed: A local rank failed.
    """
    if importlib.util.find_spec("litgpt") is None:
        raise ValueError("litgpt: LitGPT is not installed; pip install 'axo[litgpt]'")
    options, arguments = parse_options(arguments)
    name = arguments[0] if arguments else "--help"
    if (name in PARALLEL or name in _HELP) and (not arguments or _HELP & set(arguments)):
        print(help_text())
    _check_options(name, options)
    if name == "architectures":
        _tell_architectures(arguments[1:], options)
        return
    alone = dataclasses.replace(options, trust=False) == Options(Grid())
    if name not in PARALLEL or (alone and _is_litgpts_alone(name, arguments[1:])):
        _refuse_sharded(arguments[1:])
        _stock(arguments, options.trust)
        return
    _tell_rank_of_slurm()
    rank = Rank.from_environment()
    options = _check_early(name, arguments[1:], options, rank)
    launch = restarts.Launch(rank if PARALLEL[name].trains else None)
    with contextlib.ExitStack() as held:
        with _nothing_collected():
            # Parsed once, before there are ranks: it takes seconds, and wrong input costs one message.
            options, start = _parse(name, arguments[1:], options, rank, launch, held)
            for module in _USED_BY_RANKS:
                importlib.import_module(module)
        if rank is not None:
            _rank(start, name, options, False, int(launch.again))
            return
        if name == "chat":
            conversation.keep_input()
        restarts.run(
            _rank,
            options.ranks_in_all,
            start,
            name,
            options,
            True,
            max_restarts=options.max_restarts,
            terminate=PARALLEL[name].trains,
        )


def _refuse_sharded(arguments: list[str]) -> None:
    """Refuse sharded checkpoints among the folders that a command of litgpt's alone is given to read."""
    from axo.integrations.litgpt import checks, early

    for name, value in early.each_given(arguments, ""):
        if value is None or name in ("out_dir", "output_dir"):
            continue
        if os.path.isdir(value) or os.path.isdir(os.path.join("checkpoints", value)):
            checks.refuse_sharded(value)


def _check_options(name: str, options: Options) -> None:
    """Refuse options of Axo's that the command has no use for."""
    command = PARALLEL.get(name)
    if command is None and name != "architectures" and not name.startswith("-"):
        from axo.integrations.litgpt import early

        early.check_command(name)
        if options.grid is None or options.ranks_in_all > 1:
            raise ValueError(
                f"litgpt: {name} runs on one rank only, not on grid {options.shown}; on a grid run"
                f" {', '.join(PARALLEL)}"
            )
    if command is not None and not command.stages and options.pipeline > 1:
        able = ", ".join(other for other, known in PARALLEL.items() if known.stages)
        raise ValueError(f"litgpt: --pipeline is not for {name}; in stages run {able}")
    given = {
        "--goldfish": options.goldfish is not None,
        "--sharded": options.sharded,
        "--vocab-loss": options.vocab_loss,
        "--max-restarts": options.max_restarts > 0,
        "--allow-new-data": options.allow_new_data,
        "--offload": options.offload != "none",
        "--grid auto": options.grid is None,
    }
    lacks = {
        "--max-restarts": "it cannot resume, so a run started again would begin anew",
        "--allow-new-data": "it cannot resume",
        "--sharded": "it saves adapters, which are small and always whole",
        "--grid auto": "the planner plans steps that train all weights",
    }
    for option in (option for option, is_given in given.items() if is_given):
        if option != "--grid auto" and (command is None or not command.trains):
            raise ValueError(f"litgpt: {option} is for training ({', '.join(_TRAINERS)}), not for {name}; leave it out")
        if command is not None and not command.resumes and option in lacks:
            raise ValueError(f"litgpt: {option} is not for {name}: {lacks[option]}; use finetune_full, or leave it out")


def _check_early(name: str, arguments: list[str], asked: Options, rank: Rank | None) -> Options:
    """Refuse what can be seen without LitGPT, whose import takes seconds.

    Returns:
        What was asked, with a grid, unless it is to be chosen and only LitGPT's parser understands the arguments.

    Raises:
        ValueError: An argument is the grid's business or not LitGPT's, names what is not there, or does not fit.
    """
    from axo.integrations.litgpt import auto_grid, early

    wants = PARALLEL[name].wants
    if wants is not None and importlib.util.find_spec(wants[0]) is None:
        raise ValueError(f"litgpt: {name} wants {wants[0]}, which is not installed; pip install 'axo[{wants[1]}]'")
    given = {argument.split("=")[0] for argument in arguments}
    for option in ("--devices", "--num_nodes"):
        if option in given:
            raise ValueError(f"litgpt: {option} is what the grid says ({asked.grid or AUTO}); leave it out")
    command = PARALLEL[name]
    options = early.read(name, command.module, command.function, arguments)
    if options is None:
        return asked
    if asked.grid is None:
        asked = auto_grid.choose(name, options, asked, rank)
    _check(name, options, asked, rank)
    return asked


def _check(name: str, options: Any, asked: Options, rank: Rank | None) -> None:
    from axo.integrations.litgpt import checks, early

    command = PARALLEL[name]
    usual = early.defaults(command.module, command.function).get("devices")
    able = {"trains": command.trains, "reads_sharded": command.reads_sharded, "quantizes": command.quantizes}
    checks.check(options, asked, rank, devices=usual, **able)


def _tell_architectures(arguments: list[str], options: Options) -> None:
    from axo.integrations.litgpt import architectures

    if _HELP & set(arguments):
        print(architectures.__doc__)
        return
    if arguments or options.grid is None:
        wrong = " ".join(arguments) or "--grid auto"
        raise ValueError(f"litgpt: architectures takes --grid XxYxZxDATA and nothing else, not {wrong}")
    print(architectures.report(options.grid))


def _tell_rank_of_slurm() -> None:
    """Under srun with several tasks: this process is one rank of them. Put it as torchrun does."""
    if "RANK" in os.environ or "SLURM_NTASKS" not in os.environ:
        return
    from lightning.fabric.plugins.environments import SLURMEnvironment

    if SLURMEnvironment.detect() and int(os.environ["SLURM_NTASKS"]) > 1:
        tasks = os.environ["SLURM_NTASKS"]
        os.environ |= {"RANK": os.environ["SLURM_PROCID"], "WORLD_SIZE": tasks}
        os.environ |= {"LOCAL_RANK": os.environ["SLURM_LOCALID"]}
        os.environ["LOCAL_WORLD_SIZE"] = os.environ.get("SLURM_NTASKS_PER_NODE", tasks)


def _is_litgpts_alone(name: str, arguments: list[str]) -> bool:
    """Whether a command that has no grid runs without Axo: one that wants another package, or quantizes layers."""
    from axo.integrations.litgpt import early

    command = PARALLEL[name]
    if command.wants is not None:
        return True
    options = early.read(name, command.module, command.function, arguments)
    if options is not None:
        return options.get("quantize") is not None
    return any(argument.split("=")[0] == "--quantize" for argument in arguments)


def _stock(arguments: list[str], trust: bool) -> None:
    """litgpt's own command line in this process."""
    from litgpt.__main__ import main

    if not trust:
        from axo.integrations.litgpt import harmless

        harmless.guard()
    sys.argv = ["litgpt", *arguments]
    main()


def _parse(
    name: str,
    arguments: list[str],
    asked: Options,
    rank: Rank | None,
    launch: restarts.Launch | None = None,
    held: contextlib.ExitStack | None = None,
) -> tuple[Options, Callable[[bool], Any]]:
    """Read a command's arguments with litgpt's own parser, which ends the process with its message if they are wrong.

    Args:
        name, arguments, asked: The command, what follows it, and Axo's options.
        rank: Under torchrun: who this process is.
        launch, held: Keeps a training command's folder in ``held``, as this launch's; None: it is not taken.

    Returns:
        What was asked, with a grid, and the command as a function; true asks it to go on from the newest checkpoint.

    Raises:
        ValueError: An argument is the grid's business or names what is not there, or the grid, the batch sizes and
            the ranks do not fit, or the folder is another run's.
    """
    function = PARALLEL[name].load()  # first, or the next lines import LitGPT, and more than it needs
    read_docs_once()

    from jsonargparse import capture_parser
    from litgpt.utils import CLI

    from axo.integrations.litgpt import auto_grid, run_folder
    from axo.integrations.litgpt import text_data as text_data  # so that --data LocalText is found

    parser = capture_parser(lambda: CLI(function))
    parser.prog = f"axo litgpt {name}"
    sys.argv = ["litgpt", name, *arguments]  # litgpt reads it again when it saves its hyperparameters
    parser.exit_on_error = False  # it would print its usage, forty lines
    try:
        options = parser.parse_args(arguments)
    except argparse.ArgumentError as error:
        raise ValueError(f"litgpt: {name}: {error}") from None
    if asked.grid is None:
        asked = auto_grid.choose(name, options, asked, rank)
    _check(name, options, asked, rank)
    if PARALLEL[name].trains:
        devices = ["--devices", str(asked.data_ranks)]
        sys.argv += devices
        options = parser.parse_args([*arguments, *devices])
        first = rank is None or rank.rank == 0
        if held is not None and launch is not None and first and options.get("model_name") != "list":
            run = run_folder.hold(
                options,
                functools.partial(parser.dump, options),
                resumes=PARALLEL[name].resumes,
                again=launch.again,
                allow_new_data=asked.allow_new_data,
            )
            held.callback(run.close)
            launch.begin()

    def start(again: bool) -> None:
        values = parser.instantiate_classes(options)
        parameters = inspect.signature(function).parameters
        given = {key: value for key, value in values.items(branches=True) if key in parameters}
        _choose_checkpoint(given, again)
        PARALLEL[name].load()(**given)  # the function itself may be replaced

    return asked, start


def _choose_checkpoint(given: dict[str, Any], again: bool) -> None:
    """Name the checkpoint that ``--resume auto`` or a start again means; LitGPT would take other runs' below it too."""
    from axo.integrations.litgpt import run_folder

    asked, initial = given.get("resume"), given.get("initial_checkpoint_dir")
    by_itself = asked in (True, "auto")
    if "resume" not in given or not (again or (by_itself and initial is None)):  # LitGPT refuses both
        return
    found = run_folder.newest(given["out_dir"])
    if found is not None and initial is not None:
        given["initial_checkpoint_dir"] = None  # only one of the two may be given
    given["resume"] = found or (asked if not by_itself else False)


def read_docs_once() -> None:
    """Let jsonargparse keep what it reads of the sources of classes that an option may name.

    It reads them each time that it makes a parser: here, and for the hyperparameters beside each checkpoint.
    """
    import docstring_parser

    if not hasattr(docstring_parser.parse_from_object, "cache_info"):
        docstring_parser.parse_from_object = functools.cache(docstring_parser.parse_from_object)


def _rank(start: Callable[[bool], Any], name: str, options: Options, local: bool, restart: int) -> None:
    """What each rank runs."""
    import torch

    from axo.integrations.fabric.step_agreement import StepAgreement
    from axo.integrations.fabric.strategy import register
    from axo.integrations.litgpt import harmless
    from axo.integrations.litgpt.patches import LitGPTRun, Stopped, patched
    from axo.integrations.litgpt.strategy import LitGPTStrategy
    from axo.offload import Offload
    from axo.perf import cut

    rank = Rank.from_environment()
    assert rank is not None
    set_threads(0, rank.local_world_size)
    torch.set_float32_matmul_precision("high")  # as litgpt's main does
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    os.environ.setdefault("LT_ACCELERATOR", "cpu")  # what axo.connect has a transport for
    os.environ["LT_STRATEGY"] = "axo"
    torch._dynamo.config.disable = os.environ["TORCHDYNAMO_DISABLE"] == "1"
    command = PARALLEL[name]
    if not options.trust:
        harmless.guard()
    this = LitGPTRun(importlib.import_module(command.module), options)

    def make() -> LitGPTStrategy:
        this.strategy = LitGPTStrategy(
            options.grid,
            algorithm=options.algorithm,
            sharded=options.sharded,
            vocab_loss=options.vocab_loss,
            pipeline=options.pipeline,
            schedule=options.schedule or "1f1b",
            cuts=cut.read(options.cuts or "even"),
            microbatches=options.microbatches or None,
            offload=None if options.offload == "none" else Offload.parse(options.offload, options.offload_dir or None),
            step_agreement=this.agreement if command.trains else None,
            like_one_device=command.finetunes,
        )
        return this.strategy

    register(make)
    with contextlib.ExitStack() as stack:
        # All ranks print the same, so only rank 0 does; errors come as exceptions. (torchrun keeps the streams apart.)
        if local and rank.rank:
            stack.enter_context(_silence())
        if rank.rank:
            for logger in ("lightning", "lightning.fabric", "lightning.pytorch"):  # each rank would say what it starts
                logging.getLogger(logger).setLevel(logging.WARNING)
        else:
            own = f"{options.data_ranks} of them with own data"
            print(f"axo litgpt: grid {options.shown}: {options.ranks_in_all} ranks, {own}")
        stack.enter_context(patched(this))
        if command.trains:
            termination = stack.enter_context(Termination())
            this.agreement = StepAgreement(lambda: termination.asked)
        elif not command.launches:
            os.environ["LT_CLI_USED"] = "1"  # Fabric joins the ranks when it is made, since nobody calls launch()
        try:
            start(restart > 0)
        except Stopped as stopped:
            if rank.rank == 0:
                print(f"axo litgpt: {stopped}", flush=True)
        except SystemExit as stop:
            if stop.code:
                raise ValueError(f"litgpt: {name} ended with exit code {stop.code}; its message is above") from None
    if this.strategy is not None and this.strategy.comms is not None:
        this.strategy.comms.close()


@contextlib.contextmanager
def _nothing_collected() -> Iterator[None]:
    """Switch the garbage collector off for a block of imports, and let it leave alone what they have made.

    All of it stays in use. To look through it takes a fifth of the imports' time, and a forked rank that looks through
    it later copies every page that it looks at.
    """
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        yield
