"""Floating-point operations of a step, and the peak of a device.

    F = 96 B s l h^2 (1 + s / (6 h) + V / (16 l h))      one iteration with full recomputation of the layers
    F = 72 B s l h^2 (1 + s / (6 h) + V / (12 l h))      one iteration without

B rows, s tokens a row, l layers, h hidden, V vocabulary. The second line is the first less one forward pass of the
layers (the head is never run again, so its share of the sum grows). Model flops are the second line; hardware flops
are what really ran. Both are the formula of a GPT with an MLP of 4 h and as many key-value heads as heads, applied as
the papers do; SwiGLU and grouped queries differ by some percent. MFU and HFU divide by the dense peak of all ranks.
Source: Narayanan et al. (arXiv 2104.04473), equation (3), as used in "Democratizing AI".
"""

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


def step_flops(*, rows: int, seq_len: int, layers: int, hidden: int, vocabulary: int, recompute: bool) -> float:
    """Return the flops of one step over ``rows`` rows of ``seq_len`` tokens."""
    factor, head = (96, 16) if recompute else (72, 12)
    inner = 1 + seq_len / (6 * hidden) + vocabulary / (head * layers * hidden)
    return factor * rows * seq_len * layers * hidden**2 * inner


def peak_tflops(device_name: str, precision: str) -> float | None:
    """Return the dense peak of a device in TFLOP/s, None where it is not known (CPUs, other GPUs, fp32)."""
    if not precision.startswith("bf16"):
        return None
    for part, peak in _BF16_PEAKS:
        if part.lower() in device_name.lower():
            return peak
    return None
