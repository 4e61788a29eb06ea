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

import importlib
import importlib.util
import itertools
import os
import sys

from axo.integrations.litgpt import checks, parsing, restarts
from axo.integrations.litgpt.commands import PARALLEL
from axo.integrations.litgpt.options import NAMES, TRUST


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
    parsed = checks.read(name, arguments, asked=bool(own))
    if parsed is None:
        _stock(name, arguments)
    else:
        restarts.start(parsed)


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
