"""The errors of the communication runtime, as Python sees them. The core (csrc/base/error.h) throws their C++ twins.

``ValueError`` and ``TypeError`` say that a call was wrong before anything was sent; the classes here say what went
wrong between ranks. After one of them a communicator is aborted: later calls raise :class:`Aborted` with the first
reason.
"""

from __future__ import annotations


class Error(RuntimeError):
    """Base of everything that the communication runtime raises."""


class PeerLost(Error):
    """A peer process died or left while an operation needed it.

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
