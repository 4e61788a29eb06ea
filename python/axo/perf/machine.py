"""A machine as the planner sees it: products, memory, and the bandwidth of every axis of a grid.

Bandwidth of axis i, hierarchy x, y, z, data from the inside out, G_node GPUs a node (equation (10) of "A 4D Hybrid
Algorithm", (7) of "Democratizing AI"):

    prod_{j<=i} G_j <= G_node:  the measured entry for (prod_{j<i} G_j, G_i), or one figure for the whole node
    else                        b_inter / min(G_node, prod_{j<i} G_j), or a measured entry where the file has one

Units: GB/s = 1e9 bytes a second and direction, TFLOP/s = 1e12, microseconds, GiB. Machines come from
``axo/perf/data/machines/*.yaml`` or from a file of the user's own (``axo profile`` writes one).
"""

from __future__ import annotations

import math
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from axo import files
from axo.grid import Grid

# Flops of a fused attention kernel for each byte that memory could move in its time, fitted as ``ASSUMED`` says. Its
# tiles live in registers and shared memory: from A100 to H100 its rate has grown with memory, not with products.
ATTENTION_INTENSITY = 55.0
_FOLDER = Path(__file__).parent / "data" / "machines"
PROFILED = "machine.yaml"  # where axo profile writes


class Gemm(NamedTuple):
    """A measured product: C[m, n] = A[m, k] B[k, n] ran at ``tflops``."""

    m: int
    k: int
    n: int
    tflops: float


