"""modal_scan on CUDA; the kernels: ``csrc/cuda/modal_scan.cu``; the algorithm: ``orthokern/_modal_chunks.py``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from orthokern._modal_chunks import Adjoints, Inside, Kernels, Steps, run_scan_bwd, run_scan_fwd
from orthokern._scan_contract import ModalGradients, ModalInputs
from orthokern.cuda import _call as native
from orthokern.cuda._call import DTYPES


def _call(name: str, steps: Steps, T: int, sizes: dict[str, int], tensors: dict[str, Tensor | None]) -> None:
    """Launch the kernel `name` for T steps."""
    re, im, lengths, B, chunk, first = steps
    sizes = {"T": T, "B": B, "M": re.shape[0], "chunk": chunk, "first": first, **sizes}
    native.call(name, re.device, sizes, {"re": re, "im": im, "lengths": lengths, **tensors})


def _forward(
    steps: Steps, x: Tensor, table: Tensor | None, state: Tensor | None, z: Tensor | None, end: Tensor | None
) -> None:
    dtype = x.dtype if table is None else table.dtype
    sizes = {"dtype": DTYPES[dtype], "D": 0 if table is None else table.shape[0], "id_bytes": x.element_size()}
    inputs = {"x": x, "ids": None} if table is None else {"x": None, "ids": x}
    _call("modal_forward", steps, len(x), sizes, {"table": table, "state": state, "z": z, "end": end, **inputs})


def _join(re: Tensor, im: Tensor, entering: Tensor, end: Tensor, chunk: int, backward: bool) -> Tensor:
    state = torch.empty_like(end)
    sizes = {"lanes": end.shape[2], "M": re.shape[0], "chunks": end.shape[0], "squarings": chunk.bit_length() - 1}
    tensors = {"re": re, "im": im, "entering": entering, "end": end, "state": state}
    native.call("modal_join", re.device, sizes | {"backward": int(backward)}, tensors)
    return state


def _backward(steps: Steps, inside: Inside, carry: Tensor | None, results: Adjoints) -> None:
    (g, z, before, ids), (end, delta, table, sums) = inside, results
    D, id_bytes = 0 if table is None else table.shape[1], 0 if ids is None else ids.element_size()
    sizes = {"dtype": DTYPES[g.dtype], "D": D, "id_bytes": id_bytes}
    tensors = {"ids": ids, "state": carry, "g": g, "states": z, "before": before}
    tensors |= {"table_sums": table, "sums": sums, "end": end}
    narrow = delta is None or delta.dtype == g.dtype
    tensors |= {"delta": delta, "wide": None} if narrow else {"delta": None, "wide": delta}
    _call("modal_backward", steps, len(g), sizes, tensors)


def _pairs(steps: Steps, inside: Inside, pairs: Tensor, carry: Tensor, sums: Tensor) -> None:
    g, z, before, _ = inside
    tensors = {"state": carry, "g": g, "states": z, "before": before, "pairs": pairs, "sums": sums}
    _call("modal_pairs", steps, len(g), {"dtype": DTYPES[g.dtype], "P": pairs.shape[0]}, tensors)


def _by_id(rows: Tensor, ids: Tensor, D: int) -> Tensor:
    ids = torch.where((ids >= 0) & (ids < D), ids, D)
    return torch.ops.aten.embedding_dense_backward(rows, ids, D + 1, -1, False)[:D]


KERNELS = Kernels(_forward, _join, _backward, _pairs, _by_id)


def ready(inputs: ModalInputs) -> ModalInputs:
    """The tensors in the form that kernels need, on the device of re."""
    return ModalInputs._make(tensors_ready(inputs.re.device, inputs._asdict()))


def tensors_ready(device: torch.device, tensors: Mapping[str, Tensor | None]) -> list[Any]:
    """The tensors, of any dtype, in the form that kernels need; re and im must be float64."""
    wide = ("re", "im")
    return [
        native.ready(tensor, torch.float64 if tensor is None or name in wide else tensor.dtype, device, name)
        for name, tensor in tensors.items()
    ]


def modal_scan_fwd(inputs: ModalInputs) -> Tensor:
    """See ``orthokern.ops.modal_scan``."""
    return run_scan_fwd(KERNELS, ready(inputs))


def modal_scan_bwd(inputs: ModalInputs, grad_z: Tensor, z: Tensor, *, need_x: bool = True) -> ModalGradients:
    """See ``orthokern.ops.modal_scan``."""
    g, states = tensors_ready(inputs.re.device, {"grad_z": grad_z, "z": z})
    return run_scan_bwd(KERNELS, ready(inputs), g, states, need_x)
