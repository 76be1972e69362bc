"""What elastic attention workspaces cost a call that fits: host time, with and without them.

Within one process, blocks of calls alternate between a wrapper on FlashInfer's compiled module and
one on the same module as the wheel hands it out, so that both see the same machine.

    python benchmarks/attention_overhead.py [--out FILE]

Needs one GPU, FlashInfer and the wheel.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

BLOCKS = 40
CALLS = {"plan": 50, "run": 200}


Calls = dict[str, Callable[[], Any]]


def plain_and_elastic() -> tuple[Calls, Calls]:
    """Return the calls of two decode wrappers, the first of which has upstream's module."""
    from flashinfer import decode

    elastic = decode.gen_batch_decode_module
    decode.gen_batch_decode_module = elastic.__wrapped__
    decode.get_batch_decode_module.cache_clear()
    plain_calls = decode_calls()
    decode.gen_batch_decode_module = elastic
    decode.get_batch_decode_module.cache_clear()
    return plain_calls, decode_calls()


def decode_calls() -> Calls:
    """Return the calls of a paged decode wrapper with an ample workspace."""
    import flashinfer

    batch, pages, page, heads, kv_heads, dim = 32, 64, 16, 64, 8, 128
    device = torch.device("cuda")
    buffer = torch.empty(256 << 20, dtype=torch.uint8, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(buffer, "NHD")
    indptr = torch.arange(batch + 1, dtype=torch.int32) * pages
    indices = torch.arange(batch * pages, dtype=torch.int32, device=device)
    last = torch.full((batch,), page, dtype=torch.int32)
    shape = (batch * pages, 2, page, kv_heads, dim)
    cache = torch.randn(shape, device=device, dtype=torch.bfloat16)
    query = torch.randn(batch, heads, dim, device=device, dtype=torch.bfloat16)

    def plan() -> None:
        wrapper.plan(indptr, indices, last, heads, kv_heads, dim, page, q_data_type=torch.bfloat16)

    plan()
    return {"plan": plan, "run": lambda: wrapper.run(query, cache)}


def block(function: Callable[[], Any], calls: int) -> float:
    """Return the median host time of a call in microseconds."""
    samples = []
    for _ in range(calls):
        torch.cuda.synchronize()
        start = time.perf_counter_ns()
        function()
        samples.append((time.perf_counter_ns() - start) / 1e3)
    return statistics.median(samples)


def measure() -> list[dict[str, Any]]:
    """Return a row for each call: both medians over the blocks, and their ratio's spread."""
    plain, elastic = plain_and_elastic()
    rows = []
    for name, calls in CALLS.items():
        plain_us, elastic_us = [], []
        for _ in range(BLOCKS):
            plain_us.append(block(plain[name], calls))
            elastic_us.append(block(elastic[name], calls))
        ratios = sorted(e / p for e, p in zip(elastic_us, plain_us, strict=True))
        rows.append(
            {
                "call": f"batch_decode.{name}",
                "plain_us": statistics.median(plain_us),
                "elastic_us": statistics.median(elastic_us),
                "ratio_median": statistics.median(ratios),
                "ratio_p10": ratios[len(ratios) // 10],
                "ratio_p90": ratios[len(ratios) * 9 // 10],
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the result as JSON")
    arguments = parser.parse_args()
    if arguments.out is not None and not arguments.out.absolute().parent.is_dir():
        parser.error(f"argument --out: there is no folder {arguments.out.absolute().parent}")
    if arguments.out is not None and arguments.out.is_dir():
        parser.error(f"argument --out: must name a file, got the folder {arguments.out}")
    if not torch.cuda.is_available():
        parser.error("it takes a GPU, found none")
    import flashinfer

    result = {
        "machine": torch.cuda.get_device_name(),
        "versions": {"flashinfer-python": flashinfer.__version__, "torch": torch.__version__},
        "command": "python benchmarks/attention_overhead.py",
        "rows": measure(),
    }
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
