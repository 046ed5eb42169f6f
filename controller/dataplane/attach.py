"""Attach and detach the programs of one interface.

Attachments outlive the process. Ours are known by the names of their programs
(``stellar_xi_0003``: XDP ingress, port 3) and, on a clsact, by one handle and priority;
nothing else is ever replaced or deleted.

tc programs go to tcx (kernel 6.6 and newer), where attaching and detaching disturb nothing.
A clsact qdisc is the way for older kernels: to add or delete one, the kernel deactivates
the interface's queues for a moment and drops what is sent meanwhile. soft-RoCE from about
7.x takes the refused packet for a local error, and the queue pair is dead.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import partial

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from controller.dataplane import libbpf
from controller.dataplane.attachment import Attachment
from controller.dataplane.interfaces import Interface
from controller.dataplane.loader import KERNEL_NAMES, TC_EGRESS, TC_INGRESS, XDP_INGRESS, Dataplane
from controller.dataplane.netns import in_netns, list_netns
from controller.errors import ConflictError, StellarError, UnsupportedError, UsageError

_XDP_FLAGS = {"native": libbpf.XDP_FLAGS_DRV_MODE, "generic": libbpf.XDP_FLAGS_SKB_MODE}
_XDP_MODE_NAMES = {libbpf.XDP_ATTACHED_DRV: "native", libbpf.XDP_ATTACHED_SKB: "generic"}
_TCX_HOOKS = {TC_INGRESS: libbpf.BPF_TCX_INGRESS, TC_EGRESS: libbpf.BPF_TCX_EGRESS}
_TC_PARENTS = {TC_INGRESS: 0xFFFFFFF2, TC_EGRESS: 0xFFFFFFF3}
# First in line: filters of others that end the classification must not hide packets.
_TC_PRIORITY = 1
_TC_HANDLE = 0x57E1
_ETH_P_ALL = 3
_OUR_PROGRAM = re.compile(r"stellar_(xi|ti|te)_[0-9a-f]{4}")


def is_ours(program_name: str) -> bool:
    """Whether a BPF program's name is one that a controller gives."""
    return bool(_OUR_PROGRAM.fullmatch(program_name))


def _program_name(program_id: int) -> str:
    fd = libbpf.prog_fd_by_id(program_id)
    try:
        return libbpf.prog_info(fd).name
    finally:
        os.close(fd)


def _has_clsact(ipr: IPRoute, ifindex: int) -> bool:
    return any(qdisc.get_attr("TCA_KIND") == "clsact" for qdisc in ipr.get_qdiscs(index=ifindex))


def _filter_names(ipr: IPRoute, ifindex: int, parent: int) -> list[tuple[int, int, str]]:
    """(priority, handle, BPF program name or filter kind) of all filters at a hook."""
    found = []
    for entry in ipr.get_filters(index=ifindex, parent=parent):
        options = entry.get_attr("TCA_OPTIONS")
        if options is None:
            continue  # the head of a priority, not a filter
        name = None
        if entry.get_attr("TCA_KIND") == "bpf":
            name = options.get_attr("TCA_BPF_NAME")
        found.append((entry["info"] >> 16, entry["handle"], name or entry.get_attr("TCA_KIND")))
    return found


def check_free(interface: Interface, mode: str, adopting: bool = False) -> None:
    """Raise ConflictError when somebody else's programs are on the interface.

    Programs of Stellar count as somebody else's unless they are to be adopted: another
    controller, with a run directory of its own, observes this interface.
    """

    def look() -> None:
        if not adopting and (hooks := _our_hooks(interface.ifindex)):
            raise ConflictError(
                f"Interface {interface.label} carries {', '.join(sorted(hooks.values()))} of "
                "another controller.",
                "Stop that one: controller --run-dir ITS-DIRECTORY stop. If its directory is lost, "
                "`bpftool net` shows and detaches the programs.",
            )
        if mode != "tc":
            _our_xdp_program(interface.label, interface.ifindex)

    with _failures_explained(interface.label):
        in_netns(interface.netns, look)


