"""Launch a product's kernels again for other tensors, without what Triton does anew at each launch.

Triton binds the arguments, specializes on them, looks the kernel up and encodes a tensor map for each descriptor, most
of it in Python: several times what the driver's part takes. All of that depends on dtypes, shapes, strides, numbers,
options and the alignment of addresses, which the caller of a :class:`Repeated` keeps as they were; so the kernel is the
one that Triton would find again. What differs is where the tensors lie, and the stream: these are replaced in the
arguments that Triton's launcher handed over to its part in C. A map depends on the base alone then, and is kept by it.
Nothing here waits for the device, and the driver copies what it launches with: graphs can be captured.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import CellType, FunctionType
from typing import Any

import torch

_KEPT = 1024  # tensor maps of one operand, 128 bytes each
_STREAM = object()


@dataclass
class KernelLaunch:
    """A launch of a kernel, but for its tensors: first those that it loads through descriptors, then plain ones.

    For others of the same shapes, strides, dtypes and device, with bases of 16 bytes: what a launch looks up, checks
    and chooses took the host several times as long as Triton's own part of it, and that several times the driver's.
    """

    kernel: Any
    programs: int
    matrices: tuple[tuple[bool, Any, dict[str, Any]], ...]  # whether turned, the descriptor but for its base
    numbers: tuple[int, ...]
    options: dict[str, Any]
    repeated: Repeated | None = None
    launches: int = 0  # by Triton; the second one looks whether it can be repeated: many a first one is the only one

    def __call__(self, *tensors: torch.Tensor) -> None:
        """Launch, for tensors as they are stored."""
        count = len(self.matrices)
        if self.repeated is not None and self.repeated.ready():
            bases = [tensor.data_ptr() for tensor in tensors]
            self.repeated(bases[:count], bases[count:], lambda: self._described(tensors[:count]))
            return
        arguments = (*self._described(tensors[:count]), *tensors[count:], *self.numbers)
        compiled = self.kernel[(self.programs,)](*arguments, **self.options)
        self.launches += 1
        if self.launches == 2:
            self.repeated = Repeated.of(self.kernel, compiled, self.programs, arguments, self.options)

    def _described(self, matrices: Sequence[torch.Tensor]) -> list[Any]:
        described = []
        for matrix, (turned, kind, fields) in zip(matrices, self.matrices, strict=True):
            one = kind.__new__(kind)
            one.__dict__.update(fields, base=matrix.mT if turned else matrix)
            described.append(one)
        return described


@dataclass
class Prepared:
    """The launches of a product, but for its tensors.

    Attributes:
        multiply: Of the kernel that multiplies.
        gated: Whether kernels take a gate behind the bias.
        combine: Of the one that adds the fp32 sums of K's pieces, where K is cut: of ``pieces`` (rows, columns).
        shape, spans: Of the result; bytes from base to end of the result, a, b and the bias.
    """

    multiply: KernelLaunch
    gated: bool
    combine: KernelLaunch | None = None
    pieces: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()
    spans: tuple[int, ...] = ()

    def __call__(
        self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None, gate: Any = None
    ) -> None:
        """Launch, for operands and result as they are stored."""
        behind = (out if bias is None else bias, *((out if gate is None else gate,) if self.gated else ()))
        if self.combine is None:
            self.multiply(a, b, out, *behind)
            return
        sums = torch.empty(self.pieces, dtype=torch.float32, device=out.device)
        self.multiply(a, b, sums, *behind)
        self.combine(sums, out, *behind)


class Repeated:
    """One launch of a compiled kernel, for other tensors with bases of 16 bytes."""

    def __init__(self, jit: Any, kernel: Any, programs: int, values: Sequence[Any]) -> None:
        """Take the arguments of all parameters in their order; tensors among them are not kept."""
        from triton import knobs, runtime

        driver = runtime.driver.active
        self._current_device, self._current_stream = driver.get_current_device, driver.get_current_stream
        self._device, self._knobs = driver.get_current_device(), knobs
        self._modes = self._in_force()
        self._hooks = jit.pre_run_hooks
        cells = _cells(kernel)
        self._launcher = cells["launcher"].cell_contents if cells else kernel.run.launch
        described = [place for place, value in enumerate(values) if hasattr(value, "block_shape")]
        pointers = {place: object() for place, value in enumerate(values) if hasattr(value, "data_ptr")}
        hidden = [pointers.get(place, None if place in described else value) for place, value in enumerate(values)]
        self._hand_over = partial(_handed_over, kernel, programs, hidden, described)
        self._before, self._arguments, self._flat = self._hand_over([values[place] for place in described])
        self._stream = self._before.index(_STREAM)
        self._maps = [place for place, value in enumerate(self._arguments) if type(value).__name__ == "PyCUtensorMap"]
        self._pointers = [self._arguments.index(mark) for mark in pointers.values() if mark in self._arguments]
        self._kept: list[dict[int, Any]] = [{} for _ in self._maps]
        self.usable = (len(self._maps), len(self._pointers)) == (len(described), len(pointers))
        for place in (*self._maps, *self._pointers):
            self._arguments[place] = None

    @classmethod
    def of(
        cls, jit: Any, kernel: Any, programs: int, arguments: Sequence[Any], options: dict[str, Any]
    ) -> Repeated | None:
        """Return what repeats a launch that Triton has done of these arguments; None: Triton has to do each.

        That is so in the interpreter, and where Triton's launcher is another than in 3.6 to 3.9.
        """
        try:
            return cls._of(jit, kernel, programs, arguments, options)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):  # Triton's own parts are otherwise
            return None

    @classmethod
    def _of(
        cls, jit: Any, kernel: Any, programs: int, arguments: Sequence[Any], options: dict[str, Any]
    ) -> Repeated | None:
        run, cells = getattr(kernel, "run", None), _cells(kernel)
        if run is None or any(getattr(run, f"{name}_scratch_size", 0) for name in ("global", "profile")):
            return None
        if (cells and "launcher" not in cells) or getattr(run, "gsan_enabled", False):
            return None
        named = {name: value for name, value in options.items() if name in jit.signature.parameters}
        bound = jit.signature.bind(*arguments, **named)
        bound.apply_defaults()
        repeated = cls(jit, kernel, programs, list(bound.arguments.values()))
        return repeated if repeated.usable else None

    def ready(self) -> bool:
        """Whether Triton would launch the same now, on this device, and no hook (of a profiler) is to be called."""
        enter, leave = self._knobs.runtime.launch_enter_hook, self._knobs.runtime.launch_exit_hook
        if getattr(enter, "calls", enter) or getattr(leave, "calls", leave) or self._hooks:
            return False
        return self._in_force() == self._modes and self._current_device() == self._device

    def _in_force(self) -> tuple[Any, Any]:
        """What of Triton's settings a kernel is looked up by."""
        return self._knobs.runtime.debug, getattr(self._knobs.compilation, "instrumentation_mode", None)

    def __call__(self, bases: Sequence[int], pointers: Sequence[int], describe: Callable[[], list[Any]]) -> None:
        """Launch with descriptors of these bases, and with these pointers, each in the order of the parameters."""
        arguments = self._arguments.copy()
        for place, kept, base in zip(self._maps, self._kept, bases):  # noqa: B905 - as long by construction
            encoded = kept.get(base)
            if encoded is None:
                self._encode(bases, describe)
                encoded = kept[base]
            arguments[place] = encoded
        for place, pointer in zip(self._pointers, pointers):  # noqa: B905
            arguments[place] = pointer
        before = self._before.copy()
        before[self._stream] = self._current_stream(self._device)
        if self._flat:
            self._launcher(*before, *arguments)
        else:
            self._launcher(*before, arguments)

    def _encode(self, bases: Sequence[int], describe: Callable[[], list[Any]]) -> None:
        encoded = self._hand_over(describe())[1]
        for place, kept, base in zip(self._maps, self._kept, bases):  # noqa: B905
            if len(kept) >= _KEPT:
                kept.clear()
            kept[base] = encoded[place]


