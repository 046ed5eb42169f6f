"""`laxity` (ours): one window at a time, in an order that no window has to be overtaken for.

First come, first served, with a handicap for long windows and credit for jobs that were held up;
a job whose laxity runs out goes first if somebody else can wait for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from controller.priority.policies.guard import guard_margin_ns
from controller.priority.policies.limits import clamp, exactly
from controller.priority.policy import Assignment, JobView

# A window counts as begun later by this share of its own length: where windows differ, short ones
# go first, but never before one that has waited long. Chosen by simulation (22 mixes of 2 and 3
# jobs, periods equal, 2:3, 2:3:4 and 1:1.618:2.618, equal shares of 25 .. 45 %, jitter 0 and 20 %,
# 4 seeds): 0.3, 0.5 and 0.7 lower the mean window by 12.0, 12.7 and 13.2 % against `fair`, and the
# mean of the slowest tenth by 12.0, 11.0 and 10.3 %. On 21 mixes that were not used to choose
# (other periods, unequal shares) 0.5 gives 5 and 4 %; first come, first served 1.5 and 5 %.
HANDICAP = 0.5
# Recent iterations that took longer than this multiple of the undisturbed one give the job credit:
# two jobs with commensurate periods can lock so that the same one always waits. In the mixes
# above, the worst job's iteration is 1.10 times its `fair` one without credit and 1.03 with it;
# in the other 21 it is up to 1.14 both ways.
CREDIT_FROM = 1.2
# A window of which less than this share is left lets the next one into its own class: it loses
# at most as long again, and classes last longer. They only fall while the link is busy, so jobs
# that follow one another with short overlaps would soon all be in the lowest.
_ENDING_SHARE = 0.15
_ABOVE_ALL = 7


class LaxityPolicy:
    """A class for each open window, falling in the order in which they are served.

    A class is lowered in mid-window but not raised: lowered packets stay behind those that are
    under way, while raised ones overtake them and RC sends a whole window of packets again. So
    the first window of a busy time gets the job's ceiling, those that come after it get lower
    classes, and where one must go first the others are lowered. Only a job that the guard puts
    first, and for which no class is left above the others, is raised.
    """

    name = "laxity"
    tick_ns = 0
    needs_pacing = False
    newcomers_first = True

    def assign(
        self, now_ns: int, jobs: Sequence[JobView], link_Bps: float
    ) -> Mapping[str, Assignment]:
        """See `controller.priority.policy.Policy.assign`."""
        order = sorted(
            (job for job in jobs if job.is_open), key=lambda job: (_place_ns(job, now_ns), job.name)
        )
        late = self._guard(now_ns, order, link_Bps)
        classes = _classes(order, may_raise=False)
        if late and _ties(order, classes):
            classes = _classes(order, may_raise=True)
        result = {}
        for place, job in enumerate(order):
            ahead = tuple(each.name for each in order[:place])
            if job.name in late:
                why = f"would pass {job.max_slowdown:g} times its undisturbed iteration"
            elif ahead:
                why = f"waits for {ahead[-1]}"
            else:
                why = "goes first"
            result[job.name] = exactly(job, classes[job.name], waits_for=ahead, why=why)
        for job in jobs:
            if not job.is_open:
                result[job.name] = _at_begin(job, now_ns, order, classes)
        return result

    def _guard(self, now_ns: int, order: list[JobView], link_Bps: float) -> set[str]:
        """Put jobs whose laxity runs out before those that have laxity to give.

        To have laxity to give is to keep one's own bound although the other goes first; else
        one job would pass its bound instead of another, and the link would be split among late
        ones.

        Returns the names of those that moved.
        """
        margins = {job.name: guard_margin_ns(job, len(order) - 1, link_Bps) for job in order}
        late = []
        ahead_ns = 0.0
        for job in order:
            laxity_ns = job.laxity_ns(now_ns)
            # A microsecond, since callers round the time at which they ask. Who can wait for the
            # rest of those before it is not late yet.
            if laxity_ns <= margins[job.name] + 1000 and laxity_ns < ahead_ns:
                late.append(job)
            ahead_ns += job.rest_ns
        moved = set()
        for job in sorted(late, key=lambda each: each.deadline_ns):
            place = order.index(job)
            while place > 0 and (other := order[place - 1]) not in late:
                before_ns = sum(each.rest_ns for each in order[: place - 1])
                spare_ns = other.laxity_ns(now_ns) - before_ns - margins[other.name]
                if spare_ns < job.rest_ns:
                    break
                order[place - 1], order[place] = job, other
                place -= 1
                moved.add(job.name)
        return moved


def _place_ns(job: JobView, now_ns: int) -> float:
    """What the order goes by: begin of the window, with handicap and credit."""
    begin_ns = job.window_start_ns if job.is_open else max(now_ns, job.window_start_ns)
    credit = max(0.0, job.slowdown - CREDIT_FROM)
    return begin_ns + HANDICAP * job.ideal_window_ns - credit * job.ideal_period_ns


def _classes(order: Sequence[JobView], may_raise: bool) -> dict[str, int]:
    """Falling classes in this order, as high as may be."""
    result = {}
    highest = _ABOVE_ALL - 1
    for job in order:
        number = highest
        if job.current_class is not None and not may_raise:
            number = min(number, job.current_class)
        result[job.name] = clamp(job, number)
        highest = min(highest, _next_class(job, result[job.name], job.rest_ns))
    return result


def _next_class(job: JobView, number: int, rest_ns: float) -> int:
    """The highest class for a window that goes after a job's, of which `rest_ns` is left."""
    return number if rest_ns < _ENDING_SHARE * job.ideal_window_ns else number - 1


def _ties(order: Sequence[JobView], classes: Mapping[str, int]) -> bool:
    """Whether a job is not below one that goes before it and is not about to end."""
    return any(
        classes[after.name] > _next_class(before, classes[before.name], before.rest_ns)
        for before, after in pairwise(order)
    )


def _at_begin(
    job: JobView, now_ns: int, order: Sequence[JobView], classes: Mapping[str, int]
) -> Assignment:
    """The class with which an idle job's next window should begin.

    Its first packets leave before anybody could decide about them. Below every open window that
    goes before it, also one that should be over by then: its end is an event, at which this is
    decided again.
    """
    place_ns = _place_ns(job, now_ns)
    above = _ABOVE_ALL
    ahead = []
    for other in order:
        if other.rest_bytes and _place_ns(other, now_ns) <= place_ns:
            above = min(above, classes[other.name])
            ahead.append(other.name)
    why = f"will wait for {ahead[-1]}" if ahead else "will go first"
    return exactly(job, above - 1, waits_for=tuple(ahead), why=why)
