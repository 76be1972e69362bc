"""Print whether the shadow patched its module, and what was logged, as JSON."""

from __future__ import annotations

import importlib
import json
import logging

import cudart


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one message."""
        self.lines.append(f"{record.levelname} {record.getMessage()}")


def main() -> None:
    """Import FlashInfer's communication package with a handler on our logger."""
    cudart.load()
    handler = Lines()
    logging.getLogger("flashinfer.elastic").addHandler(handler)
    comm = importlib.import_module("flashinfer.comm")
    module = importlib.import_module("flashinfer.comm.trtllm_mnnvl_ar")
    from flashinfer.elastic import shadow

    record = shadow.registry()[module.__name__]
    # Of upstream's own class, the source of the constructor is upstream's file.
    constructor = module.MNNVLAllReduceFusionWorkspace.__init__.__code__.co_filename
    print(
        json.dumps(
            {
                "version": shadow.upstream_version(),
                "patched": record.patched,
                "reason": record.reason,
                "upstreams_own": constructor == module.__file__,
                "dispatch": comm.MNNVLAllReduceFusionWorkspace
                is module.MNNVLAllReduceFusionWorkspace,
                "logged": handler.lines,
            }
        )
    )


main()
