"""The coordinators, one for each policy; `controller.priority.coordination` has the interface."""

from controller.priority.coordinators.cassini import CassiniCoordinator
from controller.priority.coordinators.crux import CruxCoordinator
from controller.priority.coordinators.laxity import LaxityCoordinator, StrictLaxityCoordinator
from controller.priority.coordinators.simple import (
    FairCoordinator,
    MltcpCoordinator,
    StaticCoordinator,
)

__all__ = [
    "CassiniCoordinator",
    "CruxCoordinator",
    "FairCoordinator",
    "LaxityCoordinator",
    "MltcpCoordinator",
    "StaticCoordinator",
    "StrictLaxityCoordinator",
]
