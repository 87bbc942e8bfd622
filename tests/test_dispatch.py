"""Selection of a backend, the errors if no backend can be used, and the text of `explain`."""

from __future__ import annotations

import os
import subprocess
import sys
import types
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import orthokern
from orthokern import BackendUnavailable, InputError, cpu, cuda, dispatch, functional, ops
from orthokern.dispatch import Support

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_chosen", {})


def pretend(monkeypatch: pytest.MonkeyPatch, package: Any, available: bool, reason: str) -> None:
    monkeypatch.setattr(package, "AVAILABLE", available)
    monkeypatch.setattr(package, "REASON", "" if available else reason)


def cpu_leaf(monkeypatch: pytest.MonkeyPatch, available: bool) -> None:
    """Pretend a build, or none, so that these tests say the same with and without one."""
    pretend(monkeypatch, cpu, available, "the native module was not built (no compiler)")
    monkeypatch.setattr(cpu, "build_info", lambda: {"isa": "avx2", "isas": ["baseline", "avx2"]})


@pytest.mark.parametrize(
    ("available", "device", "dtype", "package"),
    [
        (True, "cpu", torch.float32, "cpu"),
        (True, "cpu", torch.bfloat16, "reference"),
        (True, "meta", torch.float32, "reference"),
        (False, "cpu", torch.float32, "reference"),
    ],
)
def test_auto_takes_the_cpu_kernels_where_they_serve(
    monkeypatch: pytest.MonkeyPatch, available: bool, device: str, dtype: torch.dtype, package: str
) -> None:
    cpu_leaf(monkeypatch, available)
    for op in ("factored_scan", "cayley") if dtype.itemsize > 2 else ("factored_scan",):
        monkeypatch.setattr(dispatch, "_warned", set())
        warned = nullcontext() if available or device == "meta" else pytest.warns(match="runs the reference")
        with warned:
            leaf = dispatch.resolve(op, device=torch.device(device), dtype=dtype)
        assert leaf.__name__ == f"orthokern.{package}.{op}"


def test_an_explicit_backend_never_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu_leaf(monkeypatch, False)
    x, u = torch.zeros(2, 1, 3), torch.eye(3)
    reasons = r"cuda: .*triton: .*cpu: the native module was not built \(no compiler\); reference: can serve this call"
    with pytest.raises(
        BackendUnavailable, match=f"^backend 'cpu' cannot serve factored_scan .float32 on cpu.*{reasons}"
    ):
        functional.factored_scan(x, u, torch.ones(3), u, backend="cpu")
    with pytest.raises(BackendUnavailable, match="reference: algorithm is chunked, it serves sequential"):
        functional.factored_scan(x, u, torch.ones(3), u, activation="identity", algorithm="chunked", backend="auto")


def test_wrong_dtype_and_device_are_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu_leaf(monkeypatch, True)
    with pytest.raises(BackendUnavailable, match="cpu: tensors are bfloat16, it serves float64, float32"):
        dispatch.resolve("factored_scan", "cpu", device=CPU, dtype=torch.bfloat16)
    with pytest.raises(BackendUnavailable, match="cpu: tensors are on meta, it serves cpu and tensors are float16"):
        dispatch.resolve("factored_scan", "cpu", device=torch.device("meta"), dtype=torch.float16)
    with pytest.raises(
        BackendUnavailable, match="no backend serves cayley .bfloat16 on cpu.: .*reference: tensors are"
    ):
        dispatch.resolve("cayley", device=CPU, dtype=torch.bfloat16)


def test_limits_and_features_are_those_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu_leaf(monkeypatch, True)
    limits = {"N": 512, "K": 64}
    row = Support(devices=("cpu",), dtypes=(torch.float32,), features=("message_clip",), limits=limits)
    monkeypatch.setitem(dispatch._tables, "dense_scan", {**ops.dense_scan.SUPPORT, "cpu": row})

    def backend(name: str, *features: str, **facts: int) -> str:
        call = {"device": CPU, "dtype": torch.float32, "features": features, **facts}
        return str(dispatch.resolve("dense_scan", name, **call).__name__.split(".")[1])

    assert backend("auto", N=512, K=64) == backend("cpu", "message_clip") == "cpu"
    assert backend("auto", N=768, K=64) == backend("auto", "lengths") == "reference"
    with pytest.raises(BackendUnavailable, match="cpu: N=768 > 512 and K=100 > 64"):
        backend("cpu", N=768, K=100)
    x, lengths = torch.zeros(2, 1, 3), torch.tensor([1])
    with pytest.raises(BackendUnavailable, match="cpu: it does not serve lengths;"):
        functional.dense_scan(x, torch.eye(3), lengths=lengths, backend="cpu")
    functional.dense_scan(x, torch.eye(3), lengths=lengths)  # auto goes on to the reference
    assert "cpu: cpu; float32, N up to 512, K up to 64; message_clip (dense_scan)" in dispatch.explain()


