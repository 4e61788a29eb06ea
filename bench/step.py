"""How long is a training step? Axo beside plain PyTorch and its own parallel schemes, interleaved in one run.

    axo bench step --cases serial --tokens 1024 --precision 32-true          1x1x1x1 against nn.Linear
    axo bench step --cases z,x,data --ranks 2 --tokens 256 --precision bf16-mixed
    torchrun --nproc-per-node 8 -m axo_bench.step --cases z                  on ranks that exist, such as GPUs

Cases: ``serial``; ``z`` against FSDP2, ``x`` against DTensor's column / row plan, ``data`` against DDP; each rival over
Gloo (NCCL on GPUs) and over backend axo, which tells transport and engine apart; everybody with torch's fused AdamW. A
round is one step of each contestant in turn, the order turned round each time, the slowest rank's time; figures are
means of the last 8 of 10 steps, as in the AxoNN papers, over all repeats. On CPUs each contestant has processes of its
own, and rivals have not Axo's settings of malloc, as users would run them; on ranks that exist all share those.

Columns: ms a step, how often faster than the first rival (median over rounds), tokens/s of all ranks, MFU and HFU (of
--peak-tflops, else of the rate of a large product measured here), comm: the part of the step that a rank is blocked in
communication (Axo alone knows), longer: by which part of it the step is longer than the same work without communication
(plain torch, the last row, whose ``faster`` is what could be won at that work; median over rounds), and the loss, which
must agree.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from axo.checkpoint.ranks import checkpoint_group, share
from axo.launch import RankFailed
from axo.perf.flops import narayanan

from .lib import step_models as models
from .lib.arguments import Parser
from .lib.emulation import emulated
from .lib.table import Table, environment

COLUMNS = {"case": "s", "contestant": "s", "ranks": "d", "ms": ".2f", "faster": ".2f", "tokens_s": ".0f"}
COLUMNS |= {"mfu": ".3f", "hfu": ".3f", "comm": ".2f", "longer": ".3f", "loss": ".4f"}
CASES = ("serial", "z", "x", "data")
STEPS, COUNTED = 10, 8
LOSS_LIMIT = {"32-true": 1e-3, "bf16-mixed": 5e-2}  # relative; the same weights after the same steps


def main(arguments: list[str] | None = None) -> int:
    """Run the bench; returns 1 when losses disagree."""
    parser = Parser("axo bench step", __doc__, json=True)
    parser.add_argument("--cases", default="serial,z,x,data", help="comma-separated")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=512)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=256, help="of a rank's rows")
    parser.add_argument("--precision", default="bf16-mixed", choices=list(LOSS_LIMIT))
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--repeats", type=int, default=1, help="times 10 steps")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--peak-tflops", type=float, default=None, help="of a rank")
    options = parser.parse_args(arguments)
    unknown = set(options.cases.split(",")) - set(CASES)
    if unknown:
        parser.error(f"--cases: {', '.join(sorted(unknown))}: choose from {', '.join(CASES)}")
    if options.tokens % options.seq_len:
        parser.error(f"--tokens {options.tokens} is not a multiple of --seq-len {options.seq_len}")
    from axo.launch import Rank, launch_local

    rank = Rank.from_environment()
    header = {"bench": "step", **environment(torch.device(options.device)), "options": _measured(options)}
    table = Table(COLUMNS, options.json if rank is None or rank.rank == 0 else None, header)
    dtype = torch.bfloat16 if options.precision == "bf16-mixed" else torch.float32
    if told := emulated(dtype, torch.device(options.device), "--precision 32-true"):
        table.note(told)
    for case in options.cases.split(","):
        if rank:
            rows = measure(case, options, table)
        elif options.device == "cpu":
            rows = measure_apart(case, options, table)
        else:
            rows = launch_local(measure, ranks_of(case, options), case, options, fork=False)
        for row in rows or []:
            table.add(**row)
    return int(any(not row["right"] for row in table.rows))


def _measured(options: argparse.Namespace) -> dict[str, Any]:
    """What was asked for, without where it goes: a place of one machine."""
    return {name: value for name, value in vars(options).items() if name != "json"}


class Player:
    """A contestant on these ranks, in turns."""

    def __init__(self, contestant: models.Contestant, sizes: models.Sizes, comms: Any) -> None:
        self.name, self._contestant, self._sizes, self._comms = contestant.name, contestant, sizes, comms
        self._batches = [batch(sizes, step, comms) for step in range(STEPS)]

    def turn(self, step: int) -> tuple[float, float, float]:
        """As ``timed_step``."""
        return timed_step(self._contestant, self._batches[step], self._comms)

    def rate(self) -> float:
        """As ``product_rate``."""
        return product_rate(self._sizes, torch.device(self._comms.device))


class PlayerApart:
    """A contestant on ``ranks`` new local ranks of its own: they do what it is asked, and rank 0 answers.

    While it waits for them, ``tell`` hears what for.
    """

    def __init__(
        self, case: str, ranks: int, options: argparse.Namespace, index: int, tell: Callable[[str], None]
    ) -> None:
        fork = multiprocessing.get_context("fork")
        self._pipe, theirs = fork.Pipe()
        self._launcher = fork.Process(target=launch, args=(os.getpid(), ranks, case, options, index, theirs))
        self._launcher.start()
        theirs.close()  # so that ranks that have failed are an end of file here
        self._case, self._tell = case, tell
        self.name = f"contestant {index} of case {case}"
        tell(starting := f"{case}: starting contestant {index + 1}, ranks: {ranks}")
        self.name = self._answer(starting)

    def _answer(self, doing: str) -> Any:
        start = time.monotonic()
        try:
            while not self._pipe.poll(10.0):
                self._tell(f"{doing}: {time.monotonic() - start:.0f} s so far")
            return self._pipe.recv()
        except (EOFError, ConnectionError):
            raise RankFailed(f"the ranks of {self.name} ended; their error stands above", rank=0) from None

    def _ask(self, *question: Any) -> Any:
        with contextlib.suppress(BrokenPipeError):  # its ranks have failed: there is no answer
            self._pipe.send(question)
        return self._answer(f"{self._case}: {self.name}, {question[0]}")

    def turn(self, step: int) -> tuple[float, float, float]:
        return self._ask("turn", step)

    def rate(self) -> float:
        return self._ask("rate")

    def end(self) -> None:
        with contextlib.suppress(BrokenPipeError):  # its ranks have failed
            self._pipe.send(None)
        self._launcher.join()


def launch(parent: int, ranks: int, *play_arguments: Any) -> None:
    """In a process of its own, which ends with ``parent``: the ranks of one contestant."""
    from axo.launch import Interrupted, end_with, launch_local

    end_with(parent)
    with contextlib.suppress(Interrupted):  # by the signal that the parent has got too, and tells of
        launch_local(play, ranks, *play_arguments)


def play(case: str, options: argparse.Namespace, index: int, pipe: Connection) -> None:
    """On every rank of one contestant: do what rank 0 is asked through ``pipe``, until that is None."""
    entry = contestants(case, sizes_of(options))[index]
    if not entry.with_malloc:
        os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", "")  # malloc has read its own; axo.connect leaves it alone now
    sizes, comms = begin(case, options)
    player = Player(entry.make(comms), sizes, comms)
    answer: Any = player.name
    while True:
        question: Any = None
        if comms.everyone.rank == 0:
            pipe.send(answer)
            question = pipe.recv()
        question = share(checkpoint_group(comms), question)[0]
        if question is None:
            break
        what, *arguments = question
        answer = getattr(player, what)(*arguments)
    comms.close()


def measure(case: str, options: argparse.Namespace, table: Table | None = None) -> list[dict[str, Any]]:
    """On every rank: the rows of one case, of contestants that share the ranks; on ranks other than 0 none."""
    sizes, comms = begin(case, options)
    players = [Player(each.make(comms), sizes, comms) for each in contestants(case, sizes)]
    rows = compete(case, options, players, table if comms.everyone.rank == 0 else None)
    comms.close()
    return rows if comms.everyone.rank == 0 else []


def measure_apart(case: str, options: argparse.Namespace, table: Table | None = None) -> list[dict[str, Any]]:
    """The rows of one case, of contestants that have local ranks of their own; ``table`` tells how far they are."""
    tell = table.progress if table is not None else lambda text: None
    with contextlib.ExitStack() as ends:
        players: list[PlayerApart] = []
        for index in range(len(contestants(case, sizes_of(options)))):
            players.append(PlayerApart(case, ranks_of(case, options), options, index, tell))
            ends.callback(players[-1].end)
        return compete(case, options, players, table)


def begin(case: str, options: argparse.Namespace) -> tuple[models.Sizes, Any]:
    """On every rank: the sizes and the communicators."""
    import axo
    from axo.launch import set_threads

    set_threads(0, int(os.environ["LOCAL_WORLD_SIZE"]))
    ranks = int(os.environ["WORLD_SIZE"])
    grid = axo.Grid(**({case: ranks} if case in axo.AXES else {}))
    comms = axo.connect(grid, device=options.device)
    return sizes_of(options), comms


def sizes_of(options: argparse.Namespace) -> models.Sizes:
    return models.Sizes(
        options.hidden, options.layers, options.heads, options.vocab, options.seq_len,
        options.tokens // options.seq_len, options.precision, options.recompute,
    )  # fmt: skip


def ranks_of(case: str, options: argparse.Namespace) -> int:
    given = os.environ.get("WORLD_SIZE")
    return int(given) if given else 1 if case == "serial" else options.ranks


def compete(
    case: str, options: argparse.Namespace, players: Sequence[Player | PlayerApart], table: Table | None = None
) -> list[dict[str, Any]]:
    """Give all players their turns; a row each. Ctrl-C leaves the rows of the rounds so far in ``table``."""
    seconds: dict[str, list[float]] = {each.name: [] for each in players}
    blocked: dict[str, list[float]] = {each.name: [] for each in players}
    losses: dict[str, float] = {}
    ranks = ranks_of(case, options)
    peak = (options.peak_tflops or players[-1].rate()) * 1e12 * ranks
    summary = partial(summarize, case, sizes_of(options), ranks, seconds, blocked, losses, peak)
    start, rounds = time.monotonic(), options.repeats * STEPS
    try:
        for number, (_, step) in enumerate(itertools.product(range(options.repeats), range(STEPS)), 1):
            turns: dict[str, tuple[float, float, float]] = {}
            for player in players[:: -1 if step % 2 else 1]:
                turns[player.name] = player.turn(step)
                if table is not None:
                    part = (number - 1 + len(turns) / len(players)) / rounds
                    left = (time.monotonic() - start) * (1 / part - 1)
                    told = f"{player.name}, {1e3 * turns[player.name][0]:.0f} ms; rows in {left:.0f} s"
                    table.progress(f"{case}: step {number} of {rounds}: {told}")
            for name, (spent, waited, losses[name]) in turns.items():
                if step >= STEPS - COUNTED:
                    seconds[name].append(spent)
                    blocked[name].append(waited)
    except KeyboardInterrupt:
        if table is not None and all(seconds.values()):
            for row in summary():
                table.add(**row)
            table.note(f"{case}: stopped: {len(row['all_ms'])} of {options.repeats * COUNTED} steps are in its rows")
        raise
    return summary()


class Entry(NamedTuple):
    """Who takes part: makes the contestant of the communicators; ``with_malloc``: with Axo's settings of malloc."""

    make: Callable[[Any], models.Contestant]
    with_malloc: bool = True


