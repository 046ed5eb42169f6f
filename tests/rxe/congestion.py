"""The incast under control: marker on the shaped port, echo at the receiver, DCQCN and departure
times at the senders; with which constants, and what it must reach beside no control at all.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

from tests.hosts import Controller
from tests.rxe.stream import WINDOW_PACKETS
from tests.rxe.traffic import Incast, Outcome, controlled
from tests.rxe.verbs import RXE_MTU_BYTES

# rxe has at most 64 packets of a queue pair below it (RXE_INFLIGHT_SKBS_PER_QP_HIGH). Here they
# wait in fq with the departures they were given, so a new rate shows only behind them.
PACKETS_IN_FQ = 64
ADDRESSES = "10.78.0.0/16"  # of rxe_switched()


def preset_constants(_rate_bit: int) -> str:
    """The paper's constants and thresholds, as the controller scales them to the link."""
    return '[dcqcn]\npreset = "paper"\n'


def lab_constants(rate_bit: int) -> str:
    """Constants for soft-RoCE behind a slow port.

    The preset, scaled, is stable in packet times, but its loop takes a delay of a fraction of
    its timer for granted. Here PACKETS_IN_FQ packets are between a rate and its effect: at
    least `delay`, their time at line rate, and that times the number of senders at their fair
    share. What follows from it:

    * timer: one delay. No second cut, and no decay of alpha, before the first can have shown:
      two delays. The echo only has to be faster than that.
    * alpha starts at a half and settles with g = 1/32. With 1 and 1/256 it stays near 1 for
      256 periods (14 s), in which every cut halves.
    * first cut: to a sixth of the link. From line rate, the cuts that the port's queue lasts
      for are not enough: it overflows, and as a receiver that drops acknowledges nothing, it
      echoes nothing either.
    * R_AI: 1/250 of the link in each timer. Twice that overshoots more in the delay than the
      port's queue should see (p99 of 4:1 then 0.3 MB); 1/400 has not found the whole port after
      four seconds (0.76 of it at 2:1).
    * The marker's window: one delay. Nothing that is over sooner can be helped by a cut, and a
      user-mode kernel's late timers send in bursts.
    * Kmin and Kmax: 4 and 15 packets. Most of the overshoot comes after the first mark, so marks
      begin early. Pmax is 1/2: feedback is one bit in an echo interval of several packets.
    """
    delay_us = PACKETS_IN_FQ * RXE_MTU_BYTES * 8_000_000 // rate_bit
    thresholds = "".join(
        f'[[class]]\nnumber = {number}\nkmin = "16KB"\nkmax = "64KB"\npmax = 0.5\n'
        for number in range(7)
    )
    return thresholds + (
        f'[ecn]\nslot = "{delay_us // 16}us"\n'
        "[dcqcn]\n"
        "g = 0.03125\n"
        "initial_alpha = 0.5\n"
        f'timer = "{delay_us}us"\n'
        f'alpha_update = "{2 * delay_us}us"\n'
        f'decrease_interval = "{2 * delay_us}us"\n'
        f'echo_interval = "{delay_us // 2}us"\n'
        f'first_cut_rate = "{rate_bit // 6}bit"\n'
        f'min_rate = "{rate_bit // 40}bit"\n'
        f'rate_ai = "{rate_bit // 250}bit"\n'
        f'rate_hai = "{rate_bit // 250}bit"\n'
    )


@contextlib.contextmanager
def governed(
    bed: Incast,
    mark: str,
    echo: str = "becn",
    constants: Callable[[int], str] = lab_constants,
    drain: float = 0.99,
) -> Iterator[Controller]:
    """A controller on the senders (with fq), on the receiver and on the shaped port.

    Parameters
    ----------
    bed
        Another one of the same port and receiver and some of the senders may run in it.
    mark, echo
        As in ``[[interface]]``.
    constants
        Rate of the port -> ``[[class]]``, ``[ecn]`` and ``[dcqcn]`` tables.
    drain
        Of the port's virtual queues. Headers take 2 %, so 0.95, the default, would leave less
        than 0.93 for messages.
    """
    # The veths of the senders have no rate: the job's is that of their links.
    rate = f"{bed.shape.rate_bit}bit"
    roles = [(host.target, 'echo = "off"') for host in bed.senders]
    roles.append((bed.receiver.target, f'echo = "{echo}"'))
    roles.append((bed.port_target, f'mark = "{mark}"\ndrain = {drain}'))
    config = "".join(
        f'[[interface]]\nname = "{target}"\nrate = "{rate}"\n{role}\n' for target, role in roles
    )
    config += f'[[job]]\nname = "incast"\nset_ect = true\nrate = "{rate}"\n'
    config += f'[job.match]\nsrc = "{ADDRESSES}"\n' + constants(bed.shape.rate_bit)
    before, after = [], []
    for host in bed.senders:
        qdisc = f"dev {host.interface} root"
        tc = f"ip netns exec {host.netns} tc qdisc"
        before.append(f"{tc} replace {qdisc} fq flow_limit {4 * WINDOW_PACKETS}")
        after.append(f"{tc} del {qdisc}")
    with controlled(config, [target for target, _ in roles], before, after) as controller:
        yield controller


@dataclass(frozen=True)
class Verdict:
    """A control beside none. Ratios: how much more there was without it."""

    goodput_share: float
    jain: float
    retransmit_ratio: float
    backlog_p99_ratio: float

    def reaches(self, needed: Verdict) -> bool:
        """Whether each figure is at least another one's."""
        least = asdict(needed)
        return all(value >= least[name] for name, value in asdict(self).items())

    def row(self) -> dict[str, float | bool]:
        """For JSON."""
        return asdict(self) | {"reached": self.reaches(TARGET)}


# What control must reach against `none` of the same boot (medians of the rounds).
TARGET = Verdict(goodput_share=0.9, jain=0.95, retransmit_ratio=10.0, backlog_p99_ratio=3.0)


def verdict(none: Sequence[Outcome], other: Sequence[Outcome]) -> Verdict:
    """Compare the medians of a variant with those without control."""

    def median(outcomes: Sequence[Outcome], value: Callable[[Outcome], float]) -> float:
        return statistics.median(value(outcome) for outcome in outcomes)

    def ratio(value: Callable[[Outcome], float], smallest: float) -> float:
        return median(none, value) / max(smallest, median(other, value))

    return Verdict(
        goodput_share=median(other, lambda o: o.goodput_share),
        jain=median(other, lambda o: o.jain),
        # Of the packets that were needed: the variants do not deliver the same number.
        retransmit_ratio=ratio(lambda o: o.retransmitted_of_run / o.needed_packets_of_run, 1e-6),
        backlog_p99_ratio=ratio(lambda o: o.backlog_p99_bytes, 1.0),
    )
