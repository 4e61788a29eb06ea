"""The tuner's choices on disk: one JSON file for each device and set of versions.

Written to a temporary file, synced and renamed, so that a reader sees the old or the new file and never half of one;
two processes that write at once lose at most each other's newest entries, which are then measured again. A file that is
corrupt, foreign or unreadable is a miss, never an error.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import tempfile
from pathlib import Path
from typing import Any

FORMAT = 2  # 1: fused operations without push among the candidates
_MOST = 16 << 20  # characters of a file


def default_folder() -> Path:
    """``AXO_TUNE_CACHE``, else ``axo/tuner`` in the user's cache folder."""
    named = os.environ.get("AXO_TUNE_CACHE")
    if named:
        return Path(named)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "axo" / "tuner"
    except RuntimeError:  # a user without a home, as in some containers
        return Path(tempfile.gettempdir()) / f"axo-{os.getuid()}" / "tuner"


class Cache:
    """Entries of one device and one set of versions, by key."""

    def __init__(self, device: str, versions: dict[str, str], folder: Path | None = None) -> None:
        self.identity = {"format": FORMAT, "device": device, "versions": versions}
        digest = hashlib.sha256(json.dumps(self.identity, sort_keys=True).encode()).hexdigest()[:16]
        self.path = (folder or default_folder()) / f"{digest}.json"
        self._entries: dict[str, dict[str, Any]] | None = None

    def get(self, key: str) -> dict[str, Any] | None:
        """Return the entry, or None."""
        return self.all().get(key)

    def all(self) -> dict[str, dict[str, Any]]:
        """Every entry; not to be changed."""
        if self._entries is None:
            self._entries = self._read()
        return self._entries

    def put(self, entries: dict[str, dict[str, Any]]) -> None:
        """Add entries and write the file; a folder that cannot be written is only a cache that forgets."""
        merged = self._read() | (self._entries or {}) | entries
        self._entries = merged
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor, name = tempfile.mkstemp(dir=self.path.parent, prefix=self.path.name, suffix=".tmp")
        except OSError:
            return
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump(self.identity | {"entries": merged}, file, indent=1, sort_keys=True)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, self.path)
        except OSError:
            Path(name).unlink(missing_ok=True)

    def _read(self) -> dict[str, dict[str, Any]]:
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO has no writer
            with os.fdopen(descriptor, encoding="utf-8") as file:
                text = file.read(_MOST + 1) if stat.S_ISREG(os.fstat(descriptor).st_mode) else ""
            content = json.loads(text) if len(text) <= _MOST else {}
        except (OSError, ValueError, RecursionError):
            return {}
        if not isinstance(content, dict) or any(content.get(name) != value for name, value in self.identity.items()):
            return {}
        entries = content.get("entries")
        if not isinstance(entries, dict):
            return {}
        return {key: entry for key, entry in entries.items() if isinstance(entry, dict)}
