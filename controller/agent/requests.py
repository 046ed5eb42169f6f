"""What the agent answers on its control socket."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from controller import __version__
from controller.agent.control import Conversation, Handler
from controller.agent.job_reports import (
    MAX_REPORT_BYTES,
    REPORT_SILENCE_S,
    JobReports,
    ReportTalk,
)
from controller.agent.planner_report import describe_planner, describe_prediction
from controller.agent.steering_report import describe_job, describe_port
from controller.config import InterfaceConfig
from controller.dataplane import attach as hooks
from controller.dataplane import interfaces, tables
from controller.dataplane.layout import Direction
from controller.errors import ConflictError, StellarError, UsageError
from controller.priority.classes import CLASSES, TrafficClass
from controller.priority.jobs import Job, JobPlan
from controller.priority.policies import POLICIES
from controller.priority.policy import OFF
from controller.priority.ranges import check_integer

if TYPE_CHECKING:
    from controller.agent.agent import Agent, PortState

Answer = tuple[dict[str, Any], list[int]]


def resident_bytes() -> int:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class Requests:
    """Handlers of one agent's requests. Each answers a document and descriptors to pass on."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._reports = JobReports()

    def handlers(self) -> dict[str, Handler | Conversation]:
        """Command -> handler."""
        return {
            "status": self._status,
            "snapshot": self._snapshot,
            "attach": self._attach,
            "detach": self._detach,
            "stop": self._stop,
            "refresh": self._refresh,
            "classes": self._classes,
            "class-set": self._class_set,
            "jobs": self._jobs,
            "job": self._job,
            "job-set": self._job_set,
            "job-delete": self._job_delete,
            "job-plan": self._job_plan,
            "job-plan-clear": self._job_plan_clear,
            "policy": self._policy,
            "job-report": Conversation(
                lambda pid: ReportTalk(self._agent, self._reports, pid),
                REPORT_SILENCE_S,
                MAX_REPORT_BYTES,
            ),
        }

    # ---- observing ----

    def _describe(self, port: PortState) -> dict[str, Any]:
        agent = self._agent
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
            "cautions": agent.cautions(port),
            "mtu_bytes": interface.mtu_bytes,
            "addresses": list(interface.addresses),
            "drops": {
                name: value - attachment.drops_before.get(name, 0) for name, value in drops.items()
            },
            "frames": {
                direction.name.lower(): {
                    reason.name.lower(): count
                    for reason, count in tables.read_reasons(
                        agent.maps["reasons"], attachment.port, direction
                    ).items()
                }
                for direction in Direction
            },
            "retired_flows": port.retired_flows,
            "retired_packets": port.retired_packets,
            "retired_wire_bytes": port.retired_wire_bytes,
            "acts": attachment.acts,
            "control": describe_port(agent.steering, agent.maps, attachment.port)
            if attachment.acts
            else None,
            "qdisc": port.qdisc.to_json() if port.qdisc and attachment.acts else None,
        }

    def _status(self, _arguments: Mapping[str, Any]) -> Answer:
        agent = self._agent
        with agent.guard:
            keys, _ = tables.read_flows(agent.maps["flows"])
            assert agent.dataplane is not None
            return {
                "running": True,
                "version": __version__,
                "pid": os.getpid(),
                "run_dir": str(agent.run_directory.path),
                "started": round(agent.started_s, 3),
                "uptime_s": round(time.time() - agent.started_s, 1),
                "resident_bytes": resident_bytes(),
                "adopted": agent.adopted,
                "flows": len(keys),
                "max_flows": agent.dataplane.max_flows,
                "new_flow_events": agent.new_flows,
                "interfaces": [self._describe(port) for port in agent.ports.values()],
                "jobs": [self._summary(name) for name in agent.steering.jobs],
                "planner": describe_planner(agent.planner),
                "events": list(agent.events),
            }, []

    def _snapshot(self, _arguments: Mapping[str, Any]) -> Answer:
        agent = self._agent
        with agent.guard:
            if any(not port.interface.rdma_device for port in agent.ports.values()):
                agent.inspect()
            agent.read_registry()
            return {
                "taken_ns": time.monotonic_ns(),
                "interfaces": [self._describe(port) for port in agent.ports.values()],
                "queue_pairs": [
                    asdict(qp) for port in agent.ports.values() for qp in port.queue_pairs.values()
                ],
                # A copy, as shutdown() may close ours before this one is on its way.
            }, [os.dup(agent.maps["flows"])]

    # ---- interfaces ----

    @staticmethod
    def _target(arguments: Mapping[str, Any]) -> InterfaceConfig:
        return InterfaceConfig.parse(
            str(arguments["interface"]), str(arguments.get("mode", "native"))
        )

    def _find(self, entry: InterfaceConfig) -> PortState | None:
        for port in self._agent.ports.values():
            attachment = port.attachment
            if (attachment.netns, attachment.interface) == (entry.netns, entry.name):
                return port
        return None

    def _attach(self, arguments: Mapping[str, Any]) -> Answer:
        agent = self._agent
        entry = self._target(arguments)
        with agent.guard:
            if self._find(entry):
                raise ConflictError(
                    f"{arguments['interface']} is attached already.",
                    "Detach it first to change its mode.",
                )
            interface = interfaces.inspect(entry.netns, entry.name)
            hooks.check_free(interface, entry.mode)
            attachment = agent.attach_new(interface, agent.configured(entry))
            return {"attached": self._describe(agent.ports[attachment.port])}, []

    def _detach(self, arguments: Mapping[str, Any]) -> Answer:
        agent = self._agent
        entry = self._target(arguments)
        with agent.guard:
            port = self._find(entry)
            if port is None:
                attached = ", ".join(p.attachment.label for p in agent.ports.values()) or "none"
                raise UsageError(f"{arguments['interface']} is not attached; attached: {attached}.")
            hooks.detach(port.attachment)
            agent.forget(port)
            agent.note(f"detached from {port.attachment.label}")
            return {"detached": port.attachment.label}, []

    def _stop(self, _arguments: Mapping[str, Any]) -> Answer:
        agent = self._agent
        with agent.guard:
            labels = [port.attachment.label for port in agent.ports.values()]
        agent.request_stop()
        return {"stopping": True, "pid": os.getpid(), "detaching": labels}, []

    def _refresh(self, _arguments: Mapping[str, Any]) -> Answer:
        """Look at the interfaces and their qdiscs now, not within five seconds."""
        with self._agent.guard:
            self._agent.inspect()
            return {"interfaces": len(self._agent.ports)}, []

    # ---- classes ----

    def _classes(self, _arguments: Mapping[str, Any]) -> Answer:
        with self._agent.guard:
            return {"classes": [entry.to_json() for entry in self._agent.steering.classes]}, []

    def _class_set(self, arguments: Mapping[str, Any]) -> Answer:
        agent = self._agent
        number, changes = arguments["number"], dict(arguments["changes"])
        check_integer("Class number", number, 0, CLASSES - 1)
        allowed = set(TrafficClass.__dataclass_fields__) - {"number"}
        if unknown := sorted(changes.keys() - allowed):
            raise UsageError(
                f"Class {number}: {unknown[0]} is unknown; allowed: {', '.join(sorted(allowed))}."
            )
        with agent.guard:
            changed = agent.steering.change_class(number, changes)
            agent.save()
            agent.note(f"class {number} changed: {', '.join(sorted(changes))}")
            return {"class": changed.to_json()}, []

    # ---- jobs ----

    def _document(self, name: str) -> dict[str, Any]:
        document = describe_job(self._agent.steering, self._agent.maps, name)
        prediction = describe_prediction(self._agent.planner, name)
        return document | prediction | {"reports": self._reported(name)}

    def _reported(self, name: str) -> list[dict[str, Any]]:
        return [reporter.to_json() for reporter in self._reports.of_job(name)]

    def _summary(self, name: str) -> dict[str, Any]:
        """A job in one line: its flows summed up."""
        job = self._document(name)
        flows = job.pop("flows")
        job["flows"] = len(flows)
        for total in ("packets", "marked", "feedback", "cuts", "paced"):
            job[total] = sum(flow[total] for flow in flows)
        return job

    def _jobs(self, _arguments: Mapping[str, Any]) -> Answer:
        agent = self._agent
        with agent.guard:
            agent.read_registry()
            return {
                "jobs": [self._summary(name) for name in agent.steering.jobs],
                "reported_only": [
                    {"name": name, "reports": self._reported(name)}
                    for name in self._reports.strangers(agent.steering.jobs)
                ],
            }, []

    def _job(self, arguments: Mapping[str, Any]) -> Answer:
        agent = self._agent
        with agent.guard:
            agent.read_registry()
            return {"job": self._document(str(arguments["name"]))}, []

    def _job_set(self, arguments: Mapping[str, Any]) -> Answer:
        agent = self._agent
        changes = dict(arguments["job"])
        name = str(changes.get("name", ""))
        with agent.guard:
            old = agent.steering.jobs.get(name)
            job = Job.from_json((old.job.to_json() if old else {}) | changes)
            agent.steering.set_job(job)
            agent.jobs_changed()
            agent.save()
            agent.read_registry()
            agent.apply_control()
            agent.note(f"job {name} {'changed' if old else 'created'}")
            return {"job": self._document(name), "created": old is None}, []

    def _job_delete(self, arguments: Mapping[str, Any]) -> Answer:
        agent = self._agent
        name = str(arguments["name"])
        with agent.guard:
            agent.steering.delete_job(name)
            agent.jobs_changed()
            agent.save()
            agent.read_registry()
            agent.apply_control()
            agent.note(f"job {name} deleted")
            return {"deleted": name}, []

    def _job_plan(self, arguments: Mapping[str, Any]) -> Answer:
        agent = self._agent
        document = dict(arguments["plan"])
        # null: what the ranks report, from now on; until they do, no compression.
        follows_ratio = "compression_ratio" in document and document["compression_ratio"] is None
        with agent.guard:
            if follows_ratio:
                ratio = self._reports.compression_ratio(str(document.get("job")))
                document["compression_ratio"] = ratio or 1.0
            plan = agent.steering.set_plan(JobPlan.from_json(document), follows_ratio)
            warnings = [text for text in agent.steering.missing() if plan.pace and "pac" in text]
            return {"plan": plan.to_json(), "warnings": warnings}, []

    def _job_plan_clear(self, arguments: Mapping[str, Any]) -> Answer:
        with self._agent.guard:
            self._agent.steering.clear_plan(str(arguments["name"]))
            self._agent.planner.forget_decision(str(arguments["name"]))
            return {"cleared": str(arguments["name"])}, []

    def _policy(self, arguments: Mapping[str, Any]) -> Answer:
        """Tell the policy in force, or rank by another one from now on."""
        agent = self._agent
        with agent.guard:
            if "name" in arguments:
                name = str(arguments["name"])
                agent.planner.set_policy(name)
                agent.steering.chosen_policy = name
                agent.jobs_changed()
                agent.save()
                agent.note(f"policy {name}")
            warnings = agent.steering.missing() if agent.planner.paces else []
            return {
                "policy": agent.planner.policy_name,
                "policies": [*POLICIES, OFF],
                "warnings": [text for text in warnings if "pac" in text],
            }, []
