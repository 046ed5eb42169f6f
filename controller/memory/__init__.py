"""Registered memory: leases of what was registered before, and a cache for memory of others.

Nothing here needs verbs: any registrar does, and that of `controller.verbs.device.Device` is one.
"""

from controller.memory.arena import Arena
from controller.memory.cached_region import CachedRegion
from controller.memory.errors import (
    ForkError,
    LeaseError,
    PoolError,
    PoolExhaustedError,
    RegionInUseError,
)
from controller.memory.export import Export
from controller.memory.lease import Lease, LeasedRange
from controller.memory.policies import DEFAULT_POLICY, ONLINE_POLICIES
from controller.memory.pool import PoolConfig, RegistrationPool
from controller.memory.region_cache import RegionCache
from controller.memory.stats import PoolStats
from controller.verbs.registration import (
    DeviceLimits,
    MemoryRegion,
    Registrar,
    RegistrationError,
)

__all__ = [
    "DEFAULT_POLICY",
    "ONLINE_POLICIES",
    "Arena",
    "CachedRegion",
    "DeviceLimits",
    "Export",
    "ForkError",
    "Lease",
    "LeaseError",
    "LeasedRange",
    "MemoryRegion",
    "PoolConfig",
    "PoolError",
    "PoolExhaustedError",
    "PoolStats",
    "RegionCache",
    "RegionInUseError",
    "Registrar",
    "RegistrationError",
    "RegistrationPool",
]
