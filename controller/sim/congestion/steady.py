"""Long flows through one port, until their start is forgotten: whether the queue settles.

The settings of Zhu et al., "ECN or Delay", CoNEXT 2016, sections 3 (DCQCN) and 4.3 (patched
TIMELY), with flows one by one in place of their fluid: cases side by side, in steps of time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from controller.congestion.dcqcn import PRESETS, DcqcnParameters
from controller.congestion.flows import DcqcnFlows, FloatArray, IntArray
from controller.congestion.timely_flows import TimelyFlows, TimelyParameters
from controller.errors import UsageError
from controller.priority.classes import KMAX_BYTES, KMIN_BYTES, PMAX
from controller.sim.congestion import chance
from controller.sim.congestion.feedback import CnpFeedback, Feedback, RttFeedback
from controller.sim.congestion.links import Link
from controller.sim.congestion.network import Network
from controller.sim.fairness import jain
from controller.sim.packets.oscillation import Oscillation, oscillation
from controller.sim.progress import Progress

_NS = 10**9
_TOLD_STEPS = 500


@dataclass(frozen=True)
class SteadyCase:
    """One port and its flows.

    Attributes
    ----------
    flows
        N.
    delay_ns
        From a mark to the reaction to it; with TIMELY: propagation there and back.
    seed
        Of marks, and of the times of first packets.
    window
        Marks by the sliding window's average instead of by the queue of the moment.
    start
        First rate of all flows, as a multiple of their fair share.
    """

    flows: int
    delay_ns: int
    seed: int = 0
    window: bool = False
    start: float = 1.0


@dataclass(frozen=True)
class SteadyConditions:
    """What holds for all cases; the defaults are the paper's.

    Attributes
    ----------
    parameters
        Constants of DCQCN or of patched TIMELY, at the flows' link rate, which is the port's.
    kmin_bytes, kmax_bytes, pmax
        Marking line; TIMELY has no marks.
    seconds, warmup_s
        Simulated time that is measured, and before it.
    step_ns, sample_ns
        Of the simulation; between two samples of the queue, whole steps.
    packet_bytes
        On the wire.
    echo_holds
        See `controller.sim.congestion.feedback.CnpFeedback`; of DCQCN.
    """

    parameters: DcqcnParameters | TimelyParameters = field(default_factory=lambda: PRESETS["paper"])
    kmin_bytes: float = KMIN_BYTES
    kmax_bytes: float = KMAX_BYTES
    pmax: float = PMAX
    seconds: float = 0.3
    warmup_s: float = 0.1
    step_ns: int = 1_000
    sample_ns: int = 10_000
    packet_bytes: int = 1_000
    echo_holds: bool = True

    def __post_init__(self) -> None:
        if self.sample_ns < self.step_ns or self.sample_ns % self.step_ns:
            raise UsageError(
                f"Samples each {self.sample_ns} ns; allowed: whole steps of {self.step_ns} ns."
            )
        if not (self.seconds > 0 and self.warmup_s >= 0):
            raise UsageError(f"{self.seconds} s after {self.warmup_s} s; allowed: above 0, from 0.")


@dataclass(frozen=True)
class SteadyOutcome:
    """What the queue and the rates of one case do.

    Attributes
    ----------
    queue_bytes
        Samples, shape (n,).
    queue_mean_bytes, queue_std_bytes
        Of them.
    empty
        Share of samples in which there is no queue: the link is not used then.
    utilisation
        What the link carries / what it can.
    oscillation
        Dominant frequency, and what of a swing is left one period later.
    jain
        Jain's index of the flows' bytes in the whole time.
    rate_cov
        Standard deviation / mean of a flow's rate over time, mean over the flows.
    hyper
        Hyper increases that happened. The fluid model has none, nor has TIMELY.
    """

    queue_bytes: FloatArray
    queue_mean_bytes: float
    queue_std_bytes: float
    empty: float
    utilisation: float
    oscillation: Oscillation
    jain: float
    rate_cov: float
    hyper: int


def simulate_steady(
    cases: Sequence[SteadyCase],
    conditions: SteadyConditions,
    progress: Progress | None = None,
) -> list[SteadyOutcome]:
    """Simulate all cases side by side; each comes out as it would alone.

    Parameters
    ----------
    cases, conditions, progress
        As in `controller.sim.congestion.incast.simulate_incast`.

    Returns
    -------
    list of SteadyOutcome
        In the order of the cases.
    """
    if not cases or min(case.flows for case in cases) < 1:
        raise UsageError("Cases without flows; allowed: one or more, each with flows.")
    port = np.repeat(np.arange(len(cases)), [case.flows for case in cases])
    network, flows = _network(cases, conditions, port)
    steps_s = _NS / conditions.step_ns
    warm = round(conditions.warmup_s * steps_s)
    steps = warm + round(conditions.seconds * steps_s)
    each = conditions.sample_ns // conditions.step_ns
    queues, total, squares = [], np.zeros(port.size), np.zeros(port.size)
    served, sent = np.zeros(len(cases)), np.zeros(port.size)
    for step in range(1, steps + 1):
        network.step()
        if step > warm:
            served += network.links.served_bytes
            sent[network.sent_flows] += network.sent_bytes
            if step % each == 0:
                queues.append(network.links.queue_bytes.copy())
                total += flows.rates_Bps
                squares += flows.rates_Bps**2
        if progress and step % _TOLD_STEPS == 0:
            progress(step, steps)
    mean = total / len(queues)
    cov = np.sqrt(np.maximum(0.0, squares / len(queues) - mean**2)) / mean
    table = np.array(queues)
    ends = np.cumsum([case.flows for case in cases]).tolist()
    hyper = flows.hyper_increases if isinstance(flows, DcqcnFlows) else np.zeros(port.size)
    return [
        _outcome(
            table[:, number],
            float(served[number] / (conditions.parameters.link_Bps * (steps - warm) / steps_s)),
            sent[end - case.flows : end],
            float(cov[end - case.flows : end].mean()),
            int(hyper[end - case.flows : end].sum()),
            conditions.sample_ns / _NS,
        )
        for number, (case, end) in enumerate(zip(cases, ends, strict=True))
    ]


def _network(
    cases: Sequence[SteadyCase], conditions: SteadyConditions, port: IntArray
) -> tuple[Network, DcqcnFlows | TimelyFlows]:
    parameters, step_ns = conditions.parameters, conditions.step_ns
    counts = [case.flows for case in cases]
    keys = np.concatenate([chance.keys(case.seed, case.flows) for case in cases])
    delays_ns = np.repeat([case.delay_ns for case in cases], counts)
    link = Link(parameters.link_Bps, conditions.kmin_bytes, conditions.kmax_bytes, conditions.pmax)
    flows: DcqcnFlows | TimelyFlows
    if isinstance(parameters, DcqcnParameters):
        flows = DcqcnFlows(parameters, port.size)
        feedback: Feedback = CnpFeedback(flows, keys, delays_ns, step_ns, conditions.echo_holds)
    else:
        flows = TimelyFlows(parameters, port.size)
        feedback, link = RttFeedback(flows, delays_ns, step_ns), link.unmarked()
    network = Network(
        feedback,
        [replace(link, window=case.window) for case in cases],
        np.arange(len(cases)),
        port,
        step_ns=step_ns,
        packet_bytes=conditions.packet_bytes,
    )
    everyone = np.arange(port.size)
    network.silence(everyone)
    network.offer(everyone, np.full(port.size, np.inf), chance.uniform(keys, 0))
    starts = np.repeat([case.start / case.flows for case in cases], counts)
    flows.set_rates(everyone, starts * parameters.link_Bps)
    return network, flows


def _outcome(
    queue: FloatArray, utilisation: float, sent: FloatArray, cov: float, hyper: int, sample_s: float
) -> SteadyOutcome:
    return SteadyOutcome(
        queue_bytes=queue,
        queue_mean_bytes=float(queue.mean()),
        queue_std_bytes=float(queue.std()),
        empty=float((queue == 0).mean()),
        utilisation=utilisation,
        oscillation=oscillation(queue, sample_s),
        jain=jain(sent),
        rate_cov=cov,
        hyper=hyper,
    )
