"""By which instructions the compiled kernels reach other ranks, read from their PTX.

For a multicast address only multimem instructions are defined. In machine code an ordinary store
has the same mnemonic, so it is the PTX that is held against the rule: nothing made from the
multicast address is the address of anything but a multimem store, and it goes nowhere else.
"""

from __future__ import annotations

import functools
import os
import subprocess
from pathlib import Path

import pytest

from build_tools import kernels, ptx, toolkit

STORE = "multimem.st.relaxed.sys.global.v4.f32"
SOURCES = [
    f"{strategy}_{dtype}"
    for strategy in ("one_shot", "two_shot")
    for dtype in ("float16", "bfloat16", "float32")
]

OFFSET = """
#include <cstddef>
#include <cstdio>
#include "flashinfer_elastic/arguments.h"
using namespace flashinfer_elastic;
int main() {
  std::printf("%zu", offsetof(Arguments, group) + offsetof(Group, multicast));
}
"""


@pytest.fixture(scope="module")
def multicast_offset(tmp_path_factory: pytest.TempPathFactory) -> int:
    """Where the multicast address lies among a kernel's arguments, in bytes."""
    program = tmp_path_factory.mktemp("offset") / "offset"
    compiler = os.environ.get("CXX", "g++")
    include = f"-I{kernels.REPOSITORY / 'include'}"
    command = [compiler, "-std=c++17", include, "-xc++", "-", "-o", str(program)]
    subprocess.run(command, input=OFFSET, text=True, check=True)
    return int(subprocess.run([program], capture_output=True, text=True, check=True).stdout)


@functools.cache
def compiled(source: str, target: int) -> dict[str, tuple[ptx.Instruction, ...]]:
    text = kernels.compile_to_ptx(Path("csrc", f"{source}.cu"), target, toolkit.find())
    return ptx.kernels(text)


# PTX differs between architectures in the names of a few instructions at most: one type is enough
# for the second.
@pytest.mark.parametrize(
    ("source", "target"),
    [(source, 90) for source in SOURCES] + [("one_shot_bfloat16", 100), ("two_shot_bfloat16", 100)],
)
def test_only_multimem_stores_go_to_the_multicast_address(
    source: str, target: int, multicast_offset: int
) -> None:
    multicast = {name: body for name, body in compiled(source, target).items() if "9Multi" in name}
    # Whole rows for 4, 8 and any number of ranks, ragged ones for any; plain and quantised.
    assert len(multicast) == 8
    for name, body in multicast.items():
        uses = ptx.uses_of_parameter(body, multicast_offset)
        assert uses.as_address, name
        assert {use.opcode for use in uses.as_address} == {STORE}, name
        assert not uses.escaped, (name, uses.escaped)
        # And there are no other multimem instructions: no loads, no reductions, no other address.
        multimem = [one for one in body if "multimem" in one.opcode]
        assert multimem == list(uses.as_address), name


@pytest.mark.parametrize("source", SOURCES)
def test_unicast_kernels_have_no_use_for_the_multicast_address(
    source: str, multicast_offset: int
) -> None:
    unicast = {name: body for name, body in compiled(source, 90).items() if "7Unicast" in name}
    # Whole rows for 2 to 8 and any number of ranks, ragged ones for any; plain and quantised.
    assert len(unicast) == 18
    for name, body in unicast.items():
        assert not any("multimem" in one.opcode for one in body), name
        assert ptx.uses_of_parameter(body, multicast_offset) == ((), ()), name


# A one-shot kernel sends to all ranks only; a two-shot kernel sends a row to its owner as well.
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_what_a_multicast_kernel_sends_to_all_it_sends_once(dtype: str) -> None:
    """Where a unicast kernel for P ranks has P - 1 stores of a word, it has one multimem store."""

    def stores(strategy: str, transport: str) -> tuple[int, int]:
        (body,) = (
            body
            for name, body in compiled(f"{strategy}_{dtype}", 90).items()
            if f"Lj8ENS_{transport}ILj8EEELb1ELb0E" in name
        )
        opcodes = [one.opcode for one in body]
        return opcodes.count(STORE), opcodes.count("st.relaxed.sys.global.v4.u32")

    for strategy in ("one_shot", "two_shot"):
        multimem, ordinary = stores(strategy, "9Multicast")
        none, more = stores(strategy, "7Unicast")
        assert none == 0
        assert multimem > 0
        # The unicast kernel sends each word by seven stores. The multicast one takes its own echo
        # in, and empties that place: one more ordinary store for each of the kernel's sums.
        assert more > ordinary, (strategy, more, ordinary)


ADDRESSES = """
struct Arguments { unsigned long long other, multicast; unsigned index; };
__global__ void KERNEL(const __grid_constant__ Arguments a) {
  unsigned long long place = a.multicast + 16ull * a.index;
  BODY
}
"""
ORDINARY = "*reinterpret_cast<unsigned*>(place) = 1;"
MULTIMEM = (
    'asm volatile("multimem.st.global.v4.f32 [%0], {%1, %1, %1, %1};" :: "l"(place), "f"(1.f));'
)
GUARDED = (
    'asm volatile("{ .reg .pred p; setp.ne.u64 p, %0, 0; @p st.global.u32 [%0], 1; }"'
    ' :: "l"(place));'
)


@pytest.mark.parametrize(
    ("body", "as_address", "escapes"),
    [
        (MULTIMEM, {"multimem.st.global.v4.f32"}, False),
        (ORDINARY, {"st.u32"}, False),
        (f"if (a.index > 3) {{ {MULTIMEM} }} else {{ {ORDINARY} }}", None, False),
        ("if (a.index & 1) place = a.other; " + ORDINARY, {"st.u32"}, False),
        ("atomicAdd(reinterpret_cast<unsigned*>(place), 1u);", {"atom.add.u32"}, False),
        ('asm volatile("{\\n.reg .b32 r;\\nmov.b32 r, 1;\\n}"); ' + ORDINARY, {"st.u32"}, False),
        (GUARDED, {"st.u32"}, False),
        ("a_global = place;", set(), True),
        ("*reinterpret_cast<unsigned long long*>(a.other) = 1;", set(), False),
    ],
)
def test_a_planted_access_is_seen(
    tmp_path: Path, body: str, as_address: set[str] | None, escapes: bool
) -> None:
    text = "__device__ unsigned long long a_global;" + ADDRESSES.replace("BODY", body)
    source = tmp_path / "planted.cu"
    source.write_text(text)
    (kernel,) = ptx.kernels(kernels.compile_to_ptx(source, 90, toolkit.find())).values()
    uses = ptx.uses_of_parameter(kernel, 8)
    found = {use.opcode for use in uses.as_address}
    if as_address is None:
        assert len(found) == 2
    else:
        # An atomic whose result nobody wants is a reduction; addresses may be made global ones.
        assert {opcode.replace("red.", "atom.").replace(".global", "") for opcode in found} == {
            opcode.replace(".global", "") for opcode in as_address
        }
    assert bool(uses.escaped) is escapes
