"""state_dict(), save_pretrained and pickles of a parallel model: whole tensors, or an error; never a rank's shards."""

import copy
import io
import pickle
from unittest import mock

import pytest
import torch
from litgpt.config import Config
from litgpt.model import GPT
from torch import nn

import axo
from axo.comm import agree
from tests.integrations.support import LLAMA
from tests.launcher import rank_outcomes, run_ranks

GRIDS = ("2x2x1x1", "1x2x2x1")


def hugging_face(kind):
    """A small model, its head tied to its embedding; grouped heads, and sizes that do not divide evenly."""
    import transformers

    torch.manual_seed(3)
    if kind == "llama":
        config = transformers.LlamaConfig(
            vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, tie_word_embeddings=True, max_position_embeddings=64,
        )  # fmt: skip
        return transformers.LlamaForCausalLM(config)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=61, n_positions=64, n_embd=32, n_layer=2, n_head=4)
    )


def save(grid, kind, folder, options):
    model = hugging_face(kind)
    comms = axo.connect(grid)
    serial = copy.deepcopy(model)
    axo.parallelize(model, comms, plan="auto")
    whole, expected = model.state_dict(), serial.state_dict()
    assert list(whole) == list(expected)
    assert all(torch.equal(whole[name], expected[name]) for name in expected)
    axo.checkpoint.save_pretrained(model, folder, **options)
    comms.close()
    return {name: value.clone() for name, value in expected.items()} if comms.rank == 0 else None


@pytest.mark.parametrize(("kind", "options"), [("llama", {"max_file_bytes": 20_000}), ("gpt2", {})])
@pytest.mark.parametrize("grid", GRIDS)
def test_a_saved_folder_is_what_hugging_face_loads(tmp_path, grid, kind, options):
    """Oracle: the serial model: the same bits, from several files too; state_dict() on the way."""
    import transformers

    (tmp_path / "out").mkdir()
    for name in ("model.safetensors", "model-00001-of-00099.safetensors", "model.safetensors.index.json", "notes"):
        (tmp_path / "out" / name).write_text("of an earlier save")
    expected = run_ranks(save, 4, grid, kind, tmp_path / "out", options, preload=("transformers",), timeout=90)[0]
    loaded, said = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not said["missing_keys"] and not said["unexpected_keys"] and not said["mismatched_keys"]
    state = loaded.state_dict()
    assert state.keys() == expected.keys() and all(torch.equal(state[name], expected[name]) for name in expected)
    several = (tmp_path / "out" / "model.safetensors.index.json").exists()
    assert several is bool(options) and (len(list((tmp_path / "out").glob("*.safetensors"))) > 1) is several
    assert (tmp_path / "out" / "notes").exists() and not list((tmp_path / "out").glob("*-of-00099*"))


def save_odd(model, folder, **buffers):
    """Save it with these buffers, or with a configuration that JSON does not know."""
    for name, buffer in buffers.items():
        model.register_buffer(name, buffer)
    model.config.of_the_user = None if buffers else {1, 2}
    try:
        axo.checkpoint.save_pretrained(model, folder)
    finally:
        for name in buffers:
            delattr(model, name)


def litgpt_model(grid, folder):
    comms = axo.connect(grid)
    torch.manual_seed(5)
    serial = GPT(Config(**LLAMA))
    model = axo.parallelize(copy.deepcopy(serial), comms)
    other = axo.parallelize(hugging_face("gpt2"), comms, plan="auto")
    said = []
    for action in (
        lambda: pickle.dumps(model.lm_head),
        lambda: torch.save(model, io.BytesIO()),
        lambda: axo.checkpoint.save_pretrained(model, folder),
        lambda: axo.checkpoint.save_pretrained(other, folder / "a file" / "below"),
        lambda: axo.checkpoint.save_pretrained(other, folder, max_file_bytes="5GB"),
        lambda: axo.checkpoint.save_pretrained("model", folder),
        lambda: save_odd(other, folder, odd=torch.zeros(3, device="meta")),
        lambda: save_odd(other, folder, odd=torch.eye(3).to_sparse()),
        lambda: save_odd(other, folder),
        lambda: axo.checkpoint.save_pretrained(other, None),
        lambda: axo.checkpoint.save_pretrained(other, f"s3:/{folder}"),  # it had been a folder "s3:" here
    ):
        try:
            action()
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    state = model.state_dict()
    same = all(torch.equal(state[name], value) for name, value in serial.state_dict().items())
    shard = model.state_dict(keep_vars=True)["lm_head.weight"] is model.lm_head.weight
    model.load_state_dict(state)
    same_again = all(torch.equal(model.state_dict()[name], value) for name, value in state.items())
    return said, same, shard, same_again


