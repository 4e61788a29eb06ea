"""LitGPT's pretraining and generation as functions that ranks run; without a grid they are stock LitGPT."""

import importlib
import json
import os
import sys
from pathlib import Path

import pytest
import torch

from axo.arrangement import arrangement_of
from axo.grid import Grid
from axo.nn import linear_loss
from axo.train.sample import write_tokenizer
from tests.integrations.support import LLAMA, mean
from tests.launcher import run_ranks

TEXT = "".join(f"line {i}: {i * i} lazy dogs jump over {i} quick brown foxes\n" for i in range(300))
STEPS = 10
# What a test asks of Axo, not of LitGPT.
ASKED = (
    "context",
    "context_kind",
    "goldfish",
    "sharded",
    "vocab_loss",
    "pipeline",
    "schedule",
    "microbatches",
    "offload",
    "offload_dir",
    "algorithm",
)


class MuonAndAdamW(torch.optim.Optimizer):
    """torch's Muon for the matrices of hidden layers and its AdamW for the rest, for a LitGPT of LLAMA's sizes."""

    def __init__(self, params, lr=1e-3, weight_decay=0.1, adjust_lr_fn=None):
        params = list(params)
        super().__init__(params, {"lr": lr})
        hidden = [p for p in params if p.dim() == 2 and LLAMA["padded_vocab_size"] not in p.shape]
        tables = [p for p in params if p.dim() == 2 and LLAMA["padded_vocab_size"] in p.shape]
        vectors = {"params": [p for p in params if p.dim() == 1], "weight_decay": 0.0}
        self.pair = (
            torch.optim.Muon(hidden, lr, weight_decay, adjust_lr_fn=adjust_lr_fn),
            torch.optim.AdamW([{"params": tables}, vectors], lr, weight_decay=weight_decay),
        )
        self.param_groups = [group for each in self.pair for group in each.param_groups]

    def step(self, closure=None):
        loss = None if closure is None else closure()
        for each in self.pair:
            each.step()
        return loss


def write_inputs(folder):
    """A text and a byte-level tokenizer (256 bytes, <s>, </s>) that litgpt can load."""
    (folder / "text.txt").write_text(TEXT)
    write_tokenizer(folder / "tokenizer")


def pretrain(folder, out, options, grid=None):
    """One rank of ``litgpt pretrain`` without its command line; returns the losses and checksums that it saw.

    ``config`` among the options: the fields that the model has beside LLAMA's; ``flops``: true to count them, which
    takes a fifth of such a short run.
    """
    import litgpt.pretrain
    from litgpt.args import EvalArgs, TrainArgs
    from litgpt.config import Config

    from axo.integrations.litgpt.text_data import LocalText

    losses, sums = [], []

    class Losses(litgpt.pretrain.RunningMean):
        def update(self, value):
            losses.append(float(value))
            super().update(value)

    class Batches(litgpt.pretrain.CycleIterator):
        def __next__(self):
            batch = super().__next__()
            sums.append(int((batch * torch.arange(1, batch.shape[1] + 1)).sum()))
            return batch

    litgpt.pretrain.RunningMean, litgpt.pretrain.CycleIterator = Losses, Batches
    litgpt.pretrain.save_hyperparameters = lambda *_: None  # reads a command line
    if not options.get("flops"):
        litgpt.pretrain.measure_flops = lambda *_: 0
    sys.argv = ["litgpt", "pretrain"]
    data_ranks = _data_ranks(grid, options)
    steps, length, rows = options.get("steps", STEPS), 32, 8
    accumulate = options.get("accumulate", 1)

    def start():
        litgpt.pretrain.setup(
            "small",
            model_config=Config(**(LLAMA | options.get("config", {}))),
            out_dir=Path(folder, out),
            precision=options.get("precision", "32-true"),
            resume=options.get("resume", False),
            data=LocalText(paths=[str(folder / "text.txt")], cache_dir=folder / "cache"),
            tokenizer_dir=folder / "tokenizer",
            train=TrainArgs(
                global_batch_size=rows,
                micro_batch_size=rows // data_ranks // accumulate,
                max_tokens=steps * rows * length,
                max_seq_length=length,
                max_norm=options.get("max_norm", 1.0),
                lr_warmup_steps=2,
                save_interval=options.get("save_interval", 1000),
                min_lr=options.get("min_lr", 4e-5),
                tie_embeddings=options.get("tie_embeddings", False),
            ),
            eval=EvalArgs(interval=1000, max_iters=2),
            optimizer=options.get(
                "optimizer",
                {
                    "class_path": "torch.optim.AdamW",
                    "init_args": {"lr": 4e-4, "weight_decay": 0.1, "betas": [0.9, 0.95]},
                },
            ),
            devices=data_ranks,
            logger_name="csv",
        )

    if options.get("goldfish") and grid is None:
        litgpt.pretrain.chunked_cross_entropy = masked_loss(*options["goldfish"])
    _run(
        start,
        "pretrain",
        grid,
        **{key: options[key] for key in ASKED if key in options},
    )
    return losses, sums


