"""One file as readers see it: lines or JSON values; packed or not, bounded, with progress."""

from __future__ import annotations

import gzip
import io
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO, Any

import ijson  # type: ignore[import-untyped]

from controller.errors import InputError
from controller.iteration.traces.json_bounds import BoundedJson, TooDeepError

ProgressCallback = Callable[[int, int], None]

# Of one trace; beyond that a file is a mistake, or has to be cut first.
MAX_ROWS = 2_000_000
# A kineto trace of a long run is some GB; a gzip bomb has no end.
MAX_TEXT_BYTES = 8 << 30
_MAX_LINE_BYTES = 1 << 20
# Traces pack 10 to 40 times; gzip cannot pack more than 1032 times, and only constant data so.
_MAX_RATIO = 200
_RATIO_FROM_BYTES = 64 << 20
_HEAD_BYTES = 64 << 10
_PROGRESS_BYTES = 1 << 20

_GZIP = b"\x1f\x8b"
_PACKERS = (
    (b"\x28\xb5\x2f\xfd", "zstd"),
    (b"BZh", "bzip2"),
    (b"\xfd7zXZ\x00", "xz"),
    (b"PK\x03\x04", "zip"),
)


class _Bounded(io.RawIOBase):
    """Reads on from a stream, counts, and stops where no trace goes on."""

    def __init__(
        self,
        stream: IO[bytes] | gzip.GzipFile,
        packed: IO[bytes],
        packed_bytes: int,
        progress: ProgressCallback,
    ) -> None:
        self._stream = stream
        self._packed = packed
        self._packed_bytes = packed_bytes
        self._progress = progress
        self._read_bytes = self._told_bytes = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        self._read_bytes += len(data)
        if self._read_bytes - self._told_bytes >= _PROGRESS_BYTES:
            self._told_bytes = self._read_bytes
            self._progress(min(self._packed.tell(), self._packed_bytes), self._packed_bytes)
        ratio_ok = (
            self._read_bytes <= _RATIO_FROM_BYTES
            or self._read_bytes <= _MAX_RATIO * self._packed_bytes
        )
        if self._read_bytes > MAX_TEXT_BYTES or not ratio_ok:
            raise OverflowError
        return len(data)


