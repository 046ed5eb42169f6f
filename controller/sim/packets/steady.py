"""DCQCN flows through one port, packet by packet, until they are in a steady state; and its queue.

The setting is that of the fluid model of Zhu et al., "ECN or Delay: Lessons Learnt from Analysis of
DCQCN and TIMELY" (CoNEXT 2016), sections 3.1 and 3.2: N long flows, one congested port.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from controller.congestion.dcqcn import PRESETS, DcqcnParameters
from controller.congestion.marking import SlidingWindow, VirtualQueue
from controller.congestion.reaction_point import ReactionPoint
from controller.errors import UsageError
from controller.priority.classes import KMAX_BYTES, KMIN_BYTES, PMAX
from controller.priority.ports import SLOT_ns
from controller.sim.fairness import jain
from controller.sim.packets.events import EventQueue
from controller.sim.packets.oscillation import Oscillation, oscillation
from controller.sim.packets.port import FifoPort, Marker, MarkingLine, Yardstick
from controller.sim.packets.sources import DcqcnFlow, NotificationPoint

_NS = 10**9


def without_hyper_increase(parameters: DcqcnParameters) -> DcqcnParameters:
    """The same with hyper increase as weak as it can be: R_HAI is R_AI.

    The fluid model has no hyper increase. It starts when both counters are beyond F, which takes
    F + 1 times the byte counter in one go: with congestion, none is seen (`SteadyResult.hyper`).
    """
    return replace(parameters, rate_hai_Bps=parameters.rate_ai_Bps)


# At 40 Gb/s these are the paper's thresholds.
PAPER_LINE = MarkingLine(KMIN_BYTES, KMAX_BYTES, PMAX)
PAPER_PARAMETERS = without_hyper_increase(PRESETS["paper"])


@dataclass(frozen=True)
class SteadySetting:
    """Flows, port, marks and delays of one run. The constants are those of the CoNEXT 2016 paper.

    Attributes
    ----------
    flows
        N, at `scale` 1.
    delay_ns
        From a mark to the reaction to it; the queue comes on top where marks are set at arrival.
    seconds, warm_up_s
        Simulated time that is measured, and before it.
    seed
        Of marks and of the times of first packets.
    packet_bytes
        On the wire.
    link_Bps
        Of the congested port, whole bytes a second, at `scale` 1; each sender's own link is the
        one of `parameters`.
    line
        Kmin, Kmax, Pmax, at `scale` 1.
    parameters
        Of reaction and notification points.
    window_slots, slot_ns
        Marks by the live sliding window of so many slots; 0 slots: by the queue of the moment.
    drain_share
        Share of the port's rate at which the window's virtual queue drains. At 1 it is the
        real queue, as it was when the packet arrived; the live default is 0.95.
    at_departure
        Marks by the queue that a packet leaves behind, see `Marker`; without a window only.
    echo_holds
        See `NotificationPoint`.
    scale
        M: M times the flows on M times the link, with M times Kmin and Kmax. The fluid model
        of it is the same, queue and rates being M times as large, and noise of single
        packets is smaller by the square root of M: what stays as M grows is no noise.
    start_alpha
        0: flows start as DCQCN has it, at line rate. Else at their share of the link, with this
        alpha, within one timer of one another: near the fixed point, to see whether they stay.
    sample_ns
        The queue is sampled so often.
    """

    flows: int
    delay_ns: int
    seconds: float = 0.2
    warm_up_s: float = 0.1
    seed: int = 0
    packet_bytes: int = 1000
    link_Bps: int = 5_000_000_000
    line: MarkingLine = PAPER_LINE
    parameters: DcqcnParameters = PAPER_PARAMETERS
    window_slots: int = 0
    slot_ns: int = SLOT_ns
    drain_share: float = 1.0
    at_departure: bool = True
    echo_holds: bool = True
    scale: int = 1
    start_alpha: float = 0.0
    sample_ns: int = 5_000

    def __post_init__(self) -> None:
        for key, low in (("flows", 1), ("delay_ns", 0), ("scale", 1), ("sample_ns", 1)):
            if getattr(self, key) < low:
                raise UsageError(f"Setting {key} is {getattr(self, key)}; allowed: from {low}.")
        if not (self.seconds > 0 and self.warm_up_s >= 0):
            raise UsageError(
                f"Setting seconds is {self.seconds}, warm_up_s {self.warm_up_s}; "
                "allowed: above 0, from 0."
            )
        if not 0 <= self.start_alpha <= 1:
            raise UsageError(f"Setting start_alpha is {self.start_alpha}; allowed: 0 .. 1.")
        if self.window_slots < 0 or not 0 < self.drain_share <= 1:
            raise UsageError(
                f"Setting window_slots is {self.window_slots}, drain_share {self.drain_share}; "
                "allowed: from 0, above 0 to 1."
            )


@dataclass(frozen=True)
class SteadyResult:
    """Figures of one run, of the measured time alone. Bytes are divided by the setting's `scale`.

    Attributes
    ----------
    setting
        What was run.
    queue_mean_bytes, queue_std_bytes, queue_p99_bytes, queue_max_bytes
        Of the port; the mean is over time, the others over samples.
    idle_share
        Share of samples that found the port empty.
    utilisation
        Bytes that left, as a share of what the port can carry.
    marked_share
        Of packets; 0 where there are none.
    cnps_per_flow_s
        CNPs that arrived, per flow and second.
    jain
        Jain's index of the bytes of each flow, 1 / N .. 1.
    flow_cov
        Coefficient of variation of the flows' bytes; like `jain` NaN where no packet left.
    rate_cov
        Coefficient of variation of single flows' rates over time (samples of Rc), mean of flows.
    alpha_mean
        Of flows and samples.
    hyper, released
        Increase events by R_HAI, and returns of a flow to line rate, of all flows, warm-up too.
    swing
        Of the queue.
    packets, events
        Simulated in all, warm-up too.
    """

    setting: SteadySetting
    queue_mean_bytes: float
    queue_std_bytes: float
    queue_p99_bytes: float
    queue_max_bytes: float
    idle_share: float
    utilisation: float
    marked_share: float
    cnps_per_flow_s: float
    jain: float
    flow_cov: float
    rate_cov: float
    alpha_mean: float
    hyper: int
    released: int
    swing: Oscillation
    packets: int
    events: int

    def to_json(self) -> dict[str, Any]:
        """Members by name; the setting's constants by theirs."""
        return asdict(self)


