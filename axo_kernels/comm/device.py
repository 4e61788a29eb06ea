"""The adapter of an axo.Communicator on GPUs: its own communication stream carries the flags and the collectives.

    fork                follow()          the stream goes on after what the compute stream has been given so far
    wait_flag, chunk    wait_flag(...)    then the chunk's collective, which follows the flag and not the compute stream
    write_flag          write_flag(...)   after the collectives issued so far
    join                the compute stream waits for the collectives' works, and for what followed them

Flags are waited for and written by the driver where it can, with the epoch that the host knows. Once an operation has
been captured (a replayed graph advances the epoch in device memory only), and on AMD (whose stream waits are slow),
one-program kernels on the same stream read it there instead. The driver's wait has no bound; what it waits for is set
by a kernel of this very process, and a lost peer shows in the collective, which axo reports.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from axo_kernels import device as devices
from axo_kernels.comm.adapters import AxoCommunicator


class DeviceAxoCommunicator(AxoCommunicator):
    """An axo.Communicator on GPUs, known by its methods."""

    def __init__(self, communicator: Any, timeout: float = 60.0, op: str = "sum") -> None:
        super().__init__(communicator, timeout, op)
        self._works: list[Any] = []
        self._by_driver = torch.version.hip is None

    @property
    def reserved_units(self) -> int:
        return max(super().reserved_units, self.communicator.reserved_ctas)

    def fork(self, device: torch.device) -> None:
        assert not self._forked, "fork() twice without join()"
        self.communicator.follow()
        self._forked = True

    def join(self) -> None:
        self._forked = False
        works, self._works = self._works, []
        try:
            for work in works:
                work.wait()
        except Exception:
            self.poll()  # a kernel that has given up tells more than the transport: which chunk, of which epoch
            raise
        torch.cuda.current_stream(self.communicator.device).wait_stream(self._own_stream())

    def abandon(self) -> None:
        self._forked = False
        self._works = []

    def _issue(self, call: Callable[[], Any]) -> Any:
        if not self._forked:
            return call()
        with self.communicator.signalled():
            work = call()
        self._works.append(work)
        return work

    def wait_flag(self, workspace: Any, number: int) -> None:
        assert self._forked, "wait_flag() belongs between fork() and join()"
        if self._by_driver and workspace.count is not None:
            self.communicator.wait_flag(workspace.flags[number:], workspace.count)
            return
        kernels = devices.signal_kernels()
        assert kernels is not None
        with torch.cuda.stream(self._own_stream()):
            kernels.wait_flag_kernel[(1,)](
                workspace.flags[number:], workspace.epoch, workspace.status, self.spins, number, num_warps=1
            )

    def write_flag(self, workspace: Any, number: int) -> None:
        assert self._forked, "write_flag() belongs between fork() and join()"
        if self._by_driver and workspace.count is not None:
            self.communicator.write_flag(workspace.flags[number:], workspace.count)
            return
        kernels = devices.signal_kernels()
        assert kernels is not None
        with torch.cuda.stream(self._own_stream()):
            kernels.write_flag_kernel[(1,)](workspace.flags[number:], workspace.epoch, num_warps=1)

    def _own_stream(self) -> Any:
        return torch.cuda.ExternalStream(self.communicator.stream, self.communicator.device)