def contestants(case: str, sizes: models.Sizes) -> list[Entry]:
    """Who takes part, the first rival second; the yardstick without communication last."""

    def axo_with(name: str = "", **options: Any) -> Entry:
        return Entry(lambda comms: models.axo_contestant(f"Axo {comms.grid}{name}", sizes, comms, **options))

    def rival(on_gpus: str, on_cpus: str) -> Entry:
        def make(comms: Any) -> models.Contestant:
            device = torch.device(comms.device)
            transport = on_gpus if device.type == "cuda" else on_cpus
            return models.rival(case, sizes, transport, dist.new_group(backend=transport), device)

        return Entry(make, with_malloc=False)

    if case == "serial":
        return [
            axo_with(),
            Entry(lambda comms: models.Contestant("nn.Linear", models.serial(sizes, comms.device), sizes)),
        ]
    return [
        axo_with(),
        rival("nccl", "gloo"),
        rival("axo", "axo"),
        *(axo_with(f" {name}", overlap=overlap) for name, overlap in switched(case, sizes)),
        Entry(lambda comms: models.alone(case, comms.everyone.size, sizes, comms.device)),
    ]


def switched(case: str, sizes: models.Sizes) -> list[tuple[str, Any]]:
    """Axo with what the case has to overlap switched off, and for z also without the cache of gathered weights."""
    from axo import Overlap

    if case == "x":
        return [("OAR off", Overlap(all_reduce=False))]
    if case == "data":  # one bucket is full when backward ends
        whole = 4 * sizes.hidden * (2 * sizes.vocab + sizes.layers * (12 * sizes.hidden + 4) + 2)
        return [("at the end", Overlap(bucket_bytes=whole))]
    return [
        ("ORS, OAG off", Overlap(reduce_scatter=False, all_gather=False)),
        ("nothing kept", Overlap(gather_cache="none")),
        ("nothing kept, ORS, OAG off", Overlap(reduce_scatter=False, all_gather=False, gather_cache="none")),
    ]


