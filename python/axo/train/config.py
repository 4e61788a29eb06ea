"""What one training run is, as a frozen dataclass: its fields, each with its help, are the options of ``axo train``.

Not here: whether the options fit together (``check``). Nothing heavy is imported, so that ``axo --help`` answers at
once.
"""

# ruff: noqa: RUF009  (each default is a dataclasses.field)
from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, NamedTuple

from axo.grid import Grid

KEPT = ("nothing", "products")
OPTIMIZERS = ("adamw", "muon")
PRECISIONS = ("bf16-mixed", "32-true", "bf16-true", "16-mixed")
LOG_NAME, PLOT_NAME, CHECKPOINTS = "log.jsonl", "loss.png", "checkpoints"  # in the run's folder
RANKS_NAME = "ranks"  # there, with --elastic: how many the run is to have
MODEL, RANKS, DATA, OPTIMIZER, OUTPUT = "Model", "Ranks", "Data", "Optimizer", "Output"


class Bounds(NamedTuple):
    """The numbers that an option may be, both ends among them, and how a message says that."""

    words: str
    least: float
    most: float = sys.float_info.max


AT_LEAST_0, AT_LEAST_1 = Bounds("at least 0", 0), Bounds("at least 1", 1)
FINITE, POSITIVE = Bounds("at least 0 and finite", 0), Bounds("above 0 and finite", math.nextafter(0, 1))
BELOW_1 = Bounds("in [0, 1)", 0, math.nextafter(1, 0))


def overrides(given: Sequence[str]) -> dict[str, str]:
    """FIELD=VALUE, several times over, as a dict."""
    pairs = [override.partition("=") for override in given]
    for (name, equals, _), override in zip(pairs, given, strict=True):
        if not equals or not name.strip():
            raise ValueError(f"train: --model-override {override!r} is not of the form FIELD=VALUE")
    return {name.strip(): value for name, _, value in pairs}


def _option(default: Any, panel: str, help: str, bounds: Bounds | None = None, **shown: str) -> Any:
    """A field (its default, or what makes it), and how ``axo train --help`` shows it: where, and in one line.

    ``shown`` may have a metavar, where that is not the type, and the option's name, where it is not the field's.
    """
    value = {"default_factory": default} if callable(default) else {"default": default}
    return field(metadata={"panel": panel, "help": help, "bounds": bounds, **shown}, **value)


