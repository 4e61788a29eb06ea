"""What the planner reads: models, machines, counts of tokens; and how it refuses what it cannot read.

Oracles: the papers' tables; LitGPT's own parameter count; the lines of broken files.
"""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from axo.cli import main as cli
from axo.cli.plan import tokens_of
from axo.perf import flops, machine, readers
from axo.perf.layers import LinearKind
from axo.perf.workload import Block, Workload

FILE = """\
name: mine
gpus_per_node: 4
memory_gib: 40
peak_tflops: 312
gemm_tflops: 280
memory_gbs: 1500
inter_gbs: 100
intra_gbs: {1x2: 80, 1x4: 230}
"""


def test_known_machines() -> None:
    assert {"alps", "dgx-a100", "dgx-h100", "frontier", "gb200-nvl72", "mi300x", "perlmutter"} <= set(machine.known())
    for alias, name in machine.ALIASES.items():
        assert machine.load(alias).name == machine.load(alias.upper()).name == name
    peaks = readers.papers()["peaks_tflops"]
    for name, key in (("perlmutter", "perlmutter_A100"), ("frontier", "frontier_GCD"), ("alps", "alps_H100")):
        found = machine.load(name)
        assert [found.peak_tflops, found.gemm_tflops] == peaks[key]
    for name in machine.known():
        found = machine.load(name)
        assert found.name == name and found.gemm_tflops < found.peak_tflops
        assert set(found.assumed) <= {"gemm_fraction"}
        assert found.calibrated_on or found.gemm_fraction == machine.ASSUMED["gemm_fraction"]
        assert found.memory_gbs < 8200 and found.watts < 2000 and found.inter_gbs <= 50 * found.gpus_per_node


@pytest.mark.parametrize(
    ("line", "text", "message"),
    [
        (3, "memory_gib: forty", r"line 3, field 'memory_gib': 'forty' is not a number"),
        (3, "memory_gib: -1", r"line 3, field 'memory_gib': -1 must be above 0"),
        (2, "gpus_per_node: 4.5", r"line 2, field 'gpus_per_node': 4.5 is not a whole number"),
        (8, "intra_gbs: {1-2: 80}", r"line 8, field 'intra_gbs': '1-2' is not of the form INNERxSIZE"),
        (8, "intra_gbs: {1x2: fast}", r"line 8, field 'intra_gbs': 'fast' is not a number"),
        (6, "memory_bandwidth: 1500", r"line 6, field 'memory_bandwidth': is not a field"),
        (4, "peak_tflops: [1", r"line \d+: not YAML"),
        (6, "", r"field 'memory_gbs': is missing"),
        (1, "gemms: [{m: 1}]", r"line 1, field 'gemms': .* lacks one of m, k, n, tflops"),
        (1, "network_fraction: 77", r"line 1, field 'network_fraction': 77.0 is not a share"),
        (1, "contention: 1.5", r"line 1, field 'contention': 1.5 is not a share under 1"),
        (1, "calibrated_on: 3", r"line 1, field 'calibrated_on': 3 is not a list"),
        (1, "name: !mine x", r"line 1: not YAML: could not determine a constructor"),
        (1, "name: 2026-99-99", r"line 1, field 'name': month must be in 1..12"),
        (1, "[a, b]: 3", r"line 1, field .* is not a field"),
        (2, "gpus_per_node: 9000000000", r"line 2, field 'gpus_per_node': 9000000000 is not a whole number from 1 to"),
        (4, "memory_gib: 40", r"line 4, field 'memory_gib': is given twice, first in line 3"),
        (4, f"peak_tflops: {10**400}", r"line 4, field 'peak_tflops': 1000.*\.\.\. is not a number"),
        (8, "intra_gbs:\n  1x2: 80\n  1x4: -3", r"line 10, field 'intra_gbs': -3 must be above 0"),
        (8, "intra_gbs: {1x2: 80, 1x2: 90}", r"line 8, field 'intra_gbs': has an entry twice"),
    ],
)
def test_broken_machine_files_name_line_and_field(tmp_path: Path, line: int, text: str, message: str) -> None:
    lines = FILE.splitlines()
    lines[line - 1] = text
    path = tmp_path / f"broken-{line}-{abs(hash(text))}.yaml"
    path.write_text("\n".join(lines))
    with pytest.raises(ValueError, match=message):
        machine.load(str(path))


