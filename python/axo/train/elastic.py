"""``axo train --elastic MIN:MAX``: a run has fewer ranks when one dies, and as many as it is told, each time on another
grid.

    all ranks     every ``copy_every`` steps: what a checkpoint holds, into a folder of this host's memory (tmpfs)
    a rank dies   the launcher sees it and ends the others
    OUT/ranks     a number that somebody writes there: rank 0 reads it with the next copy, after which all ranks end
    the launcher  takes the most ranks up to that number (of dead ones: one less) on which the run fits, forks them
    new ranks     connect, load the newest copy onto their grid (``axo.checkpoint``), and go on

The launcher owns the folder, so it outlives every rank; when the launcher has been killed, the next one removes it. A
death costs at most ``copy_every`` steps: a copy is written while the next step runs, which counts once it is whole. A
number that is told costs none. Batch, order of the data and schedule are the run's,
whatever the grid: the losses are those of a run that nothing happened to.

With ``--hosts`` each host has a launcher and a folder of its own, in which copies of another host's shards lie, too
(``axo.checkpoint.mirrors``); the launchers agree on what follows (``launchers``), by ``decide``.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import math
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from axo import files
from axo.checkpoint import folder as folders
from axo.checkpoint.folder import complete, latest, number_of, run_of
from axo.checkpoint.mirrors import files_of
from axo.grid import AXES, Grid
from axo.launch import Interrupted, Part, RankFailed, Termination, handled, own_folder
from axo.train.check import check_grid
from axo.train.config import CHECKPOINTS, RANKS_NAME, TrainConfig
from axo.train.launchers import Launchers, Said, places_of

OnRanks = Callable[[int], TrainConfig]
_MEMORY = "/dev/shm"
_MOST_REQUEST = 64  # bytes


@dataclass
class StateCopies:
    """Where a run's copies lie, and how it came to go on from one.

    Attributes:
        folder: On tmpfs.
        original: The run as it was begun, on MAX ranks.
        on_ranks: Gives it on so many ranks, or raises ValueError: ``nearest``, or the planner.
        event: Why its ranks were started: "" at first; "recovered", "resized" as in the log.
        noticed: When the ranks before these had ended, by the monotonic clock; None: there were none.
        seconds: What has passed since then, in parts.
        shortages: Deaths while the system killed processes as memory was short.
        signals: Those that have come, for an end of the run.
        old_request: When OUT/ranks, where it was there before the run, was written (ns).
        complaint: What was told of an OUT/ranks that cannot be removed.
        run: The run's identity, where its folder may have been lost with a host; None: its folder has it.
    """

    folder: str
    original: TrainConfig
    on_ranks: OnRanks
    event: str = ""
    noticed: float | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    shortages: int = 0
    signals: list[int] = field(default_factory=list)
    old_request: int | None = None
    complaint: str = ""
    run: str | None = None
    _killed: int = field(default_factory=lambda: _killed_for_memory())

    def begin(self, event: str) -> None:
        """The ranks have ended; those that follow come to go on."""
        self.event, self.noticed, self.seconds = event, time.monotonic(), {}

    def mark(self, part: str) -> None:
        """``part`` is what has passed since the part before."""
        if self.noticed is not None:
            self.seconds[part] = time.monotonic() - self.noticed - sum(self.seconds.values())

    def newest(self) -> Path | None:
        """The newest copy, or a checkpoint of the run that is newer."""
        copy = latest(self.folder)
        if copy is None or not self.original.saves:
            return copy
        saved = latest(Path(self.original.out, CHECKPOINTS), run=run_of(copy))
        return copy if saved is None or number_of(saved) <= number_of(copy) else saved

    def keep(self) -> str:
        """Make the newest copy a checkpoint of the run, where that saves and has none so new. Says so; "": it is none.

        The ranks have ended.
        """
        copy = self.newest()
        marker = None if copy is None or copy.parent != Path(self.folder) else folders.read_marker(copy)
        if copy is None or marker is None or marker.metadata is None or not self.original.saves:
            return ""
        if not all(files_of(copy).values()):
            return f"the newest copy, of step {marker.step}, is not whole on this host"
        final = Path(self.original.out, CHECKPOINTS, folders.name_of(marker.step)).absolute()
        try:
            part = folders.UnfinishedCheckpoint(final, marker.run)
            try:
                ignored = shutil.ignore_patterns(folders.MARKER)
                shutil.copytree(copy, part.folder, ignore=ignored, dirs_exist_ok=True)
                os.sync()
                part.commit(marker.step, marker.metadata)
            finally:
                part.close()
            folders.prune(final, self.original.keep, marker.run)
        except (OSError, ValueError) as error:
            return f"the newest copy, of step {marker.step}, cannot be kept ({error})"
        return f"the newest copy is kept as {final}, of step {marker.step}"

    def short_of_memory(self, error: RankFailed) -> bool:
        """Whether a rank was killed, and the system has killed since the last look as memory was short."""
        before, self._killed = self._killed, _killed_for_memory()
        short = error.signal == signal.SIGKILL and self._killed > before
        self.shortages += short
        return short


def check(config: TrainConfig, on_ranks: OnRanks, copy: int) -> None:
    """Check what ``--elastic`` asks for; ``copy``: bytes of the run's state.

    Raises:
        ValueError: It is no MIN:MAX, MAX is not the ranks of the grid, no grid of fewer ranks fits, or this host's
            memory has no room for the copies.
    """
    (least, most), asked = _bounds(config), f"{config.owner}: elastic={config.elastic}"
    if most != config.ranks:
        raise ValueError(f"{asked}: grid {config.shown} has {config.ranks} ranks, not {most}")
    if config.hosts is not None and most % (hosts := len(places_of(config.hosts))):
        raise ValueError(f"{asked}: {most} ranks do not divide over {hosts} hosts")
    if least < most and isinstance(smaller := _fitting(config, on_ranks, most - 1), str):
        raise ValueError(
            f"{asked}: no grid of {least} to {most - 1} ranks fits ({smaller}); use a smaller"
            " MIN, or another batch-size"
        )
    try:
        free = shutil.disk_usage(_MEMORY).free
    except OSError as error:
        raise ValueError(f"{asked} keeps copies in {_MEMORY}: {error.strerror}") from None
    needed = 2 * copy  # one stays until the next is complete
    if needed > free:
        raise ValueError(
            f"{asked}: two copies of the run's state take {needed / 2**30:,.1f} GiB, and"
            f" {_MEMORY} has {free / 2**30:,.1f} GiB free; make it larger (mount -o remount,size=...), or use"
            " checkpoints and --resume"
        )


@contextlib.contextmanager
def copies_of_a_run(config: TrainConfig, on_ranks: OnRanks) -> Iterator[StateCopies]:
    """Room for the copies of one run, in this host's memory; where a run that saves is ended, the newest is kept.

    Not where an error of the run's own ends it, such as a loss that is none: the copy may have it, too.

    Raises:
        Interrupted: A signal came while there were no ranks.
    """
    signals: list[int] = []
    keeps = False

    def end(number: int, frame: Any) -> None:
        if keeps:
            os.write(2, b"\naxo: the newest copy is being kept\n")
            return
        signals.append(number)  # what is raised while a destructor runs is lost
        raise Interrupted(number)

    # On all hosts of a run the folder has one name.
    name = "" if config.hosts is None else hashlib.sha256(config.hosts.encode()).hexdigest()[:16]
    with own_folder(_MEMORY, name) as folder, handled(end, Termination.signals() if config.saves else ()):
        copies = StateCopies(folder, config, on_ranks, signals=signals)
        with contextlib.suppress(OSError):
            copies.old_request = Path(config.out, RANKS_NAME).lstat().st_mtime_ns
        try:
            yield copies
        except BaseException as error:
            keeps = config.saves and (not isinstance(error, RankFailed) or error.lost or error.signal != 0)
            kept = copies.keep() if keeps else ""
            if isinstance(error, Interrupted):
                error.lost = kept or error.lost
            elif kept:
                print(f"axo {config.owner}: {kept}", flush=True)
            raise


def run(config: TrainConfig, on_ranks: OnRanks, start: Callable[[Launches, StateCopies], int]) -> None:
    """Start a run's ranks, and again as long as it goes on.

    Args:
        config, on_ranks: The run, and as it is on other ranks.
        start: Starts this host's ranks and waits for them; returns how many others were asked for, 0: none.

    Raises:
        RankFailed, Interrupted: It ends by that.
    """
    launchers = None if config.hosts is None else Launchers(config.hosts)
    with copies_of_a_run(config, on_ranks) as copies, contextlib.ExitStack() as end:
        gc.freeze()  # each launch looks for garbage first: through all that was imported, that takes half a second
        end.callback(gc.unfreeze)
        launches = Launches(copies, launchers)
        while launches.go_on():
            try:
                launches.have_ended(start(launches, copies))
            except RankFailed as error:
                launches.have_failed(error)


class Launches:
    """The launches of a run, one after another: which ranks are this host's, and how it goes on when they have ended.

    Args:
        copies: The run's.
        launchers: Of all its hosts; None: this host is the only one.

    Attributes:
        config: The run as it goes on. ranks: How many of its ranks are this host's.
        part: Which ones; None: all.
    """

    def __init__(self, copies: StateCopies, launchers: Launchers | None) -> None:
        self._copies, self._launchers, self._own = copies, launchers, launchers.own if launchers else 0
        self._hosts = [address for address, _ in launchers.places] if launchers else [""]
        self.config, self.ranks, self.part = copies.original, 0, None if launchers is None else Part(0, 0, "", 0)
        self._most = copies.original.ranks // len(self._hosts)
        self._error: RankFailed | None = None
        options = hashlib.sha256(str(copies.original.as_dict()).encode()).hexdigest()
        self._said: Said = {"options": options, "ran": False, "hosts": []}
        self._say(self._most)

    def _say(self, ranks: int, **how: Any) -> None:
        """What the others are to hear: how many ranks this host can have now, and how those before have ended."""
        self._said |= {"ranks": ranks, "why": "", "failed": "", "late": "", "asked": 0, "done": False} | how

    def have_ended(self, asked: int) -> None:
        """This host's ranks have ended well; ``asked``: ranks that are wanted, as rank 0 was told; 0: it was not."""
        self._error = None
        done = not asked and (self.part is None or self.part.first == 0)
        self._say(self.ranks, asked=asked, done=done)
        if not done:
            self._copies.begin("resized")

    def have_failed(self, error: RankFailed) -> None:
        """They have ended by a death, an error of their own, or as those of another host have.

        Raises:
            RankFailed: Nothing but ``error`` is to be said.
        """
        late = self._launchers is not None and (error.consequence or ": Timeout: " in str(error))
        died, why, failed = error.lost and not late, str(error), "" if error.lost or late else str(error)
        if self._launchers is None and not died:
            raise error
        self._copies.begin("recovered")
        if died and self._copies.short_of_memory(error):
            why += "; memory was short, and the system has killed a process"
            if self._copies.shortages > 1:
                failed = self._ends(why, "that was so before, and fewer ranks hold more each")
        self._error = error
        self._say(self.ranks - died, why=why if died else "", failed=failed, late=str(error) if late else "")

    def _ends(self, why: str, reason: str) -> str:
        return f"{why}; elastic={self._copies.original.elastic} ends here: {reason}"

    def go_on(self) -> bool:
        """Agree with the other hosts; whether the run goes on. Waits while this host has no ranks in it.

        Raises:
            RankFailed: It ends with an error of some host.
            Interrupted: A signal came as the ranks ended.
        """
        copies = self._copies
        while True:
            markers = {path: folders.read_marker(path) for path in complete(copies.folder)}
            own = {path.name: [each.run, each.metadata, files_of(path)] for path, each in markers.items() if each}
            said = self._said | {"copies": own, "signal": copies.signals[0] if copies.signals else 0}
            said["place"] = self._place()
            plan = self._decide({0: said}) if self._launchers is None else self._launchers.agree(said, self._decide)
            if plan["failed"]:
                if self._error is not None and str(self._error) == plan["failed"]:
                    raise self._error
                rank = -1 if self._error is None else self._error.rank
                raise RankFailed(plan["failed"], rank=rank, user_error=not plan["lost"], lost=plan["lost"])
            if plan["done"]:
                return False
            if copies.signals:
                raise Interrupted(copies.signals[0])
            if str(self._own) in plan["hosts"]:
                break
            self._say(self._most)
            print(f"axo {copies.original.owner}: waits, as the run has no rank for this host", flush=True)
        hosts = {int(host): ranks for host, ranks in plan["hosts"].items()}
        first, world = sum(ranks for host, ranks in hosts.items() if host < self._own), sum(hosts.values())
        self.ranks, self.config = hosts[self._own], copies.on_ranks(world) if plan["event"] else copies.original
        self.part = None if self._launchers is None else Part(first, world, *plan["place"])
        if plan["resume"]:
            self.config = replace(self.config, resume=plan["resume"], overwrite=False)
        if plan["event"] and copies.noticed is None:
            copies.begin(plan["event"])
        copies.event, copies.run = plan["event"], plan["run"]
        self._said |= {"ran": True, "hosts": sorted(hosts)}
        if plan["event"] and first == 0:
            shown, owner = self.config.shown, copies.original.owner
            print(f"axo {owner}: {plan['why']}; goes on with {world} ranks on grid {shown}", flush=True)
        return True

    def _place(self) -> tuple[str, int] | None:
        """Where ranks meet if this host has rank 0."""
        return None if self._launchers is None else self._launchers.meeting_place()

    def _decide(self, said: dict[int, Said]) -> Said:
        """What all hosts do, from what those that are there have said."""
        original, ran = self._copies.original, {host for each in said.values() for host in each["hosts"]}
        lost = [f"host {self._hosts[host]} is lost" for host in sorted(ran - said.keys())]
        why = lost + [each["why"] for each in said.values() if each["why"]]
        asked = max(each["asked"] for each in said.values())
        failed = [each["failed"] for each in said.values() if each["failed"]]
        failed += [each["late"] for each in said.values() if each["late"] and "is lost" not in each["late"] and not why]
        if len({each["options"] for each in said.values()}) > 1:
            names = ", ".join(self._hosts[host] for host in said)
            failed = [f"train: hosts {names} have different options; give each the same"]
        plan: Said = {"failed": failed[0] if failed else "", "lost": bool(why), "hosts": {}}
        plan |= {"done": any(each["done"] for each in said.values()), "place": None}
        signals = [signal.Signals(each["signal"]).name for each in said.values() if each["signal"]]
        if signals and not plan["done"] and self._launchers is not None:
            plan["failed"] = plan["failed"] or f"train: a host was ended by {signals[0]}"
        if plan["failed"] or plan["done"]:
            return plan
        told = "; ".join(why) or (f"{Path(original.out, RANKS_NAME)} said so" if asked else "hosts lost each other")
        room = {host: self._most if asked else each["ranks"] for host, each in said.items()}
        most = min(sum(room.values()), asked or original.ranks)
        run = _fitting(original, self._copies.on_ranks, most) if ran else original
        try:
            resume, identity = self._newest(said)
        except ValueError as error:
            run = str(error)
        if isinstance(run, str):
            return plan | {"failed": self._ends(told, run), "lost": True}
        ranks = {str(host): count for host, count in _shares(run.ranks, room).items() if count}
        plan |= {"event": "" if not ran else "resized" if asked else "recovered", "resume": resume, "run": identity}
        first = int(next(iter(ranks)))
        place = self._place() if first == self._own else said[first]["place"]
        return plan | {"hosts": ranks, "why": told, "place": place}

    def _newest(self, said: dict[int, Said]) -> tuple[str | None, str | None]:
        """The newest copy of which these hosts have all files together, or a newer checkpoint, and whose it is.

        Raises:
            ValueError: There were copies, and of each some files are lost.
        """
        files: dict[tuple[str, str, str], dict[str, int]] = {}  # by name, run and checksum of the metadata
        for each in said.values():
            for name, (run, checksum, sizes) in each["copies"].items():
                together = files.setdefault((name, run, checksum), {})
                together |= {file: max(size, together.get(file, 0)) for file, size in sizes.items()}
        if not files:  # before the first one the run has done nothing
            return None, None
        copy, run = max((copy[:2] for copy, sizes in files.items() if all(sizes.values())), default=("", max(files)[1]))
        if self._copies.original.saves:
            saved = latest(Path(self._copies.original.out, CHECKPOINTS), run=run)
            if saved is not None and (not copy or number_of(saved) > number_of(Path(copy))):
                return str(saved), run
        if not copy:
            raise ValueError(
                "the hosts that are lost had the only copies of some shards (each lies on two, neighbours in --hosts);"
                " with --save-every the run would go on from a checkpoint"
            )
        return str(Path(self._copies.folder, copy)), run


