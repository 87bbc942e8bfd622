"""No source file above 600 lines and no function above 100, but for those whose first comment gives a reason.

The reason stands in the first comment (or docstring) of the file, or for a function in the first comment or docstring
of its body, and begins with "Longer than 600 lines:" or "Longer than 100 lines:".
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {"orthokern": ("*.py",), "triton_kernels": ("*.py",), "csrc": ("*.h", "*.cuh", "*.cpp", "*.cu")}
SOURCES = sorted(path for folder, kinds in FOLDERS.items() for kind in kinds for path in (ROOT / folder).rglob(kind))
FILE_LIMIT, FUNCTION_LIMIT = 600, 100


def first_comment(lines: list[str]) -> str:
    """The first block of comment lines, or the first docstring, among the first lines that are no code."""
    found: list[str] = []
    quoted = False
    for line in lines:
        text = line.strip()
        comment = quoted or text.startswith(("#", "//", "/*", "*", '"""'))
        if text.count('"""') == 1:
            quoted = not quoted
        if comment:
            found.append(text)
        elif found or text:
            break
    return " ".join(found)


def long_functions(source: str) -> Iterator[tuple[str, int, str]]:
    """(name, lines, docstring or comments before the first statement) of each Python function above the limit."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or 0) - node.lineno + 1
            if length > FUNCTION_LIMIT:
                head = lines[node.lineno - 1 : node.body[0].lineno - 1]
                comments = [line.strip() for line in head if line.strip().startswith("#")]
                yield node.name, length, " ".join([ast.get_docstring(node) or "", *comments])


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_source_is_short_or_says_why_not(path: Path) -> None:
    source = path.read_text()
    lines = source.splitlines()
    reason = f"Longer than {FILE_LIMIT} lines: "
    assert len(lines) <= FILE_LIMIT or reason in first_comment(lines), (
        f"{len(lines)} lines; split the file, or begin a sentence of its first comment with {reason!r}"
    )
    if path.suffix == ".py":
        reason = f"Longer than {FUNCTION_LIMIT} lines: "
        for name, length, comment in long_functions(source):
            assert reason in comment, (
                f"{name} has {length} lines; split it, or begin a sentence of its first comment with {reason!r}"
            )


def test_the_limits_are_held_and_reasons_are_read() -> None:
    body = "    x = 1\n" * FUNCTION_LIMIT
    assert [name for name, _, _ in long_functions(f"def f(\n    a: int,\n) -> None:\n{body}")] == ["f"]
    assert not list(long_functions("def f():\n" + "    x = 1\n" * (FUNCTION_LIMIT - 1)))
    for comment in (
        "    # Longer than 100 lines: a table.\n",
        '    """Does it.\n\n    Longer than 100 lines: a table.\n    """\n',
    ):
        (_, _, found), *_ = long_functions(f"def f(\n    a: int,\n) -> None:\n{comment}{body}")
        assert "Longer than 100 lines: a table." in found
    assert "Longer than 600 lines: one" in first_comment(
        ["// A scan.", "// Longer than 600 lines: one", "int x;", "// no"]
    )
    assert "no" not in first_comment(["// A scan.", "int x;", "// no"])