class SteadyRun:
    """The network of one setting, with the series that were sampled.

    Parameters
    ----------
    setting
        What to run.

    Attributes
    ----------
    flows
        All senders.
    port
        The congested one.
    """

    def __init__(self, setting: SteadySetting) -> None:
        self.setting = setting
        scale, parameters = setting.scale, setting.parameters
        draws = random.Random(setting.seed)
        self.events = EventQueue()
        self.port = FifoPort(self.events, setting.link_Bps * scale, _marker(setting, draws.random))
        self.flows = [self._flow(draws.random(), parameters) for _ in range(setting.flows * scale)]
        self._queue: list[int] = []
        self._rates: list[list[float]] = []
        self._alphas: list[float] = []
        self._sampled = 0

    def _flow(self, when: float, parameters: DcqcnParameters) -> DcqcnFlow:
        setting = self.setting
        if setting.start_alpha:
            start_ns = when * parameters.timer_ns
            reaction = ReactionPoint(replace(parameters, initial_alpha=setting.start_alpha))
            reaction.begin_window(int(start_ns), setting.link_Bps / setting.flows)
            reaction.begin_window(int(start_ns), 0)  # no floor: it was no prediction
        else:
            # Senders are not in step: first packets spread over one packet's time.
            start_ns = when * setting.packet_bytes * _NS / parameters.link_Bps
            reaction = ReactionPoint(parameters)
        return DcqcnFlow(
            self.events,
            self.port,
            setting.packet_bytes,
            reaction,
            NotificationPoint(parameters.echo_interval_ns, setting.echo_holds),
            setting.delay_ns,
            start_ns,
        )

    def _sample(self, now_ns: int) -> None:
        """Take a sample, and the next one in time."""
        self._queue.append(self.port.queue_bytes)
        # Rates change with timers and CNPs, some tens of us apart.
        if self._sampled % 10 == 0:
            self._rates.append([flow.reaction.rc_Bps for flow in self.flows])
            self._alphas.append(math.fsum(flow.reaction.alpha for flow in self.flows))
        self._sampled += 1
        self.events.at(now_ns + self.setting.sample_ns, self._sample)

    @property
    def queue_bytes(self) -> NDArray[np.float64]:
        """Samples of the queue, shape (samples,), divided by the scale."""
        return np.array(self._queue, dtype=np.float64) / self.setting.scale

    @property
    def rates_Bps(self) -> NDArray[np.float64]:
        """Every tenth sample's Rc, shape (samples / 10, flows)."""
        return np.array(self._rates)

    def run(self) -> SteadyResult:
        """Warm up, measure."""
        setting, port, flows = self.setting, self.port, self.flows
        begin_ns = round(setting.warm_up_s * _NS)
        end_ns = begin_ns + round(setting.seconds * _NS)
        self.events.run(begin_ns)
        port.begin_statistics(begin_ns)
        bytes_before = port.departed_bytes
        counts = (port.departed_packets, port.marked_packets, sum(flow.cnps for flow in flows))
        before = np.array([flow.delivered_packets for flow in flows])
        self.events.at(begin_ns, self._sample)
        self.events.run(end_ns)
        packets, marks, cnps = (
            now - then
            for now, then in zip(
                (port.departed_packets, port.marked_packets, sum(flow.cnps for flow in flows)),
                counts,
                strict=True,
            )
        )
        shares = np.array([flow.delivered_packets for flow in flows]) - before
        queue, rates = self.queue_bytes, self.rates_Bps
        return SteadyResult(
            setting=setting,
            queue_mean_bytes=port.mean_queue_bytes(end_ns) / setting.scale,
            queue_std_bytes=float(queue.std()),
            queue_p99_bytes=float(np.percentile(queue, 99)),
            queue_max_bytes=port.largest_bytes / setting.scale,
            idle_share=float(np.mean(queue == 0)),
            utilisation=(port.departed_bytes - bytes_before)
            / (port.rate_Bps * (end_ns - begin_ns) / _NS),
            marked_share=marks / packets if packets else 0.0,
            cnps_per_flow_s=cnps / len(flows) / setting.seconds,
            jain=jain(shares),
            flow_cov=float(shares.std() / shares.mean()) if packets else math.nan,
            rate_cov=float(np.mean(rates.std(axis=0) / rates.mean(axis=0))),
            alpha_mean=float(np.mean(self._alphas)) / len(flows),
            hyper=sum(flow.reaction.counters.hyper for flow in flows),
            released=sum(flow.reaction.counters.released for flow in flows),
            swing=oscillation(queue, setting.sample_ns / _NS),
            packets=port.departed_packets,
            events=self.events.happened,
        )


def packet_steady(setting: SteadySetting) -> SteadyResult:
    """Run one setting.

    Parameters
    ----------
    setting
        See `SteadySetting`; ten flows at 40 Gbit/s for 0.3 s are 1.5 million packets, about five
        seconds of one core.

    Returns
    -------
    SteadyResult
        The same for the same setting, seed included.

    Raises
    ------
    UsageError
        The measured time holds fewer than 16 samples of the queue.
    """
    return SteadyRun(setting).run()


def _marker(setting: SteadySetting, draw: Callable[[], float]) -> Marker:
    line = MarkingLine(
        setting.line.kmin_bytes * setting.scale,
        setting.line.kmax_bytes * setting.scale,
        setting.line.pmax,
    )
    if not setting.window_slots:
        return Marker(line, draw, at_departure=setting.at_departure)
    virtual = VirtualQueue(setting.link_Bps * setting.scale * setting.drain_share)
    window: Yardstick = SlidingWindow(virtual, setting.slot_ns, setting.window_slots)
    return Marker(line, draw, window)
