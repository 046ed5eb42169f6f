"""The agent's hand on the dataplane: classes, jobs, their flows and plans.

It turns configuration and what the registry knows into entries of the maps. Packets need
none of it: what stands in the maps goes on working when the agent is gone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from controller.agent import maps
from controller.agent.assignments import FlowAssignments
from controller.agent.job_reports import class_now
from controller.agent.job_state import JobState
from controller.agent.maps import ClassSettings, JobSettings, PortSettings
from controller.config import Config, InterfaceConfig
from controller.congestion.dcqcn import REFERENCE_LINK_Bps, predicted_rate_Bps
from controller.dataplane import layout
from controller.dataplane.layout import JobFlag, PortFlag
from controller.errors import ConflictError, UsageError
from controller.ops.qdisc_tree import classid
from controller.priority import classes as traffic
from controller.priority import laxity
from controller.priority.jobs import (
    Job,
    JobPlan,
    check_jobs,
    check_rate,
    describe_match,
)
from controller.priority.policies import POLICIES
from controller.priority.policy import OFF
from controller.priority.ports import PortFacts, PortPlan, PortWishes, plan_port, slot_ns_of

# Notification point without DCQCN's constants: SIGCOMM 2015, 3.1.
ECHO_INTERVAL_ns = 50_000
# An iteration ends with a silence longer than the pauses inside one AllReduce (a bucket that is
# late by some ms), and shorter than the compute phase of models that train over RDMA.
MIN_GAP_ns = 20_000_000
# A window of soft-RoCE: 128 packets (RXE_MAX_UNACKED_PSNS) of 4096 and headers.
WINDOW_BYTES = 128 * 4200
_NS_PER_S = 10**9
# A job whose rule has matched nothing for so long is worth a warning.
UNMATCHED_WARNING_S = 60.0
# A plan is written anew when the reported compression ratio differs by more than this share: the
# ratio of top-k wavers with each tensor, and a rate is not predicted to the per cent.
RATIO_STEP = 0.02
_MARKS = {"window": PortFlag.MARK, "instant": PortFlag.MARK_INSTANT, "off": PortFlag(0)}
_ECHOES = {"becn": PortFlag.ECHO_BECN, "cnp": PortFlag.ECHO_CNP, "off": PortFlag(0)}


@dataclass
class SteeredPort:
    """A port with what is done there."""

    entry: InterfaceConfig
    facts: PortFacts
    label: str
    plan: PortPlan


@dataclass(frozen=True)
class Saved:
    """What an earlier controller left: all classes, number -> job, a policy set at run time."""

    classes: tuple[traffic.TrafficClass, ...]
    jobs: Mapping[int, Job]
    policy: str | None = None


def read_saved(document: Mapping[str, Any]) -> Saved:
    """From `Steering.to_json`, or from nothing.

    Raises
    ------
    UsageError, ValueError, KeyError, TypeError, AttributeError
        It is damaged.
    """
    classes = tuple(traffic.TrafficClass.from_json(e) for e in document.get("classes", ()))
    if classes:
        traffic.validate(classes)
    jobs: dict[int, Job] = {}
    for entry in document.get("jobs", ()):
        number = int(entry["number"])
        if number in jobs or not 0 < number < layout.MAX_JOBS:
            raise ValueError(f"job number {number}")
        jobs[number] = Job.from_json(entry["job"])
    check_jobs(tuple(jobs.values()))
    policy = document.get("policy")
    if policy is not None and policy not in (*POLICIES, OFF):
        raise ValueError(f"policy {policy!r}")
    return Saved(classes, jobs, policy)


class Steering:
    """Classes, jobs and flows of one controller.

    Parameters
    ----------
    config
        What it starts with.
    fds
        Maps by name.
    note
        Gets what a user should read.
    """

    def __init__(self, config: Config, fds: Mapping[str, int], note: Callable[[str], None]) -> None:
        self._config = config
        self._fds = fds
        self._note = note
        self.classes = config.classes
        self.jobs: dict[str, JobState] = {}
        # Set at run time; it survives the controller. None: the configuration's.
        self.chosen_policy: str | None = None
        self._ports: dict[int, SteeredPort] = {}
        # A job's entry says which of its two plans holds: who writes either holds this.
        self._job_lock = threading.Lock()
        # The policy paces jobs: ports that can are told to.
        self._policy_paces = False
        self.flows = FlowAssignments(
            fds, self.jobs, config.control.env_variable, self._is_forwarded, note
        )

    # ---- life ----

    def begin(self, earlier: Saved, adopted: bool) -> None:
        """Write what does not depend on a port; take over what an earlier controller left.

        Parameters
        ----------
        earlier
            What the earlier controller left, if there was one. Its jobs hold, except those that the
            configuration names as well; its classes, if the configuration changes none.
        adopted
            Whether its maps are in use.
        """
        if earlier.classes and self.classes == traffic.default_classes():
            self.classes = earlier.classes
        self.chosen_policy = earlier.policy
        now_s = time.monotonic()
        numbers = {job.name: number for number, job in earlier.jobs.items()}
        # Configured ones first, in their order: the first rule that matches wins.
        configured = {job.name: job for job in self._config.jobs}
        others = {job.name: job for job in earlier.jobs.values() if job.name not in configured}
        for name, job in (configured | others).items():
            if name in numbers:
                self.jobs[name] = JobState(job, numbers[name], now_s)
            else:
                self._add_job(job, reserved=earlier.jobs.keys())
        maps.write_crc32_table(self._fds)
        maps.write_dscp_classes(self._fds, [entry.dscp for entry in self.classes])
        policy = self._config.laxity
        maps.write_laxity(
            self._fds,
            policy.thresholds_ns,
            laxity.lowering_ns(policy.thresholds_ns, policy.hysteresis),
            policy.raise_at == "drained",
        )
        self._write_jobs()
        if adopted:
            self.flows.adopt()
            for name, state in self.jobs.items():
                state.plan = maps.read_plan(self._fds, state.number, name)

    def to_json(self) -> dict[str, Any]:
        """What has to survive the agent."""
        return {
            "classes": [entry.to_json() for entry in self.classes],
            "jobs": [
                {"job": state.job.to_json(), "number": state.number} for state in self.jobs.values()
            ],
            "policy": self.chosen_policy,
        }

    @property
    def policy(self) -> str:
        """Name of the policy that should be in force."""
        return self.chosen_policy or self._config.priority.policy

    @property
    def env_variable(self) -> str:
        """Variable that names a process's job."""
        return self._config.control.env_variable

    @property
    def acts(self) -> bool:
        """Whether there is anything to do to packets."""
        return bool(self.jobs)

    # ---- ports ----

    def check_rates(self) -> None:
        """Raise UsageError when a configured job's rate is above what the interfaces carry.

        Of a job that was set at run time, the links may have become slower since: a note.
        """
        configured = {job.name for job in self._config.jobs}
        for name, state in self.jobs.items():
            try:
                self._check_rate(f"Job {name}: rate", state.job.rate_Bps)
            except UsageError as error:
                if name in configured:
                    raise
                self._note(str(error))

    def write_port(
        self, number: int, entry: InterfaceConfig, facts: PortFacts, label: str
    ) -> SteeredPort:
        """Write what is done on a port, new or after its facts have changed."""
        port = self._put_port(number, entry, facts, label)
        self._write_jobs()
        return port

    def _put_port(
        self, number: int, entry: InterfaceConfig, facts: PortFacts, label: str
    ) -> SteeredPort:
        plan = plan_port(facts, self._wishes(entry))
        if entry.mark in ("window", "instant") or entry.echo in ("becn", "cnp") or entry.pace:
            self._refuse_bypass(facts, label)
        port = SteeredPort(entry, facts, label, plan)
        flags = _MARKS[plan.mark] | _ECHOES[plan.echo]
        flags |= PortFlag.DCQCN * plan.dcqcn | PortFlag.PACE * plan.pace
        flags |= PortFlag.BY_DSCP * plan.by_dscp | PortFlag.CONSUME_CNP * plan.consume_cnp
        flags |= PortFlag.DROP_BEYOND * (self._config.control.beyond_horizon == "drop")
        settings = PortSettings(
            flags=PortFlag(flags),
            link_Bps=plan.link_Bps,
            priority_base=classid(0) if facts.tree_rate_Bps else 0,
            drain_share=entry.drain,
            slot_ns=self._config.ecn.slot_ns or slot_ns_of(plan.link_Bps),
            horizon_ns=self._config.control.horizon_ns,
            echo_interval_ns=int(
                self._config.dcqcn.overrides.get("echo_interval_ns", ECHO_INTERVAL_ns)
            ),
        )
        if plan.link_Bps and (plan.dcqcn or plan.echo != "off"):
            parameters = self._config.dcqcn.parameters(plan.link_Bps)
            settings = replace(settings, echo_interval_ns=parameters.echo_interval_ns)
            maps.write_dcqcn(
                self._fds, number, parameters, self._config.dcqcn.prediction,
                self._config.dcqcn.phases,
            )  # fmt: skip
        self._write_classes(number, plan.link_Bps, entry.drain)
        maps.write_port(self._fds, number, settings)
        self._ports[number] = port
        return port

    def _write_jobs(self) -> None:
        """Write all jobs anew: their gap goes by the slowest link."""
        for state in self.jobs.values():
            self._write_job(state)

    @staticmethod
    def _refuse_bypass(facts: PortFacts, label: str) -> None:
        if facts.kind == "bypass":
            raise UsageError(
                f"Interface {label} belongs to a hardware RNIC: its RDMA packets never pass the "
                "kernel, so nothing here can mark, echo or pace them.",
                "Take mark, echo and pace out of its [[interface]]; give queue pairs their traffic "
                "class instead (NCCL_IB_TC, UCX_IB_TRAFFIC_CLASS).",
            )

    def _wishes(self, entry: InterfaceConfig) -> PortWishes:
        return PortWishes(
            rate_Bps=entry.rate_Bps,
            mark=entry.mark,
            echo=entry.echo,
            pace=entry.pace,
            classify=entry.classify,
            dcqcn=any(self.has_dcqcn(state.job) for state in self.jobs.values()),
            paced_jobs=self._policy_paces
            or any(
                state.job.rate_Bps
                or (state.plan and state.plan.pace and state.plan.in_force(time.monotonic_ns()))
                for state in self.jobs.values()
            ),
        )

    def _write_classes(self, number: int, link_Bps: int, drain: float) -> None:
        entries = []
        for entry in self.classes:
            kmin, kmax, pmax = traffic.thresholds(entry, link_Bps or REFERENCE_LINK_Bps)
            entries.append(
                ClassSettings(
                    entry.dscp, entry.priority, kmin, kmax, pmax,
                    link_Bps * drain * entry.ceiling_share,
                )
            )  # fmt: skip
        maps.write_classes(self._fds, number, entries)

    def forget_port(self, number: int) -> None:
        """A port is no more; its flows are forgotten one by one by `flows.forget`."""
        self._ports.pop(number, None)
        maps.clear_port(self._fds, number)
        self._write_jobs()

    def port(self, number: int) -> SteeredPort | None:
        """What is done on a port."""
        return self._ports.get(number)

    def _is_forwarded(self, number: int) -> bool:
        port = self._ports.get(number)
        return port is not None and port.facts.kind == "forwarded"

    def _rewrite_ports(self) -> None:
        for number, port in list(self._ports.items()):
            self._put_port(number, port.entry, port.facts, port.label)
        self._write_jobs()

    # ---- classes ----

    def change_class(self, number: int, changes: Mapping[str, Any]) -> traffic.TrafficClass:
        """Change one class at run time; flows of it carry the new values with the next packet."""
        self.classes = traffic.change(self.classes, number, **changes)
        maps.write_dscp_classes(self._fds, [entry.dscp for entry in self.classes])
        self._rewrite_ports()
        return self.classes[number]

    def gap_ns(self, job: Job) -> int:
        """Silence that ends an iteration: the job's, or by what its flows go at.

        Between two messages that wait for a window of the queue pair to drain there are
        pauses; twice that time is more than any of them.
        """
        if job.gap_ns:
            return job.gap_ns
        # The planner's thread asks, too, while ports come and go.
        ports = list(self._ports.values())
        rates = [port.plan.link_Bps for port in ports if port.plan.link_Bps]
        rates += [job.rate_Bps] if job.rate_Bps else []
        return max([MIN_GAP_ns, *(2 * WINDOW_BYTES * _NS_PER_S // rate for rate in rates)])

    # ---- jobs ----

    def _add_job(self, job: Job, reserved: Collection[int] = ()) -> JobState:
        """Give a new job a number of which nothing of an earlier job is left."""
        taken = {state.number for state in self.jobs.values()}
        free = set(range(1, layout.MAX_JOBS)) - taken - set(reserved)
        if not free:
            raise ConflictError(
                f"There are {layout.MAX_JOBS - 1} jobs, the most that one controller takes.",
                "Delete one: controller job delete NAME.",
            )
        state = self.jobs[job.name] = JobState(job, min(free), time.monotonic())
        maps.clear_progress(self._fds, state.number)
        maps.write_plan(self._fds, state.number, None)
        return state

    def _write_job(self, state: JobState) -> None:
        job = state.job
        settings = JobSettings(
            flags=JobFlag(JobFlag.SET_ECT * job.set_ect | JobFlag.DCQCN * self.has_dcqcn(job)),
            class_default=job.traffic_class,
            class_floor=job.class_floor,
            class_ceiling=job.class_ceiling,
            pace_Bps=job.rate_Bps,
            gap_ns=self.gap_ns(job),
        )
        with self._job_lock:
            maps.write_job(self._fds, state.number, settings)

    def find(self, name: str) -> JobState:
        """The job of that name.

        Raises
        ------
        UsageError
            There is none; names those that are.
        """
        state = self.jobs.get(name)
        if state is None:
            known = ", ".join(sorted(self.jobs)) or "none"
            raise UsageError(
                f"There is no job {name!r}; there are: {known}.",
                "Create it: controller job set NAME --match ..., or [[job]] in the configuration.",
            )
        return state

    def set_job(self, job: Job) -> JobState:
        """Create a job or change it; every flow is matched anew."""
        self._check_rate(f"Job {job.name}: rate", job.rate_Bps)
        state = self.jobs.get(job.name)
        is_new = state is None
        if state is None:
            state = self._add_job(job)
        old, state.job = state.job, job
        try:
            self._rewrite_ports()
        except UsageError:
            if is_new:
                del self.jobs[job.name]
            state.job = old
            self._rewrite_ports()
            raise
        state.since_s = time.monotonic()
        state.was_matched = state.is_warned = False
        self.flows.match_anew()
        return state

    def _check_rate(self, what: str, rate_Bps: int) -> None:
        """Raise UsageError when no interface can carry the rate; 0 is none."""
        links = [port.plan.link_Bps for port in self._ports.values()]
        if rate_Bps and links and all(links):
            check_rate(what, rate_Bps, max(links))

    def delete_job(self, name: str) -> None:
        """Forget a job; its flows are left alone from now on, or go to another job."""
        state = self.find(name)
        self._take_plan(state)
        with self._job_lock:
            del self.jobs[name]
        self.flows.match_anew()
        self._rewrite_ports()

    def set_plan(self, plan: JobPlan, follows_ratio: bool = False) -> JobPlan:
        """Tell the dataplane what is expected of a job's iteration; returns the plan in force.

        Its class limits are narrowed to the job's. `follows_ratio`: `report_ratio` may change its
        compression ratio.
        """
        state = self.find(plan.job)
        if not plan.in_force(time.monotonic_ns()):
            raise UsageError(
                f"Plan of job {plan.job}: valid_until lies in the past, it would never hold."
            )
        self._check_rate(f"Plan of job {plan.job}: rate", plan.rate_Bps)
        job = state.job
        floor = min(max(plan.class_floor, job.class_floor), job.class_ceiling)
        ceiling = max(min(plan.class_ceiling, job.class_ceiling), floor)
        plan = replace(plan, class_floor=floor, class_ceiling=ceiling)
        self._write_plan(state, plan, max(1, self.flows.senders(plan.job)), by_hand=True)
        state.follows_ratio = follows_ratio
        if plan.pace:
            self._rewrite_ports()  # what is missing for it is told there
        return plan

    def report_ratio(self, name: str, ratio: float) -> None:
        """Ranks of a job report a compression ratio: a plan that named none takes it."""
        state = self.jobs.get(name)
        plan = state.plan if state else None
        if not state or not plan or not state.follows_ratio:
            return
        if abs(ratio - plan.compression_ratio) <= RATIO_STEP * plan.compression_ratio:
            return
        if plan.in_force(time.monotonic_ns()):
            senders = max(1, self.flows.senders(plan.job))
            changed = replace(plan, compression_ratio=ratio)
            self._write_plan(state, changed, senders, by_hand=True)

    def _write_plan(
        self,
        state: JobState,
        plan: JobPlan,
        senders: int,
        *,
        by_hand: bool,
        window_ns: int | None = None,
        is_predicted: bool = True,
    ) -> bool:
        """See `write_policy_plan`; one by hand is always written."""
        predicted_Bps = 0.0
        if is_predicted:
            predicted_Bps = predicted_rate_Bps(
                plan.expected_bytes,
                plan.compression_ratio,
                window_ns or plan.deadline_ns - plan.window_start_ns,
                senders,
            )
        with self._job_lock:
            if self.jobs.get(plan.job) is not state:
                return False  # its number may be another job's by now
            if not by_hand and state.by_hand:
                if state.plan and state.plan.in_force(time.monotonic_ns()):
                    return False
                state.follows_ratio = False
            maps.write_plan(self._fds, state.number, plan, predicted_Bps, is_predicted)
            state.plan, state.by_hand = plan, by_hand
        return True

    def write_policy_plan(
        self,
        state: JobState,
        plan: JobPlan | None,
        window_ns: int | None = None,
        is_predicted: bool = True,
    ) -> bool:
        """Write what the policy decided, or take it away; not while a plan by hand holds.

        May be called from any thread. Class limits are the caller's to keep within the job's.

        Parameters
        ----------
        window_ns
            How long the plan's bytes take undisturbed; None: until its deadline.
        is_predicted
            Whether its bytes mean something; else only its class does.

        Returns
        -------
        bool
            Whether it was written.
        """
        if plan is not None:
            return self._write_plan(
                state, plan, max(1, state.senders),
                by_hand=False, window_ns=window_ns, is_predicted=is_predicted,
            )  # fmt: skip
        if state.by_hand and state.plan and state.plan.in_force(time.monotonic_ns()):
            return False
        self._take_plan(state)
        return True

    def _take_plan(self, state: JobState) -> None:
        with self._job_lock:
            if self.jobs.get(state.job.name) is state:
                maps.write_plan(self._fds, state.number, None)
            state.plan, state.by_hand, state.follows_ratio = None, False, False

    def set_policy_paces(self, paces: bool) -> None:
        """Whether the policy in force gives rates: ports are written anew when that changes."""
        if paces != self._policy_paces:
            self._policy_paces = paces
            self._rewrite_ports()

    def hold_departures(self, state: JobState, until_ns: int) -> bool:
        """Let nothing of a job depart before `until_ns`, where its ports pace; whether any does."""
        ports = [number for number in state.ports if self._paces(number)]
        maps.hold_departures(self._fds, state.number, ports, until_ns)
        return bool(ports)

    def _paces(self, number: int) -> bool:
        port = self._ports.get(number)
        return port is not None and port.plan.pace

    def link_Bps(self, ports: Collection[int]) -> int:
        """The slowest known rate of these ports; 0: none is known."""
        found = [self._ports.get(number) for number in ports]
        return min((port.plan.link_Bps for port in found if port and port.plan.link_Bps), default=0)

    def class_now(self, name: str, reported_bytes: int, current_class: int | None) -> int:
        """The class that a job's next message gets, or would get where we saw its packets.

        Parameters
        ----------
        reported_bytes
            What its ranks say they have sent in this iteration: counts where none of the job's
            packets ever came by (a NIC that bypasses the kernel).
        current_class
            What was said before; None: nothing.
        """
        state = self.find(name)
        done = reported_bytes
        if state.was_matched:
            progress = maps.read_progress(self._fds, state.number)
            plan = state.plan
            gap_ns = plan.gap_ns if plan and plan.gap_ns else self.gap_ns(state.job)
            # After such a silence the next packet begins an iteration, before its class is chosen.
            is_over = int(progress["last_ns"]) + gap_ns < time.monotonic_ns()
            done = 0 if is_over else int(progress["bytes"])
        policy = self._config.laxity
        return class_now(
            state.job, state.plan, time.monotonic_ns(), done, current_class,
            policy.thresholds_ns, policy.hysteresis,
        )  # fmt: skip

    def missing(self) -> list[str]:
        """What of the wishes is not done on some interface, each once."""
        texts = [text for port in self._ports.values() for text in port.plan.missing]
        return list(dict.fromkeys(texts))

    def clear_plan(self, name: str) -> None:
        """A job has no plan any more: default class, no pacing by plan."""
        state = self.find(name)
        self._take_plan(state)
        self._rewrite_ports()

    # ---- watching ----

    def count_flows(self) -> None:
        """Note on which ports jobs have flows; exactly where DCQCN divides a rate by them."""
        self.flows.count([name for name, state in self.jobs.items() if self.has_dcqcn(state.job)])

    def watch(self) -> None:
        """Warn once of each job whose rule has matched nothing for a minute."""
        self.count_flows()
        now_s = time.monotonic()
        for name, state in self.jobs.items():
            if state.was_matched or state.is_warned:
                continue
            if now_s - state.since_s >= UNMATCHED_WARNING_S:
                state.is_warned = True
                self._note(
                    f"job {name} has matched no flow for {UNMATCHED_WARNING_S:.0f} s; its rule: "
                    f"{describe_match(state.job, self.env_variable)}"
                )

    def has_dcqcn(self, job: Job) -> bool:
        """Whether DCQCN governs a job's flows."""
        return self._config.dcqcn.enabled if job.dcqcn is None else job.dcqcn
