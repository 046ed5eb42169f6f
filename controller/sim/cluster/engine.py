"""Event-driven, flow-level simulation of jobs on a cluster, under a coordinator of theirs.

Rates are constant between events, so nothing is approximated but packets: no queue, no loss. With
DCQCN's rates there are queues, and rates are means of short intervals.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from controller.errors import UsageError
from controller.priority.coordination import Coordinator
from controller.sim.cluster.dcqcn import DcqcnSimulation
from controller.sim.cluster.jobs import ClusterJob
from controller.sim.cluster.outcome import DCQCN_SHARING, ClusterConditions, ClusterOutcome
from controller.sim.cluster.simulation import Simulation
from controller.sim.cluster.topology import LeafSpine
from controller.sim.jobs import names_differ
from controller.sim.progress import Progress


def simulate_cluster(
    jobs: Sequence[ClusterJob],
    topology: LeafSpine,
    coordinator: Coordinator,
    conditions: ClusterConditions,
    *,
    until_iterations: int | Mapping[str, int],
    warmup: int = 0,
    seed: int = 0,
    progress: Progress | None = None,
) -> ClusterOutcome:
    """Run jobs on a cluster until each has done its number of iterations.

    A job that is through goes on, so that the others never have the network to themselves; one
    that leaves early (`ClusterJob.iterations`) is through when it does. Buckets of an iteration
    are sent one after the other in steps, each at the rate that the network gives to all flows of
    the step; the next iteration begins when the backward pass is over and all buckets are through.

    Parameters
    ----------
    jobs
        At least one; names differ.
    topology
        Of the network.
    coordinator
        Asked about the jobs of a component of the contention graph, for each in which there are
        two or more: when a window begins or ends, every `tick_ns` while several are open, when
        the laxity of a job that waits runs out, and when a job comes or goes.
    conditions
        How links are shared, and how well the coordinator sees and acts.
    until_iterations
        Of each job, from 1, for all or by name; see `controller.sim.cluster.course`'s
        `even_iterations`.
    warmup
        Iterations of each job that are left out at the begin; below the least of
        `until_iterations`.
    seed
        Of compute times, of prediction errors and of paths; the same for every coordinator.
    progress
        Called now and then with the iterations done and those wanted.

    Raises
    ------
    UsageError
        There is no job, two have one name, one has no number of iterations, the topology lacks
        a NIC, a job never gets through, or is no ring although rates are DCQCN's.
    """
    names_differ([job.name for job in jobs])
    wanted = wanted_iterations(jobs, until_iterations, warmup)
    kind = DcqcnSimulation if conditions.sharing == DCQCN_SHARING else Simulation
    simulation = kind(jobs, topology, coordinator, conditions, wanted, warmup, seed)
    return simulation.run(progress)


def wanted_iterations(
    jobs: Sequence[ClusterJob], until: int | Mapping[str, int], warmup: int
) -> dict[str, int]:
    """Name -> iterations after which a job counts as through, see `simulate_cluster`."""
    return {job.name: _wanted(job, until, warmup) for job in jobs}


def _wanted(job: ClusterJob, until: int | Mapping[str, int], warmup: int) -> int:
    count = until if isinstance(until, int) else until.get(job.name, 0)
    if count < 1:
        raise UsageError(f"Job {job.name}: {count} iterations; allowed: from 1.")
    if job.iterations:
        count = min(count, job.iterations)
    if not 0 <= warmup < count:
        raise UsageError(
            f"Job {job.name}: {count} iterations with {warmup} of warm-up; allowed: 0 .. "
            f"{count - 1} of warm-up."
        )
    return count
