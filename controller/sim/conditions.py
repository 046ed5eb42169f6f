"""The link and the controller of a simulation, and what comes out of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from controller.errors import UsageError
from controller.priority.classes import CLASSES
from controller.sim.jobs import Iteration
from controller.sim.link import check_link


@dataclass(frozen=True)
class Conditions:
    """The link, and how well the controller sees and acts.

    Parameters
    ----------
    link_Bps
        Payload rate of the link.
    floor_share
        What a class with traffic is sure of, as a share of the link.
    message_bytes
        A flow changes its class at a multiple of this only; 0: anywhere.
    plan_ns
        From an event until what the policy decides about it is in force.
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

    link_Bps: float
    floor_share: float = 0.05
    message_bytes: int = 128 * 1024
    plan_ns: float = 1e6
    raise_bytes: int = 0
    start_error: float = 0.0
    bytes_error: float = 0.0

    def __post_init__(self) -> None:
        check_link(self.link_Bps, self.floor_share, CLASSES)
        for name in ("message_bytes", "plan_ns", "raise_bytes", "start_error", "bytes_error"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise UsageError(f"{name} is {value!r}; allowed: a number from 0.")
        if self.bytes_error >= 1:
            raise UsageError(f"bytes_error is {self.bytes_error!r}; allowed: below 1.")


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
        What of that was sent twice, see `Conditions.raise_bytes`.
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
