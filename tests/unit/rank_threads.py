"""Ranks that are threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


def run_threads(ranks: int, work: Callable[[int], Any]) -> list[Any]:
    """Call ``work(rank)`` on all ranks; return results, or what was raised, by rank."""
    results: list[Any] = [None] * ranks

    def one(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
