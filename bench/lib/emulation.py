"""Whether a processor multiplies numbers of 16 bits itself: a bench says so before it takes hours, and what to type."""

from __future__ import annotations

import platform
from pathlib import Path

import torch


def emulated(dtype: torch.dtype, device: torch.device, instead: str) -> str:
    """What to say where products of ``dtype`` are emulated; "" elsewhere, and of processors other than x86.

    Args:
        instead: What to type for a dtype that the processor has.
    """
    flags = {torch.bfloat16: ("avx512_bf16", "amx_bf16"), torch.float16: ("avx512_fp16", "amx_fp16")}.get(dtype, ())
    if device.type != "cpu" or platform.machine() != "x86_64" or not flags:
        return ""
    processor = Path("/proc/cpuinfo").read_text()
    if any(flag in processor for flag in flags):
        return ""
    name = "bf16" if dtype == torch.bfloat16 else "fp16"
    return f"this processor has no {name} products: they are emulated, many times slower; try {instead}"