def test_a_machine_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(FILE + "gemms: [{m: 8192, k: 4096, n: 4096, tflops: 200}, {m: 64, k: 4096, n: 4096, tflops: 20}]\n")
    found = machine.load(str(path))
    assert found.intra_gbs == {(1, 2): 80, (1, 4): 230} and found.calibrated_on == ()
    # what the file leaves out has assumed values, which are named, and is not perfect
    assert found.assumed == tuple(machine.ASSUMED) and found.network_fraction == 0.94 and found.contention == 0.25
    assert found.gemm_fraction == machine.ASSUMED["gemm_fraction"] < 1
    # attention runs as fast as memory lets it, never faster than products, or as the file says
    assert found.attention_flops == pytest.approx(machine.ATTENTION_INTENSITY * 1e9 * found.memory_gbs)
    path.write_text(FILE + "attention_tflops: 90\n")
    machine._read.cache_clear()
    assert machine.load(str(path)).attention_flops == 90e12
    path.write_text(FILE + "attention_tflops: 9000\n")
    machine._read.cache_clear()
    found = machine.load(str(path))
    assert found.attention_flops == found.gemm_flops
    path.write_text(FILE + "gemms: [{m: 8192, k: 4096, n: 4096, tflops: 200}, {m: 64, k: 4096, n: 4096, tflops: 20}]\n")
    machine._read.cache_clear()
    found = machine.load(str(path))
    few, many = found.gemm_seconds(128, 4096, 4096), found.gemm_seconds(8192, 4096, 4096)
    assert few > 2 * many / 64  # the small product was measured to be slow
    path.write_text(FILE.replace("{1x2: 80, 1x4: 230}", "150"))
    machine._read.cache_clear()
    assert machine.load(str(path)).intra(2, 2) == 150
    for content, message in (
        (b"- 1\n- 2\n", "line 1: expected fields"),
        (b"", "line 1: expected fields"),
        (b"name: \xff", "not text, from byte 6 on"),
    ):
        path.write_bytes(content)
        machine._read.cache_clear()
        with pytest.raises(ValueError, match=message):
            machine.load(str(path))
    with pytest.raises(ValueError, match=f"machine file '{tmp_path}' is not a file"):
        machine.load(str(tmp_path))


def test_unknown_names_list_the_known() -> None:
    with pytest.raises(
        ValueError, match=r"machine 'summit' is not known; use one of a100-pcie, alps, dgx-a100, .*perlmutter"
    ):
        machine.load("summit")
    with pytest.raises(ValueError, match=r"machine file 'gone\.yaml' does not exist"):
        machine.load("gone.yaml")
    for wrong, near in (("gpt-7b", "gpt-5b"), ("pythia-14", "pythia-14m"), ("pythia14m", "pythia-14m"),
                        ("meta-llama/Llama-3.1-8", "Llama-3.1-8B")):  # fmt: skip
        with pytest.raises(ValueError, match=rf"model '{wrong}' is not known; the nearest are [^;]*\b{near}\b.*; use"):
            readers.read(wrong)
    assert readers.read("meta-llama/Llama-3.1-8B") == readers.read("Llama-3.1-8B")
    with pytest.raises(ValueError, match=r"model file 'gone\.json' does not exist"):
        readers.read("gone.json")


def test_papers_models_have_their_names_sizes() -> None:
    for name in readers.known():
        parameters = readers.read(name).parameters
        size = name.split("-")[1]
        stated = float(size[:-1]) * (1e9 if size.endswith("b") else 1e6)
        # U-Nets leave out attention and embeddings; GPT names round (gpt-60b holds 57.8 billion)
        assert parameters == pytest.approx(stated, rel=0.12 if name.startswith("gpt") else 0.5), name