def test_unknown_backend_names() -> None:
    x, u = torch.zeros(2, 1, 3), torch.eye(3)
    for backend, guess in (("gpu", ""), ("", ""), ("refrence", ": did you mean 'reference'?")):
        with pytest.raises(InputError, match=f"unknown backend '{backend}'{guess}.*auto, reference, cpu, triton, cuda"):
            functional.dense_scan(x, u, backend=backend)


def test_the_environment_sets_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "from orthokern import dispatch; print(dispatch.requested(None))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "ORTHOKERN_BACKEND": "Reference"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert run.stdout == "reference\n", run.stderr

    def call() -> Any:
        return functional.modrelu(torch.ones(2, requires_grad=True), torch.ones(1)).grad_fn.name()

    monkeypatch.setattr(dispatch, "_process_default", "reference")
    assert call() == "MulBackward0"  # plain torch code
    monkeypatch.setattr(dispatch, "_process_default", "refrence")
    with pytest.raises(InputError, match="unknown backend in ORTHOKERN_BACKEND 'refrence': did you mean 'reference'?"):
        call()


@pytest.mark.parametrize("available", [True, False])
def test_explain(monkeypatch: pytest.MonkeyPatch, available: bool) -> None:
    cpu_leaf(monkeypatch, available)
    text = orthokern.explain()
    assert text.startswith(f"orthokern {orthokern.__version__}, Python 3.") and "isas: baseline, avx2" in text
    for op in ops.NAMES:
        native = available and op != "skew_exp"  # plain torch on every device
        assert any(line.split() == [op, "yes", "yes" if native else "no", "no", "no"] for line in text.splitlines())
    monkeypatch.setattr(dispatch, "_process_default", "refernce")
    assert "refernce (from ORTHOKERN_BACKEND, unknown: calls fail; accepted: auto, " in orthokern.explain()
    missing = "native module: not available: the native module was not built (no compiler)"
    assert ("cpu: cpu; float64, float32" if available else missing) in text


