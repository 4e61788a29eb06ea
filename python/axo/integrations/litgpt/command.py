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

import atexit
import contextlib
import difflib
import gc
import importlib.util
import inspect
import itertools
import logging
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from axo.integrations.litgpt import checks, conversation, restarts
from axo.integrations.litgpt.options import AUTO, NAMES, TRUST, Options
from axo.launch import Rank, Termination, set_threads

if TYPE_CHECKING:
    from axo.integrations.litgpt.parsing import Parsed


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
        from axo.integrations.litgpt import parsing

        return parsing.load(self.module, self.function)


_ON_ONE_DEVICE = Command("", "main", False, reads_sharded=False, stages=False)
# Commands that are not in this table run on one rank, without Axo.
PARALLEL = {
    "pretrain": Command("litgpt.pretrain", "setup", True),
    "finetune_full": Command("litgpt.finetune.full", "setup", True, finetunes=True),
    "finetune_lora": Command(
        "litgpt.finetune.lora", "setup", True, finetunes=True, resumes=False, reads_sharded=False, quantizes=True
    ),
    "generate": Command("litgpt.generate.base", "main", False, quantizes=True),
    "generate_full": replace(_ON_ONE_DEVICE, module="litgpt.generate.full", launches=True),
    "chat": Command("litgpt.chat.base", "main", False, stages=False, quantizes=True),
    "serve": replace(_ON_ONE_DEVICE, module="litgpt.deploy.serve", function="run_server", wants=("litserve", "serve")),
    "evaluate": replace(
        _ON_ONE_DEVICE, module="litgpt.eval.evaluate", function="convert_and_evaluate", wants=("lm_eval", "evaluate")
    ),
}
for _kind in ("adapter", "adapter_v2"):
    _module = f"litgpt.finetune.{_kind}"
    PARALLEL[f"finetune_{_kind}"] = replace(PARALLEL["finetune_lora"], module=_module, stages=False, quantizes=False)
    _module = f"litgpt.generate.{_kind}"
    PARALLEL[f"generate_{_kind}"] = replace(_ON_ONE_DEVICE, module=_module, launches=True)
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
_FOR_TRAINING = {"--goldfish", "--sharded", "--vocab-loss", "--max-restarts", "--allow-new-data", "--offload"}


def run(arguments: list[str]) -> None:
    """Run a litgpt command with its arguments.

    Raises:
        ValueError: The grid or the batch sizes do not fit, or the command cannot run on several ranks.
        axo.launch.RankFailed: A local rank failed.
    """
    if importlib.util.find_spec("litgpt") is None:
        raise ValueError("litgpt: LitGPT is not installed; pip install 'axo[litgpt]'")
    name, *arguments = arguments or ["--help"]
    if name not in PARALLEL:
        _run_on_one_rank(name, arguments)
        return
    command = PARALLEL[name]
    own = _given(arguments) & set(NAMES) - {TRUST}
    if command.wants is not None and not own and not _HELP & set(arguments):
        _stock(name, arguments)
        return
    _refuse_before_import(name, command, arguments)
    _tell_rank_of_slurm()
    rank = Rank.from_environment()
    launch = restarts.Launch(rank if command.trains else None)
    with contextlib.ExitStack() as stack:
        with _nothing_collected():
            # Once, before there are ranks: it takes seconds, and wrong input costs one message.
            parsed = _parse(name, command, arguments)
            if not own and replace(parsed.own, trust=False) == Options() and parsed.litgpt.get("quantize") is not None:
                _stock(name, arguments)
                return
            job = _prepare(name, command, parsed, rank)
            for module in _USED_BY_RANKS:
                importlib.import_module(module)
        if command.trains and (rank is None or rank.rank == 0) and job.parsed.litgpt.get("model_name") != "list":
            job.take_folder(stack, again=launch.again)
            launch.begin()
        options = job.parsed.own
        what = name, options, job.start, job.parsed.as_yaml()
        if rank is not None:
            _rank(*what, False, int(launch.again))
            return
        if name == "chat":
            conversation.keep_input()
        restarts.run(
            _rank,
            options.ranks_in_all,
            *what,
            True,
            max_restarts=options.max_restarts,
            terminate=command.trains,
        )


def _given(arguments: list[str]) -> set[str]:
    return {argument.partition("=")[0] for argument in arguments}


def _run_on_one_rank(name: str, arguments: list[str]) -> None:
    """A command that Axo has no part in: litgpt's own, in this process."""
    import litgpt.parser_config

    commands = {*litgpt.parser_config.parser_commands(), *PARALLEL}
    if not name.startswith("-") and name not in commands:
        near = difflib.get_close_matches(name, commands, 1)
        meant = f"did you mean {near[0]}?" if near else f"use one of {', '.join(sorted(commands))}"
        raise ValueError(f"litgpt: there is no command {name!r}; {meant}")
    for option in sorted(_given(arguments) & set(NAMES) - {TRUST}):
        raise ValueError(
            f"litgpt: {name} runs on one rank only, so it takes no {option}; on a grid run {', '.join(PARALLEL)}"
        )
    _stock(name, arguments)


def _refuse_before_import(name: str, command: Command, arguments: list[str]) -> None:
    """Refuse what the words alone show: LitGPT's import takes seconds."""
    if command.wants is not None and importlib.util.find_spec(command.wants[0]) is None:
        package, extra = command.wants
        raise ValueError(f"litgpt: {name} wants {package}, which is not installed; pip install 'axo[{extra}]'")
    for option in sorted(_given(arguments) & {"--devices", "--num_nodes"}):
        raise ValueError(f"litgpt: {option} is what the grid says; leave it out")


