"""QLoRA on a grid: ``axo litgpt finetune_lora``, ``generate`` and ``chat`` with ``--quantize``.

Oracle: stock LitGPT on one device, from a checkpoint whose linear weights have been quantized (to four bits: by
bitsandbytes) and made dense again, whole. LitGPT itself quantizes on CUDA GPUs only; there it also puts a norm behind
the embedding and trains with bitsandbytes' optimizers, which no grid does.
"""

import functools
import shutil
import sys

import pytest
import torch
from litgpt.config import Config
from litgpt.model import GPT

from tests.integrations.litgpt.test_finetuning import LORA, losses_on
from tests.integrations.support import LLAMA, distance, installed, tell
from tests.integrations.trainer import chat, finetune, generate, ranks_of, write_base
from tests.launcher import run_ranks

KIND = "bnb.nf4"
LINEAR = ("attn.qkv.weight", "proj.weight", "fc_1.weight", "fc_2.weight", "lm_head.weight")


@pytest.fixture(scope="session")
def bitsandbytes():
    """The folder that holds it."""
    return str(installed("bitsandbytes", "bitsandbytes.txt", "bitsandbytes", "--no-deps"))


def make_dense(folder, source, target):
    """Write ``target`` with what four bits keep of ``source``."""
    sys.path.insert(0, folder)
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    shutil.copytree(source, target)
    state = torch.load(source / "lit_model.pth")
    for name in [name for name in state if name.endswith(LINEAR)]:
        codes = quantize_4bit(state[name].half(), blocksize=64, quant_type="nf4")
        state[name] = dequantize_4bit(*codes).float()
    torch.save(state, target / "lit_model.pth")


def with_path(path, command, *args):
    sys.path.insert(0, path)
    return command(*args)


def from_both(bitsandbytes, folder, name, **fields):
    """The folders of a checkpoint, and of what four bits keep of it."""
    write_base(folder, name, **fields)
    run_ranks(make_dense, 1, bitsandbytes, folder / name, folder / f"{name}-dense")
    return name, f"{name}-dense"


@pytest.mark.soak
@pytest.mark.parametrize(
    ("grid", "stages", "algorithm"),
    [
        ("2x2x1x1", 1, "axonn"),
        ("1x2x2x1", 1, "axonn"),
        ("2x1x1x2", 1, "axonn"),
        ("1x1x2x1", 2, "axonn"),
        ("2x2x1x1", 1, "tesseract"),
    ],
)
def test_qlora_equals_lora_on_what_four_bits_keep(bitsandbytes, folder, grid, stages, algorithm):
    """Rows of each shard are multiples of 64, so blocks fall alike: losses to 1e-4, adapters to 1e-5, text the same."""
    name = f"wide-{grid}-{algorithm}"
    dense = f"{name}-dense"
    from_both(bitsandbytes, folder, name, n_embd=128, intermediate_size=128)
    stock = run_ranks(finetune, 1, folder, f"stock-{dense}", None, "lora", LORA | {"base": dense})[0]
    plain = run_ranks(finetune, 1, folder, f"stock-{name}", None, "lora", LORA | {"base": name})[0]
    assert max(abs(a - b) for a, b in zip(stock, plain, strict=True)) > 1e-3  # or the test could not fail
    asked = LORA | {"base": name, "quantize": KIND, "pipeline": stages, "algorithm": algorithm}
    mine = losses_on(folder, f"qlora-{name}", grid, "lora", asked, (with_path, bitsandbytes, finetune))
    apart = max(map(abs, map(float.__sub__, mine, stock)))
    tell("litgpt finetune_lora --quantize", grid=grid, stages=stages, algorithm=algorithm, losses_apart=apart)
    assert mine == pytest.approx(stock, abs=1e-4)
    saved = [
        torch.load(folder / out / "final" / "lit_model.pth.lora")["model"]
        for out in (f"stock-{dense}", f"qlora-{name}")
    ]
    assert list(saved[0]) == list(saved[1]) and distance(saved[1], saved[0]) < 1e-5
    expected = run_ranks(generate, 1, folder / dense)[0]
    ranks, environment = ranks_of(grid, stages)
    in_stages = functools.partial(generate, pipeline=stages, algorithm=algorithm)
    given = (folder / name, grid, 1, 0.0, "", {"quantize": KIND})
    assert run_ranks(with_path, ranks, bitsandbytes, in_stages, *given, env=environment) == [expected] * ranks


