"""What is kept of a run while it goes on: bytes by bins of time, samples of queues."""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from controller.congestion.flows import FloatArray, IntArray
from controller.sim.congestion.network import Network
from controller.sim.fairness import jain_of_sums


def merged(spans: FloatArray) -> FloatArray:
    """Union of spans of time, in order.

    Parameters
    ----------
    spans
        Begins and ends, shape (n, 2).

    Returns
    -------
    ndarray
        The same time in spans that do not touch, shape (m, 2).
    """
    if not len(spans):
        return np.zeros((0, 2))
    spans = spans[np.argsort(spans[:, 0])]
    reach = np.maximum.accumulate(spans[:, 1])
    first = np.flatnonzero(np.concatenate(([True], spans[1:, 0] > reach[:-1])))
    last = np.concatenate((first[1:] - 1, [len(spans) - 1]))
    return np.stack((spans[first, 0], reach[last]), axis=1)


def stability(values: FloatArray) -> float:
    """1 - CoV of values, shape (n,); NaN for fewer than two, or where all are 0."""
    if values.size < 2 or not values.any():
        return float("nan")
    return 1 - float(values.std() / values.mean())


class Bins:
    """Bytes of ports, streams and flows in bins of time, from the begin of measuring on.

    First everything is accounted, then it is read.

    Parameters
    ----------
    network
        That is measured, at the time when measuring begins.
    flow_port
        Port (link) of each flow, shape (flows,), not falling.
    bin_ns, sample_ns
        Length of a bin; time between two samples of the queues. Whole steps.
    """

    def __init__(self, network: Network, flow_port: IntArray, bin_ns: int, sample_ns: int) -> None:
        self._network, self._flow_port = network, flow_port
        self._bin_ns, self._sample_ns = bin_ns, sample_ns
        self._begin_ns = network.now_ns
        ports = network.links.count
        self._port_now: FloatArray = np.zeros(ports)
        self._delivered: FloatArray = network.delivered_bytes.copy()
        self._flow_now: FloatArray = np.zeros(flow_port.size)
        self._port_rows: list[FloatArray] = []
        self._stream_rows: list[FloatArray] = []
        self._queue_rows: list[NDArray[np.float32]] = []
        self._jain_sum: FloatArray = np.zeros(ports)
        self._jain_bins: FloatArray = np.zeros(ports)
        # Of each flow's whole bins: how many, sum and sum of squares of their bytes.
        self._moments: FloatArray = np.zeros((3, flow_port.size))

    def account(self, flow_began_ns: FloatArray) -> None:
        """Take the network's last step.

        Parameters
        ----------
        flow_began_ns
            Since when each flow has had something to send, shape (flows,); infinite: it has not.
        """
        network = self._network
        self._port_now += network.links.served_bytes
        self._flow_now[network.sent_flows] += network.sent_bytes
        since_ns = network.now_ns - self._begin_ns
        if since_ns % self._sample_ns == 0:
            self._queue_rows.append(network.links.queue_bytes.astype(np.float32))
        if since_ns % self._bin_ns == 0:
            self._close(flow_began_ns)

    def _close(self, flow_began_ns: FloatArray) -> None:
        self._port_rows.append(self._port_now)
        self._port_now = np.zeros_like(self._port_now)
        self._stream_rows.append(self._network.delivered_bytes - self._delivered)
        self._delivered = self._network.delivered_bytes.copy()
        whole = flow_began_ns <= self._network.now_ns - self._bin_ns
        nbytes, ports = self._flow_now * whole, len(self._jain_sum)
        squares = nbytes * nbytes
        self._moments += whole, nbytes, squares
        count = np.bincount(self._flow_port, whole, ports)
        total = np.bincount(self._flow_port, nbytes, ports)
        index = jain_of_sums(count, total, np.bincount(self._flow_port, squares, ports))
        usable = (count >= 2) & ~np.isnan(index)
        self._jain_sum[usable] += index[usable]
        self._jain_bins += usable
        self._flow_now[:] = 0.0

    # Tables of the rows, once all are there: what follows reads them column by column.

    @cached_property
    def _port_table(self) -> FloatArray:
        return np.array(self._port_rows, order="F")

    @cached_property
    def _stream_table(self) -> FloatArray:
        return np.array(self._stream_rows, order="F")

    @cached_property
    def _queue_table(self) -> NDArray[np.float32]:
        return np.array(self._queue_rows, order="F")

    def port_bytes(self, port: int, spans: FloatArray) -> FloatArray:
        """Bytes that a port served in each bin that lies within one of the spans, shape (n,)."""
        return self._within(self._port_table[:, port], spans)

    def stream_bytes(self, stream: int, spans: FloatArray) -> FloatArray:
        """The same of one stream."""
        return self._within(self._stream_table[:, stream], spans)

    def total_bytes(self, port: int) -> float:
        """Bytes that a port served in all bins."""
        return float(self._port_table[:, port].sum())

    def _within(self, values: FloatArray, spans: FloatArray) -> FloatArray:
        inside = np.zeros(values.size, dtype=bool)
        for begin_ns, end_ns in spans - self._begin_ns:
            first = int(np.ceil(begin_ns / self._bin_ns))
            inside[first : int(end_ns // self._bin_ns)] = True
        return values[inside]

    def queue_samples(self, port: int, spans: FloatArray) -> FloatArray:
        """Samples of a port's queue that lie within one of the spans, in bytes, shape (n,)."""
        values = self._queue_table[:, port].astype(np.float64)
        times_ns = self._begin_ns + self._sample_ns * np.arange(1, values.size + 1)
        inside = np.zeros(values.size, dtype=bool)
        for begin_ns, end_ns in spans:
            inside |= (times_ns >= begin_ns) & (times_ns <= end_ns)
        return values[inside]

    @cached_property
    def jain(self) -> FloatArray:
        """Jain's index of each port's flows, mean over bins with two whole flows, or NaN."""
        with np.errstate(invalid="ignore"):
            result: FloatArray = self._jain_sum / self._jain_bins
        return result

    @cached_property
    def flow_stabilities(self) -> FloatArray:
        """1 - CoV of each flow's whole bins, shape (flows,); NaN for fewer than two."""
        count, total, squares = self._moments
        with np.errstate(invalid="ignore", divide="ignore"):
            mean = total / count
            spread = np.sqrt(np.maximum(0.0, squares / count - mean**2))
            result: FloatArray = np.where(count >= 2, 1 - spread / mean, np.nan)
        return result
