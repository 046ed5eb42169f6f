"""One flow in full: what `controller explain FLOW` tells."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from controller.errors import UsageError
from controller.observe.joined import Flow, Row, join
from controller.observe.snapshot import Snapshot, flow_rows
from controller.observe.verdicts import Verdict, judge

_MAX_CANDIDATES = 10
# Addresses and QPNs are made of these.
_FLOW_LIKE = re.compile(r"[0-9a-fA-FxX.:-]+")


@dataclass(frozen=True)
class Explanation:
    """A flow, its opposite direction and the verdicts about both.

    ``rows`` and ``opposite_rows`` are those of ``flow_rows``, one an observation point.
    """

    flow: str
    opposite: str | None
    rows: tuple[Row, ...]
    opposite_rows: tuple[Row, ...]
    verdicts: tuple[Verdict, ...]

    def to_json(self) -> dict[str, Any]:
        """``explain --json``."""
        return {
            "flow": self.flow,
            "opposite_flow": self.opposite,
            "points": [dict(row) for row in self.rows],
            "opposite_points": [dict(row) for row in self.opposite_rows],
            "verdicts": [verdict.to_json() for verdict in self.verdicts],
        }

    def to_text(self, width: int = 80) -> str:
        """For a person; no line is longer than `width`, but for names that are."""
        from controller.observe.report import explanation_text

        return explanation_text(self, width)


def explain(snapshot: Snapshot, flow_query: str, jobs: Sequence[str] = ()) -> Explanation:
    """Everything about one flow.

    Parameters
    ----------
    snapshot
        The reading.
    flow_query
        The flow's name, a prefix that only it has, or its destination QPN (0x11b or 283).
    jobs
        Names of the jobs that could have been meant; the error lists them.

    Raises
    ------
    UsageError
        No flow or several flows match; the candidates are listed.
    """
    rows = flow_rows(snapshot)
    flows = join(snapshot, rows)
    flow = _find(flows, flow_query.strip(), jobs)
    opposite = flow.opposite
    names = {flow.name, f"{flow.src}-{flow.dst}"}
    if opposite is not None:
        names.add(opposite.name)
    return Explanation(
        flow=flow.name,
        opposite=opposite.name if opposite else None,
        rows=tuple(flow.rows),
        opposite_rows=tuple(opposite.rows) if opposite else (),
        verdicts=tuple(v for v in judge(snapshot, rows) if v.flow in names),
    )


def flows_named(snapshot: Snapshot, query: str) -> list[str]:
    """Names of all flows that `query` can mean, in the order of the table.

    Parameters
    ----------
    snapshot
        The reading.
    query
        As `explain` takes it.
    """
    # The name of a job seldom looks like an address or a number, and then nothing is read.
    if not _FLOW_LIKE.fullmatch(query):
        return []
    flows = join(snapshot, flow_rows(snapshot))
    return [flow.name for flow in _matches(flows, query)]


def _matches(flows: Mapping[str, Flow], query: str) -> list[Flow]:
    if query in flows:
        return [flows[query]]
    matches = [flow for name, flow in flows.items() if query and name.startswith(query)]
    qpn = _qpn(query)
    if qpn is not None:
        matches += [flow for flow in flows.values() if flow.dqpn == qpn and flow not in matches]
    return matches


def _find(flows: Mapping[str, Flow], query: str, jobs: Sequence[str]) -> Flow:
    subject = "flow or job" if jobs else "flow"
    known = f"\nJobs:\n{_listing(jobs)}" if jobs else ""
    if not flows:
        raise UsageError(
            f"No {subject} matches {query!r}: no RoCEv2 packet was seen at all.{known}",
            "`controller status` tells what is attached.",
        )
    matches = _matches(flows, query)
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise UsageError(
            f"{query!r} matches {len(matches)} flows:\n{_listing(f.name for f in matches)}",
            "\nGive a whole name.",
        )
    raise UsageError(
        f"No {subject} matches {query!r}; expected {'the name of a job, ' if jobs else ''}a flow's "
        f"name, the beginning of one, or a destination QPN. Flows seen:\n"
        f"{_listing(_nearest(flows, query))}{known}"
    )


def _nearest(flows: Mapping[str, Flow], query: str) -> Sequence[str]:
    """Names that contain the query, else all."""
    return [name for name in flows if query and query in name] or list(flows)


def _qpn(query: str) -> int | None:
    try:
        return int(query, 16 if query.lower().startswith("0x") else 10)
    except ValueError:
        return None


def _listing(names: Iterable[str]) -> str:
    shown = list(names)
    lines = [f"  {name}" for name in shown[:_MAX_CANDIDATES]]
    if len(shown) > _MAX_CANDIDATES:
        lines.append(f"  ... and {len(shown) - _MAX_CANDIDATES} more")
    return "\n".join(lines)
