"""Who waits for a flag, and who raises it: the driver on NVIDIA, a kernel on AMD.

HIP's own wait compares without wrapping around, and wants memory of a special kind. Oracle: what the communicator was
asked for, and which kernels were launched on its stream; a recorder, since no GPU is here.
"""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from axo_kernels import adapt
from axo_kernels.comm import adapters, communicator
from axo_kernels.fused.chunks import chunk_order
from axo_kernels.fused.workspace import Workspace
from tests.kernels.comm.test_device import Recorder


@pytest.mark.parametrize("hip", [None, "6.4.0"])
def test_the_driver_has_the_flags_on_nvidia_alone(monkeypatch, hip):
    recorder, log, current = Recorder(), [], ["compute"]

    @contextmanager
    def on(stream):
        current.append(stream)
        yield
        current.pop()

    def launched(name):
        class Kernel:
            def __getitem__(self, grid):
                return lambda flags, word, counted, *rest, **options: log.append(
                    (current[-1], name, flags.storage_offset(), int(word) + counted)
                )

        return Kernel()

    kernels = SimpleNamespace(wait_flag_kernel=launched("wait"), write_flag_kernel=launched("write"))
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(communicator.devices, "signal_kernels", lambda: kernels)
    monkeypatch.setattr(adapters.torch.cuda, "stream", on)
    monkeypatch.setattr(adapters.torch.cuda, "ExternalStream", lambda handle, device: handle)
    comm = adapt(recorder)
    workspace = Workspace("op", chunk_order("all_reduce", 8, 2, 0, 2), torch.device("cpu"))
    workspace.advance()
    assert (workspace.epoch.counted, workspace.epoch.captured) == (1, False), (
        "the host knows the epoch, so that it is the machine which decides"
    )
    comm.fork(torch.device("cuda", 0))
    comm.wait_flag(workspace, 1)
    comm.write_flag(workspace, 0)
    driver, kernel = [("wait", 1, 1), ("write", 0, 1)], [(12345, "wait", 1, 1), (12345, "write", 0, 1)]
    assert recorder.log == ["follow", *([] if hip else driver)]
    assert log == (kernel if hip else [])
