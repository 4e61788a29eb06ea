"""A pytest plugin: run LitGPT's own tests, such as ``tests/test_model.py``, unchanged, on models that a grid shares.

    torchrun --nproc-per-node 2 -m pytest -p tests.integrations.litgpt.plugin --axo-grid 2x1x1x1 tests/test_model.py

``litgpt.GPT``, and the ones of LoRA and adapters, are replaced by classes that split themselves over the grid as soon
as they are built: whole weights are cut when they are loaded, ``state_dict()`` and logits come back whole, and tests
compare them with Hugging Face's classes as they always do. The ranks run the same tests in the same order under the
same seeds (one a test, from its name). What Axo refuses (``axo.Refused``) is a skip that shows the refusal, and what a
shared model cannot satisfy (``_DIFFERENT``) is an expected failure with its reason: run with ``-rsx`` to see them. A
test that fails on any rank fails on all.

Not here: the tests. ``test_model.py`` is in LitGPT's source distribution (``pip download --no-deps --no-binary :all:
litgpt==0.5.13``), the others are in its repository only.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_zero_only
from lightning_utilities.core.rank_zero import rank_zero_only as utilities_zero_only

import axo
from axo.comm.connect import Communicators
from axo.grid import Grid
from axo.integrations.fabric.compile import keep_out_of_graphs
from axo.placement import placement_of
from axo.sharding import cut_features, gather_features

# Tests that look into one rank's part of the model, at Axo's own layers, or at the last bits of fp32: name -> (the axes
# that make them differ; "": any grid, of one rank too; why).
_DIFFERENT = {
    "test_kv_cache_buffer_shape": ("x", "a rank's cache holds its own query groups, not all"),
    "test_against_original_gemma_2": (
        "xy",
        "it allows 3e-5, and with its random weights fp32 itself, Hugging Face's too, is 4e-5 to 2e-4 from fp64: sums"
        " that are split round otherwise, not worse, and whether that passes is chance",
    ),
    "test_against_original_gemma_3": (
        "xy",
        "as test_against_original_gemma_2: it allows 3e-5, and some differ by 4e-5",
    ),
    "test_adapter_compile": ("", "as test_lora_compile"),
    "test_lora_merge": ("xyz", "it adds whole updates to the rows of the weight that a rank holds"),
    "test_lora_mqa_gqa": ("", "it compares the shape of a rank's part of the weight with that of the whole"),
    "test_lora_ind_correctness": ("", "lora_ind is of a whole fused weight; a part has other rows"),
    "test_lora_compile": ("", "it counts graphs, and communication is never traced: each layer is a break"),
    "test_tensor_parallel_llama": ("", "LitGPT's own tensor parallelism would split a model that is split"),
}


def pytest_addoption(parser: Any) -> None:
    parser.addoption("--axo-grid", default="1x1x1x1", metavar="XxYxZxDATA", help="Ranks on each axis.")


def pytest_configure(config: Any) -> None:
    torch.set_num_threads(1)
    config.addinivalue_line("markers", "flaky: of pytest-rerunfailures, which the file uses; nothing is run again here")
    comms = axo.connect(config.getoption("--axo-grid"))
    config.add_cleanup(comms.close)
    _forget_ranks()
    config.pluginmanager.register(_SameVerdict(comms), "axo-same-verdict")
    _replace_gpt(comms)
    _copy_whole(config)
    _keep_process_group(config)
    if comms.rank:
        reporter = config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            config.pluginmanager.unregister(reporter)


def pytest_report_header(config: Any) -> str:
    return f"axo: litgpt.GPT is shared by grid {config.getoption('--axo-grid')}"


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    grid = Grid.parse(config.getoption("--axo-grid"))
    for item in items:
        axes, reason = _DIFFERENT.get(item.originalname, ("", ""))
        if reason and (not axes or any(grid.size(axis) > 1 for axis in axes)):
            item.add_marker(pytest.mark.xfail(reason=f"axo: {reason}"))


@pytest.fixture(autouse=True)
def _same_seed(request: Any) -> None:
    torch.manual_seed(zlib.crc32(request.node.name.encode()))  # wherever the file lies


def _forget_ranks() -> None:
    """The tests are of one process, and each rank runs them as such: whatever they start must not see torchrun's."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RUN_ID"):
        os.environ.pop(name, None)
    decorators: tuple[Any, ...] = (fabric_zero_only, utilities_zero_only)
    for decorator in decorators:
        decorator.rank = 0


