"""The kernel for Hopper, which nothing here can run: its barriers in a model, its machine code, who is let near it."""

import itertools
import warnings
from dataclasses import replace

import pytest
import torch

from axo_kernels import Tuner
from axo_kernels.gemm.layout import Product, as_row_major
from axo_kernels.gemm.tiles import HOPPER, TARGETS, accumulating, candidates, estimate
from axo_kernels.tune import choice as choice_module
from axo_kernels.tune import runners
from axo_kernels.tune import trust as trust_module
from axo_kernels.tune import tuner as tuner_module
from axo_kernels.tune.cache import Cache
from axo_kernels.tune.choice import Choice, from_json
from axo_kernels.tune.timing import Timing
from axo_kernels.tune.trust import shape_class
from bench.lib import launches
from bench.tools.assembly import grouped_complaints, loop_bodies, meeting_complaints

from .ring_model import Ring, explore

# Stages, tiles of a program, steps: rings that never wrap, that wrap inside a tile and between tiles.
SIZES = [(2, 1, 1), (2, 2, 1), (2, 3, 2), (3, 2, 1), (2, 1, 4)]


@pytest.mark.parametrize("pingpong", [True, False], ids=["pingpong", "shared"])
def test_no_order_of_events_stops_the_ring_or_spoils_it(pingpong):
    counts = [explore(Ring(pingpong, *sizes, parts=1 + (sizes[2] == 1))) for sizes in SIZES]
    assert all(not wrong for _, wrong in counts), counts
    assert sum(states for states, _ in counts) > 5_000, "too few states to be all orders"


# With halves of a tile both groups go on together, so that states are many more.
LARGER = {
    True: [(2, 4, 3), (3, 3, 3), (3, 4, 2), (4, 3, 2), (4, 2, 4), (5, 2, 3)],
    False: [(2, 3, 3), (3, 2, 2), (3, 3, 1), (4, 2, 1)],
}


@pytest.mark.soak
@pytest.mark.parametrize("pingpong", [True, False], ids=["pingpong", "shared"])
def test_larger_rings(pingpong):
    counts = [explore(Ring(pingpong, *sizes, parts=2)) for sizes in LARGER[pingpong]]
    assert all(not wrong for _, wrong in counts), counts
    print(f"{sum(states for states, _ in counts)} states")


BROKEN = {
    "first phase": "nobody can go on",
    "phase never turns": "",
    "empty counts one group": "",
    "too few bytes": "",
    "gives back what is read": "a buffer is filled while a product reads it",
    "two left in flight": "a buffer is filled while a product reads it",
    "last stage kept": "nobody can go on",
    "buffer in use": "a buffer is written while it is stored",
    "position": "",
    "no order": "a product reads what is not there",
}


@pytest.mark.parametrize("broken", BROKEN)
def test_the_model_finds_what_is_broken(broken):
    found = explore(Ring(True, 2, 3, 3, broken=broken))[1] or explore(Ring(False, 2, 3, 3, broken=broken))[1]
    assert found and (not BROKEN[broken] or BROKEN[broken] == found), found


MEETINGS = [  # both ways, tiles of a chunk: one, several, one less in the last
    (Ring(pingpong, 2, tiles, steps, meets=meets, chunk=chunk))
    for meets in ("wait", "signal")
    for pingpong in (True, False)
    for tiles, steps, chunk in ((1, 2, 1), (2, 1, 1), (2, 1, 2), (3, 1, 2))
    if (pingpong or tiles < 3)
]


def test_no_order_of_events_is_wrong_where_the_kernel_meets_a_stream():
    counts = [explore(ring) for ring in MEETINGS]
    assert all(not wrong for _, wrong in counts), counts
    assert min(states for states, _ in counts) > 30 and sum(states for states, _ in counts) > 5_000


COME, LOST = "a copy reads what has not come", "what has not come is stored as if it had"
STORED = "a flag is set before all that it stands for is known to be in memory"
UNMET = {
    "wait": {"flag": COME, "no acquire": COME, "fence": COME, "fence first": COME, "mark": LOST, "looks first": LOST},
    "signal": {
        "buffer alone": STORED, "no barrier": STORED, "count relaxed": STORED, "no release": STORED,
        "every tile": STORED, "half": STORED, "count kept": "a flag is not set, or a counter not empty",
    },
}  # fmt: skip


