"""``axo litgpt``: LitGPT's own pretraining on grids, against LitGPT as it is on one device."""

import contextlib
import csv
import dataclasses
import io
import json
import os
import re

import pytest
import torch

from axo.grid import AXES, Grid
from axo.integrations.litgpt import parsing
from axo.integrations.litgpt.command import PARALLEL
from axo.integrations.litgpt.command import run as run_command
from axo.integrations.litgpt.options import Options
from tests.integrations.runs import NOT_TORCHRUN
from tests.integrations.support import LLAMA, distance, tell
from tests.integrations.trainer import STEPS, masked_loss, run
from tests.launcher import run_ranks


@pytest.fixture(scope="session")
def serial(folder):
    return run(folder, "serial")


@pytest.mark.parametrize(
    ("grid", "stages"),
    [
        # x and y alone: those below have them beside others; test_checkpoints.py pretrains on 2x1x2x1 and 1x2x1x2.
        pytest.param("2x1x1x1", 1, marks=pytest.mark.soak),
        pytest.param("1x2x1x1", 1, marks=pytest.mark.soak),
        ("1x1x2x1", 1),
        pytest.param("2x2x1x1", 1, marks=pytest.mark.soak),
        pytest.param("2x1x1x2", 1, marks=pytest.mark.soak),
        ("2x2x2x1", 1),
        ("2x1x2x1", 2),
    ],
)
def test_pretraining_equals_stock_litgpt(folder, serial, grid, stages):
    """Oracle: ``litgpt pretrain``, one device, fp32. Losses to 1e-4, the model after 10 steps to 1e-5 (both summation
    order only), the same tokens."""
    losses, sums, state = run(folder, f"{grid}-{stages}", grid, pipeline=stages, flops=stages > 1)
    apart, same = distance(state["model"], serial[2]["model"]), sums == serial[1]
    worst = _worst(losses, serial[0])
    tell("litgpt pretrain", grid=grid, stages=stages, losses_apart=worst, weights_apart=apart, same_tokens=same)
    assert len(losses) == STEPS and serial[0][-1] < serial[0][0] - 0.1
    assert losses == pytest.approx(serial[0], abs=1e-4)
    assert same
    assert apart < 1e-5
    logged, expected = _logged(folder / f"{grid}-{stages}"), _logged(folder / "serial")
    assert [row["loss"] for row in logged] == pytest.approx(losses, abs=1e-6)  # of all data ranks, not of rank 0
    assert logged[-1]["val_loss"] == pytest.approx(expected[-1]["val_loss"], abs=1e-4)
    for row in logged[1:]:
        shares = [row[f"comm_share/{axis}"] for axis in AXES]
        assert [share > 0 for share in shares] == [size != "1" for size in grid.split("x")]
        assert row["comm_share/all"] == pytest.approx(sum(shares)) and 0 < sum(shares) < 1
        assert row["memory_gb"] > 0.1 and row["tokens_per_sec"] > 1  # a process that has imported torch


