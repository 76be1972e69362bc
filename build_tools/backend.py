"""The PEP 517 backend: setuptools, with build requirements that depend on the machine."""

from __future__ import annotations

from setuptools import build_meta

from build_tools import requirements

build_sdist = build_meta.build_sdist
build_wheel = build_meta.build_wheel
get_requires_for_build_sdist = build_meta.get_requires_for_build_sdist
prepare_metadata_for_build_wheel = build_meta.prepare_metadata_for_build_wheel


def get_requires_for_build_wheel(
    config_settings: dict[str, str | list[str] | None] | None = None,
) -> list[str]:
    """Give what a wheel build needs here: the CUDA toolkit's packages only where no nvcc is."""
    return [*build_meta.get_requires_for_build_wheel(config_settings), *requirements.needed()]
