"""TOML while it is read: takes keys out, converts them, complains about what is left."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from controller.errors import UsageError
from controller.units import (
    BYTES_FORMS,
    DURATION_FORMS,
    RATE_FORMS,
    format_bytes,
    format_duration,
    format_rate,
    parse_bytes,
    parse_ns,
    parse_rate_Bps,
)

Value = TypeVar("Value")
Default = TypeVar("Default")


class Section:
    """One table of a configuration file.

    Every method takes one key out; it returns the default when the key is absent. Errors name
    the file, the key, what was found and what is allowed.

    Parameters
    ----------
    path
        The file.
    name
        The table as errors call it, e.g. ``interface[2]``.
    values
        What TOML made of it.
    """

    def __init__(self, path: Path, name: str, values: Any) -> None:
        self._path, self._name = path, name
        if not isinstance(values, Mapping):
            raise UsageError(f"{path}: key {name} is {values!r}; allowed: a table.")
        self._values = dict(values)
        self._known: list[str] = []

    @property
    def label(self) -> str:
        """How errors call the table: file and table."""
        return f"{self._path}: key {self._name}"

    def where(self, key: str) -> str:
        """How errors call a key of it."""
        return f"{self.label}.{key}"

    def require(self, key: str, allowed: str) -> None:
        """Complain when a key is missing."""
        if key not in self._values:
            raise UsageError(f"{self.where(key)} is missing; allowed: {allowed}.")

    def _read(
        self, key: str, default: Default, convert: Callable[[Any], Value], allowed: str
    ) -> Value | Default:
        self._known.append(key)
        if key not in self._values:
            return default
        value = self._values.pop(key)
        try:
            return convert(value)
        except (ValueError, UsageError):
            raise UsageError(f"{self.where(key)} is {value!r}; allowed: {allowed}.") from None

    def integer(self, key: str, default: Default, low: int, high: int) -> int | Default:
        """A whole number in low .. high."""

        def convert(value: Any) -> int:
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
                raise ValueError
            return value

        return self._read(key, default, convert, f"{low} .. {high}")

    def number(
        self, key: str, default: Default, low: float, high: float, above: bool = False
    ) -> float | Default:
        """A number in low .. high; with `above`, low itself is not allowed."""

        def convert(value: Any) -> float:
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            # NaN is in no range.
            if not is_number or not low <= value <= high or (above and value == low):
                raise ValueError
            return float(value)

        return self._read(key, default, convert, f"{'above ' * above}{low:g} .. {high:g}")

    def share(self, key: str, default: Default, above: bool = False) -> float | Default:
        """A share of a whole, 0 .. 1; with `above`, not 0."""
        return self.number(key, default, 0, 1, above)

    def flag(self, key: str, default: Default) -> bool | Default:
        """True or false."""

        def convert(value: Any) -> bool:
            if not isinstance(value, bool):
                raise ValueError
            return value

        return self._read(key, default, convert, "true, false")

    def text(self, key: str, default: Default, choices: tuple[str, ...] = ()) -> str | Default:
        """A string, or one of several."""

        def convert(value: Any) -> str:
            if not isinstance(value, str) or (choices and value not in choices):
                raise ValueError
            return value

        return self._read(key, default, convert, ", ".join(choices) or "a string")

    def size(self, key: str, default: Default, low: int, high: int) -> int | Default:
        """Bytes from text with a unit, or from a plain number of them."""

        def convert(value: Any) -> int:
            is_count = isinstance(value, int) and not isinstance(value, bool)
            return _within(parse_bytes(str(value) if is_count else _string(value)), low, high)

        allowed = f"{format_bytes(low)} .. {format_bytes(high)}, as in {BYTES_FORMS}"
        return self._read(key, default, convert, allowed)

    def rate(self, key: str, default: Default, low_Bps: int, high_Bps: int) -> int | Default:
        """Bytes a second from text with a unit."""

        def convert(value: Any) -> int:
            return _within(parse_rate_Bps(_string(value)), low_Bps, high_Bps)

        allowed = f"{format_rate(low_Bps)} .. {format_rate(high_Bps)}, as in {RATE_FORMS}"
        return self._read(key, default, convert, allowed)

    def duration(self, key: str, default: Default, low_ns: int, high_ns: int) -> int | Default:
        """Nanoseconds from text with a unit."""

        def convert(value: Any) -> int:
            return _within(parse_ns(_string(value)), low_ns, high_ns)

        allowed = f"{format_duration(low_ns)} .. {format_duration(high_ns)}, as in {DURATION_FORMS}"
        return self._read(key, default, convert, allowed)

    def durations(self, key: str, default: Default, count: int) -> tuple[int, ...] | Default:
        """A list of so many durations, in ns."""

        def convert(value: Any) -> tuple[int, ...]:
            if not isinstance(value, list) or len(value) != count:
                raise ValueError
            return tuple(parse_ns(_string(entry)) for entry in value)

        return self._read(key, default, convert, f"{count} durations, as in {DURATION_FORMS}")

    def raw(self, key: str, default: Any) -> Any:
        """A value as TOML has it, for a reader of its own; name it with `where`."""
        self._known.append(key)
        return self._values.pop(key, default)

    def table(self, key: str) -> Section:
        """A table within this one; an empty one when it is absent."""
        return Section(self._path, f"{self._name}.{key}", self.raw(key, {}))

    def finish(self) -> None:
        """Complain about a key that nobody took."""
        for key in self._values:
            raise UsageError(f"{self.where(key)} is unknown; allowed: {', '.join(self._known)}.")


def read_document(path: Path, keys: Sequence[str]) -> dict[str, Any]:
    """What a TOML file says.

    Parameters
    ----------
    keys
        Allowed at its top.

    Raises
    ------
    UsageError
        The file cannot be read, is no TOML, or has another key at its top.
    """
    try:
        document = tomllib.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}.", "Name a readable file.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: not TOML: {error}.") from error
    for key in document:
        if key not in keys:
            raise UsageError(f"{path}: key {key} is unknown; allowed: {', '.join(keys)}.")
    return document


@contextmanager
def told_with(prefix: str) -> Iterator[None]:
    """Put the file and key before what a check of values together has to say."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{prefix}: {error.message}", error.remedy) from error


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError
    return value


def _within(value: int, low: int, high: int) -> int:
    if not low <= value <= high:
        raise ValueError
    return value
