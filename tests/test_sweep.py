"""The example of a sweep, on a local Ray cluster that the test starts."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from orthokern.errors import InputError

ray = pytest.importorskip("ray")
pytest.importorskip("ray.tune")
SCRIPT = Path(__file__).resolve().parents[1] / "docs" / "scripts" / "sweep.py"
SETTINGS: dict[str, Any] = {"T": 8, "iterations": 2, "hidden": 6, "batch": 4}


@pytest.fixture(scope="module")
def sweep() -> Iterator[ModuleType]:
    """The script as a module, with a cluster of one process."""
    if not SCRIPT.exists():
        pytest.skip("not a source tree with documentation")
    spec = importlib.util.spec_from_file_location("sweep_example", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["sweep_example"] = module
    spec.loader.exec_module(module)
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(module)  # the workers have no such module
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield module
    ray.shutdown()


def test_every_margin_and_seed_runs(sweep: ModuleType, tmp_path: Path) -> None:
    rows = sweep.sweep("copy", [0.0, 0.5], 2, tmp_path, **SETTINGS)
    assert [(row["margin"], row["seed"]) for row in rows] == [(0.0, 0), (0.0, 1), (0.5, 0), (0.5, 1)]
    assert all(row["iteration"] == 2 and row["exit_code"] == 0 and row["loss"] > 0 for row in rows)
    assert len({row["loss"] for row in rows}) == 4
    assert (tmp_path / "margin-0.5-seed-1" / "metrics.jsonl").exists()


def test_an_unknown_setting_is_one_line(sweep: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^unknown setting of task copy 'hiden': did you mean 'hidden'\?") as raised:
        sweep.sweep("copy", [0.1], 1, tmp_path, **SETTINGS, hiden=3)
    assert "\n" not in str(raised.value)
