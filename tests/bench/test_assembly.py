"""The gates of compiled code can fail: texts that pass, and edits of them that must not.

Oracle: the texts hold what Triton 3.6 makes of the kernels, a line of each kind; an edit is what a worse compilation
would hold instead. `make compile-defaults` runs the same gates over every default.
"""

import pytest

from axo_kernels.gemm.tiles import TARGETS
from bench.tools.assembly import complaints, left_in_flight, matrix_tiles, under_way

EPOCH = "ld.global.b32 { %r1 }, [ %rd1 + 0 ];\n"
WIDE = "@%p1 st.global.v4.b32 [ %rd2 + 0 ], { %r1, %r2, %r3, %r4 };\n"
COPY = "cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r2;\n"
READ = "@%p1 ld.global.sys.acquire.b32 %r5, [ %rd3 + 0 ];\n"
RAISED = "@%p1 atom.global.sys.release.exch.b32 %r6, [ %rd4 + 0 ], %r1;\n"
COUNTED = "@%p1 atom.global.gpu.acq_rel.add.u32 %r7, [ %rd5 + 0 ], %r8;\n"
REPORT = "@%p1 st.global.b32 [ %rd6 + 0 ], { %r9 };\n" * 3
PRODUCT = "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {\n" + COPY + WIDE
PTX = {
    "matmul": PRODUCT,
    "accumulate": PRODUCT + "ld.global.v2.b64 { %rd7, %rd8 }, [ %rd9 + 0 ];\n",
    "epilogue": PRODUCT + 8 * EPOCH,
    "signal": 8 * EPOCH + PRODUCT + COUNTED + RAISED,
    "wait": 7 * EPOCH + READ + "$L1:\n" + READ + "@%p2 bra $L1;\n" + REPORT + RAISED + PRODUCT,
    "goldfish": 26 * "ld.global.b64 { %rd1 }, [ %rd2 + 0 ];\n" + "st.global.b16 [ %rd3 + 0 ], { %rs1 };\n" + WIDE,
    "combine": EPOCH + "ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];\n" + WIDE,
}
LOAD = "global_load_dword v3, v[86:87], off offset:192\n"
AMD_WIDE = "buffer_store_dwordx2 v[0:1], v2, s[0:3], 0 offen\n"
WRITTEN_BACK = "buffer_wbl2 sc0 sc1\nglobal_atomic_swap v0, v1, s[6:7] sc1\n"
AMD_PRODUCT = (
    "v_mfma_f32_16x16x16_bf16 a[0:3], v[2:3], v[4:5], a[0:3]\nglobal_load_dwordx4 v[0:3], v[4:5], off\n" + AMD_WIDE
)
AMD_READ = "global_load_dword v2, v[0:1], off sc0 sc1\nbuffer_inv sc0 sc1\n"
GCN = {
    "matmul": AMD_PRODUCT,
    "signal": 7 * LOAD + AMD_PRODUCT + "buffer_wbl2 sc1\nbuffer_inv sc1\n" + WRITTEN_BACK,
    "wait": 6 * LOAD + AMD_READ + ".L1:\n" + AMD_READ + "s_cbranch_vccnz .L1\n"
    "global_store_dwordx3 v3, v[0:2], s[10:11] offset:4\n" + WRITTEN_BACK + AMD_PRODUCT,
}  # fmt: skip
NARROW_STORES, NARROW_LOADS = "stores of the result that are narrower", "loads that are narrower"
HALF = WIDE.replace("v4.b32", "v2.b32")
# (kernel, what stands there, what stands there instead, what is said)
WORSE_PTX = [
    *((kernel, WIDE, WIDE + HALF, f"1 {NARROW_STORES}") for kernel in PTX),
    *((kernel, WIDE, WIDE + EPOCH, f"1 {NARROW_LOADS}") for kernel in PTX),
    ("goldfish", "b16", "b8 [ %rd3 + 1 ], { %rs2 };\nst.global.b8", f"1 {NARROW_STORES}"),
    *(
        (kernel, COPY, COPY.replace("0x10", "0x4"), "1 copies to shared memory")
        for kernel in PTX
        if kernel not in ("combine", "goldfish")
    ),
    *((kernel, WIDE, WIDE + "fence.sc.sys;\n", "orders at system scope") for kernel in PTX),
    ("matmul", WIDE, WIDE.replace("v4.b32", "b16"), f"1 {NARROW_STORES}"),
    ("accumulate", "ld.global.v2.b64", "ld.global.v2.b32", f"1 {NARROW_LOADS}"),
    ("signal", COUNTED, COUNTED.replace("gpu", "sys"), "no acquire-release count of finished tiles"),
    ("signal", COUNTED, COUNTED.replace("gpu", "sys"), "2 orders at system scope, expected at most 1"),
    ("signal", "exch.b32", "add.u32", "no release at system scope"),
    ("wait", "bra $L1", "bra $L2", "no spin loop"),
    ("wait", REPORT, REPORT + RAISED, "4 orders at system scope, expected at most 3"),
    ("matmul", "wgmma", "mma", "no wgmma"),
    ("matmul", COPY, "", "no asynchronous copy"),
]
WORSE_GCN = [
    *((kernel, AMD_WIDE, AMD_WIDE.replace("dwordx2", "short"), f"1 {NARROW_STORES}") for kernel in GCN),
    *((kernel, AMD_WIDE, AMD_WIDE + LOAD, f"1 {NARROW_LOADS}") for kernel in GCN),
    *((kernel, AMD_WIDE, AMD_WIDE + "buffer_wbl2 sc0 sc1\n", "orders at system scope") for kernel in GCN),
    ("signal", "buffer_wbl2 sc0 sc1", "buffer_wbl2 sc1", "no release at system scope"),
    ("wait", "buffer_inv", "nothing", "no invalidation after the acquire"),
    ("matmul", "v_mfma", "v_fma", "no v_mfma"),
    ("matmul", "16x16x16", "4x4x4", "a matrix instruction of 4x4x4"),
    ("matmul", "16x16x16", "16x16x32", "a matrix instruction of 16x16x32"),  # gfx950's
]


