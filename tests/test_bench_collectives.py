"""``axo bench collectives`` at a toy size: every operation and rival is right; JSON lines say where they are from."""

import json
import subprocess
import sys


def test_every_rival_is_right(tmp_path):
    lines, picture = tmp_path / "rows.jsonl", tmp_path / "busbw.png"
    options = ["--ranks", "2", "--sizes", "1K", "--rounds", "1", "--json", str(lines), "--plot", str(picture)]
    command = [sys.executable, "-m", "axo.cli", "bench", "collectives", *options]
    result = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stdout + result.stderr
    header, *rows = [json.loads(line) for line in lines.read_text().splitlines()]
    assert {"device", "torch", "commit", "date"} <= set(header)
    rows = [row for row in rows if "rival" in row]
    assert {row["rival"] for row in rows} == {"axo", "axo-c10d", "gloo"}
    assert len({row["op"] for row in rows}) == 6 and all(row["wrong"] == 0 for row in rows)
    assert picture.stat().st_size > 1000
