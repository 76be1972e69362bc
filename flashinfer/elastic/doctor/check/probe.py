"""Import FlashInfer and load the kernels; write down what happened.

Run as a program of its own, as ``python -c <this file> RESULT LIBRARY MODULE...``: an import that
crashes, or that depends on what is imported already, then shows as it does in a server. The result
is written after each step, so that a crash leaves what was known, and ``at`` says where it was.

Standard library only: everything else is what is being tested.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any


def main(result_file: str, library: str, names: list[str]) -> None:
    """Do all steps; keep ``result_file`` up to date."""
    if sys.path and sys.path[0] == "":
        del sys.path[0]  # -c puts the working directory there, a console script does not
    result: dict[str, Any] = {"at": "", "flashinfer_file": None, "imports": {}, "registry": {}}

    def save(step: str) -> None:
        result["at"] = step
        part = result_file + ".part"
        with open(part, "w") as file:
            json.dump(result, file)
        os.replace(part, result_file)

    for name in ("flashinfer", *names):
        save("importing " + name)
        error = None
        try:
            importlib.import_module(name)
        except BaseException as raised:
            error = {"text": _describe(raised), "missing": _missing(raised)}
        result["imports"][name] = error
    result["flashinfer_file"] = getattr(sys.modules.get("flashinfer"), "__file__", None)
    shadow = sys.modules.get("flashinfer.elastic.shadow")
    if shadow is not None:
        for name, record in shadow.registry().items():
            result["registry"][name] = {"patched": record.patched, "reason": record.reason}

    save("importing torch")
    try:
        torch = importlib.import_module("torch")
        result["torch"] = torch.__version__
        result["torch_cuda"] = torch.version.cuda
    except BaseException as raised:
        result["torch_error"] = _describe(raised)

    save("loading " + library)
    try:
        tvm_ffi = importlib.import_module("tvm_ffi")
        information = tvm_ffi.load_module(library).elastic_build_info()
        result["library"] = json.loads(str(information))
    except BaseException as raised:
        result["library_error"] = _describe(raised)
    save("")


def _describe(error: BaseException) -> str:
    """Return an error's type and the first line of its text."""
    lines = str(error).strip().splitlines()
    return type(error).__name__ + (": " + lines[0] if lines else "")


def _missing(error: BaseException) -> str | None:
    """Return the module that was not found, if that is the error or what led to it."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ModuleNotFoundError):
            return cause.name
        cause = cause.__cause__ or cause.__context__
    return None


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
