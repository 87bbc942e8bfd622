"""Temporary copies of the source tree; for tests that build, with native sources that compile in a second."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

STUB_SOURCES = {
    # The plain C API: pybind11's headers alone take longer to compile than everything else here.
    "bindings.cpp": """
#include <Python.h>
#include "common/answer.h"
#include "build_info.h"

const char* best_isa();
#ifdef ORTHOKERN_HAVE_CUDA
const char* cuda_probe();
#else
const char* cuda_probe() { return ""; }
#endif

static PyObject* build_info(PyObject*, PyObject*) { return PyUnicode_FromString(ORTHOKERN_BUILD_INFO); }
static PyObject* probe(PyObject*, PyObject*) { return Py_BuildValue("ssi", best_isa(), cuda_probe(), ANSWER); }
static PyMethodDef methods[] = {{"build_info", build_info, METH_NOARGS, ""}, {"probe", probe, METH_NOARGS, ""}, {}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", "", -1, methods, nullptr, nullptr, nullptr, nullptr};
PyMODINIT_FUNC PyInit__C() { return PyModule_Create(&module); }
""",
    "common/answer.h": "#define ANSWER 42\n",
    "common/activations.h": "// what the build takes the hash of\n",
    "cpu/ops.h": "// and of this\n",
    "cpu/select.cpp": """
namespace orthokern {
namespace baseline { const char* probe(); }
namespace avx2 { const char* probe(); }
namespace avx512 { const char* probe(); }
}
const char* best_isa() {
#if defined(ORTHOKERN_HAVE_AVX512)
  return orthokern::avx512::probe();
#elif defined(ORTHOKERN_HAVE_AVX2)
  return orthokern::avx2::probe();
#else
  return orthokern::baseline::probe();
#endif
}
""",
    "cpu/probe.cpp": """
#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)
namespace orthokern { namespace ORTHOKERN_ISA { const char* probe() { return TEXT(ORTHOKERN_ISA); } } }
""",
}


def copy_checkout(target: Path) -> Path:
    """Copy what git tracks, and what it neither tracks nor ignores yet, so that a build leaves this tree alone."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout: cannot tell the sources from what was built here")
    for name in filter(None, listed.stdout.split("\0")):
        source = ROOT / name
        if source.is_file():  # a file deleted but still in the index is listed too
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name)
    return target


def stub_native_sources(checkout: Path) -> Path:
    shutil.rmtree(checkout / "csrc", ignore_errors=True)
    for name, text in STUB_SOURCES.items():
        path = checkout / "csrc" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return checkout


@pytest.fixture
def real_checkout(tmp_path: Path) -> Path:
    """A copy of the source tree with its own native sources."""
    return copy_checkout(tmp_path / "checkout")


@pytest.fixture(scope="session")
def make_checkout(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    """Makes a new copy of the source tree, with native sources that compile in a second."""
    return lambda: stub_native_sources(copy_checkout(tmp_path_factory.mktemp("checkout")))
