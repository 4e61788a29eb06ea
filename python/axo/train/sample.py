"""A text, a tokenizer, a small model's sizes and questions with answers: to try Axo and LitGPT with, where nothing can
be downloaded.

    text.txt             source code of Python's standard library, its first bytes: text that every machine has
    tokenizer/           byte-level, in the format of Hugging Face's tokenizers: 256 bytes, <s> and </s>
    model.yaml           for --model_config: pythia-14m's blocks under that vocabulary; with its own 50,254 tokens nine
                         tenths of the parameters, and of the time, would be embeddings of tokens that never come
    instructions.json    sums in words, in the form that LitGPT's JSON data module reads

Not here: a tokenizer worth training a real model with.
"""

from __future__ import annotations

import json
from pathlib import Path

from axo.train.data import default_text

MODEL = """\
name: small
n_layer: 6
n_head: 4
n_embd: 128
intermediate_size: 512
block_size: 512
vocab_size: 258
padding_multiple: 8
"""


def write(folder: str | Path, size: int = 1 << 20) -> Path:
    """Write all four into ``folder``, which is made if it is not there.

    Args:
        folder: Files of these names in it are replaced.
        size: Bytes of text, at most.

    Raises:
        ValueError: ``folder`` is a file.
    """
    out = Path(folder)
    if out.exists() and not out.is_dir():
        raise ValueError(f"sample: {out} is a file; name a folder, or one that is not there yet")
    out.mkdir(parents=True, exist_ok=True)
    text = ""
    for path in default_text():
        text += path.read_text(encoding="utf-8", errors="ignore")
        if len(text) >= size:
            break
    whole = text.encode()[:size].decode(errors="ignore")  # not a part of a character at the end
    (out / "text.txt").write_text(whole, encoding="utf-8")
    write_tokenizer(out / "tokenizer")
    (out / "model.yaml").write_text(MODEL, encoding="utf-8")
    pairs = [(a, b) for a in range(1, 21) for b in range(1, 11)]
    rows = [{"instruction": f"What is {a} plus {b}?", "input": "", "output": f"It is {a + b}."} for a, b in pairs]
    (out / "instructions.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return out


def write_tokenizer(folder: Path) -> None:
    """Write a byte-level tokenizer: byte b is token b, <s> is 256, </s> is 257."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir(exist_ok=True)
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]  # GPT-2's table: these stand for themselves
    others = [byte for byte in range(256) if byte not in printable]
    symbols = {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(vocab=symbols | {"<s>": 256, "</s>": 257}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
