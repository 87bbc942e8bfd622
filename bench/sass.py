"""The machine code of the hot loops of the CUDA kernels, and an estimate of their clocks. No GPU is needed.

python bench/sass.py                              every kernel for sm_80, sm_90 and sm_100, as Markdown tables
python bench/sass.py factored_scan --arch 90      one source file, one architecture
python bench/sass.py FILE.sass                    the output of `nvdisasm -c -hex`

A source file is compiled by nvcc and disassembled by nvdisasm (`pip install nvidia-cuda-nvdisasm`). A *hot loop* is a
loop with a barrier, and every loop inside of it: its body runs once for each step of a sequence. Other loops are hot if
they have at least 32 multiply-adds.

The *path* of a loop is its longest way from the first instruction to the branch back, if possible without function
calls and without inner loops that multiply nothing and send nothing to another block. Other inner loops are passed
`repeats` times. Rarely taken code that the compiler has moved behind the loop is not part of it.

Clocks are estimated by a simulation of one multiprocessor (`estimate`). Each of its four schedulers issues one
instruction per clock, from the warp that has waited longest, and observes what the compiler has written into each
instruction: the clocks until the next one may follow, and the scoreboards to wait for. `Model` holds everything else,
that is latencies, widths of the pipes, and clocks of shared memory. Memory outside of the multiprocessor is assumed to
answer in time, which is what the rings of prefetched inputs are for. Bank conflicts, the instruction cache and register
bank conflicts are not modelled. The estimate has not been compared with a device.
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
SCHEDULERS = 4

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
    stall: int = 1  # clocks until the next instruction of the warp
    waits: int = 0  # scoreboards to wait for, as a mask
    sets: int | None = None  # scoreboard that is released when the result is there
    releases: int | None = None  # scoreboard that is released when the operands have been read

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
    r"(?:\s*/\* 0x(?P<low>[0-9a-f]{16}) \*/)?"
)
HIGH = re.compile(r"^\s*/\* 0x(?P<high>[0-9a-f]{16}) \*/\s*$")


def parse(text: str) -> list[Function]:
    """The functions of nvdisasm's output. Without -hex, instructions have no schedule (stall 1, no scoreboards)."""
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
        found = LINE.match(line)
        if found:
            instruction = Instruction(
                int(found["address"], 16), found["predicate"] or "", found["opcode"], found["operands"].strip()
            )
            for name in waiting:
                labels[name] = instruction.address
            waiting.clear()
            functions[-1].instructions.append(instruction)
            names = re.findall(r"\.L_\w+", instruction.operands)
            if names and instruction.base in ("BRA", "BRX", "CALL", "BRXU"):
                pending.append((instruction, names))
            continue
        high = HIGH.match(line)
        if high and functions[-1].instructions:
            _schedule(functions[-1].instructions[-1], int(high["high"], 16))
    resolve()
    return [function for function in functions if function.instructions]


def _schedule(instruction: Instruction, high: int) -> None:
    """The compiler's schedule, from the upper half of the encoding: bits 105 to 121 of the 128."""
    bits = high >> 41
    instruction.stall = bits & 15
    sets, releases = bits >> 5 & 7, bits >> 8 & 7
    instruction.sets = None if sets == 7 else sets
    instruction.releases = None if releases == 7 else releases
    instruction.waits = bits >> 11 & 63


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

    def path(self, repeats: int = 1) -> list[Instruction]:
        """The longest way through the loop; loops inside are passed `repeats` times."""
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
        return self._repeated(body, way, repeats)

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
            found = [(entry[0] + 1, way) for way in ways if (entry := longest[way]) is not None]
            longest[i] = max(found, default=None)
        if longest[0] is None:
            return None
        way, i = [], 0
        while i >= 0:
            way.append(i)
            entry = longest[i]
            assert entry is not None
            i = entry[1]
        return way

    def _repeated(self, body: list[Instruction], way: list[int], repeats: int) -> list[Instruction]:
        inner = [loop for loop in loops(self.function) if self.contains(loop)]
        expanded: list[Instruction] = []
        for i in way:
            expanded.append(body[i])
            for loop in inner:
                if i == loop.last - self.first:
                    begin = loop.first - self.first
                    part = [body[j] for j in way if begin <= j <= i]
                    expanded += part * (repeats - 1)
        return [instruction for instruction in expanded if not instruction.never]


