"""The command ``axo``. This file reads options and prints results; what they mean is in the modules that it calls.

Those are imported inside the commands, so that ``axo --help`` answers at once and planning needs no torch.
Wrong input ends with one line and exit code 2, a failed check or run with 1, Ctrl-C with 130.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import pkgutil
import runpy
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

app = typer.Typer(
    name="axo",
    help="Train large models with four-dimensional parallelism; measure, plan and inspect.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_RANK_0_FIRST_SECONDS = 10.0
_WRONG_INPUT, _FAILED, _INTERRUPTED = 2, 1, 128 + signal.SIGINT


@app.command()
def train(
    paths: Annotated[
        list[str] | None, typer.Argument(metavar="[PATH]...", help="More text, so that '--data A B C' is A, B and C.")
    ] = None,
    model: Annotated[
        str,
        typer.Option(help="A LitGPT configuration by name, 'tiny', or a YAML / JSON file.", rich_help_panel="Model"),
    ] = "tiny",
    model_override: Annotated[
        list[str] | None,
        typer.Option(metavar="FIELD=VALUE", help="Set a field of litgpt.Config; repeatable.", rich_help_panel="Model"),
    ] = None,
    grid: Annotated[
        str, typer.Option(metavar="XxYxZxDATA", help="Ranks on each axis.", rich_help_panel="Ranks")
    ] = "1x1x1x1",
    threads: Annotated[
        int, typer.Option(help="CPU threads of a rank; 0: its share of the cores.", rich_help_panel="Ranks")
    ] = 0,
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATH...", help="Text: files or folders. Default: Python's library.", rich_help_panel="Data"
        ),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(metavar="PATH", help="A tokenizer.json; default: bytes.", rich_help_panel="Data")
    ] = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps.", rich_help_panel="Data")] = 200,
    batch_size: Annotated[
        int, typer.Option(help="Rows of the global batch, whatever the grid.", rich_help_panel="Data")
    ] = 16,
    seq_len: Annotated[int, typer.Option(help="Tokens of a row.", rich_help_panel="Data")] = 128,
    accumulate: Annotated[
        int, typer.Option(help="Pieces that a rank's rows are cut into.", rich_help_panel="Data")
    ] = 1,
    lr: Annotated[float, typer.Option(help="Peak learning rate.", rich_help_panel="Optimizer")] = 1e-3,
    min_lr: Annotated[
        float | None,
        typer.Option(help="Last learning rate; default: a tenth of the peak.", rich_help_panel="Optimizer"),
    ] = None,
    warmup: Annotated[int, typer.Option(help="Steps of linear warm-up.", rich_help_panel="Optimizer")] = 20,
    weight_decay: Annotated[float, typer.Option(help="Of weights only.", rich_help_panel="Optimizer")] = 0.1,
    beta1: Annotated[float, typer.Option(help="AdamW.", rich_help_panel="Optimizer")] = 0.9,
    beta2: Annotated[float, typer.Option(help="AdamW.", rich_help_panel="Optimizer")] = 0.95,
    clip: Annotated[float, typer.Option(help="Largest gradient norm; 0: off.", rich_help_panel="Optimizer")] = 1.0,
    goldfish_k: Annotated[
        int, typer.Option(help="Goldfish loss: leave one of K tokens out; 0: off.", rich_help_panel="Optimizer")
    ] = 0,
    goldfish_h: Annotated[
        int, typer.Option(help="Goldfish loss: tokens before one that decide.", rich_help_panel="Optimizer")
    ] = 13,
    seed: Annotated[int, typer.Option(help="Of initial weights and data order.", rich_help_panel="Optimizer")] = 0,
    precision: Annotated[
        str, typer.Option(help="bf16-mixed, 32-true, bf16-true or 16-mixed.", rich_help_panel="Optimizer")
    ] = "bf16-mixed",
    recompute: Annotated[
        bool, typer.Option("--recompute", help="Run each block again in backward.", rich_help_panel="Optimizer")
    ] = False,
    zero: Annotated[
        int, typer.Option(help="1: optimizer state cut over data; 2: gradients too.", rich_help_panel="Optimizer")
    ] = 0,
    out: Annotated[
        str, typer.Option(metavar="DIR", help="Where the log and the plot go.", rich_help_panel="Output")
    ] = "runs/train",
    log_every: Annotated[int, typer.Option(help="Steps between lines of the log.", rich_help_panel="Output")] = 1,
    save_every: Annotated[
        int, typer.Option(help="Steps between checkpoints, in DIR/checkpoints; 0: none.", rich_help_panel="Output")
    ] = 0,
    keep: Annotated[int, typer.Option(help="Checkpoints that stay.", rich_help_panel="Output")] = 2,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="[auto|DIR]", help="Go on from the newest checkpoint of --out, or DIR.", rich_help_panel="Output"
        ),
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Write a chrome trace of a step, and a PNG.", rich_help_panel="Output"),
    ] = None,
    peak_tflops: Annotated[
        float | None, typer.Option(help="Dense peak of a rank's device, for MFU.", rich_help_panel="Output")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, or cuda: a GPU for each rank.", rich_help_panel="Ranks")] = "cpu",
    compare_serial: Annotated[
        bool,
        typer.Option(
            "--compare-serial", help="Train on one rank without Axo too, and compare.", rich_help_panel="Output"
        ),
    ] = False,
    expect_drop: Annotated[
        float | None,
        typer.Option(
            metavar="NATS",
            help="Fail unless the last 10 losses average at least this far under ln(vocabulary).",
            rich_help_panel="Output",
        ),
    ] = None,
) -> None:
    """Train a LitGPT model on a grid of ranks: new local ones, or those that torchrun started."""
    with _one_message("train"):
        from axo.grid import Grid
        from axo.train import TrainConfig, run

        config = TrainConfig(
            model=model,
            model_overrides=_fields(model_override or []),
            grid=Grid.parse(grid),
            data=(*(data or ()), *(paths or ())),
            tokenizer=tokenizer,
            steps=steps,
            batch_size=batch_size,
            seq_len=seq_len,
            accumulate=accumulate,
            lr=lr,
            min_lr=lr / 10 if min_lr is None else min_lr,
            warmup=warmup,
            weight_decay=weight_decay,
            beta1=beta1,
            beta2=beta2,
            clip=clip,
            goldfish_k=goldfish_k,
            goldfish_h=goldfish_h,
            seed=seed,
            precision=precision,
            recompute=recompute,
            zero=zero,
            device=device,
            threads=threads,
            out=out,
            log_every=log_every,
            peak_tflops=peak_tflops,
            save_every=save_every,
            keep=keep,
            resume=resume,
            trace=trace,
            compare_serial=compare_serial,
        )
        outcome = run(config)
    if outcome is not None and not _tell(outcome, expect_drop):
        raise typer.Exit(_FAILED)


def _tell(outcome: Any, expect_drop: float | None) -> bool:
    """Print a run's result; return whether all that was asked of it holds. The verdict of the parity comes last."""
    import math

    seconds = f"{outcome.seconds:.0f} s" + (f", serial {outcome.serial_seconds:.0f} s" if outcome.serial else "")
    _say(f"log {outcome.log} · loss curve {outcome.plot} · training {seconds}")
    if outcome.checkpoint is not None:
        _say(f"checkpoint {outcome.checkpoint}")
    if outcome.stopped:
        _say(f"stopped by SIGTERM after {len(outcome.losses)} steps; go on with --resume auto")
        return True
    line = (
        f"loss: {outcome.losses[0]:.3f} at first, {outcome.tail_loss:.3f} over the last {len(outcome.losses[-10:])} of "
        f"{len(outcome.losses)} steps, {outcome.drop:.3f} nats under "
        f"ln({outcome.vocabulary}) = {math.log(outcome.vocabulary):.3f}"
    )
    fell = expect_drop is None or outcome.drop >= expect_drop
    if expect_drop is not None:
        line += f" (at least {expect_drop:g}): {'ok' if fell else 'FAILED'}"
    _say(line)
    if outcome.parity is not None:
        _say(str(outcome.parity))
    return fell and (outcome.parity is None or outcome.parity.ok)


