"""Rules: which flows belong to a job, decided from facts that somebody else gathered.

The facts about processes come from `controller.agent.processes`.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import Any

from controller.errors import UsageError
from controller.priority.ranges import check_integer

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Prefix = ipaddress.IPv4Network | ipaddress.IPv6Network

DEFAULT_ENV_VARIABLE = "STELLAR_JOB"

MAX_QPN = (1 << 24) - 1
# PID_MAX_LIMIT of linux/threads.h on 64-bit machines.
MAX_PID = 1 << 22
# (uid_t)-1 means "no user".
MAX_UID = (1 << 32) - 2

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_GLOB = frozenset("*?[")


@dataclass(frozen=True)
class ProcessFacts:
    """What is known about the process that owns a flow's local queue pair.

    Parameters
    ----------
    command
        Its name as the kernel keeps it: at most 15 characters.
    argv0
        The first word of its command line, "" for a kernel thread.
    cgroup
        Path of its control group, e.g. ``/system.slice/train.service``.
    """

    pid: int
    uid: int
    command: str
    argv0: str = ""
    cgroup: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class FlowFacts:
    """A flow, as rules see it.

    ``local_qpn`` is the queue pair of this host when the flow leaves it, None when it is not
    known (or the same as ``dqpn``); ``process`` is None on a forwarder.
    """

    source: Address
    destination: Address
    dqpn: int
    local_qpn: int | None = None
    process: ProcessFacts | None = None


@dataclass(frozen=True)
class JobMatch:
    """What a flow must be to belong to a job.

    Every criterion that is given must hold; several values of one are alternatives.

    Parameters
    ----------
    src, dst, address
        Prefixes: of the flow's source, its destination, either of them.
    qpn
        Either queue pair number of the flow's connection.
    pid, uid
        Of the owner of the local queue pair (real user id).
    command
        Patterns (fnmatch) for its name or the file name in its first argument.
    cgroup
        Its control group: a path, which stands for all groups below it too, or a pattern.
    env
        ``NAME=PATTERN`` for a variable in its environment, or ``PATTERN`` for the default one.
    """

    src: tuple[Prefix, ...] = ()
    dst: tuple[Prefix, ...] = ()
    address: tuple[Prefix, ...] = ()
    qpn: tuple[int, ...] = ()
    pid: tuple[int, ...] = ()
    uid: tuple[int, ...] = ()
    command: tuple[str, ...] = ()
    cgroup: tuple[str, ...] = ()
    env: tuple[str, ...] = ()

    @classmethod
    def parse(cls, document: Mapping[str, Any], where: str = "match") -> JobMatch:
        """From criterion -> value or list of values, as TOML, JSON and the command line have it.

        Parameters
        ----------
        document
            Numbers may be text ("0x11"), addresses are.
        where
            What an error calls the table, e.g. ``stellar.toml: key job[1].match``.

        Raises
        ------
        UsageError
            A criterion is unknown, or a value is none of its kind.
        """
        if not isinstance(document, Mapping):
            raise UsageError(f"{where} is {document!r}; allowed: a table of criteria.")
        values: dict[str, tuple[Any, ...]] = {}
        for key, given in document.items():
            if key not in _READERS:
                raise UsageError(f"{where}.{key} is unknown; allowed: {', '.join(_READERS)}.")
            entries = given if isinstance(given, list | tuple) else [given]
            if not entries:
                raise UsageError(f"{where}.{key} is empty; allowed: at least one value.")
            values[key] = tuple(_READERS[key](f"{where}.{key}", entry) for entry in entries)
        return cls(**values)

    def to_json(self) -> dict[str, list[Any]]:
        """Criteria that are given, by name; addresses as text."""
        return {
            member.name: [_plain(value) for value in getattr(self, member.name)]
            for member in fields(self)
            if getattr(self, member.name)
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> JobMatch:
        """From `to_json`."""
        return cls.parse(document)

    def needs_process(self) -> bool:
        """Whether a criterion is about the process."""
        return bool(self.pid or self.uid or self.command or self.cgroup or self.env)

    def matches(self, facts: FlowFacts, env_variable: str = DEFAULT_ENV_VARIABLE) -> bool:
        """Whether a flow fulfils every criterion; true when there is none."""
        source, destination = _as_v4(facts.source), _as_v4(facts.destination)
        if self.src and not _within(source, self.src):
            return False
        if self.dst and not _within(destination, self.dst):
            return False
        if self.address and not (
            _within(source, self.address) or _within(destination, self.address)
        ):
            return False
        if self.qpn and facts.dqpn not in self.qpn and facts.local_qpn not in self.qpn:
            return False
        if not self.needs_process():
            return True
        return facts.process is not None and self._owns(facts.process, env_variable)

    def _owns(self, process: ProcessFacts, env_variable: str) -> bool:
        names = (process.command, PurePosixPath(process.argv0).name)
        return (
            (not self.pid or process.pid in self.pid)
            and (not self.uid or process.uid in self.uid)
            and (
                not self.command
                or any(fnmatchcase(name, each) for each in self.command for name in names)
            )
            and (not self.cgroup or any(_in_cgroup(process.cgroup, each) for each in self.cgroup))
            and (
                not self.env
                or any(_has(process.environment, each, env_variable) for each in self.env)
            )
        )


def check_variable(where: str, name: object) -> None:
    """Raise UsageError unless `name` can be an environment variable's."""
    if not isinstance(name, str) or not _VARIABLE.fullmatch(name):
        raise UsageError(
            f"{where} is {name!r}; allowed: the name of an environment variable, e.g. "
            f"{DEFAULT_ENV_VARIABLE}."
        )


