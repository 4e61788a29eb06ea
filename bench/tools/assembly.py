"""What PTX and AMD GCN of our kernels must contain: matrix instructions, copies, spin loops, memory order."""

from __future__ import annotations

import re

from axo_kernels.gemm.tiles import Target

_MATRIX = {
    "sm_80": "mma.sync",
    "sm_90": "wgmma.mma_async",
    "sm_100": "tcgen05.mma",
    "gfx90a": "v_mfma",
    "gfx942": "v_mfma",
}
# A read with acquire at system scope, a release at system scope, in each assembly.
_ACQUIRE = {
    "nvidia": r"ld\.global\.(sys\.acquire|acquire\.sys)",
    "gfx90a": r"global_load_dword .*\bglc\b",
    "gfx942": r"global_load_dword .*\bsc0 sc1\b",
}
_RELEASE = {
    "nvidia": r"atom\.global\.(sys\.release|release\.sys)\.exch",
    "gfx90a": r"buffer_wbl2",
    "gfx942": r"buffer_wbl2 sc0 sc1",
}


def complaints(
    text: str, kernel: str, target: Target, dtype: str, precision: str, descriptors: bool
) -> tuple[dict[str, int], list[str]]:
    """Return instruction counts and what is missing."""
    key = "nvidia" if target.nvidia else target.arch
    wrong = []
    matrix = _MATRIX[target.arch]
    counts = {name: len(re.findall(re.escape(name), text)) for name in (matrix, *_COPIES[target.nvidia])}
    multiplies = kernel != "flags"
    on_units = dtype != "fp32" or precision == "tf32" or not target.nvidia
    if multiplies and on_units and not counts[matrix]:
        wrong.append(f"no {matrix}")
    if multiplies and descriptors and not counts["cp.async.bulk.tensor"]:
        wrong.append("no bulk tensor copy")
    if multiplies and target.nvidia and not descriptors and not counts["cp.async."]:
        wrong.append("no asynchronous copy: the loop over K is not pipelined")
    is_flag_writer = kernel == "flags" and "wait_flag" not in text
    if kernel == "wait" or (kernel == "flags" and not is_flag_writer):
        if not spin_loop(text, _ACQUIRE[key]):
            wrong.append("no spin loop that reads with acquire at system scope")
        if not target.nvidia and not re.search(r"buffer_inv", text):
            wrong.append("no invalidation after the acquire")
        if descriptors and "fence.proxy.async.global" not in text:
            wrong.append("no proxy fence between the acquire and the bulk copies")
    if kernel == "signal" or is_flag_writer:
        if not re.search(_RELEASE[key], text):
            wrong.append("no release at system scope")
        if not target.nvidia and not re.search(r"buffer_wbl2[^\n]*\n(?:[^\n]*\n){0,12}?[^\n]*global_atomic_swap", text):
            wrong.append("no write-back before the atomic exchange")
    if kernel == "signal" and target.nvidia and not re.search(r"atom\.global\.(sys\.acq_rel|acq_rel\.sys)\.add", text):
        wrong.append("no acquire-release count of finished tiles at system scope")
    return counts, wrong


_COPIES = {True: ("cp.async.bulk.tensor", "cp.async."), False: ("global_load", "buffer_load")}


def spin_loop(text: str, read: str) -> bool:
    """Say whether a read that matches stands inside a loop: between a label and a branch back to it."""
    lines = text.splitlines()
    labels = {
        match.group(1): index
        for index, line in enumerate(lines)
        if (match := re.match(r"\s*(\$?[.\w$]+):", line)) and not line.strip().startswith("//")
    }
    reads = [index for index, line in enumerate(lines) if re.search(read, line)]
    for index, line in enumerate(lines):
        match = re.search(r"\b(?:bra(?:\.uni)?|s_cbranch_\w+|s_branch)\s+(\$?[.\w$]+)", line)
        if match and labels.get(match.group(1), index) < index:
            if any(labels[match.group(1)] < position < index for position in reads):
                return True
    return False
