"""Code that copies a module before it is split, or reads a split weight: right as on one device, or refused by name."""

import contextlib
import sys

import pytest
import torch

import axo
from tests.integrations.support import ELASTIC, distance, installed
from tests.launcher import rank_outcomes, run_ranks

TRANSFORMERS = ("transformers.trainer", "transformers.models.llama.modeling_llama")
EACH = ["2x1x1x1", "1x1x2x1", pytest.param("1x2x1x1", marks=pytest.mark.soak)]


def average(grid, kind, folder):
    """The weights that training with an averaging callback leaves, those of its checkpoint, the validation's loss.

    "alone" is a callback of rank 0 alone that saves."""
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import (
        EMAWeightAveraging,
        LambdaCallback,
        ModelCheckpoint,
        StochasticWeightAveraging,
    )
    from torch.utils.data import DataLoader, TensorDataset

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(3)
            self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 4))

        def training_step(self, batch, index):
            return self.net(batch[0]).square().mean()

        def validation_step(self, batch, index):
            self.log("check", self.net(batch[0]).square().mean(), sync_dist=True)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.5)

    callbacks = {
        "EMA": lambda: EMAWeightAveraging(decay=0.5),
        "SWA": lambda: StochasticWeightAveraging(swa_lrs=0.2, swa_epoch_start=1, annealing_epochs=1),
        "alone": lambda: LambdaCallback(on_train_end=lambda it, _: it.is_global_zero and it.save_checkpoint(folder)),
    }
    strategy, parts = "auto", 1
    if grid is not None:
        from axo.integrations.trainer import AxoStrategy

        strategy = AxoStrategy(grid, like_one_device=True)
        parts = strategy.grid.z * strategy.grid.data
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=1 if grid is None else "auto", max_epochs=4, logger=False,
        callbacks=[callbacks[kind](), ModelCheckpoint(dirpath=folder, save_last=True, save_top_k=0)],
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
    )  # fmt: skip
    module = Module()
    rows = TensorDataset(torch.randn(16, 4, generator=torch.Generator().manual_seed(1)))
    loader = DataLoader(rows, batch_size=8 // parts)
    trainer.fit(module, loader, loader)
    state = module.state_dict()
    saved = torch.load(folder / "last.ckpt", weights_only=False)["state_dict"]
    return state, saved, float(trainer.callback_metrics["check"])


@pytest.mark.parametrize("kind", ["EMA", "SWA"])
@pytest.mark.parametrize("grid", EACH)
def test_averages_of_weights_are_those_of_one_device(grid, kind, tmp_path):
    expected = average(None, kind, tmp_path / "alone")
    for found in run_ranks(average, 2, grid, kind, tmp_path / "grid", env=ELASTIC, preload=("lightning.pytorch",)):
        assert distance(found[0], expected[0]) < 1e-5 and distance(found[1], expected[1]) < 1e-5
        assert found[2] == pytest.approx(expected[2], rel=1e-5)


@pytest.fixture(scope="session")
def peft():
    """The folder in which PEFT lies."""
    return str(installed("peft", "peft.txt", "peft", "--no-deps"))


def adapt(grid, cases, folder, packages):
    """For each kind of adapter three losses, and the norms of what the Trainer has saved; or the refusal."""
    sys.path.insert(0, packages)
    import peft
    import transformers.trainer
    import transformers.trainer_utils
    from safetensors.torch import load_file
    from transformers import Trainer, TrainingArguments
    from transformers.utils import import_utils

    import_utils._peft_available = True  # it was looked for when transformers was imported
    getattr(import_utils.is_peft_available, "cache_clear", lambda: None)()  # since transformers 5
    for module in (transformers.trainer, transformers.trainer_utils):
        module.PeftModel, module.PeftMixedModel = peft.PeftModel, peft.PeftMixedModel

    from examples.hf.train import model_of
    from examples.nanogpt.model import rows

    layers = {"target_modules": ["q_proj", "v_proj"], "r": 4, "task_type": "CAUSAL_LM"}
    tokens = {"num_virtual_tokens": 4, "task_type": "CAUSAL_LM"}
    kinds = {
        "head": lambda: peft.LoraConfig(**layers, modules_to_save=["lm_head"]),
        "added": lambda: peft.LoraConfig(**layers, modules_to_save=["lm_head"]),
        "prompt": lambda: peft.PromptTuningConfig(**tokens),
        "prefix": lambda: peft.PrefixTuningConfig(**tokens),
        "DoRA": lambda: peft.LoraConfig(**layers, use_dora=True),
        "LoKr": lambda: peft.LoKrConfig(**layers),
        "LoHa": lambda: peft.LoHaConfig(**layers),
        "tokens": lambda: peft.TrainableTokensConfig(token_indices=[1, 2, 3], task_type="CAUSAL_LM"),
    }
    results = []
    for number, (kind, plan) in enumerate(cases):
        torch.manual_seed(11)
        out = folder / f"{kind}{number}"
        arguments = TrainingArguments(
            output_dir=str(out), use_cpu=True, max_steps=3, save_steps=3, learning_rate=1e-2, logging_steps=1, seed=7,
            per_device_train_batch_size=4 if grid is None or grid[4] == "1" else 2, report_to=[], disable_tqdm=True,
        )  # fmt: skip
        data = [{"input_ids": row, "labels": row} for row in rows(16)]
        model = model_of()
        if kind == "added":  # transformers' own way
            model.add_adapter(kinds[kind]())
        else:
            model = peft.get_peft_model(model, kinds[kind]())
        trainer = Trainer(model, arguments, train_dataset=data)
        if grid is not None:
            from axo.integrations.hugging_face import on_grid

            trainer = on_grid(trainer, grid, plan=plan)
        try:
            trainer.train()
        except axo.Refused as error:
            results.append(str(error))
            continue
        trainer.save_model(str(out / "final"))
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        whole = load_file(out / "final" / "adapter_model.safetensors")
        results.append((losses, {name: float(value.norm()) for name, value in whole.items()}))
    return results


def check(ranks, expected):
    for rank in ranks:
        for (losses, norms), (wanted, wanted_norms) in zip(rank, expected, strict=True):
            assert losses == pytest.approx(wanted, abs=1.1e-4)  # four digits are logged
            assert norms == pytest.approx(wanted_norms, rel=1e-3, abs=1e-4)


SAVED = [("head", "auto"), ("added", "auto"), ("prompt", "auto")]
READERS = ("DoRA", "LoKr", "LoHa", "tokens")
WHOLE = {"*.base_layer": "replicate", "*.default": "replicate"}


@pytest.mark.parametrize("grid", EACH)
def test_adapters_are_trained_and_saved_as_on_one_device(grid, tmp_path, peft):
    """Those whose modules are split: what rank 0 writes is gathered on all ranks. And what refuses, kept whole."""
    cases = SAVED + ([("prefix", "auto")] if grid[0] == "1" else [("prefix", {"*.self_attn.*": "replicate"})])
    (expected,) = run_ranks(adapt, 1, None, cases, tmp_path / "alone", peft, preload=TRANSFORMERS, timeout=90)
    check(run_ranks(adapt, 2, grid, cases, tmp_path / "grid", peft, preload=TRANSFORMERS, timeout=90), expected)


@pytest.mark.soak
@pytest.mark.parametrize("grid", ["2x1x1x1", "1x2x1x1", "1x1x2x1"])
def test_readers_of_weights_are_right_once_these_are_whole(grid, tmp_path, peft):
    cases = [(kind, WHOLE) for kind in READERS]
    (expected,) = run_ranks(adapt, 1, None, cases, tmp_path / "alone", peft, preload=TRANSFORMERS, timeout=90)
    check(run_ranks(adapt, 2, grid, cases, tmp_path / "grid", peft, preload=TRANSFORMERS, timeout=200), expected)


@pytest.mark.parametrize("grid", EACH)
def test_readers_of_split_weights_are_refused(grid, tmp_path, peft):
    cases = [(kind, "auto") for kind in (*READERS, *(["prefix"] if grid[0] == "2" else []))]
    for rank in run_ranks(adapt, 2, grid, cases, tmp_path, peft, preload=TRANSFORMERS, timeout=90):
        for (kind, _), refused in zip(cases, rank, strict=True):
            assert isinstance(refused, str) and ": 'replicate'}" in refused, (kind, refused)
            assert kind == "prefix" or "reads 'base_model.model.model." in refused, refused


def merge(grid, packages):
    """How far a model is from one device's once PEFT has merged its adapters, unmerged them, and left them out."""
    sys.path.insert(0, packages)
    import peft

    from examples.hf.train import model_of

    comms = axo.connect(grid)
    layers = {"target_modules": ["q_proj", "o_proj", "down_proj"], "r": 4, "task_type": "CAUSAL_LM"}
    kinds = (peft.LoraConfig(**layers, init_lora_weights=False), peft.LoHaConfig(**layers, init_weights=False))
    ids, distances = torch.arange(8).view(2, 4), []
    mine = axo.shard_batch(ids, comms)
    for kind in kinds:
        models = []
        for _ in range(2):
            torch.manual_seed(1)
            models.append(peft.get_peft_model(model_of(), kind).eval())
        serial, model = models
        axo.parallelize(model, comms, plan="auto")
        steps = [lambda m: m.merge_adapter(safe_merge=True), lambda m: m.unmerge_adapter(), lambda m: m.merge_adapter()]
        for step in steps:
            for each in models:
                step(each)
            if serial.get_layer_status()[0].merged_adapters:  # LoHa itself is refused
                distances.append(distance_of_logits(serial, model, ids, mine, comms))
        for each in models:
            each.unmerge_adapter()
        distances.append(distance_of_logits(serial.merge_and_unload(), model.merge_and_unload(), ids, mine, comms))
    return distances


@torch.no_grad()
def distance_of_logits(serial, model, ids, mine, comms):
    found, expected = model(input_ids=mine).logits, axo.shard_batch(serial(input_ids=ids).logits, comms)
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("grid", EACH)
def test_adapters_are_merged_into_split_weights(grid, peft):
    for distances in run_ranks(merge, 2, grid, peft, preload=TRANSFORMERS, timeout=90):
        assert len(distances) == 6 and max(distances) < 1e-5


def generate(grid):
    """What each rank generates of its own prompt and number of tokens, beside one device."""
    from examples.hf.train import model_of

    comms = axo.connect(grid)
    model = axo.parallelize(model_of(), comms, plan="auto").eval()
    serial = model_of().eval()
    ids = torch.arange(4).view(1, 4) + comms.z.rank
    options = {"do_sample": False, "max_new_tokens": 3 + 2 * comms.z.rank, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(ids, **options).tolist(), serial.generate(ids, **options).tolist()


def test_ranks_generate_unequal_numbers_of_tokens():
    outcomes = run_ranks(generate, 2, "1x1x2x1", preload=TRANSFORMERS[1:])
    assert [len(found[0]) for found, _ in outcomes] == [7, 9]
    for found, expected in outcomes:
        assert found == expected


def step_alone(grid):
    from accelerate import Accelerator
    from accelerate.local_sgd import LocalSGD

    from axo.integrations.hugging_face import on_grid

    accelerator = on_grid(Accelerator(cpu=True), grid)
    model = accelerator.prepare(torch.nn.Sequential(torch.nn.Linear(4, 4)))
    with (
        pytest.raises(axo.Refused, match=r"LocalSGD.*accelerator\.accumulate"),
        LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2),
    ):
        pass


def test_local_steps_are_refused():
    run_ranks(step_alone, 2, "1x1x1x2", env=ELASTIC)


def pack_saved(grid):
    """Gradient norms of a step, plain, with torch's own hooks of saved tensors, and with hooks of a program's own."""
    comms = axo.connect(grid)
    norms = []
    for hooks in (None, torch.autograd.graph.save_on_cpu(), torch.autograd.graph.saved_tensors_hooks(*OF_ONES_OWN)):
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8))
        model = axo.parallelize(model, comms, plan="auto")
        rows = torch.randn(4, 8, generator=torch.Generator().manual_seed(4))
        with hooks or contextlib.nullcontext():
            loss = model(rows).square().mean()
        loss.backward()
        norms.append(axo.clip_grad_norm_(model.parameters(), 1e9).item())
    return norms


