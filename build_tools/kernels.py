"""Compile ``csrc/`` into one library, incrementally, with ninja.

Each list of architectures has a directory of its own under ``build/kernels/``, so that switching
between them recompiles nothing. Commands run in the repository's root on relative paths, which
keeps the machine's paths out of the binary.

``python -m build_tools.kernels`` compiles and prints the library's path.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path

from build_tools import architectures, toolkit

REPOSITORY = Path(__file__).resolve().parent.parent
LIBRARY = "libflashinfer_elastic.so"

#: For host and device code alike. No fast-math anywhere, and no contraction of a*b+c that the
#: source does not ask for: results must not depend on what a compiler chose to fuse.
COMMON_FLAGS = ("-O3", "-std=c++17", "-Iinclude", "-Icsrc")
HOST_FLAGS = ("-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-Wall")
DEVICE_FLAGS = ("-fmad=false",)
#: -z now: a symbol that TVM FFI does not provide is an error when loading, not in a call.
#: --exclude-libs: our static CUDA runtime stays private; torch brings its own.
LINK_FLAGS = (
    "-shared",
    "-Wl,-z,now",
    "-Wl,--exclude-libs,ALL",
    "-Wl,--gc-sections",
    "-Wl,--strip-all",
)
LINK_LIBRARIES = ("-lcudart_static", "-ldl", "-lrt", "-lpthread")


def build(targets: tuple[int, ...], kit: toolkit.Toolkit) -> Path:
    """Compile the library for the given architectures, or find that nothing changed.

    Parameters
    ----------
    targets : tuple of int
        As :func:`build_tools.architectures.parse` gives them.
    kit : Toolkit
        The compiler to use.

    Returns
    -------
    Path
        The library.

    Raises
    ------
    subprocess.CalledProcessError
        Where the compiler or the linker fails; what they said is on stderr.
    """
    directory = Path("build", "kernels", f"{kit.label}.{architectures.label(targets)}")
    file = REPOSITORY / directory / "build.ninja"
    text = ninja_file(targets, kit, directory)
    file.parent.mkdir(parents=True, exist_ok=True)
    if not file.exists() or file.read_text() != text:
        file.write_text(text)
    ninja = find_ninja()
    if ninja is None:
        raise FileNotFoundError("the build needs ninja; install it")
    command = [ninja, "-f", str(directory / "build.ninja")]
    if jobs := os.environ.get("MAX_JOBS"):
        command += ["-j", jobs]
    subprocess.run(command, check=True, cwd=REPOSITORY)
    return REPOSITORY / directory / LIBRARY


def compile_to_ptx(source: Path, target: int, kit: toolkit.Toolkit) -> str:
    """Compile one file as for the library, but stop at PTX.

    Parameters
    ----------
    source : Path
        Of a ``.cu`` file, absolute or relative to the repository's root.
    target : int
        One architecture, such as 90.
    kit : Toolkit
        The compiler to use.

    Raises
    ------
    RuntimeError
        Where the compiler fails; the text is what it said.
    """
    command = [*_device_command((target,), kit), f"-arch=compute_{target}", "--ptx", "-o", "-"]
    run = subprocess.run(
        [*command, str(source)], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    if run.returncode:
        raise RuntimeError(run.stderr)
    return run.stdout


def ninja_file(targets: tuple[int, ...], kit: toolkit.Toolkit, directory: Path) -> str:
    """Write the ninja file that compiles ``csrc/`` into ``directory`` (relative to the root)."""
    device = [
        *_device_command(targets, kit),
        # Machine code for each architecture and no PTX: nothing is left for a driver to compile.
        *(f"-gencode=arch=compute_{target},code=sm_{target}" for target in targets),
    ]
    host = [_host_compiler(), *_common_flags(targets), *_host_flags(), "-isystem", str(kit.include)]
    link = [_host_compiler(), *LINK_FLAGS]
    libraries = [f"-L{kit.library}", *LINK_LIBRARIES]
    sources = sorted(path.relative_to(REPOSITORY) for path in REPOSITORY.glob("csrc/*.c[cu]"))
    objects = {source: directory / f"{source.name}.o" for source in sources}
    rules = {".cu": "device", ".cc": "host"}
    return "\n".join(
        [
            f"builddir = {directory}",
            *_compile_rule("device", device),
            *_compile_rule("host", host),
            "rule link",
            f"  command = {_shell(link)} $in -o $out {_shell(libraries)}",
            "  description = link $out",
            *(f"build {objects[source]}: {rules[source.suffix]} {source}" for source in sources),
            f"build {directory / LIBRARY}: link {' '.join(map(str, objects.values()))}",
            "",
        ]
    )


def _device_command(targets: tuple[int, ...], kit: toolkit.Toolkit) -> list[str]:
    """Give the compiler of device code and its flags, but for what code to generate."""
    return [
        *(str(kit.nvcc), f"-ccbin={_host_compiler()}", *_common_flags(targets), *DEVICE_FLAGS),
        f"-Xcompiler={','.join(_host_flags())}",
    ]


def _host_compiler() -> str:
    return os.environ.get("CXX") or "g++"


def _common_flags(targets: tuple[int, ...]) -> list[str]:
    return [
        *(*COMMON_FLAGS, "-isystem", str(_tvm_ffi())),
        f'-DFLASHINFER_ELASTIC_ARCHS="{",".join(map(str, targets))}"',
    ]


def _host_flags() -> list[str]:
    return [*HOST_FLAGS, f"-ffile-prefix-map={_tvm_ffi()}=tvm_ffi"]


def _tvm_ffi() -> Path:
    found = find_tvm_ffi()
    if found is None:
        raise FileNotFoundError("the build needs the headers of apache-tvm-ffi; install it")
    return found


def _compile_rule(name: str, command: list[str]) -> list[str]:
    return [
        f"rule {name}",
        f"  command = {_shell(command)} -MD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "  description = compile $in",
    ]


def _shell(words: list[str]) -> str:
    """Quote words for the shell, and the result for ninja."""
    return shlex.join(words).replace("$", "$$")


def find_tvm_ffi() -> Path | None:
    """Find TVM FFI's headers without importing it, which would import torch as well."""
    spec = importlib.util.find_spec("tvm_ffi")
    for location in (spec and spec.submodule_search_locations) or ():
        return Path(location, "include")
    return None


def find_ninja() -> str | None:
    """Find ninja: the one beside this interpreter, else the machine's."""
    beside = Path(sysconfig.get_path("scripts"), "ninja")
    return str(beside) if beside.is_file() else shutil.which("ninja")


if __name__ == "__main__":
    print(build(architectures.requested(), toolkit.find()))
