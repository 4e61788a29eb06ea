"""Work: one pending collective, and the group of operations that a thread has open.

    work = comms.y.all_reduce(t, async_op=True)
    compute_on(other)
    t = work.wait()          # right; reading or writing t before this line is wrong

A Work keeps its tensors alive; dropping it does not cancel the operation. The three ways to wait are those of
csrc/base/work.h.

The result of a tensor that is not contiguous is copied when its operation is complete, whether or not the Work is still
there: by the next wait or blocking call of any communicator, by ``is_completed``, or else by the thread of the futures.
On a device the copy follows in the order of streams, at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from numbers import Real
from typing import Any, Protocol

import torch

from axo.comm.counting import observers
from axo.comm.memory import CopyPairs
from axo.errors import Error

undelivered: list[Work] = []  # works on the host with copies to make
_copying = threading.RLock()  # a reader must not pass a copy that another thread is making
_LONGEST_S = 1e9  # 30 years: what a clock of nanoseconds can hold


def deliver_completed() -> None:
    """Make the copies of all works whose operations are complete."""
    for work in tuple(undelivered):
        if work._core is not None and work._core.is_completed():
            work._deliver()


def copy_all(copies: CopyPairs) -> None:
    """Copy ``(to, from)``, in the mode in which ``to`` may be written."""
    for target, buffer in copies:
        with torch.inference_mode(target.is_inference()), torch.no_grad():
            target.copy_(buffer)


class CoreWork(Protocol):
    """What the core, or what stands for it, gives for an operation: ``_C.Work``; times in milliseconds."""

    def wait(self) -> None: ...
    def synchronize(self, timeout_ms: int, /) -> None: ...
    def is_completed(self) -> bool: ...
    def exception(self) -> BaseException | None: ...
    def seconds(self) -> float: ...
    def source(self) -> int: ...
    def when_completed(self, callback: Callable[[], None], /) -> None: ...


class Issuer(Protocol):
    """What a Work asks of the communicator that has issued it."""

    @property
    def axis(self) -> str: ...
    def block(self, wait: Callable[..., object], *arguments: Any) -> float: ...


class Work:
    """A pending operation. It keeps its tensors alive; dropping it does not cancel the operation."""

    __slots__ = ("_copies", "_core", "_issuer", "_result")

    def __init__(self, issuer: Issuer, core: CoreWork | None, result: Any, copies: CopyPairs) -> None:
        self._issuer = issuer
        self._core = core  # None: nothing is pending
        self._result = result
        self._copies = copies  # (to, from): results of tensors that are not contiguous

    def wait(self) -> Any:
        """Block until the operation is complete; return its result, as the blocking call would.

        Raises:
            PeerLost, Timeout, Mismatch, Aborted: What the operation ended with.
        """
        if open_group.depth:
            self._check_issued()
        if self._core is not None:
            start = self._issuer.block(self._core.wait)
            if observers.active:
                observers.waited(self._issuer.axis, start, self)
        if self._copies:
            self._finish()
        if undelivered:
            deliver_completed()
        return self._result

    def synchronize(self, timeout: float | None = None) -> None:
        """Block the host until the operation is complete, at most ``timeout`` seconds.

        Raises:
            Timeout: Still pending then; the operation itself goes on. ValueError: A negative time, or none.
        """
        if timeout is None:
            self.wait()
            return
        self._block(timeout)
        self._finish()
        deliver_completed()

    def _block(self, timeout: float | None) -> None:
        if timeout is not None and not (isinstance(timeout, Real) and timeout >= 0):
            raise ValueError(
                f"synchronize: timeout={timeout!r} is no time; use seconds of at least 0, or None for ever"
            )
        self._check_issued()
        if self._core is not None:
            limit = -1 if timeout is None else int(min(float(timeout), _LONGEST_S) * 1000)
            self._issuer.block(self._core.synchronize, limit)

    def is_completed(self) -> bool:
        """Whether the operation has ended, with or without an error. Never blocks."""
        if self._core is not None and not self._core.is_completed():
            return False
        if self._copies:
            self._deliver()
        return True

    def exception(self) -> BaseException | None:
        """The error that the operation ended with; None while it is pending or when it succeeded."""
        return None if self._core is None else self._core.exception()

    def result(self) -> Any:
        """The result, after waiting for it."""
        return self.wait()

    def duration(self) -> float | None:
        """Seconds from issue to completion; None while it is pending, after an error, or where nobody measured.

        On a device the time is measured between events of its stream, with ``DeviceOptions(timing=True)`` only.
        """
        if self._core is None or self._core.exception() is not None:
            return None
        seconds = self._core.seconds()
        return seconds if seconds >= 0 else None

    def source(self) -> int | None:
        """The rank whose message a ``recv`` took; None before one has come, and for every other operation."""
        if self._core is None:
            return None
        rank = self._core.source()
        return rank if rank >= 0 else None

    def future(self) -> torch.futures.Future:
        """A ``torch.futures.Future`` of the result, or of the error that the operation ends with.

        It is completed on a thread of Axo's, where its callbacks run too. A callback may issue collectives; it must not
        wait for another of these futures.
        """
        self._check_issued()
        future: torch.futures.Future = torch.futures.Future()
        if self._core is None:
            future.set_result(self._result)
        else:
            self._core.when_completed(lambda: self._settle(future))
        return future

    def _settle(self, future: torch.futures.Future) -> None:
        try:
            self.synchronize()
        except Exception as error:
            future.set_exception(error)
            return
        future.set_result(self._result)

    def _check_issued(self) -> None:
        if self in open_group.recorded:
            raise Error("wait: this operation belongs to an axo.group() that is still open; wait after the block")

    def launched(self) -> None:
        """No open group holds it back: see to it that the copies are made even if nobody waits."""
        if self._copies and self._core is not None:
            undelivered.append(self)
            self._core.when_completed(self._deliver)

    def _deliver(self) -> None:
        """The copies of an operation that has ended."""
        with _copying:
            if self._core is not None and self._core.exception() is not None:
                self._copies = ()
            self._finish()
            if self in undelivered:
                undelivered.remove(self)

    def _finish(self) -> None:
        if not self._copies:
            return
        with _copying:
            copy_all(self._copies)
            self._copies = ()


class _OpenGroup(threading.local):
    """This thread's open ``axo.group()``: how deep, what was recorded, and what the end of the block waits for."""

    depth = 0

    def __init__(self) -> None:
        self.recorded: list[Work] = []
        self.waits: list[Work] = []


open_group = _OpenGroup()