OF_ONES_OWN = (lambda tensor: tensor.clone(), lambda packed: packed)


@pytest.mark.parametrize("grid", ["2x1x1x1", "1x1x2x1"])
def test_hooks_of_saved_tensors_may_read_split_weights(grid):
    """Autograd calls them where Axo, or the layer itself, saves its own weight."""
    for norms in run_ranks(pack_saved, 2, grid):
        assert norms == [norms[0]] * 3


def change_late(grid):
    """What is said of tables, heads and adapters that come after the split."""
    from examples.hf.train import model_of

    comms = axo.connect(grid)
    model = axo.parallelize(model_of(), comms, plan="auto")

    def head():
        model.lm_head = torch.nn.Linear(32, 64)

    def around():
        layer = model.model.layers[0].self_attn.q_proj
        model.model.layers[0].self_attn.q_proj = torch.nn.Sequential(layer, torch.nn.Linear(32, 32))

    said = []
    for change in (lambda: model.resize_token_embeddings(72), head, around):
        with pytest.raises(axo.Refused) as refused:
            change()
        said.append(str(refused.value))
    model.lm_head = torch.nn.Identity()  # has no parameters
    return said


def test_what_comes_after_the_split_is_refused():
    for said in run_ranks(change_late, 2, "2x1x1x1", preload=TRANSFORMERS[1:]):
        assert "resize_token_embeddings: the embedding is split over ranks" in said[0]
        assert "LlamaForCausalLM.lm_head: Linear has a parameter 'weight'" in said[1]
        assert "LlamaAttention.q_proj: Sequential has a parameter '1.weight'" in said[2]


