"""What the graphics card says of itself: its limits once, its clock, power and temperature while it works.

A share of the peak is one at the clock of the peak, which the card leaves when it is hot or at its limit of power.
Through the driver's own library (NVML), since torch asks for a package that a bare machine has not; nothing where there
is none (AMD, a CPU).
"""

from __future__ import annotations

import contextlib
import ctypes
import subprocess
from functools import cache
from typing import Any

import torch

ASKED = (
    "name,driver_version,clocks.sm,clocks.max.sm,power.limit,clocks_throttle_reasons.active,compute_mode,"
    "mig.mode.current"
)


def described() -> str:
    """The card's limits, as ``nvidia-smi`` prints them; why not, where it does not."""
    command = ["nvidia-smi", f"--query-gpu={ASKED}", "--format=csv"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"nvidia-smi: {type(error).__name__}"
    return (answer.stdout + answer.stderr).strip()


def state(device: torch.device) -> dict[str, Any]:
    """Its clock in MHz, power in W, temperature in degrees Celsius and reasons to slow down, now."""
    said: dict[str, Any] = {}
    if device.type != "cuda" or torch.version.hip:
        return said
    with contextlib.suppress(OSError, AttributeError):  # no such library, or an older one
        library, card = _card(_bus(device))
        value, wide = ctypes.c_uint(), ctypes.c_ulonglong()
        for name, call, number, scale in (
            ("sm_mhz", "nvmlDeviceGetClockInfo", (1,), 1.0),  # NVML_CLOCK_SM
            ("watts", "nvmlDeviceGetPowerUsage", (), 1e-3),
            ("celsius", "nvmlDeviceGetTemperature", (0,), 1.0),  # NVML_TEMPERATURE_GPU
        ):
            if getattr(library, call)(card, *number, ctypes.byref(value)) == 0:
                said[name] = value.value * scale
        if library.nvmlDeviceGetCurrentClocksThrottleReasons(card, ctypes.byref(wide)) == 0:
            said["throttled"] = f"{wide.value:#x}"
    return said


def _bus(device: torch.device) -> bytes:
    """Where the card is plugged in: the library counts cards that are hidden from this process too."""
    one: Any = torch.cuda.get_device_properties(device)
    return f"{one.pci_domain_id:08x}:{one.pci_bus_id:02x}:{one.pci_device_id:02x}.0".encode()


@cache
def _card(bus: bytes) -> tuple[Any, Any]:
    library, card = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_void_p()
    if library.nvmlInit_v2() or library.nvmlDeviceGetHandleByPciBusId_v2(bus, ctypes.byref(card)):
        raise OSError("the driver does not know the card")
    return library, card