def loops(function: Function) -> list[Loop]:
    """The loops of a function: from the target of a branch back to that branch."""
    index = {instruction.address: i for i, instruction in enumerate(function.instructions)}
    last: dict[int, int] = {}
    for i, instruction in enumerate(function.instructions):
        for target in instruction.targets:
            # a way back out of the code behind the loop is no loop: it has no way from its target to itself
            if instruction.base == "BRA" and target in index and index[target] < i:
                last[index[target]] = max(last.get(index[target], 0), i)
    found = [Loop(function, first, end) for first, end in sorted(last.items())]
    exits = [i for i, one in enumerate(function.instructions) if one.base == "EXIT" and not one.predicate]
    return [loop for loop in found if not any(loop.first <= i < loop.last for i in exits)]


def hot_loops(function: Function) -> list[Loop]:
    """The loops over the steps: with a barrier and multiply-adds, and no such loop inside; or with 32 multiply-adds."""
    found = loops(function)
    steps = [loop for loop in found if loop.count("barrier") and loop.count("fma") >= 8]
    steps = [loop for loop in steps if not any(loop.contains(other) for other in steps)]
    products = [loop for loop in found if loop.count("fma") >= 32]
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
    found, since = [], None
    for instruction in body:
        if begins(instruction):
            since = 0
        elif ends(instruction):
            if since is not None:
                found.append(since)
            since = None
        elif since is not None and not instruction.never:
            since += 1
    return found


def between_store_and_barrier(body: Sequence[Instruction]) -> list[int]:
    """For each barrier of a loop, the instructions between it and the last store to shared memory before it."""
    return _between(body, lambda i: i.base in ("STS", "STAS"), lambda i: i.base == "BAR")


def between_sum_and_send(body: Sequence[Instruction]) -> list[int]:
    """For each vector that a cluster exchanges, the instructions between the last exchange of sums within the block
    (a shuffle, or the barrier behind which they are read) and the first store to another block."""
    return _between(body, lambda i: i.opcode.startswith("SHFL.BFLY") or i.base == "BAR", lambda i: i.base == "STAS")


@dataclasses.dataclass(frozen=True)
class Model:
    """What a simulated multiprocessor adds to the compiler's schedule, in clocks."""

    fma: int = 1  # of a scheduler's pipe, for one instruction of a warp
    double: int = 2
    integer: int = 2  # 16 lanes; IMAD runs on the pipe of the multiply-adds
    special: int = 8  # 4 lanes
    issue_shared: int = 2  # of a scheduler, between two instructions to shared memory
    shared_latency: int = 29  # a load of shared memory, when nothing is before it
    shuffle_latency: int = 24
    special_latency: int = 22
    barrier_latency: int = 16  # from the last arrival until the first instruction behind it
    other_latency: int = 30  # S2R and the like
    operand_latency: int = 12  # until a store has read its operands
    tensor: int = 8  # of a scheduler's tensor core, m16n8k8 of TF32 or m16n8k16 of bfloat16
    tensor_latency: int = 33


MODELS = {"80": Model(fma=2, integer=2), "90": Model(), "100": Model()}


def wavefronts(instruction: Instruction) -> int:
    """Clocks of shared memory's data path: 128 bytes each, without conflicts and without sharing between lanes."""
    if instruction.base in ("LDS", "STS", "STAS"):
        return 4 if ".128" in instruction.opcode else 2 if ".64" in instruction.opcode else 1
    if instruction.base in ("LDSM", "ATOMS"):
        return 4
    if instruction.base == "SHFL":
        return 1
    if instruction.base == "LDGSTS":
        return 4 if ".128" in instruction.opcode else 1
    return 0


@dataclasses.dataclass
class Warp:
    """A warp while `estimate` runs it."""

    block: int
    position: int = 0
    ready: float = 0.0
    boards: list[float] = dataclasses.field(default_factory=lambda: [0.0] * 6)
    issued: float = 0.0
    done: list[float] = dataclasses.field(default_factory=list)


def pipe_of(instruction: Instruction, model: Model) -> tuple[str, int]:
    """The pipe that an instruction occupies, "" for none that is modelled, and for how many clocks."""
    base = instruction.base
    if base in ("DFMA", "DADD", "DMUL", "DSETP"):
        return "double", model.double
    if base == "HMMA":
        return "tensor", model.tensor
    if instruction.kind == "fma" or base in ("FADD", "FMUL", "IMAD"):
        return "fma", model.fma
    if instruction.kind == "special":
        return "special", model.special
    if instruction.kind in ("shared", "shuffle", "global"):
        return "shared", model.issue_shared
    return ("integer", model.integer) if instruction.kind in ("float", "integer") else ("", 1)