def save_alone(grid, what, folder):
    """Rank 0 calls what all must call."""
    if what.endswith("trainer.save_checkpoint()"):
        average(grid, "alone", folder)
        return
    if what == "fabric.save()":
        from lightning import Fabric

        fabric = Fabric(accelerator="cpu", strategy=axo.AxoStrategy(grid, plan="auto"))
        fabric.launch()
        model = fabric.setup(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)))
        if fabric.is_global_zero:
            fabric.save(folder / "model", {"model": model})
        fabric.barrier()
        return
    from accelerate import Accelerator

    from axo.integrations.hugging_face import on_grid
    from examples.hf.train import model_of

    accelerator = on_grid(Accelerator(cpu=True), grid)
    model = accelerator.prepare(model_of())
    if accelerator.is_main_process:
        {
            "model.state_dict()": model.state_dict,
            "layer.full_weight()": model.model.layers[0].self_attn.q_proj.full_weight,
            "accelerator.save_state()": lambda: accelerator.save_state(folder / "state"),
        }[what]()
    accelerator.wait_for_everyone()


@pytest.mark.parametrize(
    "what",
    [
        "model.state_dict()",
        "layer.full_weight()",
        "accelerator.save_state()",
        "fabric.save()",
        "fabric.save() or trainer.save_checkpoint()",
    ],
)
@pytest.mark.parametrize("grid", ["2x1x1x1", "1x1x2x1"])
def test_a_save_of_rank_0_alone_is_an_error_on_all_ranks(grid, what, tmp_path):
    """Without waiting for a time limit, which is 30 minutes."""
    preload = ("lightning.pytorch",) if what.startswith("fabric.save()") else TRANSFORMERS[1:]
    outcomes = rank_outcomes(save_alone, 2, grid, what, tmp_path, env=ELASTIC, preload=preload)
    for outcome in outcomes:
        assert outcome.error in ("Mismatch", "Aborted", "PeerLost"), outcome.describe()
    assert any(f"rank 0 called {what} and others did not" in outcome.message for outcome in outcomes)
