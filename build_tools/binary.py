"""What a compiled library holds for each CUDA architecture, as ``cuobjdump`` tells it."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from build_tools import toolkit


def find_cuobjdump() -> Path:
    """Find ``cuobjdump`` beside nvcc, on ``PATH``, or among the packages pip installed.

    Raises
    ------
    ToolkitError
        Where there is none.
    """
    nvcc = toolkit.find_nvcc()
    if nvcc is not None and (nvcc.parent / "cuobjdump").is_file():
        return nvcc.parent / "cuobjdump"
    on_path = shutil.which("cuobjdump")
    found = Path(on_path) if on_path else toolkit.find_installed("bin/cuobjdump")
    if found is None:
        raise toolkit.ToolkitError("no cuobjdump: pip install nvidia-cuda-cuobjdump")
    return found


def kernels(library: Path) -> dict[str, frozenset[str]]:
    """List the kernels that a library holds machine code of, by architecture.

    Parameters
    ----------
    library : Path
        A shared library with embedded device code.

    Returns
    -------
    dict of str to frozenset of str
        Such as ``{"sm_90": {"_ZN…", …}, "sm_100": …}``: mangled names of the entry points.
        An architecture with device code but no kernel has an empty set.
    """
    found: dict[str, set[str]] = {}
    for line in _cuobjdump("--list-elf", library).splitlines():
        if match := re.search(r"\.(sm_\w+)\.cubin$", line):
            found[match[1]] = set()
    architecture = ""
    for line in _cuobjdump("--dump-elf-symbols", library).splitlines():
        if match := re.match(r"arch = (sm_\w+)", line):
            architecture = match[1]
        elif match := re.match(r"STT_FUNC\s.*\bSTO_ENTRY\s+(\S+)", line):
            found[architecture].add(match[1])
    return {name: frozenset(entries) for name, entries in found.items()}


def ptx(library: Path) -> list[str]:
    """List the PTX images in a library, which a driver would compile when it loads them."""
    return re.findall(r"\S+\.ptx$", _cuobjdump("--list-ptx", library), re.MULTILINE)


def _cuobjdump(option: str, library: Path) -> str:
    command = [str(find_cuobjdump()), option, str(library)]
    run = subprocess.run(command, capture_output=True, text=True)
    # Listing what is not there is an error to cuobjdump, and an empty list to us.
    if run.returncode and "No PTX file found" not in run.stderr + run.stdout:
        raise RuntimeError(f"{' '.join(command)} failed: {run.stderr.strip()}")
    return run.stdout
