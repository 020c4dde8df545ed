"""Keeps a copy of everything that this process writes to stderr, native code's last words included.

A child process does the copying: when this process is killed or aborts, what it had written still
reaches both the terminal and the file. This file is also the child's program; it then imports
nothing of the package.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_STDERR = 2
_DRAIN_TIMEOUT_S = 5.0


class StderrTee:
    """From construction to `close()`, file descriptor 2 also goes to the end of `path`."""

    def __init__(self, path: Path) -> None:
        _flush()
        self._terminal = os.dup(_STDERR)
        # A session of its own: a Ctrl-C or a signal to the group must not cut off the last words.
        self._child = subprocess.Popen([sys.executable, "-I", "-S", __file__, os.fspath(path)], stdin=subprocess.PIPE,
                                       stdout=self._terminal, stderr=subprocess.DEVNULL, start_new_session=True)
        assert self._child.stdin is not None
        os.dup2(self._child.stdin.fileno(), _STDERR)
        self._child.stdin.close()

    def close(self) -> None:
        """Puts stderr back and waits until the copy is whole. Calling it again does nothing."""
        if self._terminal < 0:
            return
        _flush()
        os.dup2(self._terminal, _STDERR)
        os.close(self._terminal)
        self._terminal = -1
        try:
            self._child.wait(_DRAIN_TIMEOUT_S)
        except subprocess.TimeoutExpired:  # a process of our own still holds the pipe: leave it the copy
            return


def _flush() -> None:
    if sys.stderr is not None:
        sys.stderr.flush()


def _copy(path: str) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    while data := os.read(0, 1 << 16):
        for descriptor in (1, file):
            try:
                os.write(descriptor, data)
            except OSError:  # a closed terminal or a full disk must not stop the other copy
                continue


if __name__ == "__main__":
    _copy(sys.argv[1])
