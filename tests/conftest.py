"""Fixtures of all tests: fixed seeds, and memory that is poisoned with NaN until a kernel has written it."""

from __future__ import annotations

import gzip
import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch is loaded: tests with two threads share cores

import random
import signal
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from poison import poisoned
from torch._dynamo import trace_rules

import orthokern
from orthokern import cpu
from orthokern.cpu import _call

MAX_WORKERS = 8  # each takes some 700 MB, and the longest file sets the time from here on
# Files of long tests: no worker should end with one. The first compiles the host harness, which two would do at once.
FIRST = ("test_cuda_gru.py", "test_bench_smoke.py", "test_optim.py", "test_sass.py")
FIRST += ("test_triton_kernels.py", "test_tutorials.py")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Plain `pytest` distributes the files over the cores if pytest-xdist is installed: a test seldom uses two cores.

    Exceptions are `-n`, selected files (a worker takes seconds to start), options that need the terminal, and a machine
    with a GPU, which all workers would share.
    """
    option = config.option
    chosen = getattr(option, "numprocesses", 0) is not None or "PYTEST_XDIST_WORKER" in os.environ
    alone = option.usepdb or option.capture == "no" or option.collectonly or torch.cuda.is_available()
    if chosen or alone or config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = min(cores, MAX_WORKERS)
    if workers > 1:
        option.numprocesses, option.dist = workers, "loadfile"  # files whole: fixtures that compile belong to one
        option.loadscopereorder = False  # it would begin with the files of many tests, not with those of long ones
        os.environ.setdefault("OMP_NUM_THREADS", str(cores // workers))


def pytest_configure(config: pytest.Config) -> None:
    """Without native kernels most tests are skipped, which must not count as a success in CI."""
    if not cpu.AVAILABLE and os.environ.get("CI"):
        raise pytest.UsageError(f"CI is set, and the tests of the native kernels cannot run: {cpu.REASON}")


def pytest_report_header() -> str:
    kernels = f"{_call._C.isa()} kernels" if cpu.AVAILABLE else f"no native kernels: {cpu.REASON}"
    return f"orthokern: {Path(orthokern.__file__).parent}, {kernels}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in FIRST)


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """An output that a kernel leaves unwritten is NaN here, where it would often be a harmless-looking zero."""
    # Dynamo lists torch's functions by identity: before any of them is replaced. The list is kept until a process group
    # is made.
    trace_rules.get_torch_obj_rule_map()
    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
    # Large results of the CPU kernels, whose memory may hold an earlier result. Data is read with frombuffer elsewhere.
    monkeypatch.setattr(torch, "frombuffer", poisoned(torch.frombuffer, only="orthokern.cpu._call"))
    # Dynamo does not trace a method of the C base class that it finds in a closure.
    new_empty = poisoned(torch.Tensor.new_empty, traced=lambda self, *args, **kwargs: self.new_zeros(*args, **kwargs))
    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)


@pytest.fixture(autouse=True)
def fixed_seeds() -> Iterator[None]:
    """Seed every generator, and restore what a run in this process changes: thread count, flushing of denormals."""
    random.seed(42)
    np.random.seed(42)  # noqa: NPY002  (for libraries that draw from the global generator)
    torch.manual_seed(42)
    threads = torch.get_num_threads()
    yield
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    torch.set_flush_denormal(False)


@pytest.fixture(params=_call._C.isas() if cpu.AVAILABLE else [])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set that kernels are built for and this CPU has."""
    before = _call._C.isa()
    assert _call._C.select_isa(request.param)
    yield request.param
    assert _call._C.select_isa(before)


@pytest.fixture(scope="session")
def module(request: pytest.FixtureRequest) -> Any:
    """The host harness of the CUDA kernels (tests/cuda_host), compiled."""
    from cuda_host import build

    assert request.config.cache is not None
    return build.load(request.config.cache.mkdir("cuda_host"))


@pytest.fixture(scope="session")
def mnist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images in which the row of a bright stripe determines the label: a task that is learned in seconds."""
    folder = tmp_path_factory.mktemp("mnist")
    generator = torch.Generator().manual_seed(0)
    for part, count in (("train", 260), ("t10k", 60)):
        labels = torch.arange(count) % 10
        images = torch.randint(0, 30, (count, 28, 28), generator=generator)
        for i, label in enumerate(labels.tolist()):
            images[i, 2 * label + 4 : 2 * label + 8] += 200
        content = struct.pack(">4I", 2051, count, 28, 28) + images.to(torch.uint8).numpy().tobytes()
        (folder / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(content, 1))
        content = struct.pack(">2I", 2049, count) + labels.to(torch.uint8).numpy().tobytes()
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(content)
    return folder


@pytest.fixture
def signals_not_ignored() -> Iterator[None]:
    """SIGHUP and SIGINT have their default effect, even under nohup, which ignores SIGHUP, and in the background of a
    script, which ignores SIGINT."""
    default = {signal.SIGHUP: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
    ignored = [number for number in default if signal.getsignal(number) == signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, default[number])
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


@pytest.fixture(scope="session")
def ptb(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the Penn Treebank with 120 short sentences to train on."""
    from runs import write_words

    return write_words(tmp_path_factory.mktemp("ptb"), 120, 25)
