"""A contest made by hand: two jobs of one period, whose windows overlap only under `fair`."""

from __future__ import annotations

from controller.sim.measures import Iteration
from controller.workload.contest import Contest, Options, Turn
from controller.workload.fabric import TROUBLES
from controller.workload.mixes import Mix, MixJob
from controller.workload.plan import Traffic

MS = 1_000_000
MIX = Mix(
    "hand",
    (MixJob("a", "resnet50", 500 * MS, 0.4, 5), MixJob("b", "bert-large", 500 * MS, 0.2, 4)),
    0.0,
)
# Policy -> job -> window of each iteration that counts, in ms.
WINDOWS_ms = {"fair": {"a": 300, "b": 200}, "laxity": {"a": 200, "b": 150}}
ITERATIONS, WARMUP, ROUNDS = 10, 2, 2


def turn(number: int, policy: str, windows_ms: dict[str, int], slow: int = 0) -> Turn:
    """One turn; iteration 5 of each job takes `slow` ms longer."""
    records = []
    for job in MIX.jobs:
        now_ns = 0
        for iteration in range(WARMUP + ITERATIONS + 3):
            begin_ns = now_ns + job.compute_ns
            length_ms = windows_ms[job.name] + (slow if iteration == 5 else 0)
            if iteration < WARMUP:
                length_ms = 10_000  # would show in every figure
            end_ns = begin_ns + length_ms * MS
            records.append(Iteration(job.name, iteration, now_ns, begin_ns, end_ns))
            now_ns = end_ns
    counters = dict.fromkeys(TROUBLES, 0) | {"sent_pkts": 1000}
    if policy == "laxity":
        counters["duplicate_request"] = 5
    return Turn(
        number, policy, tuple(records), counters, 0 if policy == "fair" else 3000, 10.0,
        0.0 if policy == "fair" else 0.5,
    )  # fmt: skip


def contest(slow_ms: int = 400) -> Contest:
    """All turns of it."""
    options = Options(("fair", "laxity"), ROUNDS, ITERATIONS, WARMUP, 1)
    alone_ns = {job.name: (job.window_ns * 1.0, job.window_ns * 1.0) for job in MIX.jobs}
    turns = tuple(
        turn(number, policy, WINDOWS_ms[policy], slow_ms) for number, policy in options.turns()
    )
    return Contest(MIX, Traffic(6_250_000), options, alone_ns, turns, "7.3.4")
