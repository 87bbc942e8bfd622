"""Compile Triton kernels ahead of time, for chips that need not be there, and read what they use.

``triton.compile`` makes PTX and a binary for any target; ptxas, which Triton ships, says what the binary uses.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import subprocess
import tempfile
from typing import Any

import torch
import triton
from triton.backends import compiler as backends
from triton.compiler import ASTSource

# KiB of shared memory that one program may have, by compute capability
SHARED_KIB = {80: 163, 90: 227, 100: 227}
ARCHITECTURE = {80: "sm_80", 90: "sm_90a", 100: "sm_100a"}
TYPE = {torch.float32: "*fp32", torch.float64: "*fp64"}
TYPE |= {torch.int64: "*i64", torch.int32: "*i32", torch.uint8: "*u8"}


@dataclasses.dataclass(frozen=True)
class Resources:
    """What one compiled kernel uses."""

    registers: int  # a thread
    spills: int  # bytes stored and loaded, a thread
    shared: int  # bytes, a program
    ptx: str = dataclasses.field(repr=False)  # the code that the assembler was given


def ptxas(capability: int) -> str:
    """The path of the assembler that Triton would call."""
    from triton.backends.nvidia import compiler

    if not hasattr(compiler, "get_ptxas"):  # Triton 3.2
        tool = compiler._path_to_binary("ptxas")
    else:  # one for all architectures in 3.4 and 3.5
        tool = compiler.get_ptxas(*[capability][: len(inspect.signature(compiler.get_ptxas).parameters)])
    return str(tool[0] if isinstance(tool, tuple) else tool.path)


def resources(kernel: Any, arguments: dict[str, Any], capability: int, num_warps: int) -> Resources:
    """Compile a kernel for arguments as a launch would give them.

    Args:
        arguments: by name; a dtype stands for a tensor of that dtype, "i32" for a number that a launch does not
            specialise on, anything else is the value of a constexpr.
    """
    signature, constants, pointers = {}, {}, []
    for index, name in enumerate(kernel.arg_names):
        value = arguments[name]
        if isinstance(value, torch.dtype):
            signature[name] = TYPE[value]
            pointers.append(index)
        elif isinstance(value, str) and value == "i32":
            signature[name] = "i32"
        else:
            constants[name] = value
    if hasattr(backends, "AttrsDescriptor"):  # Triton 3.2
        attributes = backends.AttrsDescriptor.from_hints(dict.fromkeys(pointers, 16))
    else:
        signature |= dict.fromkeys(constants, "constexpr")
        signature = {name: signature[name] for name in kernel.arg_names}
        attributes = {(index,): [["tt.divisibility", 16]] for index in pointers}
    source = ASTSource(kernel, signature, constants, attributes)
    target = backends.GPUTarget("cuda", capability, 32)
    compiled = triton.compile(source, target=target, options={"num_warps": num_warps, "enable_fp_fusion": True})
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(compiled.asm["ptx"])
        file.flush()
        command = [ptxas(capability), "-v", "--gpu-name", ARCHITECTURE[capability], file.name, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    used = re.search(r"Used (\d+) registers", said)
    spilled = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    assert used and spilled, f"ptxas says something new:\n{said}"
    return Resources(int(used[1]), int(spilled[1]) + int(spilled[2]), compiled.metadata.shared, compiled.asm["ptx"])
