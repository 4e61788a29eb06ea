"""Tables 1 and 2 of "Tesseract" (Wang et al., 2021): forward and backward of 25 settings on 1 to 64 A100 of Meluxina.

The paper gives batch, width, heads and shape of each setting and the links of the machine. What it leaves open is taken
from the public benchmark of Optimus, one of whose settings (batch 96, width 2048, 32 heads on 2 x 2) is a row of table
2: 24 layers, 512 tokens, fp32, activations recomputed in backward, blocks alone. The units are read off the rows:

    seconds are of one sequence       the columns "throughput" and "inference" are 1/seconds and are called sequences a
                                      second; [2,2,1] of both tables agree only so (1.9 times the seconds for 2.25 times
                                      the flops of a sequence; as seconds of a batch the flops would fall to 0.28)
    table 2: of batch/d sequences     [q,q,1], [q,q,2] and [q,q,4] of one q have batches of 1:2:4, GPUs of 1:2:4 and the
                                      same seconds to 2%

    forward     products / rate + slow * collectives        what ``cost()`` counts for the four products of a block, at
    backward    forward + 2 products / rate + slow * ...    equation (10)'s bandwidths, nothing hidden

Two figures are fitted, for both tables together, to the forward of two of the 25 rows (``RATE_ROW``, ``LINK_ROW``):
the rate of products on one GPU, and by how much collectives are slower than equation (10). Megatron-LM is axonn with x
alone; Optimus is SUMMA, which is Tesseract of depth 1.

It knows no latency beyond the machine file's and no overhead of an implementation.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property

from axo.arrangement import AXONN, TESSERACT
from axo.grid import Grid
from axo.matmul import cost
from axo.perf import machine, readers
from axo.perf.layer_time import Network

SEQUENCE, LAYERS, ITEMSIZE = 512, 24, 4
STRONG_HIDDEN = 3072
RATE_ROW, LINK_ROW = ("weak", "t111"), ("strong", "t441")
CALIBRATION = (RATE_ROW, LINK_ROW)
REPEATED = ("strong", "t881")  # table 1 prints table 2's figures here
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
        """What the paper calls so: sequences a second."""
        return 1 / (self.forward + self.backward)

    @property
    def sequences(self) -> float:
        """Those whose seconds the row gives are 1 of so many of a step."""
        return self.batch / (self.grid.z if self.table == "weak" else 1)

    @cached_property
    def flops(self) -> float:
        """Of one GPU in one forward pass, for the sequence that the row counts."""
        tokens = self.batch * SEQUENCE * LAYERS / self.sequences
        return tokens * (24.0 * self.hidden**2 + 4.0 * SEQUENCE * self.hidden) / self.grid.world_size

    @cached_property
    def links(self) -> tuple[float, float]:
        """Seconds of the collectives of forward and backward by equation (10), for the sequence that the row counts."""
        sent, network = {cost.FORWARD: 0.0, cost.BACKWARD: 0.0}, Network(machine.load("meluxina"), self.grid)
        arrangement = AXONN if self.method == "Megatron-LM" else TESSERACT
        for into, out, transposed in ((1, 3, False), (1, 1, True), (1, 4, False), (4, 1, True)):
            sizes = self.grid, self.batch * SEQUENCE, into * self.hidden, out * self.hidden
            for call in cost.linear(*sizes, transposed=transposed, itemsize=ITEMSIZE, arrangement=arrangement):
                sent[call.phase] += call.calls * network.seconds(call.op, call.axis, call.elements * call.itemsize)
        times = LAYERS / self.sequences
        return times * sent[cost.FORWARD], times * sent[cost.BACKWARD]

    @property
    def predicted(self) -> tuple[float, float]:
        """Seconds of forward and backward."""
        return self.with_links(slow())

    def with_links(self, slow: float) -> tuple[float, float]:
        """``predicted``, where collectives take ``slow`` times what equation (10) says."""
        products, (there, back) = self.flops / rate(), self.links
        forward = products + slow * there
        return forward, forward + 2 * products + slow * back


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
def rate() -> float:
    """Products of one GPU in flop/s, attention and all that is not a product included: from a row without links."""
    row = setting(*RATE_ROW)
    return row.flops / row.forward


@cache
def slow(link_row: tuple[str, str] = LINK_ROW) -> float:
    """How many times longer than by equation (10) collectives take: from one row between nodes."""
    row = setting(*link_row)
    return (row.forward - row.flops / rate()) / row.links[0]


def mean_error(link_row: tuple[str, str] = LINK_ROW) -> float:
    """Mean |predicted / paper - 1| over both tables, without the rows that were fitted and the one that is repeated."""
    errors = []
    for row in settings():
        if (row.table, row.key) != REPEATED:
            forward, backward = row.with_links(slow(link_row))
            if (row.table, row.key) not in (RATE_ROW, link_row):
                errors.append(abs(forward / row.forward - 1))
            errors.append(abs(backward / row.backward - 1))
    return sum(errors) / len(errors)


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
