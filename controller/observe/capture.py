"""Capture files -> Ethernet frames: pcap and pcapng, plain or gzip, either byte order.

scapy reads the records; this module tells apart what its readers do not: a file that
ends between two records from one that ends inside a record, and the interfaces of a
pcapng file from each other. What was read until a file breaks is never lost.
"""

from __future__ import annotations

import io
import logging
import os
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

from controller.errors import InputError

# https://www.tcpdump.org/linktypes.html
LINK_ETHERNET = 1
LINK_SLL = 113
LINK_SLL2 = 276
_LINK_NAMES = {
    0: "BSD loopback",
    LINK_ETHERNET: "Ethernet",
    101: "raw IP",
    105: "IEEE 802.11",
    LINK_SLL: "Linux cooked",
    127: "IEEE 802.11 radiotap",
    197: "ERF: native InfiniBand, as ibdump and Endace cards write it",
    228: "raw IPv4",
    229: "raw IPv6",
    247: "native InfiniBand",
    LINK_SLL2: "Linux cooked v2",
}
_NG_MAGIC = b"\x0a\x0d\x0d\x0a"
_PCAP_MAGICS = (b"\xa1\xb2\xc3\xd4", b"\xd4\xc3\xb2\xa1", b"\xa1\xb2\x3c\x4d", b"\x4d\x3c\xb2\xa1")
_GZIP_MAGIC = b"\x1f\x8b"
_BUFFER_BYTES = 1 << 18
# Where compressed data is damaged, as much as one step of decompression is lost.
_UNZIP_BYTES = 1 << 14
_GZIP_WINDOW_BITS = 16 + zlib.MAX_WBITS  # zlib.h: with a gzip header
_RECORD_HEADER_BYTES = 16
_DAMAGE = (OSError, EOFError, OverflowError, zlib.error)
_U64_MASK = (1 << 64) - 1

_WHAT_IS_READ = "pcap and pcapng files are read, also compressed by gzip."
_HOW_TO_CAPTURE = (
    "RoCEv2 runs over Ethernet: capture with `tcpdump -i INTERFACE udp port 4791` on an "
    "Ethernet interface, or on a mirror port of the switch."
)


def link_name(link_type: int) -> str:
    """A link type as messages call it: ``197 (ERF: native InfiniBand, ...)``."""
    name = _LINK_NAMES.get(link_type)
    return f"{link_type} ({name})" if name else str(link_type)


class Record(NamedTuple):
    """One captured frame, its link header made Ethernet.

    ``frame`` is None when the link type is not one that can carry RoCEv2 here. ``wire_len``
    is the frame's own length in bytes, ``interface`` what tells apart several interfaces
    of one capture ("" if there is one only, or the file does not say).
    """

    time_ns: int
    wire_len: int
    frame: bytes | None
    interface: str


