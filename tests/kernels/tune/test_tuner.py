"""The tuner and its cache. Speed is not tested here (bench/gemm.py prints it): clocks are replaced where one must
win."""

import json
import os
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import axo_kernels.tune.runners as runners_module
import axo_kernels.tune.tuner as tuner_module
from axo.cli import tune as command
from axo_kernels import FusedCommunicator, Tuner
from axo_kernels.fused.chunks import chunk_order
from axo_kernels.fused.fp8 import all_gather_matmul_fp8
from axo_kernels.fused.workspace import Workspaces
from axo_kernels.gemm.layout import DTYPES, LAYOUTS, Product, stored_shapes
from axo_kernels.gemm.tiles import Config
from axo_kernels.tune.cache import Cache
from axo_kernels.tune.choice import Choice, from_json, fused_choices, fused_name, vendor_choices
from axo_kernels.tune.timing import Timing, paired, relative_error
from axo_kernels.tune.tuner import runner
from bench.lib.accuracy import matmul_reference
from bench.lib.simulated import SimulatedCommunicator
from tests.launcher import run_ranks

CPU = torch.device("cpu")
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
VERSIONS = {"torch": "1", "triton": "none"}


@pytest.fixture
def cache(tmp_path):
    return Cache("a device", VERSIONS, tmp_path)


def rigged(winner, calls, device, rounds=0, warmup=0, budget=0):
    """Stands for the clock: runs every call once, and lets the one at index ``winner`` win by half."""
    for call in calls:
        call()
    best = min(winner, len(calls) - 1)
    return [Timing(1.0 - 0.5 * (index == best), 1.0 - 0.5 * (index == best), 0.9) for index in range(len(calls))]


@pytest.mark.parametrize("stored", LAYOUTS)
@pytest.mark.parametrize("mode", LAYOUTS)
def test_every_mode_computes_the_same_product(stored, mode):
    generator = torch.Generator().manual_seed(1)
    a = torch.randn((8, 6) if stored == "TN" else (6, 8), generator=generator)
    b = torch.randn((5, 8) if stored == "NT" else (8, 5), generator=generator)
    reference = matmul_reference(a, b, stored)
    run = runner(Choice("vendor", mode), stored)
    assert relative_error(run(a, b), reference) < 1e-6
    out = torch.ones(6, 5)
    run(a, b, out=out, accumulate=True)
    assert relative_error(out, reference + 1) < 1e-6
    bias = torch.randn(5)
    assert relative_error(run(a, b, bias=bias), reference + bias.double()) < 1e-6
    if stored != "TN":
        deep = a.view(3, 2, 8)
        assert relative_error(run(deep, b), reference.view(3, 2, 5)) < 1e-6


def test_the_command_names_the_kernels_dtypes():
    """axo tune has them by name: it refuses others before torch is imported."""
    assert [getattr(torch, name) for name in command.DTYPES] == list(DTYPES)


def test_candidates_count_the_copies():
    product = Product("NT", 2048, 4096, 1024, torch.float32)
    assert {choice.layout for choice in vendor_choices(product, 1.0)} == set(LAYOUTS)
    skinny = Product("NT", 2, 4096, 4096, torch.float32)
    assert [choice.layout for choice in vendor_choices(skinny, 4.0)] == ["NT"], "a copy of the weight is hopeless"


@pytest.mark.parametrize("winner", [0, 1, 2])
def test_the_fastest_right_candidate_wins(cache, monkeypatch, winner):
    monkeypatch.setattr(tuner_module, "paired", partial(rigged, winner))
    seen = []
    tuner = Tuner("first-step", cache=cache, progress=lambda *told: seen.append(told))
    product = Product("NT", 512, 256, 128, torch.float32)
    choices = vendor_choices(product, 4.0)
    assert len(choices) == 3
    assert tuner.choose(product, CPU).layout == choices[winner].layout
    assert tuner.measured == 1 and seen[-1] == (3, 3, f"matmul {product.name}")


def test_of_several_that_gain_the_fastest_wins(cache, monkeypatch):
    def falling(calls, device, rounds=0, warmup=0, budget=0):
        ratios = (1.0, 0.6, 0.7)[: len(calls)]
        return [Timing(ratio, ratio, ratio) for ratio in ratios]

    monkeypatch.setattr(tuner_module, "paired", falling)
    product = Product("NT", 512, 256, 128, torch.float32)
    chosen = Tuner("first-step", cache=cache).choose(product, CPU)
    assert chosen.layout == vendor_choices(product, 4.0)[1].layout and chosen.baseline == 1.0


