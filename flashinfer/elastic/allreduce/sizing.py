"""How many bytes a strategy needs, and how many a workspace should own.

Plain integer arithmetic: no torch, no CUDA, no environment, so that every rank that is given the
same numbers computes the same sizes, and so that the rules can be tested exhaustively.

Vocabulary
----------
tokens
    Rows of the ``[tokens, hidden]`` tensor being reduced (N).
hidden
    Elements of a row (H).
element_bytes
    Bytes of an element (e): 2 for fp16 and bf16, 4 for fp32.
ranks
    Size of the tensor-parallel group (P).
buffer
    One Lamport buffer. A workspace owns several and alternates between them. Every size below is
    in bytes and for **one** buffer.

Two layouts are sized here. *Upstream's*, in ``oneshot_bytes`` and ``twoshot_bytes``, is the
contract of ``get_required_buffer_size_bytes``: callers act on it (they re-create a workspace or
take another path when it does not fit), so it is reproduced to the byte. The *native* one, in
``native_oneshot_bytes`` and ``native_twoshot_bytes``, is what our kernels store: the same slots,
each row padded to whole segments. It is never smaller, so a buffer sized for the native layout
holds upstream's too.
"""

from __future__ import annotations

ALIGNMENT = 256
"""Every buffer size is a multiple of this many bytes.

It keeps the second stage of two-shot, which starts in the middle of a buffer, aligned for the
widest vector access. (FlashInfer 0.6.x rounds down to 16 bytes instead and misaligns that stage
for some sizes.)
"""

LAMPORT_BUFFERS_NATIVE = 2
"""Buffers that the native engine alternates between; upstream's kernels rotate through three."""

SEGMENT_ELEMENTS = 8
"""Elements of a segment, the unit of work of the native kernels. Rows are padded to it."""

MAX_BUFFER_BYTES = 2**31 - ALIGNMENT
"""Largest buffer that is allocated unasked.

Upstream's kernels count the bytes they clear in an ``int``. What does not fit is served in chunks.
"""

MAX_EXPLICIT_BYTES = 2**32 - 1
"""Largest buffer that may be asked for: upstream keeps the size in a ``uint32`` and says so."""

MIN_BUFFER_BYTES = 2**20
"""Smallest buffer that is allocated when no size is asked for.

Device memory that peers can map comes in granules of 2 MiB, which two buffers of this size fill:
it costs nothing, and it lets a workspace that was reported for a handful of tokens serve a model
with much wider rows (a drafter that shares the target's workspace).
"""

