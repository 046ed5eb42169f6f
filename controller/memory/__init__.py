"""Registered memory: leases of what was registered before, and a cache for memory of others."""

from controller.memory.arena import Arena
from controller.memory.errors import (
    ForkError,
    LeaseError,
    PoolError,
    PoolExhaustedError,
    RegionInUseError,
)
from controller.memory.lease import Lease, LeasedRange
from controller.memory.pool import PoolConfig, RegistrationPool
from controller.memory.stats import PoolStats

__all__ = [
    "Arena",
    "ForkError",
    "Lease",
    "LeaseError",
    "LeasedRange",
    "PoolConfig",
    "PoolError",
    "PoolExhaustedError",
    "PoolStats",
    "RegionInUseError",
    "RegistrationPool",
]
