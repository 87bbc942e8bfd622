"""Measure and draw what the modal form costs and how exact it is by T: docs/images/modal_time.png, modal_error.png.

    python docs/scripts/modal_scaling.py              # both, T up to 1 000 000: about eight minutes on two quiet cores
    python docs/scripts/modal_scaling.py --part time  # about four
    python docs/scripts/modal_scaling.py --largest 10000 --out /tmp/images    # a quick look

Time: forward and backward of a loss behind a readout, N = 128, B = 50, float32: a batch of the copy task and random
token ids in the modal form, random ids step by step, and torch.nn.RNN (tanh) with a linear readout. Every time stands
for a result that was compared with that of another algorithm.

Error: relative to the sequential scan in float64, B = 4; norm of the difference over norm, the worst of the gradients
of U, s, V, readout and input table. s is uniform in 1 +- margin and then scaled so that the largest |eigenvalue| of
W = U diag(s) V^T is 1: else states of long sequences leave the range of float32.

Prints one line per measurement, and writes the numbers beside each picture as JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

from harness import check, conditions, factors, relative_error  # noqa: E402

from orthokern import functional  # noqa: E402
from orthokern.data import CopyTask  # noqa: E402

LENGTHS = (100, 300, 1000, 3000, 10_000, 30_000, 100_000, 300_000, 1_000_000)
N, IDS, CLASSES = 128, 10, 9
BATCH, ERROR_BATCH = 50, 4
# Longest sequence of each curve of times: torch keeps several tensors of the size of the states.
CURVES = {
    "modal, copy task": 10**6,
    "modal, random ids": 10**6,
    "sequential, random ids": 300_000,
    "torch.nn.RNN (tanh)": 10_000,
}
MARGINS = {0.0: 10**6, 0.001: 10**6, 0.1: 100_000}  # and the longest sequence
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-4, 2e-2  # of float32 step by step at T = 300 000, the less exact of two


class Problem:
    """A linear recurrence over token ids and a readout of nine classes; float32."""

    def __init__(self, T: int, B: int, margin: float, *, copy: bool = False) -> None:
        generator = torch.Generator().manual_seed(T)
        u, _, v = factors(N, generator)
        s = 1 + margin * (2 * torch.rand(N, generator=generator) - 1)
        radius = torch.linalg.eigvals((u.double() * s.double()) @ v.double().mT).abs().max()
        s = (s / radius).float()
        table, readout = torch.randn(N, IDS, generator=generator), torch.randn(CLASSES, N, generator=generator)
        if copy:
            self.x, self.target = CopyTask(T, dtype=torch.uint8).batch(B, generator)
            table[:, 0] = 0.0
        else:
            self.x = torch.randint(IDS, (T, B), generator=generator, dtype=torch.uint8)
            self.target = torch.randint(CLASSES, (T, B), generator=generator, dtype=torch.uint8)
        # Logits of order 1: in T steps of random ids a state grows as sqrt(T).
        self.inputs = [u, s, v, readout / (10 * T) ** 0.5, table]

    def results(self, algorithm: str, dtype: torch.dtype = torch.float32, basis: Tensor | None = None) -> list[Tensor]:
        """The loss, and its gradients with respect to ``inputs``."""
        inputs = [tensor.to(dtype).requires_grad_() for tensor in self.inputs]
        u, s, v, readout, table = inputs
        found = functional.scan_cross_entropy(
            self.x,
            (u, s, v),
            readout,
            self.target,
            weight=table,
            activation="identity",
            algorithm=algorithm,
            basis=basis,
        )
        self.basis = found.basis
        return [found.loss.detach(), *torch.autograd.grad(found.loss, inputs)]


def torch_step(problem: Problem) -> Callable[[], list[Tensor]]:
    """The same task with torch.nn.RNN: another function, of the same sizes."""
    rnn, readout = nn.RNN(IDS, N), nn.Linear(N, CLASSES)
    parameters = [*rnn.parameters(), *readout.parameters()]
    x = nn.functional.one_hot(problem.x.long(), IDS).float()
    target = problem.target.flatten().long()

    def step() -> list[Tensor]:
        loss = nn.functional.cross_entropy(readout(rnn(x)[0]).flatten(0, 1), target)
        return [loss.detach(), *torch.autograd.grad(loss, parameters)]

    return step


def seconds(step: Callable[[], Any], T: int) -> list[float]:
    """Of one call each, after one that is not counted; fewer of long ones."""
    times = []
    for _ in range(1 + (7 if T < 30_000 else 3 if T <= 100_000 else 1)):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return times[1:]


def measure_times(largest: int, points: list[dict[str, Any]]) -> None:
    """Adds a point for every curve and T."""
    for T in (T for T in LENGTHS if 1000 <= T <= largest):
        for curve in (curve for curve, longest in CURVES.items() if T <= longest):
            problem = Problem(T, BATCH, 0.001, copy="copy" in curve)
            if curve.startswith("torch"):
                step, error = torch_step(problem), None
            else:
                algorithm = curve.split(",")[0]
                first = problem.results(algorithm)
                basis = problem.basis  # as a training step has it: that of the step before
                step = lambda a=algorithm, b=basis, p=problem: p.results(a, basis=b)  # noqa: E731
                if algorithm == "modal" and T > CURVES["sequential, random ids"]:
                    expected = problem.results("modal", torch.float64)
                else:
                    expected = problem.results("sequential" if algorithm == "modal" else "modal")
                check(f"{curve}, T = {T}", first[:1], expected[:1], LOSS_TOLERANCE)
                error = check(f"{curve}, T = {T}", first[1:], expected[1:], GRADIENT_TOLERANCE)
            times = seconds(step, T)
            point = {"curve": curve, "T": T, "ms": [round(1e3 * t, 3) for t in times], "difference": error}
            points.append(point)
            print(f"{curve}, T = {T}: {1e3 * statistics.median(times):.1f} ms", flush=True)


def measure_errors(largest: int, points: list[dict[str, Any]]) -> None:
    """Adds a point for every margin, algorithm and T."""
    for T in (T for T in LENGTHS if T <= largest and T not in (300, 3000, 30_000, 300_000)):
        for margin in (margin for margin, longest in MARGINS.items() if T <= longest):
            problem = Problem(T, ERROR_BATCH, margin)
            exact = problem.results("sequential", torch.float64)
            for algorithm in ("modal", "sequential"):
                found = problem.results(algorithm)
                loss = relative_error(found[0], exact[0])
                worst = max(relative_error(a, b) for a, b in zip(found[1:], exact[1:], strict=True))
                points.append({"margin": margin, "algorithm": algorithm, "T": T, "loss": loss, "gradients": worst})
                print(f"{algorithm}, margin {margin:g}, T = {T}: loss {loss:.1e}, gradients {worst:.1e}", flush=True)


def draw_times(points: list[dict[str, Any]], path: Path) -> None:
    curves = []
    for index, curve in enumerate(CURVES):
        some = {p["T"]: statistics.median(p["ms"]) / 1e3 for p in points if p["curve"] == curve}
        curves.append((some, f"C{index}o-", curve))
    title = f"N = {N}, B = {BATCH}, float32, {torch.get_num_threads()} threads"
    _draw(path, curves, "seconds, forward and backward", title)


def draw_errors(points: list[dict[str, Any]], path: Path) -> None:
    curves = []
    for index, margin in enumerate(MARGINS):
        for algorithm, style in (("modal", "-"), ("sequential", "--")):
            some = {p["T"]: p["gradients"] for p in points if p["margin"] == margin and p["algorithm"] == algorithm}
            curves.append((some, f"C{index}o{style}", f"{algorithm}, margin {margin:g}"))
    title = f"N = {N}, B = {ERROR_BATCH}, float32 against float64"
    _draw(path, curves, "relative error of the worst gradient", title)


def _draw(path: Path, curves: list[tuple[dict[int, float], str, str]], quantity: str, title: str) -> None:
    """Draws curves: values by T, format, label."""
    figure, axis = plt.subplots(figsize=(6.4, 4.2), layout="constrained")
    for values, form, label in curves:
        axis.plot(list(values), list(values.values()), form, label=label, markersize=3)
    axis.set(xscale="log", yscale="log", xlabel="time steps T", ylabel=quantity, title=title)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def error_table(points: list[dict[str, Any]]) -> str:
    """The table of docs/modal.md: the worst gradient, modal / sequential."""
    lengths = sorted({point["T"] for point in points})
    found = {(point["margin"], point["algorithm"], point["T"]): f"{point['gradients']:.1e}" for point in points}
    lines = ["| | " + " | ".join(f"T = {T}" for T in lengths) + " |", "| --- |" + " ---: |" * len(lengths)]
    for margin in sorted({point["margin"] for point in points}):
        cells = []
        for T in lengths:
            pair = [found.get((margin, algorithm, T)) for algorithm in ("modal", "sequential")]
            cells.append("–" if None in pair else " / ".join(map(str, pair)))
        lines.append(f"| margin {margin:g} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


PARTS: dict[str, tuple[Any, Any]] = {"time": (measure_times, draw_times), "error": (measure_errors, draw_errors)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure and draw time and error of linear recurrences by T.")
    parser.add_argument("--part", choices=tuple(PARTS), help="one of the two pictures (default: both)")
    parser.add_argument("--largest", type=int, default=10**6, metavar="T", help="longest sequence (default: 1000000)")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's)")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images", metavar="DIR")
    args = parser.parse_args()
    if args.largest < 1000:
        parser.error(f"--largest must be at least 1000, got {args.largest}")
    torch.set_flush_denormal(True)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    for name in [args.part] if args.part else PARTS:
        measure, draw = PARTS[name]
        points: list[dict[str, Any]] = []
        picture = args.out / f"modal_{name}.png"
        try:
            measure(args.largest, points)
        finally:  # what was measured is kept, whatever ends the rest
            numbers = {"conditions": conditions(), "points": points}
            picture.with_suffix(".json").write_text(json.dumps(numbers, indent=1) + "\n")
        draw(points, picture)
        if name == "error":
            print(error_table(points))
        print(f"wrote {picture} and {picture.with_suffix('.json')}")


if __name__ == "__main__":
    main()
