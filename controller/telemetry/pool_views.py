"""Text of `controller pool status`, at most 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from controller.units import format_bytes, format_duration

_WIDTH = 80


def _wrapped(text: str) -> str:
    return textwrap.fill(
        text, _WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False
    )


def _details(pool: Mapping[str, Any]) -> list[str]:
    """What does not fit into the row of a pool."""
    stats = pool["stats"]
    lines = []
    if pool["chunks"] or pool["chunks_wanted"]:
        present = ", ".join(
            f"{format_bytes(nbytes)} in pages of {size}"
            for size, nbytes in pool["present_nbytes"].items()
        )
        wanted = f" of {pool['chunks_wanted']}" if pool["chunks"] != pool["chunks_wanted"] else ""
        nodes = ", ".join(str(node) for node in pool["numa_nodes"] if node >= 0)
        lines.append(
            f"chunks: {pool['chunks']}{wanted}, {format_bytes(pool['chunk_nbytes'])} each"
            + (f", {present}" if present else "")
            + (f", on NUMA node {nodes}" if nodes else "")
        )
    lines.append(
        f"leases: {stats['leases']:,}, {stats['lease_key_hits']:,} of them to their key's old "
        f"place; {stats['leases_out']:,} out, {stats['leases_leaked']:,} leaked; waited "
        f"{format_duration(stats['lease_wait_us'] * 1000)}"
    )
    mean_us = stats["registration_us"] / stats["registrations"] if stats["registrations"] else 0.0
    lines.append(
        f"registrations: {stats['registrations']:,}, {stats['deregistrations']:,} given back; "
        f"{format_duration(mean_us * 1000)} on average, "
        f"{format_duration(stats['registration_max_us'] * 1000)} at most"
    )
    if pool["cache_nbytes"]:
        evictions = ", ".join(f"{name} {n:,}" for name, n in stats["evictions"].items() if n)
        prefetch = ", ".join(f"{name} {n:,}" for name, n in stats["prefetch"].items())
        lines.append(
            f"cache: {format_bytes(pool['cache_nbytes'])} in up to {pool['cache_regions']:,} "
            f"regions, policy {pool['policy']}; evicted: {evictions or 'none'}; "
            f"prefetch: {prefetch if pool['prefetch_depth'] else 'off'}"
        )
    failed = stats["revocations"].get("failed", 0)
    if failed:
        lines.append(f"rkeys that peers did not give back when asked to: {failed:,}")
    return [_wrapped(line) for line in lines]


def pools_text(pools: Sequence[Mapping[str, Any]]) -> str:
    """A row for each pool, and under it what it is made of and came to.

    Parameters
    ----------
    pools
        As `controller.memory.status_files.read_pools` gives them.
    """
    if not pools:
        return "no pools; a process shows its own here as soon as it makes one"
    lines = [f"{'pool':<18}{'pid':>9}  {'device':<14}{'leased':>10}{'of':>10}{'pinned':>10}"
             f"{'hits':>7}"]  # fmt: skip
    for pool in pools:
        stats = pool["stats"]
        hits = f"{stats['hits'] / stats['gets']:.1%}" if stats["gets"] else "-"
        lines.append(
            f"{pool['name'][:17]:<18}{pool['pid']:>9}  {pool['device'][:13]:<14}"
            f"{format_bytes(pool['leased_nbytes']):>10}{format_bytes(pool['capacity_nbytes']):>10}"
            f"{format_bytes(stats['pinned_nbytes']):>10}{hits:>7}"
        )
        lines += _details(pool)
    return "\n".join(lines)