def test_state_dict_is_whole_and_pickles_are_refused(tmp_path):
    (tmp_path / "a file").write_text("")
    for said, *right in run_ranks(litgpt_model, 2, "2x1x1x1", tmp_path, preload=("transformers",)):
        assert all(right)
        assert "is not pickled; every rank calls model.state_dict()" in said[0]
        assert "is not pickled; of a parallel model every rank calls model.state_dict()" in said[1]  # from its hooks
        assert said[2].startswith("ValueError: save_pretrained: GPT has no config of Hugging Face's; use axo.checkp")
        assert "cannot be written: Not a directory" in said[3] and len(said) == 11
        assert said[5] == "ValueError: checkpoint: model is a str, not an nn.Module; give the model itself"
        assert "'odd' has no storage (meta device) and cannot be saved" in said[6]
        assert "'odd' is sparse_coo and cannot be saved" in said[7]
        assert said[8].startswith("ValueError: rank 0: save_pretrained: ") and "not JSON serializable" in said[8]
        assert said[9] == "ValueError: save_pretrained: folder=None names no folder; give one"
        assert "is an address, not a folder; mount it" in said[10]
        assert "max_file_bytes='5GB' is no size; use a number" in said[4]


def save_by_hugging_face(grid, kind, folder):
    model = hugging_face(kind)
    comms = axo.connect(grid)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    axo.parallelize(model, comms, plan="auto")
    model.save_pretrained(folder / str(comms.rank), is_main_process=comms.rank == 0)
    comms.close()
    return expected if comms.rank == 0 else None


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_hugging_faces_own_save_pretrained_writes_whole_weights(tmp_path, kind):
    """Called by every rank. Oracle: the serial model, the same bits."""
    import transformers

    expected = run_ranks(save_by_hugging_face, 4, GRIDS[0], kind, tmp_path, preload=("transformers",), timeout=90)[0]
    loaded, said = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "0", output_loading_info=True)
    assert not said["missing_keys"] and not said["unexpected_keys"] and not said["mismatched_keys"]
    state = loaded.state_dict()
    assert list(state) == list(expected)
    assert all(torch.equal(state[name], expected[name]) for name in expected)


def rank_0_alone(grid, then):
    # rank 0's limit ends first, by far: nothing hangs on how late a rank is
    with mock.patch.object(agree, "_BEFORE_THE_PEERS", 0.02), axo.connect(grid, timeout=50) as comms:
        model = axo.parallelize(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)), comms, plan="auto")
        batch = axo.shard_batch(torch.rand(4, 8), comms)
        model(batch).sum().backward()
        if comms.rank == 0:
            model.state_dict()
        elif then == "step":
            model(batch).sum().backward()
        elif then == "barrier":
            comms.x.barrier()
            comms.y.barrier()
        else:
            comms.world.barrier()
    raise AssertionError("nobody has noticed")


@pytest.mark.parametrize("then", ["step", "barrier", "barrier of the world"])
def test_a_state_that_one_rank_gathers_alone_is_told_on_every_rank(then):
    """By the rank that called it, and by those that wait for it; what meets it in the same operation is a mismatch."""
    told = [outcome.describe() for outcome in rank_outcomes(rank_0_alone, 4, "2x2x1x1", then)]
    words = "rank 0 called model.state_dict() and others did not; every rank must call it"
    assert words in told[0]
    for each in told[1:]:
        assert words in each or (then == "barrier of the world" and "differs between ranks" in each), told


def one_data_index(grid):
    with axo.connect(grid) as comms:
        torch.manual_seed(0)
        serial = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
        model = axo.parallelize(copy.deepcopy(serial), comms, plan="auto")
        if comms.coords.data == 0:
            found = model.state_dict()
            assert all(torch.equal(found[name], value) for name, value in serial.state_dict().items())
        comms.world.barrier()


def test_ranks_of_one_data_index_gather_a_state_by_themselves():
    run_ranks(one_data_index, 4, "2x1x1x2")
