"""``axo litgpt COMMAND ...``: LitGPT's own command line, on a grid.

    litgpt     pretrain pythia-14m --data LitData ...
    axo litgpt pretrain pythia-14m --data LitData ... --grid 2x2x2x1

The arguments are litgpt's, plus Axo's own (``options``). Each rank runs litgpt's own function (``rank``) with Fabric's
strategy set to AxoStrategy by LT_STRATEGY; the names that are replaced meanwhile stand in one class (``patches``).
litgpt takes every device for a data rank; so its "devices" are the grid's data ranks (z and data), each of them Gx*Gy
ranks that work as one: batch size, token counts and the flop line then are right as they stand, and ``--devices`` is
not for the user to set. torch.compile, which ``litgpt pretrain`` always asks for, is off unless TORCHDYNAMO_DISABLE=0
is set.

Ranks are started here, or are torchrun's. Losses that are printed and logged are means over the data ranks.
"""

from __future__ import annotations

import atexit
import gc
import importlib.util
import itertools
import os
import sys
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from axo.integrations.litgpt import checks, conversation, parsing, restarts, run_folder
from axo.integrations.litgpt.commands import PARALLEL
from axo.integrations.litgpt.options import NAMES, TRUST, Options
from axo.launch import Rank

# Imported once, before local ranks are forked, instead of by each of them.
_USED_BY_RANKS = ("axo.checkpoint.reader", "axo.checkpoint.writer", "axo.parallelize", "axo.plans.litgpt.plan")


def run(arguments: list[str]) -> None:
    """Run a litgpt command with its arguments.

    Raises:
        ValueError: The grid or the batch sizes do not fit, or the command cannot run on several ranks.
        axo.launch.RankFailed: A local rank failed.
    """
    name, *arguments = arguments or ["--help"]
    command, words = PARALLEL.get(name), {argument.partition("=")[0] for argument in arguments}
    own = sorted(words & set(NAMES) - {TRUST})
    if command is None:
        _check_serial(name, own)
    if command is None or (command.wants is not None and not own and not words & {"-h", "--help"}):
        _stock(name, arguments)
        return
    if command.wants is not None and importlib.util.find_spec(command.wants[0]) is None:
        package, extra = command.wants
        raise ValueError(f"litgpt: {name} wants {package}, which is not installed; pip install 'axo[{extra}]'")
    for option in sorted(words & {"--devices", "--num_nodes"}):
        raise ValueError(f"litgpt: {option} is what the grid says; leave it out")
    rank = Rank.from_environment()
    launch = restarts.Launch(rank if command.trains else None)
    gc.disable()  # what is imported stays in use: to look through it takes a fifth of the time
    try:
        # Once, before there are ranks: it takes seconds, and wrong input costs one message.
        parsed = parsing.parse(name, command.load(), arguments)
        if not own and replace(parsed.own, trust=False) == Options() and parsed.litgpt.get("quantize") is not None:
            _stock(name, arguments)
            return
        checks.check(name, parsed, rank)
        from axo.integrations.litgpt import rank as of_rank

        for module in _USED_BY_RANKS:
            importlib.import_module(module)
        gc.freeze()  # a forked rank that looks through it later copies every page that it looks at
        atexit.register(gc.unfreeze)  # else Triton's modules report all of theirs as leaked when the program ends
    finally:
        gc.enable()
    options = parsed.own
    with ExitStack() as stack:
        if command.trains and (rank is None or rank.rank == 0) and parsed.values.get("model_name") != "list":
            how = {"again": launch.again, "allow_new_data": options.allow_new_data}
            stack.enter_context(run_folder.hold(parsed.values, parsed.as_yaml, resumes=command.resumes, **how))
            launch.begin()
        given = name, options, partial(of_rank.start, name, parsed), parsed.as_yaml(), rank is None
        if rank is not None:
            of_rank.run(*given, int(launch.again))
            return
        if name == "chat":
            conversation.keep_input()
        times, ends = options.max_restarts, command.trains
        restarts.run(of_rank.run, options.ranks_in_all, *given, max_restarts=times, terminate=ends)


def _check_serial(name: str, own: list[str]) -> None:
    """Refuse a command that is none, and options of Axo's for one that runs on one rank."""
    import litgpt.parser_config

    commands = sorted({*litgpt.parser_config.parser_commands(), *PARALLEL})
    if not name.startswith("-") and name not in commands:
        raise ValueError(f"litgpt: there is no command {name!r}; {parsing.meant(name, commands)}")
    if own:
        raise ValueError(
            f"litgpt: {name} runs on one rank only, so it takes no {own[0]}; on a grid run {', '.join(PARALLEL)}"
        )


def _stock(name: str, arguments: list[str]) -> None:
    """litgpt's own command line in this process; it reads no sharded checkpoint."""
    for option, value in itertools.pairwise(["", *arguments]):
        path = value.partition("=")[2] if value.startswith("--") else value
        written = any(name in option + value for name in ("out_dir", "output_dir"))
        if not written and (os.path.isdir(path) or os.path.isdir(os.path.join("checkpoints", path))):
            checks.refuse_sharded(path)
    importlib.import_module("litgpt.__main__")  # which imports every command; ``protect`` replaces names in them
    if TRUST not in arguments:
        from axo.integrations.litgpt.rank import protect

        protect()
    _run_litgpt(name, [argument for argument in arguments if argument != TRUST])


def _run_litgpt(name: str, arguments: list[str]) -> None:
    from litgpt.__main__ import main

    sys.argv = ["litgpt", name, *arguments]
    main()
