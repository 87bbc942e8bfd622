"""Both scans: the kernel, whose time loop is one launch, and its launch.

Forward and backward are one recurrence (``orthokern/_gpu_scans.py``). The maps come as row-major matrices with a row
per output: ``second`` [N, K] and, for the factored scan, ``first`` [K, N] and ``scale`` [K]. A step multiplies a state
x by y = second (scale * (first x)), or y = second x in the dense scan:

    forward   factored: first = V^T, second = U     dense: second = W
    backward  factored: first = U^T, second = V     dense: second = W^T

    program i_row  ->  one sequence or chunk, all its steps; nothing is exchanged between programs

    registers, for all T:  the matrices, if they fit (``plan`` in ``_matrix.py``), and the state [1, BLOCK_N]
    L1 or L2, every step:  matrices that do not fit, 32 columns at a time
    shared memory:         the state, between the threads that compute it and those that multiply with it
    HBM, in every step:    forward reads the input term, or a token id whose row of the table comes from L2, one step
                           ahead, and writes h_t. Backward reads g_t, and h_t or a_t, and writes delta_t and the squared
                           norm of dL/dh_t.

A product is summed on the FMA units over the columns that a thread holds, then over 8 threads. It is IEEE: a lower
``precision`` changes nothing.
"""

# Triton compiles the functions below; their arguments have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from orthokern import _gpu_scans
from orthokern._elements import checked
from orthokern._scan_contract import ScanArgs, ScanGradients, ScanStates
from orthokern.triton_kernels._activation import apply, chain
from orthokern.triton_kernels._matrix import columns, flag_at, load_resident, plan, product, row_or_zeros, steps_of
from orthokern.triton_kernels.activations import parameter, parameter_kind


