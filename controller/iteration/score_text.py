"""A score as people read it, and its single predictions."""

from __future__ import annotations

from typing import Any

from controller.iteration.score import Score
from controller.telemetry.text import wrapped
from controller.units import format_bytes, format_duration

_NS_PER_US = 1000


def rows_json(score: Score) -> list[dict[str, Any]]:
    """Every scored prediction: what was predicted, what came, errors in percent."""
    result = []
    for row in score.rows:
        last, mean, ewma = row.naive_error_pct
        result.append(
            {
                "window": row.window + 1,
                "period_us": row.actual_ns / _NS_PER_US,
                "predicted_us": row.predicted_ns / _NS_PER_US,
                "error_pct": row.error_pct,
                "naive_error_pct": {"last": last, "mean": mean, "ewma02": ewma},
                "periodic": row.is_periodic,
                "changed": row.changed,
            }
        )
    return result


def score_text(score: Score, source: str, with_rows: bool = False) -> str:
    """Summary at 80 columns; `with_rows`: also every prediction."""
    document = score.to_json()
    prediction = score.prediction
    verdict = "periodic" if prediction.is_periodic else "NOT periodic"
    lines = [
        wrapped(f"{source}: {verdict} (confidence {prediction.confidence:.2f}): {prediction.why}")
    ]
    about = f"period {format_duration(score.period_ns)}, {prediction.iterations} iterations"
    if prediction.bursts_per_iteration > 1:
        about += f" of {prediction.bursts_per_iteration} bursts"
    if prediction.window_ns:
        about += f", window {format_duration(prediction.window_ns)}"
    if prediction.bytes is not None:
        about += f", {format_bytes(prediction.bytes)}"
    lines.append(wrapped(about, "  "))
    if score.changes:
        shown = ", ".join(str(number) for number in score.changes[:8])
        lines.append(wrapped(f"period changed, noticed at iteration {shown}", "  "))
    if prediction.anomalies:
        lines.append(f"  {prediction.anomalies} pauses (evaluation, checkpoint) told apart")
    ours, naive, start = (
        document["error_pct"], document["naive_error_pct"], document["start_error_pct"],
    )  # fmt: skip
    lines += [
        "",
        f"error of the next period, %    {len(score.rows)} predictions",
        f"{'':21}{'ours':>9}{'last':>9}{'mean':>9}{'ewma 0.2':>10}",
        f"{'mean':21}{ours['mean']:9.3f}{naive['last']:9.3f}{naive['mean']:9.3f}"
        f"{naive['ewma02']:10.3f}",
        f"{'p50':21}{ours['p50']:9.3f}",
        f"{'p95':21}{ours['p95']:9.3f}",
        f"{'begin, % of period':21}{start['p50']:9.3f} p50{start['p95']:12.3f} p95",
    ]
    if document["bytes_error_pct"] is not None:
        lines.append(f"{'bytes':21}{document['bytes_error_pct']:9.3f} mean")
    best = min(naive.values())
    if ours["mean"] >= best:
        lines.append("No better than the best naive prediction on this trace.")
    if with_rows:
        lines += ["", f"{'window':>7}{'period':>12}{'predicted':>12}{'error %':>9}{'last %':>9}"]
        for row in score.rows:
            mark = "  changed" if row.changed else "" if row.is_periodic else "  not periodic"
            lines.append(
                f"{row.window + 1:7}{format_duration(row.actual_ns):>12}"
                f"{format_duration(row.predicted_ns):>12}{row.error_pct:9.3f}"
                f"{row.naive_error_pct[0]:9.3f}{mark}"
            )
    lines += [wrapped(f"note: {note}") for note in score.notes]
    return "\n".join(lines)
