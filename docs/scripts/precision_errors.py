"""Errors of the scans' precisions by T.

    python docs/scripts/precision_errors.py        of the CUDA scan, on the host harness: the table of benchmarks.md
    python docs/scripts/precision_errors.py cpu    of the CPU scan: the table of cpu-scans.md

The first takes two or three minutes, and a C++ compiler. The harness rounds factors as tensor cores are specified to
and adds in float32 one after the other; a device may add in another order.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from cuda_host import build  # noqa: E402
from helpers import run_scan, scan_problem  # noqa: E402

from orthokern.cuda import _call  # noqa: E402

B, LENGTHS = 4, (10, 100, 1000)
TENSOR_CORES = {"path": 1, "cluster": 2, "tensor": 1}  # clusters, which have other products than IEEE


def main(backend: str, N: int, precisions: tuple[str, ...]) -> None:
    generator = torch.Generator().manual_seed(0)

    def orthogonal() -> torch.Tensor:
        return torch.linalg.qr(torch.randn(N, N, dtype=torch.float64, generator=generator))[0]

    u, v = orthogonal(), orthogonal()
    s = 1 + 0.001 * (2 * torch.rand(N, dtype=torch.float64, generator=generator) - 1)
    print("| | T | " + " | ".join(precisions) + " |")
    for activation in ("identity", "tanh"):
        for T in LENGTHS:
            problem = scan_problem("factored_scan", B=B, T=T, N=N, activation=activation, inputs="tokens")
            problem.matrices = (u, s, v)
            exact = run_scan(problem, "reference")
            cells = []
            for precision in precisions:
                found = run_scan(problem.to(torch.float32), backend, precision=precision, algorithm="sequential")
                errors = (float((found[k].double() - exact[k]).norm() / exact[k].norm()) for k in ("hs", "grad_u"))
                cells.append(" / ".join(f"{error:.1e}" for error in errors))
            print(f"| {activation} | {T} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1:] == ["cpu"]:
        main("cpu", 128, ("ieee", "bf16"))
        sys.exit()
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        build.use(build.load(Path(folder)), patch)
        patch.setattr(_call, "overrides", TENSOR_CORES)
        main("cuda", 64, ("ieee", "tf32", "bf16"))
