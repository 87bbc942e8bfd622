"""The CUDA host harness for the tests of the CUDA scans (tests/cuda_host)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cuda_cases import PATHS
from cuda_host import build

from orthokern.cuda import _call


@pytest.fixture(autouse=True)
def harness(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    module = request.getfixturevalue("module")
    torch.set_num_threads(1)
    build.use(module, monkeypatch)
    yield module
    module.set_schedule(*build.ORDERS["forward"])
    module.set_chip()


@pytest.fixture
def override(monkeypatch: pytest.MonkeyPatch) -> Any:
    def choose(path: str | dict[str, int]) -> None:
        monkeypatch.setattr(_call, "overrides", PATHS[path] if isinstance(path, str) else path)

    return choose
