"""Policies compared on one mix: the same ranks, the same compute times, turn by turn."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from controller.errors import UsageError
from controller.ops.testbed import Testbed
from controller.priority.policies import POLICIES
from controller.priority.ranges import check_integer
from controller.sim.measures import Iteration
from controller.workload.control import FAIR, Running, controlled
from controller.workload.crew import Crew
from controller.workload.fabric import increase, read_counters
from controller.workload.mixes import Mix
from controller.workload.plan import Course, Traffic, plan_alone, plan_round

DEFAULT_POLICIES = (FAIR, "static", "mltcp", "laxity")
# Windows of each job on an idle network, to know what there is to lose.
_ALONE_ITERATIONS = 8

Progress = Callable[[float], None]


@dataclass(frozen=True)
class Options:
    """How to compare.

    Parameters
    ----------
    policies
        In the order of the first round; every other round takes the opposite one, so that a
        drift of the machine falls on all of them.
    rounds
        How often each has its turn.
    iterations, warmup
        Of the job with the longest period, in each turn: those that count, and those before.
    seed
        Of jitter and offsets.

    Raises
    ------
    UsageError
        A policy is unknown or twice there, or a number impossible.
    """

    policies: tuple[str, ...] = DEFAULT_POLICIES
    rounds: int = 3
    iterations: int = 20
    warmup: int = 8
    seed: int = 1

    def __post_init__(self) -> None:
        known = (FAIR, *(name for name in POLICIES if name != FAIR))
        for policy in self.policies:
            if policy not in known:
                raise UsageError(f"Policy {policy!r} is unknown; allowed: {', '.join(known)}.")
            if self.policies.count(policy) > 1:
                raise UsageError(f"Policy {policy} is named twice; allowed: each once.")
        if not self.policies:
            raise UsageError(f"No policy is named; allowed: {', '.join(known)}.")
        check_integer("Number of rounds", self.rounds, 1, 10_000)
        check_integer("Number of iterations", self.iterations, 1, 1_000_000)
        check_integer("Number of warm-up iterations", self.warmup, 1, 1_000_000)
        check_integer("Seed", self.seed, 0, 2**32 - 1)

    def turns(self) -> list[tuple[int, str]]:
        """Round and policy, in the order in which they are run."""
        result = []
        for number in range(self.rounds):
            order = self.policies if number % 2 == 0 else self.policies[::-1]
            result += [(number, policy) for policy in order]
        return result


@dataclass(frozen=True)
class Turn:
    """One episode of one policy.

    Parameters
    ----------
    round, policy
        Which.
    records
        All its iterations, warm-up and end as well.
    counters
        What rxe's counters gained on all hosts.
    control_bytes
        Said between ranks and controllers, both directions.
    wall_s, agent_cpu_s
        How long it took, and what the controller used of a processor meanwhile; 0 where none
        runs.
    """

    round: int
    policy: str
    records: tuple[Iteration, ...]
    counters: Mapping[str, int]
    control_bytes: int
    wall_s: float
    agent_cpu_s: float


@dataclass(frozen=True)
class Contest:
    """Everything that was measured on one mix; what a report is made of.

    Parameters
    ----------
    mix, traffic, options
        What was run.
    alone_ns
        Job -> windows when nobody else sent.
    turns
        In the order in which they were run.
    kernel
        Release.
    """

    mix: Mix
    traffic: Traffic
    options: Options
    alone_ns: Mapping[str, tuple[float, ...]]
    turns: tuple[Turn, ...]
    kernel: str = ""


def run_contest(
    mix: Mix,
    traffic: Traffic,
    bed: Testbed,
    options: Options,
    progress: Progress = lambda _: None,
    told: Callable[[str], None] = lambda _: None,
    run_dir: Path | None = None,
) -> Contest:
    """Compare policies on the hosts of a testbed.

    Parameters
    ----------
    mix, traffic, options
        What to run.
    bed
        Of `fabric.shared_hosts`.
    progress
        Called with the share that is done, 0 .. 1.
    told
        Called with a line for people at the begin of each turn.
    run_dir
        Of the controllers, for who wants to look at them meanwhile; None: one that nobody knows.

    Raises
    ------
    RankError
        A rank died or stands still: a policy has starved it.
    StellarError
        A controller cannot start.
    """
    turns = options.turns()
    # The alone part is short; it counts as one turn.
    parts = len(turns) + 1
    with tempfile.TemporaryDirectory(prefix="stlr-") as folder:
        run_dir = run_dir or Path(folder) / "run"
        with Crew(mix, traffic, bed, run_dir) as crew:
            alone = {}
            for place, job in enumerate(mix.jobs):
                told(f"{mix.name}: {job.name} alone")
                records = crew.run(plan_alone(job, _ALONE_ITERATIONS))
                # The first brings queue pairs and memory to life.
                alone[job.name] = tuple(record.window_ns for record in records[1:])
                progress((place + 1) / len(mix.jobs) / parts)
            done: list[Turn] = []
            for number, policy in turns:
                told(f"{mix.name}: round {number + 1} of {options.rounds}, {policy}")
                begun = (len(done) + 1) / parts

                def on_share(share: float, begun: float = begun) -> None:
                    progress(begun + share / parts)

                courses = plan_round(mix, options.iterations, options.warmup, options.seed, number)
                with controlled(mix, traffic, bed, policy, run_dir) as controller:
                    done.append(_turn(crew, bed, courses, number, policy, controller, on_share))
    return Contest(mix, traffic, options, alone, tuple(done), os.uname().release)


def _turn(
    crew: Crew,
    bed: Testbed,
    courses: Mapping[str, Course],
    number: int,
    policy: str,
    controller: Running | None,
    progress: Progress,
) -> Turn:
    before = read_counters(bed)
    said_before = crew.control_bytes
    cpu_before_s = controller.cpu_s() if controller else 0.0
    began_s = time.monotonic()
    records = crew.run(courses, progress)
    return Turn(
        round=number,
        policy=policy,
        records=records,
        counters=increase(before, read_counters(bed)),
        control_bytes=crew.control_bytes - said_before,
        wall_s=time.monotonic() - began_s,
        agent_cpu_s=controller.cpu_s() - cpu_before_s if controller else 0.0,
    )
