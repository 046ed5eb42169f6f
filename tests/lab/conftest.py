"""Make the library of scripts/lab importable, and choose the tests that this machine can need."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the lab kernel where setup does not build it: the machine's own kernel suffices."""
    from labkernel import build, native

    if native.native_obstacle() is not None or build.find_kernel() is not None:
        return
    unneeded = [item for item in items if needs_lab_kernel(item)]
    config.hook.pytest_deselected(items=unneeded)
    items[:] = [item for item in items if item not in unneeded]


def needs_lab_kernel(item: pytest.Item) -> bool:
    """Tell whether a test starts the lab kernel, and not the command on this machine's kernel."""
    where = item.callspec.params.get("where") if hasattr(item, "callspec") else None
    return item.get_closest_marker("lab") is not None and where != "--native"
