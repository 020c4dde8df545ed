"""Names a process so that a reused pid is not taken for it."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Process:
    """A process of this node: its pid, and when it started in clock ticks since boot (proc(5))."""

    pid: int
    start_ticks: int

    @staticmethod
    def current() -> Process:
        """The calling process."""
        fields = _stat(os.getpid())
        if fields is None:
            raise OSError("/proc is not readable: ranks cannot tell live peers from dead ones.")
        return Process(os.getpid(), int(fields[19]))

    def alive(self) -> bool:
        """True while the process runs; a zombie is dead."""
        fields = _stat(self.pid)
        return fields is not None and fields[0] not in "ZX" and int(fields[19]) == self.start_ticks

    def __str__(self) -> str:
        return f"process {self.pid}"


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat after the command's name: state first, start time twentieth."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()
