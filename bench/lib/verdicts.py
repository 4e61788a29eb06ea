"""What must be shown on a GPU, as one line each: reached or not, or "not measured" where a row is missing.

Of kernels: Triton alone against the vendor library over the GPT shapes (deep: K of at least 2,048 and four waves of
tiles of 128 x 256), TN added to an fp32 gradient against torch's product and sum, the tuned choice on every shape, fp8
against torch's bf16, overlap where communication takes 0.2, 0.4 and 0.8 of the product's time, also as replays of
graphs.
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import geometric_mean
from typing import Any

from axo_kernels.gemm.layout import Product

Verdicts = dict[str, bool | str]
Row = dict[str, Any]

_ERROR = 4e-3
_DEEP = (("NN", 0.95), ("NT", 0.95), ("TN", 0.93))
_GLUON = 0.95
_ELSEWHERE, _WORST = 0.88, 0.80
_ADDED = 1.00
_TUNED_WORST, _TUNED_MEAN = 0.99, 1.00
_FP8, _ROUNDED = 1.5, 1.0  # of twice the peak; worth its rounding
_HIDDEN = ((0.2, 0.5), (0.4, 0.7), (0.8, 0.8))
_SLOWER = 1.01
_MEETING = 0.95
_WAVE = 128 * 256


def speed(rows: Iterable[Row], gpt: Iterable[Product], units: int) -> Verdicts:
    """Judge rows of ``bench.gemm``.

    Args:
        gpt: The products that the goals of Triton alone are over; others count for the tuned choice and the error.
        units: Multiprocessors of the device.
    """
    rows = [row for row in rows if row.get("triton_ratio")]
    rows, all_rows = [row for row in rows if not row.get("disturbed")], rows
    wanted = {product.name for product in gpt}
    mine = [row for row in rows if row["product"] in wanted]
    deep = [row for row in mine if row["k"] >= 2048 and row["m"] * row["n"] >= 4 * units * _WAVE]
    rest = [row for row in mine if row not in deep]
    verdicts: Verdicts = {f"GPT shapes measured: {len(mine)} of {len(wanted)}": len(mine) == len(wanted) or _NOT}
    error = max((max(row["errors"].get(name, 0.0) for name in ("triton", "gluon")) for row in all_rows), default=None)
    verdicts |= line("Triton's relative error", error, _ERROR, len(all_rows), at_most=True, form=".1e")
    wrong = float(sum(not row["right"] for row in all_rows)) if all_rows else None
    verdicts |= line(
        "products with a wrong result, added to a gradient too", wrong, 0, len(all_rows), at_most=True, form="g"
    )
    for layout, goal in _DEEP:
        ratios = [row["triton_ratio"] for row in deep if row["layout"] == layout]
        verdicts |= line(f"Triton {layout}, K >= 2048, >= 4 waves, of torch", _mean(ratios), goal, len(ratios))
    ratios = [row["gluon_ratio"] for row in deep if row.get("gluon_ratio")]
    verdicts |= line("Gluon on Hopper, K >= 2048, >= 4 waves, of torch", _mean(ratios), _GLUON, len(ratios))
    ratios = [row["triton_ratio"] for row in rest]
    verdicts |= line("Triton on the other GPT shapes, of torch", _mean(ratios), _ELSEWHERE, len(ratios))
    ratios = [row["triton_ratio"] for row in mine]
    off = len(all_rows) - len(rows)
    verdicts |= line("Triton at worst, of torch", min(ratios, default=None), _WORST, len(ratios), disturbed=off)
    ratios = [row["accumulate_ratio"] for row in mine if row.get("accumulate_ratio")]
    verdicts |= line("TN added to an fp32 gradient, of torch.mm and add_", _mean(ratios), _ADDED, len(ratios))
    ratios = [row["tuned_ratio"] for row in rows if row["tuned_ratio"]]
    verdicts |= line("tuned at worst, of torch", min(ratios, default=None), _TUNED_WORST, len(ratios), disturbed=off)
    verdicts |= line("tuned, of torch", _mean(ratios), _TUNED_MEAN, len(ratios))
    return verdicts


def fp8(rows: Iterable[Row], scalings: Iterable[str]) -> Verdicts:
    """Judge rows of ``bench.lib.fp8``: the product alone, and with what rounds its operands."""
    rows = list(rows)
    verdicts: Verdicts = {}
    for scaling in scalings:
        for what, name, goal in (("alone", "fp8_ratio", _FP8), ("and its rounding", "rounded_ratio", _ROUNDED)):
            ratios = [row[name] for row in rows if row["scaling"] == scaling]
            verdicts |= line(f"fp8 {what}, a scale a {scaling}, of torch's bf16", _mean(ratios), goal, len(ratios))
    return verdicts


def overlap(rows: Iterable[Row], operations: Iterable[str], shapes: Iterable[tuple[int, int, int]]) -> Verdicts:
    """Judge rows of ``bench.overlap``: of each operation, shape and share the fastest strategy, and graph."""
    rows, sizes = list(rows), list(shapes)
    verdicts: Verdicts = {}
    for share, goal in _HIDDEN:
        for operation in operations:
            for size in sizes:
                name = "x".join(map(str, size))
                mine = [
                    row
                    for row in rows
                    if row["asked_share"] == share and row["operation"] == operation and name in row["shape"].split()
                ]
                what, hidden, slower = f"{operation} {name} share {share}", None, None
                graph, replayed = f"{what}, as a graph", None
                if mine:
                    best = min(mine, key=lambda row: row["fused_ms"])
                    hidden = best["efficiency"]
                    slower = best["fused_ms"] / best["serial_ms"]
                    what += f", {best['strategy']}/{best['chunks']}"
                if replays := [row for row in mine if row.get("graph_ms")]:
                    best = min(replays, key=lambda row: row["graph_ms"])
                    replayed = best["graph_efficiency"]
                    graph += f", {best['strategy']}/{best['chunks']}"
                verdicts |= line(f"{what} hides", hidden, goal)
                verdicts |= line(f"{graph} hides", replayed, goal)
                verdicts |= line(f"{what} over serial", slower, _SLOWER, at_most=True)
    pairs: dict[tuple[str, str], list[float]] = {}  # several rows have the same product
    for row in (row for row in rows if row["strategy"] == "groups" and row["own_ms"]):
        pairs.setdefault((row["operation"], row["shape"]), []).append(row["gemm_ms"] / row["own_ms"])
    ratios = [geometric_mean(each) for each in pairs.values()]
    return verdicts | line("Gluon that meets a stream, flags set, of torch", _mean(ratios), _MEETING, len(ratios))


_NOT = "not measured"


def line(
    name: str,
    value: float | None,
    goal: float,
    shapes: int | None = None,
    *,
    at_most: bool = False,
    form: str = ".3f",
    beside: str = "",
    disturbed: int = 0,
) -> Verdicts:
    """One verdict: the name, the value (None: not measured), what stands beside it, and the goal. With ``disturbed``
    rows that the value is without, it is missed or not measured (clock.py)."""
    bound = f"goal: at {'most' if at_most else 'least'} {goal:g}"
    if value is None:
        return {f"{name} ({bound})": _NOT}
    over = "" if shapes is None else f" over {shapes} shapes"
    over += f", {disturbed} disturbed" if disturbed else ""
    reached = value <= goal if at_most else value >= goal
    return {f"{name}: {value:{form}}{over}{beside} ({bound})": _NOT if reached and disturbed else reached}


def _mean(ratios: list[float]) -> float | None:
    return geometric_mean(ratios) if ratios else None
