"""`scripts/lab run` has the manners of an ordinary child process, also when the guest dies."""

import os
import pty
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAB = ROOT / "scripts/lab"
PYTHON = "/usr/bin/python3"  # also inside, where sys.executable may be hidden

pytestmark = pytest.mark.lab


@pytest.fixture(params=["--lab", "--native"])
def where(request: pytest.FixtureRequest) -> str:
    """Everything that holds in the lab kernel holds on the machine's own kernel too."""
    return str(request.param)


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that takes whatever the lab leaves in the temporary directory."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def lab(*command: str, options: tuple[str, ...] = ("--lab",), stdin: bytes = b"", **env: str):
    return subprocess.run(
        [LAB, "run", *options, "--", *command],
        input=stdin,
        capture_output=True,
        timeout=120,
        env=os.environ | env,
    )


@contextmanager
def running(*command: str, options: tuple[str, ...] = ("--lab",)) -> Iterator[subprocess.Popen]:
    """A command under way: it has printed its first line."""
    process = subprocess.Popen(
        [LAB, "run", *options, "--", *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline(), "the command did not start"
        yield process
    finally:
        process.terminate()
        try:
            process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def processes_with(mark: str) -> list[str]:
    """Command lines of living processes that contain `mark`."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if mark in line:
            found.append(line)
    return found


def test_the_exit_status_is_the_commands(where):
    assert lab("sh", "-c", "exit 37", options=(where,)).returncode == 37


def test_a_command_killed_by_a_signal_gives_128_plus_its_number(where):
    assert lab("sh", "-c", "kill -9 $$", options=(where,)).returncode == 137


def test_a_command_that_is_not_there_gives_127_and_one_not_executable_126(where):
    missing = lab("no-such-command", options=(where,))
    assert missing.returncode == 127
    assert b"no-such-command" in missing.stderr
    assert lab("/etc/passwd", options=(where,)).returncode == 126


def test_stdout_and_stderr_stay_apart_and_arrive_byte_for_byte():
    program = (
        "import os, sys, threading\n"
        "def write(stream, unit):\n"
        "    data = b''.join(unit + b'%07d' % i for i in range(1_000_000))\n"
        "    while data: data = data[os.write(stream, data[:99_999]):]\n"
        "other = threading.Thread(target=write, args=(2, b'\\xff\\x04\\r'))\n"
        "other.start(); write(1, b'\\x00\\x03\\n'); other.join(); sys.exit(37)\n"
    )
    result = lab(PYTHON, "-c", program)
    assert result.returncode == 37
    assert result.stdout == b"".join(b"\x00\x03\n%07d" % i for i in range(1_000_000))
    assert result.stderr == b"".join(b"\xff\x04\r%07d" % i for i in range(1_000_000))


def test_stdin_arrives_byte_for_byte_and_ends():
    data = bytes(range(256)) * 8192
    assert lab("cat", stdin=data).stdout == data


def test_a_command_that_does_not_read_its_stdin_is_not_held_up():
    assert lab("true", stdin=bytes(1 << 20)).returncode == 0


def test_a_command_whose_reader_goes_away_ends():
    process = subprocess.Popen(
        [LAB, "run", "--lab", "--", "yes"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"y\n"
    process.stdout.close()
    assert process.wait(60) == 128 + signal.SIGPIPE


def test_a_line_arrives_within_100_ms_of_being_written():
    clock = "import time\nfor _ in range(5): print(time.time(), flush=True); time.sleep(0.3)"
    with running(PYTHON, "-c", clock) as process:
        assert process.stdout is not None
        late = [time.time() - float(process.stdout.readline()) for _ in range(4)]
    # The best of four: a busy machine may well delay one of them.
    assert min(late) < 0.1


def test_output_of_a_process_that_outlives_the_command_for_a_moment_is_not_lost():
    assert lab("bash", "-c", "exec > >(sleep 0.05; cat); echo late").stdout == b"late\n"


def test_a_process_left_in_the_background_does_not_hold_up_the_end():
    begin = time.monotonic()
    assert lab("sh", "-c", "sleep 60 & echo done").stdout == b"done\n"
    assert time.monotonic() - begin < 30


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_signals_reach_the_command(where, name):
    number = signal.Signals[name]
    script = f"trap 'echo caught; exit 5' {name[3:]}; echo ready; while :; do sleep 0.05; done"
    with running("sh", "-c", script, options=(where,)) as process:
        process.send_signal(number)
        out, _ = process.communicate(timeout=60)
    assert out == b"caught\n"
    assert process.returncode == 5


def test_a_command_ended_by_a_signal_gives_128_plus_its_number(where):
    with running("sh", "-c", "echo ready; sleep 60", options=(where,)) as process:
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM


def test_the_time_limit_gives_124(where, scratch):
    begin = time.monotonic()
    result = lab("sleep", "60", options=(where, "--timeout", "1"))
    assert result.returncode == 124
    assert b"longer than its 1 s" in result.stderr
    assert time.monotonic() - begin < 30


def test_the_time_limit_ends_a_command_that_ignores_sigterm(where, scratch):
    script = "trap '' TERM; while :; do sleep 1; done"
    result = lab("sh", "-c", script, options=(where, "--timeout", "1"))
    assert result.returncode == 124


def test_several_run_side_by_side():
    script = "echo ready; read line < /dev/null; sleep 1; cat /tmp/mine 2>&1; echo $1 > /tmp/mine"
    with (
        running("sh", "-c", script, "sh", "one") as one,
        running("sh", "-c", script, "sh", "two") as two,
    ):
        first, _ = one.communicate(timeout=60)
        second, _ = two.communicate(timeout=60)
    assert (one.returncode, two.returncode) == (0, 0)
    assert b"one" not in second
    assert b"two" not in first


def test_the_hosts_files_do_not_change(tmp_path):
    (tmp_path / "kept").write_text("host")
    script = f"cd {tmp_path}; echo guest > kept; echo guest > new; rm -rf /etc/hostname; cat kept"
    assert lab("sh", "-c", script).stdout == b"guest\n"
    assert (tmp_path / "kept").read_text() == "host"
    assert not (tmp_path / "new").exists()
    assert Path("/etc/hostname").exists()


def test_changes_in_the_results_folder_stay(where, tmp_path):
    results = tmp_path / "deep" / "results"
    script = "head -c 3000000 /dev/zero > $STELLAR_RESULTS/zeros; pwd > $STELLAR_RESULTS/cwd"
    assert lab("sh", "-c", script, options=(where, "--results", str(results))).returncode == 0
    assert (results / "zeros").read_bytes() == bytes(3_000_000)
    assert (results / "cwd").read_text().strip() == str(Path.cwd())
    assert sorted(path.name for path in results.iterdir()) == ["cwd", "zeros"]


def test_a_results_folder_is_announced_if_something_is_in_it_and_removed_if_not(where, scratch):
    silent = lab("true", options=(where,))
    assert silent.stderr == b""
    assert list(scratch.iterdir()) == []
    spoken = lab("sh", "-c", "echo here > $STELLAR_RESULTS/file", options=(where,))
    folder = spoken.stderr.decode().strip().rpartition(" ")[2]
    assert Path(folder, "file").read_text() == "here\n"


@pytest.mark.parametrize("parent", ["/dev/shm", "/run"])
def test_a_working_folder_that_the_guest_would_hide_is_there_all_the_same(parent, monkeypatch):
    folder = Path(parent, f"stellar-test-{os.getpid()}")
    folder.mkdir()
    try:
        (folder / "file").write_text("visible")
        monkeypatch.chdir(folder)
        assert lab("cat", "file").stdout == b"visible"
    finally:
        (folder / "file").unlink()
        folder.rmdir()


def test_the_environment_is_passed_on_and_names_the_kernel(where):
    result = lab(
        "sh",
        "-c",
        'echo "$STELLAR_LAB $OUTER $GIVEN"; command -v tc',
        options=(where, "--env", "GIVEN=a b"),
        OUTER="o",
        PATH="/usr/bin:/bin",
    )
    kind = {"--lab": "uml", "--native": "native"}[where]
    assert result.stdout.decode().splitlines()[0] == f"{kind} o a b"
    assert result.stdout.decode().splitlines()[1].endswith("/tc")


def test_the_guest_is_ready_for_rdma_and_bpf():
    script = """
        rdma system show
        cat /sys/class/net/lo/flags
        stat -f -c %t /sys/fs/bpf
        grep -c 'cpu MHz' /proc/cpuinfo
        sysctl -n -w net.ipv4.ip_forward=1
        hostname
    """
    rdma, lo, bpf, clocks, forward, name = lab("sh", "-c", script).stdout.decode().splitlines()
    assert "netns exclusive" in rdma
    assert int(lo, 16) & 1, "lo is down"
    assert bpf == "cafe4a11"
    assert clocks == "2"
    assert forward == "1"
    assert name == "stellar-lab"


def test_memory_and_processors_are_as_asked_for():
    result = lab(
        "sh", "-c", "nproc; grep MemTotal /proc/meminfo", options=("--mem=512M", "--cpus=1")
    )
    processors, memory = result.stdout.decode().splitlines()
    assert processors == "1"
    assert 450_000 < int(memory.split()[1]) < 524_288


def test_a_guest_out_of_memory_gives_122_and_says_so(scratch):
    program = "x = [bytearray(b'x' * (1 << 20)) for _ in range(1000)]"
    result = lab(PYTHON, "-c", program, options=("--mem", "256M"))
    assert result.returncode == 122
    assert b"ran out of its 256M of memory" in result.stderr
    assert b"--mem" in result.stderr
    assert list(scratch.glob("stellar-results-*/console.log"))


def test_a_guest_that_panics_gives_123_with_its_last_words(scratch):
    result = lab("sh", "-c", "echo before; sleep 0.2; echo c > /proc/sysrq-trigger; sleep 60")
    assert result.returncode == 123
    assert result.stdout == b"before\n"
    assert b"sysrq_handle_crash" in result.stderr
    assert b"died while the command ran" in result.stderr
    (log,) = scratch.glob("stellar-results-*/console.log")
    assert "Kernel panic" in log.read_text()


def test_memory_that_fits_nowhere_gives_125_and_says_where_it_was_sought(scratch):
    result = lab("true", options=("--lab", "--mem", "9000G"))
    assert result.returncode == 125
    assert b"/dev/shm: " in result.stderr
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["run", "true"], b"--"),
        (["run", "--mem", "lots", "--lab", "--", "true"], b"512M"),
        (["run", "--cpus", "9", "--", "true"], b"--cpus"),
        (["run", "--env", "novalue", "--", "true"], b"K=V"),
        (["run", "--timeout", "0", "--", "true"], b"positive"),
        (["run", "--"], b"a command after --"),
        (["shell"], b"terminal"),
    ],
)
def test_wrong_usage_gives_125_and_tells_what_is_expected(arguments, expected):
    result = subprocess.run([LAB, *arguments], stdin=subprocess.DEVNULL, capture_output=True)
    assert result.returncode == 125
    assert expected in result.stderr


def test_no_process_and_no_file_is_left_behind(scratch):
    assert lab("sh", "-c", "sleep 1000 & sleep 1000 & true").returncode == 0
    assert processes_with(str(scratch)) == []
    assert list(scratch.iterdir()) == []


def test_the_guest_does_not_outlive_a_killed_lab(scratch):
    with running("sh", "-c", "echo ready; sleep 1000") as process:
        assert processes_with(f"uml_dir={scratch}")
        process.kill()
        process.wait()
        deadline = time.monotonic() + 30
        while processes_with(f"uml_dir={scratch}") and time.monotonic() < deadline:
            time.sleep(0.05)
    assert processes_with(f"uml_dir={scratch}") == []


def test_the_shell_is_interactive_on_a_terminal():
    process, terminal = pty.fork()
    if process == 0:
        os.environ["SHELL"] = "/bin/sh"
        os.execv(LAB, [str(LAB), "shell", "--lab"])
    shown = b""
    answers = [(b"# ", b"tty; uname -n\n"), (b"stellar-lab", b"exit 3\n")]
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if select.select([terminal], [], [], 1)[0]:
            try:
                shown += os.read(terminal, 4096)
            except OSError:  # the terminal is closed
                break
        if answers and answers[0][0] in shown:
            os.write(terminal, answers.pop(0)[1])
    _, status = os.waitpid(process, 0)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 3
    assert b"/dev/pts/" in shown


def test_which_names_the_kernel_and_the_reason():
    result = subprocess.run([LAB, "which"], capture_output=True, text=True)
    assert result.returncode == 0
    assert result.stdout.startswith(("native: kernel", "lab: "))
