"""A sweep over margins and seeds with Ray Tune: python docs/scripts/sweep.py --out sweep --seeds 3

Each trial is one call of orthokern.tasks.run, in a process of its own. docs/experiments.md says what changes for a
cluster of several machines. Needs `pip install -e '.[sweep]'`.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")  # one plain line for each trial
try:
    from ray import tune
except ImportError:
    sys.exit("error: Ray Tune is not installed; pip install -e '.[sweep]' installs it")

from orthokern import InputError, tasks


def trial(config: dict[str, Any]) -> dict[str, Any]:
    """One run. What it returns is a row of the sweep's table."""
    settings = {name: value for name, value in config.items() if name not in ("task", "out")}
    folder = Path(config["out"]) / f"margin-{config['margin']}-seed-{config['seed']}"
    result = tasks.run(config["task"], folder, threads=1, plots=False, **settings)
    last = result.values.get("last") or {}
    return {
        "reached": bool(result.values.get("reached")),
        "iteration": result.values.get("iteration", 0),
        "loss": last.get("loss", float("nan")),
        "exit_code": result.exit_code,
    }


def sweep(task: str, margins: list[float], seeds: int, out: Path, **settings: Any) -> list[dict[str, Any]]:
    """All pairs of a margin and a seed on Ray's cluster: the one that ray.init connected to, else this machine.

    Args:
        task: a name of orthokern.tasks.
        margins, seeds: the grid; seeds 0 to seeds - 1.
        out: for the run folders; on a cluster a folder that all machines see.
        settings: other settings of every run.

    Returns:
        One dictionary for each run: margin, seed, reached, iteration, loss, exit_code.

    Raises:
        InputError: settings that the task does not take, known after the first run of each.
    """
    out = out.resolve()
    space = {"task": task, "out": str(out), **settings}
    space |= {"margin": tune.grid_search(margins), "seed": tune.grid_search(list(range(seeds)))}
    config = tune.RunConfig(storage_path=str(out / "ray"), verbose=0)
    tuner = tune.Tuner(tune.with_resources(trial, {"cpu": 1}), param_space=space, run_config=config)
    rows = []
    for each in tuner.fit():
        if each.error is not None:
            cause = getattr(each.error, "cause", each.error)
            if isinstance(cause, InputError):
                raise InputError(str(cause))
            lines = [line for line in str(each.error).strip().splitlines() if line]
            raise InputError(f"a trial failed: {lines[-1]}")
        found = each.metrics
        rows.append(
            {
                "margin": each.config["margin"],
                "seed": each.config["seed"],
                **{name: found[name] for name in ("reached", "iteration", "loss", "exit_code")},
            }
        )
    return sorted(rows, key=lambda row: (row["margin"], row["seed"]))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the run folders")
    parser.add_argument("--margins", type=float, nargs="+", default=[0.0, 0.01, 0.1, 1.0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--T", type=int, default=100)
    parser.add_argument("--iterations", type=int, default=200)
    given = parser.parse_args(arguments)
    try:
        rows = sweep("copy", given.margins, given.seeds, given.out, T=given.T, iterations=given.iterations)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("margin  seed  solved  iteration  loss")
    for row in rows:
        solved = "yes" if row["reached"] else "no"
        print(f"{row['margin']:6g}  {row['seed']:4d}  {solved:>6}  {row['iteration']:9d}  {row['loss']:.4g}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
