"""Twenty public models by plan="auto": equal to serial, and split as the table of docs/plans.md says.

Oracle: the same model, unchanged, in one process.
"""

import re
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import axo
from axo.plans.auto.families import CLASSES, of_transformers, table_of
from examples.nanogpt import model as nanogpt
from examples.unet.model import UNet
from examples.vit.model import ViT
from tests.launcher import run_ranks
from tests.nn.support import assert_close, assert_gradients_match, serial_seed

transformers = pytest.importorskip("transformers")
LIMIT = 1e-5
VOCABULARY = 101
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
SIZES |= {"num_attention_heads": 8, "max_position_embeddings": 32}
FAMILIES = ("llama", "qwen2", "qwen3", "gemma", "mistral", "mixtral", "gpt2", "gpt_neox", "opt", "bloom", "falcon")
FAMILIES += ("phi", "bert", "t5", "whisper", "vit", "mamba")
PRELOAD = tuple(f"transformers.models.{name}.modeling_{name}" for name in FAMILIES)


def built(kind, config, **fields):
    return getattr(transformers, kind)(getattr(transformers, f"{config}Config")(**fields))


def causal(family, **fields):
    return lambda: built(f"{family}ForCausalLM", family, **SIZES, **fields)


class Mixer(nn.Module):
    """MLP-Mixer (Tolstikhin et al., 2021): an MLP over patches, and one over channels."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm_1, self.norm_2 = nn.LayerNorm(32), nn.LayerNorm(32)
            self.tokens = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16))
            self.channels = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

        def forward(self, x):
            x = x + self.tokens(self.norm_1(x).transpose(1, 2)).transpose(1, 2)
            return x + self.channels(self.norm_2(x))

    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 32, 2, stride=2), nn.Linear(32, 10)
        self.blocks = nn.Sequential(self.Block(), self.Block())

    def forward(self, x):
        return self.head(self.blocks(self.stem(x).flatten(2).transpose(1, 2)).mean(1))


def text():
    return torch.randint(VOCABULARY, (4, 12), generator=torch.Generator().manual_seed(3))


def noise(*shape):
    return torch.randn(4, *shape, generator=torch.Generator().manual_seed(3))


def gpt2():
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return built("GPT2LMHeadModel", "GPT2", vocab_size=VOCABULARY, n_embd=32, n_layer=1, n_head=8, **dropout)


def falcon():
    fields = {"num_kv_heads": 4, "new_decoder_architecture": True}
    return built("FalconForCausalLM", "Falcon", **{**SIZES, **fields})


def bert():
    return built("BertForMaskedLM", "Bert", **SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


def t5():
    fields = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 4, "d_ff": 48, "num_layers": 1, "num_heads": 8}
    return built("T5ForConditionalGeneration", "T5", **fields, dropout_rate=0.0, decoder_start_token_id=0)


def whisper():
    layers = {f"{side}_{what}": size for side in ("encoder", "decoder") for what, size in
              (("layers", 1), ("attention_heads", 8), ("ffn_dim", 48))}  # fmt: skip
    places = {"max_source_positions": 12, "max_target_positions": 32, "num_mel_bins": 8, "d_model": 32}
    tokens = dict.fromkeys(("decoder_start_token_id", "pad_token_id", "bos_token_id", "eos_token_id"), 0)
    fields = {**layers, **places, **tokens, "vocab_size": VOCABULARY, "dropout": 0.0}
    return built("WhisperForConditionalGeneration", "Whisper", **fields)


def vit():
    fields = {**SIZES, "image_size": 8, "patch_size": 4, "hidden_dropout_prob": 0.0}
    return built("ViTForImageClassification", "ViT", **fields)


def mamba():
    return built("MambaForCausalLM", "Mamba", vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=1, state_size=4)


def loss_of_text(model):
    return model(input_ids=text(), labels=text()).loss


def loss_of_image(model):
    out = model(noise(3, 8, 8))
    return getattr(out, "logits", out).square().mean()


MODELS = {
    "Llama": (causal("Llama", num_key_value_heads=4), loss_of_text),
    "Qwen2": (causal("Qwen2", num_key_value_heads=4), loss_of_text),
    "Qwen3": (causal("Qwen3", num_key_value_heads=4, head_dim=4), loss_of_text),
    "Gemma": (causal("Gemma", num_key_value_heads=1, head_dim=4), loss_of_text),
    "Mistral": (causal("Mistral", num_key_value_heads=4), loss_of_text),
    "Mixtral": (causal("Mixtral", num_key_value_heads=4, num_local_experts=3), loss_of_text),
    "GPT-2": (gpt2, loss_of_text),
    "GPT-NeoX": (causal("GPTNeoX"), loss_of_text),
    "OPT": (causal("OPT", ffn_dim=48, word_embed_proj_dim=32, dropout=0.0), loss_of_text),
    "BLOOM": (lambda: built("BloomForCausalLM", "Bloom", **SIZES, n_layer=1, n_head=8), loss_of_text),
    "Falcon": (falcon, loss_of_text),
    "Phi": (causal("Phi", resid_pdrop=0.0), loss_of_text),
    "BERT": (bert, loss_of_text),
    "T5": (t5, loss_of_text),
    "Whisper": (whisper, lambda model: model(input_features=noise(8, 24), labels=text()).loss),
    "ViT": (vit, loss_of_image),
    "U-Net": (
        lambda: UNet(3, 8, 32, (1, 2), 1, (8, 4), 8, 8),
        lambda model: (model(noise(3, 8, 8), torch.arange(4)) - noise(3, 8, 8)).square().mean(),
    ),
    "MLP-Mixer": (Mixer, loss_of_image),
    "nanoGPT": (
        lambda: nanogpt.GPT(nanogpt.GPTConfig(n_head=8, n_layer=1, bias=True)),
        lambda model: model(nanogpt.rows(4)[:, :-1], nanogpt.rows(4)[:, 1:]),
    ),
    "Mamba": (mamba, loss_of_text),
    "plain ViT": (lambda: ViT(heads=8, depth=1), lambda model: model(noise(8, 8)).square().mean()),
}


# What the refusal of the model says: since transformers 5 Mamba's mixer reads the bias of that layer itself.
PLANS = {"Mamba": {"*.dt_proj": "replicate"}} if transformers.__version__ >= "5" else {}


def path_of(model):
    """Where the tables of its attention are from."""
    paths = set()
    for name, module in model.named_modules():
        if heads := table_of(module, name):
            paths.add("form" if heads.form else "class" if of_transformers(module) in CLASSES else "plan")
    return " ".join(paths)


def one_step(grids):
    """What each model became on the first grid: the path of its attention, and whether chains are split."""
    became = {}
    for grid in grids:
        comms = axo.connect(grid)
        warnings.simplefilter("ignore")
        for name, (make, loss_of) in MODELS.items():
            serial_seed()
            serial = make()
            expected = loss_of(serial)
            expected.backward()
            serial_seed()
            model = make()
            path = path_of(model)
            axo.parallelize(model, comms, plan=PLANS.get(name, "auto"))
            loss = loss_of(model)
            loss.backward()
            assert_close(loss, expected, LIMIT, f"{grid} {name}: loss")
            trained = {key: p.grad for key, p in serial.named_parameters() if p.grad is not None}
            assert_gradients_match(model, trained, LIMIT, f"{grid} {name}")
            reasons = [line.why for line in axo.plan_report(model)]
            heads = path if "heads over x" in reasons else "whole"
            became.setdefault(name, (heads, "split" if "proved by tracing" in reasons else "whole"))
        comms.close()
    return became


def test_twenty_public_models_are_equal_to_serial_and_split_as_the_page_says():
    page = (Path(__file__).parents[2] / "docs" / "plans.md").read_text()
    rows = re.findall(r"^\| ([\w'. -]+) \| (plan|class|form|whole) \| (split|whole) \|", page, re.MULTILINE)
    expected = {name: (heads, chains) for name, heads, chains in rows}
    if transformers.__version__ >= "5":
        expected |= {"Mixtral": ("plan", "whole"), "ViT": ("class", "split")}  # its MLP is one module there
    became = run_ranks(one_step, 2, ["2x1x1x1", "1x2x1x1"], timeout=150, preload=PRELOAD)
    assert became[0] == became[1] == expected and len(rows) == len(MODELS) == 21