@pytest.mark.parametrize(
    "name",
    ["pythia-160m", "Llama-2-7b-hf", "Llama-3-8B", "phi-2", "Gemma-2b", "Gemma-2-9b", "falcon-7b"]
    + ["Mixtral-8x7B-v0.1", "Qwen3-30B-A3B", "Qwen3-8B", "OLMo-2-1124-7B", "Gemma-3-1b-it"],
)
def test_litgpt_configurations_have_litgpts_parameters(name: str) -> None:
    """LitGPT's own model on the meta device is the oracle. Tied tables are stored once there, counted twice here."""
    import torch
    from litgpt import GPT, Config

    config = Config.from_name(name)
    with torch.device("meta"):
        model = GPT(config)
    stored = sum(parameter.numel() for parameter in model.parameters())
    tied = model.lm_head.weight.numel() if model.lm_head.weight is model.transformer.wte.weight else 0
    assert readers.read(name).parameters == stored + tied


def test_hugging_face_and_litgpt_agree(tmp_path: Path) -> None:
    fields = {
        "model_type": "llama",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields))
    mine, theirs = readers.read(str(path)), readers.read("Llama-3-8B")
    assert mine.parameters == theirs.parameters and mine.blocks == theirs.blocks
    assert mine.seq_length == 2048 and readers.read(str(path), seq_length=4096).seq_length == 4096
    for changes, message in (
        ({"kv_lora_rank": 512}, "kv_lora_rank=512 is no field of transformers' llama, which would build another model"),
        (
            {"model_type": "deepseek_v2", "num_hidden_layers": 1, "q_lora_rank": None},
            "gated attention, and a latent one of keys alone, are not modelled",
        ),
        (
            {"model_type": "jamba", "num_hidden_layers": 1},
            r"model_type='jamba' is not one attention and an MLP",
        ),
        ({"model_type": "t5", "num_key_value_heads": None}, "is_encoder_decoder=True, and only decoders are known"),
        ({"model_type": "llama-9"}, "model_type='llama-9' is none that transformers"),
        ({"model_type": None}, "the configuration has no model_type"),
        ({"num_key_value_heads": "8"}, "num_key_value_heads='8' is not a whole number of at least 1"),
        ({"intermediate_size": -4}, "intermediate_size=-4 is not a whole number"),
    ):
        path.write_text(json.dumps(fields | changes))
        with pytest.raises(ValueError, match=message):
            readers.read(str(path))
    for content in (b"{", b"[" * 100_000, b"\xff\xfe"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"config\.json"):
            readers.read(str(path))


