"""SIGTERM and Ctrl-C ask a run to stop after its step, so that it ends in a good checkpoint."""

from __future__ import annotations

import signal
import types


class StopRequest:
    """While entered, the first SIGTERM or SIGINT is noted in `signal_number`; a second SIGINT interrupts at once.

    Enter it in the main thread.
    """

    def __init__(self) -> None:
        self.signal_number: int | None = None
        self._previous: dict[int, object] = {}

    def __bool__(self) -> bool:
        return self.signal_number is not None

    @property
    def exit_code(self) -> int:
        """128 and the signal, as a shell counts: 143 for SIGTERM, 130 for Ctrl-C."""
        return 128 + (self.signal_number or 0)

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
