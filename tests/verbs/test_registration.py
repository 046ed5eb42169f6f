"""What is said when the kernel refuses to register memory."""

from __future__ import annotations

import ctypes
import errno
from types import SimpleNamespace

import pytest

from controller.verbs import registration
from controller.verbs.registration import DeviceLimits, RegistrationError, VerbsRegistrar


@pytest.mark.parametrize(
    ("code", "parts"),
    [
        (errno.ENOMEM, ["1073741825 bytes at 0x1000", "RLIMIT_MEMLOCK is", "soft-RoCE: 1 GiB",
                        "ulimit -l unlimited", "register less at a time", "chunk_nbytes"]),
        (errno.EFAULT, ["not mapped, or not writable"]),
        (errno.EBADF, ["Bad file descriptor (no further reason)"]),
    ],
)  # fmt: skip
def test_every_cause_that_the_kernels_number_may_have_is_named(
    monkeypatch: pytest.MonkeyPatch, code: int, parts: list[str]
) -> None:
    def refuse(*_: object) -> None:
        ctypes.set_errno(code)

    monkeypatch.setattr(registration, "_libibverbs", lambda: SimpleNamespace(ibv_reg_mr=refuse))
    registrar = VerbsRegistrar(0, DeviceLimits("rxe0", 10, 1 << 40))
    with pytest.raises(RegistrationError) as caught:
        registrar.register(0x1000, (1 << 30) + 1)
    for part in ("rxe0 cannot register", *parts):
        assert part in str(caught.value)
