"""The README's row for programs that are to stay unchanged, typed in a process that has not heard of Axo.

Oracle of the gradient: the same model without ranks. torch before 2.14 has no entry points for backends, which the row
says.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import torch

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()
HAS_ENTRY_POINTS = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 14)
PROGRAM = """
import copy, json, sys
import torch, torch.distributed
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

def of_axo():
    return sorted(name for name in sys.modules if name.split(".")[0] in ("axo", "axo_kernels"))

before = of_axo()
NEEDED_IMPORT
torch.distributed.distributed_c10d.BackendConfig(torch.distributed.Backend("axo"))  # a group's first look at the name
registered = of_axo()
THE_ROW
mesh = torch.distributed.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
torch.manual_seed(0)
alone, x = nn.Linear(6, 4), torch.randn(8, 6)
ddp, fsdp = DistributedDataParallel(copy.deepcopy(alone)), fully_shard(copy.deepcopy(alone), mesh=mesh)
for model in (alone, ddp, fsdp):
    model(x).square().sum().backward()
torch.testing.assert_close(ddp.module.weight.grad, alone.weight.grad)
torch.testing.assert_close(fsdp.weight.grad.full_tensor(), alone.weight.grad)
assert torch.equal(distribute_tensor(x, mesh, [Replicate()]).full_tensor(), x)
print(json.dumps([before, registered, torch.distributed.get_backend()]))
torch.distributed.destroy_process_group()
"""


def test_the_row_of_the_readme_works_as_typed():
    """Until a group is made, one module of Axo is loaded, which names a function; and none in other programs."""
    (row,) = re.findall(r"\| DDP, FSDP2 or DTensor, unchanged \| (.*) \|", README)
    call, needed = re.findall(r"`([^`]+)`", row)
    assert needed == "import axo" and "torch 2.11 to 2.13" in row
    code = PROGRAM.replace("NEEDED_IMPORT", "" if HAS_ENTRY_POINTS else needed).replace("THE_ROW", call)
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | ranks, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    before, registered, backend = json.loads(done.stdout)
    assert (before, registered, backend) == ([], ["axo", "axo.comm", "axo.comm.c10d", "axo.lazy"], "axo")


def test_another_torch_is_named_beside_those_that_axo_supports():
    """The range is that of pyproject.toml, out of the installed package."""
    versions = ["2.10.0", "2.99.0+cpu"]
    code = f"import torch\nfor torch.__version__ in {versions}:\n    try:\n        import axo.comm.extension\n"
    code += "    except ImportError as error:\n        print(error)\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    for version, said in zip(versions, done.stdout.splitlines(), strict=True):
        assert said.startswith(f"axo was built against torch {torch.__version__} and runs with torch {version};"), said
        assert re.search(r"axo supports torch<2\.\d+,>=2\.\d+: with one of those, install axo again", said), said
