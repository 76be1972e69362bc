"""The whole engine of vLLM 0.24, small: with fused all-reduce on our workspace and without."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from vllm_parallel import needs

pytestmark = needs("0.24.", "0.6.13")


def test_engine_generates_the_tokens_of_fusion_off(repository: Path, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    script = repository / "benchmarks" / "vllm_engine.py"
    small = ["--modes", "off", "mnnvl", "--layers", "2", "--hidden", "2048", "--prompts", "8"]
    # Together less than this test's own, at which nobody would end the engines.
    limits = ["--rounds", "1", "--tokens", "32", "--start-limit", "400", "--round-limit", "40"]
    paths = ["--out", str(out), "--logs", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, str(script), *small, *limits, *paths],
        timeout=600,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(out.read_text())
    assert result["wrong"] == []
    ours = result["modes"]["mnnvl"]
    assert ours["prompts_as_off"] == 8 and ours["distinct_tokens"] > 8
