"""A hook of mkdocs: what pages show or link to outside of docs/ comes to the site too, at its place in the repository.

In the repository a page links to ``../examples/vit/README.md`` or to a picture in ``../bench/results``. The site's root
is docs/; so the READMEs of the examples and the pictures become files of the site, and ``../`` before them goes.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
_OUT = re.compile(r"(\]\()((?:\.\./)+)((?:examples|bench|README|CONTRIBUTING|CHANGELOG)[^)#]*)")
_IN = re.compile(r"(\]\()((?:\.\./)+)docs/")


def on_config(config: Any) -> Any:
    """List the READMEs of examples where the navigation says so."""
    pages = [path.relative_to(ROOT).as_posix() for path in sorted(ROOT.glob("examples/*/README.md"))]
    (place,) = (entry for entry in config.nav if "Examples" in entry)
    place["Examples"] = [{Path(page).parent.name: page} for page in pages]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the READMEs of examples and the pictures of results."""
    for path in [*ROOT.glob("examples/*/README.md"), *ROOT.glob("bench/results/*.png")]:
        name = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Let links between docs/ and the rest of the repository lead to where the site has them."""
    if page.file.src_uri.startswith("examples/"):
        return _IN.sub(r"\1\2", markdown)  # the repository's docs/ is the site's root
    return _OUT.sub(lambda found: found[1] + found[2][3:] + found[3], markdown)
