"""The Triton leaf without a GPU: interpreted for its results, compiled ahead of time for its resources.

What a GPU has to confirm (that the compiled code computes what the interpreter does, and how fast) is not here.
"""

from __future__ import annotations

import ast
import importlib
import inspect
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
# Interpreter and compiler change from release to release; the CUDA builds of torch 2.6 to 2.13 bring 3.2 to 3.7.
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
    assert passed and int(passed[1]) > 15, done.stdout[-2000:]


@pytest.mark.parametrize("op", OPS)
def test_signatures_are_those_of_the_reference(op: str) -> None:
    ours, reference = (importlib.import_module(f"orthokern.{p}.{op}") for p in ("triton_kernels", "reference"))
    stem = op.removesuffix("s")
    names = [name for name in (f"{stem}_fwd", f"{stem}_bwd", op) if inspect.isfunction(getattr(reference, name, None))]
    assert names
    for name in names:
        signatures = [
            [
                (p.name, p.kind, p.default)
                for p in inspect.signature(getattr(module, name)).parameters.values()
                if p.name not in ("grad_pre", "grad_gates")  # of second derivatives, which the reference alone has
            ]
            for module in (ours, reference)
        ]
        assert signatures[0] == signatures[1], name


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
# op, N, K, precision, dtype: every way to multiply at the largest size of every entry of its table
SCANS: list[tuple[str, int, int, str, torch.dtype]] = [
    *[("dense_scan", N, N, "ieee", F32) for N in (32, 64, 128)],
    *[("factored_scan", N, K, "ieee", F32) for N, K in ((32, 32), (64, 64), (128, 32), (128, 128))],
    *[("dense_scan", N, N, "ieee", F64) for N in (32, 64, 128)],
    *[("factored_scan", N, N, "ieee", F64) for N in (32, 64, 128)],
    *[("dense_scan", N, N, precision, F32) for precision in ("tf32", "tf32x3", "bf16") for N in (64, 128)],
    *[("factored_scan", N, N, precision, F32) for precision in ("tf32", "bf16") for N in (32, 128)],
    ("factored_scan", 128, 64, "tf32x3", F32),
]
# the ones that the plain `pytest` compiles
USUAL = [("dense_scan", 128, 128, "ieee", F32), ("factored_scan", 128, 128, "ieee", F32)]
USUAL += [("dense_scan", 128, 128, "ieee", F64), ("factored_scan", 128, 128, "tf32", F32)]
# Bytes that the compiler may move out of registers, stores and loads together. None where matrices stay in registers.
# Where they are read in panels, the assembler may hold a kernel to 64 (80) registers, so that more programs share a
# processor, and move up to 36 bytes that it reads once a step or after the last. On tensor cores a few addresses. The
# elimination: addresses of what it stores at the end. Older compilers than 3.6 spill more, 3.2 up to 4 KiB on tensor
# cores; with them, compiling is all that is asked.
BOUNDED = VERSION >= (3, 6)
SPILLS_ROWS = 0
SPILLS_PANELS = 40
SPILLS_DOT = 16
SPILLS_CAYLEY = 32


