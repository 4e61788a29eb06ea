"""PyTorch's own backend tests (torch.testing._internal.distributed.distributed_test, CPU part) on the backend ``axo``.

The suite decides by the backend's *name* which tests exist: it is imported under the name of a CPU backend that it
knows (gloo) and then told the real one. Each rank imports it once and forks a process for each test, so that no test
sees what another left. A test that does not apply skips itself; how many skip is shown.

`make test` runs a handful at 4 ranks; ``pytest -m soak tests/comm/test_c10d_suite.py -s`` runs all at 2, 4 and 8.
"""

import importlib
import os
import select
import signal
import sys
import tempfile
import time
import traceback
import unittest
from datetime import timedelta

import pytest
import torch.distributed as dist

from tests.launcher import rank_outcomes

SAMPLE = [
    "test_DistributedDataParallelCPU",
    "test_all_gather_coalesced_with_empty",
    "test_all_reduce_sum_async",
    "test_all_to_all_full_group",
    "test_barrier_timeout_full_group",
    "test_batch_isend_irecv_gloo_tags",
    "test_get_future",
    "test_scatter_object_list",
    "test_send_recv_any_source",
    "test_send_recv_with_tag_torch_profiler",
    "test_sparse_all_reduce_sum",
]
# Tests that this backend cannot pass, with the reason.
NO_GPU = "moves tensors to a GPU, and decides by a name that it does not know"
GLOO_ONLY = "torch offers this for Gloo alone, by name"
NOT_OURS = {
    "test_SyncBatchNorm_process_group": "needs torchvision",
    "test_all_to_all_cuda": NO_GPU,
    "test_all_to_all_cuda_complex": NO_GPU,
    "test_all_to_all_full_group_cuda": NO_GPU,
    "test_all_to_all_group_cuda": NO_GPU,
    "test_batch_isend_irecv_mixed_backend_err": "needs NCCL and Gloo",
    "test_batch_isend_irecv_op_err": NO_GPU,
    "test_ddp_logging_data_cpu": "torch's logger calls every third-party backend 'custom'",
    "test_monitored_barrier_failure_order": GLOO_ONLY,
    "test_monitored_barrier_gloo": GLOO_ONLY,
    "test_monitored_barrier_gloo_rank_0_timeout": GLOO_ONLY,
    "test_monitored_barrier_gloo_subgroup": GLOO_ONLY,
    "test_monitored_barrier_wait_all_ranks": GLOO_ONLY,
}
# Tests that are written for one world size without saying so.
WORLD_OF = {"test_new_subgroups_with_group_param": 4}
# Tests that have a branch for each backend that they know by name: they take Gloo's.
LIKE_GLOO = "test_accumulate_gradients_no_sync"
PARTS = 4  # the suite runs in so many slices
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
TEST_LIMIT_S = 90


def load_suite():
    """The suite's module and a test class of our own, with the backend's real name set."""
    os.environ.update(BACKEND="gloo", INIT_METHOD="env://", TEMP_DIR=os.environ["SUITE_DIR"])
    suite = importlib.import_module("torch.testing._internal.distributed.distributed_test")
    suite.BACKEND = os.environ["BACKEND"] = "axo"

    class Suite(suite.TestDistBackend, suite.DistributedTest._DistTestBase):
        def runTest(self):  # unittest wants a method to name
            pass

    return suite, Suite


def applicable(world):
    """The tests that this backend and a world of so many ranks can pass."""
    names = sorted(name for name in dir(load_suite()[1]) if name.startswith("test_"))
    return [name for name in names if name not in NOT_OURS and WORLD_OF.get(name, world) == world]


def all_come(store, key):
    """Wait for all ranks. The suite's own runner starts them at once; here one may still be at the test before, and a
    test's time limit, 5 s for some, must not begin without it."""
    store.add(key, 1)
    end = time.monotonic() + TEST_LIMIT_S
    while store.add(key, 0) < int(os.environ["WORLD_SIZE"]) and time.monotonic() < end:
        time.sleep(0.01)


