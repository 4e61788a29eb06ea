"""The dense peak of a device, by its name: what MFU and HFU divide by. ``--peak-tflops`` stands above this table."""

from __future__ import annotations

# Dense bf16 peak in TFLOP/s by a part of the device's name; a more telling part stands before a shorter one.
_BF16_PEAKS = (
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("GH200", 989.0),
    ("H200", 989.0),
    ("H100", 989.0),
    ("A100", 312.0),
    ("L40S", 362.0),
    ("MI300X", 1307.0),
    ("MI250X", 191.5),  # one GCD, which is what a rank sees
)


def peak_tflops(device_name: str, precision: str) -> float | None:
    """Return the dense peak of a device in TFLOP/s, None where it is not known (CPUs, other GPUs, fp32)."""
    if precision == "32-true":
        return None
    for part, peak in _BF16_PEAKS:
        if part.lower() in device_name.lower():
            return peak
    return None
