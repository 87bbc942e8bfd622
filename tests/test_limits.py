"""No source file has more than 500 lines, no function more than 80 without its docstring, and no constructor declares
more than 8 arguments, except those that are listed here with a reason."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("orthokern", "triton_kernels", "csrc", "tests", "bench", "docs/scripts")
KINDS = (".py", ".h", ".cuh", ".cpp", ".cu")
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in KINDS)
FILE_LIMIT, FUNCTION_LIMIT, ARGUMENT_LIMIT = 500, 80, 8

# "file" or "file: function" -> why it is longer
REASONS = {
    "csrc/cuda/gru_resident.h: gru_resident_fwd_kernel": "one loop over time, whose weights stay in registers",
    "csrc/cuda/gru_resident.h: gru_resident_bwd_kernel": "one loop over time, whose weights stay in registers",
    "csrc/cuda/scan_resident.h: resident_scan_kernel": "one loop over time, whose weights stay in registers",
    "orthokern/nn/_base.py: __init__": "the arguments of torch's recurrent modules",
    "tests/modal_problem.py: __init__": "the arguments of a sequence loss",
}

# a function of C++ or CUDA, formatted by clang-format: from column 0 to a brace in column 0
NATIVE = re.compile(r"^(?!namespace|struct|class|union|enum|extern|template)\w[^;{}]*\([^;{}]*\{\n.*?^\}", re.M | re.S)


def too_long(path: Path) -> dict[str, str]:
    """name -> what exceeds its limit, of a file and its functions."""
    source, name = path.read_text(), str(path.relative_to(ROOT))
    excess = {name: len(source.splitlines()) - FILE_LIMIT}
    if path.suffix != ".py":
        for match in NATIVE.finditer(source):
            called = re.search(
                r"(\w+)\s*\(", re.sub(r"__launch_bounds__\s*\([^()]*(\([^()]*\))?[^()]*\)", "", match.group())
            )
            assert called is not None
            excess[f"{name}: {called.group(1)}"] = match.group().count("\n") + 1 - FUNCTION_LIMIT
        return {key: f"{over} lines too long" for key, over in excess.items() if over > 0}
    arguments = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[1] if ast.get_docstring(node) is not None and len(node.body) > 1 else node.body[0]
            excess[f"{name}: {node.name}"] = (node.end_lineno or 0) - first.lineno + 1 - FUNCTION_LIMIT
            count = len([*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]) - 1
            if node.name == "__init__" and count > ARGUMENT_LIMIT:
                arguments[f"{name}: {node.name}"] = f"{count} arguments"
    return {key: f"{over} lines too long" for key, over in excess.items() if over > 0} | arguments


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_source_is_short_or_has_a_reason(path: Path) -> None:
    assert too_long(path).keys() <= REASONS.keys()