def test_a_gain_within_the_noise_is_no_gain(cache, monkeypatch):
    def close(calls, device, rounds=0, warmup=0, budget=0):
        return [Timing(1.0, 1.0 - 0.02 * index, 0.99) for index, _ in enumerate(calls[:2])] + [
            Timing(0.9, 0.9, 1.05) for _ in calls[2:]
        ]

    monkeypatch.setattr(tuner_module, "paired", close)
    tuner = Tuner("first-step", cache=cache)
    assert tuner.choose(Product("NN", 512, 256, 128, torch.float32), CPU).layout == "NN"


def test_a_wrong_candidate_is_never_timed(cache, monkeypatch):
    """Break the path that lays operands out anew: the candidate that uses it must drop out, however fast it is."""
    timed = []

    def fastest_last(calls, device, rounds=0, warmup=0, budget=0):
        timed.append(len(calls))
        return [Timing(1.0 / (index + 1), 1.0 / (index + 1), 0.5) for index, _ in enumerate(calls)]

    monkeypatch.setattr(tuner_module, "paired", fastest_last)
    monkeypatch.setattr(runners_module, "laid_out", lambda tensor: tensor.mT.contiguous() * 1.01)
    tuner = Tuner("first-step", cache=cache)
    assert tuner.choose(Product("NT", 512, 256, 128, torch.float32), CPU).layout == "NT"
    assert timed == [1, 1]


def test_no_more_rounds_than_are_asked_for(cache, monkeypatch):
    """Of a quick product the budget alone would take the most; a bench of many products has no time for that."""
    asked = []

    def quick(calls, device, rounds=0, warmup=0, budget=0):
        asked.append(rounds)
        return [Timing(1e-6, 1.0, 1.0) for _ in calls]

    monkeypatch.setattr(tuner_module, "paired", quick)
    for rounds in (25, 9):
        tuner = Tuner("first-step", cache=cache, budget=0.3, rounds=rounds)
        tuner.choose(Product("NT", 512, 256, 128 + rounds, torch.float32), CPU)
    assert asked == [3, 25, 3, 9]


def test_what_is_not_timed_says_why(cache, monkeypatch):
    """One that does not launch, one that is wrong; one after which the device is dead is named by the error."""
    product = Product("NT", 512, 256, 128, torch.float32)
    plain = runners_module.vendor_matmul

    def broken(a, b, layout="NN", *rest, **more):
        if layout == "NN":
            raise ValueError("PassManager::run failed\n\nptxas fatal")
        return plain(a, b, layout, *rest, **more) * (1.01 if layout == "TN" else 1.0)

    monkeypatch.setattr(runners_module, "vendor_matmul", broken)
    monkeypatch.setattr(tuner_module, "paired", partial(rigged, 2))
    tuner = Tuner("first-step", cache=cache)
    assert tuner.choose(product, CPU).layout == "NT"
    assert {one.choice: one.why for one in tuner.left_out} == {
        "NN vendor": "ValueError: PassManager::run failed ... ptxas fatal",
        "TN vendor": "off by 1.0e-02",
    }
    assert {one.name for one in tuner.left_out} == {f"matmul {product.name}"}

    def dead(device):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(tuner_module.torch.cuda, "synchronize", dead)
    operands = [torch.randn(shape) for shape in stored_shapes(product)]
    run = lambda choice, operands: broken(*operands, choice.layout)  # noqa: E731
    with pytest.raises(RuntimeError, match="the device has stopped working in 'NN vendor': ValueError: PassManager"):
        tuner._complaint(Choice("vendor", "NN"), product, operands, operands[0], run, torch.device("cuda"))


