"""C -> BPF instructions and map descriptions, by BCC, in a process that ends afterwards.

``compile_programs`` starts ``python -m controller.dataplane.compile``: LLVM's tens of
megabytes are gone when it returns. BCC only compiles here; it creates its maps for the
moment of the compilation, and the loader creates the real ones. What was compiled before,
from the same source by the same compiler for the same kernel, comes from the cache.
"""

from __future__ import annotations

import base64
import ctypes as ct
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from controller.dataplane.artifact_cache import ArtifactCache, cache_directory, open_cache
from controller.dataplane.compile_key import compilation_key
from controller.dataplane.shim import kernel_source
from controller.errors import UnsupportedError

log = logging.getLogger("stellar.bpf_cache")

# A checkout has bpf/ beside the package; an installed wheel carries it inside.
_CANDIDATES = (Path(__file__).parents[2] / "bpf", Path(__file__).parents[1] / "bpf")
SOURCE_DIRECTORY = next((path for path in _CANDIDATES if path.is_dir()), _CANDIDATES[0])
_INCLUDE = re.compile(r'^\s*#\s*include\s+"(?P<name>[^"]+)"')
_BPF_LD_IMM64 = 0x18
_BPF_PSEUDO_MAP_FD = 1
_INSTRUCTION_BYTES = 8
_COMPILER_FILES = re.compile(r"lib(bcc|LLVM|clang)[^/]*\.so[^/]*$")


@dataclass(frozen=True)
class MapSpec:
    """A map as the source declares it."""

    name: str
    type: int
    key_size: int
    value_size: int
    max_entries: int
    flags: int


@dataclass(frozen=True)
class Program:
    """Instructions of one function; map references are by name.

    ``map_loads`` lists (instruction index, map name).
    """

    name: str
    instructions: bytes
    map_loads: tuple[tuple[int, str], ...]


@dataclass(frozen=True)
class Artifact:
    """Result of one compilation."""

    maps: Mapping[str, MapSpec]
    programs: Mapping[str, Program]


def flatten(name: str, directory: Path = SOURCE_DIRECTORY, seen: set[str] | None = None) -> str:
    """The source file `name` with its local includes written out, each once.

    BCC rewrites map accesses (``flows.lookup()``) in the main file only, so the headers
    have to be part of it. ``#line`` keeps compiler messages pointing at the real files.
    """
    seen = set() if seen is None else seen
    seen.add(name)
    path = directory / name
    lines = [f'#line 1 "{path}"']
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        match = _INCLUDE.match(line)
        if not match:
            lines.append(line)
        elif match["name"] not in seen:
            lines.append(flatten(match["name"], directory, seen))
            lines.append(f'#line {number + 1} "{path}"')
    return "\n".join(lines)


def compile_programs(
    sources: Sequence[str],
    functions: Sequence[str],
    defines: Mapping[str, str] | None = None,
) -> Artifact:
    """Compile files of ``bpf/`` into one set of programs that share their maps.

    Parameters
    ----------
    sources
        File names below ``bpf/``, compiled as one unit in this order.
    functions
        Names of the programs to take out.
    defines
        Preprocessor definitions.

    Raises
    ------
    UnsupportedError
        BCC is missing, or the compiler rejected the source (its messages are included).
    UsageError
        STELLAR_BPF_CACHE names no place for the cache.
    """
    try:
        text = "\n".join(_flatten_all(sources))
    except OSError as error:
        raise UnsupportedError(
            f"The BPF programs did not compile: {error.filename}: {error.strerror}.",
            "Install the whole project; its C sources belong to it.",
        ) from error
    request = {
        "text": "#include <uapi/linux/bpf.h>\n#include <uapi/linux/pkt_cls.h>\n" + text,
        "functions": list(functions),
        "cflags": [f"-D{name}={value}" for name, value in (defines or {}).items()],
    }
    with open_cache(cache_directory()) as cache:
        key = compilation_key(request) if cache else None
        if cache is None or key is None:
            return _decode(_compile_apart(request))
        artifact = _stored(cache, key)
        if artifact is None:
            with cache.locked(key):
                # Another process may have stored it while this one waited.
                artifact = _stored(cache, key)
                if artifact is None:
                    document = _compile_apart(request)
                    cache.store(key, document)
                    artifact = _decode(document)
        return artifact


def _flatten_all(sources: Sequence[str]) -> list[str]:
    seen: set[str] = set()
    return [flatten(source, seen=seen) for source in sources]


def _stored(cache: ArtifactCache, key: str) -> Artifact | None:
    """What the cache holds for a key, unless another compiler made it."""
    document = cache.load(key)
    if document is None:
        return None
    try:
        changed = [path for path, *stamp in document["compiler"] if _stamp(path) != stamp]
        if not changed:
            return _decode(document)
        log.info("%s has changed: compiling anew", changed[0])
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("a stored compilation cannot be used (%r): compiling anew", error)
    cache.discard(key)
    return None


