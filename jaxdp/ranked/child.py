"""One rank's process as the launcher holds it: started, read, signalled, reaped."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from jaxdp.ranked.recorder import RecorderView

_PR_SET_PDEATHSIG = 1
_LINE_LIMIT = 1 << 16
_libc = ctypes.CDLL(None, use_errno=True)  # loaded here, for between fork and exec nothing may be


class Child:
    """A rank's process, leader of a session of its own; it dies with the thread that made it.

    Rank 0 writes to the launcher's stdout; all that any rank writes elsewhere comes out of `read`.
    """

    def __init__(self, rank: int, command: Sequence[str], environment: Mapping[str, str], view: RecorderView) -> None:
        self.rank = rank
        self.view = view
        self.returncode: int | None = None
        self.ended_ns = 0
        self.was_told_to_end = False
        self.last_line = b""
        self._rest = b""
        reading, writing = os.pipe2(os.O_CLOEXEC)
        self._process = subprocess.Popen(
            command, env=dict(environment), stdin=subprocess.DEVNULL, stdout=None if rank == 0 else writing,
            stderr=writing, start_new_session=True, preexec_fn=_die_with_parent(os.getpid()))
        os.close(writing)
        os.set_blocking(reading, False)
        self.output = reading

    @property
    def pid(self) -> int:
        """The process's id; the rank's process group has the same."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process has not been reaped yet."""
        return self.returncode is None

    @property
    def is_stopped(self) -> bool:
        """Whether a signal or a debugger holds the process."""
        with contextlib.suppress(OSError):
            return Path(f"/proc/{self.pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] in "Tt"
        return False

    def read(self) -> list[bytes]:
        """The whole lines that the rank has written since the last call; closes `output` at its end."""
        try:
            data = os.read(self.output, 1 << 16)
        except BlockingIOError:
            return []
        if not data:
            self.close()
        *lines, self._rest = (self._rest + data).split(b"\n")
        if self._rest and (not data or len(self._rest) > _LINE_LIMIT):
            lines, self._rest = [*lines, self._rest], b""
        self.last_line = next((line for line in reversed(lines) if line.strip()), self.last_line)
        return lines

    def close(self) -> None:
        """Stops reading. Calling it again does nothing."""
        if self.output >= 0:
            os.close(self.output)
            self.output = -1

    def send(self, number: int) -> None:
        """Signals the rank's own process, if it lives."""
        if self.alive:
            os.kill(self.pid, number)

    def end(self, number: int) -> None:
        """Signals the rank and all that it started in its session."""
        if self.alive:
            self.was_told_to_end = True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def reap(self) -> bool:
        """Whether the process has ended just now. What it started in its process group ends with it."""
        if not self.alive or os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # not reaped yet, so that the number is no one else's
        self.returncode = self._process.wait()
        self.ended_ns = time.monotonic_ns()
        return True


def _die_with_parent(parent: int) -> Callable[[], None]:
    def prepare() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before prctl: no signal will come
            os._exit(1)
    return prepare
