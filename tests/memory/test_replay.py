"""``controller pool replay``: traces, the pool that is simulated, and the command."""

from __future__ import annotations

import json
import tracemalloc
from random import Random

import pytest
from click.testing import CliRunner

from controller.cli_pool_replay import pool_replay
from controller.errors import InputError, UsageError
from controller.memory.policies import make_policy
from controller.memory.policies.belady import BeladyPolicy, next_uses
from controller.memory.replay import (
    REPLAY_POLICIES,
    Request,
    SimulatedPool,
    read_trace,
    replay_file,
    results_text,
)


@pytest.fixture
def trace(tmp_path):
    """Writes a trace, and gives its path."""

    def write(content):
        path = tmp_path / "trace.csv"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def run(path, *options):
    """The command on its own, as `controller pool` calls it."""
    result = CliRunner().invoke(pool_replay, [str(path), *options], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


# ---- reading ----


@pytest.mark.parametrize("header", ["", "key,bytes\n", "key,bytes,register_us\n"])
@pytest.mark.parametrize("ending", ["\n", "\r\n", ""])
def test_a_trace_may_have_a_header_and_any_line_ending(trace, header, ending):
    path = trace(header + "a,4096\nb,8192" + ending)
    assert [request[:2] for request in read_trace(path)] == [("a", 4096), ("b", 8192)]


def test_a_byte_order_mark_is_no_part_of_the_key(trace):
    assert next(read_trace(trace("\ufeffa,1\n"))).key == "a"


def test_the_time_of_registering_may_be_there_or_empty(trace):
    requests = list(read_trace(trace("a,1,12.5\nb,1,\nc,1\n")))
    assert [request.register_us for request in requests] == [12.5, 0.0, 0.0]


@pytest.mark.parametrize("register_us", ["1e-300", "9e18"])
def test_absurd_times_break_nothing(trace, register_us):
    path = trace("".join(f"b{n},4096,{register_us}\n" for _ in range(4) for n in range(30)))
    (result,) = replay_file(path, "heat", 20 * 4096)
    assert result.hits > 30


def test_a_key_names_its_stream_before_the_last_slash(trace):
    requests = list(read_trace(trace("job3/g0/b7,1\nplain,1\n")))
    assert [request.stream for request in requests] == ["job3/g0", None]


def test_a_quoted_key_may_hold_a_comma(trace):
    assert next(read_trace(trace('"a,b",7\n')))[:2] == ("a,b", 7)


@pytest.mark.parametrize(
    "content, complaint",
    [
        ("", "holds no request"),
        ("key,bytes\n", "holds no request"),
        ("\n\n", "holds no request"),
        ("a,1\nb\n", "line 2 has 1 columns"),
        ("a,1\nb,1,2,3\n", "line 2 has 4 columns"),
        (",1\n", "line 1 has no key"),
        ("a,x\n", "line 1 has 'x' bytes"),
        ("a,1.5\n", "line 1 has '1.5' bytes"),
        ("a,-1\n", "line 1 has '-1' bytes"),
        ("a,٣\n", "line 1 has '٣' bytes"),
        ("a,0\n", "line 1 has 0 bytes; allowed: 1"),
        ("a,9223372036854775808\n", "line 1 has 9223372036854775808 bytes"),
        ("a," + "9" * 2000 + "\n", r"line 1 has '9{32}\.\.\.' bytes"),
        ("a,1\n" + "b" * 5000 + ",1\n", "line 2 is longer than 4096 bytes"),
        ("a,1,fast\n", "line 1 has register_us 'fast'"),
        ("a,1,nan\n", "line 1 has register_us 'nan'"),
        ("a,1,inf\n", "line 1 has register_us 'inf'"),
        ("a,1,-3\n", "line 1 has register_us '-3'"),
        ('a,1\n"b,1\n', "line 2 is no CSV"),
        (b"a,1\n\xff\xfe,1\n", "line 2 is not text"),
        (b"\x7fELF\x02\x01\x00\x00\n", "line 1 is not text"),
        (b"a\x00b,1\n", "line 1 is not text"),
        ("a,1\nkey,bytes\n", "line 2 has 'bytes' bytes"),
    ],
)
def test_what_is_no_trace_is_refused_with_file_and_line(trace, content, complaint):
    path = trace(content)
    with pytest.raises(InputError, match=complaint) as caught:
        list(read_trace(path))
    assert str(path) in str(caught.value)


def test_a_file_that_is_not_there_is_an_input_error(tmp_path):
    with pytest.raises(InputError, match="cannot be read: No such file"):
        list(read_trace(tmp_path / "none.csv"))


def test_progress_is_told_with_the_bytes_read_and_in_total(trace):
    path = trace("a,1\n" * 10_000)
    told = []
    list(read_trace(path, lambda done, total: told.append((done, total))))
    assert told == [(4096 * 4, 40_000), (8192 * 4, 40_000)]


# ---- the pool ----


def test_hits_are_counted_by_requests_and_by_bytes(trace):
    path = trace("a,10,1\nb,30,3\na,10,1\nc,30,3\nb,30,3\n")
    (result,) = replay_file(path, "lru", 60)
    document = result.to_json()
    # c does not fit beside a and b: b, least recently used, went.
    assert document == {
        "policy": "lru",
        "capacity_bytes": 60,
        "requests": 5,
        "hits": 1,
        "hit_ratio": 0.2,
        "bytes_hit_ratio": 10 / 110,
        "evictions": 2,
        "too_large": 0,
        "registration_us": 10.0,
        "unpooled_us": 11.0,
    }


@pytest.mark.parametrize("policy", REPLAY_POLICIES)
def test_what_is_larger_than_the_pool_is_a_miss_and_displaces_nothing(trace, policy):
    path = trace("a,10\nbig,101\na,10\nbig,101\na,10\n")
    (result,) = replay_file(path, policy, 100)
    assert (result.hits, result.too_large, result.evictions) == (2, 2, 0)


@pytest.mark.parametrize("policy", REPLAY_POLICIES)
def test_a_key_that_grew_is_registered_anew_and_one_that_shrank_is_covered(trace, policy):
    path = trace("a,10\na,20\na,20\na,5\na,20\n")
    (result,) = replay_file(path, policy, 100)
    assert result.hits == 3


@pytest.mark.parametrize("policy", REPLAY_POLICIES)
def test_a_pool_never_holds_more_than_its_capacity(policy):
    random = Random(5)
    sizes = {str(n): random.randrange(1, 40) for n in range(40)}
    keys = random.choices(list(sizes), k=600)
    rule = BeladyPolicy(next_uses(keys)) if policy == "belady" else make_policy(policy, 100)
    pool = SimulatedPool(policy, rule, 100)
    for key in keys:
        pool.request(Request(key, sizes[key], 0.0, None))
        assert sum(pool._resident.values()) == pool._used_bytes <= 100


def test_prefetch_turns_the_misses_of_a_loop_into_hits_that_are_counted_apart(trace):
    path = trace("".join(f"b{n},1\n" for _ in range(30) for n in range(100)))
    (plain,) = replay_file(path, "heat", 80)
    (ahead,) = replay_file(path, "heat", 80, prefetch=True)
    document = ahead.to_json()
    assert "prefetch" not in plain.to_json()
    assert document["prefetch"]["hit_ratio"] > plain.hits / plain.requests + 0.1
    assert document["hit_ratio"] <= plain.hits / plain.requests
    assert document["prefetch"]["issued"] >= ahead.prefetch_hits + ahead.prefetch_wasted
    assert ahead.prefetch_wasted <= 0.05 * ahead.prefetch_hits


def test_an_unknown_policy_and_an_empty_pool_are_refused(trace):
    path = trace("a,1\n")
    with pytest.raises(UsageError, match="does not exist"):
        replay_file(path, "fifo", 10)
    for policy in REPLAY_POLICIES:
        with pytest.raises(UsageError, match="holds nothing"):
            replay_file(path, policy, 0)


# ---- the command ----


def test_the_command_prints_the_stable_keys(trace):
    document = json.loads(
        run(trace("a,1\na,1\n"), "--policy", "lru", "--capacity-bytes", "10", "--json")
    )
    assert (document["policy"], document["requests"], document["hits"]) == ("lru", 2, 1)
    assert (document["hit_ratio"], document["bytes_hit_ratio"]) == (0.5, 0.5)


def test_all_policies_are_compared_side_by_side(trace):
    path = trace("a,1,5\nb,1,5\na,1,5\n")
    document = json.loads(run(path, "--policy", "all", "--capacity-bytes", "1KiB", "--json"))
    assert [entry["policy"] for entry in document["policies"]] == list(REPLAY_POLICIES)
    assert {entry["hits"] for entry in document["policies"]} == {1}


def test_the_table_fits_in_80_columns(trace):
    path = trace("".join(f"b{n},{n + 1},9999999\n" for _ in range(3) for n in range(50)))
    text = results_text(replay_file(path, "all", 900, prefetch=True))
    assert max(map(len, text.splitlines())) <= 80
    assert all(policy in text for policy in REPLAY_POLICIES)


def test_memory_does_not_grow_with_the_length_of_a_trace(trace):
    path = trace(b"".join(b"b%d,4096\n" % (n % 50) for n in range(15_000)))
    tracemalloc.start()
    try:
        replay_file(path, "lru", 40 * 4096)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 15_000 * 50
