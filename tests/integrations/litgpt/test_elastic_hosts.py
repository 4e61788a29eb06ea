"""axo litgpt pretrain --elastic --hosts: a host is lost, and the run goes on from the memory of the other.

Hosts share no /dev/shm, process or parent, and each has a folder of its own for the run.
"""

import time
from pathlib import Path

import pytest
import torch

from tests.hosts import Hosts, available, python
from tests.integrations.runs import NOT_TORCHRUN, STEPS, arguments, losses_of
from tests.integrations.support import distance

pytestmark = pytest.mark.hosts
WHY_NOT = available()
if WHY_NOT:
    pytest.skip(f"no hosts can be made here: {WHY_NOT}", allow_module_level=True)

# axo litgpt that waits after seven steps until there is a file "on" in the folder of the run.
PROGRAM = """
import sys, time
from pathlib import Path
from axo.integrations.fabric.step_agreement import StepAgreement
before, out = StepAgreement.before_step, Path(sys.argv[sys.argv.index("--out_dir") + 1])
def wait(self, comms):
    while self.step == 7 and not (out / "on").exists():
        (out / "waits").touch()
        time.sleep(0.01)
    before(self, comms)
StepAgreement.before_step = wait
from axo.cli.main import main
main()
"""


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_host_costs_a_few_steps_and_no_file(folder, whole, lost):
    """Oracle: the undisturbed run on one host. The lost one is that of rank 0, which wrote the log, or the other."""
    (out := folder / f"host-{lost}").mkdir()
    with Hosts(2) as hosts:
        for host in hosts:
            host.run("mount", "-t", "tmpfs", "tmpfs", str(out))
        addresses = ",".join(host.address for host in hosts)
        given = arguments(folder, out.name, "--elastic", "2:4", "--hosts", addresses, "--copy-every", "3", save=100)
        environment = dict.fromkeys(NOT_TORCHRUN) | {"AXO_SECRET": "s" * 32, "OMP_NUM_THREADS": "1"}
        launchers = hosts.start(python(PROGRAM, "litgpt", *given), 1, **environment)
        folders, left = [Path(f"/proc/{host._inside.pid}/root{folder}") for host in hosts], 1 - lost
        end = time.monotonic() + 240
        while not all((each / out.name / "waits").exists() for each in folders):
            assert time.monotonic() < end and None in [each.poll() for each in launchers], hosts.output(0)
            time.sleep(0.02)
        hosts[lost].lose_power()
        (folders[left] / out.name / "on").touch()
        assert launchers[left].wait(240) == 0, hosts.output(left)
        said = " ".join(hosts.output(left).split())
        assert f"axo litgpt: host {hosts[lost].address} is lost; goes on with 2 ranks on grid 1x1x2x1" in said, said
        assert "Resuming training from /dev/shm/axo-ranks-" in said and "recovered from step 6" in said, said
        losses = {step: loss for each in folders for step, loss in losses_of(each, out.name).items()}
        assert losses == pytest.approx(whole[0], abs=1e-4) and sorted(losses) == list(range(1, STEPS + 1))
        state = torch.load(folders[left] / out.name / "final" / "lit_model.pth", weights_only=True)
        assert distance(state["model"], whole[1]["model"]) < 1e-5
