"""Draw how far orthonormal bases drift in long float32 training: docs/images/orthogonality_drift.png.

Random gradients of a given norm drive GeodesicSGD with and without its correction (orthokern/optim/geodesic.py, Note
[Drift]); max|M^T M - I| is measured in float64 along the way. From the repository's root:

    python docs/scripts/orthogonality_drift.py                 # 100 000 steps per curve
    python docs/scripts/orthogonality_drift.py --steps 2000    # a quick look

Prints one line per curve and writes the numbers beside the picture as JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch

import orthokern
from orthokern.init import haar_orthogonal_
from orthokern.optim import GeodesicSGD

# (label, lr, gradient norms): the copy task's rate with a clipped and an unclipped gradient, and a step that is large
CASES = [
    ("lr 1e-6, gradient norm 1", 1e-6, (1.0, 1.0)),
    ("lr 1e-4, gradient norms 1 to 100", 1e-4, (1.0, 100.0)),
    ("lr 1e-2, gradient norms 1 to 100 (large steps)", 1e-2, (1.0, 100.0)),
]
POOL = 64  # gradients drawn in advance; each step takes a random one, of either sign


def error(bases: list[torch.nn.Parameter]) -> float:
    """max|M^T M - I| over the bases, evaluated in float64."""
    m = torch.stack([p.detach() for p in bases]).double()
    return float((m.mT @ m - torch.eye(m.shape[-1], dtype=torch.float64)).abs().max())


def curve(n: int, k: int, lr: float, norms: tuple[float, float], correct: bool, steps: int) -> dict[str, Any]:
    """Two bases [n,k] through `steps` steps -> the error at about 200 of them, and the time."""
    generator = torch.Generator().manual_seed(0)
    pool = torch.randn(POOL, 2, n, k, generator=generator)
    pool /= torch.linalg.matrix_norm(pool).square().sum(1).sqrt()[:, None, None, None]
    bases = [torch.nn.Parameter(haar_orthogonal_(torch.empty(n, k), generator)) for _ in range(2)]
    optimizer = GeodesicSGD(bases, lr, correct_every=100 if correct else 0)
    low, high = (torch.tensor(norm).log() for norm in norms)
    picks = torch.randint(POOL, (steps,), generator=generator).tolist()
    sizes = torch.exp(low + (high - low) * torch.rand(steps, generator=generator))
    signs = torch.randint(2, (steps,), generator=generator) * 2 - 1
    factors = (sizes * signs).tolist()
    every = max(1, steps // 200)
    seen, errors, start = [0], [error(bases)], time.perf_counter()
    for step in range(1, steps + 1):
        gradient = pool[picks[step - 1]] * factors[step - 1]
        for p, g in zip(bases, gradient, strict=True):
            p.grad = g
        optimizer.step()
        if step % every == 0:
            seen.append(step)
            errors.append(error(bases))
    return {
        "N": n,
        "K": k,
        "lr": lr,
        "norms": norms,
        "corrected": correct,
        "steps": seen,
        "errors": errors,
        "seconds": time.perf_counter() - start,
    }


def draw(curves: list[dict[str, Any]], path: Path) -> None:
    """One panel per shape, one colour per case, dashed without correction."""
    shapes = sorted({(c["N"], c["K"]) for c in curves}, reverse=True)
    figure, axes = plt.subplots(1, len(shapes), figsize=(6 * len(shapes), 4.2), sharey=True, layout="constrained")
    for axis, (n, k) in zip(axes, shapes, strict=True):
        for c in curves:
            if (c["N"], c["K"]) == (n, k):
                index = [(lr, norms) for _, lr, norms in CASES].index((c["lr"], c["norms"]))
                label = f"{CASES[index][0]}{', corrected' if c['corrected'] else ''}"
                style = "-" if c["corrected"] else "--"
                axis.plot(c["steps"][1:], c["errors"][1:], style, color=f"C{index}", label=label, linewidth=1.2)
        axis.axhline(1e-5, color="black", linewidth=0.8, linestyle=":")
        axis.set(title=f"N = {n}, K = {k}, float32", xlabel="step", xscale="log", yscale="log")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("max |UᵀU − I|")
    axes[-1].legend(fontsize=7, loc="upper left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the drift of orthonormal bases over many float32 Cayley steps.")
    parser.add_argument("--steps", type=int, default=100_000, help="steps per curve (default: 100000)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "images" / "orthogonality_drift.png")
    args = parser.parse_args()
    if args.steps < 1:
        parser.error(f"--steps must be at least 1, got {args.steps}")
    curves = []
    for n, k in ((128, 128), (128, 16)):
        for label, lr, norms in CASES:
            for correct in (False, True):
                c = curve(n, k, lr, norms, correct, args.steps)
                curves.append(c)
                print(
                    f"N={n} K={k} {label}{', corrected' if correct else ''}: worst {max(c['errors']):.2e}, "
                    f"last {c['errors'][-1]:.2e}, {1e6 * c['seconds'] / args.steps:.0f} us per step",
                    flush=True,
                )
    draw(curves, args.out)
    conditions = {"orthokern": orthokern.__version__, "torch": torch.__version__, "threads": torch.get_num_threads()}
    args.out.with_suffix(".json").write_text(json.dumps({"conditions": conditions, "curves": curves}) + "\n")
    print(f"wrote {args.out} and {args.out.with_suffix('.json')}")


if __name__ == "__main__":
    main()