def _logged(out):
    """One dict of numbers a step from the CSV log; the last also has what was validated at the end."""
    (file,) = (out / "logs" / "csv").glob("*/metrics.csv")
    rows = [{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(file.open())]
    *steps, last = rows
    return steps if "loss" in last else [*steps[:-1], steps[-1] | last]


def _worst(losses, others):
    return max(abs(loss - other) for loss, other in zip(losses, others, strict=True))


@pytest.mark.parametrize(("grid", "stages"), [("2x1x1x2", 1), ("1x1x2x1", 2)])
def test_the_vocabulary_parallel_loss_equals_stock_litgpt(folder, serial, grid, stages):
    losses, _, state = run(folder, f"vocabulary-{stages}", grid, vocab_loss=True, pipeline=stages)
    assert losses == pytest.approx(serial[0], abs=1e-4)
    assert distance(state["model"], serial[2]["model"]) < 1e-5


@pytest.mark.parametrize(
    ("grid", "options"),
    [
        ("1x1x4x1", {"context": 4}),
        ("2x1x2x1", {"context": 2, "context_kind": "heads", "vocab_loss": True}),
        pytest.param("1x2x4x1", {"context": 2, "context_kind": "gather"}, marks=pytest.mark.soak),
    ],
)
def test_sequences_over_several_ranks_equal_stock_litgpt(folder, serial, grid, options):
    """Validation too; the ranks of a context read the same rows."""
    out = f"context-{grid}"
    losses, sums, state = run(folder, out, grid, **options)
    assert losses == pytest.approx(serial[0], abs=1e-4)
    assert sums == pytest.approx([options["context"] * each for each in serial[1]])
    assert distance(state["model"], serial[2]["model"]) < 1e-5
    logged, expected = _logged(folder / out), _logged(folder / "serial")
    assert logged[-1]["val_loss"] == pytest.approx(expected[-1]["val_loss"], abs=1e-4)
    assert logged[-1]["total_tokens"] == expected[-1]["total_tokens"]


@pytest.mark.parametrize(("grid", "stages"), [("2x2x1x1", 1), ("1x1x2x1", 2)])
def test_muon_equals_stock_litgpt_with_torchs_pair(folder, grid, stages):
    """Oracle: stock LitGPT with an optimizer that steps torch's own Muon and AdamW."""
    muon = {"init_args": {"lr": 1e-3, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}}
    pair = {"class_path": "tests.integrations.trainer.MuonAndAdamW"} | muon
    stock = run(folder, f"stock-muon-{stages}", optimizer=pair, steps=5)
    muon |= {"class_path": "axo.optim.Muon"}
    losses, sums, state = run(folder, f"muon-{stages}", grid, pipeline=stages, optimizer=muon, steps=5)
    assert losses == pytest.approx(stock[0], abs=1e-4) and sums == stock[1]
    assert distance(state["model"], stock[2]["model"]) < 1e-3  # what travels, and the products, are in bf16


@pytest.mark.parametrize(
    ("grid", "stages"), [("2x1x2x1", 1), ("1x1x2x1", 2), pytest.param("2x2x1x1", 1, marks=pytest.mark.soak)]
)
def test_tied_embeddings_equal_stock_litgpt(folder, grid, stages):
    """LitGPT ties head and embedding once it has drawn both: what comes behind them is drawn from there on."""
    stock = run(folder, "stock-tied", tie_embeddings=True, steps=3)
    losses, sums, state = run(folder, f"tied-{stages}", grid, pipeline=stages, tie_embeddings=True, steps=3)
    assert losses == pytest.approx(stock[0], abs=1e-4) and sums == stock[1]
    assert distance(state["model"], stock[2]["model"]) < 1e-5
    assert torch.equal(state["model"]["lm_head.weight"], state["model"]["transformer.wte.weight"])


@pytest.mark.soak
def test_pretraining_with_tesseract_equals_stock_litgpt(folder, serial):
    losses, sums, state = run(folder, "tesseract", "2x2x1x1", algorithm="tesseract", vocab_loss=True)
    assert losses == pytest.approx(serial[0], abs=1e-4) and sums == serial[1]
    assert distance(state["model"], serial[2]["model"]) < 1e-5


@pytest.mark.soak
def test_goldfish_pretraining_equals_masked_litgpt(folder, serial):
    """Oracle: litgpt with its loss replaced by plain torch over the kept tokens. One data rank: means are the same."""
    stock = run(folder, "stock-goldfish", None, goldfish=(2, 5))
    losses, sums, state = run(folder, "goldfish", "2x2x1x1", vocab_loss=True, goldfish=(2, 5))
    assert losses == pytest.approx(stock[0], abs=1e-4) and sums == stock[1]
    assert losses[0] != pytest.approx(serial[0][0], abs=1e-5)  # it is another loss
    assert distance(state["model"], stock[2]["model"]) < 1e-5


def test_goldfish_masks_training_and_not_validation():
    """The function that litgpt's commands then call, against plain torch over the kept tokens."""
    import litgpt.finetune.full as module

    from axo.grid import Grid
    from axo.integrations.litgpt.options import Options
    from axo.integrations.litgpt.patches import LitGPTRun, patched
    from axo.integrations.litgpt.strategy import LitGPTStrategy

    asked = Options(grid=Grid(), goldfish=(2, 5))
    with patched(LitGPTRun(module, asked, strategy=LitGPTStrategy("1x1x1x1"))):
        loss = module.chunked_cross_entropy
    torch.manual_seed(3)  # of some draws, one in 1,500, both losses are within 1e-4
    logits, targets = torch.randn(2, 40, 9), torch.randint(0, 9, (2, 40))
    trained = loss(logits, targets)
    with torch.no_grad():
        validated = loss(logits, targets)
        everything = masked_loss(2, 5)(logits, targets)
    assert trained.item() == pytest.approx(masked_loss(2, 5)(logits, targets).item(), rel=1e-6)
    assert validated.item() == pytest.approx(everything.item(), rel=1e-6) != pytest.approx(trained.item(), abs=1e-4)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["pretrain", "x", "--goldfish"], "--goldfish expected one argument"),
        (["pretrain", "pythia-14m", "--goldfish", "1,13"], "K of at least 2"),
        (["pretrain", "pythia-14m", "--goldfish=x"], "K,H"),
        (["generate", ".", "--goldfish", "2,13"], "not for generate"),
        (["chat", ".", "--goldfish", "2,13"], "not for chat"),
        (["generate", ".", "--sharded"], "--sharded is for training .pretrain, finetune_full.*, not for generate"),
        (["generate", ".", "--max-restarts", "2"], "--max-restarts is for training"),
        (["finetune_lora", ".", "--max-restarts", "2"], "--max-restarts is not for finetune_lora: it cannot resume"),
        (["finetune", ".", "--sharded"], "--sharded is not for finetune: it saves adapters"),
        (["finetune_lora", ".", "--grid", "auto"], "--grid auto is not for finetune_lora"),
        (["pretrain", "pythia-14m", "--host", "0.0.0.0"], "--host is for serve, not for pretrain; leave it out"),
        (["pretrain", "pythia-14m", "--max-restarts", "-1"], "--max-restarts -1 is not a whole number of at least 0"),
        (["pretrain", "pythia-14m", "--ranks", "4"], "--ranks is for --grid auto"),
        (["pretrain", "pythia-14m", "--context", "0"], "--context 0 is not a whole number of at least 1"),
        (["pretrain", "pythia-14m", "--context", "3", "--grid", "1x1x2x1"], "--context 3 does not divide z=2"),
        (
            ["pretrain", "pythia-14m", "--context", "2", "--grid", "1x1x2x1", "--pipeline", "2"],
            "--context 2 with --pipeline 2 is not supported",
        ),
        (
            ["pretrain", "pythia-14m", "--context", "2", "--grid", "auto"],
            "--context 2 with --grid auto is not supported",
        ),
        (
            ["pretrain", "pythia-14m", "--context", "2", "--context-kind", "tree", "--grid", "1x1x2x1"],
            "context='tree' is not known; use one of 'ring', 'gather', 'heads'",
        ),
        (
            ["finetune_adapter", ".", "--context", "2", "--grid", "1x1x2x1"],
            "--context is of pretrain, finetune_full and",
        ),
        (["pretrain", "pythia-14m", "--context-kind", "heads", "--grid", "1x1x2x1"], "--context-kind heads is of"),
        (
            ["pretrain", "pythia-14m", "--context", "2", "--grid", "2x2x2x1", "--algorithm", "tesseract"],
            "--context is not supported by algorithm 'tesseract'",
        ),
        (
            ["pretrain", "pythia-14m", "--context", "8", "--context-kind", "heads", "--grid", "1x1x8x1"],
            "context='heads' cannot give a rank's 4 heads",
        ),
        (["pretrain", "pythia-14m", "--pipeline", "0"], "--pipeline 0 is not a whole number of at least 1"),
        (["pretrain", "pythia-14m", "--schedule", "zbv"], "--schedule zbv is of pipeline stages; add --pipeline N"),
        (["pretrain", "pythia-14m", "--cuts", "3"], "--cuts 3 is of pipeline stages; add --pipeline N"),
        (["pretrain", "pythia-14m", "--pipeline", "2", "--cuts", "most"], "cuts='most' is not even, planner, or numb"),
        (["pretrain", "pythia-14m", "--pipeline", "2", "--cuts", "6"], "leave a stage without layers, or go beyond"),
        (
            ["merge_lora", "--pipeline", "2"],
            "merge_lora runs on one rank only, so it takes no --pipeline; on a grid run pretrain",
        ),
        (
            ["chat", ".", "--pipeline", "2"],
            "--pipeline is not for chat; in stages run pretrain, finetune_full, finetune_lora",
        ),
        (["pretrain", "pythia-14m", "--pipeline", "2", "--schedule", "2f2b"], "schedule='2f2b' is not known; use one"),
        (["pretrain", "pythia-14m", "--pipeline", "7"], "6 blocks over 7 stages leave a stage without layers"),
        (["pretrain", "pythia-14m", "--pipeline", "2", "--microbatches", "1"], "microbatches=1 are fewer than the 2"),
        (
            ["pretrain", "pythia-14m", "--pipeline", "6", "--train.micro_batch_size", "4"],
            "micro_batch_size=4 are fewer rows than the 6 stages",
        ),
        (["pretrain", "pythia-14m", "--offload-dir", "/scratch"], "--offload-dir /scratch without --offload"),
        (["pretrain", "pythia-14m", "--offload", "everything"], "'everything' is not known; use none, or a list"),
        (["pretrain", "pythia-14m", "--offload", "optimizer"], "on CPU ranks wants --offload-dir DIR"),
        (["generate", ".", "--offload", "optimizer"], "--offload is for training"),
        (["pretrain", "pythia-14m", "--offload", "parameters", "--pipeline", "2"], "--offload parameters with --pipel"),
        (
            ["pretrain", "pythia-14m", "--algorithm", "summa", "--grid", "2x1x1x1"],
            "'summa' cannot use grid 2x1x1x1; it needs x = y",
        ),
        (["pretrain", "pythia-14m", "--algorithm", "summa", "--grid", "auto"], "--algorithm summa name a grid"),
        (["architectures"], "there is no command 'architectures'; use one of chat, "),
        (
            ["validate", "--grid", "2x1x1x1"],
            "validate runs on one rank only, so it takes no --grid; on a grid",
        ),
        (
            ["serve", "--grid", "2x1x1x1"],
            r"serve wants no_such_package, which .* install 'axo\[serve",
        ),
        (["evaluate", "folder", "--grid", "2x1x1x1"], "--tasks is missing"),
        (["evaluate", "folder", "--tasks", "a", "--batch_size", "auto", "--grid", "2x1x1x1"], "--batch_size auto is"),
        (["generate_adapter", ".", "--adapter_path", "no/such"], "--adapter_path no/such does not exist"),
        (["pretrain", "pythia-14m", "--grid", "2x1x1x1", "--devices", "2"], "--devices is what the grid says"),
        (["pretrain", "pythia-14m", "--elastic", "1:2", "--max-restarts", "1"], "memory; leave --max-restarts out"),
        (["finetune_full", ".", "--elastic", "1:2"], "--elastic is of pretrain, not of finetune_full"),
        (["pretrain", "pythia-14m", "--copy-every", "3"], "--copy-every is of --elastic MIN:MAX; add that"),
        (["pretrain", "pythia-14m", "--hosts", "a,b"], "--hosts is of --elastic MIN:MAX; add that, or leave it out"),
        (["finetune_lora", "no/such/folder", "--grid", "2x1x1x1"], "no/such/folder does not exist; get it first"),
        (["generate_full", "no/such", "--quantize", "bnb.nf4", "--grid", "2x1x1x1"], "bnb.nf4 runs on one device only"),
        (
            ["finetune", "no/such", "--quantize", "bnb.int8-training", "--grid", "2x1x1x1"],
            "int8-training keeps the frozen weights in half precision",
        ),
        (
            ["finetune", "no/such", "--quantize", "bnb.nf4", "--offload", "optimizer", "--grid", "2x1x1x1"],
            "bnb.nf4 does not run with --offload",
        ),
        (
            ["generate", "no/such", "--quantize", "bnb.nf4", "--precision", "bf16-mixed", "--grid", "1x1x2x1"],
            "bnb.nf4 with --precision bf16-mixed: use 32-true",
        ),
        (["pretrain", "pythia-15m"], "there is no model 'pythia-15m'; the nearest are pythia-31m, pythia-14m"),
        (["pretrain", "pythia-14m", "--tokenizer_dir", "no/such"], "--tokenizer_dir no/such is not a folder"),
        (["pretrain", "pythia-14m", "--initial_checkpoint_dir", "no/such"], "--initial_checkpoint_dir no/such is not"),
        (["pretrain", "pythia-14m", "--resume", "no/such.pth"], "--resume no/such.pth does not exist"),
        (["pretrain", "pythia-14m", "--train.micro_batch_size", "0"], "micro_batch_size=0 is not a whole number"),
        (["pretrain", "pythia-14m", "--logger_name", "mlflow"], "--logger_name mlflow wants a package that is not"),
    ],
)
def test_options_that_are_wrong(arguments, words, monkeypatch):
    from axo.integrations.litgpt import checks, command
    from axo.integrations.litgpt.command import run as run_command

    monkeypatch.setitem(checks._LOGGERS, "mlflow", (("no_such_package",), "mlflow"))
    for name, package in (("serve", "no_such_package"), ("evaluate", "torch")):
        changed = dataclasses.replace(command.PARALLEL[name], wants=(package, name))
        monkeypatch.setitem(command.PARALLEL, name, changed)
    with pytest.raises(ValueError, match=words):
        run_command(arguments)