def finetune(folder, out, grid=None, method="full", options=None):
    """The losses that one rank of ``litgpt finetune_*`` saw: two samples of unequal length an optimizer step, together.

    Without a grid: stock litgpt on one device. An example is generated after steps 8 and 16, greedily: their tokens are
    written to ``out``/examples.json. Among the options:
    ``held_back``, the share of samples to validate with; ``accumulate``, micro-batches of a step.
    """
    module = importlib.import_module(f"litgpt.finetune.{method}")
    from litgpt.args import EvalArgs, TrainArgs
    from litgpt.data import JSON

    losses = []

    class Losses(module.RunningMean):
        def update(self, value):
            losses.append(float(value))
            super().update(value)

    module.RunningMean = Losses
    examples, stock = [], module.generate

    def greedily(*args, temperature, **given):
        examples.append(stock(*args, temperature=0.0, **given))
        return examples[-1]

    module.generate = greedily
    options = dict(options or {})
    data_ranks = _data_ranks(grid, options)
    rate, base = options.pop("lr", 4e-4), folder / options.pop("base", "base")
    max_time = options.pop("max_time", None)
    held_back, accumulate = options.pop("held_back", 0.1), options.pop("accumulate", 1)
    asked = {key: options.pop(key) for key in ASKED if key in options}
    # What litgpt writes beside its checkpoint, and reads when it merges adapters.
    sys.argv = ["litgpt", f"finetune_{method}", str(base), *(f"--{k}={v}" for k, v in options.items())]

    def start():
        module.setup(
            base,
            out_dir=folder / out,
            precision="32-true",
            devices=data_ranks,
            data=JSON(folder / "samples.json", val_split_fraction=held_back, num_workers=0),
            train=TrainArgs(
                global_batch_size=2 * accumulate,
                micro_batch_size=2 // data_ranks,
                epochs=5,
                max_steps=20,
                lr_warmup_steps=2,
                save_interval=None,
                max_time=max_time,
            ),
            eval=EvalArgs(interval=8, max_iters=2 if accumulate == 1 else 99, max_new_tokens=4, final_validation=False),
            optimizer={"class_path": "torch.optim.AdamW", "init_args": {"lr": rate}},
            **options,
        )

    _run(start, f"finetune_{method}", grid, **asked)
    (folder / out / "examples.json").write_text(json.dumps([example.tolist() for example in examples]))
    return losses


def write_base(folder, name="base", **fields):
    """A checkpoint to start from, and samples of different lengths."""
    import shutil

    from litgpt.config import Config
    from litgpt.model import GPT
    from litgpt.utils import save_config

    config = Config(**{**LLAMA, **fields})
    shutil.copytree(folder / "tokenizer", folder / name)
    torch.manual_seed(5)
    torch.save(GPT(config).state_dict(), folder / name / "lit_model.pth")
    save_config(config, folder / name)
    samples = [{"instruction": f"say {i}", "input": "", "output": "ab" * (i % 7 + 1)} for i in range(60)]
    (folder / "samples.json").write_text(json.dumps(samples))


def masked_loss(k, h):
    """Plain torch: the mean loss over the tokens that count; all of them where there are no gradients."""
    from axo.nn.goldfish import goldfish_mask

    def loss(logits, targets, chunk_size=128):
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        keep = goldfish_mask(targets, k, h).flatten() if torch.is_grad_enabled() else torch.ones_like(losses).bool()
        return losses.mean() if logits.is_meta else losses[keep].mean()  # litgpt counts flops on the meta device

    return loss