@pytest.mark.parametrize("meets, broken", [(meets, broken) for meets in UNMET for broken in UNMET[meets]])
def test_the_model_finds_what_is_broken_at_flags(meets, broken):
    """In halves, two tiles of which are a chunk: counted by both groups."""
    assert explore(Ring(False, 2, 2, 1, meets=meets, chunk=2, broken=broken))[1] == UNMET[meets][broken]


def test_rings_that_cannot_turn():
    """A stage is given back while the next is read, so one is too few; nor may one group wait longer than the ring."""
    assert explore(Ring(True, 1, 1, 2))[1] == explore(Ring(False, 1, 1, 2))[1] == "nobody can go on"
    assert explore(Ring(False, 2, 1, 5, head=4))[1] == "nobody can go on"
    assert not replace(HOPPER[0], stages=1).fits(TARGETS["sm_90"], torch.bfloat16)


def test_candidates_on_hopper_alone():
    """bf16 and fp16 that descriptors can describe; and a buffer of fp32 fits where a master gradient is added to."""
    for arch, target in TARGETS.items():
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for described in (True, False):
                found = candidates(target, Product("NT", 4096, 4096, 4096, dtype), described and target.descriptors)
                grouped = [config for config in found if config.groups]
                wanted = arch == "sm_90" and described and dtype != torch.float32
                assert set(grouped) == (set(HOPPER) if wanted else set()), (arch, dtype, described)
    for config in HOPPER:
        assert accumulating(config).fits(TARGETS["sm_90"], torch.bfloat16, torch.float32)
        assert from_json(Choice("triton", "NT", config).to_json()) == Choice("triton", "NT", config)


# A group's loop as the compiler writes it: wait for the stage, a product, which may stay in flight, a barrier of the
# group's 128 threads, the stage given back.
LOOP = """
.L_x_1:
 SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR7+0x30080], R10 ;
 HGMMA.64x128x16.F32.BF16 R88, gdesc[UR4], R88, gsb0 ;
 WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
 ULEA UR33, UR6, UR20, 0x3 ;
 BAR.SYNC.DEFER_BLOCKING 0x2, 0x80 ;
 @P0 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR33+0x300a0], RZ ;
 @P0 BRA `(.L_x_1) ;
"""
SASS = (
    " USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xf0 ;\n USETMAXREG.DEALLOC.CTAPOOL 0x18 ;\n UTMALDG.2D [UR16], [UR6] ;\n"
    + LOOP
    + LOOP.replace("_1", "_2")
    + " BAR.SYNC.DEFER_BLOCKING 0x1 ;\n UTMASTG.2D [UR4], [UR8] ;\n"
)


def test_what_the_gate_on_machine_code_lets_through():
    assert len(loop_bodies(SASS)) == 2 and not grouped_complaints(SASS, accumulate=False)
    for old, new, told in (
        ("UTMALDG", "LDGSTS", "no UTMALDG"),
        ("USETMAXREG.TRY_ALLOC", "NOP", "no USETMAXREG.TRY_ALLOC to the 240"),
        ("0xf0", "0xa8", "no USETMAXREG.TRY_ALLOC to the 240 registers of who multiplies: [168]"),
        ("0x18", "0xa8", "no USETMAXREG.DEALLOC to the 24 registers of who loads: [168]"),
        ("gsb0, 0x1", "gsb0, 0x0", "0 products are in flight"),
        ("BLOCKING 0x2, 0x80", "BLOCKING 0x0", "a barrier of the whole program"),
        ("BAR.SYNC.DEFER_BLOCKING 0x2, 0x80", "NOP", "before its threads have met"),
        ("ULEA UR33", "ULEA UR34", "the same stage back at each step"),
        ("UTMASTG", "UTMAREDG", "no UTMASTG"),
        (" BAR.SYNC.DEFER_BLOCKING 0x1 ;", " STL [R1], R2 ;", "kept in memory"),
        ("_2", "_1", "expected one for each"),
    ):
        found = grouped_complaints(SASS.replace(old, new), accumulate=False)
        assert any(told in each for each in found), (old, new, found)
    assert grouped_complaints(SASS, accumulate=True) == ["no UTMAREDG"]


