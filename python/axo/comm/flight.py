"""The flight recorder: where a process writes the last operations of its communicators, and what the files say.

With AXO_FLIGHT_DIR set, a rank writes its file there when an operation fails and on SIGUSR1
(``csrc/base/flight_recorder.h`` says what is in it). ``axo info --flight FILES`` puts those of several ranks together:
where a job stands, and who was late where.

A file is JSON lines, one operation each. Ranks of one communicator share its ``id``; a collective is matched over ranks
by its sequence number. Ranks on one host share a clock, by which their times are compared. Times of several hosts are
compared by wall-clock time, so they are only as exact as these clocks.

What it does not do: messages (send, recv) are shown when they are pending, never matched.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from types import ModuleType, NoneType
from typing import TYPE_CHECKING, Any

from axo import files

if TYPE_CHECKING:
    from rich.console import Console

_TIMES = ("issued", "written", "epoch")
_FIELDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("communicator", "id", "host", "op", "dtype", "state"), (str,)),
    **dict.fromkeys(("rank", "size", "pid", "sequence", "count"), (int,)),
    **dict.fromkeys(_TIMES, (int, float)),
    # may be null, or not there
    **dict.fromkeys(("world_rank", "root", "tag"), (int, NoneType)),
    "failure": (str, NoneType),
    "ended": (int, float, NoneType),
}
_MOST = 64 << 20  # bytes of a file: of some hundred communicators
_MOST_RANKS = 1 << 20  # of one communicator; each of those that have no record is listed
_MOST_SECONDS = 1e12
_MOST_PAIRS = 1 << 24  # collectives times ranks of one communicator: a rank remembers 256
_SHOWN = 64  # ranks, communicators, failures: of each at most so many
_MESSAGES = ("send", "recv")


def _core() -> ModuleType:
    from axo.comm.extension import _C  # reading files needs neither torch nor the extension

    return _C


def folder() -> Path | None:
    """The folder that AXO_FLIGHT_DIR names; None: it is not set.

    Raises:
        ValueError: It names no folder.
    """
    named = os.environ.get("AXO_FLIGHT_DIR", "")
    if named and not os.path.isdir(named):
        raise ValueError(f"AXO_FLIGHT_DIR={named!r} is not a folder; make it first, or unset the variable")
    return Path(named) if named else None


def arm() -> None:
    """Do as AXO_FLIGHT_DIR says.

    Called before any rank waits for another: then a rank whose folder is not there says so, and its peers do not only
    learn that they have lost it.

    Raises:
        ValueError: It names no folder.
    """
    path = folder()
    if path is None:
        return
    # A program that has a handler of its own for the signal keeps it.
    taken = signal.getsignal(signal.SIGUSR1) not in (signal.SIG_DFL, None)
    _core().set_flight_directory(str(path.resolve()), 0 if taken else int(signal.SIGUSR1))


def lines() -> list[str]:
    """The last operations of every living communicator of this process, one JSON object a line."""
    return _core().flight_lines().splitlines()


def write() -> str:
    """Write this process's file now; its path, or "" when AXO_FLIGHT_DIR is not set."""
    return _core().write_flight_file()


@dataclass
class Line:
    """One communicator: what each of its ranks has recorded of its collectives, by sequence number."""

    name: str
    size: int
    ranks: dict[int, dict[int, dict[str, Any]]] = field(default_factory=dict)
    messages: list[dict[str, Any]] = field(default_factory=list)
    failures: dict[int, str] = field(default_factory=dict)

    def absent(self) -> Iterator[int]:
        """Ranks without a file."""
        return (rank for rank in range(self.size) if rank not in self.ranks)

    def called(self, rank: int) -> str:
        """The rank, with its number in the world where that is known."""
        operations = self.ranks.get(rank)
        world = next(iter(operations.values()))["world_rank"] if operations else None
        return str(rank) if world is None or world == rank else f"{rank} (world {world})"