def _stamp(path: str) -> list[int]:
    state = Path(path).stat()
    return [state.st_size, state.st_mtime_ns]


def _compile_apart(request: Mapping[str, Any]) -> dict[str, Any]:
    result = subprocess.run(
        [sys.executable, "-m", "controller.dataplane.compile"],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
        process_group=0,  # Ctrl-C is for the controller
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    if result.returncode:
        raise UnsupportedError(
            f"The BPF programs did not compile:\n{result.stderr.strip()}",
            "`controller doctor` tells what is missing.",
        )
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def _decode(document: Mapping[str, Any]) -> Artifact:
    maps = {entry["name"]: MapSpec(**entry) for entry in document["maps"]}
    programs = {
        entry["name"]: Program(
            entry["name"],
            base64.b64decode(entry["instructions"]),
            tuple((int(index), str(name)) for index, name in entry["map_loads"]),
        )
        for entry in document["programs"]
    }
    return Artifact(maps, programs)


def _map_loads(instructions: bytes, names: Mapping[int, str]) -> list[tuple[int, str]]:
    loads = []
    for index in range(len(instructions) // _INSTRUCTION_BYTES):
        code, registers, _, _, immediate = _unpack(instructions, index)
        if code == _BPF_LD_IMM64 and registers >> 4 == _BPF_PSEUDO_MAP_FD:
            loads.append((index, names[immediate]))
    return loads


def _unpack(instructions: bytes, index: int) -> tuple[int, int, int, int, int]:
    start = index * _INSTRUCTION_BYTES
    raw = instructions[start : start + _INSTRUCTION_BYTES]
    offset = int.from_bytes(raw[2:4], "little", signed=True)
    return raw[0], raw[1], offset, 0, int.from_bytes(raw[4:8], "little")


def _table_functions(library: Any) -> Any:
    """Types of the calls that BCC's Python does not use itself (libbcc's bpf_module.h)."""
    library.bpf_num_tables.argtypes = [ct.c_void_p]
    library.bpf_num_tables.restype = ct.c_size_t
    library.bpf_table_name.argtypes = [ct.c_void_p, ct.c_size_t]
    library.bpf_table_name.restype = ct.c_char_p
    for name in ("fd", "key_size", "leaf_size"):
        function = getattr(library, f"bpf_table_{name}_id")
        function.argtypes = [ct.c_void_p, ct.c_size_t]
        function.restype = ct.c_int if name == "fd" else ct.c_size_t
    return library


def _compile_here(request: dict[str, Any]) -> dict[str, Any]:
    """The part that needs BCC; runs in the short-lived process."""
    import bcc

    with kernel_source() as directory:
        os.environ["BCC_KERNEL_SOURCE"] = str(directory)
        module = bcc.BPF(text=request["text"], cflags=[*request["cflags"], "-Wno-macro-redefined"])
    library, handle = _table_functions(bcc.libbcc.lib), ct.c_void_p(module.module)
    maps, names = [], {}
    for number in range(library.bpf_num_tables(handle)):
        name = library.bpf_table_name(handle, number).decode()
        names[library.bpf_table_fd_id(handle, number)] = name
        maps.append(
            {
                "name": name,
                "type": library.bpf_table_type_id(handle, number),
                "key_size": library.bpf_table_key_size_id(handle, number),
                "value_size": library.bpf_table_leaf_size_id(handle, number),
                "max_entries": library.bpf_table_max_entries_id(handle, number),
                "flags": library.bpf_table_flags_id(handle, number),
            }
        )
    programs = []
    for function in request["functions"]:
        instructions = module.dump_func(function.encode())
        programs.append(
            {
                "name": function,
                "instructions": base64.b64encode(instructions).decode(),
                "map_loads": _map_loads(instructions, names),
            }
        )
    return {"maps": maps, "programs": programs, "compiler": _compiler_files(bcc)}


def _compiler_files(bcc: Any) -> list[list[str | int]]:
    """(path, size, time of the last change) of what BCC consists of, as loaded here."""
    # address, permissions, offset, device, inode, path: proc_pid_maps(5)
    fields = (line.split(None, 5) for line in Path("/proc/self/maps").read_text().splitlines())
    mapped = {part[5] for part in fields if len(part) == 6 and _COMPILER_FILES.search(part[5])}
    modules = {bcc.__file__, str(Path(bcc.__file__).with_name("version.py"))}
    return [[path, *_stamp(path)] for path in sorted(mapped | modules)]


def main() -> None:
    """Read a request from standard input, write the result to standard output."""
    try:
        document = _compile_here(json.load(sys.stdin))
    except ImportError as error:
        sys.exit(f"BCC's Python module cannot be imported: {error} (package python3-bpfcc).")
    except Exception as error:  # BCC raises bare Exceptions; its messages are on stderr
        sys.exit(f"BCC: {error}")
    json.dump(document, sys.stdout)


if __name__ == "__main__":
    main()
