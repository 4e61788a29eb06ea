"""What PTX and AMD GCN of our kernels must contain: matrix instructions, copies, spin loops, memory order."""

from __future__ import annotations

import re

from axo_kernels.gemm.tiles import Target

_MATRIX = {"sm_80": "mma.sync", "sm_90": "wgmma.mma_async", "sm_100": "tcgen05.mma"}  # AMD: v_mfma
# The tiles of AMD's matrix instructions at their full rate: of 16 bits, of fp32.
_TILES = {
    "gfx90a": (("32x32x8", "16x16x16"), ("32x32x2", "16x16x4")),
    "gfx942": (("32x32x8", "16x16x16"), ("32x32x2", "16x16x4")),
    "gfx950": (("32x32x16", "16x16x32"), ("32x32x2", "16x16x4")),
}
# A read with acquire at system scope, a release at system scope, in each assembly.
_ACQUIRE = {
    "nvidia": r"ld\.global\.(sys\.acquire|acquire\.sys)",
    "gfx90a": r"global_(load_dword|atomic_add) .*\bglc\b",
    "gfx942": r"global_(load_dword|atomic_add) .*\bsc0 sc1\b",
    "gfx950": r"global_(load_dword|atomic_add) .*\bsc0 sc1\b",
}
_RELEASE = {
    "nvidia": r"atom\.global\.(sys\.release|release\.sys)\.exch",
    "gfx90a": r"buffer_wbl2",
    "gfx942": r"buffer_wbl2 sc0 sc1",
    "gfx950": r"buffer_wbl2 sc0 sc1",
}


def complaints(
    text: str, kernel: str, target: Target, dtype: str, precision: str, descriptors: bool, bias_loads: int = 0,
    grouped: bool = False,
) -> tuple[dict[str, int], list[str]]:  # fmt: skip
    """Return instruction counts and what is missing; ``bias_loads``: how many loads of a bias a thread may make;
    ``grouped``: the kernel for Hopper."""
    key = "nvidia" if target.nvidia else target.arch
    wrong = []
    matrix = _MATRIX.get(target.arch, "v_mfma")
    counts = {name: len(re.findall(re.escape(name), text)) for name in (matrix, *_COPIES[target.nvidia])}
    multiplies = kernel not in ("flags", "combine", "goldfish", "sum", "keep")
    on_units = dtype != "fp32" or precision == "tf32" or not target.nvidia
    if multiplies and on_units and not counts[matrix]:
        wrong.append(f"no {matrix}")
    if not target.nvidia:
        slow = set(matrix_tiles(text)) - set(_TILES[target.arch][dtype == "fp32"])
        wrong += [f"a matrix instruction of {tile}" for tile in sorted(slow)]
    if multiplies and descriptors and not counts["cp.async.bulk.tensor"]:
        wrong.append("no bulk tensor copy")
    if multiplies and target.nvidia and not descriptors and not counts["cp.async."]:
        wrong.append("no asynchronous copy: the loop over K is not pipelined")
    is_flag_writer = kernel == "flags" and "wait_flag" not in text
    if kernel in ("wait", "sum") or (kernel == "flags" and not is_flag_writer):
        if not spin_loop(text, _ACQUIRE[key]):
            wrong.append("no spin loop that reads with acquire at system scope")
        if not target.nvidia and not re.search(r"buffer_inv", text):
            wrong.append("no invalidation after the acquire")
        if descriptors and "fence.proxy.async.global" not in text:
            wrong.append("no proxy fence between the acquire and the bulk copies")
    if kernel in ("signal", "push", "sum", "keep") or is_flag_writer:
        if not re.search(_RELEASE[key], text):
            wrong.append("no release at system scope")
        if not target.nvidia and not re.search(r"buffer_wbl2[^\n]*\n(?:[^\n]*\n){0,12}?[^\n]*global_atomic_swap", text):
            wrong.append("no write-back before the atomic exchange")
    if kernel in ("signal", "push", "sum") and target.nvidia:
        if not re.search(r"atom\.global\.(gpu\.acq_rel|acq_rel\.gpu)\.add", text):
            wrong.append("no acquire-release count of finished tiles on this GPU")
    if grouped:
        wrong += meeting_complaints(text, kernel)
        kernel = f"{kernel} of groups"
    orders, allowed = len(re.findall(_SYSTEM[key], text)), 1 if is_flag_writer else _ORDERS.get(kernel, 0)
    if orders > allowed:
        wrong.append(f"{orders} orders at system scope, expected at most {allowed}")
    if kernel == "flags":
        return counts, wrong
    loads, stores = _BESIDE[target.nvidia].get(kernel, (0, 0))
    if (narrow := narrow_stores(text, target) - stores) > 0:
        wrong.append(f"{narrow} stores of the result that are narrower than they need be")
    if (narrow := narrow_loads(text, target) - loads - bias_loads) > 0:
        wrong.append(f"{narrow} loads that are narrower than they need be")
    # TF32 operands have to lie along K, so those that do not are turned around four bytes at a time on their way in
    if precision != "tf32" and (narrow := narrow_copies(text)):
        wrong.append(f"{narrow} copies to shared memory that are narrower than they need be")
    return counts, wrong


