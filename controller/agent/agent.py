"""The agent: attaches the dataplane, watches the interfaces, answers the control socket.

It never touches a packet. Its loop wakes for new-flow events (to learn their queue
pairs) and once a second (to see whether the interfaces are still there).
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from controller import __version__
from controller.agent.control import ControlServer, request
from controller.agent.state import RunDirectory, State
from controller.config import Config, InterfaceConfig
from controller.dataplane import attach as hooks
from controller.dataplane import interfaces, layout, libbpf, tables
from controller.dataplane.attachment import Attachment
from controller.dataplane.interfaces import Interface
from controller.dataplane.layout import Direction
from controller.dataplane.loader import Dataplane, compile_dataplane
from controller.dataplane.shim import kernel_version
from controller.errors import (
    ConflictError,
    NotRunningError,
    PrivilegeError,
    StellarError,
    UnsupportedError,
    UsageError,
)
from controller.observe.registry import pair_entries, parse_queue_pairs
from controller.observe.snapshot import QueuePair

log = logging.getLogger("stellar.agent")

MIN_KERNEL = (5, 18)
_WATCH_PERIOD_S = 1.0
# A queue pair is listed a moment before its first packet; many flows start together.
_REGISTRY_DELAY_S = 0.02
_REGISTRY_MIN_PERIOD_S = 0.2
_EXPIRY_PERIOD_S = 60.0
# RDMA devices and addresses may come after attaching.
_INSPECT_PERIOD_S = 5.0
_EVENTS_KEPT = 50
_GONE_QUEUE_PAIRS_KEPT = 4096


@dataclass
class PortState:
    """An attachment with what the agent knows about its interface."""

    attachment: Attachment
    interface: Interface
    retired_flows: int = 0
    retired_packets: int = 0
    retired_wire_bytes: int = 0
    queue_pairs: dict[int, QueuePair] = field(default_factory=dict)


def require_privileges() -> None:
    """Raise PrivilegeError unless this process may load and attach programs."""
    if os.geteuid() != 0:
        raise PrivilegeError(
            f"The controller runs as uid {os.geteuid()}; attaching BPF programs needs root.",
            "Use sudo. (`controller analyze` and `controller doctor` tell more.)",
        )


def require_kernel(release: str | None = None) -> None:
    """Raise UnsupportedError on a kernel that cannot run the programs.

    Ring buffer 5.8, coarse clock 5.11, multi-buffer XDP 5.18. Default: the running one.
    """
    found = kernel_version(release)
    if found < MIN_KERNEL:
        raise UnsupportedError(
            f"This kernel is {found[0]}.{found[1]}; {MIN_KERNEL[0]}.{MIN_KERNEL[1]} or newer is "
            "needed (multi-buffer XDP).",
            "Use a newer kernel. `controller analyze` needs one, too; in the lab kernel all "
            "works: scripts/lab run -- COMMAND.",
        )


def resident_bytes() -> int:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def notify_systemd(message: str) -> None:
    """Tell systemd (Type=notify) a state; does nothing when not started by it.

    The protocol of sd_notify(3): one datagram to $NOTIFY_SOCKET.
    """
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as connection,
    ):
        connection.sendto(message.encode(), address)


class Agent:
    """One controller of one host.

    Parameters
    ----------
    run
        Its run directory.
    config
        Interfaces and sizes.
    """

    def __init__(self, run: RunDirectory, config: Config) -> None:
        self._run = run
        self._config = config
        self._ports: dict[int, PortState] = {}
        # Left by an earlier controller and not adopted yet: still ours to clean up.
        self._leftovers: list[Attachment] = []
        self._guard = threading.RLock()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._stopping = threading.Event()
        self._events: deque[dict[str, Any]] = deque(maxlen=_EVENTS_KEPT)
        self._new_flows = 0
        self._registry_due_s: float | None = None
        self._registry_read_s = 0.0
        self._started_s = time.time()
        self._adopted = False
        self._dataplane: Dataplane | None = None
        self._server: ControlServer | None = None
        self._ring: libbpf.RingBuffer | None = None

    # ---- life ----

    def start(self) -> None:
        """Load, attach (or adopt) and begin to serve. On failure nothing stays attached."""
        require_privileges()
        require_kernel()
        self._run.create()
        self._run.lock()
        # From here on a signal must not leave half of it attached: run() sees it and ends.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._request_stop())
        try:
            previous = self._run.read_state()
            wanted = {(entry.netns, entry.name): entry for entry in self._config.interfaces}
            found = {key: interfaces.inspect(*key) for key in wanted}
            leftovers = self._living(previous)
            taken = {(a.netns, a.interface) for a in leftovers}
            for key, entry in wanted.items():
                hooks.check_free(found[key], entry.mode, adopting=key in taken)
            if not wanted and not leftovers:
                raise UsageError(
                    "No interface is named, and no earlier controller left one.",
                    "Name it: controller start -i [NETNS:]IF (`ip link` lists them), or "
                    "[[interface]] in --config FILE.",
                )
            self._dataplane = self._load(previous)
            self._leftovers = list(leftovers)
            self._drop_flows_except({attachment.port for attachment in leftovers})
            for attachment in leftovers:
                key = (attachment.netns, attachment.interface)
                if key in wanted:
                    attachment.mode = wanted[key].mode
                interface = found.get(key) or interfaces.inspect(*key)
                self._leftovers.remove(attachment)
                self._attach(attachment, interface)
            for key, entry in wanted.items():
                if key not in taken:
                    self._attach_new(found[key], entry.mode)
            self._ring = libbpf.RingBuffer(self._maps["events"], self._flow_event)
            self._server = ControlServer(
                self._run.socket_path,
                {
                    "status": self._handle_status,
                    "snapshot": self._handle_snapshot,
                    "attach": self._handle_attach,
                    "detach": self._handle_detach,
                    "stop": self._handle_stop,
                },
            )
            self._request_registry()
        except BaseException:
            self.shutdown()
            raise

    def run(self) -> None:
        """Serve until `stop` or a signal; then detach everything."""
        notify_systemd("READY=1")
        assert self._ring is not None
        watch_s = expiry_s = inspect_s = time.monotonic()
        try:
            while not self._stopping.is_set():
                now_s = time.monotonic()
                due_s = watch_s + _WATCH_PERIOD_S
                if self._registry_due_s is not None:
                    due_s = min(due_s, self._registry_due_s)
                ready, _, _ = select.select(
                    [self._ring.fileno(), self._wake_read], [], [], max(0.0, due_s - now_s)
                )
                if self._wake_read in ready:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake_read, 4096)
                if self._ring.fileno() in ready:
                    self._ring.consume()
                now_s = time.monotonic()
                with self._guard:
                    if self._registry_due_s is not None and now_s >= self._registry_due_s:
                        self._try(self._read_registry)
                    if now_s >= watch_s + _WATCH_PERIOD_S:
                        watch_s = now_s
                        self._try(self._watch)
                    if now_s >= inspect_s + _INSPECT_PERIOD_S:
                        inspect_s = now_s
                        self._try(self._inspect)
                    if now_s >= expiry_s + _EXPIRY_PERIOD_S:
                        expiry_s = now_s
                        self._try(self._expire)
        finally:
            notify_systemd("STOPPING=1")
            self.shutdown()

    def shutdown(self) -> None:
        """Detach everything of ours and leave no file behind. May be called twice."""
        if self._server:
            self._server.close()
            self._server = None
        with self._guard:
            failed: list[Attachment] = []
            for attachment in [p.attachment for p in self._ports.values()] + self._leftovers:
                try:
                    if interfaces.still_there(
                        attachment.netns, attachment.netns_inode, attachment.ifindex
                    ):
                        hooks.detach(attachment)
                    elif self._dataplane:
                        hooks.detach_moved(attachment, self._dataplane.map_ids.values())
                except (StellarError, OSError) as error:
                    log.error("%s", error)
                    failed.append(attachment)
            self._ports.clear()
            self._leftovers.clear()
            if self._ring:
                self._ring.close()
                self._ring = None
            if self._dataplane:
                if failed:
                    self._run.write_state(State(failed, self._dataplane.map_ids))
                else:
                    self._run.remove_state()
                self._dataplane.close()
                self._dataplane = None
        self._run.unlock()

    def _request_stop(self) -> None:
        self._stopping.set()
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b"x")

    @property
    def _maps(self) -> Mapping[str, int]:
        if self._dataplane is None:
            raise StellarError("The controller is stopping.")
        return self._dataplane.map_fds

    # ---- loading and adopting ----

    def _load(self, previous: State | None) -> Dataplane:
        artifact = compile_dataplane()
        if previous and previous.attachments:
            if previous.abi == layout.ABI:
                try:
                    dataplane = Dataplane(artifact, adopt=previous.map_ids)
                    self._adopted = True
                    self._note("adopted the flows of an earlier controller")
                    return dataplane
                except PrivilegeError:
                    raise
                except StellarError as error:
                    self._note(f"counters start anew: {error.message}")
            else:
                self._note(
                    f"counters start anew: the earlier controller's layout is {previous.abi}, "
                    f"this one's {layout.ABI}"
                )
        return Dataplane(artifact, self._config.observe.max_flows)

    def _living(self, previous: State | None) -> list[Attachment]:
        """Attachments of an earlier controller whose interface still exists."""
        living = []
        for attachment in previous.attachments if previous else []:
            if interfaces.still_there(attachment.netns, attachment.netns_inode, attachment.ifindex):
                living.append(attachment)
            else:
                self._note(f"{attachment.label} of an earlier controller is gone")
                if previous:
                    hooks.detach_moved(attachment, previous.map_ids.values())
        return living

    def _attach_new(self, interface: Interface, mode: str) -> Attachment:
        free = set(range(layout.MAX_PORTS)) - self._ports.keys()
        if not free:
            raise ConflictError(
                f"{layout.MAX_PORTS} interfaces are attached, the most that one controller takes.",
                "Detach one, or start a second controller with another --run-dir.",
            )
        attachment = Attachment(
            port=min(free),
            netns=interface.netns,
            netns_inode=interface.netns_inode,
            interface=interface.name,
            ifindex=interface.ifindex,
            mode=mode,
            clsact_is_ours=hooks.needs_own_clsact(interface),
            drops_before=interfaces.drop_counters(
                interface.netns, interface.name, interface.rdma_device
            ),
        )
        tables.clear_reasons(self._maps["reasons"], attachment.port)
        self._attach(attachment, interface)
        return attachment

    def _attach(self, attachment: Attachment, interface: Interface) -> None:
        assert self._dataplane is not None
        self._ports[attachment.port] = PortState(attachment, interface)
        self._save()  # before anything is attached: a crash must not hide it
        try:
            hooks.attach(self._dataplane, attachment)
        except BaseException:
            del self._ports[attachment.port]
            self._save()
            raise
        self._note(f"attached to {attachment.label} ({interface.kind}, {attachment.mode})")
        for caution in interfaces.cautions(interface, attachment.mode):
            log.warning("%s: %s", attachment.label, caution)  # and in `status`, as long as it holds

    def _save(self) -> None:
        assert self._dataplane is not None
        attachments = [port.attachment for port in self._ports.values()]
        self._run.write_state(State(attachments + self._leftovers, self._dataplane.map_ids))

    def _forget(self, port: PortState) -> None:
        """Clean up after a port whose interface is detached or gone."""
        del self._ports[port.attachment.port]
        self._drop_flows_except(self._ports.keys())
        self._save()

    def _drop_flows_except(self, numbers: Collection[int]) -> None:
        """Forget the flows of ports that are no more: the next one to get a number starts at 0."""
        keys, _ = tables.read_flows(self._maps["flows"])
        for key in keys[~np.isin(keys["port"], list(numbers))]:
            self._take_flow(key)

    def _take_flow(self, key: np.void) -> np.void | None:
        """Take a flow and its pair out of the dataplane; its last counters, if it was there."""
        libbpf.map_delete(self._maps["pairs"], key.tobytes())
        return tables.take_flow(self._maps["flows"], key)

    def _note(self, text: str) -> None:
        if self._events and self._events[-1]["event"] == text:
            return  # the same again, every second: once is enough
        log.info("%s", text)
        self._events.append({"time": round(time.time(), 3), "event": text})

    # ---- periodic work ----

    def _try(self, work: Callable[[], None]) -> None:
        """Do periodic work; what fails (an interface that goes meanwhile) is tried again."""
        try:
            work()
        except (StellarError, OSError) as error:
            self._note(f"{work.__name__.strip('_').replace('_', ' ')}: {error}")

    def _flow_event(self, _record: bytes) -> None:
        self._new_flows += 1
        self._request_registry()

    def _request_registry(self) -> None:
        if self._registry_due_s is None:
            self._registry_due_s = max(
                time.monotonic() + _REGISTRY_DELAY_S,
                self._registry_read_s + _REGISTRY_MIN_PERIOD_S,
            )

    def _read_registry(self) -> None:
        """Learn the queue pairs of all ports and tell the dataplane which flows pair."""
        self._registry_due_s = None
        for port in list(self._ports.values()):
            device, netns = port.interface.rdma_device, port.attachment.netns
            if not device:
                continue
            try:
                entries = interfaces.rdma_queue_pairs(netns, device)
            except StellarError:
                continue  # the namespace is being deleted; _watch() reports it
            listed = parse_queue_pairs(port.attachment.port, entries)
            numbers = {qp.local_qpn for qp in listed}
            for qp in port.queue_pairs.values():
                if qp.local_qpn not in numbers and qp.state != "gone":
                    port.queue_pairs[qp.local_qpn] = QueuePair(**asdict(qp) | {"state": "gone"})
            for qp in listed:
                port.queue_pairs.pop(qp.local_qpn, None)  # newest last
                port.queue_pairs[qp.local_qpn] = qp
            while len(port.queue_pairs) > _GONE_QUEUE_PAIRS_KEPT + len(listed):
                del port.queue_pairs[next(iter(port.queue_pairs))]
        keys, _ = tables.read_flows(self._maps["flows"])
        living = [
            qp
            for port in self._ports.values()
            for qp in port.queue_pairs.values()
            if qp.state != "gone"
        ]
        tables.write_pairs(self._maps["pairs"], pair_entries(keys, living))
        self._registry_read_s = time.monotonic()

    def _watch(self) -> None:
        for port in list(self._ports.values()):
            attachment = port.attachment
            if not interfaces.still_there(
                attachment.netns, attachment.netns_inode, attachment.ifindex
            ):
                assert self._dataplane is not None
                place = hooks.detach_moved(attachment, self._dataplane.map_ids.values())
                self._note(
                    f"{attachment.label} "
                    + (f"moved to {place}" if place else "vanished")
                    + "; its flows are dropped"
                )
                self._forget(port)

    def _inspect(self) -> None:
        for port in self._ports.values():
            attachment = port.attachment
            with contextlib.suppress(StellarError):  # just vanished: _watch() reports it
                interface = interfaces.inspect(attachment.netns, attachment.interface)
                if interface.ifindex != attachment.ifindex:
                    continue
                if interface.kind != port.interface.kind:
                    self._note(f"{attachment.label} is {interface.kind} now")
                    self._request_registry()
                port.interface = interface

    def _expire(self) -> None:
        idle_ns = self._config.observe.idle_flow_s * 1_000_000_000
        if not idle_ns:
            return
        keys, stats = tables.read_flows(self._maps["flows"])
        for key in keys[stats["last_ns"] + idle_ns < time.monotonic_ns()]:
            taken = self._take_flow(key)
            port = self._ports.get(int(key["port"]))
            if taken is not None and port is not None:
                port.retired_flows += 1
                port.retired_packets += int(taken["packets"])
                port.retired_wire_bytes += int(taken["wire_bytes"])

    # ---- requests ----

    def _describe(self, port: PortState) -> dict[str, Any]:
        attachment, interface = port.attachment, port.interface
        try:
            drops = interfaces.drop_counters(
                attachment.netns, attachment.interface, interface.rdma_device
            )
        except (StellarError, OSError):
            drops = {}
        return {
            "port": attachment.port,
            "interface": attachment.label,
            "netns": attachment.netns,
            "name": attachment.interface,
            "kind": interface.kind,
            "mode": attachment.mode,
            "rdma_device": interface.rdma_device,
            "cautions": interfaces.cautions(interface, attachment.mode),
            "mtu_bytes": interface.mtu_bytes,
            "addresses": list(interface.addresses),
            "drops": {
                name: value - attachment.drops_before.get(name, 0) for name, value in drops.items()
            },
            "frames": {
                direction.name.lower(): {
                    reason.name.lower(): count
                    for reason, count in tables.read_reasons(
                        self._maps["reasons"], attachment.port, direction
                    ).items()
                }
                for direction in Direction
            },
            "retired_flows": port.retired_flows,
            "retired_packets": port.retired_packets,
            "retired_wire_bytes": port.retired_wire_bytes,
        }

    def _handle_status(self, _arguments: Mapping[str, Any]) -> tuple[dict[str, Any], list[int]]:
        with self._guard:
            keys, _ = tables.read_flows(self._maps["flows"])
            assert self._dataplane is not None
            return {
                "running": True,
                "version": __version__,
                "pid": os.getpid(),
                "run_dir": str(self._run.path),
                "started": round(self._started_s, 3),
                "uptime_s": round(time.time() - self._started_s, 1),
                "resident_bytes": resident_bytes(),
                "adopted": self._adopted,
                "flows": len(keys),
                "max_flows": self._dataplane.max_flows,
                "new_flow_events": self._new_flows,
                "interfaces": [self._describe(port) for port in self._ports.values()],
                "events": list(self._events),
            }, []

    def _handle_snapshot(self, _arguments: Mapping[str, Any]) -> tuple[dict[str, Any], list[int]]:
        with self._guard:
            if any(not port.interface.rdma_device for port in self._ports.values()):
                self._inspect()
            self._read_registry()
            return {
                "taken_ns": time.monotonic_ns(),
                "interfaces": [self._describe(port) for port in self._ports.values()],
                "queue_pairs": [
                    asdict(qp) for port in self._ports.values() for qp in port.queue_pairs.values()
                ],
                # A copy, as shutdown() may close ours before this one is on its way.
            }, [os.dup(self._maps["flows"])]

    def _target(self, arguments: Mapping[str, Any]) -> InterfaceConfig:
        return InterfaceConfig.parse(
            str(arguments["interface"]), str(arguments.get("mode", "native"))
        )

    def _find(self, entry: InterfaceConfig) -> PortState | None:
        for port in self._ports.values():
            attachment = port.attachment
            if (attachment.netns, attachment.interface) == (entry.netns, entry.name):
                return port
        return None

    def _handle_attach(self, arguments: Mapping[str, Any]) -> tuple[dict[str, Any], list[int]]:
        entry = self._target(arguments)
        with self._guard:
            if self._find(entry):
                raise ConflictError(
                    f"{arguments['interface']} is attached already.",
                    "Detach it first to change its mode.",
                )
            interface = interfaces.inspect(entry.netns, entry.name)
            hooks.check_free(interface, entry.mode)
            attachment = self._attach_new(interface, entry.mode)
            return {"attached": self._describe(self._ports[attachment.port])}, []

    def _handle_detach(self, arguments: Mapping[str, Any]) -> tuple[dict[str, Any], list[int]]:
        entry = self._target(arguments)
        with self._guard:
            port = self._find(entry)
            if port is None:
                attached = ", ".join(p.attachment.label for p in self._ports.values()) or "none"
                raise UsageError(f"{arguments['interface']} is not attached; attached: {attached}.")
            hooks.detach(port.attachment)
            self._forget(port)
            self._note(f"detached from {port.attachment.label}")
            return {"detached": port.attachment.label}, []

    def _handle_stop(self, _arguments: Mapping[str, Any]) -> tuple[dict[str, Any], list[int]]:
        with self._guard:
            labels = [port.attachment.label for port in self._ports.values()]
        self._request_stop()
        return {"stopping": True, "pid": os.getpid(), "detaching": labels}, []


def clean_up(run: RunDirectory, progress: Callable[[str], None] = lambda _: None) -> list[str]:
    """Detach what a dead controller left; returns the interfaces it was taken off.

    Raises
    ------
    ConflictError
        A controller is alive in this run directory.
    """
    require_privileges()
    if not run.path.is_dir():
        return []
    run.lock()
    try:
        state = run.read_state() or State()
        cleaned = []
        for attachment in state.attachments:
            if interfaces.still_there(attachment.netns, attachment.netns_inode, attachment.ifindex):
                progress(attachment.label)
                hooks.detach(attachment)
                cleaned.append(attachment.label)
            elif place := hooks.detach_moved(attachment, state.map_ids.values()):
                cleaned.append(place)
        run.remove_state()
        return cleaned
    finally:
        run.unlock()


def end(run: RunDirectory, timeout_s: float) -> tuple[bool, list[str]]:
    """End the controller of a run directory, or clean up after a dead one.

    Returns
    -------
    tuple
        Whether one ran, and the interfaces that it was taken off.

    Raises
    ------
    ConflictError
        One is alive there, but answers nothing within `timeout_s`.
    StellarError
        It did not end within `timeout_s`.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            left_s = max(0.1, deadline_s - time.monotonic())
            answer, _ = request(run.socket_path, "stop", timeout_s=left_s)
            break
        except NotRunningError:
            try:
                return False, clean_up(run)
            except ConflictError:  # it is starting, or ending already
                if time.monotonic() >= deadline_s:
                    raise
                time.sleep(0.1)
    if not wait_for_end(int(answer["pid"]), deadline_s - time.monotonic()):
        raise StellarError(
            f"The controller (pid {answer['pid']}) did not end within {timeout_s:g} s.",
            f"Its log may tell why: {run.log_path}. Then: kill -9, and stop again.",
        )
    return True, list(answer["detaching"])


def wait_for_end(pid: int, timeout_s: float) -> bool:
    """Wait until a process has ended; False after `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        ready, _, _ = select.select([pidfd], [], [], max(0.0, deadline_s - time.monotonic()))
        return bool(ready)
    finally:
        os.close(pidfd)
