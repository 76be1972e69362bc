"""Build the wheel: the Python files under ``flashinfer/`` and the compiled library.

The library is no Python extension module, so the wheel works with every Python 3. It must be
installed as *purelib*, like flashinfer-python, for both to land in one directory.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from setuptools import find_namespace_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

# Without a PEP 517 front end, as in `python setup.py`, the root is not on the path.
sys.path.insert(0, str(Path(__file__).resolve().parent))

from build_tools import architectures, kernels, naming, requirements, toolkit

TARGETS = architectures.requested()
PLACE = Path("flashinfer", "elastic", "lib")


class BuildPython(build_py):
    """Copy the Python files, then compile the library and put it among them."""

    def run(self) -> None:
        # setuptools only ever adds to build/lib: what a former build left would be shipped.
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()
        library = kernels.build(TARGETS, toolkit.find())
        place = Path(self.build_lib, PLACE)
        place.mkdir(parents=True, exist_ok=True)
        shutil.copy2(library, place)


class TaggedWheel(bdist_wheel):
    """Tag the wheel for any Python 3 on the platform that the library's symbols ask for."""

    def get_tag(self) -> tuple[str, str, str]:
        build_lib = self.get_finalized_command("build_py").build_lib
        return "py3", "none", naming.platform_tag(Path(build_lib, PLACE, kernels.LIBRARY))


def version() -> str:
    """Give the version; without a toolkit (metadata, source distribution) its public part."""
    try:
        return naming.full_version(TARGETS, toolkit.find())
    except toolkit.ToolkitError:
        return naming.public_version()


setup(
    version=version(),
    packages=find_namespace_packages(include=["flashinfer", "flashinfer.*"]),
    py_modules=["flashinfer_doctor"],
    package_data={
        "flashinfer.elastic": ["py.typed"],
        "flashinfer.elastic.doctor.bench": ["*.cu"],
    },
    install_requires=[
        requirements.tvm_ffi_at_run_time(),
        "click>=8.1",
        # Not cuda-python, whose newest release would pull the bindings that are there up or down.
        "cuda-bindings",
        "flashinfer-python>=0.6.12,<0.8",
        "nvidia-ml-py",
        "rich>=13",
        "torch",
    ],
    cmdclass={"build_py": BuildPython, "bdist_wheel": TaggedWheel},
)
