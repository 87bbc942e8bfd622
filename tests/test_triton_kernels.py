"""The Triton leaf without a GPU: interpreted for its results, compiled ahead of time for its resources.

What a GPU has to confirm (that the compiled code computes what the interpreter does, and how fast) is not here.
"""

from __future__ import annotations

import ast
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

if os.environ.get("CI"):
    import triton  # there, a suite that skips these tests would say nothing
else:
    triton = pytest.importorskip("triton")
# Interpreter and compiler change from release to release; the CUDA builds of torch 2.6 to 2.15 bring 3.2 to 3.9.
OLDEST, NEWEST = (3, 2), (3, 9)
VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
if not OLDEST <= VERSION <= NEWEST:
    why = "Triton {}: the kernels have been tried with {}.{} to {}.{}".format(triton.__version__, *OLDEST, *NEWEST)
    assert not os.environ.get("CI"), why
    pytest.skip(why, allow_module_level=True)
CAPABILITIES = [80, 90, 100] if VERSION > (3, 2) else [80, 90]  # the ptxas of Triton 3.2 is older than Blackwell

from orthokern._activations import ACTIVATIONS  # noqa: E402

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "triton_leaf"))

OPS = (
    "activations",
    "dense_scan",
    "factored_scan",
    "gru_scan",
    "cayley",
    "linear_cross_entropy",
)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("interpreted", "not slow"),
        ("interpreted_ops", "not slow"),
        pytest.param("interpreted", "slow", marks=pytest.mark.slow),
    ],
)
def test_results_under_the_interpreter(name: str, part: str) -> None:
    """A file of tests/triton_leaf, in a process that interprets kernels from the start."""
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE / "triton_leaf")]),
    }
    file = str(HERE / "triton_leaf" / f"{name}.py")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", part, file]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=HERE.parent)
    passed = re.search(r"(\d+) passed", done.stdout)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert passed and int(passed[1]) > 5, done.stdout[-2000:]


def test_every_launch_asks_for_fused_sums() -> None:
    """Unless enable_fp_fusion is given, Triton 3.9 warns and 3.10 no longer fuses; the interpreter cannot tell."""
    launches = 0
    for file in (HERE.parent / "triton_kernels").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                assert options.get("enable_fp_fusion") == "True", f"{file.name}:{node.lineno}: {ast.unparse(node.func)}"
                launches += 1
    assert launches >= len(OPS)


# -------------------------------------------------------------------------------------------------- ahead of time

F32, F64 = torch.float32, torch.float64
# op, N, K, dtype: matrices in registers and read in every step, at the largest size of every number of warps
SCANS: list[tuple[str, int, int, torch.dtype]] = [
    *[("dense_scan", N, N, dtype) for N in (32, 64, 128) for dtype in (F32, F64)],
    *[("factored_scan", N, K, F32) for N, K in ((32, 32), (64, 64), (128, 32), (128, 128))],
    *[("factored_scan", N, N, F64) for N in (32, 64, 128)],
]
# the ones that the plain `pytest` compiles
USUAL = [("dense_scan", 128, 128, F32), ("factored_scan", 128, 128, F32), ("dense_scan", 128, 128, F64)]
# Bytes that the compiler may move out of registers, stores and loads together. None where matrices stay in registers.
# Where they are read in every step, the assembler may hold a kernel to 64 (80) registers, so that more programs share a
# processor, and move up to 36 bytes that it reads once a step or after the last. The elimination: addresses of what it
# stores at the end. Older compilers than 3.6 spill more; with them, compiling is all that is asked.
BOUNDED = VERSION >= (3, 6)
SPILLS_READ = 40
SPILLS_RESIDENT = 0 if VERSION < (3, 8) else 16  # one backward of 32 units, on sm_80
SPILLS_CAYLEY = 32


