"""Training: options, recipe, log, plot, verdict, and runs on ranks against the serial run of plain torch and LitGPT."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

import axo
from axo.grid import Grid
from axo.matmul.products import products_of
from axo.nn.goldfish import goldfish_mask
from axo.perf import plots
from axo.train import TrainConfig, log, models, recipe, runner
from axo.train.check import check, open_batches
from axo.train.loop import Trainer
from axo.train.serial import build_serial, compare, train_serial
from axo_kernels import SignalTimeout
from axo_kernels.fused.chunks import chunk_order
from tests.launcher import rank_outcomes, run_ranks
from tests.train.test_data import byte_tokenizer

TEXT = "".join(f"line {i}: the quick brown fox jumps over {i * i} lazy dogs\n" for i in range(400))
SMALL = {"n_layer": 2, "n_embd": 64, "intermediate_size": 128, "n_head": 8, "n_query_groups": 4, "block_size": 64}
MIXTURE = {"mlp_class_name": "LLaMAMoE", "n_expert": 8, "n_expert_per_token": 2, "moe_intermediate_size": 32}
NEOX = {
    "name": "small-neox", "block_size": 64, "n_layer": 2, "n_embd": 64, "n_head": 8, "vocab_size": 250,
    "padded_vocab_size": 256, "rotary_percentage": 0.25, "parallel_residual": True, "bias": True,
}  # fmt: skip


@pytest.fixture()
def text(tmp_path: Path) -> str:
    (tmp_path / "text.txt").write_text(TEXT)
    return str(tmp_path / "text.txt")


def small(text: str, **options: Any) -> TrainConfig:
    usual: dict[str, Any] = {
        "model_overrides": SMALL, "data": (text,), "steps": 4, "batch_size": 8, "seq_len": 32, "lr": 2e-3, "warmup": 2,
        "precision": "32-true", "seed": 5, "out": str(Path(text).parent / "out"),
    }  # fmt: skip
    return TrainConfig(**(usual | options))


# --- options -----------------------------------------------------------------------------------------------------


def test_defaults_are_valid_and_printable(tmp_path: Path) -> None:
    config = TrainConfig(grid=Grid(2, 2, 2, 1))
    check(config)
    assert json.loads(json.dumps(config.as_dict()))["grid"] == "2x2x2x1"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": ("/nowhere/text",)}, r"data: /nowhere/text does not exist"),
        ({"batch_size": 6, "grid": Grid(1, 1, 2, 2)}, r"batch-size=6 rows do not divide over z\*data=4.*use 4 or 8"),
        ({"batch_size": 0}, r"batch-size=0 is out of range; it must be at least 1"),
        ({"accumulate": 3}, r"accumulate=3 does not divide a rank's 8 rows.*use one of \[1, 2, 4, 8\]"),
        (
            {"seq_len": 31, "grid": Grid(2, 1, 1, 1), "sequence_parallel": True},
            r"seq-len=31 does not divide over x=2; use seq-len=30 or 32",
        ),
        ({"seq_len": 65}, r"seq-len=65 is not in \[1, block_size=64\]"),
        ({"batch_size": 1024}, r"hold \d+ windows of seq-len=32, fewer than batch-size=1024"),
        ({"precision": "fp8"}, r"precision='fp8' is not one of bf16-mixed, 32-true, bf16-true, 16-mixed"),
        ({"device": "cuda"}, r"device='cuda', and torch .* finds none here; use device='cpu'"),
        ({"lr": math.nan}, r"lr=nan is out of range"),
        ({"lr": math.inf}, r"lr=inf is out of range"),
        ({"min_lr": 1.0}, r"min-lr=1.0 is out of range; it must be in \[0, 0.002\]"),
        ({"beta2": 1.0}, r"beta2=1.0 is out of range"),
        ({"model": "pythia-14mm"}, r"neither a LitGPT configuration nor a .*; the nearest are .*pythia-14m"),
        ({"model": "missing.yaml"}, r"the file missing.yaml does not exist"),
        ({"model_overrides": {"n_layers": 3}}, r"litgpt.Config has no field 'n_layers'; did you mean n_layer"),
        ({"model_overrides": {"n_layer": "three"}}, r"n_layer='three' is not a whole number"),
        ({"model_overrides": {"n_embd": 100}}, r"LitGPT refuses .*n_embd=100 does not divide over n_head=8"),
        ({"model_overrides": {"vocab_size": 200, "padded_vocab_size": 200}}, r"has 256 tokens, more than .*\(200\)"),
        (
            {"grid": Grid(3, 1, 1, 1)},
            r"intermediate_size=128 does not divide over x=3; use intermediate_size=126 or 129, or",
        ),
        ({"grid": Grid(1, 3, 1, 1)}, r"n_embd=64 does not divide over y=3"),
        ({"algorithm": "cannon"}, r"algorithm='cannon' is not known; use one of axonn, tesseract, summa"),
        (
            {"algorithm": "tesseract", "grid": Grid(2, 1, 2, 1)},
            r"algorithm 'tesseract' cannot use grid 2x1x2x1; it needs x = y and z as its depth, such as 2x2x1x1",
        ),
        (
            {"algorithm": "tesseract", "grid": Grid(2, 2, 2, 1), "batch_size": 6},
            r"batch-size=6 rows do not divide over x\*z\*data=4",
        ),
        (
            {"algorithm": "tesseract", "grid": Grid(2, 2, 2, 1), "chunked_loss": True},
            r"train: chunked-loss is not supported by algorithm 'tesseract'",
        ),
        ({"chunked_loss": True, "precision": "16-mixed"}, r"train: chunked-loss with precision=16-mixed"),
        (
            {"chunked_loss": True, "sequence_parallel": True, "grid": Grid(2, 1, 1, 1)},
            r"train: chunked-loss with sequence-parallel is not supported",
        ),
        ({"context": 3, "grid": Grid(1, 1, 4, 1)}, r"context=3 does not divide z=4; use one of \[1, 2, 4\]"),
        ({"context_kind": "star"}, r"context='star' is not known"),
        (
            {"context": 2, "context_kind": "heads", "grid": Grid(8, 1, 2, 1)},
            r"context='heads' cannot give a rank's 1 heads",
        ),
        ({"context": 2, "grid": Grid(2, 1, 2, 1), "sequence_parallel": True}, r"sequence-parallel with context=2 is"),
        ({"context": 2, "grid": Grid(1, 1, 4, 1), "batch_size": 5}, r"do not divide over z\*data/context=2"),
        ({"experts": 3, "grid": Grid(1, 1, 4, 1)}, r"train: experts=3 ranks do not divide z=4 of grid 1x1x4x1"),
        ({"experts": 2, "grid": Grid(1, 1, 2, 1)}, r"experts=2 is of models that have experts"),
        (
            {"experts": 4, "grid": Grid(1, 1, 2, 2), "zero": 1, "model_overrides": SMALL | MIXTURE},
            r"experts=4, more than z=2, with zero=1 is not supported",
        ),
        (
            {"experts": 2, "grid": Grid(1, 1, 2, 1), "pipeline": 2, "model_overrides": SMALL | MIXTURE},
            r"train: pipeline=2 with experts=2 is not supported",
        ),
        ({"tokenizer": "/nowhere/tokenizer.json"}, r"tokenizer: /nowhere/tokenizer.json does not exist"),
        ({"recompute": True, "recompute_keeps": "all"}, r"recompute-keeps='all' is not one of nothing, products"),
        ({"recompute_keeps": "products"}, r"recompute-keeps=products says what --recompute keeps; say that too"),
        ({"optimizer": "lion"}, r"train: optimizer='lion' is not one of adamw, muon"),
        (
            {"optimizer": "muon", "offload": "optimizer"},
            r"AdamW's state on the lower tier, and optimizer=muon; use adam",
        ),
        ({"offload": "gradients"}, r"train: offload='gradients': 'gradients' is not known; use none, or a list of"),
        ({"offload": "activations=3"}, r"offload='activations=3' asks for 3 blocks, and the model has 2; use activ"),
        ({"offload_dir": "x"}, r"offload-dir=x without offload; say what goes there"),
        ({"offload": "optimizer", "offload_dir": "/dev/null/x"}, r"offload-dir=/dev/null/x cannot be written: "),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_bad_options_are_named_before_ranks_start(text: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(small(text, **change))


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(text: str, tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path / "tokenizer.json", extra=["<s>", "</s>"])
    with pytest.raises(ValueError, match=r"has 258 tokens, more than the vocabulary of model 'tiny' \(256\)"):
        check(small(text, tokenizer=str(tokenizer)))
    check(small(text, tokenizer=str(tokenizer), model_overrides=SMALL | {"padded_vocab_size": 258, "vocab_size": 258}))


# --- models ------------------------------------------------------------------------------------------------------


def test_a_model_by_name_is_litgpts_own() -> None:
    from litgpt.config import Config

    assert models.resolve("pythia-14m") == Config.from_name("pythia-14m")
    assert models.resolve("EleutherAI/pythia-14m") == Config.from_name("pythia-14m")
    assert models.resolve("pythia-14m", {"n_layer": "3", "head_size": "null"}) == Config.from_name(
        "pythia-14m", n_layer=3, head_size=None
    )


@pytest.mark.parametrize("name", ["model.yaml", "model.json"])
def test_a_model_from_a_file(tmp_path: Path, name: str) -> None:
    import yaml

    path = tmp_path / name
    path.write_text(json.dumps(NEOX) if name.endswith("json") else yaml.safe_dump(NEOX))
    config = models.resolve(str(path), {"n_layer": 3})
    assert (config.name, config.n_layer, config.n_embd, config.parallel_residual) == ("small-neox", 3, 64, True)
    path.write_text("just text")
    with pytest.raises(ValueError, match="holds no fields"):
        models.resolve(str(path))


def test_overriding_does_not_change_the_preset() -> None:
    models.resolve("tiny", {"n_layer": 9})
    assert models.resolve("tiny").n_layer == 4


def test_parameters_are_counted() -> None:
    config = models.resolve("tiny", SMALL)
    attention, mlp, norms = (64 + 2 * 32) * 64 + 64 * 64, 3 * 64 * 128, 2 * 64
    assert models.count_parameters(config) == 2 * 256 * 64 + 2 * (attention + mlp + norms) + 64


# --- recipe, peaks, verdict, pictures ----------------------------------------------------------------------------


def test_learning_rate_warms_up_and_follows_half_a_cosine() -> None:
    config = TrainConfig(lr=1.0, min_lr=0.1, warmup=4, steps=12)
    rates = [recipe.learning_rate(step, config) for step in range(13)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0 and math.isclose(rates[8], 0.55) and math.isclose(rates[12], 0.1)
    assert rates[3:] == sorted(rates[3:], reverse=True)
    assert recipe.learning_rate(0, TrainConfig(lr=1.0, warmup=0, steps=1)) == 1.0


def test_weights_decay_and_norms_do_not(text: str) -> None:
    config = small(text)
    model = build_serial(config)
    decayed, rest = recipe.build_optimizer(model, config).param_groups
    assert {parameter.dim() for parameter in decayed["params"]} == {2} and decayed["weight_decay"] == 0.1
    assert {parameter.dim() for parameter in rest["params"]} == {1} and rest["weight_decay"] == 0.0
    assert len(decayed["params"]) + len(rest["params"]) == len(list(model.parameters()))


def test_peaks_are_known_by_name_and_precision() -> None:
    assert log.peak_tflops("NVIDIA H100 80GB HBM3", "bf16-mixed") == 989.0
    assert log.peak_tflops("NVIDIA H100 PCIe", "bf16-mixed") == 756.0
    assert log.peak_tflops("NVIDIA A100-SXM4-40GB", "32-true") is None
    assert log.peak_tflops("Some CPU @ 2.00GHz", "bf16-mixed") is None


def test_the_verdict_is_one_exact_line() -> None:
    good = compare([2.0, 1.00005], [2.0, 1.0], "32-true")
    assert good.ok and str(good) == "parity: max |loss - serial| = 5.0e-05 over 2 steps (limit 1e-4): ok"
    bad = compare([2.0, 1.1], [2.0, 1.0], "32-true")
    assert not bad.ok and str(bad) == "parity: max |loss - serial| = 1.0e-01 over 2 steps (limit 1e-4): FAILED"
    nan = compare([math.nan, 1.0], [2.0, 1.0], "32-true")
    assert not nan.ok and str(nan).endswith("FAILED")
    low = compare([2.002], [2.0], "bf16-mixed")
    assert low.ok and str(low).startswith(
        "parity (bf16-mixed, relative): max |loss - serial| / serial = 1.0e-03 over 1"
    )
    with pytest.raises(ValueError, match="0 and 1 losses"):
        compare([], [1.0], "32-true")


def test_plain_lines_say_what_is_left(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of two seconds, by a clock of the test's own."""
    now = iter(range(0, 100, 2))
    monkeypatch.setattr(log.time, "perf_counter", lambda: next(now))
    line = {"loss": 5.0, "tokens_per_s": 1000.0, "memory_gb": 0.5, "comm_share": {"all": 0.25}}
    with log.Display("run", 4) as display:
        for done in range(1, 5):
            display.show(done, line)
    figures = "loss 5.000 · 1,000 tokens/s · 0.50 GB a rank · comm 25%"
    left = ["", " · 0:00:04 left", " · 0:00:02 left", ""]
    assert capsys.readouterr().out.splitlines() == [f"run {n}/4: {figures}{rest}" for n, rest in enumerate(left, 1)]


