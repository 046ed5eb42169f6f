"""How long work tells how far it is."""

from __future__ import annotations

from collections.abc import Callable

# Called now and then with what is done and what there is to do, in units of whoever calls.
Progress = Callable[[int, int], None]
