"""A completion queue that can be polled, and waited for with select().

pyverbs' get_cq_event() blocks with the interpreter's lock held. So waiting is select()'s, and
get_cq_event() is called only when there is an event.
"""

from __future__ import annotations

import select
from typing import Any

from pyverbs.cq import CQ, CompChannel
from pyverbs.pyverbs_error import PyverbsError

from controller.verbs.device import Device, DeviceError
from controller.verbs.pointers import channel_fd


class CompletionQueue:
    """A completion queue with a channel.

    Parameters
    ----------
    device
        Open.
    depth
        Completions that it holds; more lose the queue pairs.
    """

    def __init__(self, device: Device, depth: int) -> None:
        if depth > device.max_cqe:
            raise DeviceError(
                f"{device.name} has completion queues of at most {device.max_cqe} entries, "
                f"{depth} are needed.",
                "Use fewer peers, classes or slots.",
            )
        self._channel = CompChannel(device.context)
        try:
            self.fd = channel_fd(self._channel, device.context_pointer)
            self.cq = CQ(device.context, depth, None, self._channel, 0)
        except BaseException as error:
            self._channel.close()
            if not isinstance(error, PyverbsError):
                raise
            raise DeviceError(f"{device.name} makes no completion queue: {error}") from None
        self._poller = select.poll()
        self._poller.register(self.fd, select.POLLIN)
        self._unacknowledged = 0

    def poll(self, most: int = 32) -> list[Any]:
        """Completions that are there: pyverbs' WC, at most so many."""
        count, completions = self.cq.poll(num_entries=most)
        return completions if count else []

    def arm(self) -> None:
        """Make the descriptor readable at the next completion; poll once more afterwards."""
        self.cq.req_notify()

    def take_events(self) -> None:
        """Read the events that made the descriptor readable; never blocks."""
        while self._poller.poll(0):
            self._channel.get_cq_event(self.cq)
            self._unacknowledged += 1
            if self._unacknowledged >= 64:  # each acknowledgement takes a mutex
                self.cq.ack_events(self._unacknowledged)
                self._unacknowledged = 0

    def close(self) -> None:
        """Close it; its queue pairs must be closed before."""
        # Closing waits for unacknowledged events.
        if self._unacknowledged:
            self.cq.ack_events(self._unacknowledged)
            self._unacknowledged = 0
        self.cq.close()
        self._channel.close()
