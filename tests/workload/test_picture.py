from __future__ import annotations

from controller.workload.picture import shown_windows, text_picture
from tests.workload.contests import MIX, MS, WARMUP, contest


def test_windows_are_shown_from_the_end_of_the_warm_up() -> None:
    found = contest(0)
    windows = shown_windows(found, found.turns[0], 3)
    assert set(windows) == {job.name for job in MIX.jobs}
    for spans in windows.values():
        assert spans and all(0 <= begin < end <= 3 * MIX.longest_ns for begin, end in spans)
    job = MIX.jobs[1]
    first = next(r for r in found.turns[0].records if r.job == job.name and r.iteration == WARMUP)
    lengths = {round(end - begin) for begin, end in windows[job.name]}
    assert lengths <= {round(first.window_ns), 200 * MS}


def test_the_picture_shows_the_first_and_the_last_policy_in_80_columns() -> None:
    text = text_picture(contest())
    assert text.index("under fair (no controller)") < text.index("under laxity")
    assert "█" in text and max(map(len, text.splitlines())) <= 80
