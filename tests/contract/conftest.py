"""Each supported upstream with the repository's files merged into it, as an install leaves them."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flashinfer.elastic.shadow import TESTED_VERSIONS

PROBES = Path(__file__).parent / "probes"


@pytest.fixture(params=TESTED_VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    """Each supported upstream version in turn."""
    return str(request.param)


@pytest.fixture(scope="session")
def merged_tree(
    upstream_tree: Callable[[str], Path],
    repository: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], Path]:
    """Return a function that gives upstream's files of a version with ours beside them."""
    trees: dict[str, Path] = {}

    def merge(version: str) -> Path:
        if version not in trees:
            tree = tmp_path_factory.mktemp("merged") / version
            # Links: upstream's thousands of files are only read.
            shutil.copytree(upstream_tree(version), tree, copy_function=os.link)
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(
                repository / "flashinfer", tree / "flashinfer", dirs_exist_ok=True, ignore=ignored
            )
            trees[version] = tree
        return trees[version]

    return merge


@pytest.fixture(scope="session")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Return a function that runs a script of ``probes`` over a tree, and gives what it prints.

    The script runs in a process of its own, with the tree ahead of everything else on its path,
    and prints one JSON document as its last line. Importing FlashInfer takes seconds, so each
    script runs once a tree.
    """
    scratch = tmp_path_factory.mktemp("probe")

    @functools.cache
    def run(script: str, tree: Path) -> Any:
        path = os.pathsep.join(filter(None, [str(tree), os.environ.get("PYTHONPATH")]))
        environment = os.environ | {
            "PYTHONPATH": path,
            # Compiled files of the shared tree do not belong into it.
            "PYTHONPYCACHEPREFIX": str(scratch / "bytecode"),
            "FLASHINFER_WORKSPACE_BASE": str(scratch / "workspace"),
        }
        done = subprocess.run(
            [sys.executable, str(PROBES / script)],
            env=environment,
            cwd=scratch,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, f"{script} over {tree}:\n{done.stdout}\n{done.stderr}"
        return json.loads(done.stdout.splitlines()[-1])

    return run
