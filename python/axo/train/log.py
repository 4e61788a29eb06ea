"""What people see of a run: its log, a progress bar on a terminal or about ten plain lines elsewhere, and its picture.

The log is JSON lines: one header, one line a step, one summary. Each line is flushed when it is written.

header: the options, versions, grid, hosts of the ranks, device, transport, sizes of model and text, and the peak that
        MFU divides by.
step:   step, loss, lr, grad_norm, seconds, tokens_per_s, memory_gb (1e9 bytes; the most that a rank has held so far,
        mean over ranks), comm_share (time blocked / time, mean over ranks, by axis and in all), model_flops,
        hardware_flops, mfu, hfu (shares of the peak of all ranks; null where it is unknown), worked (seconds of each
        rank) and spread (seconds, by axis; ``axo.train.slow``); with --experts expert_balance (rows of the rank whose
        experts got the most over the mean of ranks, mean over mixtures).
slow:   step, rank, host, times, steps: a rank that was so many times as slow as the others of its stage, in the mean.
recovered, resized: with ``--elastic``, after a rank's death, and on ranks that the run was told to have: start, noticed
        (monotonic clock; when the ranks before had ended), seconds of each part since then.
summary: steps, seconds, tail_loss, fused (how each product with its collective ran that could run as one, or why not).
Units: seconds, tokens a second, flops of the whole step on all ranks. Model flops are those of
``axo.perf.flops.narayanan`` without recomputation, hardware flops with it where the run recomputes.
"""

from __future__ import annotations

import json
import math
import os
import platform
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TextIO

import torch
from litgpt.config import Config
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from axo import files
from axo.checkpoint.folder import whole_file
from axo.files import open_own
from axo.grid import AXES
from axo.perf.flops import narayanan
from axo.train import models
from axo.train.config import LOG_NAME, TrainConfig
from axo.train.loop import Step
from axo.train.slow import SlowRanks, spread
from axo_kernels.device import cpu_model

_MOST = 1 << 30  # bytes of a log
_LINES = 10  # about, of a run that is shown on no terminal
_MUTED, _AXO, _SERIAL, _LIMIT = "#6b7785", "#1668a8", "#f0a03c", "#c43d3d"
# Dense bf16 peak in TFLOP/s by a part of the device's name; a more telling part stands before a shorter one.
_BF16_PEAKS = {
    "H100 PCIe": 756.0, "H100 NVL": 835.0, "GH200": 989.0, "H200": 989.0, "H100": 989.0, "A100": 312.0, "L40S": 362.0,
    "MI300X": 1307.0, "MI250X": 191.5,  # one GCD, which is what a rank sees
}  # fmt: skip


