"""Ranks come to rank 0; whoever does not belong there is told so, or shut out."""

from __future__ import annotations

import concurrent.futures
import contextlib
import datetime
import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from controller.allreduce import gate
from controller.allreduce.control_channel import ControlChannel
from controller.allreduce.control_socket import InsecureRendezvousWarning
from controller.allreduce.environment import Master, Placement, TlsFiles
from controller.allreduce.errors import StallError
from controller.allreduce.rendezvous import HANDSHAKE_S
from controller.errors import ConflictError, PrivilegeError, UsageError
from tests.allreduce.ranks import (
    Opened,
    Stranger,
    free_master,
    gather,
    group,
    in_threads,
    join,
)
from tests.waiting import wait


@pytest.fixture(params=["tcp", "unix"])
def master(request: pytest.FixtureRequest, tmp_path: Path) -> Master:
    return free_master() if request.param == "tcp" else Master(path=str(tmp_path / "meet"))


@contextlib.contextmanager
def waiting_rank_0(
    size: int, master: Master, timeout_s: float = 20.0, **options: Any
) -> Iterator[concurrent.futures.Future[ControlChannel]]:
    """Rank 0 waits in a thread; its channel is closed afterwards."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        future = pool.submit(join, 0, size, master, timeout_s, **options)
        try:
            yield future
        finally:
            if future.exception() is None:
                future.result().close()


def come_and_go(rank: int, size: int, master: Master, caplog: pytest.LogCaptureFixture) -> None:
    """Join by hand and leave; rank 0 knows of both afterwards."""
    with Stranger(master) as stranger:
        stranger.hello(rank, size)
        missing = [other for other in range(1, size) if other != rank]
        assert stranger.hear() == {"type": "waiting", "missing": missing}
    wait(lambda: re.search(rf"rank {rank} .* went away while the group met", caplog.text))


# ---- those who belong ----


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_all_ranks_meet_and_the_place_is_free_again(size: int, master: Master) -> None:
    for _ in range(2):
        with group(size, master) as channels:
            assert [(c.rank, c.size) for c in channels] == [(r, size) for r in range(size)]
            assert gather(channels) == [[{"rank": r} for r in range(size)]] * size
            assert not master.path or not Path(master.path).exists()
    # A new one beside the old one, at the same place.
    with group(size, master) as old, group(size, master) as new:
        assert gather(new) == gather(old)


def test_a_group_of_one_needs_no_socket() -> None:
    opened = Opened()
    channel = ControlChannel.join(Placement(0, 1, 0, None), timeout_s=1)
    assert channel.all_gather({"a": (1, 2)}, 1) == [{"a": [1, 2]}]
    assert not opened.descriptors
    channel.abort({})
    channel.close()


def test_ranks_may_come_long_before_rank_0_and_after_it(master: Master) -> None:
    def late(rank: int, delay_s: float) -> ControlChannel:
        time.sleep(delay_s)
        return join(rank, 3, master)

    channels = in_threads(lambda: late(0, 0.4), lambda: late(1, 0), lambda: late(2, 0.8))
    assert gather(channels) == [[{"rank": rank} for rank in range(3)]] * 3
    in_threads(*(channel.close for channel in channels))


def test_a_name_with_two_addresses_is_met_at_either() -> None:
    with group(3, Master("localhost", free_master().port)) as channels:
        assert len(gather(channels)[0]) == 3


def test_a_rank_that_went_away_while_the_others_waited_may_come_again(
    master: Master, caplog: pytest.LogCaptureFixture
) -> None:
    with waiting_rank_0(3, master) as rank_0:
        come_and_go(1, 3, master, caplog)
        channels = in_threads(lambda: join(1, 3, master), lambda: join(2, 3, master))
        assert gather([rank_0.result(), *channels]) == [[{"rank": r} for r in range(3)]] * 3
        in_threads(*(channel.close for channel in channels))


# ---- those who do not come ----


def test_a_timeout_names_the_ranks_that_did_not_come_on_all_that_did(master: Master) -> None:
    results = in_threads(*(lambda r=r: join(r, 5, master, timeout_s=2) for r in (0, 1, 3)))
    for error in results:
        assert isinstance(error, StallError)
        assert error.waiting_for == (2, 4)
        assert "Ranks 2, 4" in error.message
    assert str(master) in results[0].message
    assert not master.path or not Path(master.path).exists()


def test_a_member_with_less_patience_names_the_missing_ranks_itself(master: Master) -> None:
    with waiting_rank_0(3, master, timeout_s=2) as rank_0:
        with pytest.raises(StallError, match="Rank 2 did not come") as caught:
            join(1, 3, master, timeout_s=1)
        assert caught.value.waiting_for == (2,)
        error = rank_0.exception()
        assert isinstance(error, StallError) and error.waiting_for == (2,)
        assert "Rank 1 came and went away again" in error.message


def test_ranks_that_came_and_went_are_not_mistaken_for_ranks_that_never_came(
    caplog: pytest.LogCaptureFixture,
) -> None:
    master = free_master()
    with waiting_rank_0(3, master, timeout_s=2) as rank_0:
        for rank in (1, 2):
            come_and_go(rank, 3, master, caplog)
        error = rank_0.exception()
        assert isinstance(error, StallError) and error.waiting_for == (1, 2)
        assert "Ranks 1, 2 of group 'world' did not stay with rank 0" in error.message


def test_without_rank_0_a_member_says_that_nobody_was_there(master: Master) -> None:
    start_s = time.monotonic()
    with pytest.raises(StallError, match=r"could not join .* (refused|No such file)") as caught:
        join(1, 2, master, timeout_s=0.3)
    assert caught.value.waiting_for == (0,)
    assert time.monotonic() - start_s < 5


def test_a_failed_rendezvous_leaves_no_thread_and_no_descriptor(master: Master) -> None:
    opened = Opened()
    for rank in (0, 1):
        with pytest.raises(StallError):
            join(rank, 2, master, timeout_s=0.2)
    assert not opened.threads
    assert not opened.descriptors


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), float("inf")])
def test_a_timeout_that_is_none_is_refused(timeout_s: float) -> None:
    with pytest.raises(UsageError, match="Timeout of the rendezvous"):
        join(0, 2, free_master(), timeout_s=timeout_s)


# ---- those who do not belong ----


@pytest.mark.parametrize(
    ("size", "rank", "options", "reason"),
    [
        (4, 1, {}, "Rank 0 has 3 ranks"),
        (3, 1, {"group": "other"}, "group 'world' meets, not 'other'"),
        (3, 2, {}, "Rank 2 has joined already"),
    ],
)
def test_a_rank_that_does_not_fit_is_told_why_and_the_others_meet(
    master: Master, size: int, rank: int, options: dict[str, Any], reason: str
) -> None:
    with waiting_rank_0(3, master) as rank_0, Stranger(master) as rank_2:
        # By hand: so it is known when it is there.
        rank_2.hello(2, 3)
        assert rank_2.hear() == {"type": "waiting", "missing": [1]}
        with pytest.raises(UsageError, match=reason):
            join(rank, size, master, **options)
        with join(1, 3, master) as rank_1:
            assert rank_2.hear_until("welcome")
            rank_2.say({"type": "part", "rank": 2, "seq": 1, "document": {"rank": 2}})
            assert gather([rank_0.result(), rank_1]) == [[{"rank": r} for r in range(3)]] * 2


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"protocol": 2}, "version 1 .* this rank speaks 2"),
        ({"protocol": None}, "this rank speaks nothing"),
        ({"rank": 0}, "Rank 0 cannot join"),
        ({"rank": 2}, "Rank 2 cannot join"),
        ({"rank": -1}, "Rank -1"),
        ({"rank": True}, "Rank True"),
        ({"rank": "1"}, "Rank 1 cannot join"),
        ({"size": 2.0}, "this rank has 2.0"),
        ({"type": "part"}, "no greeting"),
        ({"group": "\x1b[2J"}, r"\?\[2J"),
        ({"group": ["world"]}, "not \"\\['world'\\]\""),
    ],
)
def test_a_greeting_that_is_not_right_is_refused_with_the_reason(
    other: dict[str, Any], reason: str
) -> None:
    master = free_master()
    with waiting_rank_0(2, master), Stranger(master) as stranger:
        stranger.hello(1, 2, **other)
        answer = stranger.hear()
        assert answer["type"] == "refused"
        assert re.search(reason, answer["error"]), answer
        assert stranger.hear() == {}
        join(1, 2, master).close()


GARBAGE = {
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "tls": bytes.fromhex("160301020001"),
    "zero": bytes(64),
    "huge": b"\xff\xff\xff\xff",
    "no json": b"\0\0\0\5hello",
    "no utf-8": b"\0\0\0\2\xff\xfe",
    "no object": b"\0\0\0\1" + b"1",
    "deep": b"\0\0\x30\0" + b"[" * 0x3000,
    "deep object": b"\0\0\x09\0" + b'{"":' * 0x240,
    "empty": b"\0\0\0\0",
}


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_is_answered_by_the_end_and_disturbs_nobody(name: str) -> None:
    master = free_master()
    with waiting_rank_0(2, master) as rank_0, Stranger(master) as stranger:
        stranger.stream.sendall(GARBAGE[name])
        # Not after the time that a greeting may take.
        assert stranger.seconds_to_end() < HANDSHAKE_S * 0.8
        with join(1, 2, master) as rank_1:
            assert len(gather([rank_0.result(), rank_1])) == 2


def test_who_says_nothing_or_says_it_slowly_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "HANDSHAKE_S", 0.4)
    master = free_master()
    with waiting_rank_0(2, master), Stranger(master) as silent, Stranger(master) as slow:
        # While it still speaks; not to its end, which would be refused for what it says.
        with pytest.raises(ConnectionError):
            for byte in b"\0\0\1\0" + b'{"type": ' + b" " * 240:
                slow.stream.sendall(bytes([byte]))
                time.sleep(0.02)
        assert silent.seconds_to_end() < 5
        monkeypatch.undo()  # a rank needs as long where the machine is busy
        join(1, 2, master).close()


def test_a_crowd_of_strangers_does_not_keep_the_ranks_out() -> None:
    master = free_master()
    opened = Opened()
    with waiting_rank_0(3, master), contextlib.ExitStack() as crowd:
        for _ in range(100):
            crowd.enter_context(Stranger(master))
        time.sleep(0.2)
        # Rank 0's end of at most size + 16 of them, its loop and its listener.
        assert len(opened.descriptors) < 100 + 19 + 10
        crowd.close()
        met = in_threads(lambda: join(1, 3, master), lambda: join(2, 3, master))
        in_threads(*(channel.close for channel in met))


def test_a_member_that_speaks_before_all_are_there_loses_its_place() -> None:
    master = free_master()
    with waiting_rank_0(2 + 1, master), Stranger(master) as early:
        early.hello(1, 3)
        assert early.hear()["type"] == "waiting"
        early.say({"type": "part", "rank": 1, "seq": 1, "document": {}})
        assert early.seconds_to_end() < 10
        met = in_threads(lambda: join(1, 3, master), lambda: join(2, 3, master))
        in_threads(*(channel.close for channel in met))


def test_what_is_no_rank_0_is_recognised() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        master = Master("127.0.0.1", server.getsockname()[1])

        def answer() -> None:
            connection, _ = server.accept()
            connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
            connection.recv(1000)
            connection.close()

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(UsageError, match="no rank 0: it sent a message of"):
            join(1, 2, master)
        thread.join()


# ---- where rank 0 listens ----


def test_a_second_rank_0_at_the_same_place_is_told_of_the_first(master: Master) -> None:
    with waiting_rank_0(2, master):
        Stranger(master).stream.close()  # it listens now
        with pytest.raises(ConflictError, match="listens on"):
            join(0, 2, master)
        join(1, 2, master).close()


def test_an_address_of_another_host_is_refused_on_rank_0() -> None:
    master = Master("192.0.2.1", free_master().port)
    with (
        pytest.warns(InsecureRendezvousWarning, match="INSECURE"),
        pytest.raises(UsageError, match="cannot listen on 192"),
    ):
        join(0, 2, master, insecure=True)


def test_the_socket_that_a_killed_rank_0_left_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "meet"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert path.exists()
    with group(2, Master(path=str(path))) as channels:
        assert len(gather(channels)) == 2
    path.write_text("not a socket")
    with pytest.raises(ConflictError, match="no socket"):
        join(0, 2, Master(path=str(path)))
    assert path.read_text() == "not a socket"
    with pytest.raises(UsageError, match="directory must exist"):
        join(0, 2, Master(path=str(tmp_path / "none" / "meet")))


_AS_NOBODY = """
import socket, sys
stream = socket.socket(socket.AF_UNIX)
stream.connect(sys.argv[1])
try:
    print(stream.recv(100))