@app.command()
def consolidate(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A checkpoint, a folder of them, or a plain file.")],
    out: Annotated[str, typer.Argument(metavar="OUT", help="A .pth or .safetensors file; from a file: a folder.")],
    optimizer: Annotated[bool, typer.Option("--optimizer", help="The optimizer's state_dict too (.pth).")] = False,
) -> None:
    """Write a sharded checkpoint as one plain state_dict, or a plain one as a checkpoint."""
    with _one_message("consolidate"):
        from axo import checkpoint

        write: Any = checkpoint.consolidate
        if (Path(source) / "lit_model.pth").is_dir():  # a folder of axo litgpt --sharded
            from axo.integrations.fabric import sharded_checkpoint as sharded

            write = sharded.consolidate
        _say(f"wrote {write(source, out, optimizer=optimizer)}")


@app.command()
def info(
    grid: Annotated[
        str, typer.Option(metavar="XxYxZxDATA", help="Start these local ranks and check each axis.")
    ] = "1x1x1x1",
    flight: Annotated[bool, typer.Option("--flight", help="Put ranks' flight files together instead.")] = False,
    files: Annotated[
        list[Path] | None, typer.Argument(help="With --flight: axo-flight-PID.jsonl of the ranks.")
    ] = None,
) -> None:
    """Show versions, libraries and settings, and check that the ranks of a grid can talk; or read flight files."""
    with _one_message("info"):
        from axo import settings as config
        from axo.cli import info as report
        from axo.grid import Grid

        if flight:
            from axo.comm.flight import render

            if not files:
                raise ValueError("info: --flight wants files, such as FOLDER/axo-flight-*.jsonl")
            render(files, Console())
            return
        if files:
            raise ValueError(f"info: {files[0]} is a flight file only with --flight before it")
        for name, value in report.facts().items():
            _say(f"{name:<12} {value}")
        Console().print(report.settings_table(config.VARIABLES, config.settings()))
        for line in report.check_grid(Grid.parse(grid)):
            _say(line)


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
)
def bench(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Which; without it, they are listed.")] = "",
) -> None:
    """Run a benchmark with the arguments that follow its name, e.g. 'axo bench collectives --help'."""
    known = _benchmarks()
    if name in ("", "--help", "-h"):
        _say("usage: axo bench NAME [ARGUMENTS]")
        _say("benchmarks: " + (", ".join(known) or "none installed"))
        return
    with _one_message("bench"):
        if name not in known:
            raise ValueError(f"bench: {name!r} is not one of {', '.join(known) or 'the installed benchmarks (none)'}")
        sys.argv = [f"axo bench {name}", *context.args]
        runpy.run_module(f"axo_bench.{name}", run_name="__main__", alter_sys=False)


