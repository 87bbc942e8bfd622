"""Measurements that need their own process, because they measure the memory of the process. Prints one JSON object.

python bench/child.py memory --op factored_scan --inputs tokens --activation tanh --T 10020 --N 128 --threads 2
python bench/child.py copy --T 10000 --N 128 --threads 2

Memory is in MB of 1e6 bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import io
import json
import math
import re
import resource
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from harness import BATCH, check, factors
from torch import Tensor

from orthokern import cpu, functional

FEATURES, CLASSES = 10, 9
TOLERANCE = 1e-5


def status(field: str) -> int | None:
    """A field of /proc/self/status in bytes; None where the system has none."""
    try:
        found = re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    except OSError:
        return None
    return 1024 * int(found[1]) if found else None


def peak() -> int:
    """Largest resident size so far, in bytes."""
    high = status("VmHWM")
    if high is not None:
        return high
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def start_again() -> int:
    """Free cached memory, reset the recorded peak if the system allows it, and return the resident size in bytes."""
    gc.collect()
    cpu.empty_cache()
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError):  # not glibc
        pass
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:  # then the peak is that of the imports at least; it is far below what is measured
        pass
    return status("VmRSS") or peak()


def memory(op: str, inputs: str, activation: str, T: int, N: int, every: int) -> dict[str, Any]:
    """Peak of forward and backward, every `every`-th state kept (0: all), above parameters and the input itself."""
    generator = torch.Generator().manual_seed(0)
    u, s, v = factors(N, generator)
    matrices = [u, s, v] if op == "factored_scan" else [(u * s) @ v.mT]
    weight, readout = torch.randn(N, FEATURES, generator=generator), torch.randn(CLASSES, N, generator=generator)
    parameters = [*matrices, weight, readout]
    if activation == "prelu":
        parameters.append(torch.full((1,), 0.7))  # its slope
    for parameter in parameters:
        parameter.requires_grad_()

    def data(T: int) -> tuple[Tensor, Tensor]:
        if inputs == "tokens":
            x = torch.randint(0, FEATURES, (T, BATCH), generator=generator)
        else:
            x = torch.randn(T, BATCH, FEATURES, generator=generator).requires_grad_()
        return x, torch.randint(0, CLASSES, (T, BATCH), generator=generator)

    def loss(x: Tensor, targets: Tensor, dtype: torch.dtype = torch.float32, backend: str | None = None) -> Tensor:
        cast = [parameter.to(dtype) for parameter in parameters]
        slope = cast.pop() if activation == "prelu" else None
        *scanned, w, r = cast
        scan = getattr(functional, op)
        options = {"activation": activation, "act_param": slope, "checkpoint_every": every}
        states = scan(x, *scanned, weight=w, backend=backend, **options)
        return functional.linear_cross_entropy(states, r, None, targets, backend=backend)

    def step(x: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        wanted = [*parameters, x] if x.requires_grad else parameters
        return torch.autograd.grad(loss(x, targets), wanted)

    # A short run first: it checks, starts the threads, and maps what does not grow with T.
    small = data(8)
    exact = torch.autograd.grad(
        loss(small[0].double() if inputs == "features" else small[0], small[1], torch.float64, "reference"), parameters
    )
    error = check(op, step(*small)[: len(parameters)], exact, TOLERANCE)
    del exact, small

    batch = data(T)
    before = start_again()
    grads = step(*batch)
    extra = peak() - before
    assert all(bool(g.isfinite().all()) for g in grads)
    states_and_adjoints = 2 * 4 * T * BATCH * N
    from orthokern import _C  # its memory pool, which no public function shows

    cached = _C.cache_bytes()
    return {
        "ratio": extra / states_and_adjoints,
        "extra_mb": round(extra / 1e6, 1),
        "states_and_adjoints_mb": round(states_and_adjoints / 1e6, 1),
        "before_mb": round(before / 1e6, 1),
        "pool_in_use_mb": round(cached[0] / 1e6, 1),
        "pool_waiting_mb": round(cached[1] / 1e6, 1),
        "error": error,
        "tolerance": TOLERANCE,
    }


def copy(T: int, N: int, algorithm: str) -> dict[str, Any]:
    """Peak of a process that trains on the copy task by its command line: a few iterations, an evaluation, plots."""
    from orthokern.tasks import copy as task
    from orthokern.training import read_metrics

    with tempfile.TemporaryDirectory() as folder:
        words = [
            "--T",
            T,
            "--hidden",
            N,
            "--algorithm",
            algorithm,
            "--iterations",
            4,
            "--threads",
            torch.get_num_threads(),
        ]
        with contextlib.redirect_stdout(io.StringIO()):
            code = task.main([str(word) for word in (*words, "--out", Path(folder) / "run")])
        evaluations = [r for r in read_metrics(Path(folder) / "run" / "metrics.jsonl") if "held_out_loss" in r]
        assert code == 0 and len(evaluations) == 1 and math.isfinite(evaluations[0]["held_out_loss"])
        assert list(Path(folder).glob("run/*.png"))
    return {"peak_mb": round(peak() / 1e6, 1), "B": task.DEFAULTS["batch"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("memory", "copy"))
    parser.add_argument("--op", choices=("factored_scan", "dense_scan"), default="factored_scan")
    parser.add_argument("--inputs", choices=("tokens", "features"), default="tokens")
    parser.add_argument("--activation", choices=("tanh", "prelu", "oplu"), default="tanh")
    parser.add_argument("--checkpoint-every", type=int, default=0, metavar="K", help="keep every K-th state only")
    parser.add_argument("--algorithm", choices=("auto", "modal", "sequential"), default="auto", help="of the copy task")
    parser.add_argument("--T", type=int, required=True)
    parser.add_argument("--N", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    if given.what == "memory":
        found = memory(given.op, given.inputs, given.activation, given.T, given.N, given.checkpoint_every)
    else:
        found = copy(given.T, given.N, given.algorithm)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
