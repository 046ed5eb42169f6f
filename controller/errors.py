"""Errors that a person reads: what was found, what was expected, what to do."""

from __future__ import annotations


class StellarError(Exception):
    """A condition that the user can understand and mend.

    Parameters
    ----------
    message
        What was found and what was expected; names the interface, key or file.
    remedy
        What to do about it.
    """

    exit_code = 1

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message} {self.remedy}".strip()


class UsageError(StellarError):
    """Wrong arguments or a wrong configuration file."""

    exit_code = 2


class PrivilegeError(StellarError):
    """Not root, or a capability is missing."""

    exit_code = 3


class UnsupportedError(StellarError):
    """The machine (kernel, library, device) cannot do what was asked."""

    exit_code = 4


class ConflictError(StellarError):
    """Somebody else's program or another controller is in the way."""

    exit_code = 5


class NotRunningError(StellarError):
    """No controller answers on the control socket."""

    exit_code = 6


class InputError(StellarError):
    """A file or message that cannot be read: empty, cut, of another kind."""

    exit_code = 7