def needs_own_clsact(interface: Interface) -> bool:
    """Whether attaching will create a clsact: the kernel has no tcx, the interface no clsact."""

    def look() -> bool:
        if _has_tcx(interface.ifindex):
            return False
        with IPRoute() as ipr:
            return not _has_clsact(ipr, interface.ifindex)

    with _failures_explained(interface.label):
        return in_netns(interface.netns, look)


def _has_tcx(ifindex: int) -> bool:
    # STELLAR_TC=clsact: the way of older kernels on any kernel, for tests.
    if os.environ.get("STELLAR_TC") == "clsact":
        return False
    return libbpf.tcx_query(ifindex, libbpf.BPF_TCX_EGRESS) is not None


def attach(dataplane: Dataplane, attachment: Attachment) -> None:
    """Attach the programs, or swap them in place of an earlier controller's.

    On failure everything of ours is taken off again.

    Raises
    ------
    ConflictError
        A foreign XDP program or tc filter is in the way.
    UnsupportedError
        The driver or kernel cannot do what `attachment.mode` asks.
    """
    created_clsact = False

    def work() -> None:
        nonlocal created_clsact
        try:
            with IPRoute() as ipr:
                tcx = _has_tcx(attachment.ifindex)
                if not tcx and not _has_clsact(ipr, attachment.ifindex):
                    ipr.tc("add", "clsact", index=attachment.ifindex)
                    created_clsact = True
                attach_tc = _attach_tcx if tcx else partial(_attach_tc, ipr)
                detach_tc = _detach_tcx if tcx else partial(_detach_tc, ipr)
                if attachment.mode == "tc":
                    _detach_xdp(attachment)
                    attach_tc(dataplane, attachment, TC_INGRESS)
                else:
                    _attach_xdp(dataplane, attachment)
                    detach_tc(attachment, TC_INGRESS)
                attach_tc(dataplane, attachment, TC_EGRESS)
                if tcx and _has_clsact(ipr, attachment.ifindex):
                    # Left by a controller that did not use tcx: each packet would count twice.
                    for function in _TC_PARENTS:
                        _detach_tc(ipr, attachment, function)
        except BaseException:
            # What made attaching fail may stop this, too; the first error is the one to tell.
            with contextlib.suppress(NetlinkError, OSError):
                _take_off(attachment, created_clsact or attachment.clsact_is_ours)
            raise

    with _failures_explained(attachment.label):
        in_netns(attachment.netns, work)


@contextlib.contextmanager
def _failures_explained(label: str) -> Iterator[None]:
    """Turns what the kernel refuses into a StellarError."""
    try:
        yield
    except (NetlinkError, OSError) as error:
        code = error.code if isinstance(error, NetlinkError) else error.errno
        text = f"tc: {os.strerror(code or 0)}" if isinstance(error, NetlinkError) else str(error)
        if code in (errno.ENODEV, errno.ENXIO):
            raise UsageError(f"Interface {label} was deleted meanwhile.") from error
        raise UnsupportedError(
            f"Attaching to {label} is refused: {text}.",
            "The kernel needs tcx, or clsact and cls_bpf (CONFIG_NET_SCH_INGRESS, "
            "CONFIG_NET_CLS_BPF); see `controller doctor`.",
        ) from error


def _our_xdp_program(label: str, ifindex: int) -> tuple[int, int]:
    """Id (0: none) and XDP_ATTACHED_* mode; a ConflictError when it is somebody else's."""
    program_id, mode = libbpf.xdp_query(ifindex)
    if program_id and not is_ours(name := _program_name(program_id)):
        raise ConflictError(
            f"Interface {label} carries the XDP program {name!r} (id {program_id}, "
            f"{_XDP_MODE_NAMES.get(mode, 'offloaded')}) of somebody else.",
            "Detach that program, or observe this interface with --mode tc.",
        )
    return program_id, mode


