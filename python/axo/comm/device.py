"""The communicator of GPUs: the collectives of ``axo.Communicator`` in the order of streams, and what GPUs add.

    work = comms.y.all_reduce(t, async_op=True)      # on the communicator's stream, after what the current one holds
    work.wait()                                      # the current stream goes on after it; the host does not wait
    work.synchronize(timeout=1.0)                    # the host waits

A blocking call is launched on the current stream and returns at once: what is enqueued next sees its result. The
current stream is torch's; an array of another library is ordered against its own stream when it is passed (DLPack), and
its owner orders what follows. Calls on a stream that captures a CUDA graph become part of the graph.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from axo.comm.communicator import Communicator
from axo.comm.extension import _C
from axo.comm.memory import CopyPairs, check_integer
from axo.comm.work import Work, copy_all
from axo.errors import Error, Mismatch
from axo.settings import value_of


def ask_for_launch_order() -> None:
    """Have NCCL 2.26 to 2.30 let kernels begin in the order of their launches, unless the environment says otherwise.

    Never RCCL, to which the variable means one operation after the other, and none of its direct collectives.

    They read NCCL_LAUNCH_ORDER_IMPLICIT once, at the first communicator of the process. Where torch's own NCCL backend
    is there already it may be too late: then nothing is asked for, and the communicators of a rank share one stream.
    """
    groups = dist.distributed_c10d._world.pg_backend_config.values()
    if torch.version.hip is None and not any("nccl" in backends for backends in groups):
        os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")


@dataclass(frozen=True)
class DeviceOptions:
    """How the communicators of a GPU are made; the same on all ranks.

    Attributes:
        min_ctas, max_ctas: Thread blocks that one operation may use; 0: the library's choice. The sum of ``max_ctas``
            over a rank's communicators is what computation must leave free for all to run at once. RCCL keeps to
            neither.
        cga_cluster_size: Thread blocks in a cluster; -1: none where ``max_ctas`` or a cap is given, else the library's
            choice.
        zero_cta: Copy-engine collectives where the library has them (NCCL 2.28, registered memory): they take no SM.
        high_priority: Communication is scheduled before computation.
        timing: ``Work.duration()`` is measured; costs two more events an operation.
        split_share: The axes share the world's buffers; operations of both must then not overlap, and none can be
            capped.
        streams: ``"own"`` for each communicator, one ``"shared"`` by all of a rank, or ``"auto"``: own where the
            library lets kernels begin in the order of their launches (NCCL 2.26), else shared. Own streams without that
            order can deadlock.
        check: Compare every operation and its order between ranks before it runs; None: as AXO_CHECK says. Slow.
        composed: (hosts, ranks of each, collective, least bytes): from so many bytes on, a collective of so many hosts
            is composed of those inside hosts and those between them; None: as the file says that AXO_COMPOSITION names.
    """

    min_ctas: int = 0
    max_ctas: int = 0
    cga_cluster_size: int = -1
    zero_cta: bool = False
    high_priority: bool = True
    timing: bool = False
    split_share: bool = False
    streams: str = "auto"
    check: bool | None = None
    composed: tuple[tuple[int, int, str, int], ...] | None = None

    def for_core(self, timeout_ms: int, device: int) -> _C.DeviceOptions:
        fields = asdict(self) | {"check": -1 if self.check is None else int(self.check)}
        fields["composed"] = _composed(value_of("AXO_COMPOSITION")) if self.composed is None else self.composed
        return _C.DeviceOptions("world", timeout_ms, device, *fields.values())


def _composed(path: str) -> tuple[tuple[int, int, str, int], ...]:
    """The rows of ``composed`` in a file of ``axo profile``; none without a file."""
    import yaml

    if not path:
        return ()
    try:
        shapes = (yaml.safe_load(Path(path).read_text()) or {}).get("composed", {})
        return tuple(
            (int(hosts), int(local), str(collective), int(least))
            for local, hosts, table in ((*shape.split("x"), table) for shape, table in shapes.items())
            for collective, least in table.items()
        )
    except (OSError, ValueError, TypeError, AttributeError, yaml.YAMLError) as error:
        raise ValueError(f"AXO_COMPOSITION={path}: no file that axo profile wrote ({error}); give one") from None


class DeviceWork(Work):
    """A pending operation on a device."""

    __slots__ = ("_copied",)

    _issuer: DeviceCommunicator
    _core: _C.Work | None

    def __init__(self, issuer: DeviceCommunicator, core: _C.Work | None, result: Any, copies: CopyPairs) -> None:
        super().__init__(issuer, core, result, copies)
        self._copied: torch.Event | None = None  # the end of the copies

    def wait(self) -> Any:
        """Let the current stream go on after the operation; return its result. The host does not wait.

        Raises:
            PeerLost, Timeout, Aborted: The operation is known to have failed.
        """
        self._check_issued()
        if self._core is not None:
            self._core.wait_on(self._issuer.current_stream)
        if self._copied is not None:
            torch.accelerator.current_stream(self._issuer.device).wait_event(self._copied)
        return self._result

    def synchronize(self, timeout: float | None = None) -> None:
        self._block(timeout)
        if self._copied is not None:
            self.wait()
            torch.accelerator.current_stream(self._issuer.device).synchronize()

    def launched(self) -> None:
        """Make the copies on a stream of their own, after the operation: nobody has to wait for them to be made."""
        if self._copies and self._core is not None:
            with torch.Stream(self._issuer.device):
                self._core.wait_on(self._issuer.current_stream)
                copy_all(self._copies)
                self._copied = torch.accelerator.current_stream(self._issuer.device).record_event()
                # The copies read buffers that belong to the issuing stream, and may not have run yet.
                self._core.keep_until(self._issuer.current_stream, self._copies)
            self._copies = ()


class DeviceCommunicator(Communicator):
    """The collectives among the ranks of one axis, on GPUs. Made by ``axo.connect(device="cuda")`` and ``split``."""

    _core: _C.DeviceCommunicator | None
    _after_caller = True

    def _run_plain(self, call: Any, tensor: Any, other: Any, result: Any, async_op: bool) -> Any:
        return None  # what the core looks at lies on the host

    @cached_property
    def _capped(self) -> dict[int, DeviceCommunicator]:
        return {}

    @cached_property
    def _place(self) -> tuple[int, int]:
        assert self.device.index is not None
        return _C.device_type_code(self.device.type), self.device.index

    @property
    def current_stream(self) -> int:
        """The handle of torch's current stream on this device."""
        return _C.current_stream(*self._place)

    @property
    def stream(self) -> int:
        """The handle of this communicator's stream, on which non-blocking operations run."""
        return self._needed("stream").stream

    @property
    def library_version(self) -> int:
        """Of NCCL or RCCL: 23203 is 2.32.3."""
        return self._needed("library_version").library_version

    @property
    def composed(self) -> dict[str, int]:
        """By collective: the least bytes from which it is composed of those inside hosts and those between them."""
        return {} if self._core is None else self._core.composed

    @property
    def reserved_ctas(self) -> int:
        """Thread blocks to leave free for communication: the sum of ``max_ctas`` over this rank's communicators."""
        return 0 if self._core is None else self._core.reserved_ctas

    @property
    def shares_buffers(self) -> bool:
        """``DeviceOptions(split_share=True)``: it and its parts must not run at once: no :meth:`capped`."""
        return self._core is not None and self._core.shares_buffers

    def capped(self, max_ctas: int) -> DeviceCommunicator:
        """The same ranks through a communicator of its own whose operations take ``max_ctas`` thread blocks at most.

        For a product that leaves as many multiprocessors to them. 0: none where the library's copy engines can move it
        (``DeviceOptions.zero_cta``). Collective at its first call for a number; later ones give what was made.
        ``reserved_ctas`` does not count it; it closes with this one.
        """
        check_integer("capped", "max_ctas", max_ctas)
        if max_ctas not in self._capped:
            name = f"{self.name}/{max_ctas} blocks"
            core = self._needed("capped").capped(max_ctas, name)
            twin = type(self)(core, name=name, axis=self.axis, device=self.device, timeout=self._timeout)
            twin._siblings = (*self._siblings, self)
            self._cores.append(core)
            self._capped[max_ctas] = twin
        return self._capped[max_ctas]

    def follow(self) -> None:
        """Let this communicator's stream go on after what the current stream has been given so far."""
        self._needed("follow").follow(self.current_stream)

    def wait_flag(self, flag: Any, value: int) -> None:
        """Hold this communicator's stream until a flag has reached ``value``: ``int32(flag - value) >= 0``, cyclic.

        Args:
            flag: The address of a 4-byte word on the device, or an integer tensor whose first element it is.
        """
        self._needed("wait_flag").wait_flag(self._flag_address("wait_flag", flag), value & 0xFFFFFFFF)

    def write_flag(self, flag: Any, value: int) -> None:
        """Write ``value`` to a flag after everything issued on this communicator's stream so far."""
        self._needed("write_flag").write_flag(self._flag_address("write_flag", flag), value & 0xFFFFFFFF)

    @contextmanager
    def signalled(self) -> Iterator[None]:
        """In this block non-blocking operations follow ``wait_flag`` only, not what is on the current stream.

        For a producer that runs on the current stream and raises flags as it goes: ``follow()``, launch the producer,
        then for each chunk ``wait_flag`` and the collective, here. Keep the tensors until the works are waited for.
        """
        self._after_caller, before = False, self._after_caller
        try:
            yield
        finally:
            self._after_caller = before

    def register(self, tensor: torch.Tensor, *, symmetric: bool = False) -> Any:
        """Let collectives use the tensor's memory without staging, for as long as the result of this call is held.

        ``symmetric`` makes it a window that peers reach: collective, for memory of ``axo.empty_shared(device=...)``, of
        equal size on all ranks. Gives None where the library cannot, or has no use for it here.
        """
        source = self._tensor(tensor, "register")
        if not source.is_contiguous() or source.numel() == 0:
            raise ValueError("register: the tensor is empty or not contiguous; register the one that it is a view of")
        return self._needed("register").register_buffer(source.data_ptr(), source.nbytes, symmetric)

    def _needed(self, what: str) -> _C.DeviceCommunicator:
        if self._core is None:
            raise Error(f"{what}: communicator {self.name!r} has one rank, and so neither a stream nor a library")
        return self._core

    def _flag_address(self, what: str, flag: Any) -> int:
        if isinstance(flag, int):
            return flag
        tensor = self._tensor(flag, what)
        if tensor.element_size() != 4 or tensor.dtype.is_floating_point or tensor.numel() == 0:
            raise ValueError(f"{what}: a flag is a 4-byte integer; got {tensor.numel()} of {tensor.dtype}")
        return tensor.data_ptr()

    def _issue(
        self, call: Callable[..., Any], args: tuple[Any, ...], keep: Any, copies: CopyPairs, result: Any, blocking: bool
    ) -> Work | None:
        stream = self.current_stream
        if blocking and not self._after_caller:
            raise ValueError("signalled(): a blocking call follows the current stream; use async_op=True")
        try:
            if blocking:
                call(*args, True, self._timeout_ms, None, stream, True)
                copy_all(copies)
                return None
            core = call(*args, False, self._timeout_ms, keep, stream, self._after_caller)
        except Mismatch as error:
            self._spread(error)
            raise
        return DeviceWork(self, core, result, copies)

    def _nothing_pending(self, result: Any) -> Work:
        return DeviceWork(self, None, result, ())

    def _scaled(
        self, op: str, source: torch.Tensor, args: tuple[Any, ...], scale: float
    ) -> tuple[Callable[..., Any], torch.Tensor, tuple[Any, ...]]:
        return getattr(self._core, f"{op}_scaled"), source, (float(scale),)
