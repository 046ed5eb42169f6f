"""A progress bar on stderr, only for people and only when it takes a while."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_QUIET_S = 1.0


@contextmanager
def progress_bar(label: str) -> Iterator[Callable[[int, int], None]]:
    """Gives a function (done, total) to call now and then.

    Nothing is drawn when stderr is no terminal, or before one second has passed.
    """
    if not sys.stderr.isatty():
        yield lambda _done, _total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    started_s = time.monotonic()
    with Progress(
        TextColumn(label),
        BarColumn(),
        TextColumn("{task.percentage:3.0f} %"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as bar:
        task = bar.add_task(label, total=None, visible=False)

        def update(done: int, total: int) -> None:
            if time.monotonic() - started_s > _QUIET_S:
                bar.update(task, completed=done, total=total, visible=True)

        yield update