def _within(address: Address, prefixes: tuple[Prefix, ...]) -> bool:
    return any(address in prefix for prefix in prefixes)


def _as_v4(address: Address) -> Address:
    """The IPv4 address in a v4-mapped one, which is how flow keys hold it."""
    mapped = getattr(address, "ipv4_mapped", None)
    return address if mapped is None else ipaddress.IPv4Address(mapped)


def _in_cgroup(path: str, wanted: str) -> bool:
    if _GLOB & set(wanted):
        return fnmatchcase(path, wanted)
    return path == wanted or path.startswith(wanted.rstrip("/") + "/")


def _has(environment: Mapping[str, str], criterion: str, default_variable: str) -> bool:
    name, pattern = _split_env(criterion)
    value = environment.get(name or default_variable)
    return value is not None and fnmatchcase(value, pattern)


def _split_env(criterion: str) -> tuple[str, str]:
    """``NAME=PATTERN`` -> both; "" as the name when there is none."""
    name, separator, pattern = criterion.partition("=")
    return (name, pattern) if separator and _VARIABLE.fullmatch(name) else ("", criterion)


# ---- values of criteria ----


def _read_prefix(where: str, value: object) -> Prefix:
    allowed = "an address or prefix, e.g. 10.0.0.1, 10.0.0.0/24, fd00::/64"
    if not isinstance(value, str):  # ip_network takes integers, too
        raise UsageError(f"{where} is {value!r}; allowed: {allowed}.")
    try:
        prefix = ipaddress.ip_network(value)
    except ValueError as error:
        raise UsageError(f"{where} is {value!r} ({error}); allowed: {allowed}.") from error
    mapped = getattr(prefix.network_address, "ipv4_mapped", None)
    if mapped is not None and prefix.prefixlen >= 96:
        return ipaddress.IPv4Network((mapped, prefix.prefixlen - 96))
    return prefix


def _integer_reader(low: int, high: int) -> Callable[[str, object], int]:
    def read(where: str, value: object) -> int:
        number = value
        if isinstance(value, str):
            try:
                number = int(value, 0)
            except ValueError:
                number = value  # and the check names it
        check_integer(where, number, low, high)
        assert isinstance(number, int)
        return number

    return read


def _read_pattern(where: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise UsageError(f"{where} is {value!r}; allowed: a name or pattern, e.g. python3*.")
    return value


def _read_cgroup(where: str, value: object) -> str:
    if not isinstance(value, str) or not value.startswith(("/", "*")):
        raise UsageError(
            f"{where} is {value!r}; allowed: a path below /sys/fs/cgroup or a pattern, e.g. "
            "/system.slice/train.service, */docker-*."
        )
    return value


def _read_env(where: str, value: object) -> str:
    if not isinstance(value, str) or not value or value.startswith("="):
        raise UsageError(
            f"{where} is {value!r}; allowed: NAME=PATTERN, or PATTERN for the default variable."
        )
    return value


_READERS: Mapping[str, Callable[[str, object], Any]] = {
    "src": _read_prefix,
    "dst": _read_prefix,
    "address": _read_prefix,
    "qpn": _integer_reader(0, MAX_QPN),
    "pid": _integer_reader(1, MAX_PID),
    "uid": _integer_reader(0, MAX_UID),
    "command": _read_pattern,
    "cgroup": _read_cgroup,
    "env": _read_env,
}


def _plain(value: Prefix | int | str) -> int | str:
    return value if isinstance(value, int | str) else str(value)