def meeting_complaints(ptx: str, kernel: str) -> list[str]:
    """What is out of its order in the PTX of the kernel for Hopper where it waits for flags, or sets them.

    The flag is read, with acquire at system scope, by the warp that loads, which has 24 registers, and nowhere else;
    behind it stands the proxy fence, and behind that the first bulk load. A flag is released by a group behind the bulk
    store, the wait for its end (not for its buffer alone), a barrier of the group's threads, and the count.
    """
    if kernel not in ("wait", "signal"):
        return []
    events = "".join(_EVENTS[found.lastgroup] for found in re.finditer(_EVENT, ptx) if found.lastgroup)
    if kernel == "wait":
        in_order = bool(re.fullmatch(r"[^al]*p[^al]*a+[^al]*f[^al]*l+[^al]*", events))
        return [] if in_order else ["the flag, the proxy fence and the bulk loads stand in another order"]
    released = re.findall(r"[^r]*r", events)
    in_order = len(released) == 2 and all(re.search(r"sob+cb*r$", each) for each in released)
    return [] if in_order else ["a group's store, its end, barrier, count and release stand in another order"]


# What meeting_complaints looks for in PTX, and its letter.
_PTX = {
    "producer": r"setmaxnreg\.dec\.sync\.aligned\.u32\s+24;",
    "acquire": r"ld\.global\.(?:sys\.acquire|acquire\.sys)",
    "fence": r"fence\.proxy\.async\.global",
    "load": r"cp\.async\.bulk\.tensor\S*\.shared::c\w+\.global\b",
    "store": r"cp\.async\.bulk\.tensor\S*\.global\.shared::cta",
    "over": r"cp\.async\.bulk\.wait_group\s+0",
    "barrier": r"bar\.sync\s+\d+, 128;",
    "count": r"atom\.global\.(?:gpu\.acq_rel|acq_rel\.gpu)\.add",
    "release": r"atom\.global\.(?:sys\.release|release\.sys)\.exch",
}
_EVENTS = {name: name[0] for name in _PTX}
_EVENT = "|".join(f"(?P<{name}>{pattern})" for name, pattern in _PTX.items())


