"""What came of an incast: throughput stability, queue, fairness, length of windows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from controller.congestion.flows import FloatArray
from controller.sim.congestion.bins import Bins, merged, stability
from controller.sim.congestion.windows import Windows
from controller.sim.measures import slowest_mean

_NS = 10**9
_MS = 10**6


@dataclass(frozen=True)
class IncastOutcome:
    """What came of one case. Figures that could not be measured are NaN.

    A bin counts for the port when a job's window was open all through it, for a job when its own
    was, for a flow when it had something to send all through it. So what is measured is how
    the port is used by those who want it, not how much they want.

    Attributes
    ----------
    stability
        Throughput stability of the port, 1 - CoV (standard deviation / mean) of its bins.
    job_stability, flow_stability
        The same of each job's bytes through the port, and of each flow's bytes at its sender;
        means over jobs and flows.
    utilisation
        Bytes through the port / what it can carry, over the time in which a window is open.
    jain
        Jain's index of the flows' bytes in a bin, mean over bins with two such flows.
    queue_mean_bytes, queue_p99_bytes, queue_max_bytes
        In the time in which a window is open.
    windows
        Completed ones that began after the warm-up.
    window_mean_ns, window_slowest_ns
        Time from a window's begin until its last byte left the port: mean, and mean of the
        slowest 10 %.
    cuts_per_ms, notifications_per_ms
        Of each flow, in the time in which a window is open.
    bins
        Of the port that counted.
    """

    stability: float
    job_stability: float
    flow_stability: float
    utilisation: float
    jain: float
    queue_mean_bytes: float
    queue_p99_bytes: float
    queue_max_bytes: float
    windows: int
    window_mean_ns: float
    window_slowest_ns: float
    cuts_per_ms: float
    notifications_per_ms: float
    bins: int


@dataclass(frozen=True)
class Measured:
    """What a run has kept.

    Attributes
    ----------
    bins, windows
        Of all ports.
    begin_ns, end_ns
        Time that is measured.
    cuts, notifications
        In that time, of each port's flows together, shape (ports,).
    """

    bins: Bins
    windows: Windows
    begin_ns: int
    end_ns: int
    cuts: FloatArray
    notifications: FloatArray

    def outcome(self, port: int, flows: slice, rate_Bps: float) -> IncastOutcome:
        """What came of one port.

        Parameters
        ----------
        port
            Its position.
        flows
            Positions of the flows into it.
        rate_Bps
            What it carries.
        """
        bins, windows = self.bins, self.windows
        jobs = windows.jobs_of(port)
        spans = [windows.open_spans(job, self.begin_ns, self.end_ns) for job in jobs]
        is_open = merged(np.concatenate(spans))
        open_ns = float((is_open[:, 1] - is_open[:, 0]).sum())
        flow_ms = open_ns / _MS * (flows.stop - flows.start)
        port_bytes = bins.port_bytes(port, is_open)
        queue = bins.queue_samples(port, is_open)
        lengths = [ns for job in jobs for ns in windows.lengths_ns(job, self.begin_ns)]
        of_jobs = [
            stability(bins.stream_bytes(job, own)) for job, own in zip(jobs, spans, strict=True)
        ]
        return IncastOutcome(
            stability=stability(port_bytes),
            job_stability=_mean(np.array(of_jobs)),
            flow_stability=_mean(bins.flow_stabilities[flows]),
            utilisation=_ratio(bins.total_bytes(port), rate_Bps * open_ns / _NS),
            jain=float(bins.jain[port]),
            queue_mean_bytes=_mean(queue),
            queue_p99_bytes=float(np.percentile(queue, 99)) if queue.size else float("nan"),
            queue_max_bytes=float(queue.max()) if queue.size else float("nan"),
            windows=len(lengths),
            window_mean_ns=_mean(np.array(lengths)),
            window_slowest_ns=slowest_mean(lengths) if lengths else float("nan"),
            cuts_per_ms=_ratio(float(self.cuts[port]), flow_ms),
            notifications_per_ms=_ratio(float(self.notifications[port]), flow_ms),
            bins=port_bytes.size,
        )


def _mean(values: FloatArray) -> float:
    """Of those that could be measured; NaN where none could."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else float("nan")


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else float("nan")
