"""What fork() does to pools: nothing of them may be used in the child.

Registered pages must not be copied on write: the device would go on with the old ones. So pools'
memory is not inherited (MADV_DONTFORK), and the device's handles belong to the parent. A child that
touches a pool is told so. Asking for the process id on every lease would cost as much as the lease
does; instead the child marks all pools, once, before it runs anything else.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol

from controller.memory.errors import ForkError


class Forkable(Protocol):
    """Something that must not be used in a child; it looks at `forked` itself."""

    forked: bool


_alive: weakref.WeakSet[Forkable] = weakref.WeakSet()


def _mark_all() -> None:
    for each in list(_alive):
        each.forked = True


os.register_at_fork(after_in_child=_mark_all)


def watch_fork(each: Forkable) -> None:
    """Set ``each.forked`` in every child that is forked from now on.

    Parameters
    ----------
    each
        Hashable by identity and weakly referable; held weakly.
    """
    _alive.add(each)


def fork_error(what: str) -> ForkError:
    """The error for a child that touches `what`.

    Parameters
    ----------
    what
        Begins a sentence: ``Pool 'gradients'``.
    """
    return ForkError(
        f"{what} belongs to the process that made it; this one (pid {os.getpid()}) was forked "
        "from it and has neither its memory nor its device.",
        "Make pools after fork(), or start workers with multiprocessing's `spawn` method.",
    )