def grouped_complaints(sass: str, accumulate: bool) -> list[str]:
    """What is missing in the SASS of the kernel for Hopper (gemm/hopper.py).

    Bulk loads and stores (adding ones where it accumulates); 240 and 24 registers dealt out to the groups; in each loop
    of products at least two groups of them in flight and no barrier of the whole program; no register kept in memory.
    """
    wrong = []
    store = "UTMAREDG" if accumulate else "UTMASTG"
    for name in ("UTMALDG", store):
        if name not in sass:
            wrong.append(f"no {name}")
    for name, registers, whose in (("DEALLOC", 24, "loads"), ("TRY_ALLOC", 240, "multiplies")):
        given = {int(found, 16) for found in re.findall(rf"USETMAXREG\.{name}[^;]*?(0x[0-9a-f]+)", sass)}
        if registers not in given:
            wrong.append(f"no USETMAXREG.{name} to the {registers} registers of who {whose}: {sorted(given)}")
    if re.search(r"\b(?:STL|LDL)\b", sass):
        wrong.append("registers kept in memory")
    loops = [body for body in loop_bodies(sass) if "HGMMA" in body]
    if len(loops) != 2:
        wrong.append(f"{len(loops)} loops of products, expected one for each of the two groups")
    for body in loops:
        waits = [int(found, 16) for found in re.findall(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x[0-9a-f]+)", body)]
        if not waits or min(waits) < 1:
            wrong.append(f"a loop waits until {min(waits, default=0)} products are in flight before it issues the next")
        barriers = re.findall(r"BAR\.SYNC\S* ([^;]*?)\s*;", body)
        if any(not re.search(r", 0x80$", operands) for operands in barriers):
            wrong.append(f"a barrier of the whole program in a loop of products: {barriers}")
        if re.search(r"SYNCS\.ARRIVE", re.sub(r"BAR\.SYNC.*?SYNCS\.ARRIVE[^;]*", "", body, flags=re.S)):
            wrong.append("a group gives a stage back before its threads have met")
        given_back = re.findall(r"SYNCS\.ARRIVE\S* RZ, \[(\w+)\+", body)
        if not any(re.search(rf"\b[A-Z][\w.]* {register}\b,", body) for register in given_back):
            wrong.append("a group gives the same stage back at each step")
        if "UTMALDG" in body:
            wrong.append("a group that multiplies also loads")
    return wrong


def matrix_tiles(text: str) -> list[str]:
    """The tiles (m x n x k) of the matrix instructions of a kernel in PTX or GCN, each once; none of tcgen05's."""
    nvidia = re.findall(r"\bmma\S*\.m(\d+)n(\d+)k(\d+)\b", text)
    return sorted({"x".join(tile) for tile in nvidia + re.findall(r"\bv_mfma_f32_(\d+)x(\d+)x(\d+)", text)})


def under_way(gcn: str) -> int:
    """How many products a wave issues between the loads of a step of K from memory and its wait for them: the most in
    a loop that multiplies, around which the steps go. 0: each step waits for its operands before it multiplies."""
    most = 0
    for body in loop_bodies(gcn):
        events = re.findall(r"\b(?:global|buffer)_load|v_mfma|vmcnt\(\d+\)", body)
        for index, event in enumerate(events):
            products = later = 0
            for other in events[index + 1 :] + events[:index]:
                if other.startswith("vmcnt") and int(other[6:-1]) <= later:
                    break  # at most so many loads are under way, and as many have been issued since
                products += other == "v_mfma"
                later += other.endswith("load")
            most = max(most, products if event.endswith("load") else 0)
    return most


def left_in_flight(sass: str) -> int:
    """How many groups of wgmma's products the loops of a kernel leave in flight where they wait for those before.

    Of a loop the first wait counts: one that holds its epilogue too waits there for all.
    """
    loops = [body for body in loop_bodies(sass) if "HGMMA" in body]
    waits = [re.search(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x[0-9a-f]+)", body) for body in loops]
    return min((int(found.group(1), 16) if found else 0 for found in waits), default=0)


def instructions(sass: str) -> int:
    """How many instructions a piece of SASS has."""
    return len(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s", sass, re.M))


def loop_bodies(text: str) -> list[str]:
    """The innermost loops of a kernel in SASS or GCN: from a label to the branch back to it."""
    lines, spans = text.splitlines(), _loops(text)
    inner = [
        span
        for span in spans
        if not any(other != span and span[0] <= other[0] and other[1] <= span[1] for other in spans)
    ]
    return ["\n".join(lines[first : last + 1]) for first, last in inner]


_COPIES = {True: ("cp.async.bulk.tensor", "cp.async."), False: ("global_load", "buffer_load")}


# Narrow loads and stores of a kernel beside its operands and its result, by whether the GPU is NVIDIA's.
#   signal  loads the epoch, its share of the table's first row, and six entries of a segment
#   push    of NVIDIA's loads two addresses more
#   sum     of two parts loads the epoch and four addresses, and has two reports; waits and orders are written once a
#           part, and a flag for each of two copies
#   wait    one entry less; what it reports when a wait gives up are three words. On AMD the compiler reads the epoch
#           once for all threads and stores the three words at once, and the two reads of a flag are loads like others
#   of groups (gemm/hopper.py): each has a part of its own, and so has who loads; a chunk that has not come is marked
#   keep    loads the epoch and three entries of a segment; AMD's, the epoch for all threads at once
#   combine loads the bias
#   goldfish (axo/nn) loads 13 windows of two tokens, each of which begins anywhere, and stores two bytes; AMD's, one
_BESIDE = {
    True: {
        "signal": (8, 0),
        "push": (10, 0),
        "wait": (7, 3),
        "signal of groups": (17, 0),
        "wait of groups": (16, 4),
        "combine": (1, 0),
        "goldfish": (26, 1),
        "sum": (5, 6),
        "keep": (4, 0),
    },
    False: {"signal": (7, 0), "push": (7, 0), "wait": (8, 1), "goldfish": (0, 1), "sum": (4, 2), "keep": (3, 0)},
}
# Orders at system scope: the flag that is raised, once a chunk; where a kernel waits, the reads of a flag before and in
# the loop, and the report's first word.
_SYSTEM = {
    "nvidia": r"\.sys\b|\bfence\.sc\b",
    "gfx90a": r"\bbuffer_(?:wbl2|invl2)\b",
    "gfx942": r"\bbuffer_(?:wbl2|inv) sc0 sc1",
    "gfx950": r"\bbuffer_(?:wbl2|inv) sc0 sc1",
}
_ORDERS = {"signal": 1, "push": 1, "wait": 3, "flags": 3, "sum": 8, "keep": 1}
_ORDERS |= {"signal of groups": 2, "wait of groups": 3}
_WIDE = {True: r"\.(?:v4\.b32|v2\.b64)", False: r"_dwordx[24]"}
_LOAD = {True: r"\bld\.global(?!\.sys)[.\w]*", False: r"\b(?:global|buffer)_load_\w+"}
_STORE = {True: r"\bst\.global[.\w]*", False: r"\b(?:global|buffer)_store_\w+"}


def narrow_loads(text: str, target: Target) -> int:
    """How many loads into registers move less than 16 bytes a thread, on AMD 8; reads of a flag are not among
    NVIDIA's."""
    return _narrow(_LOAD, text, target)


def narrow_stores(text: str, target: Target) -> int:
    """How many stores move less than 16 bytes a thread; on AMD 8, as its matrix units leave four neighbours in a
    thread."""
    return _narrow(_STORE, text, target)


def narrow_copies(text: str) -> int:
    """How many asynchronous copies to NVIDIA's shared memory move less than 16 bytes."""
    return sum(size != "0x10" for size in re.findall(r"cp\.async\.c[ag]\.shared\.global[^;]*?, (0x\w+)", text))


def _narrow(every: dict[bool, str], text: str, target: Target) -> int:
    # A register that AMD's compiler keeps in memory is moved by the same instructions; spills are counted apart.
    found = re.findall(every[target.nvidia], re.sub(r".*; \d+-byte Folded (?:Spill|Reload)$", "", text, flags=re.M))
    return sum(not re.search(_WIDE[target.nvidia], instruction) for instruction in found)


def spin_loop(text: str, read: str) -> bool:
    """Say whether a read that matches stands inside a loop."""
    reads = [index for index, line in enumerate(text.splitlines()) if re.search(read, line)]
    return any(first < index < last for first, last in _loops(text) for index in reads)


_BRANCH = re.compile(r"\b(?:bra(?:\.uni)?\s+|s_cbranch_\w+\s+|s_branch\s+|BRA\b.*?(?=\.L_x_))(\$?[.\w$]+)")


def _loops(text: str) -> list[tuple[int, int]]:
    """The lines of each label and of a branch back to it, in PTX, SASS or GCN."""
    lines = text.splitlines()
    labels = {
        match.group(1): index
        for index, line in enumerate(lines)
        if (match := re.match(r"\s*(\$?[.\w$]+):", line)) and not line.strip().startswith("//")
    }
    branches = [(index, match[1]) for index, line in enumerate(lines) if (match := _BRANCH.search(line))]
    return [(labels[label], index) for index, label in branches if labels.get(label, index) < index]
