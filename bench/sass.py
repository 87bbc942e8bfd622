"""Facts about the machine code of the hot loops of the CUDA kernels. No GPU is needed.

    python bench/sass.py                           every kernel for sm_80, sm_90 and sm_100
    python bench/sass.py factored_scan --arch 90   one source file, one architecture

A source file is compiled by nvcc and disassembled by nvdisasm (`pip install nvidia-cuda-nvdisasm`). A *hot loop* is a
loop with a barrier and multiply-adds: its body runs once for each step of a sequence. Other loops are hot if they have
at least 32 multiply-adds. A hot loop should have no division, function call or access to local memory, and few
instructions between a store to shared memory and the barrier that waits for it.

The *path* of a loop is its longest way from the first instruction to the branch back, if possible without function
calls and without inner loops that multiply nothing and send nothing to another block. Other inner loops are passed
once. Rarely taken code that the compiler has moved after the loop is not part of it.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ARCHITECTURES = ("80", "90", "100")
FILES = ("factored_scan", "dense_scan", "gru_scan", "cayley")
MULTIPLY_ADDS = ("FFMA", "FFMA2", "DFMA", "HFMA2", "HMMA")


@dataclasses.dataclass
class Instruction:
    predicate: str  # "@!P0" or ""
    opcode: str  # with its modifiers: "LDS.128"
    operands: str
    targets: list[int] = dataclasses.field(default_factory=list)  # indices that it may branch to

    @property
    def base(self) -> str:
        return self.opcode.split(".")[0]

    @property
    def never(self) -> bool:  # placeholders of the compiler: @!PT
        return self.predicate == "@!PT"

    @property
    def is_call(self) -> bool:
        within = "(.L_x_" in self.operands  # sm_80: a branch to a label of the same function
        return (self.base in ("CALL", "JMP", "RET") or ".CALL" in self.opcode) and not within

    @property
    def is_shuffle_routine(self) -> bool:
        """sm_80: a shuffle for diverged lanes, which the compiler cannot exclude, after a BRA.DIV."""
        return self.is_call and "shflsync" in self.operands

    @property
    def is_division(self) -> bool:
        """Part of a division: the range check of a float division, or the estimate of an integer one."""
        reciprocal = self.base == "MUFU" and self.opcode.endswith("RCP64H")
        return self.base == "FCHK" or reciprocal or (self.base == "I2F" and ".RP" in self.opcode)

    @property
    def ends(self) -> bool:
        """Whether there is no path to the next instruction."""
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
    r"^\s*/\*[0-9a-f]+\*/\s+(?P<predicate>@!?U?P[T0-9]+)?\s*(?P<opcode>[A-Z][\w.]*)\s*(?P<operands>[^;]*);"
)


def parse(text: str) -> Iterator[Function]:
    """The functions of nvdisasm's output."""
    _, *parts = re.split(r"^\.text\.(\S+):", text, flags=re.MULTILINE)
    for name, body in zip(parts[::2], parts[1::2], strict=True):
        instructions: list[Instruction] = []
        labels: dict[str, int] = {}
        for line in body.splitlines():
            if label := re.match(r"\s*(\.L_\S+|\$\S+):", line):
                labels[label[1]] = len(instructions)
            elif match := LINE.match(line):
                instruction = Instruction(match["predicate"] or "", match["opcode"], match["operands"].strip())
                instructions.append(instruction)
        for one in instructions:
            if one.base in ("BRA", "BRX", "CALL", "BRXU"):
                one.targets = [labels[label] for label in re.findall(r"\.L_\w+", one.operands) if label in labels]
        if instructions:
            yield Function(name, instructions)


@dataclasses.dataclass(frozen=True)
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

    def count(self, *opcodes: str) -> int:
        return sum(one.base in opcodes and not one.never for one in self.body)

    @property
    def faults(self) -> dict[str, int]:
        """The instructions that a hot loop must not have, with their counts."""
        counts = {
            "division": sum(one.is_division for one in self.body),
            "function call": sum(one.is_call and not one.is_shuffle_routine for one in self.body),
            "access to local memory": sum(one.base in ("LDL", "STL") for one in self.body),
        }
        return {name: count for name, count in counts.items() if count}

    def path(self) -> list[Instruction]:
        """The longest path through the loop; inner loops are passed once."""
        rare: set[int] = set()
        for loop in loops(self.function):
            if self.contains(loop) and loop.count(*MULTIPLY_ADDS) < 8 and not loop.count("STAS"):
                rare.update(range(loop.first, loop.last + 1))
        calls = {i for i in range(self.first, self.last + 1) if self.function.instructions[i].is_call}
        for avoided in (rare | calls, calls, set[int]()):
            if way := self._longest(avoided):
                return [one for one in way if not one.never]
        raise ValueError(f"{self.function.label}: no way through the loop at instruction {self.first}")

    def _longest(self, avoided: set[int]) -> list[Instruction]:
        code = self.function.instructions
        best = {self.last: (1, -1)}  # by index: the length of the way from there, and the next index
        for i in range(self.last - 1, self.first - 1, -1):
            if i in avoided:
                continue
            ways = [] if code[i].ends else [i + 1]
            if ".DIV" not in code[i].opcode:  # diverged lanes, which the compiler cannot exclude
                ways += [target for target in code[i].targets if target > i]
            lengths = [(best[way][0] + 1, way) for way in ways if way in best]
            if lengths:
                best[i] = max(lengths)
        way, i = [], self.first if self.first in best else -1
        while i >= 0:
            way.append(code[i])
            i = best[i][1]
        return way

    def gaps(self) -> list[int]:
        """For each barrier, the instructions between it and the last store to shared memory before it."""
        counts, since = [], None
        for instruction in self.path():
            if instruction.base in ("STS", "STAS"):
                since = 0
            elif instruction.base == "BAR":
                counts += [] if since is None else [since]
                since = None
            elif since is not None:
                since += 1
        return counts


