"""The flight recorder: where a rank is, in a file that its launcher reads and that outlives a SIGKILL.

A rank writes its position into a mapped file; two slots take turns and a count of notes names the
valid one, so that a rank stopped or killed in mid-write leaves the note before it whole. Without a
launcher every call here does nothing.
"""

from __future__ import annotations

import dataclasses
import enum
import faulthandler
import mmap
import os
import signal
import struct
import time
from pathlib import Path

RECORDER_VARIABLE = "JAXDP_FLIGHT_RECORDER"
FIRST_UPDATE = "first update"  # the phase that compiles

_COUNT = struct.Struct("<Q")
_NOTE = struct.Struct("<QqqB40s80s600s")
_FILE_BYTES = _COUNT.size + 2 * _NOTE.size
_READ_ATTEMPTS = 8


class Outcome(enum.IntEnum):
    """How far a rank came. A consequence is a failure that some other rank caused."""

    RUNNING = 0
    DONE = 1
    FAILED = 2
    CONSEQUENCE = 3


@dataclasses.dataclass(frozen=True)
class Position:
    """A rank's last note.

    `count` grows by one a note, and all ranks of a run make the same notes in the same order: of two
    running ranks the one with the smaller count is behind. `time_ns` is CLOCK_MONOTONIC, one clock
    for all processes of a node. `step` is 0 before the first.
    """

    count: int = 0
    time_ns: int = 0
    step: int = 0
    outcome: Outcome = Outcome.RUNNING
    phase: str = "starting"
    collective: str = ""
    sentence: str = ""

    @property
    def is_starting(self) -> bool:
        """Whether the rank still imports, loads, meets its peers or compiles."""
        return self.step == 0 or self.phase == FIRST_UPDATE

    def __str__(self) -> str:
        where = f"step {self.step}, phase {self.phase}" if self.step else f"phase {self.phase}"
        return f"{where}, last small collective {self.collective}" if self.collective else where


class Recorder:
    """The writing end, held by the rank itself."""

    def __init__(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._memory = mmap.mmap(descriptor, _FILE_BYTES)
        os.close(descriptor)
        self._position = Position(time_ns=time.monotonic_ns())

    def note(self, **changes: object) -> None:
        """Publishes the position with `changes`; what is too long for its field is cut."""
        self._position = position = dataclasses.replace(
            self._position, count=self._position.count + 1, time_ns=time.monotonic_ns(), **changes)  # pyright: ignore[reportArgumentType]
        _NOTE.pack_into(self._memory, _slot(position.count), position.count, position.time_ns, position.step,
                        position.outcome, *(_cut(text, size) for text, size in (
                            (position.phase, 40), (position.collective, 80), (position.sentence, 600))))
        _COUNT.pack_into(self._memory, 0, position.count)  # last: it publishes the slot

    @property
    def outcome(self) -> Outcome:
        """What was noted last."""
        return self._position.outcome


class RecorderView:
    """The reading end, held by the launcher, which also makes the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stack_path = _stack_path(path)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.ftruncate(descriptor, _FILE_BYTES)
        self._memory = mmap.mmap(descriptor, _FILE_BYTES)
        os.close(descriptor)
        self._born_ns = time.monotonic_ns()

    def read(self) -> Position:
        """The last whole note; count 0 and the time of the file's birth before the first."""
        for _ in range(_READ_ATTEMPTS):
            (count,) = _COUNT.unpack_from(self._memory)
            if count == 0:
                break
            found, time_ns, step, outcome, *texts = _NOTE.unpack_from(self._memory, _slot(count))
            if found == count and _COUNT.unpack_from(self._memory) == (count,):
                phase, collective, sentence = (text.rstrip(b"\0").decode(errors="replace") for text in texts)
                return Position(count, time_ns, step, Outcome(outcome), phase, collective, sentence)
        return Position(time_ns=self._born_ns)


_recorder: Recorder | None = None


def start() -> None:
    """Begins to record if a launcher asked for it, and answers SIGUSR1 with the stacks of all threads.

    The stacks go to a file beside the recorder's. A child process does not inherit the recorder.
    """
    global _recorder
    path = os.environ.pop(RECORDER_VARIABLE, None)
    if path is None:
        return
    stack = os.open(_stack_path(Path(path)), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    _recorder = Recorder(Path(path))
    _recorder.note()  # only now may SIGUSR1 be sent


def note(phase: str, step: int | None = None) -> None:
    """This rank enters `phase`, of `step` or of the same step as before. All ranks make the same notes."""
    if _recorder is not None:
        _recorder.note(phase=phase, **({} if step is None else {"step": step}))


def note_collective(text: str) -> None:
    """This rank enters a small collective between a step's programs. All ranks make the same notes."""
    if _recorder is not None:
        _recorder.note(collective=text)


def note_failure(sentence: str, *, consequence: bool) -> None:
    """This rank is about to end for `sentence`. The first failure counts."""
    if _recorder is not None and _recorder.outcome == Outcome.RUNNING:
        outcome = Outcome.CONSEQUENCE if consequence else Outcome.FAILED
        _recorder.note(outcome=outcome, sentence=sentence)


def note_done() -> None:
    """This rank has done all that it was asked to, unless it has failed."""
    if _recorder is not None and _recorder.outcome == Outcome.RUNNING:
        _recorder.note(outcome=Outcome.DONE)


def _slot(count: int) -> int:
    return _COUNT.size + count % 2 * _NOTE.size


def _stack_path(path: Path) -> Path:
    return path.with_suffix(".stack")


def _cut(text: str, size: int) -> bytes:
    return text.encode(errors="replace")[:size]
