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
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from controller.agent.control import ControlServer
from controller.agent.maps import clear_port
from controller.agent.planner import Planner
from controller.agent.requests import Requests
from controller.agent.requirements import require_kernel, require_privileges
from controller.agent.state import RunDirectory, State
from controller.agent.steering import Saved, Steering, read_saved
from controller.config import Config, InterfaceConfig
from controller.dataplane import attach as hooks
from controller.dataplane import interfaces, layout, libbpf, tables
from controller.dataplane.attachment import Attachment
from controller.dataplane.interfaces import Interface
from controller.dataplane.loader import Dataplane, compile_dataplane
from controller.errors import (
    ConflictError,
    PrivilegeError,
    StellarError,
    UsageError,
)
from controller.observe.registry import pair_entries, parse_queue_pairs
from controller.observe.snapshot import QueuePair
from controller.ops.qdisc_state import QdiscState, read_state
from controller.priority.ports import PortFacts

log = logging.getLogger("stellar.agent")

_WATCH_PERIOD_S = 1.0
# A queue pair is listed a moment before its first packet; many flows start together.
_REGISTRY_DELAY_S = 0.02
_REGISTRY_MIN_PERIOD_S = 0.2
_EXPIRY_PERIOD_S = 60.0
# RDMA devices and addresses may come after attaching.
_INSPECT_PERIOD_S = 5.0
_EVENTS_KEPT = 50
_NICENESS = -10
_SWITCH_S = 0.0005
_GONE_QUEUE_PAIRS_KEPT = 4096


@dataclass
class PortState:
    """An attachment with what the agent knows about its interface."""

    attachment: Attachment
    interface: Interface
    entry: InterfaceConfig
    qdisc: QdiscState | None = None
    retired_flows: int = 0
    retired_packets: int = 0
    retired_wire_bytes: int = 0
    queue_pairs: dict[int, QueuePair] = field(default_factory=dict)


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


