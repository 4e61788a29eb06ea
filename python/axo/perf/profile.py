"""Measure this machine: the bandwidth database, latency, products and memory, written as a machine file.

For every two-level hierarchy (inner, size) with inner * size ranks in a node, the grid 1-inner-size-rest is built with
``inner`` on x and ``size`` on y, and all groups of y all-reduce a large message at once ("Democratizing AI", V-B):

    GB/s = 2 (size - 1)/size * bytes / seconds / 1e9          (the ring equation (3), solved for the bandwidth)

where the seconds of a tiny all-reduce are taken off, since latency is counted apart.
Latency is half of a tiny all-reduce of two ranks, products are timed on all ranks at once at the shapes that a model's
layers have on a few grids. On CPU ranks, where the host computes what it issues, a tiny GPT of LitGPT's tells what a
layer takes beside these; without LitGPT that is left at 0, and the file says so.
The best of several repeats counts for bandwidth and products, the median for latency and layers.

Runs on every rank (``measure``); the command starts local ranks. Where the ranks are on several hosts, the same rings
are measured across them (``cross_gbs``), and ``inter_gbs`` is what leaves a host with one ring a rank. On one host
nothing is known between hosts: ``inter_gbs`` is then the slowest entry inside, and the file says so. torch is imported
only when something is measured.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import yaml

from axo.grid import Grid
from axo.matmul.cost import chunk
from axo.perf import readers
from axo.perf.memory import GIB
from axo.perf.workload import Workload

if TYPE_CHECKING:
    from axo.comm.connect import Communicators

NO_LITGPT = "not measured: LitGPT is not installed (pip install 'axo[litgpt]'); 0 stands in"
Connect = Callable[..., "Communicators"]
COMPOSED = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all")
_FASTER = 0.95  # of the library's own time, at most, for a composed collective to be worth its turns
_TINY: dict[str, Any] = {
    "name": "tiny", "n_layer": 1, "n_embd": 64, "n_head": 4, "n_query_groups": 4, "intermediate_size": 64,
    "bias": False, "padded_vocab_size": 64, "block_size": 8, "norm_class_name": "RMSNorm",
    "mlp_class_name": "GptNeoxMLP", "parallel_residual": False,
}  # fmt: skip


def hierarchies(ranks: int) -> Iterator[tuple[int, int]]:
    """Yield every (inner, size) whose product divides ``ranks``, size above 1: the database's keys."""
    for inner in range(1, ranks + 1):
        for size in range(2, ranks // inner + 1):
            if ranks % (inner * size) == 0:
                yield inner, size


def shapes(workload: Workload, ranks: int, rows: int) -> list[tuple[int, int, int]]:
    """Return the (m, k, n) of a model's products on the grids that give all ranks to x, to y or to z."""
    products = []
    for grid in dict.fromkeys((Grid(), Grid(x=ranks), Grid(y=ranks), Grid(z=ranks))):
        products += [(chunk(rows, grid.z), *layer.local_sizes(grid)) for _, layer in workload.products]
    return list(dict.fromkeys(products))


def measure(
    connect: Connect,
    ranks: int,
    workload: Workload,
    rows: int,
    message: int,
    repeats: int,
    node: int = 0,
    dtype: str = "bfloat16",
    device: str = "cpu",
) -> dict[str, Any]:
    """Measure on every rank of the world; return the machine file's fields (the same on all ranks).

    Args:
        connect: Gives the communicators of a grid, on ``device``: ``axo.connect``.
        ranks: How many ranks the world has.
        workload: Whose products are timed.
        rows: Rows of the products before z shards them.
        message: Bytes of the large message.
        repeats: Of every measurement.
        node: Ranks of a host; 0: all of them are on one.
        dtype: What products compute in, also those of the layers that are timed on CPU ranks.
        device: "cpu" or "cuda".

    Raises:
        ValueError: A count is not at least 1.
    """
    for name, value in (("ranks", ranks), ("rows", rows), ("message", message), ("repeats", repeats)):
        if value < 1:
            raise ValueError(f"profile: {name}={value} is not at least 1")
    node = node or ranks
    if ranks % node:
        raise ValueError(f"profile: {ranks} ranks are not a whole number of hosts of {node}")
    world = connect(Grid(data=ranks))
    try:
        gemms = [_gemm(world, shape, repeats, dtype) for shape in shapes(workload, ranks, rows)]
        memory_gbs = _copy(world, message, repeats)
        layer = _layer(world, 5 * repeats, dtype) if device == "cpu" and _all_have_litgpt(world) else None
    finally:
        world.close()
    table: dict[str, float] = {}
    cross: dict[str, float] = {}
    latency = latency_inter = 0.0
    for inner, size in hierarchies(ranks):
        comms = connect(Grid(x=inner, y=size, z=ranks // (inner * size)))
        inside = inner * size <= node
        try:
            (table if inside else cross)[f"{inner}x{size}"] = _all_reduce(comms, size, message, repeats)
            if inside and not latency:
                latency = _latency(comms, 2 * (size - 1), 20 * repeats)
            elif inner == node and inner * size == ranks:
                latency_inter = _latency(comms, 2 * math.ceil(math.log2(size)), 20 * repeats)
        finally:
            comms.close()
    inter = cross[f"{node}x{ranks // node}"] * node if cross else min(table.values(), default=memory_gbs)
    best = max(gemm["tflops"] for gemm in gemms)
    return {
        "name": "profiled",
        "description": f"{ranks} ranks, {node} a host, each {_what(device)}",
        "gpus_per_node": node,
        "memory_gib": round(_memory_gib(device, node), 3),
        "peak_tflops": best,
        "gemm_tflops": best,
        "memory_gbs": memory_gbs,
        "inter_gbs": inter,
        "intra_gbs": table or memory_gbs,
        **({"cross_gbs": cross} if cross else {}),
        **({"composed": _composed(connect, ranks, node, message, repeats)} if cross and device == "cuda" else {}),
        "latency_intra_us": latency,
        "latency_inter_us": latency_inter if cross else latency,
        "layer_us": layer or 0.0,
        "gemm_fraction": 1.0,  # these very products and rings were timed, all ranks at once
        "network_fraction": 1.0,
        "contention": 0.0,
        "gemms": gemms,
        "profiled": {
            "message_bytes": message,
            "repeats": repeats,
            "model": workload.name,
            "rows": rows,
            "dtype": dtype,
            "inter_gbs": f"{node} rings side by side, one a rank, over {ranks // node} hosts"
            if cross
            else "not measured: one host; the slowest entry of intra_gbs stands in",
            "peak_tflops": "the fastest product measured",
            **({"layer_us": NO_LITGPT} if device == "cpu" and layer is None else {}),
        },
    }


def on_this_rank(ranks: int, model: str, rows: int, bytes_: int, repeats: int, device: str) -> dict[str, Any]:
    """Meet the other ranks, and measure a model by name: what the command runs on each."""
    import torch.distributed

    import axo
    from axo import launch

    node = int(os.environ.get("LOCAL_WORLD_SIZE") or ranks)
    launch.set_threads(0, node)
    workload = readers.read(model)
    if ranks > 1 and not torch.distributed.is_initialized():
        torch.distributed.init_process_group("axo")
    connect = partial(axo.connect, device=device)
    return measure(connect, ranks, workload, rows, bytes_, repeats, min(node, ranks), device=device)


def write(fields: dict[str, Any], path: Path) -> None:
    """Write a machine file that ``axo.perf.machine.load`` reads."""
    head = "# Measured by `axo profile`. Edit name, peak_tflops and inter_gbs where you know better.\n"
    path.write_text(head + yaml.safe_dump(fields, sort_keys=False, width=110))


def _timed(comms: Communicators, repeats: int, run: Callable[[], object]) -> list[float]:
    """Time ``run`` on all ranks at once: for each repeat the slowest rank's seconds."""
    import torch

    on_cpu = torch.device(comms.device).type == "cpu"
    synchronize: Callable[[], object] = nullcontext if on_cpu else torch.accelerator.synchronize
    run()
    seconds_each = []
    for _ in range(repeats):
        comms.world.barrier()
        synchronize()
        started = time.perf_counter()
        run()
        synchronize()
        seconds_each.append(time.perf_counter() - started)
    seconds = torch.tensor(seconds_each, dtype=torch.float64, device=comms.device)
    if comms.grid.world_size > 1:
        seconds = comms.world.all_reduce(seconds, "max")
    return [float(second) for second in seconds]


def _all_reduce(comms: Communicators, size: int, message: int, repeats: int) -> float:
    """Return GB/s of simultaneous all-reduces over y, without the time that a tiny one takes too."""
    import torch

    def all_rings(tensor: torch.Tensor) -> None:
        comms.y.all_reduce(tensor, "max")
        comms.world.barrier()  # a ring that began late had the link to itself: the time is until all have ended

    large, tiny = torch.ones(max(2, message // 4), device=comms.device), torch.ones(1, device=comms.device)
    seconds = min(_timed(comms, repeats, lambda: all_rings(large)))
    start = min(_timed(comms, 10 * repeats, lambda: all_rings(tiny)))  # else a busy moment doubles GB/s
    return round(2 * (size - 1) / size * large.numel() * 4 / max(seconds - start, seconds / 2) / 1e9, 4)


def _composed(connect: Connect, ranks: int, node: int, message: int, repeats: int) -> dict[str, dict[str, int]]:
    """From how many bytes on each collective over all hosts is faster composed of those inside them and between them.

    From a message of ``message`` bytes down by fours, for as long as it is; so never where the library's own is faster.
    """
    import torch

    from axo.comm.device import DeviceOptions

    rows = tuple((ranks // node, node, collective, 0) for collective in COMPOSED)
    plain, composed = (connect(Grid(data=ranks), device_options=DeviceOptions(composed=of)) for of in ((), rows))
    least: dict[str, int] = {}
    try:
        for collective in COMPOSED:
            count = max(message // 4 // ranks, 1) * ranks
            while count >= ranks:
                tensor = torch.ones(count // ranks if collective == "all_gather" else count, device=plain.device)
                ways = (getattr(comms.world, collective) for comms in (plain, composed))
                own, other = (min(_timed(plain, repeats, partial(way, tensor))) for way in ways)
                if other > _FASTER * own:
                    break
                least[collective] = 4 * count
                count = count // 4 // ranks * ranks
    finally:
        composed.close()
        plain.close()
    return {f"{node}x{ranks // node}": least}


def _all_have_litgpt(world: Communicators) -> bool:
    import torch

    return bool(world.world.all_reduce(torch.tensor(int(find_spec("litgpt") is not None)), "min"))


def _latency(comms: Communicators, steps: int, repeats: int) -> float:
    """Return microseconds of one of the ``steps`` of a tiny all-reduce over y."""
    import torch

    tensor = torch.ones(1, device=comms.device)
    seconds = median(_timed(comms, repeats, lambda: comms.y.all_reduce(tensor, "max")))
    return round(1e6 * seconds / steps, 3)


def _gemm(comms: Communicators, shape: tuple[int, int, int], repeats: int, dtype: str) -> dict[str, Any]:
    """Return the rate of one product, all ranks at once."""
    import torch

    m, k, n = shape
    draws = torch.Generator(comms.device).manual_seed(0)
    a, weight = (
        torch.randn(size, generator=draws, device=comms.device).to(getattr(torch, dtype)) for size in ((m, k), (n, k))
    )
    seconds = min(_timed(comms, repeats, lambda: a @ weight.t()))
    return {"m": m, "k": k, "n": n, "tflops": round(2e-12 * m * k * n / seconds, 6)}


def _copy(comms: Communicators, message: int, repeats: int) -> float:
    """Return GB/s of a copy (read and write counted), all ranks at once."""
    import torch

    source = torch.ones(max(1, message // 4), device=comms.device)
    target = torch.empty_like(source)
    seconds = min(_timed(comms, repeats, lambda: target.copy_(source)))
    return round(8 * source.numel() / seconds / 1e9, 4)


def _layer(comms: Communicators, repeats: int, dtype: str) -> float:
    """Return microseconds of one layer of a tiny GPT, forward and backward, all ranks at once; nothing is reduced.

    Its weights are fp32; products in another ``dtype`` are those of autocast.
    """
    import torch
    from litgpt import GPT, Config

    import axo

    with torch.random.fork_rng(devices=[]):
        model = axo.parallelize(GPT(Config(**_TINY)), comms)
    ids = torch.zeros(1, _TINY["block_size"], dtype=torch.long)

    def step() -> None:
        with axo.no_sync(model):
            with torch.autocast("cpu", getattr(torch, dtype)) if dtype != "float32" else nullcontext():
                loss = axo.nn.cross_entropy(model(ids), ids, comms=comms, columns=_TINY["padded_vocab_size"])
            loss.backward()

    layers = sum(len(block.layers) for block in readers.from_litgpt(_TINY, seq_length=ids.shape[1]).unrolled())
    return round(1e6 * median(_timed(comms, repeats, step)) / layers, 1)


def _memory_gib(device: str, node: int) -> float:
    """Memory of one rank's device, or its share of the host's."""
    import torch

    from axo.comm.memory import physical_memory

    return (physical_memory(torch.device(device)) or 0) / GIB / (node if device == "cpu" else 1)


def _what(device: str) -> str:
    """What a rank is, in words."""
    if device == "cpu":
        return f"a share of {os.cpu_count()} cores"
    import torch

    return torch.cuda.get_device_name(torch.cuda.current_device())
