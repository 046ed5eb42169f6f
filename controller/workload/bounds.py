"""What any policy could have gained on a contest: the compute times of its turns without one."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from controller.sim.measures import Alone, Figures, Iteration, measure, relative_change
from controller.sim.oracle import gain
from controller.workload.contest import Turn

# Round, job, iteration.
Key = tuple[int, str, int]


@dataclass(frozen=True)
class Bounds:
    """Relative changes against `fair`, by member of `Figures`; -0.4: 40 % lower.

    Parameters
    ----------
    isolated
        Every window undisturbed: no schedule can beat that.
    found
        The best order of windows that a search finds which knows every compute time.
    """

    isolated: Mapping[str, float]
    found: Mapping[str, float]

    def to_json(self) -> dict[str, Any]:
        """For reports."""
        return {
            name: {key.removesuffix("_ns"): round(value, 4) for key, value in change.items()}
            for name, change in (("isolated", self.isolated), ("found", self.found))
        }


def find_bounds(
    turns: Sequence[Turn], counting: Collection[Key], alone: Mapping[str, Alone], fair: Figures
) -> Bounds:
    """Bounds over the iterations that count.

    Parameters
    ----------
    turns
        Of `fair`.
    counting
        Iterations that count.
    alone
        Of each job.
    fair
        Figures of these iterations under `fair`.
    """
    found: list[Iteration] = []
    isolated: list[Iteration] = []
    for turn in turns:
        found += [
            each
            for each in gain(turn.records, alone).iterations
            if (turn.round, each.job, each.iteration) in counting
        ]
        isolated += [
            Iteration(
                each.job,
                each.iteration,
                each.compute_begin_ns,
                each.window_begin_ns,
                each.window_begin_ns + alone[each.job].window_ns,
            )
            for each in turn.records
            if (turn.round, each.job, each.iteration) in counting
        ]
    return Bounds(
        relative_change(fair, measure(isolated, alone).over_all),
        relative_change(fair, measure(found, alone).over_all),
    )
