"""Where DCQCN's loop is stable: over flows, loop delay and the marker's window."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from controller.congestion.delay_equations import Array
from controller.congestion.fixed_point import fixed_point
from controller.congestion.fluid import DcqcnLoop
from controller.congestion.linear import rightmost_root
from controller.congestion.linear_dcqcn import common_mode, difference_mode, exact_jacobian
from controller.congestion.stability import critical_delay_us


@dataclass(frozen=True)
class StabilityMap:
    """Exact stability to small disturbances on a grid.

    Attributes
    ----------
    flows, delays_us, windows_us
        The axes: shapes (F,), (D,), (W,).
    rightmost_per_s
        Real part of the rightmost root, shape (W, F, D): below 0, disturbances die out so fast.
    critical_delay_us
        Shape (W, F); 0: unstable without any delay; infinite: stable up to 10 ms.
    share
        p* of each number of flows, shape (F,).
    exists
        Whether p* is at most Pmax, shape (F,). Where it is not, there is no fixed point; the other
        arrays then say what held if the marking line went on beyond Kmax.
    """

    flows: Array
    delays_us: Array
    windows_us: Array
    rightmost_per_s: Array
    critical_delay_us: Array
    share: Array
    exists: Array

    @property
    def stable(self) -> Array:
        """Shape (W, F, D): there is a fixed point, and it is stable."""
        stable: Array = (self.rightmost_per_s < 0) & self.exists[None, :, None]
        return stable


def stability_map(
    loop: DcqcnLoop,
    flows: Sequence[int],
    delays_us: Sequence[float],
    windows_us: Sequence[float],
    progress: Callable[[int, int], None] | None = None,
) -> StabilityMap:
    """Exact stability on a grid.

    Parameters
    ----------
    loop
        All that does not change; its flows, delay and window do.
    flows, delays_us, windows_us
        Points of the grid; window 0 is DCQCN's own marking by the queue of the moment.
    progress
        Called with (done, total) rows of the grid.
    """
    loops = [replace(loop, flows=count, delay_ns=0.0) for count in flows]
    rest = fixed_point(loops)
    shape = (len(windows_us), len(flows), len(delays_us))
    rightmost, critical = np.empty(shape), np.empty(shape[:2])
    done = 0
    for column, point in enumerate(loops):
        jacobian = exact_jacobian(point)
        difference = [difference_mode(jacobian)] if point.flows > 1 else []
        apart = [
            max(
                (rightmost_root(mode.later(delay * 1e-6)).real for mode in difference),
                default=-np.inf,
            )
            for delay in delays_us
        ]
        for row, window_us in enumerate(windows_us):
            common = common_mode(jacobian, replace(point, window_ns=window_us * 1e3))
            for index, delay in enumerate(delays_us):
                together = rightmost_root(common.later(delay * 1e-6)).real
                rightmost[row, column, index] = max(together, apart[index])
            found = critical_delay_us([common, *difference])
            critical[row, column] = np.inf if found is None else found
            done += 1
            if progress:
                progress(done, shape[0] * shape[1])
    return StabilityMap(
        flows=np.array(flows),
        delays_us=np.array(delays_us, dtype=float),
        windows_us=np.array(windows_us, dtype=float),
        rightmost_per_s=rightmost,
        critical_delay_us=critical,
        share=rest.share[:, 0],
        exists=rest.exists[:, 0],
    )