def test_off_cached_and_first_step(cache, monkeypatch):
    monkeypatch.setattr(tuner_module, "paired", partial(rigged, 1))
    product = Product("NT", 512, 256, 128, torch.float32)
    a, b = torch.randn(512, 128), torch.randn(256, 128)
    for mode in ("off", "cached"):
        idle = Tuner(mode, cache=cache)
        assert torch.equal(idle.matmul(a, b, "NT"), torch.nn.functional.linear(a, b))
        assert idle.measured == 0 and idle.calls == 1
    active = Tuner("first-step", cache=cache)
    assert relative_error(active.matmul(a, b, "NT"), matmul_reference(a, b, "NT")) < 1e-6
    assert active.measured == 1 and cache.path.exists()
    for _ in range(3):
        active.matmul(a, b, "NT")
    assert active.measured == 1 and active.calls == 4
    later = Tuner("cached", cache=Cache("a device", VERSIONS, cache.path.parent))
    assert later.choose(product, CPU) == active.choose(product, CPU) and later.measured == 0
    assert later.choose(product, CPU).layout != "NT"
    other = Tuner("cached", cache=Cache("another device", VERSIONS, cache.path.parent))
    assert other.choose(product, CPU).layout == "NT", "another device's choices are foreign"


def test_environment_chooses_the_mode(monkeypatch, cache):
    monkeypatch.setenv("AXO_TUNE", "off")
    assert Tuner(cache=cache).mode == "off"
    monkeypatch.delenv("AXO_TUNE")
    assert Tuner(cache=cache).mode == "cached"
    monkeypatch.setenv("AXO_TUNE", "always")
    with pytest.raises(ValueError, match="AXO_TUNE='always' is not a mode; use one of off, cached, first-step"):
        Tuner(cache=cache)


def test_gradients_flow_through_every_choice(cache, monkeypatch):
    for winner in range(3):
        monkeypatch.setattr(tuner_module, "paired", partial(rigged, winner))
        folder = cache.path.parent / str(winner)
        tuner = Tuner("first-step", cache=Cache("a device", VERSIONS, folder))
        a, b = torch.randn(2, 256, 128, requires_grad=True), torch.randn(256, 128, requires_grad=True)
        grad = torch.randn(2, 256, 256)
        got = torch.autograd.grad(tuner.matmul(a, b, "NT"), (a, b), grad)
        expected = torch.autograd.grad(torch.nn.functional.linear(a, b), (a, b), grad)
        for mine, theirs in zip(got, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)  # sums of 512 terms in another order


@pytest.mark.parametrize(
    "damage",
    [
        "",
        "{",
        "[]",
        "null",
        '{"format": 1}',
        '{"format": 99, "entries": {}}',
        "\x00\xff",
        '{"entries": {"matmul NT 512x256x128 float32": 3}}',
    ],
)
def test_a_damaged_or_foreign_file_is_a_miss(cache, damage):
    cache.path.parent.mkdir(parents=True, exist_ok=True)
    cache.path.write_text(damage)
    assert cache.get("matmul NT 512x256x128 float32") is None
    cache.put({"key": Choice("vendor", "NN").to_json()})
    assert from_json(Cache("a device", VERSIONS, cache.path.parent).get("key")) == Choice("vendor", "NN")


@pytest.mark.parametrize(
    "change",
    [
        {"backend": "magic"},
        {"layout": "XX"},
        {"strategy": "hope"},
        {"chunks": 0},
        {"chunks": "four"},
        {"chunks": 2.5},
        {"seconds": True},
        {"config": {"block_m": 3}},
        {"config": 5},
        {"extra": 1},
        {"seconds": None},
        {"strategy": "signal", "config": None},
        {"backend": "vendor", "config": None, "strategy": "signal"},
    ],
)
def test_a_foreign_entry_is_a_miss(change):
    good = Choice("triton", "NT", Config(128, 256, 64, descriptors=True), "split", 4, 1.0, 2.0)
    assert from_json(json.loads(json.dumps(good.to_json()))) == good
    assert from_json(good.to_json() | change) is None


def test_an_entry_that_cannot_run_here_is_a_miss(cache):
    """A right file's damaged entry: a tile without a GPU, a tile that fits nothing."""
    product = Product("NT", 64, 64, 64, torch.float32)
    for damaged in (Choice("triton", "NT"), Choice("triton", "NT", Config(96, 32, 32))):
        cache.put({f"matmul {product.name}": damaged.to_json()})
        tuner = Tuner("cached", cache=cache)
        assert tuner.choose(product, CPU) == Choice("vendor", "NT")


def test_a_user_without_a_home_has_a_cache_too(monkeypatch):
    from axo_kernels.tune.cache import default_folder

    def homeless():
        raise RuntimeError("Could not determine home directory.")

    for name in ("AXO_TUNE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pathlib.Path.home", homeless)
    assert default_folder().name == "tuner"


