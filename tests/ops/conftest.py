"""The tests of single ops: ``test_<op>.py`` tests the reference, the kernels and the registration of an op."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Threads that wait for each other over tiny tensors cost more than they bring: a test that needs two asks."""
    torch.set_num_threads(1)