@app.command(
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,
        "help_option_names": [],
    },
    add_help_option=False,
)
def litgpt(context: typer.Context) -> None:
    """Run a LitGPT command: its arguments, --grid, in training --goldfish K,H; e.g. 'axo litgpt pretrain --help'."""
    with _one_message("litgpt"):
        from axo.integrations.litgpt.command import run

        run(context.args)


def _benchmarks() -> list[str]:
    if importlib.util.find_spec("axo_bench") is None:
        return []
    package = importlib.import_module("axo_bench")
    return sorted(module.name for module in pkgutil.iter_modules(package.__path__) if _is_script(module.name))


def _is_script(name: str) -> bool:
    """Whether a module of the benches can be run; others are what they share."""
    spec = importlib.util.find_spec(f"axo_bench.{name}")
    return spec is not None and spec.origin is not None and '__name__ == "__main__"' in Path(spec.origin).read_text()


def _fields(overrides: list[str]) -> dict[str, str]:
    fields = {}
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or not key:
            raise ValueError(f"train: --model-override {override!r} is not of the form FIELD=VALUE")
        fields[key.strip()] = value
    return fields


@contextmanager
def _one_message(command: str) -> Iterator[None]:
    """Turn errors into one message and an exit code.

    Under torchrun all ranks fail alike on wrong input and rank 0 speaks for them: the others give it time to, after
    which torchrun ends them. One that is still there has an error of its own.
    """
    try:
        yield
    except KeyboardInterrupt:
        _show_cursor()
        _complain(f"axo {command}: interrupted; all ranks have ended")
        raise typer.Exit(_INTERRUPTED) from None
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "litgpt":
            raise
        _complain(f"axo {command}: error: this needs LitGPT; install it with: pip install 'axo[litgpt]'")
        raise typer.Exit(_FAILED) from None
    except (ValueError, FloatingPointError) as error:
        rank = os.environ.get("RANK", "0")
        if rank != "0":
            time.sleep(_RANK_0_FIRST_SECONDS)
        _complain(f"axo {command}: error: {'' if rank == '0' else f'rank {rank}: '}{error}")
        raise typer.Exit(_WRONG_INPUT) from None
    except RuntimeError as error:
        from axo.errors import Aborted, PeerLost

        if isinstance(error, (PeerLost, Aborted)):  # under torchrun: the rank that is the cause has said more
            _complain(f"axo {command}: rank {os.environ.get('RANK', '0')}: {error}")
            raise typer.Exit(_FAILED) from None
        # Of the launcher's making: see axo.launch. Anything else keeps its traceback.
        if not hasattr(error, "user_error"):
            raise
        _show_cursor()
        if getattr(error, "trace", ""):
            sys.stderr.write(error.trace)  # type: ignore[attr-defined]
        _complain(f"axo {command}: error: {error}")
        raise typer.Exit(_WRONG_INPUT if error.user_error else _FAILED) from None


def _say(line: str) -> None:
    Console().print(line, markup=False, highlight=False, soft_wrap=True)


def _complain(line: str) -> None:
    sys.stdout.flush()
    Console(stderr=True).print(line, style="red", markup=False, highlight=False, soft_wrap=True)


def _show_cursor() -> None:
    """A rank that was ended while it drew a progress bar could not bring the cursor back."""
    if sys.stdout.isatty():
        Console().show_cursor(True)


def _mount(module: str) -> None:
    """Add the commands of another part's typer application, if that part is there."""
    if importlib.util.find_spec(module) is None:
        return
    part: typer.Typer = importlib.import_module(module).app
    app.registered_commands += part.registered_commands
    app.registered_groups += part.registered_groups


_mount("axo.cli.plan")
_mount("axo.cli.tune")


def main() -> None:
    """Entry point of the command."""
    app(args=_with_auto(sys.argv[1:]))


def _with_auto(arguments: list[str]) -> list[str]:
    """Let ``--resume`` alone mean ``--resume auto``: an option with an optional value, which typer does not have."""
    found = []
    for argument, after in zip(arguments, [*arguments[1:], "-"], strict=True):
        found += [argument, "auto"] if argument == "--resume" and after.startswith("-") else [argument]
    return found


if __name__ == "__main__":
    main()
