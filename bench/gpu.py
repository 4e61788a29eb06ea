"""Everything that waits for a GPU, in one command of under eight minutes.

    axo bench gpu --out results                    on a GPU (make gpu)
    python3 -m bench.gpu --walk --out results      the same code on stand-ins and the CPU; its times mean nothing

The transport (``bench.device``), then the kernels (``bench.kernels``) in what is left of the time. Each is a process of
its own with a limit of its own, so that one that hangs or dies leaves the other its time and is reported. Both end with
their verdicts, and with lines in ``device.jsonl`` and ``kernels.jsonl``.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

import torch

SECONDS = 450.0  # of all parts together
TRANSPORT = 0.25  # of them: the most that the transport may take
ENDING = 15.0  # the kernels stop beginning anything new so many seconds before their limit


def main(arguments: list[str] | None = None) -> int:
    """Run the parts; returns how many failed."""
    parser = argparse.ArgumentParser(prog="axo bench gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"))
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of everything together")
    parser.add_argument("--walk", action="store_true", help="walk through on stand-ins and a CPU")
    options = parser.parse_args(arguments)
    if options.seconds < 4 * ENDING:
        parser.error(f"--seconds {options.seconds:g} is too short for any result; use at least {4 * ENDING:g}")
    if not (options.walk or torch.cuda.is_available()):
        parser.error("no GPU is visible, so nothing is measured; --walk walks through on stand-ins and the CPU")
    started = time.perf_counter()
    out = ["--out", str(options.out)]
    failed = part("device", [*out, *(["--standin"] if options.walk else [])], TRANSPORT * options.seconds)
    left = options.seconds - (time.perf_counter() - started)
    kernels = [*out, "--seconds", f"{left - ENDING:.0f}", *(["--dry"] if options.walk else [])]
    failed += part("kernels", kernels, left)
    print(
        f"gpu: {time.perf_counter() - started:.0f} of {options.seconds:.0f} s, {failed} of 2 parts failed", flush=True
    )
    return failed


def part(name: str, arguments: list[str], seconds: float) -> int:
    """Run one bench within ``seconds``; 1 when it failed."""
    print(f"--- {name}: at most {seconds:.0f} s", flush=True)
    try:
        done = subprocess.run([sys.executable, "-m", f"{__package__}.{name}", *arguments], timeout=seconds)
    except subprocess.TimeoutExpired:
        print(f"{name}: stopped after {seconds:.0f} s; what it had measured is in its file", flush=True)
        return 1
    if done.returncode:
        print(f"{name}: {done.returncode} verdicts failed, or it ended early (the lines above)", flush=True)
    return int(done.returncode != 0)


if __name__ == "__main__":
    raise SystemExit(main())
