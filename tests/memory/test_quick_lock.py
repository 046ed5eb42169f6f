"""The lock of the hot path excludes, and is free again after errors."""

from __future__ import annotations

import sys
import threading
import time

import pytest

from controller.memory import quick_lock
from controller.memory.quick_lock import QuickLock
from tests.memory.alarms import alarms


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


@pytest.fixture(params=["semaphore", "none to be had"])
def any_lock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> QuickLock:
    if request.param != "semaphore":

        def refuse(*_: object) -> None:
            raise OSError("no /dev/shm")

        monkeypatch.setattr(quick_lock, "SemLock", refuse)
    return QuickLock()


def test_a_thread_knows_whether_it_is_inside_and_others_are_not(any_lock: QuickLock) -> None:
    others: list[bool] = []
    assert not any_lock.held_by_this_thread()
    with any_lock:
        assert any_lock.held_by_this_thread()
        thread = threading.Thread(target=lambda: others.append(any_lock.held_by_this_thread()))
        thread.start()
        thread.join()
    assert not any_lock.held_by_this_thread() and others == [False]


def test_a_signal_that_raises_at_any_place_leaves_it_free(
    any_lock: QuickLock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alarms every 50 us or so, at whatever step of taking and giving: none of them loses it."""
    # pytest's takes so long that the next alarm finds it.
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)

    def take_and_give() -> None:
        with any_lock:
            pass

    with alarms() as interrupt:
        for _ in range(2000):
            interrupt(take_and_give, 50e-6)
            # By another thread, as the holder itself is let in.
            assert not any_lock.held_by_this_thread()