def be_prompt() -> None:
    """Ask for the processor before those that train: a plan is due within a millisecond.

    The agent needs it for a few per cent of the time. Where it may not (in a container), it goes on
    as it is.
    """
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, _NICENESS)
    # A thread that works on a long answer lets the planner in after this, not after 5 ms.
    sys.setswitchinterval(_SWITCH_S)


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
        self.run_directory = run
        self._config = config
        self.ports: dict[int, PortState] = {}
        # Left by an earlier controller and not adopted yet: still ours to clean up.
        self._leftovers: list[Attachment] = []
        self._steering: Steering | None = None
        # Of an earlier controller, by namespace and name: it holds where nobody says otherwise.
        self._earlier_entries: dict[tuple[str, str], InterfaceConfig] = {}
        self.guard = threading.RLock()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._stopping = threading.Event()
        self.events: deque[dict[str, Any]] = deque(maxlen=_EVENTS_KEPT)
        self.new_flows = 0
        self._registry_due_s: float | None = None
        self._registry_read_s = 0.0
        self.started_s = time.time()
        self.adopted = False
        self.dataplane: Dataplane | None = None
        self._server: ControlServer | None = None
        self._planner: Planner | None = None
        # Records of new flows, from the planner's thread to ours.
        self._flow_events: deque[bytes] = deque()

    # ---- life ----

    def start(self) -> None:
        """Load, attach (or adopt) and begin to serve. On failure nothing stays attached."""
        require_privileges()
        require_kernel()
        self.run_directory.create()
        self.run_directory.lock()
        # From here on a signal must not leave half of it attached: run() sees it and ends.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self.request_stop())
        try:
            previous = self.run_directory.read_state()
            earlier = self._read_control(previous)
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
            self.dataplane = self._load(previous)
            self._leftovers = list(leftovers)
            self._steering = Steering(self._config, self.maps, self.note)
            self._steering.begin(earlier, self.adopted)
            self._drop_flows_except({attachment.port for attachment in leftovers})
            for attachment in leftovers:
                key = (attachment.netns, attachment.interface)
                if key in wanted:
                    attachment.mode = wanted[key].mode
                interface = found.get(key) or interfaces.inspect(*key)
                self._leftovers.remove(attachment)
                try:
                    said = wanted.get(key) or self._earlier_entries.get(key)
                    self._attach(attachment, interface, said or InterfaceConfig(*key))
                except BaseException:
                    self._leftovers.append(attachment)  # shutdown() takes it off
                    raise
            for key, entry in wanted.items():
                if key not in taken:
                    self.attach_new(found[key], entry)
            self.steering.check_rates()
            self._planner = Planner(
                self.steering,
                self.maps,
                self.steering.policy,
                self._config.priority.max_slowdown,
                self._flow_event,
                self.note,
            )
            self.jobs_changed()
            be_prompt()  # before its thread begins, which inherits it
            self._planner.start()
            self._server = ControlServer(
                self.run_directory.socket_path,
                Requests(self).handlers(),
            )
            self._request_registry()
        except BaseException:
            self.shutdown()
            raise

    def run(self) -> None:
        """Serve until `stop` or a signal; then detach everything."""
        notify_systemd("READY=1")
        watch_s = expiry_s = inspect_s = time.monotonic()
        try:
            while not self._stopping.is_set():
                now_s = time.monotonic()
                due_s = watch_s + _WATCH_PERIOD_S
                if self._registry_due_s is not None:
                    due_s = min(due_s, self._registry_due_s)
                ready, _, _ = select.select([self._wake_read], [], [], max(0.0, due_s - now_s))
                if ready:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake_read, 4096)
                self._take_flow_events()
                now_s = time.monotonic()
                with self.guard:
                    if self._registry_due_s is not None and now_s >= self._registry_due_s:
                        self._try(self.read_registry)
                    if now_s >= watch_s + _WATCH_PERIOD_S:
                        watch_s = now_s
                        self._try(self._watch)
                    if now_s >= inspect_s + _INSPECT_PERIOD_S:
                        inspect_s = now_s
                        self._try(self.inspect)
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
        with self.guard:
            failed: list[Attachment] = []
            saved = self._saved_control()
            for attachment in [p.attachment for p in self.ports.values()] + self._leftovers:
                try:
                    if interfaces.still_there(
                        attachment.netns, attachment.netns_inode, attachment.ifindex
                    ):
                        hooks.detach(attachment)
                    elif self.dataplane:
                        hooks.detach_moved(attachment, self.dataplane.map_ids.values())
                except (StellarError, OSError) as error:
                    log.error("%s", error)
                    failed.append(attachment)
            self.ports.clear()
            self._leftovers.clear()
            if self._planner:
                self._planner.close()
                self._planner = None
            if self.dataplane:
                if failed:
                    self.run_directory.write_state(
                        State(failed, self.dataplane.map_ids, control=saved)
                    )
                else:
                    self.run_directory.remove_state()
                self.dataplane.close()
                self.dataplane = None
        self.run_directory.unlock()

    def request_stop(self) -> None:
        """Let `run` end."""
        self._stopping.set()
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b"x")

    @property
    def maps(self) -> Mapping[str, int]:
        """Descriptors of the dataplane's maps by name."""
        if self.dataplane is None:
            raise StellarError("The controller is stopping.")
        return self.dataplane.map_fds

    # ---- loading and adopting ----

    def _load(self, previous: State | None) -> Dataplane:
        artifact = compile_dataplane()
        if previous and previous.attachments:
            if previous.abi == layout.ABI:
                try:
                    dataplane = Dataplane(artifact, adopt=previous.map_ids)
                    self.adopted = True
                    self.note("adopted the flows of an earlier controller")
                    return dataplane
                except PrivilegeError:
                    raise
                except StellarError as error:
                    self.note(f"counters start anew: {error.message}")
            else:
                self.note(
                    f"counters start anew: the earlier controller's layout is {previous.abi}, "
                    f"this one's {layout.ABI}"
                )
        return Dataplane(artifact, self._config.observe.max_flows)

    def _read_control(self, previous: State | None) -> Saved:
        """What an earlier controller did, read before anything is touched.

        Raises
        ------
        StellarError
            The state file is damaged.
        """
        control = previous.control if previous else {}
        try:
            for document in control.get("interfaces", ()):
                entry = InterfaceConfig(**document)
                entry.check()
                self._earlier_entries[entry.netns, entry.name] = entry
            return read_saved(control)
        except (StellarError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise StellarError(
                f"State file {self.run_directory.state_path} is damaged: {error!r}.",
                "Look what is attached (`ip link`, `tc filter show`), then delete the file.",
            ) from error

    def _living(self, previous: State | None) -> list[Attachment]:
        """Attachments of an earlier controller whose interface still exists."""
        living = []
        for attachment in previous.attachments if previous else []:
            if interfaces.still_there(attachment.netns, attachment.netns_inode, attachment.ifindex):
                living.append(attachment)
            else:
                self.note(f"{attachment.label} of an earlier controller is gone")
                if previous:
                    hooks.detach_moved(attachment, previous.map_ids.values())
        return living

    def configured(self, entry: InterfaceConfig) -> InterfaceConfig:
        """What the configuration file says of an interface that is attached at run time."""
        for known in self._config.interfaces:
            if (known.netns, known.name) == (entry.netns, entry.name):
                return replace(known, mode=entry.mode)
        return entry

    def attach_new(self, interface: Interface, entry: InterfaceConfig) -> Attachment:
        """Attach to an interface; StellarError, and nothing is attached, when that fails."""
        free = set(range(layout.MAX_PORTS)) - self.ports.keys()
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
            mode=entry.mode,
            clsact_is_ours=hooks.needs_own_clsact(interface),
            drops_before=interfaces.drop_counters(
                interface.netns, interface.name, interface.rdma_device
            ),
        )
        tables.clear_reasons(self.maps["reasons"], attachment.port)
        clear_port(self.maps, attachment.port)
        self._attach(attachment, interface, entry)
        return attachment

    def _attach(self, attachment: Attachment, interface: Interface, entry: InterfaceConfig) -> None:
        assert self.dataplane is not None
        port = PortState(attachment, interface, entry)
        self._write_control(port)
        attachment.acts = self._wants_control(port)
        self.ports[attachment.port] = port
        self.save()  # before anything is attached: a crash must not hide it
        try:
            hooks.attach(self.dataplane, attachment)
        except BaseException:
            del self.ports[attachment.port]
            self.steering.forget_port(attachment.port)
            self.save()
            raise
        self.note(
            f"attached to {attachment.label} ({interface.kind}, {attachment.mode}): "
            f"{interfaces.ABILITIES[interface.kind]}"
        )
        for caution in self.cautions(port):
            log.warning("%s: %s", attachment.label, caution)  # and in `status`, as long as it holds

    # ---- control ----

    @property
    def steering(self) -> Steering:
        """Jobs and classes; there once the agent has started."""
        if self._steering is None:
            raise StellarError("The controller is starting or stopping.")
        return self._steering

    @property
    def planner(self) -> Planner:
        """Predictions and plans; there once the agent has started."""
        if self._planner is None:
            raise StellarError("The controller is starting or stopping.")
        return self._planner

    def jobs_changed(self) -> None:
        """Tell the planner which jobs there are."""
        self.planner.jobs_changed(self.steering.jobs.values())
        self.steering.set_policy_paces(self.planner.paces)

    def _saved_control(self) -> dict[str, Any]:
        if not self._steering:
            return {}
        entries = [port.entry for port in self.ports.values()]
        for attachment in self._leftovers:
            if entry := self._earlier_entries.get((attachment.netns, attachment.interface)):
                entries.append(entry)
        return self._steering.to_json() | {"interfaces": [asdict(entry) for entry in entries]}

    def _wants_control(self, port: PortState) -> bool:
        return self.steering.acts and port.interface.kind != "bypass"

    def _write_control(self, port: PortState) -> None:
        """Write what is done on a port, from what it is and what its queues are now."""
        interface = port.interface
        port.qdisc = read_state(interface)
        facts = PortFacts(
            kind=interface.kind,
            speed_Bps=interface.speed_Bps,
            tree_rate_Bps=port.qdisc.rate_Bps if port.qdisc.kind == "htb" else 0,
            has_fq=port.qdisc.all_fq,
        )
        known = self.steering.port(port.attachment.port)
        if known is None or known.facts != facts:
            self.steering.write_port(port.attachment.port, port.entry, facts, port.attachment.label)

    def apply_control(self) -> None:
        """Let every port act or only observe, as there are jobs now; swaps programs in place.

        A port that fails goes on as it was; the others are switched, then its error is raised.
        """
        assert self.dataplane is not None
        failure: StellarError | None = None
        for port in self.ports.values():
            wanted = self._wants_control(port)
            if port.attachment.acts == wanted:
                continue
            port.attachment.acts = wanted
            try:
                hooks.attach(self.dataplane, port.attachment)
            except StellarError as error:
                failure = failure or error
                # It was taken off: observing must go on.
                port.attachment.acts = not wanted
                with contextlib.suppress(StellarError):  # vanished: _watch() reports it
                    hooks.attach(self.dataplane, port.attachment)
                continue
            what = "acts on packets of jobs" if wanted else "observes only"
            self.note(f"{port.attachment.label} {what}")
        self.save()
        if failure:
            raise failure

    def cautions(self, port: PortState) -> list[str]:
        """What a user should know about this interface."""
        result = interfaces.cautions(port.interface, port.attachment.mode)
        control = self.steering.port(port.attachment.port)
        if control and self.steering.acts:
            result += [f"not done here: {text}" for text in control.plan.missing]
        if port.qdisc and port.qdisc.horizon_drops:
            result.append(
                f"fq dropped {port.qdisc.horizon_drops} packets that were to depart beyond its "
                "horizon: make control.horizon shorter, or fq's longer"
            )
        return result

    def save(self) -> None:
        """Write the state file: what a later controller takes over."""
        assert self.dataplane is not None
        attachments = [port.attachment for port in self.ports.values()]
        self.run_directory.write_state(
            State(
                attachments + self._leftovers, self.dataplane.map_ids,
                control=self._saved_control(),
            )
        )  # fmt: skip

    def forget(self, port: PortState) -> None:
        """Clean up after a port whose interface is detached or gone."""
        del self.ports[port.attachment.port]
        self._drop_flows_except(self.ports.keys())
        self.steering.forget_port(port.attachment.port)
        self.save()

    def _drop_flows_except(self, numbers: Collection[int]) -> None:
        """Forget the flows of ports that are no more: the next one to get a number starts at 0."""
        keys, _ = tables.read_flows(self.maps["flows"])
        for key in keys[~np.isin(keys["port"], list(numbers))]:
            self._take_flow(key)

    def _take_flow(self, key: np.void) -> np.void | None:
        """Take a flow and its pair out of the dataplane; its last counters, if it was there."""
        libbpf.map_delete(self.maps["pairs"], key.tobytes())
        self.steering.flows.forget(key.tobytes())
        return tables.take_flow(self.maps["flows"], key)

    def note(self, text: str) -> None:
        """Log what a user should read, and keep it for `status`."""
        if self.events and self.events[-1]["event"] == text:
            return  # the same again, every second: once is enough
        log.info("%s", text)
        self.events.append({"time": round(time.time(), 3), "event": text})

    # ---- periodic work ----

    def _try(self, work: Callable[[], None]) -> None:
        """Do periodic work; what fails (an interface that goes meanwhile) is tried again."""
        try:
            work()
        except (StellarError, OSError) as error:
            self.note(f"{work.__name__.strip('_').replace('_', ' ')}: {error}")

    def _flow_event(self, record: bytes) -> None:
        """A flow is new; called in the planner's thread, which must not wait for ours."""
        self._flow_events.append(record)
        self._wake()

    def _take_flow_events(self) -> None:
        while self._flow_events:
            record = self._flow_events.popleft()
            self.new_flows += 1
            with self.guard:
                key = np.frombuffer(record, layout.FLOW_EVENT)[0]["key"]
                self.steering.flows.match_early(key)
            self._request_registry()

    def _request_registry(self) -> None:
        if self._registry_due_s is None:
            self._registry_due_s = max(
                time.monotonic() + _REGISTRY_DELAY_S,
                self._registry_read_s + _REGISTRY_MIN_PERIOD_S,
            )

    def read_registry(self) -> None:
        """Learn the queue pairs of all ports and tell the dataplane which flows pair."""
        self._registry_due_s = None
        for port in list(self.ports.values()):
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
        keys, stats = tables.read_flows(self.maps["flows"])
        living = [
            qp
            for port in self.ports.values()
            for qp in port.queue_pairs.values()
            if qp.state != "gone"
        ]
        pairs = pair_entries(keys, living)
        tables.write_pairs(self.maps["pairs"], pairs)
        self.steering.flows.match(keys, stats, pairs, living)
        self.steering.count_flows()
        self._registry_read_s = time.monotonic()

    def _watch(self) -> None:
        for port in list(self.ports.values()):
            attachment = port.attachment
            if not interfaces.still_there(
                attachment.netns, attachment.netns_inode, attachment.ifindex
            ):
                assert self.dataplane is not None
                place = hooks.detach_moved(attachment, self.dataplane.map_ids.values())
                self.note(
                    f"{attachment.label} "
                    + (f"moved to {place}" if place else "vanished")
                    + "; its flows are dropped"
                )
                self.forget(port)
        self.steering.watch()

    def inspect(self) -> None:
        """Look at the interfaces and their queues again."""
        for port in self.ports.values():
            attachment = port.attachment
            try:
                interface = interfaces.inspect(attachment.netns, attachment.interface)
            except StellarError:
                continue  # just vanished: _watch() reports it
            if interface.ifindex != attachment.ifindex:
                continue
            if interface.kind != port.interface.kind:
                self.note(f"{attachment.label} is {interface.kind} now")
                self._request_registry()
            port.interface = interface
            try:
                self._write_control(port)
            except StellarError as error:
                self.note(f"{attachment.label}: {error}")
        if any(port.attachment.acts != self._wants_control(port) for port in self.ports.values()):
            self.apply_control()

    def _expire(self) -> None:
        idle_ns = self._config.observe.idle_flow_s * 1_000_000_000
        if not idle_ns:
            return
        keys, stats = tables.read_flows(self.maps["flows"])
        for key in keys[stats["last_ns"] + idle_ns < time.monotonic_ns()]:
            taken = self._take_flow(key)
            port = self.ports.get(int(key["port"]))
            if taken is not None and port is not None:
                port.retired_flows += 1
                port.retired_packets += int(taken["packets"])
                port.retired_wire_bytes += int(taken["wire_bytes"])