def in_eight_bits(weight):
    """What eight bits keep of a whole weight, (rows, columns): LLM.int8()'s codes, one scale a row."""
    half = weight.half().float()
    largest = half.abs().amax(1, keepdim=True)
    return (half * (127 / largest)).round() * (largest / 127)


def parts_in_eight_bits(grid):
    """For each linear layer of a model, by each algorithm: whether its part is that of the whole weight."""
    import axo
    from axo.nn.quantize import quantize

    found = []
    for algorithm in ("axonn", "tesseract"):
        comms = axo.connect(grid)
        torch.manual_seed(5)
        model = GPT(Config(**LLAMA)).requires_grad_(False)
        whole = {name: in_eight_bits(weight) for name, weight in model.state_dict().items() if weight.dim() == 2}
        axo.parallelize(model, comms, algorithm=algorithm)
        quantize(model, "int8")
        for name, layer in model.named_modules():
            if isinstance(layer, axo.nn.Linear):
                part = layer.placements["weight"].take(whole[f"{name}.weight"])
                found.append((name, layer.weight.codes.dtype, torch.equal(layer.weight.dense(), part)))
        comms.close()
    return found


def test_a_row_in_eight_bits_has_the_scale_of_all_its_columns():
    """Columns are split over y, with Tesseract over x. Wants no bitsandbytes."""
    for found in run_ranks(parts_in_eight_bits, 4, "2x2x1x1"):
        assert len(found) == 2 * (5 * LLAMA["n_layer"] + 1)
        assert all(dtype == torch.int8 and same for _, dtype, same in found), found


def write_in_eight_bits(checkpoint, grid, algorithm):
    return generate(checkpoint, grid, files={"quantize": "bnb.int8"}, algorithm=algorithm)


@pytest.mark.soak
@pytest.mark.parametrize(("grid", "algorithm"), [("1x2x1x1", "axonn"), ("2x2x1x1", "tesseract")])
def test_text_in_eight_bits_is_that_of_one_device(folder, grid, algorithm):
    name = f"eight-{algorithm}"
    write_base(folder, name)
    shutil.copytree(folder / name, folder / f"{name}-dense")
    state = torch.load(folder / name / "lit_model.pth")
    dense = {key: in_eight_bits(value) if key.endswith(LINEAR) else value for key, value in state.items()}
    torch.save(dense, folder / f"{name}-dense" / "lit_model.pth")
    expected = run_ranks(generate, 1, folder / f"{name}-dense")[0]
    ranks, environment = ranks_of(grid)
    made = run_ranks(write_in_eight_bits, ranks, folder / name, grid, algorithm, env=environment)
    assert made == [expected] * ranks
    if algorithm == "axonn":
        said = run_ranks(chat, 1, folder / f"{name}-dense")[0]
        asked = (folder / name, grid, {"quantize": "bnb.int8"})
        assert run_ranks(chat, ranks, *asked, env=environment)[0] == said


def sizes(bitsandbytes, kind):
    """(bytes of a quantized weight, whether each part of it has the whole one's values)."""
    sys.path.insert(0, bitsandbytes)
    from axo.quantized import QuantizedWeight

    weight = torch.randn(96, 128, generator=torch.Generator().manual_seed(0))
    whole = QuantizedWeight(weight, kind)
    parts = [QuantizedWeight(weight[rows][:, columns], kind) for rows, columns in (
        (slice(0, 48), slice(0, 64)), (slice(48, 96), slice(64, 128))
    )]  # fmt: skip
    same = [torch.equal(parts[0].dense(), whole.dense()[:48, :64]), torch.equal(parts[1], whole[48:, 64:])]
    taken = whole.codes.nbytes + whole.state.absmax.nbytes
    return taken, all(same), (whole.dense() - weight).abs().max().item()


@pytest.mark.soak
def test_a_weight_of_four_bits_takes_an_eighth_and_its_scales(bitsandbytes):
    elements = 96 * 128
    for kind in ("nf4", "fp4"):
        taken, same, apart = run_ranks(sizes, 1, bitsandbytes, kind)[0]
        assert taken == elements // 2 + elements // 64 * 4 and same and 0 < apart < 0.7
