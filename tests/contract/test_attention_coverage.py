"""What is covered of each upstream and what is not: found in its sources, compared with the docs.

``docs/attention.md`` has two tables that are generated from what is found here. To write them
anew::

    python tests/contract/test_attention_coverage.py <directory of upstream's wheels>
"""

from __future__ import annotations

import ast
import functools
import re
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flashinfer.elastic.attention import overflow, patches, signatures
from flashinfer.elastic.shadow import TESTED_VERSIONS

DOCS = Path(__file__).resolve().parent.parent.parent / "docs" / "attention.md"
YES = "covered"

# What carves a workspace with AlignedAllocator, by file.
ALLOCATOR_USERS = {
    "include/flashinfer/allocator.h": "the allocator itself",
    "include/flashinfer/attention/scheduler.cuh": YES,
    "csrc/trtllm_fmha_kernel_launcher.cu": YES,
    "csrc/fmha_v2_run.cu": YES,
    "include/flashinfer/attention/blackwell/fmha_cutlass_sm100.cuh": (
        "takes as much as it says there is: cannot overflow"
    ),
    "include/flashinfer/sampling.cuh": "sampling; a buffer of FlashInfer's own",
    "include/flashinfer/gemm/": "GEMM; a buffer of FlashInfer's own",
}

# Which entry points of attention take a workspace, by module and name; the first match counts.
LAYOUT = "no AlignedAllocator: a layout and a size of its own"
CHECKED = LAYOUT + "; refuses a short workspace and says what it needs"
ENTRY_POINTS: list[tuple[str, str]] = [
    (r"cascade\.", YES),
    (r"attention\._core\.", YES),
    (r"decode\.(BatchDecode|CUDAGraph)", YES),
    (r"(decode|prefill|mla\._core)\.trtllm_\w+$", YES),
    (r"mla\.(_core|_batch_mla\._wrapper)\.BatchMLAPagedAttentionWrapper", YES),
    (r"mla\._core\.TrtllmGenMlaDecodeRunner", YES),
    (r"(pod|sparse)\.\w+Wrapper", YES),
    (r"prefill\.Batch\w+Wrapper", YES),
    (r"cute_dsl\.attention\.wrappers\.batch_(mla|hca)\.", CHECKED),
    (r"mla\.(cake_dsv4|cake_kimi_k3_mla|_swa)\.", CHECKED),
    (r"attention\.prims_ts\.|cudnn\.|cute_dsl\.|decode\.|mla\.|msa_ops\.", LAYOUT),
    (r"prefill\.|sm110_xqa\.|sparse_mqa\.|xqa\.", LAYOUT),
]
MODULES = re.compile(
    r"attention\.|cascade\.|cudnn\.|cute_dsl\.attention\.|decode\.|mla\.|msa_ops\.|pod\.|prefill\."
    r"|sm110_xqa\.|sparse\.|sparse_mqa\.|xqa\."
)
WORKSPACE = re.compile(r"workspace(_buffer)?$|multi_ctas_kv_counter_buffer$")


def allocator_users(wheel: Path) -> dict[str, int]:
    """Return how often each C++ file of a wheel carves with AlignedAllocator."""
    found = {}
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            path = name.removeprefix("flashinfer/data/")
            if path.startswith(("csrc/", "include/")) and path != name:
                count = archive.read(name).count(b"aligned_alloc")
                if count:
                    found[path] = count
    return found


@functools.lru_cache(maxsize=1)
def python_files(wheel: Path) -> tuple[tuple[str, ast.Module], ...]:
    """Return the attention modules of a wheel, as dotted names and syntax trees."""
    return tuple(_python_files(wheel))


def _python_files(wheel: Path) -> Iterator[tuple[str, ast.Module]]:
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            module = name.removeprefix("flashinfer/").removesuffix(".py").replace("/", ".")
            if name.endswith(".py") and MODULES.match(module + "."):
                yield module, ast.parse(archive.read(name))


