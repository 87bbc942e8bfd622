"""factored_scan and dense_scan on CUDA; ``csrc/cuda/scan.h`` describes the kernels."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from orthokern import _gpu_scans
from orthokern._activations import ACTIVATIONS
from orthokern._gpu_scans import composed
from orthokern._products import ieee_products
from orthokern._scan_contract import ScanArgs, ScanGradients, ScanStates
from orthokern.cuda import _call as native
from orthokern.cuda._library import product
from orthokern.cuda._steps import Steps
from orthokern.cuda._steps import run as run_steps

# The lowest precision of products that a kernel may use. Three TF32 products are slower than IEEE float32.
_PRECISIONS = {"ieee": 0, "3xtf32": 0, "tf32": 1, "bf16": 2}
# The fewest steps of a window whose products run concurrently with the scan of the next one, which costs a launch for
# each window.
_OVERLAPPED_STEPS = 256
_CLUSTER, _LIBRARY = 1, 2  # ScanPath of csrc/cuda/scan.h
# Clocks of the GPU between a scan on clusters and the products of its window: otherwise the blocks of a product, which
# become ready at the same moment as the next kernel of the scan, occupy the multiprocessors that its clusters need.
_PRODUCT_DELAY = 10_000
_CARRY_UNITS = 128  # kCarryUnits of csrc/cuda/scan_carry.h
# The tensors of a launch, all of which are passed to the native function.
_NONE = dict.fromkeys(("x", "tokens", "table", "gate", "start", "out", "pre", "end", "sums", "norms", "carried"))


class SideStream:
    """A second stream for work that runs concurrently with the scan: the current stream inside a ``with`` block.

    It first waits for all work of the current stream, and then ``delay`` clocks of the GPU. The current stream waits
    for it in ``join`` only. References to tensors of both streams must be kept until then, also after an exception. A
    CUDA graph captures both. Without a CUDA device, in tests, there is one stream.
    """

    def __init__(self, device: torch.device, delay: int) -> None:
        self.main = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self.stream = None if self.main is None else _side_stream(device.index or 0, self.main.cuda_stream)
        self.inside: Any = None
        self.delay = delay

    def __enter__(self) -> None:
        if self.stream is not None:
            self.stream.wait_stream(self.main)
            self.inside = torch.cuda.stream(self.stream)
            self.inside.__enter__()
            if self.delay:
                torch.cuda._sleep(self.delay)

    def __exit__(self, *error: object) -> None:
        if self.inside is not None:
            self.inside.__exit__(*error)

    def join(self) -> None:
        if self.main is not None and self.stream is not None:
            self.main.wait_stream(self.stream)


@functools.lru_cache(maxsize=32)
def _side_stream(device: int, main: int) -> Any:
    """The second stream of the stream with the address ``main``. Each has its own: while a thread captures a graph, no
    work outside of the graph may wait for its streams. Cached: torch has only 32 streams of a priority for each device.
    """
    return torch.cuda.Stream(device)


class Scan(_gpu_scans.Scan):
    """Launches of the native kernels, with the plan of the native planner. args: as ``native.ready_args`` returns
    them."""

    def __init__(
        self, args: ScanArgs, *, backward: bool, chunk: int | None = None, sequences: int | None = None
    ) -> None:
        super().__init__(args, backward=backward, chunk=chunk, sequences=sequences)
        (B, N), act_param, leak, first = args.h0.shape, args.act_param, args.leak, args.first
        self.device = args.h0.device
        tokens = not backward and args.x is not None and not args.x.is_floating_point()
        self.sizes = {
            "B": B,
            "N": N,
            "K": 0 if first is None else first.shape[1],
            "sequences": self.sequences,
            "precision": _PRECISIONS[args.precision],
            "activation": ACTIVATIONS[args.activation].number,
            "act_param_stride": int(act_param is not None and act_param.numel() > 1),
            "leak_stride": int(leak is not None and leak.numel() > 1),
            "backward": int(backward),
        }
        # the shared memory of a sequence depends on which inputs exist
        inputs = {"tokens": int(tokens), "cut": int(self.cut is not None), "leak": int(leak is not None)}
        self.plan = native.plan(f"{args.op}_plan", self.device, {**self.sizes, "T": 1, "chunk": 1, **inputs})
        self.sums_rows, self.norm_columns = self.plan["sums_rows"], self.plan["norm_columns"]
        self.packed = False  # whether a launch has filled the workspace
        self.tensors = {
            "first": first,
            "scale": args.scale,
            "second": args.second,
            "act_param": act_param,
            "lengths": args.lengths,
            "leak": leak,
            "restart": self.restart,
            "packed1": args.second.new_empty(self.plan["packed1"]) if self.plan["packed1"] else None,
            "packed2": args.second.new_empty(self.plan["packed2"]) if self.plan["packed2"] else None,
        }

    def side_stream(self, window: int) -> SideStream | None:
        """None if the batch occupies the GPU, so that its window is short, or if products of a library alternate with
        other kernels."""
        path = self.plan["path"]
        if path == _LIBRARY or window < _OVERLAPPED_STEPS:
            return None
        return SideStream(self.device, _PRODUCT_DELAY if path == _CLUSTER else 0)

    def add_to_map(self, total: Tensor | None, rows: Tensor, states: Tensor) -> Tensor:
        """In TF32 if the precision of the scan's products is below IEEE; bfloat16 would need copies."""
        if not self.plan["precision"]:
            return super().add_to_map(total, rows, states)
        N, adds = self.sizes["N"], total is not None
        total = rows.new_empty(N, N) if total is None else total
        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            product(self.device, ieee=False)(rows.mT, states, total, add=adds)
        return total

    def carry(self, power: Tensor, ends: Tensor, starts: Tensor) -> None:
        count, B, N = ends.shape
        if N > _CARRY_UNITS:
            return super().carry(power, ends, starts)
        sizes, tensors = {"count": count, "B": B, "N": N}, {"power": power, "ends": ends, "starts": starts}
        native.call("scan_carry", self.device, sizes, tensors)

    def run(self, steps: int, *, time: int = 0, **tensors: Tensor | None) -> None:
        if not steps or not self.sequences:
            return
        table = tensors.get("table")
        sizes = {
            **self.sizes,
            "T": steps,
            "D": 0 if table is None else table.shape[0],
            "chunk": self.chunk or steps,
            "time": time,
            "clip": self.clip,
            "packed": int(self.packed),
        }
        cut = None if self.cut is None else self.cut[time : time + steps]
        args = {**_NONE, **self.tensors, **tensors, "cut": cut}
        if self.plan["path"] == _LIBRARY:
            self._run_steps(sizes, args)
        else:
            native.call(self.args.op, self.device, {**sizes, "plan": self.plan}, args)
            self.packed = True

    def _run_steps(self, sizes: dict[str, Any], args: dict[str, Tensor | None]) -> None:
        """A library product and one kernel per step."""
        start, backward, precision = args["start"], self.sizes["backward"], self.plan["precision"]
        if args["leak"] is not None and not backward:  # the kernel reads (1 - l) h_{t-1} from the state, in float32
            precision = min(precision, _PRECISIONS["tf32"])
        shape, new = (self.sizes["sequences"], self.sizes["N"]), self.args.second.new_empty
        dtype = torch.bfloat16 if precision == _PRECISIONS["bf16"] else torch.float32  # of the products' factors
        state = new(shape, dtype=dtype).zero_() if start is None else start.view(shape).to(dtype, copy=True)
        factors = [factor.to(dtype) for factor in self._factors()]
        tensors = {"state": state, "product": new(shape), "last": factors[-1]}
        if len(factors) > 1:
            tensors |= {"first": factors[0], "inner": state.new_empty(len(state), factors[0].shape[1])}

        def launch(steps: Steps, count: int) -> None:
            own = steps.tensors
            end_step = steps.kernel(backward, own["product"], own["state"])
            multiply, rows = product(steps.device, ieee=not precision), own["inner" if "first" in own else "state"]
            for step in range(count):
                if "first" in own:
                    multiply(own["state"], own["first"], rows)
                multiply(rows, own["last"], own["product"])
                end_step(step=step)

        of_scan = {name: value for name, value in sizes.items() if name != "backward"} | {"precision": precision}
        with ieee_products():
            run_steps("scan", (backward, precision), of_scan, args, tensors, launch, min(sizes["chunk"], sizes["T"]))

    def _factors(self) -> list[Tensor]:
        """Matrices whose product maps the rows of a state: W^T, backward W, as two factors if that is less work."""
        first, scale, second = self.args.first, self.args.scale, self.args.second
        backward = self.sizes["backward"]
        if first is None or scale is None:
            return [second if backward else second.mT]
        if 2 * self.sizes["K"] > self.sizes["N"]:
            w = composed(self.args).to(second.dtype)
            return [w if backward else w.mT]
        return [second * scale, first.mT] if backward else [first * scale, second.mT]


def scan_fwd(args: ScanArgs) -> ScanStates:
    """See ``orthokern.ops.factored_scan`` and ``orthokern.ops.dense_scan``.

    ``precision`` has an effect above N = 160 (factored) or 192: on the kernels of clusters, and on library products.
    """
    args, _ = native.ready_args(args, args.time_steps)
    return _gpu_scans.scan_fwd(Scan, args)


def scan_bwd(args: ScanArgs, grad_hs: Tensor, states: Tensor, pre: Tensor | None, needs: Any) -> ScanGradients:
    """See ``orthokern.ops.factored_scan`` and ``orthokern.ops.dense_scan``."""
    saved = {"grad_hs": grad_hs, "states": states, "pre": pre}
    args, (grad_hs, states, pre) = native.ready_args(args, grad_hs.shape[0], **saved)
    return _gpu_scans.scan_bwd(Scan, args, grad_hs, states, pre, needs)
