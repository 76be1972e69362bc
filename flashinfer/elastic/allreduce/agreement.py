"""Agreement between the ranks of a group.

Creating a workspace takes many steps, each of which can fail on one rank only. A rank that gave up
by itself would leave its peers waiting in the next collective, so every step ends in an agreement:
all ranks learn how it went everywhere, and either all go on or all raise.

Everything here is built on the one thing that every communication backend has, ``allgather``.
Broadcast is avoided on purpose: a supported upstream release counts its root wrongly in subgroups.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from . import interrupts

T = TypeVar("T")

# Every allgather carries frames of one size, because a backend may gather into equal tensors.
# Longer payloads take more frames; all ranks learn from the first frames how many.
FRAME_BYTES = 1024
_MAGIC = b"FIE1"
_HEADER = struct.Struct("<4sIIII")  # magic, rank, world size, round, payload bytes
_CHUNK_BYTES = FRAME_BYTES - _HEADER.size

_MAX_MESSAGE_CHARS = 2000


class Communicator(Protocol):
    """What is asked of a communication backend: upstream's backends, or any object like them."""

    def allgather(self, data: Any, /) -> Sequence[Any]:
        """Return the ``data`` of every rank."""


class CollectiveError(RuntimeError):
    """A step failed on at least one rank; every rank of the group raises this.

    Attributes
    ----------
    stage : str
        The step that failed.
    failures : dict[int, str]
        What went wrong, by rank; empty when no rank can be blamed.
    """

    def __init__(self, stage: str, message: str, failures: Mapping[int, str] | None = None) -> None:
        super().__init__(f"{stage}: {message}")
        self.stage = stage
        self.failures = dict(failures or {})


class Agreement:
    """Collectives for the ranks of one group.

    All methods are collective: every rank calls the same ones in the same order. Each takes the
    same number of backend collectives on every rank whatever happens, so that no rank waits for a
    peer that has already given up. Outcomes are functions of the gathered values alone, hence the
    same on every rank.

    Parameters
    ----------
    comm : Communicator
        Backend of exactly this group; not used by a group of one.
    rank, world_size : int
        This rank's place in the group. The backend may gather in another order: frames carry
        their rank and are sorted by it.
    """

    def __init__(self, comm: Communicator, rank: int, world_size: int) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is outside a group of {world_size}")
        self._comm = comm
        self.rank = rank
        self.world_size = world_size
        self._round = 0

    def exchange(self, payload: bytes) -> list[bytes]:
        """Return the payload of every rank, indexed by rank.

        Raises
        ------
        CollectiveError
            On every rank, when what the backend gathered is not one frame of each rank at the same
            round: a backend of another group, wrong ranks, or ranks that have lost step.
        """
        if self.world_size == 1:
            return [payload]
        lengths, chunks = self._exchange_frame(len(payload), payload[:_CHUNK_BYTES])
        received = [bytearray(chunk) for chunk in chunks]
        for start in range(_CHUNK_BYTES, max(lengths), _CHUNK_BYTES):
            _, chunks = self._exchange_frame(len(payload), payload[start : start + _CHUNK_BYTES])
            for buffer, chunk in zip(received, chunks, strict=True):
                buffer.extend(chunk)
        return [bytes(buffer[:length]) for buffer, length in zip(received, lengths, strict=True)]

    def gather(self, name: str, value: object) -> list[Any]:
        """Return the JSON value of every rank, indexed by rank.

        Raises
        ------
        CollectiveError
            On every rank, when a rank's value is not JSON or a rank gathers something else.
        """
        try:
            message = {"name": name, "value": value}
            payload = json.dumps(message, sort_keys=True)
        except (TypeError, ValueError) as error:
            payload = json.dumps({"name": name, "error": str(error)})
        answers = [_decode(answer) for answer in self.exchange(payload.encode())]

        names = [answer.get("name") for answer in answers]
        if any(other != name for other in names):
            raise CollectiveError(name, f"ranks are at different steps: {_who_has_what(names)}")
        failures = {r: answer["error"] for r, answer in enumerate(answers) if "error" in answer}
        if failures:
            raise CollectiveError(name, _who_failed(failures), failures)
        return [answer["value"] for answer in answers]

    def agree(self, stage: str, error: BaseException | None) -> None:
        """Raise on every rank when ``error`` is set on any.

        Raises
        ------
        CollectiveError
            Names the ranks that failed and their messages. A rank that failed raises it from its
            own error; an interrupt (``KeyboardInterrupt``, ``SystemExit``) is re-raised as it is
            where it happened.
        """
        reports = self.gather(stage, None if error is None else describe(error))
        failures = {r: report for r, report in enumerate(reports) if report is not None}
        if not failures:
            return
        if error is not None and not isinstance(error, Exception):
            raise error
        raise CollectiveError(stage, _who_failed(failures), failures) from error

    def attempt(self, stage: str, work: Callable[[], T]) -> T:
        """Do local ``work`` and agree on how it went; return its result.

        ``work`` must not call collectives of its own. An interrupt that is held (see
        ``interrupts``) counts as its failure.

        Raises
        ------
        CollectiveError
            As :meth:`agree`, when the work raised on any rank.
        """
        results: list[T] = []
        failure: BaseException | None = None
        try:
            try:
                results.append(work())
                # Not before the work, on which that of others may wait.
                interrupts.deliver()
            except BaseException as error:
                failure = error
            self.agree(stage, failure)
        finally:
            failure = None  # breaks the cycle error -> traceback -> this frame -> error
        return results[0]

    def same(self, name: str, value: object) -> None:
        """Raise on every rank when ranks hold different values.

        Parameters
        ----------
        name : str
            What the value is; part of the message.
        value : bytes or a JSON value
            What must be equal everywhere.

        Raises
        ------
        CollectiveError
            Says which ranks have which value.
        """
        if isinstance(value, (bytes, bytearray)):
            value = f"bytes {value.hex()}"
        values = [json.dumps(answer, sort_keys=True) for answer in self.gather(name, value)]
        if any(other != values[0] for other in values):
            raise CollectiveError(name, f"ranks disagree: {_who_has_what(values)}")

    def barrier(self) -> None:
        """Wait until every rank is here.

        An allgather is a barrier, and unlike the barrier of some backends it never guesses a
        device and notices ranks that have lost step.
        """
        self.exchange(b"")

    def _exchange_frame(self, length: int, chunk: bytes) -> tuple[list[int], list[bytes]]:
        frame = _HEADER.pack(_MAGIC, self.rank, self.world_size, self._round, length) + chunk
        self._round += 1
        gathered = self._comm.allgather(frame.ljust(FRAME_BYTES, b"\0"))
        return _sort_frames(list(gathered), self.world_size)


