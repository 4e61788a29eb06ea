"""Sequences over z: which tokens a rank of a context has, and what its ranks tell each other of a batch.

``axo.connect(grid, context=c)`` lets c neighbours along z hold pieces of the same sequences: rank i has pieces i and
2c - 1 - i of 2c (``axo.placement.context_ranges``), or of packed documents those that ``ranges_by_work`` gives. Rows
over z are tokens then. Layers that work token by token need nothing; attention looks beyond its own tokens
(``axo.nn.attention``), positions count from the sequence's start, and the label of a piece's last token is another
rank's. A batch has one ``Pieces``, which goes with it through the model, so that a block that is run again in backward
sees the documents of its own batch.

Not here: how a model is told (``axo.plans.context``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.nn.functional as F

from axo.check import one_of
from axo.comm.communicator import Communicator
from axo.comm.transports import alone
from axo.errors import Refused
from axo.matmul import cost
from axo.placement import Range, context_ranges, cut_ranges

KINDS = cost.EXCHANGES


@dataclass(frozen=True, eq=False)
class Pieces:
    """How a batch of sequences lies on the ranks of a context.

    Attributes:
        length: Tokens of each sequence.
        communicator: Of the context, ``comms.context``.
        kind: How its attention exchanges keys and values: "ring", "gather" or "heads".
        documents: Whose tokens see each other: a number for each token, ``(rows, length)``, which does not fall along a
            sequence; None: all of a sequence.
        cut_by: The tokens of each rank, if they are not an early and a late piece.
    """

    length: int
    communicator: Communicator
    kind: str = "ring"
    documents: torch.Tensor | None = None
    cut_by: Sequence[Sequence[Range]] | None = None

    def __post_init__(self) -> None:
        check_kind("context", self.kind)

    @property
    def ranks(self) -> int:
        """Of the context."""
        return self.communicator.size

    @cached_property
    def on_one_rank(self) -> Pieces:
        """The same batch, all of whose tokens a rank has."""
        return replace(self, communicator=alone("context", self.communicator.device), cut_by=None)

    def ranges(self, rank: int | None = None) -> Sequence[Range]:
        """The ranges of tokens that a rank has, two or more; default: this one."""
        rank = self.communicator.rank if rank is None else rank
        return context_ranges(self.length, self.ranks, rank) if self.cut_by is None else self.cut_by[rank]

    def tokens(self, rank: int | None = None) -> int:
        """How many these are."""
        return sum(high - low for low, high in self.ranges(rank))

    @property
    def longest(self) -> int:
        """Tokens of the rank that has the most: what is exchanged is padded to them."""
        return max(map(self.tokens, range(self.ranks)))

    @cached_property
    def document_starts(self) -> tuple[list[int], list[int]]:
        """Where the document of each token begins: at the earliest, and at the latest, of all rows."""
        assert self.documents is not None
        numbers = self.documents
        first = torch.arange(self.length, device=numbers.device).expand_as(numbers).contiguous()
        first[:, 1:].masked_fill_(numbers[:, 1:] == numbers[:, :-1], 0)
        starts = first.cummax(1).values
        return starts.amin(0).tolist(), starts.amax(0).tolist()

    def positions(self, device: torch.device) -> torch.Tensor:
        """Where this rank's tokens stand in the sequence, ``(tokens,)``."""
        return cut_ranges(torch.arange(self.length, device=device), self.ranges(), 0)

    def cut(self, whole: torch.Tensor, rank: int, dim: int) -> torch.Tensor:
        """A rank's tokens of a tensor with those of all, padded by zeros to ``longest``."""
        return pad(cut_ranges(whole, self.ranges(rank), dim), self.longest, dim)

    def join(self, parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
        """All tokens in their order, of what :meth:`cut` gave each rank."""
        starts = dict[int, torch.Tensor]()
        for rank, part in enumerate(parts):
            place = 0
            for low, high in self.ranges(rank):
                if low < high:
                    starts[low] = part.narrow(dim, place, high - low)
                place += high - low
        return torch.cat([starts[start] for start in sorted(starts)] or [parts[0].narrow(dim, 0, 0)], dim)


def pad(tensor: torch.Tensor, size: int, dim: int) -> torch.Tensor:
    """``tensor`` with zeros behind its end along ``dim``, which becomes ``size``."""
    missing = size - tensor.shape[dim]
    return F.pad(tensor, [0, 0] * (tensor.dim() - 1 - dim % tensor.dim()) + [0, missing]) if missing else tensor


def pieces_of(
    tokens: torch.Tensor,
    communicator: Communicator,
    kind: str = "ring",
    cut_by: Sequence[Sequence[Range]] | None = None,
) -> Pieces:
    """How the batch lies of which this rank has ``tokens``. Collective over a context: two numbers a rank.

    Args:
        tokens: Ids or features of this rank's tokens, ``(rows, its tokens, ...)``.
        communicator: ``comms.context``.
        kind: ``"ring"``, ``"gather"`` or ``"heads"``.
        cut_by: The tokens of each rank, where ``axo.shard_batch`` has cut by work.

    Raises:
        ValueError: The ranks' tokens are no pieces of the same sequences; on every rank.
    """
    mine = torch.tensor([tokens.shape[:2]], device=communicator.device)
    shapes = communicator.all_gather(mine).tolist()
    pieces = Pieces(sum(count for _, count in shapes), communicator, kind, cut_by=cut_by)
    if shapes != [[shapes[0][0], pieces.tokens(rank)] for rank in range(communicator.size)]:
        raise ValueError(
            f"context: the ranks hold (rows, tokens) = {shapes}, which are no pieces of the same sequences of"
            f" {pieces.length} tokens; cut whole batches by axo.shard_batch(batch, comms), and pack or pad sequences of"
            " different lengths"
        )
    return pieces


def whole_tokens(mine: torch.Tensor, pieces: Pieces) -> torch.Tensor:
    """Gather numbers of tokens over a context: ``(rows, its tokens)`` -> ``(rows, length)``. No gradients.

    Raises:
        ValueError: They are not as many as the tokens of this rank, such as labels that were not cut with them.
    """
    if mine.shape[1] != pieces.tokens():
        raise ValueError(
            f"context: numbers of {mine.shape[1]} tokens beside {pieces.tokens()} tokens of this rank; cut labels and"
            " positions as the tokens are, by axo.shard_batch(batch, comms)"
        )
    parts = pieces.communicator.all_gather(pad(mine, pieces.longest, 1).contiguous().unsqueeze(0))
    return pieces.join(list(parts), 1)


def next_labels(labels: torch.Tensor, pieces: Pieces, ignored: int = -100) -> torch.Tensor:
    """The label of each token is that of the next one: ``(rows, its tokens)``; the last of a sequence has none."""
    shifted = F.pad(whole_tokens(labels, pieces)[:, 1:], (0, 1), value=ignored)
    return pieces.cut(shifted, pieces.communicator.rank, 1)[:, : labels.shape[1]].contiguous()


def with_documents(pieces: Pieces, positions: torch.Tensor) -> Pieces:
    """The same batch, of packed documents that do not see each other.

    Args:
        pieces: The batch.
        positions: Of this rank's tokens, ``(rows or 1, its tokens)``; they begin at 0 with each document.

    Raises:
        ValueError: One is neither 0 nor behind the one before, as where tokens lie otherwise than ``pieces`` says; on
            every rank.
    """
    whole = whole_tokens(positions.to(torch.int32), pieces)
    astray = (whole[:, 1:] != 0) & (whole[:, 1:] != whole[:, :-1] + 1)
    if bool(astray.any()):
        row, token = astray.nonzero()[0].tolist()
        raise ValueError(
            f"context: in row {row} position {int(whole[row, token + 1])} comes behind {int(whole[row, token])}; those"
            " of a document count from 0, and a batch that axo.shard_batch(..., positions=) has cut is read with its"
            " context_cut: give the model the whole dict"
        )
    numbers = (whole == 0).cumsum(1, dtype=torch.int32)
    packed = bool((numbers[:, -1:] > 1).any())
    return replace(pieces, documents=numbers) if packed else pieces


def check_kind(owner: str, kind: str, wanted: str = "") -> None:
    """Refuse an exchange that is not known, or that cannot do what attention wants.

    Raises:
        ValueError: It is not known.
        Refused: ``wanted``, what the model's own attention does to scores, is not for it.
    """
    one_of(f"{owner}: context", kind, KINDS)
    if wanted and kind != "gather":
        raise Refused(f"{owner}: context={kind!r} cannot have {wanted}; use context='gather'")


def check_heads(owner: str, kind: str, heads: int, groups: int, ranks: int) -> None:
    """Refuse heads of a rank that cannot be given to the ranks of a context.

    Raises:
        Refused: The kind is "heads" and they do not divide.
    """
    if kind == "heads" and not cost.heads_divide(heads, groups, ranks):
        raise Refused(
            f"{owner}: context='heads' cannot give a rank's {heads} heads of queries and {groups} of keys and values to"
            f" {ranks} ranks; use context='ring' or 'gather'"
        )
