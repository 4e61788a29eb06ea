"""Tables 1 and 2 of "Tesseract" (Wang et al., 2021): forward and backward of 25 settings on 1 to 64 A100 of Meluxina.

The paper gives batch, width and shape of each setting and the links of the machine; it gives neither the sequence
length, nor the blocks of the model, nor its dtype. So what is predicted is one block, in bf16, of ``SEQUENCE`` tokens
(that of Optimus's paper): its products at the rate of the machine file, and after them, nothing hidden, the collectives
that ``cost()`` counts for its four products, at equation (10)'s bandwidths. One factor a table, which stands for the
number of blocks and all that is not known, is fitted to the forward of one row (``CALIBRATION``): two rows of 25.
Megatron-LM is axonn with x alone; Optimus is SUMMA, which is Tesseract of depth 1.

It knows no latency and no overhead of an implementation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, cached_property

from axo.arrangement import AXONN, TESSERACT
from axo.grid import Grid
from axo.matmul import cost
from axo.perf import machine, readers
from axo.perf.layer_time import Network

SEQUENCE = 512
STRONG_HIDDEN = 3072
CALIBRATION = {"strong": "t221", "weak": "t221"}
METHODS = {"meg": "Megatron-LM", "opt": "Optimus", "t": "Tesseract"}


@dataclass(frozen=True)
class Setting:
    """One row of a table.

    Attributes:
        table, key: "strong" (table 1) or "weak" (table 2); its name in ``data/papers.yaml``.
        grid: Of ours: x = p for Megatron-LM.
        batch, hidden: Sequences and width.
        forward, backward: Measured, in seconds.
    """

    table: str
    key: str
    grid: Grid
    batch: int
    hidden: int
    forward: float
    backward: float

    @property
    def method(self) -> str:
        """``"Megatron-LM"``, ``"Optimus"`` or ``"Tesseract"``."""
        return next(full for short, full in METHODS.items() if self.key.startswith(short))

    @property
    def shape(self) -> str:
        """``[4,4,4]``, as the paper writes it."""
        grid = self.grid
        sizes = {"Megatron-LM": (grid.x,), "Optimus": (grid.x, grid.y)}.get(self.method, (grid.x, grid.y, grid.z))
        return f"[{','.join(map(str, sizes))}]"

    @property
    def throughput(self) -> float:
        """What the paper calls so: batches a second."""
        return 1 / (self.forward + self.backward)

    @cached_property
    def block(self) -> tuple[float, float]:
        """Seconds of forward and backward of one block."""
        tokens = self.batch * SEQUENCE
        on = machine.load("meluxina")
        flops = tokens * (24.0 * self.hidden**2 + 4.0 * SEQUENCE * self.hidden) / self.grid.world_size
        sent, network = {cost.FORWARD: 0.0, cost.BACKWARD: 0.0}, Network(_without_latency(on), self.grid)
        arrangement = AXONN if self.method == "Megatron-LM" else TESSERACT
        for into, out, transposed in ((1, 3, False), (1, 1, True), (1, 4, False), (4, 1, True)):
            sizes = self.grid, tokens, into * self.hidden, out * self.hidden
            for call in cost.linear(*sizes, transposed=transposed, itemsize=2, arrangement=arrangement):
                sent[call.phase] += call.calls * network.seconds(call.op, call.axis, call.elements * call.itemsize)
        return flops / on.gemm_flops + sent[cost.FORWARD], 2 * flops / on.gemm_flops + sent[cost.BACKWARD]

    @property
    def predicted(self) -> tuple[float, float]:
        """Seconds of forward and backward."""
        forward, backward = self.block
        return factor(self.table) * forward, factor(self.table) * backward


def _without_latency(on: machine.Machine) -> machine.Machine:
    return replace(on, latency_intra_us=0.0, latency_inter_us=0.0)


@cache
def settings() -> tuple[Setting, ...]:
    """All rows of both tables, in their order."""
    numbers, found = readers.papers(), list[Setting]()
    for table in ("strong", "weak"):
        for key, row in numbers[f"tesseract_{table}"].items():
            hidden = STRONG_HIDDEN if table == "strong" else row[1]
            found.append(Setting(table, key, _grid(key), row[0], hidden, *row[-4:-2]))
    return tuple(found)


def setting(table: str, key: str) -> Setting:
    """One row."""
    return next(row for row in settings() if (row.table, row.key) == (table, key))


def _grid(key: str) -> Grid:
    if key.startswith("meg"):
        return Grid(x=int(key[3:]))
    sizes = key[3:].split("x") if key.startswith("opt") else key[1:]
    return Grid(*map(int, sizes))


@cache
def factor(table: str) -> float:
    """What one block's time is multiplied by: from the forward of one row."""
    row = setting(table, CALIBRATION[table])
    return row.forward / row.block[0]


# What the paper compares at 64 GPUs: words, table, the two rows, whether throughputs are compared (else forward times).
COMPARED = (
    ("[4,4,4] against [8,8,1], strong", "strong", "t444", "t881", False),
    ("[4,4,4] against Megatron-LM, strong", "strong", "t444", "meg64", False),
    ("[4,4,4] against Optimus, strong", "strong", "t444", "opt8x8", False),
    ("[4,4,4] against Megatron-LM, weak, throughput", "weak", "t444", "meg64", True),
    ("[4,4,4] against Optimus, weak, throughput", "weak", "t444", "opt8x8", True),
)


def ratio(table: str, fast: str, slow: str, throughput: bool, *, predicted: bool) -> float:
    """How many times faster one row is than another, as measured or as predicted."""
    times = []
    for key in (slow, fast):
        row = setting(table, key)
        both = row.predicted if predicted else (row.forward, row.backward)
        times.append(sum(both) if throughput else both[0])
    return times[0] / times[1]


def order_at_64(table: str, *, predicted: bool) -> list[str]:
    """The methods at 64 GPUs by their forward, the fastest first; of Tesseract [4,4,4]."""
    rows = [setting(table, key) for key in ("t444", "meg64", "opt8x8")]
    return [row.method for row in sorted(rows, key=lambda row: row.predicted[0] if predicted else row.forward)]
