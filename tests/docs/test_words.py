"""Words that only Axo's pages use in this sense are explained where a reader meets them first. Oracle: the pages."""

import re

import pytest

from tests.environments import ROOT

PAGES = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
# What a page must say within so many characters of its first use.
EXPLAINED = {
    r"\bOAR\b": r"all-reduce|overlap",
    r"\bORS\b": r"scatter|overlap",
    r"\bOAG\b": r"all-gather|overlap",
    r"\blower tier\b": r"host|files",
    r"\bsoak\b": r"long",
}
ONCE = {r"\bsoak\b": ("README.md", "index.md", "status.md")}  # in others it stands in commands alone
NEAR = 300


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_words_are_explained_where_they_first_stand(page):
    text = page.read_text()
    for word, explanation in EXPLAINED.items():
        if page.name in ONCE.get(word, (page.name,)) and (first := re.search(word, text)):
            near = text[max(0, first.start() - NEAR) : first.end() + NEAR]
            assert re.search(explanation, near), f"{page.name}: {first[0]} is not explained"


def test_the_first_page_has_the_words_and_the_grid_has_four_dimensions():
    words = re.findall(r"^\| ([^|]+) \|", (ROOT / "docs/index.md").read_text().partition("## Words")[2], re.MULTILINE)
    assert {"product", "hidden", "OAR, ORS, OAG", "kept", "lower tier", "soak"} <= set(words)
    assert not [page.name for page in PAGES if re.search(r"three-dimensional", page.read_text())]
    assert "four-dimensional" in (ROOT / "README.md").read_text().partition("![")[0]
    install = (ROOT / "README.md").read_text().partition("## Install")[2]
    assert install.index("git clone URL") < install.index("pip install"), "a reader has no checkout yet"


@pytest.mark.parametrize("name", ["pretrain", "finetune", "litgpt"])
def test_pages_of_training_say_how_a_rank_gets_a_gpu(name):
    text = (ROOT / f"docs/{name}.md").read_text()
    assert re.search(r"LT_ACCELERATOR=cuda|--device cuda", text)
    assert "run on the CPU" in text and "](devices.md)" in text


def test_the_page_of_gpus_begins_with_what_to_type():
    first = (ROOT / "docs/devices.md").read_text().partition("```\n\n")[0]
    assert first.count("\n") < 12 and "8 GPUs" in first and "LT_ACCELERATOR=cuda axo litgpt" in first


def test_how_to_plan_fits_two_screens():
    lines = (ROOT / "docs/planner.md").read_text().splitlines()
    screen = sum(-(-len(line) // 160) or 1 for line in lines)
    assert screen <= 2 * 45, f"{screen} lines of 160 columns: results and reasons belong into docs/notes/planner.md"
