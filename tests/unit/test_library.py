"""Finding and loading the compiled kernels, and which GPUs they run on."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flashinfer.elastic.allreduce.engines import library


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    library.load.cache_clear()
    yield
    library.load.cache_clear()


@pytest.mark.parametrize(
    ("archs", "runs", "does_not"),
    [
        ((90,), (90,), (80, 89, 100, 103, 120)),
        ((90, 100), (90, 100, 103), (80, 89, 110, 120)),
        ((103,), (103,), (100, 90)),
        ((80,), (80, 86, 89), (75, 90)),
        ((), (), (90,)),
    ],
)
def test_machine_code_runs_on_its_own_major_version(
    archs: tuple[int, ...], runs: tuple[int, ...], does_not: tuple[int, ...]
) -> None:
    assert all(library.runs_on(archs, arch) for arch in runs)
    assert not any(library.runs_on(archs, arch) for arch in does_not)


def test_a_missing_file_is_named_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    missing = tmp_path / "libflashinfer_elastic.so"
    monkeypatch.setattr(library, "FILE", missing)
    with pytest.raises(RuntimeError, match="is missing") as caught:
        library.load()
    assert str(missing) in str(caught.value)


def test_the_library_is_loaded_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "library.so"
    file.touch()
    loaded: list[str] = []

    def load_module(path: str) -> Any:
        loaded.append(path)
        return types.SimpleNamespace(
            elastic_build_info=lambda: json.dumps({"archs": [90, 100], "cuda": "13.0"}),
            elastic_context_create="create",
            elastic_context_destroy="destroy",
            elastic_context_choose_multicast="choose",
            elastic_context_expired_waits="expired",
            elastic_allreduce="allreduce",
            elastic_allreduce_quantized="allreduce_quantized",
        )

    monkeypatch.setattr(library, "FILE", file)
    monkeypatch.setitem(sys.modules, "tvm_ffi", types.SimpleNamespace(load_module=load_module))
    first = library.load()
    assert library.load() is first
    assert loaded == [str(file)]
    assert first == (
        "create",
        "destroy",
        "choose",
        "expired",
        "allreduce",
        "allreduce_quantized",
        (90, 100),
    )


def test_the_built_library_says_what_it_was_built_for() -> None:
    if not library.FILE.exists():
        pytest.skip("the kernels have not been built")
    functions = library.load()
    assert functions.archs
    assert all(70 <= arch <= 200 for arch in functions.archs)
    # Arguments are checked before a GPU is needed.
    with pytest.raises(ValueError, match="rank 2 of 2: groups of 1 to 64 ranks are supported"):
        functions.context_create(2, [0, 0], 0, 256, 0, 1.0, False, 132, 0)
    with pytest.raises(ValueError, match="rank 0 of 65"):
        functions.context_create(0, [0] * 65, 0, 256, 0, 1.0, False, 132, 0)
    with pytest.raises(ValueError, match="the multicast address 8 is not a multiple of 16"):
        functions.context_create(0, [0, 0], 8, 256, 0, 1.0, False, 132, 0)
