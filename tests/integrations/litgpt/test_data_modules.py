"""Every data module of LitGPT that runs without a network: what an epoch on a grid reads, against stock LitGPT.

Stock is as many ranks as the grid has data ranks, over Gloo, without Axo. Run with ``-s`` for the table of samples and
tokens. litdata lies in a folder of its own (tests/integrations/litdata.txt says why and how); where it is not there, it
is fetched.
"""

import json
import os
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from axo.grid import Grid
from tests.integrations.support import ELASTIC, installed
from tests.launcher import run_ranks

LENGTH, BATCH = 16, 2
GRIDS = ("1x1x1x1", "2x1x1x1", "2x2x1x1", "2x1x2x1", "1x1x2x2")
SAMPLES = 262  # of LitData; even as all here: litdata 0.2.59 ends with a segmentation fault on a batch of two chunks
FINETUNING = ("JSON", "Alpaca", "Alpaca2k", "AlpacaGPT4", "Deita", "FLAN", "LIMA", "LongForm")
STREAMS = ("LitData", "TextFiles", "TinyLlama", "MicroLlama", "OpenWebText", "TinyStories")


@pytest.fixture(scope="session")
def litdata():
    """The folder that holds litdata."""
    return installed("litdata", "litdata.txt", "litdata", "--no-deps")


@pytest.fixture(scope="session")
def prepared(litdata, tmp_path_factory):
    """A folder with what each module reads, as its own preparation would leave it."""
    path = tmp_path_factory.mktemp("data")
    run(write, 1, litdata, path)  # this process stays without litdata
    return path