LLAMA = {
    "model_type": "llama",
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
PUBLIC = {  # fields of the config.json of public models, and the parameters that their makers give (billions)
    "Llama-3.2-1B": (LLAMA | {"hidden_size": 2048, "num_hidden_layers": 16, "intermediate_size": 8192,
                              "tie_word_embeddings": True}, 1.236),
    "gpt2": ({"model_type": "gpt2"}, 0.1244),
    "falcon-7b": ({"model_type": "falcon", "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71,
                   "multi_query": True, "parallel_attn": True, "bias": False, "vocab_size": 65024}, 6.92),
    "starcoder": ({"model_type": "gpt_bigcode", "n_layer": 40, "n_embd": 6144, "n_head": 48, "n_inner": 24576,
                   "multi_query": True, "n_positions": 8192, "vocab_size": 49152}, 15.52),
    "Nemotron-4-340B": ({"model_type": "nemotron", "hidden_size": 18432, "num_hidden_layers": 96, "vocab_size": 256000,
                         "num_attention_heads": 96, "num_key_value_heads": 8, "intermediate_size": 73728}, 341.0),
    "Qwen2-57B-A14B": ({"model_type": "qwen2_moe", "hidden_size": 3584, "num_hidden_layers": 28, "vocab_size": 151936,
                        "num_attention_heads": 28, "num_key_value_heads": 4, "intermediate_size": 18944,
                        "moe_intermediate_size": 2560, "shared_expert_intermediate_size": 20480, "num_experts": 64,
                        "num_experts_per_tok": 8, "tie_word_embeddings": False}, 57.41),
    "ERNIE-4.5-21B-A3B": ({"model_type": "ernie4_5_moe", "hidden_size": 2560, "intermediate_size": 12288,
                           "num_hidden_layers": 28, "num_attention_heads": 20, "num_key_value_heads": 4,
                           "moe_num_experts": 64, "moe_k": 6, "moe_intermediate_size": 1536,
                           "moe_num_shared_experts": 2, "vocab_size": 103424, "moe_layer_start_index": 1,
                           "moe_layer_end_index": 27, "tie_word_embeddings": True}, 21.83),
    "gpt-oss-20b": ({"model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24,
                     "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32,
                     "num_experts_per_tok": 4, "vocab_size": 201088}, 20.91),
    "phi-3": ({"model_type": "phi3"}, 3.821),
    "opt-125m": ({"model_type": "opt"}, 0.1252),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLIC)
def test_a_config_counts_as_many_parameters_as_its_makers_say(name: str, tmp_path: Path) -> None:
    fields, billions = PUBLIC[name]
    path = tmp_path / "Llama-3-8B" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(fields))
    found = readers.read(str(path))
    assert found.parameters / 1e9 == pytest.approx(billions, rel=2e-3)
    assert found.file == str(path) and not found.trained_as  # a folder's name is no model


