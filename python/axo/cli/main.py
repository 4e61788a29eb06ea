"""The command ``axo``: its subcommands, related ones in one file, which reads options and prints results.

What a command does is in the package that it calls; that is imported inside it, so that ``axo --help`` answers at once
and planning needs no torch. How commands end is in ``errors``.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from axo import __version__
from axo.cli import bench, consolidate, dryrun, info, litgpt, plan, sample, train, tune
from axo.cli.errors import CommandGroup
from axo.cli.output import say

app = typer.Typer(
    name="axo",
    help="Train large models with four-dimensional parallelism; measure, plan and inspect.",
    cls=CommandGroup,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        say(f"axo {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print Axo's version.", is_eager=True, callback=_version)
    ] = False,
) -> None:
    """Options of ``axo`` itself."""
    try:
        os.getcwd()
    except FileNotFoundError:  # libraries that look for their parts there end the process in words of their own
        raise ValueError("the current folder has been removed; change into one that exists") from None


app.command()(train.train)
app.command()(sample.sample)
app.command()(consolidate.consolidate)
app.command()(info.info)
app.command(context_settings=bench.CONTEXT, add_help_option=False)(bench.bench)
app.command(context_settings=litgpt.CONTEXT, add_help_option=False)(litgpt.litgpt)
for command in (plan.plan, plan.simulate, plan.reproduce, plan.profile):
    app.command()(command)
app.command()(tune.tune)
app.command()(dryrun.dryrun)


def main() -> None:
    """Entry point of the command."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed: files that this process opens would take its number
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
    app(args=train.with_auto(sys.argv[1:]))


if __name__ == "__main__":
    main()
