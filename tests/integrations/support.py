"""Shared by the tests of the integrations: a small GPT, and training steps with Fabric on any strategy."""

import csv
import importlib.util
import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch

LLAMA = {
    "name": "small-llama", "block_size": 192, "n_layer": 2, "n_embd": 64, "n_head": 8, "n_query_groups": 4,
    "vocab_size": 258, "padded_vocab_size": 264, "rotary_percentage": 1.0, "parallel_residual": False, "bias": False,
    "norm_class_name": "RMSNorm", "mlp_class_name": "LLaMAMLP", "intermediate_size": 96,
}  # fmt: skip
ELASTIC = {"TORCHELASTIC_RUN_ID": "test"}  # what makes Fabric see torchrun


def tokens(rows, length=33, seed=3):
    """Reproducible rows (rows, length) of ids that a model can learn: each counts up in steps of its own."""
    generator = torch.Generator().manual_seed(seed)
    start, step = torch.randint(0, 250, (2, rows, 1), generator=generator)
    return (start + (step % 5 + 1) * torch.arange(length)) % 250


def mean(columns):
    return [sum(column) / len(column) for column in zip(*columns, strict=True)]


def distance(weights, serial):
    """Relative distance of whole models: both as one vector."""
    assert weights.keys() == serial.keys()
    difference = sum(float((weights[name].double() - serial[name].double()).square().sum()) for name in serial)
    return (difference / sum(float(serial[name].double().square().sum()) for name in serial)) ** 0.5


def tell(proof, **figures):
    """Print what was seen as a JSON line (pytest -s shows it)."""
    print("\n" + json.dumps({"proof": proof} | figures))


def csv_values(file):
    """{name: {step: value}} of a CSV logger's file; ``step`` as the logger was given it."""
    found = {}
    for row in csv.DictReader(file.open()):
        for name, value in row.items():
            if value and name != "step":
                found.setdefault(name, {})[int(row["step"])] = float(value)
    return found


def tensorboard_values(folder):
    """{name: {step: value}} of the one event file in ``folder``, which must be whole.

    A record is its length in 8 bytes, 4 bytes of checksum, an event, and 4 bytes of checksum.
    """
    from tensorboardX.proto.event_pb2 import Event

    (file,) = Path(folder).rglob("events.out.tfevents.*")
    data, at, found = file.read_bytes(), 0, {}
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        event = Event.FromString(data[at + 12 : at + 12 + length])
        at += 16 + length
        for value in event.summary.value:
            found.setdefault(value.tag, {})[event.step] = value.simple_value
    assert at == len(data)
    return found


def installed(name, requirements, package, *options):
    """The folder that holds ``package``: where Python finds it, else ``name`` beside the environment, into which it is
    fetched where it is not there."""
    found = importlib.util.find_spec(package)
    if found is not None and found.origin is not None:
        return Path(found.origin).parents[1]
    folder = Path(sys.prefix, name)
    if not (folder / package).is_dir():
        wanted = Path(__file__).with_name(requirements)
        command = [sys.executable, "-m", "pip", "install", "-q", *options, "--target", str(folder), "-r", str(wanted)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"{package} cannot be fetched: {done.stderr.strip().splitlines()[-1]}")
    return folder
