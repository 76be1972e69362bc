#!/usr/bin/env python3
"""Fill the generated regions of README.md and docs/*.md.

    scripts/render_tables.py            rewrite them
    scripts/render_tables.py --check    exit with 1 where one is out of date, and change nothing

A region lies between two comments, ``<!-- begin: NAME -->`` and ``<!-- end: NAME -->``:

* ``comparison`` - from benchmarks/results/*.json, the measurements that compare with other
  implementations, CUDA-graph replays only;
* ``measurements`` - everything in those files;
* ``limits`` - this wheel's graph times as multiples of the limit;
* ``host`` - the host's time of an eager call;
* ``engines`` - from benchmarks/results/engines/*.json, whole vLLM engines;
* ``sizing`` - the sizing rule, applied to what vLLM reports.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

REPOSITORY = Path(__file__).resolve().parent.parent
RESULTS = Path("benchmarks", "results")
# Behind site-packages: an installed wheel comes first.
sys.path.append(str(REPOSITORY))

from flashinfer.elastic.allreduce import sizing  # noqa: E402

NOT_MEASURED = (
    "No measurement is recorded yet: `benchmarks/results/` is empty, so there is no number to show."
)

_REGION = re.compile(r"(<!-- begin: ([\w-]+) -->\n).*?(<!-- end: \2 -->)", re.DOTALL)

METHODS = {
    "native_auto": "this wheel",
    "native_oneshot": "its one-shot",
    "native_twoshot": "its two-shot",
    "trtllm_oneshot": "FlashInfer trtllm one-shot",
    "trtllm_twoshot": "FlashInfer trtllm two-shot",
    "vllm_custom_ar": "vLLM custom all-reduce + norm",
    "symm_mem_oneshot": "torch symm_mem one-shot + norm",
    "symm_mem_twoshot": "torch symm_mem two-shot + norm",
    "nccl": "NCCL + norm",
    "nccl_symm": "NCCL symmetric + norm",
    "limit": "limit",
}
"""Columns, in this order. Other methods follow under their own names."""

OURS = "native_auto"
LIMIT = "limit"


class Setting(NamedTuple):
    """What the rows of one table have in common."""

    world_size: int
    hidden: int
    dtype: str
    pattern: str
    mode: str


Table = dict[int, dict[str, float]]
"""Median microseconds by tokens and method."""


def load(file: Path) -> tuple[dict[str, Any], dict[Setting, Table]]:
    """Read one result file; return what it says of its origin, and its tables."""
    content = json.loads(file.read_text())
    tables: dict[Setting, Table] = {}
    for row in content["rows"]:
        setting = Setting(*(row[name] for name in Setting._fields))
        line = tables.setdefault(setting, {}).setdefault(row["tokens"], {})
        line[row["method"]] = row["median_us"]
    return content, tables


def is_peer(method: str) -> bool:
    """Return whether a method is somebody else's implementation."""
    return not method.startswith("native_") and method != LIMIT


def compares(table: Table) -> bool:
    """Return whether a table holds ours beside another implementation."""
    methods = {method for line in table.values() for method in line}
    return OURS in methods and any(map(is_peer, methods))


def draw(setting: Setting, table: Table) -> str:
    """Return one table in Markdown."""
    present = {method for line in table.values() for method in line}
    methods = [method for method in METHODS if method in present]
    methods += sorted(present - set(METHODS))
    head = ["tokens", *(METHODS.get(method, method) for method in methods)]
    if compares(table):
        head.append("times faster than the best other")
    rows = [_line(tokens, table[tokens], methods, compares(table)) for tokens in sorted(table)]
    title = (
        f"**{setting.pattern}**, {setting.world_size} GPUs, rows of {setting.hidden} "
        f"{setting.dtype}, {setting.mode}; microseconds a call, median:"
    )
    return f"{title}\n\n{_markdown(head, rows)}"


def _line(tokens: int, times: dict[str, float], methods: list[str], with_ratio: bool) -> list[str]:
    cells = [str(tokens)]
    cells += [f"{times[method]:.1f}" if method in times else "-" for method in methods]
    if with_ratio:
        peers = [time for method, time in times.items() if is_peer(method)]
        cells.append(f"{min(peers) / times[OURS]:.2f}" if peers and OURS in times else "-")
    return cells