def test_serving_on_another_accelerator_is_refused(monkeypatch):
    from axo.integrations.litgpt.checks import _check_values

    monkeypatch.setenv("LT_ACCELERATOR", "cpu")
    for accelerator in ("auto", "cpu"):
        _check_values({"accelerator": accelerator}, Options(), PARALLEL["serve"])
    with pytest.raises(ValueError, match=r"--accelerator cuda is not what the ranks use \(cpu\)"):
        _check_values({"accelerator": "cuda"}, Options(), PARALLEL["serve"])


@pytest.mark.parametrize(
    "arguments",
    [["finetune_lora", "folder", "--quantize", "bnb.nf4"], ["serve", "folder"], ["evaluate"], ["merge_lora", "folder"]],
)
def test_what_runs_on_one_device_is_litgpts_alone_without_a_grid(arguments, monkeypatch):
    """As it is: Axo has no part in it."""
    from axo.integrations.litgpt import command

    given = []
    monkeypatch.setattr(command, "_run_litgpt", lambda name, rest: given.append([name, *rest]))
    command.run(arguments)
    assert given == [arguments]


def test_stages_are_not_compiled(monkeypatch):
    from axo.integrations.litgpt.command import run as run_command

    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "0")
    with pytest.raises(ValueError, match=r"--pipeline runs without torch\.compile; leave TORCHDYNAMO_DISABLE=0"):
        run_command(["pretrain", "pythia-14m", "--pipeline", "2", "--schedule", "zbv"])


