"""Job views of a 12.5 MB/s link for tests of policies: times in ms, sizes as ms of the link."""

from __future__ import annotations

from typing import Any

from controller.priority.policy import JobView

LINK_Bps = 12.5e6
MS = 1_000_000


def size_bytes(ms: float) -> int:
    """What the link carries in a time."""
    return round(ms * LINK_Bps / 1000)


def sending(
    name: str, since_ms: float, window_ms: float, done_ms: float = 0, **more: Any
) -> JobView:
    """A job whose window is open."""
    return _view(name, True, since_ms, window_ms, done_ms, **more)


def idle(name: str, next_ms: float, window_ms: float, **more: Any) -> JobView:
    """A job that computes; its next window is expected at a time."""
    return _view(name, False, next_ms, window_ms, 0, **more)


def _view(
    name: str, is_open: bool, start_ms: float, window_ms: float, done_ms: float, **more: Any
) -> JobView:
    return JobView(
        name=name,
        is_open=is_open,
        window_start_ns=round(start_ms * MS),
        expected_bytes=size_bytes(window_ms),
        done_bytes=size_bytes(done_ms),
        alone_Bps=LINK_Bps,
        compute_ns=round(more.pop("compute_ms", 280) * MS),
        **more,
    )
