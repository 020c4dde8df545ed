"""A launcher as a user's shell starts it, its ranks found and signalled, and all that was said shown on failure."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from helpers import clean_environment

TRAIN = ("import sys; from jaxdp.cli import main; sys.exit(main())",)
# A launch of ranks that run a script of the test instead of training: it starts in a moment.
SCRIPT = ("import sys; from jaxdp.ranked.launch import launch; "
          "sys.exit(launch([sys.executable, '-c', sys.argv[2]], int(sys.argv[1]), platform='cpu', "
          "timeout_s=float(sys.argv[3])))",)
RANK = """
import os, signal, subprocess, sys, time
from jaxdp.ranked import recorder
recorder.start()
rank = int(os.environ["RANK"])
recorder.note("update", 7)
def ready():
    open(f"rank-{rank}.pid", "w").write(str(os.getpid()))
def done(code=0):
    recorder.note_done()
    sys.exit(code)
"""


class Launched:
    """A launcher in a session of its own, with `folder` as working directory and for its temporary files."""

    def __init__(self, folder: Path, program: Sequence[str], arguments: Sequence[object],
                 environment: dict[str, str]) -> None:
        self.folder = folder
        self.temporary = folder / "tmp"
        self.temporary.mkdir(exist_ok=True)
        self._out, self._err = folder / "stdout", folder / "stderr"
        with open(self._out, "wb") as out, open(self._err, "wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-c", *program, *map(str, arguments)], stdin=subprocess.DEVNULL, stdout=out,
                stderr=err, start_new_session=True, cwd=folder,
                env=clean_environment(TMPDIR=str(self.temporary), **environment))

    @property
    def out(self) -> str:
        return self._out.read_text(errors="replace")

    @property
    def err(self) -> str:
        return self._err.read_text(errors="replace")

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def wait_for(self, condition: Callable[[], bool], timeout_s: float) -> None:
        """Returns when `condition` holds. Fails at the deadline, or when the launcher ends before."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise AssertionError(f"waited in vain; {self._said()}")
            time.sleep(0.02)

    def pid(self, rank: int, timeout_s: float = 30.0) -> int:
        """Of a script's rank, once it has said that it is ready."""
        path = self.folder / f"rank-{rank}.pid"
        self.wait_for(lambda: path.exists() and path.read_text() != "", timeout_s)
        return int(path.read_text())

    def wait_until_ready(self) -> None:
        """Returns when both ranks of a script are."""
        self.pid(0)
        self.pid(1)

    def child(self, rank: int) -> int:
        """The pid of a rank by its environment, among the launcher's own children."""
        for child in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split():
            if f"RANK={rank}".encode() in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
                return int(child)
        raise AssertionError(f"there is no rank {rank}; {self._said()}")

    def finish(self, expect: int, timeout_s: float) -> list[str]:
        """The lines on stderr of a launcher that exits with `expect` in time and leaves no temporary file."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the launcher did not end within {timeout_s:g} s; {self._said()}") from None
        assert code == expect, self._said()
        assert list(self.temporary.iterdir()) == [], self._said()
        return self.err.splitlines()

    def members(self) -> list[int]:
        """All live processes of this launch, however they came about: those that have its folder for temporaries."""
        mark = f"TMPDIR={self.temporary}".encode()
        return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit() and _is_marked(path, mark)]

    def close(self) -> None:
        for pid in self.members():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(10)

    def _said(self) -> str:
        return (f"exit {self.process.poll()}\n--- stdout\n{self.out[-2000:]}\n"
                f"--- stderr of all ranks\n{self.err[-6000:]}")


def _is_marked(process: Path, mark: bytes) -> bool:
    try:
        state = (process / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
        return state not in "ZX" and mark in (process / "environ").read_bytes().split(b"\0")
    except OSError:
        return False


@contextlib.contextmanager
def launched_script(folder: Path, world_size: int, body: str, *, timeout_s: float = 60.0,
                    environment: dict[str, str] | None = None) -> Iterator[Launched]:
    """`world_size` ranks that run `RANK` and then `body`."""
    launch = Launched(folder, SCRIPT, (world_size, RANK + body, timeout_s), environment or {})
    try:
        yield launch
    finally:
        launch.close()


@contextlib.contextmanager
def launched_training(folder: Path, world_size: int, *arguments: object) -> Iterator[Launched]:
    """`jaxdp launch` of the tiny model on CPU."""
    words = ("launch", "--nproc", world_size, "--", "train", "--model", "tiny", "--platform", "cpu", "--shards", 4,
             "--seed", 5, "--json", *arguments)
    launch = Launched(folder, TRAIN, words, {})
    try:
        yield launch
    finally:
        launch.close()
