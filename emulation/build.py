"""Builds the Python module of the emulated machine: ``python emulation/build.py [--tsan]``.

Needs a C++17 compiler (``CXX``, by default g++), pybind11 and ninja. Builds again only what
changed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pybind11

SOURCES = Path(__file__).resolve().parent
REPOSITORY = SOURCES.parent
MODULE = "flashinfer_elastic_emulation"

# What runs the kernels is compiled without instrumentation: to ThreadSanitizer, a scheduler of
# fibers is all data races. It says itself which accesses of the kernels are ordered.
KERNELS = ("one_shot", "two_shot", "planted_race")
MACHINE = ("fabric", "fiber", "group", "memory", "module", "multiprocessor")

FLAGS = (
    "-std=c++17 -O2 -g1 -fPIC -fvisibility=hidden -Wall -Wextra -Wno-unknown-pragmas "
    # The device's arithmetic, and kernels that read any element type as words.
    "-ffp-contract=off -fno-strict-aliasing"
)


def build(*, tsan: bool = False, out: Path | None = None, verbose: bool = False) -> Path:
    """Build the module and give the path of its shared library.

    Parameters
    ----------
    tsan : bool
        Instrument the kernels for ThreadSanitizer. The module then loads only into a process that
        was started with the sanitizer's runtime preloaded.
    out : Path, optional
        Where to build; by default ``build/emulation`` or ``build/emulation-tsan``.
    verbose : bool
        Show what is compiled even if all goes well.

    Raises
    ------
    RuntimeError
        If the build fails; the text holds the compiler's output.
    """
    directory = out or REPOSITORY / "build" / ("emulation-tsan" if tsan else "emulation")
    directory.mkdir(parents=True, exist_ok=True)
    library = MODULE + str(sysconfig.get_config_var("EXT_SUFFIX"))
    _write_if_changed(directory / "build.ninja", _rules(library, tsan))
    command = [_ninja(), "-C", str(directory)]
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if verbose:
        print(done.stdout, end="")
    if done.returncode != 0:
        raise RuntimeError(f"the emulation does not build:\n{done.stdout}")
    return directory / library


def tsan_runtime() -> Path:
    """Path of the sanitizer's runtime, to be preloaded."""
    given = subprocess.check_output([_compiler(), "-print-file-name=libtsan.so"], text=True)
    return Path(given.strip()).resolve()


def _rules(library: str, tsan: bool) -> str:
    includes = (
        f"-I{SOURCES} -I{REPOSITORY / 'include'} "
        f"-isystem {pybind11.get_include()} -isystem {sysconfig.get_path('include')}"
    )
    machine = "-DFLASHINFER_ELASTIC_TSAN=1" if tsan else ""
    sanitize = "-fsanitize=thread" if tsan else ""
    lines = [
        "ninja_required_version = 1.5",
        f"flags = {FLAGS} {machine} {includes}",
        "rule compile",
        f"  command = {_compiler()} -MD -MF $out.d $flags $extra -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "  description = compile $in",
        "rule link",
        f"  command = {_compiler()} -shared {sanitize} $in -o $out -pthread",
        "  description = link $out",
    ]
    for name in KERNELS + MACHINE:
        lines.append(f"build {name}.o: compile {SOURCES / name}.cc")
        if name in KERNELS:
            lines.append(f"  extra = {sanitize}")
    objects = " ".join(f"{name}.o" for name in KERNELS + MACHINE)
    lines += [f"build {library}: link {objects}", f"default {library}", ""]
    return "\n".join(lines)


def _compiler() -> str:
    return os.environ.get("CXX") or "g++"


def _ninja() -> str:
    beside = Path(sys.executable).parent / "ninja"
    found = str(beside) if beside.exists() else shutil.which("ninja")
    if found is None:
        raise RuntimeError("ninja is not installed")
    return found


def _write_if_changed(path: Path, text: str) -> None:
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def main() -> None:
    """Build what the command line asks for."""
    parser = argparse.ArgumentParser(description="Build the emulated machine's Python module.")
    parser.add_argument("--tsan", action="store_true", help="instrument for ThreadSanitizer")
    parser.add_argument("--out", type=Path, help="build directory")
    given = parser.parse_args()
    print(build(tsan=given.tsan, out=given.out, verbose=True))


if __name__ == "__main__":
    main()
