"""gru_scan on CUDA; the kernels: ``csrc/cuda/gru_scan.cu``."""

from __future__ import annotations

import torch
from torch import Tensor

from orthokern._gpu_scans import Models, gru_parameter_gradients
from orthokern._scan_contract import GruArgs, GruGradients, GruInputs, GruOptions, GruStates
from orthokern.cuda import _call as native
from orthokern.cuda._sums import add_product

_RESIDENT = 0  # a path of csrc/cuda/gru_scan.h


class _Scan:
    """One GRU scan with the plan of the native planner (csrc/cuda/gru_scan.h)."""

    def __init__(self, inputs: GruInputs, options: GruOptions, T: int, *, backward: bool) -> None:
        B, N = inputs.h0.shape
        self.inputs, self.options = inputs, options
        self.sizes = {
            "T": T, "B": B, "N": N, "of_model": B // Models(inputs.w).count, "kanai": int(options.kanai),
            "backward": int(backward),
        }  # fmt: skip
        self.plan = native.plan("gru_scan_plan", inputs.h0.device, self.sizes)

    def run(self, **tensors: Tensor | None) -> None:
        """Launch it on the current stream; tensors by the names in csrc/cuda/gru_scan.h."""
        h0 = self.inputs.h0
        work = h0.new_empty(self.plan["work"]) if self.plan["work"] else None
        of_options = {"lengths": self.options.lengths, "resets": self.options.resets}
        given = {**self.inputs._asdict(), **of_options, **tensors, "work": work}
        native.call("gru_scan", h0.device, {**self.sizes, "plan": self.plan}, given)


def gru_scan_fwd(args: GruArgs) -> GruStates:
    """See ``orthokern.ops.gru_scan``."""
    inputs, options = args.parts()
    models = Models(inputs.w)
    inputs, options = models.gru_rows(*_ready(inputs, options))
    assert inputs.x is not None
    T, (B, N), new = inputs.x.shape[0], inputs.h0.shape, inputs.h0.new_empty
    states = GruStates(hs=new(T, B, N), gates=new(T, B, 3 * N), pre=None if options.kanai else new(T, B, N))
    of_backward = dict.fromkeys(("grad_hs", "grad_x", "factor", "grad_h0", "grad_reset_state", "norms"))
    _Scan(inputs, options, T, backward=False).run(**of_backward, **states._asdict())
    return GruStates(*(models.apart(tensor) for tensor in states))


def gru_scan_bwd(args: GruArgs, grad_hs: Tensor, states: GruStates, *, need_params: bool = True) -> GruGradients:
    """See ``orthokern.ops.gru_scan``."""
    inputs, options = args.parts()
    models = Models(inputs.w)
    inputs, options = models.gru_rows(*_ready(inputs._replace(x=None), options))
    h0 = inputs.h0
    saved = {
        name: models.joined(native.ready(tensor, torch.float32, h0.device, name))
        for name, tensor in {"grad_hs": grad_hs, **states._asdict()}.items()
    }
    hs = saved["hs"]
    assert hs is not None
    T, B, N = hs.shape
    grad_x, factor, grad_h0 = h0.new_empty(T, B, 3 * N), torch.empty_like(hs), torch.empty_like(h0)
    scan = _Scan(inputs, options, T, backward=True)
    norms = h0.new_zeros(T, scan.plan["norm_columns"])
    state = inputs.reset_state
    grad_state = None if options.resets is None or state is None else torch.zeros_like(state)
    scan.run(**saved, grad_x=grad_x, factor=factor, grad_h0=grad_h0, grad_reset_state=grad_state, norms=norms)
    grad_w = grad_bias = None
    if need_params:
        grad_w, grad_bias = gru_parameter_gradients(models, inputs, options, hs, grad_x, factor, add_product)
    norm = models.apart(norms).sum(-1).sqrt()  # [T], [T, models]
    return GruGradients(
        models.apart(grad_x), grad_w, models.apart(grad_h0, 0), grad_bias, models.apart(grad_state, 0),
        norm.mT if models.several else norm,
    )  # fmt: skip


def serves_replicas(inputs: GruInputs) -> bool:
    """Whether a call for R models can be one launch: if the matrices fit into registers."""
    one = inputs._replace(w=inputs.w[0], h0=inputs.h0[0])
    return _Scan(one, GruOptions("kanai"), 1, backward=True).plan["path"] == _RESIDENT


def _ready(inputs: GruInputs, options: GruOptions) -> tuple[GruInputs, GruOptions]:
    """The arguments, checked and contiguous."""
    device = inputs.h0.device
    tensors = {name: native.ready(tensor, torch.float32, device, name) for name, tensor in inputs._asdict().items()}
    lengths = native.ready(options.lengths, torch.int64, device, "lengths")
    resets = native.ready(options.resets, torch.bool, device, "resets")
    return GruInputs(**tensors), GruOptions(options.variant, lengths, resets)  # type: ignore[arg-type]
