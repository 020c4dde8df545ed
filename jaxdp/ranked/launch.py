"""Starts the ranks of one run on this node, watches them, and ends them together."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from jaxdp.ranked.child import Child
from jaxdp.ranked.group_folder import group_folder
from jaxdp.ranked.placement import rank_environment
from jaxdp.ranked.recorder import Outcome, RecorderView
from jaxdp.ranked.verdict import RankEnd, exit_code, explain, first_cause, hindmost

TICK_S = 0.05
GRACE_S = 3.0  # for the ranks to notice a failure themselves: a peer's death is noticed within 1 s
REFUSED_GRACE_S = 1.0  # where a rank refused the input, and nothing is lost
TERMINATE_S = 3.0  # between SIGTERM and SIGKILL
START_UP_S = 60.0  # the least allowed to a rank that starts or compiles, which load can make slow
STACK_S = 1.0  # for a stuck rank to write its Python stacks
DRAIN_S = 2.0  # for the last words of ended ranks
_PATIENT_SIGNALS = 2  # Ctrl-C after these ends the group at once


def launch(command: Sequence[str], world_size: int, *, platform: str, timeout_s: float,
           environ: Mapping[str, str] | None = None) -> int:
    """Runs `command` as `world_size` ranks and returns the exit code of the group.

    0 all done; 143 and 130 as rank 0 says after a stop that was asked for; 2 if a rank refused the
    input; else 1. A rank's stderr appears on this process's, each line after `rank N: `; rank 0's
    stdout is this process's. When a rank fails the others end within seconds, and the first cause is
    told before its consequences. A rank that stays in one phase for `timeout_s` is a failure (until
    its first update is done, for `START_UP_S` if that is more). SIGTERM and Ctrl-C go to rank 0. When
    it returns, or is killed, no rank is left. Call it in the main thread.

    Raises `ConfigError` for a device list shorter than `world_size`, with nothing started.
    """
    environ = os.environ if environ is None else environ
    with _noted_signals() as signals, group_folder() as folder:  # no signal may skip the cleaning
        recorders = [folder / f"rank-{rank}.flight" for rank in range(world_size)]
        environments = [rank_environment(environ, rank, world_size, platform, rendezvous=folder / "meet",
                                         recorder=recorder) for rank, recorder in enumerate(recorders)]
        group = _Group(signals, timeout_s)
        try:
            group.start(command, environments, recorders)
            return group.watch()
        finally:
            group.destroy()


@contextlib.contextmanager
def _noted_signals() -> Iterator[list[int]]:
    """SIGTERM and SIGINT, in the order in which they came; they do nothing else."""
    noted: list[int] = []

    def note(number: int, frame: types.FrameType | None) -> None:
        noted.append(number)

    previous = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield noted
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class _Group:
    """The ranks of one launch: first running, then, once one has failed, coming to an end."""

    def __init__(self, signals: Sequence[int], timeout_s: float) -> None:
        self._signals = signals
        self._timeout_s = timeout_s
        self._forwarded = 0
        self._children: list[Child] = []
        self._selector = selectors.DefaultSelector()
        self._failing_since: float | None = None
        self._terminated_at: float | None = None
        self._stuck: dict[int, str] = {}
        self._held: dict[int, list[bytes]] = {}
        self._last_tick = self._awake_since = time.monotonic()

    def start(self, command: Sequence[str], environments: Sequence[Mapping[str, str]],
              recorders: Sequence[Path]) -> None:
        for rank, (environment, recorder) in enumerate(zip(environments, recorders, strict=True)):
            child = Child(rank, command, environment, RecorderView(recorder))
            self._children.append(child)
            self._held[rank] = []
            self._selector.register(child.output, selectors.EVENT_READ, child)

    def watch(self) -> int:
        """Returns the group's exit code once no rank is left."""
        while self._living():
            self._tick()
        self._drain()
        self._tell()
        return exit_code(self._ends())

    def destroy(self) -> None:
        """Leaves no rank, whatever happened."""
        for child in self._living():
            child.end(signal.SIGKILL)
        for child in self._children:
            while child.alive and not child.reap():
                time.sleep(0.001)
            child.close()
        self._selector.close()

    def _living(self) -> list[Child]:
        return [child for child in self._children if child.alive]

    def _ends(self) -> list[RankEnd]:
        return [RankEnd(child.rank, child.returncode, child.ended_ns, child.view.read(),
                        child.last_line.decode(errors="replace").strip(), child.was_told_to_end,
                        self._stuck.get(child.rank, "")) for child in self._children]

    def _tick(self) -> None:
        self._pump(TICK_S)
        now = time.monotonic()
        if now - self._last_tick > 20 * TICK_S:  # this process was stopped, or its terminal was: ranks waited for it
            self._awake_since = now
        self._last_tick = now
        for child in self._children:
            child.reap()
        self._forward_signals()
        if not self._is_failing():
            self._look_for_stuck(now)
        if self._failing_since is not None:
            self._end_group(now)

    def _is_failing(self) -> bool:
        """Whether some rank has failed or is stuck; from then on what the ranks write is held back."""
        if self._failing_since is None and any(end.has_failed or end.stuck for end in self._ends()):
            self._failing_since = time.monotonic()
        return self._failing_since is not None

    def _forward_signals(self) -> None:
        """Rank 0 decides at which step all ranks stop."""
        for number in list(self._signals[self._forwarded:]):
            self._forwarded += 1
            self._children[0].send(number)
            if number == signal.SIGINT and self._forwarded > _PATIENT_SIGNALS:
                self._terminate(time.monotonic())

    def _look_for_stuck(self, now: float) -> None:
        living = self._living()
        idle_s = [(position, now - max(position.time_ns / 1e9, self._awake_since))
                  for position in (child.view.read() for child in living)]
        overdue = [seconds for position, seconds in idle_s
                   if seconds > (max(self._timeout_s, START_UP_S) if position.is_starting else self._timeout_s)]
        if overdue:
            self._name_stuck(living, f"made no progress for {max(overdue):.0f} s")
            self._failing_since = now - GRACE_S  # they had their time

    def _name_stuck(self, living: Sequence[Child], what: str) -> None:
        """Names the ranks that hold the others up: those that are stopped, else those furthest behind."""
        stopped = [child for child in living if child.is_stopped]
        for child in stopped:
            self._stuck[child.rank] = f"{what}: it is stopped (SIGSTOP, or a debugger)"
        if not stopped:
            least = hindmost([child.view.read() for child in living])
            behind = [child for child in living if child.view.read().count == least]
            for child in behind:
                others = "" if len(behind) < 2 else f" (as did {len(behind) - 1} more, all at one place)"
                self._stuck[child.rank] = what + others

    def _end_group(self, now: float) -> None:
        assert self._failing_since is not None
        ends = self._ends()
        grace_s = REFUSED_GRACE_S if any(end.is_refusal for end in ends) else GRACE_S
        if self._terminated_at is None and now >= self._failing_since + grace_s:
            if not self._stuck and not any(end.has_failed and not end.is_consequence for end in ends):
                waiting = [child for child, end in zip(self._children, ends, strict=True)
                           if child.alive and not end.has_failed and end.position.outcome != Outcome.DONE]
                self._name_stuck(waiting, "did not go on") if waiting else None
            self._ask_for_stacks()
            self._terminate(now)
        elif self._terminated_at is not None and now >= self._terminated_at + TERMINATE_S:
            for child in self._living():
                child.end(signal.SIGKILL)

    def _terminate(self, now: float) -> None:
        self._failing_since = now if self._failing_since is None else self._failing_since
        if self._terminated_at is None:
            self._terminated_at = time.monotonic()
            for child in self._living():
                child.end(signal.SIGTERM)

    def _ask_for_stacks(self) -> None:
        """Asks each rank that is stuck, but can run, for its Python stacks, and holds them to be told."""
        asked = [child for child in self._living()
                 if child.rank in self._stuck and child.view.read().count and not child.is_stopped]
        for child in asked:
            child.send(signal.SIGUSR1)
        if asked:
            time.sleep(STACK_S)
        for child in asked:
            self._held[child.rank] += [b"Python stacks:", *child.view.stack_path.read_bytes().splitlines()]

    def _pump(self, timeout_s: float) -> None:
        """Passes on, or holds back, what the ranks have written within `timeout_s`."""
        if not self._selector.get_map():
            time.sleep(timeout_s)
        for key, _ in self._selector.select(timeout_s):
            child: Child = key.data
            lines = child.read()
            if child.output < 0:
                self._selector.unregister(key.fd)
            if self._is_failing():  # asked after reading: a rank notes its failure before it writes of it
                self._held[child.rank] += lines
            else:
                _write(child.rank, lines)

    def _drain(self) -> None:
        """Reads what ended ranks have left in their pipes; a process that they left behind may hold one open."""
        deadline = time.monotonic() + DRAIN_S
        while self._selector.get_map() and time.monotonic() < deadline:
            self._pump(TICK_S)

    def _tell(self) -> None:
        """The first cause, what its rank had to say of it, then the consequences."""
        ends = self._ends()
        cause = first_cause(ends)
        if cause is None:
            return
        first, *consequences = (line.encode() for line in explain(ends))
        _write(None, [first])
        if not cause.is_refusal:
            _write(cause.rank, self._held[cause.rank])
        _write(None, consequences)


def _write(rank: int | None, lines: Sequence[bytes]) -> None:
    prefix = b"jaxdp launch: " if rank is None else b"rank %d: " % rank
    data = b"".join(prefix + line + b"\n" for line in lines)
    with contextlib.suppress(OSError):  # a terminal that is gone must not stop the watch
        while data:
            data = data[os.write(2, data):]
