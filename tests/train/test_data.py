"""Text, tokens and batches. Oracles: the files' own bytes, NumPy slices of them, and counting."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from axo.grid import Grid
from axo.train import TrainConfig, data, runner
from tests.launcher import run_ranks


def write(folder: Path, sizes: list[int]) -> tuple[list[Path], bytes]:
    """Files of these sizes with random bytes, and all of them joined."""
    generator = np.random.default_rng(3)
    files, everything = [], b""
    for index, size in enumerate(sizes):
        piece = generator.integers(0, 256, size, dtype=np.uint8).tobytes()
        path = folder / f"{index:02}.bin"
        path.write_bytes(piece)
        files.append(path)
        everything += piece
    return files, everything


def byte_tokenizer(path: Path, extra: list[str] | None = None) -> Path:
    """A tokenizer.json: GPT-2's byte alphabet (256 symbols), no merges, and ``extra`` tokens that text never gives."""
    from tokenizers.pre_tokenizers import ByteLevel

    symbols = [*sorted(ByteLevel.alphabet()), *(extra or [])]
    path.write_text(
        json.dumps(
            {
                "version": "1.0",
                "added_tokens": [],
                "pre_tokenizer": {
                    "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False
                },
                "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
                "model": {"type": "BPE", "vocab": {symbol: i for i, symbol in enumerate(symbols)}, "merges": []},
            }
        )
    )  # fmt: skip
    return path


def test_corpus_reads_across_files_and_empty_files(tmp_path: Path) -> None:
    files, everything = write(tmp_path, [5, 0, 7, 1, 0, 0, 300, 2])
    corpus = data.Corpus(files)
    assert len(corpus) == len(everything) == 315
    expected = np.frombuffer(everything, dtype=np.uint8)
    for start, count in [(0, 315), (0, 1), (4, 2), (5, 8), (12, 2), (313, 2), (314, 1), (20, 0)]:
        tokens = corpus.read(start, count)
        assert tokens.dtype == np.int64
        assert np.array_equal(tokens, expected[start : start + count]), (start, count)
    (tmp_path / "new").write_bytes(bytes(300))
    os.replace(tmp_path / "new", files[-2])  # as long as the one before, and its bytes are others
    os.truncate(files[-1], 1)
    for start in (100, 314):
        with pytest.raises(ValueError, match=r"bin was changed or replaced while the run reads it; leave it as it was"):
            corpus.read(start, 1)


def test_texts_are_told_apart_by_their_contents_not_by_their_place(tmp_path: Path) -> None:
    (tmp_path / "moved").mkdir()
    large = np.random.default_rng(0).bytes(1 << 20)
    first, last = b"x" + large[1:], large[:-1] + b"x"
    digests = []
    for name, content in (("a", large), ("moved/a", large), ("a", first), ("a", last), ("a", b"ab"), ("a", b"ac")):
        (tmp_path / name).write_bytes(content)
        digests.append(data.digest_of([tmp_path / name]))
    assert digests[0] == digests[1] and len(set(digests)) == 5


def test_find_files_takes_files_and_sorted_folders(tmp_path: Path) -> None:
    for name in ("b/2.txt", "b/10.txt", "a.txt", "tests/c.txt", ".hidden/no.txt", ".no.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    found = [file.relative_to(tmp_path).as_posix() for file in data.find_files([tmp_path])]
    assert found == ["a.txt", "b/10.txt", "b/2.txt", "tests/c.txt"]
    assert data.find_files([tmp_path / "b" / "2.txt", tmp_path / "a.txt"]) == [tmp_path / "b/2.txt", tmp_path / "a.txt"]


def test_missing_path_and_empty_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere\.txt does not exist"):
        data.find_files([tmp_path / "nowhere.txt"])
    with pytest.raises(ValueError, match="holds no files"):
        data.find_files([tmp_path])


def test_default_text_is_the_library_without_packages_and_tests() -> None:
    files = data.default_text()
    names = [file.as_posix() for file in files]
    assert len(files) > 100 and len(set(names)) == len(names)
    assert any(name.endswith("/argparse.py") for name in names)
    assert not [name for name in names if "site-packages" in name or "/test/" in name or "/tests/" in name]
    assert files == data.default_text()


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 17, 100, 1000])
def test_permute_is_a_permutation(size: int) -> None:
    for key in (0, 1, 2**63 + 5):
        assert sorted(data.permute(np.arange(size), size, key=key).tolist()) == list(range(size))


