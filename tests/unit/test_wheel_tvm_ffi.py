"""The library in the wheel loads under the oldest supported TVM FFI and under later ones."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from build_tools import naming, requirements

LIBRARY = "flashinfer/elastic/lib/libflashinfer_elastic.so"

SCRIPT = """
import sys
import tvm_ffi
module = tvm_ffi.load_module(sys.argv[1])
print(tvm_ffi.__version__, module["elastic_build_info"]())
try:
    module["elastic_context_create"]()
except TypeError:
    print("errors cross over")
"""


@pytest.mark.parametrize("version", [requirements.OLDEST_TVM_FFI, "0.1.11", "0.1.15.post2"])
def test_loads_calls_and_raises(version: str, tmp_path: Path) -> None:
    wheels = sorted((naming.REPOSITORY / "dist").glob("flashinfer-*.whl"))
    if not wheels:
        pytest.skip("there is no wheel in dist/: run scripts/build.sh --wheel-only")
    with zipfile.ZipFile(wheels[-1]) as archive:
        library = archive.extract(LIBRARY, tmp_path)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(tmp_path / "ffi")]
    subprocess.run([*command, f"apache-tvm-ffi=={version}"], check=True)

    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, library],
        env=os.environ | {"PYTHONPATH": str(tmp_path / "ffi")},
        check=True,
        capture_output=True,
        text=True,
    )
    lines = run.stdout.splitlines()
    assert lines[0].startswith(f"{version} {{"), run.stdout
    assert lines[1:] == ["errors cross over"], run.stdout
