"""No code leaks from one instruction set into another.

Template instantiations and inline functions are weak symbols, of which the linker keeps one: if two instruction sets
define the same one, a CPU without AVX-512 may end up in AVX-512 code. So whatever an object compiled for an instruction
set defines weakly carries the name of that set.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ISAS = ("baseline", "avx2", "avx512")


def leaks(listing: str, isa: str) -> list[str]:
    """Weak definitions without the name of their instruction set, in the output of ``nm``. Names are mangled, "4avx2"
    in place of "avx2": old versions of nm cannot demangle them all."""
    symbols = []
    for line in listing.splitlines():
        match = re.match(r"[0-9a-f]+ ([WVu]) (.*)", line)
        # DW.ref.* is a pointer that the exception tables go through: data, the same in every object.
        if match and f"{len(isa)}{isa}" not in match.group(2) and not match.group(2).startswith("DW.ref."):
            symbols.append(match.group(2))
    return symbols


def built_objects() -> list[tuple[str, Path]]:
    """(instruction set, object) of every kernel that stands in the build folder and has its source still."""
    folder = ROOT / "build"
    return [
        (isa, path)
        for isa in ISAS
        for path in sorted(folder.glob(f"native-{sys.implementation.cache_tag}-*/obj/{isa}/cpu/*.o"))
        if (ROOT / "csrc" / "cpu" / f"{path.stem}.cpp").exists()
    ]


@pytest.mark.skipif(shutil.which("nm") is None, reason="nm is not installed")
@pytest.mark.skipif(sys.platform == "darwin", reason="nm tells no weak symbols apart on macOS")
def test_kernel_objects_share_no_code() -> None:
    objects = built_objects()
    if not objects and not os.environ.get("CI"):
        pytest.skip("no objects in build/: the native module was not built from this source tree")
    assert objects, "CI builds the native module from this source tree, but there are no objects in build/"
    problems = []
    for isa, path in objects:
        listing = subprocess.run(["nm", path], capture_output=True, text=True, check=True).stdout
        problems += [f"{isa}/{path.name}: {symbol}" for symbol in leaks(listing, isa)]
    assert not problems, "weak symbols that instruction sets would share:\n" + "\n".join(problems)
