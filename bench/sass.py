"""The machine code of the hot loops of the CUDA kernels. No GPU is needed.

python bench/sass.py                              every kernel for sm_80, sm_90 and sm_100, as Markdown tables
python bench/sass.py factored_scan --arch 90      one source file, one architecture
python bench/sass.py FILE.sass                    the output of `nvdisasm -c`

A source file is compiled by nvcc and disassembled by nvdisasm (`pip install nvidia-cuda-nvdisasm`). A *hot loop* is a
loop with a barrier, and every loop inside of it: its body runs once for each step of a sequence. Other loops are hot if
they have at least 32 multiply-adds.

The *path* of a loop is its longest way from the first instruction to the branch back, if possible without function
calls and without inner loops that multiply nothing and send nothing to another block. Other inner loops are passed
once. Rarely taken code that the compiler has moved behind the loop is not part of it.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ARCHITECTURES = ("80", "90", "100")
FILES = ("factored_scan", "dense_scan", "gru_scan", "cayley")

# Kinds of instructions by the first part of the opcode, in the order in which a report shows them.
KINDS = {
    "fma": "FFMA FFMA2 DFMA HFMA2 HMMA",
    "float": "FADD FADD2 FMUL FMUL2 FSEL FSETP FMNMX FSET DADD DMUL DSETP F2F F2I I2F F2FP FSWZADD FCHK FMNMX3",
    "special": "MUFU",
    "shared": "LDS STS LDSM ATOMS SYNCS STAS",
    "shuffle": "SHFL",
    "global": "LDG STG LD ST LDGSTS UBLKCP RED ATOM ATOMG",
    "local": "LDL STL",
    "barrier": "BAR",
    "branch": "BRA BRX BSSY BSYNC CALL RET EXIT WARPSYNC BREAK JMP NANOSLEEP YIELD BRXU BPT UCGABAR_WAIT UCGABAR_ARV",
    "wait": "DEPBAR LDGDEPBAR ARRIVES CCTL MEMBAR FENCE ERRBAR NOP WARPGROUP",
}
KIND_OF = {opcode: kind for kind, opcodes in KINDS.items() for opcode in opcodes.split()}
REPORTED = (*KINDS, "integer")


@dataclasses.dataclass
class Instruction:
    address: int
    predicate: str  # "@!P0" or ""
    opcode: str  # with its modifiers: "LDS.128"
    operands: str
    targets: list[int] = dataclasses.field(default_factory=list)  # addresses that it may branch to

    @property
    def base(self) -> str:
        return self.opcode.split(".")[0]

    @property
    def kind(self) -> str:
        return KIND_OF.get(self.base, "integer")

    @property
    def never(self) -> bool:  # placeholders of the compiler: @!PT
        return self.predicate == "@!PT"

    @property
    def is_call(self) -> bool:
        within = "(.L_x_" in self.operands  # sm_80: a branch to a label of the same function
        return (self.base in ("CALL", "JMP", "RET") or ".CALL" in self.opcode) and not within

    @property
    def is_shuffle_routine(self) -> bool:
        """sm_80: a shuffle for lanes that have parted, which the compiler cannot exclude, behind a BRA.DIV."""
        return self.is_call and "shflsync" in self.operands

    @property
    def is_division(self) -> bool:
        """Part of a division: the range check of a float division, or the estimate of an integer one."""
        reciprocal = self.base == "MUFU" and self.opcode.endswith("RCP64H")
        return self.base == "FCHK" or reciprocal or (self.base == "I2F" and ".RP" in self.opcode)

    @property
    def ends(self) -> bool:
        """No way to the next instruction."""
        if self.predicate not in ("", "@PT"):
            return False
        conditional = ".DIV" in self.opcode or self.operands.startswith(("UP", "!UP"))  # BRA.U: a uniform predicate
        return self.base in ("EXIT", "BRX", "RET", "JMP") or (self.base == "BRA" and not conditional)


@dataclasses.dataclass
class Function:
    name: str
    instructions: list[Instruction]

    @property
    def label(self) -> str:
        """The kernel and its template arguments: "resident_scan_kernel 1 0 8 8 0 1 0"."""
        kernel = re.search(r"[a-z_]+_kernel", self.name)
        values = re.findall(r"L(?:[bij]|N\w*?E?)(n?\d+)E", self.name)
        return " ".join([kernel.group() if kernel else self.name, *(value.replace("n", "-") for value in values)])


LINE = re.compile(
    r"^\s*/\*(?P<address>[0-9a-f]+)\*/\s+(?P<predicate>@!?U?P[T0-9]+)?\s*(?P<opcode>[A-Z][\w.]*)\s*(?P<operands>[^;]*);"
)


def parse(text: str) -> list[Function]:
    """The functions of nvdisasm's output."""
    functions: list[Function] = []
    labels: dict[str, int] = {}
    pending: list[tuple[Instruction, list[str]]] = []
    waiting: list[str] = []  # labels of the next instruction
    scope = ""

    def resolve() -> None:
        for instruction, names in pending:
            instruction.targets = [labels[name] for name in names if name in labels]
        pending.clear()
        labels.clear()

    for line in text.splitlines():
        section = re.match(r"^\.text\.(\S+):", line)
        if section:
            resolve()
            scope = section.group(1)
            functions.append(Function(scope, []))
            continue
        label = re.match(r"^\s*(\.L_\S+|\$\S+):", line)
        if label:
            waiting.append(label.group(1))
            continue
        if not functions:
            continue
        match = LINE.match(line)
        if match:
            instruction = Instruction(
                int(match["address"], 16), match["predicate"] or "", match["opcode"], match["operands"].strip()
            )
            for name in waiting:
                labels[name] = instruction.address
            waiting.clear()
            functions[-1].instructions.append(instruction)
            names = re.findall(r"\.L_\w+", instruction.operands)
            if names and instruction.base in ("BRA", "BRX", "CALL", "BRXU"):
                pending.append((instruction, names))
    resolve()
    return [function for function in functions if function.instructions]


