"""The tutorials run, their notebooks are up to date, and the site lists every page."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.py"))
# Trainings whose outcome no line of the tutorial checks: a few iterations run the same lines.
SHORTER = {"linear_layers": ("(model, 3e-3, 200)", "(model, 3e-3, 2)"), "decision": ("range(300)", "range(2)")}

pytestmark = pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="not a source tree with documentation")


@pytest.mark.slow
@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_runs(path: Path, tmp_path: Path) -> None:
    # several threads wait long for each other on a busy machine
    environment = {**os.environ, "MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1"}
    source, (long, short) = path.read_text(encoding="utf-8"), SHORTER.get(path.stem, ("", ""))
    assert long in source
    command = [sys.executable, "-W", "ignore::UserWarning", "-c", source.replace(long, short)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert not list(tmp_path.iterdir()), "a tutorial removes the files that it writes"


def cells(source: str) -> list[tuple[str, str]]:
    """(kind, text) of the cells of a source in percent format; Markdown without its comment signs."""
    parts = []
    for cell in re.split(r"^# %%", source, flags=re.MULTILINE)[1:]:
        head, _, body = cell.partition("\n")
        if "[markdown]" in head:
            parts.append(("markdown", re.sub(r"^# ?", "", body.strip(), flags=re.MULTILINE)))
        else:
            parts.append(("code", body.strip()))
    return parts


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_a_notebook_is_that_of_its_source(path: Path) -> None:
    notebook = path.with_suffix(".ipynb")
    assert notebook.is_file(), f"run `python docs/scripts/notebooks.py {path.stem}`"
    assert notebook.stat().st_size <= 300_000
    stored = json.loads(notebook.read_text())["cells"]
    assert [(cell["cell_type"], "".join(cell["source"]).strip()) for cell in stored] == cells(path.read_text()), (
        f"{notebook.name} is not that of {path.name}: run `python docs/scripts/notebooks.py {path.stem}`"
    )
    assert any(cell.get("outputs") for cell in stored), f"{notebook.name} has no outputs"


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    listed = set(re.findall(r"[\w/-]+\.md", navigation))
    docs = ROOT / "docs"
    pages = {page.name for page in docs.glob("*.md")} - {"README.md"}
    pages |= {f"api/{page.name}" for page in docs.glob("api/*.md")}
    pages |= {f"tutorials/{path.stem}.md" for path in TUTORIALS}
    assert pages <= listed, f"mkdocs.yml does not list {', '.join(sorted(pages - listed))}"
