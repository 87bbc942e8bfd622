"""bench/sass.py: its parser on machine code, and, if there is nvcc, the hot loops of the kernels."""

from __future__ import annotations

import collections
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from cuda_host import build

from orthokern import cuda

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "bench"))
sass = pytest.importorskip("sass", reason="not a source tree with benchmarks")
# Those that the build is limited to, if it is.
BUILT = os.environ.get("ORTHOKERN_CUDA_ARCHS", "").replace(".", "")
ARCHITECTURES = [arch for arch in sass.ARCHITECTURES if not BUILT or arch in BUILT]

# A loop with everything that a hot loop must not have, and a second loop inside of it.
BAD = """
.text._ZN9orthokern4cuda12some_kernelILb1ELi8EEEvPf:
 /*0000*/ S2R R0, SR_TID.X ;
.L_x_1:
 /*0010*/ LDS.128 R4, [R0] ;
 /*0020*/ FCHK P0, R4, R5 ;
 /*0030*/ @!P0 BRA `(.L_x_2) ;
 /*0040*/ CALL.REL.NOINC `($__internal_0_$__cuda_sm20_div_s64) ;
.L_x_2:
 /*0050*/ I2F.U32.RP R8, R6 ;
 /*0060*/ STL [R1], R4 ;
.L_x_3:
PRODUCTS
 /*00f0*/ @P1 BRA `(.L_x_3) ;
 /*0100*/ STS [R0], R4 ;
 /*0110*/ @!PT LDS RZ, [RZ] ;
 /*0120*/ IADD3 R0, R0, 0x1, RZ ;
 /*0130*/ LDL R4, [R1] ;
 /*0140*/ BAR.SYNC.DEFER_BLOCKING 0x0 ;
 /*0150*/ @P2 BRA `(.L_x_1) ;
 /*0160*/ EXIT ;
""".replace("PRODUCTS", 8 * "\n /*0070*/ FFMA R4, R4, R5, R4 ;")


def hot_loop(text: str) -> Any:
    (function,) = sass.parse(text)
    (loop,) = sass.hot_loops(function)
    return loop


def test_faults_of_a_loop() -> None:
    loop = hot_loop(BAD)
    assert loop.function.label == "some_kernel 1 8"
    assert loop.faults == {"division": 2, "function call": 1, "access to local memory": 2}
    counts = collections.Counter(instruction.base for instruction in loop.path())
    assert (counts["FFMA"], counts["BAR"]) == (8, 1) and "FFMA" in sass.MULTIPLY_ADDS
    assert loop.gaps() == [2], "the placeholder @!PT is not executed"
    assert "function call" not in hot_loop(BAD.replace("$__cuda_sm20_div_s64", "$__cuda_sm70_shflsync_bfly_p")).faults


# Instructions between the store of a state (or of y, or adjoints) and the barrier, at most. A block of several
# sequences ends its loop over them there, as do the kernels of calls with resets.
MOST_BETWEEN = {
    "resident_scan_kernel": 6,
    "several sequences": 20,
    "resets": 40,
    "low_rank_scan_kernel": 4,
    "gru_resident_fwd_kernel": 26,
    "gru_resident_bwd_kernel": 7,
    "scan_carry_kernel": 4,
    "cluster_scan_kernel": 6,
}
# The kernels that keep a register in local memory.
LOCAL = {
    ("factored_scan", "100"): ("resident_scan_kernel 1 0 8 10 1 -1 2 0", "resident_scan_kernel 1 1 8 10 1 -1 2 1"),
}
HOT_KERNELS = {"factored_scan": 66, "dense_scan": 46, "gru_scan": 12}  # how many there are at least, beside clusters


def most_between(label: str) -> int:
    kernel, *values = label.split()
    if kernel != "resident_scan_kernel":
        return MOST_BETWEEN[kernel]
    return MOST_BETWEEN["resets" if values[7] == "1" else "several sequences" if values[4] == "1" else kernel]


