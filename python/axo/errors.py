"""The errors of the communication runtime, as Python sees them. The core (csrc/base/error.h) throws their C++ twins.

``ValueError`` and ``TypeError`` say that a call was wrong before anything was sent; :class:`Refused` that it was right
and Axo does not support it; :class:`CheckpointError` that nothing was saved. The other classes say what went wrong
between ranks. After one of them a communicator is aborted: later calls raise :class:`Aborted` with the first reason.
"""

from __future__ import annotations


class Refused(ValueError):
    """Axo cannot do exactly what a serial program does here (a size, a feature, a kind of layer), and does nothing."""


class Error(RuntimeError):
    """Base of everything that the communication runtime raises."""


class ResourceError(Error):
    """The system refused this process memory or a file: a limit of it (``ulimit``), or there is no more."""


class PeerLost(Error):
    """A peer died, left, or ended with an error of its own while an operation needed it; the message says which error.

    One class for all three: what a program can do is the same, and a rank that raises may die of it at any moment.

    Attributes:
        peer: Its rank in the communicator, or -1 when unknown.
    """

    def __init__(self, message: str, peer: int = -1) -> None:
        super().__init__(message)
        self.peer = peer


class Timeout(Error):
    """An operation did not finish in time; the message names who has arrived and who has not."""


class Mismatch(Error):
    """Ranks issued operations that do not match (kind, size, dtype, op, root or order)."""


class Aborted(Error):
    """The communicator was aborted, by this rank or by another."""


class CheckpointError(RuntimeError):
    """A save failed on some rank; the same on every rank. Earlier checkpoints are as they were."""


def raised(error: BaseException) -> str:
    """What a rank has raised, as the end of a sentence that begins with the rank: the first line of it."""
    lines = str(error).strip().splitlines()
    return f"raised {type(error).__name__}" + (f": {lines[0]}" if lines else "")


def user_message(error: BaseException) -> str | None:
    """What to tell a user of an error that explains itself: wrong input, or a file or disk that cannot be used.

    Returns:
        The message; None for anything else, whose traceback is wanted.
    """
    if isinstance(error, OSError) and error.errno and not isinstance(error, ConnectionError):
        where = "" if error.filename is None else f"{str(error.filename)!r} cannot be used: "
        return f"{where}{error.strerror}"
    return str(error) if isinstance(error, (ValueError, FloatingPointError, CheckpointError, ResourceError)) else None