class TrainLog:
    """Writes a run's log to ``config.out``; rank 0 alone holds one.

    Args:
        config: The run.
        model: Its model's configuration.
        tokens: Tokens of its text.
        transport: What moves the bytes.
        hosts: Of each rank.
        start: The first step; above 0 the lines of the steps before it are kept, and another header follows them.
    """

    def __init__(
        self, config: TrainConfig, model: Config, tokens: int, transport: str, hosts: Sequence[str], start: int = 0
    ) -> None:
        self.path = Path(config.out, LOG_NAME)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept = _lines_before(self.path, start)
        if kept:  # until they are on disk once more they stay where they are
            with whole_file(self.path) as unfinished:
                unfinished.write_text("".join(kept), encoding="utf-8")
        self._file = _open(self.path, anew=not kept)
        assert model.padded_vocab_size is not None
        sizes = (config.batch_size, config.seq_len, model.n_layer, model.n_embd, model.padded_vocab_size)
        self._flops = [narayanan(*sizes, recompute=recompute) for recompute in (False, config.recompute)]
        device = torch.cuda.get_device_name(config.device) if config.device.startswith("cuda") else cpu_model()
        peak = config.peak_tflops or peak_tflops(device, config.precision)
        self._peak = None if peak is None else peak * 1e12 * config.ranks  # flops a second of all ranks
        versions = {"python": platform.python_version(), "torch": torch.__version__}
        for name in ("axo", "litgpt", "triton", "numpy"):
            with suppress(PackageNotFoundError):  # its distribution may have another name
                versions[name] = version(name)
        parameters = models.count_parameters(model)
        sizes_of_model = {"parameters": parameters, "layers": model.n_layer, "hidden": model.n_embd}
        header: dict[str, Any] = {"kind": "header", "config": config.as_dict(), "model": sizes_of_model}
        header |= {"tokens": tokens, "versions": versions, "grid": str(config.grid), "pipeline": config.pipeline}
        header |= {"ranks": config.ranks, "transport": transport, "hosts": [*hosts], "device": device}
        self.write(header | {"peak_tflops_a_rank": peak, "start": start})
        self._grid, self._slow = config.grid, SlowRanks(config.grid.world_size, hosts)

    def watch(self, step: Step) -> dict[str, Any] | None:
        """Look at every step, also at those that are not written; write and return a line of a rank that is slow."""
        line = self._slow.take(step.index, step.by_rank[:, 0].tolist())
        if line is not None:
            self.write(line)
        return line

    def step(self, step: Step) -> dict[str, Any]:
        """Write one step; return the line."""
        share = {axis: seconds / step.seconds for axis, seconds in step.blocked.items()}
        mfu, hfu = (None if self._peak is None else flops / (self._peak * step.seconds) for flops in self._flops)
        line = {"kind": "step", "step": step.index, "loss": step.loss, "lr": step.lr, "grad_norm": step.grad_norm}
        line |= {"seconds": step.seconds, "tokens_per_s": step.tokens / step.seconds, "memory_gb": step.memory / 1e9}
        line |= {"comm_share": share | {"all": sum(share.values())}, "model_flops": self._flops[0]}
        line |= {"hardware_flops": self._flops[1], "mfu": mfu, "hfu": hfu}
        line |= {"worked": [round(seconds, 6) for seconds in step.by_rank[:, 0].tolist()]}
        line |= {"spread": spread(self._grid, step.by_rank[:, 1 : 1 + len(AXES)])}
        line |= {} if step.balance is None else {"expert_balance": step.balance}
        self.write(line)
        return line

    def write(self, line: Mapping[str, Any]) -> None:
        """Write any line."""
        try:
            if not self.path.exists():  # moved or removed, with the run's folder or alone
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file.close()
                self._file = _open(self.path, anew=False)
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        except OSError as error:
            error.filename = str(self.path)
            raise

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _open(path: Path, *, anew: bool) -> TextIO:
    """A run's log, at its end; no link to a file elsewhere.

    Raises:
        ValueError: It is one.
    """
    descriptor = open_own(path)
    if anew:
        os.ftruncate(descriptor, 0)
    return os.fdopen(descriptor, "a", encoding="utf-8")


def _lines_before(path: Path, start: int) -> list[str]:
    """The lines of an older log that stay when a run goes on from ``start``: all but of steps from there on."""
    kept = []
    data = files.read_bytes(path, _MOST) if start and path.is_file() else b""
    for line in data.decode("utf-8", "replace").splitlines(keepends=True):
        try:
            entry = files.parse_json(line)
        except ValueError:  # the run was killed while it wrote
            continue
        kind, step = (entry.get("kind"), entry.get("step")) if isinstance(entry, dict) else (None, None)
        lasts = kind in ("header", "recovered", "resized")
        if lasts or (kind in ("step", "slow") and isinstance(step, int | float) and step < start):
            kept.append(line)
    return kept


def peak_tflops(device_name: str, precision: str) -> float | None:
    """Return the dense peak of a device in TFLOP/s, None where it is not known (CPUs, other GPUs, fp32)."""
    peaks = (peak for part, peak in _BF16_PEAKS.items() if part.lower() in device_name.lower())
    return None if precision == "32-true" else next(peaks, None)


