"""``flashinfer-doctor check`` on recorded machines and installations."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("rich")
testing = pytest.importorskip("click.testing")

import doctor_machines as machines  # noqa: E402
from doctor_machines import FakeDriver, FakeNvml, Recorded, failing, installed  # noqa: E402

from flashinfer.elastic.doctor import cli  # noqa: E402
from flashinfer.elastic.doctor.check import (  # noqa: E402
    document,
    environment,
    installation,
    machine,
)
from flashinfer.elastic.doctor.check.facts import (  # noqa: E402
    Applied,
    Facts,
    Group,
    Installation,
    Kernels,
    Requirement,
)
from flashinfer.elastic.doctor.check.findings import Finding, Level, healthy, judge  # noqa: E402


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start from an environment without settings."""
    for setting in environment.gather().settings:
        monkeypatch.delenv(setting.name)


gather_machine = machine.gather


def look(recorded: Recorded, made: Installation | None = None) -> Facts:
    found = gather_machine(lambda: FakeDriver(recorded), lambda: FakeNvml(recorded))  # type: ignore[arg-type, return-value]
    return Facts(made or installed(), found, environment.gather())


def worst(findings: list[Finding], topic: str) -> Level:
    order = [Level.OK, Level.NOTE, Level.UNKNOWN, Level.PROBLEM]
    return max((one.level for one in findings if one.topic == topic), key=order.index)


def said(findings: list[Finding], topic: str) -> str:
    return " ".join(f"{one.text} {one.remedy}" for one in findings if one.topic == topic)


def problems(findings: list[Finding]) -> set[str]:
    return {one.topic for one in findings if one.level is Level.PROBLEM}


# Machines


def test_two_gpus_with_nvlink() -> None:
    facts = look(machines.TWO_NV18)
    findings = judge(facts)
    assert healthy(findings)
    (pair,) = facts.machine.pairs
    assert (pair.nvlink, pair.links, pair.peer_access) == ("nvlink", 18, True)
    assert facts.machine.driver_cuda == "13.0"
    assert [gpu.arch for gpu in facts.machine.gpus] == [90, 90]
    assert document.make(facts, findings, None).engines == ("native", "native")
    assert "every pair of GPUs (1 pair, 18 links each)" in said(findings, "nvlink")


def test_the_attribute_alone_does_not_prove_multicast() -> None:
    findings = judge(look(machines.TWO_NV18))
    assert worst(findings, "multicast") is Level.NOTE
    assert "does not prove" in said(findings, "multicast")


def test_no_gpu_is_no_problem_and_said() -> None:
    facts = look(machines.NOTHING)
    findings = judge(facts)
    assert healthy(findings)
    assert facts.machine.gpus == () and facts.machine.driver is None
    assert "libcuda.so.1 is not there" in said(findings, "driver")
    assert "NVML says driver not loaded" in said(findings, "driver")
    assert "cannot be told here" in said(findings, "driver")


def test_one_gpu() -> None:
    findings = judge(look(machines.ONE))
    assert healthy(findings)
    assert "nothing to all-reduce with" in said(findings, "nvlink")


def test_eight_switched_gpus() -> None:
    facts = look(machines.EIGHT_SWITCHED)
    assert len(facts.machine.pairs) == 28 and {pair.links for pair in facts.machine.pairs} == {18}
    assert healthy(judge(facts))
    assert "fabric is up" in said(judge(facts), "multicast")


def test_bridged_pairs() -> None:
    facts = look(machines.BRIDGED)
    findings = judge(facts)
    assert healthy(findings), "groups within an island work"
    links = {(pair.a, pair.b): (pair.nvlink, pair.links) for pair in facts.machine.pairs}
    assert links[0, 1] == ("nvlink", 12) and links[2, 3] == ("nvlink", 12)
    assert links[0, 2] == ("none", None)
    assert "no NVLink between GPUs 0 and 2, 0 and 3, 1 and 2, 1 and 3" in said(findings, "nvlink")


