"""What `controller lab stability` prints: both views of a loop's stability, as text and JSON."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from controller.congestion.stability import LONGEST_DELAY_US, MarginStep, Stability
from controller.units import format_bytes, format_duration

_COLUMNS = (20, 14)
_NO_GAIN = "the loop's gain is 1 at no frequency"
# Of `exact`: null where there is no fixed point.
_OF_FIXED_POINT = (
    "p",
    "q_bytes",
    "critical_delay_us",
    "phase_margin_deg",
    "rightmost_per_s",
    "rightmost_rad_per_s",
)


@dataclass(frozen=True)
class StabilityReport:
    """A loop's stability with the setting it holds for.

    Attributes
    ----------
    model
        ``dcqcn`` or ``timely``.
    setting
        The options and their values, units in the names.
    title
        The setting for people, lines of at most 80 columns.
    result
        Both views.
    ladder
        From the published margin to the exact one; empty for TIMELY.
    """

    model: str
    setting: dict[str, Any]
    title: str
    result: Stability
    ladder: Sequence[MarginStep]

    def to_json(self) -> dict[str, Any]:
        """The document of `--json`; what does not exist is null, with the reason beside it."""
        published, exact = self.result.published, self.result.exact
        root = exact.rightmost
        return {
            "model": self.model,
            "setting": self.setting,
            "phase_margin_deg": published.margin_deg,
            "convergence_s": published.convergence_s,
            "fixed_point": {"p": published.share, "q_bytes": published.queue_bytes},
            "published_critical_delay_us": published.critical_delay_us,
            "published_stable": published.stable,
            "exact": {
                "p": exact.share,
                "q_bytes": exact.queue_bytes,
                "exists": not exact.missing,
                "stable": exact.stable,
                "critical_delay_us": exact.critical_delay_us,
                "phase_margin_deg": exact.margin_deg,
                "rightmost_per_s": None if root is None else root.real,
                "rightmost_rad_per_s": None if root is None else abs(root.imag),
            },
            "reasons": self._reasons(),
            "margin_ladder": [
                {
                    "step": step.what,
                    "phase_margin_deg": step.margin_deg,
                    "alone_deg": step.alone_deg,
                }
                for step in self.ladder
            ],
        }

    def _reasons(self) -> dict[str, str]:
        """Why a key of the document is null."""
        published, exact = self.result.published, self.result.exact
        reasons = {}
        longest = f"{LONGEST_DELAY_US / 1000:g} ms"
        no_delay = f"no delay up to {longest} makes the loop unstable"
        if published.margin_deg is None:
            why = (
                _NO_GAIN
                if published.share is None or published.share < 1
                else f"the published approximation gives p* = {published.share:.3g}"
            )
            reasons["phase_margin_deg"] = reasons["published_stable"] = why
            if published.critical_delay_us is None:
                reasons["published_critical_delay_us"] = why
        elif published.critical_delay_us is None:
            reasons["published_critical_delay_us"] = no_delay
        if published.convergence_s is None:
            reasons["convergence_s"] = published.no_convergence
        if self.model == "timely":
            reasons["fixed_point.p"] = reasons["exact.p"] = "TIMELY marks no packets"
        if exact.missing:
            for key in _OF_FIXED_POINT:
                reasons.setdefault(f"exact.{key}", exact.missing)
            return reasons
        if exact.critical_delay_us is None:
            reasons["exact.critical_delay_us"] = no_delay
        if exact.margin_deg is None:
            reasons["exact.phase_margin_deg"] = _NO_GAIN
        if exact.rightmost is None:
            for key in ("rightmost_per_s", "rightmost_rad_per_s"):
                reasons[f"exact.{key}"] = f"single roots are told apart up to a delay of {longest}"
        return reasons

    def text(self) -> str:
        """The same for people, at most 80 columns."""
        published, exact = self.result.published, self.result.exact
        lines = [self.title, "", _row("", "published", "exact")]
        if published.share is not None:
            lines.append(_row("marked packets", _percent(published.share), _percent(exact.share)))
        lines.append(_row("queue", _size(published.queue_bytes), _size(exact.queue_bytes)))
        margin = published.margin_deg
        lines += [
            _row("phase margin", _degrees(margin), _degrees(exact.margin_deg)),
            _row(
                "verdict",
                "-" if margin is None else ("stable" if published.stable else "unstable"),
                ("stable" if exact.stable else "unstable")
                if not exact.missing
                else "no fixed point",
            ),
            _row("critical delay", *(_critical(self.result))),
            _row("convergence", _seconds(published.convergence_s), ""),
        ]
        lines.append("")
        lines += self._comment()
        if self.ladder:
            lines += ["", "From the published margin to the exact one, one correction at a time:"]
            lines += [f"  {step.what:<46}{_degrees(step.margin_deg):>12}" for step in self.ladder]
        return "\n".join(lines)

    def _comment(self) -> list[str]:
        exact = self.result.exact
        if exact.missing:
            return _wrapped(f"No fixed point: {exact.missing}. The queue cycles instead.")
        root = exact.rightmost
        if root is None:
            return _wrapped(f"Small disturbances {'die out' if exact.stable else 'grow'}.")
        way = "die out" if root.real < 0 else "grow"
        lines = f"Small disturbances {way} at {abs(root.real):.4g} /s"
        if root.imag:
            lines += f", at {abs(root.imag) / (2 * math.pi):.4g} Hz"
        # Where the linearised equations end.
        leaves = (
            "the RTT then leaves the range from T_low to T_high"
            if self.model == "timely"
            else "the queue then leaves the marking line"
        )
        lines += f". Large ones are another matter: {leaves}."
        return _wrapped(lines)


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 78)


def _row(label: str, published: str, exact: str) -> str:
    return f"  {label:<{_COLUMNS[0]}}{published:>{_COLUMNS[1]}}{exact:>{_COLUMNS[1] + 2}}".rstrip()


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share * 100:.4g} %"


def _size(size_bytes: float | None) -> str:
    return "-" if size_bytes is None else format_bytes(size_bytes)


def _degrees(margin: float | None) -> str:
    return "-" if margin is None else f"{margin:z.2f} deg"


def _seconds(time_s: float | None) -> str:
    return "-" if time_s is None else format_duration(time_s * 1e9)


def _critical(result: Stability) -> tuple[str, str]:
    above = f"> {LONGEST_DELAY_US / 1000:g} ms"

    def shown(delay_us: float | None, known: bool) -> str:
        if not known:
            return "-"
        return above if delay_us is None else f"{delay_us:.4g} us"

    published, exact = result.published, result.exact
    return (
        shown(published.critical_delay_us, published.margin_deg is not None),
        shown(exact.critical_delay_us, not exact.missing),
    )