DEFAULT_ONESHOT_MAX_BYTES = 64 * 2**20
"""Default bound of the buffer space that is reserved for one-shot.

Callers that force one-shot do so up to 32 MiB a rank in a group of two (vLLM's table), which is
64 MiB a buffer, and to less in larger groups.
"""


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is at least ``value``."""
    return -(-value // multiple) * multiple


def row_bytes(hidden: int, element_bytes: int) -> int:
    """Return the bytes that one row occupies in the native layout.

    Parameters
    ----------
    hidden : int
        Elements of a row.
    element_bytes : int
        Bytes of an element.

    Returns
    -------
    int
        ``ceil(hidden / 8) * 8 * element_bytes``: a whole number of segments.
    """
    return round_up(hidden, SEGMENT_ELEMENTS) * element_bytes


def oneshot_bytes(tokens: int, hidden: int, element_bytes: int, ranks: int) -> int:
    """Return upstream's one-shot requirement: a slot per token and source rank.

    Returns
    -------
    int
        ``tokens * hidden * ranks * element_bytes``, exactly as upstream's
        ``get_required_buffer_size_bytes`` computes it in every supported version.
    """
    return tokens * hidden * ranks * element_bytes


def twoshot_bytes(tokens: int, hidden: int, element_bytes: int, ranks: int) -> int:
    """Return upstream's two-shot requirement: two stages of tokens rounded up to the group size.

    Returns
    -------
    int
        ``2 * ceil(tokens / ranks) * ranks * hidden * element_bytes``, exactly as upstream's
        ``get_required_buffer_size_bytes`` computes it in every supported version.
    """
    return 2 * round_up(tokens, ranks) * hidden * element_bytes


def native_oneshot_bytes(tokens: int, hidden: int, element_bytes: int, ranks: int) -> int:
    """Return what one-shot occupies in the native layout: ``oneshot_bytes`` with padded rows.

    Slot ``token * ranks + source`` of the receiver's buffer holds one row of one source.
    """
    return tokens * ranks * row_bytes(hidden, element_bytes)


def native_twoshot_bytes(tokens: int, hidden: int, element_bytes: int, ranks: int) -> int:
    """Return what two-shot occupies in the native layout: ``twoshot_bytes`` with padded rows.

    ``ceil(tokens / ranks) * ranks`` slots receive contributions for the tokens that this rank
    owns, and as many receive the sums of all tokens.
    """
    return 2 * round_up(tokens, ranks) * row_bytes(hidden, element_bytes)


def buffer_bytes(
    max_tokens: int,
    hidden: int,
    element_bytes: int,
    ranks: int,
    *,
    oneshot_max_bytes: int = DEFAULT_ONESHOT_MAX_BYTES,
    explicit: int | None = None,
) -> int:
    """Return the size of the buffers that a workspace should own.

    The rule is to hold whatever the caller may ask for, not only what the default strategy would
    use for the reported maximum:

    - two-shot for ``max_tokens``, and
    - one-shot for every number of tokens up to ``max_tokens``, as long as its payload
      (``oneshot_bytes``) is at most ``oneshot_max_bytes``. Where the maximum itself is beyond that
      bound, this is one-shot for the largest number of tokens within it.

    Parameters
    ----------
    max_tokens : int
        The number of tokens that the caller reports as its maximum. 0 counts as 1.
    hidden : int
        Elements of a row.
    element_bytes : int
        Bytes of an element.
    ranks : int
        Size of the group.
    oneshot_max_bytes : int
        Bound of the one-shot payload that is provided for, in bytes a buffer. 0 provides for
        two-shot only.
    explicit : int, optional
        A size that the caller asks for, in bytes a buffer. It is honoured whole: never less is
        returned, and the other parameters (which may then be 0) have no influence.

    Returns
    -------
    int
        Bytes of one buffer, a multiple of ``ALIGNMENT``. Without ``explicit`` it is between
        ``MIN_BUFFER_BYTES`` and ``MAX_BUFFER_BYTES``; what exceeds the latter runs in chunks.

    Raises
    ------
    ValueError
        If ``explicit`` does not fit in 32 bits (upstream's limit, in upstream's words) or is
        negative, or if, without ``explicit``, a parameter is out of its range.

    Examples
    --------
    Eight ranks, rows of 6144 bf16 elements, 42 tokens reported. Upstream allocates two-shot for
    42 tokens, 1179648 bytes, and refuses the 40 tokens of one-shot that vLLM then asks for:

    >>> twoshot_bytes(42, 6144, 2, 8), oneshot_bytes(40, 6144, 2, 8)
    (1179648, 3932160)
    >>> buffer_bytes(42, 6144, 2, 8)
    4128768
    """
    if explicit is not None:
        return _explicit_bytes(explicit)
    if max_tokens < 0 or oneshot_max_bytes < 0 or min(hidden, element_bytes, ranks) < 1:
        raise ValueError(
            "A workspace needs max_tokens >= 0, hidden >= 1, element_bytes >= 1, ranks >= 1 and "
            f"oneshot_max_bytes >= 0, got {max_tokens}, {hidden}, {element_bytes}, {ranks} and "
            f"{oneshot_max_bytes}."
        )
    tokens = max(max_tokens, 1)
    oneshot_tokens = min(
        tokens, oneshot_max_bytes // oneshot_bytes(1, hidden, element_bytes, ranks)
    )
    wanted = max(
        native_twoshot_bytes(tokens, hidden, element_bytes, ranks),
        native_oneshot_bytes(oneshot_tokens, hidden, element_bytes, ranks),
        MIN_BUFFER_BYTES,
    )
    return min(round_up(wanted, ALIGNMENT), MAX_BUFFER_BYTES)


def _explicit_bytes(explicit: int) -> int:
    """Return the explicit size, rounded up to the alignment, or raise upstream's error."""
    if explicit < 0:
        raise ValueError(f"The buffer size in bytes must not be negative, got {explicit}.")
    size = round_up(max(explicit, 1), ALIGNMENT)
    if size > MAX_EXPLICIT_BYTES:
        raise ValueError(
            f"The buffer size in bytes {size} is greater than the maximum supported size "
            "(UINT32_MAX)."
        )
    return size
