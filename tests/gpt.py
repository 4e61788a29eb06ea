"""A small GPT trained serially and on a grid, for the tests of parity."""

import torch
import torch.nn.functional as F
from litgpt.config import Config
from litgpt.model import GPT

import axo
from tests.nn.support import mean_over_data_ranks, my_rows, seed_apart, serial_seed

BATCH, TOKENS = 16, 16

# 101 columns of logits: uneven over x. Groups of two queries to a key.
LLAMA = {
    "n_layer": 2,
    "n_embd": 64,
    "n_head": 8,
    "n_query_groups": 4,
    "block_size": 32,
    "vocab_size": 100,
    "padded_vocab_size": 101,
    "norm_class_name": "RMSNorm",
    "mlp_class_name": "LLaMAMLP",
    "intermediate_size": 96,
    "rotary_percentage": 1.0,
    "parallel_residual": False,
    "bias": False,
}
NEOX = {
    "n_layer": 2,
    "n_embd": 64,
    "n_head": 8,
    "block_size": 32,
    "vocab_size": 100,
    "padded_vocab_size": 101,
    "rotary_percentage": 0.25,
    "parallel_residual": True,
    "bias": True,
}


def batch(config, step):
    """Ids and targets (BATCH, TOKENS) of one step: a noisy counting sequence, which a model can learn."""
    generator = torch.Generator().manual_seed(100 + step)
    start = torch.randint(config.vocab_size, (BATCH, 1), generator=generator)
    ids = (start + 3 * torch.arange(TOKENS + 1)) % config.vocab_size
    return ids[:, :-1], ids[:, 1:]


def serial_losses(config, steps, meta):
    """The oracle: litgpt's model, torch's loss, clipping and AdamW, in one process without Axo."""
    config = Config(**config)
    serial_seed()
    with torch.device("meta" if meta else "cpu"):
        model = GPT(config)
    if meta:
        model.to_empty(device="cpu")
        model.apply(_reset)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        ids, targets = batch(config, step)
        loss = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def train(comms, config, steps, meta):
    """The same on a grid; returns the losses of the whole batch."""
    config = Config(**config)
    seed_apart(comms)
    with torch.device("meta" if meta else "cpu"):
        model = GPT(config)
    axo.parallelize(model, comms)
    if meta:
        assert all(parameter.is_meta for parameter in model.parameters())
        axo.init_weights(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss_fn = axo.nn.CrossEntropyLoss(comms=comms, columns=config.padded_vocab_size)
    losses = []
    for step in range(steps):
        ids, targets = batch(config, step)
        loss = loss_fn(model(my_rows(comms, ids)), my_rows(comms, targets))
        optimizer.zero_grad()
        loss.backward()
        axo.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(mean_over_data_ranks(comms, loss))
    return losses


def _reset(module):
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()
