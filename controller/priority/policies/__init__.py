"""The policies by which jobs share a link; one interface, `controller.priority.policy`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from controller.errors import UsageError
from controller.priority.policies.cassini import CassiniPolicy
from controller.priority.policies.crux import CruxPolicy
from controller.priority.policies.fair import FairPolicy
from controller.priority.policies.guard import guard_margin_ns
from controller.priority.policies.laxity import LaxityPolicy
from controller.priority.policies.mltcp import MltcpPolicy
from controller.priority.policies.static import StaticPolicy
from controller.priority.policy import Policy

__all__ = ["POLICIES", "find_policy", "guard_margin_ns"]

# Name -> how to make one. A policy may remember what it has decided: one object for each link.
POLICIES: Mapping[str, Callable[[], Policy]] = MappingProxyType(
    {
        "laxity": LaxityPolicy,
        "fair": FairPolicy,
        "static": StaticPolicy,
        "mltcp": MltcpPolicy,
        "crux": CruxPolicy,
        "cassini": CassiniPolicy,
    }
)


def find_policy(name: str) -> Policy:
    """Make a policy by name.

    Raises
    ------
    UsageError
        There is none of this name.
    """
    if name not in POLICIES:
        raise UsageError(f"Policy is {name!r}; allowed: {', '.join(POLICIES)}.")
    return POLICIES[name]()