def gpu(monkeypatch: pytest.MonkeyPatch, cuda_serves: bool = True) -> torch.device:
    """Pretend a GPU of compute capability 9.0 with both of its leaves."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    pretend(monkeypatch, cuda, cuda_serves, "not in this build: nvcc not found")
    monkeypatch.setattr(dispatch.importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(dispatch, "_warned", set())
    return torch.device("cuda", 0)


def test_explain_of_a_call_says_what_dispatch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu_leaf(monkeypatch, True)
    text = orthokern.explain("factored_scan", N=128, device="cpu")
    assert text.splitlines()[0] == "factored_scan (float32 on cpu, N=128, K=128): backend 'auto' takes cpu"
    assert "  cpu: chosen\n  reference: could serve, and comes later in the order of auto" in text
    gpu(monkeypatch)
    text = orthokern.explain("factored_scan", N=600, dtype=torch.float64)  # a GPU is what one has it for
    assert text.splitlines() == [
        "factored_scan (float64 on cuda, N=600, K=600): backend 'auto' takes reference",
        "  cuda: tensors are float64, it serves float32",
        "  triton: N=600 > 128",
        "  cpu: tensors are on cuda, it serves cpu",
        "  reference: chosen",
    ]
    refused = orthokern.explain("dense_scan", N=8, backend="cpu", features=("lengths",))
    assert refused.splitlines()[0] == "dense_scan (float32 on cuda, N=8, K=8): backend 'cpu' cannot serve"
    asked = orthokern.explain("dense_scan", N=8, backend="triton")
    assert asked.splitlines()[0].endswith("backend 'triton' takes triton") and "asked for, and it can serve" in asked


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--op", "factored_scn"], "unknown op 'factored_scn': did you mean 'factored_scan'?"),
        (["--op", "cayley", "--dtype", "float31"], "unknown dtype 'float31'; accepted: float64"),
        (["--op", "cayley", "--device", "gpu"], "unknown device 'gpu'; accepted: cpu, cuda"),
        (["--op", "factored_scan", "--features", "lenghts"], "unknown feature 'lenghts': did you mean 'lengths'?"),
        (["--op", "factored_scan", "--algorithm", "bogus"], "unknown algorithm 'bogus': accepted: auto, sequential"),
        (["--N", "600"], "--N describes a call: give --op too, one of factored_scan, dense_scan"),
        (["factored_scan"], "unknown argument factored_scan: did you mean --op factored_scan"),
        (["--op", "cayley", "--N", "-3"], "--N: '-3' is not an integer of at least 0"),
        (["--op", "factored_scan", "--N", "8", "--K", "9"], "factored_scan: N=8, K=9; accepted: K of at most N"),
    ],
)
def test_explain_refuses_what_means_nothing(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from orthokern.explain import main

    assert main(arguments) == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"error: {message}") and said.err.count("\n") == 1 and not said.out
    assert main(["--op", "cayley", "--N", "9", "--K", "3", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.startswith("cayley (float32 on cpu, N=9, K=3): ")


@pytest.mark.parametrize("op", ["factored_scan", "dense_scan", "modal"])
def test_explain_of_the_modal_algorithm(op: str) -> None:
    call = {"N": 8, "device": "cpu", "algorithm": "modal", "backend": "reference"}
    text = orthokern.explain(op, features=("lengths",), **call)
    assert text.startswith("modal (float32 on cpu, N=8, K=8): backend 'reference' takes reference\n")
    assert "reference: it does not serve resets" in orthokern.explain(op, features=("lengths", "resets"), **call)


def test_one_warning_when_the_reference_runs_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    device = gpu(monkeypatch, cuda_serves=False)

    def resolve(op: str, N: int, backend: str | None = None) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            leaf = dispatch.resolve(op, backend, device=device, dtype=torch.float32, N=N, K=N)
        assert leaf.__name__.startswith("orthokern.reference") == (N > 128 or op == "skew_exp")
        return [str(warning.message) for warning in caught]

    true_leaf = dispatch.leaf
    none = types.ModuleType("orthokern.triton_kernels")  # Triton itself is not needed here
    monkeypatch.setattr(dispatch, "leaf", lambda op, name: none if name == "triton" else true_leaf(op, name))
    assert resolve("factored_scan", 64) == []
    assert resolve("factored_scan", 600, "reference") == []  # asked for
    assert resolve("factored_scan", 600) == [
        "factored_scan: backend 'auto' runs the reference, which is slow, on float32 on cuda:0, N=600, K=600: "
        "cuda: not in this build: nvcc not found; triton: N=600 > 128"
    ]
    assert resolve("factored_scan", 700) == []
    assert resolve("skew_exp", 8) == []  # there is nothing else, and it is made of torch's own kernels


def test_why_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def why(message: str | None) -> str | None:
        def init() -> None:
            if message is not None:
                raise RuntimeError(message)

        monkeypatch.setattr(torch.cuda, "init", init)
        dispatch._silent_device.cache_clear()
        return dispatch.no_device()

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert why("unused") == f"torch {torch.__version__} is built without CUDA"
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert why("No CUDA GPUs are available") == "no CUDA device (CUDA_VISIBLE_DEVICES='')"
    said = "Unexpected error from cudaGetDeviceCount().\nError 803: system has unsupported display driver"
    assert why(said) == f"the CUDA driver does not initialise: {said}".replace("\n", " ")
    assert f"  no GPU: {dispatch.no_device()}" in orthokern.explain()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert dispatch.no_device() is None
    dispatch._silent_device.cache_clear()


@pytest.mark.skipif(not cpu.AVAILABLE, reason="no native module")
def test_a_native_module_of_other_sources_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "orthokern").symlink_to(Path(orthokern.__file__).parent)
    (tmp_path / "csrc" / "cpu").mkdir(parents=True)
    (tmp_path / "csrc" / "common").mkdir()
    for name in ("setup.py", "csrc/cpu/ops.h", "csrc/common/activations.h"):
        (tmp_path / name).write_text("// other arguments\n")
    code = "from orthokern import cpu; print(cpu.AVAILABLE, cpu.REASON)"
    run = [sys.executable, "-c", code]
    result = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert result.stdout.startswith("False the native module was built from other sources")


def test_lazy_attributes() -> None:
    assert orthokern.functional.spectrum is functional.spectrum
    assert {"functional", "nn", "optim", "explain", "InputError"} <= set(dir(orthokern))
    for name, member in (("compare", "compare"), ("reproduce", "__doc__"), ("tasks", "run")):
        assert name in orthokern.__all__ and name in dir(orthokern)
        assert hasattr(orthokern.__getattr__(name), member)
    with pytest.raises(AttributeError, match="no attribute 'functionnal'"):
        orthokern.functionnal  # noqa: B018