@dataclass(frozen=True)
class Skew:
    """One collective that ranks came to at different times.

    Attributes:
        seconds: From the first rank's arrival to the last one's; None while somebody is missing.
        last: The rank that came last, if all came. missing: Ranks that have not come. forgotten: Those whose file goes
            back less far.
    """

    line: Line
    sequence: int
    op: str
    state: str
    seconds: float | None
    last: int | None
    missing: tuple[int, ...]
    forgotten: tuple[int, ...]
    waited: float  # seconds that the first rank has waited when its file was written or the operation ended

    @property
    def label(self) -> tuple[str, str]:
        """Communicator and operation, for a table."""
        return f"{self.line.name} of {self.line.size}", f"{self.op} #{self.sequence}"

    @property
    def unknown(self) -> Iterator[int]:
        """Ranks of which nothing is known here, which may be as many as a file claims."""
        return chain(self.forgotten, self.line.absent())


def read(paths: Iterable[Path]) -> list[Line]:
    """The communicators that the files tell of.

    Raises:
        ValueError: A file that cannot be read, or is no flight file; names it and the line.
    """
    lines: dict[tuple[str, str, int], Line] = {}
    paths = list(paths)
    for path in paths:
        for record in _records(path):
            key = (record["communicator"], record["id"], record["size"])
            line = lines.setdefault(key, Line(record["communicator"], record["size"]))
            if record["failure"]:
                line.failures[record["rank"]] = record["failure"]
            operations = line.ranks.setdefault(record["rank"], {})
            if record["op"] in _MESSAGES:
                line.messages.append(record)
            else:
                operations[record["sequence"]] = record
    for line in lines.values():
        sequences = len({sequence for operations in line.ranks.values() for sequence in operations})
        if sequences * len(line.ranks) > _MOST_PAIRS:
            raise ValueError(
                f"flight file {paths[0]}: {sequences} collectives of {len(line.ranks)} ranks of one communicator cannot"
                " be; give files that Axo has written"
            )
    return sorted(lines.values(), key=lambda line: (-line.size, line.name))


def _records(path: Path) -> Iterator[dict[str, Any]]:
    try:
        text = files.read_text(path, _MOST)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"flight file {path}: cannot be read ({why}); give files named axo-flight-PID.jsonl") from None
    if not text.strip():
        raise ValueError(f"flight file {path}: is empty; a rank writes its file on failure or on SIGUSR1")
    for number, row in enumerate(text.splitlines(), 1):
        where = f"flight file {path}, line {number}"
        try:
            record = files.parse_json(row)
        except ValueError as error:
            raise ValueError(f"{where}: is not JSON ({error}); give files named axo-flight-PID.jsonl") from None
        if not isinstance(record, dict):
            raise ValueError(f"{where}: is not a JSON object; give files named axo-flight-PID.jsonl")
        for name, kinds in _FIELDS.items():
            value = record.setdefault(name, None)
            if isinstance(value, bool) or not isinstance(value, kinds):
                wrong = "cannot be" if NoneType in kinds else f"is not {kinds[-1].__name__}"
                raise ValueError(f"{where}: {name}={files.shown(value)} {wrong}; give files that Axo has written")
        if not 0 <= record["rank"] < record["size"] <= _MOST_RANKS:
            raise ValueError(f"{where}: rank {files.shown(record['rank'])} of {files.shown(record['size'])} cannot be")
        if not all(abs(record[name] or 0) < _MOST_SECONDS for name in (*_TIMES, "ended")):
            raise ValueError(f"{where}: a time of it is not one; give files that Axo has written")
        yield record


def skews(line: Line) -> list[Skew]:
    """The collectives of one communicator, in order, that at least one rank still remembers."""
    sequences = sorted({sequence for operations in line.ranks.values() for sequence in operations})
    first = {rank: min(operations, default=0) for rank, operations in line.ranks.items()}
    return [_skew(line, sequence, first) for sequence in sequences]


