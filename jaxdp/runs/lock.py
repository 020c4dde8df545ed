"""One run owns its folder: a lock that a dead owner cannot keep.

The lock is `flock` on `run.lock`, which the kernel gives back when its holder dies, so two launches
at one instant cannot both have it and no stale lock needs guessing. The file's contents only say
who the owner is. On a network file system the lock is as good as that system's `flock`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import fcntl
import os
import platform
import secrets
import time
from pathlib import Path

from jaxdp.errors import RunFolderError
from jaxdp.runs import strict_json

LOCK_FILE = "run.lock"
_OWNER_WAIT_S = 1.0  # between an owner's flock and its name in the file lie microseconds


@dataclasses.dataclass(frozen=True)
class Owner:
    """Who holds, or held, a folder. `nonce` tells two owners of one pid apart."""

    pid: int
    host: str
    started_utc: str
    nonce: str

    @staticmethod
    def current() -> Owner:
        """This process, as an owner with a fresh nonce."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        return Owner(os.getpid(), platform.node(), now, secrets.token_hex(8))

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, started {self.started_utc}"


class FolderLock:
    """Holds `folder` for this process from construction to `release()`.

    Raises `RunFolderError` at once, naming the owner, where another process holds it. `previous` is
    the owner that died holding it, or None.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK_FILE
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = self._wait_for_owner()
            os.close(self._descriptor)
            raise RunFolderError(f"{folder} is owned by a live run ({owner}). "
                                 f"Wait for it to end, or choose another --output.") from None
        except OSError as error:
            os.close(self._descriptor)
            raise RunFolderError(f"{folder} cannot be locked: {error.strerror}. "
                                 f"Choose an --output on a file system with flock.") from error
        self.previous = self._read_owner()
        self.owner = Owner.current()
        self._write(strict_json.encode(strict_json.dumps(self.owner)))

    def release(self) -> None:
        """Gives the folder back and clears the owner. Calling it again does nothing."""
        if self._descriptor < 0:
            return
        with contextlib.suppress(OSError):
            self._write(b"")
        os.close(self._descriptor)
        self._descriptor = -1

    def _write(self, data: bytes) -> None:
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, data, 0)

    def _read_owner(self) -> Owner | None:
        try:
            return Owner(**strict_json.loads(os.pread(self._descriptor, 1 << 16, 0)))
        except (ValueError, TypeError):  # empty, or cut off by a death in mid-write
            return None

    def _wait_for_owner(self) -> Owner | str:
        deadline = time.monotonic() + _OWNER_WAIT_S
        while (owner := self._read_owner()) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return owner or "a process that has not given its name"