def scan_arguments(
    op: str, N: int, K: int, dtype: torch.dtype, *, backward: bool, activation: str, tokens: bool, leak: bool = False
) -> tuple[dict[str, Any], int]:
    """Arguments of the kernel as ``Scan.run`` gives them, with lengths, resets and a message clip, and the warps."""
    from orthokern.triton_kernels import _matrix

    factored, row = op == "factored_scan", ACTIVATIONS[activation]
    resident, block_n, block_k, num_warps = _matrix.plan(N, K, 1 + factored, dtype)
    has_param, reads_input = row.parameter is not None, row.reads == "input"
    pointers: dict[str, Any] = {
        "p_x": torch.int64 if tokens else dtype,
        "p_table": tokens,
        "p_gate": backward and activation != "identity",
        "p_pre": leak or (reads_input and not backward),
        "p_end": False,
        "p_sums": backward and has_param,
        "p_norms": backward,
        "p_first": factored,
        "p_scale": factored,
        "p_param": has_param,
        "p_lengths": torch.int64,
        "p_cut": torch.uint8,
        "p_restart": not backward,
        "p_clip": backward,
        "p_leak": leak,
        "p_carried": leak and backward,
        **dict.fromkeys(("p_start", "p_out", "p_second"), True),
    }
    pointers = {name: dtype if exists is True else exists or None for name, exists in pointers.items()}
    constants = {"N": N, "K": K, "BACKWARD": backward, "ACTIVATION": activation, "PARAM": "N" if has_param else "none"}
    constants |= {"LEAK": "N" if leak else "none", "RESIDENT": resident, "BLOCK_N": block_n, "BLOCK_K": block_k}
    return {**pointers, **dict.fromkeys(("T", "B", "CHUNK", "TIME", "D"), "i32"), **constants}, num_warps


def check(kernel: Any, arguments: dict[str, Any], capability: int, warps: int, spills: int) -> None:
    """A kernel fits on a processor and spills no more than so many bytes."""
    from resources import SHARED_KIB, resources

    used = resources(kernel, arguments, capability, warps)
    what = f"{kernel.__name__} {arguments}: {used}"
    assert used.shared <= SHARED_KIB[capability] * 1024, what
    assert used.spills <= spills or not BOUNDED, what
    assert used.registers * 32 * warps <= 65536, what


def check_scan(
    scan: tuple[str, int, int, torch.dtype], capability: int, activations: tuple[str, ...], leak: bool = False
) -> None:
    from orthokern.triton_kernels import _scan

    for backward, (index, activation) in itertools.product((False, True), enumerate(activations)):
        options = {"backward": backward, "tokens": index % 2 == 0 and not backward, "leak": leak}
        arguments, warps = scan_arguments(*scan, activation=activation, **options)
        spills = SPILLS_RESIDENT if arguments["RESIDENT"] else SPILLS_READ
        check(_scan.scan_kernel, arguments, capability, warps, spills)


def label(scan: tuple[str, int, int, torch.dtype]) -> str:
    op, N, K, dtype = scan
    return f"{op}-N{N}K{K}-{str(dtype).removeprefix('torch.')}"


@pytest.mark.parametrize("leak", [False, True])
@pytest.mark.parametrize("scan", USUAL, ids=label)
def test_scans_fit_on_a_processor(scan: tuple[str, int, int, torch.dtype], leak: bool) -> None:
    check_scan(scan, 90, ("prelu",), leak)


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("scan", SCANS, ids=label)
def test_every_scan_fits_on_every_processor(scan: tuple[str, int, int, torch.dtype], capability: int) -> None:
    # Processors differ in their memory and in how ptxas spends registers: the heaviest activation shows it. Activations
    # differ at N = 128, where registers are scarcest, and on one processor.
    many = capability == 90 and scan[1] == 128
    check_scan(scan, capability, ("prelu", "oplu", "modrelu", "tanh", "identity") if many else ("prelu",))


def test_a_step_computes_everything_once() -> None:
    """One exponential in a step of a forward with tanh, and 12 shuffles for each product of 128 columns."""
    from resources import resources

    from orthokern.triton_kernels import _scan

    for op, shuffles in (("dense_scan", 12), ("factored_scan", 24)):
        arguments, warps = scan_arguments(op, 128, 128, F32, backward=False, activation="tanh", tokens=True)
        ptx = resources(_scan.scan_kernel, arguments, 90, warps).ptx
        assert ptx.count("ex2.approx") == 1 and (ptx.count("shfl.sync") <= shuffles or not BOUNDED), op


def check_gru(N: int, dtype: torch.dtype, capability: int, variants: tuple[str, ...] = ("kanai", "torch")) -> None:
    from orthokern.triton_kernels import _matrix, gru_scan

    resident, block_n, _, warps = _matrix.plan(N, N, 3, dtype)
    for variant in variants:
        kanai = variant == "kanai"
        common: dict[str, Any] = {"p_pre": None if kanai else dtype, "p_lengths": torch.int64, "p_resets": torch.uint8}
        common |= {**dict.fromkeys(("p_h0", "p_hs", "p_gates", "p_state"), dtype), "T": "i32", "B": "i32"}
        common |= {"N": N, "KANAI": kanai, "RESIDENT": resident, "BLOCK_N": block_n}
        forward = {**common, **dict.fromkeys(("p_x", "p_w", "p_bias"), dtype)}
        gradients = ("p_grad", "p_w_t", "p_grad_x", "p_factor", "p_grad_h0", "p_grad_state", "p_square")
        backward = {**common, **dict.fromkeys(gradients, dtype)}
        for kernel, arguments in ((gru_scan.gru_scan_fwd_kernel, forward), (gru_scan.gru_scan_bwd_kernel, backward)):
            check(kernel, arguments, capability, warps, 0 if resident else SPILLS_READ)