def test_the_plot_explains_its_number_and_shows_both_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures, new_figure = [], plots.new_figure
    monkeypatch.setattr(plots, "new_figure", lambda *shape: figures.append(new_figure(*shape)) or figures[-1])
    for serial in (None, [5.0, 4.0, 3.0]):
        path = tmp_path / "deep" / "loss.png"
        log.draw(path, [5.0, 4.0, 3.0], title="t", subtitle="s", vocabulary=256, serial=serial, limit=1e-4)
        axes = figures[-1][1]
        told = [text.get_text() for text in axes.get_legend().get_texts()]
        assert told == ["serial"] * (serial is not None) + ["Axo (4.00: mean of the last 3 steps)"]
        if serial is not None:  # equal curves: wider, and of another colour, than the one that lies on it
            serial_line, own = axes.lines[-2:]
            assert serial_line.get_linewidth() > 2 * own.get_linewidth() and serial_line.get_color() != own.get_color()
        assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and path.stat().st_size > 20_000
        path.unlink()


# --- serial ------------------------------------------------------------------------------------------------------


def test_serial_is_the_textbook_loop(text: str) -> None:
    """Oracle: the same training written out here, with nothing of the package but the batches."""
    import torch.nn.functional as F
    from litgpt.model import GPT

    config = small(text, weight_decay=0.0, clip=0.3)
    batches = open_batches(config)
    model = GPT(models.resolve(config.model, config.model_overrides))
    torch.manual_seed(config.seed)
    model.apply(model._init_weights)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    losses = []
    for step in range(config.steps):
        optimizer.param_groups[0]["lr"] = recipe.learning_rate(step, config)
        inputs, targets = map(torch.from_numpy, batches.read(step, range(8)))
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert list(train_serial(config, batches)) == pytest.approx(losses, abs=1e-6)