except ConnectionError:
    print(b"")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_another_user_cannot_open_the_unix_socket_and_is_refused_where_he_can() -> None:
    folder = Path(tempfile.mkdtemp())
    try:
        folder.chmod(0o755)
        path = folder / "meet"

        def nobody() -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                [sys.executable, "-c", _AS_NOBODY, str(path)],
                user=65534, group=65534, extra_groups=[], text=True, capture_output=True,
            )  # fmt: skip

        master = Master(path=str(path))
        with waiting_rank_0(2, master) as rank_0:
            while not path.exists():
                time.sleep(0.01)
            assert path.stat().st_mode & 0o777 == 0o600
            assert "PermissionError" in nobody().stderr
            path.chmod(0o666)
            assert nobody().stdout == "b''\n"
            with join(1, 2, master) as rank_1:
                assert len(gather([rank_0.result(), rank_1])) == 2
    finally:
        shutil.rmtree(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_a_member_does_not_trust_another_users_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        path = Path(folder) / "meet"
        script = (
            "import socket, sys; s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]);"
            "s.listen(); c, _ = s.accept(); c.recv(1)"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", script, str(path)], user=65534, group=65534, extra_groups=[]
        )
        try:
            with pytest.raises(PrivilegeError, match="user 65534's"):
                join(1, 2, Master(path=str(path)))
        finally:
            process.kill()
            process.wait()


# ---- TLS ----


class Authority:
    """Signs certificates of ranks."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.certificate = self._sign(name, self._key, ca=True)
        self.path = folder / f"{name}.pem"
        self.path.write_bytes(self.certificate.public_bytes(serialization.Encoding.PEM))

    def _sign(self, name: str, key: Any, *, ca: bool = False) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
            .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, self._name)]))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(hours=1))
            .add_extension(x509.BasicConstraints(ca, None), critical=True)
            .sign(self._key, hashes.SHA256())
        )

    def files(self, name: str, passphrase: bytes = b"") -> TlsFiles:
        """A certificate and key for a rank."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate, key_file = self._folder / f"{name}.crt", self._folder / f"{name}.key"
        certificate.write_bytes(self._sign(name, key).public_bytes(serialization.Encoding.PEM))
        key_file.touch(0o600)
        key_file.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.BestAvailableEncryption(passphrase)
                if passphrase
                else serialization.NoEncryption(),
            )
        )
        return TlsFiles(str(self.path), str(certificate), str(key_file))


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "ours")


