"""The lock of the hot path excludes, and is free again after errors."""

from __future__ import annotations

import sys
import threading
import time

import pytest

from controller.memory.quick_lock import QuickLock


def test_threads_inside_are_never_two() -> None:
    lock = QuickLock()
    counts = [0]

    def work() -> None:
        for _ in range(3000):
            with lock:
                before = counts[0]
                # A place where another thread would come between.
                sum(range(20))
                counts[0] = before + 1

    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval_s)
    assert counts[0] == 4 * 3000


def test_an_error_inside_leaves_it_free() -> None:
    lock = QuickLock()
    with pytest.raises(ZeroDivisionError), lock:
        raise ZeroDivisionError
    with lock:
        pass


def test_who_finds_it_taken_gets_it_when_it_is_free() -> None:
    lock = QuickLock()
    got = threading.Event()

    def take() -> None:
        with lock:
            got.set()

    thread = threading.Thread(target=take)
    with lock:
        thread.start()
        time.sleep(0.05)
        assert not got.is_set()
    assert got.wait(10)
    thread.join()
