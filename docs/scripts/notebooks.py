"""Write the notebooks of docs/tutorials, with outputs: `python docs/scripts/notebooks.py [NAME ...]`.

Each tutorial has one source, docs/tutorials/<name>.py in jupytext's percent format. Run this after changing one. Needs
`pip install -e '.[docs]'`.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

TUTORIALS = Path(__file__).resolve().parents[1] / "tutorials"
LARGEST = 300_000  # bytes of a notebook


def main(names: list[str]) -> int:
    """Execute the tutorials and write their notebooks; all of them without names."""
    import jupytext
    import nbformat
    from nbclient import NotebookClient

    os.environ["PYTHONWARNINGS"] = "ignore"
    os.environ["PYDEVD_DISABLE_FILE_VALIDATION"] = "1"
    paths = [TUTORIALS / f"{name}.py" for name in names] or sorted(TUTORIALS.glob("*.py"))
    for path in paths:
        if not path.is_file():
            print(f"no tutorial {path.stem!r}; there are: {', '.join(p.stem for p in sorted(TUTORIALS.glob('*.py')))}")
            return 2
    for path in paths:
        notebook = jupytext.read(path)
        with tempfile.TemporaryDirectory() as folder:
            resources = {"metadata": {"path": folder}}
            NotebookClient(notebook, timeout=300, coalesce_streams=True, resources=resources).execute()
        for number, cell in enumerate(notebook.cells):
            cell["id"] = f"cell-{number}"
            cell.metadata = {}
            if cell.cell_type == "code":  # only what the page shows
                cell.outputs = [output for output in cell.outputs if output.output_type != "execute_result"]
        notebook.metadata = {"kernelspec": notebook.metadata["kernelspec"]}
        text = nbformat.writes(notebook) + "\n"
        if len(text) > LARGEST:
            print(f"{path.stem}: {len(text)} bytes; accepted: up to {LARGEST}")
            return 1
        path.with_suffix(".ipynb").write_text(text)
        print(f"{path.stem}.ipynb: {len(text)} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
