"""Folders of checkpoints that LitGPT's commands read: nothing in them runs code, unless ``--trust`` is given."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from tests.checkpoint import hostile
from tests.checkpoint.hostile import Bomb
from tests.integrations.litgpt.test_serving import litserve
from tests.integrations.trainer import generate, ranks_of, write_base
from tests.launcher import Command, rank_outcomes, run_ranks

__all__ = ["litserve"]  # a fixture


def other(base: Path, name: str) -> Path:
    return Path(shutil.copytree(base, base.with_name(name)))


@pytest.fixture(scope="session")
def base(folder: Path) -> Path:
    if not (folder / "harmless").exists():
        write_base(folder, "harmless")
    return folder / "harmless"


@pytest.mark.parametrize("kind", ["plain", "model", "sharded", "style"])
def test_generate_runs_nothing_of_a_checkpoints_folder(base: Path, tmp_path: Path, kind: str) -> None:
    """Oracle: a folder that the file would make."""
    flag, path = tmp_path / "it ran", other(base, f"hostile-{kind}")
    file = path / "lit_model.pth"
    if kind == "style":
        (path / "prompt_style.yaml").write_text("class_path: os.abort\ninit_args: {}\n")
        said = "names 'os.abort', which is no prompt style of LitGPT's"
    elif kind == "sharded":
        file.unlink()
        hostile.write(path).rename(file)
        hostile.rewrite(file, lambda metadata: Bomb(flag))
        said = "it names 'posix.mkdir', which no checkpoint of Axo's holds"
    else:
        state = torch.load(file, weights_only=True)
        torch.save({"model": state, "x": Bomb(flag)} if kind == "model" else {**state, "x": Bomb(flag)}, file)
        said = "it holds a posix.mkdir"
    ranks, environment = ranks_of("2x1x1x1")
    outcomes = rank_outcomes(generate, ranks, path, "2x1x1x1", env=environment)
    assert [outcome.error for outcome in outcomes] == ["ValueError"] * ranks
    assert all(said in outcome.message and str(path) in outcome.message for outcome in outcomes)
    assert not flag.exists()


def test_generate_reads_what_others_wrote(base: Path) -> None:
    """Oracle: stock LitGPT."""
    expected = run_ranks(generate, 1, base)[0]
    (path := other(base, "styled")).joinpath("prompt_style.yaml").write_text("class_path: litgpt.prompts.Alpaca\n")
    ranks, environment = ranks_of("2x1x1x1")
    assert len(run_ranks(generate, ranks, path, "2x1x1x1", env=environment)[0]) > len(expected)  # its prompt is longer
    assert run_ranks(generate, ranks, base, "2x1x1x1", env=environment)[0] == expected


def test_commands_without_a_grid_run_nothing_either(base: Path, tmp_path: Path) -> None:
    """``convert_from_litgpt`` and ``convert_to_litgpt`` read .pth and .bin; with --trust they do as stock LitGPT."""
    flag, path = tmp_path / "it ran", other(base, "bomb")
    state = torch.load(path / "lit_model.pth", weights_only=True)
    torch.save({**state, "x": Bomb(flag)}, path / "lit_model.pth")
    torch.save({"x": Bomb(flag)}, path / "pytorch_model.bin")
    for words in (
        ["convert_from_litgpt", str(path), str(tmp_path / "out")],
        ["convert_to_litgpt", str(path), "--model_name", "pythia-14m"],
    ):
        command = Command("axo.cli", "litgpt", *words)
        output = command.communicate()
        assert command.returncode == 2 and "it holds a posix.mkdir" in output and "Traceback" not in output, output
        assert not flag.exists()
    torch.save({**state, "x": Bomb(flag)}, path / "lit_model.pth")  # which convert_to_litgpt began to write
    command = Command("axo.cli", "litgpt", "convert_from_litgpt", str(path), str(tmp_path / "out"), "--trust")
    output = command.communicate()
    assert flag.exists(), output


def render(litserve: str, checkpoint: Path, template: str) -> Any:
    import sys

    sys.path.insert(0, litserve)
    import litgpt.deploy.serve as module

    from axo.integrations.litgpt.rank import protect

    protect()
    assert module.OpenAISpecLitAPI.__module__ == "axo.integrations.litgpt.serving_apis"  # what a new process imports
    file = checkpoint / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))
    api = module.OpenAISpecLitAPI(checkpoint, precision="32-true", max_new_tokens=4, api_path="/predict")
    api.setup("cpu")
    return api.decode_request(SimpleNamespace(messages=[SimpleNamespace(role="user", content="hello")]))


def names_of_stock(*more: str) -> list[str]:
    """Where what the stock command line would use comes from."""
    from axo.integrations.litgpt import command

    found = []

    def run(name: str, arguments: list[str]) -> None:
        import litgpt.deploy.serve
        import litgpt.generate.base
        import litgpt.utils

        used = (litgpt.deploy.serve.OpenAISpecLitAPI, litgpt.utils.lazy_load, litgpt.generate.base.load_prompt_style)
        found.extend(each.__module__ for each in used)

    command._run_litgpt = run
    command._stock("serve", ["nothing", *more])
    return found


def test_the_stock_command_line_uses_the_same() -> None:
    own = "axo.integrations.litgpt"
    assert run_ranks(names_of_stock, 1) == [[f"{own}.serving_apis", f"{own}.harmless", f"{own}.harmless"]]
    trusted = run_ranks(names_of_stock, 1, "--trust")[0]
    assert trusted == ["litgpt.deploy.serve", "lightning.fabric.utilities.load", "litgpt.prompts"]


def test_a_chat_template_reaches_nothing(litserve: str, base: Path, tmp_path: Path) -> None:
    flag, path = tmp_path / "it ran", other(base, "template")
    text = "{% for m in messages %}<{{ m.role }}>{{ m.content | upper }}{% endfor %}"
    assert run_ranks(render, 1, litserve, path, text) == ["<user>HELLO"]
    for reach in ("cycler.__init__.__globals__", "joiner.__init__.__globals__", "lipsum.__globals__"):
        (outcome,) = rank_outcomes(render, 1, litserve, path, f"{{{{ {reach}.os.mkdir({str(flag)!r}) }}}}")
        assert outcome.error == "ValueError" and "chat_template of tokenizer_config.json: " in outcome.message
        assert not flag.exists()


def test_stock_styles_are_known(tmp_path: Path) -> None:
    from litgpt.prompts import prompt_styles, save_prompt_style

    from axo.integrations.litgpt.harmless import load_prompt_style

    for style in prompt_styles.values():
        save_prompt_style(style(), tmp_path)
        assert type(load_prompt_style(tmp_path)) is style
    for wrong in ("litgpt.prompts.yaml", "litgpt.prompts.load_prompt_style", "x", "", None, ["a"] * 9):
        (tmp_path / "prompt_style.yaml").write_text(yaml.safe_dump({"class_path": wrong}))
        with pytest.raises(ValueError, match=r"prompt_style.yaml names .*--trust"):
            load_prompt_style(tmp_path)
