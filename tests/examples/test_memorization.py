"""The memorization study: its buckets, its mask, its judgement of a repeated document, its steps against plain torch.

The study itself is the last test, a long proof.
"""

import json
import random
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import axo
from axo.nn.goldfish import goldfish_mask, goldfish_targets
from examples.memorization import __main__ as command
from examples.memorization import documents, study
from examples.memorization.documents import EPOCHS, UNIQUE_RUN
from examples.memorization.study import Settings
from tests.launcher import run_ranks

LENGTH, VOCABULARY = 40, 96
WIDE = 512  # whose steps are shorter than the bound
SMALL = Settings(32, vocabulary=VOCABULARY, length=LENGTH, suffix=20, warmup=1)


def texts(count: int = 30) -> list[list[int]]:
    draws = random.Random(0)
    return [[draws.randrange(VOCABULARY) for _ in range(LENGTH + draws.randrange(20))] for _ in range(count)]


def test_documents_are_like_no_other_text():
    given = texts()
    given[1][5 : 5 + UNIQUE_RUN] = given[0][30 : 30 + UNIQUE_RUN]  # a run in common, inside both documents
    given[3][LENGTH : LENGTH + UNIQUE_RUN] = given[2][:UNIQUE_RUN]  # in the document of one, after that of the other
    given[4] = given[4][: LENGTH - 1]
    given[5][2 : 1 + UNIQUE_RUN] = given[6][2 : 1 + UNIQUE_RUN]  # a run of one token less is nothing
    assert documents.library(given, LENGTH).usable == [3, *range(5, 30)]


def test_buckets_are_disjoint_and_the_other_text_holds_none_of_them():
    source = documents.library(texts(), LENGTH)
    buckets = documents.draw(source, 3, seed=1)
    assert buckets.documents.shape == (len(EPOCHS), 3, LENGTH)
    drawn = [tuple(document) for bucket in buckets.documents.tolist() for document in bucket]
    heads = [tuple(text[:LENGTH]) for text in source.texts]
    assert len(set(drawn)) == len(drawn) and set(drawn) <= set(heads)
    left = [text for text, head in zip(source.texts, heads, strict=True) if head not in drawn]
    assert buckets.other.tolist() == [token for text in left for token in text] and len(left) == 30 - 12
    assert torch.equal(documents.draw(source, 3, seed=1).documents, buckets.documents)
    assert not torch.equal(documents.draw(source, 3, seed=2).documents, buckets.documents)
    with pytest.raises(ValueError, match=r"documents=8 in 4 buckets are 32, and there are 30 .* use 1 to 7"):
        documents.draw(source, 8, seed=0)


def test_each_document_is_seen_as_often_as_its_bucket_says():
    seen = documents.schedule(20, seed=3)
    expected = {(bucket, document): epochs for bucket, epochs in enumerate(EPOCHS) for document in range(20) if epochs}
    assert Counter(seen) == expected
    places = [index / len(seen) for index, item in enumerate(seen) if item == (3, 7)]
    # one in each sixth of the run's time; a place in the order is that time but for what chance the others add
    assert all(abs(place - (epoch + 0.5) / 6) < 0.2 for epoch, place in enumerate(places))
    batches = list(study.batches(SMALL, documents.draw(documents.library(texts(), LENGTH), 2, 0), 0))
    assert len(batches) == 1 + 2 * sum(EPOCHS)


@pytest.mark.parametrize("k", [2, 3, 4])
def test_goldfish_drops_one_in_k_of_real_text(k):
    from pydoc_data.topics import topics

    words: dict[str, int] = {}
    text = [words.setdefault(word, len(words)) for name in sorted(topics) for word in topics[name].split()]
    buckets = documents.Buckets(torch.tensor(text[:8000]).view(4, 20, 100), torch.tensor(text[8000:]))
    assert abs(k * study.dropped_share(buckets, (k, 13)) - 1) <= 0.02


def test_a_passage_loses_the_same_tokens_in_any_document():
    passage, (first, second) = texts(1)[0][:30], torch.randint(VOCABULARY, (2, 64))
    first[3:33], second[30:60] = torch.tensor(passage), torch.tensor(passage)
    alone = goldfish_mask(torch.tensor(passage), 2, 13)[13:]
    assert 0 < alone.sum() < len(alone)
    assert torch.equal(goldfish_mask(first, 2, 13)[16:33], alone)
    assert torch.equal(goldfish_mask(second, 2, 13)[43:60], alone)


class Parrot(torch.nn.Module):
    """Knows some documents by heart: the token after a beginning that it has met; 0 after any other."""

    def __init__(self, known: list[list[int]]) -> None:
        super().__init__()
        self.next = {tuple(text[:end]): text[end] for text in known for end in range(1, len(text))}

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        said = [[self.next.get(tuple(row[: end + 1]), 0) for end in range(len(row))] for row in ids.tolist()]
        return F.one_hot(torch.tensor(said), VOCABULARY).float()


def test_exact_match_is_found_and_nothing_else():
    known = [[token or 1 for token in text[:LENGTH]] for text in texts(3)]
    wrong_start, wrong_end = list(known[1]), list(known[2])
    wrong_start[10] = wrong_start[10] % 90 + 1
    wrong_end[-1] = wrong_end[-1] % 90 + 1
    asked = torch.tensor([known[0], wrong_start, wrong_end])
    right = study.said_rightly(Parrot(known), asked, 20)
    assert right.shape == (3, 20)
    assert right.all(1).tolist() == [True, False, False]
    assert right[1].sum() == 0 and right[2].sum() == 19
    # the changed token stands before the suffix, the text after it is the parrot's: a prompt it does not know
    assert study.said_rightly(Parrot([*known, wrong_start]), asked, 20).all(1).tolist() == [True, True, False]


