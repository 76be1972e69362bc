"""What ``benchmarks/vllm_engine.py`` takes for a failure."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import vllm_engine

from flashinfer.elastic.doctor.bench import machine

PROMPTS = 8


def outcome(mode: str) -> dict[str, Any]:
    """Return the outcome of a mode that did what it should."""
    backend = vllm_engine.MODES[mode]
    worker = {
        "workspace": None if backend is None else {"backend": backend},
        "libraries": [vllm_engine.OUR_LIBRARY] if mode == "mnnvl" else [],
    }
    return {
        "prompts_as_off": PROMPTS,
        "repeats_itself": True,
        "workers": [worker | {"rank": rank} for rank in range(vllm_engine.RANKS)],
    }


def judged(**changes: Any) -> list[str]:
    """Judge a run of all modes in which mode ``mnnvl`` came out otherwise."""
    result = {mode: outcome(mode) for mode in vllm_engine.MODES}
    result["mnnvl"] |= copy.deepcopy(changes)
    return vllm_engine.judge(result, PROMPTS)


def workers(**changes: Any) -> list[dict[str, Any]]:
    first, *others = outcome("mnnvl")["workers"]
    return [first | changes, *others]


def test_nothing_is_wrong_where_all_did_what_they_should() -> None:
    assert judged() == []


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"prompts_as_off": PROMPTS - 1}, "mnnvl: 1 of 8 prompts differ from fusion off"),
        ({"repeats_itself": False}, "mnnvl: a later round gave other tokens than the first"),
        ({"workers": []}, "mnnvl: 0 workers answered, not 2"),
        ({"workers": workers(workspace=None)}, "mnnvl, rank 0: the workspace is None, not mnnvl"),
        ({"workers": workers(libraries=[])}, "mnnvl, rank 0: did not load "),
        (
            {"workers": workers(libraries=[vllm_engine.OUR_LIBRARY, "trtllm_comm.so"])},
            "mnnvl, rank 0: loaded upstream's trtllm_comm.so",
        ),
    ],
)
def test_each_departure_is_named(changes: dict[str, Any], text: str) -> None:
    (wrong,) = judged(**changes)
    assert wrong.startswith(text)


def test_a_lost_engine_is_wrong_once() -> None:
    result = {"off": outcome("off"), "mnnvl": {"error": "no answer in time"}}
    assert vllm_engine.judge(result, PROMPTS) == ["mnnvl: no answer in time"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--hidden", "300"], "--hidden: must be a multiple of 256, got 300"),
        (["--layers", "0"], "--layers: must be positive, got 0"),
        (["--batched-tokens", "-1"], "--batched-tokens: must be positive, got -1"),
        (["--out", "/"], "--out: must name a file, got the folder /"),
        (["--jit-cache", "/nowhere"], "--jit-cache: /nowhere has no flashinfer_jit_cache"),
    ],
)
def test_wrong_options_are_refused_before_an_engine_starts(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        vllm_engine.parse(arguments)
    assert text in capsys.readouterr().err


def test_what_is_not_installed_is_named_before_an_engine_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(vllm_engine, "find_spec", lambda name: None if name == "vllm" else name)
    with pytest.raises(SystemExit):
        vllm_engine.parse([])
    assert "not installed: vllm" in capsys.readouterr().err


def test_the_result_file_says_nothing_of_where_it_was_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(machine, "describe", lambda ranks: f"{ranks} x GPU")
    monkeypatch.setattr(vllm_engine, "find_spec", lambda name: name)
    options = vllm_engine.parse(["--out", str(tmp_path / "x"), "--logs", str(tmp_path)])
    rates = {"tokens_per_s": [3.0, 1.0, 2.0], "versions": {"vllm": "1"}}
    result = {mode: outcome(mode) | copy.deepcopy(rates) for mode in vllm_engine.MODES}
    document = vllm_engine.describe(options, result, [])
    assert document["machine"] == "2 x GPU"
    assert document["versions"] == {"vllm": "1"}
    assert document["median_tokens_per_s"]["mnnvl"] == 2.0
    assert document["settings"]["layers"] == options.layers
    assert str(tmp_path) not in json.dumps(document)
