"""What each shadowed module of upstream's attention gets.

Every function here is given one of upstream's modules when it has just run, checks that it has
what is to be replaced, and replaces it; see :mod:`flashinfer.elastic.shadow`.

Three things are replaced, all by name in the namespace in which upstream looks them up:

* the generators of compiled modules, so that the modules grow their workspaces;
* the check of the separate counter buffer that callers of FlashInfer 0.7.x may pass;
* the constructors of the wrapper classes that own an integer workspace, to note the instances.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

from flashinfer.elastic import shadow

from . import modules, overflow, pool, settings, wrappers
from .signatures import GENERATORS

_COUNTER_CHECK = "_resolve_trtllm_gen_multi_ctas_kv_counter_buffer"


def prefill(module: ModuleType) -> None:
    """Patch ``flashinfer.prefill``."""
    _patch(
        module,
        generators=[
            "gen_batch_prefill_module",
            "gen_customize_batch_prefill_module",
            "gen_trtllm_gen_fmha_module",
            "gen_fmha_v2_module",
        ],
        classes=["BatchPrefillWithPagedKVCacheWrapper", "BatchPrefillWithRaggedKVCacheWrapper"],
    )


def decode(module: ModuleType) -> None:
    """Patch ``flashinfer.decode``."""
    _patch(
        module,
        generators=[
            "gen_batch_decode_module",
            "gen_customize_batch_decode_module",
            "gen_customize_batch_prefill_module",
            "gen_trtllm_gen_fmha_module",
        ],
        classes=["BatchDecodeWithPagedKVCacheWrapper"],
        optional_classes=["BatchDecodeMlaWithPagedKVCacheWrapper"],  # 0.6.x
    )


def sparse(module: ModuleType) -> None:
    """Patch ``flashinfer.sparse``, whose modules come from prefill's and decode's getters."""
    _patch(
        module,
        generators=[],
        classes=["BlockSparseAttentionWrapper", "VariableBlockSparseAttentionWrapper"],
    )


def pod(module: ModuleType) -> None:
    """Patch ``flashinfer.pod``."""
    _patch(
        module,
        generators=["gen_pod_module", "gen_batch_pod_module"],
        classes=["PODWithPagedKVCacheWrapper", "BatchPODWithPagedKVCacheWrapper"],
    )


def attention(module: ModuleType) -> None:
    """Patch ``flashinfer.attention._core``."""
    _patch(module, generators=["gen_batch_attention_module"], classes=["BatchAttention"])


def mla(module: ModuleType) -> None:
    """Patch ``flashinfer.mla._core`` and, in FlashInfer 0.7.x, the backends it has loaded.

    0.7.x moved the wrapper to ``mla._batch_mla``, a package that 0.6.x lacks. A shadow in there
    would make it importable in 0.6.x, so its modules are patched from here; ``flashinfer.mla``
    runs ``_core`` before anybody gets at them.
    """
    if hasattr(module, "gen_batch_mla_module"):
        _patch(
            module,
            generators=["gen_batch_mla_module", "gen_trtllm_gen_fmha_module"],
            classes=["BatchMLAPagedAttentionWrapper"],
        )
        return
    backends = f"{module.__package__}._batch_mla._backends"
    try:
        generated = importlib.import_module(f"{backends}._fa_common")
        trtllm_gen = importlib.import_module(f"{backends}.trtllm_gen_backend")
    except ImportError as error:
        raise shadow.ContractError(f"{module.__name__} has no MLA backends: {error}") from error
    shadow.check_attributes(module, ["get_trtllm_gen_fmha_module", _COUNTER_CHECK])
    shadow.check_attributes(generated, ["gen_batch_mla_module", "_BatchMLAGeneratedFaMechanics"])
    shadow.check_attributes(trtllm_gen, ["gen_trtllm_gen_fmha_module"])
    if not settings.enabled():
        return
    _replace_generators(module)
    _replace_counter_check(module)
    for backend in (generated, trtllm_gen):
        _replace_generators(backend)
    wrappers.observe(generated._BatchMLAGeneratedFaMechanics)
    _replace_preflight(generated)


def _patch(
    module: ModuleType,
    *,
    generators: Iterable[str],
    classes: Iterable[str],
    optional_classes: Iterable[str] = (),
) -> None:
    """Replace what there is to replace in a module that must have certain names."""
    classes = list(classes)
    shadow.check_attributes(module, [*generators, *classes])
    if not settings.enabled():
        return
    _replace_generators(module)
    _replace_counter_check(module)
    for name in [*classes, *optional_classes]:
        cls = getattr(module, name, None)
        if cls is not None:
            wrappers.observe(cls)


def _replace_generators(module: ModuleType) -> None:
    """Wrap every generator that a module has, also those that only some versions have."""
    for name, family in GENERATORS.items():
        original = vars(module).get(name)
        if original is not None:
            setattr(module, name, modules.generator(original, family))


def _replace_counter_check(module: ModuleType) -> None:
    """Have a caller's counter buffer that is too small grow instead of being refused."""
    original: Callable[..., Any] | None = vars(module).get(_COUNTER_CHECK)
    if original is None:
        return  # 0.6.x keeps the counters in the workspace

    @functools.wraps(original)
    def resolve(counter_buffer: Any, *args: Any, **kwargs: Any) -> Any:
        if counter_buffer is not None and pool.grown:
            counter_buffer = pool.replacement(counter_buffer)
        try:
            return original(counter_buffer, *args, **kwargs)
        except ValueError as error:
            needed = overflow.counter_bytes(error)
            if needed is None or counter_buffer is None:
                raise
        larger = pool.grow(
            counter_buffer,
            needed,
            kind="counters",
            call=f"{module.__name__}.{_COUNTER_CHECK}",
            allocation_name="trtllm_gen_counters",
        )
        return original(larger.data, *args, **kwargs)

    setattr(module, _COUNTER_CHECK, resolve)


def _replace_preflight(module: ModuleType) -> None:
    """Have 0.7.x's MLA judge a plan by the workspace that the plan will get.

    From 0.7.4 on it refuses a plan beforehand whose float workspace is too small.
    """
    name = "preflight_plan_from_wrapper"
    for cls in [value for value in vars(module).values() if isinstance(value, type)]:
        if isinstance(vars(cls).get(name), classmethod):
            setattr(cls, name, classmethod(_preflight(vars(cls)[name].__func__)))


def _preflight(original: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """Wrap a preflight check of a class and the arguments of a plan."""

    @functools.wraps(original)
    def preflight(cls: Any, args: Any) -> None:
        if pool.grown:
            args = _with_workspace(args, pool.replacement(args._float_workspace_buffer))
        try:
            return original(cls, args)
        except Exception as error:
            needed = overflow.preflight_bytes(error)
            if needed is None:
                raise
        larger = pool.grow(
            args._float_workspace_buffer,
            needed,
            kind="float",
            call="batch_mla.plan",
            allocation_name="mla_partial_o and mla_partial_lse",
        )
        return original(cls, _with_workspace(args, larger.data))

    return preflight


def _with_workspace(args: Any, workspace: Any) -> Any:
    """Return a plan's arguments with another float workspace."""
    if workspace is args._float_workspace_buffer:
        return args
    return dataclasses.replace(args, _float_workspace_buffer=workspace)
