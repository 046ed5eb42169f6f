"""What the readers of CSV share: rows by column name, numbers with their line in the error."""

from __future__ import annotations

import csv
import decimal
from collections.abc import Iterable, Iterator, Mapping, Sequence

from controller.errors import InputError
from controller.iteration.traces.names import MAX_BYTES
from controller.iteration.traces.source import MAX_ROWS, TraceSource

NS_PER_US = 1_000
NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000

# 30 years: longer than any run, and sums of two million such times stay exact in Python.
MAX_TIME_NS = 30 * 366 * 86_400 * NS_PER_S
# Of any clock, one that counts from 1970 as well: what fits into 64 bits everywhere else.
MAX_CLOCK_NS = (1 << 63) - 1


class Row(Mapping[str, str]):
    """One line of a table, by the names of its columns.

    Parameters
    ----------
    source, line
        For errors; lines count from 1.
    columns
        Index by name.
    cells
        As they stand in the line.
    """

    def __init__(
        self, source: TraceSource, line: int, columns: Mapping[str, int], cells: Sequence[str]
    ) -> None:
        self._source = source
        self._line = line
        self._columns = columns
        self._cells = cells

    def __getitem__(self, name: str) -> str:
        return self._cells[self._columns[name]].strip()

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def error(self, name: str, expected: str) -> InputError:
        """An error that names file, line and column."""
        return self._source.error(
            f"line {self._line}, {name}: found {self[name][:40]!r}; expected {expected}."
        )

    def duration_ns(self, name: str, unit_ns: int) -> int:
        """A duration of some unit in nanoseconds.

        Raises
        ------
        InputError
            Not a number, negative, or longer than 30 years.
        """
        return self._time_ns(name, unit_ns, MAX_TIME_NS, "a duration from 0 to 30 years")

    def time_ns(self, name: str, unit_ns: int) -> int:
        """A time on any clock, as one that counts from 1970, of some unit in nanoseconds.

        Raises
        ------
        InputError
            Not a number, negative, or 2^63 ns and more.
        """
        return self._time_ns(name, unit_ns, MAX_CLOCK_NS, "a time from 0 to below 2^63 ns")

    def _time_ns(self, name: str, unit_ns: int, most_ns: int, expected: str) -> int:
        try:
            number = decimal.Decimal(self[name])
        except decimal.InvalidOperation:
            raise self.error(name, "a number") from None
        # The comparison also keeps "1e999999" from becoming an integer.
        if not number.is_finite() or not 0 <= number <= decimal.Decimal(most_ns) / unit_ns:
            raise self.error(name, expected)
        return int((number * unit_ns).to_integral_value())

    def count(self, name: str, maximum: int = MAX_BYTES, minimum: int = 0) -> int:
        """A whole number.

        Raises
        ------
        InputError
            Something else, or out of bounds.
        """
        text = self[name]
        # Nearly every cell; Decimal is for "1e6" and "4096.0".
        if len(text) < 19 and text.isascii() and text.isdigit():
            value = int(text)
            if minimum <= value <= maximum:
                return value
        try:
            number = decimal.Decimal(text)
        except decimal.InvalidOperation:
            raise self.error(name, "a whole number") from None
        if not number.is_finite() or not minimum <= number <= maximum or number % 1:
            raise self.error(name, f"a whole number from {minimum} to {maximum}")
        return int(number)

    def optional_count(self, name: str, maximum: int = MAX_BYTES) -> int | None:
        """A whole number; None where the column is missing or the cell is blank."""
        return self.count(name, maximum) if self.get(name) else None


def cells_of(source: TraceSource) -> Iterator[tuple[int, list[str]]]:
    """Lines of a CSV file as (line number, cells); blank lines and ``#`` comments left out.

    Raises
    ------
    InputError
        Not text, not CSV, or more than `MAX_ROWS` lines.
    """
    reader = csv.reader(
        # Comments become blank lines, so that line numbers stay those of the file.
        ("" if line.lstrip().startswith("#") else line + "\n" for line in source.lines()),
        strict=True,
    )
    rows = 0
    while True:
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise source.error(f"line {reader.line_num} is not CSV ({error}).") from None
        if not any(cell.strip() for cell in cells):
            continue
        rows += 1
        if rows > MAX_ROWS:
            raise source.error(
                f"has more than {MAX_ROWS} rows, which is the most that is read.",
                "Split the file; a few thousand iterations tell as much.",
            )
        yield reader.line_num, cells


def rows_of(source: TraceSource, columns: Iterable[str], skip_lines: int = 0) -> Iterator[Row]:
    """Rows of a CSV file whose first row names the columns.

    Parameters
    ----------
    columns
        Those that have to be there.
    skip_lines
        Rows before the one with the names.

    Raises
    ------
    InputError
        A column is missing, a row is shorter than the first, or see `cells_of`.
    """
    lines = cells_of(source)
    for _ in range(skip_lines):
        next(lines, None)
    _, names = next(lines, (0, []))
    index = {name.strip(): position for position, name in enumerate(names)}
    missing = [name for name in columns if name not in index]
    if missing:
        raise source.error(
            f"has no column {missing[0]!r}; found {', '.join(index)[:120] or 'no columns'}."
        )
    for number, cells in lines:
        if len(cells) < len(names):
            raise source.error(
                f"line {number} has {len(cells)} columns; the first row names {len(names)}.",
                "The file may be cut; copy it again.",
            )
        yield Row(source, number, index, cells)
