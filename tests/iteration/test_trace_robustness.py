"""Files that are damaged, foreign or malicious: an error that names the file, never a traceback."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from controller.errors import InputError, UsageError
from controller.iteration.series import Trace
from controller.iteration.traces import FORMATS, json_bounds, read_trace, tables
from controller.iteration.traces import source as source_module
from tests.iteration import fixtures


def refused(tmp_path: Path, content: str | bytes, packed: bool = False) -> str:
    """The error that reading this content gives; it names the file."""
    path = fixtures.write(tmp_path / "a_trace", content, packed)
    with pytest.raises(InputError) as caught:
        read_trace(path)
    assert str(path) in caught.value.message
    return str(caught.value)


GENERATORS: dict[str, Callable[[], str]] = {
    "kineto": fixtures.kineto_json,
    "chakra": fixtures.host_trace_json,
    "nccl": fixtures.nccl_tests_table,
    "straggler": fixtures.straggler_csv,
    "minibatch": fixtures.minibatch_csv,
    "aicb": fixtures.aicb_csv,
    "csv": lambda: "start_us,bytes\n1,2\n3,4\n",
}


@pytest.mark.parametrize("format", GENERATORS)
def test_gzip_that_is_cut_or_damaged_is_refused(tmp_path: Path, format: str) -> None:
    data = gzip.compress(GENERATORS[format]().encode())
    assert "gzip data" in refused(tmp_path, data[:-6])
    damaged = bytearray(data)
    damaged[len(data) // 2] ^= 0xFF
    assert "gzip data" in refused(tmp_path, bytes(damaged))


@pytest.mark.parametrize("format", ["kineto", "chakra"])
def test_json_that_is_cut_anywhere_is_refused(tmp_path: Path, format: str) -> None:
    text = GENERATORS[format]()
    for end in range(1, len(text) - 1, max(1, len(text) // 40)):
        refused(tmp_path, text[:end])


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("", "is empty"),
        (" \n\n", "is empty"),
        ("hello\nworld\n", "no trace that is known"),
        ("ip,DSW,PSW,ASW\n1,2,3,4\n", "no trace that is known"),
        ('{"a": 1, "b": [2]}', "is JSON with the keys a, b"),
        ("{}", r"is JSON with the keys (none)"),
        ("[[1], 2]", "has 2 profiler events, none of them an NCCL"),
        ("[1, 2]", "no trace that is known"),
        ("# only a comment\n", "has no row of numbers"),
        ('{"traceEvents": []}', "has 0 profiler events"),
        ('{"traceEvents": 5}', "has 0 profiler events"),
        ('{"traceEvents": [1, null, [], {"ph": "X"}]}', "has 4 profiler events"),
        ('{"nodes": [{"name": 5}, 6]}', "has 2 nodes of an execution trace"),
        ('{"workload_graph": [{"NodeType": [7]}]}', "has 1 nodes"),
        ("{" * 5000, "nests deeper than 200 levels"),
        ("[" * 200_000, "nests deeper than 200 levels"),
        (b"\x0a\x05\x0a\x030.4\x00\x10\x07", "chakra_jsonizer"),
        (b"\x28\xb5\x2f\xfd0000", "zstd"),
        (b"PK\x03\x04aaaaaaa", "zip"),
        ("start_us,bytes\n1,2\n".encode("utf-16"), "is binary"),
        (b"start_us,bytes\n1,\xff\xfe\n", "is not UTF-8 text"),
        ("a:1:2 [0] NCCL INFO Bootstrap\n", "no collective of an NCCL log"),
        ("start_us,bytes\n" + "1" * 2_000_000, "line 2 is longer than 1 MiB"),
        ('start_us,bytes\n"1,2\n', "is not CSV"),
    ],
)
def test_what_is_no_trace_is_told_with_what_was_found(
    tmp_path: Path, content: str | bytes, what: str
) -> None:
    assert what in refused(tmp_path, content)


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ("x,1", "line 3, start_us: found 'x'"),
        ("nan,1", "start_us: found 'nan'"),
        ("inf,1", "start_us: found 'inf'"),
        ("-5,1", "start_us: found '-5'"),
        ("1e999999999,1", "start_us"),
        ("1e300,1", "from 0 to below 2^63 ns"),
        ("5,-1", "bytes: found '-1'"),
        ("5,1.5", "bytes: found '1.5'"),
        ("5,1e99", "bytes"),
        ("5", "line 3 has 1 columns"),
        ("5,6,7", "line 3 has 3 columns"),
        (",5", "start_us: found ''"),
    ],
)
def test_a_row_that_cannot_be_read_is_named(tmp_path: Path, row: str, what: str) -> None:
    assert what in refused(tmp_path, f"# a comment\nstart_us,bytes\n{row}\n")


@pytest.mark.parametrize(
    ("key", "value", "what"),
    [
        ("ts", "soon", "ts is 'soon'; microseconds"),
        ("ts", None, "ts is nothing"),
        ("ts", [], "ts is []"),
        ("ts", True, "ts is True"),
        ("ts", 1e300, "which is no time"),
        ("dur", -1, "dur is -1"),
    ],
)
def test_a_kernel_with_a_time_of_a_wrong_type_is_named(
    tmp_path: Path, key: str, value: object, what: str
) -> None:
    events = fixtures.kineto_events(steps=1, elements=(4,))
    kernel = next(event for event in events if event.get("cat") == "kernel")
    kernel[key] = value
    message = refused(tmp_path, json.dumps(events))
    assert what in message
    assert f"event {events.index(kernel) + 1}" in message


@pytest.mark.parametrize("columns", ["straggler", "minibatch", "aicb"])
def test_a_table_whose_last_row_is_cut_is_refused(tmp_path: Path, columns: str) -> None:
    text = GENERATORS[columns]().rstrip()
    message = refused(tmp_path, text[: text.rindex(",")])
    assert f"line {len(text.splitlines())} has" in message


@pytest.mark.parametrize("columns", ["straggler", "minibatch", "aicb"])
def test_a_table_without_rows_is_refused(tmp_path: Path, columns: str) -> None:
    refused(tmp_path, GENERATORS[columns]().splitlines()[0] + "\n")


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1 << 16])
def test_brackets_within_strings_do_not_count_as_depth(size: int) -> None:
    text = json.dumps([{"name": '[{"\\' * 300 + "\\", "args": [[]]}] * 3).encode()
    stream = json_bounds.BoundedJson(io.BytesIO(text))
    assert b"".join(iter(lambda: stream.read(size), b"")) == text
    deep = json_bounds.BoundedJson(io.BytesIO(text[:-1] + b"," + b"[" * json_bounds.MAX_DEPTH))
    with pytest.raises(json_bounds.TooDeepError, match="deeper than 200"):
        while deep.read(size):
            pass


@pytest.mark.parametrize("value", ['"' + "a" * 5000 + '"', "[" + "1," * 2500 + "1]"])
def test_one_value_that_is_too_large_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setattr(json_bounds, "MAX_VALUE_BYTES", 100_000)
    events = '{"traceEvents": [{"args": [%s]}]}'
    assert "0 profiler" not in refused(tmp_path, events % ",".join([value] * 4))
    large = value.replace("a", "a" * 100).replace("1,", "1," * 100)
    assert "one value of more than" in refused(tmp_path, events % large)


def test_a_missing_file_and_a_folder_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nowhere does not exist"):
        read_trace(tmp_path / "nowhere")
    with pytest.raises(InputError, match="is a folder"):
        read_trace(tmp_path)


def test_more_rows_than_the_limit_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "MAX_ROWS", 10)
    assert "more than 10 rows" in refused(tmp_path, "".join(f"{n},1\n" for n in range(20)))


def test_a_gzip_bomb_stops_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module, "_RATIO_FROM_BYTES", 1 << 20)
    assert "200 times its size" in refused(tmp_path, (b"#" * 1023 + b"\n") * 4096, packed=True)


def test_a_format_that_is_asked_for_is_checked(tmp_path: Path) -> None:
    path = fixtures.write(tmp_path / "t", GENERATORS["csv"]())
    with pytest.raises(UsageError, match="No trace format 'zip'; known are kineto"):
        read_trace(path, "zip")
    with pytest.raises(InputError, match=r"is not PyTorch profiler JSON .*, but CSV"):
        read_trace(path, "kineto")


@pytest.mark.parametrize("format", GENERATORS)
def test_a_format_that_is_asked_for_and_found_is_read(tmp_path: Path, format: str) -> None:
    assert set(GENERATORS) == set(FORMATS)
    path = fixtures.write(tmp_path / "t", GENERATORS[format]())
    assert read_trace(path, format) == read_trace(path)


@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(
    begin=st.sampled_from([b"", b"{", b"[", b"\x1f\x8b", b"start_us,bytes\n", b"NCCL INFO "]),
    data=st.binary(max_size=200),
)
def test_any_bytes_are_a_trace_or_an_input_error(tmp_path: Path, begin: bytes, data: bytes) -> None:
    path = fixtures.write(tmp_path / "fuzz", begin + data)
    try:
        assert isinstance(read_trace(path), Trace)
    except InputError as error:
        assert str(path) in error.message


_BASES = {name: generate().encode() for name, generate in GENERATORS.items()}
_BASES["nccl-log"] = fixtures.nccl_line(1, "[2024-05-22 17:15:01] ").encode()
_BASES["protobuf as JSON"] = fixtures.protobuf_as_json(True).encode()


@settings(max_examples=300, suppress_health_check=list(HealthCheck))
@given(
    base=st.sampled_from(sorted(_BASES)),
    edits=st.lists(
        st.tuples(
            st.floats(0, 1, exclude_max=True),
            st.integers(0, 6),
            st.sampled_from([b"", b"-1", b"null", b"1e400", b"[[", b'"', b",", b"\x00", b"\xff"]),
        ),
        min_size=1,
        max_size=4,
    ),
)
def test_a_trace_with_any_edit_is_a_trace_or_an_input_error(
    tmp_path: Path, base: str, edits: list[tuple[float, int, bytes]]
) -> None:
    data = _BASES[base]
    for where, length, by in edits:
        position = int(where * len(data))
        data = data[:position] + by + data[position + length :]
    path = fixtures.write(tmp_path / "fuzz", data)
    try:
        trace = read_trace(path)
    except InputError as error:
        assert str(path) in error.message
    else:
        assert trace.collectives or trace.windows
        assert all(one.end_ns >= one.start_ns for one in trace.collectives)
