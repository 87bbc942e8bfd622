"""The peak memory of a scan, which needs a process of its own. Prints one JSON object.

python bench/child.py memory --op factored_scan --inputs tokens --activation tanh --T 10020 --N 128 --threads 2

Memory is in MB of 1e6 bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from harness import BATCH, ROOT, WrongResult, check, factors
from torch import Tensor

from orthokern import cpu, functional

FEATURES, CLASSES = 10, 9
TOLERANCE = 1e-5


def child(*arguments: str) -> dict[str, Any]:
    """Run this file in a process of its own, with the threads of this one; returns the JSON object that it prints."""
    command = [sys.executable, __file__, *arguments, "--threads", str(torch.get_num_threads())]
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    process = subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True)
    if process.returncode:
        raise WrongResult(f"bench/child.py {' '.join(arguments)} failed: {process.stderr.strip()[-800:]}")
    result: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return result


def status(field: str) -> int | None:
    """A field of /proc/self/status in bytes; None where the system has none."""
    try:
        line = re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    except OSError:
        return None
    return 1024 * int(line[1]) if line else None


def peak() -> int:
    """Largest resident size so far, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return status("VmHWM") or unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def reset_peak() -> int:
    """Free cached memory, reset the recorded peak if the system allows it, and return the resident size in bytes."""
    gc.collect()
    cpu.empty_cache()
    with contextlib.suppress(AttributeError, OSError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)
    with contextlib.suppress(OSError):  # then the peak is that of the imports at least, far below what is measured
        Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS") or peak()


def memory(op: str, inputs: str, activation: str, T: int, N: int, every: int) -> dict[str, Any]:
    """Peak of forward and backward, every `every`-th state kept (0: all), above parameters and the input itself."""
    generator = torch.Generator().manual_seed(0)
    u, s, v = factors(N, generator)
    matrices = [u, s, v] if op == "factored_scan" else [(u * s) @ v.mT]
    weight, readout = torch.randn(N, FEATURES, generator=generator), torch.randn(CLASSES, N, generator=generator)
    slope = [torch.full((1,), 0.7)] if activation == "prelu" else []
    parameters = [t.requires_grad_() for t in (*matrices, weight, readout, *slope)]

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
        options = {"activation": activation, "act_param": slope, "checkpoint_every": every}
        states = getattr(functional, op)(x, *scanned, weight=w, backend=backend, **options)
        return functional.linear_cross_entropy(states, r, None, targets, backend=backend)

    def step(x: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(loss(x, targets), [*parameters, x] if x.requires_grad else parameters)

    # A short run first: it checks, starts the threads, and maps what does not grow with T.
    x, targets = data(8)
    exact_x = x.double() if inputs == "features" else x
    exact = torch.autograd.grad(loss(exact_x, targets, torch.float64, "reference"), parameters)
    error = check(op, step(x, targets)[: len(parameters)], exact, TOLERANCE)
    del exact, exact_x, x, targets

    batch = data(T)
    before = reset_peak()
    grads = step(*batch)
    extra = peak() - before
    assert all(bool(g.isfinite().all()) for g in grads)
    return {
        "ratio": extra / (2 * 4 * T * BATCH * N),
        "extra_mb": extra / 1e6,
        "before_mb": before / 1e6,
        "error": error,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("memory",))
    parser.add_argument("--op", choices=("factored_scan", "dense_scan"), default="factored_scan")
    parser.add_argument("--inputs", choices=("tokens", "features"), default="tokens")
    parser.add_argument("--activation", choices=("tanh", "prelu", "oplu"), default="tanh")
    parser.add_argument("--checkpoint-every", type=int, default=0, metavar="K", help="keep every K-th state only")
    parser.add_argument("--T", type=int, required=True)
    parser.add_argument("--N", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    result = memory(args.op, args.inputs, args.activation, args.T, args.N, args.checkpoint_every)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
