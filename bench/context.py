"""A sequence over two CPU ranks: what the ring hides behind attention, and what pieces of equal work gain.

    axo bench context --tokens 16384 --limit 50M

Forward and backward of ``axo.nn.attention``, causal, on two ranks that play two hosts; what leaves one is held to
--limit bytes a second. In turn, each --rounds times: as it is; with each message waited for where it is sent; and with
contiguous pieces, of which the later rank's has three times the work. Times are medians of the slowest rank.

A round of two ranks sends keys and values forward, the same backward, and their gradient behind it: three messages of
equal size, of which the last leaves when there is nothing left to compute. So at most two of three can hide, and what
is hidden is told as a share of these. The check is the result on one rank.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch

from .lib.arguments import Parser
from .lib.clock import slowest
from .lib.table import Table, environment

COLUMNS = {"case": "s", "tokens": "d", "limit_MBs": ".0f", "seconds": ".3f", "error": ".1e"}
HEADS, SIZE, HIDES, BALANCE = 4, 32, 0.5, 1.3


def main(arguments: list[str] | None = None) -> int:
    """Print the three times and the two goals. Returns the number of goals missed."""
    from axo.launch import launch_local

    parser = Parser("axo bench context", __doc__, json=True)
    parser.add_argument("--tokens", type=int, default=16384, help="of the sequence (16384)")
    parser.add_argument("--limit", type=float, default=50.0, help="MB a second that leave a rank (50)")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args(arguments)
    if min(options.tokens, options.rounds) < 1 or options.limit <= 0:
        parser.error("--tokens, --rounds and --limit are above 0")
    table = Table(COLUMNS, options.json, environment(torch.device("cpu")) | {"bench": "context"})
    times, messages, error = launch_local(measure, 2, options.tokens, options.limit * 1e6, options.rounds)
    for case, seconds in times.items():
        table.add(case=case, tokens=options.tokens, limit_MBs=options.limit, seconds=seconds, error=error)
    hidden = (times["waited for"] - times["ring"]) / (2 / 3 * messages)
    gain = times["contiguous"] / times["ring"]
    table.note(f"messages alone {messages:.3f} s; hidden of what could be: {hidden:.0%} (goal {HIDES:.0%})",
               verdict=hidden >= HIDES, hidden=hidden)  # fmt: skip
    table.note(f"contiguous pieces over balanced ones: {gain:.2f} (goal {BALANCE})", verdict=gain >= BALANCE, gain=gain)
    return int(hidden < HIDES) + int(gain < BALANCE)


def measure(tokens: int, rate: float, rounds: int) -> tuple[dict[str, float], float, float]:
    """On each rank: seconds of each case, of the messages alone, and the largest relative error of the output."""
    import axo
    from axo.comm.hosts import simulate
    from axo.nn.context import Pieces

    torch.set_num_threads(1)
    simulate(1, rate=rate)
    with axo.connect("1x1x2x1", context=2) as comms:
        whole = Pieces(tokens, comms.context)
        torch.manual_seed(0)
        full = [torch.randn(1, HEADS, tokens, SIZE) for _ in range(3)]
        cases: dict[str, Callable[[], Any]] = {"ring": _as_it_is, "waited for": _waited_for, "contiguous": _contiguous}
        seconds: dict[str, list[float]] = {case: [] for case in cases}
        error = 0.0
        for _ in range(rounds):
            for case, changed in cases.items():
                with changed():
                    mine = [whole.cut(each, comms.context.rank, 2).requires_grad_() for each in full]
                    seconds[case].append(slowest(comms.world, partial(_step, mine, whole)))
        mine = [whole.cut(each, comms.context.rank, 2) for each in full]
        with torch.no_grad():
            ours = axo.nn.attention(mine[0], mine[1], mine[2], whole)
            serial = torch.nn.functional.scaled_dot_product_attention(full[0], full[1], full[2], is_causal=True)
        expected = whole.cut(serial, comms.context.rank, 2)
        error = float((ours - expected).abs().max() / expected.abs().max())
        keys = torch.cat(mine[1:], -1)
        messages = 3 * statistics.median(slowest(comms.world, partial(_message, keys, whole)) for _ in range(rounds))
        return {case: statistics.median(each) for case, each in seconds.items()}, messages, error


def _step(mine: list[torch.Tensor], pieces: Any) -> None:
    import axo

    output = axo.nn.attention(mine[0], mine[1], mine[2], pieces)
    output.backward(torch.ones_like(output))


def _message(keys: torch.Tensor, pieces: Any) -> None:
    from axo.nn.context_attention import _RingExchange

    _RingExchange(pieces)._pass_on(keys)()


@contextmanager
def _as_it_is() -> Iterator[None]:
    yield


def _waited_for() -> Any:
    from axo.nn.context_attention import _RingExchange

    plain = _RingExchange._pass_on

    def at_once(self: Any, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        arrived = plain(self, tensor)()
        return lambda: arrived

    return mock.patch.object(_RingExchange, "_pass_on", at_once)


def _contiguous() -> Any:
    from axo.nn import context

    def neighbours(length: int, ranks: int, rank: int) -> list[tuple[int, int]]:
        low, middle, high = (length * (2 * rank + half) // (2 * ranks) for half in range(3))
        return [(low, middle), (middle, high)]

    return mock.patch.object(context, "context_ranges", neighbours)


if __name__ == "__main__":
    raise SystemExit(main())