def scan_arguments(
    op: str,
    direction: str,
    N: int,
    K: int,
    precision: str,
    dtype: torch.dtype,
    activation: str,
    tokens: bool,
    ragged: bool = False,
    cuts: bool = False,
) -> tuple[dict[str, Any], Any]:
    """Arguments of a kernel as ``_launch.launch_forward`` and ``launch_backward`` give them, and the plan.

    ragged: with lengths and, backward, a message clip. cuts: with resets.
    """
    from orthokern.triton_kernels import _launch

    factored = op == "factored_scan"
    plan = _launch.plan(N, K, 50, factored=factored, dtype=dtype, precision=precision)
    row = ACTIVATIONS[activation]
    has_param, from_hs, from_pre = row.parameter is not None, row.reads == "output", row.reads == "input"
    arguments: dict[str, Any] = {
        "p_second": dtype,
        "p_first": dtype if factored else None,
        "p_scale": dtype if factored else None,
        "FACTORED": factored,
        "p_param": dtype if has_param else None,
        "T": "i32",
        "B": "i32",
        "R": "i32",
        "CHUNK": "i32",
        "FIRST": "i32",
        "D": "i32",
        "N": N,
        "K": K,
        "ACTIVATION": activation,
        "PARAM": "N" if has_param else "none",
        "WAY": plan.way,
        "PRECISION": precision,
        "BLOCK_B": plan.block_b,
        "BLOCK_N": plan.block_n,
        "BLOCK_K": plan.block_k,
        "p_lengths": torch.int64 if ragged else None,
        "LENGTHS": ragged,
        "p_cut": torch.uint8 if cuts else None,
        "p_restart": dtype if cuts else None,
        "CUTS": cuts,
    }
    if direction == "fwd":
        arguments |= {
            "p_x": torch.int64 if tokens else dtype,
            "p_table": dtype if tokens else None,
            "p_h0": dtype,
            "p_hs": dtype,
            "p_pre": dtype if from_pre else None,
            "p_last": None,
            "TOKENS": tokens,
            "STORE_HS": True,
            "STORE_PRE": from_pre,
            "STORE_LAST": False,
        }
    else:
        arguments |= {
            "p_grad": dtype,
            "p_hs": dtype if from_hs else None,
            "p_pre": dtype if from_pre else None,
            "p_carry": dtype,
            "p_delta": dtype,
            "p_left": dtype,
            "p_square": dtype,
            "p_sum": dtype if has_param else None,
            "STORE_DELTA": True,
            "STORE_SUM": has_param,
            "FROM_HS": from_hs,
            "FROM_PRE": from_pre,
            "p_clip": dtype if ragged else None,
            "CLIP": ragged,
        }
    return arguments, plan


def check_scan(
    scan: tuple[str, int, int, str, torch.dtype], capability: int, activations: tuple[str, ...], ragged: bool = False
) -> None:
    from resources import SHARED_KIB, resources

    from orthokern.triton_kernels import _scan

    op, N, K, precision, dtype = scan
    for direction in ("fwd", "bwd"):
        for index, activation in enumerate(activations):
            arguments, plan = scan_arguments(
                op, direction, N, K, precision, dtype, activation, tokens=index % 2 == 0, ragged=ragged
            )
            kernel = getattr(_scan, f"scan_{direction}_kernel")
            used = resources(kernel, arguments, capability, plan.num_warps)
            what = f"{op} {direction} {activation} {plan}: {used}"
            assert used.shared <= SHARED_KIB[capability] * 1024, what
            allowed = {"rows": SPILLS_ROWS, "panels": SPILLS_PANELS, "dot": SPILLS_DOT}[plan.way]
            assert used.spills <= allowed or not BOUNDED, what
            assert used.registers * 32 * plan.num_warps <= 65536, what


def label(scan: tuple[str, int, int, str, torch.dtype]) -> str:
    op, N, K, precision, dtype = scan
    return f"{op}-N{N}K{K}-{precision}-{str(dtype).removeprefix('torch.')}"


@pytest.mark.parametrize("scan", USUAL, ids=label)
def test_scans_fit_on_a_processor(scan: tuple[str, int, int, str, torch.dtype]) -> None:
    check_scan(scan, 90, ("prelu",), ragged=True)


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("scan", SCANS, ids=label)
def test_every_scan_fits_on_every_processor(scan: tuple[str, int, int, str, torch.dtype], capability: int) -> None:
    # Processors differ in their memory and in how ptxas spends registers: the heaviest activation with both arguments
    # shows it. Activations differ at N = 128, where registers are scarcest, and on one processor.
    check_scan(scan, capability, ("prelu",), ragged=True)
    if capability == 90:
        N = scan[1]
        check_scan(scan, capability, ("prelu", "oplu", "modrelu", "tanh", "identity") if N == 128 else ("prelu",))