def test_permutations_of_different_keys_differ_and_mix() -> None:
    first = data.permute(np.arange(1000), 1000, key=1).tolist()
    second = data.permute(np.arange(1000), 1000, key=2).tolist()
    # Of two independent random permutations about one position in 1,000 agrees; neighbours are about 333 apart.
    assert sum(a == b for a, b in zip(first, second, strict=True)) < 10
    assert 280 < np.abs(np.diff(first)).mean() < 390


def test_an_epoch_shows_every_window_once(tmp_path: Path) -> None:
    files, _ = write(tmp_path, [10 * 23 + 5])
    batches = data.Batches(data.Corpus(files), seq_len=10, batch_size=4, seed=7)
    assert batches.windows == 23
    order = np.concatenate([batches.windows_of(step, range(4)) for step in range(23)]).tolist()  # 92 = 4 epochs of 23
    epochs = [order[i : i + 23] for i in range(0, 92, 23)]
    assert all(sorted(epoch) == list(range(23)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_rows_hold_the_text_and_targets_are_shifted_by_one(tmp_path: Path) -> None:
    files, everything = write(tmp_path, [40, 61])
    batches = data.Batches(data.Corpus(files), seq_len=8, batch_size=6, seed=1)
    inputs, targets = batches.read(2, range(6))
    assert inputs.shape == targets.shape == (6, 8)
    for row in range(6):
        start = int(batches.windows_of(2, range(row, row + 1))[0]) * 8
        assert bytes(inputs[row].astype(np.uint8)) == everything[start : start + 8]
        assert bytes(targets[row].astype(np.uint8)) == everything[start + 1 : start + 9]


def test_batches_depend_on_seed_and_step_only(tmp_path: Path) -> None:
    files, _ = write(tmp_path, [5000])
    corpus = data.Corpus(files)

    def read(seed: int, step: int) -> np.ndarray:
        return data.Batches(corpus, seq_len=16, batch_size=8, seed=seed).read(step, range(8))[0]

    assert np.array_equal(read(3, 5), read(3, 5))
    assert not np.array_equal(read(3, 5), read(4, 5))
    assert not np.array_equal(read(3, 5), read(3, 6))


@pytest.mark.parametrize("grid", [grid for ranks in (1, 2, 4, 8) for grid in Grid.all(ranks)], ids=str)
def test_every_grid_reads_the_same_global_batch(grid: Grid) -> None:
    """Rows joined over the data ranks in rank order are the global batch; x and y peers read the same rows."""
    rows = {rank: data.rank_rows(24, grid, grid.coords(rank)) for rank in range(grid.world_size)}
    joined: list[int] = []
    for d in range(grid.data):
        for z in range(grid.z):
            same = {rows[grid.rank(x, y, z, d)] for x in range(grid.x) for y in range(grid.y)}
            assert len(same) == 1
            part = same.pop()
            joined += range(part.start, part.stop)
    assert joined == list(range(24))


def test_a_batch_that_does_not_divide_names_what_would() -> None:
    grid = Grid(2, 1, 2, 2)
    with pytest.raises(
        ValueError, match=r"batch-size=10 rows do not divide over z\*data=4 of grid 2x1x2x2; use 8 or 12"
    ):
        data.rank_rows(10, grid, grid.coords(0))
    with pytest.raises(ValueError, match=r"use 4$"):
        data.rank_rows(1, grid, grid.coords(0))


def test_too_short_a_corpus_names_what_it_needs(tmp_path: Path) -> None:
    files, _ = write(tmp_path, [100])
    with pytest.raises(
        ValueError, match=r"100 tokens hold 6 windows of seq-len=16, fewer than batch-size=8.*129 tokens"
    ):
        data.Batches(data.Corpus(files), seq_len=16, batch_size=8, seed=0)
    enough, _ = write(tmp_path, [129])
    assert data.Batches(data.Corpus(enough), seq_len=16, batch_size=8, seed=0).windows == 8


def test_tokenizer_ids_are_written_once_and_mapped(tmp_path: Path) -> None:
    text = "Grüße, 世界!\nsecond line\n" * 50
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    (tmp_path / "b.txt").write_text("end", encoding="utf-8")
    files = [tmp_path / "a.txt", tmp_path / "b.txt"]
    tokenizer = byte_tokenizer(tmp_path / "tokenizer.json")
    corpus = data.encode(files, tokenizer, tmp_path / "cache")

    from tokenizers import Tokenizer

    loaded = Tokenizer.from_file(str(tokenizer))
    expected = loaded.encode(text).ids + loaded.encode("end").ids
    assert len(corpus) == len(expected) == len(text.encode()) + 3  # one symbol a byte
    assert corpus.read(0, len(corpus)).tolist() == expected
    assert corpus.vocab_size == data.tokenizer_vocab_size(tokenizer) == 256
    stored = list((tmp_path / "cache").glob("tokens-*"))
    again = data.encode(files, tokenizer, tmp_path / "cache")
    assert again.read(0, 10).tolist() == expected[:10]
    assert list((tmp_path / "cache").glob("tokens-*")) == stored and len(stored) == 1
    sent = pickle.dumps(corpus)  # to a rank that is spawned
    assert len(sent) < 1000 and pickle.loads(sent).read(0, 10).tolist() == expected[:10]
    (tmp_path / "b.txt").write_text("changed", encoding="utf-8")
    assert len(data.encode(files, tokenizer, tmp_path / "cache")) == len(expected) + 4


def encoded(files: list[Path], tokenizer: Path, cache: Path) -> int:
    return len(data.encode(files, tokenizer, cache))


def test_ranks_that_encode_at_the_same_time_share_one_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text\n" * 2000)
    tokenizer = byte_tokenizer(tmp_path / "tokenizer.json")
    assert run_ranks(encoded, 2, [tmp_path / "a.txt"], tokenizer, tmp_path / "cache") == [20000, 20000]
    assert len([path for path in (tmp_path / "cache").iterdir() if path.name != ".lock"]) == 1


def opened(tokenizer: str | None, text: str, out: str) -> list[str]:
    """What a run of two ranks reads of its text, and by what."""
    seen = Path(out).with_name("seen")
    read, load = data.digest_of, data._load_tokenizer

    def note(what: str) -> None:
        with open(seen, "a") as file:
            file.write(f"{what}\n")

    data.digest_of = lambda files: (note("text"), read(files))[1]
    data._load_tokenizer = lambda path: (note("tokenizer"), load(path))[1]
    sizes = {"n_layer": 1, "n_embd": 32, "intermediate_size": 64, "n_head": 8, "n_query_groups": 4}
    config = TrainConfig(
        model_overrides=sizes, data=(text,), tokenizer=tokenizer, steps=1, batch_size=4, seq_len=16,
        precision="32-true", grid=Grid(1, 1, 2, 1), out=out,
    )  # fmt: skip
    del os.environ["RANK"], os.environ["WORLD_SIZE"]  # it starts ranks of its own
    runner.run(config)
    return seen.read_text().split()


@pytest.mark.parametrize("tokenizer", [False, True])
def test_the_ranks_of_a_launch_take_the_text_that_was_opened_before_them(tokenizer: bool, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text\n" * 2000)
    path = str(byte_tokenizer(tmp_path / "tokenizer.json")) if tokenizer else None
    found = run_ranks(opened, 1, path, str(tmp_path / "a.txt"), str(tmp_path / "out"))[0]
    assert found == (["tokenizer", "tokenizer", "text"] if tokenizer else ["text"])  # its vocabulary, and to encode


def test_a_bad_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        data.tokenizer_vocab_size(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"is not a tokenizer\.json"):
        data.tokenizer_vocab_size(tmp_path / "tokenizer.json")
