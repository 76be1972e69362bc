"""Print how the patched module behaves inside its FlashInfer, as JSON."""

from __future__ import annotations

import importlib
import inspect
import json
import pickle
import sys
from typing import Any

import cudart
import torch


def dispatch(comm: Any, workspace_class: type) -> bool:
    """Return whether upstream's ``allreduce_fusion`` takes a workspace of ours to our function."""
    workspace = workspace_class.__new__(workspace_class)
    workspace.__dict__["_destroyed"] = True  # Never constructed: its destructor has nothing to do.
    seen = []
    allreduce = importlib.import_module("flashinfer.comm.allreduce")
    ours = allreduce.trtllm_mnnvl_allreduce
    try:
        allreduce.trtllm_mnnvl_allreduce = lambda **arguments: seen.append(arguments["workspace"])
        tensor = torch.empty(2, 16)
        comm.allreduce_fusion(tensor, workspace, comm.AllReduceFusionPattern.kAllReduce)
    finally:
        allreduce.trtllm_mnnvl_allreduce = ours
    return seen == [workspace]


def main() -> None:
    """Import as a user does, and look."""
    cudart.load()
    comm = importlib.import_module("flashinfer.comm")
    module = importlib.import_module("flashinfer.comm.trtllm_mnnvl_ar")
    allreduce = importlib.import_module("flashinfer.comm.allreduce")
    from flashinfer.elastic import allreduce as elastic
    from flashinfer.elastic import shadow

    record = shadow.registry()[module.__name__]
    replaced = [
        name for name in (elastic.WORKSPACE, *elastic.ENTRY_POINTS) if hasattr(module, name)
    ]
    workspace_class = getattr(module, elastic.WORKSPACE)
    upstream_class = elastic.upstream_original(elastic.WORKSPACE)
    strategies = module.MNNVLAllreduceFusionStrategy
    threshold = module.MNNVL_ONE_SHOT_THRESHOLD
    module.MNNVL_ONE_SHOT_THRESHOLD = -1
    moved = strategies.select_strategy(8, 1, 16, torch.bfloat16)
    module.MNNVL_ONE_SHOT_THRESHOLD = threshold
    print(
        json.dumps(
            {
                "version": shadow.upstream_version(),
                "patched": record.patched,
                "reason": record.reason,
                "file": module.__file__,
                "in_place": module is sys.modules[module.__name__] is comm.trtllm_mnnvl_ar,
                "replaced": replaced,
                "differ": [
                    name
                    for name in replaced
                    if getattr(module, name) is not elastic.upstream_original(name)
                ],
                "is_a_subclass": issubclass(workspace_class, upstream_class),
                "seen_by_allreduce": [
                    name
                    for name in replaced
                    if getattr(allreduce, name, None) is getattr(module, name)
                ],
                "dispatches": dispatch(comm, workspace_class),
                "pickles": [
                    name
                    for name in replaced
                    if pickle.loads(pickle.dumps(getattr(module, name))) is getattr(module, name)
                ],
                "getmodule": [
                    name for name in replaced if inspect.getmodule(getattr(module, name)) is module
                ],
                "same_signature": [
                    name
                    for name in replaced
                    if inspect.signature(getattr(module, name))
                    == inspect.signature(elastic.upstream_original(name))
                ],
                "strategy_moved": moved.name,
                "cuda_initialized": torch.cuda.is_initialized(),
            }
        )
    )


main()