def test_goldfish_leaves_tokens_out_of_the_loss(text: str) -> None:
    """Rows: the loss with goldfish is the mean over the kept tokens, taken here with a mask of this test's own."""
    config = small(text, goldfish_k=2, goldfish_h=3, steps=1)
    batches = open_batches(config)
    inputs, targets = map(torch.from_numpy, batches.read(0, range(config.batch_size)))
    keep = goldfish_mask(torch.cat([inputs[:, :1], targets], 1), 2, 3)[:, 1:]
    with torch.no_grad():
        losses = torch.nn.functional.cross_entropy(
            build_serial(config)(inputs).flatten(0, 1), targets.flatten(), reduction="none"
        )
    assert 0.3 < keep.float().mean() < 0.7
    assert next(train_serial(config, batches)) == pytest.approx(losses[keep.flatten()].mean().item(), abs=1e-5)


def test_accumulation_and_recomputation_do_not_change_the_loss(text: str) -> None:
    config = small(text)
    batches = open_batches(config)
    usual = list(train_serial(config, batches))
    changed = list(train_serial(dataclasses.replace(config, accumulate=4, recompute=True), batches))
    # Another order of sums in fp32: 4 steps drift by far less than 1e-5.
    assert changed == pytest.approx(usual, abs=1e-5) and usual[-1] < usual[0] - 0.1


