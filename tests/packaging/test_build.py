"""The rules of setup.py: which sources are compiled, when they are recompiled, and the messages for errors."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
UNSET = ("ORTHOKERN_CUDA_ARCHS", "MAX_JOBS", "CXX", "CXXFLAGS", "LDFLAGS", "CUDACXX", "CUDA_HOME", "CUDA_PATH")

# Answers what setup.py asks of nvcc, and compiles with the host's compiler.
FAKE_NVCC = """#!/bin/sh
case "$*" in
  *--version*) echo "Cuda compilation tools, release 12.9, V12.9.1"; exit 0;;
  *--list-gpu-arch*) printf 'compute_80\\ncompute_90\\n'; exit 0;;
esac
echo "$@" >> "$0.log"
language="-x c++"
for word; do
  shift
  case "$word" in
    -gencode=*|-ccbin=*|-cudart=*) ;;
    -Xcompiler=*) set -- "$@" $(echo "${word#-Xcompiler=}" | sed 's/\\\\,/@/g;s/,/ /g;s/@/,/g');;
    -shared) language=""; set -- "$@" "$word";;
    *) set -- "$@" "$word";;
  esac
done
exec c++ $language "$@"
"""


def build(checkout: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """``setup.py build_ext --inplace`` with no setting but those given."""
    clean = {name: value for name, value in os.environ.items() if name not in UNSET}
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    clean |= {"ORTHOKERN_CUDA": "0", **env}
    return subprocess.run(command, cwd=checkout, env=clean, capture_output=True, text=True, stdin=subprocess.DEVNULL)


def probe(checkout: Path) -> tuple[dict[str, Any], tuple[str, str, int]]:
    """The stub's build information and what its kernels answer."""
    (library,) = (checkout / "orthokern").glob("_C.*")
    load = (
        "import importlib.util, sys; s = importlib.util.spec_from_file_location('_C', sys.argv[1]);"
        "m = importlib.util.module_from_spec(s); s.loader.exec_module(m); import json;"
        "print(m.build_info()); print(json.dumps(m.probe()))"
    )
    run = subprocess.run([sys.executable, "-c", load, str(library)], capture_output=True, text=True, check=True)
    info, answer = (json.loads(line) for line in run.stdout.splitlines())
    return info, tuple(answer)


def executable(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o700)
    return path


def error_line(run: subprocess.CompletedProcess[str]) -> str:
    """The one line that a failed build prints as its own."""
    assert run.returncode != 0
    assert "Traceback" not in run.stderr
    (line,) = [line for line in run.stderr.splitlines() if line.startswith("orthokern: error: ")]
    return line


def objects(checkout: Path) -> dict[str, int]:
    return {str(path.relative_to(checkout)): path.stat().st_mtime_ns for path in checkout.glob("build/native-*/**/*.o")}


@pytest.fixture(scope="module")
def built(make_checkout: Callable[[], Path]) -> Path:
    """A copy of the source tree with a stub for its native module, built. One for this file: builds are incremental."""
    checkout = make_checkout()
    run = build(checkout)
    assert run.returncode == 0, run.stdout + run.stderr
    return checkout


def test_build_information(built: Path) -> None:
    info, (best, cuda, _) = probe(built)
    assert sorted(info) == ["compiler", "contract", "cuda", "cuda_reason", "isas", "version"]
    version = re.search(r'"(.+)"', (ROOT / "orthokern" / "_version.py").read_text().split("__version__ =")[1])
    assert version is not None and info["version"] == version.group(1)
    assert info["isas"][0] == "baseline" and info["isas"][-1] == best
    assert (info["cuda"], info["cuda_reason"], cuda) == (False, "switched off by ORTHOKERN_CUDA=0", "")


def test_kernels_are_compiled_once_for_each_instruction_set(built: Path) -> None:
    info, _ = probe(built)
    units = sorted(path.split("/obj/")[1] for path in objects(built))
    kernels = [f"{isa}/cpu/probe.o" for isa in info["isas"]]
    assert units == sorted([*kernels, "common/bindings.o", "common/cpu/select.o"])


def test_a_second_build_compiles_what_changed(built: Path) -> None:
    before = objects(built)
    assert build(built).returncode == 0
    assert objects(built) == before

    (built / "csrc/common/answer.h").write_text("#define ANSWER 43\n")
    assert build(built).returncode == 0
    changed = [path for path, time in objects(built).items() if before[path] != time]
    assert [Path(path).name for path in changed] == ["bindings.o"]
    assert probe(built)[1][2] == 43


def test_cuda_sources_go_through_nvcc(built: Path, tmp_path: Path) -> None:
    nvcc = executable(tmp_path / "nvcc", FAKE_NVCC)
    source = built / "csrc/cuda/probe.cu"
    source.parent.mkdir()
    source.write_text('const char* cuda_probe() { return "cuda"; }\n')
    try:
        run = build(built, ORTHOKERN_CUDA="auto", CUDACXX=str(nvcc), LDFLAGS="-Wl,-O1,-z,now", NVCC_CCBIN="c++")
        assert run.returncode == 0, run.stdout + run.stderr
        info, (_, cuda, _) = probe(built)
        assert (info["cuda"], info["cuda_reason"], cuda) == (True, "nvcc 12.9 for sm_80, sm_90", "cuda")
        log = Path(f"{nvcc}.log").read_text()
        assert "-ccbin" not in log and "-Xcompiler=-Wl\\,-O1\\,-z\\,now" in log
        assert "-gencode=arch=compute_80,code=sm_80" in log and "-gencode=arch=compute_90,code=compute_90" in log

        run = build(built, ORTHOKERN_CUDA="1", CUDACXX=str(nvcc), ORTHOKERN_CUDA_ARCHS="9.0;70")
        assert "cannot compile them for '70', accepted is a list as 80;90 of 80, 90" in error_line(run)
    finally:
        source.unlink()
    run = build(built, ORTHOKERN_CUDA="1", CUDACXX=str(nvcc))
    assert "ORTHOKERN_CUDA=1 asks for the CUDA kernels, but this version has no CUDA kernels" in error_line(run)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("CXX", "no-such-compiler", "no C++17 compiler found (tried no-such-compiler)"),
        ("CXXFLAGS", 'c++ "', "CXXFLAGS='c++ \"': No closing quotation; accepted is text that"),
        ("ORTHOKERN_CUDA", "yes", "ORTHOKERN_CUDA='yes': accepted are auto"),
        ("MAX_JOBS", "0", "MAX_JOBS='0': accepted is a whole number, 1 or more"),
    ],
)
def test_bad_settings(built: Path, name: str, value: str, message: str) -> None:
    assert message in error_line(build(built, **{name: value}))


def test_compiler_error(built: Path) -> None:
    header = built / "csrc/common/answer.h"
    text = header.read_text()
    header.write_text("#error broken on purpose\n")
    try:
        assert "the native build failed" in error_line(build(built))
    finally:
        header.write_text(text)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="one instruction set")
def test_instruction_sets_that_the_compiler_refuses(built: Path, tmp_path: Path) -> None:
    compiler = executable(tmp_path / "c++", '#!/bin/sh\ncase "$*" in *-mavx512f*) exit 1;; esac\nexec c++ "$@"\n')
    run = build(built, CXX=str(compiler))
    assert run.returncode == 0 and "no kernels for avx512" in run.stdout
    assert probe(built)[0]["isas"] == ["baseline", "avx2"]