def _cells(kernel: Any) -> dict[str, CellType]:
    """What Triton's function that encodes descriptors has around it: the launcher in C among it. Without descriptors
    nothing: there that launcher is all there is.
    """
    launch = getattr(getattr(kernel, "run", None), "launch", None)
    names = getattr(getattr(launch, "__code__", None), "co_freevars", ())
    return dict(zip(names, getattr(launch, "__closure__", None) or (), strict=True))


def _handed_over(
    kernel: Any, programs: int, values: list[Any], places: list[int], described: list[Any]
) -> tuple[list[Any], list[Any], bool]:
    """What Triton's launcher hands over to its part in C: before the kernel's arguments, these, and whether as one list
    with what is before them (Triton 3.6) or in one of their own.
    """
    taken: list[Any] = []
    launch, cells = kernel.run.launch, _cells(kernel)
    twin, values = copy.copy(kernel.run), values.copy()
    twin.launch = take = lambda *given: taken.extend(given)
    if cells:
        cells |= {"launcher": CellType(take)}
        twin.launch = FunctionType(launch.__code__, launch.__globals__, closure=tuple(cells.values()))
    for place, one in zip(places, described, strict=True):
        values[place] = one
    twin(programs, 1, 1, _STREAM, kernel.function, kernel.packed_metadata, None, None, None, *values)
    if isinstance(taken[-1], (list, tuple)):
        return taken[:-1], list(taken[-1]), False
    behind = taken.index(_STREAM) + 1
    return taken[:behind], taken[behind:], True