@dataclasses.dataclass
class Loop:
    function: Function
    first: int  # indices into the function's instructions
    last: int

    @property
    def body(self) -> list[Instruction]:
        return self.function.instructions[self.first : self.last + 1]

    def contains(self, other: Loop) -> bool:
        inside = self.first <= other.first and other.last <= self.last
        return inside and (self.first, self.last) != (other.first, other.last)

    def count(self, kind: str) -> int:
        return sum(instruction.kind == kind and not instruction.never for instruction in self.body)

    def path(self) -> list[Instruction]:
        """The longest way through the loop; loops inside are passed once."""
        body = self.body
        index = {instruction.address: i for i, instruction in enumerate(body)}
        rare: set[int] = set()
        for loop in loops(self.function):
            if self.contains(loop) and loop.count("fma") < 8 and not any(one.base == "STAS" for one in loop.body):
                rare.update(range(loop.first - self.first, loop.last - self.first + 1))
        calls = {i for i, instruction in enumerate(body) if instruction.is_call}
        for avoided in (rare | calls, calls, set()):
            way = self._longest(body, index, avoided)
            if way is not None:
                break
        else:
            raise ValueError(f"{self.function.label}: no way through the loop at {body[0].address:#x}")
        return [body[i] for i in way if not body[i].never]

    @staticmethod
    def _longest(body: list[Instruction], index: dict[int, int], avoid: set[int]) -> list[int] | None:
        longest: list[tuple[int, int] | None] = [None] * len(body)  # length from here, and what comes next
        longest[-1] = (1, -1)
        for i in range(len(body) - 2, -1, -1):
            if i in avoid:
                continue
            ways = [] if body[i].ends else [i + 1]
            if ".DIV" not in body[i].opcode:  # lanes that have parted, which is what the compiler cannot exclude
                ways += [index[target] for target in body[i].targets if index.get(target, -1) > i]
            lengths = [(entry[0] + 1, way) for way in ways if (entry := longest[way]) is not None]
            longest[i] = max(lengths, default=None)
        if longest[0] is None:
            return None
        way, i = [], 0
        while i >= 0:
            way.append(i)
            entry = longest[i]
            assert entry is not None
            i = entry[1]
        return way