class Display(Progress):
    """A context that shows the lines of a log, of a run of that ``title`` with so many ``steps``."""

    def __init__(self, title: str, steps: int) -> None:
        console, figures = Console(), TextColumn("{task.fields[figures]}")
        columns = (TextColumn("[bold]{task.description}"), BarColumn(bar_width=None), MofNCompleteColumn(), figures)
        super().__init__(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal)
        self._title, self._steps = title, steps
        self._first = (steps, 0.0)  # the step that was shown first, and when
        self._task = self.add_task(title, total=steps, figures="")

    def show(self, done: int, line: dict[str, Any]) -> None:
        """Show a step's line; ``done`` steps are over."""
        figures = f"loss {line['loss']:.3f}"
        if "tokens_per_s" in line:
            figures += f" · {line['tokens_per_s']:,.0f} tokens/s · {line['memory_gb']:.2f} GB a rank"
            figures += f" · comm {line['comm_share']['all']:.0%}"
        if line.get("mfu") is not None:
            figures += f" · MFU {line['mfu']:.1%}"
        if "expert_balance" in line:
            figures += f" · busiest experts {line['expert_balance']:.2f} x mean"
        now = time.perf_counter()
        first, since = self._first = min(self._first, (done, now))
        if not self.disable:
            self.update(self._task, completed=done, figures=figures)
        elif done in (1, self._steps) or done * _LINES // self._steps > (done - 1) * _LINES // self._steps:
            if first < done < self._steps:
                figures += f" · {timedelta(seconds=round((now - since) / (done - first) * (self._steps - done)))} left"
            self.console.print(f"{self._title} {done}/{self._steps}: {figures}", highlight=False, soft_wrap=True)


def draw(
    path: Path,
    losses: Sequence[float],
    *,
    title: str,
    subtitle: str,
    vocabulary: int,
    serial: Sequence[float] | None = None,
    limit: float | None = None,
) -> None:
    """Draw the losses (nats, of each step) as a PNG; with a serial run, its curve behind and the difference below.

    ``vocabulary``: tokens, of which ln is what a guess costs. ``limit``: what the difference may be at most.
    """
    from axo.perf.plots import new_figure  # only here: a run needs it once it has trained

    steps = range(1, len(losses) + 1)
    figure, top, *below = new_figure(9, 5 if serial is None else 6.6, (1,) if serial is None else (3, 1))
    _draw_line(top, math.log(vocabulary), _MUTED, f"a guess: ln({vocabulary}) = {math.log(vocabulary):.2f}")
    if serial is not None:
        top.plot(steps, serial, color=_SERIAL, linewidth=5, alpha=0.75, solid_capstyle="round", label="serial")
        differences = [max(1e-9, abs(a - b)) for a, b in zip(losses, serial, strict=True)]  # a logarithm shows no 0
        below[0].plot(steps, differences, color=_AXO, linewidth=1.2)
        below[0].set(yscale="log", ylabel="|loss - serial|")
        if limit is not None:
            _draw_line(below[0], limit, _LIMIT, f"limit {limit:.0e}")
    tail = sum(losses[-10:]) / len(losses[-10:])
    label = f"Axo ({tail:.2f}: mean of the last {len(losses[-10:])} steps)"
    top.plot(steps, losses, color=_AXO, linewidth=1.8, solid_capstyle="round", label=label)
    beside: dict[str, Any] = {"xytext": (6, 0), "textcoords": "offset points", "va": "center", "fontweight": "bold"}
    top.annotate(f"{tail:.2f}", (len(losses), tail), color=_AXO, **beside)
    top.set(ylabel="loss (nats a token)", xlim=(1, max(2, len(losses))))
    top.legend(frameon=False, loc="lower left")
    figure.axes[-1].set_xlabel("step")
    figure.suptitle(title, x=0.01, ha="left", fontsize=15, fontweight="bold")
    top.set_title(subtitle, loc="left", fontsize=10, color=_MUTED)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # a link there is not followed
    figure.savefig(path)


def _draw_line(axes: Any, height: float, color: str, words: str) -> None:
    """A dashed line across, with its words at the right end."""
    axes.axhline(height, color=color, linewidth=1, linestyle=(0, (4, 4)))
    above: dict[str, Any] = {"xytext": (0, 5), "textcoords": "offset points", "ha": "right", "fontsize": 9}
    axes.annotate(words, (1, height), xycoords=("axes fraction", "data"), color=color, **above)
