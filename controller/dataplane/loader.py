"""From a compiled artifact to maps and loaded programs.

A controller that starts after another one died takes over its maps by their ids, so no
counter is lost. Maps live as long as an attached program or a controller holds them:
nothing is pinned.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Mapping

from controller.dataplane import layout, libbpf
from controller.dataplane.compile import Artifact, MapSpec, Program, compile_programs
from controller.errors import PrivilegeError, StellarError, UnsupportedError

SOURCES = ("xdp_ingress.c", "tc_ingress.c", "tc_egress.c")
XDP_INGRESS = "stellar_xdp_in"
TC_INGRESS = "stellar_tc_in"
TC_EGRESS = "stellar_tc_out"
# Kernel names have 15 characters; the port number is part of it, so that a controller
# recognises what an earlier one left: stellar_xi_0003.
KERNEL_NAMES = {
    XDP_INGRESS: "stellar_xi",
    TC_INGRESS: "stellar_ti",
    TC_EGRESS: "stellar_te",
}
# bpf/port.h, in both halves of the immediate
_PORT_PLACEHOLDER = 0x57E11A01
_ACTS_PLACEHOLDER = 0x57E11A02
# Only programs that act hold these: where none was attached, they died with the controller.
_CONTROL_MAPS = frozenset({
    "port_controls", "class_controls", "dcqcn_controls", "laxity_controls", "dscp_classes", "jobs",
    "plans", "assignments", "control_epoch", "crc32_table", "controls", "progress",
    "job_departures", "markers", "acts",
})  # fmt: skip
# Maps whose values begin with a bpf_spin_lock (bpf/maps.h).
_LOCKED_MAPS = ("flows", "controls", "progress", "markers")
_LD_IMM64 = 0x18
_PSEUDO_MAP_FD = 1


def compile_dataplane(defines: Mapping[str, str] | None = None) -> Artifact:
    """The dataplane's programs, compiled."""
    return compile_programs(SOURCES, tuple(KERNEL_NAMES), defines)


def _lock_btf(name: str, key_size: int, value_size: int) -> bytes:
    """BTF that tells the kernel one thing: a bpf_spin_lock is at offset 0 of the value.

    Types: 1 u32, 2 struct bpf_spin_lock {u32 val}, 3 the key (opaque), 4 the value.
    Format: Documentation/bpf/btf.rst of Linux.
    """
    strings = bytearray(b"\0")

    def string(text: str) -> int:
        offset = len(strings)
        strings.extend(text.encode() + b"\0")
        return offset

    kind_int, kind_struct = 1, 4

    def header(label: str, kind: int, members: int, size: int) -> bytes:
        return struct.pack("<III", string(label), kind << 24 | members, size)

    types = header("unsigned int", kind_int, 0, 4) + struct.pack("<I", 32)
    types += header("bpf_spin_lock", kind_struct, 1, 4) + struct.pack("<III", string("val"), 1, 0)
    types += header(f"{name}_key", kind_struct, 0, key_size)
    types += header(f"{name}_value", kind_struct, 1, value_size)
    types += struct.pack("<III", string("lock"), 2, 0)
    prologue = struct.pack("<HBBIIIII", 0xEB9F, 1, 0, 24, 0, len(types), len(types), len(strings))
    return prologue + types + bytes(strings)


def _relocate(program: Program, map_fds: Mapping[str, int], port: int, acts: bool) -> bytes:
    code = bytearray(program.instructions)
    for index, name in program.map_loads:
        struct.pack_into("<I", code, index * 8 + 4, map_fds[name])
    patched = 0
    for start in range(0, len(code) - 8, 8):
        low, high = (struct.unpack_from("<I", code, start + offset)[0] for offset in (4, 12))
        if code[start] != _LD_IMM64 or low != high:
            continue
        if low in (_PORT_PLACEHOLDER, _ACTS_PLACEHOLDER):
            struct.pack_into("<I", code, start + 4, port if low == _PORT_PLACEHOLDER else acts)
            struct.pack_into("<I", code, start + 12, 0)
            patched += low == _PORT_PLACEHOLDER
    if not patched and program.name in KERNEL_NAMES:
        raise StellarError(f"{program.name} has no place for the port number (bpf/port.h).")
    return bytes(code)


