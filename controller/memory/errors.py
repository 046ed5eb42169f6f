"""What the registration pool can refuse, each kind an exception of its own."""

from __future__ import annotations

from controller.errors import StellarError


class PoolError(StellarError):
    """The pool could not be made, or is closed or broken."""


class PoolExhaustedError(PoolError):
    """Everything is in use; the message says by whom."""


class LeaseError(PoolError):
    """A lease was used after its release, released twice, or is still out at the end."""


class RegionInUseError(PoolError):
    """A region cannot go: work requests or peers still use it."""


class ForkError(PoolError):
    """A child process touched a pool that its parent made."""
