"""Shared by the tests of the integrations: a small GPT, and training steps with Fabric on any strategy."""

import importlib.util
import json
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
