"""The Markdown files: lines of at most 120 columns, links that resolve, and tables whose rows have all their cells. The
Notes of the sources: each that is referred to is defined once."""

from __future__ import annotations

import importlib
import json
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
WIDTH = 120
README_LINES, README_WORDS = 110, 900

pytestmark = pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="not a source tree with documentation")


def documents() -> list[Path]:
    return [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("bench/*.md"))]


def prose(path: Path) -> str:
    """Without blocks and spans of code."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`", "code", text)


def anchors(path: Path) -> set[str]:
    """Of the headings, as GitHub forms them."""
    found: set[str] = set()
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    for heading in re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE):
        found.add(re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-"))
    return found


def unresolved(path: Path) -> list[str]:
    """The relative links of a page that lead nowhere."""
    found = []
    for target in re.findall(r"\]\(([^()\s]+)\)", prose(path)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        there = (path.parent / name).resolve() if name else path
        if not there.exists() or (anchor and anchor not in anchors(there)):
            found.append(target)
    return found


def test_lines_fit() -> None:
    long = [
        f"{path.relative_to(ROOT)}:{number}: {len(line)} columns"
        for path in documents()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > WIDTH and not line.lstrip().startswith("|")
    ]
    assert not long, f"lines of at most {WIDTH} columns, tables excepted:\n" + "\n".join(long)


def test_the_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= README_LINES and len(text.split()) <= README_WORDS


def test_relative_links_resolve() -> None:
    broken = [f"{path.relative_to(ROOT)}: {target}" for path in documents() for target in unresolved(path)]
    assert not broken, "\n".join(broken)


def ragged(text: str) -> list[str]:
    """The first lines of tables that have no rows, or rows of different numbers of cells."""
    found = []
    for table in re.findall(r"(?:^\|.*\n)+", text + "\n", flags=re.MULTILINE):
        rows = re.sub(r"`[^`\n]*`", "code", table).splitlines()
        widths = {len(re.findall(r"(?<!\\)\|", row)) for row in rows}
        if len(rows) < 3 or len(widths) > 1:
            found.append(rows[0])
    return found


def test_tables_are_complete() -> None:
    broken = [f"{path.relative_to(ROOT)}: {first}" for path in documents() for first in ragged(path.read_text())]
    assert not broken, "\n".join(broken)
    assert ragged("| a | b |\n| --- | --- |\n| 1 |\n\n| c |\n| --- |\n") == ["| a | b |", "| c |"]


def test_every_document_is_in_an_index() -> None:
    index, results = ROOT / "docs" / "README.md", ROOT / "docs" / "results" / "README.md"
    for page in (index, results):
        listed = set(re.findall(r"\]\(([^()\s#]+)", page.read_text()))
        missing = [other.name for other in page.parent.glob("*.md") if other != page and other.name not in listed]
        assert not missing, f"{page.relative_to(ROOT)} does not list {', '.join(missing)}"


def test_the_errors_of_the_modal_form_are_those_of_their_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "scripts"))
    script = importlib.import_module("modal_scaling")
    points = json.loads((ROOT / "docs" / "images" / "modal_error.json").read_text())["points"]
    assert script.error_table(points) in (ROOT / "docs" / "modal.md").read_text()


NOTED = {"orthokern", "triton_kernels", "csrc", "tests", "bench", "docs"}
NOTE = re.compile(r"Note \[([^\]]+)\]")


def notes(text: str) -> tuple[list[str], set[str]]:
    """The names of the Notes that a source defines, each on a line of its own, and of those that it refers to."""
    defined = re.findall(r"^\s*(?:#|//)?\s*Note \[([^\]\n]+)\]\s*$", text, flags=re.MULTILINE)
    one_line = re.sub(r"\n\s*(?:#|//)?\s*", " ", text)
    return defined, {name for name in NOTE.findall(one_line)}


def test_every_note_that_is_referred_to_is_defined_once() -> None:
    kinds = {".py", ".h", ".cuh", ".cpp", ".cu", ".md"}
    paths = [path for folder in NOTED for path in (ROOT / folder).rglob("*") if path.suffix in kinds]
    found = [notes(path.read_text()) for path in paths if path != Path(__file__)]
    counts = Counter(name for defined, _ in found for name in defined)
    wrong = {name: counts[name] for _, referred in found for name in referred if counts[name] != 1}
    assert not wrong, f"definitions of Notes (exactly one is needed): {wrong}"
    text = "    Note [A thing]\n    It is Note [A\n    thing] and // Note [Other].\n"
    assert notes(text) == (["A thing"], {"A thing", "Other"})
