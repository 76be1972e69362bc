"""Thousands of calls in a row: sizes that change, captured graphs, streams, ranks out of step."""

from __future__ import annotations

import random
import time
from typing import Any, NamedTuple

import torch
from allreduce_cases import (
    AUTO,
    DTYPES,
    ONESHOT,
    TWOSHOT,
    make_problem,
    needs_gpus,
    open_workspace,
    strategy_named,
)
from allreduce_reference import bits_of
from ranks import run_ranks

pytestmark = needs_gpus

CALLS = 10_000
GRAPHS = 60
STREAMS = 3
VARIANTS = 3
"""Inputs that each case alternates between, so that a stale buffer never looks right."""

BUFFER_BYTES = 1 << 20
"""Some cases fit any way, some are served with two-shot instead of one-shot, some in chunks."""

TOKENS = (0, 1, 1, 1, 2, 3, 5, 7, 8, 16, 33, 64, 100, 300)
HIDDEN = (63, 64, 512, 2880, 4096, 7168, 8192)


class Case:
    """A call of a fixed shape with static tensors, as a captured graph needs them."""

    def __init__(self, rank: int, ranks: int, number: int, choose: random.Random) -> None:
        self.tokens = choose.choice(TOKENS)
        self.hidden = choose.choice(HIDDEN)
        self.dtype = choose.choice(DTYPES)
        self.strategy = choose.choice((ONESHOT, TWOSHOT, AUTO))
        self.pdl = choose.random() < 0.5
        self.fused = choose.random() < 0.6
        self.inputs = []
        self.expected = []
        for variant in range(VARIANTS):
            seed = 1000 * number + variant
            problem = make_problem(ranks, self.tokens, self.hidden, self.dtype, seed)
            if variant == 0:
                self.gamma = problem.gamma
            problem = problem._replace(gamma=self.gamma)
            result = problem.expected()
            if self.fused:
                assert result.norm is not None
                assert result.residual is not None
                self.inputs.append((problem.inputs[rank].clone(), problem.residual))
                self.expected.append((result.norm, result.residual))
            else:
                self.inputs.append((problem.inputs[rank].clone(),))
                self.expected.append((result.sum,))
        self.arguments = [torch.empty_like(tensor) for tensor in self.inputs[0]]
        self.results = [torch.empty_like(tensor) for tensor in self.expected[0]]
        self.variant = 0

    def prepare(self, variant: int) -> None:
        """Put in inputs that are new."""
        self.variant = variant
        for tensor, value in zip(self.arguments, self.inputs[variant], strict=True):
            tensor.copy_(value)

    def poison(self) -> None:
        for tensor in self.results:
            tensor.fill_(float("nan"))

    def call(self, workspace: Any) -> None:
        from flashinfer.comm.trtllm_mnnvl_ar import (
            trtllm_mnnvl_allreduce,
            trtllm_mnnvl_fused_allreduce_add_rmsnorm,
        )

        strategy = strategy_named(self.strategy)
        if self.fused:
            trtllm_mnnvl_fused_allreduce_add_rmsnorm(
                self.arguments[0],
                self.arguments[1],
                self.gamma,
                workspace,
                1e-6,
                self.results[0],
                self.results[1],
                self.pdl,
                strategy,
            )
        else:
            trtllm_mnnvl_allreduce(
                self.arguments[0], workspace, self.pdl, self.results[0], strategy
            )

    def count_wrong(self, wrong: torch.Tensor) -> None:
        """Add the number of wrong elements to ``wrong``, without a look from the host."""
        for got, expected in zip(self.results, self.expected[self.variant], strict=True):
            wrong += (bits_of(got) != bits_of(expected)).sum()


class Burst(NamedTuple):
    """Calls back to back, nothing between them; with ``graph``, a capture of them."""

    cases: list[Case]
    graph: torch.cuda.CUDAGraph | None = None


class Lane:
    """A stream with cases of its own, whose tensors no other stream touches."""

    def __init__(self, rank: int, ranks: int, number: int, choose: random.Random) -> None:
        self.stream = torch.cuda.Stream()
        count = GRAPHS // STREAMS
        self.cases = [Case(rank, ranks, 100 * number + i, choose) for i in range(count)]
        self.wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        self.graphs: list[Burst] = []

    def choose_cases(self, choose: random.Random) -> list[Case]:
        return choose.sample(self.cases, choose.randint(1, 5))

    def capture(self, workspace: Any, choose: random.Random) -> None:
        cases = self.choose_cases(choose)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            for case in cases:
                case.poison()
            for case in cases:
                case.call(workspace)
        self.graphs.append(Burst(cases, graph))

    def run(self, burst: Burst, workspace: Any, choose: random.Random) -> int:
        for case in burst.cases:
            case.prepare(choose.randrange(VARIANTS))
        if burst.graph is not None:
            burst.graph.replay()
        else:
            for case in burst.cases:
                case.poison()
            for case in burst.cases:
                case.call(workspace)
        for case in burst.cases:
            case.count_wrong(self.wrong)
        return len(burst.cases)