def test_a_measured_tile_gives_way_where_a_wider_result_does_not_fit(monkeypatch):
    from axo_kernels.gemm.tiles import TARGETS

    given = []
    monkeypatch.setattr(runners_module, "target_of", lambda device: TARGETS["sm_90"])
    monkeypatch.setattr(runners_module, "matmul", lambda *_, config, **__: given.append(config))
    monkeypatch.setattr(runners_module, "triton_matmul", lambda *all: (given.append(all[-1]), None))
    tile = Config(128, 256, 64, stages=4, descriptors=True, parts=2)
    a, b = torch.ones(256, 64, dtype=torch.bfloat16), torch.ones(256, 64, dtype=torch.bfloat16)
    run = runner(Choice("triton", "NT", tile), "NT")
    for more in ({}, {"out_dtype": torch.float32}, {"out": torch.ones(256, 256)}):
        run(a, b, **more)
    assert given == [tile, None, None]


def test_the_cache_survives_a_folder_that_cannot_be_written(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    cache = Cache("a device", VERSIONS, blocked / "below")
    cache.put({"key": {"value": 1}})
    assert cache.get("key") == {"value": 1}


def write_or_read(folder):
    """Ranks 0 and 1 write thirty times, as processes with a cache of their own; rank 2 reads meanwhile, and counts."""
    rank, reads = int(os.environ["RANK"]), 0
    path, ended = Cache("a device", VERSIONS, folder).path, [folder / "0.ended", folder / "1.ended"]
    if rank < 2:
        for n in range(30):
            Cache("a device", VERSIONS, folder).put({"ab"[rank]: {"n": n}})
        ended[rank].touch()
    while rank == 2 and not all(file.exists() for file in ended):
        if path.exists():
            json.loads(path.read_text())  # raises on half a file
            reads += 1
        time.sleep(0.001)
    return reads


def test_two_writers_never_leave_half_a_file(tmp_path):
    assert run_ranks(write_or_read, 3, tmp_path)[2] > 0
    assert not list(tmp_path.glob("*.tmp"))


def check_ranks_agree(folder):
    """Each rank's clock prefers another strategy; all must take the one that is fastest on the slowest rank."""
    import torch.distributed as dist

    from axo_kernels import adapt

    dist.init_process_group("gloo")
    comm = adapt(dist.group.WORLD)
    product = Product("NT", 64, 32, 16, torch.float32)
    sums = Product("NN", 64, 32, 16, torch.float32)

    def clock(calls, device, rounds=0, warmup=0, budget=0):
        # serial 1.0; split/2 is fast on rank 0 alone; split/4 is rather fast everywhere
        mine = {1: 1.0, 2: 0.2 if comm.rank == 0 else 1.3, 4: 0.5 + 0.01 * comm.rank, 8: 0.9}
        chunks = [call.args[-2].chunks for call in calls]  # the choice that a call was made of
        return [Timing(mine[count], mine[count], 0.9) for count in chunks]

    tuner_module.paired = clock
    own = Cache("a device", VERSIONS, folder / str(comm.rank))
    tuner = Tuner("first-step", comm=comm, cache=own)
    asked = {operation: sums if operation.endswith("dw") else product for operation in tuner_module.FUSED}
    choices = [tuner.choose_fused(operation, asked[operation], CPU) for operation in asked]
    again = Tuner("cached", comm=comm, cache=own)  # only rank 0 has a file: its choice is everybody's
    assert [again.choose_fused(operation, asked[operation], CPU) for operation in asked] == choices
    assert again.measured == 0 and own.path.exists() == (comm.rank == 0)
    return [(choice.strategy, choice.chunks, choice.seconds) for choice in choices]


def test_ranks_make_one_choice_by_the_slowest(tmp_path):
    found = run_ranks(check_ranks_agree, 2, tmp_path)
    assert found[0] == found[1] == [("split", 4, 0.51)] * len(tuner_module.FUSED)


def test_fused_choices_need_a_communicator(cache):
    with pytest.raises(ValueError, match="give Tuner"):
        Tuner("cached", cache=cache).choose_fused("matmul_all_reduce", Product("NT", 4, 4, 4, torch.float32), CPU)
    with pytest.raises(ValueError, match="use one of all_gather_matmul"):
        Tuner("cached", cache=cache).choose_fused("all_reduce", Product("NT", 4, 4, 4, torch.float32), CPU)


def test_what_fp8_may_choose():
    """The product is torch's alone, serial or in chunks; torch._scaled_mm takes 16 rows, or a multiple of them."""

    def names(rows, device):
        product = Product("NT", 4096, rows, 4096, torch.bfloat16)
        found = fused_choices(
            "all_gather_matmul_fp8", product, torch.device(device), "b", FusedCommunicator(0, 4), pytest.fail, {}
        )
        return [choice.name for choice in found]

    assert names(2048, "cuda") == ["NT vendor", "NT vendor split/2", "NT vendor split/4", "NT vendor split/8"]
    assert names(2040, "cuda") == names(64, "cuda") == ["NT vendor"]
    assert names(32, "cpu") == ["NT vendor", "NT vendor split/2", "NT vendor split/4"]


@pytest.mark.parametrize("winner, strategy", [(0, "serial"), (1, "split")])
def test_fp8_runs_as_the_clock_says(cache, monkeypatch, winner, strategy):
    """The candidates that are timed are the operation itself, serial and split."""
    monkeypatch.setattr(tuner_module, "paired", partial(rigged, winner))
    comm = SimulatedCommunicator(4, 1e15, CPU)
    tuner = Tuner("first-step", cache=cache, comm=FusedCommunicator(0, 1))
    product = Product("NT", 64, 32, 64, torch.bfloat16)
    choice = tuner.choose_fused("all_gather_matmul_fp8", product, CPU, on=comm)
    assert choice.strategy == strategy and {ran.operation for ran in comm.ran} == {"all_gather_matmul_fp8"}
    assert {ran.strategy for ran in comm.ran} == {"serial", "split"}
    a, shard = torch.randn(64, 64), torch.randn(32, 64)
    all_gather_matmul_fp8(a, shard, comm, strategy=choice.strategy, chunks=choice.chunks)
    assert (comm.ran[-1].strategy, comm.ran[-1].chunks) == (choice.strategy, choice.chunks)
    assert Tuner("cached", cache=cache, comm=FusedCommunicator(0, 1)).choose_fused(
        "all_gather_matmul_fp8", product, CPU, on=comm
    ) == tuner_module.from_json(choice.to_json())


class Windowed(SimulatedCommunicator):
    """Has windows; buffers that were asked for are counted."""

    without_windows, buffers = "", 0

    def windowed(self):
        return self

    def empty(self, shape, dtype, device):
        self.buffers += 1
        return torch.empty(shape, dtype=dtype, device=device)


def test_gathers_in_windows_are_timed_beside_the_others_and_win_where_they_are_faster(cache, monkeypatch):
    product = Product("NT", 64, 32, 64, torch.float32)
    ask = ("all_gather_matmul", product, CPU)

    def clock(windows, calls, device, rounds=0, warmup=0, budget=0):
        choices = [call.args[-2] for call in calls]  # that a call was made of
        [call() for call in calls]
        times = [0.5 if (each.chunks, each.windows) == (2, windows) else 1.0 for each in choices]
        return [Timing(each, each, 0.9) for each in times]

    for windows in (False, True):
        monkeypatch.setattr(tuner_module, "paired", partial(clock, windows))
        comm = Windowed(4, 1e15, CPU)
        fresh = Cache("a device", VERSIONS, cache.path.parent / str(windows))
        tuner = Tuner("first-step", cache=fresh, comm=FusedCommunicator(0, 1))
        choice = tuner.choose_fused(*ask, on=comm)
        assert (choice.strategy, choice.chunks, choice.windows) == ("split", 2, windows)
        assert choice.name == f"NT vendor split/2{' in windows' if windows else ''}" and comm.buffers
        assert [(left.choice, left.why) for left in tuner.left_out] == [("push", "is for sums")]
        other = SimulatedCommunicator(4, 1e15, CPU)
        again = Tuner("cached", cache=fresh, comm=FusedCommunicator(0, 1))
        assert again.choose_fused(*ask, on=comm) == choice and from_json(choice.to_json()) == choice
        assert again.choose_fused(*ask, on=other) == Choice("vendor", "NT"), "chosen where there are windows"
    tuner = Tuner("first-step", cache=cache, comm=FusedCommunicator(0, 1))
    tuner.choose_fused(*ask, on=other)
    told = {left.choice: left.why for left in tuner.left_out}
    assert told == {"push": "is for sums", "windows": "SimulatedCommunicator has none"}
    with pytest.raises(ValueError, match="windows=True: SimulatedCommunicator has none; use windows=False"):
        runners_module.run_fused(
            "all_gather_matmul", "b", other, "NT", choice, [torch.ones(64, 64), torch.ones(32, 64)]
        )


def test_a_push_is_a_candidate_where_kernels_reach_the_peers(cache, monkeypatch):
    """With every tile of the fused kernel, once: it has no chunks. On disk it is a miss where nothing reaches them."""
    from axo_kernels.gemm.tiles import TARGETS
    from axo_kernels.tune import choice as choice_module

    monkeypatch.setattr(choice_module.devices, "runs_triton", lambda device: True)
    monkeypatch.setattr(choice_module.devices, "target_of", lambda device: TARGETS["sm_90"])
    product, cuda = Product("NT", 4096, 4096, 4096, torch.bfloat16), torch.device("cuda", 0)
    on = FusedCommunicator(0, 2)
    asked = ("matmul_reduce_scatter", product, cuda, "b", on, lambda product, device: Choice("vendor", "NT"))
    assert not any(each.strategy == "push" for each in fused_choices(*asked, {"push": "no"}))
    pushes = [each for each in fused_choices(*asked, {"windows": "no"}) if each.strategy == "push"]
    assert len(pushes) == len({each.config for each in pushes}) == 3 and {each.chunks for each in pushes} == {1}
    assert all(from_json(each.to_json()) == each for each in pushes)
    plan = runners_module.way_of(pushes[0], "NT")
    assert (plan.strategy, plan.config, plan.multiply) == ("push", pushes[0].config, None)
    monkeypatch.setattr(tuner_module, "usable", lambda *all: True)
    monkeypatch.setattr(Tuner, "_kernel_complaint", lambda *all: "")
    cache.put({fused_name("matmul_reduce_scatter", "b", on, product, push=True): pushes[0].to_json()})
    apart = FusedCommunicator(0, 2)
    on._unreachable, apart._unreachable = "", "they are apart"
    tuner = Tuner("cached", cache=cache, comm=FusedCommunicator(0, 1))
    for line, found in ((on, pushes[0]), (apart, Choice("vendor", "NT")), (on, pushes[0])):  # two axes of one grid
        assert tuner.choose_fused("matmul_reduce_scatter", product, cuda, on=line) == found


def test_a_fused_candidate_that_fails_is_left_out(cache, monkeypatch):
    """It raises, or a kernel in it has reported. The others are timed, and what is no push leaves the room alone."""
    comm, real = SimulatedCommunicator(4, 1e15, CPU), tuner_module.run_fused
    comm.rooms.append(SimpleNamespace(workspaces=Workspaces()))

    def run(operation, gather, on, stored, choice, operands):
        if choice.chunks == 4:
            raise RuntimeError("out of memory")
        if choice.chunks == 8:
            silent = on.workspaces.get("a sum", chunk_order("all_reduce", 64, 8, 0, 4), "", CPU)
            silent.status.copy_(torch.tensor([1, 2, 3, 2], dtype=torch.int32))
        return real(operation, gather, on, stored, choice, operands)

    monkeypatch.setattr(tuner_module, "run_fused", run)
    tuner = Tuner("first-step", cache=cache, comm=FusedCommunicator(0, 1))
    assert tuner.choose_fused("matmul_all_reduce", Product("NT", 64, 32, 64, torch.float32), CPU, on=comm)
    told = {left.choice: left.why for left in tuner.left_out if left.choice != "push"}
    silent = told.pop("NT vendor split/8")
    assert silent.startswith("SignalTimeout: a sum: rank 0 of 4 waited ") and "for chunk 2 of epoch 3" in silent
    assert told.pop("NT vendor split/4") == "RuntimeError: out of memory" and set(told) == {"windows"}
    assert len(comm.rooms) == 1


@pytest.mark.parametrize("captured", [False, True])
def test_after_a_push_that_fails_the_next_has_another_room(cache, monkeypatch, captured):
    """One that a captured graph writes to stays, and still reports."""
    comm, push = FusedCommunicator(0, 1), Choice("triton", "NT", strategy="push")
    room = SimpleNamespace(workspaces=Workspaces(), epoch=SimpleNamespace(captured=captured))
    comm.rooms.append(room)

    def run(choice, operands):
        if choice is push:
            raise RuntimeError("out of memory")
        return operands[0] @ operands[1].T

    monkeypatch.setattr(Tuner, "_kernel_complaint", lambda *all: "")
    product = Product("NT", 8, 8, 8, torch.float32)
    Tuner("first-step", cache=cache)._measure("a sum", product, CPU, [Choice("vendor", "NT"), push], run, comm)
    assert not comm.rooms and comm.captured_rooms == [room] * captured


def test_a_choice_among_caps_is_a_miss_without_them_and_the_reverse(tmp_path):
    """Both kinds of communicator read one file; each takes what was chosen for its own kind."""
    product, operation = Product("NT", 64, 64, 64, torch.float32), "matmul_all_reduce"
    plain, capping = FusedCommunicator(0, 2), type("Capping", (FusedCommunicator,), {"caps": (4, 8)})(0, 2)
    plain._unreachable = capping._unreachable = "they are apart"
    kept = Choice("vendor", "NT", strategy="split", chunks=2)
    for written in (plain, capping):
        cache = Cache("a device", VERSIONS, tmp_path / type(written).__name__)
        cache.put({fused_name(operation, "b", written, product): kept.to_json()})
        for read in (plain, capping):
            tuner = Tuner("cached", cache=cache, comm=FusedCommunicator(0, 1))
            found = tuner.choose_fused(operation, product, CPU, on=read)
            assert found == (kept if read is written else Choice("vendor", "NT"))


def products_measured():
    tuner = Tuner(budget=0.01)
    tuner.matmul(torch.randn(96, 64), torch.randn(80, 64), "NT")
    return tuner.measured


def test_a_second_process_times_nothing(tmp_path):
    """The real clock, in three processes: those after the first start from its file."""
    counts = []
    for mode in ("first-step", "first-step", "cached"):
        counts += run_ranks(products_measured, 1, env={"AXO_TUNE": mode, "AXO_TUNE_CACHE": str(tmp_path)})
    assert counts == [1, 0, 0]


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_choice_is_never_slower_than_torch(cache, monkeypatch, dtype):
    """GPT shapes scaled down, 2,048 tokens: paired medians within 3% of torch's default, on every product.

    One thread, timed by its processor time, so that a busy machine does not decide.
    """
    from axo_kernels.tune import timing
    from axo_kernels.tune.model_shapes import layers

    monkeypatch.setattr(timing.time, "perf_counter", time.thread_time)
    torch.set_num_threads(1)
    tuner = Tuner("first-step", cache=cache)
    measured = 0
    for layer in layers("gpt-5b", rows=2048, shrink=8):
        for product in layer.products(dtype).values():
            choice = tuner.choose(product, CPU)
            a, b = (torch.randn(shape).to(dtype) for shape in stored_shapes(product))
            run = runner(choice, product.layout)
            default = partial(runner(Choice("vendor", product.layout), product.layout), a, b)
            timings = paired([default, partial(run, a, b)], CPU, rounds=15)
            print(f"{product.name}: {choice.name}, {timings[0].seconds * 1e3:.2f} ms, ratio {timings[1].ratio:.3f}")
            if timings[0].seconds >= 1e-3:
                measured += 1
                # the same call twice differs by up to 3% here, so only another choice than torch's own is held to it
                assert choice.layout == product.layout or timings[1].ratio <= 1.03, product.name
    assert measured >= 12


@pytest.mark.soak
def test_dispatch_costs_less_than_five_microseconds(cache):
    """Processor time of a tuned call over the same torch call, at a size where the product itself is nothing."""
    torch.set_num_threads(1)
    tuner = Tuner("cached", cache=cache)
    a, b = torch.randn(8, 8), torch.randn(8, 8)
    pairs = {
        "NT": (lambda: tuner.matmul(a, b, "NT"), lambda: torch.nn.functional.linear(a, b)),
        "NN": (lambda: tuner.matmul(a, b, "NN"), lambda: torch.matmul(a, b)),
        "TN": (lambda: tuner.matmul(a, b, "TN"), lambda: torch.matmul(a.mT, b)),
    }
    for layout, (mine, theirs) in pairs.items():
        extra = []
        for _ in range(9):
            seconds = []
            for call in (mine, theirs):
                started = time.thread_time()
                for _ in range(2000):
                    call()
                seconds.append(time.thread_time() - started)
            extra.append((seconds[0] - seconds[1]) / 2000)
        cost = sorted(extra)[len(extra) // 2]
        print(f"{layout}: {cost * 1e6:.2f} us a call")
        assert cost < 5e-6
