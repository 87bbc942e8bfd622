"""The examples in the docstrings of all modules give the results that they show."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from pathlib import Path

import pytest
import torch

import orthokern


def modules_with_examples() -> list[str]:
    """Names without "orthokern.". Modules are read here and imported by their test, as some take long to import."""
    found = []
    folders = [(Path(folder), "") for folder in orthokern.__path__]
    for folder, prefix in folders:
        for module in pkgutil.iter_modules([str(folder)]):
            name = prefix + module.name
            path = folder / module.name / "__init__.py" if module.ispkg else folder / f"{module.name}.py"
            if path.exists() and ">>> " in path.read_text(encoding="utf-8"):
                found.append(name)
            if module.ispkg:
                folders.append((folder / module.name, f"{name}."))
    return sorted(found)


MODULES = modules_with_examples()


def test_the_modules_are_found() -> None:
    assert {"init", "nn.frozen", "tasks", "diagnostics.plots.studies", "_files"} <= set(MODULES)


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # some write a run folder
    torch.manual_seed(0)
    module = importlib.import_module(f"orthokern.{name}")
    names = {"torch": torch, "orthokern": orthokern}
    found = doctest.testmod(module, extraglobs=names, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert found.attempted > 0 and found.failed == 0
