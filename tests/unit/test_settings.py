"""The environment variables of all-reduce workspaces."""

from __future__ import annotations

import pytest

from flashinfer.elastic.allreduce import settings

MIB = 2**20


def test_defaults() -> None:
    assert settings.read({}) == ("auto", 64 * MIB, 600.0, "auto")


def test_an_empty_value_counts_as_unset() -> None:
    assert settings.read(dict.fromkeys(settings.NAMES, "")) == settings.read({})
    assert settings.read(dict.fromkeys(settings.NAMES, "  ")) == settings.read({})


@pytest.mark.parametrize("engine", ["auto", "native", "upstream", " Native ", "UPSTREAM"])
def test_engines(engine: str) -> None:
    assert settings.read({settings.ENGINE: engine}).engine == engine.strip().lower()


@pytest.mark.parametrize("choice", ["auto", "0", "1", " AUTO "])
def test_multicast(choice: str) -> None:
    assert settings.read({settings.MULTICAST: choice}).multicast == choice.strip().lower()


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("1", MIB), ("0.5", MIB // 2), ("2048", 2048 * MIB), (" 8 ", 8 * MIB)],
)
def test_one_shot_limit(text: str, size: int) -> None:
    assert settings.read({settings.ONESHOT_MAX_MB: text}).oneshot_max_bytes == size


@pytest.mark.parametrize(("text", "seconds"), [("0", 0.0), ("0.25", 0.25), ("3600", 3600.0)])
def test_time_out(text: str, seconds: float) -> None:
    assert settings.read({settings.TIMEOUT_S: text}).timeout_s == seconds


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (settings.ENGINE, "fast"),
        (settings.ENGINE, "native,upstream"),
        (settings.MULTICAST, "2"),
        (settings.MULTICAST, "yes"),
        (settings.ONESHOT_MAX_MB, "64MB"),
        (settings.ONESHOT_MAX_MB, "-1"),
        (settings.ONESHOT_MAX_MB, "nan"),
        (settings.ONESHOT_MAX_MB, "inf"),
        (settings.TIMEOUT_S, "-0.1"),
        (settings.TIMEOUT_S, "never"),
        (settings.TIMEOUT_S, "1e12"),
        (settings.TIMEOUT_S, "2147483649"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(name: str, text: str) -> None:
    with pytest.raises(ValueError, match=r"allowed") as caught:
        settings.read({name: text})
    assert name in str(caught.value)
    assert repr(text) in str(caught.value)


def test_the_process_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.ENGINE, "upstream")
    monkeypatch.setenv(settings.TIMEOUT_S, "7")
    read = settings.read()
    assert (read.engine, read.timeout_s) == ("upstream", 7.0)
