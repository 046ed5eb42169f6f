"""Rates, sizes and durations: what is read, what is refused, what is printed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.errors import UsageError
from controller.units import (
    format_bytes,
    format_duration,
    format_rate,
    parse_bytes,
    parse_ns,
    parse_rate_Bps,
)


@pytest.mark.parametrize(
    ("text", "rate_Bps"),
    [
        ("8bit", 1),
        ("100kbit", 12_500),
        ("100mbit", 12_500_000),
        ("100Mbit", 12_500_000),
        ("100 Mbit/s", 12_500_000),
        ("25gbit", 3_125_000_000),
        ("0.4tbit", 50_000_000_000),
        ("400gbit", 50_000_000_000),
        ("1mibit", 131_072),
        ("7bps", 7),
        ("12mbps", 12_000_000),
        ("12MBps", 12_000_000),
        ("12.5MB", 12_500_000),
        ("12.5MB/s", 12_500_000),
        ("1MiB", 1_048_576),
        (" 1gbps ", 1_000_000_000),
        ("0", 0),
        ("0mbit", 0),
    ],
)
def test_a_rate_is_read_as_tc_reads_it(text: str, rate_Bps: int) -> None:
    assert parse_rate_Bps(text) == rate_Bps


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("4096", 4096),
        ("1B", 1),
        ("100kB", 100_000),
        ("100KB", 100_000),
        ("100MB", 100_000_000),
        ("1.5 GB", 1_500_000_000),
        ("5KiB", 5120),
        ("5kiB", 5120),
        ("1GiB", 2**30),
        ("0", 0),
    ],
)
def test_a_size_is_read_in_powers_of_1000_or_1024(text: str, size_bytes: int) -> None:
    assert parse_bytes(text) == size_bytes


@pytest.mark.parametrize(
    ("text", "duration_ns"),
    [("7ns", 7), ("50us", 50_000), ("50µs", 50_000), ("62.5us", 62_500), ("20ms", 20_000_000),
     ("2s", 2_000_000_000), ("2 s", 2_000_000_000), ("1min", 60_000_000_000), ("0", 0)],
)  # fmt: skip
def test_a_duration_is_read(text: str, duration_ns: int) -> None:
    assert parse_ns(text) == duration_ns


_WRONG_EVERYWHERE = ["", "fast", "-1", "-1mbit", "1e9bit", "1,5MB", "0x10", "nan", "inf", "MB",
                     "1 2MB", "1.2.3s", "٣mbit"]  # fmt: skip


@pytest.mark.parametrize(
    ("parse", "text", "form"),
    [
        *[(parse_rate_Bps, text, "100mbit") for text in _WRONG_EVERYWHERE],
        *[(parse_bytes, text, "64KiB") for text in _WRONG_EVERYWHERE],
        *[(parse_ns, text, "50us") for text in _WRONG_EVERYWHERE],
        # Bits or bytes? Seconds or nanoseconds?
        (parse_rate_Bps, "100", "100mbit"),
        (parse_rate_Bps, "100Mb", "100mbit"),
        (parse_rate_Bps, "100m", "100mbit"),
        (parse_rate_Bps, "100mbit/s/s", "100mbit"),
        (parse_rate_Bps, "50us", "100mbit"),
        (parse_bytes, "100Mb", "64KiB"),
        (parse_bytes, "100mbit", "64KiB"),
        (parse_ns, "20", "50us"),
        (parse_ns, "20MS", "50us"),
        # Beyond the kernel's 64 bits.
        (parse_rate_Bps, "99999999999tbit", "too large"),
        (parse_bytes, "99999999999GB", "too large"),
        (parse_ns, "99999999999999s", "too large"),
    ],
)
def test_what_is_no_such_value_is_refused_with_the_allowed_forms(
    parse: Callable[[str, str], int], text: str, form: str
) -> None:
    with pytest.raises(UsageError) as caught:
        parse(text, "--option")
    assert f"--option {text!r}" in caught.value.message
    assert form in caught.value.message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (format_rate(12_500_000), "100 Mbit/s"),
        (format_rate(3_125_000_000), "25 Gbit/s"),
        (format_rate(124_999_999.99), "1 Gbit/s"),
        (format_rate(0), "0 bit/s"),
        (format_bytes(540_000), "540 kB"),
        (format_bytes(1_048_576), "1.049 MB"),
        (format_bytes(999), "999 B"),
        (format_duration(67_108_864), "67.11 ms"),
        (format_duration(50_000), "50 us"),
        (format_duration(999_999_999), "1 s"),
    ],
)
def test_values_are_printed_in_the_unit_that_people_use(text: str, expected: str) -> None:
    assert text == expected


@given(st.integers(min_value=0, max_value=10**15))
def test_what_is_printed_can_be_read_again_to_four_digits(value: int) -> None:
    for parse, show in (
        (parse_rate_Bps, format_rate),
        (parse_bytes, format_bytes),
        (parse_ns, format_duration),
    ):
        # Rates count bits: half a byte of rounding comes on top for the smallest.
        assert parse(show(value)) == pytest.approx(value, rel=1e-3, abs=1)