def said(text, kernel, arch):
    return complaints(text, kernel, TARGETS[arch], "bf16", "ieee", False, bias_loads=8 if kernel == "epilogue" else 0)[
        1
    ]


@pytest.mark.parametrize("arch, texts", [("sm_90", PTX), ("gfx942", GCN)])
def test_texts_that_pass(arch, texts):
    assert {kernel: said(text, kernel, arch) for kernel, text in texts.items()} == {kernel: [] for kernel in texts}


@pytest.mark.parametrize(
    "arch, kernel, old, new, expected",
    [("sm_90", *case) for case in WORSE_PTX] + [("gfx942", *case) for case in WORSE_GCN],
)
def test_worse_code_is_refused(arch, kernel, old, new, expected):
    text = (PTX if arch == "sm_90" else GCN)[kernel]
    assert old in text
    found = said(text.replace(old, new), kernel, arch)
    assert any(expected in one for one in found), found


def test_spills_are_not_the_result():
    """In tiles that are no default the compiler may keep registers in memory: gfx90a moves them as it does results."""
    spill, back = "buffer_store_dword v70, off, s[96:99], 0", "buffer_load_dword v70, off, s[96:99], 0"
    marked = f"{spill} ; 4-byte Folded Spill\n{back} ; 4-byte Folded Reload\n"
    assert said(GCN["matmul"] + marked, "matmul", "gfx90a") == []
    assert len(said(f"{GCN['matmul']}{spill}\n{back}\n", "matmul", "gfx90a")) == 2


def test_products_while_operands_are_under_way():
    """Around the loop: behind the loads, before the wait that stands above them. Stores count nothing."""
    load, product, wait = "global_load_dwordx4 v[0:3], v[4:5], off\n", 3 * "v_mfma_f32_32x32x8_bf16 a\n", "s_waitcnt "
    for body, expected in (
        (load + product + wait + "vmcnt(0)\n" + product, 3),
        (wait + "vmcnt(0)\n" + product + load, 0),
        (product + wait + "vmcnt(0)\n" + load + product, 6),
        (load + wait + "lgkmcnt(0)\n" + product + wait + "vmcnt(0) lgkmcnt(0)\n", 3),
        (load + wait + "vmcnt(0)\n" + product, 0),
        (load + load + wait + "vmcnt(1)\n" + product + wait + "vmcnt(0)\n", 3),
        ("buffer_store_dwordx2 v[0:1], v2\n" + product, 0),
    ):
        assert under_way(f".LBB0_1:\n{body} s_cbranch_scc1 .LBB0_1\n") == expected, body
    assert under_way(load + product) == under_way(f".L1:\n{load} s_branch .L1\n") == 0, "no loop that multiplies"


def test_tiles_of_matrix_instructions():
    assert matrix_tiles(PTX["matmul"] + "mma.sync.aligned.m16n8k16.row.col.f32 {") == ["16x8x16", "64x128x16"]
    assert matrix_tiles(GCN["matmul"] + "v_mfma_f32_32x32x2f32 a[0:15], v0") == ["16x16x16", "32x32x2"]
    assert matrix_tiles("") == []


def test_products_in_flight():
    """A loop that holds its epilogue waits for all there; one whose first wait is for all has none in flight."""
    product = " HGMMA.64x256x16.F32.BF16 R24, gdesc[UR8], R24, gsb0 ;\n"
    wait, all_of_them = " WARPGROUP.DEPBAR.LE gsb0, 0x1 ;\n", " WARPGROUP.DEPBAR.LE gsb0, 0x0 ;\n"
    for behind, expected in (
        (wait, 1),
        (wait + all_of_them, 1),
        (all_of_them, 0),
        (all_of_them + wait, 0),
        ("", 0),
        (wait + " @P0 BRA `(.L_x_1) ;\n.L_x_2:\n" + product + all_of_them + " @P0 BRA `(.L_x_2) ;\n", 0),
    ):
        assert left_in_flight(f".L_x_1:\n{product}{behind} @P0 BRA `(.L_x_1) ;\n") == expected, behind
    assert left_in_flight("") == 0


def test_tf32_operands_may_be_turned_around():
    text = PTX["matmul"].replace("0x10", "0x4")
    assert complaints(text, "matmul", TARGETS["sm_90"], "fp32", "tf32", False)[1] == []
    assert complaints(text, "matmul", TARGETS["sm_90"], "fp32", "ieee", False)[1] != []
