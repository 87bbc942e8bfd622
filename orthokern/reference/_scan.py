"""The reference of factored_scan and dense_scan.

Note [Sequences of different lengths]
    With lengths, a_t and h_t of a sequence are zero after its end, so that the loss does not depend on padding:
    ghat_t = delta_t = 0 there. The gradients are those of each sequence alone. Padding in x and in the cotangents is
    replaced by zeros first, because 0 times NaN is not 0.

Note [Message clip]
    With message_clip c > 0 the backward uses clip(phi'(a_t) ghat_t, -c, c), element by element, instead of
    delta_t = phi'(a_t) ghat_t, for the previous step, the parameters of a_t, and x. This is autograd's gradient of the
    same scan with an identity at every a_t whose backward clips. The gradient of the activation's own parameter comes
    from ghat_t, which is not clipped. (The "gradient clipping" of Vorontsov et al. 2017, section 4, in their released
    code.)

Note [Resets]
    Where resets[t, b] is true, step t of sequence b starts from r = reset_state[b] instead of h_{t-1}:

        a_t = W r + e_t,    ghat_{t-1} = g_{t-1}  (step t does not depend on h_{t-1}),    dL/dr += W^T delta_t

    The sum of dL/dr is over all resets of the sequence. The term of M = dL/dW is delta_t r^T for such a step. A reset
    at t = 0 replaces h0, whose gradient is then zero. Resets on padding have no effect, since delta_t = 0 there.

Note [Leak]
    With leak l, one number or one for each unit, h_t = (1 - l) h_{t-1} + l phi(a_t). The backward has

        ghat_t = g_t + W^T delta_{t+1} + (1 - l) ghat_{t+1},    delta_t = phi'(a_t) l ghat_t
        dL/dl = sum_t ghat_t (phi(a_t) - h_{t-1}), summed over the batch, and over the units for one number

    phi'(a_t) and phi(a_t) are computed from a_t, which is saved for every activation. With a reset, h_{t-1} is
    reset_state in all of these terms, and dL/dr has the further term (1 - l) ghat_t. The message clip applies to
    phi'(a_t) l ghat_t.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from orthokern._scan_contract import ScanArgs, ScanGradients, ScanStates, running, started, without_padding
from orthokern.reference.activations import activation_fwd, chain


def input_term(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """e [T, B, N] from x [T, B, N], from features x [T, B, D] or from token ids x [T, B] and weight [N, D]."""
    if weight is None:
        return x
    if x.is_floating_point():
        e = x @ weight.mT
    else:
        e = torch.nn.functional.embedding(x, weight.mT)
    return e if bias is None else e + bias


def clip_message(message: Tensor, c: float) -> Tensor:
    """The message, clipped to [-c, c]. A bound above the largest number of the dtype, which torch refuses, has no
    effect."""
    return message if c > torch.finfo(message.dtype).max else message.clamp(-c, c)


class ClippedMessage(torch.autograd.Function):
    """The identity; its backward clips the gradient to [-c, c], see Note [Message clip]."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, c: float) -> Tensor:
        return a.view_as(a)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
        _, ctx.c = inputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return clip_message(gradient, ctx.c), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        return tangent.view_as(tangent)


def product(args: ScanArgs, rows: Tensor) -> Tensor:
    """W applied to every row of rows [B, N]."""
    if args.first is None or args.scale is None:
        return rows @ args.second.mT
    return ((rows @ args.first) * args.scale) @ args.second.mT


def transposed_product(args: ScanArgs, rows: Tensor) -> Tensor:
    """W^T applied to every row of rows [B, N]."""
    if args.first is None or args.scale is None:
        return rows @ args.second
    return ((rows @ args.second) * args.scale) @ args.first.mT


def scan_fwd(args: ScanArgs) -> ScanStates:
    """hs, ckpt and pre of ``orthokern.ops.factored_scan`` and ``dense_scan``. Differentiable by autograd."""
    return run_steps(args, running(args.time_steps, args.lengths))


