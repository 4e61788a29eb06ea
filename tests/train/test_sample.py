"""What ``axo sample`` writes: a text of the right size, a token a byte, and sums that are right."""

import json
import re

import pytest
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
    rows = json.loads((out / "instructions.json").read_text())
    for row in rows:
        first, second, total = map(int, re.findall(r"\d+", row["instruction"] + row["output"]))
        assert first + second == total
    assert len(rows) == 200
    write(out, size=100)
    assert 97 <= len((out / "text.txt").read_bytes()) <= 100
    with pytest.raises(ValueError, match=r"text.txt is a file; name a folder"):
        write(out / "text.txt")