def test_recomputation_that_keeps_products_repeats_none(text: str) -> None:
    """Products of one step: three for each weight (forward, dI, dW), and a fourth where blocks run again whole, but
    for the last of a block, after which nothing more is wanted."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Products(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += str(func) in ("aten.mm.default", "aten.addmm.default")
            return func(*args, **(kwargs or {}))

    counts, losses = [], []
    for options in ({}, {"recompute": True}, {"recompute": True, "recompute_keeps": "products"}):
        config = small(text, steps=1, **options)
        with Products() as seen:
            losses += list(train_serial(config, open_batches(config)))
        counts.append(seen.count)
    weights = SMALL["n_layer"] * 5  # qkv, proj, fc_1, fc_2, proj
    assert counts == [3 * weights + 3, 4 * weights + 3 - SMALL["n_layer"], 3 * weights + 3]
    assert losses == [losses[0]] * 3


# --- ranks -------------------------------------------------------------------------------------------------------


def train_on_rank(config: TrainConfig) -> tuple[list[float], list[float]]:
    comms = axo.connect(config.grid, context=config.context, experts=config.experts)
    batches = open_batches(config)
    trainer = Trainer(config, comms, batches)
    steps = [trainer.step(index) for index in range(config.steps)]
    comms.close()
    assert all((step.balance or 0) >= 1 if config.experts > 1 else step.balance is None for step in steps)
    return [step.loss for step in steps], [step.grad_norm for step in steps]


@pytest.mark.parametrize(
    ("grid", "options"),
    [
        ("2x2x1x1", {"model": "file"}),
        ("2x1x2x1", {"accumulate": 2, "clip": 0.3, "offload": "optimizer,activations", "sequence_parallel": True}),
        (
            "1x2x1x2",
            {"recompute": True, "recompute_keeps": "products", "goldfish_k": 3, "goldfish_h": 4, "accumulate": 2},
        ),
        ("2x2x2x1", {"chunked_loss": False}),
        ("2x2x2x1", {"algorithm": "tesseract", "recompute": True, "accumulate": 2}),
        ("2x1x2x1", {"context": 2, "seq_len": 29, "recompute": True, "goldfish_k": 3, "goldfish_h": 4}),
        ("1x1x4x1", {"context": 2, "context_kind": "heads", "accumulate": 2}),
        ("2x2x1x1", {"chunked_loss": True, "model_overrides": SMALL | {"final_logit_softcapping": 2.0}}),
        ("2x1x2x1", {"chunked_loss": True, "context": 2, "goldfish_k": 3, "accumulate": 2, "recompute": True}),
        ("1x1x2x2", {"experts": 4, "accumulate": 2, "recompute": True, "model_overrides": SMALL | MIXTURE}),
        ("2x1x2x1", {"experts": 2, "chunked_loss": True, "zero": 1, "model_overrides": SMALL | MIXTURE}),
    ],
    ids=str,
)
def test_losses_equal_serial(text: str, tmp_path: Path, grid: str, options: dict[str, Any]) -> None:
    """Every rank reports the same loss and norm; the loss is the serial run's to 2e-5 (fp32, another order of sums)."""
    if options.get("model") == "file":
        (tmp_path / "neox.json").write_text(json.dumps(NEOX))
        options = {"model": str(tmp_path / "neox.json"), "model_overrides": {}}
    config = small(text, grid=Grid.parse(grid), **options)
    serial = list(train_serial(config, open_batches(config)))
    results = run_ranks(train_on_rank, config.grid.world_size, config)
    assert all(result == results[0] for result in results)
    assert results[0][0] == pytest.approx(serial, abs=2e-5)
    assert serial[-1] < serial[0] - 0.1  # it learns, so the comparison says something


