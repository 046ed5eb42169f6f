"""The form of a verdict; the rules are in ``verdicts`` and ``losses``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Worst first: the order in which reports show them.
SEVERITIES = ("error", "warning", "info", "ok")


@dataclass(frozen=True)
class Verdict:
    """One finding about one flow (or, ``low_entropy``, about a pair of hosts).

    ``evidence`` holds the numbers that carry it; ``summary`` is one sentence, ``remedy``
    what to do about it.
    """

    flow: str
    verdict: str
    severity: str
    evidence: Mapping[str, Any]
    remedy: str
    summary: str

    def to_json(self) -> dict[str, Any]:
        """The keys of ``analyze --json``."""
        return {
            "flow": self.flow,
            "verdict": self.verdict,
            "severity": self.severity,
            "summary": self.summary,
            "evidence": dict(self.evidence),
            "remedy": self.remedy,
        }
