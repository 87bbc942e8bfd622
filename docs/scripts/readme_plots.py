"""Draw the plots of the README in docs/images: speed.png from a results file, copy_learning.png from a run folder.

The results file is that of the table in the README. The run is that of the README:

    python -m orthokern.tasks.copy --T 10000 --out runs/copy
    python docs/scripts/readme_plots.py bench/results/FILE.json runs/copy

Bars of speed.png are times of torch's modules divided by those of orthokern. Rows in which torch is faster stay in it.
The text of both is legible at a width of 400 pixels.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "docs" / "images"


class Bar(NamedTuple):
    """A row of the plot, and the table, case and size of its number in a results file."""

    label: str
    table: str
    case: str
    size: dict[str, int]


LONG, WIDE, STEP = {"N": 128, "T": 1000, "B": 50}, {"N": 1000, "T": 120, "B": 50}, {"N": 16, "T": 1, "B": 1}
GROUPS: dict[str, list[Bar]] = {
    "N = 128, T = 1000, batch of 50": [
        Bar("RNN", "modules", "torch.nn.RNN over orthokern.nn.RNN", LONG),
        Bar("FactorizedRNN", "modules", "torch.nn.RNN over orthokern.nn.FactorizedRNN", LONG),
        Bar("GRU", "gru", "torch.nn.GRU over orthokern.nn.GRU, variant torch", LONG),
        Bar("LSTM", "lstm", "torch.nn.LSTM over orthokern.nn.LSTM", LONG),
    ],
    "N = 1000, T = 120, batch of 50": [
        Bar("RNN", "modules", "torch.nn.RNN over orthokern.nn.RNN", WIDE),
        Bar("FactorizedRNN", "modules", "torch.nn.RNN over orthokern.nn.FactorizedRNN", WIDE),
        Bar("GRU", "gru", "torch.nn.GRU over orthokern.nn.GRU, variant torch", WIDE),
        Bar("LSTM", "lstm", "torch.nn.LSTM over orthokern.nn.LSTM", WIDE),
    ],
    "one step of one sequence, N = 16": [
        Bar("RNN", "overhead", "torch.nn.RNN over orthokern.nn.RNN", STEP),
        Bar("FactorizedRNN", "overhead", "torch.nn.RNN over orthokern.nn.FactorizedRNN", STEP),
        Bar("GRU", "overhead", "torch.nn.GRU over orthokern.nn.GRU", STEP),
    ],
}


def ratio(rows: list[dict[str, Any]], bar: Bar) -> float:
    """The number of a bar; StopIteration if the file lacks it."""
    return next(
        row["value"]
        for row in rows
        if (row["table"], row["case"]) == (bar.table, bar.case) and bar.size.items() <= row["size"].items()
    )


def draw_speed(axes: Any, rows: list[dict[str, Any]]) -> None:
    labels, y = [], 0.0
    for title, bars in GROUPS.items():
        axes.text(0.3, y, title, va="center", fontweight="bold", bbox={"color": "white", "pad": 1})
        for bar in bars:
            y += 1
            value = ratio(rows, bar)
            axes.barh(y, value - 1, left=1, height=0.75, color="#2a6fb0" if value >= 1 else "#c0552d")
            text = f"{value:.1f}x" if value >= 1 else f"{value:.2f}x"
            axes.text(1.06 * max(value, 1.0), y, text, va="center")
            labels.append((y, bar.label))
        y += 1.4
    axes.set_yticks([place for place, _ in labels], [label for _, label in labels])
    axes.set_ylim(y - 0.5, -0.8)
    axes.set_xscale("log")
    axes.set_xlim(0.3, 13)
    axes.set_xticks([0.5, 1, 2, 4, 8], ["0.5", "1", "2", "4", "8"])
    axes.minorticks_off()
    axes.axvline(1, color="black", linewidth=1, zorder=0)
    axes.set_xlabel("time of torch / time of orthokern, CPU")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


def draw_copy(axes: Any, records: list[dict[str, Any]]) -> None:
    for name, label, style in (("accuracy", "training batch", "-"), ("held_out_accuracy", "held out", "o")):
        points = [(r["iteration"], 100 * r[name]) for r in records if name in r]
        axes.plot(*zip(*points, strict=True), style, label=label, markersize=5)
    axes.set(xlabel="iteration", ylabel="symbols recalled (%)")
    axes.grid(alpha=0.3)
    axes.legend()


def main(arguments: list[str]) -> int:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    if len(arguments) != 2:
        print(__doc__)
        return 2
    results, run = map(Path, arguments)
    rows = json.loads(results.read_text(encoding="utf-8"))["rows"]
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    plt.rcParams["font.size"] = 11
    for name, height, draw, data in (("speed", 5, draw_speed, rows), ("copy_learning", 2.8, draw_copy, records)):
        figure, axes = plt.subplots(figsize=(5, height), layout="constrained")
        draw(axes, data)
        figure.savefig(IMAGES / f"{name}.png", dpi=160)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
