"""A rank's part of ``--elastic``: copies of its state in memory, each begun, completed and told of with all ranks.

Not here: where they lie and what the launcher makes of them (``elastic``); what a copy holds (whoever trains).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from axo.checkpoint import Save
from axo.checkpoint.mirrors import Mirrors
from axo.checkpoint.ranks import checkpoint_group, pending, share
from axo.comm.connect import Communicators
from axo.errors import CheckpointError
from axo.train.config import TrainConfig
from axo.train.elastic import StateCopies, requested_run


class RankCopies:
    """The copies of one run on this rank. All ranks call each method.

    Args:
        config: The run, as these ranks have it.
        state: Where copies go.
        comms: What ``axo.connect`` returned.
        save: Begins a copy in a folder, with these mirrors.
        asked_to_stop: Whether this rank has had a signal that ends the run.

    Attributes:
        resizes: The ranks end here, as the run goes on on others.
        next: Which run that is; rank 0 alone knows it.
    """

    def __init__(
        self,
        config: TrainConfig,
        state: StateCopies,
        comms: Communicators,
        save: Callable[[Path, Mirrors | None], Save],
        asked_to_stop: Callable[[], bool],
    ) -> None:
        self._config, self._state, self._save, self._asked_to_stop = config, state, save, asked_to_stop
        self._group, self._first = checkpoint_group(comms), comms.everyone.rank == 0
        self._mirrors = None if config.hosts is None else Mirrors(self._group)
        self._under_way: Save | None = None
        self._from_copy = self._fail = False  # the latter: and that has been told
        self._start = 0
        self.resizes = False
        self.next: TrainConfig | None = None

    def complete(self, asked: str | Path | None) -> None:
        """Let this host have all of ``asked``, from which the run goes on, where that is a copy."""
        self._from_copy = asked is not None and Path(asked).parent == Path(self._state.folder)
        if self._from_copy and self._mirrors is not None:
            self._mirrors.complete(Path(str(asked)))

    def loaded(self, done: int) -> None:
        """The run's state after ``done`` steps is there; the first copy is begun where it was not one's."""
        self._state.mark("move")
        self._start = done
        if not self._from_copy:
            self.begin()

    def first_step(self, done: int) -> dict[str, Any] | None:
        """After ``done`` steps: if that was the first of ranks that follow others, the line of the log that says so."""
        if self._state.noticed is None or done != self._start + 1:
            return None
        self._state.mark("step")
        times = {"noticed": self._state.noticed, "seconds": self._state.seconds}
        return {"kind": self._state.event, "start": self._start} | times

    def settle(self, done: int) -> None:
        """Before ``done`` steps count: the copy that was begun before the last of them is whole.

        So no more than ``copy_every`` of the steps that count are ever lost.
        """
        if done % self._config.copy_every == 1 % self._config.copy_every:
            self.wait()

    def after(self, done: int) -> bool:
        """After ``done`` steps, if it is time: begin a copy. Returns whether these ranks end here.

        Where the run is told to have other ranks, the copy is completed, for these to end.
        """
        if done % self._config.copy_every:
            return False
        if self._first:
            self.next = requested_run(self._config, self._state)
        self.wait()
        requested = share(self._group, self.next is not None)[0]
        self.begin()
        complete = requested and self.wait()
        # A signal that came meanwhile is obeyed by these ranks: their next step is the last one, and is saved.
        self.resizes = complete and not any(share(self._group, self._asked_to_stop()))
        if self.next is not None and not self.resizes:
            if not complete:
                self._tell(f"without a copy the run goes on with {self._config.ranks} ranks")
            self.next = None
        return self.resizes

    def begin(self) -> None:
        """Begin a copy of what the ranks hold now."""
        pending.wait()  # one to disk, whose error ends the run
        self.wait()
        try:
            self._under_way = self._save(Path(self._state.folder), self._mirrors)
            self._under_way.apart = True
        except (ValueError, CheckpointError) as error:
            self._fails(error)

    def wait(self) -> bool:
        """Until the newest copy is complete; whether it is. One that cannot be written leaves the one before it."""
        copy, self._under_way = self._under_way, None
        try:
            return copy is not None and copy.wait() is not None
        except CheckpointError as error:
            self._fails(error)
            return False

    def _fails(self, error: Exception) -> None:
        if not self._fail and self._first:
            self._tell(f"{error}; the copy before it stays, and more steps would be lost")
        self._fail = True

    def _tell(self, words: str) -> None:
        print(f"axo {self._config.owner}: {words}", flush=True)