def loops(function: Function) -> list[Loop]:
    """The loops of a function: from the target of a branch back to that branch."""
    index = {instruction.address: i for i, instruction in enumerate(function.instructions)}
    last: dict[int, int] = {}
    for i, instruction in enumerate(function.instructions):
        for target in instruction.targets:
            # a way back out of the code behind the loop is no loop: it has no way from its target to itself
            if instruction.base == "BRA" and target in index and index[target] < i:
                last[index[target]] = max(last.get(index[target], 0), i)
    candidates = [Loop(function, first, end) for first, end in sorted(last.items())]
    exits = [i for i, one in enumerate(function.instructions) if one.base == "EXIT" and not one.predicate]
    return [loop for loop in candidates if not any(loop.first <= i < loop.last for i in exits)]


def hot_loops(function: Function) -> list[Loop]:
    """The loops over the steps: with a barrier and multiply-adds, and no such loop inside; or with 32 multiply-adds."""
    every = loops(function)
    steps = [loop for loop in every if loop.count("barrier") and loop.count("fma") >= 8]
    steps = [loop for loop in steps if not any(loop.contains(other) for other in steps)]
    products = [loop for loop in every if loop.count("fma") >= 32]
    products = [loop for loop in products if not any(other.contains(loop) for other in products)]
    return steps + [
        loop
        for loop in products
        if not any(loop.contains(step) or step.contains(loop) or step == loop for step in steps)
    ]


def _between(
    body: Sequence[Instruction], begins: Callable[[Instruction], bool], ends: Callable[[Instruction], bool]
) -> list[int]:
    """The instructions between each one that ends a section and the last one before it that begins a section."""
    counts, since = [], None
    for instruction in body:
        if begins(instruction):
            since = 0
        elif ends(instruction):
            if since is not None:
                counts.append(since)
            since = None
        elif since is not None and not instruction.never:
            since += 1
    return counts


def between_store_and_barrier(body: Sequence[Instruction]) -> list[int]:
    """For each barrier of a loop, the instructions between it and the last store to shared memory before it."""
    return _between(body, lambda i: i.base in ("STS", "STAS"), lambda i: i.base == "BAR")


def between_sum_and_send(body: Sequence[Instruction]) -> list[int]:
    """For each vector that a cluster exchanges, the instructions between the last exchange of sums within the block
    (a shuffle, or the barrier behind which they are read) and the first store to another block."""
    return _between(body, lambda i: i.opcode.startswith("SHFL.BFLY") or i.base == "BAR", lambda i: i.base == "STAS")


@dataclasses.dataclass
class Report:
    """One hot loop. `kinds`, `gaps` and `sends` are of one pass, which is a step for a block with one sequence."""

    kernel: str
    kinds: dict[str, int]
    divisions: int  # of the whole loop, as are calls and local
    calls: int  # without is_shuffle_routine
    local: int
    gaps: list[int]
    sends: list[int]

    @property
    def facts(self) -> list[str]:
        """The faults of a hot loop."""
        named = {"division": self.divisions, "function call": self.calls, "access to local memory": self.local}
        return [f"{self.kernel}: {count} x {name}" for name, count in named.items() if count]


def report(function: Function, loop: Loop) -> Report:
    path = loop.path()
    counts = collections.Counter(instruction.kind for instruction in path)
    return Report(
        kernel=function.label,
        kinds={kind: counts[kind] for kind in REPORTED},
        divisions=sum(one.is_division for one in loop.body),
        calls=sum(one.is_call and not one.is_shuffle_routine for one in loop.body),
        local=sum(one.kind == "local" for one in loop.body),
        gaps=between_store_and_barrier(path),
        sends=between_sum_and_send(path),
    )