class Dataplane:
    """Maps shared by all attached interfaces, and the programs loaded against them.

    Parameters
    ----------
    artifact
        Compiled programs.
    max_flows
        Size of the flow table.
    adopt
        Maps of an earlier controller to take over, name -> kernel id. StellarError is
        raised when one is gone or of another layout.
    """

    def __init__(
        self,
        artifact: Artifact,
        max_flows: int = layout.MAX_FLOWS,
        adopt: Mapping[str, int] | None = None,
    ) -> None:
        self._artifact = artifact
        self.max_flows = max_flows
        self.map_fds: dict[str, int] = {}
        try:
            if adopt is None:
                self._create_maps()
            else:
                self._adopt_maps(adopt)
        except BaseException:
            self.close()
            raise

    def _create_maps(self) -> None:
        for spec in self._artifact.maps.values():
            entries = self.max_flows if spec.name in ("flows", "pairs") else spec.max_entries
            self.map_fds[spec.name] = self._create_map(spec, entries)

    @staticmethod
    def _create_map(spec: MapSpec, entries: int) -> int:
        btf_fd = -1
        try:
            btf = None
            if spec.name in _LOCKED_MAPS:
                blob = _lock_btf(spec.name, spec.key_size, spec.value_size)
                btf_fd = libbpf.btf_load(blob)
                # An array's key has to be the number itself.
                btf = (btf_fd, 1 if spec.type == libbpf.MAP_TYPE_ARRAY else 3, 4)
            return libbpf.map_create(
                spec.type, spec.name, spec.key_size, spec.value_size, entries, spec.flags, btf
            )
        except OSError as error:
            raise _explain(error, f"BPF map {spec.name} ({entries} entries)") from error
        finally:
            if btf_fd >= 0:
                os.close(btf_fd)

    def _adopt_maps(self, ids: Mapping[str, int]) -> None:
        for name, spec in self._artifact.maps.items():
            try:
                self.map_fds[name] = libbpf.map_fd_by_id(ids[name])
            except (KeyError, OSError) as error:
                if name in _CONTROL_MAPS:
                    self.map_fds[name] = self._create_map(spec, spec.max_entries)
                    continue
                raise StellarError(f"Map {name} of the earlier controller is gone.") from error
            info = libbpf.map_info(self.map_fds[name])
            found = (info.name, info.type, info.key_size, info.value_size)
            if found != (name[:15], spec.type, spec.key_size, spec.value_size):
                raise StellarError(
                    f"Map {info.name} of the earlier controller has {info.key_size}-byte keys "
                    f"and {info.value_size}-byte values, this version's {name} has "
                    f"{spec.key_size} and {spec.value_size}."
                )
            if name == "flows":
                self.max_flows = info.max_entries

    @property
    def map_ids(self) -> dict[str, int]:
        """Kernel ids of the maps, by which a later controller finds them."""
        return {name: libbpf.map_info(fd).id for name, fd in self.map_fds.items()}

    def load(self, function: str, port: int, acts: bool = False) -> int:
        """Load one of the programs for an attachment; returns its descriptor.

        Parameters
        ----------
        function
            XDP_INGRESS, TC_INGRESS or TC_EGRESS.
        port
            Number of the attachment, 0 .. MAX_PORTS - 1.
        acts
            Whether it acts on packets of jobs, or observes only.
        """
        program = self._artifact.programs[function]
        is_xdp = function.startswith("stellar_xdp")
        kernel_name = f"{KERNEL_NAMES.get(function, function)}_{port:04x}"[:15]
        try:
            return libbpf.prog_load(
                libbpf.PROG_TYPE_XDP if is_xdp else libbpf.PROG_TYPE_SCHED_CLS,
                kernel_name,
                _relocate(program, self.map_fds, port, acts),
                # rxe wants MTU 4200 for 4096-byte packets, more than one XDP buffer.
                libbpf.BPF_F_XDP_HAS_FRAGS if is_xdp else 0,
            )
        except OSError as error:
            raise _explain(error, f"BPF program {function}") from error

    def close(self) -> None:
        """Close the descriptors; maps stay while attached programs use them."""
        for fd in self.map_fds.values():
            os.close(fd)
        self.map_fds.clear()


def _explain(error: OSError, what: str) -> StellarError:
    if error.errno in (errno.EPERM, errno.EACCES):
        return PrivilegeError(
            f"{what} cannot be created: {error.strerror}.",
            "Run as root, or with CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON; a verifier message "
            "above means a bug: please report it.",
        )
    if error.errno == errno.ENOMEM:
        return StellarError(f"{what}: out of memory.", "Lower observe.max_flows.")
    return UnsupportedError(
        f"{what} is refused by this kernel: {error.strerror}.",
        "`controller doctor` tells which kernel feature is missing.",
    )
