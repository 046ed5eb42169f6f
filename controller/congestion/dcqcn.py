"""DCQCN parameters: presets with their sources, scaling with the link rate, our two additions.

Sources, by the names that the comments below use:

* *paper*: Zhu et al., "Congestion Control for Large-Scale RDMA Deployments", SIGCOMM 2015. The
  algorithm is its section 3.1, the choice of values its section 5; everything there is for
  40 Gb/s links.
* *vendor*: NVIDIA, "DCQCN CC Parameters" (DOCA documentation), for ConnectX-4 and later, and
  the defaults that ``mlxconfig`` lists for these adapters.
* *QCN*: IEEE 802.1Qau, whose rate increase the paper takes over.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Any, NoReturn

from controller.errors import UsageError

_NS = 10**9
_US = 10**3
_Mbit_Bps = 10**6 / 8

# The paper's links; the constants of both presets are written down for this rate.
REFERENCE_LINK_Bps = 40_000 * _Mbit_Bps

# The vendor's adapters take up to 31 (rpg_threshold).
MAX_FAST_RECOVERY_STEPS = 31
# The dataplane's fixed point resolves no smaller gain. (The vendor's smallest is 1/1024.)
MIN_GAIN = 2.0**-16

# A paced sender needs an answer within its QP timeout, or it sends all again and in the end
# gives up. Ours: one packet of 4096 bytes and its headers in the 67 ms of the timeout attribute
# 14 (4.096 us x 2^14; IBTA vol. 1, 9.7.6.1.3), which perftest and most applications set.
LEAST_RATE_Bps = 4200 / (4.096e-6 * 2**14)

# Ours: more than this many times R_AI in one step is no longer an adjustment of it.
MAX_PHASE_MULTIPLIER = 16.0


def _refuse(key: str, found: object, allowed: str) -> NoReturn:
    raise UsageError(f"DCQCN key {key} is {found!r}; allowed: {allowed}.")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


class Phase(Enum):
    """Where a job stands in its sync window."""

    IDLE = "idle"
    BEGIN = "begin"
    MIDDLE = "middle"
    END = "end"


@dataclass(frozen=True)
class PhaseIncrease:
    """Multipliers of R_AI and R_HAI by phase of the sync window.

    The values are ours, there is no published source for them; `middle` is plain DCQCN, so
    all ones switch the change off. Outside a window little is sent and the bandwidth belongs
    to jobs that are in theirs, so a flow should hardly gain (`idle`). The rate at which a window
    opens is left over from another moment of the network, so the first tenth finds the new share
    quickly (`begin`). In the last tenth a higher rate has no bytes left to pay off on, while
    its queue still delays the stragglers whom the job waits for (`end`).

    Attributes
    ----------
    idle, begin, middle, end
        Multiplier in that phase, 0 (target rate frozen) .. 16.
    begin_share, end_share
        Shares of the window's expected bytes that end `begin` and start `end`.
    """

    idle: float = 0.25
    begin: float = 2.0
    middle: float = 1.0
    end: float = 0.5
    begin_share: float = 0.1
    end_share: float = 0.9

    def __post_init__(self) -> None:
        for phase in Phase:
            value = getattr(self, phase.value)
            if not (_is_number(value) and 0 <= value <= MAX_PHASE_MULTIPLIER):
                _refuse(f"phase_steps.{phase.value}", value, f"0 .. {MAX_PHASE_MULTIPLIER:g}")
        if not (_is_number(self.begin_share) and 0 <= self.begin_share <= 1):
            _refuse("phase_steps.begin_share", self.begin_share, "0 .. 1")
        if not (_is_number(self.end_share) and self.begin_share <= self.end_share <= 1):
            _refuse("phase_steps.end_share", self.end_share, "begin_share .. 1")

    def phase(self, sent_bytes: float, expected_bytes: float, in_window: bool = True) -> Phase:
        """Phase after `sent_bytes` of a window's `expected_bytes`.

        Parameters
        ----------
        sent_bytes, expected_bytes
            Of the current window; 0 expected bytes mean that nobody predicted it, which is
            the middle: plain DCQCN. More bytes than expected are still the end.
        in_window
            False between two windows.
        """
        if not in_window:
            return Phase.IDLE
        if expected_bytes <= 0:
            return Phase.MIDDLE
        if sent_bytes < self.begin_share * expected_bytes:
            return Phase.BEGIN
        return Phase.END if sent_bytes >= self.end_share * expected_bytes else Phase.MIDDLE

    def multiplier(self, phase: Phase) -> float:
        """Multiplier of R_AI and R_HAI in a phase."""
        value: float = getattr(self, phase.value)
        return value


# How a field follows the link rate: `_RATE` with it, `_BYTES` with it above the reference
# link, `_TIME` against it below the reference link. Fields in neither are numbers without unit.
_RATE = ("rate_ai_Bps", "rate_hai_Bps", "min_rate_Bps", "first_cut_rate_Bps")
_BYTES = ("byte_counter_bytes",)
_TIME = ("alpha_update_ns", "decrease_interval_ns", "timer_ns", "echo_interval_ns")


@dataclass(frozen=True)
class DcqcnParameters:
    """Constants of DCQCN at one link rate.

    Attributes
    ----------
    g
        Gain of alpha.
    alpha_update_ns
        Alpha decays once for each such period without a cut.
    decrease_interval_ns
        No second cut sooner than this; 0: every CNP cuts.
    timer_ns, byte_counter_bytes
        An increase event after each such time, and after each so many bytes.
    fast_recovery_steps
        F: events counted by one of the two before the target rate grows.
    rate_ai_Bps, rate_hai_Bps
        Steps of the target rate in additive and in hyper increase.
    min_rate_Bps
        Current rate never falls below it.
    min_decrease_factor
        A cut leaves at least this share of the current rate.
    first_cut_rate_Bps
        Current and target rate that a CNP sets on an unlimited flow; 0: an ordinary cut from
        line rate.
    initial_alpha
        Alpha of the first cut.
    echo_interval_ns
        Notification point: at most one CNP or BECN per flow in this time.
    link_Bps
        The link these constants are for.
    phase_steps
        Multipliers of the two steps by phase of the sync window.

    Raises
    ------
    UsageError
        A value is out of range; names the key, what was found and what is allowed.
    """

    g: float
    alpha_update_ns: int
    decrease_interval_ns: int
    timer_ns: int
    byte_counter_bytes: int
    fast_recovery_steps: int
    rate_ai_Bps: float
    rate_hai_Bps: float
    min_rate_Bps: float
    min_decrease_factor: float
    first_cut_rate_Bps: float
    initial_alpha: float
    echo_interval_ns: int
    link_Bps: float
    phase_steps: PhaseIncrease = PhaseIncrease()

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_rates()

    def _check_numbers(self) -> None:
        if not (_is_number(self.g) and MIN_GAIN <= self.g <= 1):
            _refuse("g", self.g, "2^-16 (0.0000153) .. 1")
        if not (_is_number(self.initial_alpha) and 0 < self.initial_alpha <= 1):
            _refuse("initial_alpha", self.initial_alpha, "above 0, at most 1")
        if not (_is_number(self.min_decrease_factor) and 0 < self.min_decrease_factor < 1):
            _refuse("min_decrease_factor", self.min_decrease_factor, "above 0, below 1")
        least = {"decrease_interval_ns": 0, "echo_interval_ns": 0}
        for key in (*_TIME, *_BYTES, "fast_recovery_steps"):
            value, low = getattr(self, key), least.get(key, 1)
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                _refuse(key, value, f"a whole number from {low}")
        if self.fast_recovery_steps > MAX_FAST_RECOVERY_STEPS:
            _refuse(
                "fast_recovery_steps", self.fast_recovery_steps, f"1 .. {MAX_FAST_RECOVERY_STEPS}"
            )

    def _check_rates(self) -> None:
        for key in ("link_Bps", "rate_ai_Bps", "rate_hai_Bps", "min_rate_Bps"):
            value = getattr(self, key)
            if not (_is_number(value) and 0 < value <= self.link_Bps):
                limit = "" if key == "link_Bps" else f", at most the link's {self.link_Bps:g}"
                _refuse(key, value, f"above 0 bytes/s{limit}")
        if self.rate_hai_Bps < self.rate_ai_Bps:
            _refuse(
                "rate_hai_Bps", self.rate_hai_Bps, f"rate_ai_Bps ({self.rate_ai_Bps:g}) or more"
            )
        first = self.first_cut_rate_Bps
        if not _is_number(first) or (
            first != 0 and not self.min_rate_Bps <= first <= self.link_Bps
        ):
            _refuse(
                "first_cut_rate_Bps",
                first,
                f"0 (cut from line rate) or {self.min_rate_Bps:g} (min_rate_Bps)"
                f" .. {self.link_Bps:g} bytes/s",
            )


PRESETS = {
    "paper": DcqcnParameters(
        g=1 / 256,  # paper, section 5
        alpha_update_ns=55 * _US,  # paper, section 3.1: has to exceed the CNP interval
        # Paper, section 3.1: every CNP cuts, only the notification point spaces them. A limit
        # of that same spacing here would drop each CNP that arrives a little early.
        decrease_interval_ns=0,
        timer_ns=55 * _US,  # paper, section 5
        byte_counter_bytes=10_000_000,  # paper, section 5
        fast_recovery_steps=5,  # paper, section 3.1
        rate_ai_Bps=40 * _Mbit_Bps,  # paper, section 5
        # The paper has hyper increase in its state machine but gives no value, and leaves it out
        # of its fluid model. Ten times R_AI is QCN's ratio (5 and 50 Mb/s at 10 Gb/s), the
        # vendor's (5 and 50 Mb/s), and the one of the HPCC authors' DCQCN simulations.
        rate_hai_Bps=400 * _Mbit_Bps,
        # The paper gives none. Ours: one additive step, a thousandth of the link.
        min_rate_Bps=40 * _Mbit_Bps,
        min_decrease_factor=0.5,  # follows from alpha <= 1 (paper, equation 1)
        first_cut_rate_Bps=0,  # paper, section 3.1: flows start at line rate
        initial_alpha=1.0,  # paper, section 3.1
        echo_interval_ns=50 * _US,  # paper, section 3.1
        link_Bps=REFERENCE_LINK_Bps,
    ),
    "connectx": DcqcnParameters(
        g=5 / 1024,  # vendor: dce_tcp_g 1019, the share that alpha keeps, of 1024
        alpha_update_ns=1 * _US,  # vendor: dce_tcp_rtt
        decrease_interval_ns=4 * _US,  # vendor: rate_reduce_monitor_period
        timer_ns=300 * _US,  # vendor: rpg_time_reset
        byte_counter_bytes=32_767,  # vendor: rpg_byte_reset
        fast_recovery_steps=1,  # vendor: rpg_threshold
        rate_ai_Bps=5 * _Mbit_Bps,  # vendor: rpg_ai_rate
        rate_hai_Bps=50 * _Mbit_Bps,  # vendor: rpg_hai_rate
        min_rate_Bps=1 * _Mbit_Bps,  # vendor: rpg_min_rate
        min_decrease_factor=0.5,  # vendor: rpg_min_dec_fac
        first_cut_rate_Bps=0,  # vendor: rate_to_set_on_first_cnp
        initial_alpha=1023 / 1024,  # vendor: initial_alpha_value
        # Ours: the paper's. `mlxconfig` lists 2 us (min_time_between_cnps), which a software
        # receiver cannot hold.
        echo_interval_ns=50 * _US,
        link_Bps=REFERENCE_LINK_Bps,
    ),
}


def preset(name: str, link_Bps: float) -> DcqcnParameters:
    """The preset `name` for a link of `link_Bps`.

    Raises
    ------
    UsageError
        No such preset, or a link rate that is not above 0.
    """
    if name not in PRESETS:
        _refuse("preset", name, ", ".join(PRESETS))
    return scaled(PRESETS[name], link_Bps)


def scaled(parameters: DcqcnParameters, link_Bps: float) -> DcqcnParameters:
    """The same control law for a link of another rate C; 40 Gb/s is the reference.

    Rates (R_AI, R_HAI, minimum, first cut) always follow C: so do they in the HPCC authors' DCQCN
    simulations (R_AI 5 Mb/s x C / 25 Gb/s). The paper and the vendor say nothing about other
    links; the vendor lists one set of absolute values, so `connectx` is theirs at 40 Gb/s and our
    scaling elsewhere.

    Above 40 Gb/s bytes follow C and times stay, as production settings do with the marking
    thresholds (100 and 400 KB per 25 Gb/s: Li et al., HPCC, SIGCOMM 2019): propagation and
    host delays do not shrink with faster links, so neither should what waits for them.

    Below 40 Gb/s bytes stay and times grow by 40 Gb/s / C. This is our dimensional analysis:
    the fluid model knows no time but those constants, the delay and MTU / C. A packet does not
    shrink with the link, so counted in packet times everything is as at 40 Gb/s, and rates
    are the same curves, slower. Only the delay does not follow: measured in packet times it gets
    shorter, which is the stable direction.

    The minimum rate never becomes less than one packet in a QP timeout (62.6 kB/s), nor more
    than the link; a first cut's rate never less than that minimum. What such a limit has raised
    does not scale back: scale a preset, not something that was scaled already.

    Raises
    ------
    UsageError
        `link_Bps` is not above 0.
    """
    if not (_is_number(link_Bps) and link_Bps > 0):
        _refuse("link_Bps", link_Bps, "above 0 bytes/s")
    here, there = link_Bps / REFERENCE_LINK_Bps, parameters.link_Bps / REFERENCE_LINK_Bps
    bytes_factor = max(here, 1) / max(there, 1)
    time_factor = max(1 / here, 1) / max(1 / there, 1)
    changes: dict[str, Any] = {}
    for field in fields(parameters):
        value = getattr(parameters, field.name)
        if field.name in _RATE:
            changes[field.name] = value * (here / there)
        elif field.name in _BYTES:
            changes[field.name] = round(value * bytes_factor)
        elif field.name in _TIME:
            changes[field.name] = round(value * time_factor)
    least = min(max(changes["min_rate_Bps"], LEAST_RATE_Bps), float(link_Bps))
    changes["min_rate_Bps"] = least
    if changes["first_cut_rate_Bps"]:
        changes["first_cut_rate_Bps"] = max(changes["first_cut_rate_Bps"], least)
    return replace(parameters, **changes, link_Bps=float(link_Bps))


def predicted_rate_Bps(
    expected_bytes: float, compression_ratio: float, window_ns: int, flows: int
) -> float:
    """Rate at which each flow of a job is just done at the end of its sync window.

    Parameters
    ----------
    expected_bytes
        Predicted for the window, all flows together, before compression.
    compression_ratio
        Bytes on the wire for each byte before compression; 1 without.
    window_ns
        Predicted length of the window.
    flows
        Flows of the job that share the bytes evenly.

    Raises
    ------
    UsageError
        A value that cannot be a prediction; names it.
    """
    for key, value in (
        ("expected_bytes", expected_bytes),
        ("compression_ratio", compression_ratio),
        ("window_ns", window_ns),
        ("flows", flows),
    ):
        if not (_is_number(value) and value > 0):
            _refuse(key, value, "above 0")
    return expected_bytes * compression_ratio / flows * _NS / window_ns
