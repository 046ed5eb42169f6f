"""Long flows at several delays, on the same seeds: the experiment and its table."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from controller.congestion.timely_flows import TimelyParameters
from controller.errors import UsageError
from controller.sim.congestion.bounds import check_work
from controller.sim.congestion.experiment import MAX_SEEDS
from controller.sim.congestion.steady import (
    SteadyCase,
    SteadyConditions,
    SteadyOutcome,
    simulate_steady,
)
from controller.sim.intervals import Estimate, estimate
from controller.sim.progress import Progress

# Of a noise that a stable loop only colours little is left; of a sustained swing most is.
SWING_LEFT = 0.5


@dataclass(frozen=True)
class SteadyExperiment:
    """Long flows: numbers of them, delays and markers, on the same seeds.

    Attributes
    ----------
    flows, delays_ns, windows
        Every combination is simulated: N, feedback delay, marks by the window's average or not.
    seeds
        How many; they are 0, 1, ...
    conditions
        Of all.
    """

    flows: tuple[int, ...]
    delays_ns: tuple[int, ...]
    windows: tuple[bool, ...]
    seeds: int
    conditions: SteadyConditions

    def __post_init__(self) -> None:
        if not (self.flows and self.delays_ns and self.windows):
            raise UsageError("Flows, delays or markers are none; allowed: one or more of each.")
        if not 1 <= self.seeds <= MAX_SEEDS:
            raise UsageError(f"{self.seeds} seeds; allowed: 1 .. {MAX_SEEDS}.")
        for key in ("flows", "delays_ns", "windows"):
            values = getattr(self, key)
            if len(set(values)) < len(values):
                raise UsageError(f"Of {key}, one stands twice: {values}; allowed: each once.")
        conditions = self.conditions
        if any(self.windows) and isinstance(conditions.parameters, TimelyParameters):
            raise UsageError("TIMELY marks no packets, so nothing is by the window's average.")
        each = len(self.delays_ns) * len(self.windows) * self.seeds
        check_work(
            sum(self.flows) * each,
            len(self.flows) * each,
            (conditions.seconds + conditions.warmup_s) * 1e9 / conditions.step_ns,
            conditions.seconds * 1e9 / conditions.sample_ns,
        )

    def cases(self) -> list[SteadyCase]:
        """All of them, seeds of a combination one after the other."""
        return [
            SteadyCase(flows, delay_ns, seed, window)
            for window in self.windows
            for flows in self.flows
            for delay_ns in self.delays_ns
            for seed in range(self.seeds)
        ]

    def run(self, progress: Progress | None = None) -> SteadyTable:
        """Simulate all cases."""
        cases = self.cases()
        outcomes = simulate_steady(cases, self.conditions, progress)
        return SteadyTable(self, tuple(zip(cases, outcomes, strict=True)))


@dataclass(frozen=True)
class SteadyRow:
    """One combination, means over its seeds.

    Attributes
    ----------
    flows, delay_ns, window
        Of the combination.
    queue_bytes
        Mean queue, with its confidence.
    queue_std_bytes, empty, utilisation, jain, rate_cov, dominant_hz, correlation, hyper
        See `SteadyOutcome` and `controller.sim.packets.oscillation.Oscillation`.
    oscillates
        More than `SWING_LEFT` of a swing is left one period later.
    """

    flows: int
    delay_ns: int
    window: bool
    queue_bytes: Estimate
    queue_std_bytes: float
    empty: float
    utilisation: float
    jain: float
    rate_cov: float
    dominant_hz: float
    correlation: float
    hyper: int
    oscillates: bool


@dataclass(frozen=True, eq=False)
class SteadyTable:
    """What came of an experiment with long flows: each case and its outcome."""

    experiment: SteadyExperiment
    outcomes: tuple[tuple[SteadyCase, SteadyOutcome], ...]

    def rows(self) -> list[SteadyRow]:
        """One for each combination."""
        seeds = self.experiment.seeds
        starts = range(0, len(self.outcomes), seeds)
        return [self._row(self.outcomes[start : start + seeds]) for start in starts]

    @staticmethod
    def _row(outcomes: tuple[tuple[SteadyCase, SteadyOutcome], ...]) -> SteadyRow:
        case = outcomes[0][0]
        each = [outcome for _, outcome in outcomes]

        def mean(name: str) -> float:
            return float(np.mean([getattr(outcome, name) for outcome in each]))

        correlation = float(np.mean([outcome.oscillation.correlation for outcome in each]))
        return SteadyRow(
            flows=case.flows,
            delay_ns=case.delay_ns,
            window=case.window,
            queue_bytes=estimate([outcome.queue_mean_bytes for outcome in each]),
            **{
                name: mean(name)
                for name in ("queue_std_bytes", "empty", "utilisation", "jain", "rate_cov")
            },
            dominant_hz=float(np.median([outcome.oscillation.dominant_hz for outcome in each])),
            correlation=correlation,
            hyper=sum(outcome.hyper for outcome in each),
            oscillates=correlation > SWING_LEFT,
        )