class _Unzip(io.RawIOBase):
    """Decompressed bytes of a gzip file, up to the very place where it breaks off.

    ``gzip.GzipFile`` raises before it hands out what it has.
    """

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw
        self._unzip = zlib.decompressobj(_GZIP_WINDOW_BITS)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._next(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def _next(self, size: int) -> bytes:
        while True:
            if self._unzip.eof:  # another member may follow, or padding
                packed = self._unzip.unused_data.lstrip(b"\0")
                packed = packed or self._raw.read(_UNZIP_BYTES).lstrip(b"\0")
                if not packed:
                    return b""
                self._unzip = zlib.decompressobj(_GZIP_WINDOW_BITS)
            else:
                packed = self._unzip.unconsumed_tail or self._raw.read(_UNZIP_BYTES)
                if not packed:
                    raise EOFError("it ends before its end marker")
            data = self._unzip.decompress(packed, size)
            if data:
                return data


class _Source:
    """The file's bytes for scapy's readers: counts them, and turns damage into its end."""

    def __init__(self, path: Path) -> None:
        self._raw = io.BufferedReader(io.FileIO(path), _BUFFER_BYTES)
        self.name = str(path)
        self.total_bytes = os.fstat(self._raw.fileno()).st_size
        self.position = 0
        self.damage = ""
        self._stream: Any = self._raw
        self.is_gzip = self._raw.peek(2)[:2] == _GZIP_MAGIC
        if self.is_gzip:
            self._stream = io.BufferedReader(_Unzip(self._raw), _UNZIP_BYTES)

    def peek(self, size: int) -> bytes:
        """The next bytes, which stay unread."""
        try:
            return bytes(self._stream.peek(size)[:size])
        except _DAMAGE as error:
            self.damage = str(error)
            return b""

    def read(self, size: int = -1) -> bytes:
        """Read like a file; at a damaged place the file ends."""
        try:
            data: bytes = self._stream.read(size)
        except _DAMAGE as error:
            self.damage = str(error)
            return b""
        self.position += len(data)
        return data

    @property
    def done_bytes(self) -> int:
        """How far the file itself (compressed or not) is read."""
        return self._raw.tell()

    def close(self) -> None:
        self._raw.close()


class Capture:
    """An open capture file; iterate over its records.

    Parameters
    ----------
    path
        The file.

    Raises
    ------
    InputError
        The file is missing, empty, not a capture, or of a link type without RoCEv2.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.truncated = False
        """The file ends inside a record, or is damaged: more frames may have followed."""
        self.link_types: set[int] = set()
        try:
            self._source = _Source(self.path)
        except OSError as error:
            raise InputError(
                f"{path} cannot be read: {error.strerror}.", "Give a capture file."
            ) from error
        try:
            self._reader, self._is_ng = _open_reader(self._source)
            if not self._is_ng:
                link_type = int(self._reader.linktype) & 0xFFFF  # above: FCS length flags
                self.link_types.add(link_type)
                if link_type not in _TO_ETHERNET:
                    raise wrong_link_type(self.path, self.link_types)
        except BaseException:
            self._source.close()
            raise

    @property
    def total_bytes(self) -> int:
        """Size of the file."""
        return self._source.total_bytes

    @property
    def done_bytes(self) -> int:
        """How much of the file is read."""
        return self._source.done_bytes

    def __enter__(self) -> Capture:
        return self

    def __exit__(self, *_: object) -> None:
        self._source.close()

    def __iter__(self) -> Iterator[Record]:
        with _scapy_silent():
            yield from self._read_ng() if self._is_ng else self._read_pcap()

    def _read_pcap(self) -> Iterator[Record]:
        reader, source = self._reader, self._source
        link_type = next(iter(self.link_types))
        convert = _TO_ETHERNET[link_type]
        unit_ns = 1 if reader.nano else 1000
        read = reader._read_packet
        while True:
            start = source.position
            try:
                data, meta = read()
            except EOFError:
                # A clean end is one where not a byte of a next record was there.
                self.truncated = source.position != start or bool(source.damage)
                return
            if source.position - start < _RECORD_HEADER_BYTES + meta.caplen:
                self.truncated = True
                return
            time_ns = meta.sec * 1_000_000_000 + meta.usec * unit_ns
            yield convert(time_ns, meta.wirelen, data, "")

    def _read_ng(self) -> Iterator[Record]:
        reader, source = self._reader, self._source
        time_ns = 0
        while True:
            try:
                data, meta = reader._read_packet()
            except (EOFError, struct.error):
                self.truncated = source.position != reader.block_start or bool(source.damage)
                return
            if meta.tshigh is not None:  # simple packet blocks have no time
                ticks = meta.tshigh << 32 | meta.tslow
                time_ns = ticks * 1_000_000_000 // meta.tsresol & _U64_MASK
            self.link_types.add(meta.linktype)
            convert = _TO_ETHERNET.get(meta.linktype, _no_ethernet)
            yield convert(time_ns, meta.wirelen, data, reader.interface_label)


def wrong_link_type(path: Path, link_types: set[int]) -> InputError:
    """The error for a capture without a single frame of a usable link type."""
    found = ", ".join(link_name(link_type) for link_type in sorted(link_types))
    return InputError(
        f"{path} has link type {found}; expected 1 (Ethernet), 113 or 276 (Linux cooked).",
        _HOW_TO_CAPTURE,
    )


def _open_reader(source: _Source) -> tuple[Any, bool]:
    magic = source.peek(4)
    if source.damage:
        raise InputError(
            f"{source.name} is a damaged gzip file: {source.damage}.",
            "Copy it again, or unpack it.",
        )
    if not magic:
        raise InputError(f"{source.name} is empty.", _WHAT_IS_READ)
    if magic != _NG_MAGIC and magic not in _PCAP_MAGICS:
        raise InputError(
            f"{source.name} is not a capture: it starts with {magic.hex(' ')}.", _WHAT_IS_READ
        )
    # Imported here: scapy takes a while to load, and nothing else needs it.
    from scapy.error import Scapy_Exception

    is_ng = magic == _NG_MAGIC
    try:
        with _scapy_silent():
            return (_ng_reader(source) if is_ng else _pcap_reader(source)), is_ng
    except (Scapy_Exception, EOFError, struct.error) as error:
        raise InputError(
            f"{source.name} ends inside its file header, or the header is damaged.",
            "Capture or copy it again.",
        ) from error


def _pcap_reader(source: _Source) -> Any:
    from scapy.utils import RawPcapReader

    return RawPcapReader(source)  # type: ignore[arg-type]


def _ng_reader(source: _Source) -> Any:
    from scapy.data import MTU
    from scapy.utils import RawPcapNgReader

    class Reader(RawPcapNgReader):
        """Knows where the block in hand began, and the interface of its packet."""

        block_start = 0
        interface_label = ""

        def _read_block(self, size: int = MTU) -> Any:
            self.block_start = source.position
            return super()._read_block(size)

        def _read_block_shb(self) -> None:
            self.interfaces = []  # interface numbers begin anew in every section
            super()._read_block_shb()

        def _read_block_epb(self, block: bytes, size: int) -> Any:
            number = int(struct.unpack_from(self.endian + "I", block)[0])
            self.interface_label = self._label(number)
            return super()._read_block_epb(block, size)

        def _read_block_spb(self, block: bytes, size: int) -> Any:
            self.interface_label = self._label(0)
            return super()._read_block_spb(block, size)

        def _read_block_pkt(self, block: bytes, size: int) -> Any:
            number = int(struct.unpack_from(self.endian + "H", block)[0])
            self.interface_label = self._label(number)
            return super()._read_block_pkt(block, size)

        def _label(self, number: int) -> str:
            if number >= len(self.interfaces):
                return ""
            name = self.interfaces[number][2].get("name")
            if isinstance(name, bytes):
                return name.rstrip(b"\0").decode(errors="replace")
            return f"interface {number}" if number else ""

    reader: Any = Reader(source)  # type: ignore[arg-type]
    reader.blocktypes.pop(10, None)  # decryption secrets: of no use here
    return reader


def _ethernet(time_ns: int, wire_len: int, data: bytes, interface: str) -> Record:
    return Record(time_ns, wire_len, data, interface)


def _cooked(time_ns: int, wire_len: int, data: bytes, interface: str) -> Record:
    """LINKTYPE_LINUX_SLL: 16 bytes, the source address at 6, the protocol at 14."""
    frame = bytes(6) + data[6:12] + data[14:] if len(data) >= 16 else b""
    return Record(time_ns, max(wire_len - 2, 0), frame, interface)


def _cooked2(time_ns: int, wire_len: int, data: bytes, interface: str) -> Record:
    """LINKTYPE_LINUX_SLL2: 20 bytes, protocol at 0, interface index at 4, address at 12."""
    if len(data) < 20:
        return Record(time_ns, wire_len, b"", interface)
    frame = bytes(6) + data[12:18] + data[0:2] + data[20:]
    index = int.from_bytes(data[4:8], "big")
    return Record(time_ns, wire_len - 6, frame, f"{interface or 'any'}#{index}")


def _no_ethernet(time_ns: int, wire_len: int, _data: bytes, interface: str) -> Record:
    return Record(time_ns, wire_len, None, interface)


_TO_ETHERNET = {LINK_ETHERNET: _ethernet, LINK_SLL: _cooked, LINK_SLL2: _cooked2}


@contextmanager
def _scapy_silent() -> Iterator[None]:
    """Without scapy's own warnings on standard error: this module reports damage itself."""
    logger = logging.getLogger("scapy.runtime")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
