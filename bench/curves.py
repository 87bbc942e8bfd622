"""The plot of a results file: cost against T, B and N."""

from __future__ import annotations

from pathlib import Path

from layout import Results, cases, counted, of

# letter of the horizontal axis -> the sizes that are the same at all of its points
CURVES = {"T": {"N": 128, "B": 50}, "B": {"N": 128, "T": 100}, "N": {"T": 30, "B": 50}}


def plot_scaling(results: Results, path: Path) -> Path | None:
    """Draw cost against T, B and N; returns the path, or None where nothing was measured."""
    rows = of(results, "scaling")
    panels = {
        letter: [row for row in rows if all(row["size"][other] == value for other, value in fixed.items())]
        for letter, fixed in CURVES.items()
    }
    if not any(panels.values()):
        return None
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(12, 3.8), constrained_layout=True)
    for axis, (letter, points) in zip(axes, panels.items(), strict=True):
        for case in cases(points):
            line = sorted((row for row in points if row["case"] == case), key=lambda row: row["size"][letter])
            # per step everywhere but over B, where a step of more sequences is more work: there per sequence and step
            per = [row["value"] / (row["size"]["B"] if letter == "B" else 1) for row in line]
            label = case if case.startswith("torch") else f"orthokern.nn.{case}"
            axis.plot([row["size"][letter] for row in line], per, marker="o", markersize=3, label=label)
        axis.set_xscale("log", base=2 if letter != "T" else 10)
        axis.set_yscale("log")
        axis.set_xlabel({"T": "T, time steps", "B": "B, sequences", "N": "N, hidden units"}[letter])
        axis.set_ylabel("µs per step and sequence" if letter == "B" else "µs per time step")
        axis.set_title(", ".join(f"{other}={value}" for other, value in CURVES[letter].items()), fontsize=10)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    conditions = results["conditions"]
    threads = counted(conditions["threads"], "thread")
    figure.suptitle(f"forward and backward, float32, {conditions['machine']['cpu']}, {threads}", fontsize=10)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path
