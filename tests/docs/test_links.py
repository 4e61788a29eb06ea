"""Links between the README, the docs and the examples lead to files and headings that are there."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").glob("**/*.md"),
    *ROOT.glob("examples/**/*.md"),
]
FENCE = re.compile(r"^( *)```.*?^\1```", re.DOTALL | re.MULTILINE)


def anchors(page):
    """What a heading is called in a link: lower case, punctuation gone, spaces as hyphens; as on the site."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    found = set()
    for heading in re.findall(r"^#+ +(.+?)\s*$", text, re.MULTILINE):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        found.add(re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-"))
    return found


def test_links_lead_somewhere():
    seen = 0
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", page.read_text(encoding="utf-8"))):
            if re.match(r"[a-z]+:", target):
                continue
            seen += 1
            path, _, anchor = target.partition("#")
            where = f"{page.relative_to(ROOT)} links to {target}"
            file = (page.parent / path).resolve() if path else page
            assert file.exists(), where
            if anchor:
                assert anchor in anchors(file), f"{where}; its headings are {sorted(anchors(file))}"
    assert seen > 50


def test_every_page_of_the_docs_is_on_the_site_and_says_for_whom_it_is():
    listed = set(re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE))
    docs = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").glob("**/*.md")}
    assert listed == docs, f"the navigation in mkdocs.yml and the pages in docs/ differ in {sorted(listed ^ docs)}"
    examples = {path.relative_to(ROOT).as_posix() for path in (ROOT / "examples").glob("*/README.md")}
    for name in ("CONTRIBUTING.md", *examples, *(f"docs/{name}" for name in docs)):
        start = (ROOT / name).read_text(encoding="utf-8").split("\n\n")[1]
        assert re.search(r"\b[Ff]or (who|every|user|reader)", start), f"{name} does not say whom it is for: {start}"
