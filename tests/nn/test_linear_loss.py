"""Head and cross-entropy in chunks of rows: torch's on whole logits, and no tensor of tokens times vocabulary.

Oracles: ``F.linear`` and ``F.cross_entropy`` on one rank; LitGPT's model trained serially; ``cost`` for what is sent.
"""

from __future__ import annotations

import math
import resource
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from litgpt.config import Config
from litgpt.model import GPT
from torch import nn
from torch.utils.checkpoint import checkpoint

import axo
from axo.nn import Features, linear_cross_entropy
from axo.nn.linear_loss import linear_cross_entropy_cost
from tests import gpt
from tests.launcher import run_ranks
from tests.nn.support import (
    Largest,
    assert_close,
    assert_counted,
    assert_gradients_match,
    mean_over_data_ranks,
    my_rows,
    once,
    seed_apart,
)

ROWS, HIDDEN, VOCABULARY = 24, 12, 101
CASES: list[dict[str, Any]] = [
    {},
    {"label_smoothing": 0.1, "z_loss": 1e-2, "softcap": 3.0, "bias": True, "transposed": True},
    {"reduction": "none", "label_smoothing": 0.2, "bias": True, "softcap": 2.0},
    {"vocab_size": 90, "z_loss": 1e-3},
]


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    targets = torch.randint(80, (ROWS,), generator=generator)
    targets[::5] = -100
    return torch.randn(ROWS, HIDDEN, generator=generator), targets


def weights(rows: int) -> torch.Tensor:
    return torch.linspace(0.5, 2, rows)


def expected(case: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor], dict[str, Any]]:
    torch.manual_seed(1)
    head = nn.Linear(HIDDEN, VOCABULARY, case.get("bias", False))
    x, targets = inputs()
    x.requires_grad_()
    logits = head(x)[:, : case.get("vocab_size", VOCABULARY)]
    if "softcap" in case:
        logits = case["softcap"] * torch.tanh(logits / case["softcap"])
    losses = F.cross_entropy(logits, targets, reduction="none", label_smoothing=case.get("label_smoothing", 0.0))
    losses = losses + case.get("z_loss", 0.0) * logits.logsumexp(1).square() * (targets != -100)
    (losses * weights(ROWS) if case.get("reduction") == "none" else losses).sum().backward()
    gradients = {name: p.grad for name, p in head.named_parameters()}
    return losses.detach(), x.grad, gradients, head.state_dict()


def gradients(grid: str, recompute: bool) -> None:
    comms = axo.connect(grid)
    for case in CASES:
        losses, input_grad, serial, state = once(partial(expected, case))
        options = {"reduction": "sum"} | {k: v for k, v in case.items() if k not in ("bias", "transposed")}
        head = axo.nn.Linear(
            HIDDEN, VOCABULARY, case.get("bias", False), comms=comms, transposed=case.get("transposed", False),
            grad_reduce="sum", features=Features(uneven_out=True),
        )  # fmt: skip
        head.load_state_dict(state)
        x, targets = inputs()
        mine, ids = axo.shard_input(head, x).requires_grad_(), my_rows(comms, targets)
        call = partial(linear_cross_entropy, head=head, target=ids, chunk_rows=5, **options)
        with axo.count_collectives() as counts:
            loss = checkpoint(call, mine, use_reentrant=False) if recompute else call(mine)
            (loss * my_rows(comms, weights(ROWS))).sum().backward() if loss.dim() else loss.backward()
        own = my_rows(comms, losses)
        assert_close(loss, own if loss.dim() else own.sum(), 1e-5, f"{case}: loss")
        assert_close(mine.grad, axo.shard_input(head, input_grad), 1e-5, f"{case}: gradient of the input")
        assert_gradients_match(head, serial, 1e-5, str(case))
        if loss.dim() == 0 and not recompute:
            smoothing = "label_smoothing" in case
            rows = ROWS // comms.grid.data
            assert_counted(counts, linear_cross_entropy_cost(head, rows, label_smoothing=smoothing, chunk_rows=5))


@pytest.mark.parametrize(
    ("grid", "recompute"),
    [("1x1x1x1", False), ("2x2x2x1", False), ("2x1x1x2", True), ("1x2x3x1", False), ("3x1x2x1", True)],
)
def test_equals_torchs_on_whole_logits(grid: str, recompute: bool) -> None:
    run_ranks(gradients, axo.Grid.parse(grid).world_size, grid, recompute, timeout=90)


def build(comms: Any, config: dict[str, Any], zero: int) -> GPT:
    """LitGPT's model without its head, which stands beside it."""
    seed_apart(comms)
    model = axo.parallelize(GPT(Config(**config)), comms, zero=zero)
    model.head, model.lm_head = model.lm_head, nn.Identity()
    return model


def train(grid: str, steps: int, zero: int, precision: torch.dtype) -> list[float]:
    comms = axo.connect(grid)
    model = build(comms, gpt.LLAMA, zero)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        ids, targets = (my_rows(comms, part) for part in gpt.batch(model.config, step))
        total = 0.0
        for piece in (0, 1):
            with axo.no_sync(model) if piece == 0 else torch.enable_grad():
                with torch.autocast("cpu", precision, enabled=precision != torch.float32):
                    hidden = model(ids.chunk(2)[piece])
                    loss = linear_cross_entropy(hidden, model.head, targets.chunk(2)[piece], chunk_rows=7) / 2
                loss.backward()
            total += mean_over_data_ranks(comms, loss)
        axo.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


