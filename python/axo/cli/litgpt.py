"""``axo litgpt``: hands its arguments to ``axo.integrations.litgpt``."""

from __future__ import annotations

import sys

import typer

CONTEXT = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "allow_interspersed_args": False,
    "help_option_names": [],
}


def litgpt(context: typer.Context) -> None:
    """Run a LitGPT command: its arguments, --grid, in training --goldfish K,H; e.g. 'axo litgpt pretrain --help'."""
    if sys.stderr.isatty():  # it takes seconds
        print("axo litgpt: loading LitGPT", file=sys.stderr, flush=True)
    from axo.integrations.litgpt.command import run

    run(context.args)
