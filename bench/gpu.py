"""Everything that waits for a GPU, in one command that ends itself in under eight minutes.

    axo bench gpu --out results                    on a GPU (make gpu)
    python3 setup.py build_ext --inplace; PYTHONPATH=python:. python3 -m bench.gpu --seconds 400 --out results
                                                   the same on a machine without network or pip: torch and triton only;
                                                   the kernels run where the extension could not be built
    python3 -m bench.gpu --walk --out results      the same code on stand-ins and the CPU; its times mean nothing

The parts, most certain first: the kernels (``bench.kernels``; they need no extension), the transport
(``bench.device``), offload (``bench.offload``), the layers and a training step (``bench.gpu_step``). Each is a process
of its own with a limit of its own, so that one that hangs or dies leaves the others their time and is reported. Each
leaves JSON lines and ends with its verdicts; ``verdicts.txt`` has all of them. The same command again goes on: a part
that has come to its end is not run again (``--fresh``: it is), and of the kernels only what was left out for lack of
time is measured. What stands there of another device, other versions or sources, or of a walk, is not gone on with: the
old files are renamed to ``*.before``.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .lib.arguments import Parser
from .lib.table import LEFT_OUT, environment, read_rows, same

SECONDS = 450.0  # of all parts together
ENDING = 15.0  # the kernels stop beginning anything new so many seconds before their limit


@dataclass(frozen=True)
class Part:
    """One bench: its module, its option on stand-ins, and the most of the time that is left when it begins."""

    name: str
    walk: str
    share: float


PARTS = (
    Part("kernels", "--dry", 0.6),
    Part("device", "--standin", 0.6),
    Part("offload", "--walk", 0.2),
    Part("gpu_step", "--walk", 1.0),
)


def main(arguments: list[str] | None = None) -> int:
    """Run the parts; returns how many failed."""
    parser = Parser("axo bench gpu", __doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"))
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of everything together")
    parser.add_argument("--walk", action="store_true", help="walk through on stand-ins and a CPU")
    parser.add_argument("--fresh", action="store_true", help="run parts that have ended before once more")
    options = parser.parse_args(arguments)
    if options.seconds < 4 * ENDING:
        parser.error(f"--seconds {options.seconds:g} is too short for any result; use at least {4 * ENDING:g}")
    if not (options.walk or torch.cuda.is_available()):
        parser.error("no GPU is visible, so nothing is measured; --walk walks through on stand-ins and the CPU")
    options.out.mkdir(parents=True, exist_ok=True)
    ended = options.out / "ended.json"
    known = {"walk": options.walk} | environment(torch.device("cpu" if options.walk else "cuda"))
    before: dict[str, Any] = json.loads(ended.read_text()) if ended.exists() else {}
    if options.fresh or (before and not same(before.get("of", {}), known)):
        for path in (ended, *(options.out / f"{part.name}.jsonl" for part in PARTS)):
            if path.exists():
                path.replace(path.with_suffix(".before"))
                print(f"begun anew: {path} is {path.stem}.before now", flush=True)
        before = {}
    done: dict[str, int] = before.get("parts", {})
    ended.write_text(json.dumps({"of": known, "parts": done}))
    started, failed = time.perf_counter(), 0
    for part in PARTS:
        if part.name in done:
            print(f"--- {part.name}: has ended before", flush=True)
            failed += int(done[part.name] != 0)
            continue
        left = options.seconds - (time.perf_counter() - started)
        code, whole = run(part, options.out, part.share * left, options.walk)
        failed += int(code != 0)
        if code is not None and whole:  # one that was stopped, died or left something out runs again next time
            done[part.name] = code
            ended.write_text(json.dumps({"of": known, "parts": done}))
    (options.out / "verdicts.txt").write_text("".join(f"{line}\n" for line in verdicts(options.out)))
    spent = time.perf_counter() - started
    print(f"gpu: {spent:.0f} of {options.seconds:.0f} s, {failed} of {len(PARTS)} parts failed", flush=True)
    return failed


def run(part: Part, out: Path, seconds: float, walk: bool) -> tuple[int | None, bool]:
    """Run one bench within ``seconds``.

    Returns:
        How many of its verdicts failed, None where it did not come to its end; and whether it left out nothing.
    """
    print(f"--- {part.name}: at most {seconds:.0f} s", flush=True)
    command = [sys.executable, "-m", f"{__package__}.{part.name}", "--out", str(out), *([part.walk] if walk else [])]
    if part.name == "kernels":
        command += ["--seconds", f"{seconds - ENDING:.0f}"]
    try:
        code = subprocess.run(command, timeout=seconds).returncode
    except subprocess.TimeoutExpired:
        print(f"{part.name}: stopped after {seconds:.0f} s; what it had measured is in its file", flush=True)
        return None, False
    if code:
        print(f"{part.name}: {code} verdicts failed, or it ended early (the lines above)", flush=True)
    lines = read_rows(out / f"{part.name}.jsonl")
    ended = any("verdict" in line for line in lines)
    return code if ended else None, not any(line.get(LEFT_OUT) for line in lines)


def verdicts(out: Path) -> list[str]:
    """The last verdicts of every part that has written some, as ``part: verdict``."""
    found = []
    for part in PARTS:
        lines = read_rows(out / f"{part.name}.jsonl")
        found += [f"{part.name}: {line['note']}" for line in lines if "verdict" in line]
    return found


if __name__ == "__main__":
    raise SystemExit(main())
