"""Every Python block of the Markdown files runs.

The blocks of a file share their names and run in order, in an empty folder. A comment directly before a block changes
that: `<!-- setup: CODE -->` is run first, for names that the page takes as given; `<!-- no-run: REASON -->` is for a
block that needs data or a device.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>setup|no-run):\s(?P<text>(?:(?!-->).)*?)\s*-->\n+)?"
    r"^```(?:python|py)\b[^\n]*\n(?P<code>.*?)^```[^\S\n]*$",
    re.MULTILINE | re.DOTALL,
)

pytestmark = pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="not a source tree with documentation")


class Block(NamedTuple):
    """line: of the first line of the code in its file; setup: code to run before; reason: why it does not run."""

    line: int
    code: str
    setup: str
    reason: str


def blocks(text: str) -> list[Block]:
    found = []
    for match in BLOCK.finditer(text):
        mark, note = match["mark"], (match["text"] or "").strip()
        line = text.count("\n", 0, match.start("code")) + 1
        found.append(Block(line, match["code"], note if mark == "setup" else "", note if mark == "no-run" else ""))
    return found


def run(blocks: list[Block], name: str) -> dict[str, Any]:
    """Runs the blocks one after the other; a failure names the line of the file."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks:
        if block.reason:
            continue
        exec(compile(block.setup, f"{name} (setup of line {block.line})", "exec"), names)
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
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        run(blocks(path.read_text()), str(path))
