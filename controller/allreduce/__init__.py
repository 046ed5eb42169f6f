"""AllReduce over RC queue pairs: schedules, reduction, compression, and the engine that runs them.

`Communicator`, `Settings` and `Placement` are what a program needs; they are imported when they are
used, as only they need an RDMA library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from controller.allreduce.communicator import Communicator
    from controller.allreduce.environment import Placement
    from controller.allreduce.settings import Settings

__all__ = ["Communicator", "Placement", "Settings"]


def __getattr__(name: str) -> Any:
    """Import on first use."""
    from importlib import import_module

    modules = {"Communicator": "communicator", "Placement": "environment", "Settings": "settings"}
    if name not in modules:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{modules[name]}"), name)
