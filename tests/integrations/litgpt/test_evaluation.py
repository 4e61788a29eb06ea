"""``axo litgpt evaluate`` on a grid, with tasks and data made here. Oracle: stock ``litgpt evaluate`` on one device."""

import functools
import json
import os
import sys

import pytest
import yaml

from tests.integrations.support import LLAMA, installed, tell
from tests.integrations.trainer import _run, ranks_of, write_base
from tests.launcher import run_ranks

TASKS = ("choose", "complete", "read")


@pytest.fixture(scope="session")
def lm_eval():
    """The folder that holds the harness."""
    return str(installed("evaluate", "evaluate.txt", "lm_eval", "--no-deps"))


@pytest.fixture(scope="session")
def base(folder):
    """A checkpoint as ``litgpt download`` leaves it, with Hugging Face's configuration; and three tasks."""
    from transformers import LlamaConfig

    write_base(folder, "judged")
    LlamaConfig(
        architectures=["LlamaForCausalLM"], vocab_size=LLAMA["padded_vocab_size"], hidden_size=LLAMA["n_embd"],
        intermediate_size=LLAMA["intermediate_size"], num_hidden_layers=LLAMA["n_layer"], rms_norm_eps=1e-5,
        num_attention_heads=LLAMA["n_head"], num_key_value_heads=LLAMA["n_query_groups"], rope_theta=10000.0,
        max_position_embeddings=LLAMA["block_size"], tie_word_embeddings=False, pad_token_id=1,
    ).save_pretrained(folder / "judged")  # fmt: skip
    tasks = folder / "judged" / "tasks"
    tasks.mkdir()
    words = ["lazy dogs", "quick foxes", "brown", "line 7", "0 and 1"]
    samples = [
        {"text": f"{words[i % 5]} {i}: ", "choices": words[: 2 + i % 4], "answer": i % 2, "goal": str(i)}
        for i in range(12)
    ]
    (tasks / "samples.json").write_text("\n".join(map(json.dumps, samples)))
    shared = {
        "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(tasks / "samples.json")}},
        "test_split": "test", "doc_to_text": "{{text}}",
    }  # fmt: skip
    of_each = {
        "choose": {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": "{{answer}}"},
        "complete": {
            "output_type": "generate_until", "doc_to_target": "{{goal}}",
            "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8, "do_sample": False},
        },
        "read": {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}"},
    }  # fmt: skip
    metrics = {"choose": ("acc", "acc_norm"), "complete": ("exact_match",), "read": ("word_perplexity",)}
    for name in TASKS:
        listed = [{"metric": metric} for metric in metrics[name]]
        (tasks / f"{name}.yaml").write_text(
            yaml.safe_dump({"task": name, **shared, **of_each[name], "metric_list": listed})
        )
    return folder / "judged"


def evaluate(lm_eval, checkpoint, out, grid=None, asked=None):
    """One rank of ``litgpt evaluate``: what it printed of results."""
    import contextlib
    import io

    sys.path.insert(0, lm_eval)
    os.environ |= {"HF_HOME": str(checkpoint / "cache"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    import litgpt.eval.evaluate as module
    import lm_eval.evaluator as evaluator

    only = {"include_path": str(checkpoint / "tasks"), "include_defaults": False}
    evaluator.TaskManager = functools.partial(evaluator.TaskManager, **only)

    def start():
        module.convert_and_evaluate(
            checkpoint_dir=checkpoint, tasks=",".join(TASKS), out_dir=checkpoint / out, batch_size=3, device="cpu"
        )

    with contextlib.redirect_stdout(io.StringIO()) as printed:
        _run(start, "evaluate", grid, **(asked or {}))
    return printed.getvalue()


def judged(checkpoint, out):
    """(metrics, answers to each sample) that a run has written."""
    written = json.loads((checkpoint / out / "results.json").read_text())
    answers = {
        task: [sample["filtered_resps"] for sample in sorted(samples, key=lambda sample: sample["doc_id"])]
        for task, samples in written["samples"].items()
    }
    return written["results"], answers


def numbers(answers):
    """Log-likelihoods, and the words between them."""
    if isinstance(answers, float):
        return [answers], []
    if isinstance(answers, dict):
        answers = [answers[task] for task in sorted(answers)]
    if not isinstance(answers, list):
        return [], [answers]
    parts = [numbers(part) for part in answers]
    return [number for part, _ in parts for number in part], [word for _, part in parts for word in part]


@pytest.mark.soak
@pytest.mark.parametrize("grid, algorithm", [("2x1x1x1", "axonn"), ("2x2x2x1", "axonn"), ("2x2x1x1", "tesseract")])
def test_a_model_on_a_grid_is_judged_as_by_stock_litgpt(lm_eval, base, grid, algorithm):
    """Choices, text that is generated in batches of unequal lengths, and perplexity. Rank 0 alone prints and writes."""
    if not (base / "stock").exists():
        run_ranks(evaluate, 1, lm_eval, base, "stock", timeout=180)
    ranks, environment = ranks_of(grid)
    printed = run_ranks(
        evaluate, ranks, lm_eval, base, grid, grid, {"algorithm": algorithm}, env=environment, timeout=180
    )
    assert ["|choose" in text for text in printed] == [True] + [False] * (ranks - 1)
    (expected, answers), (results, mine) = judged(base, "stock"), judged(base, grid)
    assert results.keys() == expected.keys() == set(TASKS)
    assert numbers(mine)[1] == numbers(answers)[1]
    apart = max(abs(a - b) for a, b in zip(numbers(mine)[0], numbers(answers)[0], strict=True))
    tell("litgpt evaluate", grid=grid, log_likelihoods_apart=apart, count=len(numbers(mine)[0]))
    assert apart < 1e-4
    for task, metrics in expected.items():
        assert results[task].keys() == metrics.keys()
        for name, value in metrics.items():
            told = pytest.approx(value, rel=1e-5) if isinstance(value, float) else value
            assert results[task][name] == told, name
