"""Replay of recorded requests through eviction policies, without memory, device or clock.

A trace is CSV, one request a line: ``key,bytes`` or ``key,bytes,register_us``. A first line
``key,bytes...`` is a header. The part of a key before its last ``/`` names the stream
(communicator, job) whose order of requests may repeat: ``job3/bucket7``.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from controller.errors import InputError, StellarError, UsageError
from controller.memory.policies import ONLINE_POLICIES, EvictionPolicy, make_policy
from controller.memory.policies.belady import BeladyPolicy, next_uses

REPLAY_POLICIES = (*ONLINE_POLICIES, "belady")
ALL_POLICIES = "all"

_MAX_LINE_BYTES = 4096
_MAX_BYTES = 2**63 - 1
_MAX_DIGITS = 19
_FORM = "key,bytes or key,bytes,register_us"
_PROGRESS_EVERY = 4096
# Regions that a live pool fetches ahead at a time.
_PREFETCH_LIMIT = 4

ProgressCallback = Callable[[int, int], None]


class Request(NamedTuple):
    """One line of a trace; `register_us` is 0 where it is not known."""

    key: str
    nbytes: int
    register_us: float
    stream: str | None


@dataclass(frozen=True)
class ReplayResult:
    """What one policy made of a trace.

    `hits` leaves out those that only prefetching made: they are `prefetch_hits`. Of the times,
    `registration_us` is that of all misses, `unpooled_us` that of all requests; None where the
    trace has none.
    """

    policy: str
    capacity_bytes: int
    requests: int
    hits: int
    bytes_requested: int
    bytes_hit: int
    evictions: int
    too_large: int
    registration_us: float | None
    unpooled_us: float | None
    prefetches: int | None
    prefetch_hits: int
    prefetch_wasted: int

    def to_json(self) -> dict[str, object]:
        """As `--json` prints it."""
        document: dict[str, object] = {
            "policy": self.policy,
            "capacity_bytes": self.capacity_bytes,
            "requests": self.requests,
            "hits": self.hits,
            "hit_ratio": self.hits / self.requests,
            "bytes_hit_ratio": self.bytes_hit / self.bytes_requested,
            "evictions": self.evictions,
            "too_large": self.too_large,
            "registration_us": self.registration_us,
            "unpooled_us": self.unpooled_us,
        }
        if self.prefetches is not None:
            document["prefetch"] = {
                "issued": self.prefetches,
                "useful": self.prefetch_hits,
                "wasted": self.prefetch_wasted,
                "hit_ratio": (self.hits + self.prefetch_hits) / self.requests,
            }
        return document


class SimulatedPool:
    """The content of a pool that one policy rules; no region is ever in use.

    Parameters
    ----------
    name
        Of the policy, for the result.
    policy
        Only this pool may drive it.
    capacity_bytes
        What the pool holds at most.
    prefetch
        Whether what the policy expects is fetched, each time before the next request comes.
    """

    def __init__(
        self, name: str, policy: EvictionPolicy, capacity_bytes: int, prefetch: bool = False
    ) -> None:
        self.name = name
        self._policy = policy
        self._capacity_bytes = capacity_bytes
        self._prefetch = prefetch
        self._resident: dict[str, int] = {}
        self._used_bytes = 0
        self._requests = self._hits = self._bytes_requested = self._bytes_hit = 0
        self._evictions = self._too_large = 0
        self._registration_us = self._unpooled_us = 0.0
        # Fetched and not asked for yet. What can be fetched is what was asked for before.
        self._ahead: set[str] = set()
        self._sizes: dict[str, int] = {}
        self._prefetches = self._prefetch_hits = self._prefetch_wasted = 0

    def request(self, request: Request) -> bool:
        """Serve one request.

        Returns
        -------
        bool
            True when the region was resident.
        """
        key, nbytes, register_us, stream = request
        self._requests += 1
        self._bytes_requested += nbytes
        self._unpooled_us += register_us
        self._policy.on_request(key, nbytes, register_us, stream)
        held = self._resident.get(key, 0)
        hit = held >= nbytes
        if hit and key in self._ahead:
            self._ahead.discard(key)
            self._prefetch_hits += 1
        elif hit:
            self._hits += 1
            self._bytes_hit += nbytes
        else:
            self._registration_us += register_us
            if held:  # it grew: registered anew
                self._remove(key)
            if nbytes > self._capacity_bytes:
                self._too_large += 1
            else:
                self._insert(key, nbytes)
        if self._prefetch:
            self._sizes[key] = nbytes
            self._fetch_ahead(key)
        return hit

    def result(self) -> ReplayResult:
        """What came of it so far."""
        timed = self._unpooled_us > 0
        return ReplayResult(
            policy=self.name,
            capacity_bytes=self._capacity_bytes,
            requests=self._requests,
            hits=self._hits,
            bytes_requested=self._bytes_requested,
            bytes_hit=self._bytes_hit,
            evictions=self._evictions,
            too_large=self._too_large,
            registration_us=self._registration_us if timed else None,
            unpooled_us=self._unpooled_us if timed else None,
            prefetches=self._prefetches if self._prefetch else None,
            prefetch_hits=self._prefetch_hits,
            prefetch_wasted=self._prefetch_wasted,
        )

    def _insert(self, key: str, nbytes: int, keep: str | None = None) -> bool:
        """Make room and insert, without touching the region `keep`."""
        excess = self._used_bytes + nbytes - self._capacity_bytes
        going = []
        if excess > 0:
            for victim in self._policy.victims():
                assert isinstance(victim, str)
                if victim == keep:
                    continue
                going.append(victim)
                excess -= self._resident[victim]
                if excess <= 0:
                    break
            else:
                return False
        for victim in going:
            self._remove(victim)
            self._evictions += 1
        self._resident[key] = nbytes
        self._used_bytes += nbytes
        self._policy.on_insert(key, nbytes)
        return True

    def _remove(self, key: str) -> None:
        self._used_bytes -= self._resident.pop(key)
        self._policy.on_remove(key)
        if key in self._ahead:
            self._ahead.discard(key)
            self._prefetch_wasted += 1

    def _fetch_ahead(self, current: str) -> None:
        for key in self._policy.prefetch_candidates(_PREFETCH_LIMIT):
            assert isinstance(key, str)
            nbytes = self._sizes[key]
            if nbytes <= self._capacity_bytes and self._insert(key, nbytes, keep=current):
                self._ahead.add(key)
                self._prefetches += 1


def read_trace(path: Path, progress: ProgressCallback | None = None) -> Iterator[Request]:
    """The requests of a trace, one at a time.

    Parameters
    ----------
    path
        A CSV file.
    progress
        Is called now and then with bytes read and in total.

    Raises
    ------
    InputError
        The file is empty or not such a trace; names the line.
    """
    number = 0
    requests = 0
    try:
        with path.open("rb") as file:
            total = path.stat().st_size
            while line := file.readline(_MAX_LINE_BYTES + 1):
                number += 1
                request = _parse(line, path, number)
                if request is not None:
                    requests += 1
                    yield request
                if progress is not None and number % _PROGRESS_EVERY == 0:
                    progress(file.tell(), total)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.") from error
    if not requests:
        raise InputError(
            f"{path} holds no request; expected CSV lines {_FORM}.",
            "Record a run with --record, or check the path.",
        )


def replay_file(
    path: Path,
    policy: str,
    capacity_bytes: int,
    prefetch: bool = False,
    progress: ProgressCallback | None = None,
) -> list[ReplayResult]:
    """Replay a trace through one policy, or through all.

    Parameters
    ----------
    path
        A CSV file; see `read_trace`. `belady` reads it twice.
    policy
        One of `REPLAY_POLICIES`, or ``all``.
    capacity_bytes
        What the pool holds at most; at least 1.
    prefetch
        See `SimulatedPool`.
    progress
        See `read_trace`.

    Raises
    ------
    InputError
        See `read_trace`.
    UsageError
        No policy has that name, or the capacity is below 1.
    """
    names = REPLAY_POLICIES if policy == ALL_POLICIES else (policy,)
    pools = []
    for name in names:
        if name == "belady":
            if capacity_bytes < 1:
                raise UsageError(f"A pool of {capacity_bytes} bytes holds nothing.")
            future = next_uses(request.key for request in read_trace(path, progress))
            rule: EvictionPolicy = BeladyPolicy(future)
        else:
            rule = make_policy(name, capacity_bytes)
        pools.append(SimulatedPool(name, rule, capacity_bytes, prefetch))
    for request in read_trace(path, progress):
        for pool in pools:
            pool.request(request)
    return [pool.result() for pool in pools]


def results_text(results: Sequence[ReplayResult]) -> str:
    """The results as a table of at most 80 columns."""
    first = results[0]
    head = f"{first.requests} requests, pool of {first.capacity_bytes} bytes"
    if first.too_large:
        head += f"\n{first.too_large} requests for more than the pool holds"
    lines = [head, ""]
    timed = first.registration_us is not None
    ahead = first.prefetches is not None
    title = f"{'policy':<11}{'hits':>12}{'ratio':>8}{'by bytes':>10}{'evictions':>12}"
    title += f"{'registering':>14}" if timed else ""
    title += f"{'prefetched':>13}" if ahead else ""
    lines.append(title)
    for result in results:
        ratio = 100 * result.hits / result.requests
        by_bytes = 100 * result.bytes_hit / result.bytes_requested
        line = f"{result.policy:<11}{result.hits:>12}{ratio:>7.2f}%{by_bytes:>9.2f}%"
        line += f"{result.evictions:>12}"
        if timed:
            line += f"{(result.registration_us or 0) / 1000:>11.1f} ms"
        if ahead:
            line += f"{result.prefetch_hits:>13}"
        lines.append(line)
    if ahead:
        lines.append("")
        lines.append("prefetched: hits that only prefetching made; not among hits and ratio")
    return "\n".join(lines)


def _parse(line: bytes, path: Path, number: int) -> Request | None:
    """A line of the trace; None for the header and for blank lines."""
    if len(line) > _MAX_LINE_BYTES:
        raise _unreadable(path, number, f"is longer than {_MAX_LINE_BYTES} bytes")
    try:
        text = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise _unreadable(path, number, "is not text") from error
    if not text.isprintable() and not text.replace("\t", " ").isprintable():
        raise _unreadable(path, number, "is not text")
    if not text.strip():
        return None
    try:
        fields = next(csv.reader([text], strict=True)) if '"' in text else text.split(",")
    except csv.Error as error:
        raise _unreadable(path, number, f"is no CSV ({error})") from error
    fields = [field.strip() for field in fields]
    if number == 1 and fields in (["key", "bytes"], ["key", "bytes", "register_us"]):
        return None
    if not 2 <= len(fields) <= 3:
        raise _unreadable(path, number, f"has {len(fields)} columns")
    key, size = fields[:2]
    if not key:
        raise _unreadable(path, number, "has no key")
    if not (size.isascii() and size.isdigit() and len(size) <= _MAX_DIGITS):
        raise _unreadable(path, number, f"has {_short(size)} bytes, which is no whole number")
    nbytes = int(size)
    if not 1 <= nbytes <= _MAX_BYTES:
        raise _unreadable(path, number, f"has {nbytes} bytes; allowed: 1 .. 2**63 - 1")
    return Request(
        key,
        nbytes,
        _microseconds(fields[2], path, number) if len(fields) == 3 else 0.0,
        key.rpartition("/")[0] or None,
    )


def _microseconds(text: str, path: Path, number: int) -> float:
    if not text:
        return 0.0
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= _MAX_BYTES:
        raise _unreadable(path, number, f"has register_us {_short(text)}, which is no time")
    return value


def _short(text: str) -> str:
    return repr(text if len(text) <= 32 else text[:32] + "...")


def _unreadable(path: Path, number: int, what: str) -> StellarError:
    return InputError(f"{path} line {number} {what}; expected {_FORM}.")