def run_one(suite, case, name, pipe):
    """In a process of its own: one test between the set-up and the end that the suite's own runner has."""
    outcome, note = PASSED, ""
    try:
        test = case()
        test._testMethodName = name
        test.rank = int(os.environ["RANK"])
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False)
        seconds = suite.CUSTOM_PG_TIMEOUT.get(name, suite.default_pg_timeout)
        limits = {"timeout": timedelta(seconds=seconds), "store": dist.PrefixStore(name, store)}
        all_come(store, f"{name}/come")
        dist.init_process_group("axo", rank=test.rank, world_size=int(os.environ["WORLD_SIZE"]), **limits)
        test._barrier()
        if name.startswith(LIKE_GLOO):
            suite.BACKEND = "gloo"
        getattr(test, name)()
        test._barrier()
        if dist.is_initialized():
            dist.destroy_process_group()
    except unittest.SkipTest as skip:
        outcome, note = SKIPPED, str(skip)
    except SystemExit as skip:  # the suite's decorators leave with a code of their own
        reasons = {value.exit_code: value.message for value in suite.TEST_SKIPS.values()}
        outcome, note = (SKIPPED, reasons[skip.code]) if skip.code in reasons else (FAILED, f"exit {skip.code}")
    except BaseException:
        outcome, note = FAILED, traceback.format_exc()
    os.write(pipe, f"{outcome}\n{note}".encode()[:60_000])


def run_suite(names):
    """On a rank: every test in a forked process; -> name: (outcome, note)."""
    suite, case = load_suite()
    results = {}
    for name in names:
        os.environ["TEMP_DIR"] = suite.TEMP_DIR = os.path.join(os.environ["SUITE_DIR"], name)
        for folder in ("barrier", "test_dir", "init_dir"):
            os.makedirs(os.path.join(os.environ["TEMP_DIR"], folder), exist_ok=True)
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reader)
            run_one(suite, case, name, writer)
            sys.stdout.flush()
            os._exit(0)
        os.close(writer)
        results[name] = collect(reader, pid)
    return results


def collect(reader, pid):
    data, end = b"", time.monotonic() + TEST_LIMIT_S
    while select.select([reader], [], [], max(0, end - time.monotonic()))[0]:
        piece = os.read(reader, 65_536)
        data += piece
        if not piece:
            break
    else:
        os.kill(pid, signal.SIGUSR2)
        time.sleep(0.2)
        os.kill(pid, signal.SIGKILL)
    os.close(reader)
    status = os.waitpid(pid, 0)[1]
    if not data:
        return FAILED, f"no answer (status {status})"
    outcome, _, note = data.decode(errors="replace").partition("\n")
    return outcome, note


def combined(world, names, timeout):
    """Outcome of each test over all ranks: failed if it failed on one, passed if it passed on one, else skipped."""
    with tempfile.TemporaryDirectory() as folder:
        options = {"env": {"SUITE_DIR": folder}, "preload": ("torch.testing._internal.common_distributed",)}
        outcomes = rank_outcomes(run_suite, world, names, timeout=timeout, **options)
    for outcome in outcomes:
        assert outcome.ok, outcome.describe() + outcome.traceback + outcome.output
    return over_all_ranks([outcome.value for outcome in outcomes])


def over_all_ranks(results):
    """Outcome of each test from those of all ranks."""
    result = {}
    for name in results[0]:
        ranks = [of_rank[name] for of_rank in results]
        kinds = {kind for kind, _ in ranks}
        kind = FAILED if FAILED in kinds else PASSED if PASSED in kinds else SKIPPED
        result[name] = (kind, next(note for rank_kind, note in ranks if rank_kind == kind))
    return result


def test_a_handful_of_torchs_tests():
    pytest.importorskip("expecttest", reason="PyTorch's tests need it; `make test` installs it")
    results = combined(4, SAMPLE, timeout=200)
    failures = {name: note for name, (kind, note) in results.items() if kind != PASSED}
    assert not failures, "\n".join(f"{name}: {note}" for name, note in failures.items())


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("world", "part"), [(world, part) for world in (2, 4, 8) for part in range(PARTS)])
def test_all_of_torchs_tests(world, part):
    with tempfile.TemporaryDirectory() as folder:
        (outcome,) = rank_outcomes(applicable, 1, world, env={"SUITE_DIR": folder})
    assert outcome.ok, outcome.traceback
    check_all(f"{world} ranks", combined(world, outcome.value[part::PARTS], timeout=3000), 80 // PARTS)


def check_all(where, results, least):
    """No test fails, and ``least`` pass; slices of the suite differ by a few."""
    by_kind = {kind: [n for n, (k, _) in results.items() if k == kind] for kind in (PASSED, FAILED, SKIPPED)}
    print(f"\n{where}: " + ", ".join(f"{len(found)} {kind}" for kind, found in by_kind.items()))
    for name in by_kind[FAILED]:
        print(f"FAILED {name}\n{results[name][1]}")
    assert len(by_kind[PASSED]) >= least
    assert not by_kind[FAILED], by_kind[FAILED]
