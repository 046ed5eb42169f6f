"""Run one command in the lab kernel, with the manners of an ordinary child process."""

import re
import shutil
import sys
import termios
import tty
from pathlib import Path

from labkernel import EXIT_GUEST_DIED, EXIT_GUEST_MEMORY, EXIT_TIMEOUT, LabError, say
from labkernel.guest import Guest
from labkernel.pump import Pump
from labkernel.spec import RunSpec

CONSOLE_TAIL_LINES = 20
HALT_LIMIT_S = 5.0


def run(kernel: Path, spec: RunSpec) -> int:
    """Run `spec` in the lab kernel; return the exit status of `scripts/lab run`."""
    guest = Guest(kernel, spec)
    pump = Pump(guest)
    saved = termios.tcgetattr(0) if spec.terminal else None
    try:
        if saved:
            tty.setraw(0)
        pump.run()
    finally:
        guest.end(HALT_LIMIT_S if pump.status is not None else 0.0)
        if saved:
            termios.tcsetattr(0, termios.TCSADRAIN, saved)
    try:
        return conclude(guest, pump)
    finally:
        guest.remove()


def conclude(guest: Guest, pump: Pump) -> int:
    """Turn how the guest ended into an exit status, and into words where something went wrong."""
    console = guest.console_text()
    killed = re.findall(r"Out of memory: Killed process \d+ \(.*?\)", console)
    problem, status = None, pump.status
    if pump.timed_out:
        problem = f"the command ran longer than its {guest.spec.timeout_s:g} s and was ended"
        status = EXIT_TIMEOUT
    elif killed and status != 0:
        problem = (
            f"the guest ran out of its {guest.spec.memory} of memory ({'; '.join(killed)}); "
            "give more with --mem"
        )
        status = EXIT_GUEST_MEMORY
    elif pump.failure is not None:
        problem, status = f"the lab kernel could not be set up: {pump.failure}", None
    elif status is None:
        problem, status = "the lab kernel died while the command ran", EXIT_GUEST_DIED
    if problem is None and status is not None:
        trouble = re.findall(r"^.*(?:BUG:|Oops|WARNING: .* at ).*$", console, re.MULTILINE)
        if killed or trouble:
            keep_console(guest)
            say(f"the guest's kernel complained: {(killed + trouble)[0].strip()}")
        return status
    keep_console(guest)
    if status != EXIT_TIMEOUT:
        tail = "\n".join(console.rstrip().splitlines()[-CONSOLE_TAIL_LINES:])
        print(f"--- last lines of its console\n{tail}\n---", file=sys.stderr)
    if status is None:
        raise LabError(str(problem))
    say(str(problem))
    return status


def keep_console(guest: Guest) -> None:
    """Save the console log for the user."""
    shutil.copyfile(guest.console, guest.spec.results / "console.log")
