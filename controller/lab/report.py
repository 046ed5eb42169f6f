"""What a cluster scenario showed: policies beside each other, with confidence over seeds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from controller.lab.scenario import FAIR, ORACLE, ClusterScenario
from controller.lab.tasks import Run
from controller.sim.intervals import Estimate, estimate

# Links that are told by name.
_HOTTEST = 8


@dataclass(frozen=True, eq=False)
class ClusterReport:
    """All policies of a scenario on all its seeds.

    Parameters
    ----------
    scenario
        What was simulated.
    runs
        One for each policy and seed.
    """

    scenario: ClusterScenario
    runs: tuple[Run, ...]

    @cached_property
    def by_policy(self) -> Mapping[str, tuple[Run, ...]]:
        """Policy -> its runs in the order of seeds."""
        ordered = sorted(self.runs, key=lambda run: run.seed)
        return {
            policy: tuple(run for run in ordered if run.policy == policy)
            for policy in self.scenario.policies
        }

    @property
    def any_runs(self) -> tuple[Run, ...]:
        """Those of the first policy, for what is the same under each."""
        return self.by_policy[self.scenario.policies[0]]

    @cached_property
    def estimates(self) -> Mapping[str, Mapping[str, Estimate]]:
        """Policy -> key of `Run.figures` -> figure over the seeds."""
        return {
            policy: {key: estimate([run.figures[key] for run in runs]) for key in runs[0].figures}
            for policy, runs in self.by_policy.items()
        }

    @cached_property
    def changes(self) -> Mapping[str, Mapping[str, Estimate]]:
        """Policy -> key -> change against fair, seed by seed, as a share; without fair: none."""
        if FAIR not in self.by_policy:
            return {}
        base = self.by_policy[FAIR]
        return {
            policy: {
                key: estimate(
                    [
                        run.figures[key] / fair.figures[key] - 1
                        for run, fair in zip(runs, base, strict=True)
                    ]
                )
                for key in runs[0].figures
                # Where nothing is sent, there is nothing to be a share of.
                if all(fair.figures[key] > 0 for fair in base)
            }
            for policy, runs in self.by_policy.items()
            if policy != FAIR
        }

    @cached_property
    def bound(self) -> Mapping[str, Estimate]:
        """Key -> figure with every window undisturbed, which no policy can beat."""
        return {
            key: estimate([run.bound[key] for run in self.any_runs])
            for key in self.any_runs[0].bound
        }

    @cached_property
    def loads(self) -> Mapping[str, tuple[float, float]]:
        """Kind of link -> what jobs that are never held up ask of it: mean, and of the hottest.

        Shares of the links, both over the seeds.
        """
        fabric = self.scenario.network.fabric
        number = np.arange(fabric.links)
        core = (number >= fabric.nics) & (number < fabric.links - fabric.nics)
        loads = {"nics": ~core, "uplinks": core}
        return {
            kind: (
                statistics.fmean(float(run.link_load[links].mean()) for run in self.any_runs),
                statistics.fmean(float(run.link_load[links].max()) for run in self.any_runs),
            )
            for kind, links in loads.items()
            if links.any()
        }

    def to_json(self) -> dict[str, Any]:
        """The document of ``--json``; times in ms, changes as shares (-0.1: 10 % lower)."""
        document: dict[str, Any] = {
            "scenario": self.scenario.to_json(),
            "seeds": self.scenario.seeds,
            "first_seed": self.scenario.first_seed,
            "policies": {policy: self._policy_json(policy) for policy in self.by_policy},
            "ci95": {policy: _half_widths(figures) for policy, figures in self.estimates.items()},
            "bound": _nested(self.bound),
            "links": self._links_json(),
        }
        if ORACLE in self.by_policy:
            document["oracle"] = self._oracle_json()
        return document

    def text(self) -> str:
        """For people, at most 80 columns wide."""
        from controller.lab.report_text import report_text

        return report_text(self)

    def figures(self, folder: Path) -> list[Path]:
        """Draw all pictures, see `controller.lab.figures`.

        Raises
        ------
        UsageError
            matplotlib is not there, or the folder cannot be written to.
        """
        from controller.lab.figures import draw

        return draw(self, folder)

    def _policy_json(self, policy: str) -> dict[str, Any]:
        runs, estimates = self.by_policy[policy], self.estimates[policy]
        slowdowns = {
            name: statistics.fmean(run.job_slowdown[name] for run in runs)
            for name in runs[0].job_slowdown
        }
        result = _nested(estimates)
        result["worst_job"] = max(slowdowns, key=lambda name: slowdowns[name])
        result["job_slowdown"] = {name: _rounded(value) for name, value in slowdowns.items()}
        result["ci95"] = _half_widths(estimates)
        changes = self.changes.get(policy)
        result["vs_fair"] = None
        if changes is not None:
            result["vs_fair"] = {**_nested(changes), "ci95": _half_widths(changes)}
        result["events"] = sum(run.events for run in runs)
        result["decisions"] = sum(run.decisions for run in runs)
        return result

    def _oracle_json(self) -> dict[str, Any]:
        runs = self.by_policy[ORACLE]
        gains = {
            order: [
                statistics.fmean(run.order_gains[order][place] for run in runs) for place in (0, 1)
            ]
            for order in runs[0].order_gains
        }
        return {
            "orders": {str(run.seed): run.order for run in runs},
            "vs_fair": {
                order: {"allreduce_ms": {"mean": _rounded(mean), "slowest10": _rounded(slowest)}}
                for order, (mean, slowest) in gains.items()
            },
        }

    def _links_json(self) -> dict[str, Any]:
        """Loads over all seeds, and by name the hottest links of the first: places are drawn."""
        fabric = self.scenario.network.fabric
        first = {policy: runs[0] for policy, runs in self.by_policy.items()}
        load = self.any_runs[0].link_load
        return {
            "load": {
                kind: {"mean": _rounded(mean), "hottest": _rounded(most)}
                for kind, (mean, most) in self.loads.items()
            },
            "seed": self.any_runs[0].seed,
            "hottest": [
                {
                    "link": fabric.link_name(link),
                    "load": _rounded(float(load[link])),
                    "utilisation": {
                        policy: _rounded(float(run.link_use[link])) for policy, run in first.items()
                    },
                }
                for link in np.argsort(-load, kind="stable")[:_HOTTEST].tolist()
            ],
        }


def _nested(figures: Mapping[str, Estimate]) -> dict[str, Any]:
    """Means, with ``a.b`` as member b of a."""
    result: dict[str, Any] = {}
    for key, each in figures.items():
        table, _, member = key.rpartition(".")
        (result.setdefault(table, {}) if table else result)[member] = _rounded(each.mean)
    return result


def _half_widths(figures: Mapping[str, Estimate]) -> dict[str, float | None]:
    return {
        key: None if each.half_width is None else _rounded(each.half_width)
        for key, each in figures.items()
    }


def _rounded(value: float) -> float:
    """Six significant digits: more is noise, and differs between machines."""
    return float(f"{value:.6g}") + 0.0  # no -0.0
