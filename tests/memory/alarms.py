"""Signals that raise, as Ctrl-C does, at whatever step of some work."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType

Interrupt = Callable[[Callable[[], object], float], None]


@contextlib.contextmanager
def alarms() -> Iterator[Interrupt]:
    """interrupt(step, after_s): repeats the step until an alarm raises in it.

    What it raises in a finalizer goes nowhere: so it comes again every 5 ms. The next one may find
    the step interrupted already, where others use the processor; then it raises nothing.
    """

    def repeat(step: Callable[[], object]) -> None:
        while True:
            step()

    def stop(_number: int, frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_code is repeat.__code__:
                raise InterruptedError
            frame = frame.f_back

    def interrupt(step: Callable[[], object], after_s: float) -> None:
        signal.setitimer(signal.ITIMER_REAL, after_s, 5e-3)
        try:
            repeat(step)
        except InterruptedError:
            signal.setitimer(signal.ITIMER_REAL, 0)

    previous = signal.signal(signal.SIGALRM, stop)
    try:
        yield interrupt
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