@pytest.mark.parametrize(
    ("fields", "litgpt"),
    [
        ({"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}, "Mixtral-8x7B-v0.1"),
        ({"model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8, "head_dim": 128}, "Qwen3-30B-A3B"),
        ({"model_type": "qwen3", "head_dim": 128}, "Qwen3-8B"),
        ({"model_type": "olmo2"}, "OLMo-2-1124-7B"),
    ],
)
def test_experts_and_norms_of_heads_are_read_alike(tmp_path: Path, fields: dict, litgpt: str) -> None:
    """A config.json with LitGPT's sizes, and LitGPT's own configuration: the same blocks, but for biases' spelling."""
    from litgpt import Config

    config = Config.from_name(litgpt)
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps(
            {
                "hidden_size": config.n_embd,
                "num_hidden_layers": config.n_layer,
                "num_attention_heads": config.n_head,
                "num_key_value_heads": config.n_query_groups,
                "intermediate_size": config.intermediate_size,
                "moe_intermediate_size": config.moe_intermediate_size,
                "vocab_size": config.padded_vocab_size,
            }
            | fields
        )
    )
    assert readers.read(str(path)).blocks == readers.read(litgpt).blocks


def test_a_token_costs_only_the_experts_that_it_goes_through() -> None:
    """6 flops a parameter that a token meets: of 8 experts in a block, 2."""
    workload = readers.read("Mixtral-8x7B-v0.1", seq_length=1)
    one, h, f = 3 * 4096 * 14336, 4096, 14336
    assert one == 3 * h * f
    idle = 32 * 6 * one
    embedding, norms, attention = 32000 * h, (2 * 32 + 1) * h, 32 * 4 * h
    expected = 6 * (workload.parameters - idle - embedding - norms) + 3 * attention
    assert flops.step_flops(workload, 1) == pytest.approx(expected, rel=1e-12)


def test_a_workload_names_the_size_that_does_not_divide() -> None:
    from axo.grid import Grid

    workload = Workload("w", (Block((LinearKind("fc", 30, 64),)),), 16)
    assert workload.misfit(Grid(y=4)) == "y=4 does not divide fc.in_features=30"
    assert workload.misfit(Grid(x=4, y=2)) == ""


@pytest.mark.parametrize(
    ("text", "batch", "expected"),
    [("16.8M", True, 2**24), ("4M", True, 2**22), ("5M", True, 5_000_000), ("524288", True, 524288)]
    + [("16800000", True, 16_800_000), ("2T", False, 2 * 10**12), ("1_000", False, 1000), ("1.5k", False, 1500)],
)
def test_counts_of_tokens(text: str, batch: bool, expected: int) -> None:
    assert tokens_of(text, batch=batch) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("plan --model gpt-80b --gpus 8192 --machine summit", "axo plan: error: machine 'summit' is not known"),
        (
            "plan --model gpt-7b --gpus 8 --machine alps",
            "axo plan: error: model 'gpt-7b' is not known; the nearest are gpt-5b",
        ),
        ("plan --model gpt-5b --gpus 64 --machine alps --top 0", "axo plan: error: top=0 is not at least 1"),
        ("plan --model gpt-5b --gpus 64 --machine alps --seq 0", "axo plan: error: sequence length 0 is not"),
        ("plan --model gpt-5b --gpus 64 --machine alps --batch-tokens 1e400", "'1e400' is more tokens than there are"),
        ("plan --model gpt-5b --gpus 64 --machine alps --zero 3", "zero=3 is not a stage; use 0, 1 or 2"),
        ("plan --model gpt-5b --gpus 100000000000 --machine alps", "is more than any machine has; use at most 1048576"),
        ("simulate --model gpt-5b --grid 1x1x8x1 --machine alps --trace /no/t", "folder '/no' does not exist; make it"),
        ("profile --device tpu", "axo profile: error: device='tpu' is not known; use cpu or cuda"),
        ("plan --model gpt-80b --gpus 4 --machine alps", "not enough memory; the nearest miss is"),
        ("plan --model gpt-5b --gpus 64 --machine alps --batch-tokens many", "'many' is not a count of tokens"),
        ("plan --model gpt-5b --gpus 64 --machine alps --overlap all", "overlap all is not known"),
        ("plan --model gpt-5b --gpus 64 --machine alps --explain 2x2x2x2", "grid 2x2x2x2 has 16 ranks, not 64"),
        (
            "plan --model gpt-5b --gpus 64 --machine alps --pipeline 2 --explain 2x2x4x4",
            "grid 2x2x4x4 is none of those that were planned; use a grid of --algorithm axonn, and --pipeline 1",
        ),
        (
            "plan --model gpt-5b --gpus 64 --machine alps --algorithm tesseract --explain 2x4x8x1",
            "grid 2x4x8x1 is none of those that were planned; use a grid of --algorithm tesseract",
        ),
        ("plan --gpus 8 --machine alps", "name what is to be planned: --model NAME --gpus N"),
        ("plan --model gpt-5b --gpus 64", "no machine is named and there is no machine.yaml here; add --machine"),
        ("plan --model gpt-5b --gpus 64 --machine alps --gpu-hour -1", "gpu-hour=-1.0 is not a price of at least 0"),
        ("plan --model gpt-5b --gpus 64 --machine alps --gpu-hour 2", "say how many --tokens that has"),
        ("plan --model gpt-5b --gpus 64 --machine alps --precision fp8", "precision='fp8' is not planned"),
        ("plan --model gpt-5b --gpus 64 --machine alps --network -4", "network=-4.0 is not a rate; give the Gb/s of"),
        ("plan --compare gone.json", "gone.json cannot be read as a plan"),
        ("simulate --model gpt-5b --grid 2x2 --machine alps", "grid '2x2' is not of the form"),
        ("simulate --model gpt-10b --grid 1x1x1x1 --machine alps", "cannot run on grid 1x1x1x1 of alps: needs "),
        ("simulate --model gpt-10b --grid 7x1x1x1 --machine alps", "axo plan --gpus 7 ranks the grids that can"),
        ("reproduce tables", "axo reproduce: error: 'tables' is not known; use papers"),
        ("plan --model gpt-5b --gpus 64 --machine alps --json /nowhere/x.json", "folder '/nowhere' does not exist"),
    ],
)
def test_mistakes_end_in_one_line_and_exit_code_2(arguments: str, message: str) -> None:
    found = CliRunner().invoke(cli.app, arguments.split())
    assert found.exit_code == 2
    assert message in found.stderr and found.stderr.count("\n") == 1, found.stderr