@dataclass(frozen=True)
class Machine:
    """Figures of one machine.

    Args:
        gpus_per_node: Ranks that share a node.
        memory_gib: Memory of one GPU.
        peak_tflops: Advertised dense rate of one GPU.
        gemm_tflops: Rate that a large product was measured to reach.
        memory_gbs: Bandwidth of a GPU's memory.
        inter_gbs: Bandwidth between two nodes, all their NICs together.
        intra_gbs: Bandwidth inside a node by (inner, size): ``inner`` rings side by side would be (inner, size).
        cross_gbs: The same of rings that leave the node, all side by side, where somebody has measured them.
        latency_intra_us, latency_inter_us: Start-up of one message.
        layer_us: What a layer takes, forward and backward, beside its products and the bytes that it moves, where the
            processor that issues it also computes it: CPU ranks. A GPU's host runs ahead of it: 0.
        gemm_fraction: Share of ``gemm_tflops`` that products reach inside a training step (calibrated).
        network_fraction: Share of ``inter_gbs`` that collectives reach (calibrated).
        contention: Share of a GPU's products that is lost while a collective runs beside them (its kernels take units).
        watts: Power of one GPU with its share of the node; 0: not known.
        attention_tflops: Rate of a fused attention kernel; 0: ``ATTENTION_INTENSITY`` times ``memory_gbs``.
        host_link_gbs: Between a GPU and its host, one direction.
        host_memory_gbs: A GPU's share of the bandwidth of the host's memory.
        gemms: Measured products, where there are any.
        calibrated_on: The measurements that gave the two fractions; empty: nobody calibrated them.
        assumed: Fields that the file does not give, which have the values of ``ASSUMED``.
        source: What ``--machine`` calls it: its name, or its file.
        network: Gb/s of a node's NICs that replace the file's; 0: none do.
    """

    name: str
    gpus_per_node: int
    memory_gib: float
    peak_tflops: float
    gemm_tflops: float
    memory_gbs: float
    inter_gbs: float
    intra_gbs: dict[tuple[int, int], float] = field(default_factory=dict)
    cross_gbs: dict[tuple[int, int], float] = field(default_factory=dict)
    latency_intra_us: float = 0.0
    latency_inter_us: float = 0.0
    layer_us: float = 0.0
    gemm_fraction: float = 1.0
    network_fraction: float = 1.0
    contention: float = 0.0
    watts: float = 0.0
    attention_tflops: float = 0.0
    host_link_gbs: float = 25.0
    host_memory_gbs: float = 25.0
    gemms: tuple[Gemm, ...] = ()
    calibrated_on: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()
    source: str = ""
    network: float = 0.0
    description: str = ""

    def bandwidth(self, grid: Grid, axis: str) -> float:
        """Return bytes a second that one ring of ``axis`` gets (equation (10); placement-aware)."""
        inner, size = grid.stride(axis), grid.size(axis)
        if inner * size <= self.gpus_per_node:
            return 1e9 * self.intra(inner, size)
        if (inner, size) in self.cross_gbs:
            return 1e9 * self.cross_gbs[inner, size]
        return 1e9 * self.inter_gbs * self.network_fraction / min(self.gpus_per_node, inner)

    @property
    def to_another_node(self) -> float:
        """Bytes a second that one GPU sends to one on another node, while the others of its node may do the same."""
        return 1e9 * self.inter_gbs * self.network_fraction / self.gpus_per_node

    def intra(self, inner: int, size: int) -> float:
        """Return GB/s of a ring of ``size`` ranks inside a node with ``inner`` ranks of other axes between them.

        The nearest entry with the same ``inner`` serves sizes that were not measured, then the slowest of all.
        """
        if (inner, size) in self.intra_gbs:
            return self.intra_gbs[inner, size]
        near = [(abs(math.log(s / max(size, 1))), gbs) for (i, s), gbs in self.intra_gbs.items() if i == inner]
        return min(near)[1] if near else min(self.intra_gbs.values(), default=self.inter_gbs)

    def latency(self, grid: Grid, axis: str) -> tuple[float, float]:
        """Return (seconds of one turn of a ring over ``axis``, seconds of one way up a tree over it).

        A ring of G ranks on S nodes takes S hops between nodes and G - S inside; a tree log2 of each.
        """
        inner, size = grid.stride(axis), grid.size(axis)
        a_node = max(1, min(size, self.gpus_per_node // inner))
        nodes = -(-size // a_node)
        intra, inter = 1e-6 * self.latency_intra_us, 1e-6 * self.latency_inter_us
        ring = (nodes if nodes > 1 else 0) * inter + (size - 1 - (nodes - 1)) * intra
        tree = math.ceil(math.log2(nodes)) * inter + math.ceil(math.log2(a_node)) * intra
        return ring, tree

    def crosses_nodes(self, grid: Grid, axis: str) -> bool:
        """True when peers on ``axis`` stand on different nodes."""
        return grid.size(axis) > 1 and grid.stride(axis) * grid.size(axis) > self.gpus_per_node

    def nodes(self, gpus: int) -> tuple[int, int]:
        """Return (nodes, ranks of each) on which so many GPUs stand: as few nodes as have equally many."""
        a_node = next(each for each in range(min(gpus, self.gpus_per_node), 0, -1) if gpus % each == 0)
        return gpus // a_node, a_node

    def of_nodes(self, gpus: int) -> Machine:
        """Return this machine with nodes of as many GPUs as so many stand on."""
        nodes, a_node = self.nodes(gpus)
        return self if nodes == 1 or a_node == self.gpus_per_node else replace(self, gpus_per_node=a_node)

    @property
    def gemm_flops(self) -> float:
        """Flop/s of a large product inside a training step."""
        return 1e12 * self.gemm_tflops * self.gemm_fraction

    @property
    def attention_flops(self) -> float:
        """Flop/s of a fused attention kernel inside a training step, of scores that the causal mask leaves."""
        rate = 1e12 * self.attention_tflops or ATTENTION_INTENSITY * 1e9 * self.memory_gbs
        return min(rate, self.gemm_flops)

    def gemm_seconds(self, m: int, k: int, n: int) -> float:
        """Return the time of one product: of the nearest measured one, else its flops and its bytes (bf16) added."""
        flops = 2.0 * m * k * n
        if not self.gemms:
            return flops / self.gemm_flops + 2.0 * (m * k + k * n + m * n) / (1e9 * self.memory_gbs)

        def far(gemm: Gemm) -> float:  # sizes compared by their logarithms
            return sum(math.log(a / b) ** 2 for a, b in ((m, gemm.m), (k, gemm.k), (n, gemm.n)) if a and b)

        return flops / (1e12 * self.gemm_fraction * min(self.gemms, key=far).tflops)

    def with_network(self, gigabits: float) -> Machine:
        """Return this machine with other NICs: ``gigabits`` (Gb/s) of a node together, one direction.

        Raises:
            ValueError: Not a rate.
        """
        if not 0 < gigabits <= 1e6:
            raise ValueError(f"network={gigabits} is not a rate; give the Gb/s of a node's NICs together, such as 3200")
        return replace(self, inter_gbs=gigabits / 8, cross_gbs={}, network=gigabits)


# ---------------------------------------------------------------------------------------------------------- reading


# Other names of the machines that come with Axo.
ALIASES = {
    "h100": "dgx-h100",
    "h200": "dgx-h200",
    "b200": "dgx-b200",
    "gb200": "gb200-nvl72",
    "a100": "dgx-a100",
    "a100-80": "dgx-a100",
    "a100-40": "dgx-a100-40",
    "4090": "rtx-4090",
    "5090": "rtx-5090",
}


def known() -> list[str]:
    """Return the names of the machines that come with Axo."""
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


def load(name_or_path: str) -> Machine:
    """Read a machine by name or alias, or a file.

    Raises:
        ValueError: Unknown name, or a broken file (its line and field are named).
    """
    path = Path(name_or_path)
    name = ALIASES.get(name_or_path.lower(), name_or_path.lower())
    if name in known():
        return _read(_FOLDER / f"{name}.yaml")
    if path.suffix in (".yaml", ".yml", ".json") or path.exists():
        if not path.is_file():
            what = "is not a file" if path.exists() else "does not exist"
            raise ValueError(f"machine file {name_or_path!r} {what}; `axo profile --out FILE` writes one")
        return _read(path)
    raise ValueError(f"machine {name_or_path!r} is not known; use one of {', '.join(known())}, or a machine file")


def measured_here() -> str:
    """Return the machine file that ``axo profile`` wrote in this folder, for a user who names no machine.

    Raises:
        ValueError: There is none; says what to choose.
    """
    if Path(PROFILED).is_file():
        return PROFILED
    raise ValueError(
        f"no machine is named and there is no {PROFILED} here; add --machine with one of {', '.join(known())}, or"
        f" measure this one: axo profile --out {PROFILED}"
    )


# What a machine file that does not say it gets: gemm_fraction, fitted with ATTENTION_INTENSITY on four published runs
# on A100 and H100 (``axo bench exam``); what the papers' machines were measured to reach of the network; NCCL's own
# tuning constants; and a quarter of a GPU's units busy with collectives.
ASSUMED = {
    "gemm_fraction": 0.96,
    "network_fraction": 0.94,
    "latency_intra_us": 3.4,
    "latency_inter_us": 14.0,
    "contention": 0.25,
}

_MOST = 1e15  # of any number in a file, so that nothing computed from it is infinite
_MOST_A_NODE = 65536
_SHARES = {  # the largest, and how that is said
    "gemm_fraction": (2.0, "; a value near or under 1 is meant"),
    "network_fraction": (2.0, "; a value near or under 1 is meant"),
    "contention": (math.nextafter(1.0, 0.0), " under 1"),
}
_MAY_BE_ZERO = ("latency", "layer", "contention", "attention")
# The numbers of a file, and whether each must be given; ``network`` is of the command.
_NUMBERS = {
    one.name: one.default is MISSING for one in fields(Machine) if one.type == "float" and one.name != "network"
}
_OTHERS = "name gpus_per_node intra_gbs cross_gbs gemms calibrated_on description sources profiled composed".split()


@cache
def _read(path: Path) -> Machine:
    import yaml  # which a machine that plans no file of its own may lack

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        text = files.read_text(path)
        files.check_yaml(text)
        root = yaml.compose(text, Loader=loader)
        if not isinstance(root, yaml.MappingNode):
            raise ValueError(
                f"machine file {path}, line 1: expected fields such as 'gpus_per_node: 4', got something else"
            )
        return _MachineFile(path, root, loader).machine()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}" if mark else "somewhere"
        raise ValueError(f"machine file {path}, {where}: not YAML: {getattr(error, 'problem', error)}") from None
    except (OSError, ValueError) as error:
        why = str(error.strerror) if isinstance(error, OSError) else str(error).removeprefix(f"{path}: ")
        raise ValueError(why if why.startswith("machine file") else f"machine file {path}: {why}") from None


class _MachineFile:
    """A composed YAML mapping, and the Machine that it describes; what is wrong is told with its line and field."""

    def __init__(self, path: Path, root: Any, loader: Any) -> None:
        self.path, self.loader, self.values, self.lines = path, loader, dict[str, Any](), dict[str, int]()
        self.nodes = self.entries(root)
        for name, (node, line) in self.nodes.items():
            self.lines[name] = line
            self.values[name] = self.value(name, node)

    def fail(self, name: str, what: str, line: int = 0) -> ValueError:
        return ValueError(
            f"machine file {self.path}, line {line or self.lines.get(name, 1)}, field {files.shown(name)}: {what}"
        )

    def entries(self, root: Any, field: str = "") -> dict[str, tuple[Any, int]]:
        """The nodes of a mapping, of the file or of a field of it, and their lines, by key."""
        entries = dict[str, tuple[Any, int]]()
        for key, node in root.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in entries:
                twice = "has an entry twice" if field else f"is given twice, first in line {entries[name][1]}"
                raise self.fail(field or name, twice, line)
            entries[name] = node, line
        return entries

    def value(self, name: str, node: Any) -> Any:
        try:
            return self.loader("").construct_object(node, deep=True)
        except (ValueError, LookupError, TypeError, ArithmeticError, AttributeError) as error:
            # a date that there is not, a number of thousands of digits or, with !!int, of none
            raise self.fail(name, str(error)) from None

    def number(self, name: str, value: Any, *, line: int = 0) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not -_MOST <= value <= _MOST:
            raise self.fail(name, f"{files.shown(value)} is not a number", line)
        if value < 0 or (value == 0 and not name.startswith(_MAY_BE_ZERO)):
            raise self.fail(name, f"{value!r} must be above 0", line)
        most, why = _SHARES.get(name, (math.inf, ""))
        if value > most:
            raise self.fail(name, f"{float(value)} is not a share{why}")
        return float(value)

    def machine(self) -> Machine:
        given, needed = self.values, ["gpus_per_node", "intra_gbs", *(name for name, must in _NUMBERS.items() if must)]
        for name in (name for name in given if name not in _NUMBERS and name not in _OTHERS):
            raise self.fail(name, f"is not a field; the fields are {', '.join((*_OTHERS, *_NUMBERS))}")
        for name in (name for name in needed if name not in given):
            raise self.fail(name, "is missing")
        gpus, rows = given["gpus_per_node"], given.get("calibrated_on") or []
        if isinstance(gpus, bool) or not isinstance(gpus, int) or not 1 <= gpus <= _MOST_A_NODE:
            raise self.fail("gpus_per_node", f"{files.shown(gpus)} is not a whole number from 1 to {_MOST_A_NODE}")
        if not isinstance(rows, list):
            raise self.fail("calibrated_on", f"{files.shown(rows)} is not a list of what was measured")
        numbers = {name: self.number(name, given[name]) for name in _NUMBERS if name in given}
        inside = given["intra_gbs"]  # a table, or one figure for the whole node
        return Machine(
            name=str(given.get("name", self.path.stem)),
            gpus_per_node=gpus,
            intra_gbs=self.table("intra_gbs") if isinstance(inside, dict) else
            dict.fromkeys(((inner, gpus) for inner in range(1, gpus + 1)), self.number("intra_gbs", inside)),
            cross_gbs=self.table("cross_gbs") if "cross_gbs" in given else {},
            gemms=self.gemms() if given.get("gemms") else (),
            calibrated_on=tuple(map(str, rows)),
            assumed=tuple(name for name in ASSUMED if name not in numbers),
            source=self.path.stem if self.path.parent == _FOLDER else str(self.path),
            description=str(given.get("description", "")),
            **(ASSUMED | numbers),
        )  # fmt: skip

    def table(self, name: str) -> dict[tuple[int, int], float]:
        if not isinstance(self.values[name], dict):
            raise self.fail(name, f"{files.shown(self.values[name])} is not a table of INNERxSIZE: GB/s")
        table = {}
        for key, (node, line) in self.entries(self.nodes[name][0], name).items():
            parts = key.split("x")
            if len(parts) != 2 or not all(part.isdecimal() and 0 < int(part) <= _MOST for part in parts):
                raise self.fail(name, f"{files.shown(key)} is not of the form INNERxSIZE, such as 2x4", line)
            table[int(parts[0]), int(parts[1])] = self.number(name, self.value(name, node), line=line)
        return table

    def gemms(self) -> tuple[Gemm, ...]:
        rows, gemms = self.values["gemms"], list[Gemm]()
        if not isinstance(rows, list):
            raise self.fail("gemms", "is not a list of {m, k, n, tflops}")
        for row, node in zip(rows, self.nodes["gemms"][0].value, strict=True):
            line = node.start_mark.line + 1
            if not isinstance(row, dict) or not set(Gemm._fields) <= set(row):
                raise self.fail("gemms", f"{files.shown(row)} lacks one of {', '.join(Gemm._fields)}", line)
            *sizes, tflops = (self.number("gemms", row[part], line=line) for part in Gemm._fields)
            m, k, n = map(math.ceil, sizes)
            gemms.append(Gemm(m, k, n, tflops))
        return tuple(gemms)
