"""QLoRA on a grid: ``axo litgpt finetune_lora`` and ``generate`` with ``--quantize bnb.nf4``.

Oracle: stock LitGPT on one device, from a checkpoint whose linear weights bitsandbytes has quantized and made dense
again, whole. LitGPT itself quantizes on CUDA GPUs only; there it also puts a norm behind the embedding and trains with
bitsandbytes' optimizers, which no grid does.
"""

import functools
import sys

import pytest
import torch

from tests.integrations.litgpt.test_finetuning import LORA, losses_on
from tests.integrations.support import distance, installed, tell
from tests.integrations.trainer import finetune, generate, ranks_of, write_base
from tests.launcher import run_ranks

KIND = "bnb.nf4"
LINEAR = ("attn.qkv.weight", "proj.weight", "fc_1.weight", "fc_2.weight", "lm_head.weight")


@pytest.fixture(scope="session")
def bitsandbytes():
    """The folder that holds it."""
    return str(installed("bitsandbytes", "bitsandbytes.txt", "bitsandbytes", "--no-deps"))


def make_dense(folder, source, target):
    """Write ``target`` with what four bits keep of ``source``."""
    import shutil

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
@pytest.mark.parametrize(("grid", "stages"), [("2x2x1x1", 1), ("1x2x2x1", 1), ("2x1x1x2", 1), ("1x1x2x1", 2)])
def test_qlora_equals_lora_on_what_four_bits_keep(bitsandbytes, folder, grid, stages):
    """Rows of each shard are multiples of 64, so blocks fall alike: losses to 1e-4, adapters to 1e-5, text the same."""
    name, dense = f"wide-{grid}", f"wide-{grid}-dense"
    from_both(bitsandbytes, folder, name, n_embd=128, intermediate_size=128)
    stock = run_ranks(finetune, 1, folder, f"stock-{dense}", None, "lora", LORA | {"base": dense})[0]
    plain = run_ranks(finetune, 1, folder, f"stock-{name}", None, "lora", LORA | {"base": name})[0]
    assert max(abs(a - b) for a, b in zip(stock, plain, strict=True)) > 1e-3  # or the test could not fail
    asked = LORA | {"base": name, "quantize": KIND, "pipeline": stages}
    mine = losses_on(folder, f"qlora-{grid}", grid, "lora", asked, (with_path, bitsandbytes, finetune))
    apart = max(map(abs, map(float.__sub__, mine, stock)))
    tell("litgpt finetune_lora --quantize", grid=grid, stages=stages, losses_apart=apart)
    assert mine == pytest.approx(stock, abs=1e-4)
    saved = [
        torch.load(folder / out / "final" / "lit_model.pth.lora")["model"]
        for out in (f"stock-{dense}", f"qlora-{grid}")
    ]
    assert list(saved[0]) == list(saved[1]) and distance(saved[1], saved[0]) < 1e-5
    expected = run_ranks(generate, 1, folder / dense)[0]
    ranks, environment = ranks_of(grid, stages)
    in_stages = functools.partial(generate, pipeline=stages)
    given = (folder / name, grid, 1, 0.0, "", {"quantize": KIND})
    assert run_ranks(with_path, ranks, bitsandbytes, in_stages, *given, env=environment) == [expected] * ranks


def sizes(bitsandbytes, kind):
    """(bytes of a quantized weight, whether each part of it has the whole one's values)."""
    sys.path.insert(0, bitsandbytes)
    from axo.overlap.quantized import QuantizedWeight

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
