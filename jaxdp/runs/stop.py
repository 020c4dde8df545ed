"""When a run stops early: SIGTERM and Ctrl-C, noted between steps and agreed on by all ranks."""

from __future__ import annotations

import signal
import types
from pathlib import Path
from typing import Protocol

from jaxdp.runs import strict_json
from jaxdp.runs.files import Files, write_durably

STOP_FILE = "stop.json"


class Stop(Protocol):
    """Asked after each step, in order, until it says yes."""

    def is_due(self, step: int) -> bool: ...


class StopRequest:
    """While entered, the first SIGTERM or SIGINT is noted; a second SIGINT interrupts at once.

    Enter it in the main thread.
    """

    def __init__(self) -> None:
        self.signal_number: int | None = None
        self._previous: dict[int, object] = {}

    @property
    def exit_code(self) -> int:
        """128 and the signal, as a shell counts: 143 for SIGTERM, 130 for Ctrl-C."""
        return 128 + (self.signal_number or 0)

    def is_due(self, step: int) -> bool:
        """Whether the run ends with `step`."""
        return self.signal_number is not None

    def __enter__(self) -> StopRequest:
        self._previous = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]

    def _note(self, number: int, frame: types.FrameType | None) -> None:
        if self.signal_number == signal.SIGINT == number:
            raise KeyboardInterrupt
        self.signal_number = number


class AnnouncedStop(StopRequest):
    """Rank 0's: once it is asked to stop, all ranks do one more step and end with that.

    The announcement lies in the run's folder before rank 0 enters that step, and no rank can finish
    a step that rank 0 has not entered: so every rank sees it in time.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._path = folder / STOP_FILE
        self._path.unlink(missing_ok=True)  # of an earlier start
        self._last_step: int | None = None

    def is_due(self, step: int) -> bool:
        if self.signal_number is not None and self._last_step is None:
            self._last_step = step + 1
            text = strict_json.dumps({"last_step": self._last_step, "signal": self.signal_number})
            write_durably(Files(), self._path, [strict_json.encode(text)])
        return step == self._last_step


class FollowedStop(StopRequest):
    """A peer's: it ends when rank 0 says so, whatever signals it gets itself."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._path = folder / STOP_FILE

    def is_due(self, step: int) -> bool:
        try:
            announced = strict_json.loads(self._path.read_bytes())
        except FileNotFoundError:
            return False
        self.signal_number = announced["signal"]
        return step >= announced["last_step"]

    def _note(self, number: int, frame: types.FrameType | None) -> None:
        """A launcher signals all ranks; rank 0 decides for them."""
