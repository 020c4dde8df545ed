"""What a run shows while it goes: JSON lines, plain lines, or a live display on a terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from jaxdp.runs import strict_json

if TYPE_CHECKING:
    from rich.progress import Progress

_LINES_A_RUN = 20  # of a plain display, besides the first, the last and those with a validation loss
_SMOOTHING = 0.2


class Display(Protocol):
    """Shows a run on stdout. No method raises when stdout is gone."""

    def start(self, header: Sequence[str], first_step: int, steps: int) -> None: ...

    def step(self, record: dict[str, Any]) -> None: ...

    def close(self) -> None:
        """Ends what is live. Calling it again, or before `start`, does nothing."""
        ...

    def say(self, lines: Sequence[str]) -> None: ...


def make_display(*, json: bool) -> Display:
    """JSON lines if asked for, a live display if stdout is a terminal, else plain lines."""
    if json:
        return JsonLines()
    return LiveDisplay() if sys.stdout.isatty() else PlainLines()


class JsonLines:
    """The metrics record of each step, and nothing else."""

    def start(self, header: Sequence[str], first_step: int, steps: int) -> None: ...

    def step(self, record: dict[str, Any]) -> None:
        _write(strict_json.encode(strict_json.dumps(record)) + b"\n")

    def close(self) -> None: ...

    def say(self, lines: Sequence[str]) -> None: ...


class PlainLines:
    """A header, about `_LINES_A_RUN` lines of steps, and the closing lines."""

    def start(self, header: Sequence[str], first_step: int, steps: int) -> None:
        self._first, self._last = first_step, steps
        self._every = max(1, (steps - first_step + 1) // _LINES_A_RUN)
        self._speed = _Speed()
        _write_lines(header)

    def step(self, record: dict[str, Any]) -> None:
        tokens_per_s = self._speed.update(record)
        step = record["step"]
        if step in (self._first, self._last) or step % self._every == 0 or record["validation_loss"] is not None:
            _write_lines([f"step {step:>{len(str(self._last))}}/{self._last}  {_describe(record, tokens_per_s)}"])

    def close(self) -> None: ...

    def say(self, lines: Sequence[str]) -> None:
        _write_lines(lines)


class LiveDisplay:
    """One live line of progress, and a line that stays for each validation loss."""

    def __init__(self) -> None:
        self._progress = _make_progress()

    def start(self, header: Sequence[str], first_step: int, steps: int) -> None:
        _write_lines(header)
        self._speed = _Speed()
        self._last = steps
        self._task = self._progress.add_task("", total=steps, completed=first_step - 1)
        self._progress.start()

    def step(self, record: dict[str, Any]) -> None:
        tokens_per_s = self._speed.update(record)
        if record["validation_loss"] is not None:
            self._progress.console.print(f"step {record['step']}/{self._last}  {_describe(record, tokens_per_s)}",
                                         highlight=False, markup=False)
        text = _describe(record | {"validation_loss": None}, tokens_per_s)
        self._progress.update(self._task, completed=record["step"], description=text)

    def close(self) -> None:
        self._progress.stop()

    def say(self, lines: Sequence[str]) -> None:
        _write_lines(lines)


class _Speed:
    """Smoothed tokens a second of the steps that compile nothing."""

    def __init__(self) -> None:
        self._value: float | None = None

    def update(self, record: dict[str, Any]) -> float | None:
        if record.get("compile_ms") is None and record["total_ms"] > 0:
            now = record["tokens"] / (record["total_ms"] / 1e3)
            self._value = now if self._value is None else self._value + _SMOOTHING * (now - self._value)
        return self._value


def _describe(record: dict[str, Any], tokens_per_s: float | None) -> str:
    record = strict_json.restore_numbers(record)
    parts = [f"loss {record['loss']:.4f}"]
    if record["validation_loss"] is not None:
        parts.append(f"validation {record['validation_loss']:.4f}")
    if tokens_per_s is not None:
        parts.append(f"{tokens_per_s:,.0f} tokens/s")
    buckets = record["bucket_count"]
    parts += [f"{buckets} bucket{'' if buckets == 1 else 's'}", f"check {record['parameter_check']}"]
    return "  ".join(parts)


def _make_progress() -> Progress:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=8),
                    TextColumn("{task.description}", markup=False), TimeRemainingColumn(compact=True))


def _write_lines(lines: Sequence[str]) -> None:
    if lines:
        _write("".join(line + "\n" for line in lines).encode("utf-8", "backslashreplace"))


def _write(data: bytes) -> None:
    """Writes to stdout at once. A reader that has gone away must not stop a run: its records are in the files."""
    try:
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