def _keep_process_group(config: Any) -> None:
    """LitGPT's own fixture destroys the process group after each test; the grid's is that of the whole session."""
    destroy = torch.distributed.destroy_process_group
    torch.distributed.destroy_process_group = lambda group=None: None if group is None else destroy(group)

    def restore() -> None:
        torch.distributed.destroy_process_group = destroy

    config.add_cleanup(restore)  # runs before what was added earlier


def _replace_gpt(comms: Communicators) -> None:
    """Must run before a test module says ``from litgpt import GPT``."""
    import litgpt
    import litgpt.adapter
    import litgpt.adapter_v2
    import litgpt.lora
    import litgpt.model
    import litgpt.utils

    from axo.integrations.litgpt.patches import count_parameters
    from axo.plans.litgpt import plan  # noqa: F401  it must know the classes as they are

    for module in (litgpt.model, litgpt.lora, litgpt.adapter, litgpt.adapter_v2):
        module.GPT = _split(module.GPT, comms)  # type: ignore[misc, attr-defined]
    litgpt.GPT = litgpt.model.GPT  # type: ignore[misc]
    litgpt.utils.num_parameters = count_parameters


def _split(stock: Any, comms: Communicators) -> Any:
    """litgpt's class, split over the grid when a model of it is built."""
    from litgpt.model import LLaMAMoE

    def build(self: Any, config: Any) -> None:
        stock.__init__(self, config)
        try:
            axo.parallelize(self, comms, gather_logits=True)
        except axo.Refused as refusal:
            pytest.skip(f"refused: {refusal}")
        for block in self.transformer.h:
            if isinstance(block.mlp, LLaMAMoE):
                block.mlp.forward = _whole(block.mlp.forward, comms, config.n_embd)
        keep_out_of_graphs(self)  # as AxoStrategy does

    return type("GPT", (stock,), {"__init__": build, "__module__": stock.__module__, "__doc__": stock.__doc__})


def _whole(forward: Callable[..., Any], comms: Communicators, features: int) -> Callable[..., Any]:
    """For a test that calls a part of a model by itself: whole features come and go."""

    def call(x: torch.Tensor) -> torch.Tensor:
        if comms.grid.y == 1 or x.shape[-1] != features:
            return forward(x)
        return gather_features(forward(cut_features(x, comms, "y", features)), comms, "y", features)

    return call


def _copy_whole(config: Any) -> None:
    """A test that copies a weight of a split model into a tensor of the whole size gets all of it."""
    copy = torch.Tensor.copy_

    def copy_whole(self: torch.Tensor, source: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        placement = placement_of(source)
        if placement is not None and self.shape == placement.global_shape:
            source = axo.unshard(source.detach(), placement)
        return copy(self, source, *args, **options)

    torch.Tensor.copy_ = copy_whole  # type: ignore[method-assign, assignment]
    config.add_cleanup(lambda: setattr(torch.Tensor, "copy_", copy))


class _SameVerdict:
    """Every rank must come to the same verdict on a test: one that differs fails it on all."""

    def __init__(self, comms: Communicators) -> None:
        self._comms = comms

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Generator[None, Any, Any]:
        report = yield
        failed = self._comms.world.all_reduce(torch.tensor([int(report.failed), int(report.skipped)]), "max")
        if failed[0] and not report.failed:
            report.outcome = "failed"
            report.longrepr = "failed on another rank of the grid"
        elif failed[1] and not report.skipped and not report.failed:
            report.outcome = "failed"
            report.longrepr = "skipped on another rank of the grid and not on this one"
        return report