def requested_run(config: TrainConfig, copies: StateCopies) -> TrainConfig | None:
    """The run on as many ranks as OUT/ranks says, which is removed; None: it goes on as it is."""
    path, (least, most) = Path(config.out, RANKS_NAME), _bounds(config)
    try:
        with files.open_regular(path, follow=False) as file:
            status = os.fstat(file.fileno())
            if not status.st_size:  # it is being written
                return None
            path.unlink()  # first: a number that is written from here on is another file
            text = file.read(_MOST_REQUEST + 1).decode(errors="replace").strip()
        if status.st_uid not in (0, os.getuid(), path.parent.stat().st_uid):
            raise ValueError(f"{path} is a file of another user, who owns neither the run nor its folder")
        if status.st_mtime_ns == copies.old_request:
            raise ValueError(f"{path} was there before the run began")
        if len(text) > _MOST_REQUEST:
            raise ValueError(f"{path} is longer than {_MOST_REQUEST} bytes")
        if not text.isdecimal() or not least <= int(text) <= most:
            raise ValueError(f"{path} says {files.shown(text)}, which is no number of ranks from {least} to {most}")
        request = _fitting(copies.original, copies.on_ranks, int(text))
        if isinstance(request, str):
            raise ValueError(f"{path} says {text}, and no grid of {least} to {text} ranks fits ({request})")
        if request.ranks != config.ranks:
            return request
        largest = "" if config.ranks == int(text) else ", the most up to that on which it fits"
        why = f"{path} says {text}, and the run has {config.ranks} ranks already{largest}"
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        why = str(error)
        try:
            path.unlink(missing_ok=True)
        except OSError:  # a folder: told once
            if why == copies.complaint:
                return None
            copies.complaint = why
    print(f"axo {config.owner}: {why}; goes on with {config.ranks} ranks", flush=True)
    return None


