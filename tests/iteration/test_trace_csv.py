"""CSV by hand and by `trace import`: what rows mean, and that what is written reads the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from controller.errors import InputError
from controller.iteration.series import Collective, SyncWindow, Trace
from controller.iteration.traces import read_trace
from controller.iteration.traces.table_csv import collectives_csv, windows_csv
from tests.iteration import fixtures


def read(tmp_path: Path, text: str) -> Trace:
    return read_trace(fixtures.write(tmp_path / "t", text))


@pytest.mark.parametrize(
    "text",
    [
        "start_us,bytes\n1.5,4096\n10,\n",
        "1.5,4096\n10,\n",
        "\ufeffstart_us , bytes\r\n1.5,4096\r\n10,\r\n",
        "# of job 3\n\nbytes,start_us\n4096,1.5\n# more\n,10\n",
        "start_us,bytes,rank\n1.5,4096,0\n10,,1\n",
        "10,\n1.5,4.096e3\n",
        "start_us,bytes\n10,\n1.5,4000\n1.5,96\n",
    ],
)
def test_a_row_is_a_sync_window(tmp_path: Path, text: str) -> None:
    trace = read(tmp_path, text)
    assert trace.source == "csv"
    assert trace.windows == (SyncWindow(1_500, 1_500, 4096), SyncWindow(10_000, 10_000))
    assert trace.collectives == ()


def test_rows_out_of_order_are_sorted_and_it_is_said(tmp_path: Path) -> None:
    assert "rows were not in order of begin; they are sorted" in read(tmp_path, "3,1\n2,1\n").notes
    assert read(tmp_path, "2,1\n3,1\n").notes == ()


def test_an_end_or_a_duration_gives_the_length(tmp_path: Path) -> None:
    expected = (SyncWindow(1_000, 4_000, 7),)
    assert read(tmp_path, "1,4,7\n").windows == expected
    assert read(tmp_path, "start_us,end_us,bytes\n1,4,7\n").windows == expected
    assert read(tmp_path, "start_us,dur_us,bytes\n1,3,7\n").windows == expected
    with pytest.raises(InputError, match="end_us: found '4'; expected not less than start_us 5"):
        read(tmp_path, "5,4,7\n")


def test_an_operation_makes_a_row_a_collective(tmp_path: Path) -> None:
    # The header and the names of operations of the development set's normalised traces.
    trace = read(
        tmp_path,
        "t_us,dur_us,op,bytes,cpu_step,launch_us\n"
        "20.5,2,_reduce_scatter_base,64,550,1\n30,1,generic,,,\n35,1,sendrecv,,,\n",
    )
    assert trace.collectives == (
        Collective(20_500, 22_500, 64, "reduce_scatter", "", 550),
        Collective(30_000, 31_000, None, "unknown"),
        Collective(35_000, 36_000, None, "send_recv"),
    )
    assert trace.windows == ()


def test_a_column_that_stands_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="names the column 't_us' twice"):
        read(tmp_path, "start_us,t_us,bytes\n1,2,3\n")


def test_windows_that_are_written_read_the_same_from_their_first_begin_on(
    tmp_path: Path,
) -> None:
    windows = (
        SyncWindow(-7, 3, 10),
        SyncWindow(1_711_964_646_000_000_123, 1_711_964_646_000_000_124, None),
    )
    origin_ns = windows[0].start_ns
    assert read(tmp_path, windows_csv(windows)).windows == tuple(
        SyncWindow(w.start_ns - origin_ns, w.end_ns - origin_ns, w.bytes) for w in windows
    )


def test_collectives_that_are_written_read_the_same(tmp_path: Path) -> None:
    collectives = (
        Collective(0, 5, 10, "all_reduce", 'pg "a", of 2', 3),
        Collective(1_001, 2_002, None, "unknown", "", None),
    )
    assert read(tmp_path, collectives_csv(collectives)).collectives == collectives


def test_collectives_that_begin_below_zero_are_written_from_the_first_on(tmp_path: Path) -> None:
    trace = read(tmp_path, collectives_csv([Collective(-500, 0), Collective(500, 501)]))
    assert [one.start_ns for one in trace.collectives] == [0, 1_000]


def test_times_since_1970_are_read_to_the_nanosecond_and_durations_stay_bounded(
    tmp_path: Path,
) -> None:
    text = "start_us,dur_us,bytes\n1711964646000000.123,5,7\n"
    start_ns = 1_711_964_646_000_000_123
    assert read(tmp_path, text).windows == (SyncWindow(start_ns, start_ns + 5_000, 7),)
    last_us = ((1 << 63) - 1) // 1000
    assert read(tmp_path, f"{last_us}\n").windows[0].start_ns == last_us * 1000
    with pytest.raises(InputError, match="start_us: found '9223372036854776'"):
        read(tmp_path, f"{last_us + 1}\n")
    with pytest.raises(InputError, match=r"dur_us: .*a duration from 0 to 30 years"):
        read(tmp_path, "start_us,dur_us,bytes\n0,1711964646000000,7\n")
