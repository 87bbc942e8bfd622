"""No source file has more than 600 lines and no function more than 100, unless a reason is given.

The reason is in the first comment (or docstring) of the file, or of the body of a Python function, and begins with
"Longer than 600 lines:" or "Longer than 100 lines:". The reasons for C++ and CUDA functions are in `LONG_FUNCTIONS`,
those for files of tests in `LONG_TESTS`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
KINDS = (".py", ".h", ".cuh", ".cpp", ".cu")
FOLDERS = ("orthokern", "triton_kernels", "csrc", "tests", "bench", "docs/scripts")
FOUND = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in KINDS]
SOURCES = sorted([*FOUND, *ROOT.glob("setup.py")])
NATIVE = [path for path in SOURCES if path.suffix != ".py"]
FILE_LIMIT, FUNCTION_LIMIT = 600, 100

# file -> function -> why it is longer than 100 lines
LONG_FUNCTIONS = {
    "csrc/cuda/gru_resident.h": {
        "gru_resident_fwd_kernel": "one loop over time, whose weights and states stay in registers between steps",
        "gru_resident_bwd_kernel": "one loop over time, whose weights and adjoints stay in registers between steps",
    },
}

# file of tests -> the one subject in it, whose tests share problems and comparisons
LONG_TESTS: dict[str, str] = {}

# What a native function is found without: comments, strings, characters and preprocessor lines.
NO_CODE = re.compile(
    r"""//[^\n]*|/\*.*?\*/|R"\(.*?\)"|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])+'"""
    r"""|^[ \t]*\#(?:[^\n]*\\\n)*[^\n]*""",
    re.DOTALL | re.MULTILINE,
)
SCOPE = re.compile(r"(inline\s+)?namespace\b|(struct|class|union|enum|extern)\b")
ATTRIBUTE = re.compile(r"(__launch_bounds__|__align__|alignas|__attribute__)\s*\((\([^)]*\)|[^()])*\)")


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
    """(name, lines, docstring or comments before the first statement) of each Python function above the limit.
    Docstrings do not count."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or 0) - node.lineno + 1
            if ast.get_docstring(node) is not None:
                length -= (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
            if length > FUNCTION_LIMIT:
                head = lines[node.lineno - 1 : node.body[0].lineno - 1]
                comments = [line.strip() for line in head if line.strip().startswith("#")]
                yield node.name, length, " ".join([ast.get_docstring(node) or "", *comments])


def closing(code: str, at: int, pair: str) -> int:
    """Index of the bracket that closes the one at `at`."""
    depth = 0
    for index in range(at, len(code)):
        depth += (code[index] == pair[0]) - (code[index] == pair[1])
        if depth == 0:
            return index
    raise AssertionError(f"line {code.count(chr(10), 0, at) + 1}: {pair[0]} is not closed")


def native_functions(source: str) -> Iterator[tuple[str, int]]:
    """(name, lines) of each C++ or CUDA function, without its template line. Lambdas belong to their function.

    A brace opens a namespace, a class, a function or an initialiser, which the text before it tells. Namespaces and
    classes are searched for functions.
    """
    code = NO_CODE.sub(lambda found: re.sub(r"[^\n]", " ", found.group()), source)
    begin = at = 0  # of a declaration
    while at < len(code):
        if code[at] in ";}":
            begin = at + 1
        elif code[at] == "{":
            while re.match(r"\s*template\b", code[begin:at]):
                begin = closing(code, code.index("<", begin), "<>") + 1
            declaration = code[begin:at].strip()
            if SCOPE.match(declaration):
                begin = at + 1
            else:
                end = closing(code, at, "{}")
                if not code[end + 1 :].lstrip().startswith((",", "{")):  # else one of a constructor's initialisers
                    if "(" in declaration:
                        name = re.search(r"(\S+?)\s*\(", ATTRIBUTE.sub("", declaration))
                        first = code.index(declaration, begin)
                        yield name.group(1) if name else declaration, code.count("\n", first, end) + 1
                    begin = end + 1
                at = end
        at += 1


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_source_is_short_or_says_why_not(path: Path) -> None:
    source = path.read_text()
    lines = source.splitlines()
    reason = f"Longer than {FILE_LIMIT} lines: "
    assert len(lines) <= FILE_LIMIT or reason in first_comment(lines) or str(path.relative_to(ROOT)) in LONG_TESTS, (
        f"{len(lines)} lines; split the file, or begin a sentence of its first comment with {reason!r}"
    )
    if path.suffix == ".py":
        reason = f"Longer than {FUNCTION_LIMIT} lines: "
        for name, length, comment in long_functions(source):
            assert reason in comment, (
                f"{name} has {length} lines; split it, or begin a sentence of its first comment with {reason!r}"
            )


@pytest.mark.parametrize("path", NATIVE, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_native_function_is_short_or_has_a_reason(path: Path) -> None:
    reasons = LONG_FUNCTIONS.get(str(path.relative_to(ROOT)), {})
    lengths = {name: lines for name, lines in native_functions(path.read_text()) if lines > FUNCTION_LIMIT}
    for name, lines in lengths.items():
        assert name in reasons, f"{name} has {lines} lines; split it, or give a reason in LONG_FUNCTIONS"
    assert reasons.keys() <= lengths.keys(), "LONG_FUNCTIONS has functions that are short now; remove them"


def test_long_tests_are_long() -> None:
    short = [name for name in LONG_TESTS if len((ROOT / name).read_text().splitlines()) <= FILE_LIMIT]
    assert not short, "LONG_TESTS has files that are short now; remove them"
