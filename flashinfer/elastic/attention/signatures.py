"""Where the workspaces stand among the arguments of upstream's compiled functions.

Compiled functions take positional arguments only and say nothing of their names, so the positions
are written down here. The contract tests read them off the C++ sources of every supported
version. A function is described by its name, and where versions differ by its number of arguments
too; a call that matches no description is left alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

PLANS = frozenset({"plan", "plan_with_staged_workspace_bytes"})
"""Functions that take (float workspace, integer workspace, its page-locked twin, ...)."""

RUNS: dict[str, tuple[int, ...]] = {
    "run": (0, 1),
    "ragged_run": (0, 1),
    "paged_run": (0, 1),
}
"""Functions that use what ``plan`` carved: positions of their float and integer workspaces."""

POD_RUNS: dict[str, tuple[int, ...]] = {
    "pod_with_kv_cache_tensor": (15, 16),
    "batch_pod_with_kv_cache_tensor": (0, 1, 22, 23),
}
"""The same for the modules that run prefill and decode in one kernel."""


class Launch(NamedTuple):
    """A function that is given a workspace and its size and carves it while launching.

    Attributes
    ----------
    workspace, size : int
        Positions of the buffer and of its size in bytes.
    counters : int or None
        Position of the separate counter buffer, which 0.7.x has.
    query : int or None
        Position of the query, ``[tokens, heads, head_dim]``; None if the call cannot be sized
        beforehand, and then the remaining positions are not given either.
    max_query, batch, multiprocessors : int
        Positions of the longest query, the number of requests and the number of SMs.
    lse : int or None
        Position of the log-sum-exp output, which may be None in a call; None if there is none.
    counter_slab : bool
        Whether the workspace begins with 0.6.x's 8 MiB of counters.
    splits : bool
        Whether the keys may be split over CTAs, and partial results go to scratch.
    tramples : bool
        Whether statistics are stored where other launches of 0.6.x have their counters.
    """

    workspace: int
    size: int
    counters: int | None = None
    query: int | None = None
    max_query: int = -1
    batch: int = -1
    multiprocessors: int = -1
    lse: int | None = None
    counter_slab: bool = False
    splits: bool = False
    tramples: bool = False


# fmt: off
TRTLLM_GEN: dict[str, dict[int, Launch]] = {
    "trtllm_paged_attention_decode": {
        30: Launch(5, 20, None, 2, 8, 15, 18, 27, counter_slab=True, splits=True),
        36: Launch(5, 21, 6, 2, 9, 16, 19, 28, splits=True),
    },
    "trtllm_paged_attention_context": {
        31: Launch(5, 21, None, 2, 8, 15, 19, 28, tramples=True),
        35: Launch(5, 22, 6, 2, 9, 16, 20, 31),
        38: Launch(5, 25, 6, 2, 9, 16, 23, 34),
    },
    "trtllm_ragged_attention": {
        30: Launch(4, 18, None, 1, 6, 11, 15, 21, counter_slab=True, splits=True),
        32: Launch(4, 18, None, 1, 6, 11, 15, 21),
    },
    "trtllm_paged_attention_decode_sparse_mla_dsv4": {
        17: Launch(4, 14, None, 1, 11, 10, 12, None, counter_slab=True, splits=True),
        22: Launch(4, 17, 5, 1, 14, 13, 15, None, splits=True),
    },
}
"""trtllm-gen's launchers, by name and number of arguments. The output is argument 0 of each."""
# fmt: on

FMHA_V2: dict[str, dict[int, Launch]] = {"run": {26: Launch(4, 5)}}
"""The launcher of ``trtllm_fmha_v2_prefill``; the allocator checks everything it takes."""


@dataclass(frozen=True)
class Family:
    """What the modules of one generator have.

    Attributes
    ----------
    label : str
        What to call them in logs and reports.
    plans : frozenset of str
        Their planning functions.
    runs : dict
        Their functions that use a plan.
    launches : dict
        Their functions that carve and launch at once.
    """

    label: str
    plans: frozenset[str] = frozenset()
    runs: dict[str, tuple[int, ...]] = field(default_factory=dict)
    launches: dict[str, dict[int, Launch]] = field(default_factory=dict)


_PREFILL = Family("batch_prefill", PLANS, RUNS)
_DECODE = Family("batch_decode", PLANS, RUNS)
_HOLISTIC = Family("batch_attention", PLANS, RUNS)

GENERATORS: dict[str, Family] = {
    "gen_batch_prefill_module": _PREFILL,
    "gen_customize_batch_prefill_module": _PREFILL,
    "_gen_batch_prefill_primary_module": _PREFILL,
    "_gen_batch_prefill_independent_paged_module": _PREFILL,
    "gen_batch_decode_module": _DECODE,
    "gen_customize_batch_decode_module": _DECODE,
    "gen_batch_decode_mla_module": Family("batch_decode_mla", PLANS, RUNS),
    "gen_batch_mla_module": Family("batch_mla", PLANS, RUNS),
    "gen_batch_attention_module": _HOLISTIC,
    "_gen_batch_attention_primary_module": _HOLISTIC,
    "_gen_batch_attention_independent_module": _HOLISTIC,
    "gen_pod_module": Family("pod", runs=POD_RUNS),
    "gen_batch_pod_module": Family("batch_pod", runs=POD_RUNS),
    "gen_trtllm_gen_fmha_module": Family("trtllm_gen", launches=TRTLLM_GEN),
    "gen_fmha_v2_module": Family("trtllm_fmha_v2", launches=FMHA_V2),
}
"""The generators whose modules are wrapped, under the names by which upstream's getters call them.

All of upstream's getters end in ``gen_…(…).build_and_load()``, with the generator looked up in the
namespace of the getter, so replacing that name covers whoever has the getter, under any name.
"""

EXEMPT_GENERATORS: dict[str, str] = {
    "gen_single_decode_module": "its scratch is upstream's own, allocated per call",
    "gen_single_prefill_module": "its scratch is upstream's own, allocated per call",
    "gen_fmha_cutlass_sm100a_module": "takes no bytes of its workspace, nothing can overflow",
    "gen_trtllm_fmha_v2_sm120_module": "takes no workspace",
    "gen_eagle_verify_fp8kv_sm90_module": "its workspace is upstream's own, sized by upstream",
    "gen_mla_module": "CUTLASS MLA carves no allocator; its size is a documented requirement",
    "gen_cascade_module": "merges states, takes no workspace",
    "gen_tuning_buckets": "not a module",
    "gen_customize_batch_decode": "not a name, part of a comment",
}
"""Generators that the same files use and that are left alone, and why."""
