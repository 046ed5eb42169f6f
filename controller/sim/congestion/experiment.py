"""Variants of DCQCN at several incast degrees, on the same seeds: the experiment, its table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np

from controller.congestion.flows import FloatArray
from controller.errors import UsageError
from controller.sim.congestion.bounds import check_work
from controller.sim.congestion.incast import IncastCase, IncastConditions, simulate_incast
from controller.sim.congestion.outcome import IncastOutcome
from controller.sim.congestion.windows import Changes
from controller.sim.intervals import Estimate, estimate
from controller.sim.progress import Progress

STANDARD = "standard"
# Of the live marker's virtual queue, see `controller.agent.maps`.
_LIVE_DRAIN = 0.95
VARIANTS: Mapping[str, Changes] = {
    STANDARD: Changes(),
    "prediction": Changes(prediction=True),
    "window": Changes(window_marks=True),
    "phases": Changes(phases=True),
    "all": Changes(prediction=True, window_marks=True, phases=True),
    # All but the window: marks by the queue of the moment.
    "instant": Changes(prediction=True, phases=True),
    # All, with the live marker's virtual queue.
    "live": Changes(prediction=True, window_marks=True, phases=True, drain_share=_LIVE_DRAIN),
    "mltcp": Changes(mltcp=True),
}
MAX_SEEDS = 100


@dataclass(frozen=True)
class IncastExperiment:
    """Variants at incast degrees, on the same seeds.

    Attributes
    ----------
    degrees
        Senders into the port.
    variants
        Names in `VARIANTS`; the standard one is the yardstick and always there.
    seeds
        How many; they are 0, 1, ...
    jobs
        That the senders belong to, where there are as many senders.
    conditions
        Of all.
    """

    degrees: tuple[int, ...]
    variants: tuple[str, ...]
    seeds: int
    jobs: int
    conditions: IncastConditions

    def __post_init__(self) -> None:
        if not self.degrees or len(set(self.degrees)) < len(self.degrees):
            raise UsageError("Incast degrees are none, or one stands twice.")
        if not 1 <= self.seeds <= MAX_SEEDS:
            raise UsageError(f"{self.seeds} seeds; allowed: 1 .. {MAX_SEEDS}.")
        if STANDARD not in self.variants:
            raise UsageError(f"Variants without {STANDARD}, which the others are compared with.")
        for name in self.variants:
            if name not in VARIANTS:
                raise UsageError(f"Variant {name!r} is unknown; allowed: {', '.join(VARIANTS)}.")
        if len(set(self.variants)) < len(self.variants):
            raise UsageError("One variant stands twice.")
        each, conditions = len(self.variants) * self.seeds, self.conditions
        check_work(
            sum(self.degrees) * each,
            len(self.degrees) * each,
            conditions.duration_ns / conditions.step_ns,
            (conditions.duration_ns - conditions.warmup_ns) / conditions.sample_ns,
        )

    def run(self, progress: Progress | None = None) -> IncastTable:
        """Simulate all cases."""
        keys = [
            (degree, variant, seed)
            for degree in self.degrees
            for variant in self.variants
            for seed in range(self.seeds)
        ]
        cases = [
            IncastCase(degree, min(self.jobs, degree), seed, VARIANTS[variant])
            for degree, variant, seed in keys
        ]
        outcomes = simulate_incast(cases, self.conditions, progress)
        return IncastTable(self, dict(zip(keys, outcomes, strict=True)))


@dataclass(frozen=True, eq=False)
class IncastTable:
    """What came of an experiment.

    Attributes
    ----------
    experiment
        What was simulated.
    outcomes
        (degree, variant, seed) -> outcome.
    """

    experiment: IncastExperiment
    outcomes: Mapping[tuple[int, str, int], IncastOutcome]

    def values(self, degree: int, variant: str, figure: str) -> FloatArray:
        """A figure of `IncastOutcome` at a degree, shape (seeds,)."""
        seeds = range(self.experiment.seeds)
        return np.array([getattr(self.outcomes[degree, variant, s], figure) for s in seeds])

    def estimate(self, degree: int, variant: str, figure: str) -> Estimate | None:
        """Its mean over seeds; None: no seed could measure it."""
        return _estimate(self.values(degree, variant, figure))

    def change(self, degree: int, variant: str, figure: str) -> Estimate | None:
        """Change against the standard variant in percent, seed by seed."""
        return _estimate(self._changes(degree, variant, figure))

    def mean_change(self, variant: str, figure: str) -> Estimate | None:
        """The same, mean over the degrees."""
        rows = [self._changes(degree, variant, figure) for degree in self.experiment.degrees]
        return _estimate(np.mean(rows, axis=0))

    def possible_change(self, degree: int) -> float:
        """By how many percent stability can grow at most, for it is 1 at best."""
        return float(np.mean(100 * (1 / self.values(degree, STANDARD, "stability") - 1)))

    def _changes(self, degree: int, variant: str, figure: str) -> FloatArray:
        standard = self.values(degree, STANDARD, figure)
        result: FloatArray = 100 * (self.values(degree, variant, figure) / standard - 1)
        return result


FIGURES = tuple(field.name for field in fields(IncastOutcome))


def _estimate(values: FloatArray) -> Estimate | None:
    known = values[np.isfinite(values)]
    return estimate(known.tolist()) if known.size else None
