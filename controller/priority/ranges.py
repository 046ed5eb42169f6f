"""Checks of single values: the error tells what was found and what is allowed."""

from __future__ import annotations

from controller.errors import UsageError

# Limits within which the dataplane's 64-bit arithmetic on plans cannot overflow: a laxity is a
# deadline less (bytes / 1024) * 10^9.
MAX_BYTES = 1 << 42
MAX_TIME_ns = (1 << 62) - 1
# Less is a mistake; bpf/pace.h would pace at this instead (PACE_MIN_BPS).
MIN_RATE_Bps = 1000
MAX_RATE_Bps = 1 << 40
# A job that may take a hundred times as long has no bound.
MAX_SLOWDOWN = 100.0


def check_integer(what: str, value: object, low: int, high: int) -> None:
    """Raise UsageError unless `value` is an integer (not a bool) in low .. high."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise UsageError(f"{what} is {value!r}; allowed: {low} .. {high}.")


def check_share(what: str, value: object, zero: bool) -> None:
    """Raise UsageError unless `value` is a number in 0 .. 1; 0 itself only with `zero`."""
    # `not 0 <= value <= 1` so that NaN fails.
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)
        or not 0 <= value <= 1
        or (value == 0 and not zero)
    ):
        raise UsageError(f"{what} is {value!r}; allowed: {'0' if zero else 'above 0'} .. 1.")


def check_slowdown(what: str, value: object) -> None:
    """Raise UsageError unless `value` is a number in 1 .. MAX_SLOWDOWN."""
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)
        or not 1 <= value <= MAX_SLOWDOWN
    ):
        raise UsageError(f"{what} is {value!r}; allowed: 1 .. {MAX_SLOWDOWN:g}.")


def check_rate_or_none(what: str, rate_Bps: object) -> None:
    """Raise UsageError unless `rate_Bps` is 0 (none) or a rate that can be paced."""
    if rate_Bps != 0 or not isinstance(rate_Bps, int) or isinstance(rate_Bps, bool):
        check_integer(f"{what} in bytes/s", rate_Bps, MIN_RATE_Bps, MAX_RATE_Bps)
