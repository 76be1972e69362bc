"""What the programs that use FlashInfer's all-reduce report as their maximum, and what they ask.

Read in the sources of vLLM 0.24 and 0.33 and of SGLang. Their tables are in MiB of one rank's
contribution, ``tokens * hidden * element_bytes``, by architecture and size of the group.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

ARCHS = (90, 100, 103)
"""Architectures for which vLLM has tables that are known here."""


class Ask(enum.Enum):
    """What a caller asks of FlashInfer for a call."""

    ONESHOT = "one-shot"
    TWOSHOT = "two-shot"
    AUTO = "auto"
    """FlashInfer chooses."""


class Problem(NamedTuple):
    """What all calls on a workspace have in common.

    Attributes
    ----------
    ranks : int
        Size of the group.
    hidden : int
        Elements of a row.
    element_bytes : int
        Bytes of an element.
    """

    ranks: int
    hidden: int
    element_bytes: int

    @property
    def row_bytes(self) -> int:
        """Bytes of a row as a caller has it."""
        return self.hidden * self.element_bytes


class Caller(NamedTuple):
    """One way in which FlashInfer's all-reduce is used.

    Attributes
    ----------
    name : str
        Of the program, and of the call where it has several: *fused* with residual and norm,
        *unfused* an all-reduce alone. *direct* is a program of one's own, with ``use_oneshot``
        left alone (*auto*) or True (*one-shot*).
    reports : int
        Tokens that it reports as its maximum when it creates its workspace, and up to which it
        makes calls; 0 where it does not use FlashInfer for this group.
    oneshot_up_to : int
        Tokens up to which it forces one-shot.
    beyond : Ask
        What it asks above that.
    """

    name: str
    reports: int
    oneshot_up_to: int = 0
    beyond: Ask = Ask.AUTO

    def ask(self, tokens: int) -> Ask:
        """Return what it asks for a number of tokens."""
        return Ask.ONESHOT if tokens <= self.oneshot_up_to else self.beyond


_FUSED_024: dict[int, dict[int, float]] = {
    90: {2: 64, 4: 2, 8: 0.5},
    100: {2: 64, 4: 32, 8: 1},
    103: {2: 64, 4: 64, 8: 2},
}
_FUSED_033: dict[int, dict[int, float]] = {
    90: {2: 64, 4: 2, 8: 0.5},
    100: {2: 64, 4: 32, 8: 1, 16: 64},
    103: {2: 64, 4: 64, 8: 4, 16: 64},
}
_ONESHOT_024: dict[int, dict[int, float]] = {
    90: {2: 32, 4: 2, 8: 0.5},
    100: {2: 32, 4: 4, 8: 1},
    103: {2: 32, 4: 4, 8: 2},
}
_ALONE_033: dict[int, dict[int, float]] = {
    100: {4: 80, 8: 128, 16: 8},
    103: {4: 80, 8: 128, 16: 8},
}


def callers(problem: Problem, max_tokens: int, arch: int) -> tuple[Caller, ...]:
    """Return the known callers, as they are on a machine.

    Parameters
    ----------
    problem : Problem
        Of the model and its group.
    max_tokens : int
        Most tokens of a forward pass, such as vLLM's ``max_num_batched_tokens``. Nobody reports
        more.
    arch : int
        One of ``ARCHS``.
    """

    def tokens(table: dict[int, dict[int, float]]) -> int:
        size = int(table.get(arch, {}).get(problem.ranks, 0) * 2**20)
        return min(size // problem.row_bytes, max_tokens)

    return (
        Caller("vLLM 0.24, fused", tokens(_FUSED_024), tokens(_ONESHOT_024), Ask.TWOSHOT),
        Caller("vLLM 0.33, fused", tokens(_FUSED_033)),
        Caller("vLLM 0.33, unfused", tokens(_ALONE_033)),
        Caller("SGLang", max_tokens),
        Caller("direct, auto", max_tokens),
        Caller("direct, one-shot", max_tokens, max_tokens),
    )