def _markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["--:"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def comparison(root: Path) -> str:
    """Return the tables for README that compare with others, graph replays only."""
    return _measurements(
        root, "", lambda setting, table: setting.mode == "graph" and compares(table)
    )


def measurements(root: Path) -> str:
    """Return everything that was measured, for a page in docs/."""
    return _measurements(root, "../", lambda *_: True)


def limits(root: Path) -> str:
    """Return this wheel's graph times as multiples of the limit, a line for each width of rows."""
    lines: dict[tuple[str, Setting], dict[int, float]] = {}
    for file in sorted((root / RESULTS).glob("*.json")):
        for setting, table in load(file)[1].items():
            ratios = {
                tokens: times[OURS] / times[LIMIT]
                for tokens, times in table.items()
                if setting.mode == "graph" and OURS in times and LIMIT in times
            }
            if ratios:
                lines[file.name, setting] = ratios
    if not lines:
        return NOT_MEASURED
    sizes = sorted({tokens for ratios in lines.values() for tokens in ratios})
    rows = [
        [f"{setting.hidden} {setting.dtype}, {setting.world_size} GPUs"]
        + [f"{ratios[tokens]:.2f}" if tokens in ratios else "-" for tokens in sizes]
        for (_, setting), ratios in sorted(lines.items())
    ]
    return _markdown(["rows of \\ tokens", *map(str, sizes)], rows)


def host(root: Path) -> str:
    """Return the host's time of an eager call, from the outermost layer to the innermost."""
    rows = [
        [file.stem, cost["backend"], f"`{cost['layer']}`", f"{cost['median_us']:.1f}"]
        for file in sorted((root / RESULTS).glob("*.json"))
        for cost in json.loads(file.read_text()).get("host_cost", [])
    ]
    head = ["run", "backend", "call of", "us, median"]
    return _markdown(head, rows) if rows else NOT_MEASURED


ENGINES = {
    "off": "fusion off: vLLM's custom all-reduce, then the norm",
    "trtllm": "fused, FlashInfer's `trtllm`",
    "mnnvl": "fused, `mnnvl` with this wheel",
}
"""Modes of ``benchmarks/vllm_engine.py``, in the order of the table."""


def engines(root: Path) -> str:
    """Return the tokens a second of whole engines, a table for each file."""
    parts: list[str] = []
    for file in sorted((root / RESULTS / "engines").glob("*.json")):
        content = json.loads(file.read_text())
        settings, versions = content["settings"], content["versions"]
        parts.append(
            f"vLLM {versions['vllm']}, FlashInfer {versions['flashinfer-python']}, "
            f"{content['machine']}; a Llama of {settings['layers']} layers of "
            f"{settings['hidden']}, {settings['prompts']} prompts at a time, "
            f"{settings['tokens']} tokens each, {settings['rounds']} rounds in turn:"
        )
        parts.append(_engine_table(content["modes"], settings["prompts"]))
        if not content["modes"].get("off", {}).get("repeats_itself", True):
            parts.append("Fusion off gave other tokens from round to round: none were compared.")
    return "\n\n".join(parts) or NOT_MEASURED


def _engine_table(modes: dict[str, Any], prompts: int) -> str:
    off = modes.get("off", {})
    rows = []
    for mode, title in ENGINES.items():
        rates = modes.get(mode, {}).get("tokens_per_s", [])
        if len(rates) < 2:
            continue
        tenths = statistics.quantiles(rates, n=10, method="inclusive")
        same = modes[mode].get("prompts_as_off") if off.get("repeats_itself") else None
        rows.append(
            [
                title,
                f"{statistics.median(rates):,.0f}",
                f"{tenths[0]:,.0f} to {tenths[-1]:,.0f}",
                _ratio(rates, off.get("tokens_per_s")),
                _ratio(rates, modes.get("trtllm", {}).get("tokens_per_s")),
                "-" if same is None else f"{same} of {prompts}",
            ]
        )
    head = ["all-reduce", "tokens/s, median", "10% to 90% of rounds", "against off"]
    return _markdown([*head, "against trtllm", "prompts with the tokens of off"], rows)


def _ratio(rates: list[float], others: list[float] | None) -> str:
    if not others:
        return "-"
    return f"{statistics.median(rates) / statistics.median(others):.2f}"


def _measurements(root: Path, up: str, wanted: Callable[[Setting, Table], bool]) -> str:
    parts: list[str] = []
    for file in sorted((root / RESULTS).glob("*.json")):
        content, tables = load(file)
        chosen = [setting for setting in sorted(tables) if wanted(setting, tables[setting])]
        if not chosen:
            continue
        parts.append(_origin(content))
        plot = file.with_suffix(".svg")
        if plot.exists():
            parts.append(f"![Latency against tokens, {file.stem}]({up}{plot.relative_to(root)})")
        parts += [draw(setting, tables[setting]) for setting in chosen]
    return "\n\n".join(parts) or NOT_MEASURED


def _origin(content: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    return f"On {_describe(content['machine'])}; {versions}. Measured by `{content['command']}`."


def _describe(machine: Any) -> str:
    if isinstance(machine, dict):
        return ", ".join(f"{name} {value}" for name, value in machine.items())
    return str(machine)


class Caller(NamedTuple):
    """What vLLM 0.24 reports as its maximum, and up to where it forces one-shot, in MiB.

    Per rank: tokens x hidden x bytes of an element.
    """

    name: str
    ranks: int
    reported: float
    forced: float


CALLERS = (
    Caller("vLLM 0.24, SM90", 2, 64, 32),
    Caller("vLLM 0.24, SM90", 4, 2, 2),
    Caller("vLLM 0.24, SM90", 8, 0.5, 0.5),
    Caller("vLLM 0.24, SM100", 4, 32, 4),
    Caller("vLLM 0.24, SM100", 8, 1, 1),
    Caller("vLLM 0.24, SM103", 4, 64, 4),
    Caller("vLLM 0.24, SM103", 8, 2, 2),
)

_HIDDEN = 6144
_ELEMENT_BYTES = 2
_UPSTREAM_BUFFERS = 3
_UPSTREAM_ONESHOT_BYTES = 2**20
"""Upstream allocates for one-shot up to where its own heuristic prefers it."""


def upstream_bytes(tokens: int, hidden: int, element_bytes: int, ranks: int) -> int:
    """Return the bytes of a buffer that FlashInfer 0.6.x allocates for a maximum of tokens."""
    most = _UPSTREAM_ONESHOT_BYTES // sizing.oneshot_bytes(1, hidden, element_bytes, ranks)
    return max(
        sizing.oneshot_bytes(min(most, tokens), hidden, element_bytes, ranks),
        sizing.twoshot_bytes(tokens, hidden, element_bytes, ranks),
    )


def sizes(_: Path) -> str:
    """Return the sizing rule, applied to rows of 6144 bf16 elements."""
    head = [
        "caller",
        "GPUs",
        "reported tokens",
        "one-shot forced up to",
        "which needs",
        "upstream's buffer",
        "upstream",
        "our buffer",
        "memory a GPU, upstream",
        "ours",
    ]
    return _markdown(head, [_sizes_of(caller) for caller in CALLERS])


def _sizes_of(caller: Caller) -> list[str]:
    row = _HIDDEN * _ELEMENT_BYTES
    reported, forced = (int(mib * 2**20) // row for mib in (caller.reported, caller.forced))
    problem = (_HIDDEN, _ELEMENT_BYTES, caller.ranks)
    needed = sizing.oneshot_bytes(forced, *problem)
    theirs = upstream_bytes(reported, *problem)
    ours = sizing.buffer_bytes(reported, *problem)
    return [
        caller.name,
        str(caller.ranks),
        str(reported),
        str(forced),
        f"{needed:,}",
        f"{theirs:,}",
        "ValueError" if needed > theirs else "fits",
        f"{ours:,}",
        f"{_UPSTREAM_BUFFERS * theirs / 2**20:.1f} MiB",
        f"{sizing.LAMPORT_BUFFERS_NATIVE * ours / 2**20:.1f} MiB",
    ]


REGIONS: dict[str, Callable[[Path], str]] = {
    "comparison": comparison,
    "measurements": measurements,
    "limits": limits,
    "host": host,
    "engines": engines,
    "sizing": sizes,
}


def render(text: str, root: Path = REPOSITORY) -> str:
    """Return a page with its regions filled from what lies below ``root``.

    Raises
    ------
    KeyError
        If a region has a name that is not known.
    """
    return _REGION.sub(
        lambda match: f"{match[1]}{REGIONS[match[2]](root)}\n{match[3]}",
        text,
    )


def pages(root: Path = REPOSITORY) -> Iterator[Path]:
    """Give the pages that may have regions."""
    yield root / "README.md"
    yield from sorted((root / "docs").glob("*.md"))


def main(arguments: list[str] | None = None) -> int:
    """Do what the command line asks for; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing, only compare")
    check = parser.parse_args(arguments).check
    stale = False
    for page in pages():
        text = page.read_text()
        rendered = render(text)
        if rendered == text:
            continue
        stale = True
        print(f"{'out of date' if check else 'written'}: {page.relative_to(REPOSITORY)}")
        if not check:
            page.write_text(rendered)
    return int(check and stale)


if __name__ == "__main__":
    sys.exit(main())
