"""What do the checksums of a checkpoint cost, and how fast are saving and loading? One process, in turns.

    axo bench checkpoint --mb 256,1024 --rounds 9

Rivals, interleaved in every round: "axo", the same "without checksums", and "dcp", torch's own writer and reader of the
same entries. Actions: "save" to a synced and renamed folder, "load" of files that the system holds in memory (four
times as many rounds: they are quick and uneven), and "load from disk", after it was told to drop them. Times are
medians and the least; `cost` is the median over the rounds of axo's time over that without checksums in the same round,
less one (the goal is below 0.05), and #wrong the elements that differ after a load. Both loads of Axo read the same
files, by two threads.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from .lib.arguments import Parser, numbers
from .lib.table import Table, environment

COLUMNS = {
    "action": "s",
    "rival": "s",
    "mb": "d",
    "rounds": "d",
    "ms": ".1f",
    "least_ms": ".1f",
    "gb_s": ".2f",
    "cost": ".3f",
}
COLUMNS |= {"wrong": "d"}
RIVALS = ("axo", "without checksums", "dcp")


def main(arguments: list[str] | None = None) -> int:
    """Run the bench; returns 1 when a load is wrong."""
    parser = Parser("axo bench checkpoint", __doc__, json=True)
    parser.add_argument("--mb", default="256", help="sizes of the model in MB (1e6 bytes), comma-separated")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--folder", default=None, help="where to write (default: the system's temporary folder)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    table = Table(COLUMNS, options.json, {"bench": "checkpoint", **environment(torch.device("cpu"))})
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for size in numbers("--mb", options.mb):
            _measure(table, Path(folder), size, options.rounds)
    return int(any(row["wrong"] for row in table.rows))


class _Model(nn.Module):
    """``mb`` MB of fp32 in matrices of 16 MB."""

    def __init__(self, mb: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(1000, 4000)) for _ in range(max(1, mb // 16)))


def _measure(table: Table, folder: Path, mb: int, rounds: int) -> None:
    from axo import checkpoint
    from axo.checkpoint import checksum

    model, other = _Model(mb), _Model(mb)
    size = sum(parameter.nbytes for parameter in model.parameters())
    entries = {f"model/{name}": value for name, value in model.state_dict().items()}
    targets = {f"model/{name}": value for name, value in other.state_dict().items()}
    place = {rival: folder / rival.replace(" ", "_") for rival in RIVALS}

    def save_plain() -> None:
        with mock.patch.object(checksum, "update", lambda value, data: 0):
            checkpoint.save(place["without checksums"], model)

    actions: dict[str, dict[str, Callable[[], object]]] = {
        "save": {
            "axo": lambda: checkpoint.save(place["axo"], model),
            "without checksums": save_plain,
            "dcp": lambda: dcp.save(entries, checkpoint_id=place["dcp"], no_dist=True),
        },
        "load": {
            "axo": lambda: checkpoint.load(place["axo"], other),
            "without checksums": lambda: checkpoint.load(place["axo"], other, verify=False),
            "dcp": lambda: dcp.load(targets, checkpoint_id=place["dcp"], no_dist=True),
        },
    }
    actions["load from disk"] = actions["load"]
    for action, calls in actions.items():
        times: dict[str, list[float]] = {rival: [] for rival in RIVALS}
        wrong = dict.fromkeys(RIVALS, 0)
        counted = rounds * 4 if action == "load" else rounds
        for number in range(counted + 1):  # the first is not counted
            for rival in RIVALS[number % 3 :] + RIVALS[: number % 3]:
                if action == "save":
                    shutil.rmtree(place[rival], ignore_errors=True)
                elif action == "load from disk":
                    _drop(place["dcp" if rival == "dcp" else "axo"])
                start = time.perf_counter()
                calls[rival]()
                times[rival].append(time.perf_counter() - start)
                if action != "save":
                    wrong[rival] += _differ(model, other)
        cost = (
            statistics.median(a / b for a, b in zip(times["axo"][1:], times["without checksums"][1:], strict=True)) - 1
        )
        for rival in RIVALS:
            seconds = statistics.median(times[rival][1:])
            row = {"mb": round(size / 1e6), "rounds": counted, "ms": 1e3 * seconds, "gb_s": size / seconds / 1e9}
            cost_of = cost if rival == "axo" else None
            table.add(
                action=action,
                rival=rival,
                **row,
                least_ms=1e3 * min(times[rival][1:]),
                cost=cost_of,
                wrong=wrong[rival],
            )


def _drop(folder: Path) -> None:
    """Have the system forget the files' contents."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def _differ(model: nn.Module, other: nn.Module) -> int:
    """Elements that differ; ``other`` is cleared for the next load."""
    count = sum(int((a != b).sum()) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    return count


if __name__ == "__main__":
    raise SystemExit(main())
