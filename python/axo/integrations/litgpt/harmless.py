"""What LitGPT reads of a checkpoint's folder, made harmless: nothing in it runs code, unless ``--trust`` is given.

    lit_model.pth, *.bin, *.ckpt    tensors and plain values only: torch's own allow-list, instead of Lightning's lazy
                                    reader, which unpickles whatever a file names, and of weights_only=False
    prompt_style.yaml               names a class that LitGPT imports and calls: one of litgpt.prompts
    tokenizer_config.json           its chat_template is a program in Jinja: rendered in Jinja's sandbox

Stands for the whole process. In the processes that LitServe starts LitGPT's API objects set it up (``serving_apis``).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import litgpt.prompts
import litgpt.utils
from lightning.fabric.utilities import load as lightning_load

from axo import files
from axo.checkpoint.stored import read_plain
from axo.integrations.litgpt.parsing import read_yaml

_STOCK = lightning_load._lazy_load, litgpt.prompts.load_prompt_style
_TORCHS = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"


def protect() -> None:
    """Replace what reads them in every module of LitGPT's, imported by now or later."""
    if "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD" not in os.environ:  # who has set that has said that files are trusted
        os.environ[_TORCHS] = "1"
    lightning_load._lazy_load = read_checkpoint
    litgpt.prompts.load_prompt_style = load_prompt_style
    ours = dict(zip(map(id, _STOCK), (read_checkpoint, load_prompt_style), strict=True))
    for module in [module for name, module in sys.modules.items() if name.partition(".")[0] == "litgpt"]:
        for name, value in list(vars(module).items()):  # under whatever name they were imported
            if id(value) in ours:
                setattr(module, name, ours[id(value)])


def read_checkpoint(filename: Any) -> Any:
    """Stands for Lightning's ``_lazy_load``: the tensors are mapped, and read when they are used."""
    if not os.path.isfile(filename):
        raise FileNotFoundError(f"Path {str(filename)!r} does not exist or is not a file.")
    return read_plain(Path(filename))


def load_prompt_style(checkpoint_dir: Path) -> litgpt.prompts.PromptStyle:
    """Stands for LitGPT's.

    Raises:
        ValueError: The folder names something else than one of LitGPT's styles.
    """
    file = Path(checkpoint_dir) / "prompt_style.yaml"
    said = read_yaml(file)
    path = said.get("class_path") if isinstance(said, dict) else None
    module, _, name = str(path)[:200].rpartition(".")
    kind = getattr(litgpt.prompts, name, None) if module == "litgpt.prompts" else None
    if not isinstance(kind, type) or not issubclass(kind, litgpt.prompts.PromptStyle):
        raise ValueError(
            f"litgpt: {file} names {files.shown(path)}, which is no prompt style of LitGPT's and would be imported and"
            " called; add --trust if you trust who wrote it"
        )
    return kind()


def sandboxed_templates() -> Any:
    """A context in which ``jinja2.Template`` makes templates that reach nothing but what they are given."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    return mock.patch("jinja2.Template", ImmutableSandboxedEnvironment().from_string)
