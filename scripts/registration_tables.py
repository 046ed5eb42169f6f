"""Tables of docs/results.md about registration, of `scripts/bench-registration`."""

from __future__ import annotations

from typing import Any


def registration_table(document: Any) -> str:
    """Markdown table of `scripts/bench-registration`: what a registration and a hit cost."""
    lines = [
        "| size | ibv_reg_mr, us | by pyverbs, us | cached: p50, us | p99, us | x less (p50) "
        "| lease, us |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in document["costs"]:
        size = row["nbytes"]
        text = f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"
        lines.append(
            f"| {text} | {row['touched_us']:,.0f} | {row['pyverbs_us']:,.0f} "
            f"| {row['hit_p50_us']:.1f} | {row['hit_p99_us']:.1f} | {row['speedup']:,.0f} "
            f"| {row['lease_us']:.1f} |"
        )
    return "\n".join(lines)


def overlap_table(document: Any) -> str:
    """Markdown table of `scripts/bench-registration`: what a transfer keeps meanwhile."""
    lines = ["| registered meanwhile | how | rate kept |", "|---:|---|---:|"]
    for row in document["overlaps"]:
        lines.append(f"| {row['nbytes'] >> 20} MiB | {row['way']} | {row['kept']:.2f} |")
    return "\n".join(lines)