def _check_options(name: str, options: Options) -> None:
    """Refuse options of Axo's that the command has no use for."""
    command = PARALLEL[name]
    if not command.stages and options.pipeline > 1:
        able = ", ".join(other for other, each in PARALLEL.items() if each.stages)
        raise ValueError(f"litgpt: --pipeline is not for {name}; in stages run {able}")
    if "--host" in options.given and name != "serve":
        raise ValueError(f"litgpt: --host is for serve, not for {name}; leave it out")
    lacks = {
        "--max-restarts": "it cannot resume, so a run started again would begin anew",
        "--allow-new-data": "it cannot resume",
        "--sharded": "it saves adapters, which are small and always whole",
        f"--grid {AUTO}": "the planner plans steps that train all weights",
    }
    given = [f"--grid {AUTO}" if option == "--grid" and options.grid is None else option for option in options.given]
    for option in given:
        if option in _FOR_TRAINING and not command.trains:
            raise ValueError(f"litgpt: {option} is for training ({', '.join(_TRAINERS)}), not for {name}; leave it out")
        if option in lacks and not command.resumes:
            raise ValueError(f"litgpt: {option} is not for {name}: {lacks[option]}; use finetune_full, or leave it out")


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


def _stock(name: str, arguments: list[str]) -> None:
    """litgpt's own command line in this process; it reads no sharded checkpoint."""
    for option, value in itertools.pairwise(["", *arguments]):
        path = value.partition("=")[2] if value.startswith("--") else value
        written = any(name in option + value for name in ("out_dir", "output_dir"))
        if not written and (os.path.isdir(path) or os.path.isdir(os.path.join("checkpoints", path))):
            checks.refuse_sharded(path)
    importlib.import_module("litgpt.__main__")  # which imports every command; ``protect`` replaces names in them
    if TRUST not in arguments:
        protect()
    _run_litgpt(name, [argument for argument in arguments if argument != TRUST])


def protect() -> None:
    """Let nothing in a checkpoint's folder run code, in this process and in those that LitServe starts."""
    from axo.integrations.litgpt import harmless

    harmless.protect()
    if "litgpt.deploy.serve" in sys.modules:
        from axo.integrations.litgpt import serving_apis  # wants LitServe

        serving_apis.replace()


def _run_litgpt(name: str, arguments: list[str]) -> None:
    from litgpt.__main__ import main

    sys.argv = ["litgpt", name, *arguments]
    main()


@dataclass
class Job:
    """One command, read and checked: what its ranks run.

    Attributes:
        name, command: Which.
        parsed: Its arguments; LitGPT's name the grid's data ranks as devices.
    """

    name: str
    command: Command
    parsed: Parsed

    def take_folder(self, stack: contextlib.ExitStack, *, again: bool) -> None:
        """Keep the folder of a run that trains for this launch, until ``stack`` ends.

        Raises:
            ValueError: It is another run's.
        """
        from axo.integrations.litgpt import run_folder

        run = run_folder.hold(
            self.parsed.litgpt,
            self.parsed.as_yaml,
            resumes=self.command.resumes,
            again=again,
            allow_new_data=self.parsed.own.allow_new_data,
        )
        stack.callback(run.close)

    def start(self, again: bool) -> None:
        """Call litgpt's function; ``again``: it goes on from its newest checkpoint."""
        function = self.command.load()  # which may be replaced
        given = self.parsed.values(function)
        _choose_checkpoint(given, again)
        function(**given)


def _parse(name: str, command: Command, arguments: list[str]) -> Parsed:
    function = command.load()  # first: what follows would import more of LitGPT than is needed
    from axo.integrations.litgpt import parsing

    return parsing.parse(name, function, arguments)


def _prepare(name: str, command: Command, parsed: Parsed, rank: Rank | None) -> Job:
    """Check a command's arguments.

    Args:
        rank: Under torchrun: who this process is.

    Raises:
        ValueError: One names what is not there, or does not fit to the grid.
    """
    from axo.integrations.litgpt import auto_grid

    function = command.load()
    _check_options(name, parsed.own)
    if parsed.own.grid is None:
        parsed.own = auto_grid.choose(name, parsed.litgpt, parsed.own, rank)
    checks.check(
        parsed.litgpt,
        parsed.own,
        rank,
        devices=inspect.signature(function).parameters["devices"].default if command.trains else None,
        trains=command.trains,
        reads_sharded=command.reads_sharded,
        quantizes=command.quantizes,
    )
    if command.trains:
        parsed.litgpt.devices = parsed.own.data_ranks
        checks.check_data(parsed.values(function).get("data"))
    return Job(name, command, parsed)


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


def _rank(
    name: str, options: Options, start: Callable[[bool], Any], hyperparameters: str, local: bool, restart: int
) -> None:
    """What each rank runs.

    Args:
        name, options: The command, and what was asked of Axo.
        start: Calls LitGPT's function; true: it goes on from its newest checkpoint.
        hyperparameters: LitGPT's options, as it writes them.
        local: The ranks were started here, so they share this program's output.
        restart: How often the ranks were started before.
    """
    import torch

    from axo.integrations.fabric.step_agreement import StepAgreement
    from axo.integrations.fabric.strategy import register
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
    module = importlib.import_module(command.module)
    if not options.trust:
        protect()
    this = LitGPTRun(module, options, hyperparameters=hyperparameters)

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
            this.agreement, this.termination = StepAgreement(lambda: termination.asked), termination
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
        atexit.register(gc.unfreeze)  # else Triton's modules report all of theirs as leaked when the program ends
    finally:
        gc.enable()


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        yield