@dataclass(frozen=True)
class TrainConfig:
    """Options of a training run. Each field says what it is; ``axo.train.check`` says what goes together."""

    owner: ClassVar[str] = "train"  # the command, in messages

    model: str = _option("tiny", MODEL, "A LitGPT configuration by name, 'tiny', or a YAML / JSON file.")
    model_overrides: dict[str, Any] = _option(
        dict, MODEL, "Set a field of litgpt.Config; repeatable.", metavar="FIELD=VALUE", name="model-override"
    )
    grid: Grid = _option(
        Grid, RANKS, "Ranks on each axis; auto: what the planner finds fastest, stages too.", metavar="XxYxZxDATA"
    )
    algorithm: str = _option("axonn", RANKS, "axonn; tesseract where x = y (z is its depth); summa: tesseract, z = 1.")
    pipeline: int = _option(1, RANKS, "Stages, each of them a grid.", AT_LEAST_1)
    schedule: str = _option(
        "1f1b", RANKS, "Of the stages: gpipe, 1f1b, looped-bfs, interleaved-1f1b, zero-bubble, zbv or dualpipev."
    )
    cuts: str = _option(
        "even", RANKS, "First blocks of later stages: even, planner (the least flops of the busiest rank), or 3,7."
    )
    microbatches: int = _option(8, RANKS, "Micro-batches that fill the stages in each piece.", AT_LEAST_1)
    sequence_parallel: bool = _option(
        False, RANKS, "Split the tokens of the residual stream over x: norms keep 1/x of their activations."
    )
    context: int = _option(1, RANKS, "Neighbours along z that hold pieces of the same sequences.", AT_LEAST_1)
    context_kind: str = _option("ring", RANKS, "How these see each other's keys and values: ring, gather or heads.")
    experts: int = _option(1, RANKS, "Neighbours along z, then data, that hold other experts each.", AT_LEAST_1)
    threads: int = _option(
        0, RANKS, "CPU threads of a rank; 0: its share of the cores.", Bounds("in [0, 4096]", 0, 4096)
    )
    elastic: str | None = _option(
        None,
        RANKS,
        "Go on with fewer ranks when one dies, at least MIN, and with as many as OUT/ranks says. MAX: those of --grid.",
        metavar="MIN:MAX",
    )
    hosts: str | None = _option(
        None,
        RANKS,
        "With --elastic: the run's hosts, on each of which this command is typed; one that is lost costs no file.",
        metavar="HOST[:PORT],...",
    )
    copy_every: int = _option(10, RANKS, "With --elastic: steps between copies of the state in memory.", AT_LEAST_1)
    timeout: float = _option(600, RANKS, "Seconds that an operation between ranks may take.", POSITIVE)
    data: tuple[str, ...] = _option((), DATA, "Text: files or folders. Default: Python's library.", metavar="PATH...")
    tokenizer: str | None = _option(None, DATA, "A tokenizer.json; default: bytes.", metavar="PATH")
    steps: int = _option(200, DATA, "Optimizer steps.", AT_LEAST_1)
    batch_size: int = _option(16, DATA, "Rows of the global batch, whatever the grid.", AT_LEAST_1)
    seq_len: int = _option(128, DATA, "Tokens of a row.", AT_LEAST_1)
    accumulate: int = _option(1, DATA, "Pieces that a rank's rows are cut into.", AT_LEAST_1)
    optimizer: str = _option(
        "adamw", OPTIMIZER, "adamw; muon: for matrices of hidden layers, with steps as large as AdamW's."
    )
    lr: float = _option(1e-3, OPTIMIZER, "Peak learning rate.", FINITE)
    min_lr: float | None = _option(None, OPTIMIZER, "Last learning rate; default: a tenth of the peak.", FINITE)
    warmup: int = _option(20, OPTIMIZER, "Steps of linear warm-up.", AT_LEAST_0)
    weight_decay: float = _option(0.1, OPTIMIZER, "Of weights only.", FINITE)
    beta1: float = _option(0.9, OPTIMIZER, "AdamW's first; Muon's momentum is 0.95.", BELOW_1)
    beta2: float = _option(0.95, OPTIMIZER, "AdamW's second.", BELOW_1)
    clip: float = _option(1.0, OPTIMIZER, "Largest gradient norm; 0: off.", FINITE)
    chunked_loss: bool | None = _option(
        None, OPTIMIZER, "Loss and gradient of the head in chunks of rows: logits never exist whole. Default: on, but"
        " for tesseract, summa, --sequence-parallel and 16-mixed.", name="chunked-loss/--no-chunked-loss",
    )  # fmt: skip
    goldfish_k: int = _option(0, OPTIMIZER, "Goldfish loss: leave one of K tokens out; 0: off.", AT_LEAST_0)
    goldfish_h: int = _option(13, OPTIMIZER, "Goldfish loss: tokens before one that decide.", AT_LEAST_1)
    seed: int = _option(0, OPTIMIZER, "Of initial weights and data order.", Bounds("in [0, 2**63)", 0, 2**63 - 1))
    precision: str = _option("bf16-mixed", OPTIMIZER, "bf16-mixed, 32-true, bf16-true or 16-mixed.")
    recompute: bool = _option(False, OPTIMIZER, "Run each block again in backward.")
    recompute_keeps: str = _option(
        "nothing", OPTIMIZER, "What --recompute keeps: nothing, or products (and attention): selective recomputation."
    )
    offload: str = _option(
        "none", OPTIMIZER, "Onto the lower tier: optimizer, parameters, activations (or activations=BLOCKS).",
        metavar="WHAT,...",
    )  # fmt: skip
    offload_dir: str | None = _option(
        None, OPTIMIZER, "Its folder, for CPU ranks. Default: that of --out.", metavar="DIR"
    )
    zero: int = _option(
        0, OPTIMIZER, "1: optimizer state cut over data; 2: gradients too.",
        Bounds("0, 1 or 2; for what ZeRO-3 does, give the grid's z ranks", 0, 2),
    )  # fmt: skip
    overlap: str = _option("oar,ors,oag", OPTIMIZER, "What hides behind products: oar, ors, oag, or none.")
    gather_cache: str = _option(
        "all", OPTIMIZER, "Gathered weights kept until backward: all, none, a number of layers, or 512MiB."
    )
    device: str = _option("cpu", RANKS, "cpu, or cuda: a GPU for each rank.")
    out: str = _option("runs/train", OUTPUT, "Where the log and the plot go.", metavar="DIR")
    log_every: int = _option(1, OUTPUT, "Steps between lines of the log.", AT_LEAST_1)
    save_every: int = _option(0, OUTPUT, "Steps between checkpoints, in DIR/checkpoints; 0: none.", AT_LEAST_0)
    keep: int = _option(2, OUTPUT, "Checkpoints that stay.", AT_LEAST_1)
    resume: str | None = _option(
        None, OUTPUT, "Go on from the newest checkpoint of --out, or DIR.", metavar="[auto|DIR]"
    )
    allow_new_data: bool = _option(False, OUTPUT, "Resume although seed, batch, text or model options are others now.")
    overwrite: bool = _option(False, OUTPUT, "Start again in --out; remove an earlier run's checkpoints in it.")
    trace: str | None = _option(None, OUTPUT, "Write a chrome trace of a step, and a PNG.", metavar="FILE")
    peak_tflops: float | None = _option(None, OUTPUT, "Dense peak of a rank's device, for MFU.", POSITIVE)
    compare_serial: bool = _option(False, OUTPUT, "Train on one rank without Axo too, and compare.")

    @property
    def ranks(self) -> int:
        """The ranks of all stages."""
        return self.grid.world_size * self.pipeline

    @property
    def chunks_loss(self) -> bool:
        """Whether logits never exist whole: ``chunked_loss``, or where nothing is said wherever it can be."""
        could = self.algorithm == "axonn" and not self.sequence_parallel and self.precision != "16-mixed"
        return could if self.chunked_loss is None else self.chunked_loss

    @property
    def saves(self) -> bool:
        """Whether the run saves checkpoints, and so also on SIGTERM and Ctrl-C."""
        return self.save_every > 0

    @property
    def shown(self) -> str:
        """The grid, and the stages if there are several."""
        return self.grid.in_stages(self.pipeline)

    @property
    def last_lr(self) -> float:
        """The learning rate of the last step."""
        return self.lr / 10 if self.min_lr is None else self.min_lr

    def as_dict(self) -> dict[str, Any]:
        """Return the options as plain values, for the header of a log."""
        return (
            asdict(self)
            | {"grid": str(self.grid), "data": list(self.data), "min_lr": self.last_lr}
            | {"chunked_loss": self.chunks_loss}
        )
