"""What kernels do with an address they are given, as their PTX tells it.

A store to a multicast address and an ordinary one become the same mnemonic in machine code, so only
PTX shows which is which. A kernel's parameters are followed from where they are loaded through the
arithmetic of registers to where they are used as an address.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

_BYTES = {"8": 1, "16": 2, "32": 4, "64": 8}
_MOVES = ("mov.b64", "mov.u64")
_ADDS = ("add.s64", "add.u64")
_NAME = r"[A-Za-z_$%][\w$]*"
_ENTRY = re.compile(rf"\.entry\s+({_NAME})\(")
_REGISTER = re.compile(r"%[a-z]+\d+")
_BRACKETS = re.compile(rf"\[\s*({_NAME})\s*(?:\+\s*(-?\d+))?\s*\]")


class Instruction(NamedTuple):
    """One instruction.

    Attributes
    ----------
    opcode : str
        With its suffixes, as in ``st.relaxed.sys.global.v4.u32``.
    results, sources : tuple of str
        Registers that it sets, and that it takes as values; no predicates.
    address : tuple of (str, int) or None
        Register or symbol in brackets, and the offset from it in bytes.
    text : str
        As written, without its predicate.
    """

    opcode: str
    results: tuple[str, ...]
    sources: tuple[str, ...]
    address: tuple[str, int] | None
    text: str


class Uses(NamedTuple):
    """What becomes of one parameter in a kernel.

    Attributes
    ----------
    as_address : tuple of Instruction
        Those whose address is made from it.
    escaped : tuple of Instruction
        Those that store it, or hand it to a function: what happens to it then is not followed.
    """

    as_address: tuple[Instruction, ...]
    escaped: tuple[Instruction, ...]


def kernels(ptx: str) -> dict[str, tuple[Instruction, ...]]:
    """Read the kernels of a PTX module.

    Parameters
    ----------
    ptx : str
        As ``nvcc -ptx`` writes it.

    Returns
    -------
    dict of str to tuple of Instruction
        By mangled name.
    """
    found = {}
    for match in _ENTRY.finditer(ptx):
        start = ptx.index("\n{", match.end()) + 1
        found[match[1]] = tuple(_instructions(ptx[start : _closing_brace(ptx, start)]))
    return found


def uses_of_parameter(body: Sequence[Instruction], offset: int) -> Uses:
    """Follow the 8 bytes at ``offset`` of a kernel's first parameter.

    Everything that is computed from a followed register is followed too, so a use may be reported
    that is none; a use is missed only where the value goes through memory or a call, and then it is
    in ``escaped``. Loads of parameters at a place that is computed are taken to be of others, and
    registers that a block of inline assembly declares for itself are not followed.
    """
    places = _parameter_addresses(body)
    followed: set[str] = set()
    for one in body:
        if one.opcode.startswith("ld.param") and one.address is not None:
            symbol, at = one.address
            if symbol not in places:
                continue
            at += places[symbol]
            width = _element_bytes(one.opcode)
            followed |= {
                register
                for index, register in enumerate(one.results)
                if at + index * width < offset + 8 and offset < at + (index + 1) * width
            }
    before = -1
    while before != len(followed):
        before = len(followed)
        for one in body:
            # What is loaded from an address is another value than the address.
            if not one.opcode.startswith(("ld.", "atom.")) and not followed.isdisjoint(one.sources):
                followed.update(one.results)
    stores = ("st.", "red.", "atom.", "multimem.")
    return Uses(
        tuple(one for one in body if one.address is not None and one.address[0] in followed),
        tuple(
            one
            for one in body
            if one.opcode.startswith(stores) and not followed.isdisjoint(one.sources)
        ),
    )


def _closing_brace(text: str, start: int) -> int:
    """Find the brace that closes the one at ``start``; inline assembly has blocks of its own."""
    depth = 0
    for match in re.compile(r"[{}]").finditer(text, start):
        depth += 1 if match[0] == "{" else -1
        if depth == 0:
            return match.start()
    raise ValueError("a body of PTX does not end")


def _parameter_addresses(body: Sequence[Instruction]) -> dict[str, int]:
    """Names for places of the first parameter, with their distance in bytes from its start.

    Its symbol, registers that hold the symbol's address, and those a constant away from them.
    """
    places: dict[str, int] = {}
    before = -1
    while before != len(places):
        before = len(places)
        for one in body:
            if one.address is not None and one.address[0].endswith("_param_0"):
                places[one.address[0]] = 0
            if one.opcode in _MOVES:
                source = one.text.split()[-1]
                if source.endswith("_param_0"):
                    places[one.results[0]] = 0
                elif source in places:
                    places[one.results[0]] = places[source]
            elif one.opcode in _ADDS and len(one.sources) == 1 and one.sources[0] in places:
                constant = int(one.text.split(",")[-1])
                places[one.results[0]] = places[one.sources[0]] + constant
    return places


def _element_bytes(opcode: str) -> int:
    match = re.search(r"\.[a-z]+(8|16|32|64)$", opcode)
    if match is None:
        raise ValueError(f"no element type in {opcode}")
    return _BYTES[match[1]]


def _instructions(body: str) -> Iterator[Instruction]:
    # Inline assembly may have several on one line, in braces, and predicates of its own naming.
    for statement in re.sub(r"//.*", "", body).split(";"):
        text = re.sub(r"^@!?%?\w+\s+", "", re.sub(r"^([{}\s]|[\w$]+:)*", "", statement).strip())
        match = re.match(r"([a-z][\w.:]*)\s+(.*)$", text, re.DOTALL)
        if match is None:
            continue
        opcode, operands = match[1], match[2]
        brackets = _BRACKETS.search(operands)
        address = (brackets[1], int(brackets[2] or 0)) if brackets else None
        first, _, rest = _BRACKETS.sub("[]", operands).partition(",")
        if first.startswith("{"):
            first, _, rest = operands.partition("}")
        if opcode.startswith(("st.", "red.", "multimem.", "bra", "call", "bar")):
            results: tuple[str, ...] = ()
            rest = _BRACKETS.sub("[]", operands)
        else:
            results = tuple(_REGISTER.findall(first))
        sources = tuple(_REGISTER.findall(_BRACKETS.sub("[]", rest)))
        yield Instruction(
            opcode,
            tuple(name for name in results if not name.startswith("%p")),
            tuple(name for name in sources if not name.startswith("%p")),
            address,
            text,
        )