# What the kernel has where it meets a stream, in the order of its PTX: the groups, then who loads, or the other group.
WAITS = """
 bar.sync 0, 128;
 cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd1, {%r1, %r2}], [%r3];
 setmaxnreg.dec.sync.aligned.u32 24;
 @%p1 ld.global.sys.acquire.b32 %r83, [ %rd17 + 0 ];
 @%p1 ld.global.sys.acquire.b32 %r85, [ %rd17 + 0 ];
 fence.proxy.async.global; mov.u32 %r90, 0;
 @%p2 cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r94], [%rd2, {%r4, %r5}], [%r93];
"""
SIGNALS = """
 @%p3 cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd1, {%r1, %r2}], [%r3];
 cp.async.bulk.wait_group 0; mov.u32 %r391, 0;
 bar.sync 0, 128;
 @%p4 atom.global.gpu.acq_rel.add.u32 %r394, [ %rd79 + 0 ], %r395;
 @%p4 atom.global.sys.release.exch.b32 %r472, [ %rd80 + 0 ], %r473;
"""


def test_what_the_gate_on_flags_lets_through():
    lines = WAITS.strip().splitlines()
    assert not meeting_complaints(WAITS, "wait") and not meeting_complaints("", "matmul")
    for first, second in itertools.combinations((2, 3, 5, 6), 2):  # any two in the other's place
        swapped = list(lines)
        swapped[first], swapped[second] = lines[second], lines[first]
        assert meeting_complaints("\n".join(swapped), "wait"), (first, second)
    for gone in (2, 5):
        assert meeting_complaints("\n".join(lines[:gone] + lines[gone + 1 :]), "wait")
    assert meeting_complaints(lines[3] + WAITS, "wait"), "a group that multiplies waits too"
    both, lines = SIGNALS + SIGNALS.replace("bar.sync 0", "bar.sync 2"), SIGNALS.strip().splitlines()
    assert not meeting_complaints(both, "signal") and meeting_complaints(SIGNALS, "signal")
    for gone in range(len(lines)):
        assert meeting_complaints(both.replace(lines[gone], "", 1), "signal"), lines[gone]
    for old, new in (
        ("wait_group 0", "wait_group.read 0"),
        ("gpu.acq_rel", "gpu.relaxed"),
        ("sys.release", "gpu.release"),
        (", 128;", ", 256;"),
    ):
        assert meeting_complaints(both.replace(old, new, 1), "signal"), new


