"""`laxity` (ours): one window at a time, in an order that no window has to be overtaken for.

First come, first served, with a handicap for long windows and credit for jobs that were held up;
a job whose laxity runs out goes first if somebody else can wait for it. The same code ranks the
jobs of one link, who all wait for each other, and those of a cluster, where only jobs that meet
on a link do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from controller.priority.contention import Contention, one_link
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
_HIGHEST = 6
_ABOVE_ALL = 7
# Callers round the time at which they ask.
_ROUNDING_ns = 1000
_NO_CLASS = "; no class is left below"


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
        return rank(now_ns, jobs, one_link(tuple(job.name for job in jobs), link_Bps))


# Of an open window with bytes left: bit of its job, place in the order, class, name of its job.
_Sending: TypeAlias = tuple[int, float, int, str]


@dataclass(slots=True, eq=False)
class _Window:
    """A window that is open: what ranking asks of it again and again, worked out once."""

    job: JobView
    place_ns: float  # what the order goes by
    bit: int  # of the job, among those of the contention graph
    meets: int  # mask of the jobs that it waits for, or lets wait
    laxity_ns: float
    rest_ns: float
    rest_bytes: int  # also above 0 where the rate alone is not known, and so the time is not
    is_ending: bool
    margin_ns: float = 0.0
    number: int = 0  # its class


def rank(now_ns: int, jobs: Sequence[JobView], contention: Contention) -> dict[str, Assignment]:
    """Decide for jobs of which those wait for each other that meet on a link.

    Parameters
    ----------
    now_ns
        On the clock of the views.
    jobs
        All of one component of the contention graph or more, in any order.
    contention
        Who meets whom.

    Returns
    -------
    dict
        Name -> assignment, for each job. The class of an open window is one below the lowest of
        the windows before it in the order that its job meets; windows that do not meet do not
        lower each other. Where the classes do not suffice, the last windows of the order share
        the job's lowest, and `why` says so.
    """
    order = [_window(job, now_ns, contention) for job in jobs if job.is_open]
    order.sort(key=lambda each: (each.place_ns, each.job.name))
    late = _guard(order, contention)
    tied = _give_classes(order, may_rise=0)
    if late:
        near = 0
        for window in order:
            if window.bit & late:
                near |= window.bit | window.meets
        # On one link everybody is near; elsewhere a class that is missing far away is no reason
        # to raise anybody here.
        if tied & near:
            tied = _give_classes(order, may_rise=near)
    result = {}
    for place, window in enumerate(order):
        ahead = _names_ahead(order, place)
        if window.bit & late:
            why = f"would pass {window.job.max_slowdown:g} times its undisturbed iteration"
        elif ahead:
            why = f"waits for {ahead[-1]}"
        else:
            why = "goes first"
        if window.bit & tied:
            why += _NO_CLASS
        result[window.job.name] = exactly(window.job, window.number, waits_for=ahead, why=why)
    sending = [
        (each.bit, each.place_ns, each.number, each.job.name) for each in order if each.rest_bytes
    ]
    for job in jobs:
        if not job.is_open:
            meets = contention.neighbour_mask(job.name)
            result[job.name] = _at_begin(job, _place_ns(job, now_ns), meets, sending)
    return result


def _window(job: JobView, now_ns: int, contention: Contention) -> _Window:
    rest_ns = job.rest_ns
    return _Window(
        job=job,
        place_ns=_place_ns(job, now_ns),
        bit=1 << contention.number(job.name),
        meets=contention.neighbour_mask(job.name),
        laxity_ns=job.laxity_ns(now_ns),
        rest_ns=rest_ns,
        rest_bytes=job.rest_bytes,
        is_ending=rest_ns < _ENDING_SHARE * job.ideal_window_ns,
    )


def _place_ns(job: JobView, now_ns: int) -> float:
    """What the order goes by: begin of the window, with handicap and credit."""
    begin_ns = job.window_start_ns if job.is_open else max(now_ns, job.window_start_ns)
    credit = max(0.0, job.slowdown - CREDIT_FROM)
    return begin_ns + HANDICAP * job.ideal_window_ns - credit * job.ideal_period_ns


def _names_ahead(order: Sequence[_Window], place: int) -> tuple[str, ...]:
    """Jobs that go before the one at a place of the order and meet it."""
    meets = order[place].meets
    return tuple([each.job.name for each in order[:place] if each.bit & meets])


# ---- the guard ----


def _guard(order: list[_Window], contention: Contention) -> int:
    """Put jobs whose laxity runs out before those that have laxity to give.

    To have laxity to give is to keep one's own bound although the other goes first; else
    one job would pass its bound instead of another, and the link would be split among late
    ones.

    Returns the jobs that moved, as a mask.
    """
    opened = 0
    for window in order:
        opened |= window.bit
    hurried = 0
    for window in order:
        others = (window.meets & opened).bit_count()
        link_Bps = contention.link_Bps(window.job.name)
        window.margin_ns = guard_margin_ns(window.job, others, link_Bps)
        if window.laxity_ns <= window.margin_ns + _ROUNDING_ns:
            hurried |= window.bit
    if not hurried:
        return 0
    late = _late(order, hurried, contention)
    moved = 0
    for window in sorted(late, key=lambda each: each.job.deadline_ns):
        place = order.index(window)
        while (before := _met_before(order, place)) is not None:
            other = order[before]
            if other in late or not _can_wait(order, before, window, contention):
                break
            # Past those between as well, whom it does not meet: to them it makes no difference.
            order.insert(before, order.pop(place))
            place = before
            moved |= window.bit
    return moved


def _late(order: Sequence[_Window], hurried: int, contention: Contention) -> list[_Window]:
    """Those whose laxity (of the hurried ones) does not cover the rest of those before them.

    Who can wait for the rest of those before it is not late yet. Links work side by side: what
    is before a window is the most on any of its links.
    """
    ahead_ns = [0.0] * len(contention.links)
    late = []
    for window in order:
        places = contention.links_of(window.job.name)
        if window.bit & hurried:
            wait_ns = max([ahead_ns[place] for place in places], default=0.0)
            if window.laxity_ns < wait_ns:
                late.append(window)
        for place in places:
            ahead_ns[place] += window.rest_ns
    return late


def _met_before(order: Sequence[_Window], place: int) -> int | None:
    """Place of the last job before the one at `place` that it meets."""
    meets = order[place].meets
    while place > 0:
        place -= 1
        if order[place].bit & meets:
            return place
    return None


def _can_wait(order: Sequence[_Window], place: int, late: _Window, contention: Contention) -> bool:
    """Whether the window at `place` keeps its bound although a late one goes before it.

    Asked of the links that both use: on its others nothing changes.
    """
    other = order[place]
    if other.laxity_ns - other.margin_ns < late.rest_ns:
        return False
    both = other.bit | late.bit
    for link in contention.links_of(late.job.name):
        mask = contention.link_masks[link]
        if mask & both == both:
            before_ns = sum([each.rest_ns for each in order[:place] if each.bit & mask])
            if other.laxity_ns - before_ns - other.margin_ns < late.rest_ns:
                return False
    return True


# ---- classes ----


def _give_classes(order: Sequence[_Window], may_rise: int) -> int:
    """Falling classes in this order, as high as may be.

    Parameters
    ----------
    order
        Each gets its `number`.
    may_rise
        Jobs (a mask) whose class may be above the one that they have.

    Returns
    -------
    int
        Jobs, as a mask, that are not below one which they meet, which goes before them and which
        is not about to end.
    """
    # Place n + 1: windows after which those that they meet have class n at most, n from -1.
    limits = [0] * (_ABOVE_ALL + 2)
    tied = 0
    for window in order:
        limit = _ABOVE_ALL + 1
        for number, mask in enumerate(limits):
            if mask & window.meets:
                limit = number - 1
                break
        job = window.job
        number = min(_HIGHEST, limit)
        if job.current_class is not None and not may_rise & window.bit:
            number = min(number, job.current_class)
        window.number = clamp(job, number)
        if window.number > limit:
            tied |= window.bit
        limits[window.number + window.is_ending] |= window.bit
    return tied


def _at_begin(job: JobView, place_ns: float, meets: int, sending: Sequence[_Sending]) -> Assignment:
    """The class with which an idle job's next window should begin.

    Its first packets leave before anybody could decide about them. Below every open window that
    it meets and that goes before it, also one that should be over by then: its end is an event,
    at which this is decided again.
    """
    ahead = [
        (number, name)
        for bit, open_place_ns, number, name in sending
        if bit & meets and open_place_ns <= place_ns
    ]
    if not ahead:
        return exactly(job, _HIGHEST, why="will go first")
    lowest = min(ahead)[0]
    why = f"will wait for {ahead[-1][1]}"
    if clamp(job, lowest - 1) >= lowest:
        why += _NO_CLASS
    return exactly(job, lowest - 1, waits_for=tuple([name for _, name in ahead]), why=why)