def _attach_xdp(dataplane: Dataplane, attachment: Attachment) -> None:
    program_id, mode = _our_xdp_program(attachment.label, attachment.ifindex)
    old_fd: int | None = None
    if program_id:
        if _XDP_MODE_NAMES.get(mode) != attachment.mode:
            _detach_xdp(attachment)  # the kernel allows no change of mode in place
        else:
            old_fd = libbpf.prog_fd_by_id(program_id)
    fd = dataplane.load(XDP_INGRESS, attachment.port, attachment.acts)
    flags = _XDP_FLAGS[attachment.mode]
    try:
        if old_fd is None:
            flags |= libbpf.XDP_FLAGS_UPDATE_IF_NOEXIST
        libbpf.xdp_attach(attachment.ifindex, fd, flags, old_fd)
    except OSError as error:
        if error.errno in (errno.EBUSY, errno.EEXIST):
            raise ConflictError(
                f"Another XDP program came to {attachment.label} at the same time.", "Try again."
            ) from error
        raise UnsupportedError(
            f"XDP ({attachment.mode} mode) on {attachment.label}: {os.strerror(error.errno or 0)}.",
            "The driver may lack native XDP, or not for this MTU: use --mode generic or tc.",
        ) from error
    finally:
        os.close(fd)
        if old_fd is not None:
            os.close(old_fd)


def _attach_tc(ipr: IPRoute, dataplane: Dataplane, attachment: Attachment, function: str) -> None:
    parent = _TC_PARENTS[function]
    for priority, handle, name in _filter_names(ipr, attachment.ifindex, parent):
        if (priority, handle) == (_TC_PRIORITY, _TC_HANDLE) and not is_ours(name):
            raise ConflictError(
                f"Interface {attachment.label} has a tc filter {name!r} of somebody else with "
                f"priority {priority} and handle {handle:#x}.",
                "Give that filter another handle.",
            )
    fd = dataplane.load(function, attachment.port, attachment.acts)
    try:
        ipr.tc(
            "replace-filter",
            "bpf",
            index=attachment.ifindex,
            parent=parent,
            prio=_TC_PRIORITY,
            handle=_TC_HANDLE,
            protocol=_ETH_P_ALL,
            fd=fd,
            name=f"{KERNEL_NAMES[function]}_{attachment.port:04x}",
            direct_action=True,
        )
    finally:
        os.close(fd)


def _our_tcx_program(ifindex: int, function: str) -> int | None:
    """Descriptor of our program at a tcx hook, None when there is none."""
    for program_id in libbpf.tcx_query(ifindex, _TCX_HOOKS[function]) or ():
        if is_ours(_program_name(program_id)):
            return libbpf.prog_fd_by_id(program_id)
    return None


def _attach_tcx(dataplane: Dataplane, attachment: Attachment, function: str) -> None:
    old_fd = _our_tcx_program(attachment.ifindex, function)
    fd = dataplane.load(function, attachment.port, attachment.acts)
    try:
        libbpf.tcx_attach(attachment.ifindex, fd, _TCX_HOOKS[function], old_fd)
    finally:
        os.close(fd)
        if old_fd is not None:
            os.close(old_fd)


def _detach_tcx(attachment: Attachment, function: str) -> None:
    fd = _our_tcx_program(attachment.ifindex, function)
    if fd is None:
        return
    try:
        libbpf.tcx_detach(attachment.ifindex, fd, _TCX_HOOKS[function])
    finally:
        os.close(fd)


def _detach_xdp(attachment: Attachment) -> None:
    program_id, mode = libbpf.xdp_query(attachment.ifindex)
    if not program_id or not is_ours(_program_name(program_id)):
        return
    fd = libbpf.prog_fd_by_id(program_id)
    try:
        # With the program named, the kernel detaches that one or none.
        libbpf.xdp_attach(attachment.ifindex, -1, _XDP_FLAGS[_XDP_MODE_NAMES[mode]], fd)
    finally:
        os.close(fd)


def _detach_tc(ipr: IPRoute, attachment: Attachment, function: str) -> None:
    parent = _TC_PARENTS[function]
    for priority, handle, name in _filter_names(ipr, attachment.ifindex, parent):
        if is_ours(name):
            ipr.tc(
                "del-filter",
                "bpf",
                index=attachment.ifindex,
                parent=parent,
                prio=priority,
                handle=handle,
                protocol=_ETH_P_ALL,
            )