def test_ranks_with_certificates_of_one_authority_meet_by_tls(authority: Authority) -> None:
    with group(3, free_master(), tls=authority.files("rank")) as channels:
        assert gather(channels) == [[{"rank": r} for r in range(3)]] * 3
        large = in_threads(
            *(lambda c=c: c.all_gather({"x": "y" * 1_000_000}, 20) for c in channels)
        )
        assert all(len(document["x"]) == 1_000_000 for result in large for document in result)


def test_the_files_may_come_from_the_environment(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, master = authority.files("rank"), free_master()
    monkeypatch.setenv("STELLAR_TLS_CA", files.ca)
    monkeypatch.setenv("STELLAR_TLS_CERT", files.certificate)
    monkeypatch.setenv("STELLAR_TLS_KEY", files.key)
    with waiting_rank_0(2, master), Stranger(master) as plain:
        plain.hello(1, 2)
        assert plain.hear() == {}  # it listens with TLS
        join(1, 2, master).close()


def test_a_certificate_of_another_authority_is_refused_on_both_sides(
    authority: Authority, tmp_path: Path
) -> None:
    theirs = Authority(tmp_path, "theirs").files("their-rank")
    ours, master = authority.files("rank"), free_master()
    with waiting_rank_0(2, master, tls=ours) as rank_0:
        with pytest.raises(UsageError, match="certificate verify failed"):
            join(1, 2, master, tls=theirs)
        # It trusts ours, but has no certificate of it.
        half = TlsFiles(ours.ca, theirs.certificate, theirs.key)
        with pytest.raises(UsageError, match=r"TLS with rank 0|without an answer"):
            join(1, 2, master, tls=half)
        with join(1, 2, master, tls=ours) as rank_1:
            assert len(gather([rank_0.result(), rank_1])) == 2


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_no_certificate_or_an_old_tls_gets_nowhere(
    authority: Authority, version: ssl.TLSVersion
) -> None:
    files, master = authority.files("rank"), free_master()
    context = ssl.create_default_context(cafile=files.ca)
    context.check_hostname = False
    context.maximum_version = version
    if version is ssl.TLSVersion.TLSv1_2:
        context.load_cert_chain(files.certificate, files.key)
    with waiting_rank_0(2, master, tls=files):
        with contextlib.suppress(ssl.SSLError, ConnectionError), Stranger(master, context) as other:
            other.hello(1, 2)
            assert other.hear() == {}
        join(1, 2, master, tls=files).close()


def test_plain_and_tls_do_not_meet_and_say_so(authority: Authority) -> None:
    files, master = authority.files("rank"), free_master()
    with waiting_rank_0(2, master, tls=files):
        with pytest.raises(UsageError, match="without an answer") as caught:
            join(1, 2, master)
        assert "Give TLS files" in caught.value.remedy
        join(1, 2, master, tls=files).close()
    with waiting_rank_0(2, master):
        with pytest.raises(UsageError, match="TLS with rank 0"):
            join(1, 2, master, tls=files)
        join(1, 2, master).close()


def test_a_key_that_others_may_read_is_refused(authority: Authority) -> None:
    files = authority.files("rank")
    Path(files.key).chmod(0o644)
    with pytest.raises(UsageError, match="mode 0644") as caught:
        join(0, 2, free_master(), tls=files)
    assert f"chmod 600 {files.key}" in caught.value.remedy


def test_files_that_are_no_use_are_named(authority: Authority, tmp_path: Path) -> None:
    files = authority.files("rank")
    empty = tmp_path / "empty"
    empty.touch(0o600)
    for wrong in (
        TlsFiles(str(empty), files.certificate, files.key),
        TlsFiles(files.ca, str(empty), files.key),
        TlsFiles(files.ca, files.certificate, str(empty)),
        TlsFiles(files.ca, authority.files("other").certificate, files.key),
        authority.files("secret", passphrase=b"secret"),
    ):
        with pytest.raises(UsageError, match="cannot be used"):
            join(0, 2, free_master(), tls=wrong)
    with pytest.raises(UsageError, match=r"none.key cannot be read: No such file"):
        join(0, 2, free_master(), tls=TlsFiles(files.ca, files.certificate, "/none.key"))


@pytest.mark.parametrize("rank", [0, 1])
def test_between_hosts_plain_connections_are_refused_with_both_ways_out(rank: int) -> None:
    with pytest.raises(UsageError, match="not on loopback") as caught:
        join(rank, 2, Master("192.0.2.1", 29500))
    assert "STELLAR_TLS_CA" in caught.value.remedy
    assert "STELLAR_INSECURE_RENDEZVOUS=1" in caught.value.remedy


def test_given_up_explicitly_authentication_is_missed_loudly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # All of 127/8 is loopback, so an address of this host that is not has to be looked up.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this host has loopback only")
        address = probe.getsockname()[0]
    monkeypatch.setenv("STELLAR_INSECURE_RENDEZVOUS", "1")
    with (
        pytest.warns(InsecureRendezvousWarning, match="INSECURE"),
        group(2, Master(address, free_master().port)) as channels,
    ):
        assert len(gather(channels)) == 2
