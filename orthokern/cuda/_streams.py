"""The second stream of a backward, for products that run concurrently with the scan."""

from __future__ import annotations

import functools
from typing import Any

import torch


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