def write(litdata, path):
    sys.path.insert(0, str(litdata))
    from litdata import TokensLoader
    from litdata.streaming.writer import BinaryWriter

    for name, count in (
        ("litdata/train", SAMPLES), ("litdata/val", 42), ("tinyllama/slimpajama/train", 150),
        ("tinyllama/slimpajama/val", 30), ("tinyllama/starcoder", 90), ("openwebtext/train", 120),
        ("openwebtext/val", 20), ("texts/train", 102), ("texts/val", 18), ("tinystories/train", 78),
        ("tinystories/val", 24),
    ):  # fmt: skip
        (path / name).mkdir(parents=True)
        item = LENGTH + 1
        writer = BinaryWriter(str(path / name), chunk_bytes=8 * item * 50, item_loader=TokensLoader(block_size=item))
        for index in range(0, count, 10):  # ten samples an item, all tokens different
            writer.add_item(index // 10, torch.arange(index * item, min(index + 10, count) * item))
        writer.done()
        writer.merge(1)
    for name in ("one", "two"):
        (path / "texts" / f"{name}.txt").write_text(" ".join(f"{name} {index * index}" for index in range(900)))
    (path / "tinystories" / "TinyStories_all_data").mkdir()
    for number in range(2):
        (path / "tinystories" / "TinyStories_all_data" / f"{number}.json").write_text("[]")
    samples = [{"instruction": f"say {i}", "input": "", "output": "ab" * (i % 7 + 1)} for i in range(47)]
    for name in ("samples", "alpaca_data_cleaned_archive", "alpacagpt4_data_cleaned_archive", "train", "val"):
        (path / f"{name}.json").write_text(json.dumps(samples[:12] if name == "val" else samples))
    for split in ("train", "test"):
        lines = [{"inputs": f"say {i}", "targets": "ab" * (i % 5 + 1)} for i in range(33)]
        (path / f"piqa_10templates_{split}.jsonl").write_text("\n".join(map(json.dumps, lines)))


def load_dataset(repository, split=None, **options):
    """Of the package ``datasets``, for modules that read from Hugging Face's hub: a few records of the same form."""
    say = [(f"say {i}", "ab" * (i % 7 + 1)) for i in range(41)]
    if "alpaca" in repository:
        return {"train": Records({"instruction": ask, "input": "", "output": answer} for ask, answer in say)}
    if split:  # Deita
        records = [{"messages": [{"content": ask}, {"content": answer}]} for ask, answer in say]
        return [records[:30], records[30:]]
    return {"train": [{"conversations": list(pair)} for pair in say]}  # LIMA


class Records(list):
    def train_test_split(self, test_size, seed):
        at = int(len(self) * (1 - test_size))
        return {"train": self[:at], "test": self[at:]}


def _tokenizer(path):
    from litgpt import Tokenizer

    return Tokenizer(path)


def module(name, path):
    """A data module of LitGPT's, as ``--data NAME`` makes it."""
    import litgpt.data

    from axo.integrations.litgpt.text_data import LocalText

    kind = getattr(litgpt.data, name, None) or {"LocalText": LocalText}[name]
    options = {
        "LitData": {"data_path": path / "litdata", "split_names": ("train", "val")},
        "TextFiles": {"train_data_path": path / "texts"},
        "TinyLlama": {"data_path": path / "tinyllama"},
        "MicroLlama": {"data_path": path / "tinyllama"},
        "OpenWebText": {"data_path": path / "openwebtext"},
        "TinyStories": {"data_path": path / "tinystories"},
        "LocalText": {"paths": [str(path / "texts" / "one.txt")], "cache_dir": path / "cache"},
        "JSON": {"json_path": path / "samples.json", "val_split_fraction": 0.2},
        "FLAN": {"download_dir": path, "subsets": "piqa_10templates"},
        "Alpaca2k": {"val_split_fraction": 0.2},
        "LIMA": {"access_token": "none", "val_split_fraction": 0.2},
        "Deita": {},
    }.get(name, {"download_dir": path})
    return kind(**options, num_workers=0)


def _samples(batch):
    """One tuple of ids a row."""
    rows = batch["input_ids"] if isinstance(batch, dict) else batch
    return [tuple(row.tolist()) for row in rows]


def _unpadded(lines):
    """The distinct samples, each without the padding of its batch."""
    return {tuple(np.trim_zeros(row, "b")) for line in lines for row in line}


def read(litdata, path, tokenizer, grid, names, stop):
    """On one rank: {module: (samples of training, of validation)}; without a grid as stock LitGPT on Gloo.

    ``stop``: read that many batches of training, save where the run stands, and go on from there in a new loader.
    """
    import lightning as L

    from axo.integrations.litgpt.strategy import LitGPTStrategy

    sys.path.insert(0, str(litdata))
    sys.modules["datasets"] = SimpleNamespace(load_dataset=load_dataset)
    os.environ["LITDATA_DISABLE_VERSION_CHECK"] = "1"  # it would ask the network
    found = {}
    for kind in (False, True):
        chosen = [name for name in names if (name in FINETUNING) is kind]
        if not chosen:
            continue
        if grid is None:
            strategy = "ddp" if int(os.environ["WORLD_SIZE"]) > 1 else "auto"
        else:
            strategy = LitGPTStrategy(grid, like_one_device=kind)
        devices = {"devices": int(os.environ["WORLD_SIZE"])} if grid is None else {}
        fabric = L.Fabric(accelerator="cpu", strategy=strategy, **devices)
        fabric.launch()
        for name in chosen:
            torch.manual_seed(1)
            loaders = _loaders(fabric, name, path, tokenizer)
            training = []
            for number, batch in enumerate(loaders[0], 1):
                training += _samples(batch)
                if number == stop:
                    state = loaders[0]._dataloader.state_dict()  # as fabric.save asks for it
                    torch.manual_seed(1)
                    loaders = _loaders(fabric, name, path, tokenizer)
                    loaders[0]._dataloader.load_state_dict(state)
                    break
            if stop:
                training += [sample for batch in loaders[0] for sample in _samples(batch)]
            found[name] = training, [sample for batch in loaders[1] for sample in _samples(batch)]
    return found


def _loaders(fabric, name, path, tokenizer):
    made = module(name, path)
    made.connect(_tokenizer(tokenizer), BATCH, LENGTH if name not in FINETUNING else None)
    made.setup()
    return fabric.setup_dataloaders(made.train_dataloader(), made.val_dataloader())


def run(function, ranks, litdata, *args):
    """Call it on ranks, which find what litdata imports there already."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(litdata)
        imported = ("boto3.s3.transfer", "tifffile")
        return run_ranks(function, ranks, litdata, *args, env=ELASTIC, timeout=120, preload=imported)


@pytest.fixture(scope="session")
def stock(litdata, prepared, folder):
    """Samples by number of ranks, then by module, then by rank."""
    found = {}

    def with_ranks(ranks, names, stop=0):
        key = ranks, names, stop
        if key not in found:
            found[key] = run(read, ranks, litdata, prepared, folder / "tokenizer", None, names, stop)
        return found[key]

    return with_ranks


def compare(stock, litdata, prepared, folder, grid, names, stop=0):
    x, y, z, data = map(int, grid.split("x"))
    results = run(read, x * y * z * data, litdata, prepared, folder / "tokenizer", grid, names, stop)
    expected = stock(z * data, names, stop)
    for name in names:
        for part, what in enumerate(("training", "validation")):
            for rank, result in enumerate(results):
                assert result[name][part] == results[rank // (x * y) * (x * y)][name][part], "peers on x and y disagree"
            mine = [results[line * x * y][name][part] for line in range(z * data)]
            theirs = [result[name][part] for result in expected]
            counts = [
                (len(set().union(*lines)), sum(map(len, lines)), sum(len(row) for line in lines for row in line))
                for lines in (mine, theirs)
            ]
            print(f"{name:12} {what:10} {grid}  distinct {counts[0][0]}, samples {counts[0][1]}, tokens {counts[0][2]}")
            # Data that has an order takes the batches of one device, and no rank reads a sample twice that another has:
            # stock on several ranks takes turns otherwise, and begins again at the first for even ones. All else is the
            # same, token by token.
            if name in STREAMS or (name, what) == ("LocalText", "training"):
                assert counts[0] == counts[1] and mine == theirs, (name, what, grid)
            elif not stop:
                assert counts[0][1] <= counts[1][1], (name, what, grid, counts)
                assert _unpadded(mine) == _unpadded([stock(1, names)[0][name][part]]), (name, what, grid)
    return results


# A grid of x alone shows nothing that one of x and y does not.
@pytest.mark.parametrize("grid", [pytest.param(g, marks=[pytest.mark.soak] * (g == "2x1x1x1")) for g in GRIDS])
def test_an_epoch_reads_what_stock_litgpt_reads(stock, litdata, prepared, folder, grid):
    """Oracle: stock LitGPT on as many ranks as there are data ranks: the same samples, rank by rank."""
    results = compare(stock, litdata, prepared, folder, grid, (*STREAMS, "LocalText", *FINETUNING))
    z, data = map(int, grid.split("x")[2:])
    distinct = set().union(*(result["LitData"][0] for result in results))
    whole = SAMPLES // (BATCH * z * data) * BATCH * z * data  # whole batches on every data rank
    assert len(distinct) == whole


@pytest.mark.parametrize(
    "grid, streams, others",
    [
        ("2x1x2x1", ("LitData", "TinyLlama"), ("LocalText", "JSON")),
        *(pytest.param(grid, STREAMS, ("LocalText", *FINETUNING), marks=pytest.mark.soak) for grid in GRIDS),
    ],
)
def test_an_epoch_goes_on_where_it_stopped(stock, litdata, prepared, folder, grid, streams, others):
    """Oracles: of litdata's datasets stock LitGPT, stopped and gone on; else the epoch that nothing stopped."""
    compare(stock, litdata, prepared, folder, grid, streams, stop=2)
    given = litdata, prepared, folder / "tokenizer", grid, others
    ranks = Grid.parse(grid).world_size
    stopped, whole = (run(read, ranks, *given, stop) for stop in (2, 0))
    for rank in range(ranks):
        for name in others:
            assert stopped[rank][name] == whole[rank][name], (name, rank)
