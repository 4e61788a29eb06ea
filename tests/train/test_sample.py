"""What ``axo sample`` writes: a text of the right size, a token a byte, a model of as many tokens, and sums that are
right."""

import json
import re

import pytest
import yaml
from litgpt.config import Config
from tokenizers import Tokenizer

from axo.train.sample import write


def test_files_are_what_they_say(tmp_path):
    out = write(tmp_path / "a" / "b", size=5000)
    text = (out / "text.txt").read_bytes()
    assert 4997 <= len(text) <= 5000
    tokenizer = Tokenizer.from_file(str(out / "tokenizer" / "tokenizer.json"))
    told = "def f(x): return 'é 😀'\n"
    assert tokenizer.encode(told).ids == list(told.encode())
    assert tokenizer.decode(list(told.encode())) == told
    config = Config(**yaml.safe_load((out / "model.yaml").read_text()))
    assert config.vocab_size == tokenizer.get_vocab_size() <= config.padded_vocab_size < 300
    assert (config.n_layer, config.n_embd) == (6, 128)
    rows = json.loads((out / "instructions.json").read_text())
    for row in rows:
        first, second, total = map(int, re.findall(r"\d+", row["instruction"] + row["output"]))
        assert first + second == total
    assert len(rows) == 200
    write(out, size=100)
    assert 97 <= len((out / "text.txt").read_bytes()) <= 100
    with pytest.raises(ValueError, match=r"text.txt is a file; name a folder"):
        write(out / "text.txt")
