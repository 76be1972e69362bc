#!/usr/bin/env python3
"""Check that wheels are fit to be released; print each check, exit with 1 where one fails.

    scripts/verify_wheel.py dist/flashinfer-*.whl

A wheel's file name is a promise: version, toolkit, architectures, platform. Everything it says is
held against what the wheel contains, and the wheel against what it must never do: bring a file that
a FlashInfer release owns, or leave device code for the driver to compile.
"""

from __future__ import annotations

import argparse
import base64
import csv
import hashlib
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from build_tools import binary, naming, toolkit, upstream

MOST_BYTES = 20_000_000
LIBRARY = "flashinfer/elastic/lib/libflashinfer_elastic.so"
LAUNCHER = "flashinfer_doctor.py"
REQUIRED = {
    "apache-tvm-ffi",
    "click",
    "cuda-bindings",
    "flashinfer-python",
    "nvidia-ml-py",
    "rich",
    "torch",
}

_NAME = re.compile(
    r"flashinfer-(?P<public>[^-+]+)\+cu(?P<cuda>\d+)\.(?P<archs>sm\d+(?:\.sm\d+)*)"
    r"-py3-none-(?P<platform>\w+)\.whl"
)


class UnfitError(Exception):
    """A wheel fails a check."""


@dataclass(frozen=True)
class Wheel:
    """A wheel, what its name says, and where its files are unpacked."""

    file: Path
    root: Path
    version: str
    public_version: str
    cuda: str
    architectures: tuple[int, ...]
    platform: str

    @classmethod
    def open(cls, file: Path, root: Path) -> Wheel:
        """Unpack ``file`` into ``root``."""
        if not file.is_file():
            raise UnfitError(f"{file}: there is no such file")
        match = _NAME.fullmatch(file.name)
        if match is None:
            raise UnfitError(
                f"{file.name} is not named like flashinfer-0.1.0+cu130.sm90-py3-none-….whl"
            )
        try:
            with zipfile.ZipFile(file) as archive:
                archive.extractall(root)
        except (OSError, zipfile.BadZipFile, zlib.error) as error:
            raise UnfitError(f"{file} cannot be unpacked: {error}") from None
        return cls(
            file=file,
            root=root,
            version=file.name.split("-")[1],
            public_version=match["public"],
            cuda=f"{match['cuda'][:-1]}.{match['cuda'][-1]}",
            architectures=tuple(int(name[2:]) for name in match["archs"].split(".")),
            platform=match["platform"],
        )

    @property
    def paths(self) -> set[str]:
        """The files in the wheel, relative to site-packages."""
        files = (path for path in self.root.rglob("*") if path.is_file())
        return {path.relative_to(self.root).as_posix() for path in files}

    @property
    def metadata(self) -> str:
        """The name of the ``.dist-info`` directory."""
        return f"flashinfer-{self.version}.dist-info"

    def text(self, name: str) -> str:
        """Read a file of the ``.dist-info`` directory."""
        file = self.root / self.metadata / name
        if not file.is_file():
            raise UnfitError(f"{self.metadata}/{name} is missing")
        return file.read_text()


def check_size(wheel: Wheel) -> str:
    """It stays small enough to install without a thought."""
    size = wheel.file.stat().st_size
    if size >= MOST_BYTES:
        raise UnfitError(f"{size:,} bytes; {MOST_BYTES:,} are too many")
    return f"{size:,} bytes"


def check_record(wheel: Wheel) -> str:
    """RECORD lists every file with its hash."""
    rows = {row[0]: row[1] for row in csv.reader(wheel.text("RECORD").splitlines())}
    if difference := wheel.paths ^ set(rows):
        raise UnfitError(f"RECORD and contents differ in {sorted(difference)}")
    for name, expected in rows.items():
        digest = hashlib.sha256((wheel.root / name).read_bytes()).digest()
        actual = f"sha256={base64.urlsafe_b64encode(digest).rstrip(b'=').decode()}"
        if expected != actual and name != f"{wheel.metadata}/RECORD":
            raise UnfitError(f"{name} does not have the hash in RECORD")
    return f"{len(rows)} files"


