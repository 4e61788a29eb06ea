"""What rank 0 shows while it trains: a rich progress bar on a terminal, about ten plain lines elsewhere."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_LINES = 10


class Display:
    """A context that shows the lines of a log.

    Args:
        console: Where to.
        title: Names the run.
        steps: Steps it will have.
    """

    def __init__(self, console: Console, title: str, steps: int) -> None:
        self._console, self._title, self._steps = console, title, steps
        self._bar: Progress | None = None
        if console.is_terminal:
            self._bar = Progress(
                TextColumn("[bold]{task.description}"),
                BarColumn(bar_width=None),
                MofNCompleteColumn(),
                TextColumn("{task.fields[figures]}"),
                TimeRemainingColumn(),
                console=console,
            )
            self._task = self._bar.add_task(title, total=steps, figures="")

    def __enter__(self) -> Display:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, done: int, line: dict[str, Any]) -> None:
        """Show a step's line; ``done`` steps are over."""
        figures = f"loss {line['loss']:.3f}"
        if "tokens_per_s" in line:
            figures += f" · {line['tokens_per_s']:,.0f} tokens/s · comm {line['comm_share']['all']:.0%}"
        if line.get("mfu") is not None:
            figures += f" · MFU {line['mfu']:.1%}"
        if self._bar is not None:
            self._bar.update(self._task, completed=done, figures=figures)
        elif done == 1 or done == self._steps or done * _LINES // self._steps > (done - 1) * _LINES // self._steps:
            self._console.print(f"{self._title} {done}/{self._steps}: {figures}", highlight=False, soft_wrap=True)
