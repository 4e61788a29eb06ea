"""What a long training run of LitGPT's needs beside its loop: an orderly end on SIGTERM or when its time is up, errors
of the data as one message, and where to go on after a rank was lost.

The loop is litgpt's own. Two names that it looks up in its module are put in front of it: ``fit``, which shows the
state to be saved, and ``CycleIterator``, the place between two steps where all ranks end together.

Not here: the agreement itself (guard.py), and who starts lost ranks again (supervisor.py, or torchrun).
"""

from __future__ import annotations

import inspect
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from axo.errors import Error
from axo.integrations.fabric.step_agreement import Guard


class Stopped(Exception):
    """The run ended on request; ``checkpoint`` is what it saved, from which it may go on or not."""

    def __init__(self, checkpoint: Path, step: int, *, resumes: bool = True) -> None:
        then = "go on with --resume auto" if resumes else "adapters only, from which LitGPT does not resume a run"
        super().__init__(f"stopped by SIGTERM after step {step}; saved {checkpoint}; {then}")
        self.checkpoint, self.step = checkpoint, step


class Watch:
    """One run of a training command of litgpt's, on this rank.

    Args:
        module: The command's module, such as ``litgpt.pretrain``.
        guard: What the ranks agree with.
    """

    def __init__(self, module: Any, guard: Guard) -> None:
        self._module, self._guard = module, guard
        self._fabric: Any = None
        self._fit, self._cycle = module.fit, module.CycleIterator

    def __enter__(self) -> Watch:
        watch, stock, inner = self, self._fit, self._cycle
        signature = inspect.signature(stock)

        def fit(*args: Any, **options: Any) -> Any:
            given = signature.bind(*args, **options).arguments
            watch._fabric, train = given["fabric"], given["train"]
            if train.max_time:
                given["train"] = replace(train, max_time=_AgreedLimit(train.max_time, watch._fabric.strategy))
            try:
                return stock(**given)
            except _End:
                raise watch._save(given) from None

        class Batches(inner):  # type: ignore[misc, valid-type]
            def __next__(self) -> Any:
                if watch._guard.stop:
                    raise _End
                try:
                    return super().__next__()
                except (StopIteration, ValueError, Error):
                    raise
                except Exception as error:
                    raise ValueError(f"data: {_in_one_line(error)}") from error

        self._module.fit, self._module.CycleIterator = fit, Batches
        return self

    def __exit__(self, *_: Any) -> None:
        self._module.fit, self._module.CycleIterator = self._fit, self._cycle
        for logger in getattr(self._fabric, "_loggers", ()):
            logger.finalize("finished")  # a forked process ends without flushing what loggers hold

    def _save(self, given: dict[str, Any]) -> Stopped:
        """Save as the loop itself does, in the folder of the step that was done last."""
        fabric, out = given["fabric"], Path(given["out_dir"])
        if "state" not in given:  # finetune_lora
            step = self._guard.step
            path = out / f"step-{step:06d}" / "lit_model.pth.lora"
            self._module.save_lora_checkpoint(fabric, given["model"], path)
            self._save_files(given, path.parent)
            return Stopped(path, step, resumes=False)
        state: dict[str, Any] = given["state"]
        step = int(state["step_count"])
        if hasattr(self._module, "save_checkpoint"):  # pretrain
            path = out / f"step-{step:08d}" / "lit_model.pth"
            if not path.exists():
                self._module.save_checkpoint(fabric, state, given["tokenizer_dir"], path)
            return Stopped(path, step)
        state["iter_num"] -= 1  # finetuning counts before it reads
        path = out / f"step-{step:06d}" / "lit_model.pth"
        path.parent.mkdir(parents=True, exist_ok=True)
        fabric.save(path, state)
        self._save_files(given, path.parent)
        return Stopped(path, step)

    def _save_files(self, given: dict[str, Any], folder: Path) -> None:
        if given["fabric"].global_rank == 0:
            self._module.copy_config_files(given["checkpoint_dir"], folder)
            self._module.save_hyperparameters(self._module.setup, folder)
            self._module.save_prompt_style(given["data"].prompt_style, folder)


def newest(out_dir: Any) -> Path | None:
    """The newest checkpoint of a run, as ``--resume auto`` finds it."""
    from litgpt.utils import find_resume_path, init_out_dir

    return find_resume_path("auto", init_out_dir(out_dir))


def refuse_mixing(out_dir: Any, resume: Any) -> None:
    """A run that may be started again goes on from the newest checkpoint, which must be its own.

    Raises:
        ValueError: There are checkpoints of an earlier run, and this one does not go on from them.
    """
    found = None if resume else newest(out_dir)
    if found is not None:
        raise ValueError(
            f"litgpt: {out_dir} holds checkpoints of an earlier run (such as {found}), from which a restarted run would"
            " go on; add --resume auto to go on from them now, or name another --out_dir"
        )


def restarts_by_torchrun() -> tuple[int, int]:
    """(which start this is, counted from 0; how many restarts torchrun allows)."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)), int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0))


class _AgreedLimit(float):
    """Seconds that a loop may take, asked on every rank with ``elapsed > limit``: reached on all as soon as on one.

    Else clocks that differ a little would let some ranks go on, and wait there for the others.
    """

    def __new__(cls, seconds: float, strategy: Any) -> _AgreedLimit:
        return super().__new__(cls, seconds)

    def __init__(self, seconds: float, strategy: Any) -> None:
        self._agree = strategy.reduce_boolean_decision

    def __lt__(self, elapsed: float) -> bool:  # Python asks the right side of ``>`` first, since its class is derived
        return bool(self._agree(float(self) < elapsed, all=False))


class _End(Exception):
    """Raised between two steps, on every rank."""


def _in_one_line(error: Exception) -> str:
    """``OSError: disk on fire (in __getitem__, books.py:12)``."""
    words = str(error).strip().splitlines() or [""]
    where = f" ({error.__notes__[-1]})" if getattr(error, "__notes__", None) else ""  # the loader's
    of_worker = any("Traceback" in line for line in words)  # then torch has put the worker's traceback in
    return f"{type(error).__name__}: {words[-1] if of_worker else words[0]}{where}"