def test_the_launches_of_chunks_fit_on_a_processor() -> None:
    """Launches that keep the last state of every row only, or what every row hands on."""
    from resources import resources

    from orthokern.triton_kernels import _scan

    for tokens in (True, False):
        forward, plan = scan_arguments("dense_scan", "fwd", 128, 128, "ieee", F32, "identity", tokens)
        forward |= {"p_hs": None, "p_last": F32, "STORE_HS": False, "STORE_LAST": True}
        assert resources(_scan.scan_fwd_kernel, forward, 90, plan.num_warps).spills == 0
    backward, plan = scan_arguments("dense_scan", "bwd", 128, 128, "ieee", F32, "identity", False)
    backward |= {"p_delta": None, "p_square": None, "STORE_DELTA": False}
    assert resources(_scan.scan_bwd_kernel, backward, 90, plan.num_warps).spills == 0


def test_the_tables_are_covered() -> None:
    """SCANS has an entry for every row of every launch table."""
    from orthokern.triton_kernels import _launch

    tables = {"rows": {w for _, w in _launch.ROWS_WARPS}, "panels": {w for _, w in _launch.PANEL_WARPS if w > 4}}
    tables |= {precision: {w for _, w in table} for precision, table in _launch.DOT_WARPS.items()}
    seen: dict[str, set[int]] = {name: set() for name in tables}
    for op, N, K, precision, dtype in SCANS:
        plan = _launch.plan(N, K, 50, factored=op == "factored_scan", dtype=dtype, precision=precision)
        seen[precision if plan.way == "dot" else plan.way].add(plan.num_warps)
    for name, warps in tables.items():
        assert seen[name] >= warps, f"{name}: {warps - seen[name]} warps are in no case"


_GRU_GRADIENTS = ("p_grad", "p_w_t", "p_grad_x", "p_factor", "p_grad_h0", "p_grad_state")


def check_gru(N: int, dtype: torch.dtype, capability: int, variants: tuple[str, ...] = ("kanai", "torch")) -> None:
    from resources import SHARED_KIB, resources

    from orthokern.triton_kernels import gru_scan

    plan = gru_scan.plan(N, dtype)
    for variant in variants:
        kanai = variant == "kanai"
        common: dict[str, Any] = {
            "p_pre": None if kanai else dtype,
            "p_h0": dtype,
            "p_hs": dtype,
            "p_gates": dtype,
            "T": "i32",
            "B": "i32",
            "p_lengths": torch.int64,
            "LENGTHS": True,
            "p_resets": torch.uint8,
            "RESETS": True,
            "STATE": True,
            "p_state": dtype,
            "N": N,
            "KANAI": kanai,
            "WAY": plan.way,
            "BLOCK_N": plan.block_n,
        }
        forward = {**common, "p_x": dtype, "p_w": dtype, "p_bias": dtype, "BIAS": True}
        backward = {**common, **dict.fromkeys(_GRU_GRADIENTS, dtype)}
        backward |= {"p_square": dtype, "FACTOR": True}
        for kernel, arguments in ((gru_scan.gru_scan_fwd_kernel, forward), (gru_scan.gru_scan_bwd_kernel, backward)):
            used = resources(kernel, arguments, capability, plan.num_warps)
            what = f"{kernel.__name__} {variant} {plan}: {used}"
            assert used.shared <= SHARED_KIB[capability] * 1024, what
            assert used.spills <= (SPILLS_ROWS if plan.way == "rows" else SPILLS_PANELS) or not BOUNDED, what
            assert used.registers * 32 * plan.num_warps <= 65536, what


def test_the_gru_fits_on_a_processor() -> None:
    check_gru(64, F32, 90, ("kanai",))