def test_exact_match_is_what_greedy_decoding_repeats():
    model = study.build(SMALL, seed=0)
    start = torch.tensor([text[:20] for text in texts(4)])
    said = start
    for _ in range(20):
        said = torch.cat([said, model(said)[:, -1:].argmax(-1)], 1)
    other = said.clone()
    other[:, 25] = (other[:, 25] + 1) % VOCABULARY
    assert study.said_rightly(model, said, 20).all()
    assert not study.said_rightly(model, other, 20).all(1).any()


def some_batches() -> list[torch.Tensor]:
    buckets = documents.draw(documents.library(texts(), LENGTH), 2, seed=0)
    return list(study.batches(Settings(32, 2, VOCABULARY, LENGTH, 20, warmup=1, batch=2), buckets, 0))[:4]


def steps_on(grid: str, goldfish: tuple[int, int] | None) -> tuple[list[float], torch.Tensor]:
    settings = Settings(WIDE, 1, VOCABULARY, LENGTH, 20, batch=2, goldfish=goldfish)
    comms = axo.connect(grid)
    model = axo.parallelize(study.build(settings, seed=5), comms, plan="litgpt", gather_logits=True)
    optimizer = torch.optim.SGD(model.parameters())
    losses = [study.step(model, optimizer, batch, settings, comms) for batch in some_batches()]
    return losses, study.said_rightly(model, some_batches()[-1], 20)


def steps_in_plain_torch(goldfish: tuple[int, int] | None) -> tuple[list[float], torch.Tensor]:
    """fp64, one process, the update written out."""
    settings = Settings(WIDE, 1, VOCABULARY, LENGTH, 20, batch=2)
    model = study.build(settings, seed=5).double()
    losses, lengths = [], []
    for batch in some_batches():
        targets = batch[:, 1:] if goldfish is None else goldfish_targets(batch[:, :-1], batch[:, 1:], *goldfish)
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), targets.flatten(), ignore_index=-100)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        length = min(1.0, loss.item() / sum(float(gradient.square().sum()) for gradient in gradients))
        lengths.append(length)
        with torch.no_grad():
            for weight, gradient in zip(model.parameters(), gradients, strict=True):
                weight -= length * gradient
        losses.append(loss.item())
    assert min(lengths) < 1  # or the bound is all that is checked
    return losses, study.said_rightly(model, some_batches()[-1], 20)


@pytest.mark.parametrize(
    ("grid", "goldfish"),
    [("1x1x1x1", None), ("2x1x1x1", (2, 5)), ("1x2x1x1", None), ("1x1x2x1", (2, 5)), ("1x1x1x2", (2, 5))],
)
def test_steps_on_a_grid_are_those_of_plain_torch(grid, goldfish):
    losses, right = steps_in_plain_torch(goldfish)
    assert losses[-1] != losses[0]
    for ours, said in run_ranks(steps_on, axo.Grid.parse(grid).world_size, grid, goldfish):
        assert ours == pytest.approx(losses, rel=1e-4)  # fp32; a step is as long as the loss is high
        assert torch.equal(said, right)


def quick(monkeypatch: pytest.MonkeyPatch, folder: Path, *more: str) -> int:
    monkeypatch.setattr(documents, "read_texts", lambda: ["text"])
    monkeypatch.setattr(documents, "tokenize", lambda _, vocabulary: [text * 2 for text in texts()])
    monkeypatch.setattr(command, "set_threads", lambda *_: None)
    return command.main(["--seeds", "1", "--documents", "2", "--widths", "16,32", "--out", str(folder), *more])


def test_the_command_writes_what_it_prints_and_goes_on_where_it_stopped(monkeypatch, tmp_path, capsys):
    assert quick(monkeypatch, tmp_path, "--seconds", "0") == command.UNFINISHED
    assert quick(monkeypatch, tmp_path) in (0, 1)
    lines = [json.loads(line) for line in (tmp_path / "memorization.jsonl").read_text().splitlines()]
    runs = [line for line in lines if "loss" in line]
    assert [(run["loss"], run["width"]) for run in runs] == [
        (loss, width) for width in (32, 16) for loss in ("cross-entropy", "Goldfish k=2 h=13")
    ]
    assert (tmp_path / "memorization.png").stat().st_size > 10_000
    assert "Goldfish leaves 1/2 of the tokens out" in capsys.readouterr().out
    quick(monkeypatch, tmp_path)
    again = [json.loads(line) for line in (tmp_path / "memorization.jsonl").read_text().splitlines()]
    assert [line for line in again if "loss" in line] == runs


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({}, 0),
        ({"plain": 0.49}, 1),
        ({"goldfish": 0.04}, 1),
        ({"dropped": 0.48}, 1),
        ({"plain": 0.5, "dropped": 0.505}, 0),
    ],
)
def test_a_missed_target_is_told(change, status, tmp_path):
    values = {"plain": 0.9, "goldfish": 0.02, "dropped": 0.5} | change
    rest = {"width": 64, "seed": 0, "cpu_s": 1.0, "wall_s": 1.0, "0 ep": 0.0, "1 ep": 0.1, "4 ep": 0.2}
    rows = [
        rest | {"loss": command.PLAIN, "6 ep": values["plain"], "dropped": None},
        rest | {"loss": "Goldfish", "6 ep": values["goldfish"], "dropped": values["dropped"]},
    ]
    table = command.Table({}, tmp_path / "lines")
    assert command.judge(rows, command.parse(["--widths", "64"]), table) == status


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_the_study_meets_its_targets(tmp_path):
    assert command.main(["--out", str(tmp_path)]) == 0