def estimate(
    path: Sequence[Instruction], warps: int, model: Model | None = None, steps: int = 6, blocks: int = 1
) -> float:
    """Clocks of one pass over `path` by all warps of `blocks` blocks that have the multiprocessor to themselves."""
    model = model or Model()
    total = len(path) * steps
    state = [Warp(block=i // warps) for i in range(warps * blocks)]
    pipe_free: list[dict[str, float]] = [collections.defaultdict(float) for _ in range(SCHEDULERS)]
    shared_free = 0.0
    at_barrier: list[list[Warp]] = [[] for _ in range(blocks)]
    left = warps * blocks
    clock = 0.0
    while left:
        issued = False
        soonest = float("inf")
        for scheduler in range(SCHEDULERS):
            ready: list[Warp] = []
            for warp in state[scheduler::SCHEDULERS]:
                if warp.position >= total or warp.ready == float("inf"):
                    continue
                instruction = path[warp.position % len(path)]
                start = warp.ready
                for board in range(6):
                    if instruction.waits >> board & 1:
                        start = max(start, warp.boards[board])
                name, _ = pipe_of(instruction, model)
                start = max(start, pipe_free[scheduler][name]) if name else start
                if start <= clock:
                    ready.append(warp)
                else:
                    soonest = min(soonest, start)
            if not ready:
                continue
            warp = min(ready, key=lambda one: one.issued)
            if len(ready) > 1:
                soonest = clock + 1
            issued = True
            instruction = path[warp.position % len(path)]
            name, busy = pipe_of(instruction, model)
            if name:
                pipe_free[scheduler][name] = clock + busy
            result = clock + model.other_latency
            if name == "shared":
                taken = wavefronts(instruction)
                begin = max(shared_free, clock)
                shared_free = begin + taken
                latency = model.shuffle_latency if instruction.kind == "shuffle" else model.shared_latency
                result = begin + latency + max(taken - 1, 0)
            elif name in ("special", "double"):
                result = clock + model.special_latency
            elif name == "tensor":
                result = clock + model.tensor_latency
            if instruction.sets is not None:
                warp.boards[instruction.sets] = max(warp.boards[instruction.sets], result)
            if instruction.releases is not None:
                free = clock + model.operand_latency
                warp.boards[instruction.releases] = max(warp.boards[instruction.releases], free)
            warp.issued = clock
            warp.ready = clock + max(1, instruction.stall)
            warp.position += 1
            if warp.position % len(path) == 0:
                warp.done.append(clock)
            if instruction.base == "BAR":
                warp.ready = float("inf")
                arrived = at_barrier[warp.block]
                arrived.append(warp)
                if len(arrived) == warps:
                    for one in arrived:
                        one.ready = clock + model.barrier_latency
                    arrived.clear()
            left -= warp.position >= total
        if issued:
            clock += 1
        elif soonest != float("inf"):
            clock = max(clock + 1, soonest)
        elif left:
            raise ValueError("a warp waits at a barrier that others do not reach")
    half = steps // 2
    ends = [max(warp.done[i] for warp in state) for i in range(steps)]
    return (ends[-1] - ends[half - 1]) / (steps - half)


@dataclasses.dataclass
class Report:
    """One hot loop. `path` and what follows are of one pass, which is a step for a block with one sequence."""

    kernel: str
    address: int
    warps: int
    kinds: dict[str, int]
    issue: float  # slots of a scheduler
    shared: int  # clocks of shared memory's data path
    divisions: int  # of the whole loop, as are calls and local
    calls: int  # without is_shuffle_routine
    local: int
    gaps: list[int]
    sends: list[int]
    clocks: float
    shared_clocks: float | None  # for each block, where a multiprocessor holds several of them; else None

    @property
    def facts(self) -> list[str]:
        """What no hot loop may have."""
        named = {"division": self.divisions, "function call": self.calls, "access to local memory": self.local}
        return [f"{self.kernel}: {count} x {name}" for name, count in named.items() if count]


def report(function: Function, loop: Loop, warps: int, arch: str = "90", repeats: int = 1) -> Report:
    path = loop.path(repeats)
    counts = collections.Counter(instruction.kind for instruction in path)
    blocks = blocks_of(function.label)
    return Report(
        kernel=function.label,
        address=loop.body[0].address,
        warps=warps,
        kinds={kind: counts[kind] for kind in REPORTED},
        issue=len(path) * -(-warps // SCHEDULERS),
        shared=warps * sum(map(wavefronts, path)),
        divisions=sum(one.is_division for one in loop.body),
        calls=sum(one.is_call and not one.is_shuffle_routine for one in loop.body),
        local=sum(one.kind == "local" for one in loop.body),
        gaps=between_store_and_barrier(path),
        sends=between_sum_and_send(path),
        clocks=estimate(path, warps, MODELS[arch]),
        shared_clocks=estimate(path, warps, MODELS[arch], blocks=blocks) / blocks if blocks > 1 else None,
    )


def warps_of(label: str) -> int:
    """Warps of a block: an argument of the resident kernels, else 8."""
    kernel, *values = label.split()
    if kernel == "resident_scan_kernel":
        return int(values[2])
    if kernel == "scan_carry_kernel":
        return 16
    if kernel.startswith("gru_resident"):
        return int(values[1])
    return 8


def blocks_of(label: str) -> int:
    """Blocks of a multiprocessor: two of a dense map of 128 units without cuts (ResidentTraits::kBlocks)."""
    kernel, *values = label.split()
    of_two = kernel == "resident_scan_kernel" and values[0] == "0" and values[3] == "8" and values[7:] != ["1"]
    return 2 if of_two else 1


def reports(text: str, arch: str = "90") -> Iterator[Report]:
    for function in parse(text):
        for loop in hot_loops(function):
            yield report(function, loop, warps_of(function.label), arch)


def table(rows: Sequence[Report]) -> str:
    head = ["kernel", *REPORTED, "issue slots", "shared memory", "store to barrier", "sum to send", "clocks"]
    head.append("of 2 blocks, each")
    lines = [head, ["---", *["---:"] * (len(head) - 1)]]
    for row in rows:
        kinds = [str(row.kinds[kind]) for kind in REPORTED]
        gaps, sends = (", ".join(map(str, found)) for found in (row.gaps, row.sends))
        lines.append([row.kernel, *kinds, f"{row.issue:.0f}", str(row.shared), gaps, sends, f"{row.clocks:.0f}"])
        lines[-1].append("" if row.shared_clocks is None else f"{row.shared_clocks:.0f}")
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
    done = subprocess.run([nvdisasm, "-c", "-hex", str(cubin)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"nvdisasm failed on {cubin.name}: {done.stderr}")
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description="Hot loops of the CUDA kernels: instructions and estimated clocks.")
    parser.add_argument("files", nargs="*", default=FILES, help="names of csrc/cuda/*.cu, or .sass files")
    parser.add_argument("--arch", nargs="*", default=ARCHITECTURES, choices=ARCHITECTURES)
    parser.add_argument("--kernel", default="", help="only kernels whose label contains this")
    arguments = parser.parse_args()
    nvcc, nvdisasm = find_nvcc(), find_nvdisasm()
    broken: list[str] = []
    for name in arguments.files:
        given = Path(name)
        if given.suffix == ".sass":
            texts = {arguments.arch[0]: given.read_text()}
        else:
            if nvcc is None or nvdisasm is None:
                sys.exit("nvcc or nvdisasm is missing: set CUDACXX, and pip install nvidia-cuda-nvdisasm")
            source = given if given.suffix == ".cu" else ROOT / "csrc" / "cuda" / f"{name}.cu"
            if not source.is_file():
                sys.exit(f"{source} does not exist; names of csrc/cuda are {', '.join(FILES)}")
            with tempfile.TemporaryDirectory() as folder:
                cubins = {arch: compiled(source, arch, nvcc, Path(folder))[0] for arch in arguments.arch}
                texts = {arch: disassemble(cubin, nvdisasm) for arch, cubin in cubins.items()}
        for arch, text in texts.items():
            rows = [row for row in reports(text, arch) if arguments.kernel in row.kernel]
            print(f"\n{given.stem}, sm_{arch}\n\n{table(rows)}")
            broken += [f"sm_{arch}: {fact}" for row in rows for fact in row.facts]
    if broken:
        sys.exit("\n".join(["", *broken]))


if __name__ == "__main__":
    main()