def batch(sizes: models.Sizes, step: int, comms: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's rows; peers on x hold the same."""
    seed = step * 1000 + comms.coords.data * comms.grid.z + comms.coords.z
    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(sizes.vocab, (sizes.rows, 1), generator=generator)
    ids = (start + 3 * torch.arange(sizes.seq_len + 1)) % sizes.vocab
    return ids[:, :-1].to(comms.device), ids[:, 1:].to(comms.device)


def timed_step(contestant: models.Contestant, rows: Any, comms: Any) -> tuple[float, float, float]:
    """Seconds of the slowest rank, its own seconds blocked, and the mean loss."""
    _synchronize(comms.device)
    comms.everyone.barrier()
    before = contestant.blocked() if contestant.blocked else 0.0
    start = time.perf_counter()
    loss = contestant.step(*rows)
    _synchronize(comms.device)
    spent = time.perf_counter() - start
    waited = contestant.blocked() - before if contestant.blocked else float("nan")
    slowest = comms.everyone.all_reduce(torch.tensor([spent], dtype=torch.float64, device=comms.device), "max")
    mean = comms.everyone.all_reduce(loss.double().reshape(1).to(comms.device), "avg")
    return float(slowest), waited, float(mean)


def _synchronize(device: Any) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def product_rate(sizes: models.Sizes, device: torch.device) -> float:
    """TFLOP/s of one rank in a 1024-cubed product of the compute dtype, all ranks at once."""
    dtype = torch.bfloat16 if sizes.precision == "bf16-mixed" else torch.float32
    a = torch.randn(1024, 1024, device=device).to(dtype)
    times = []
    for _ in range(8):
        _synchronize(device)
        start = time.perf_counter()
        a @ a
        _synchronize(device)
        times.append(time.perf_counter() - start)
    return 2 * 1024**3 / min(times) / 1e12


def summarize(
    case: str,
    sizes: models.Sizes,
    ranks: int,
    seconds: dict[str, list[float]],
    blocked: dict[str, list[float]],
    losses: dict[str, float],
    peak: float,
) -> list[dict[str, Any]]:
    """One row a contestant. ``faster`` is the median over steps of the first rival's time over this one's."""
    groups = ranks if case in ("z", "data") else 1
    tokens = sizes.tokens * groups
    shape = (sizes.rows * groups, sizes.seq_len, sizes.layers, sizes.hidden, sizes.vocab)
    flops = {"mfu": narayanan(*shape, recompute=False), "hfu": narayanan(*shape, recompute=sizes.recompute)}
    first, yardstick = list(seconds)[1], list(seconds)[-1]
    rows = []
    for name in seconds:
        mean = statistics.fmean(seconds[name])
        paired = [a / b for a, b in zip(seconds[first], seconds[name], strict=True)]
        longer = [a / b - 1 for a, b in zip(seconds[name], seconds[yardstick], strict=True)]
        apart = abs(losses[name] - losses[first]) / losses[first]
        rows.append(
            {
                "case": case,
                "contestant": name,
                "ranks": ranks,
                "ms": mean * 1e3,
                "faster": statistics.median(paired),
                "tokens_s": tokens / mean,
                "mfu": flops["mfu"] / mean / peak,
                "hfu": flops["hfu"] / mean / peak,
                "comm": None if math.isnan(waited := statistics.fmean(blocked[name])) else waited / mean,
                "longer": None if case == "serial" else statistics.median(longer),
                "loss": losses[name],
                "right": name == "no communication" or apart <= LOSS_LIMIT[sizes.precision],
                "all_ms": [round(1e3 * value, 3) for value in seconds[name]],
            }
        )
    return rows


if __name__ == "__main__":
    raise SystemExit(main())
