"""How the command ends, whatever happens: one line on stderr and an exit code. The only error handler of ``axo``.

    0                done
    1                a check failed, a rank was lost, or something that is missing here (memory, LitGPT)
    2                the user's mistake: a wrong option, a file that cannot be used, a grid that does not fit
    128 + n          signal n ended the command: Ctrl-C 130, SIGTERM 143, a closed pipe (``axo ... | head``) 141

What is none of these is a bug and keeps its traceback. On a terminal that knows ASCII only, other signs are replaced.
"""

from __future__ import annotations

import codecs
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from axo.errors import Aborted, PeerLost, Timeout, user_message
from axo.files import printable
from axo.launch import Interrupted, RankFailed, nobody_reads

FAILED, WRONG_INPUT = 1, 2
_RANK_0_FIRST_SECONDS = 10.0
_OF_LITGPT = ("litgpt", "jsonargparse")  # jsonargparse comes with it
_ASCII = {"·": "-", "×": "x", "…": "...", "–": "-", "—": "-"}


class CommandGroup(TyperGroup):
    """The group of all subcommands: runs one, and turns every error into a line and an exit code."""

    def main(self, args: Sequence[str] | None = None, *options: Any, **more: Any) -> NoReturn:
        """Run ``args``, those of the process by default; ends by ``SystemExit``."""
        _replace_what_cannot_be_shown()
        self._main_shell_completion({}, "axo")  # of `axo --install-completion`; ends the process if the shell asks
        arguments = list(sys.argv[1:] if args is None else args) or ["--help"]
        code = 0
        try:
            with self.make_context("axo", arguments) as context:
                self.invoke(context)
            sys.stdout.flush()
        except typer.Exit as end:
            code = end.exit_code
        except BaseException as error:
            code = _end(error, " ".join(["axo", *(name for name in arguments[:1] if name in self.commands)]))
        sys.exit(code)

    def resolve_command(self, context: Any, args: list[str]) -> Any:
        """As typer's, which would take a command of LitGPT's for a mistyped one."""
        from axo.integrations.litgpt.commands import PARALLEL

        if args[0] in PARALLEL:
            raise ValueError(f"{args[0]} is a command of LitGPT's; type axo litgpt {args[0]}")
        return super().resolve_command(context, args)


def complain(line: str) -> None:
    """Print one line on stderr, in red on a terminal."""
    from rich.console import Console

    with suppress(BrokenPipeError):
        sys.stdout.flush()
    line = printable(" ".join(line.split()))
    Console(stderr=True).print(line, style="red", markup=False, highlight=False, soft_wrap=True)


def _end(error: BaseException, command: str) -> int:
    """Say what happened and return the exit code.

    Raises:
        BaseException: ``error`` itself, if it is a bug.
    """
    if nobody_reads(error):
        error = Interrupted(signal.SIGPIPE)
    if isinstance(error, SystemExit):
        raise error
    if isinstance(error, KeyboardInterrupt):
        number, lost = (error.signal, error.lost) if isinstance(error, Interrupted) else (signal.SIGINT, "")
        return _end_by_signal(number, command, lost)
    if isinstance(error, RankFailed):
        _show_cursor()
        if error.trace:
            sys.stderr.write(error.trace)
        complain(f"{command}: error: {_without_name(str(error), command)}")
        return WRONG_INPUT if error.user_error else FAILED
    if isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] in _OF_LITGPT:
        complain(f"{command}: error: this needs LitGPT; install it with: pip install 'axo[litgpt]'")
        return FAILED
    if isinstance(error, MemoryError):
        complain(f"{command}: error: not enough memory: {str(error) or 'the system gave no more'}")
        return FAILED
    if isinstance(error, ImportError) and "failed to map segment" in str(error):  # a library, under ulimit -v
        complain(f"{command}: error: not enough memory: {error}")
        return FAILED
    if isinstance(error, (PeerLost, Aborted, Timeout)):  # under torchrun: the rank that is the cause has said more
        complain(f"{command}: rank {os.environ.get('RANK', '0')}: {error}")
        return FAILED
    message = user_message(error)
    if message is None and hasattr(error, "format_message"):  # of the option parser
        message = f"{error.format_message().rstrip('.')}; see {command} --help"
    if message is None:
        raise error
    # Under torchrun all ranks fail alike on wrong input and rank 0 speaks for them: the others give it time to, after
    # which torchrun ends them. One that is still there has an error of its own.
    rank = os.environ.get("RANK", "0") if "WORLD_SIZE" in os.environ else "0"
    if rank != "0":
        time.sleep(_RANK_0_FIRST_SECONDS)
        message = f"rank {rank}: {message}"
    complain(f"{command}: error: {_without_name(message, command)}")
    return WRONG_INPUT


def _without_name(message: str, command: str) -> str:
    """The message without the command's name before it, which the line has already."""
    return message.removeprefix(f"{command.removeprefix('axo ')}: ")


def _end_by_signal(number: int, command: str, lost: str = "") -> int:
    """The exit code after a signal; a closed pipe ends without a word."""
    _show_cursor()
    if number != signal.SIGPIPE:
        name = "" if number == signal.SIGINT else f" by {signal.Signals(number).name}"
        complain(f"{command}: interrupted{name}; all ranks have ended{'; ' if lost else ''}{lost}")
    return 128 + number


def _show_cursor() -> None:
    """A rank that was ended while it drew a progress bar could not bring the cursor back."""
    if sys.stdout.isatty():
        from rich.console import Console

        Console().show_cursor(True)


def _replace_what_cannot_be_shown() -> None:
    def replace(error: UnicodeError) -> tuple[str, int]:
        if not isinstance(error, UnicodeEncodeError):
            raise error
        return "".join(_ASCII.get(sign, "?") for sign in error.object[error.start : error.end]), error.end

    codecs.register_error("axo_ascii", replace)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="axo_ascii")