def _remove_clsact(attachment: Attachment) -> None:
    """Delete the clsact, unless somebody put a filter on it since."""
    with IPRoute() as ipr:
        if not _has_clsact(ipr, attachment.ifindex):
            return
        if any(_filter_names(ipr, attachment.ifindex, p) for p in _TC_PARENTS.values()):
            return
        ipr.tc("del", "clsact", index=attachment.ifindex)


def _take_off(attachment: Attachment, clsact_is_ours: bool) -> None:
    with IPRoute() as ipr:
        _detach_xdp(attachment)
        for function in _TCX_HOOKS:
            _detach_tcx(attachment, function)
        if not _has_clsact(ipr, attachment.ifindex):
            return
        for function in _TC_PARENTS:
            _detach_tc(ipr, attachment, function)
    if clsact_is_ours:
        _remove_clsact(attachment)


def detach(attachment: Attachment) -> None:
    """Take everything of ours off the interface; what is not there is no error."""
    try:
        in_netns(attachment.netns, lambda: _take_off(attachment, attachment.clsact_is_ours))
    except (NetlinkError, OSError) as error:
        code = error.code if isinstance(error, NetlinkError) else error.errno
        if code in (errno.ENODEV, errno.EINVAL, errno.ENOENT, errno.ENXIO):
            return  # the interface went away meanwhile, and its programs with it
        raise StellarError(
            f"Detaching from {attachment.label} failed: {os.strerror(code or 0)}.",
            "Run `controller stop` again; `tc filter show` and `ip link show` tell what is left.",
        ) from error


def detach_moved(attachment: Attachment, map_ids: Collection[int]) -> str:
    """Take our programs off an interface that was moved to another namespace.

    The kernel deletes the clsact of a moved interface, but leaves XDP and tcx. It may have
    a new name and index there, so the programs are known by the maps that they use. Only
    namespaces with a name can be searched.

    Returns
    -------
    str
        Where the interface is now; "" when it is not found.
    """

    def uses_our_maps(program_id: int) -> bool:
        fd = libbpf.prog_fd_by_id(program_id)
        try:
            info = libbpf.prog_info(fd)
        finally:
            os.close(fd)
        is_port = info.name.endswith(f"_{attachment.port:04x}")
        return is_ours(info.name) and is_port and not set(map_ids).isdisjoint(info.map_ids)

    def look() -> tuple[int, str] | None:
        for ifindex, name in socket.if_nameindex():
            programs = [libbpf.xdp_query(ifindex)[0]]
            for hook in _TCX_HOOKS.values():
                programs += libbpf.tcx_query(ifindex, hook) or ()
            if any(program_id and uses_our_maps(program_id) for program_id in programs):
                return ifindex, name
        return None

    for netns in ("", *list_netns()):
        # Another namespace may be deleted while it is searched.
        with contextlib.suppress(StellarError, OSError):
            found = in_netns(netns, look)
            if found:
                ifindex, name = found
                moved = replace(
                    attachment, netns=netns, interface=name, ifindex=ifindex, clsact_is_ours=False
                )
                detach(moved)
                return moved.label
    return ""


def _our_hooks(ifindex: int) -> dict[str, str]:
    """Hook -> name of our program, or another controller's, that is attached there now."""
    hooks = {}
    program_id, _ = libbpf.xdp_query(ifindex)
    if program_id and is_ours(name := _program_name(program_id)):
        hooks[XDP_INGRESS] = name
    for function, hook in _TCX_HOOKS.items():
        for program_id in libbpf.tcx_query(ifindex, hook) or ():
            if is_ours(name := _program_name(program_id)):
                hooks[function] = name
    with IPRoute() as ipr:
        if _has_clsact(ipr, ifindex):
            for function, parent in _TC_PARENTS.items():
                for _, _, name in _filter_names(ipr, ifindex, parent):
                    if is_ours(name):
                        hooks[function] = name
    return hooks