def test_devices_of_a_configuration_file_are_not_ignored(tmp_path):
    """Those of the grid are taken: a run saves them, and may be repeated from what it has saved."""
    from axo.integrations.litgpt.command import run as run_command

    file = tmp_path / "run.yaml"
    file.write_text("model_name: no-such-model\ndevices: 8\n")
    with pytest.raises(ValueError, match=r"devices: 8 is what the grid says \(1x1x2x1\); leave it out"):
        run_command(["pretrain", "--config", str(file), "--grid", "1x1x2x1"])
    file.write_text("model_name: no-such-model\ndevices: 2\n")
    with pytest.raises(ValueError, match="there is no model 'no-such-model'"):
        run_command(["pretrain", "--config", str(file), "--grid", "1x1x2x1"])


@pytest.mark.soak
def test_accumulation_equals_stock_litgpt(folder):
    """Oracle: stock LitGPT that accumulates too (its learning rate counts micro-batches)."""
    stock = run(folder, "stock-accumulation", None, accumulate=2)
    losses, sums, state = run(folder, "accumulation", "1x2x2x1", accumulate=2)
    assert len(losses) == 2 * STEPS and losses == pytest.approx(stock[0], abs=1e-4) and sums == stock[1]
    assert distance(state["model"], stock[2]["model"]) < 1e-5