def check_metadata(wheel: Wheel) -> str:
    """It installs as purelib, beside flashinfer-python, with the dependencies it needs."""
    tags = Parser().parsestr(wheel.text("WHEEL"))
    if tags["Root-Is-Purelib"] != "true":
        raise UnfitError(
            "Root-Is-Purelib is not true: it could land beside flashinfer-python's files"
        )
    if tags["Tag"] != f"py3-none-{wheel.platform}":
        raise UnfitError(f"WHEEL says {tags['Tag']}, the name {wheel.platform}")
    metadata = Parser().parsestr(wheel.text("METADATA"))
    if (metadata["Name"], metadata["Version"]) != ("flashinfer", wheel.version):
        raise UnfitError(f"METADATA says {metadata['Name']} {metadata['Version']}")
    required = metadata.get_all("Requires-Dist", [])
    names = {re.split(r"[\s<>=!~;\[(]", requirement)[0] for requirement in required}
    if names != REQUIRED:
        raise UnfitError(f"Requires-Dist names {sorted(names)}, not {sorted(REQUIRED)}")
    return ", ".join(sorted(required))


def check_licence(wheel: Wheel) -> str:
    """Licence and notice come with it."""
    if Parser().parsestr(wheel.text("METADATA"))["License-Expression"] != "Apache-2.0":
        raise UnfitError("METADATA does not say License-Expression: Apache-2.0")
    if "Apache License" not in wheel.text("licenses/LICENSE"):
        raise UnfitError("licenses/LICENSE is not the Apache License")
    if "flashinfer-python" not in wheel.text("licenses/NOTICE"):
        raise UnfitError("licenses/NOTICE does not say what the wheel works beside")
    return "Apache-2.0, NOTICE"


def check_contents(wheel: Wheel) -> str:
    """It holds the repository's ``flashinfer/``, the library, the launcher, and nothing else."""
    tree = naming.REPOSITORY
    shipped = (path for suffix in ("*.py", "*.cu") for path in (tree / "flashinfer").rglob(suffix))
    expected = {path.relative_to(tree).as_posix() for path in shipped}
    expected |= {LIBRARY, LAUNCHER, "flashinfer/elastic/py.typed"}
    found = {path for path in wheel.paths if not path.startswith(f"{wheel.metadata}/")}
    if difference := expected ^ found:
        raise UnfitError(f"wheel and source tree differ in {sorted(difference)}")
    return f"{len(found)} files"


def check_upstream(wheel: Wheel) -> str:
    """No FlashInfer release owns a file of the same path."""
    for release in upstream.RELEASES:
        if shared := wheel.paths & upstream.owned_paths(upstream.wheel(release)):
            raise UnfitError(f"flashinfer-python {release} owns {sorted(shared)}")
    return f"against {', '.join(upstream.RELEASES)}"


def check_platform(wheel: Wheel) -> str:
    """The platform tag is what auditwheel reads from the symbols."""
    audited = naming.audited_tag(wheel.file)
    if audited != wheel.platform:
        raise UnfitError(f"auditwheel says {audited}")
    if not audited.startswith("manylinux_"):
        raise UnfitError(f"{audited} is no tag to release")
    return audited


def check_device_code(wheel: Wheel) -> str:
    """Every kernel has machine code for every architecture named, for no other, and no PTX."""
    kernels = binary.kernels(wheel.root / LIBRARY)
    named = {f"sm_{architecture}" for architecture in wheel.architectures}
    if set(kernels) != named:
        raise UnfitError(f"the name says {sorted(named)}, the library has {sorted(kernels)}")
    everywhere = frozenset.intersection(*kernels.values())
    for architecture, names in kernels.items():
        if lacking := frozenset.union(*kernels.values()) - names:
            raise UnfitError(f"{architecture} lacks {sorted(lacking)}")
    if not everywhere:
        raise UnfitError("the library has no kernels")
    if images := binary.ptx(wheel.root / LIBRARY):
        raise UnfitError(f"the library holds PTX: {images}")
    return f"{len(everywhere)} kernels for each of {', '.join(sorted(named))}"


