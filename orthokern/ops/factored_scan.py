"""factored_scan: a recurrence through W = U diag(s) V^T that never forms W."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import Unpack

from orthokern._scan_contract import ScanOptions
from orthokern.ops._checks import factors, scan_args
from orthokern.ops._scan import SUPPORT, scan
from orthokern.ops.modal.op import modal_scan

__all__ = ["SUPPORT", "factored_scan"]


def factored_scan(
    x: Tensor, u: Tensor, s: Tensor, v: Tensor, h0: Tensor | None = None, **options: Unpack[ScanOptions]
) -> Tensor:
    """h_t = phi(U (s * (V^T h_{t-1})) + e_t) over a sequence; W = U diag(s) V^T is not formed.

    Vorontsov et al. 2017, eq. 8 and 10.

    Equation:
        e_t = x_t                        without weight
            = weight x_t + bias          for features; for token ids x_t is one-hot, and is not materialised
        a_t = U (s * (V^T h_{t-1})) + e_t,    h_t = phi(a_t),    t = 1 ... T.
        With leak l, h_t = (1 - l) h_{t-1} + l phi(a_t).
        With lengths, a_t = h_t = 0 for t > lengths[b]. With resets, h_{t-1} is reset_state where resets_t is true.
        Backward: Note [Factored scan backward] in ``orthokern/reference/factored_scan.py``.

    Args:
        x: the input term e [T, B, N]; or with weight, features [T, B, D] or int64/int32 token ids [T, B] in [0, D).
        u, v: [N, K], K <= N; s: [K]. All floating tensors have the dtype of u.
        h0: [B, N], zeros if None.
        weight: [N, D], input matrix or table of token vectors; bias: [N], only with weight.
        activation: "tanh" (the default) or another name of orthokern.functional.ACTIVATIONS.
        act_param: [1] or [N]: slope (prelu, leaky_relu) or bias (modrelu); None for the others.
        checkpoint_every: k > 0 keeps every k-th state and recomputes the others in the backward; 0 (the default) keeps
            all.
        backend: see ``orthokern.functional``.
        precision: the lowest precision of float32 products that a kernel may use, one of PRECISIONS; "ieee" (exact
            products) is the default. States and sums stay float32. The cpu backend has "ieee". On a CPU with
            AVX512_BF16, calls of more than 16 rows (steps times sequences) may use "bf16": both factors of the products
            with W, W^T and, for features, weight are rounded to bfloat16, and so are those of the gradients of W and,
            for features, of weight and bias. The cuda backend has "tf32" and "bf16" in products with W and W^T,
            for some sizes; the gradient of W has TF32 factors there. The reference backend computes exact products.
        algorithm: "sequential"; "chunked" (parallel over chunks of time, on a GPU; for activation identity without
            message_clip, resets and leak); "modal" (in the eigenbasis of W, at O(N) a step and two products over all
            steps; for the same calls, if W has a well-conditioned eigenbasis; ignores checkpoint_every and precision);
            or "auto" (the default).
        lengths: int64 [B] in [1, T], on the device of x, the number of steps of each sequence; None: T. The cpu backend
            skips padding if the batch is sorted by decreasing length (in another order, some of it); the GPU kernels
            stop after the longest of the few sequences that they process together. Padding in x and in the cotangent
            has no effect, even if it is NaN or not a token id; gradients there are zeros.
        message_clip: c > 0 clips the gradient of every pre-activation to [-c, c], element by element and in every step
            of the backward, before it is propagated to the previous step and to the parameters: the gradient clipping
            of the code released with Vorontsov et al. 2017. 0 (the default) does not clip.
        resets: bool [T, B], on the device of x. Where it is true, the step starts from reset_state instead of the
            previous state. A sequence of the batch may thus consist of several episodes or documents, and no state or
            gradient passes from one to the next. True at t = 0 replaces h0. No effect on padding.
        reset_state: [B, N], the state that a reset sets; None: h0 if it is given, else zeros. Its gradient is the sum
            over the resets (added to that of h0, if it is h0). Pass zeros if h0 is carried over from an earlier part of
            the sequences.
        leak: [1] or [N] with values in (0, 1], the share of phi(a_t) in h_t; None: 1. For a leaky unit it is dt / tau,
            the time step divided by the time constant. A value outside (0, 1] is rejected on a CPU.

    Returns:
        hs [T, B, N], the states h_1 ... h_T; zeros after lengths[b] steps.
        Differentiable in x, u, s, v, h0, weight, bias, act_param, reset_state, leak.

    Raises:
        InputError: wrong shapes, dtypes, devices, names, token ids or values of options.
        BackendUnavailable: the requested backend does not support the call.

    Saved:
        hs, or with checkpoint_every = k: ckpt [ceil(T/k), B, N], the states entering each segment (ckpt[0] = h0), and
        x; pre [T, B, N], the a_t, for activations that need their input and with leak, without checkpoints; x if
        weight is given; all parameters, h0, lengths, resets, reset_state and leak. States are zero on padding, except a
        ckpt that enters a segment directly after the end of a sequence. If a tap is open, the backward op also computes
        the norms over [B, N] of dL/dh_t, see ``_taps``.

    Cost:
        Forward 4 T B N K flops (+ 2 T B N D for features), backward scan the same, gradients of u, s, v
        2 T B N^2 + 4 N^2 K, recomputation one forward more. For a low rank, 8 K <= N and N >= 64, or few rows, 4 T B <=
        N and N >= 256, the gradients of u, s, v take 6 T B N K (on a GPU 8 T B N K). Writes T B N elements forward,
        T B N of adjoints backward.

    Numerics:
        Products and sums over time accumulate in the dtype of u (float32 means IEEE float32), in a fixed order: the
        same inputs, machine and thread count give bit-identical results. On the CPU, float32 gradients of parameters
        over about 4096 rows are added up in float64. Rounding errors grow with T like the product of the Jacobians:
        they do not grow if s is near 1 and the activation is nearly linear. The gradients of modrelu, relu, prelu and
        oplu are discontinuous at the threshold of a unit, so two precisions may differ there by more than rounding. On
        a GPU the rounding error of the gradient of leak grows as 1 / leak.

    Example::

        >>> u, v = (torch.linalg.qr(torch.randn(8, 8))[0] for _ in range(2))
        >>> factored_scan(torch.randn(100, 4, 8), u, torch.ones(8), v).shape
        torch.Size([100, 4, 8])
    """
    factors(u, s, v)
    args = scan_args("u", (u, s, v), x, h0, options)
    return modal_scan(args) if args.algorithm == "modal" else scan(args)