def test_bf16_mixed_is_close_to_stock_litgpt(folder, serial):
    """Oracle: the fp32 run, within 1% at each step."""
    losses = run(folder, "bf16", "2x1x2x1", precision="bf16-mixed")[0]
    relative = max(abs(loss / other - 1) for loss, other in zip(losses, serial[0], strict=True))
    tell("litgpt pretrain, bf16-mixed", grid="2x1x2x1", relative=relative)
    assert relative < 0.01


def test_a_folder_of_text_is_read_without_what_is_none(tmp_path):
    """What others left there: binary files, and the chunks of litdata's with their index."""
    from axo.integrations.litgpt.text_data import _text_files

    for name, content in (("a.txt", b"text"), ("b.md", b"more"), ("c.bin", b"\0\1"), ("sub/index.json", b"{}")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    (tmp_path / "sub" / "chunk-0-0.bin").write_bytes(b"\0")
    assert [file.name for file in _text_files([str(tmp_path)])] == ["a.txt", "b.md"]
    with pytest.raises(ValueError, match="sub holds no text"):
        _text_files([str(tmp_path / "sub")])


REFUSED = {
    "pretrain pythia14m --grid 2x1x1x1": "there is no model 'pythia14m'; the nearest are pythia-14m, ",
    "pretrain meta-llama/Llama-3.1-8 --grid 2x1x1x1": "; the nearest are Llama-3.1-8B, ",
    "pretrain pythia-14m --grid 2x1x1x1 --devices=2": "--devices is what the grid says",
    "validate folder --grid 2x1x1x1": "validate runs on one rank only",
    "pretrain pythia-14m --grid 1x1x3x1": "global_batch_size=512 does not divide over micro_batch_size=4 on z*data=3",
    "pretrain pythia-14m --trian.max_tokens 9": "pretrain has no option --trian.max_tokens; did you mean --train.max_t",
    "pretrian pythia-14m --grid 2x1x1x1": "there is no command 'pretrian'; did you mean pretrain?",
    "pretrain pythia-14m --gird 2x1x1x1": "has no option --gird; did you mean --grid?",
    "pretrain pythia-14m --max_tokens=9": "has no option --max_tokens; did you mean --train.max_tokens",
    "pretrain pythia-14m --config no.yaml": "--config no.yaml is not a file",
    "pretrain --config torn.json": "--config torn.json is not YAML: while parsing",
    "pretrain --config run.yaml --grid 2x1x1x1": "micro_batch_size=0 is not a whole number",
    "pretrain --grid 2x1x1x1": "pretrain wants a model_name, its first argument",
    "pretrain pythia-14m --resume no/such.pth": "--resume no/such.pth does not exist",
    "pretrain pythia-14m --pipeline 2 --schedule 2f2b": "schedule='2f2b' is not known",
    'pretrain small --model_config {"n_layers":2}': "--model_config has no field n_layers; did you mean n_layer?",
    "pretrain small --model_config.n_layer 3 --pipeline 4": "3 blocks over 4 stages",
    "pretrain pythia-14m --grid auto --ranks 3 --machine h100": "no grid of 3 GPUs can train pythia-14m",
    "pretrain pythia-14m --grid 8x1x1x1": "n_head=4 does not divide over x=8; use n_head=8, or a grid with x in {1,",
    "finetune_lora no/such/folder --grid 2x1x1x1": "no/such/folder does not exist; get it first",
    "generate no/such --grid 2x1x1x1": "no/such does not exist",
    "generate no/such": "no/such does not exist; get it first: litgpt download no/such",
    "generate /no/such": "checkpoint_dir /no/such is not a checkpoint directory; name a folder that litgpt download",
    "finetune_lora checkpoints/no/such": "checkpoint_dir checkpoints/no/such is not a checkpoint directory",
    "generate . --max_new_tokens -3": "--max_new_tokens -3 is not a whole number of at least 1",
    "generate . --max_new_tokens 0": "--max_new_tokens 0 is not a whole number of at least 1",
    "chat . --top_k 0 --grid 2x1x1x1": "--top_k 0 is not a whole number of at least 1",
    "generate torn --grid 2x1x1x1": "torn/model_config.yaml is no configuration of a model: while parsing",
    "generate words --grid 2x1x1x1": "words/model_config.yaml is no configuration of a model",
    "pretrain pythia-14m --precision half": "--precision half is not one of bf16-true, bf16-mixed, 32-true",
    "pretrain pythia-14m --train.max_steps many": "--train.max_steps many is not a whole number",
    "pretrain pythia-14m --train.min_lr low": "--train.min_lr low is not a number",
    "pretrain pythia-14m --logger_name paper": "--logger_name paper is not one of csv, tensorboard",
    "finetune_lora . --train.epochs 1.5": "--train.epochs 1.5 is not a whole number",
    "finetune_lora . --lora_query maybe": "--lora_query maybe is not true or false",
    "finetune_lora . --quantize bnb.nf5": "--quantize bnb.nf5 is not one of bnb.nf4",
    "generate . --top_p x": "--top_p x is not a number",
    "pretrain pythia-14m --data TinyLlamas": "--data TinyLlamas is no data module of LitGPT's; did you mean TinyLlama?",
    "pretrain pythia-14m --data torn": "--data torn is a path; to train on it type --data LocalText --data.paths '[",
    "pretrain pythia-14m --out_dir run.yaml/x --logger_name csv": "--out_dir=run.yaml/x cannot be written: ",
    "pretrain pythia-14m --grid 2x1x1x1 --logger_name csv": "pretrain without --data reads TinyLlama's data, and"
    " data/slimpajama/train is not a folder; to train on text files of your own add --data LocalText --data.paths",
    "pretrain pythia-14m --logger_name csv --data TinyLlama --data.data_path torn": "and torn/slimpajama/train is not",
    "pretrain pythia-14m --data TextFiles --data.train_data_pat .": "train_data_pat is no option of TextFiles; did you"
    " mean train_data_path?",
    "pretrain pythia-14m --data LocalText --data.paths run.yaml": "--data.paths run.yaml is not a list, such as '[",
    "pretrain pythia-14m --data TextFiles --data.seed 3": "--data.train_data_path is missing; TextFiles wants it",
    "finetune_lora . --data litgpt.data.Alpaca2k --data.no 3": "use one of mask_prompt, val_split_fraction, prompt",
    "finetune_lora . --data JSON": "--data.json_path is missing; JSON wants it",
    "finetune_lora . --data JSON --data.json_path no.json": "finetune_lora: The `json_path` must be a file",
    "finetune_lora . --data JSON --data.json_path torn": "--data.json_path torn: The `json_path` must be",
    "finetune_lora . --data JSON --data.json_path run.yaml": "--data.json_path run.yaml: Unsupported file format",
    "finetune_lora . --data JSON --data.json_path torn.json": "--data.json_path torn.json: Expecting property name",
    "finetune_lora . --data JSON --data.json_path empty.json": "--data.json_path empty.json holds no records",
    "finetune_lora . --data JSON --data.json_path one.json": "--data.json_path one.json holds no list of records",
    "finetune_lora . --data JSON --data.json_path number.json": "number.json: '3' is no record such as",
    "finetune_lora . --data JSON --data.json_path key.json": "key.json: \"{'instruction': ''}\" is no record such as",
    "finetune_lora . --data JSON --data.json_path null.json": 'is no record such as {"instruction": ...',
    "finetune_lora . --data JSON --data.json_path one.json --data.prompt_style alpacca": "--data.prompt_style='alpacca'"
    " is not known; did you mean 'alpaca'?",
    "finetune_lora . --data litgpt.data.JSON --data.json_path lines.jsonl": "lines.jsonl: \"{'x': 1}\" is no record",
    "convert_from_litgpt sharded out": "sharded holds a sharded checkpoint; make it whole: axo consolidate sharded",
    "convert_pretrained_checkpoint --checkpoint_dir=sharded out": "sharded holds a sharded checkpoint; make it whole",
    "finetune_lora logs --grid 2x1x1x1": "checkpoint_dir logs holds no lit_model.pth; name a folder that litgpt down",
    "finetune_lora trained --grid 2x1x1x1": "trained holds a checkpoint of a training; take the model out of it",
    "generate logs": "checkpoint_dir logs holds no lit_model.pth",
    "chat run.yaml": "checkpoint_dir run.yaml is not a checkpoint directory",
}


def test_what_litgpt_would_download_is_left_to_it(tmp_path, monkeypatch):
    """Oracle: litgpt's own rule, which raises for a folder that no download can bring."""
    import litgpt.scripts.download as download
    from litgpt.utils import auto_download_checkpoint

    from axo.integrations.litgpt import checks, command

    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    asked = []
    monkeypatch.setattr(download, "download_from_hub", lambda repo_id, access_token: asked.append(repo_id))
    for folder in ("EleutherAI/pythia-14m", "no-such", "checkpoints/no/such", "/no/such"):
        tried = len(asked)
        with contextlib.suppress(FileNotFoundError):
            auto_download_checkpoint(folder)
        known = command.PARALLEL["finetune_lora"]
        options = parsing.parse("finetune_lora", known.load(), [folder]).values
        with contextlib.nullcontext() if len(asked) > tried else pytest.raises(ValueError, match="not a checkpoint"):
            checks._check_paths(options, 1, False)
    assert asked == ["EleutherAI/pythia-14m", "no-such"]


def test_wrong_input_is_one_line_before_there_are_ranks(tmp_path):
    (tmp_path / "run.yaml").write_text("model_name: pythia-14m\ntrain: {micro_batch_size: 0}\n")
    for name, text in (("torn", "n_layer: [1"), ("words", "hello")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model_config.yaml").write_text(text)
        (tmp_path / name / "lit_model.pth").touch()
    (tmp_path / "lit_model.pth").touch()
    (tmp_path / "logs").mkdir()
    good = {"instruction": "say it", "output": "it"}
    records = {"empty": [], "one": good, "number": [good, 3], "key": [{"instruction": ""}]}
    records["null"] = [good | {"instruction": None}]
    for name, content in records.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    (tmp_path / "torn.json").write_text("[{")
    (tmp_path / "trained").mkdir()
    torch.save({"model": {}, "step_count": 4}, tmp_path / "trained" / "lit_model.pth")
    (tmp_path / "sharded" / "lit_model.pth").mkdir(parents=True)
    (tmp_path / "sharded" / "lit_model.pth" / ".metadata").touch()
    lines = json.dumps({**good, "output": "a\u2028b"}, ensure_ascii=False) + '\n{"x": 1}\n'
    (tmp_path / "lines.jsonl").write_text(lines)
    for told, words in zip(run_ranks(refusals, 1, str(tmp_path), timeout=120)[0], REFUSED.values(), strict=True):
        assert words in told and "\n" not in told, told


def refusals(folder):
    os.chdir(folder)  # and as where no launcher has started ranks
    for name in NOT_TORCHRUN:
        os.environ.pop(name, None)
    told = []
    for arguments in REFUSED:
        with contextlib.redirect_stdout(io.StringIO()) as printed, pytest.raises(ValueError) as caught:
            run_command(arguments.split())
        told.append(printed.getvalue() + str(caught.value))
    return told


def test_a_command_of_one_device_reads_folders_only_and_not_its_output(tmp_path, monkeypatch):
    from axo.integrations.litgpt import command

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "_run_litgpt", lambda name, rest: ran.append([name, *rest]))
    (tmp_path / "checkpoints" / "old" / "lit_model.pth").mkdir(parents=True)
    (tmp_path / "checkpoints" / "old" / "lit_model.pth" / ".metadata").touch()
    ran: list[list[str]] = []
    long = "tell " * 100
    for rest in (["--prompt", long], [f"--prompt={long}"], ["--out_dir", "checkpoints/old"], ["--out_dir=old"]):
        command.run(["evaluate", "here", *rest])
    assert len(ran) == 4
    with pytest.raises(ValueError, match="checkpoints/old holds a sharded checkpoint"):
        command.run(["evaluate", "old"])


def test_a_file_of_a_model_is_taken_and_forms_of_data(tmp_path, monkeypatch):
    """Oracle: what the file says."""
    from litgpt.data import JSON

    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.yaml").write_text("n_layer: 2\nn_head: 2\n")
    (tmp_path / "run.yaml").write_text("grid: 1x1x2x1\nmax_restarts: 3\ntrain: {micro_batch_size: 2}\n")
    setup = PARALLEL["pretrain"].load()
    parsed = parsing.parse("pretrain", setup, ["x", "--model_config", "model.yaml", "--config", "run.yaml"])
    assert (parsed.litgpt.model_config.n_layer, parsed.litgpt.train.micro_batch_size) == (2, 2)
    assert parsed.own == Options(grid=Grid(1, 1, 2, 1), max_restarts=3)
    assert "grid" not in parsed.as_yaml() and "micro_batch_size: 2" in parsed.as_yaml()
    (tmp_path / "a.json").write_text(json.dumps([{"instruction": "say it", "output": "it"}] * 3))
    (tmp_path / "c.yaml").write_text("data: {class_path: litgpt.data.JSON, init_args: {json_path: a.json}}\n")
    setup = PARALLEL["finetune_lora"].load()
    for given in (
        ["--config", "c.yaml", "--data", "JSON"],
        ["--data", "JSON", "--data.json_path", "a.json", "--data.val_split_fraction", "0.5"],
        ["--data", "JSON", "--data.init_args", "{json_path: a.json}"],
    ):
        assert isinstance(parsing.parse("finetune_lora", setup, [".", *given]).values["data"], JSON), given


def test_an_accelerator_that_the_ranks_cannot_use_is_refused(monkeypatch):
    wrong = {"tpu": "device='tpu' is not known; use cpu, or cuda"}
    for name, words in (wrong if torch.cuda.is_available() else wrong | {"cuda": "finds none here; use dev"}).items():
        monkeypatch.setenv("LT_ACCELERATOR", name)
        with pytest.raises(ValueError, match=f"LT_ACCELERATOR='{name}': .*{words}"):
            run_command(["pretrain", "pythia-14m", "--logger_name", "csv"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "LitData", "--data.seed", "x"], "--data.seed x is not a whole number"),
        (["--optimizer", "Adams"], "--optimizer Adams is not in torch.optim; name one that is, such as AdamW"),
    ],
)
def test_what_only_the_parser_or_torch_knows_is_one_message(arguments, message, tmp_path, monkeypatch, capfd):
    """The parser printed its usage, forty lines, and ended the process."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=re.escape(message)):
        run_command(["pretrain", "pythia-14m", "--logger_name", "csv", *arguments])
    assert capfd.readouterr().err == ""


def test_a_folder_of_data_that_is_not_there_is_one_message():
    """LitGPT raises FileNotFoundError, which would be shown with a traceback of every frame."""
    import litgpt.data
    import litgpt.pretrain

    from axo.grid import Grid
    from axo.integrations.litgpt.options import Options
    from axo.integrations.litgpt.patches import LitGPTRun, patched

    class Fabric:
        rank_zero_first = contextlib.nullcontext

    with patched(LitGPTRun(litgpt.pretrain, Options(grid=Grid()))):
        with pytest.raises(ValueError, match="data: The data path for TinyLlama is expected to be the directory"):
            litgpt.pretrain.get_dataloaders(
                Fabric(), litgpt.data.TinyLlama("/no/such"), None, litgpt.pretrain.TrainArgs(micro_batch_size=1), 8
            )


def count(grid):
    """What litgpt prints of a model's size: all, and those that LoRA trains."""
    import litgpt.lora
    from litgpt.utils import num_parameters

    import axo
    from axo.integrations.litgpt.patches import count_parameters

    config = litgpt.lora.Config(**LLAMA, lora_r=2, lora_query=True, lora_value=True, lora_mlp=True)
    model = litgpt.lora.GPT(config)
    litgpt.lora.mark_only_lora_as_trainable(model)
    if grid is not None:
        axo.parallelize(model, axo.connect(grid))
    counts = num_parameters if grid is None else count_parameters
    return [counts(model, trained) for trained in (None, True, False)]


def test_the_size_that_is_printed_is_that_of_all_devices():
    """Oracle: the same model on one device, by litgpt's own function."""
    serial = run_ranks(count, 1, None)[0]
    assert serial[0] == sum(serial[1:])
    assert run_ranks(count, 2, "2x1x1x1") == [serial] * 2
    assert run_ranks(count, 2, "1x1x2x1") == [serial] * 2
