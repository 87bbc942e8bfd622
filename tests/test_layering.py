"""The arrows of the architecture hold, and every op has its files.

    tasks -> training -> nn -> functional -> ops -> dispatch -> leaves

A module may import what stands lower, and modules of its own layer's package; never what stands higher, and no leaf
another leaf. Imports inside functions count; those under TYPE_CHECKING run nowhere and don't.
"""

from __future__ import annotations

import ast
import graphlib
import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from orthokern import dispatch

ROOT = Path(__file__).resolve().parents[1]

# Lowest first. Every part of the package (a module or folder directly under orthokern/) stands in exactly one layer.
LAYERS: list[set[str]] = [
    {"_version", "errors", "_C", "_activations", "_products", "_autocast", "_memory", "_decompositions"},
    {"_scan_contract", "_elements"},
    {"_gru_parameters"},  # what the leaves share
    {"_gpu_scans"},
    {"reference", "cpu", "cuda", "triton_kernels"},  # the leaves
    {"_files", "_no_compiler"},
    {"dispatch", "commandline", "_state"},
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
SHARED = {"errors", "_activations", "_products", "_scan_contract", "_gru_parameters", "_elements"}
LEAF_IMPORTS = {
    "reference": {"_scan_contract"},
    "cpu": SHARED | {"_version", "_C"},
    "cuda": SHARED | {"_version", "_C", "_gpu_scans"},
    "triton_kernels": SHARED | {"_gpu_scans"},
}

FOLDERS = {"orthokern": ROOT / "orthokern", "orthokern.triton_kernels": ROOT / "triton_kernels"}


def modules() -> dict[str, Path]:
    """Every Python module of the installed package, by its full name."""
    found = {}
    for package, folder in FOLDERS.items():
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            found[".".join([package, *parts]).removesuffix(".__init__")] = path
    return found


MODULES = modules()


def part_of(module: str) -> str:
    """The part that a module belongs to: "ops" for orthokern.ops.cayley, "" for orthokern itself."""
    return module.split(".")[1] if "." in module else ""


def under_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def run_time_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those that only a type checker sees."""
    for node in ast.iter_child_nodes(tree):
        if under_type_checking(node):
            assert isinstance(node, ast.If)
            for other in node.orelse:
                yield other
                yield from run_time_nodes(other)
        else:
            yield node
            yield from run_time_nodes(node)


def text_of(node: ast.AST) -> str | None:
    """A string constant, or the constant beginning of an f-string."""
    if isinstance(node, ast.JoinedStr) and node.values:
        node = node.values[0]
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def imports(module: str, source: str, is_package: bool) -> set[str]:
    """Full names of the modules that a module imports, by statement or with importlib."""
    package = module if is_package else module.rpartition(".")[0]
    found = set()
    for node in run_time_nodes(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                is_module = inner in MODULES or part_of(inner) in RANK and base == "orthokern"
                found.add(inner if is_module else base)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == "import_module":
            name = text_of(node.args[0])
            if name:
                found.add(name.rstrip("."))
    return found


def forbidden(module: str, imported: str) -> str | None:
    """Why a module may not import another one of the project, or None if it may."""
    own, other = part_of(module), part_of(imported)
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


def arrows(module: str) -> Iterator[tuple[str, str]]:
    """(imported module, why it is forbidden) for every import that breaks a rule."""
    path = MODULES[module]
    for imported in sorted(imports(module, path.read_text(), path.name == "__init__.py")):
        top = imported.split(".")[0]
        if top == "orthokern":
            why = forbidden(module, imported)
        elif part_of(module) == "reference" and top != "torch" and top not in sys.stdlib_module_names:
            why = "the reference imports torch, the standard library and the argument types of _scan_contract"
        elif part_of(module) != "triton_kernels" and top in ("triton", "triton_kernels"):
            why = "only the Triton leaf imports Triton"
        else:
            why = None
        if why:
            yield imported, why


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_point_downwards(module: str) -> None:
    assert part_of(module) in RANK, f"{module} stands in no layer: add it to LAYERS"
    broken = [f"{module} -> {imported}: {why}" for imported, why in arrows(module)]
    assert not broken, "\n".join(broken)


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


@pytest.mark.parametrize("leaf", ["cpu", "cuda"])
def test_one_module_of_a_leaf_passes_addresses(leaf: str) -> None:
    passing = {path.name for path in (ROOT / "orthokern" / leaf).glob("*.py") if "data_ptr" in path.read_text()}
    assert passing == {"_call.py"}


def functions(op: str, backend: str) -> dict[str, inspect.Signature]:
    """The functions that a leaf exports for an op, without the types."""
    module = dispatch.leaf(op, backend)
    stem = op.removesuffix("s")  # activations exports activation_fwd
    names = getattr(importlib.import_module(f"orthokern.ops.{op}"), "FUNCTIONS", (f"{stem}_fwd", f"{stem}_bwd"))
    found = {name: getattr(module, name) for name in names if inspect.isfunction(getattr(module, name, None))}
    return {
        name: inspect.Signature(
            [
                p.replace(annotation=inspect.Parameter.empty)
                for p in inspect.signature(function).parameters.values()
                # cotangents of a forward's further results, which a second derivative gives the reference
                if not (backend == "reference" and p.name in ("grad_gates", "grad_pre"))
            ]
        )
        for name, function in found.items()
    }


@pytest.mark.parametrize("op", OPS)
def test_leaves_have_the_signatures_of_the_reference(op: str) -> None:
    reference = functions(op, "reference")
    assert reference, f"orthokern/reference/{op}.py exports none of the op's functions"
    for backend in ("cpu", "cuda"):
        if importlib.import_module(f"orthokern.ops.{op}").SUPPORT[backend].missing is None:
            assert functions(op, backend) == reference