class TraceSource:
    """A file that can be read from its begin as often as a reader likes.

    Use `open_source` to get one.

    Parameters
    ----------
    name
        What errors call it.
    stream
        Seekable.
    progress
        Called with (bytes read, bytes in all) of the file as it lies on disk.
    """

    def __init__(self, name: str, stream: IO[bytes], progress: ProgressCallback) -> None:
        self.name = name
        self._stream = stream
        self._progress = progress
        self._size_bytes = stream.seek(0, io.SEEK_END)
        stream.seek(0)
        magic = stream.read(6)
        self._packed = magic.startswith(_GZIP)
        for begin, packer in _PACKERS:
            if magic.startswith(begin):
                raise InputError(
                    f"{name} is packed with {packer}; plain and gzip files are read.",
                    f"Unpack it first, or pack it with gzip instead of {packer}.",
                )
        with self.reading():
            self.head = self.open().read(_HEAD_BYTES) or b""
        if not self.head.strip():
            raise InputError(f"{name} is empty; a trace was expected.")

    def error(self, message: str, remedy: str = "") -> InputError:
        """An error that names the file."""
        return InputError(f"{self.name}: {message}", remedy)

    def open(self) -> io.BufferedReader:
        """The unpacked bytes from the begin; at most one at a time."""
        self._stream.seek(0)
        stream: IO[bytes] | gzip.GzipFile = self._stream
        if self._packed:
            stream = gzip.GzipFile(fileobj=self._stream, mode="rb")
        bounded = _Bounded(stream, self._stream, self._size_bytes, self._progress)
        return io.BufferedReader(bounded, buffer_size=_HEAD_BYTES)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Turns what unpacking and reading may raise into errors that name the file."""
        try:
            yield
        except EOFError:
            raise self.error("the gzip data ends early.", "Copy the file again.") from None
        except (gzip.BadGzipFile, zlib.error) as error:
            raise self.error(f"the gzip data is damaged ({error}).", "Copy it again.") from None
        except OverflowError:
            raise self.error(
                f"holds more than {MAX_TEXT_BYTES >> 30} GiB, or unpacks to more than "
                f"{_MAX_RATIO} times its size; no trace does.",
                "Record fewer iterations, or cut the file.",
            ) from None
        except UnicodeDecodeError as error:
            raise self.error(
                f"is not UTF-8 text (byte {error.object[error.start]:#04x})."
            ) from None
        except OSError as error:
            raise self.error(f"cannot be read: {error.strerror or error}.") from None

    def mentions(self, words: bytes) -> bool:
        """Whether a line of the file has these words."""
        with self.reading():
            stream = self.open()
            return any(
                words in line for line in iter(lambda: stream.readline(_MAX_LINE_BYTES), b"")
            )

    def lines(self, errors: str = "strict") -> Iterator[str]:
        """Lines of text without their ends.

        Parameters
        ----------
        errors
            What becomes of bytes that are not UTF-8, as `bytes.decode` has it.

        Raises
        ------
        InputError
            Damaged, not UTF-8, or a line longer than 1 MiB.
        """
        with self.reading():
            stream = self.open()
            number = 0
            while line := stream.readline(_MAX_LINE_BYTES + 1):
                number += 1
                if len(line) > _MAX_LINE_BYTES:
                    raise self.error(
                        f"line {number} is longer than {_MAX_LINE_BYTES >> 20} MiB; "
                        "lines of text were expected."
                    )
                text = line.decode(errors=errors)
                yield (text.removeprefix("\ufeff") if number == 1 else text).rstrip("\r\n")

    def json_values(self, prefix: str, multiple_values: bool = False) -> Iterator[Any]:
        """JSON values one after the other, the file never whole in memory.

        Parameters
        ----------
        prefix
            As ijson has it: ``traceEvents.item`` is each element of the list ``traceEvents``.
        multiple_values
            Whether the file is several JSON values one behind the other.

        Raises
        ------
        InputError
            Not JSON, or cut.
        """
        yield from self._json(ijson.items, prefix, multiple_values=multiple_values)

    def json_parts(self) -> Iterator[tuple[str, str, Any]]:
        """The parts (prefix, event, value) of the file as ijson's parse has them."""
        yield from self._json(ijson.parse, multiple_values=True)

    def _json(self, parser: Callable[..., Any], *arguments: Any, **options: Any) -> Iterator[Any]:
        found = 0
        with self.reading():
            stream = self.open()
            if self.head.startswith(b"\xef\xbb\xbf"):
                stream.read(3)
            try:
                for value in parser(BoundedJson(stream), *arguments, **options):
                    found += 1
                    yield value
            except TooDeepError as error:
                raise self.error(f"{error}; no trace does.") from None
            except ijson.IncompleteJSONError as error:
                # Both what is cut and what is no JSON: the parser tells in words only.
                raise self.error(
                    f"is cut or is not JSON; {found} complete parts came before that "
                    f"({_first_line(error)}).",
                    "Copy it again, or record it again and let the profiler finish.",
                ) from None
            except (ijson.JSONError, ValueError, ArithmeticError, RecursionError) as error:
                raise self.error(f"is not JSON that can be read ({_first_line(error)}).") from None


def _first_line(error: BaseException) -> str:
    text = str(error.args[0] if error.args else error)
    if isinstance(error.args[0] if error.args else None, bytes):
        text = error.args[0].decode("utf-8", "replace")
    return text.strip().split("\n")[0].strip()[:120]


@contextmanager
def open_source(path: Path, progress: ProgressCallback) -> Iterator[TraceSource]:
    """Open a file; ``-`` is standard input.

    Raises
    ------
    InputError
        Missing, a folder, empty, or packed in a way that is not read.
    """
    name = "standard input" if str(path) == "-" else str(path)
    # Python has no stream for a descriptor that was closed before it began.
    if str(path) == "-" and sys.stdin is None:
        raise InputError("Standard input is closed.", "Give a file, or redirect one.")
    try:
        stream: IO[bytes] = sys.stdin.buffer if str(path) == "-" else path.open("rb")
    except FileNotFoundError:
        raise InputError(f"{name} does not exist.", "Give the path of a trace.") from None
    except IsADirectoryError:
        raise InputError(f"{name} is a folder.", "Give one file of it.") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{name[:200]} cannot be opened: {_reason(error)}.") from None
    # Standard input is not ours to close.
    with nullcontext() if stream is sys.stdin.buffer else stream:
        if _seekable(stream):
            yield TraceSource(name, stream, progress)
            return
        # A pipe is read once, a trace up to three times.
        with tempfile.TemporaryFile() as copy:
            shutil.copyfileobj(stream, copy)
            yield TraceSource(name, copy, progress)


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _seekable(stream: IO[bytes]) -> bool:
    try:
        stream.seek(0)
    except (OSError, ValueError):
        return False
    return stream.seekable()