def test_pcie(monkeypatch: pytest.MonkeyPatch) -> None:
    findings = judge(look(machines.PCIE))
    assert {"nvlink", "kernels"} <= problems(findings)
    assert facts_path(machines.PCIE) == "SYS"
    monkeypatch.setenv("FLASHINFER_MNNVL_ALLOW_PCIE", "1")
    assert worst(judge(look(machines.PCIE)), "nvlink") is Level.NOTE


def facts_path(recorded: Recorded) -> str | None:
    return look(recorded).machine.pairs[0].path


def test_no_peer_access() -> None:
    recorded = Recorded(("XN", "NX"), peer_access=False)
    findings = judge(look(recorded))
    assert problems(findings) == {"nvlink"}
    assert "no peer access between GPUs 0 and 1" in said(findings, "nvlink")


def test_memory_that_cannot_be_shared() -> None:
    assert problems(judge(look(Recorded(("XN", "NX"), shareable=0)))) == {"driver"}


def test_a_broken_fabric() -> None:
    facts = look(machines.BROKEN_FABRIC)
    assert facts.machine.gpus[0].fabric_error == "NVML says 999, unhealthy route"
    findings = judge(facts)
    assert healthy(findings), "the native engine needs no multicast"
    assert "fabric is not well: NVML says 999, unhealthy route" in said(findings, "multicast")


def test_a_fabric_that_is_starting() -> None:
    assert "not up (yet): in progress" in said(judge(look(machines.FABRIC_STARTING)), "multicast")


def test_nvml_alone_still_lists_the_gpus() -> None:
    recorded = Recorded(("XN", "NX"), driver_fails=True)
    facts = look(recorded)
    assert [gpu.name for gpu in facts.machine.gpus] == ["NVIDIA H200"] * 2
    assert [gpu.arch for gpu in facts.machine.gpus] == [90, 90]
    assert facts.machine.gpus[0].multicast_attribute is None
    assert facts.machine.pairs[0].nvlink == "nvlink"
    findings = judge(facts)
    assert healthy(findings)
    assert "which GPUs this process may use" in said(findings, "driver")
    assert worst(findings, "multicast") is Level.UNKNOWN


def test_the_driver_alone_still_lists_the_gpus() -> None:
    facts = look(Recorded(("XN", "NX"), nvml_fails=True))
    assert [gpu.arch for gpu in facts.machine.gpus] == [90, 90]
    assert facts.machine.pairs[0].nvlink == "unknown" and facts.machine.pairs[0].peer_access
    findings = judge(facts)
    assert healthy(findings) and worst(findings, "nvlink") is Level.UNKNOWN


def test_nvml_is_given_back() -> None:
    nvml = FakeNvml(machines.TWO_NV18)
    machine.gather(lambda: FakeDriver(machines.TWO_NV18), lambda: nvml)  # type: ignore[arg-type, return-value]
    assert nvml.open == 0


# Kernels and engine


def test_an_architecture_that_the_wheel_lacks() -> None:
    findings = judge(look(machines.PCIE))
    assert "sm89, for which this wheel has no machine code" in said(findings, "kernels")
    assert 'FLASHINFER_CUDA_ARCH_LIST="8.9"' in said(findings, "kernels")
    # Upstream's kernels, which need multicast, on GPUs that have none.
    assert "engine" in problems(findings)


def test_machine_code_of_sm100_runs_on_sm103() -> None:
    assert healthy(judge(look(machines.BLACKWELL_ULTRA)))


@pytest.mark.parametrize(
    ("asked", "recorded", "engine", "level"),
    [
        ("native", machines.TWO_NV18, "native", Level.OK),
        ("upstream", machines.TWO_NV18, "upstream", Level.NOTE),
        ("upstream", machines.BRIDGED, "upstream", Level.PROBLEM),
        ("native", machines.PCIE, "none", Level.PROBLEM),
    ],
)
def test_the_engine_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, asked: str, recorded: Recorded, engine: str, level: Level
) -> None:
    monkeypatch.setenv("FLASHINFER_MNNVL_ENGINE", asked)
    facts = look(recorded)
    findings = judge(facts)
    assert set(document.make(facts, findings, None).engines) == {engine}
    assert worst(findings, "engine") is level