def run_steps(args: ScanArgs, alive: Tensor | None) -> ScanStates:
    """h_t = phi(W h_{t-1} + e_t), e of ``input_term``, from h0; alive: bool [T, B] or None, see ``running``."""
    assert args.x is not None
    h, checkpoint_every = args.h0, args.checkpoint_every
    e = input_term(without_padding(args.x, alive), args.weight, args.bias)
    # unbind, not e[t]: the backward of T separate selections writes T zero-filled tensors of e's size
    states, entering, pre = [], [], []
    for t, e_t in enumerate(e.unbind(0)):
        if checkpoint_every and t % checkpoint_every == 0:
            entering.append(h)
        alive_t = None if alive is None else alive[t]
        start = h if args.resets is None else started(h, args.resets[t], args.reset_state)
        a = without_padding(product(args, start) + e_t, alive_t)
        if args.message_clip > 0:
            a = ClippedMessage.apply(a, args.message_clip)
        phi = activation_fwd(a, args.act_param, activation=args.activation)
        h = without_padding(phi if args.leak is None else (1 - args.leak) * start + args.leak * phi, alive_t)
        states.append(h)
        pre.append(a)
    return ScanStates(
        torch.stack(states), torch.stack(entering) if entering else None, torch.stack(pre) if args.keeps_pre else None
    )


def norm_over_batch(g: Tensor) -> Tensor:
    """Frobenius norm over the last two dimensions of [..., B, N], in float32 for half precision. Squares of float32
    would leave its range for elements below 1e-19 and above 1e19."""
    wide = torch.promote_types(g.dtype, torch.float32)
    exact = torch.float32 if g.device.type == "mps" else torch.float64  # MPS has no float64
    return g.to(exact).square().sum((-2, -1)).sqrt().to(wide)


def scan_bwd(
    args: ScanArgs,
    grad_hs: Tensor,
    states: Tensor,
    pre: Tensor | None,
    needs: Any,
    grad_pre: Tensor | None = None,
) -> ScanGradients:
    """The adjoint recurrence of Note [Factored scan backward], for any W.

    It is differentiable, which double backward uses: then hs and pre are functions of the inputs, and a second backward
    sends a gradient to each, the one of pre as ``grad_pre`` [T, B, N] (without checkpoints).
    """
    x, h0, weight, bias, act_param, leak = args.x, args.h0, args.weight, args.bias, args.act_param, args.leak
    T, B, N = grad_hs.shape
    alive = running(T, args.lengths)
    grad_hs = without_padding(grad_hs, alive)
    x = None if x is None else without_padding(x, alive)

    def zeros(tensor: Tensor | None, required: bool) -> Tensor | None:
        return torch.zeros_like(tensor) if tensor is not None and required else None

    m = grad_hs.new_zeros(N, N)
    grad_weight, grad_bias = zeros(weight, needs.weight), zeros(bias, needs.bias)
    grad_act_param, grad_leak = zeros(act_param, needs.act_param), zeros(leak, needs.leak)
    grad_reset_state = zeros(args.reset_state, args.resets is not None)
    grad_x_segments: list[Tensor] = []
    norms: list[Tensor] = []
    carry = torch.zeros_like(h0)  # dL/dh_t without g_t

    segment = args.checkpoint_every or T  # its steps
    for start in reversed(range(0, T, segment)):
        stop = min(start + segment, T)
        hs, pre_rows, before, cut_rows = segment_states(args, x, states, pre, alive, start, stop)
        of_pre = (None,) * (stop - start) if grad_pre is None else without_padding(grad_pre, alive).unbind(0)
        rows = zip(grad_hs[start:stop], hs, pre_rows, before, cut_rows, of_pre, strict=True)
        deltas: list[Tensor] = []
        for g_t, h_t, a_t, before_t, cut_t, of_pre_t in reversed(list(rows)):
            ghat = g_t + carry
            if needs.norm:
                norms.append(norm_over_batch(ghat))
            phi, of_phi = h_t, ghat
            if leak is not None:
                phi, of_phi = activation_fwd(a_t, act_param, activation=args.activation), leak * ghat
                grad_leak = None if grad_leak is None else grad_leak + (ghat * (phi - before_t)).sum_to_size(leak.shape)
            delta, elementwise = chain(of_phi, phi, a_t, act_param, activation=args.activation)
            if elementwise is not None and grad_act_param is not None:
                assert act_param is not None
                grad_act_param = grad_act_param + elementwise.sum_to_size(act_param.shape)
            if of_pre_t is not None:
                delta = delta + of_pre_t
            if args.message_clip > 0:
                delta = clip_message(delta, args.message_clip)
            carry = transposed_product(args, delta)
            if leak is not None:
                carry = carry + (1 - leak) * ghat
            if cut_t is not None:
                if grad_reset_state is not None:
                    grad_reset_state = grad_reset_state + started(carry, ~cut_t, None)
                carry = started(carry, cut_t, None)
            deltas.append(delta)
        delta_segment = torch.stack(deltas[::-1])

        if needs.sums:
            m = m + delta_segment.flatten(0, 1).mT @ before.flatten(0, 1)
            if weight is not None and grad_weight is not None:
                assert x is not None
                grad_weight = grad_weight + weight_gradient(delta_segment, x[start:stop], weight)
            if grad_bias is not None:
                grad_bias = grad_bias + delta_segment.sum((0, 1))
        if needs.x and weight is None:
            grad_x_segments.append(delta_segment)
        elif needs.x and x is not None and x.is_floating_point():
            assert weight is not None
            grad_x_segments.append(delta_segment @ weight)

    grad_x = torch.cat(grad_x_segments[::-1]) if grad_x_segments else None
    norm = torch.stack(norms[::-1]) if needs.norm else None
    first, scale, second = map_gradients(args, m) if needs.map else (None, None, None)
    of_state, of_units = (grad_reset_state, grad_leak), (grad_weight, grad_bias, grad_act_param)
    return ScanGradients(grad_x, first, scale, second, carry, *of_units, *of_state, norm)


