"""Memory of a scan's forward and backward over that of states plus adjoints, each in a process of its own.

This file is the program of those processes too: it prints one JSON object, in MB of 1e6 bytes.

    python bench/bench_memory.py factored_scan tokens tanh --T 10020 --N 128
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import BATCH, Bench, Size, check, factors, run
from torch import Tensor

from orthokern import cpu, functional

CASES = [(op, inputs, "tanh", 0) for op in ("factored_scan", "dense_scan") for inputs in ("tokens", "features")]
# These keep their pre-activations for the backward: half as much again, and more than the target. Not so with
# checkpoints.
CASES += [(op, "tokens", "prelu", 0) for op in ("factored_scan", "dense_scan")]
CASES += [("factored_scan", "tokens", "oplu", 0)]
CASES += [("factored_scan", "tokens", activation, 100) for activation in ("prelu", "oplu")]
FEATURES, CLASSES = 10, 9
TOLERANCE = 1e-5


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
@pytest.mark.parametrize(("op", "inputs", "activation", "every"), CASES)
@pytest.mark.sizes([{"N": 128, "T": 10020}], quick=[{"N": 32, "T": 200}])
def test_peak(benchmark: Any, bench: Bench, size: Size, op: str, inputs: str, activation: str, every: int) -> None:
    """Loss on all states (linear readout, cross-entropy), gradients of everything, the features' included."""
    if bench.quick and (op, inputs, activation, every) not in (CASES[0], CASES[4]):
        pytest.skip("two processes are enough for a quick run")
    benchmark.group = "processes of their own"
    command = [sys.executable, __file__, op, inputs, activation, f"--checkpoint-every={every}"]
    command += [f"--T={size['T']}", f"--N={size['N']}", f"--threads={torch.get_num_threads()}"]
    result = json.loads(benchmark.pedantic(run, args=(command,), rounds=1))
    case = f"{op}, {inputs}" + ("" if activation == "tanh" else f", {activation}")
    case += f", checkpoint_every={every}" if every else ""
    ratio = 1e6 * result["extra_mb"] / (2 * 4 * size["T"] * BATCH * size["N"])
    bench.record("memory", case, {**size, "B": BATCH}, ratio, target=1.3, better="lower", **result)


def resident(field: str) -> int:
    """VmRSS or VmHWM of this process, its resident size now and at most, in bytes."""
    (kilobytes,) = re.findall(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return 1024 * int(kilobytes)


def reset_peak() -> int:
    """Free cached memory, let the recorded peak start again from here, and return the resident size in bytes."""
    gc.collect()
    cpu.empty_cache()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def memory(op: str, inputs: str, activation: str, T: int, N: int, every: int) -> dict[str, float]:
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
    extra = resident("VmHWM") - before
    assert all(bool(g.isfinite().all()) for g in grads)
    return {"extra_mb": extra / 1e6, "before_mb": before / 1e6, "error": error}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="The peak memory of one case.")
    parser.add_argument("op", choices=("factored_scan", "dense_scan"))
    parser.add_argument("inputs", choices=("tokens", "features"))
    parser.add_argument("activation", choices=("tanh", "prelu", "oplu"))
    parser.add_argument("--checkpoint-every", type=int, default=0, metavar="K", help="keep every K-th state only")
    parser.add_argument("--T", type=int, required=True)
    parser.add_argument("--N", type=int, required=True)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(json.dumps(memory(args.op, args.inputs, args.activation, args.T, args.N, args.checkpoint_every)))