_LOAD = """
import json, sys
import tvm_ffi
print(json.dumps({
    "tvm_ffi": tvm_ffi.__version__,
    "built": json.loads(tvm_ffi.load_module(sys.argv[1])["elastic_build_info"]()),
}))
"""


def check_loads(wheel: Wheel) -> str:
    """The library loads under the TVM FFI installed here, and says what the name says."""
    said = json.loads(_python("-c", _LOAD, str(wheel.root / LIBRARY)))
    expected = {"archs": list(wheel.architectures), "cuda": wheel.cuda}
    if said["built"] != expected:
        raise UnfitError(f"elastic_build_info is {said['built']}, not {expected}")
    return f"tvm-ffi {said['tvm_ffi']}, {said['built']}"


_IMPORT = """
import sys
# Unpacked, the wheel is a namespace package: no FlashInfer is needed for the part that needs none.
sys.path.insert(0, sys.argv[1])
import flashinfer.elastic
assert flashinfer.elastic.__file__.startswith(sys.argv[1]), flashinfer.elastic.__file__
heavy = {"torch", "tvm_ffi", "cuda"} & set(sys.modules)
assert not heavy, f"importing it imports {heavy}"
print(flashinfer.elastic.__version__)
"""


def check_imports(wheel: Wheel) -> str:
    """``flashinfer.elastic`` imports, costs nothing, and has the wheel's version."""
    version = _python("-S", "-c", _IMPORT, str(wheel.root))
    if version != wheel.public_version:
        raise UnfitError(f"flashinfer.elastic is {version}")
    return version


CHECKS: tuple[Callable[[Wheel], str], ...] = (
    check_size,
    check_record,
    check_metadata,
    check_licence,
    check_contents,
    check_upstream,
    check_platform,
    check_device_code,
    check_loads,
    check_imports,
)


def verify(file: Path) -> Iterator[tuple[str, str | None, str]]:
    """Run every check on one wheel.

    Yields
    ------
    tuple of (str, str or None, str)
        The check's name, what is wrong or None, and what was found.
    """
    with tempfile.TemporaryDirectory() as directory:
        try:
            wheel = Wheel.open(file, Path(directory).resolve())
        except UnfitError as error:
            yield "name", str(error), ""
            return
        for check in CHECKS:
            try:
                yield check.__name__.removeprefix("check_"), None, check(wheel)
            except UnfitError as error:
                yield check.__name__.removeprefix("check_"), str(error), ""


def missing_tools() -> list[str]:
    """Return what the checks need and this machine lacks, each with what to do."""
    missing = [
        f"no {module}: pip install {package}"
        for module, package in (("auditwheel", "auditwheel"), ("tvm_ffi", "apache-tvm-ffi"))
        if importlib.util.find_spec(module) is None
    ]
    try:
        binary.find_cuobjdump()
    except toolkit.ToolkitError as error:
        missing.append(str(error))
    return missing


def main(arguments: list[str] | None = None) -> int:
    """Verify the wheels named on the command line; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("wheels", nargs="+", type=Path, metavar="WHEEL")
    files = parser.parse_args(arguments).wheels
    if missing := missing_tools():
        print(f"error: {'; '.join(missing)}", file=sys.stderr)
        return 1
    failures = 0
    for file in files:
        print(file.name)
        for name, wrong, found in verify(file):
            failures += wrong is not None
            print(f"  {'ok  ' if wrong is None else 'FAIL'} {name:12} {wrong or found}")
    return 1 if failures else 0


def _python(*arguments: str) -> str:
    """Run this interpreter and give what it printed."""
    run = subprocess.run([sys.executable, *arguments], capture_output=True, text=True)
    if run.returncode:
        raise UnfitError(run.stderr.strip())
    return run.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
