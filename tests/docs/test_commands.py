"""Every command that a page shows in a block marked ``bash`` runs as it stands there, or NOT_RUN says why not; and so
does every one between its words (README's tables) that says all that it needs (INLINE). Of the others between words,
which name an option, ``tests/house/test_readme.py`` checks that it exists.

A page's commands run one after the other in an empty folder; ``python -m`` finds the checkout's examples. Most take a
minute, so all pages together are a long proof (``pytest -m soak tests/docs``); what takes seconds is run each time,
there in processes forked from the zygote but for one of them, which a shell starts as all are in the long proof.
"""

import contextlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launcher import Command

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "docs").glob("**/*.md"),
        *ROOT.glob("examples/*/README.md"),
    ]
)
BLOCK = re.compile(r"^( *)```bash\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"`(axo (?:(?:plan|dryrun) --model|\w+ --help)[^`]*?)(?: \.\.\.)?`")
SECONDS = 300 * float(os.environ.get("AXO_TEST_SLOWNESS", "1"))  # for one command

# Commands that no test types, by a pattern that each of them contains, and why.
NOT_RUN = {
    r"\.\.\.": "a pattern: '...' stands for what the reader adds",
    r"^make (?!-)": "works on the checkout itself; .ci/run does the same in a fresh clone",
    r"^pip install": "changes the environment; .ci/package installs into an empty one",
    r"^pip download": "wants a network; tests/integrations/litgpt/test_plugin.py does the same where there is one",
    r"--device cuda": "wants 8 GPUs; tests/train/test_train_device.py runs it on ranks with a stand-in for them",
    r"^torchrun --nnodes": "wants two hosts; tests/comm/test_hosts.py has ranks that take themselves for several",
    r"-p tests\.integrations\.litgpt\.plugin": "wants LitGPT's sources; test_plugin.py beside it runs it",
    r"^axo bench": "measures for minutes; tests/bench runs the benches in small",
    r"^axo tune": "measures a GPU's products; tests/kernels/tune runs the tuner in small",
    r"^axo profile": "measures this machine for minutes; tests/perf/test_input.py runs it in small",
    r"bench\.tools\.bare_run": "wants root and minutes; tests/bench/test_bare_run.py has its parts",
    r" out/(final|step-)": "goes on from a run of the reader's; tests/integrations/litgpt/test_checkpoints.py does it",
    r"train\.py|PID|axo-flight": "names a program, process or files of the reader's; tests/comm/test_flight.py has all",
    r"DeepSeek-V3/config\.json": "wants a file of Hugging Face's; tests/dryrun/test_experts.py reads its like",
    r"--live OUT": "reads a run of the reader's; tests/train/test_slow.py has one",
    r"examples\.(vit|memorization)": "takes minutes; tests/examples runs it with -m soak",
}
QUICK = r"^axo (info|sample)\b|^axo plan .*--batch-tokens 4M$|^axo \w+ --help$"  # run in each `make test`
BY_SHELL = r"^axo info$"  # of the quick ones
NEEDS = {"docs/finetune.md": "docs/index.md"}  # a page that says so goes on from another


def commands_of(page):
    """The lines of the page's blocks, a continued one as one; then what stands between its words."""
    text, found = page.read_text(encoding="utf-8"), []
    for _, block in BLOCK.findall(text):
        lines = (line.strip() for line in block.replace("\\\n", " ").splitlines())
        found += [line for line in lines if line and not line.startswith("#")]
    return found + INLINE.findall(BLOCK.sub("", text))


def reason(command):
    """Why the command is not run; None: it is."""
    return next((why for pattern, why in NOT_RUN.items() if re.search(pattern, command)), None)


def name_of(page):
    return page.relative_to(ROOT).as_posix()


def type_in(folder, commands):
    """Type the commands in ``folder``, as a reader would in an environment with Axo."""
    tools = folder / ".bin"
    tools.mkdir(exist_ok=True)
    for tool, module in {"axo": "axo.cli", "python": "", "torchrun": "torch.distributed.run"}.items():
        start = f"{shlex.quote(sys.executable)} {'-m ' + module if module else ''}"
        (tools / tool).write_text(f'#!/bin/sh\nexec {start} "$@"\n')
        (tools / tool).chmod(0o755)
    places = [str(ROOT / "python"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {
        "PATH": os.pathsep.join([str(tools), str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join(place for place in places if place),
    }
    for command in commands:
        done = subprocess.run(
            ["bash", "-c", command], cwd=folder, env=env, capture_output=True, text=True, timeout=SECONDS
        )
        told = done.stdout[-2000:] + done.stderr[-3000:]
        assert done.returncode == 0, f"{command}\nended with {done.returncode}:\n{told}"


def call(folder, command):
    """The same for words alone, in a forked process."""
    with contextlib.chdir(folder):
        process = Command("axo.cli", *shlex.split(command)[1:])
        told = process.communicate()
    assert process.returncode == 0, f"{command}\nended with {process.returncode}:\n{told}"


def test_each_command_is_run_or_has_a_reason(tmp_path):
    found = {name_of(page): commands_of(page) for page in PAGES}
    every = [command for commands in found.values() for command in commands]
    run = [command for command in every if reason(command) is None]
    assert len(run) >= 15 and len(every) >= 40
    read = subprocess.run(["bash", "-n", "-c", "\n".join(every)], capture_output=True, text=True)
    assert read.returncode == 0, read.stderr
    unused = [pattern for pattern in NOT_RUN if not any(re.search(pattern, command) for command in every)]
    assert not unused, f"patterns of NOT_RUN that no command matches any more: {unused}"
    quick = dict.fromkeys(" ".join(shlex.split(command, comments=True)) for command in run if re.search(QUICK, command))
    for command in quick:
        type_in(tmp_path, [command]) if re.search(BY_SHELL, command) else call(tmp_path, command)
    assert len(quick) >= 6 and sum(bool(re.search(BY_SHELL, command)) for command in quick) == 1
    assert (tmp_path / "quick" / "tokenizer" / "tokenizer.json").is_file()


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("page", [name_of(page) for page in PAGES if any(not reason(c) for c in commands_of(page))])
def test_commands_of_a_page_run_as_they_stand(page, tmp_path):
    pages = [NEEDS[page], page] if page in NEEDS else [page]
    type_in(tmp_path, [command for each in pages for command in commands_of(ROOT / each) if not reason(command)])
