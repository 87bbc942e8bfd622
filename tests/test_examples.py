"""Every Python block of the Markdown files runs by itself, in an empty folder that the blocks of a file share.

A comment directly before a block changes that: `<!-- setup: CODE -->` is run first, for files that the page takes as
given; `<!-- needs: PACKAGE -->` skips a block where a package is not installed that the tests do not need;
`<!-- no-run: REASON -->` is for a block that needs data or a device.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>setup|needs|no-run):\s(?P<text>(?:(?!-->).)*?)\s*-->\n+)?"
    r"^```(?:python|py)\b[^\n]*\n(?P<code>.*?)^```[^\S\n]*$",
    re.MULTILINE | re.DOTALL,
)

pytestmark = pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="not a source tree with documentation")


def run(block: re.Match[str], name: str) -> dict[str, Any]:
    """Runs a block and returns its names; a failure names the line of the file."""
    names: dict[str, Any] = {"__name__": "__main__"}
    if block["mark"] == "no-run" or (block["mark"] == "needs" and importlib.util.find_spec(block["text"]) is None):
        return names
    lines_before = block.string.count("\n", 0, block.start("code"))
    if block["mark"] == "setup":
        exec(compile(block["text"], f"{name} (setup of line {lines_before + 1})", "exec"), names)
    exec(compile("\n" * lines_before + block["code"], name, "exec"), names)
    return names


FILES = [
    path
    for path in [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("bench/*.md"))]
    if BLOCK.search(path.read_text())
]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_the_python_blocks_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    for block in BLOCK.finditer(path.read_text()):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            names = run(block, str(path))
        if path == ROOT / "README.md":  # the loop learns: guessing has a loss of ln 8 = 2.08
            assert names["loss"] < 0.1