@pytest.mark.parametrize(("grid", "zero"), [("2x2x1x2", 2), ("2x1x2x1", 0)])
def test_twenty_steps_equal_serial_training(grid: str, zero: int) -> None:
    """Two micro-batches a step, the first without synchronisation: blocks are added up before they are reduced."""
    serial = gpt.serial_losses(gpt.LLAMA, 20, False)
    found = run_ranks(train, axo.Grid.parse(grid).world_size, grid, 20, zero, torch.float32, timeout=120)[0]
    assert found == pytest.approx(serial, abs=1e-4)


def test_in_bfloat16_as_much_as_products_round() -> None:
    serial = gpt.serial_losses(gpt.LLAMA, 5, False)
    assert run_ranks(train, 4, "2x1x2x1", 5, 0, torch.bfloat16)[0] == pytest.approx(serial, rel=1e-2)


def largest(chunk_rows: int) -> tuple[int, int, int]:
    comms = axo.connect("2x1x2x1")
    rows, hidden, vocabulary = 512, 16, 1024
    head = axo.nn.Linear(hidden, vocabulary, False, comms=comms)
    x = torch.randn(rows // 2, hidden, requires_grad=True)
    with Largest() as seen:
        linear_cross_entropy(x, head, torch.zeros(rows // 2, dtype=torch.int64), chunk_rows=chunk_rows).backward()
    return seen.elements, rows // 2 * vocabulary // 2, vocabulary // 2 * hidden


def test_logits_never_exist_whole() -> None:
    """The largest tensor is the block of the weight, where a chunk of logits is smaller."""
    for elements, logits, block in run_ranks(largest, 4, 8):
        assert elements <= block < logits / 8


def under_a_limit(whole: bool) -> str:
    """A step of 1.07 GB of logits on this rank, which may take 0.6 GB more than it has."""
    comms = axo.connect("2x1x1x1")
    head, ids = axo.nn.Linear(16, 1 << 17, bias=False, comms=comms), torch.arange(4096)
    nn.init.zeros_(head.weight)
    x = torch.ones(4096, 16, requires_grad=True)
    linear_cross_entropy(x[:8], head, ids[:8]).backward()  # what is loaded on the way
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData"))
    allowed = int(line.split()[1]) * 1024 + 600_000_000
    resource.setrlimit(resource.RLIMIT_DATA, (allowed, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    try:
        loss = axo.nn.cross_entropy(head(x), ids, comms=comms) if whole else linear_cross_entropy(x, head, ids)
        loss.backward()
    except RuntimeError as error:
        return str(error)
    return f"{loss.item():.3f}"


def test_logits_larger_than_the_memory_limit() -> None:
    """Oracle: the kernel's limit, which ends the same step with whole logits."""
    assert all("can't allocate memory" in words for words in run_ranks(under_a_limit, 2, True))
    assert run_ranks(under_a_limit, 2, False, timeout=120) == [f"{math.log(1 << 17):.3f}"] * 2


def uneven() -> None:
    """A rank without rows, and ranks without columns of the vocabulary: torch's gradients on one device."""
    torch.manual_seed(3)
    serial, x = nn.Linear(6, 5, bias=False), torch.randn(3, 6)
    F.cross_entropy(serial(x), torch.arange(3), reduction="sum").backward()
    for grid in ("1x1x4x1", "4x1x1x1"):
        comms = axo.connect(grid)
        features = Features(uneven_out=True)
        head = axo.nn.Linear(6, 5, bias=False, comms=comms, grad_reduce="sum", features=features)
        head.load_state_dict(serial.state_dict())
        mine = slice(comms.coords.z, comms.coords.z + 1) if comms.grid.z > 1 else slice(None)  # the last has none
        linear_cross_entropy(x[mine], head, torch.arange(3)[mine], reduction="sum", chunk_rows=2).backward()
        assert_gradients_match(head, serial, 1e-5, grid)
        comms.close()


def test_ranks_without_rows_or_columns() -> None:
    run_ranks(uneven, 4)


def nothing_counts() -> None:
    comms = axo.connect("1x1x2x1")
    head = axo.nn.Linear(8, 12, bias=False, comms=comms)
    ids = torch.arange(4) if comms.rank else torch.full((4,), -100)
    rows = torch.randn(4, 8, requires_grad=True)
    loss = axo.nn.linear_cross_entropy(rows, head, ids)
    loss.backward()
    assert loss.isnan().item() == (comms.rank == 0)  # as torch's mean over nothing
    assert rows.grad is not None and bool(rows.grad.any()) == (comms.rank == 1)
    assert head.weight.grad is not None and head.weight.grad.isfinite().all() and head.weight.grad.any()


def test_a_rank_whose_labels_are_all_ignored_spoils_no_weight() -> None:
    run_ranks(nothing_counts, 2)


def refusals() -> None:
    comms = axo.connect("2x1x1x1")
    head = axo.nn.Linear(8, 12, comms=comms)
    x, ids = torch.ones(3, 8), torch.zeros(3, dtype=torch.int64)
    for options, words in (
        ({"reduction": "max"}, "reduction='max' is not known"),
        ({"softcap": 0.0}, "softcap=0.0 is not a number above 0"),
        ({"chunk_rows": 0}, "chunk_rows=0 is not a whole number of at least 1"),
        ({"vocab_size": 13}, "vocab_size=13 is not between 1 and the 12 columns"),
        ({"head": nn.Linear(8, 12)}, "the head is a Linear; pass an axo.nn.Linear"),
        ({"target": ids[:2]}, r"targets of shape \(2,\) do not fit"),
    ):
        with pytest.raises(ValueError, match=words):
            linear_cross_entropy(**({"input": x, "head": head, "target": ids} | options))
    with pytest.raises(IndexError, match="target 12 is out of range"):
        linear_cross_entropy(x, head, ids + 12)
    loss = linear_cross_entropy(x, head, ids)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="only one backward"):
        loss.backward()


def test_bad_input_is_one_error() -> None:
    run_ranks(refusals, 2)