@pytest.mark.parametrize(
    ("grid", "limit", "options"),
    [
        ("1x2x2x2", 1e-4, {"context": 2, "seq_len": 29}),
        ("1x1x4x1", 1e-4, {"context": 4, "seq_len": 3, "batch_size": 32}),  # the last rank has no token
        ("2x1x2x1", 2e-2, {"context": 2, "context_kind": "gather", "precision": "bf16-mixed", "recompute": True}),
        ("1x2x1x2", 2e-2, {"optimizer": "muon", "precision": "bf16-mixed", "recompute": True, "zero": 2}),
    ],
    ids=str,
)
def test_twenty_losses_equal_serial(text: str, grid: str, limit: float, options: dict[str, Any]) -> None:
    """``limit``: of fp32; in bf16 products round, and sums come in another order."""
    config = small(text, grid=Grid.parse(grid), steps=20, **options)
    serial = list(train_serial(config, open_batches(config)))
    results = run_ranks(train_on_rank, config.grid.world_size, config)
    apart = max(map(abs, map(float.__sub__, results[0][0], serial)))
    print(f"{grid} {options}: losses differ by {apart:.1e}")
    assert all(result == results[0] for result in results) and apart <= limit
    assert serial[-1] < serial[0] - 0.1


def initial_weights(config: TrainConfig) -> dict[str, torch.Tensor]:
    comms = axo.connect(config.grid)
    torch.manual_seed(1000 + comms.rank)  # ranks differ before the run seeds them
    model = Trainer(config, comms, open_batches(config)).model
    whole = {name: axo.unshard(parameter.detach(), parameter.placement) for name, parameter in model.named_parameters()}
    comms.close()
    return whole if comms.rank == 0 else {}