def entry_points(wheel: Path) -> set[str]:
    """Return the public functions and classes of attention that take a workspace."""
    found = set()
    for module, tree in python_files(wheel):
        for node in tree.body:
            function = node
            if isinstance(node, ast.ClassDef):
                inits = [item for item in node.body if getattr(item, "name", "") == "__init__"]
                function = inits[0] if inits else node
            if not isinstance(function, ast.FunctionDef) or node.name.startswith("_"):
                continue
            arguments = function.args
            names = [a.arg for a in arguments.posonlyargs + arguments.args + arguments.kwonlyargs]
            if any(WORKSPACE.search(name) for name in names):
                found.add(f"{module}.{node.name}")
    return found


def status(table: dict[str, str], path: str) -> str:
    """Return the status of a C++ file: of itself or of its directory."""
    for key, value in table.items():
        if path == key or (key.endswith("/") and path.startswith(key)):
            return value
    raise AssertionError(f"{path} carves a workspace and is not described")


def entry_status(name: str) -> str:
    """Return the status of an entry point."""
    for pattern, value in ENTRY_POINTS:
        if re.match(pattern, name):
            return value
    raise AssertionError(f"{name} takes a workspace and is not described")


def render(wheels: dict[str, Path]) -> dict[str, str]:
    """Return the generated tables, by name."""
    users = {version: allocator_users(wheel) for version, wheel in wheels.items()}
    points = {version: entry_points(wheel) for version, wheel in wheels.items()}
    head = " | ".join(wheels)
    rule = "|---" * (len(wheels) + 2) + "|"

    def rows(names: set[str], found: dict[str, set[str]], of: Callable[[str], str]) -> list[str]:
        order = sorted(names, key=lambda name: (of(name) != YES, name))
        marks = {
            name: " | ".join("x" if name in found[version] else "" for version in wheels)
            for name in order
        }
        return [f"| `{name}` | {marks[name]} | {of(name)} |" for name in order]

    files = {version: set(found) for version, found in users.items()}
    return {
        "allocator": "\n".join(
            [
                f"| file | {head} | |",
                rule,
                *rows(set().union(*files.values()), files, lambda p: status(ALLOCATOR_USERS, p)),
            ]
        ),
        "entry points": "\n".join(
            [
                f"| entry point | {head} | |",
                rule,
                *rows(set().union(*points.values()), points, entry_status),
            ]
        ),
    }


def test_the_tables_of_the_docs_are_what_is_found(upstream_wheels: dict[str, Path]) -> None:
    text = DOCS.read_text()
    for name, table in render(upstream_wheels).items():
        assert f"<!-- {name} -->\n{table}\n<!-- end -->" in text, name


def _source(wheel: Path, path: str) -> str:
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(f"flashinfer/data/{path}").decode()


def test_float_allocations_are_all_known(
    version: str, upstream_wheel: Callable[[str], Path]
) -> None:
    """Which allocator a name belongs to decides which workspace grows."""
    source = _source(upstream_wheel(version), "include/flashinfer/attention/scheduler.cuh")
    found: dict[str, set[str]] = {"float": set(), "int": set()}
    for match in re.finditer(r"(\w+)_allocator\.aligned_alloc_offset\(([^;]*?)\"(\w+)\"\)", source):
        found[match[1]].add(match[3])
    assert found["float"] == overflow.FLOAT_ALLOCATIONS
    assert len(found["int"]) > 40
    assert not found["int"] & overflow.FLOAT_ALLOCATIONS


