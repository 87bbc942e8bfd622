"""The kernels under compute-sanitizer."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from device_cases import need

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[2]

# What compute-sanitizer runs, by the kernels that it is about. `backend` is set in front.
SANITIZED = {
    "scans": """
for n in (33, 130):
    u, table, ids = basis(n, n), torch.randn(n, 5, device="cuda", requires_grad=True), tokens()
    f.factored_scan(ids, u, ones(n), u, weight=table, backend=backend).sum().backward()
    f.factored_scan(ids, u, ones(n), u, weight=table, backend=backend, message_clip=0.1,
                    lengths=torch.tensor([6, -1, 2**40], device="cuda")).sum().backward()
    low = u[:, :5]
    f.factored_scan(ids, low, ones(5), low, weight=table, backend=backend,
                    lengths=torch.tensor([6, -1, 2**40], device="cuda")).sum().backward()
    f.dense_scan(ids, u, weight=table, activation="identity", backend=backend).sum().backward()
    f.dense_scan(ids, u, weight=table, activation="identity", algorithm="chunked", backend=backend).sum().backward()
""",
    "steps": """
_call.overrides = {"path": 2}
for n in (33, 66):
    u, table, ids = basis(n, n), torch.randn(n, 5, device="cuda", requires_grad=True), tokens()
    for lengths in (None, torch.tensor([6, -1, 2**40], device="cuda")):
        f.factored_scan(ids, u, ones(n), u, weight=table, backend=backend, lengths=lengths).sum().backward()
        f.dense_scan(ids, u, weight=table, backend=backend, lengths=lengths, message_clip=0.1).sum().backward()
_call.overrides = {"path": 1}
x, w = torch.randn(11, 3, 99, device="cuda", requires_grad=True), torch.randn(99, 33, device="cuda") / 6
for variant in ("kanai", "torch"):
    f.gru_scan(x, w.requires_grad_(), variant=variant, backend=backend).sum().backward()
""",
    "checkpoints": """
for n in (33, 130):
    u, x = basis(n, n), torch.randn(6, 3, n, device="cuda", requires_grad=True)
    slope = torch.full((n,), 0.2, device="cuda", requires_grad=True)
    for every in (1, 4):
        f.factored_scan(x, u, ones(n), u, activation="prelu", act_param=slope, checkpoint_every=every,
                        backend=backend).sum().backward()
        f.dense_scan(x, u, activation="identity", algorithm="chunked", checkpoint_every=every,
                     backend=backend).sum().backward()
""",
    "gru_scan": """
for n in (33, 130):
    x, w = torch.randn(6, 3, 3 * n, device="cuda", requires_grad=True), torch.randn(3 * n, n, device="cuda") / n**0.5
    w.requires_grad_()
    for variant in ("kanai", "torch"):
        for lengths in (None, torch.tensor([6, -1, 2**40], device="cuda")):
            f.gru_scan(x, w, variant=variant, lengths=lengths, backend=backend).sum().backward()
""",
    "activations": """
for n in (2, 66, 1030):
    x = torch.randn(37, n, device="cuda", requires_grad=True)
    for name in f.ACTIVATIONS:
        for size in (1, n) if name in ("prelu", "leaky_relu", "modrelu") else (0,):
            p = torch.full((size,), 0.2, device="cuda", requires_grad=True) if size else None
            y = f.activation(x, name, p, backend=backend)
            if name != "identity":
                y.sum().backward()
""",
    "cayley": """
for n, k in ((1, 1), (33, 33), (64, 64), (130, 130), (130, 7), (66, 65), (200, 70)):
    for rate in (1e-5, 1e-2, 3.0):
        f.cayley(basis(n, k).detach(), torch.randn(n, k, device="cuda"), rate, backend=backend)
    f.cayley(torch.stack([basis(n, k).detach()] * 3), torch.randn(3, n, k, device="cuda"), 1e-2, backend=backend)
if backend == "cuda":
    sizes = ((1, 1), (33, 33), (130, 130), (130, 7), (66, 65))
    cayley.cayley_of_many([(basis(*s).detach(), torch.randn(s, device="cuda"), 1e-2) for s in sizes])
""",
}
PREAMBLE = """
import torch
from orthokern import functional as f
from orthokern.cuda import _call, cayley
def basis(n, k): return torch.linalg.qr(torch.randn(n, k, device="cuda"))[0].requires_grad_()
def ones(n): return torch.ones(n, device="cuda")
def tokens(): return torch.randint(0, 5, (6, 3), device="cuda")
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="compute-sanitizer is not installed")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
@pytest.mark.parametrize("part", SANITIZED)
def test_compute_sanitizer_finds_nothing(part: str, tool: str, backend: str) -> None:
    need("factored_scan", backend, N=33, K=33)
    if part == "steps" and backend != "cuda":
        pytest.skip("Triton has no path of single steps: the case does not apply")
    code = f"{PREAMBLE}\nbackend = {backend!r}\n{SANITIZED[part]}\ntorch.cuda.synchronize()"
    done = subprocess.run(
        ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
