"""Every Python block of the Markdown files runs by itself, in an empty folder that the blocks of a file share.

A comment directly before a block changes that: `<!-- setup: CODE -->` is run first, for files that the page takes as
given; `<!-- needs: PACKAGE -->` skips a block where a package is not installed that the tests do not need;
`<!-- no-run: REASON -->` is for a block that needs data or a device.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>setup|needs|no-run):\s(?P<text>(?:(?!-->).)*?)\s*-->\n+)?"
    r"^```(?:python|py)\b[^\n]*\n(?P<code>.*?)^```[^\S\n]*$",
    re.MULTILINE | re.DOTALL,
)

pytestmark = pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="not a source tree with documentation")


class Block(NamedTuple):
    """line: of the first line of the code in its file; mark and text: those of the comment before it."""

    line: int
    code: str
    mark: str
    text: str


def blocks(text: str) -> list[Block]:
    return [
        Block(
            text.count("\n", 0, match.start("code")) + 1,
            match["code"],
            match["mark"] or "",
            (match["text"] or "").strip(),
        )
        for match in BLOCK.finditer(text)
    ]


def run(block: Block, name: str) -> dict[str, Any]:
    """Runs a block and returns its names; a failure names the line of the file."""
    names: dict[str, Any] = {"__name__": "__main__"}
    if block.mark == "no-run" or (block.mark == "needs" and importlib.util.find_spec(block.text) is None):
        return names
    if block.mark == "setup":
        exec(compile(block.text, f"{name} (setup of line {block.line})", "exec"), names)
    exec(compile("\n" * (block.line - 1) + block.code, name, "exec"), names)
    return names


FILES = [
    path
    for path in [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("bench/*.md"))]
    if blocks(path.read_text())
]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_the_python_blocks_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    for block in blocks(path.read_text()):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            names = run(block, str(path))
        if path == ROOT / "README.md":  # the loop learns: guessing has a loss of ln 8 = 2.08
            assert names["loss"] < 0.1
