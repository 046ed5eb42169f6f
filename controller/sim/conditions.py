"""What a simulation is under, and what comes out of one on one link."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from controller.errors import UsageError
from controller.priority.classes import CLASSES
from controller.sim.jobs import Iteration, check_from_zero
from controller.sim.link import check_floor, check_rate
from controller.sim.streams import ERRORS, stream


@dataclass(frozen=True, kw_only=True)
class AnyConditions:
    """How well a controller sees and acts, on one link and on a cluster.

    Parameters
    ----------
    floor_share
        What a class with traffic is sure of on a link, as a share of it.
    plan_ns
        From an event until what is decided about it is in force.
    raise_bytes
        What is sent twice when a class rises in mid-window: packets in the higher class overtake
        those in the lower, and RC goes back to the first that is missing. At most what has been
        sent.
    start_error, bytes_error
        Predicted begin and bytes of a window are off by up to this share of the compute time
        and of the bytes (uniform, by the seed).

    Raises
    ------
    UsageError
        A value is impossible.
    """

    floor_share: float = 0.05
    plan_ns: float = 1e6
    raise_bytes: int = 0
    start_error: float = 0.0
    bytes_error: float = 0.0

    def __post_init__(self) -> None:
        check_floor(self.floor_share, CLASSES)
        check_from_zero(self, ("plan_ns", "raise_bytes", "start_error", "bytes_error"))
        if self.bytes_error >= 1:
            raise UsageError(f"bytes_error is {self.bytes_error!r}; allowed: below 1.")

    def prediction_errors(self, name: str, count: int, seed: int) -> list[tuple[float, float]]:
        """By what shares predicted begin and bytes of a job's first windows are off.

        Parameters
        ----------
        name
            Of the job.
        count
            Of windows; a longer list begins with a shorter.
        seed
            Of the simulation.
        """
        # A stream of its own: errors of the controller must not change what jobs do.
        off = stream(seed, name, ERRORS).uniform(-1, 1, (count, 2))
        off *= (self.start_error, self.bytes_error)
        return [(float(start), float(size)) for start, size in off]


@dataclass(frozen=True)
class Conditions(AnyConditions):
    """The link, and how well the controller sees and acts.

    Parameters
    ----------
    floor_share, plan_ns, raise_bytes, start_error, bytes_error
        As in `AnyConditions`.
    link_Bps
        Payload rate of the link.
    message_bytes
        A flow changes its class at a multiple of this only; 0: anywhere.

    Raises
    ------
    UsageError
        A value is impossible.
    """

    link_Bps: float
    message_bytes: int = 128 * 1024

    def __post_init__(self) -> None:
        check_rate(self.link_Bps)
        super().__post_init__()
        check_from_zero(self, ("message_bytes",))


@dataclass(frozen=True)
class Outcome:
    """What a simulation gives.

    Parameters
    ----------
    iterations
        The first ones of each job, as many as were asked for, in the order in which they ended.
    carried_bytes
        What the link carried for each job until the end of the simulation.
    resent_bytes
        What of that was sent twice, see `AnyConditions.raise_bytes`.
    decisions
        How often the policy was asked.
    end_ns
        When the last of `iterations` ended.
    """

    iterations: tuple[Iteration, ...]
    carried_bytes: Mapping[str, float]
    resent_bytes: Mapping[str, float]
    decisions: int
    end_ns: float