def test_kernels_that_do_not_load() -> None:
    kernels = Kernels("lib.so", False, "OSError: libcudart.so.13", (), None)
    findings = judge(look(machines.TWO_NV18, installed(kernels=kernels)))
    assert problems(findings) == {"kernels", "engine"}


def test_the_engine_follows_the_workspaces_own_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor says what ``_Plan.engine`` would."""
    pytest.importorskip("torch")
    from flashinfer.elastic.allreduce import settings, workspace
    from flashinfer.elastic.doctor.check.findings import engine

    for asked in ("auto", "native", "upstream"):
        monkeypatch.setenv(settings.ENGINE, asked)
        for recorded in (machines.TWO_NV18, machines.PCIE, machines.BLACKWELL_ULTRA):
            facts = look(recorded)
            plan = object.__new__(workspace._Plan)
            plan.options = settings.read()
            plan.built_archs = facts.installation.kernels.archs
            gpu = facts.machine.gpus[0]
            assert gpu.arch is not None
            plan.arch = gpu.arch
            try:
                expected = plan.engine()
            except RuntimeError:
                expected = "none"
            assert engine(facts, gpu) == expected


# Memory


def test_what_a_workspace_takes() -> None:
    findings = judge(look(machines.EIGHT_SWITCHED), Group(8, 6144, 2, 42))
    assert "buffers of 4,128,768 bytes" in said(findings, "memory")
    assert "takes 8,388,608 bytes of each GPU" in said(findings, "memory")


def test_a_workspace_that_does_not_fit() -> None:
    recorded = Recorded(("XN", "NX"), free_bytes=2**20)
    assert problems(judge(look(recorded), Group(2, 6144, 2, 42))) == {"memory"}


def test_a_group_larger_than_the_machine() -> None:
    findings = judge(look(machines.TWO_NV18), Group(8, 6144, 2, 42))
    assert healthy(findings) and "8 GPUs were asked about and 2 are visible" in said(
        findings, "memory"
    )


# Installations


def test_upstream_missing() -> None:
    error = failing("ModuleNotFoundError: No module named 'flashinfer'", "flashinfer")
    made = installed(upstream=None, imports=error, registry={})
    findings = judge(look(machines.TWO_NV18, made))
    assert problems(findings) == {"install", "patch"}
    assert 'pip install "flashinfer-python>=0.6.12,<0.8"' in said(findings, "install")
    assert len([one for one in findings if one.topic == "patch"]) == 1, "said once for all modules"


def test_two_directories() -> None:
    made = installed(directory="/home/me/.local/site-packages", registry={})
    assert {one.applied for one in made.modules} == {Applied.UNTOUCHED}
    findings = judge(look(machines.TWO_NV18, made))
    assert problems(findings) == {"install", "patch"}
    assert "different directories" in said(findings, "install")
    assert "`import flashinfer` takes /site-packages/flashinfer/__init__.py" in said(
        findings, "patch"
    )


def test_an_upstream_that_is_not_tested() -> None:
    findings = judge(look(machines.TWO_NV18, installed(upstream="0.7.9")))
    assert healthy(findings) and "none of the tested releases" in said(findings, "install")


def test_a_patch_that_stepped_aside() -> None:
    registry = machines.probed()["registry"] | {
        "flashinfer.prefill": {"patched": False, "reason": "flashinfer.prefill has no gen_pod"}
    }
    findings = judge(look(machines.TWO_NV18, installed(upstream="0.7.9", registry=registry)))
    assert problems(findings) == {"patch"}
    assert "flashinfer.prefill: left as FlashInfer ships it, because flashinfer.prefill" in said(
        findings, "patch"
    )


def test_an_import_that_needs_a_gpu_is_not_held_against_a_machine_without() -> None:
    imports = machines.probed()["imports"] | {
        "flashinfer.comm.trtllm_mnnvl_ar": {"text": "OSError: no libcudart", "missing": None}
    }
    made = installed(imports=imports)
    assert healthy(judge(look(machines.NOTHING, made)))
    assert problems(judge(look(machines.TWO_NV18, made))) == {"patch"}


def test_an_import_that_lacks_a_package_is_a_problem_anywhere() -> None:
    error = failing("ModuleNotFoundError: No module named 'triton'", "triton")
    findings = judge(look(machines.NOTHING, installed(imports=error)))
    assert problems(findings) == {"patch"}
    assert "Install what provides 'triton'" in said(findings, "patch")


def test_requirements() -> None:
    lacking = (
        Requirement("nvidia-ml-py", None, False),
        Requirement("apache-tvm-ffi<0.2,>=0.1.9", "0.3.0", False),
        Requirement("torch", "2.11.0", None),
    )
    findings = judge(look(machines.TWO_NV18, installed(requirements=lacking)))
    assert problems(findings) == {"install"}
    text = said(findings, "install")
    assert "nvidia-ml-py, and it is not installed" in text and "0.3.0 is installed" in text


def test_without_upstream_that_is_said_once() -> None:
    made = installed(
        imports=failing("ModuleNotFoundError: no such file", "flashinfer.prefill"),
        registry={},
        upstream=None,
        requirements=(Requirement("flashinfer-python<0.8,>=0.6.12", None, False),),
    )
    findings = judge(look(machines.TWO_NV18, made))
    found = [finding for finding in findings if finding.level is Level.PROBLEM]
    assert [finding.topic for finding in found] == ["install", "patch"]
    assert "flashinfer-python is not installed" in found[0].text
    assert "not there without flashinfer-python" in found[1].text
    assert all("Install what provides" not in finding.remedy for finding in found)


def test_an_import_that_crashes() -> None:
    made = installed(
        imports={}, registry={}, crashed="was killed by signal 11, importing flashinfer"
    )
    findings = judge(look(machines.TWO_NV18, made))
    assert "killed by signal 11, importing flashinfer" in said(findings, "install")
    assert not healthy(findings)


# Settings


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("FLASHINFER_MNNVL_ENGINE", "fastest"),
        ("FLASHINFER_MNNVL_ONESHOT_MAX_MB", "-1"),
        ("FLASHINFER_MNNVL_TIMEOUT_S", "soon"),
        ("FLASHINFER_MNNVL_ALLOW_PCIE", "maybe"),
        ("FLASHINFER_ELASTIC_WORKSPACE_MAX_MB", "1 GB"),
    ],
)
def test_settings_that_are_not_valid(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    findings = judge(look(machines.TWO_NV18))
    assert problems(findings) == {"settings"}
    assert name in said(findings, "settings") and value in said(findings, "settings")


def test_settings_are_shown_and_those_nobody_reads_told_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FLASHINFER_MNNVL_TIMEOUT_S", "30")
    monkeypatch.setenv("FLASHINFER_MNNVL_TIME_OUT_S", "30")
    facts = look(machines.TWO_NV18)
    assert facts.environment.timeout_s == 30
    assert [(one.name, one.known) for one in facts.environment.settings] == [
        ("FLASHINFER_MNNVL_TIMEOUT_S", True),
        ("FLASHINFER_MNNVL_TIME_OUT_S", False),
    ]
    assert worst(judge(facts), "settings") is Level.NOTE


def test_attention_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHINFER_ELASTIC_WORKSPACE_MAX_MB", "512")
    assert "up to 536,870,912 bytes" in said(judge(look(machines.TWO_NV18)), "attention")
    monkeypatch.setenv("FLASHINFER_ELASTIC_WORKSPACE", "0")
    assert "switched off" in said(judge(look(machines.TWO_NV18)), "attention")


# The command

Check = Callable[..., Any]


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Check:
    """Return a function that runs the command on a recorded machine."""

    def run(
        recorded: Recorded, *arguments: str, made: Installation | None = None, width: int = 100
    ) -> Any:
        facts = look(recorded, made)
        monkeypatch.setattr(installation, "gather", lambda: facts.installation)
        monkeypatch.setattr(machine, "gather", lambda: facts.machine)
        return testing.CliRunner().invoke(
            cli.main, ["check", *arguments], env={"COLUMNS": str(width)}
        )

    return run


ALL = [
    machines.NOTHING,
    machines.ONE,
    machines.TWO_NV18,
    machines.EIGHT_SWITCHED,
    machines.BRIDGED,
    machines.PCIE,
    machines.BROKEN_FABRIC,
]


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("recorded", ALL)
def test_it_fits_the_terminal(check: Check, recorded: Recorded, width: int) -> None:
    result = check(recorded, width=width)
    assert max(map(len, result.output.splitlines())) <= width
    assert "\x1b" not in result.output
    assert result.exit_code == (1 if recorded is machines.PCIE else 0)


def test_the_matrix(check: Check) -> None:
    lines = check(machines.BRIDGED).output.splitlines()
    rows = [line.split() for line in lines if "NV12" in line]
    assert rows == [
        ["0", "-", "NV12", "SYS", "SYS"],
        ["1", "NV12", "-", "SYS", "SYS"],
        ["2", "SYS", "SYS", "-", "NV12"],
        ["3", "SYS", "SYS", "NV12", "-"],
    ]


def test_exit_codes(check: Check) -> None:
    assert check(machines.TWO_NV18).exit_code == 0
    assert check(machines.TWO_NV18, made=installed(upstream=None)).exit_code == 1
    assert check(machines.TWO_NV18, "--tp", "2").exit_code == 2
    assert check(machines.TWO_NV18, "--tp", "0").exit_code == 2


def conforms(value: Any, schema: dict[str, Any], at: str = "") -> None:
    """Check the part of JSON schema that :mod:`document` uses."""
    if "anyOf" in schema:
        errors = []
        for choice in schema["anyOf"]:
            try:
                return conforms(value, choice, at)
            except AssertionError as error:
                errors.append(str(error))
        raise AssertionError(f"{at}: {errors}")
    kinds = {
        "object": dict,
        "array": list,
        "string": str,
        "boolean": bool,
        "integer": int,
        "number": (int, float),
        "null": type(None),
    }
    assert isinstance(value, kinds[schema["type"]]), f"{at} is {value!r}"
    assert not isinstance(value, bool) or schema["type"] == "boolean", at
    assert "enum" not in schema or value in schema["enum"], at
    if schema["type"] == "object":
        assert set(schema["required"]) <= set(value) <= set(schema["properties"]), at
        for name, entry in value.items():
            conforms(entry, schema["properties"][name], f"{at}.{name}")
    if schema["type"] == "array":
        for number, entry in enumerate(value):
            conforms(entry, schema["items"], f"{at}[{number}]")
    return None


@pytest.mark.parametrize("recorded", ALL)
def test_json_conforms_to_its_schema(check: Check, recorded: Recorded) -> None:
    schema = json.loads(check(recorded, "--schema").output)
    result = check(recorded, "--json", "--tp", "8", "--hidden", "6144", "--max-tokens", "42")
    found = json.loads(result.output)
    conforms(found, schema)
    assert found["ok"] == (result.exit_code == 0)
    assert found["group"]["max_tokens"] == 42
    with pytest.raises(AssertionError):
        conforms(found | {"format": "1"}, schema)
    with pytest.raises(AssertionError):
        conforms({name: entry for name, entry in found.items() if name != "ok"}, schema)
