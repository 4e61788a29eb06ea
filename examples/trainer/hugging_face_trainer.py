"""``python -m examples.trainer.hugging_face_trainer``: Hugging Face's Trainer, on one device or a grid."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM, Trainer, TrainingArguments

from examples.hf.train import model_of
from examples.nanogpt.model import rows

BATCH = 8  # rows of one step, of all ranks together


def train(
    grid: str | None,
    out: str | Path,
    *,
    steps: int = 8,
    resume: str | Path | None = None,
    chunked_loss: bool = False,
    **arguments: Any,
) -> tuple[list[float], float, dict[str, torch.Tensor]]:
    """Train, save ``out``/checkpoint-4 and so on; the losses of the steps, that of evaluation, the whole weights.

    Args:
        grid: None: one device, without Axo.
        resume: A checkpoint of any grid.
        chunked_loss: On a grid: logits never exist whole.
        arguments: Further TrainingArguments.
    """
    parts = 1
    if grid is not None:
        from axo.grid import Grid

        parts = Grid.parse(grid).z * Grid.parse(grid).data
    wanted = TrainingArguments(
        output_dir=str(out),
        use_cpu=True,
        max_steps=steps,
        per_device_train_batch_size=BATCH // parts,
        per_device_eval_batch_size=BATCH // parts,
        learning_rate=1e-3,
        logging_steps=1,
        save_steps=4,
        report_to=[],
        disable_tqdm=True,
        seed=7,
        **arguments,
    )
    data = [{"input_ids": row, "labels": row} for row in rows(6 * BATCH)]
    check = [{"input_ids": row, "labels": row} for row in rows(BATCH, seed=5)]
    trainer = Trainer(model=model_of(), args=wanted, train_dataset=data, eval_dataset=check)
    if grid is not None:
        from axo.integrations.hugging_face import on_grid

        trainer = on_grid(trainer, grid, chunked_loss=chunked_loss)
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    weights = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    return losses, trainer.evaluate()["eval_loss"], weights


def load(folder: str | Path) -> LlamaForCausalLM:
    """What a checkpoint holds, as anybody loads it."""
    return LlamaForCausalLM.from_pretrained(folder)


def main() -> None:
    """Train and print, on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--grid", help="such as 2x1x2x1; left out: one device, without Axo")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--out", default="runs/hf_trainer", help="folder of checkpoints (runs/hf_trainer)")
    parser.add_argument("--resume", help="a checkpoint of any grid")
    options = parser.parse_args()
    losses, evaluation, _ = train(options.grid, options.out, steps=options.steps, resume=options.resume)
    if torch.distributed.is_initialized() and torch.distributed.get_rank():
        return
    for step, loss in enumerate(losses):
        print(f"loss {step}: {loss:.5f}")
    print(f"evaluation: {evaluation:.5f}")


if __name__ == "__main__":
    main()