def test_the_gru_fits_on_a_processor() -> None:
    check_gru(64, F32, 90, ("kanai",))


@pytest.mark.slow
def test_every_gru_fits_on_every_processor() -> None:
    """At the sizes where registers are scarcest."""
    for N in (64, 128):
        check_gru(N, F32, 90)
    check_gru(128, F64, 90, ("kanai",))
    for capability in CAPABILITIES:
        if capability == 90:
            continue
        check_gru(64, F32, capability, ("torch",))
        check_gru(128, F32, capability, ("kanai",))


def others(dtype: torch.dtype) -> list[tuple[Any, dict[str, Any], int, int]]:
    """(kernel, arguments, warps, bytes that may spill) of all kernels but the scans'."""
    from orthokern.triton_kernels import activations, cayley, linear_cross_entropy

    kernels: list[tuple[Any, dict[str, Any], int, int]] = []
    for S in (16, 64, 128, 512, 1024, 2048):
        block_r, block_c, warps = cayley.panel_blocks(S, dtype.itemsize)
        arguments: dict[str, Any] = {"p_matrix": dtype, "p_panel": dtype, "p_order": torch.int64}
        arguments |= {"ROWS": "i32", "COLUMNS": "i32", "WIDTH": "i32", "BLOCK_R": block_r, "BLOCK_C": block_c}
        kernels.append((cayley.cayley_panel_kernel, arguments, warps, SPILLS_CAYLEY))
    for activation in ("tanh", "prelu", "modrelu", "oplu"):
        block_r, block_n = activations.blocks(1000, 128)
        param = activation in ("prelu", "modrelu")
        arguments = {
            "p_grad_y": dtype,
            "p_x": dtype,
            "p_param": dtype if param else None,
            "p_grad_x": dtype,
            "p_y": dtype,
        }
        arguments |= {"p_partial": dtype if param else None, "R": "i32", "TILES": "i32", "N": 128}
        arguments |= {
            "ACTIVATION": activation,
            "PARAM": "N" if param else "none",
            "BLOCK_R": block_r,
            "BLOCK_N": block_n,
        }
        for kernel in (activations.activation_fwd_kernel, activations.activation_bwd_kernel):
            kernels.append((kernel, arguments, activations.NUM_WARPS, 0))
    if dtype != F32:
        return kernels
    readout: dict[str, Any] = {"p_target": torch.int64, "p_loss": F32, "ROWS": "i32", "MEAN": True, "NEED_GRAD": True}
    for N, C in ((128, 10), (500, 50), (1000, linear_cross_entropy.MAX_FUSED_C)):
        block_r, block_n, block_c = linear_cross_entropy.fused_blocks(C)
        arguments = {**readout, "p_hidden": F32, "p_weight": F32, "p_bias": F32, "p_grad_hidden": F32, "p_d": F32}
        arguments |= {"R": "i32", "N": N, "C": C, "BIAS": True, "BLOCK_R": block_r, "BLOCK_N": block_n}
        arguments |= {"BLOCK_C": block_c}
        kernel = linear_cross_entropy.linear_cross_entropy_fwd_kernel
        kernels.append((kernel, arguments, linear_cross_entropy.FUSED_WARPS, 0))
    arguments = {**readout, "p_z": F32, "C": 10_000, "BLOCK_C": linear_cross_entropy.ROW_BLOCK_C}
    kernels.append((linear_cross_entropy.linear_cross_entropy_row_kernel, arguments, linear_cross_entropy.ROW_WARPS, 0))
    return kernels


def check_others(dtype: torch.dtype, capability: int) -> None:
    for kernel, arguments, warps, spills in others(dtype):
        check(kernel, arguments, capability, warps, spills)


def test_the_other_kernels_fit_on_a_processor() -> None:
    check_others(F32, 90)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_other_kernels_fit_on_every_processor(capability: int, dtype: torch.dtype) -> None:
    check_others(dtype, capability)