def check_sequence(rank: int, ranks: int) -> dict[str, int]:
    workspace = open_workspace(rank, ranks, buffer_bytes=BUFFER_BYTES)
    choose = random.Random(20)  # the same on all ranks
    own = random.Random(rank)
    lanes = [Lane(rank, ranks, number, choose) for number in range(STREAMS)]
    torch.cuda.synchronize()
    # Captured before anything ran: a capture needs no warm-up of ours.
    for lane in lanes:
        for _ in range(GRAPHS // STREAMS):
            lane.capture(workspace, choose)
    torch.cuda.synchronize()

    counts = {"calls": 0, "eager bursts": 0, "replays": 0, "stream changes": 0, "delays": 0}
    last: Lane | None = None
    last_was_replay = False
    while counts["calls"] < CALLS:
        lane = choose.choice(lanes)
        replay = choose.random() < 0.5
        burst = choose.choice(lane.graphs) if replay else Burst(lane.choose_cases(choose))
        if last is not None and last is not lane:
            counts["stream changes"] += 1
            # Eager calls follow each other by themselves; what a graph does is for its user.
            if replay or last_was_replay:
                lane.stream.wait_stream(last.stream)
        with torch.cuda.stream(lane.stream):
            if own.random() < 0.1:
                counts["delays"] += 1
                torch.cuda._sleep(own.randrange(400_000))
            counts["calls"] += lane.run(burst, workspace, choose)
        counts["replays" if replay else "eager bursts"] += 1
        last, last_was_replay = lane, replay
        if counts["calls"] % 997 < len(burst.cases):
            # Host out of step: other ranks run ahead into calls that this one has not made.
            time.sleep(own.random() * 0.02)
            wrong = [int(each.wrong) for each in lanes]
            assert wrong == [0] * STREAMS, f"{wrong} wrong elements by call {counts['calls']}"
    torch.cuda.synchronize()
    assert [int(each.wrong) for each in lanes] == [0] * STREAMS
    workspace.destroy()
    return counts


def test_ten_thousand_calls() -> None:
    """Eager and replayed, PDL on and off, on three streams, every call's results to the bit."""
    results = run_ranks(check_sequence, timeout_s=150.0)
    for counts in results:
        assert counts["calls"] >= CALLS
        assert min(counts.values()) > 50
    print(f"by rank: {results}")


def check_skew(rank: int, ranks: int) -> int:
    """Let each rank in turn be late: by an epoch, then by two seconds."""
    workspace = open_workspace(rank, ranks, buffer_bytes=BUFFER_BYTES)
    choose = random.Random(3)
    cases = [Case(rank, ranks, number, choose) for number in range(12)]
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    calls = 0
    for late in range(ranks):
        for seconds in (0.05,) * 10 + (2.0,):
            if rank == late:
                torch.cuda.synchronize()
                time.sleep(seconds)
            # The others queue all of these; each gets as far as the late rank's words reach.
            chosen = choose.sample(cases, 4)
            for case in chosen:
                case.prepare(choose.randrange(VARIANTS))
                case.poison()
            for case in chosen:
                case.call(workspace)
            for case in chosen:
                case.count_wrong(wrong)
            calls += len(chosen)
    assert int(wrong) == 0
    # No tokens: no launch and no turn taken, so not even all ranks need to call.
    if rank == 0:
        empty = torch.empty(0, 64, device="cuda", dtype=torch.bfloat16)
        from flashinfer.comm.trtllm_mnnvl_ar import trtllm_mnnvl_allreduce

        assert trtllm_mnnvl_allreduce(empty, workspace, False).shape == (0, 64)
    for case in cases:
        case.prepare(0)
        case.poison()
        case.call(workspace)
        case.count_wrong(wrong)
    assert int(wrong) == 0
    workspace.destroy()
    return calls + len(cases)


def test_late_ranks() -> None:
    results = run_ranks(check_skew, timeout_s=90.0)
    print(f"calls by rank: {results}")
