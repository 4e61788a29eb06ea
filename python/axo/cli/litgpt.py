"""``axo litgpt``: hands its arguments to ``axo.integrations.litgpt``."""

from __future__ import annotations

import typer

CONTEXT = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "allow_interspersed_args": False,
    "help_option_names": [],
}


def litgpt(context: typer.Context) -> None:
    """Run a LitGPT command: its arguments, --grid, in training --goldfish K,H; e.g. 'axo litgpt pretrain --help'."""
    from axo.integrations.litgpt.command import run

    run(context.args)
