"""Which job each outgoing flow belongs to, and its slot in the dataplane."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from controller.agent import maps
from controller.agent.job_state import JobState
from controller.agent.processes import read_process
from controller.dataplane import layout
from controller.dataplane.layout import Direction
from controller.observe.snapshot import QueuePair
from controller.priority.jobs import FlowFacts, Job, ProcessFacts, match_job, needs_process


@dataclass
class FlowState:
    """An outgoing flow as the rules see it. ``slot`` 0: it belongs to no job.

    ``is_final``: nothing that is not known yet could change the decision; ``owner``: local
    queue pair and process that it was made for.
    """

    job: str = ""
    slot: int = 0
    is_final: bool = False
    owner: tuple[int, int] | None = None


class FlowAssignments:
    """Flows of the jobs of one controller.

    Parameters
    ----------
    fds
        Maps by name.
    jobs
        The steering's own, which change.
    env_variable
        Variable that names a process's job.
    is_forwarded
        Whether a port only forwards: queue pairs of its flows are never known.
    note
        Gets what a user should read.
    """

    def __init__(
        self,
        fds: Mapping[str, int],
        jobs: Mapping[str, JobState],
        env_variable: str,
        is_forwarded: Callable[[int], bool],
        note: Callable[[str], None],
    ) -> None:
        self._fds = fds
        self._jobs = jobs
        self._env_variable = env_variable
        self._is_forwarded = is_forwarded
        self._note = note
        self._flows: dict[bytes, FlowState] = {}
        self._free_slots = list(range(layout.MAX_CONTROLS - 1, 0, -1))
        self._is_full = False

    def adopt(self) -> None:
        """Take over what an earlier controller assigned, where its job is still there."""
        names = {state.number: name for name, state in self._jobs.items()}
        taken = set()
        for key, slot in maps.read_assignments(self._fds).items():
            number = int(maps.read_control(self._fds, slot)["job"])
            if number in names:
                self._flows[key] = FlowState(names[number], slot)
                self._jobs[names[number]].was_matched = True
                taken.add(slot)
            else:
                maps.unassign(self._fds, key)
                maps.write_control(self._fds, slot, 0)
        self._free_slots = [slot for slot in self._free_slots if slot not in taken]
        # The earlier one may have died between an assignment and its epoch.
        maps.begin_epoch(self._fds)

    def count(self, exactly: Collection[str]) -> None:
        """Note on which ports each job has flows, and how many send.

        Parameters
        ----------
        exactly
            Jobs of which flows that only answer must not count: a look at each flow.
        """
        ports: dict[str, set[int]] = {}
        senders: dict[str, int] = {}
        for key, flow in self._flows.items():
            if not flow.slot:
                continue
            ports.setdefault(flow.job, set()).add(_port_of(key))
            if flow.job in exactly and not int(maps.read_control(self._fds, flow.slot)["packets"]):
                continue
            senders[flow.job] = senders.get(flow.job, 0) + 1
        for name, state in self._jobs.items():
            state.ports = frozenset(ports.get(name, ()))
            state.senders = senders.get(name, 0)

    def senders(self, name: str) -> int:
        """How many of a job's outgoing flows have sent data (the others carry ACKs only)."""
        return sum(
            flow.job == name and int(maps.read_control(self._fds, flow.slot)["packets"]) > 0
            for flow in self._flows.values()
            if flow.slot
        )

    def match_anew(self) -> None:
        """Rules have changed: every flow is decided again."""
        for flow in self._flows.values():
            flow.is_final = False

    def of_job(self, name: str) -> dict[bytes, int]:
        """Flow key -> slot of a job's outgoing flows."""
        return {key: flow.slot for key, flow in self._flows.items() if flow.job == name}

    def match_early(self, key: np.void) -> None:
        """A new flow: decide at once if addresses and its QPN are all that counts for it."""
        if not self._jobs or key["direction"] != Direction.EGRESS:
            return
        facts = FlowFacts(*_addresses(key), int(key["dqpn"]), None, None)
        for state in self._jobs.values():
            if needs_process(state.job):
                return  # it may be this one's
            if match_job([state.job], facts, self._env_variable):
                if self._decide(key.tobytes(), state.job, is_final=True):
                    maps.begin_epoch(self._fds)
                return
            if state.job.match.qpn:
                return  # its local end is not known yet

    def match(
        self,
        keys: np.ndarray,
        stats: np.ndarray,
        pairs: Mapping[bytes, int],
        queue_pairs: Iterable[QueuePair],
    ) -> None:
        """Decide which job each outgoing flow belongs to, where it is not decided yet.

        Parameters
        ----------
        keys, stats
            The flow table, dtype FLOW_KEY and FLOW_STATS, shape (n,).
        pairs
            Flow key -> QPN of the opposite direction: of an outgoing flow, the local one.
        queue_pairs
            Of this host.
        """
        if not self._jobs and not self._flows:
            return
        owners = {(qp.port, qp.local_qpn): qp for qp in queue_pairs}
        processes: dict[int, ProcessFacts | None] = {}
        jobs = [state.job for state in self._jobs.values()]
        outgoing = np.flatnonzero(keys["direction"] == Direction.EGRESS)
        by_addresses = not any(needs_process(job) or job.match.qpn for job in jobs)
        changed = False
        try:
            for index in outgoing:
                key = keys[index]
                raw = key.tobytes()
                flow = self._flows.get(raw)
                local_qpn = pairs.get(raw) or int(stats[index]["source_qpn"]) or None
                owner = owners.get((int(key["port"]), local_qpn)) if local_qpn else None
                # The peer's queue pair number may meet another one of ours by now.
                identity = (owner.local_qpn, owner.pid) if owner else None
                if flow and flow.is_final and identity in (None, flow.owner):
                    continue
                process = None
                if owner and owner.pid:
                    if owner.pid not in processes:
                        processes[owner.pid] = read_process(owner.pid)
                    process = processes[owner.pid]
                facts = FlowFacts(*_addresses(key), int(key["dqpn"]), local_qpn, process)
                job = match_job(jobs, facts, self._env_variable)
                # Queue pairs of traffic that is only forwarded are never known.
                is_final = by_addresses or process is not None
                is_final |= self._is_forwarded(int(key["port"]))
                changed |= self._decide(raw, job, is_final)
                self._flows[raw].owner = identity
        finally:
            if changed:
                maps.begin_epoch(self._fds)

    def _decide(self, key: bytes, job: Job | None, is_final: bool) -> bool:
        """Note a decision; whether it changes an assignment."""
        flow = self._flows.setdefault(key, FlowState())
        name = job.name if job else ""
        if job:
            self._jobs[name].was_matched = True
        if flow.job == name:
            flow.is_final = is_final
            return False
        if not job:
            self._release(key, flow)
            flow.is_final = is_final
            return True
        if not flow.slot:
            if not self._free_slots:
                if not self._is_full:
                    self._note(
                        f"{layout.MAX_CONTROLS - 1} flows belong to jobs, the most that are "
                        "steered; others are left alone"
                    )
                self._is_full = True
                return False
            flow.slot = self._free_slots.pop()
        maps.write_control(self._fds, flow.slot, self._jobs[name].number)
        maps.assign(self._fds, key, flow.slot)
        flow.job, flow.is_final = name, is_final
        return True

    def _release(self, key: bytes, flow: FlowState) -> None:
        maps.unassign(self._fds, key)
        if flow.slot:
            maps.write_control(self._fds, flow.slot, 0)
            self._free_slots.append(flow.slot)
            self._is_full = False
        flow.job, flow.slot = "", 0

    def forget(self, key: bytes) -> None:
        """A flow was taken out of the table."""
        flow = self._flows.pop(key, None)
        if flow:
            self._release(key, flow)


def _port_of(key: bytes) -> int:
    return int(np.frombuffer(key, layout.FLOW_KEY)[0]["port"])


def _addresses(
    key: np.void,
) -> tuple[
    ipaddress.IPv4Address | ipaddress.IPv6Address, ipaddress.IPv4Address | ipaddress.IPv6Address
]:
    return (
        ipaddress.IPv6Address(key["saddr"].tobytes()),
        ipaddress.IPv6Address(key["daddr"].tobytes()),
    )
