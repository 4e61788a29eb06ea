"""``python -m examples.hf.train``: a Hugging Face Llama under accelerate, on one device or a grid."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import axo
from examples.nanogpt.model import rows

BATCH = 8  # rows of one step, of all ranks together


def model_of() -> LlamaForCausalLM:
    """A small Llama, the same on every rank."""
    torch.manual_seed(7)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.1))


def train(
    grid: str | None, out: str | Path, *, steps: int = 8, stop_at: int | None = None, resume: bool = False
) -> tuple[list[float], dict[str, torch.Tensor], list[int]]:
    """Train, save the state and a folder for ``from_pretrained``; losses, whole weights, a greedy continuation.

    Args:
        grid: None: one device, without Axo.
        stop_at: End after this step, and save what ``resume`` goes on from.
    """
    accelerator = Accelerator(cpu=True)
    if grid is not None:
        from axo.integrations.hugging_face import on_grid

        accelerator = on_grid(accelerator, grid)
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(list(rows(steps * BATCH)), batch_size=BATCH // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    first = 0
    if resume:
        accelerator.load_state(out)
        first = stop_at or 0
    losses = []
    for step, ids in enumerate(loader):
        if step < first:
            continue
        if stop_at is not None and not resume and step == stop_at:
            break
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
    accelerator.save_state(out)
    if grid is not None:
        axo.checkpoint.save_pretrained(model, Path(out) / "pretrained")
    model.eval()
    text = model.generate(rows(1)[:, :8], max_new_tokens=8, do_sample=False, pad_token_id=0)
    return losses, {name: value.clone() for name, value in model.state_dict().items()}, text[0].tolist()


def main() -> None:
    """Train and print, on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--grid", help="such as 2x1x2x1; left out: one device, without Axo")
    parser.add_argument("--out", default="runs/hf", help="folder of the state and of the model (runs/hf)")
    options = parser.parse_args()
    losses, _, text = train(options.grid, options.out)
    if torch.distributed.is_initialized() and torch.distributed.get_rank():
        return
    for step, loss in enumerate(losses):
        print(f"step {step}: loss {loss:.5f}")
    print("greedy:", *text)


if __name__ == "__main__":
    main()
