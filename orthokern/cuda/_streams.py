"""The second stream of a backward, for products that run concurrently with the scan."""

from __future__ import annotations

import functools
from typing import Any

import torch

# Clocks of the GPU that the second stream waits before its work: otherwise the blocks of a product, which become ready
# at the same moment as the next kernel of the scan, occupy the multiprocessors that its clusters need.
_DELAY = 10_000


class SideStream:
    """A second stream for work that runs concurrently with the scan: the current stream inside a ``with`` block.

    It first waits for all work of the current stream, which waits for it in ``join`` only. References to tensors of
    both streams must be kept until then, also after an exception. A CUDA graph captures both. Without a CUDA device, in
    tests, there is one stream.
    """

    def __init__(self, device: torch.device) -> None:
        self.main = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self.stream = None if self.main is None else _side_stream(device.index or 0, self.main.cuda_stream)
        self.inside: Any = None

    def __enter__(self) -> None:
        if self.stream is not None:
            self.stream.wait_stream(self.main)
            self.inside = torch.cuda.stream(self.stream)
            self.inside.__enter__()
            torch.cuda._sleep(_DELAY)

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
