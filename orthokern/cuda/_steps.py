"""Scans whose products are a library's, with kernels of single steps: launched as CUDA graphs of many steps."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from orthokern.cuda import _call as native

# Steps of a graph. Without one, the host takes about 10 us for each of the two or more launches of a step: of the last
# T mod _WINDOW steps, and of all steps of shorter scans. Many common T are multiples of 25.
_WINDOW = 25
# Graphs that are kept; the least recently used one is dropped. Each has copies of the maps.
_GRAPHS = 8
# Elements of a map, 64 MiB, above which a product takes longer than its launch and there are no graphs.
_LARGEST_MAP = 1 << 24
_STORED_BYTES = 512  # kStoredBytes of csrc/cuda/scan.h

Tensors = Mapping[str, Tensor]
# (dtype, shape, strides) of tensors by their names
_Layout = tuple[tuple[str, torch.dtype, tuple[int, ...], tuple[int, ...]], ...]


class Steps:
    """The launches of single steps: kernels of one scan over one set of tensors."""

    def __init__(self, op: str, tensors: Tensors) -> None:
        self.op, self.tensors, any_of_them = op, tensors, next(iter(tensors.values()))
        self.device = any_of_them.device
        # the arguments of the scan, after the number of the window's first step
        self.stored = torch.empty(_STORED_BYTES // 8, dtype=torch.int64, device=self.device)

    def kernel(self, part: int, product: Tensor, passed: Tensor) -> Callable[..., None]:
        """A part of a step on the current stream, as a function of ``step``, counted from the window's first one."""
        sizes = {"rows": passed.shape[0], "N": product.shape[1] if self.op == "scan" else self.tensors["w"].shape[1]}
        tensors = {"stored": self.stored, "product": product, "passed": passed}
        return native.prepared(f"{self.op}_step", self.device, {**sizes, "part": part}, tensors)

    def window(self, launch: Callable[[Steps, int], None], count: int) -> None:
        """The next ``count`` steps."""
        launch(self, count)
        self.stored[:1].add_(count)


class _Kept(Steps):
    """Steps over tensors at fixed addresses, and their graph. Used by one thread at a time, on one stream."""

    def __init__(self, op: str, tensors: Tensors) -> None:
        super().__init__(op, tensors)
        self.lock = threading.Lock()
        self.replay: Callable[[], None] | None = None


@functools.lru_cache(maxsize=_GRAPHS)
def _kept(op: str, variant: object, device: torch.device, stream: int, layout: _Layout) -> _Kept:
    with torch.inference_mode(False):  # a tensor of inference mode could not be changed outside of it
        own = {n: torch.empty_strided(shape, stride, dtype=d, device=device) for n, d, shape, stride in layout}
        return _Kept(op, own)


def run(
    op: str,
    variant: object,
    sizes: Mapping[str, Any],
    args: Mapping[str, Tensor | None],
    tensors: Tensors,
    launch: Callable[[Steps, int], None],
    steps: int,
    opening: Callable[[Steps], None] | None = None,
) -> None:
    """Run all steps of a scan on the current stream.

    op: "scan", "gru" or "peephole", whose arguments are `sizes` and `args`. tensors: the maps, and what steps pass to
    each other, with its first values; they may be overwritten. launch: launches steps with ``Steps.tensors`` and
    ``Steps.kernel``, in the same way for every call with the same `variant` and layout of `tensors`. opening: launched
    before them.
    """
    own = Steps(op, tensors)
    device = own.device
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        buffers = None
        if steps >= 2 * _WINDOW and max(t.numel() for t in tensors.values()) <= _LARGEST_MAP and _may_record(device):
            layout = tuple((name, t.dtype, tuple(t.shape), t.stride()) for name, t in tensors.items())
            buffers = _kept(op, variant, device, native.stream(device) or 0, layout)
            if not buffers.lock.acquire(blocking=False):  # another thread uses them
                buffers = None
        if buffers is None:
            _store(own, sizes, args, opening)
            return own.window(launch, steps)
        try:
            for name, tensor in buffers.tensors.items():
                tensor.copy_(tensors[name])
            _store(buffers, sizes, args, opening)
            for begin in range(0, steps, _WINDOW):
                count = min(_WINDOW, steps - begin)
                if count == _WINDOW and buffers.replay is not None:
                    buffers.replay()
                    continue
                buffers.window(launch, count)
                if buffers.replay is None:  # the library has been initialised by now
                    buffers.replay = _recorded(device, functools.partial(buffers.window, launch, _WINDOW))
        finally:
            buffers.lock.release()


def _store(
    steps: Steps,
    sizes: Mapping[str, Any],
    args: Mapping[str, Tensor | None],
    opening: Callable[[Steps], None] | None,
) -> None:
    native.call(f"{steps.op}_store", steps.device, sizes, {**args, "stored": steps.stored})
    if opening is not None:
        opening(steps)


def _may_record(device: torch.device) -> bool:
    """Whether steps may be launched as graphs: not on a CPU, in tests, and not into a graph that the caller captures,
    which must contain the steps themselves. Nor in the first run of a program of torch.compile(mode="reduce-overhead"),
    in which memory that stays allocated is an error."""
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return False
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is None:
        return True
    try:
        manager = trees.get_manager(device.index, create_if_none_exists=False)
    except AssertionError:  # of torch before 2.13, in a thread that has not compiled anything
        return True
    return manager is None or manager.stream != torch.cuda.current_stream(device)


_recording = threading.Lock()


def _recorded(device: torch.device, function: Callable[[], None]) -> Callable[[], None] | None:
    """`function` as a CUDA graph, for replays on the current stream; None while another thread records one."""
    if not _recording.acquire(blocking=False):
        return None
    try:
        stream, pool, first = _stream_and_pool(device, native.stream(device) or 0)
        graph, main = torch.cuda.CUDAGraph(), torch.cuda.current_stream(device)
        # A capture begins with a change of the state of torch's generator: after the work of the main stream, which may
        # read it, and not by tensors of inference mode.
        stream.wait_stream(main)
        with torch.inference_mode(False), torch.cuda.stream(stream):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                function()
            finally:
                graph.capture_end()
        main.wait_stream(stream)
        first[:] = first[:1] or [graph]
        return graph.replay
    finally:
        _recording.release()


@functools.lru_cache(maxsize=32)
def _stream_and_pool(device: torch.device, main: int) -> tuple[Any, Any, list[Any]]:
    """The stream to record graphs for the stream with the address `main`, their memory pool, and the first of them.

    torch has a workspace of the library for each stream, whose address a graph contains. Graphs that may run at the
    same time therefore need different ones, in memory that nothing else uses: the first graph keeps the pool.
    """
    return torch.cuda.Stream(device, priority=-1), torch.cuda.graph_pool_handle(), []
