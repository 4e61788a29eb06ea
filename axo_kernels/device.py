"""What the machine offers the kernels: whether Triton is there, whether it interprets, and which device a tensor is on.

Triton is optional: torch's CPU wheel brings none, and everything that does not need it works without.
"""

from __future__ import annotations

import importlib.metadata
from functools import cache
from types import ModuleType

import torch

from axo_kernels.gemm.tiles import CPU_TARGET, Target


@cache
def gemm_kernels() -> ModuleType | None:
    """Return the module of matmul kernels, or None without Triton."""
    try:
        from axo_kernels.gemm import kernels as module
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("triton"):
            raise
        return None
    return module


@cache
def signal_kernels() -> ModuleType | None:
    """Return the module of flag and signalling kernels, or None without Triton."""
    if gemm_kernels() is None:
        return None
    from axo_kernels.fused import kernels as module

    return module


@cache
def interpreted() -> bool:
    """Say whether kernels run in Triton's interpreter (TRITON_INTERPRET=1 when this process first imported them)."""
    module = gemm_kernels()
    return module is not None and type(module.matmul_kernel).__name__ == "InterpretedFunction"


def runs_triton(device: torch.device) -> bool:
    """Say whether a Triton kernel can run on tensors of this device in this process."""
    if device.type == "cuda":
        return gemm_kernels() is not None and not interpreted() and target_of(device).served
    return device.type == "cpu" and interpreted()


@cache
def target_of(device: torch.device) -> Target:
    """Describe a device; ``cuda`` stands for CUDA and ROCm devices alike."""
    if device.type != "cuda":
        return CPU_TARGET
    properties = torch.cuda.get_device_properties(device)
    shared = int(getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block))
    if torch.version.hip:
        arch = properties.gcnArchName.split(":")[0]
    else:
        arch = f"sm_{properties.major}{properties.minor}"
    return Target(arch, properties.multi_processor_count, shared)


def device_name(device: torch.device) -> str:
    """Name a device for the tuner's cache: model and architecture, or the CPU's model and thread count."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)} {target_of(device).arch}"
    return f"cpu {cpu_model()} threads={torch.get_num_threads()}"


@cache
def cpu_model() -> str:
    """The model of this machine's processor, as Linux calls it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith(("model name", "CPU part")):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return torch.backends.cpu.get_cpu_capability()


def versions() -> dict[str, str]:
    """Versions on which a measurement depends; part of the tuner's cache key."""
    installed = {"torch": torch.__version__, "triton": "none"}
    try:
        installed["triton"] = importlib.metadata.version("triton")  # without the second that importing it takes
    except importlib.metadata.PackageNotFoundError:
        pass
    if torch.version.cuda:
        installed["cuda"] = torch.version.cuda
    if torch.version.hip:
        installed["hip"] = torch.version.hip
    return installed
