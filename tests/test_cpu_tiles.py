"""The register tiles of the CPU kernels in both forms: with broadcasts, and with the lanes that aarch64 multiplies by.

The second form is compiled for this machine too, from the same lines but the two that are assembler.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FLAGS = ["-std=c++17", "-O2", "-ffp-contract=fast", "-fno-math-errno", "-Wall", "-Wextra", "-DORTHOKERN_ISA=tiles"]
LANES = "-DORTHOKERN_LANE_PRODUCTS=1"


@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler")
@pytest.mark.skipif(not (ROOT / "csrc").is_dir(), reason="the sources are not here")
@pytest.mark.parametrize(
    ("form", "rows"),
    [
        pytest.param([], 6, marks=pytest.mark.skipif(platform.machine() != "x86_64", reason="of x86-64")),
        pytest.param([LANES, "-funsigned-char"], 10),  # which is the default on aarch64
    ],
    ids=["broadcasts", "lanes"],
)
def test_every_tile_has_the_bits_of_plain_loops(tmp_path: Path, form: list[str], rows: int) -> None:
    program = tmp_path / "tiles"
    command = ["c++", *FLAGS, "-Wno-maybe-uninitialized", *form, f"-I{ROOT / 'csrc'}"]
    command += [str(ROOT / "tests" / "cpu_tiles.cpp"), "-o", str(program)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    ran = subprocess.run([program], capture_output=True, text=True)
    assert ran.stdout == f"{rows} rows of a tile, 0 failures\n" and ran.returncode == 0, ran.stdout
