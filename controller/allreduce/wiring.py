"""Connects a rank's links to all peers: exchanges what they must know, and checks what they say."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from controller import __version__
from controller.allreduce.buffers import Pool
from controller.allreduce.errors import CollectiveError, MismatchError
from controller.allreduce.link import Link, Range, completions_needed, memory_needed
from controller.allreduce.schedule import peers
from controller.allreduce.settings import Settings
from controller.errors import InputError
from controller.priority.classes import CLASSES
from controller.verbs.completions import CompletionQueue
from controller.verbs.device import Device

_TEXT_LIMIT = 200


class Channel(Protocol):
    """What is needed of the control channel."""

    @property
    def rank(self) -> int:
        """Own rank."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def all_gather(self, document: dict[str, Any], timeout_s: float) -> list[dict[str, Any]]:
        """Documents of all ranks; a barrier, too."""


@dataclass
class Wiring:
    """Links of a rank and what they stand on.

    Parameters
    ----------
    completions
        Completion queue of all links.
    links
        One a peer.
    lease
        Memory of slots and control messages.
    documents
        What each rank said of itself: `address`, `device`, `mtu_bytes`.
    """

    completions: CompletionQueue
    links: list[Link]
    lease: Any
    documents: Sequence[Mapping[str, Any]]

    def close(self) -> None:
        """Destroy queue pairs and completion queue, then give the memory back."""
        with contextlib.ExitStack() as stack:
            stack.callback(self.lease.release)
            stack.callback(self.completions.close)
            for link in self.links:
                stack.callback(link.close)


def check_common(rank: int, documents: Sequence[Mapping[str, Any]], own: Mapping[str, Any]) -> None:
    """Refuse ranks of another version or other settings.

    Raises
    ------
    MismatchError
        Names the rank, the setting, and both values.
    """
    for other, document in enumerate(documents):
        for key, value in own.items():
            if document.get(key) != value:
                raise MismatchError(
                    f"Rank {other} has {key} {str(document.get(key))[:_TEXT_LIMIT]}, rank {rank} "
                    f"has {value}.",
                    "Start all ranks with the same settings and the same version.",
                    rank=other,
                )


def wire(device: Device, channel: Channel, pool: Pool, settings: Settings) -> Wiring:
    """Connect all links. Every rank must call this at the same time.

    Raises
    ------
    CollectiveError
        A rank does not fit, or sent what is not possible.
    StellarError
        The device, the pool or the control channel cannot do it.
    """
    rank, size = channel.rank, channel.size
    partners = peers(rank, size)
    common = {"version": __version__, **settings.common()}
    documents = channel.all_gather(
        {
            **common,
            "address": str(device.gid.address),
            "device": device.name,
            "mtu_bytes": device.mtu_bytes,
        },
        settings.join_timeout_s,
    )
    check_common(rank, documents, common)

    classes = {number: settings.traffic_class(number) for number in sorted(settings.classes)}
    nbytes = memory_needed(settings.tokens, settings.chunk_nbytes, len(classes))
    with contextlib.ExitStack() as stack:
        lease = pool.lease(max(1, nbytes * len(partners)), key="allreduce/slots")
        stack.callback(lease.release)
        memory = Range(lease.addr, lease.nbytes, lease.lkey, lease.rkey)
        depth = completions_needed(settings.tokens, len(classes)) * len(partners)
        completions = CompletionQueue(device, max(1, depth))
        stack.callback(completions.close)
        links: list[Link] = []
        for place, peer in enumerate(partners):
            link = Link(
                device,
                completions,
                peer,
                classes,
                settings.traffic_class(CLASSES - 1),
                settings.tokens,
                settings.chunk_nbytes,
                memory.part(place * nbytes, nbytes),
                lease.view[place * nbytes : (place + 1) * nbytes],
            )
            stack.callback(link.close)
            links.append(link)
        answers = channel.all_gather(
            {"links": {str(link.peer): link.to_json() for link in links}}, settings.join_timeout_s
        )
        try:
            for link in links:
                theirs = answers[link.peer].get("links")
                document = theirs.get(str(rank)) if isinstance(theirs, Mapping) else None
                if not isinstance(document, Mapping):
                    raise InputError(f"Rank {link.peer} sent no link to rank {rank}.")
                link.connect(document, settings.timing)
        except InputError as error:
            raise CollectiveError(error.message, error.remedy, rank=link.peer) from None
        # Nobody sends before everybody is ready to receive.
        channel.all_gather({"ready": True}, settings.join_timeout_s)
        stack.pop_all()
    return Wiring(completions, links, lease, documents)
