"""Build of the native module ``orthokern._C``; metadata and tool settings are in pyproject.toml.

The build writes a ``build.ninja`` and runs ninja, so it is parallel and incremental. It needs setuptools, pybind11,
ninja and a C++17 compiler with GCC's command line (g++ or clang++), and no torch: the module takes addresses and sizes.

* ``csrc/bindings.cpp`` and ``csrc/cpu/select.cpp`` are compiled once, for the baseline of the architecture.
* Every other ``csrc/cpu/*.cpp`` is compiled once for each instruction set of ``ISA_FLAGS``, into a namespace of that
  name. select.cpp picks one at run time, so that one binary runs on any CPU of its architecture.
* ``csrc/cuda/*.cu`` are compiled by nvcc, under the rule of ``ORTHOKERN_CUDA``.

Environment variables:

* ``ORTHOKERN_CUDA``: ``auto`` (default: CUDA kernels if nvcc is found), ``1`` (fail without), ``0`` (never).
* ``ORTHOKERN_CUDA_ARCHS``: compute capabilities to compile for, e.g. ``80;90``; default: those of ``CUDA_ARCHS`` that
  nvcc knows.
* ``CXX``, ``CXXFLAGS``, ``LDFLAGS``; ``CUDACXX``, ``CUDA_HOME``, ``CUDA_PATH``, ``NVCC_CCBIN``: as usual.
* ``MAX_JOBS``: number of parallel compile jobs; default: one for each core.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
CSRC = ROOT / "csrc"

COMMON_FLAGS = ["-std=c++17", "-fPIC", "-fvisibility=hidden", "-DNDEBUG", "-Wall", "-Wextra"]
# Products and sums may contract to FMA, and no kernel reads errno or the floating-point flags. NaN, infinities and
# signed zeros keep their IEEE meaning: no -ffast-math.
KERNEL_FLAGS = ["-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"]
# Ascending: the last one that the CPU has is used.
ISA_FLAGS = {
    "baseline": [],
    "avx2": ["-mavx2", "-mfma"],
    "avx512": ["-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl", "-mfma", "-mprefer-vector-width=512"],
}
# Sources that a compiler has to accept, with the flags above, before an instruction set is built.
ISA_PROBES = {
    "avx2": "#include <immintrin.h>\n__m256 f(__m256 a) { return _mm256_fmadd_ps(a, a, a); }\n",
    "avx512": "#include <immintrin.h>\n__m512d f(__m512i a) { return _mm512_cvtepi64_pd(a); }\n",
}
# A source that every accepted compiler takes.
COMPILER_PROBE = """\
#include <optional>
typedef float Floats __attribute__((vector_size(16)));
typedef int Ints __attribute__((vector_size(16)));
std::optional<int> answer = 42;
Ints rounded(Floats x) { return __builtin_convertvector(x, Ints); }
"""
CUDA_ARCHS = ["80", "90", "100"]  # binaries serve all chips of their generation, PTX of the highest serves future ones


def fail(message: str) -> NoReturn:
    """End the build with one line. SystemExit passes through setuptools and pip with no traceback around it."""
    raise SystemExit(f"orthokern: error: {message}")


def say(message: str) -> None:
    print(f"orthokern: {message}", flush=True)


def capture(command: list[str]) -> str:
    """Standard output of a command, empty if it cannot be run or fails."""
    try:
        return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""


def words_of(name: str) -> list[str]:
    """The words of an environment variable, as a shell splits them."""
    text = os.environ.get(name, "").strip()
    try:
        return shlex.split(text)
    except ValueError as error:
        fail(f"{name}={text!r}: {error}; accepted is text that a shell can split into words")


def job_count() -> int:
    """Number of parallel compile jobs: MAX_JOBS, or the cores this process may use."""
    value = os.environ.get("MAX_JOBS")
    if value:
        if not re.fullmatch(r"[1-9][0-9]*", value.strip()):
            fail(f"MAX_JOBS={value!r}: accepted is a whole number, 1 or more")
        return int(value)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cuda_mode() -> str:
    """The value of ORTHOKERN_CUDA: "auto", "0" or "1"."""
    mode = os.environ.get("ORTHOKERN_CUDA", "").strip() or "auto"
    if mode not in ("auto", "0", "1"):
        fail(f"ORTHOKERN_CUDA={mode!r}: accepted are auto (CUDA where nvcc is found), 1 (fail without nvcc), 0 (never)")
    return mode


def compiles(compiler: list[str], flags: list[str], source: str) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        unit = Path(folder, "probe.cpp")
        unit.write_text(source)
        command = [*compiler, *flags, "-c", str(unit), "-o", str(Path(folder, "probe.o"))]
        try:
            return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True).returncode == 0
        except OSError:
            return False


@dataclass(frozen=True)
class Toolchain:
    """A C++ compiler and what it can do."""

    command: list[str]  # as typed: CXX may hold arguments
    name: str  # first line of --version
    target: str  # x86_64-linux-gnu
    isas: list[str]  # those of ISA_FLAGS to build, ascending

    @classmethod
    def find(cls) -> Toolchain:
        value = words_of("CXX")
        candidates = [value] if value else [["c++"], ["g++"], ["clang++"]]
        for command in candidates:
            if compiles(command, COMMON_FLAGS, COMPILER_PROBE):
                name = (capture([*command, "--version"]).splitlines() or ["unknown"])[0].strip()
                target = capture([*command, "-dumpmachine"]).strip()
                return cls(command, name, target, cls.probe_isas(command, target))
        tried = ", ".join(" ".join(command) for command in candidates)
        fail(f"no C++17 compiler found (tried {tried}): install g++ 9 or newer, or clang++, or set CXX to one")

    @staticmethod
    def probe_isas(command: list[str], target: str) -> list[str]:
        if target.split("-")[0] not in ("x86_64", "amd64"):
            return ["baseline"]  # NEON belongs to the baseline of aarch64
        isas = []
        for isa, flags in ISA_FLAGS.items():
            if isa not in ISA_PROBES or compiles(command, flags, ISA_PROBES[isa]):
                isas.append(isa)
            else:
                say(f"the compiler does not accept {' '.join(flags)}: no kernels for {isa}")
        return isas


@dataclass(frozen=True)
class Cuda:
    """Whether the CUDA kernels are built, with what, and why (not)."""

    nvcc: str | None
    archs: list[str]
    reason: str

    @classmethod
    def find(cls, sources: list[Path]) -> Cuda:
        mode = cuda_mode()
        if mode == "0":
            return cls(None, [], "switched off by ORTHOKERN_CUDA=0")
        nvcc = cls.find_nvcc()
        if not sources:
            missing = "this version has no CUDA kernels"
        elif nvcc is None:
            missing = "nvcc not found (looked in CUDACXX, CUDA_HOME, CUDA_PATH, PATH and /usr/local/cuda)"
        else:
            release = re.search(r"release ([0-9.]+)", capture([nvcc, "--version"]))
            version = release.group(1) if release else "unknown"
            archs = cls.choose_archs(nvcc, version)
            return cls(nvcc, archs, f"nvcc {version} for {', '.join('sm_' + arch for arch in archs)}")
        if mode == "1":
            fail(f"ORTHOKERN_CUDA=1 asks for the CUDA kernels, but {missing}")
        return cls(None, [], missing)

    @staticmethod
    def find_nvcc() -> str | None:
        homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
        candidates = [os.environ.get("CUDACXX", ""), *(f"{home}/bin/nvcc" for home in homes), "nvcc"]
        for candidate in [*candidates, "/usr/local/cuda/bin/nvcc"]:
            path = shutil.which(candidate) if candidate else None
            if path:
                return path
        return None

    @staticmethod
    def choose_archs(nvcc: str, version: str) -> list[str]:
        known = re.findall(r"compute_([0-9]+)\b", capture([nvcc, "--list-gpu-arch"]))
        known = [arch for arch in known if int(arch) >= 80]  # the kernels copy asynchronously
        value = os.environ.get("ORTHOKERN_CUDA_ARCHS", "").strip()
        if not value:
            return [arch for arch in CUDA_ARCHS if arch in known] or CUDA_ARCHS
        archs = [word.replace(".", "") for word in re.split(r"[;,\s]+", value) if word]
        accepted = f"accepted is a list as 80;90 of {', '.join(known)}"
        if not archs:
            fail(f"ORTHOKERN_CUDA_ARCHS={value!r} names no compute capability; {accepted}")
        for arch in archs:
            if not re.fullmatch(r"[0-9]{2,3}[af]?", arch) or (known and arch.rstrip("af") not in known):
                fail(f"ORTHOKERN_CUDA_ARCHS={value!r}: nvcc {version} cannot compile them for {arch!r}, {accepted}")
        return archs

    def gencode(self) -> list[str]:
        """One binary for each architecture, and PTX of the highest one for future GPUs.

        PTX of 90a or 100f runs on its own generation only, so it is used if the list has no other.
        """
        binaries = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in self.archs]
        highest = max(self.archs, key=lambda arch: (arch.isdigit(), int(arch.rstrip("af"))))
        return [*binaries, f"-gencode=arch=compute_{highest},code=compute_{highest}"]


class NinjaBuild(build_ext):
    """Compile and link ``orthokern._C`` with ninja.

    Objects stay in ``build/native-<python>-<platform>/obj/<isa or common>/`` of the source tree, even if setuptools
    builds in a temporary folder (as it does for an editable install), so that the next build compiles what has changed.
    """

    def run(self) -> None:
        if sys.platform == "win32":  # before setuptools looks for a compiler
            fail("Windows is not supported; use WSL")
        for name in ("CC", "CXX", "CFLAGS", "CXXFLAGS", "CPPFLAGS", "LDFLAGS"):  # setuptools splits them too
            words_of(name)
        super().run()

    def build_extension(self, ext: Extension) -> None:
        jobs = job_count()
        cuda_sources = sorted((CSRC / "cuda").glob("*.cu"))
        cuda = Cuda.find(cuda_sources)
        toolchain = Toolchain.find()
        include = sysconfig.get_paths()["include"]
        if not Path(include, "Python.h").exists():
            fail(f"no Python.h in {include}: install the headers of Python (python3-dev, or python3-devel)")
        say(f"{toolchain.name}, {toolchain.target}; CPU kernels for {', '.join(toolchain.isas)}")
        say(f"CUDA kernels: {'yes' if cuda.nvcc else 'no'}, {cuda.reason}")

        folder = ROOT / "build" / f"native-{sys.implementation.cache_tag}-{sysconfig.get_platform()}"
        folder.mkdir(parents=True, exist_ok=True)
        self.write_build_info(folder / "build_info.h", toolchain, cuda)
        self.write_ninja(folder, toolchain, cuda, cuda_sources if cuda.nvcc else [])
        self.run_ninja(folder, jobs, cuda)

        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(folder / "_C.so", target)

    def write_build_info(self, path: Path, toolchain: Toolchain, cuda: Cuda) -> None:
        """The description of the build in the module: a JSON object, as a C string literal."""
        contract = sorted([*CSRC.glob("cuda/*.h"), CSRC / "cpu" / "ops.h", CSRC / "common" / "activations.h"])
        info = {
            "version": self.distribution.get_version(),
            "contract": hashlib.sha256(b"".join(header.read_bytes() for header in contract)).hexdigest(),
            "compiler": toolchain.name,
            "isas": toolchain.isas,
            "cuda": cuda.nvcc is not None,
            "cuda_reason": cuda.reason,
        }
        # JSON of a string is a valid C string literal once it is ASCII.
        text = f"#pragma once\n#define ORTHOKERN_BUILD_INFO {json.dumps(json.dumps(info))}\n"
        if not path.exists() or path.read_text() != text:  # an unchanged file recompiles nothing
            path.write_text(text)

    def write_ninja(self, folder: Path, toolchain: Toolchain, cuda: Cuda, cuda_sources: list[Path]) -> None:
        import pybind11

        own_flags, own_link = words_of("CXXFLAGS"), words_of("LDFLAGS")
        base = [*own_flags, *COMMON_FLAGS, f"-I{CSRC}"]
        optional = [*toolchain.isas[1:], *(["cuda"] if cuda.nvcc else [])]
        once = [*base, "-O2", *(f"-DORTHOKERN_HAVE_{name.upper()}=1" for name in optional)]
        # -isystem keeps headers of a build environment that will be gone out of the dependency files.
        python = [f"-isystem{path}" for path in (pybind11.get_include(), sysconfig.get_paths()["include"])]

        # GCC warns about its own AVX-512 header (its bug 105593); clang does not know the option.
        quiet = [] if "clang" in toolchain.name else ["-Wno-maybe-uninitialized"]

        units = [("cxx", CSRC / "bindings.cpp", "common", [*once, f"-I{folder}", *python])]
        for source in sorted((CSRC / "cpu").glob("*.cpp")):
            if source.stem == "select":
                units.append(("cxx", source, "common", once))
                continue
            for isa in toolchain.isas:
                flags = [*base, *quiet, *KERNEL_FLAGS, *ISA_FLAGS[isa], f"-DORTHOKERN_ISA={isa}"]
                units.append(("cxx", source, isa, flags))
        for source in cuda_sources:
            flags = ["-O3", "-std=c++17", "-Xcompiler=-fPIC,-fvisibility=hidden", f"-I{CSRC}", *cuda.gencode()]
            units.append(("nvcc", source, "cuda", flags))

        libraries = [] if sys.platform == "darwin" else ["-pthread"]  # part of libSystem there
        if sys.platform.startswith("linux"):
            libraries.append("-ldl")
        rules = {"cxx": [*toolchain.command, "-MMD"]}
        if cuda.nvcc:
            own_host = os.environ.get("CXX") or not os.environ.get("NVCC_CCBIN")  # which nvcc reads itself
            host = [f"-ccbin={toolchain.command[0]}"] if own_host and len(toolchain.command) == 1 else []
            rules["nvcc"] = [cuda.nvcc, *host, "-MMD"]
            # nvcc finds its static runtime. The driver is loaded at the first CUDA call only.
            link = [cuda.nvcc, *host, "-shared", "-cudart=static"]
            # nvcc splits the value at commas
            link += ["-Xcompiler=" + word.replace(",", "\\,") for word in [*libraries, *own_link]]
            libraries = []
        elif sys.platform == "darwin":
            link = [*toolchain.command, *own_flags, "-bundle", "-undefined", "dynamic_lookup", *own_link]
        else:
            link = [*toolchain.command, *own_flags, "-shared", *own_link]

        def words(command: list[str]) -> str:
            return shlex.join(command).replace("$", "$$")

        lines = ["# Written by setup.py."]
        for rule, command in rules.items():
            lines += [f"rule {rule}", f"  command = {words(command)} -MF $out.d $flags -c $in -o $out"]
            lines += ["  depfile = $out.d", "  deps = gcc", "  description = compile $out"]
        lines += ["rule link", f"  command = {words(link)} $in -o $out {words(libraries)}", "  description = link $out"]
        objects = []
        for rule, source, kind, flags in units:
            objects.append(f"obj/{kind}/{source.relative_to(CSRC).with_suffix('.o')}")
            path = re.sub(r"([$ :])", r"$\1", str(source))
            lines += [f"build {objects[-1]}: {rule} {path}", f"  flags = {words(flags)}"]
        lines += [f"build _C.so: link {' '.join(objects)}", ""]
        (folder / "build.ninja").write_text("\n".join(lines))

    def run_ninja(self, folder: Path, jobs: int, cuda: Cuda) -> None:
        import ninja

        # pip puts the programs of its build environment on PATH; those of a virtual environment may not be on it.
        program = shutil.which("ninja") or os.path.join(ninja.BIN_DIR, "ninja")
        if subprocess.run([program, "-j", str(jobs)], cwd=folder, stdin=subprocess.DEVNULL).returncode != 0:
            hint = "; ORTHOKERN_CUDA=0 builds without the CUDA kernels" if cuda.nvcc and cuda_mode() == "auto" else ""
            hint += "; MAX_JOBS=1 needs less memory" if jobs > 1 else ""
            fail(f"the native build failed, see the compiler's messages above{hint}")


if __name__ == "__main__":
    native = sorted(str(path.relative_to(ROOT)) for end in ("cpp", "cu") for path in CSRC.rglob(f"*.{end}"))
    setup(
        packages=[*find_packages(include=["orthokern", "orthokern.*"]), "orthokern.triton_kernels"],
        # Triton ships a top-level package `triton_kernels`; ours is a part of orthokern.
        package_dir={"orthokern.triton_kernels": "triton_kernels"},
        ext_modules=[Extension("orthokern._C", native)],
        cmdclass={"build_ext": NinjaBuild},
    )
