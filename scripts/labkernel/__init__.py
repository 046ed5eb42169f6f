"""The lab kernel: build it, start it, run one command in it. `scripts/lab` is its command line.

Standard library only: this runs on a fresh machine, before any virtual environment exists.
"""

import sys

OLDEST_KERNEL = (7, 1)  # the first with rxe across network namespaces

# Exit statuses of `scripts/lab run` beside the command's own; 124 to 127 as timeout(1) and env(1).
EXIT_GUEST_MEMORY = 122
EXIT_GUEST_DIED = 123
EXIT_TIMEOUT = 124
EXIT_LAB = 125


class LabError(Exception):
    """The lab itself cannot do what was asked. The text says what was found and what to do."""


def say(text: str) -> None:
    """Print a line about the lab to standard error, apart from the command's own output."""
    print(f"lab: {text}", file=sys.stderr, flush=True)
