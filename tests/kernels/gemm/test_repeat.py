"""Launches that are repeated without Triton's binder, through its real launcher over a driver that computes nothing.

Oracle: what Triton itself hands to its launcher in C, and what it encodes its tensor maps from.
"""

import subprocess
import sys
from dataclasses import replace
from functools import partial
from inspect import Parameter, Signature
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from axo_kernels.gemm.tiles import HOPPER, TARGETS, default_config
from axo_kernels.tune.choice import Choice

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("kernel", ["hopper", "descriptors", "cut"])
def test_a_repeated_launch_is_tritons(kernel, tmp_path):
    code = f"from tests.kernels.gemm.test_repeat import check; check({kernel!r}, {str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_repeated_launch_is_tritons_on_amd(tmp_path):
    code = f"from tests.kernels.gemm.test_repeat import check_amd; check_amd({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]


def check_amd(folder):
    """What Triton's own launcher for AMD gives to its part in C, of which a recorder takes the place: its arguments
    stand in another order than NVIDIA's."""
    from bench.tools.stub_driver import Stub

    Stub(Path(folder))
    from triton import runtime
    from triton.backends.amd.driver import HIPLauncher

    from axo_kernels.gemm.repeat import Repeated

    runtime.driver.active.get_current_stream = lambda device: 7
    taken, run = [], object.__new__(HIPLauncher)
    scratch = {f"{kind}_scratch_{what}": 0 for kind in ("global", "profile") for what in ("size", "align")}
    vars(run).update(scratch, launch_cooperative_grid=False, warp_size=64)
    vars(run).update(
        arg_annotations=[], kernel_signature=b"", num_ctas=1, launch=partial(lambda *all: taken.append(all))
    )
    kernel = SimpleNamespace(run=run, function=3, packed_metadata=(4, 1, 512))
    names = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in ("a", "b", "c", "n", "BLOCK")]
    jit = SimpleNamespace(pre_run_hooks=[], signature=Signature(names))
    first, second = ([torch.empty(8) for _ in range(3)] for _ in range(2))
    repeated = Repeated.of(jit, kernel, 96, (*first, 512), {"BLOCK": 64, "num_warps": 4})
    assert repeated is not None and repeated.ready()
    run(96, 1, 1, 7, 3, (4, 1, 512), None, None, None, *(tensor.data_ptr() for tensor in second), 512, 64)
    repeated([], [tensor.data_ptr() for tensor in second], None)
    plain = [[list(value) if isinstance(value, tuple) else value for value in each] for each in taken]
    assert len(plain) == 2 and plain[0] == plain[1] and plain[0][:5] == [False, 96, 1, 1, 7]


def check(kernel, folder):
    """In a process of its own, whose driver is the stub."""
    from axo_kernels.tune.runners import runner
    from bench.tools.stub_driver import Stub

    stub = Stub(Path(folder))
    from triton import knobs, runtime

    from axo_kernels.gemm import repeat

    driver, device, stream, encoded, launched = runtime.driver.active, [0], [7], {}, []
    driver.get_current_device, driver.get_current_stream = lambda: device[0], lambda device: stream[0]
    fill = next(name for name in ("fill_tma_descriptor_tiled", "fill_tma_descriptor") if hasattr(driver.utils, name))
    encode = getattr(driver.utils, fill)

    def recorded_map(*given):
        tensor_map = encode(*given)
        encoded[id(tensor_map)] = tensor_map, [list(value) if isinstance(value, tuple) else value for value in given]
        return tensor_map

    setattr(driver.utils, fill, recorded_map)

    def plain(value):
        """For comparison: maps as what they were encoded from, tensors as addresses, no hooks as None."""
        if id(value) in encoded:
            return encoded[id(value)][1]
        if isinstance(value, torch.Tensor):
            return value.data_ptr()
        if type(value).__name__ in ("HookChain", "LazyDict"):
            return None
        return [plain(one) for one in value] if isinstance(value, (list, tuple)) else value

    config = HOPPER[0] if kernel == "hopper" else default_config(TARGETS["sm_90"], torch.bfloat16, True)
    run = runner(Choice("triton", "NT", replace(config, split_k=2 if kernel == "cut" else 1)), "NT")
    m, n, k = 512, 768, 256

    def operands():
        out = torch.empty(m, 2 * n, dtype=torch.bfloat16)[:, :n]
        a, b = torch.empty(m, k, dtype=torch.bfloat16), torch.empty(n, k, dtype=torch.bfloat16)
        return {"a": a, "b": b, "out": out, "bias": torch.empty(n, dtype=torch.bfloat16)}

    first, second = operands(), operands()
    run(**first)
    (prepared,) = run._prepared.values()
    launch = prepared.multiply
    if kernel == "cut":  # the launch behind: of plain pointers, to the sums of K's pieces in the place of a
        launch = prepared.combine
        first["a"], second["a"] = (torch.empty(2 * m, n) for _ in range(2))
        run = lambda a, b, out, bias: launch(a, out, bias, out)  # noqa: E731
    (compiled,) = launch.kernel.device_caches[0][0].values()
    launcher = None
    recorded = lambda *given: (launched.append(plain(given)), launcher(*given))[1]  # noqa: E731
    if kernel == "cut":
        launcher, compiled.run.launch = compiled.run.launch, partial(recorded)  # no function of Python's
    else:
        cell = repeat._cells(compiled)["launcher"]
        launcher, cell.cell_contents = cell.cell_contents, recorded
    begun = stub.launches
    run(**first)
    assert launch.repeated is not None and launch.launches == 2, "the second launch is Triton's"
    run(**first)
    assert launch.launches == 2 and len(launched) == 2 and launched[0] == launched[1]

    seen = []
    watch = lambda metadata: seen.append(metadata.get()["name"])  # noqa: E731
    stream[0], maps = 9, stub.maps
    run(**second)
    assert (stub.maps > maps) == (kernel != "cut") and launch.launches == 2, "other bases: maps of their own"
    knobs.runtime.launch_enter_hook.add(watch)
    run(**second)
    assert len(seen) == 1 and launch.launches == 3, "with a hook Triton launches"
    knobs.runtime.launch_enter_hook.remove(watch)
    knobs.runtime.launch_exit_hook.add(watch)
    run(**second)
    assert len(seen) == 2 and launch.launches == 4
    knobs.runtime.launch_exit_hook.remove(watch)
    maps = stub.maps
    run(**second)
    run(**(second | {"a": first["a"]}))
    assert stub.maps == maps and launch.launches == 4, "maps of these bases are kept"
    assert launched[2] == launched[3] == launched[4] == launched[5] != launched[6]
    assert 9 in launched[2] and 7 in launched[1] and stub.launches == len(launched) + begun and not stub.complaints

    device[0] = 1
    assert not launch.repeated.ready(), "a kernel is one device's"
    device[0], repeat._KEPT = 0, 1
    for kept in launch.repeated._kept:
        kept.clear()
    for given in (first, second, first, second):
        run(**given)
    assert launched[-4:-2] == launched[-2:] and launched[-1] == launched[5], "few maps are kept, all are right"
    assert all(len(kept) == 1 for kept in launch.repeated._kept)