def loops(function: Function) -> list[Loop]:
    """The loops of a function: from the target of a branch back to that branch."""
    last: dict[int, int] = {}
    for i, instruction in enumerate(function.instructions):
        for target in instruction.targets:
            # a branch back from the code after the loop is no loop: there is no path from its target to itself
            if instruction.base == "BRA" and target < i:
                last[target] = max(last.get(target, 0), i)
    exits = [i for i, one in enumerate(function.instructions) if one.base == "EXIT" and not one.predicate]
    candidates = [Loop(function, first, end) for first, end in sorted(last.items())]
    return [loop for loop in candidates if not any(loop.first <= i < loop.last for i in exits)]


def hot_loops(function: Function) -> list[Loop]:
    """The loops over the steps: with a barrier and multiply-adds, and no such loop inside; or with 32 multiply-adds."""
    every = loops(function)
    steps = [loop for loop in every if loop.count("BAR") and loop.count(*MULTIPLY_ADDS) >= 8]
    steps = [loop for loop in steps if not any(loop.contains(other) for other in steps)]
    products = [loop for loop in every if loop.count(*MULTIPLY_ADDS) >= 32]
    products = [loop for loop in products if not any(other.contains(loop) for other in products)]
    apart = [x for x in products if not any(x.contains(step) or step.contains(x) or step == x for step in steps)]
    return steps + apart


def table(shown: Sequence[Loop]) -> str:
    lines = [["kernel", "instructions of a step", "multiply-adds", "store to barrier", "faults"], ["---"] * 5]
    for loop in shown:
        path = loop.path()
        products = sum(one.base in MULTIPLY_ADDS for one in path)
        faults = ", ".join(f"{count} x {name}" for name, count in loop.faults.items())
        gaps = ", ".join(map(str, loop.gaps()))
        lines.append([loop.function.label, str(len(path)), str(products), gaps, faults])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def find_nvdisasm() -> str | None:
    """The program of the wheel, in site-packages/nvidia, or that of a CUDA toolkit."""
    for folder in {sysconfig.get_paths()["purelib"], *sys.path}:
        for place in Path(folder or ".").glob("nvidia/*/bin/nvdisasm"):
            return str(place)
    return shutil.which("nvdisasm")


def compiled(source: Path, arch: str, nvcc: str, folder: Path) -> tuple[Path, str]:
    """A .cu file of this project for one architecture: the cubin in `folder`, and what ptxas reports about the
    resources of each kernel. Minutes on a slow machine."""
    cubin = folder / f"{source.stem}.{arch}.cubin"
    command = [nvcc, "-std=c++17", "-O3", f"-arch=sm_{arch}", "-Xptxas=-v", f"-I{ROOT / 'csrc'}", "-cubin"]
    done = subprocess.run([*command, "-o", str(cubin), str(source)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"nvcc failed on {source.name} for sm_{arch}:\n{done.stderr}")
    return cubin, done.stderr


def disassemble(cubin: Path, nvdisasm: str) -> str:
    """The machine code of a cubin."""
    return subprocess.run([nvdisasm, "-c", str(cubin)], capture_output=True, text=True, check=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description="Facts about the hot loops of the CUDA kernels.")
    parser.add_argument("files", nargs="*", default=FILES, help="names of csrc/cuda/*.cu")
    parser.add_argument("--arch", nargs="*", default=ARCHITECTURES, choices=ARCHITECTURES)
    parser.add_argument("--kernel", default="", help="only kernels whose label contains this")
    arguments = parser.parse_args()
    nvcc = os.environ.get("CUDACXX") or shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    nvdisasm = find_nvdisasm()
    if nvcc is None or nvdisasm is None:
        sys.exit("nvcc or nvdisasm is missing: set CUDACXX, and pip install nvidia-cuda-nvdisasm")
    for name in arguments.files:
        for arch in arguments.arch:
            with tempfile.TemporaryDirectory() as folder:
                cubin, _ = compiled(ROOT / "csrc" / "cuda" / f"{name}.cu", arch, nvcc, Path(folder))
                code = disassemble(cubin, nvdisasm)
            hot = [loop for function in parse(code) for loop in hot_loops(function)]
            shown = [loop for loop in hot if arguments.kernel in loop.function.label]
            print(f"\n{name}, sm_{arch}\n\n{table(shown)}", flush=True)


if __name__ == "__main__":
    main()