def test_initial_weights_equal_serial_to_the_bit(text: str) -> None:
    config = small(text, grid=Grid(2, 2, 1, 1))
    whole = run_ranks(initial_weights, 4, config)[0]
    serial = dict(build_serial(config).named_parameters())
    assert whole.keys() == serial.keys()
    assert all(torch.equal(whole[name], serial[name]) for name in serial)


def unequal_gradient(config: TrainConfig) -> tuple[float, torch.Tensor]:
    """One backward with 1 row on data rank 0 and 5 on data rank 1."""
    comms = axo.connect(config.grid)
    batches = open_batches(config)
    trainer = Trainer(config, comms, batches)
    rows = range(1) if comms.coords.data == 0 else range(1, 6)
    loss, tokens = trainer.accumulate(*map(torch.from_numpy, batches.read(0, rows)))
    assert tokens == 6 * config.seq_len
    weight = trainer.model.lm_head.weight
    gradient = axo.unshard(weight.grad, weight.placement)
    comms.close()
    return float(loss), gradient


def widest_buffers(configs: list[TrainConfig]) -> list[int]:
    """The elements of the largest tensor that a step makes, by run."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            made = [each.numel() for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
            Largest.elements = max([Largest.elements, *made])
            return result

    comms, widest = axo.connect(configs[0].grid), []
    for config in configs:
        trainer, Largest.elements = Trainer(config, comms, open_batches(config)), 0
        with Largest(), pytest.MonkeyPatch.context() as patch:
            patch.setattr("axo.nn.linear_loss.LOGITS_CHUNK", 1 << 14)
            trainer.step(0)
        widest.append(Largest.elements)
    comms.close()
    return widest


def test_a_chunked_loss_has_no_logits_of_all_tokens(text: str) -> None:
    model = SMALL | {"n_embd": 32, "intermediate_size": 32, "vocab_size": 4096, "padded_vocab_size": 4096}
    usual = small(text, grid=Grid(2, 1, 1, 1), model_overrides=model, batch_size=16, seq_len=64)
    most, chunked = run_ranks(widest_buffers, 2, [dataclasses.replace(usual, chunked_loss=False), usual])[0]
    logits, head = 16 * 64 * 4096 // 2, 4096 // 2 * 32  # of this rank
    assert most == logits and head <= chunked < 1.01 * head  # its gradient, with a small one in the same buffer


def test_unequal_local_batches_are_weighted_by_tokens(text: str) -> None:
    """Oracle: one serial backward over the six rows."""
    import torch.nn.functional as F

    config = small(text, grid=Grid(2, 1, 1, 2))
    results = run_ranks(unequal_gradient, 4, config)
    model = build_serial(config)
    inputs, targets = map(torch.from_numpy, open_batches(config).read(0, range(6)))
    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    loss.backward()
    total = results[0][0] + results[2][0]  # ranks 0 and 2 are the two data ranks at x = 0
    assert total / (6 * config.seq_len) == pytest.approx(loss.item(), rel=1e-6)  # fp32 sums
    for _, gradient in results:
        torch.testing.assert_close(gradient, model.lm_head.weight.grad, atol=1e-6, rtol=1e-5)


def train_with_text_missing(config: TrainConfig, on: tuple[int, ...]) -> None:
    if int(os.environ["RANK"]) in on:
        config = dataclasses.replace(config, data=("/nowhere",))
    runner.train_rank(config)


@pytest.mark.parametrize(("on", "who"), [((1,), "rank 1: "), ((0, 1), "")])
def test_text_that_a_rank_cannot_read_is_one_error_on_all(text: str, on: tuple[int, ...], who: str) -> None:
    for outcome in rank_outcomes(train_with_text_missing, 2, small(text, grid=Grid(2, 1, 1, 1)), on):
        assert outcome.error == "ValueError", outcome.describe()
        assert outcome.message == f"{who}data: /nowhere does not exist; give files or folders of text"


def nan_on_rank(config: TrainConfig) -> str:
    comms = axo.connect(config.grid)
    trainer = Trainer(config, comms, open_batches(config))
    if comms.rank == 1:
        with torch.no_grad():
            trainer.model.lm_head.weight.fill_(math.nan)
    try:
        trainer.step(0)
    except FloatingPointError as error:
        return str(error)
    return "no error"


def test_a_loss_that_is_not_finite_stops_every_rank(text: str) -> None:
    messages = run_ranks(nan_on_rank, 2, small(text, grid=Grid(1, 1, 1, 2)))
    assert len(set(messages)) == 1 and messages[0].startswith("train: the loss of step 0 is nan")


def waited_in_vain(config: TrainConfig) -> str:
    comms = axo.connect(config.grid)
    trainer = Trainer(config, comms, open_batches(config))
    workspaces = products_of(comms).fused.on("z").workspaces
    workspace = workspaces.get("all_gather_matmul", chunk_order("all_gather", 4, 2, 0, 2), None, torch.device("cpu"))
    with torch.no_grad():
        trainer.model.lm_head.weight.fill_(math.nan)
    # as a kernel on a GPU reports it while the host goes on
    note = torch.tensor([1, 1, 17, 16], dtype=torch.int32)
    trainer.optimizer.register_step_post_hook(lambda *_: workspace.status.copy_(note))
    try:
        trainer.step(0)
    except (SignalTimeout, FloatingPointError) as error:
        return str(error)
    return "no error"


def test_rows_that_a_peer_never_sent_are_no_matter_of_the_learning_rate(text: str) -> None:
    """A kernel puts NaN where a chunk never came: its report goes before the loss that comes of it."""
    [message] = run_ranks(waited_in_vain, 1, small(text))
    assert "waited 600 s for chunk 1 (rows of rank 1) of epoch 17; its flag stands at 16" in message
