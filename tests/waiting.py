"""Wait for what another thread or process does, instead of sleeping for as long as it may take."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def wait(condition: Callable[[], Any], timeout_s: float = 30.0) -> None:
    """Until a condition is true; it is asked a hundred times a second."""
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, f"it did not happen within {timeout_s:g} s"
        time.sleep(0.01)
