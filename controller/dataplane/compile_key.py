"""What decides the result of a compilation, in one hash: the name of an entry in the cache."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from controller.dataplane import layout
from controller.dataplane.artifact_cache import KEY_DIGITS

log = logging.getLogger("stellar.bpf_cache")

_SYSTEM_INCLUDE = re.compile(r"#[ \t]*include[ \t]*<(?P<name>[^>]+)>")
# Environment by which BCC and clang may be told to compile differently.
_COMPILER_VARIABLES = re.compile(r"BCC_\w+|ARCH|CPATH|C_INCLUDE_PATH")
# Stand-in headers, compiler flags and the form of an entry are in these.
_OWN_FILES = tuple(Path(__file__).with_name(name) for name in ("compile.py", "shim.py"))


def compilation_key(request: Mapping[str, Any]) -> str | None:
    """Hash of the source, its headers, the flags, BCC's place, the kernel and the ABI.

    Parameters
    ----------
    request
        For the compiler: ``text`` with its local includes written out, ``functions``, ``cflags``.

    Returns
    -------
    str or None
        Hexadecimal digits; None where it cannot be told, e.g. without BCC. The compiler's own
        libraries are not in it, as finding them means to load them: the entry names them.
    """
    try:
        bcc = importlib.util.find_spec("bcc")
        if bcc is None or bcc.origin is None:
            return None
        own = [path.read_bytes() for path in _OWN_FILES]
        # Those of the stand-ins are looked for in the text of shim.py.
        headers = system_headers(request["text"] + own[-1].decode())
    except (OSError, ValueError) as error:
        log.info("the compiled programs are not kept: %s", error)
        return None
    environment = {n: v for n, v in os.environ.items() if _COMPILER_VARIABLES.fullmatch(n)}
    facts = {
        "request": request,
        "abi": layout.ABI,
        "bcc": bcc.origin,
        # BCC looks at the kernel's version, and at what it offers.
        "kernel": (platform.release(), platform.version(), platform.machine()),
        "environment": environment,
    }
    digest = hashlib.sha256()
    parts = [json.dumps(facts, sort_keys=True).encode(), *own]
    for name in sorted(headers):
        parts += [name.encode(), headers[name]]
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:KEY_DIGITS]


def system_headers(text: str) -> dict[str, bytes]:
    """The system's headers that a source includes, directly or through one another.

    Parameters
    ----------
    text
        The source.

    Returns
    -------
    dict
        Name -> content, for every header that is in the C library's directories, whatever the
        preprocessor's conditions say. BCC's own are part of its library and not among them.
    """
    directories = (Path("/usr/include"), Path(f"/usr/include/{platform.machine()}-linux-gnu"))
    found: dict[str, bytes] = {}
    open_names = _SYSTEM_INCLUDE.findall(text)
    while open_names:
        name = open_names.pop().removeprefix("uapi/")
        paths = (directory / name for directory in directories)
        path = next((path for path in paths if path.is_file()), None)
        if path and name not in found:
            found[name] = path.read_bytes()
            open_names += _SYSTEM_INCLUDE.findall(found[name].decode(errors="replace"))
    return found