# Bytes that a kernel may spill: factored maps above 128 units, any activation, several sequences of a block; and
# backward with resets or a leak.
SPILLS = {
    ("100", "ResidentTraitsILb1ELb0ELi8ELi10ELb1ELin1ELNS0_14ResidentInputsE2ELb0E"): 4,
    ("100", "ResidentTraitsILb1ELb1ELi8ELi10ELb1ELin1ELNS0_14ResidentInputsE2ELb1E"): 40,
}
# The cluster kernels of any activation may spill what does not change from step to step.
CLUSTER_OF_ANY, CLUSTER_SPILLS = "ELi0ELin1EEEEEvNS0_8ScanArgs", 64
# Of shared memory; 10 for the others.
STATIC_KILOBYTES = {"cayley": 48}


def check_resources(name: str, arch: str, report: str) -> None:
    """Only the kernels of SPILLS spill: the maps are in registers, and a spilled weight would be read in every step."""
    entries = report.split("Compiling entry function")[1:]
    assert len(entries) > (20 if name in ("factored_scan", "dense_scan") else 2)
    for entry in entries:
        kernel = entry.split("'")[1]
        spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", entry)
        used = re.search(r"Used (\d+) registers", entry)
        assert spills is not None and used is not None, entry
        allowed = [CLUSTER_SPILLS] if CLUSTER_OF_ANY in kernel else []
        allowed += [most for (of, known), most in SPILLS.items() if of == arch and known in kernel]
        assert max(map(int, spills.groups())) <= max(allowed, default=0), f"{kernel} spills {spills.groups()} bytes"
        shape = re.search(r"(?:ResidentTraitsILb[01]ELb[01]|gru_resident_..d_kernelILb[01])ELi(\d+)E", kernel)
        assert shape or "resident" not in kernel, kernel
        threads = 32 * int(shape.group(1)) if shape else 256
        warps = -(-threads // 128) * 4  # registers are given to the four parts of a multiprocessor, evenly
        assert int(used.group(1)) <= min(255, 65536 // (32 * warps)), kernel
        static = re.search(r"(\d+) bytes smem", entry)
        assert static is None or int(static.group(1)) <= STATIC_KILOBYTES.get(name, 10) << 10, kernel


def check_hot_loops(name: str, arch: str, text: str) -> None:
    hot = [loop for function in sass.parse(text) for loop in sass.hot_loops(function)]
    kernels = collections.Counter(loop.function.label.split()[0] for loop in hot)
    assert kernels.total() - kernels["cluster_scan_kernel"] >= HOT_KERNELS[name]
    if name != "gru_scan":
        assert kernels["low_rank_scan_kernel"] == (20 if name == "factored_scan" else 0)
        assert kernels["resident_scan_kernel"] >= 46 and (arch == "80" or kernels["cluster_scan_kernel"] == 20)
    for loop in hot:
        label, gaps = loop.function.label, loop.gaps()
        faults = dict(loop.faults)
        if label.startswith("cluster_scan_kernel") and label.endswith(" -1"):
            faults.pop("access to local memory", None)
        allowed = {"access to local memory": 1} if label in LOCAL.get((name, arch), ()) else {}
        assert faults in ({}, allowed), (label, faults)
        assert gaps or label.startswith("cluster_scan_kernel"), label
        assert max(gaps, default=0) <= most_between(label), (label, gaps)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("name", (*HOT_KERNELS, "cayley", "rotation_scan", "peephole_scan"))
def test_machine_code(name: str, arch: str, tmp_path: Path) -> None:
    nvcc, nvdisasm = build.nvcc(), sass.find_nvdisasm()
    if nvcc is None:
        assert not cuda.AVAILABLE, "the build had an nvcc that is not here now: set CUDACXX to it"
        pytest.skip("nvcc not found")
    cubin, report = sass.compiled(ROOT / "csrc" / "cuda" / f"{name}.cu", arch, nvcc, tmp_path)
    check_resources(name, arch, report)
    if name in HOT_KERNELS:
        if nvdisasm is None:
            pytest.skip("the resources were checked; nvdisasm for the loops was not found")
        check_hot_loops(name, arch, sass.disassemble(cubin, nvdisasm))