def test_planned_functions_take_their_workspaces_where_we_say(
    version: str, upstream_wheel: Callable[[str], Path]
) -> None:
    """Read off the C++ definitions behind every ``plan``, ``run`` and POD function."""
    checked = []
    with zipfile.ZipFile(upstream_wheel(version)) as archive:
        names = [n for n in archive.namelist() if re.fullmatch(r".*/data/csrc/[^/]+\.cuh?", n)]
        sources = {name: archive.read(name).decode() for name in names}
    pattern = (
        r"\b((?:Batch(?:Prefill|Decode|MLA|Paged)\w*(?:Plan|Run)(?:MLA)?)|"
        r"(?:batch_)?pod_with_kv_cache_tensor)\(\s*([^;{}]*?)\)\s*\{"
    )
    for source in sources.values():
        for name, text in re.findall(pattern, source):
            while "<" in text:
                text = re.sub(r"<[^<>]*>", "", text)
            text = re.sub(r"//.*|\s[A-Z_]+(?=\))", "", text)
            names = [part.split("=")[0].split()[-1] for part in text.split(",") if part.strip()]
            if not any("workspace_buffer" in name for name in names):
                continue
            spots = [index for index, name in enumerate(names) if "workspace_buffer" in name]
            if "Plan" in name:
                expected = [0, 1, 2]
            else:
                expected = list(signatures.POD_RUNS.get(name, signatures.RUNS["run"]))
            assert spots == expected, (name, names)
            checked.append(name)
    assert {"BatchDecodeWithPagedKVCachePlan", "pod_with_kv_cache_tensor"} <= set(checked)
    assert len(set(checked)) >= 14


def test_every_generator_is_wrapped_or_exempt(
    version: str, upstream_wheel: Callable[[str], Path]
) -> None:
    shadowed = ("prefill", "decode", "sparse", "pod", "cascade", "attention._core", "mla._core")
    backends = (
        "mla._batch_mla._backends._fa_common",
        "mla._batch_mla._backends.trtllm_gen_backend",
    )
    known = signatures.GENERATORS.keys() | signatures.EXEMPT_GENERATORS.keys()
    for module, tree in python_files(upstream_wheel(version)):
        if module not in (*shadowed, *backends):
            continue
        called = {
            node.func.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        generators = {name for name in called if re.match(r"_?gen_\w+", name)}
        assert generators <= known, module


def test_generators_of_planned_modules_are_used_in_patched_modules_only(
    version: str, upstream_wheel: Callable[[str], Path]
) -> None:
    """A getter elsewhere would hand out modules that do not grow."""
    patched = {
        "prefill",
        "decode",
        "pod",
        "attention._core",
        "mla._core",
        "mla._batch_mla._backends._fa_common",
        "mla._batch_mla._backends.trtllm_gen_backend",
    }
    for module, tree in python_files(upstream_wheel(version)):
        called = {
            node.func.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        if called & signatures.GENERATORS.keys():
            assert module in patched, (module, called & signatures.GENERATORS.keys())


def test_every_owner_of_an_integer_workspace_is_observed(
    version: str, upstream_wheel: Callable[[str], Path]
) -> None:
    known = Path(str(patches.__file__)).read_text()
    owners = set()
    for _, tree in python_files(upstream_wheel(version)):
        for cls in [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]:
            for node in ast.walk(cls):
                if isinstance(node, ast.Assign) and any(
                    isinstance(target, ast.Attribute)
                    and re.fullmatch(r"_?int_workspace_buffer(_[pd])?", target.attr)
                    and isinstance(target.value, ast.Name)
                    and target.value.id == "self"
                    for target in node.targets
                ):
                    owners.add(cls.name)
    assert len(owners) >= 9
    for owner in owners:
        assert f'"{owner}"' in known or f".{owner})" in known, owner


@pytest.mark.parametrize("name", sorted(signatures.EXEMPT_GENERATORS))
def test_exemptions_have_reasons(name: str) -> None:
    assert signatures.EXEMPT_GENERATORS[name]
    assert name not in signatures.GENERATORS


def write(directory: Path) -> None:
    """Write the tables of the docs anew."""
    wheels = {
        version: next(directory.glob(f"flashinfer_python-{version}-*.whl"))
        for version in TESTED_VERSIONS
    }
    text = DOCS.read_text()
    for name, table in render(wheels).items():
        begin = text.index(f"<!-- {name} -->\n") + len(f"<!-- {name} -->\n")
        text = text[:begin] + table + text[text.index("\n<!-- end -->", begin) :]
    DOCS.write_text(text)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
