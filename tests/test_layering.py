"""The arrows of the architecture hold, and every op has its files.

    tasks -> training -> nn -> functional -> ops -> dispatch -> leaves

A module may import what stands lower, and modules of its own layer's package; never what stands higher, and no leaf
another leaf. Imports inside functions count; those under TYPE_CHECKING run nowhere and don't.
"""

from __future__ import annotations

import ast
import graphlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orthokern import dispatch

ROOT = Path(__file__).resolve().parents[1]

# Lowest first. Every part of the package (a module or folder directly under orthokern/) stands in exactly one layer.
LAYERS: list[set[str]] = [
    {"_C"},
    {"_version", "errors", "_native", "_activations", "_products", "_autocast", "_memory", "_decompositions"},
    {"_scan_contract"},
    {"_elements"},
    {"_gru_parameters", "_map_gradients"},  # what the leaves share
    {"_gpu_scans"},
    {"reference", "cpu", "cuda", "triton_kernels"},  # the leaves
    {"_files"},
    {"dispatch", "commandline"},
    {"ops"},
    {"functional", "_learned_orthogonal"},
    {"init", "penalties", "optim", "data"},
    {"diagnostics"},
    {"nn"},
    {"parametrize", "conversion"},
    {"training"},
    {"tasks"},
    {"reproduce"},
    {""},  # orthokern/__init__.py, which loads all of the above on first use
    {"explain", "compare", "__main__"},
]
RANK = {part: rank for rank, parts in enumerate(LAYERS) for part in parts}
# What a leaf may import of the project besides itself: the reference the names of its arguments alone, so that it
# depends on nothing that it is there to check.
SHARED = {"errors", "_activations", "_products", "_scan_contract", "_gru_parameters", "_map_gradients", "_elements"}
LEAF_IMPORTS = {
    "reference": {"_scan_contract"},
    "cpu": SHARED | {"_version", "_native"},
    "cuda": SHARED | {"_version", "_native", "_gpu_scans"},
    "triton_kernels": SHARED | {"_gpu_scans"},
}

FOLDERS = {"orthokern": ROOT / "orthokern", "orthokern.triton_kernels": ROOT / "triton_kernels"}


def modules() -> dict[str, Path]:
    """Every Python module of the installed package, by its full name."""
    paths = {}
    for package, folder in FOLDERS.items():
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            paths[".".join([package, *parts]).removesuffix(".__init__")] = path
    return paths


MODULES = modules()


def part_of(module: str) -> str:
    """The part that a module belongs to: "ops" for orthokern.ops.cayley, "" for orthokern itself."""
    return module.split(".")[1] if "." in module else ""


def run_time_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those that only a type checker sees."""
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)):
            yield node
            yield from run_time_nodes(node)


def imports(module: str, source: str, is_package: bool) -> set[str]:
    """Full names of the modules that a module imports, by statement or with importlib."""
    package = module if is_package else module.rpartition(".")[0]
    names = set()
    for node in run_time_nodes(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                is_module = inner in MODULES or part_of(inner) in RANK and base == "orthokern"
                names.add(inner if is_module else base)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == "import_module":
            name = node.args[0]
            if isinstance(name, ast.JoinedStr):
                name = name.values[0]
            if isinstance(name, ast.Constant):
                names.add(str(name.value).rstrip("."))
    return names


def forbidden(module: str, imported: str) -> str | None:
    """Why a module may not import another one, or None if it may."""
    own, other, top = part_of(module), part_of(imported), imported.split(".")[0]
    if top != "orthokern":
        if own == "reference" and top != "torch" and top not in sys.stdlib_module_names:
            return "the reference imports torch, the standard library and the argument types of _scan_contract"
        return "only the Triton leaf imports Triton" if own != "triton_kernels" and "triton" in top else None
    if other not in RANK:
        return f"{imported} stands in no layer of this test"
    if own == other:
        return None
    if own in LEAF_IMPORTS and other not in LEAF_IMPORTS[own]:
        return f"a leaf imports {imported}"
    if RANK[own] <= RANK[other]:
        return f"{imported} does not stand lower"
    return None


def test_the_modules_of_nn_import_each_other_in_one_order() -> None:
    graph = {}
    for name, path in MODULES.items():
        if name.startswith("orthokern.nn."):
            assert "TYPE_CHECKING" not in path.read_text()
            graph[name] = {
                other for other in imports(name, path.read_text(), False) if other.startswith("orthokern.nn.")
            }
    graphlib.TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_point_downwards(module: str) -> None:
    assert part_of(module) in RANK, f"{module} stands in no layer: add it to LAYERS"
    path = MODULES[module]
    imported = imports(module, path.read_text(), path.name == "__init__.py")
    broken = {name: forbidden(module, name) for name in sorted(imported)}
    assert not any(broken.values()), {name: why for name, why in broken.items() if why}


OPS = sorted(path.stem for path in (ROOT / "orthokern" / "ops").glob("*.py") if not path.name.startswith("_"))
FILES = {
    "reference": ["orthokern/reference/{}.py"],
    "cpu": ["orthokern/cpu/{}.py", "csrc/cpu/{}.cpp"],
    "triton": ["triton_kernels/{}.py"],
    "cuda": ["orthokern/cuda/{}.py", "csrc/cuda/{}.cu"],
}


@pytest.mark.parametrize("backend", FILES)
@pytest.mark.parametrize("op", OPS)
def test_an_op_has_its_file_or_its_reason(op: str, backend: str) -> None:
    support = importlib.import_module(f"orthokern.ops.{op}").SUPPORT[backend]
    for file in [pattern.format(op) for pattern in FILES[backend]]:
        if support.missing is None:
            assert (ROOT / file).exists(), f"SUPPORT of {op} has a {backend} backend, but there is no {file}"
        else:
            assert len(support.missing) > 5, f"SUPPORT of {op} gives no reason for having no {backend} backend"
            assert not (ROOT / file).exists(), f"{file} exists, but SUPPORT of {op} says: {support.missing}"


def functions(op: str, backend: str) -> dict[str, list[tuple[Any, ...]]]:
    """The parameters of the functions that a leaf exports for an op, without the types."""
    module = dispatch.leaf(op, backend)
    stem = op.removesuffix("s")  # activations exports activation_fwd
    names = getattr(importlib.import_module(f"orthokern.ops.{op}"), "FUNCTIONS", (f"{stem}_fwd", f"{stem}_bwd"))
    # cotangents of a forward's further results, which a second derivative gives the reference
    extra = ("grad_gates", "grad_pre") if backend == "reference" else ()
    return {
        name: [(p.name, p.kind, p.default) for p in inspect.signature(f).parameters.values() if p.name not in extra]
        for name in names
        if inspect.isfunction(f := getattr(module, name, None))
    }


@pytest.mark.parametrize("op", OPS)
def test_leaves_have_the_signatures_of_the_reference(op: str) -> None:
    reference = functions(op, "reference")
    assert reference, f"orthokern/reference/{op}.py exports none of the op's functions"
    for backend in ("cpu", "cuda", *(["triton"] if importlib.util.find_spec("triton") else [])):
        if importlib.import_module(f"orthokern.ops.{op}").SUPPORT[backend].missing is None:
            assert functions(op, backend) == reference