def _shares(ranks: int, room: dict[int, int]) -> dict[int, int]:
    """How many of so many ranks each host has: as even as the room of each allows, a lower host first."""
    shares = dict.fromkeys(room, 0)
    for _ in range(ranks):
        shares[min((host for host in room if shares[host] < room[host]), key=shares.__getitem__)] += 1
    return shares


def _bounds(config: TrainConfig) -> tuple[int, int]:
    least, colon, most = (config.elastic or "").partition(":")
    if not (colon and least.isdecimal() and most.isdecimal() and 1 <= int(least) <= int(most)):
        raise ValueError(
            f"{config.owner}: elastic={config.elastic!r} is not MIN:MAX; use two numbers of ranks, such as"
            f" 2:{config.ranks}"
        )
    return int(least), int(most)


def nearest(original: TrainConfig, ranks: int, check: Callable[[TrainConfig], Any] = check_grid) -> TrainConfig:
    """The run on so many ranks, on the grid that is nearest to its own and that it fits on: that ``check`` lets pass.

    Raises:
        ValueError: It fits on none; says why not on the last one.
    """
    problem = ValueError(f"{ranks} ranks do not divide over pipeline={original.pipeline} stages")
    grids = [] if ranks % original.pipeline else Grid.all(ranks // original.pipeline)
    for grid in sorted(grids, key=lambda grid: _distance(original.grid, grid)):
        try:
            check(next_run := replace(original, grid=grid))
            return next_run
        except ValueError as error:
            problem = error
    raise problem


def _fitting(original: TrainConfig, on_ranks: OnRanks, most: int) -> TrainConfig | str:
    """The run on the most ranks, from ``most`` down to MIN, on which it fits; else why it fits on none."""
    least = _bounds(original)[0]
    why = f"{most} ranks are left, and MIN is {least}"
    for ranks in range(most, least - 1, -1):
        try:
            return on_ranks(ranks)
        except ValueError as error:
            why = str(error)
    return why


def _killed_for_memory(root: Path = Path("/")) -> int:
    """How many processes the system has killed so far as memory was short; 0 where it does not say.

    Those of this process's control group (version 2), else of the host.
    """
    places = ["proc/vmstat"]
    with contextlib.suppress(OSError):
        if own := re.search(r"^0::/(.*)$", (root / "proc/self/cgroup").read_text(), re.MULTILINE):
            places.insert(0, f"sys/fs/cgroup/{own[1]}/memory.events")
    for place in places:
        with contextlib.suppress(OSError):
            if count := re.search(r"^oom_kill (\d+)$", (root / place).read_text(), re.MULTILINE):
                return int(count[1])
    return 0


def _distance(one: Grid, other: Grid) -> tuple[float, int, int]:
    """How far two grids are apart; of two as far, the one with fewer ranks along x and y is nearer."""
    apart = sum(abs(math.log(one.size(axis) / other.size(axis))) for axis in AXES)
    return round(apart, 9), other.x * other.y, other.x
