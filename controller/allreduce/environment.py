"""Which rank this process is, and where rank 0 is met, from what its launcher set.

The sources, first that is there: torchrun (RANK, WORLD_SIZE, LOCAL_RANK), Open MPI
(OMPI_COMM_WORLD_*), Slurm (SLURM_PROCID, ...). In this order because mpirun and torchrun are
often started by Slurm, whose variables then describe the starter.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass

from controller.errors import UsageError

_UNIX = "unix:"
_MAX_PORT = 65535
# Far beyond any cluster; a rank has a connection and a slot in several tables.
MAX_RANKS = 1 << 16
# sun_path is 108 bytes with the closing zero (unix(7)).
_MAX_UNIX_PATH_BYTES = 107
# Below the ephemeral ports of Linux (32768 and up), so that no outgoing connection has it already.
_SLURM_PORTS = range(20000, 30000)
_LAUNCHERS = (
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("Slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
)


@dataclass(frozen=True)
class Master:
    """Where rank 0 listens: an address and a port, or the path of a Unix socket.

    A path works between network namespaces of one host, where addresses may not.
    """

    address: str = ""
    port: int = 0
    path: str = ""

    def __post_init__(self) -> None:
        if self.path:
            if len(self.path.encode(errors="surrogateescape")) > _MAX_UNIX_PATH_BYTES:
                raise UsageError(
                    f"Master {self} is longer than the {_MAX_UNIX_PATH_BYTES} bytes that a Unix "
                    "socket's path may have.",
                    "Put it in a directory with a shorter name.",
                )
            if self.address or self.port or not self.path.startswith("/") or "\0" in self.path:
                raise UsageError(
                    f"Master {self} is no absolute path; expected unix:/path, without a port."
                )
        elif not self.address or not 1 <= self.port <= _MAX_PORT:
            raise UsageError(
                f"Master {self} is incomplete; expected an address and a port in 1 .. {_MAX_PORT}.",
                "Set MASTER_ADDR and MASTER_PORT, or MASTER_ADDR=unix:/path.",
            )

    def __str__(self) -> str:
        if self.path:
            return f"{_UNIX}{self.path}"
        return f"[{self.address}]:{self.port}" if ":" in self.address else (
            f"{self.address}:{self.port}"
        )  # fmt: skip

    @classmethod
    def parse(cls, text: str) -> Master:
        """From ``host:port``, ``[IPv6]:port`` or ``unix:/path``."""
        if text.startswith(_UNIX):
            return cls(path=text.removeprefix(_UNIX) or "?")
        host, separator, port = text.rpartition(":")
        bracketed = host.startswith("[") and host.endswith("]")
        if not separator or (":" in host and not bracketed):
            raise UsageError(
                f"Master {text!r} cannot be read; expected HOST:PORT, [IPV6]:PORT or unix:/path."
            )
        return cls(host.strip("[]"), _number("Port of the master", port))


@dataclass(frozen=True)
class TlsFiles:
    """Files (PEM) of mutual TLS: both sides show a certificate that the same authority signed."""

    ca: str
    certificate: str
    key: str

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> TlsFiles | None:
        """From STELLAR_TLS_CA, STELLAR_TLS_CERT and STELLAR_TLS_KEY; None when none is set."""
        names = ("STELLAR_TLS_CA", "STELLAR_TLS_CERT", "STELLAR_TLS_KEY")
        values = [environ.get(name, "") for name in names]
        if not any(values):
            return None
        if not all(values):
            missing = [name for name, value in zip(names, values, strict=True) if not value]
            raise UsageError(
                f"{_found(environ, names)} is not all that TLS needs; missing: "
                f"{', '.join(missing)}.",
                "Set all three, or none.",
            )
        return cls(*values)


def insecure_allowed(environ: Mapping[str, str]) -> bool:
    """Whether STELLAR_INSECURE_RENDEZVOUS allows plain connections between hosts."""
    value = environ.get("STELLAR_INSECURE_RENDEZVOUS", "")
    if value not in ("", "0", "1"):
        raise UsageError(f"STELLAR_INSECURE_RENDEZVOUS is {value!r}; allowed: 0, 1.")
    return value == "1"


@dataclass(frozen=True)
class Placement:
    """A process's place in its group.

    Attributes
    ----------
    rank
        0 .. size - 1.
    size
        Number of ranks.
    local_rank
        Index among the ranks of this host; picks the device.
    master
        Where rank 0 is met; None only in a group of one.
    """

    rank: int
    size: int
    local_rank: int
    master: Master | None

    def __post_init__(self) -> None:
        if not 1 <= self.size <= MAX_RANKS:
            raise UsageError(f"The group has {self.size} ranks; allowed: 1 .. {MAX_RANKS}.")
        if not 0 <= self.rank < self.size:
            raise UsageError(
                f"Rank {self.rank} is not in a group of {self.size}; allowed: 0 .. {self.size - 1}."
            )
        if not 0 <= self.local_rank < self.size:
            raise UsageError(
                f"Local rank {self.local_rank} is not in a group of {self.size}; allowed: 0 .. "
                f"{self.size - 1}."
            )
        if self.master is None and self.size > 1:
            raise UsageError(
                f"Nothing tells where rank 0 of {self.size} is met.",
                "Set MASTER_ADDR and MASTER_PORT on all ranks, or MASTER_ADDR=unix:/path when all "
                "are on one host (Open MPI: mpirun -x MASTER_ADDR -x MASTER_PORT).",
            )

    @classmethod
    def from_environment(
        cls,
        environ: Mapping[str, str],
        *,
        rank: int | None = None,
        size: int | None = None,
        local_rank: int | None = None,
        master: Master | str | None = None,
    ) -> Placement:
        """The place that a launcher's variables and the arguments give; arguments win.

        Parameters
        ----------
        environ
            Variables of the process.
        rank, size
            Both or neither; with them no launcher's variable is read but for the master.
        local_rank
            Without it: the launcher's, else the rank when the master is on this host (loopback or
            a Unix socket), else 0, as one rank a host has.
        master
            As `Master.parse` reads it. Without it: STELLAR_MASTER_ADDR and STELLAR_MASTER_PORT,
            each else MASTER_ADDR and MASTER_PORT, else Slurm's first host.

        Raises
        ------
        UsageError
            Half a set of variables, or values that cannot be; names the variables found.

        Notes
        -----
        torchrun's own store listens on MASTER_PORT (it says so by TORCHELASTIC_USE_AGENT_STORE),
        so there the port after it is taken unless STELLAR_MASTER_PORT is set.
        """
        launcher, names = "", ("", "", "")
        if rank is None and size is None:
            launcher, names, (rank, size, found_local) = _launched(environ)
            local_rank = found_local if local_rank is None else local_rank
        if rank is None or size is None:
            raise UsageError(
                f"Rank {rank} and size {size} were given; expected both or neither.",
                "Give both, or let the launcher's variables tell.",
            )
        if isinstance(master, str):
            master = Master.parse(master)
        if master is None:
            master = _master(environ, launcher)
        if local_rank is None:
            local_rank = rank if master is None or _is_local(master) else 0
        try:
            return cls(rank, size, local_rank, master)
        except UsageError as error:
            if not launcher:
                raise
            found = _found(environ, (*names, "MASTER_ADDR", "MASTER_PORT"))
            raise UsageError(f"{error.message} Found: {found}.", error.remedy) from error


def first_host(hostlist: str) -> str:
    """First host of a Slurm host list: ``gpu[007-009,12],login`` -> ``gpu007``.

    Raises
    ------
    UsageError
        It begins with no host.
    """
    # Up to the comma that is outside brackets; of each bracket, the beginning of its first range.
    head = re.match(r"(?:[^\[\],\s]|\[[0-9,\-]+\])+", hostlist)
    host = re.sub(r"\[(\d*)[0-9,\-]*\]", r"\1", head[0]) if head else ""
    if not head or not host or hostlist[head.end() : head.end() + 1] not in ("", ","):
        raise UsageError(
            f"Slurm's host list {hostlist!r} cannot be read; expected the like of gpu[01-04],login."
        )
    return host


def _launched(
    environ: Mapping[str, str],
) -> tuple[str, tuple[str, str, str], tuple[int, int, int | None]]:
    """The launcher, its variables' names, and rank, size and local rank."""
    for launcher, *names in _LAUNCHERS:
        rank, size, local = names
        if rank not in environ and size not in environ:
            continue
        if rank not in environ or size not in environ:
            # Slurm gives a batch script SLURM_NTASKS and no rank (and a shell in it SLURM_PROCID):
            # that is no launched process.
            if launcher == "Slurm":
                continue
            missing = size if rank in environ else rank
            raise UsageError(
                f"Found {_found(environ, names)}, but {missing} is not set.",
                f"Set both {rank} and {size}, or start the ranks by torchrun, mpirun or srun.",
            )
        return (
            launcher,
            (rank, size, local),
            (
                _number(rank, environ[rank]),
                _number(size, environ[size]),
                _number(local, environ[local]) if local in environ else None,
            ),
        )
    known = [name for _, rank, size, _ in _LAUNCHERS for name in (rank, size)]
    raise UsageError(
        f"This process has no rank: of the launchers' variables, found {_found(environ, known)}.",
        "Start the ranks by torchrun, mpirun or srun, set RANK and WORLD_SIZE, or give both.",
    )


