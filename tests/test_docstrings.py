"""The examples in the docstrings of all modules give the results that they show."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest
import torch

import orthokern

PACKAGE = Path(orthokern.__file__).parent
# Modules are read here and imported by their test, as some take long to import.
MODULES = sorted(
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
    for path in PACKAGE.rglob("*.py")
    if ">>> " in path.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # some write a run folder
    torch.manual_seed(0)
    module = importlib.import_module(f"orthokern.{name}")
    names = {"torch": torch, "orthokern": orthokern}
    result = doctest.testmod(module, extraglobs=names, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.attempted > 0 and result.failed == 0
