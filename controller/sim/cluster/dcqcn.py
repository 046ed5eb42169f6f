"""Rates of a cluster's jobs by DCQCN instead of by shares: its flows on simulated queues."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from controller.congestion.dcqcn import preset
from controller.congestion.flows import DcqcnFlows
from controller.errors import UsageError
from controller.priority.coordination import Coordinator
from controller.sim.cluster.collectives import edge_paths
from controller.sim.cluster.jobs import RING, ClusterJob
from controller.sim.cluster.outcome import ClusterConditions
from controller.sim.cluster.simulation import Simulation
from controller.sim.cluster.topology import LeafSpine
from controller.sim.congestion import chance
from controller.sim.congestion.feedback import CnpFeedback
from controller.sim.congestion.links import Link
from controller.sim.congestion.network import Network

PRESET = "paper"
# From a mark to the reaction to it: a data centre's round trip and the NIC, as in
# `controller.sim.congestion.incast`.
FEEDBACK_ns = 10_000
# A tenth of the interval of CNPs and of the timer.
STEP_ns = 5_000
# Steps after which the cluster hears of what has been delivered: what begins in between waits.
_STEPS = 4
# Half a byte less than all is all: queues are served in parts of bytes.
_ALL_bytes = 0.5


class RateSource(Protocol):
    """A network that is asked how far the jobs' steps come in the next interval."""

    interval_ns: int

    def load(self, job: int, nbytes: float) -> None:
        """A job's next step, of which each of its flows has so much to send."""

    def weigh(self, job: int, weight: float) -> None:
        """Weight of a job's flows from now on."""

    def advance(self) -> Mapping[int, float]:
        """Go on by an interval.

        Returns
        -------
        mapping
            Job that has a step under way -> bytes by which its slowest flow has come further;
            infinity: to the end.
        """


class DcqcnNetwork:
    """The flows of rings, each with its reaction point, on the links of a cluster.

    Flows of a step are not tied to each other, as those of a real ring are by its chunks: a step is
    over when the slowest is. Classes count for nothing; weights are those of rate increases.

    Parameters
    ----------
    jobs
        With rings; others would change the peers of their flows in each step.
    topology
        Of the network; marking is by the default thresholds at each link's rate.
    qps_per_peer
        Flows on each edge of a ring.
    seed
        Of paths and marks.
    step_ns
        Of the simulated queues.

    Raises
    ------
    UsageError
        A job has another algorithm.
    """

    def __init__(
        self,
        jobs: Sequence[ClusterJob],
        topology: LeafSpine,
        qps_per_peer: int = 1,
        seed: int = 0,
        step_ns: int = STEP_ns,
    ) -> None:
        for job in jobs:
            if job.algorithm != RING:
                raise UsageError(
                    f"Job {job.name}: algorithm is {job.algorithm!r}; with DCQCN's rates allowed: "
                    f"{RING!r}.",
                    "Correct it, or share by classes.",
                )
        self.interval_ns = _STEPS * step_ns
        paths = [ring_paths(job, topology, qps_per_peer, seed) for job in jobs]
        ends = np.cumsum([len(each) for each in paths])
        self._flows_of = [
            np.arange(end - len(each), end) for each, end in zip(paths, ends, strict=True)
        ]
        count = int(ends[-1])
        self._control = DcqcnFlows(preset(PRESET, topology.nic_Bps), max(1, count))
        keys = chance.keys(seed, max(1, count))
        self._network = Network(
            CnpFeedback(self._control, keys, FEEDBACK_ns, step_ns),
            [Link.by_rate(rate_Bps) for rate_Bps in topology.capacity_Bps.tolist()],
            np.concatenate([*paths, np.zeros((int(count == 0), 4), np.int64)]),
            step_ns=step_ns,
        )
        self._network.silence(np.arange(max(1, count)))
        # Job -> what each of its flows has to send, what had been delivered before it, and how
        # far the slowest is.
        self._under_way: dict[int, tuple[float, NDArray[np.float64], float]] = {}

    def load(self, job: int, nbytes: float) -> None:
        """See `RateSource.load`."""
        flows = self._flows_of[job]
        self._network.offer(flows, np.full(len(flows), nbytes), np.zeros(len(flows)))
        self._under_way[job] = (nbytes, self._network.delivered_bytes[flows].copy(), 0.0)

    def weigh(self, job: int, weight: float) -> None:
        """See `RateSource.weigh`."""
        self._control.multipliers[self._flows_of[job]] = weight

    def advance(self) -> Mapping[int, float]:
        """See `RateSource.advance`."""
        for _ in range(_STEPS):
            self._network.step()
        moved: dict[int, float] = {}
        for job, (nbytes, before, done) in list(self._under_way.items()):
            delivered = self._network.delivered_bytes[self._flows_of[job]] - before
            slowest = float(delivered.min())
            if slowest >= nbytes - _ALL_bytes:
                moved[job] = math.inf
                del self._under_way[job]
            else:
                moved[job] = slowest - done
                self._under_way[job] = (nbytes, before, slowest)
        return moved


