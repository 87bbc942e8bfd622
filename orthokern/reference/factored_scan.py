"""factored_scan, the reference: h_t = phi(U (s * (V^T h_{t-1})) + e_t), W = U diag(s) V^T never formed.

Note [Factored scan backward]
    Let a_t = U S V^T h_{t-1} + e_t, h_t = phi(a_t), S = diag(s), and g_t the gradient that reaches h_t from outside
    the recurrence. Write ghat_t = dL/dh_t and delta_t = dL/da_t. h_t acts on the loss directly and through a_{t+1}:

        ghat_t  = g_t + (U S V^T)^T delta_{t+1} = g_t + V (s * (U^T delta_{t+1})),     delta_{T+1} = 0
        delta_t = phi'(a_t) ghat_t                                        (a diagonal, or oplu's permutation)
        dL/dh_0 = V (s * (U^T delta_1))

    e_t enters a_t with weight one, so dL/de_t = delta_t. For the parameters, a_t = W h_{t-1} + e_t gives
    dL/dW = M := sum_t delta_t h_{t-1}^T, one product over all time steps, and the chain rule through
    W = U S V^T, dL = <M, dU S V^T + U dS V^T + U S dV^T>, gives

        dL/dU = M V S,     dL/dV = M^T U S,     dL/ds = diag(U^T M V).

    Lengths and the clipping of delta_t: Note [Sequences of different lengths] and Note [Message clip] in ``_scan.py``.

    In row form (a row per sequence): h V S U^T + e, ghat = g + ((delta U) s) V^T, M = delta^T h.
"""

from orthokern.reference._scan import scan_bwd as factored_scan_bwd
from orthokern.reference._scan import scan_fwd as factored_scan_fwd

__all__ = ["factored_scan_bwd", "factored_scan_fwd"]