def map_gradients(args: ScanArgs, m: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """The gradients of first, scale and second from M: Note [Factored scan backward]."""
    if args.first is None or args.scale is None:
        return None, None, m
    m_v = m @ args.first
    return (m.mT @ args.second) * args.scale, (args.second * m_v).sum(0), m_v * args.scale


def segment_states(
    args: ScanArgs, x: Tensor | None, states: Tensor, pre: Tensor | None, alive: Tensor | None, start: int, stop: int
) -> tuple[Any, Any, Tensor, Any]:
    """For the steps [start, stop): rows of hs, rows of pre, the states h_{t-1} that they start from [steps, B, N], and
    rows of resets; None for those that do not exist. Recomputes the states from a checkpoint."""
    entering, absent = args.h0, (None,) * (stop - start)
    alive = None if alive is None else alive[start:stop]
    cut = None if args.resets is None else args.resets[start:stop]
    if args.checkpoint_every:
        assert x is not None
        entering = states[start // args.checkpoint_every]
        segment = args._replace(x=x[start:stop], h0=entering, checkpoint_every=0, message_clip=0.0, resets=cut)
        states, _, pre = run_steps(segment, alive)
    before = started(torch.cat([entering.unsqueeze(0), states[:-1]]), cut, args.reset_state)
    pre_rows, cut_rows = (absent if rows is None else rows.unbind(0) for rows in (pre, cut))
    return states.unbind(0), pre_rows, without_padding(before, alive), cut_rows


def weight_gradient(delta: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """sum_t delta_t x_t^T [N, D]; for token ids x [T, B], where x_t is one-hot, delta added to the column of its id."""
    rows = delta.flatten(0, 1)
    if x.is_floating_point():
        return rows.mT @ x.flatten(0, 1)
    return torch.zeros_like(weight).index_add(1, x.flatten(), rows.mT)
