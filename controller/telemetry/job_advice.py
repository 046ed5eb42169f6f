"""The class to start a job with whose queue pairs are not made by our engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from controller.telemetry.job_views import Document, names_text
from controller.telemetry.text import wrapped

# Both take the traffic class byte of the GRH or IP header: DSCP << 2, the ECN bits are the NIC's.
_VARIABLES = ("NCCL_IB_TC", "UCX_IB_TRAFFIC_CLASS")


@dataclass(frozen=True)
class Advice:
    """The class that a job is best started with, and how to say so.

    Parameters
    ----------
    is_needed
        Whether the class of its packets cannot be set from here.
    why
        Whole sentences.
    traffic_class
        Class, 0 .. 7.
    dscp
        Of that class, 0 .. 63.
    """

    is_needed: bool
    why: str
    traffic_class: int
    dscp: int

    @property
    def environment(self) -> dict[str, int]:
        """Variable -> value, the traffic class byte."""
        return dict.fromkeys(_VARIABLES, self.dscp << 2)

    def to_json(self) -> dict[str, Any]:
        """Members by name, and the environment."""
        return {
            "is_needed": self.is_needed,
            "why": self.why,
            "class": self.traffic_class,
            "dscp": self.dscp,
            "environment": self.environment,
        }

    def to_lines(self) -> list[str]:
        """For a person, at most 80 columns."""
        return [
            wrapped(self.why, "  "),
            *(f"    {name}={value}" for name, value in self.environment.items()),
            wrapped(
                f"({self.dscp} x 4, the DSCP of its class {self.traffic_class}.) A queue pair "
                "keeps it: it cannot follow the iteration. Switches must trust DSCP. Ranks on "
                "controller.allreduce follow it on any NIC.",
                "  ",
            ),
        ]


def advise(
    job: Document, interfaces: Sequence[Document], classes: Sequence[Document]
) -> Advice | None:
    """What to start a job with; None where its ranks report and so choose the class themselves.

    The class is the job's own and not the one in force: a queue pair keeps the traffic class
    that it was made with.

    Parameters
    ----------
    job
        A document of the request ``job``.
    interfaces
        As ``status`` has them, those of its flows; all while it has none.
    classes
        As the request ``classes`` has them, all eight.
    """
    if job["reports"]:
        return None
    bypass = [entry["interface"] for entry in interfaces if entry["kind"] == "bypass"]
    if bypass:
        why = (
            f"On {names_text(bypass)} (bypass: a hardware NIC) packets never reach the kernel: no "
            "class is set from here. Start its processes with"
        )
    elif not job["flows"]:
        why = (
            "No flow of it is seen here and no rank reports. Should it run over a hardware NIC, "
            "start its processes with"
        )
    else:
        why = (
            "Its ranks do not report, so it does not use controller.allreduce. Here the dataplane "
            "sets its class in each packet: nothing is to be done. On a host where it leaves "
            "through a hardware NIC, start its processes with"
        )
    number = int(job["traffic_class"])
    dscp = next(int(entry["dscp"]) for entry in classes if entry["number"] == number)
    return Advice(bool(bypass) or not job["flows"], why, number, dscp)