@pytest.mark.slow
def test_every_gru_fits_on_every_processor() -> None:
    """Every way to multiply, at the sizes where registers are scarcest."""
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
    from orthokern.triton_kernels import _inputs, activations, cayley, linear_cross_entropy

    found: list[tuple[Any, dict[str, Any], int, int]] = []
    for S in (16, 64, 128, 512, 1024, 2048):
        block_r, block_c, warps = cayley.panel_blocks(S, dtype.itemsize)
        arguments: dict[str, Any] = {"p_matrix": dtype, "p_panel": dtype, "p_order": torch.int64}
        arguments |= {"ROWS": "i32", "COLUMNS": "i32", "WIDTH": "i32", "BLOCK_R": block_r, "BLOCK_C": block_c}
        found.append((cayley.cayley_panel_kernel, arguments, warps, SPILLS_CAYLEY))
    features = [(precision, True) for precision in ("ieee", "tf32", "tf32x3", "bf16")]
    if dtype == F64:
        features = [("ieee", dot) for dot in {_inputs.DOT_F64, False}]
    for precision, dot in features:
        arguments = {
            "p_x": dtype,
            "p_weight": dtype,
            "p_bias": dtype,
            "p_e": dtype,
            "R": "i32",
            "B": "i32",
            "D": 50,
            "N": 128,
        }
        arguments |= {"BIAS": True, "DOT": dot, "PRECISION": precision, "BLOCK_R": _inputs.FEATURES_BLOCK_R}
        arguments |= {"BLOCK_N": _inputs.FEATURES_BLOCK_N, "BLOCK_D": _inputs.FEATURES_BLOCK_D}
        found.append((_inputs.features_kernel, arguments, _inputs.FEATURES_WARPS, 0))
    for N in (32, 128):
        arguments = {"p_delta": dtype, "p_order": torch.int64, "p_bounds": torch.int64, "p_partial": dtype, "N": N}
        arguments |= {"D": "i32", "SPLITS": "i32", "BLOCK_R": _inputs.TOKENS_TILE // N, "BLOCK_N": N}
        found.append((_inputs.token_gradient_kernel, arguments, _inputs.TOKENS_WARPS, 0))
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
            found.append((kernel, arguments, activations.NUM_WARPS, 0))
    if dtype != F32:
        return found
    readout: dict[str, Any] = {"p_target": torch.int64, "p_loss": F32, "ROWS": "i32", "MEAN": True, "NEED_GRAD": True}
    for N, C in ((128, 10), (500, 50), (1000, linear_cross_entropy.MAX_FUSED_C)):
        block_r, block_n, block_c = linear_cross_entropy.fused_blocks(C)
        arguments = {**readout, "p_hidden": F32, "p_weight": F32, "p_bias": F32, "p_grad_hidden": F32, "p_d": F32}
        arguments |= {"R": "i32", "N": N, "C": C, "BIAS": True, "BLOCK_R": block_r, "BLOCK_N": block_n}
        arguments |= {"BLOCK_C": block_c}
        kernel = linear_cross_entropy.linear_cross_entropy_fwd_kernel
        found.append((kernel, arguments, linear_cross_entropy.FUSED_WARPS, 0))
    arguments = {**readout, "p_z": F32, "C": 10_000, "BLOCK_C": linear_cross_entropy.ROW_BLOCK_C}
    found.append((linear_cross_entropy.linear_cross_entropy_row_kernel, arguments, linear_cross_entropy.ROW_WARPS, 0))
    return found


def check_others(dtype: torch.dtype, capability: int) -> None:
    from resources import SHARED_KIB, resources

    for kernel, arguments, warps, spills in others(dtype):
        used = resources(kernel, arguments, capability, warps)
        assert used.shared <= SHARED_KIB[capability] * 1024, f"{kernel.__name__} {arguments}: {used}"
        assert used.spills <= spills or not BOUNDED, f"{kernel.__name__} {arguments}: {used}"


def test_the_other_kernels_fit_on_a_processor() -> None:
    check_others(F32, 90)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_other_kernels_fit_on_every_processor(capability: int, dtype: torch.dtype) -> None:
    check_others(dtype, capability)
