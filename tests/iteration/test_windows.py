"""Sync windows found in streams of collectives of several kinds."""

from __future__ import annotations

import itertools
from random import Random

import pytest

from controller.iteration.series import Collective
from controller.iteration.windows import WindowDetector, WindowPlan, find_windows, learn

MS = 1_000_000
BUCKET_BYTES = 25_000_000


def at(ms, length_ms, size, op, communicator):
    return Collective(int(ms * MS), int((ms + length_ms) * MS), size, op, communicator)


def job(
    seed=0,
    iterations=20,
    jitter=0.05,
    buckets=5,
    is_tensor_parallel=False,
    accumulation=1,
    pause_every=0,
    op="all_reduce",
):
    """Collectives of a job with 200 ms iterations, and where its windows begin.

    Gradients of each (micro) batch go in buckets in its second half; tensor-parallel operations
    of the same kind run all through it on their own communicator.
    """
    random, now, collectives, begins = Random(seed), 0.0, [], []
    for iteration in range(iterations):
        for micro in range(accumulation):
            length = 200 / accumulation * (1 + jitter * random.uniform(-1, 1))
            step = now
            while is_tensor_parallel and step < now + 0.95 * length:
                collectives.append(at(step, 0.8, 8_000_000, "all_reduce", "tensor"))
                step += length / 24 * random.uniform(0.9, 1.1)
            collectives.append(at(now + 0.1 * length, 0.05, 200, "broadcast", "data"))
            bucket = now + 0.55 * length
            if not micro:
                begins.append(int(bucket * MS))
            for _ in range(buckets):
                collectives.append(at(bucket, 20 / buckets, BUCKET_BYTES, op, "data"))
                bucket += 0.35 * length / buckets * random.uniform(1, 1.3)
            now += length
        if accumulation > 1:
            now += 200
        if pause_every and iteration % pause_every == pause_every - 1:
            now += 3000
    return tuple(sorted(collectives, key=lambda one: one.start_ns)), begins


def begins_of(windows):
    return [window.start_ns for window in windows]


@pytest.mark.parametrize(
    "kind",
    [
        {},
        {"jitter": 0.2},
        {"buckets": 1},
        {"buckets": 20},
        {"iterations": 3},
        {"is_tensor_parallel": True},
        {"accumulation": 4},
        {"accumulation": 2},
        {"pause_every": 5},
        {"pause_every": 8, "is_tensor_parallel": True},
        {"op": "reduce_scatter"},
        {"op": "reduce_scatter", "is_tensor_parallel": True},
    ],
    ids=str,
)
def test_the_windows_of_a_job_are_found(kind):
    for seed in range(5):
        collectives, begins = job(seed, **kind)
        assert begins_of(find_windows(collectives)) == begins


def test_a_window_has_the_bytes_and_the_end_of_its_collectives():
    collectives, _ = job(buckets=4)
    window = find_windows(collectives)[0]
    parts = [one for one in collectives if one.bytes == BUCKET_BYTES][:4]
    assert window.bytes == 4 * BUCKET_BYTES
    assert window.end_ns == parts[-1].end_ns
    assert window.start_ns == parts[0].start_ns


def test_two_unlike_operations_per_iteration_are_one_window():
    # Silences of 130 and 60 ms are too alike to be told apart; sizes in turn are not.
    collectives = [
        one
        for n in range(6)
        for one in (
            at(216 * n, 0.8, 1_465_344, "all_reduce", ""),
            at(216 * n + 130, 25, 1_791_693_584, "all_reduce", ""),
        )
    ]
    windows = find_windows(collectives)
    assert begins_of(windows) == [216 * n * MS for n in range(6)]
    assert {window.bytes for window in windows} == {1_793_158_928}


@pytest.mark.parametrize("kind", [{}, {"jitter": 0.2}, {"is_tensor_parallel": True}], ids=str)
def test_windows_found_online_are_those_found_at_the_end(kind):
    collectives, _ = job(3, **kind)
    plan = learn(collectives)
    detector = WindowDetector(plan)
    online = [window for one in collectives if (window := detector.add(one))]
    assert (*online, detector.flush()) == find_windows(collectives)


def test_another_batch_size_leaves_the_windows_as_they_are():
    slow, begins = job(1, iterations=10)
    later_ns = slow[-1].end_ns + 100 * MS
    # Half the batch: half the time, the same gradients.
    fast = [
        Collective(
            one.start_ns // 2 + later_ns, one.end_ns // 2 + later_ns, one.bytes, one.op,
            one.communicator,
        )
        for one in slow
    ]  # fmt: skip
    expected = begins + [begin // 2 + later_ns for begin in begins]
    assert begins_of(find_windows((*slow, *fast))) == expected


def test_collectives_that_carry_no_gradients_make_no_windows():
    assert find_windows(()) == ()
    assert learn([at(n, 1, 4, "barrier", "") for n in range(5)]) is None


def test_operations_that_overlap_are_one_window():
    plan = WindowPlan("all_reduce", "", gap_ns=5.0 * MS)
    collectives = [
        at(ms, length, 1, "all_reduce", "")
        for ms, length in ((0, 50), (10, 5), (52, 3), (100, 1), (200, 1))
    ]
    assert begins_of(find_windows(collectives, plan)) == [0, 100 * MS, 200 * MS]


def test_unknown_operations_are_cut_by_their_silences():
    collectives = [
        Collective(int((n * 100 + m * 2) * MS), int((n * 100 + m * 2 + 1) * MS))
        for n, m in itertools.product(range(8), range(3))
    ]
    windows = find_windows(collectives)
    assert begins_of(windows) == [n * 100 * MS for n in range(8)]
    assert windows[0].bytes is None