class DcqcnSimulation(Simulation):
    """A cluster whose rates a network says, an interval at a time.

    The network is ahead by up to an interval, in which rates are the mean of what it delivers. A
    step that begins in mid-interval waits for the next. Of what a coordinator decides only weights
    count: there are no classes, so no floors and nothing that is sent again when one rises, and
    nobody is paced to a share.

    Raises
    ------
    UsageError
        A job is no ring, or `ClusterConditions.raise_bytes` is not 0.
    """

    def __init__(
        self,
        jobs: Sequence[ClusterJob],
        topology: LeafSpine,
        coordinator: Coordinator | None,
        conditions: ClusterConditions,
        wanted: Mapping[str, int],
        warmup: int,
        seed: int,
    ) -> None:
        if conditions.raise_bytes:
            raise UsageError(
                f"raise_bytes is {conditions.raise_bytes} with DCQCN's rates, where no class "
                "rises; allowed: 0.",
                "Leave it out, or share by classes.",
            )
        super().__init__(jobs, topology, coordinator, conditions, wanted, warmup, seed)
        self._source: RateSource = DcqcnNetwork(jobs, topology, conditions.qps_per_peer, seed)
        self._weights = np.ones(len(jobs))
        self._loaded: list[int] = []
        self.own_ns = min(job.arrival_ns for job in jobs)

    def _load(self, job: int, *, keeps_rate: bool = False) -> None:
        super()._load(job)
        self._loaded.append(job)

    def _own(self) -> None:
        """The next interval begins."""
        for job in self._loaded:
            self._source.load(job, self.runs[job].steps[self.runs[job].step].stage.nbytes)
        self._loaded.clear()
        for job in np.flatnonzero(self.steering.weight != self._weights).tolist():
            self._source.weigh(job, float(self.steering.weight[job]))
        self._weights = self.steering.weight.copy()
        interval_s = self._source.interval_ns / 1e9
        moved = self._source.advance()
        jobs = np.fromiter(moved, np.int64, len(moved))
        most = self.transfers.step_rest_bytes(jobs, self.now_ns)
        nbytes = np.minimum(np.fromiter(moved.values(), np.float64, len(moved)), most)
        self.transfers.set_rates(jobs, nbytes / interval_s, self.now_ns)
        self.own_ns = self.now_ns + self._source.interval_ns

    def _share(self) -> None:
        """Nothing but the network gives rates."""
        self.steering.stale.clear()


def ring_paths(
    job: ClusterJob, topology: LeafSpine, qps_per_peer: int, key: int
) -> NDArray[np.int64]:
    """Links of each flow, shape (flows, 4), unused ones -1 at the end.

    The same paths as those of `controller.sim.cluster.collectives.stages`.
    """
    if len(job.nics) == 1:
        return np.zeros((0, 4), np.int64)
    senders = np.asarray(job.nics, np.int64)
    receivers = np.roll(senders, -1)
    paths = edge_paths(job.name, topology, senders, receivers, qps_per_peer, key).reshape(-1, 4)
    # Within a leaf the two links in the middle are missing.
    order = np.argsort(paths < 0, axis=1, kind="stable")
    return np.take_along_axis(paths, order, axis=1)
