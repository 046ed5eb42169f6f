"""Rates, sizes and durations as people write them, and back.

Rates follow tc: ``100mbit`` and ``25gbit`` are bits, ``12mbps`` is bytes a second; ``12.5MB``
is bytes a second as well. What is easily read either way (``100``, ``100Mb``) is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction

from controller.errors import UsageError

_BITS = 8
# The kernel keeps rates, sizes and times in 64 bits; Python structs of it are signed.
_LARGEST = 2**63 - 1
_NUMBER = re.compile(r"(\d{1,30}(?:\.\d{0,30})?|\.\d{1,30})\s*([A-Za-zµ/]*)", re.ASCII)

_SI = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_IEC = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SCALES = _SI | _IEC

# Suffixes of tc in lower case; it takes any case of them.
_RATE_SUFFIXES = {f"{name}bit": Fraction(scale, _BITS) for name, scale in _SCALES.items()}
_RATE_SUFFIXES |= {f"{name}bps": Fraction(scale) for name, scale in _SCALES.items()}
# With a capital B only: "Mb" is a megabit to some and a megabyte to others.
_BYTE_SUFFIXES = {
    f"{spelling}B": Fraction(scale)
    for name, scale in _SCALES.items()
    for spelling in {name, name.upper(), name.capitalize()}
}
_TIME_SUFFIXES = {
    "ns": Fraction(1),
    "us": Fraction(10**3),
    "µs": Fraction(10**3),
    "ms": Fraction(10**6),
    "s": Fraction(10**9),
    "min": Fraction(60 * 10**9),
}

RATE_FORMS = "100mbit, 25gbit (bits/s: bit, kbit, mbit, gbit, tbit), 12mbps, 12.5MB (bytes/s)"
BYTES_FORMS = "4096, 100kB, 5MB, 2GB (powers of 1000), 64KiB, 4MiB, 1GiB (powers of 1024)"
DURATION_FORMS = "500ns, 50us, 20ms, 2s, 1min"


def _parse(text: str, what: str, forms: str, find: Mapping[str, Fraction]) -> int:
    match = _NUMBER.fullmatch(text.strip())
    factor = find.get(match[2]) if match else None
    if match is None or factor is None:
        raise UsageError(f"{what} {text!r} cannot be read; allowed: {forms}.")
    value = round(Fraction(match[1]) * factor)
    if value > _LARGEST:
        raise UsageError(f"{what} {text!r} is too large for 64 bits; allowed: {forms}.")
    return value


def parse_rate_Bps(text: str, what: str = "Rate") -> int:
    """Bytes a second from text such as ``100mbit``, ``25gbit``, ``12.5MB``.

    Parameters
    ----------
    text
        A number with one of tc's suffixes (``mbit``: bits, ``mbps``: bytes a second; any
        case) or a byte suffix (``MB``, ``MiB``); ``/s`` may follow. ``0`` needs no suffix.
    what
        What the error calls the value, e.g. ``--rate``.

    Raises
    ------
    UsageError
        The text is something else. Zero is allowed here.
    """
    plain = text.strip().removesuffix("/s")
    match = _NUMBER.fullmatch(plain)
    if match and not match[2] and not float(match[1]):
        return 0
    if match and match[2].lower() in _RATE_SUFFIXES:
        plain = plain.lower()
    try:
        return _parse(plain, what, RATE_FORMS, _RATE_SUFFIXES | _BYTE_SUFFIXES)
    except UsageError as error:
        # With the value as it was given.
        raise UsageError(error.message.replace(repr(plain), repr(text), 1)) from None


def parse_bytes(text: str, what: str = "Size") -> int:
    """Bytes from text such as ``100MB`` (powers of 1000), ``5KiB`` (of 1024) or ``4096``.

    Raises
    ------
    UsageError
        The text is something else. Zero is allowed here.
    """
    return _parse(text, what, BYTES_FORMS, _BYTE_SUFFIXES | {"": Fraction(1)})


def parse_ns(text: str, what: str = "Duration") -> int:
    """Nanoseconds from text such as ``50us``, ``20ms``, ``2s``. ``0`` needs no suffix.

    Raises
    ------
    UsageError
        The text is something else. Zero is allowed here.
    """
    if text.strip() == "0":
        return 0
    return _parse(text, what, DURATION_FORMS, _TIME_SUFFIXES)


def _scaled(value: float, steps: tuple[tuple[float, str], ...]) -> str:
    """Value in the largest unit that it fills, four significant digits."""
    for size, unit in steps:
        # Half a unit of the fourth digit below, rounding fills the unit as well.
        if value >= size * 0.99995:
            digits = f"{value / size:.4g}"
            return f"{value / size:.0f} {unit}" if "e" in digits else f"{digits} {unit}"
    return f"{value:.4g} {steps[-1][1]}"


def format_rate(rate_Bps: float) -> str:
    """Bits a second for people: ``100 Mbit/s``; `parse_rate_Bps` reads it."""
    return _scaled(
        rate_Bps * _BITS,
        ((1e12, "Tbit/s"), (1e9, "Gbit/s"), (1e6, "Mbit/s"), (1e3, "kbit/s"), (1, "bit/s")),
    )


def format_bytes(size_bytes: float) -> str:
    """Bytes for people, powers of 1000: ``5 MB``; `parse_bytes` reads it."""
    return _scaled(size_bytes, ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B")))


def format_duration(duration_ns: float) -> str:
    """Nanoseconds for people: ``50 us``; `parse_ns` reads it."""
    return _scaled(duration_ns, ((1e9, "s"), (1e6, "ms"), (1e3, "us"), (1, "ns")))