def _master(environ: Mapping[str, str], launcher: str) -> Master | None:
    address = environ.get("STELLAR_MASTER_ADDR") or environ.get("MASTER_ADDR", "")
    if address.startswith(_UNIX):
        return Master.parse(address)
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    if not address and launcher == "Slurm" and nodes:
        address = first_host(nodes)
    port: int | None = None
    if environ.get("STELLAR_MASTER_PORT"):
        port = _number("STELLAR_MASTER_PORT", environ["STELLAR_MASTER_PORT"])
    elif environ.get("MASTER_PORT"):
        port = _number("MASTER_PORT", environ["MASTER_PORT"])
        if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            port += 1
    elif launcher == "Slurm" and environ.get("SLURM_JOB_ID"):
        # All ranks of a step come to the same port, two steps or jobs of a host to different ones.
        job = _number("SLURM_JOB_ID", environ["SLURM_JOB_ID"])
        step = _number("SLURM_STEP_ID", environ.get("SLURM_STEP_ID", "0"))
        port = _SLURM_PORTS[(job * 37 + step) % len(_SLURM_PORTS)]
    if not address and port is None:
        return None
    if not address or port is None:
        names = ("MASTER_ADDR", "MASTER_PORT", "STELLAR_MASTER_ADDR", "STELLAR_MASTER_PORT")
        raise UsageError(
            f"Found {_found(environ, names)}, but no {'port' if address else 'address'}.",
            "Set MASTER_ADDR and MASTER_PORT, or MASTER_ADDR=unix:/path.",
        )
    return Master(address, port)


def _is_local(master: Master) -> bool:
    if master.path or master.address == "localhost":
        return True
    try:
        return ipaddress.ip_address(master.address).is_loopback
    except ValueError:
        return False


def _number(name: str, text: str) -> int:
    if not re.fullmatch(r"\d{1,10}", text, re.ASCII):
        raise UsageError(f"{name} is {text!r}; expected a number.")
    return int(text)


def _found(environ: Mapping[str, str], names: tuple[str, ...] | list[str]) -> str:
    """``NAME=value`` of those that are set."""
    found = [f"{name}={environ[name]}" for name in names if name in environ]
    return ", ".join(found) or f"none of {', '.join(names)}"