def describe(error: BaseException) -> str:
    """Return one error as text for other ranks: its type and message, bounded in length."""
    text = str(error)
    if not isinstance(error, CollectiveError):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text if len(text) <= _MAX_MESSAGE_CHARS else text[: _MAX_MESSAGE_CHARS - 3] + "..."


def format_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as ``rank 3`` or ``ranks 0-2, 5``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank{'' if len(ranks) == 1 else 's'} {text}"


def _sort_frames(frames: list[Any], world_size: int) -> tuple[list[int], list[bytes]]:
    """Check one gathered round; return payload lengths and chunks, both indexed by rank.

    A function of the gathered frames and the world size only. The world size of every frame is
    checked, so ranks that differ in it all raise.
    """
    stage = "exchange between ranks"
    headers = []
    for frame in frames:
        if not isinstance(frame, (bytes, bytearray, memoryview)):
            kind = type(frame).__name__
            raise CollectiveError(stage, f"allgather returned {kind} where bytes were given")
        if len(frame) != FRAME_BYTES or bytes(frame[:4]) != _MAGIC:
            raise CollectiveError(stage, "allgather returned bytes that no rank sent this way")
        headers.append(_HEADER.unpack_from(frame))

    _, ranks, sizes, rounds, lengths = zip(*headers, strict=True) if headers else ((),) * 5
    if any(size != len(frames) for size in (*sizes, world_size)):
        wanted = sorted({*sizes, world_size})
        raise CollectiveError(
            stage,
            f"the communication backend gathers from {len(frames)} ranks, the group has "
            f"{' or '.join(map(str, wanted))}: it belongs to another group",
        )
    if sorted(ranks) != list(range(world_size)):
        raise CollectiveError(stage, f"ranks are not 0 to {world_size - 1}, each once: {ranks}")
    if len(set(rounds)) != 1:
        by_rank = [number for _, number in sorted(zip(ranks, rounds, strict=True))]
        raise CollectiveError(stage, f"ranks have lost step: rounds by rank {by_rank}")

    order = sorted(range(world_size), key=ranks.__getitem__)
    chunks = [bytes(frames[i][_HEADER.size :]) for i in order]
    return [lengths[i] for i in order], chunks


def _decode(payload: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(payload)
    except ValueError:
        answer = None
    return answer if isinstance(answer, dict) else {"name": "something else"}


def _who_has_what(values: Sequence[object]) -> str:
    ranks_by_value: dict[object, list[int]] = {}
    for rank, value in enumerate(values):
        ranks_by_value.setdefault(value, []).append(rank)
    return "; ".join(f"{format_ranks(ranks)}: {value}" for value, ranks in ranks_by_value.items())


def _who_failed(failures: Mapping[int, str]) -> str:
    ranks_by_text: dict[str, list[int]] = {}
    for rank, text in failures.items():
        ranks_by_text.setdefault(text, []).append(rank)
    return "; ".join(f"{format_ranks(ranks)}: {text}" for text, ranks in ranks_by_text.items())
