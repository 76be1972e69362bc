"""Find a CUDA toolkit: ``CUDA_HOME``, else ``nvcc`` on ``PATH``, else the one pip installed."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

#: The oldest toolkit that compiles for SM100.
OLDEST = (12, 8)


class ToolkitError(Exception):
    """There is no usable CUDA toolkit; the message says what is missing and what to do."""


@dataclass(frozen=True)
class Toolkit:
    """One CUDA toolkit.

    Attributes
    ----------
    nvcc : Path
        The compiler.
    version : tuple of int
        Major and minor, as ``nvcc --version`` says.
    include : Path
        Where ``cuda_runtime.h`` is.
    library : Path
        Where ``libcudart_static.a`` is.
    """

    nvcc: Path
    version: tuple[int, int]
    include: Path
    library: Path

    @property
    def label(self) -> str:
        """The toolkit in a wheel's name: ``cu130``."""
        return "cu{}{}".format(*self.version)


def find_nvcc() -> Path | None:
    """Give the path of ``nvcc`` as the module says, or None where there is none."""
    home = os.environ.get("CUDA_HOME")
    if home:
        nvcc = Path(home, "bin", "nvcc")
        if not nvcc.is_file():
            raise ToolkitError(f"CUDA_HOME is {home}, which has no bin/nvcc")
        return nvcc
    on_path = shutil.which("nvcc")
    return Path(on_path) if on_path else find_installed("bin/nvcc")


def find_installed(relative: str) -> Path | None:
    """Find a file of the toolkit among the packages pip installed, or None.

    Parameters
    ----------
    relative : str
        The path below the toolkit's root, such as ``"bin/nvcc"``.
    """
    spec = importlib.util.find_spec("nvidia")
    for location in (spec and spec.submodule_search_locations) or ():
        for root in sorted(Path(location).glob("cu[0-9]*"), reverse=True):
            if (root / relative).is_file():
                return root / relative
    return None


def find() -> Toolkit:
    """Find the toolkit to build with.

    Raises
    ------
    ToolkitError
        Where there is none, it is too old, or a part that the build needs is missing.
    """
    nvcc = find_nvcc()
    if nvcc is None:
        raise ToolkitError(
            "no nvcc: set CUDA_HOME, put nvcc on PATH, or install the toolkit's Python packages "
            "(python -m build_tools.requirements lists them)"
        )
    version = _version(nvcc)
    if version < OLDEST:
        raise ToolkitError(
            "{} is of CUDA {}.{}; {}.{} or later is needed".format(nvcc, *version, *OLDEST)
        )
    root = _root(nvcc)
    return Toolkit(
        nvcc=nvcc,
        version=version,
        include=_directory_of("cuda_runtime.h", root, ("include", "targets/*/include")),
        library=_directory_of("libcudart_static.a", root, ("lib64", "lib", "targets/*/lib")),
    )


def _version(nvcc: Path) -> tuple[int, int]:
    said = subprocess.run([nvcc, "--version"], check=True, capture_output=True, text=True).stdout
    match = re.search(r"release (\d+)\.(\d+)", said)
    if match is None:
        raise ToolkitError(f"{nvcc} --version does not say which release it is: {said!r}")
    return int(match[1]), int(match[2])


def _root(nvcc: Path) -> Path:
    """Ask the compiler where its toolkit is: ``nvcc`` on PATH may be a link or a wrapper script."""
    command = [str(nvcc), "--dryrun", "-x", "cu", "-c", os.devnull, "-o", os.devnull]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    match = re.search(r"^#\$ TOP=(.+)$", said, re.MULTILINE)
    if match is None:
        raise ToolkitError(f"{nvcc} --dryrun does not say where its toolkit is")
    return Path(match[1].strip()).resolve()


def _directory_of(name: str, root: Path, patterns: tuple[str, ...]) -> Path:
    for pattern in patterns:
        for directory in sorted(root.glob(pattern)):
            if (directory / name).is_file():
                return directory
    raise ToolkitError(f"the CUDA toolkit in {root} has no {name}; its runtime package is missing")