def reports(text: str) -> Iterator[Report]:
    for function in parse(text):
        for loop in hot_loops(function):
            yield report(function, loop)


def table(rows: Sequence[Report]) -> str:
    head = ["kernel", *REPORTED, "all", "store to barrier", "sum to send"]
    lines = [head, ["---", *["---:"] * (len(head) - 1)]]
    for row in rows:
        kinds = [*(row.kinds[kind] for kind in REPORTED), sum(row.kinds.values())]
        gaps, sends = (", ".join(map(str, each)) for each in (row.gaps, row.sends))
        lines.append([row.kernel, *map(str, kinds), gaps, sends])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def find_nvcc() -> str | None:
    return os.environ.get("CUDACXX") or shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")


def find_nvdisasm() -> str | None:
    """The wheel's, which lies in site-packages/nvidia, or the one of a CUDA toolkit."""
    for folder in {sysconfig.get_paths()["purelib"], *sys.path}:
        for place in Path(folder or ".").glob("nvidia/*/bin/nvdisasm"):
            return str(place)
    return shutil.which("nvdisasm")


def compiled(source: Path, arch: str, nvcc: str, folder: Path) -> tuple[Path, str]:
    """A .cu file of this project for one architecture: the cubin in `folder`, and what ptxas says of the resources of
    each kernel. Minutes on a slow machine."""
    cubin = folder / f"{source.stem}.{arch}.cubin"
    command = [nvcc, "-std=c++17", "-O3", f"-arch=sm_{arch}", "-Xptxas=-v", f"-I{ROOT / 'csrc'}", "-cubin"]
    done = subprocess.run([*command, "-o", str(cubin), str(source)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"nvcc failed on {source.name} for sm_{arch}:\n{done.stderr}")
    return cubin, done.stderr


def disassemble(cubin: Path, nvdisasm: str) -> str:
    """The machine code of a cubin."""
    done = subprocess.run([nvdisasm, "-c", str(cubin)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"nvdisasm failed on {cubin.name}: {done.stderr}")
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description="Instructions in the hot loops of the CUDA kernels.")
    parser.add_argument("files", nargs="*", default=FILES, help="names of csrc/cuda/*.cu, or .sass files")
    parser.add_argument("--arch", nargs="*", default=ARCHITECTURES, choices=ARCHITECTURES)
    parser.add_argument("--kernel", default="", help="only kernels whose label contains this")
    arguments = parser.parse_args()
    nvcc, nvdisasm = find_nvcc(), find_nvdisasm()
    broken: list[str] = []
    for name in arguments.files:
        path = Path(name)
        if path.suffix == ".sass":
            texts = {arguments.arch[0]: path.read_text()}
        else:
            if nvcc is None or nvdisasm is None:
                sys.exit("nvcc or nvdisasm is missing: set CUDACXX, and pip install nvidia-cuda-nvdisasm")
            source = path if path.suffix == ".cu" else ROOT / "csrc" / "cuda" / f"{name}.cu"
            if not source.is_file():
                sys.exit(f"{source} does not exist; names of csrc/cuda are {', '.join(FILES)}")
            with tempfile.TemporaryDirectory() as folder:
                cubins = {arch: compiled(source, arch, nvcc, Path(folder))[0] for arch in arguments.arch}
                texts = {arch: disassemble(cubin, nvdisasm) for arch, cubin in cubins.items()}
        for arch, text in texts.items():
            rows = [row for row in reports(text) if arguments.kernel in row.kernel]
            print(f"\n{path.stem}, sm_{arch}\n\n{table(rows)}")
            broken += [f"sm_{arch}: {fact}" for row in rows for fact in row.facts]
    if broken:
        sys.exit("\n".join(["", *broken]))


if __name__ == "__main__":
    main()