def _skew(line: Line, sequence: int, first_known: dict[int, int]) -> Skew:
    records = {rank: operations[sequence] for rank, operations in line.ranks.items() if sequence in operations}
    without = sorted(line.ranks.keys() - records.keys())
    one_host = len({record["host"] for record in records.values()}) == 1
    times = {rank: record["issued"] + (0.0 if one_host else record["epoch"]) for rank, record in records.items()}
    first, last = min(times, key=times.__getitem__), max(times, key=times.__getitem__)
    states = {record["state"] for record in records.values()}
    earliest, complete = records[first], len(records) == line.size
    ended = earliest["written"] if earliest["ended"] is None else earliest["ended"]
    return Skew(
        line,
        sequence,
        op=earliest["op"],
        state=next((name for name in ("failed", "running", "queued") if name in states), "done"),
        seconds=times[last] - times[first] if complete else None,
        last=last if complete else None,
        missing=tuple(rank for rank in without if sequence >= first_known[rank]),
        forgotten=tuple(rank for rank in without if sequence < first_known[rank]),
        waited=ended - earliest["issued"],
    )


def stuck(lines: Iterable[Line]) -> list[Skew]:
    """For each communicator its first collective that has not ended well everywhere, or that a rank has not come to."""
    first = (next((each for each in skews(line) if each.state != "done" or each.missing), None) for line in lines)
    return [each for each in first if each is not None]


def latest(lines: Iterable[Line]) -> list[Skew]:
    """The ten collectives that all ranks came to, and whose first and last rank were farthest apart."""
    complete = [each for line in lines for each in skews(line) if each.seconds is not None]
    return sorted(complete, key=lambda each: -(each.seconds or 0.0))[:10]


def _listed(items: Iterable[str]) -> str:
    shown = list(islice(items, _SHOWN + 1))
    return ", ".join(shown[:_SHOWN] + ["..."] * (len(shown) > _SHOWN)) or "-"


def render(paths: list[Path], console: Console) -> None:
    """Print what the files say as tables of rich."""
    from rich.table import Table

    def table(title: str, columns: dict[str, bool], rows: Iterable[tuple[str, ...]]) -> None:
        """``columns``: whether each may wrap."""
        shown = Table(title=title, title_justify="left")
        for column, wraps in columns.items():
            shown.add_column(column, no_wrap=not wraps)
        for row in rows:
            shown.add_row(*row)
        console.print(shown)

    lines = read(paths)
    if waiting := stuck(lines)[:_SHOWN]:
        columns = ("communicator", "operation", "state", "waited", "not arrived", "no record")
        rows = []
        for each in waiting:
            missing = _listed(each.line.called(rank) for rank in each.missing)
            rows.append((*each.label, each.state, f"{each.waited:.3f} s", missing, _listed(map(str, each.unknown))))
        table("not complete", {column: column != "operation" for column in columns}, rows)
    for line in lines[:_SHOWN]:
        told = [f"rank {line.called(rank)}: {why}" for rank, why in sorted(line.failures.items())[:_SHOWN]]
        for message in [message for message in line.messages if message["state"] != "done"][:10]:
            peer = "any rank" if message["root"] is None else f"rank {message['root']}"
            what = f"{message['op']} with {peer}, tag {message['tag']}, is {message['state']}"
            told.append(f"rank {line.called(message['rank'])}: {what}")
        for text in told:
            console.print(f"{line.name}, {text}", markup=False, highlight=False)
    last = [
        (*each.label, each.line.called(each.last or 0), f"{(each.seconds or 0.0) * 1e3:.3f} ms")
        for each in latest(lines)
    ]
    unwrapped = dict.fromkeys(("communicator", "operation", "last rank", "late by"), False)
    table("last to come, by how long after the first", unwrapped, last)
    total = sum(len(operations) for line in lines for operations in line.ranks.values())
    console.print(f"{len(paths)} files, {len(lines)} communicators, {total} collectives", highlight=False)