@triton.jit
def steps_to_run(p_lengths, i_row, T, B, CHUNK, TIME, BACKWARD: tl.constexpr):
    """(begin, end, row, stride) of a sequence: it has the steps [begin, end), the others are padding. ``row`` is that
    of step 0 in [T * B], and ``stride`` leads to the next step, in time or against it."""
    start = (i_row // B) * CHUNK
    count = tl.minimum(CHUNK, T - start)
    length = steps_of(p_lengths, i_row % B, TIME, T)
    begin, end = count * 0, count
    stride = B.to(tl.int64)
    row = start * stride + i_row % B
    if BACKWARD:
        begin = tl.minimum(tl.maximum(T - start - length, 0), count)
        row = (T - 1 - start) * stride + i_row % B
        stride = -stride
    else:
        end = tl.minimum(tl.maximum(length - start, 0), count)
    return begin, end, row, stride


@triton.jit
def load_id(p_x, p_table, row, exists):
    """The token id of a step; 0 without a table, and if there is no step."""
    token = row * 0
    if p_table is not None:
        token = tl.load(p_x + row, mask=exists, other=0)
    return token


@triton.jit
def load_inputs(p_x, p_table, p_gate, row, token, exists, D, N: tl.constexpr, BLOCK_N: tl.constexpr):
    """The input [1, BLOCK_N] of a step and what phi' reads of it, or 0.0.

    A token id outside [0, D) gives NaN. It is not used as an address.
    """
    o_n = tl.arange(0, BLOCK_N)[None, :]
    m = columns(o_n, exists, N)
    if p_table is not None:
        known = (token >= 0) & (token < D)
        b_x = tl.load(p_table + token * N + o_n, mask=columns(o_n, exists & known, N), other=0.0)
        b_x = tl.where(columns(o_n, exists & (known == 0), N), float("nan"), b_x)
    else:
        b_x = tl.load(p_x + row * N + o_n, mask=m, other=0.0)
    b_gate = 0.0
    if p_gate is not None:
        b_gate = tl.load(p_gate + row * N + o_n, mask=m, other=0.0)
    return b_x, b_gate


@triton.jit
def end_step(
    b_a,
    b_gate,
    b_param,
    b_leak,
    b_carried,
    p_clip,
    BACKWARD: tl.constexpr,
    ACTIVATION: tl.constexpr,
    LEAK: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The state after a step, and the elements of the parameter's gradient, without the factor l with a leak; see Note
    [Message clip] and Note [Leak] of the reference."""
    b_elementwise = 0.0
    if BACKWARD:
        b_h = b_gate
        if LEAK != "none":  # the gate is a_t for every activation
            b_h = apply(b_gate, b_param, ACTIVATION, 1, BLOCK_N)
        b_state, b_elementwise = chain(b_a, b_h, b_gate, b_param, ACTIVATION, 1, BLOCK_N)
        if LEAK != "none":  # not l times the above: oplu exchanges elements
            b_state, _ = chain(b_leak * b_a, b_h, b_gate, b_param, ACTIVATION, 1, BLOCK_N)
        if p_clip is not None:  # in this order a NaN stays a NaN
            b_clip = tl.load(p_clip)
            b_state = tl.where(b_state > b_clip, b_clip, tl.where(b_state < -b_clip, -b_clip, b_state))
    else:
        b_state = apply(b_a, b_param, ACTIVATION, 1, BLOCK_N)
        if LEAK != "none":
            b_state = b_leak * b_state + (1 - b_leak) * b_carried
    return b_state, b_elementwise


@triton.jit(do_not_specialize=["T", "B", "CHUNK", "TIME", "D"])
def scan_kernel(
    p_x,  # [T, B, N], or int64 [T, B] with a table; this and all other tensors of steps as in ``Scan.run``
    p_table,  # [D, N], or None
    p_gate,  # [T, B, N], or None if phi' reads nothing
    p_start,  # [sequences, N], or None
    p_out,  # [T, B, N], or None
    p_pre,  # [T, B, N], or None
    p_end,  # [sequences, N], or None
    p_sums,  # [2, sequences, N], of which the first half is used, or None
    p_norms,  # [T, B], or None
    p_first,  # [K, N], or None
    p_scale,  # [K], or None
    p_second,  # [N, K]
    p_param,  # [1] or [N], or None
    p_lengths,  # int64 [B], or None
    p_cut,  # uint8 [T, B], or None
    p_restart,  # [B, N], or None
    p_clip,  # [1], or None: the bound of |delta|
    p_leak,  # [1] or [N], or None
    p_carried,  # [B, N], or None without a leak or forward
    T,
    B,
    CHUNK,
    TIME,
    D,
    N: tl.constexpr,
    K: tl.constexpr,
    BACKWARD: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PARAM: tl.constexpr,
    LEAK: tl.constexpr,
    RESIDENT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    i_row = tl.program_id(0)
    o_n, o_k, m_n = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K), (tl.arange(0, BLOCK_N) < N)[None, :]
    begin, end, row, stride = steps_to_run(p_lengths, i_row, T, B, CHUNK, TIME, BACKWARD)
    if p_first is not None:
        b_first = load_resident(p_first, K, N, RESIDENT, BLOCK_K, BLOCK_N)
        b_scale = tl.load(p_scale + o_k, mask=o_k < K, other=0.0)[None, :]
    b_second = load_resident(p_second, N, K, RESIDENT, BLOCK_N, BLOCK_K)
    b_param = parameter(p_param, o_n, o_n < N, PARAM)
    b_leak = parameter(p_leak, o_n, o_n < N, LEAK)
    b_state = row_or_zeros(p_start, i_row, p_second, N, BLOCK_N)
    b_carried = b_state  # what a leak keeps of the step before: the state, or backward a
    if BACKWARD:
        b_carried = row_or_zeros(p_carried, i_row, p_second, N, BLOCK_N)
    if p_sums is not None:
        b_sum = row_or_zeros(p_sums, i_row, p_second, N, BLOCK_N)
    if p_cut is not None:
        b_restart = row_or_zeros(p_restart, i_row, p_second, N, BLOCK_N)

    # ids are loaded two steps ahead, rows of the inputs one step ahead, which hides both latencies
    row += begin * stride
    token = load_id(p_x, p_table, row, begin < end)
    b_x, b_gate = load_inputs(p_x, p_table, p_gate, row, token, begin < end, D, N, BLOCK_N)
    token = load_id(p_x, p_table, row + stride, begin + 1 < end)
    for i in range(begin, end):
        b_next, b_next_gate = load_inputs(p_x, p_table, p_gate, row + stride, token, i + 1 < end, D, N, BLOCK_N)
        token = load_id(p_x, p_table, row + 2 * stride, i + 2 < end)
        if p_first is not None:
            b_state = product(b_state, b_first, p_first, K, N, RESIDENT, BLOCK_K, BLOCK_N) * b_scale
        b_a = product(b_state, b_second, p_second, N, K, RESIDENT, BLOCK_N, BLOCK_K) + b_x
        if BACKWARD and LEAK != "none":
            b_a += (1 - b_leak) * b_carried
        b_state, b_elementwise = end_step(
            b_a, b_gate, b_param, b_leak, b_carried, p_clip, BACKWARD, ACTIVATION, LEAK, BLOCK_N
        )
        if LEAK != "none":
            b_carried = b_a if BACKWARD else b_state
        if p_out is not None:
            tl.store(p_out + row * N + o_n[None, :], b_state, mask=m_n)
        if p_pre is not None:
            tl.store(p_pre + row * N + o_n[None, :], b_a, mask=m_n)
        if p_norms is not None:
            tl.store(p_norms + row, tl.sum(tl.sum(b_a * b_a, axis=1), axis=0))
        if p_sums is not None:
            b_sum += b_elementwise
        if p_cut is not None:
            is_cut = flag_at(p_cut, row, i < end)
            b_state = tl.where(is_cut, b_restart, b_state)
            if LEAK != "none":
                b_carried = tl.where(is_cut, b_restart, b_carried)
        row += stride
        b_x = b_next
        if p_gate is not None:
            b_gate = b_next_gate
    o_row = i_row.to(tl.int64) * N + o_n[None, :]
    if p_end is not None:
        tl.store(p_end + o_row, tl.where(end == CHUNK, b_state, 0.0), mask=m_n)
    if p_sums is not None:
        tl.store(p_sums + o_row, b_sum, mask=m_n)
    if p_carried is not None:
        tl.store(p_carried + o_row, b_carried, mask=m_n)


class Scan(_gpu_scans.Scan):
    """Launches of ``scan_kernel``."""

    def __init__(
        self, args: ScanArgs, *, backward: bool, chunk: int | None = None, sequences: int | None = None
    ) -> None:
        super().__init__(args, backward=backward, chunk=chunk, sequences=sequences)
        first, second = args.first, args.second
        self.maps: tuple[Tensor | None, ...]
        if first is None:
            self.maps = None, None, second.mT.contiguous() if backward else second
        else:
            first, second = (second, first) if backward else (first, second)
            self.maps = first.mT.contiguous(), args.scale, second
        N, K = second.shape
        self.plan = plan(N, K, 1 if first is None else 2, second.dtype)
        largest = torch.finfo(second.dtype).max
        self.bound = second.new_full((1,), self.clip) if self.clip <= largest else None

    def run(self, steps: int, *, time: int = 0, **tensors: Tensor | None) -> None:
        if not steps or not self.sequences:
            return
        args, get, table = self.args, tensors.get, tensors.get("table")
        N, K = args.second.shape
        results = (get(name) for name in ("out", "pre", "end", "sums", "norms"))
        with torch.cuda.device_of(args.second):
            scan_kernel[(self.sequences,)](
                get("x") if table is None else get("tokens"),
                table,
                get("gate"),
                get("start"),
                *results,
                *self.maps,
                args.act_param,
                args.lengths,
                None if self.cut is None else self.cut[time : time + steps].view(torch.uint8),
                self.restart,
                self.bound,
                args.leak,
                get("carried"),
                steps,
                len(args.h0),
                self.chunk or steps,
                time,
                0 if table is None else len(table),
                N=N,
                K=K,
                BACKWARD=self.backward,
                ACTIVATION=args.activation,
                PARAM=parameter_kind(args.act_param),
                LEAK=parameter_kind(args.leak),
                RESIDENT=self.plan.resident,
                BLOCK_N=self.plan.block_n,
                BLOCK_K=self.plan.block_k,
                num_warps=self.plan.num_warps,
                enable_fp_fusion=True,
            )

    def carry(self, power: Tensor, ends: Tensor, starts: Tensor) -> None:
        """A dense scan in float64."""
        args = self.args._replace(first=None, scale=None, second=power.mT.contiguous(), lengths=None)
        states = torch.empty_like(ends, dtype=torch.float64)
        scan = Scan(args, backward=False)
        scan.run(len(ends), x=ends.double(), start=starts[0].double(), out=states)
        starts[1:] = states


def scan_fwd(args: ScanArgs) -> ScanStates:
    """See ``orthokern.ops.factored_scan`` and ``orthokern.ops.dense_scan``."""
    return _gpu_scans.scan_fwd(Scan, checked(args, args.time_steps, args.h0.dtype)[0])


def scan_bwd(args: ScanArgs, grad_hs: Tensor, states: Tensor, pre: Tensor | None, needs: Any) -> ScanGradients:
    """See ``orthokern.ops.factored_scan`` and ``orthokern.ops.dense_scan``."""
    saved: dict[str, Any] = {"grad_hs": grad_hs, "states": states, "pre": pre}
    args, (grad_hs, states, pre) = checked(args, len(grad_hs), args.h0.dtype, **saved)
    return _gpu_scans.scan_bwd(Scan, args, grad_hs, states, pre, needs)
