"""Everything that waits for a GPU, in one command that ends itself in under eight minutes.

    axo bench gpu --out results                    on a GPU (make gpu)
    python3 setup.py build_ext --inplace; PYTHONPATH=python:. python3 -m bench.gpu --seconds 400 --out results
                                                   the same on a machine without network or pip: torch and triton only;
                                                   the kernels run where the extension could not be built
    python3 -m bench.gpu --smoke --out results     every part at toy sizes on the GPU, in two minutes, in results/smoke
    python3 -m bench.gpu --walk --out results      the same code on stand-ins and the CPU; its times mean nothing
    ... --compiled DIR                             with kernels that bench.tools.stub_driver --cache DIR has compiled

The parts, most certain first: the kernels (``bench.kernels``; they need no extension), the transport
(``bench.device``), offload (``bench.offload``), the layers and a training step (``bench.gpu_step``). Each is a process
of its own with a limit of its own, so that one that hangs or dies leaves the others their time and is reported: in
``verdicts.txt`` with what it was doing, and with all that it said, and its compilers and drivers, in ``log.txt``. Each
leaves JSON lines and ends with its verdicts; ``verdicts.txt`` has all of them. Kernels that hung, or left a dead device
behind, are begun once more while their time lasts, without what they were in the middle of.

The same command again goes on, also where the folder was brought along: a part that has come to its end is not run
again (``--fresh``: it is), and of the kernels only what was left out for lack of time is measured. What stands there of
another device, other versions or other sources of that part, or of a walk, is not gone on with: it goes into
``before.tar``. So eight files come of it, however often it is run: what else lies there goes into that archive too.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .lib import attempts, card, compiled
from .lib.arguments import Parser
from .lib.log import logged
from .lib.page import page
from .lib.table import LEFT_OUT, environment, read_rows, same, under_way

SECONDS = 450.0  # of all parts together
ENDING = 15.0  # the kernels stop beginning anything new so many seconds before their limit
SMOKE_SECONDS = 150.0  # of --smoke: a start of ranks, of which it has five, took 12 s on an H100's machine
LEAST = 10.0  # seconds with which a part is begun: torch's import takes half of them
MOST_FILES = 8
AGAIN = 60.0  # seconds below which nothing is begun once more


@dataclass(frozen=True)
class Part:
    """One bench: its module, its option on stand-ins, and the most of the time that is left when it begins.

    Attributes:
        goes_on: Whether it measures what its file lacks; the others begin anew.
    """

    name: str
    walk: str
    share: float
    goes_on: bool = False


PARTS = (
    Part("kernels", "--dry", 0.6, goes_on=True),
    Part("device", "--standin", 0.6),
    Part("offload", "--walk", 0.2),
    Part("gpu_step", "--walk", 1.0),
)


def main(arguments: list[str] | None = None) -> int:
    """Run the parts; returns how many failed."""
    parser = Parser("axo bench gpu", __doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"))
    parser.add_argument("--seconds", type=float, default=None, help="of everything together")
    parser.add_argument("--walk", action="store_true", help="walk through on stand-ins and a CPU")
    parser.add_argument("--smoke", action="store_true", help="every part at toy sizes on the GPU")
    parser.add_argument("--compiled", type=Path, default=None, help="a folder of kernels that were compiled elsewhere")
    parser.add_argument(
        "--page", type=Path, default=None, help="write docs/gpu.md from what stands in --out; run nothing"
    )
    parser.add_argument("--fresh", action="store_true", help="run parts that have ended before once more")
    options = parser.parse_args(arguments)
    if options.page is not None:
        options.page.write_text(page(options.out), encoding="utf-8")
        return 0
    if options.seconds is None:
        options.seconds = SMOKE_SECONDS if options.smoke else SECONDS
    if options.seconds < 4 * ENDING:
        parser.error(f"--seconds {options.seconds:g} is too short for any result; use at least {4 * ENDING:g}")
    if not (options.walk or torch.cuda.is_available()):
        parser.error("no GPU is visible, so nothing is measured; --walk walks through on stand-ins and the CPU")
    out = options.out / "smoke" if options.smoke else options.out
    out.mkdir(parents=True, exist_ok=True)
    if options.walk and options.smoke:
        parser.error("--smoke is for a GPU, --walk for where there is none; use one of them")
    with logged(out / "log.txt"), tempfile.TemporaryDirectory() as temporary:
        if options.compiled is not None:
            print(compiled.bring(options.compiled, Path(temporary)), flush=True)
        try:
            return measure(out, options.seconds, options.walk, options.fresh, options.smoke)
        finally:
            keep_to_eight(out)


def measure(out: Path, seconds: float, walk: bool, fresh: bool, smoke: bool = False) -> int:
    """Run what has not ended before; returns how many parts failed."""
    if not walk:
        print(card.described(), flush=True)
    started, failed = time.perf_counter(), 0
    stopped: dict[str, str] = {}
    for part in PARTS:
        known = {"walk": walk} | environment(torch.device("cpu" if walk else "cuda"), part.name)
        put_away(part, out, known, fresh)
        code = next((row["ended"] for row in rows_of(part, out) if "ended" in row), None)
        if code is not None:
            print(f"--- {part.name}: has ended before", flush=True)
        else:
            until = time.perf_counter() + part.share * (seconds - (time.perf_counter() - started))
            code, whole = run(part, out, until, [part.walk] if walk else ["--smoke"] if smoke else [], stopped)
            if whole:  # one that was stopped, died or left something out runs again next time
                with (out / f"{part.name}.jsonl").open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"ended": code, "of": known}) + "\n")
        failed += int(code != 0)
        verdicts(out, stopped)  # after each: the rest may cost the machine
    spent = time.perf_counter() - started
    print(f"gpu: {spent:.0f} of {seconds:.0f} s, {failed} of {len(PARTS)} parts failed", flush=True)
    return failed


def run(part: Part, out: Path, until: float, how: list[str], stopped: dict[str, str]) -> tuple[int | None, bool]:
    """Run one bench until its time is over, and once more where it goes on and something new has stopped it.

    What has become of it, where it has no end, goes into ``stopped``.

    Returns:
        How many of its verdicts failed, None where it did not come to its end; and whether it left out nothing.
    """
    command = [sys.executable, "-m", f"{__package__}.{part.name}", "--out", str(out), *how]
    failed, again = setbacks(rows_of(part, out)), False
    while True:
        seconds = until - time.perf_counter()
        if seconds < LEAST:
            stopped[part.name] = "not begun: no time was left"
            print(f"{part.name}: {stopped[part.name]}", flush=True)
            return None, False
        print(f"--- {part.name}: at most {seconds:.0f} s", flush=True)
        limits = ["--seconds", f"{seconds - ENDING:.0f}", *(["--again"] if again else [])] if part.goes_on else []
        became = ""
        try:
            code: int | None = attempts.run_within([*command, *limits], timeout=seconds)
        except subprocess.TimeoutExpired:
            code, became = None, f"stopped after {seconds:.0f} s"
        lines = rows_of(part, out)
        if code is not None and not any("verdict" in line for line in lines):
            code, became = None, f"ended early with {code}"
        stopped.pop(part.name, None)
        if code is None:
            stopped[part.name] = f"{became}, {doing(lines)}"
            print(f"{part.name}: {stopped[part.name]}", flush=True)
        elif code:
            print(f"{part.name}: {code} verdicts failed (the lines above)", flush=True)
        whole = code is not None and not any(line.get(LEFT_OUT) for line in lines)
        before, failed = failed, setbacks(lines)
        again = part.goes_on and not whole and bool(failed - before)  # on the same machine: Triton's cache is there
        if not again or until - time.perf_counter() < AGAIN:
            return code, whole


def rows_of(part: Part, out: Path) -> list[dict[str, Any]]:
    return read_rows(out / f"{part.name}.jsonl")


def setbacks(lines: list[dict[str, Any]]) -> set[str]:
    """What has failed of a part, or was cut off."""
    return {line["failed"] for line in lines if "failed" in line} | under_way(lines).keys()


def doing(lines: list[dict[str, Any]]) -> str:
    """What a part that has no end was in the middle of; of one that does not say, the last line."""
    cut_off = [f"{what}, at {within}" if within else what for what, within in under_way(lines).items()]
    if cut_off:
        return f"in the middle of {cut_off[-1]}"
    return f"after {json.dumps(lines[-1])[:200] if lines else 'nothing'}"


def put_away(part: Part, out: Path, known: dict[str, Any], fresh: bool) -> None:
    """Put into the archive what a part does not go on with: what is of elsewhere, or has neither end nor way on."""
    path, rows = out / f"{part.name}.jsonl", rows_of(part, out)
    end = next((row for row in rows if "ended" in row), None)
    if end is not None:
        stands = same(end["of"], known)
    else:
        machine = {name: value for name, value in known.items() if name != "walk"}
        stands = part.goes_on and bool(rows) and same(rows[0], machine)
    if path.exists() and (fresh or not stands):
        with tarfile.open(out / "before.tar", "a") as archive:
            archive.add(path, f"{time.strftime('%Y%m%d-%H%M%S')}/{path.name}")
        path.unlink()
        print(f"begun anew: {path} is in before.tar now", flush=True)


def keep_to_eight(out: Path) -> None:
    """Put whatever is none of the bench's files into the archive: no more than eight come back from a lent machine."""
    ours = {f"{part.name}.jsonl" for part in PARTS} | {"log.txt", "verdicts.txt", "step_trace.json.gz"}
    others = sorted(path for path in out.iterdir() if path.name not in ours | {"before.tar"} and path.is_file())
    if others:
        with tarfile.open(out / "before.tar", "a") as archive:
            for path in others:
                archive.add(path, f"others/{path.name}")
                path.unlink()
    assert sum(path.is_file() for path in out.iterdir()) <= MOST_FILES


def verdicts(out: Path, stopped: dict[str, str]) -> None:
    """Write the last verdicts of every part that has some, as ``part: verdict``; of others what became of them."""
    lines = []
    for part in PARTS:
        lines += [f"{part.name}: {line['note']}" for line in rows_of(part, out) if "verdict" in line]
        lines += [f"{part.name}: {stopped[part.name]}: False"] if part.name in stopped else []
    (out / "verdicts.txt").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main())