def _data_ranks(grid, options):
    parts = arrangement_of("test", options.get("algorithm", "axonn")).row_parts(Grid.parse(grid or "1x1x1x1"))
    return parts // options.get("context", 1)


def _run(start, name, grid, **asked):
    """Run a litgpt function as this rank's part of ``axo litgpt``, or without Axo."""
    from axo.integrations.litgpt import parsing
    from axo.integrations.litgpt.commands import PARALLEL
    from axo.integrations.litgpt.options import Options
    from axo.integrations.litgpt.rank import run as run_rank

    if grid is not None:
        given = sys.argv[2:] if name.startswith("finetune") else []  # what LitGPT writes beside the adapters
        written = parsing.parse(name, PARALLEL[name].load(), given).as_yaml() if given else ""
        chunks, plain = [], linear_loss.row_losses
        linear_loss.row_losses = lambda logits, *rest: chunks.append(logits.shape) or plain(logits, *rest)
        run_rank(name, Options(grid=Grid.parse(grid), **asked), lambda again: start(), written, True, 0)
        whole = asked.get("algorithm", "axonn") != "axonn" or asked.get("pipeline", 1) > 1  # or this rank has no head
        assert bool(chunks) == bool(asked.get("vocab_loss")) or whole
        return
    torch._dynamo.config.disable = True
    torch.compile = lambda model, *_, **__: model  # with dynamo off it does no more, but imports for three seconds
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        del os.environ[variable]
    start()


def generate(checkpoint, grid=None, top_k=1, temperature=0.0, kind="", files=None, **asked):
    """Sixteen tokens from one rank of ``litgpt generate``, or of ``generate_KIND`` from ``files``."""
    module = importlib.import_module(f"litgpt.generate.{kind or 'base'}")
    made, files = [], files or {}
    stock = module.generate
    module.generate = lambda *args, **options: made.append(stock(*args, **options)) or made[-1]
    sampling = {"top_k": top_k, "temperature": temperature}

    def start():
        module.main(checkpoint, "line 7: ", max_new_tokens=16, precision="32-true", **sampling, **files)

    _run(start, f"generate_{kind}" if kind else "generate", grid, **asked)
    return made[0].tolist()


def chat(checkpoint, grid=None, options=None):
    """What one rank of ``litgpt chat`` prints of a conversation of two questions."""
    import contextlib
    import io

    import litgpt.chat.base as base

    def start():
        base.main(checkpoint, max_new_tokens=12, top_k=1, temperature=0.0, precision="32-true", **(options or {}))

    first = os.environ["RANK"] == "0"
    sys.stdin = io.StringIO("line 7: \nline 8: \n\n" if first else "nobody reads this\n")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        _run(start, "chat", grid)
    return printed.getvalue().partition("Now chatting")[2]


def ranks_of(grid, pipeline=1):
    """(number of ranks, environment) for the launcher."""
    if grid is None:
        return 1, {}
    x, y, z, data = map(int, grid.split("x"))
    return x * y * z * data * pipeline, {"TORCHELASTIC_RUN_ID": "test"}


def run(folder, out, grid=None, **options):
    """(losses, checksums) as one run: means and sums over the data ranks; and the final model."""
    stages = options.get("pipeline", 1)
    ranks, environment = ranks_of(grid, stages)
    results = run_ranks(pretrain, ranks, folder, out, options, grid, env=environment, timeout=180)
    lines = results
    if grid is not None:
        peers = int(grid.split("x")[0]) * int(grid.split("x")[1])
        own = int(grid.split("x")[0]) if options.get("algorithm") == "tesseract" else 1  # x has rows of its own there
        of_stage = ranks // stages
        lines = [result for rank, result in enumerate(results[:of_stage]) if rank % peers < own]
        for rank, (losses, sums) in enumerate(results):
            line = lines[rank % of_stage // peers * own + rank % own]
            assert losses == pytest.approx(line[0], abs=1e-6), "peers on x and y, or stages, disagree"
            assert sums == line[1], "peers on x and y, or stages, read different batches"
    losses = mean(line[0] for line in lines)
    sums = [sum(column) for column in zip(*(line[1] for line in lines), strict=True)]
    final = folder / out / "final" / "lit_model.pth"
    state = torch.load(final, weights_only=True) if final.is_file() else None
    return losses, sums, state