def test_where_it_meets_a_stream_it_is_launched_with_whole_tiles_alone(monkeypatch):
    """Else the others' default is; and the tuner tries it there."""
    from axo_kernels.comm.adapters import SoloCommunicator
    from axo_kernels.fused import segments
    from axo_kernels.fused.chunks import chunk_order
    from axo_kernels.fused.workspace import Workspace
    from axo_kernels.tune.choice import fused_choices, usable

    launched = []

    class Kernels:
        def __getattr__(self, name):
            return {(count,): lambda *given, **more: launched.append(("others", more)) for count in range(1, 133)}

    monkeypatch.setattr(segments.devices, "target_of", lambda device: TARGETS["sm_90"])
    monkeypatch.setattr(segments.devices, "signal_kernels", Kernels)
    monkeypatch.setattr(segments, "programs_left", lambda comm, device: 100)
    monkeypatch.setattr(segments, "operand_descriptors", lambda left, right, config: [left, right])
    monkeypatch.setattr(segments, "launch_grouped", lambda *given, **more: launched.append((given[5].groups, more)))

    def launch(kind, rows, chunks, dtype=torch.bfloat16):
        order, cpu = chunk_order(kind, rows, chunks, 0, 2), torch.device("cpu")
        along_n = kind == "all_gather"
        a, b = (torch.empty(size, 64, dtype=dtype) for size in ((256, 2 * rows) if along_n else (rows, 256)))
        product, workspace = Product("NT", len(a), len(b), 64, dtype), Workspace("a product", order, cpu)
        out = torch.empty(len(a), len(b), dtype=dtype)
        segments.SegmentedProduct(product, workspace, SoloCommunicator(), config=HOPPER[0]).launch(a, b, out, along_n)
        return launched.pop()

    kind, meeting = launch("all_gather", 512, 2)
    assert kind == "shared" and meeting["tiles"] == 8 and meeting["NUM_PROGRAMS"] == 100
    assert (meeting["WAIT"], meeting["ALONG_N"], meeting["SEGMENTS"]) == (True, True, 16)
    kind, meeting = launch("all_reduce", 512, 4)
    assert kind == "shared" and not meeting["WAIT"] and not meeting["ALONG_N"]
    assert launch("all_gather", 512, 4)[0] == "others", "chunks of 128 columns, tiles of 256"
    assert launch("all_reduce", 512, 3)[0] == "others"

    (m, n, _), chunks = launches.MEETING_SIZES, launches.MEETING_CHUNKS
    for kind, rows in (("all_reduce", m), ("reduce_scatter", m), ("all_gather", n // 4)):
        order = chunk_order(kind, rows, chunks, 0, 4, 128)
        assert all(segments.whole_tiles(order, config, kind == "all_gather") for config in HOPPER), "what a GPU tries"

    monkeypatch.setattr(choice_module.devices, "runs_triton", lambda device: True)
    product, cuda = Product("NT", 4096, 4096, 4096, torch.bfloat16), torch.device("cuda", 0)
    choices = (SoloCommunicator(), lambda product, device: Choice("vendor", "NT"), {"windows": "no", "push": ""})
    mine = Choice("triton", "NT", HOPPER[0], "signal", 2)
    assert usable(mine, product, cuda)
    found = fused_choices("matmul_all_reduce", product, cuda, "b", *choices)
    assert {choice.config.groups for choice in found if choice.config is not None} == {"", "shared", "pingpong"}


@pytest.mark.parametrize("fault", ["", "a step left out", "one element", "bias", "accumulate", "raises"])
def test_a_wrong_kernel_is_reported_and_left_out(fault, monkeypatch, tmp_path):
    """Measured here, and read from what an earlier process has measured."""
    calls = []

    def kernel(a, b, layout, *, backend, config, out=None, bias=None, accumulate=False, **rest):
        calls.append(config)
        if fault == "raises":
            raise RuntimeError("CUDA error: an illegal instruction was encountered")
        left, right = as_row_major(a, b, layout)
        if fault == "a step left out":
            left, right = left[:, config.block_k :], right[config.block_k :]
        result = left.float() @ right.float()
        if fault == "one element":
            result[-1, -1] += 30.0
        if bias is not None and fault != "bias":
            result += bias
        if out is None:
            return result.to(a.dtype)
        return out.add_(result) if accumulate and fault != "accumulate" else out.copy_(result)

    config = HOPPER[-1]
    monkeypatch.setattr(
        runners,
        "triton_matmul",
        lambda a, b, product, behind, config: (
            kernel(
                a, b, product.layout, backend="triton", config=config, out=behind.out, bias=behind.bias,
                accumulate=behind.accumulate,
            ),
            None,
        ),
    )  # fmt: skip
    monkeypatch.setattr(runners, "target_of", lambda device: TARGETS["sm_90"])
    monkeypatch.setattr(runners, "describable", lambda *operands: True)
    monkeypatch.setattr(choice_module, "usable", lambda *given: True)
    monkeypatch.setattr(tuner_module, "usable", lambda *given: True)
    mine = Choice("triton", "TN", config)
    monkeypatch.setattr(tuner_module, "plain_choices", lambda *given: [Choice("vendor", "TN"), mine])
    monkeypatch.setattr(
        tuner_module,
        "paired",
        lambda calls, *rest, **more: [Timing(1 / n, 1 / n, 0.5) for n in range(1, len(calls) + 1)],
    )
    product, cpu = Product("TN", 96, 80, 256, torch.bfloat16), torch.device("cpu")
    cache = Cache("a device", {}, tmp_path)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = Tuner("first-step", cache=cache).choose(product, cpu)
        cache.put({f"matmul {product.name}": mine.to_json()})  # what an older driver may have left
        later = Tuner("cached", cache=cache)
        again = later.choose(product, cpu)
        checked = len(calls)
        later.choose(replace(product, m=192), cpu)  # the same class of shapes
    assert {found.backend, again.backend} == ({"vendor"} if fault else {"triton"})
    assert len(told) == (2 if fault else 0) and all(
        "is wrong on cpu and left out" in str(each.message) for each in told
    )
    assert len(calls) == checked and set(calls) <= {config, accumulating(config)}


def test_a_complaint_says_where(monkeypatch):
    """Which elements, and which tiles of the configuration: all that is left of a device that is gone."""

    def kernel(a, b, out, **rest):
        out.copy_(a.float() @ b.float().T)
        out[130, 200] = 1000.0
        out[255:, 270:290] = float("nan")
        return out

    monkeypatch.setattr(trust_module, "_ROWS", 100)
    trust = trust_module.Trust(lambda choice: kernel)
    product = Product("NT", 256, 300, 64, torch.bfloat16)
    with pytest.warns(UserWarning, match="left out"):
        found = trust.complaint(Choice("triton", "NT", HOPPER[-1]), product, torch.device("cpu"))
    assert found.endswith(
        "21 of 76800 elements (20 NaN), rows 130 to 255, columns 200 to 289, 2 of 6 tiles of 128x128: (1, 1), (1, 2)"
    )

    def raises(a, b, out, **rest):
        raise RuntimeError("PassManager::run failed\n\nptxas fatal\n")

    trust = trust_module.Trust(lambda choice: raises)
    with pytest.warns(UserWarning, match=r"RuntimeError: PassManager::run failed \.\.\. ptxas fatal"):
        trust.complaint(Choice("triton", "NT", HOPPER[-1]), product, torch.device("cpu"))
    assert "ptxas" in str(trust.error)


def test_more_tiles_of_a_program_are_another_class():
    """A program's second tile goes on with a ring that is not new, and its third with a group that has stored."""
    for config, seen in ((HOPPER[-1], (1, 2, 3, 3)), (HOPPER[0], (1, 1, 2, 3))):  # tiles of 128x128, of 128x256
        sizes = ((512, 768), (2048, 2048), (2048, 3072), (4096, 8192))
        found = [
            shape_class(Choice("triton", "NT", config), Product("NT", m, n, 1024, torch.bfloat16), 132)
            for m, n in sizes
        ]
        assert [each[-1] for each in found] == list(seen) and len({each[:-1] for each in found}) == 1


@pytest.mark.parametrize("layout", ["NN", "NT", "TN"])
def test_deep_steps_are_tried_first_on_hopper(layout):
    """The tile of the public measurements (tiles.py), its other orders and its transpose: steps of 32 stood before."""
    product = Product(layout, 8192, 8192, 8192, torch.bfloat16)
    found = [config for config in candidates(TARGETS["sm_90"], product, True) if not config.groups][:8]
    assert (found[0].block_m, found[0].block_n, found[0].block_k) == (128, 256, 64)
    assert {replace(found[0], group_m=16), replace(found[0], flatten=False)} <= set(found)
    assert (256, 128, 64) in {(config.block_m, config.block_n, config.block_k) for config in found}


@pytest.mark.parametrize("m", [256, 4096, 16384])
def test_every_way_of_the_kernel_for_hopper_is_a_candidate(monkeypatch, m):
    """An estimate of waves and traffic puts the one that stores behind products last, and behind what is timed."""
    monkeypatch.setattr(choice_module.devices, "runs_triton", lambda device: True)
    for arch in ("sm_90", "sm_100"):
        monkeypatch.setattr(choice_module.devices, "target_of", lambda device, arch=arch: TARGETS[arch])
        product = Product("NT", m, 8192, 8192, torch.bfloat16)
        found = choice_module.plain_choices(product, torch.device("cuda", 0), 8)
        configs = [choice.config for choice in found if choice.config is not None]
        grouped = [config for config in configs if config.groups]
        assert sorted(config.name for config in grouped) == sorted(
            config.name for config in HOPPER if arch == "sm_90"
        ), "each once"
        assert len(configs) - len(grouped) == 8, "Hopper's take nobody's place"
        orders = {replace(config, group_m=0): [] for config in grouped}
        for config in grouped:
            orders[replace(config, group_m=0)].append(config.group_m)
        assert all(tried == [8, 16] for tried in orders.values()), "each in both orders of tiles"
        plain = [config for config in configs if not config.groups]
        best = plain[0]
        assert best == max(plain, key=lambda config: estimate(config, product, TARGETS[arch]))
        assert {replace(best, group_m=16), replace(best, flatten=False)} <= set(plain) or best.split_k > 1
