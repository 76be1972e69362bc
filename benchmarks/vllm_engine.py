#!/usr/bin/env python3
"""Compare whole vLLM 0.24 engines: fused all-reduce off, on upstream's trtllm, on our mnnvl.

    benchmarks/vllm_engine.py [--modes off trtllm mnnvl] [--out FILE]

An offline engine per mode, tensor parallel over two GPUs, with a randomly initialised Llama and
greedy decoding. The engines start together, each in a process of its own; then they generate in
turn, one at a time, round after round. Prints a table and writes a JSON file. Exits with 0 only if
every mode started, generated in time, and gave the tokens of fusion off in every round.

In mode ``mnnvl`` FlashInfer's just-in-time compiler is switched off: nothing there needs it. vLLM
also asks for a trtllm workspace for its quantised patterns; that one is refused then, with a
warning of vLLM's. Multicast is tried only where ``FLASHINFER_MNNVL_MULTICAST`` is set. In mode
``trtllm`` the compiler runs, for minutes, unless ``--jit-cache`` names a folder that holds a
``flashinfer_jit_cache`` package.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import engine_under_test

MODES = {"off": None, "trtllm": "trtllm", "mnnvl": "mnnvl"}
"""Modes, and the value of VLLM_FLASHINFER_ALLREDUCE_BACKEND; None leaves fusion off."""

RANKS = 2
CAPTURED = (1, 2, 4, 8, 16, 24, 32, 40, 64)
COMMUNICATION_MODULES = ("trtllm_comm", "vllm_comm", "mnnvl")
"""Parts of the names under which FlashInfer compiles its all-reduce kernels."""
OUR_LIBRARY = "libflashinfer_elastic.so"

COMMAND_LINE_ONLY = ("jit_cache", "logs", "out", "start_limit", "round_limit")
"""Options that say nothing about the numbers, and stay out of the result file."""


class EngineError(RuntimeError):
    """An engine did not start, did not answer in time, or died."""


class Engine:
    """One engine's process and its answers.

    Parameters
    ----------
    mode : str
        One of ``MODES``.
    folder : Path
        Where its log and caches go.
    spec : dict
        What ``engine_under_test`` reads.
    jit_cache : Path, optional
        Put on the path in mode ``trtllm``.
    """

    def __init__(
        self, mode: str, folder: Path, spec: dict[str, Any], jit_cache: Path | None
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / "log.txt"
        self._answers, writer = os.pipe()
        self._buffer = b""
        command = [sys.executable, engine_under_test.__file__, json.dumps(spec), str(writer)]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                env=_environment(mode, folder, jit_cache),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(writer,),
                start_new_session=True,
            )
        os.close(writer)

    def answer(self, deadline: float) -> dict[str, Any]:
        """Wait for the next answer.

        Raises
        ------
        EngineError
            When the process ends first or ``time.monotonic()`` passes ``deadline``.
        """
        while b"\n" not in self._buffer:
            ready, _, _ = select.select(
                [self._answers], [], [], max(0, deadline - time.monotonic())
            )
            if not ready:
                raise EngineError("no answer in time")
            read = os.read(self._answers, 1 << 16)
            if not read:
                raise EngineError(f"the engine ended; see {self.log}")
            self._buffer += read
        line, self._buffer = self._buffer.split(b"\n", 1)
        found: dict[str, Any] = json.loads(line)
        return found

    def generate(self, deadline: float) -> dict[str, Any]:
        """Let it generate once and wait for the outcome."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(b"go\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise EngineError(f"the engine ended; see {self.log}") from None
        return self.answer(deadline)

    def close(self) -> None:
        """End it, with all processes that it started."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._answers)


def _environment(mode: str, folder: Path, jit_cache: Path | None) -> dict[str, str]:
    """Return an engine's environment: caches of its own, and nothing that asks a network."""
    # Multicast of ours only where it is asked for; vLLM's own, below, never.
    found = {"FLASHINFER_MNNVL_MULTICAST": "0"} | os.environ
    found |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # For the look at the workers.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_CACHE_ROOT": str(folder / "vllm"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "FLASHINFER_WORKSPACE_BASE": str(folder / "flashinfer"),
    }
    backend = MODES[mode]
    if backend is not None:
        found["VLLM_FLASHINFER_ALLREDUCE_BACKEND"] = backend
    if mode == "trtllm" and jit_cache is not None:
        path = [str(jit_cache.resolve()), found.get("PYTHONPATH", "")]
        found["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    if mode != "trtllm" or jit_cache is not None:
        found["FLASHINFER_DISABLE_JIT"] = "1"
    return found


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Start the engines, let them generate in turn, and return the result by mode."""
    model = folder / "model"
    engine_under_test.write_model(model, hidden=options.hidden, layers=options.layers)
    spec = {
        "model": str(model),
        "ranks": RANKS,
        "captured": list(CAPTURED),
        "batched_tokens": options.batched_tokens,
        "prompts": options.prompts,
        "tokens": options.tokens,
        "seed": 1,
    }
    result: dict[str, Any] = {mode: {} for mode in options.modes}
    outputs: dict[str, list[list[int]]] = {}
    engines: dict[str, Engine] = {}

    def lost(mode: str, error: EngineError) -> None:
        result[mode]["error"] = str(error)
        engines.pop(mode).close()

    try:
        deadline = time.monotonic() + options.start_limit
        for mode in options.modes:
            fused = {"fused": MODES[mode] is not None}
            engines[mode] = Engine(mode, options.logs / mode, spec | fused, options.jit_cache)
        for mode, engine in list(engines.items()):
            try:
                result[mode] |= engine.answer(deadline)
                print(f"{mode}: started in {result[mode]['start_s']} s", flush=True)
            except EngineError as error:
                lost(mode, error)
        for _ in range(options.rounds):
            for mode, engine in list(engines.items()):
                try:
                    got = engine.generate(time.monotonic() + options.round_limit)
                except EngineError as error:
                    lost(mode, error)
                    continue
                count = sum(map(len, got["tokens"]))
                result[mode].setdefault("tokens_per_s", []).append(count / got["seconds"])
                result[mode].setdefault("repeats_itself", True)
                result[mode]["repeats_itself"] &= (
                    outputs.setdefault(mode, got["tokens"]) == (got["tokens"])
                )
    finally:
        for engine in engines.values():
            engine.close()
    for mode, tokens in outputs.items():
        result[mode]["distinct_tokens"] = len({token for row in tokens for token in row})
        if "off" in outputs:
            pairs = zip(tokens, outputs["off"], strict=True)
            result[mode]["prompts_as_off"] = sum(a == b for a, b in pairs)
    return result


def judge(result: dict[str, Any], prompts: int) -> list[str]:
    """Return what is wrong with the outcome; nothing if every mode did what it should."""
    wrong = [f"{mode}: {found['error']}" for mode, found in result.items() if "error" in found]
    for mode, found in result.items():
        same = found.get("prompts_as_off", prompts)
        if same != prompts:
            wrong.append(f"{mode}: {prompts - same} of {prompts} prompts differ from fusion off")
        if not found.get("repeats_itself", True):
            wrong.append(f"{mode}: a later round gave other tokens than the first")
        backend = MODES[mode]
        workers = found.get("workers", ())
        if "error" not in found and len(workers) != RANKS:
            wrong.append(f"{mode}: {len(workers)} workers answered, not {RANKS}")
        for worker in workers:
            where = f"{mode}, rank {worker['rank']}"
            workspace = worker["workspace"] or {"backend": None}
            if workspace["backend"] != backend:
                wrong.append(f"{where}: the workspace is {workspace['backend']}, not {backend}")
            compiled = [
                name
                for name in worker["libraries"]
                if any(module in name for module in COMMUNICATION_MODULES)
            ]
            if mode == "mnnvl" and compiled:
                wrong.append(f"{where}: loaded upstream's {', '.join(compiled)}")
            if mode == "mnnvl" and OUR_LIBRARY not in worker["libraries"]:
                wrong.append(f"{where}: did not load {OUR_LIBRARY}")
    return wrong


def speeds(result: dict[str, Any]) -> dict[str, float]:
    """Return the median tokens per second of each mode that generated."""
    return {
        mode: statistics.median(found["tokens_per_s"])
        for mode, found in result.items()
        if found.get("tokens_per_s")
    }


def show(result: dict[str, Any]) -> None:
    """Print the table."""
    print(
        f"\n{'mode':<8}{'start':>8}{'tokens/s':>10}{'against off':>13}{'as off':>8}{'distinct':>10}"
    )
    speed = speeds(result)
    for mode, found in result.items():
        if mode not in speed:
            print(f"{mode:<8}  {found.get('error', 'nothing')}")
            continue
        against = f"{speed[mode] / speed['off']:.2f}x" if "off" in speed else "-"
        print(
            f"{mode:<8}{found['start_s']:>7}s{speed[mode]:>10.0f}{against:>13}"
            f"{found.get('prompts_as_off', '-'):>8}{found['distinct_tokens']:>10}"
        )
    if {"trtllm", "mnnvl"} <= speed.keys():
        print(f"mnnvl against trtllm: {speed['mnnvl'] / speed['trtllm']:.3f}x")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options; exits where they are wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--modes", nargs="+", choices=MODES, default=list(MODES), help="engines to compare"
    )
    parser.add_argument("--hidden", type=int, default=6144, help="a multiple of 256")
    parser.add_argument("--layers", type=int, default=4, help="of the model")
    parser.add_argument("--prompts", type=int, default=40, help="in a round, all at a time")
    parser.add_argument("--tokens", type=int, default=128, help="generated for each prompt")
    parser.add_argument("--batched-tokens", type=int, default=4096, help="of a forward pass")
    parser.add_argument("--rounds", type=int, default=25, help="of a fraction of a second each")
    parser.add_argument("--start-limit", type=float, default=900, metavar="S", help="for all")
    parser.add_argument("--round-limit", type=float, default=120, metavar="S", help="for each")
    parser.add_argument("--jit-cache", type=Path, metavar="DIR", help="for mode trtllm")
    parser.add_argument("--logs", type=Path, help="default: a new temporary folder")
    parser.add_argument("--out", type=Path, help="JSON file; by default none is written")
    options = parser.parse_args(arguments)
    if options.out is not None and options.out.is_dir():
        parser.error(f"argument --out: must name a file, got the folder {options.out}")
    for name in ("hidden", "layers", "prompts", "tokens", "batched_tokens", "rounds"):
        if getattr(options, name) < 1:
            flag = "--" + name.replace("_", "-")
            parser.error(f"argument {flag}: must be positive, got {getattr(options, name)}")
    if options.hidden % 256:
        parser.error(f"argument --hidden: must be a multiple of 256, got {options.hidden}")
    if options.jit_cache is not None and not (options.jit_cache / "flashinfer_jit_cache").is_dir():
        parser.error(f"argument --jit-cache: {options.jit_cache} has no flashinfer_jit_cache")
    missing = [name for name in ("torch", "vllm", "safetensors") if find_spec(name) is None]
    if missing:
        parser.error(f"not installed: {', '.join(missing)}")
    return options


def describe(options: argparse.Namespace, result: dict[str, Any], wrong: list[str]) -> Any:
    """Return what the result file has: where, with what, how, and what came out."""
    from flashinfer.elastic.doctor.bench import machine

    versions = [found.pop("versions") for found in result.values() if "versions" in found]
    settings = {
        name: value for name, value in vars(options).items() if name not in COMMAND_LINE_ONLY
    }
    return {
        "machine": machine.describe(RANKS),
        "versions": versions[0] if versions else {},
        "settings": settings,
        "median_tokens_per_s": speeds(result),
        "modes": result,
        "wrong": wrong,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line asks for; return the exit code."""
    options = parse(arguments)
    # So that the engines, which have sessions of their own, are ended with this process.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="vllm-engine-") as folder:
        if options.logs is None:
            options.logs = Path(tempfile.mkdtemp(prefix="vllm-engine-logs-"))
        print(f"logs: {options.logs}", flush=True)
        result = measure(options, Path(folder))
    wrong = judge(result, options.prompts)
    if options.out is not None:
        document = describe(options, result, wrong)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(document, indent=1) + "\n")
    show(result)
    for line in wrong:
        print(line)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
