"""Importing orthokern needs only torch, compiles nothing and does not use a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import orthokern

ROOT = Path(__file__).resolve().parents[2]

# A machine without the native module and without Triton.
BLOCK = """
import sys

class Absent:
    names = ("orthokern._C", "triton")

    def find_spec(self, name, path=None, target=None):
        if name in self.names or name.startswith("triton."):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
"""

# torch may do what it likes while it is imported; from here on nobody starts a program or opens a GPU.
WATCH = """
import torch

watched = True

def watch(event, args):
    if watched and event in ("subprocess.Popen", "os.system", "os.posix_spawn", "os.exec", "os.fork"):
        raise AssertionError(f"{event}{args}")

sys.addaudithook(watch)
"""


def run(code: str, *arguments: str | Path) -> list[str]:
    """Lines that the code prints in a fresh interpreter, where a GPU would show."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_import_without_native_module_and_triton() -> None:
    """Plots and command lines too; the programs that fonts are looked up with are matplotlib's own affair."""
    code = """
    import importlib, pkgutil, orthokern, orthokern.functional, orthokern.nn, orthokern.optim, orthokern.dispatch
    h = orthokern.functional.factored_scan(torch.zeros(3, 2, 4), torch.eye(4), torch.ones(4), torch.eye(4))
    print(tuple(h.shape), torch.cuda.is_initialized(), "triton" in sys.modules, "orthokern._C" in sys.modules)
    watched = False
    names = [m.name for m in pkgutil.walk_packages(orthokern.__path__, "orthokern.")]
    for name in names:
        if not name.startswith("orthokern._C") and not name.endswith("__main__"):
            importlib.import_module(name)
    print(len(names) > 10, torch.cuda.is_initialized())
    """
    assert run(BLOCK + WATCH + textwrap.dedent(code)) == ["(3, 2, 4) False False False", "True False"]


def test_citation_and_changelog_have_the_version() -> None:
    cited = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE)
    assert cited is not None and cited[1] == orthokern.__version__
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert orthokern.__version__ in headings


@pytest.mark.parametrize(
    ("arguments", "before", "after"),
    [
        (["python", "-m", "orthokern.tasks.copy", "--T", "10"], None, "passive"),
        (["python", "-m", "orthokern.tasks.copy"], "active", "active"),
        (["python", "-m", "orthokern_user.train"], None, None),
    ],
)
def test_commands_of_the_package_wait_passively(
    arguments: list[str], before: str | None, after: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "orig_argv", arguments)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if before is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", before)
    orthokern._wait_passively()
    assert os.environ.get("OMP_WAIT_POLICY") == after


WITHOUT_COMPILER = """
import sys
import torch
from orthokern.commandline import without_compiler
from orthokern.tasks import copy

tiny = ["--T", "20", "--hidden", "16", "--batch", "2", "--iterations", "2", "--device", "cpu", "--no-plots"]
copy.main([*tiny, "--out", sys.argv[1]])
assert "sympy" not in sys.modules, "training imported the compiler"
with without_compiler():
    assert torch._dynamo.config.verbose is False, "an attribute of the compiler itself"
parameter = torch.nn.Parameter(torch.ones(3))
optimizer = torch.optim.Adam([parameter])

@torch.compile(backend="eager")
def step(x):
    return 2 * x

parameter.grad = step(torch.ones(3))
optimizer.step()
assert not hasattr(torch.optim.Optimizer.zero_grad.__wrapped__, "__dynamo_disable")
optimizer.zero_grad()
"""


def test_commands_train_without_the_compiler(tmp_path: Path) -> None:
    """The import of torch._dynamo by torch's optimizers takes a second and 140 MB; afterwards torch.compile works."""
    run(WITHOUT_COMPILER, tmp_path / "run")
