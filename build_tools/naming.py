"""The wheel's version and platform tag."""

from __future__ import annotations

import ast
import json
import platform
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from build_tools import architectures, toolkit

REPOSITORY = Path(__file__).resolve().parent.parent


def public_version() -> str:
    """Read ``__version__`` of ``flashinfer.elastic`` without importing it."""
    file = REPOSITORY / "flashinfer" / "elastic" / "__init__.py"
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign) and [ast.unparse(t) for t in node.targets] == [
            "__version__"
        ]:
            return str(ast.literal_eval(node.value))
    raise ValueError(f"{file} assigns no __version__")


def full_version(targets: tuple[int, ...], kit: toolkit.Toolkit) -> str:
    """Give the version with its local part, such as ``0.1.0+cu130.sm90.sm100``."""
    return f"{public_version()}+{kit.label}.{architectures.label(targets)}"


def platform_tag(library: Path) -> str:
    """Ask auditwheel which platform tag a library's symbols allow.

    Parameters
    ----------
    library : Path
        The compiled library.

    Returns
    -------
    str
        Such as ``manylinux_2_34_x86_64``. Where auditwheel is not installed, ``linux_x86_64``:
        pip installs such a wheel on this machine, and no index takes it.
    """
    unaudited = f"linux_{platform.machine()}"
    if subprocess.run([sys.executable, "-c", "import auditwheel"], capture_output=True).returncode:
        print(f"auditwheel is not installed: tagging the wheel {unaudited}", file=sys.stderr)
        return unaudited
    # auditwheel reads wheels, so it gets one that holds nothing but the library.
    with tempfile.TemporaryDirectory() as directory:
        wheel = Path(directory, f"library-0-py3-none-{unaudited}.whl")
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.write(library, f"library/{library.name}")
            archive.writestr("library-0.dist-info/RECORD", f"library/{library.name},,\n")
        return audited_tag(wheel)


def audited_tag(wheel: Path) -> str:
    """Give the platform tag that auditwheel finds a wheel consistent with."""
    command = [sys.executable, "-m", "auditwheel", "show", "--json", str(wheel)]
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return str(json.loads(said)["overall_tag"])
