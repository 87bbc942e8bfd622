"""An editable install and a wheel, each in a virtual environment of its own, each with ``orthokern.triton_kernels``.

Nothing is downloaded: the environments borrow torch, pip and the build requirements from the one that runs the tests.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import venv
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

CHECK = """
import sys, importlib.util
import orthokern, orthokern.nn, orthokern.triton_kernels as triton_kernels
print(orthokern.__file__)
print(triton_kernels.__file__)
print(importlib.util.find_spec("orthokern._C").origin)
print("i_" in triton_kernels.__doc__)
"""


def run(*command: str | Path, cwd: Path) -> str:
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV", "MAX_JOBS")}
    env["ORTHOKERN_CUDA"] = "0"
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", "")])
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def fresh_environment(folder: Path) -> Path:
    """The interpreter of a new virtual environment with everything this one has, except orthokern."""
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    (site,) = folder.glob("lib/python*/site-packages")
    borrowed = {Path(module.__file__).parents[1] for module in (torch, pytest) if module.__file__}
    for source in borrowed:
        for entry in source.iterdir():
            if "orthokern" not in entry.name and not (site / entry.name).exists():
                (site / entry.name).symlink_to(entry)
    return python


def pip(python: Path, *words: str | Path, cwd: Path) -> None:
    # -I: no folder of the caller's on sys.path
    options = ["--disable-pip-version-check", "--no-input", "--no-index", "--no-deps", "--no-build-isolation"]
    run(python, "-I", "-m", "pip", words[0], *options, *words[1:], cwd=cwd)


def check(python: Path, elsewhere: Path) -> Sequence[str]:
    """Paths that a user in another folder imports from: orthokern, orthokern.triton_kernels, orthokern._C."""
    *paths, has_table = run(python, "-I", "-c", CHECK, cwd=elsewhere).splitlines()
    assert has_table == "True"
    return paths


@pytest.fixture(scope="module")
def checkout(make_checkout: Callable[[], Path]) -> Path:
    """The source tree with native sources that compile in a second. (Whoever runs these tests has just installed the
    project with its own, which take minutes: what they build is nothing that an install could change.)"""
    return make_checkout()


def test_editable_install(checkout: Path, tmp_path: Path) -> None:
    python = fresh_environment(tmp_path / "venv")
    pip(python, "install", "-e", checkout, cwd=tmp_path)
    package, triton_kernels, native = check(python, tmp_path)
    assert package == str(checkout / "orthokern" / "__init__.py")
    assert triton_kernels == str(checkout / "triton_kernels" / "__init__.py")
    assert Path(native).parent == checkout / "orthokern"


def test_wheel(checkout: Path, tmp_path: Path) -> None:
    python = fresh_environment(tmp_path / "venv")
    pip(python, "wheel", "-w", tmp_path, checkout, cwd=tmp_path)
    (wheel,) = tmp_path.glob("orthokern-*.whl")
    pip(python, "install", wheel, cwd=tmp_path)
    package, triton_kernels, native = map(Path, check(python, tmp_path))
    assert package.is_relative_to(tmp_path / "venv")
    assert triton_kernels == package.parent / "triton_kernels" / "__init__.py"
    assert native.parent == package.parent
    assert (package.parent / "py.typed").exists()


def test_sdist_is_complete(real_checkout: Path, tmp_path: Path) -> None:
    """All sources of the real tree: the package, the kernels, the tests and the benchmarks, and the pages beside it."""
    sources = (".py", ".cpp", ".cu", ".h", ".typed")
    folders = ("csrc", "orthokern", "triton_kernels", "tests", "bench")
    files = [path for folder in folders for path in (real_checkout / folder).rglob("*") if path.suffix in sources]
    pages = ("LICENSE", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "CITATION.cff")
    needed = [*files, *(real_checkout / name for name in ("setup.py", "pyproject.toml", *pages))]
    assert {".cpp", ".cu", ".h"} <= {path.suffix for path in files if path.is_relative_to(real_checkout / "csrc")}
    script = f"from setuptools import build_meta; build_meta.build_sdist({str(tmp_path)!r})"
    run(sys.executable, "-c", script, cwd=real_checkout)
    (sdist,) = tmp_path.glob("orthokern-*.tar.gz")
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    assert {str(path.relative_to(real_checkout)) for path in needed} <= packed
    assert not [name for name in packed if name.endswith((".so", ".o"))]
